"""The rules of a shared engine seen through HTTP, on a real two-layer checkpoint: neighbours, pages, queues."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import ROOT, Running, events, eventually, serving_model

Answer = tuple[str, str]


@pytest.fixture(scope="module")
def tiny(tiny_chat_checkpoint: Path) -> Iterator[Running]:
    """4 running, 12 waiting, prompts computed 24 tokens a step; context 128."""
    flags = ("--quant", "f32", "--max-batch", "4", "--max-queue", "12", "--prefill-budget", "24", "--threads", "1")
    with serving_model(tiny_chat_checkpoint, *flags) as running:
        yield running


def ask(running: Running, **body: Any) -> Answer:
    """(text, finish reason), on a connection of its own; waits its turn at a full queue."""
    with httpx.Client(base_url=running.url, verify=False, timeout=30, trust_env=False) as client:
        while (response := client.post("/v1/generate", json=body)).status_code == 429:
            time.sleep(0.02)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["text"], answer["finish_reason"]


def together(calls: list[Callable[[], Answer]]) -> list[Answer]:
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        results[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def idle(running: Running) -> bool:
    values = running.metrics()
    return values["active_requests"] == values["queued_requests"] == values["kv_pages_used"] == 0


def test_sixteen_at_once_answer_as_alone(tiny: Running) -> None:
    bodies = [{"prompt": f"Item {i}: " + "lorem " * (i * 7 % 15), "max_tokens": 20} for i in range(16)]
    alone = [ask(tiny, **body) for body in bodies]
    assert len({text for text, _ in alone}) > 8, "a model that always says the same shows nothing"
    assert together([lambda body=body: ask(tiny, **body) for body in bodies]) == alone
    eventually(lambda: idle(tiny))


def test_the_same_request_eight_times_at_once(tiny: Running) -> None:
    alone = ask(tiny, prompt="one path", max_tokens=6)
    assert together([lambda: ask(tiny, prompt="one path", max_tokens=6)] * 8) == [alone] * 8


def test_aborts_in_the_middle_of_a_prompt_leak_no_page(tiny: Running) -> None:
    alone = ask(tiny, prompt="Check", max_tokens=8)
    for number in range(24):
        with tiny.open_post("/v1/generate/stream", prompt=f"{number} " + "word " * 18, max_tokens=24):
            time.sleep((0.0, 0.002, 0.005, 0.02)[number % 4])
    eventually(lambda: idle(tiny))
    assert ask(tiny, prompt="Check", max_tokens=8) == alone


def test_survivors_answer_as_alone_among_many_aborts(tiny: Running) -> None:
    prompts = ["Alpha beta", "The sea", "1 2 3 4", "x = "]
    alone = [ask(tiny, prompt=prompt, max_tokens=24) for prompt in prompts]
    stop = threading.Event()

    def abort() -> None:
        for number in itertools.cycle(range(40)):
            if stop.is_set():
                return
            with tiny.open_post("/v1/generate/stream", prompt="z " * (5 + 37 * number % 45), max_tokens=20):
                time.sleep(0.002 * (number % 5))

    aborts = threading.Thread(target=abort)
    aborts.start()
    for _ in range(3):
        assert together([lambda prompt=prompt: ask(tiny, prompt=prompt, max_tokens=24) for prompt in prompts]) == alone
    stop.set()
    aborts.join()
    eventually(lambda: idle(tiny))


def test_a_shared_prefix_is_cached_and_changes_nothing(tiny: Running) -> None:
    hits = tiny.metrics()["prefix_cache_hits"]
    found = {ask(tiny, prompt="Shared prefix " * 5 + "tail", max_tokens=3) for _ in range(40)}
    assert len(found) == 1
    assert tiny.metrics()["prefix_cache_hits"] >= hits + 39
    salted = {ask(tiny, prompt="Shared prefix " * 5 + "tail", max_tokens=3, cache_salt=str(i)) for i in range(3)}
    assert salted == found
    assert tiny.metrics()["prefix_cache_hits"] == hits + 39
    usage = tiny.post(prompt="Shared prefix " * 5 + "tail", max_tokens=3).json()["usage"]
    assert usage["cached_tokens"] == 64
    eventually(lambda: idle(tiny))
    assert tiny.metrics()["kv_pages_cached"] > 0


def test_prompts_that_differ_within_a_page_share_nothing_wrong(tiny: Running) -> None:
    ids = [104, 105] * 24
    prompts = [[*ids[:31], last] for last in (11, 13, 198)] + [ids[:n] for n in (15, 16, 17, 31, 32, 33, 47, 48, 1)]
    first = [ask(tiny, prompt=prompt, max_tokens=8) for prompt in prompts]
    fresh = [ask(tiny, prompt=prompt, max_tokens=8, cache_salt=f"page {i}") for i, prompt in enumerate(prompts)]
    backwards = [ask(tiny, prompt=prompt, max_tokens=8) for prompt in reversed(prompts)][::-1]
    assert first == fresh == backwards
    assert together([lambda prompt=prompt: ask(tiny, prompt=prompt, max_tokens=8) for prompt in prompts]) == first
    eventually(lambda: idle(tiny))


def test_a_request_that_can_never_fit_is_refused_at_once(tiny_chat_checkpoint: Path) -> None:
    with serving_model(tiny_chat_checkpoint, "--kv-pages", "4", "--max-batch", "2", "--threads", "1") as running:
        for prompt, max_tokens in (("word " * 16, 4), ("word " * 12, 8)):
            started = time.monotonic()
            response = running.post(prompt=prompt, max_tokens=max_tokens)
            assert response.status_code == 400
            assert "64" in response.json()["error"]["message"]
            assert time.monotonic() - started < 1
        assert running.post(prompt="short", max_tokens=4).status_code == 200
        assert running.post(prompt="word " * 12, max_tokens=4).status_code == 200


def test_a_stream_has_one_end_and_it_is_the_last(tiny: Running) -> None:
    for body in ({"prompt": "Hi"}, {"messages": [{"role": "user", "content": "Hi"}]}):
        text = tiny.post("/v1/generate/stream", **body, max_tokens=6).text
        assert text.endswith("\n\n")
        found = events(text)
        assert [name for name, _ in found][-1] == "done"
        assert sum(name == "done" for name, _ in found) == 1
        assert sum("finish_reason" in data for _, data in found) == 1


def test_tokens_arrive_as_they_are_made(service: Running) -> None:
    arrivals = []
    with service.open_post("/v1/generate/stream", prompt="a", max_tokens=256) as connection:
        text = b""
        while b"event: done" not in text:
            text += connection.recv(65536)
            arrivals.append((time.monotonic(), text.count(b"event: token")))
    assert len(arrivals) >= 5
    assert next(tokens for _, tokens in arrivals if tokens) < 128
    assert arrivals[-1][0] - arrivals[0][0] > 0.05  # 256 steps of a millisecond


def test_slow_readers_hold_up_nobody_and_lose_nothing(service: Running) -> None:
    slow = []
    for _ in range(6):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(service.address)
        data = json.dumps({"prompt": "ab", "max_tokens": 500}).encode()
        head = f"POST /v1/generate/stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        slow.append(connection)
    assert service.post(prompt="c", max_tokens=20).json()["text"] == "c" * 20
    eventually(lambda: service.metrics()["active_requests"] == 0)  # what they do not read costs no slot
    for connection in slow:
        with connection:
            connection.settimeout(5)
            text = b""
            while chunk := connection.recv(700):
                text += chunk
            assert text.count(b"event: token") == 500
            assert text.count(b"event: done") == 1


def test_the_script_compares_answers_under_load(tiny: Running) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "test_serve.py"), tiny.url, "--oracle", "48"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout
    assert "48 answers under load of 16 clients equal" in result.stdout
    assert "FAILED" not in result.stdout
