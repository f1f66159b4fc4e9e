"""Processes that die, in every direction; draining; a service that cannot start says so in one line."""

from __future__ import annotations

import glob
import http.client
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from crucible.engine import supervisor
from tests.serving import Running, alive, events, eventually, serving


@pytest.fixture(scope="module")
def mortal(gate: Path) -> Iterator[Running]:
    """An engine and two http workers whose processes these tests kill."""
    with serving(core={"step_s": 0.005, "max_batch": 8, "gate": str(gate)}, http_workers=2) as running:
        yield running


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, an engine goes on loading."""
    return tmp_path_factory.mktemp("mortal") / "gate"


def ask_anew(running: Running, prompt: str = "ab") -> int:
    """The status of a request on a new connection; 0 when its worker died under it."""
    try:
        with httpx.Client(verify=False, timeout=10) as client:
            return client.post(running.url + "/v1/generate", json={"prompt": prompt, "max_tokens": 3}).status_code
    except httpx.HTTPError:
        return 0


def test_a_killed_engine_ends_its_streams_with_an_error_and_is_replaced(mortal: Running, gate: Path) -> None:
    engine, *workers = mortal.children()
    gate.touch()
    with mortal.http.stream("POST", "/v1/generate/stream", json={"prompt": "a", "max_tokens": 4000}) as response:
        chunks = response.iter_text()
        next(chunks)
        os.kill(engine, signal.SIGKILL)
        name, data = events("".join(chunks))[-1]
    assert (name, data["finish_reason"]) == ("done", "error")
    assert "the engine stopped" in data["error"]["message"]
    for path in ("/v1/generate", "/v1/generate/stream"):
        down = mortal.post(path, prompt="a", max_tokens=1)
        assert down.status_code == 503
        assert int(down.headers["retry-after"]) >= 1
        assert down.json()["error"]["type"] == "unavailable_error"
    health = mortal.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "restarting")
    gate.unlink()
    eventually(lambda: {ask_anew(mortal) for _ in range(8)} == {200})
    eventually(lambda: mortal.get("/health").json()["status"] == "ok")
    assert mortal.metrics()["kv_pages_used"] == 0
    assert set(workers) <= set(mortal.children())
    assert any("the engine died (killed by SIGKILL" in line for line in mortal.errors), mortal.errors
    assert any("the engine is back" in line for line in mortal.errors)


def test_a_killed_worker_is_replaced_and_its_requests_are_cancelled(mortal: Running) -> None:
    eventually(lambda: len(mortal.children()) == 3)
    streams = [mortal.open_post("/v1/generate/stream", prompt="a", max_tokens=4000) for _ in range(4)]
    eventually(lambda: mortal.metrics()["active_requests"] == 4)
    workers = mortal.children()
    engine = next(pid for pid in workers if holds_unix_listener(pid))
    workers.remove(engine)
    os.kill(workers[0], signal.SIGKILL)
    statuses = {ask_anew(mortal) for _ in range(10)}
    assert 200 in statuses  # the other worker goes on; a connection that the dead one had accepted is lost
    os.kill(workers[1], signal.SIGKILL)
    for connection in streams:
        while connection.recv(65536):
            pass
        connection.close()
    eventually(lambda: ask_anew(mortal) == 200)
    mortal.http = httpx.Client(base_url=mortal.url, verify=False)
    eventually(lambda: mortal.metrics()["cancelled_requests"] == 4)
    assert engine in mortal.children()
    eventually(lambda: len(mortal.children()) == 3)


def holds_unix_listener(pid: int) -> bool:
    """Whether the process listens on the engine's socket."""
    listening = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()
                 if line.endswith("/engine") and line.split()[5] == "01" and line.split()[3] == "00010000"}
    links = [os.readlink(link) for link in glob.glob(f"/proc/{pid}/fd/*") if os.path.lexists(link)]
    return any(link.removeprefix("socket:[").removesuffix("]") in listening for link in links)


def test_children_end_with_a_killed_supervisor() -> None:
    with serving(core={"step_s": 0.01}) as running:
        children = running.children()
        sockets = glob.glob(f"{tempfile.gettempdir()}/crucible-*/engine")
        connection = running.open_post("/v1/generate/stream", prompt="a", max_tokens=4000)
        connection.recv(10)
        running.process.kill()
        eventually(lambda: not any(alive(pid) for pid in children), timeout=3)
        eventually(lambda: any(not os.path.exists(path) for path in sockets))
        connection.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_live_requests_finish_and_takes_no_new_ones(number: signal.Signals, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    with serving(core={"step_s": 0.02, "hold": str(hold)}) as running:
        outcome: list[str] = []

        def ask() -> None:
            with httpx.Client(verify=False, timeout=20) as client:
                answer = client.post(running.url + "/v1/generate", json={"prompt": "ab", "max_tokens": 30})
            outcome.append(answer.json()["text"])

        thread = threading.Thread(target=ask)
        thread.start()
        eventually(lambda: running.metrics()["active_requests"] == 1)
        kept = http.client.HTTPConnection(*running.address)
        kept.request("GET", "/health")
        assert b'"ok"' in kept.getresponse().read()
        children = running.children()
        for pid in [running.process.pid, *children]:  # as Ctrl-C in a terminal, which all of them get
            os.kill(pid, number)
        eventually(lambda: refused(running))
        kept.request("POST", "/v1/generate", b"{}")
        answer = kept.getresponse()
        assert (answer.status, answer.getheader("connection")) == (503, "close")
        answer.read()
        kept.close()
        hold.unlink()
        thread.join(10)
        assert outcome == ["ab" * 15]
        assert running.wait_exit() == 0
        assert not any(alive(pid) for pid in children)
        assert len(running.errors) == 2, running.errors


def refused(running: Running) -> bool:
    """Whether the address takes no connections any more."""
    try:
        socket.create_connection(running.address, timeout=1).close()
    except (ConnectionRefusedError, ConnectionResetError):  # the latter: just when the socket was closed
        return True
    return False


def test_what_was_sent_before_the_drain_ended_is_answered(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    with serving(core={"step_s": 0.01, "hold": str(hold)}) as running:
        live = running.open_post("/v1/generate", prompt="ab", max_tokens=4)
        eventually(lambda: running.metrics()["active_requests"] == 1)
        half = socket.create_connection(running.address, timeout=5)
        half.sendall(b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{")
        eventually(lambda: running.get("/health").status_code == 200)
        running.process.send_signal(signal.SIGTERM)
        eventually(lambda: refused(running))
        hold.unlink()
        answer = b""
        while not answer.endswith(b"}}"):
            answer += live.recv(65536)
        assert b'"abab"' in answer
        time.sleep(0.4)  # nothing else is under way
        half.sendall(b"}")
        answer = b""
        while chunk := half.recv(65536):  # the connection ends with its answer
            answer += chunk
        assert answer.startswith(b"HTTP/1.1 503")
        live.close()
        half.close()
        assert running.wait_exit() == 0


def test_a_second_signal_stops_at_once() -> None:
    with serving(core={"step_s": 0.05}) as running:
        connection = running.open_post("/v1/generate/stream", prompt="a", max_tokens=4000)
        connection.recv(10)
        running.process.send_signal(signal.SIGTERM)
        eventually(lambda: len(running.errors) == 2)
        running.process.send_signal(signal.SIGTERM)  # an echo of the first
        time.sleep(0.5)
        assert running.process.poll() is None
        running.process.send_signal(signal.SIGTERM)
        assert running.wait_exit(3) == 128 + signal.SIGTERM
        connection.close()


def test_a_drain_has_a_limit() -> None:
    with serving(core={"step_s": 0.05}, drain_s=0.3) as running:
        connection = running.open_post("/v1/generate/stream", prompt="a", max_tokens=4000)
        connection.recv(10)
        running.process.send_signal(signal.SIGTERM)
        assert running.wait_exit(4) == 0
        assert "dropped" in running.errors[-1]
        connection.close()


def test_a_signal_while_loading_stops() -> None:
    with serving(wait=False, core={"load_s": 30}) as running:
        eventually(lambda: running.errors == ["crucible-serve: loading the fake model"])
        started = time.monotonic()
        running.process.send_signal(signal.SIGINT)
        assert running.wait_exit(5) == 0
        assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"core": {"fail": "model.safetensors: truncated"}}, "error: model.safetensors: truncated"),
        ({"core_factory": "tests.fakes:crash"}, "error: the engine could not start: exit code 7"),
        ({"model_path": "broken"}, "error: no tokenizer here"),
    ],
)
def test_a_service_that_cannot_start_says_why_in_one_line(settings: dict[str, object], expected: str) -> None:
    with serving(wait=False, **settings) as running:
        assert running.wait_exit() == 1
        assert [line for line in running.errors if "loading" not in line] == [f"crucible-serve: {expected}"]


def test_a_child_that_keeps_dying_is_restarted_with_growing_pauses_and_then_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "GIVE_UP_AFTER", 3)
    monkeypatch.setattr(supervisor, "BACKOFF_S", (0.02, 0.04))
    lines: list[str] = []
    ups: list[object] = []
    child = supervisor.ChildSpec("engine", "tests.fakes:short_lived_child", {}, drains=False)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert supervisor.Supervisor([child], on_up=ups.append, say=lines.append).run() == 1
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert len(ups) == 1
    pauses = [line.split("restarting it in ")[1] for line in lines if "restarting" in line]
    assert pauses == ["0.02 s", "0.04 s", "0.04 s"]
    assert lines[-1] == "error: the engine died 4 times in a row, giving up: exit code 3"


def test_a_stuck_step_is_seen_from_outside() -> None:
    with serving(core={"stick_s": 3.0}, stalled_s=0.3) as running:
        with running.open_post("/v1/generate/stream", prompt="!stick", max_tokens=2):
            eventually(lambda: running.get("/health").status_code == 503)
            health = running.get("/health").json()
            assert health["status"] == "stalled"
            assert health["step_age_s"] > 0.3
            assert "no progress" in health["error"]["message"]
        eventually(lambda: running.get("/health").json()["status"] == "ok")


def test_health_tells_loading_from_ready(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    port = free_port()
    with serving(wait=False, core={"gate": str(gate)}, port=port) as running:
        running.url = f"http://127.0.0.1:{port}"
        running.http = httpx.Client(base_url=running.url, verify=False)

        def loading() -> bool:
            try:
                return "loading the fake model" in running.get("/health").text
            except httpx.HTTPError:
                return False

        eventually(loading)
        response = running.get("/health")
        assert response.status_code == 503
        assert response.json()["status"] == "loading"
        assert response.json()["error"]["message"]
        response = running.post(prompt="a", max_tokens=1)
        assert response.status_code == 503
        assert "retry-after" in response.headers
        assert running.get("/metrics").status_code == 503
        assert running.post(prompt="a", max_tokens=0).status_code == 400
        gate.unlink()
        running.wait_up()
        assert running.get("/health").status_code == 200


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_the_engine_socket_is_private_and_short_even_under_a_long_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from crucible.server.service import MAX_SOCKET_PATH, engine_socket

    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with engine_socket() as listener:
        path = Path(listener.getsockname())
        assert len(os.fsencode(path)) <= MAX_SOCKET_PATH
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not path.parent.exists()
