from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Iterator

import pytest

from crucible.bench.http_stream import Address
from crucible.bench.load import Bounds, LoadClient, Record, closed_loop, open_loop
from crucible.bench.surfaces import Job, surface
from tests.bench.fake_server import Exchange, FakeServer, Script, fake_server, in_turn

JOB = Job((1, 2, 3), 4)


def client_of(server: FakeServer, api: str = "native", timeout: float = 5.0) -> LoadClient:
    return LoadClient(Address.parse(server.url), surface(api), timeout=timeout)


def send(server: FakeServer, *jobs: Job, api: str = "native", timeout: float = 5.0) -> list[Record]:
    """The jobs one after the other on one client."""

    async def run() -> list[Record]:
        client = client_of(server, api, timeout)
        records = [await client.send(job) for job in jobs]
        client.close()
        return records

    return asyncio.run(run())


def eventually(check: object) -> None:
    end = time.monotonic() + 3
    while not check():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.005)


def whole(exchange: Exchange) -> None:
    exchange.native(exchange.body["max_tokens"])


def slow(exchange: Exchange) -> None:
    exchange.native(exchange.body["max_tokens"], pause=lambda: time.sleep(0.04))


def test_a_stream_is_timed_token_by_token() -> None:
    with fake_server(generate=slow) as server:
        (record,) = send(server, JOB)
    assert (record.outcome, record.tokens, record.counts) == ("ok", 4, [1, 1, 1, 1])
    assert record.ttft is not None
    assert record.tpot is not None
    assert 0.04 <= record.ttft < 1
    assert len(record.gaps) == 3
    assert all(0.01 < gap < 1 for gap in record.gaps)
    assert record.tpot == pytest.approx(sum(record.gaps) / 3)
    assert record.end >= record.times[-1] > record.due


def test_a_connection_is_kept_and_a_stale_one_replaced() -> None:
    def then_close(exchange: Exchange) -> None:
        whole(exchange)
        exchange.close()  # after a complete answer, without having said so

    with fake_server(generate=in_turn([whole, then_close, whole])) as server:

        async def run() -> list[Record]:
            client = client_of(server)
            records = [await client.send(JOB), await client.send(JOB)]
            assert server.connections == 1
            records.append(await client.send(JOB))
            client.close()
            return records

        assert [record.outcome for record in asyncio.run(run())] == ["ok"] * 3
        assert server.connections == 2


def test_tokens_that_arrive_together_are_one_read() -> None:
    def coalesced(exchange: Exchange) -> None:
        event = b'event: token\ndata: {"token_id":5,"text":"a"}\n\n'
        exchange.start_stream()
        exchange.chunk(event)
        for _ in range(2):
            time.sleep(0.04)
            exchange.chunk(event * 2)
        exchange.chunk(b'event: done\ndata: {"finish_reason":"length","tokens_generated":5,"text":""}\n\n')
        exchange.chunk(b"")

    with fake_server(generate=coalesced) as server:
        (record,) = send(server, Job((1,), 5))
    assert record.counts == [1, 2, 2]
    assert record.token_gaps == pytest.approx([record.gaps[0] / 2] * 2 + [record.gaps[1] / 2] * 2)


def test_tokens_hidden_in_an_event_count_for_the_gap_a_token() -> None:
    record = Record(JOB, 0.0, times=[1.0, 3.0], counts=[1, 1], tokens=4)
    assert record.token_gaps == [1.0]
    assert record.tpot == 1.0


def refused(status: int) -> Script:
    return lambda exchange: exchange.json({"error": {"message": "no"}}, status)


def cut(exchange: Exchange) -> None:
    exchange.start_stream()
    exchange.chunk(b'event: token\ndata: {"token_id":5,"text":"a"}\n\n')
    exchange.close()


def without_done(exchange: Exchange) -> None:
    exchange.start_stream()
    exchange.chunk(b'event: token\ndata: {"token_id":5,"text":"a"}\n\n')
    exchange.chunk(b"")


def failing(exchange: Exchange) -> None:
    exchange.start_stream()
    done = {"finish_reason": "error", "tokens_generated": 0, "text": "", "error": {"message": "the engine failed"}}
    exchange.chunk(b"event: done\ndata: " + json.dumps(done).encode() + b"\n\n")
    exchange.chunk(b"")


@pytest.mark.parametrize(
    ("script", "outcome", "detail"),
    [
        (refused(429), "429", "HTTP 429"),
        (refused(400), "4xx", "no"),
        (refused(503), "5xx", "HTTP 503"),
        (cut, "disconnect", "closed the connection"),
        (without_done, "disconnect", "without its last event"),
        (failing, "stream", "the engine failed"),
        (lambda exchange: exchange.raw(b"garbage\r\n\r\n"), "protocol", "status line"),
        (lambda exchange: time.sleep(1), "timeout", ""),
        (lambda exchange: exchange.close(), "disconnect", ""),
    ],
)
def test_failures_by_class(script: Script, outcome: str, detail: str) -> None:
    with fake_server(generate=in_turn([script, whole])) as server:
        record, after = send(server, JOB, JOB, timeout=0.6)
    assert record.outcome == outcome
    assert detail in record.detail
    assert after.outcome == "ok"  # whatever happened, the next request gets a connection that works


def test_no_server_at_all() -> None:
    with fake_server() as server:
        pass
    (record,) = send(server, JOB)
    assert record.outcome == "connect"


def test_a_client_that_hangs_up_is_noticed() -> None:
    with fake_server(generate=slow) as server:
        (record,) = send(server, Job((1,), 100, hang_up_after=3))
        eventually(lambda: server.hang_ups == 1)
    assert record.outcome == "hang-up"
    assert record.tokens == sum(record.counts) == 3


def test_openai_stream() -> None:
    def completions(exchange: Exchange) -> None:
        exchange.start_stream()
        for value in (
            {"choices": [{"text": "a", "finish_reason": None}]},
            {"choices": [{"text": "b", "finish_reason": "length"}]},
            {"choices": [], "usage": {"completion_tokens": 2}},
        ):
            exchange.chunk(b"data: " + json.dumps(value).encode() + b"\n\n")
        exchange.chunk(b"data: [DONE]\n\n")
        exchange.chunk(b"")

    with fake_server(completions=completions) as server:
        (record,) = send(server, JOB, api="openai")
        assert server.bodies[0]["stream_options"] == {"include_usage": True}
    assert (record.outcome, record.tokens) == ("ok", 2)


def jobs() -> Iterator[Job]:
    return itertools.repeat(JOB)


def test_closed_loop_keeps_its_clients_busy_and_its_bounds() -> None:
    with fake_server(generate=slow) as server:
        records = asyncio.run(closed_loop(client_of(server), jobs(), 3, Bounds(10, 60)))
        assert server.most_open == 3
        assert server.connections == 3
    assert [record.outcome for record in records] == ["ok"] * 10


def test_closed_loop_starts_nothing_after_its_time() -> None:
    with fake_server(generate=slow) as server:
        begin = time.monotonic()
        records = asyncio.run(closed_loop(client_of(server), jobs(), 2, Bounds(1000, 0.3)))
        assert time.monotonic() - begin < 2
    assert 2 <= len(records) <= 8
    assert {record.outcome for record in records} == {"ok"}


def test_a_refused_client_waits_before_it_asks_again() -> None:
    with fake_server(generate=refused(429)) as server:
        begin = time.monotonic()
        records = asyncio.run(closed_loop(client_of(server), jobs(), 1, Bounds(4, 60)))
        assert time.monotonic() - begin >= 4 * 0.05
    assert [record.outcome for record in records] == ["429"] * 4


def test_open_loop_does_not_wait_for_answers() -> None:
    release = threading.Event()

    def held(exchange: Exchange) -> None:
        release.wait(3)
        whole(exchange)

    async def run() -> list[Record]:
        loop = asyncio.create_task(open_loop(client, jobs(), 200, Bounds(12, 10), seed=3, max_open=8))
        await asyncio.to_thread(eventually, lambda: server.open == 8)
        await asyncio.sleep(0.1)
        release.set()
        return await loop

    with fake_server(generate=held) as server:
        client = client_of(server)
        records = asyncio.run(run())
        assert server.most_open == 8
    outcomes = sorted(record.outcome for record in records)
    assert outcomes == ["connect"] * 4 + ["ok"] * 8


def test_open_loop_arrivals_are_seeded_and_bounded_in_time() -> None:
    def dues(seed: int) -> list[float]:
        begin = time.perf_counter()
        records = asyncio.run(open_loop(client_of(server), jobs(), 100, Bounds(1000, 0.3), seed=seed, max_open=64))
        assert all(record.ttft is not None and record.ttft > 0 for record in records)
        assert max(record.due for record in records) - begin < 0.5
        due = sorted(record.due for record in records)
        return [later - earlier for earlier, later in itertools.pairwise(due)]

    with fake_server(generate=whole) as server:
        first, again = dues(5), dues(5)
    assert first == pytest.approx(again, abs=1e-6)
    assert 10 < len(first) < 60


def test_get_json_of_servers_that_have_none() -> None:
    async def run(server: FakeServer) -> list[object]:
        client = client_of(server, timeout=0.5)
        return [await client.get_json(path) for path in ("/health", "/metrics", "/nothing")]

    def prometheus(exchange: Exchange) -> None:
        exchange.answer(200, b"# HELP x\nx 1\n")

    with fake_server(health=lambda exchange: exchange.json({"status": "ok"}), metrics=prometheus) as server:
        assert asyncio.run(run(server)) == [{"status": "ok"}, None, None]
    assert asyncio.run(run(server)) == [None, None, None]
