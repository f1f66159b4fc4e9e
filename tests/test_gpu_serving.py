"""The server's part of scripts/gpu_run.py without a GPU: a real server on the CPU, and fakes for what may go wrong."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.conftest import make_text_checkpoint
from tests.serving import eventually, serving_model
from tests.serving import serving as service

SCRIPTS = Path(__file__).parents[1] / "scripts"
CPU = ("--device", "cpu", "--threads", "1", "--port", "0", "--max-batch", "16", "--prefill-budget", "1024")
ORACLE = "health names the model: ok (0.1 s)\nanswers under load are those given alone: 384 answers equal (1.2 s)\n"


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("gpu_serving")


class Commands:
    """Stands in for ``crucible bench serve``, whose row is changed by ``changes``, and test_serve.py."""

    def __init__(self, oracle: tuple[int, str] = (0, ORACLE), code: int = 0, **changes: float) -> None:
        self.oracle, self.code, self.changes = oracle, code, changes
        self.seen: list[str] = []

    def __call__(self, command: list[str], timeout: int) -> tuple[int, str]:
        self.seen.append(" ".join(command))
        if "--json" not in command:
            return self.oracle
        requests = int(command[command.index("--requests") + 1])
        row = {"completed": requests, "errors": 0, "pages_left": 0, "e2e_tok_s": 12345.6, "ttft_p50": 3.21,
               "itl_p50": 0.5, **self.changes}  # fmt: skip
        cells = {key: {"median": value} for key, value in row.items()}
        path = Path(command[command.index("--json") + 1])
        if not self.code:
            path.write_text(json.dumps({"tables": [{"rows": [cells]}]}))
        return self.code, "the last line\n"


def context(run: Any, model: str = "m") -> Any:
    return importlib.import_module("gpu_command").Context(run, model, 60)


def test_a_server(serving: ModuleType, tiny_checkpoint: Path) -> None:
    run = Commands()
    document = serving.serve(context(run, str(tiny_checkpoint)), flags=CPU, clients=(2, 3))
    start, two, three, oracle, packed, end = document["results"]
    assert all(entry["ok"] for entry in document["results"]), document["results"]
    assert start["result"].startswith("ready after ")
    assert [two["what"], three["what"]] == [
        f"`crucible bench serve`, {n} clients, {4 * n} requests" for n in (2, 3)
    ]  # fmt: skip
    assert three["result"] == "12 completed, 0 errors, 0 pages left"
    assert oracle["result"] == "2 checks; 384 answers equal (1.2 s)"
    assert "clients in one step; 16 prompts" in packed["result"]
    assert end["result"] == "KV pool whole, exit code 0 after SIGTERM"
    (table,) = document["tables"]
    assert table["rows"] == [
        ["2", "8", "0", "0", "12,346", "3.21", "0.5"],
        ["3", "12", "0", "0", "12,346", "3.21", "0.5"],
    ]
    url = run.seen[2].split()[1]
    assert url.startswith("http://127.0.0.1:")
    expected = f"-m crucible.cli bench serve --url {url} --concurrency 2 --requests 8 --trials 1 --json "
    assert run.seen[0].startswith(expected)
    assert run.seen[2] == f"scripts/test_serve.py {url} --oracle 384"


def test_with_the_real_clients(serving: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_text_checkpoint(tmp_path / "m", context_length=512)
    monkeypatch.setattr(serving, "ORACLE", 12)
    run = importlib.import_module("gpu_command").run_command
    document = serving.serve(context(run, str(model)), flags=CPU, clients=(2,))
    assert all(entry["ok"] for entry in document["results"]), document["results"]
    texts = [entry["result"] for entry in document["results"]]
    assert texts[1] == "8 completed, 0 errors, 0 pages left"
    assert texts[2].startswith("13 checks; 12 answers under load of 16 clients equal")
    ((clients, completed, errors, left, *speeds),) = document["tables"][0]["rows"]
    assert (clients, completed, errors, left) == ("2", "8", "0", "0")
    assert all(float(speed.replace(",", "")) > 0 for speed in speeds)


def test_prompts_one_after_the_other(serving: ModuleType, tiny_checkpoint: Path) -> None:
    flags = ("--device", "cpu", "--threads", "1", "--max-batch", "1", "--max-queue", "16")
    with serving_model(tiny_checkpoint, *flags) as running:
        last = "64 prompt tokens in the last step, 0 steps of several prompts"
        assert serving.packing(running.url, 1) == (False, f"not seen in 1 tries; {last}")


def test_a_request_that_does_not_end(serving: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hold").touch()
    monkeypatch.setattr(serving, "IDLE_S", 0.1)
    server, text = FakeServer(), "2 KV pages in use, 1 active requests, exit code 0 after SIGTERM"
    with (
        service(core={"hold": str(tmp_path / "hold")}) as running,
        running.open_post("/v1/generate", prompt="abc", max_tokens=20),
    ):
        eventually(lambda: running.metrics()["active_requests"])
        server.url = running.url
        assert serving.end(server) == (False, text)


def test_a_server_that_does_not_come_up(
    serving: ModuleType, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = serving.serve(context(None, "/nowhere"), flags=CPU)["results"]
    assert not entry["ok"]
    assert entry["result"].startswith(
        "RuntimeError: the server ended with exit code 2: crucible-serve: error: '/nowhere'"
    )
    monkeypatch.setattr(serving, "ready", lambda url: False)
    with pytest.raises(RuntimeError, match=r"the server was not up after 0\.1 s"):
        serving.Server(str(tiny_checkpoint), 0.1, CPU)


def test_readiness_is_an_answer_of_200(serving: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not serving.ready("http://127.0.0.1:9")
    server = object.__new__(serving.Server)
    server.url, server._process = "http://127.0.0.1:9", SimpleNamespace(poll=lambda: None)
    for answer in (False, True):
        monkeypatch.setattr(serving, "ready", lambda url, answer=answer: answer)
        assert server._healthy() == answer


class FakeServer:
    """Its counters are ``metrics``; it ends with ``code``."""

    def __init__(self, code: int = 0) -> None:
        self.url, self.code, self.killed = "http://x", code, False

    def stop(self) -> int:
        return self.code

    def kill(self) -> None:
        self.killed = True


def test_a_piece_that_breaks_leaves_the_others(serving: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise OSError("no answer")

    server = FakeServer()
    monkeypatch.setattr(serving, "Server", lambda *_: server)
    monkeypatch.setattr(serving, "ask", broken)
    document = serving.serve(context(broken), clients=(16,))
    assert [entry["result"] for entry in document["results"][1:]] == ["OSError: no answer"] * 4
    assert not any(entry["ok"] for entry in document["results"][1:])
    assert document["tables"] == []
    assert server.killed


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"completed": 63}, "63 completed, 0 errors, 0 pages left"),
        ({"errors": 1}, "64 completed, 1 errors, 0 pages left"),
        ({"pages_left": 7}, "64 completed, 0 errors, 7 pages left"),
        ({"code": 124}, "the last line"),
    ],
)
def test_a_load_that_goes_wrong(serving: ModuleType, changes: dict[str, int], text: str) -> None:
    rows: list[list[str]] = []
    assert serving.load(context(Commands(**changes)), "http://x", 16, rows) == (False, text)
    assert len(rows) == ("code" not in changes)


@pytest.mark.parametrize(
    ("code", "output", "text"),
    [
        (1, f"a: ok (1 s)\nb: FAILED: ValueError: x (2 s)\n{ORACLE}", "b: FAILED: ValueError: x (2 s)"),
        (0, "a: ok (1 s)\n", "a: ok (1 s)"),
        (124, f"{ORACLE}stopped after 9 s\n", "stopped after 9 s"),
    ],
)
def test_an_oracle_that_goes_wrong(serving: ModuleType, code: int, output: str, text: str) -> None:
    assert serving.oracle(context(Commands(oracle=(code, output))), "http://x") == (False, text)


class Counters:
    """Stands in for ``ask``: a round of prompts adds the next (packed steps, prompts, tokens, tokens of the last)."""

    def __init__(self, rounds: list[tuple[int, int, int, int]]) -> None:
        self.rounds, self.metrics, self.prompts = rounds, [0, 0, 0, 0], []

    def __call__(self, url: str, path: str, body: Any = None) -> dict[str, int]:
        names = ("packed_calls", "prefill_chunks", "prefill_tokens", "last_prefill_chunk_tokens")
        return {"vocab_size": 100, **dict(zip(names, self.metrics, strict=True))}

    def post(self, url: str, prompts: list[list[int]]) -> None:
        self.prompts += prompts
        *more, last = self.rounds.pop(0)
        self.metrics = [*(old + new for old, new in zip(self.metrics, more, strict=False)), last]


WHOLE = (16, 1024)
ALONE = (0, *WHOLE, 64)


@pytest.mark.parametrize(
    ("rounds", "fine", "text"),
    [
        ([(1, *WHOLE, 576)], True, "576 prompt tokens of 9 clients in one step; 16 prompts in 8 steps"),
        ([(1, *WHOLE, 1024)], True, "1,024 prompt tokens of 16 clients in one step; 16 prompts in 1 step"),
        ([ALONE, (3, *WHOLE, 704)], True, "704 prompt tokens of 11 clients in one step; 16 prompts with 3 such steps"),
        ([ALONE] * 5, False, "not seen in 5 tries; 64 prompt tokens in the last step, 0 steps of several prompts"),
        ([(1, *WHOLE, 64)] * 5, False, "not seen in 5 tries; 64 .*"),
        ([(1, *WHOLE, 130)] * 5, False, "not seen in 5 tries; 130 .*"),  # no whole prompts
        ([(1, 16, 900, 128)] * 5, False, "not seen in 5 tries; 128 .*"),  # some came from the prefix cache
        ([(1, 17, 1024, 128)] * 5, False, "not seen in 5 tries; 128 .*"),  # one was cut in two
        ([(0, *WHOLE, 128)] * 5, False, "not seen in 5 tries; 128 .*"),
    ],
)  # fmt: skip
def test_prompts_in_one_step(
    serving: ModuleType, monkeypatch: pytest.MonkeyPatch, rounds: Any, fine: bool, text: str
) -> None:
    counters = Counters(list(rounds))
    monkeypatch.setattr(serving, "ask", counters)
    monkeypatch.setattr(serving, "post_at_once", counters.post)
    found, said = serving.packing("http://x")
    assert found == fine
    assert said == text or (text.endswith(".*") and said.startswith(text[:-2]))
    assert counters.rounds == []
    assert {len(prompt) for prompt in counters.prompts} == {64}
    assert all(0 <= token < 90 for prompt in counters.prompts for token in prompt)
    assert len({tuple(prompt) for prompt in counters.prompts}) == 16 * len(rounds)


def test_a_client_that_is_refused_is_an_error(serving: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(url: str, path: str, body: Any = None) -> None:
        if body["prompt"] == [2]:
            raise OSError("HTTP Error 429")

    monkeypatch.setattr(serving, "ask", refused)
    with pytest.raises(OSError, match="429"):
        serving.post_at_once("http://x", [[1], [2], [3]])


@pytest.mark.parametrize(
    ("used", "active", "code", "expected"),
    [
        (0, 0, 0, (True, "KV pool whole, exit code 0 after SIGTERM")),
        (0, 0, 1, (False, "KV pool whole, exit code 1 after SIGTERM")),
        (5, 0, 0, (False, "5 KV pages in use, 0 active requests, exit code 0 after SIGTERM")),
        (0, 1, 0, (False, "0 KV pages in use, 1 active requests, exit code 0 after SIGTERM")),
    ],
)
def test_the_end(
    serving: ModuleType, monkeypatch: pytest.MonkeyPatch, used: int, active: int, code: int, expected: tuple[bool, str]
) -> None:
    monkeypatch.setattr(serving, "ask", lambda url, path: {"kv_pages_used": used, "active_requests": active})
    monkeypatch.setattr(serving, "IDLE_S", 0.1)
    assert serving.end(FakeServer(code)) == expected
