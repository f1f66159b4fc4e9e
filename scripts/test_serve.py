#!/usr/bin/env python3
"""Checks a running server's native HTTP API: python scripts/test_serve.py [URL]. Standard library only.

Each check prints one line; the exit code is the number of checks that failed. It changes nothing on the server, and
needs no particular model.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

CHECKS: list[Callable[[Server], None]] = []


class Server:
    """The server under test."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        self.address = (parts.hostname or "127.0.0.1", parts.port or 80)

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers in lower case, body); ``body`` is sent as it is when bytes, else as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)
        for name, value in {**({"Content-Type": "application/json"} if data else {}), **(headers or {})}.items():
            request.add_header(name, value)
        try:
            response = urllib.request.urlopen(request, timeout=300)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            return response.status, {k.lower(): v for k, v in response.headers.items()}, response.read()

    def generate(self, **body: Any) -> dict[str, Any]:
        status, _, answer = self.call("POST", "/v1/generate", body)
        assert status == 200, answer
        result: dict[str, Any] = json.loads(answer)
        return result

    def stream(self, **body: Any) -> list[tuple[str, dict[str, Any]]]:
        status, headers, answer = self.call("POST", "/v1/generate/stream", body)
        assert status == 200, answer
        assert headers["content-type"] == "text/event-stream; charset=utf-8", headers
        assert answer.isascii(), "raw line separators could split an event"
        events = []
        for block in answer.decode().split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
            if fields:
                events.append((fields["event"], json.loads(fields["data"])))
        return events

    def metrics(self) -> dict[str, float]:
        values: dict[str, float] = json.loads(self.call("GET", "/metrics")[2])
        return values

    def refuse(self, status: int, param: str | None, method: str, path: str, body: Any = None, **headers: str) -> None:
        """Check that a request is refused in the error shape."""
        got, _, answer = self.call(method, path, body, headers)
        assert got == status, (got, answer[:300])
        error = json.loads(answer)["error"]
        assert set(error) == {"message", "type", "param"}, error
        assert error["param"] == param, error


def check(function: Callable[[Server], None]) -> Callable[[Server], None]:
    CHECKS.append(function)
    return function


@check
def health_names_the_model(server: Server) -> None:
    status, _, body = server.call("GET", "/health")
    health = json.loads(body)
    assert status == 200, health
    for name in ("status", "version", "model", "device", "dtype", "quant", "max_batch", "context", "sampling"):
        assert name in health, name


@check
def metrics_hold_the_counters(server: Server) -> None:
    values = server.metrics()
    for name in (
        "active_requests", "queued_requests", "prefilling_requests", "completed_requests", "cancelled_requests",
        "failed_requests", "tokens_generated", "kv_pages_used", "kv_pages_total", "wasted_slots", "batch_last",
        "batch_avg", "decode_steps", "prefill_chunks", "prefill_tokens", "last_prefill_chunk_tokens", "packed_calls",
        "uptime_s", "rejected_requests",
    ):
        assert name in values, name


@check
def a_prompt_is_continued(server: Server) -> None:
    answer = server.generate(prompt="The capital of France is", max_tokens=8)
    assert answer["finish_reason"] in ("stop", "length")
    assert 1 <= answer["tokens_generated"] <= 8
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@check
def token_ids_are_a_prompt(server: Server) -> None:
    assert server.generate(prompt=[1, 2, 3], max_tokens=2)["usage"]["prompt_tokens"] == 3


@check
def a_conversation_is_answered(server: Server) -> None:
    assert server.generate(messages=[{"role": "user", "content": "Say hi."}], max_tokens=4)["tokens_generated"] >= 1


@check
def greedy_and_seeded_answers_repeat(server: Server) -> None:
    for sampling in ({}, {"temperature": 0.9, "seed": 7, "top_k": 20}):
        first, second = (server.generate(prompt="Once", max_tokens=12, **sampling)["token_ids"] for _ in range(2))
        assert first == second, sampling


@check
def a_stream_adds_up_to_the_answer(server: Server) -> None:
    for prompt in ("Hello", "naïve café 日本語 \u2028\u0085", "1 2 3"):
        whole = server.generate(prompt=prompt, max_tokens=16)
        events = server.stream(prompt=prompt, max_tokens=16)
        assert "".join(data["text"] for _, data in events) == whole["text"]
        assert [data["token_id"] for name, data in events if name == "token"] == whole["token_ids"]
        name, done = events[-1]
        assert name == "done"
        assert done["tokens_generated"] == whole["tokens_generated"]
        assert done["finish_reason"] == whole["finish_reason"]


@check
def neighbours_do_not_change_an_answer(server: Server) -> None:
    prompts = [f"Neighbour number {number}" for number in range(4)]
    alone = [server.generate(prompt=prompt, max_tokens=8)["token_ids"] for prompt in prompts]
    together: list[list[int]] = [[] for _ in prompts]

    def ask(number: int) -> None:
        together[number] = server.generate(prompt=prompts[number], max_tokens=8)["token_ids"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


@check
def wrong_requests_are_refused_by_name(server: Server) -> None:
    good = {"prompt": "a", "max_tokens": 1}
    for path in ("/v1/generate", "/v1/generate/stream"):
        for param, value in (
            ("max_tokens", 0), ("max_tokens", "1"), ("max_tokens", True), ("max_tokens", 10**9), ("temperature", -1),
            ("temperature", "hot"), ("top_k", 0), ("seed", 2**64), ("prompt", ""), ("prompt", []), ("prompt", [-1]),
            ("prompt", [10**12]), ("nonsense", 1),
        ):
            server.refuse(400, param, "POST", path, {"temperature": 1, **good, param: value})
        server.refuse(400, "prompt", "POST", path, {"max_tokens": 1})
        server.refuse(400, "seed", "POST", path, {**good, "seed": 1})


@check
def broken_bodies_are_refused(server: Server) -> None:
    bodies = [b"{", b"[]", b"null", b'{"prompt":"\xff"}', b'{"prompt":"\\ud800"}', b'{"x":' + b"[" * 10**5]
    for body in bodies:
        status, _, answer = server.call("POST", "/v1/generate", body)
        assert status == 400, (body[:40], status)
        assert json.loads(answer)["error"]["message"]
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    server.refuse(415, None, "POST", "/v1/generate", b"prompt=a", **form)
    server.refuse(413, None, "POST", "/v1/generate", b"a" * (17 * 2**20))


@check
def routes_and_methods(server: Server) -> None:
    server.refuse(404, None, "GET", "/v1/nothing")
    server.refuse(405, None, "GET", "/v1/generate")
    server.refuse(405, None, "DELETE", "/health")
    status, headers, body = server.call("HEAD", "/health")
    assert (status, body) == (200, b""), (status, body)
    status, headers, _ = server.call("OPTIONS", "/v1/generate")
    assert status in (200, 204)
    assert "POST" in headers["allow"]


@check
def hanging_up_cancels(server: Server) -> None:
    before = server.metrics()["cancelled_requests"]
    body = json.dumps({"prompt": "Count: 1, 2, 3,", "max_tokens": 400, "ignore_eos": True}).encode()
    with socket.create_connection(server.address) as connection:
        head = f"POST /v1/generate/stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        connection.recv(4096)
    end = time.monotonic() + 10
    while server.metrics()["cancelled_requests"] == before:
        assert time.monotonic() < end, server.metrics()
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8080")
    server = Server(parser.parse_args().url)
    failed = 0
    for function in CHECKS:
        started = time.monotonic()
        try:
            function(server)
            outcome = "ok"
        except Exception as error:
            failed += 1
            outcome = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"{function.__name__.replace('_', ' ')}: {outcome} ({time.monotonic() - started:.1f} s)", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
