#!/usr/bin/env python3
"""Checks a running server's native HTTP API: python scripts/test_serve.py [URL] [--oracle N]. Standard library only.

Each check prints one line; the exit code is the number of checks that failed. It changes nothing on the server, and
needs no particular model. With --oracle, N answers given under mixed load, while other clients hang up, are compared
with what the same requests get alone.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

CHECKS: list[Callable[[Server], str | None]] = []


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
        return parse_events(answer)

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


def parse_events(answer: bytes) -> list[tuple[str, dict[str, Any]]]:
    """(name, data) of each event of a stream, of which one is the end."""
    assert answer.isascii(), "raw line separators could split an event"
    events = []
    for block in answer.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if fields:
            events.append((fields["event"], json.loads(fields["data"])))
    assert [name for name, _ in events].count("done") == 1, "a stream has one end"
    assert events[-1][0] == "done"
    return events


def check(function: Callable[[Server], str | None]) -> Callable[[Server], str | None]:
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
        "failed_requests", "tokens_generated", "kv_pages_used", "kv_pages_cached", "kv_pages_total", "wasted_slots",
        "batch_last", "batch_avg", "decode_steps", "prefill_chunks", "prefill_tokens", "last_prefill_chunk_tokens",
        "packed_calls", "prefix_cache_hits", "uptime_s", "rejected_requests",
    ):
        assert name in values, name
    status, headers, text = server.call("GET", "/metrics", headers={"Accept": "text/plain"})
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
                 "queue_time_seconds", "batch_size"):
        assert f"# TYPE crucible_{name} histogram".encode() in text, name


@check
def a_prompt_is_continued(server: Server) -> None:
    answer = server.generate(prompt="The capital of France is", max_tokens=8)
    assert answer["finish_reason"] in ("stop", "length")
    assert 1 <= answer["tokens_generated"] <= 8
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= usage["cached_tokens"] < usage["prompt_tokens"]


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
            ("prompt", [10**12]), ("cache_salt", ""), ("nonsense", 1),
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
    context = json.loads(server.call("GET", "/health")[2])["context"]
    hang_up(server, {"prompt": "Count: 1, 2,", "max_tokens": min(400, context - 20), "ignore_eos": True}, after=None)
    wait(lambda: server.metrics()["cancelled_requests"] > before)


def hang_up(server: Server, body: dict[str, Any], after: float | None) -> None:
    """Send a request and close the connection ``after`` so many seconds, or once the answer begins."""
    data = json.dumps(body).encode()
    with socket.create_connection(server.address) as connection:
        head = f"POST /v1/generate/stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        if after is None:
            connection.recv(4096)
        else:
            time.sleep(after)


def wait(reached: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "not reached in time"
        time.sleep(0.05)


def mixed_requests(server: Server, count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Prompts of 1 token to half the context, as text and ids, many with a common beginning; greedy and sampled."""
    health = json.loads(server.call("GET", "/health")[2])
    longest, ids = min(health["context"] // 2, 300), health["vocab_size"] * 9 // 10
    shared = [rng.randrange(ids) for _ in range(longest)]
    requests = []
    for number in range(count):
        body: dict[str, Any] = {"max_tokens": rng.randrange(1, 24)}
        length = rng.choice((1, 15, 16, 17, 31, 32, 33, rng.randrange(1, longest), rng.randrange(1, longest)))
        length = min(length, longest)
        kind = number % 3
        if kind == 0:
            body["prompt"] = ("Lorem ipsum dolor sit amet, " * (1 + length // 28))[:length]
        elif kind == 1:
            body["prompt"] = [rng.randrange(ids) for _ in range(length)]
        else:
            body["prompt"] = [*shared[: length - 1], rng.randrange(ids)]
            body["cache_salt"] = rng.choice(("a", "b"))
        if rng.random() < 0.5:
            body |= {"temperature": rng.choice((0.3, 1.0, 1.7)), "seed": rng.randrange(2**64), "top_k": 50}
        requests.append(body)
    return requests


def answer_to(server: Server, body: dict[str, Any], stream: bool) -> tuple[list[int], str, str]:
    """(ids, text, finish reason) by either route; waits its turn at a full server."""
    while True:
        path = "/v1/generate/stream" if stream else "/v1/generate"
        status, _, data = server.call("POST", path, body)
        if status != 429:
            break
        time.sleep(0.1)
    assert status == 200, (status, data)
    if not stream:
        answer = json.loads(data)
        return answer["token_ids"], answer["text"], answer["finish_reason"]
    events = parse_events(data)
    ids = [event["token_id"] for name, event in events if name == "token"]
    return ids, "".join(event["text"] for _, event in events), events[-1][1]["finish_reason"]


def oracle(server: Server, count: int, clients: int = 16, disconnects: float = 0.1) -> str:
    """Compare ``count`` answers under load with those that a quarter as many requests got alone; says what was done."""
    rng = random.Random(1)
    requests = mixed_requests(server, -(-count // 4), rng)
    alone = [answer_to(server, body, stream=False) for body in requests]
    jobs: queue.SimpleQueue[tuple[int, bool] | float] = queue.SimpleQueue()
    hang_ups = 0
    for number in rng.sample(range(count), count):
        jobs.put((number % len(requests), rng.random() < 0.5))
        if rng.random() < disconnects:
            hang_ups += 1
            jobs.put(rng.choice((0.0, 0.005, 0.05, 0.3)))
    wrong: list[str] = []
    compared = 0
    lock = threading.Lock()

    def client() -> None:
        nonlocal compared
        while True:
            try:
                job = jobs.get_nowait()
                if isinstance(job, float):
                    hang_up(server, {"prompt": "x " * 20, "max_tokens": 60, "ignore_eos": True}, job)
                    continue
                found = answer_to(server, requests[job[0]], stream=job[1])
                with lock:
                    compared += 1
                    if found != alone[job[0]]:
                        wrong.append(f"{requests[job[0]]}: {found} under load, {alone[job[0]]} alone")
            except queue.Empty:
                return
            except Exception as error:
                wrong.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, f"{len(wrong)} differ; the first: {wrong[0]}"
    assert compared == count, compared
    wait(lambda: not any(server.metrics()[n] for n in ("active_requests", "queued_requests", "kv_pages_used")))
    return f"{compared} answers under load of {clients} clients equal, {hang_ups} hang-ups, pages whole"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8080")
    parser.add_argument("--oracle", type=int, default=0, metavar="N", help="answers to compare under load")
    arguments = parser.parse_args()
    server = Server(arguments.url)
    failed = 0
    if arguments.oracle:
        CHECKS.append(lambda server: oracle(server, arguments.oracle))
        CHECKS[-1].__name__ = "answers_under_load_are_those_given_alone"
    for function in CHECKS:
        started = time.monotonic()
        try:
            outcome = function(server) or "ok"
        except Exception as error:
            failed += 1
            outcome = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"{function.__name__.replace('_', ' ')}: {outcome} ({time.monotonic() - started:.1f} s)", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
