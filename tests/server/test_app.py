"""What goes wrong inside the server: bugs, broken decoders, an engine that hangs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import falcon.testing
import pytest

from crucible.config import SamplingParams
from crucible.engine.client import EngineClient
from crucible.errors import EngineError, TokenizerError
from crucible.server.app import STALLED_S, create_app
from crucible.server.generation import Generation
from crucible.server.native_api import render
from crucible.server.status_api import HealthResource
from crucible.server.stream import EventStream
from tests.engine.engines import LocalEngine, engine
from tests.fakes import FakeDecoder, FakeText
from tests.serving import events, eventually


class BrokenText(FakeText):
    """Fails in ways that no input should cause."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise ZeroDivisionError("a bug")

    def decoder(self) -> FakeDecoder:
        return BrokenDecoder()


class BrokenDecoder(FakeDecoder):
    def push(self, token_id: int) -> str:
        if token_id == ord("!"):
            raise TokenizerError("token id 33 has no token")
        return super().push(token_id)


@pytest.fixture
def parts() -> Iterator[tuple[LocalEngine, EngineClient]]:
    with engine(step_s=0.001) as pair:
        yield pair


def test_a_bug_is_a_500_in_the_error_shape_and_in_the_log(
    parts: tuple[LocalEngine, EngineClient], caplog: pytest.LogCaptureFixture
) -> None:
    web = falcon.testing.TestClient(create_app(parts[1], BrokenText(), "fake"))
    answer = web.simulate_post("/v1/generate", json={"messages": [{"role": "user", "content": "a"}]})
    assert answer.status_code == 500
    assert answer.json["error"] == {
        "message": "internal error; the server's log has the details", "type": "server_error", "param": None,
    }
    assert "ZeroDivisionError: a bug" in caplog.text


def test_a_decoder_that_fails_ends_the_stream_with_an_error_and_the_request(
    parts: tuple[LocalEngine, EngineClient],
) -> None:
    local, client = parts
    generation = Generation.start(client, list(b"ab!"), SamplingParams(max_tokens=2000), BrokenDecoder(), lambda: False)
    stream = EventStream(generation, render)
    found = events(b"".join(stream).decode())
    stream.close()
    assert found[-1][1]["finish_reason"] == "error"
    assert "token id 33 has no token" in found[-1][1]["error"]["message"]
    eventually(lambda: local.core.counters["cancelled_requests"] == 1)


def test_a_failing_answer_withdraws_its_request(parts: tuple[LocalEngine, EngineClient]) -> None:
    local, client = parts
    web = falcon.testing.TestClient(create_app(client, BrokenText(), "fake"))
    assert web.simulate_post("/v1/generate", json={"prompt": "ab!", "max_tokens": 2000}).status_code == 500
    eventually(lambda: local.core.counters["cancelled_requests"] == 1)


class CarefulText(FakeText):
    """Counts what it is asked to encode; a token may have 3 bytes."""

    longest = 3

    def __init__(self) -> None:
        self.encoded: list[int] = []

    def encode(self, prompt: str) -> list[int]:
        self.encoded.append(len(prompt))
        return super().encode(prompt)[:5]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        self.encoded.append(sum(len(message["content"]) for message in messages))
        return super().encode_chat(messages)[:5]


def test_text_that_cannot_fit_is_refused_before_time_is_spent_on_its_tokens() -> None:
    with engine(context=100) as (_, client):
        text = CarefulText()
        web = falcon.testing.TestClient(create_app(client, text, "fake"))
        for length, status in ((300, 200), (301, 400), (10**6, 400)):
            halves = [{"role": "user", "content": "a" * half} for half in (length // 2, length - length // 2)]
            for body, param in (({"prompt": "a" * length}, "prompt"), ({"messages": halves}, "messages")):
                answer = web.simulate_post("/v1/generate", json={"max_tokens": 1, **body})
                assert answer.status_code == status
                assert status == 200 or answer.json["error"]["param"] == param
        assert text.encoded == [300, 300]


class StubClient:
    """An engine client with a given step age; ``None``: no answer, since ``silence_s``."""

    status = "loading weights"

    def __init__(self, info: Any, age: float | None, silence_s: float, ready: bool) -> None:
        self._info, self._age, self.silence_s, self.ready = info, age, silence_s, ready

    def info(self) -> Any:
        return self._info

    def metrics(self, timeout: float) -> dict[str, float]:
        if self._age is None:
            raise EngineError("the engine did not answer within 2 s")
        return {"step_age_s": self._age}


@pytest.mark.parametrize(
    ("age", "silence_s", "ready", "draining", "status"),
    [
        (0.0, 0.0, True, False, "ok"),
        (STALLED_S + 1, 0.0, True, False, "stalled"),
        (None, 2.0, True, False, "ok"),
        (None, STALLED_S + 1, True, False, "stalled"),
        (None, 0.0, False, False, "restarting"),
        (0.0, 0.0, True, True, "draining"),
    ],
)
def test_health_is_step_progress(
    parts: tuple[LocalEngine, EngineClient],
    age: float | None,
    silence_s: float,
    ready: bool,
    draining: bool,
    status: str,
) -> None:
    stub: Any = StubClient(parts[1].info(), age, silence_s, ready)
    health = HealthResource(stub, "fake", True, lambda: draining, STALLED_S).check()
    assert health.status == status
    assert (health.error is None) == (status == "ok")
