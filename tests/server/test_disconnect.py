"""A client that hangs up stops paying for its request, whatever state that is in."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from tests.serving import Running, events, eventually, serving


@pytest.fixture(scope="module")
def slow() -> Iterator[Running]:
    """One request runs, two wait; a prompt takes 200 steps of 10 ms, more than these tests last."""
    with serving(core={"max_batch": 1, "max_queue": 2, "step_s": 0.01, "prefill_steps": 200}) as running:
        yield running


def idle(running: Running) -> bool:
    values = running.metrics()
    return values["active_requests"] == values["queued_requests"] == values["kv_pages_used"] == 0


@pytest.mark.parametrize("path", ["/v1/generate", "/v1/generate/stream"])
@pytest.mark.parametrize("wait_s", [0.0, 0.05, 0.3])
def test_while_it_prefills(slow: Running, path: str, wait_s: float) -> None:
    before = slow.metrics()["cancelled_requests"]
    with slow.open_post(path, prompt="a", max_tokens=4000):
        eventually(lambda: slow.metrics()["prefilling_requests"] == 1)
        time.sleep(wait_s)
    eventually(lambda: idle(slow), timeout=1.5)
    assert slow.metrics()["cancelled_requests"] == before + 1


@pytest.mark.parametrize("path", ["/v1/generate", "/v1/generate/stream"])
def test_while_it_is_queued(slow: Running, path: str) -> None:
    with slow.open_post("/v1/generate", prompt="a", max_tokens=4000):
        eventually(lambda: slow.metrics()["active_requests"] == 1)
        with slow.open_post(path, prompt="a", max_tokens=4000):
            eventually(lambda: slow.metrics()["queued_requests"] == 1)
        eventually(lambda: slow.metrics()["queued_requests"] == 0, timeout=1.5)
        assert slow.metrics()["active_requests"] == 1
    eventually(lambda: idle(slow), timeout=1.5)


def test_while_it_decodes(service: Running) -> None:
    before = service.metrics()["cancelled_requests"]
    for path in ("/v1/generate", "/v1/generate/stream"):
        with service.open_post(path, prompt="ab", max_tokens=500):
            eventually(lambda: service.metrics()["active_requests"] == 1)
        eventually(lambda: idle(service), timeout=2)
    assert service.metrics()["cancelled_requests"] == before + 2


def test_with_a_reset_instead_of_a_close(service: Running) -> None:
    connection = service.open_post("/v1/generate/stream", prompt="ab", max_tokens=500)
    connection.recv(10)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    eventually(lambda: idle(service), timeout=2)


def test_survivors_are_not_disturbed(service: Running) -> None:
    alone = service.post("/v1/generate/stream", prompt="survivor", max_tokens=300).text
    dropped = [service.open_post("/v1/generate/stream", prompt="x", max_tokens=500) for _ in range(6)]
    with service.http.stream("POST", "/v1/generate/stream", json={"prompt": "survivor", "max_tokens": 300}) as response:
        for connection in dropped:
            connection.close()
        text = response.read().decode()
    assert events(text) == events(alone)
    eventually(lambda: idle(service), timeout=2)


def test_headers_of_an_accepted_stream_do_not_wait_for_its_first_token(slow: Running) -> None:
    with slow.open_post("/v1/generate", prompt="a", max_tokens=4000):
        eventually(lambda: slow.metrics()["active_requests"] == 1)
        started = time.monotonic()
        with slow.open_post("/v1/generate/stream", prompt="a", max_tokens=1) as queued:
            assert queued.recv(100).startswith(b"HTTP/1.1 200")
            assert time.monotonic() - started < 0.5


def test_a_silent_stream_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    from crucible.config import SamplingParams
    from crucible.server import stream as sse
    from crucible.server.generation import Generation
    from crucible.server.native_api import render
    from tests.engine.engines import engine
    from tests.fakes import FakeDecoder

    monkeypatch.setattr(sse, "PING_S", 0.3)
    with engine(prefill_steps=10, step_s=0.1) as (local, client):
        params = SamplingParams(max_tokens=2)
        generation = Generation.start(client, [97], params, FakeDecoder(), lambda: False)
        chunks = list(sse.EventStream(generation, render))
        assert chunks[0] == sse.OPENING
        assert chunks.count(sse.PING) >= 2
        assert [name for name, _ in events(b"".join(chunks).decode())] == ["token", "token", "done"]
        generation = Generation.start(client, [97], params, FakeDecoder(), lambda: False)
        sse.EventStream(generation, render).close()  # before its first chunk
        eventually(lambda: not local.core.requests)


def test_ready_tokens_share_a_chunk_and_keep_their_events() -> None:
    from crucible.config import SamplingParams
    from crucible.server import stream as sse
    from crucible.server.generation import Generation
    from crucible.server.native_api import render
    from tests.engine.engines import engine
    from tests.fakes import FakeDecoder

    with engine() as (local, client):
        generation = Generation.start(client, [97], SamplingParams(max_tokens=50), FakeDecoder(), lambda: False)
        eventually(lambda: not local.core.requests)
        time.sleep(0.1)
        opening, chunk = sse.EventStream(generation, render)
        assert opening == sse.OPENING
        assert len(events(chunk.decode())) == 51
