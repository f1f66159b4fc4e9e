"""The engine process: admission while a step runs, cancellation in every state, failures, slow peers."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from crucible.config import SamplingParams
from crucible.engine import connection as connection_module
from crucible.engine import messages as m
from crucible.engine.client import EngineClient
from crucible.errors import EngineError, QueueFullError, RequestError
from tests.engine.engines import engine
from tests.serving import eventually


def params(max_tokens: int, **values: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **values)  # type: ignore[arg-type]


def test_a_request_gets_its_tokens_and_its_end() -> None:
    with engine() as (_, client):
        events = list(client.submit([1, 2, 3], params(5)))
        tokens = [event.token_id for event in events if isinstance(event, m.TokenEvent)]
        assert tokens == [1, 2, 3, 1, 2]
        assert events[-1] == m.Finished(events[-1].request_id, "length", 3, 5)


def test_an_eos_is_counted_and_sends_no_token() -> None:
    with engine() as (_, client):
        events = list(client.submit([7, 256], params(9)))
        assert [type(event) for event in events] == [m.TokenEvent, m.Finished]
        assert events[-1] == m.Finished(events[-1].request_id, "stop", 2, 2)


def test_a_full_queue_is_reported_while_a_step_runs() -> None:
    with engine(step_s=1.0, max_batch=1, max_queue=1) as (_, client):
        client.submit([1], params(99))
        second = client.submit([1], params(99))
        times = []
        for count in range(1, 4):
            started = time.monotonic()
            with pytest.raises(QueueFullError, match="1 running, 1 waiting"):
                client.submit([1], params(99))
            assert client.metrics()["rejected_requests"] == count
            times.append(time.monotonic() - started)
        assert min(times) < 0.05, times
        assert max(times) < 0.5, times
        second.cancel()


def test_a_cancelled_request_frees_its_place() -> None:
    with engine(max_batch=1, max_queue=1, step_s=0.01) as (local, client):
        first, second = client.submit([1], params(9999)), client.submit([2], params(9999))
        with pytest.raises(QueueFullError):
            client.submit([3], params(1))
        second.cancel()  # while it waits
        eventually(lambda: len(local.core.requests) == 1)
        first.cancel()  # while it decodes
        assert [event.token_id for event in client.submit([3], params(1)) if isinstance(event, m.TokenEvent)] == [3]
        assert client.metrics()["cancelled_requests"] == 2


def test_a_client_that_hangs_up_cancels_only_its_requests() -> None:
    with engine(max_batch=4, step_s=0.005) as (local, client):
        other = EngineClient(local.path)
        assert other.wait_ready(5)
        kept = client.submit([1], params(100))
        for _ in range(3):
            other.submit([2], params(4000))
        other.close()
        eventually(lambda: len(local.core.requests) <= 1)
        events = list(kept)
        assert len(events) == 101
        assert events[-1].finish_reason == "length"  # type: ignore[union-attr]


def test_what_the_core_refuses_is_a_request_error_with_its_parameter() -> None:
    with engine() as (_, client):
        with pytest.raises(RequestError, match="refused by the core") as caught:
            client.submit(list(b"!refuse"), params(1))
        assert caught.value.param == "prompt"
        assert client.metrics()["rejected_requests"] == 1
        assert len(list(client.submit([1], params(1)))) == 2


def test_a_failing_step_fails_everything_live_and_ends_the_loop() -> None:
    with engine(max_batch=1, max_queue=5, step_s=0.05) as (local, client):
        prompts = [[1], list(b"!raise"), [1]]
        streams = [client.submit(prompt, params(3)) for prompt in prompts]
        ends = [list(stream)[-1] for stream in streams]
        assert [end.finish_reason for end in ends] == ["length", "error", "error"]  # type: ignore[union-attr]
        assert "RuntimeError: made to fail" in (ends[1].error or "")  # type: ignore[union-attr]
        local.loop.join(5)
        eventually(lambda: client.status.startswith("the engine failed"))
        assert isinstance(local.failure, EngineError)


def test_before_it_is_ready_an_engine_says_what_it_does_and_takes_nothing() -> None:
    with engine(start=False) as (local, client):
        eventually(lambda: client.status == "starting")
        local.process.progress("compiling kernels")
        eventually(lambda: client.status == "compiling kernels")
        with pytest.raises(EngineError, match="compiling kernels"):
            client.submit([1], params(1))
        with pytest.raises(EngineError, match="not ready"):
            client.info()
        local.loop.start()
        assert client.wait_ready(5)
        assert client.info().max_batch == 2


def test_an_idle_engine_does_not_spin() -> None:
    others = set(threading.enumerate())  # engines of earlier tests may still have work
    with engine() as (_, client):
        list(client.submit([1], params(1)))
        clocks = [time.pthread_getcpuclockid(thread.ident or 0) for thread in set(threading.enumerate()) - others]
        assert len(clocks) == 3  # step loop, I/O, client
        before = sum(map(time.clock_gettime, clocks))
        time.sleep(0.3)
        assert sum(map(time.clock_gettime, clocks)) - before < 0.05


def test_a_client_that_does_not_read_is_cut_off_and_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "MAX_BACKLOG_BYTES", 20_000)
    with engine(max_batch=8, context=10**7) as (local, client):
        deaf = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(local.path)
        deaf.sendall(m.frame(m.Submit("deaf", [1], params(10**6))))
        eventually(lambda: "deaf" in local.core.requests)
        assert len(list(client.submit([1], params(50)))) == 51
        eventually(lambda: "deaf" not in local.core.requests, timeout=20)
        deaf.close()


def test_a_slow_reader_gets_everything_in_order() -> None:
    with engine(context=10**5) as (local, _):
        slow = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(local.path)
        slow.sendall(m.frame(m.Submit("slow", [1, 2], params(20_000))))
        eventually(lambda: local.core.counters["completed_requests"] == 1, timeout=20)
        received: list[int] = []
        for message in m.receive(slow, m.FromEngine):
            if isinstance(message, m.StepOutput):
                received += [token.token_id for token in message.tokens]
                if message.finished:
                    break
        assert received == [1, 2] * 10_000
        slow.close()


def test_a_broken_frame_drops_its_sender_only() -> None:
    with engine() as (local, client):
        broken = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        broken.connect(local.path)
        broken.sendall(b"\xff\xff\xff\xff")
        broken.settimeout(5)
        while broken.recv(4096):
            pass
        assert len(list(client.submit([1], params(1)))) == 2


def test_an_id_in_use_is_refused() -> None:
    with engine(step_s=0.05) as (local, _):
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.connect(local.path)
        peer.sendall(m.frame(m.Submit("a", [1], params(9))) + m.frame(m.Submit("a", [2], params(9))))
        answers = {type(x): x for x in (x for x, _ in zip(m.receive(peer, m.FromEngine), range(3), strict=False))}
        assert "in use" in answers[m.Rejected].message
        assert len(local.core.requests) == 1
        peer.close()


def test_an_asynchronous_core_has_its_next_step_launched_before_clients_are_told() -> None:
    with engine(start=False) as (local, client):
        launched, may_publish = threading.Event(), threading.Event()

        def launch() -> None:
            launched.set()
            may_publish.wait(5)

        local.core.asynchronous, local.core.launch = True, launch  # type: ignore[method-assign]
        local.loop.start()
        assert client.wait_ready(5)
        stream = iter(client.submit([1, 2, 3], params(2)))
        assert launched.wait(5)
        first: list[object] = []
        reader = threading.Thread(target=lambda: first.append(next(stream)), daemon=True)
        reader.start()
        reader.join(0.05)
        assert not first
        may_publish.set()
        reader.join(5)
        assert isinstance(first[0], m.TokenEvent)
        assert isinstance(list(stream)[-1], m.Finished)
