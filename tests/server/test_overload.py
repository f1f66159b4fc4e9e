"""Over the limits: an answer at once, and never a blocked /health."""

from __future__ import annotations

import statistics
import threading
import time

import httpx

from crucible.server.http import RESERVED_THREADS, HttpServer
from crucible.server.service import bind
from tests.server.test_native_api import refusal
from tests.serving import ROOT, Running, eventually, serving


def test_429_health_and_metrics_do_not_wait_for_a_slow_step() -> None:
    with serving(core={"step_s": 1.0, "max_batch": 1, "max_queue": 1}) as running:
        held = [running.open_post("/v1/generate/stream", prompt="a", max_tokens=1000) for _ in range(2)]
        eventually(lambda: running.metrics()["queued_requests"] == 1)
        times = []
        for path in ("/v1/generate", "/v1/generate/stream"):
            for _ in range(5):
                started = time.monotonic()
                response = running.post(path, prompt="b", max_tokens=1)
                times.append(time.monotonic() - started)
                assert "1 running, 1 waiting" in refusal(response, 429)
                assert int(response.headers["retry-after"]) >= 1
        for path in ("/health", "/metrics"):
            started = time.monotonic()
            assert running.get(path).status_code == 200
            times.append(time.monotonic() - started)
        assert statistics.median(times) < 0.05, times
        assert max(times) < 0.5, times  # a busy machine may delay one, but none waits for the step
        assert running.metrics()["rejected_requests"] == 10
        for connection in held:
            connection.close()


def test_every_accepted_request_finishes_and_the_others_get_429() -> None:
    with serving(core={"step_s": 0.002, "max_batch": 4, "max_queue": 8}, http_workers=2) as running:
        results: list[httpx.Response] = []

        def ask() -> None:
            with httpx.Client(base_url=running.url, verify=False, timeout=30) as client:
                results.append(client.post("/v1/generate", json={"prompt": "ab", "max_tokens": 40}))

        threads = [threading.Thread(target=ask) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(results) == 40
        assert {result.status_code for result in results} == {200, 429}
        assert all(result.json()["text"] == "ab" * 20 for result in results if result.status_code == 200)
        assert sum(result.status_code == 200 for result in results) >= 12
        eventually(lambda: running.metrics()["active_requests"] == 0)


def test_streams_leave_threads_for_everyone_else() -> None:
    with serving(core={"step_s": 0.02, "max_batch": 40, "max_queue": 40}) as running:
        held = [running.open_post("/v1/generate/stream", prompt="a", max_tokens=3000) for _ in range(80)]
        eventually(lambda: running.metrics()["queued_requests"] == 40)
        refused = [running.open_post("/v1/generate/stream", prompt="b", max_tokens=9) for _ in range(120)]
        assert min(health_s(running) for _ in range(3)) < 0.25
        refusal(running.post(prompt="b", max_tokens=1), 429)
        for connection in refused:
            assert connection.recv(12) == b"HTTP/1.1 429"
        for connection in held + refused:
            connection.close()
        eventually(lambda: running.metrics()["active_requests"] == 0)


def test_a_worker_has_a_thread_for_each_request_that_the_engine_takes_and_some_more() -> None:
    listener = bind("127.0.0.1", 0)
    server = HttpServer(lambda environ, start_response: [], listener, streams=24)
    assert len(server.task_dispatcher.threads) == 24 + RESERVED_THREADS
    assert RESERVED_THREADS >= 8
    server.task_dispatcher.shutdown()
    server.close()
    documented = (ROOT / "docs" / "api.md").read_text()
    assert f"`max_batch + max_queue + {RESERVED_THREADS}` threads" in documented


def health_s(running: Running) -> float:
    """Seconds /health takes."""
    started = time.monotonic()
    assert running.get("/health").status_code == 200
    return time.monotonic() - started
