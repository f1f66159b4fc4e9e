"""EngineClient: fan-out, errors by kind, and life after an engine's death."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from crucible.config import SamplingParams
from crucible.engine import messages as m
from crucible.engine.client import EngineClient
from crucible.errors import EngineError
from tests.engine.engines import engine
from tests.serving import eventually

ONE = SamplingParams(max_tokens=1)


def test_streams_get_their_own_events_and_only_those() -> None:
    with engine(max_batch=8, max_queue=8, step_s=0.001) as (_, client):
        results: dict[int, list[int]] = {}

        def ask(number: int) -> None:
            stream = client.submit([number], SamplingParams(max_tokens=30))
            results[number] = [event.token_id for event in stream if isinstance(event, m.TokenEvent)]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert results == {number: [number] * 30 for number in range(16)}


def test_get_returns_all_that_is_ready_and_nothing_after_the_end() -> None:
    with engine() as (_, client):
        stream = client.submit([1], SamplingParams(max_tokens=20))
        eventually(lambda: stream.inbox.qsize() == 21)
        assert len(stream.get(0)) == 21
        assert stream.get(0.01) == []


def test_cancel_after_the_end_is_nothing() -> None:
    with engine() as (_, client):
        stream = client.submit([1], ONE)
        list(stream)
        stream.cancel()
        assert client.metrics()["cancelled_requests"] == 0


class ScriptedEngine:
    """Plays an engine's part of the socket, so that it can die at will."""

    def __init__(self, path: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(path)
        self.listener.listen(4)
        self.listener.settimeout(5)

    def accept(self) -> socket.socket:
        connection, _ = self.listener.accept()
        info = m.EngineInfo(
            model_path="", device="cpu", quant="f32", dtype="float32", max_batch=1, max_queue=1, context=8,
            vocab_size=4, token_count=4, eos_token_ids=[], kv_pages=1, page_tokens=16,
        )
        connection.sendall(m.frame(m.Ready(info)))
        return connection

    def close(self) -> None:
        self.listener.close()


def test_a_dead_engine_fails_its_requests_and_its_successor_serves() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "engine")
        first = ScriptedEngine(path)
        client = EngineClient(path)
        connection = first.accept()
        assert client.wait_ready(5)
        outcome: list[object] = []

        def ask() -> None:
            stream = client.submit([1], ONE)
            outcome.extend(stream)

        thread = threading.Thread(target=ask)
        thread.start()
        submit = next(m.receive(connection, m.ToEngine))
        assert isinstance(submit, m.Submit)
        connection.sendall(m.frame(m.Accepted(submit.request_id)))
        connection.close()
        first.close()
        thread.join(5)
        assert len(outcome) == 1
        end = outcome[0]
        assert isinstance(end, m.Finished)
        assert end.finish_reason == "error"
        assert "engine stopped" in (end.error or "")
        assert not client.ready
        with pytest.raises(EngineError, match="not ready"):
            client.submit([1], ONE)
        with pytest.raises(EngineError, match="not ready"):
            client.metrics()
        assert client.info().max_batch == 1  # what it was
        os.unlink(path)
        second = ScriptedEngine(path)
        connection = second.accept()
        assert client.wait_ready(5)
        client.close()
        connection.close()
        second.close()


def test_an_engine_that_dies_before_it_answers_fails_the_submission_and_metrics() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "engine")
        scripted = ScriptedEngine(path)
        client = EngineClient(path)
        connection = scripted.accept()
        assert client.wait_ready(5)
        errors: list[str] = []

        def ask(call: str) -> None:
            try:
                client.submit([1], ONE) if call == "submit" else client.metrics(5)
            except EngineError as error:
                errors.append(str(error))

        threads = [threading.Thread(target=ask, args=(call,)) for call in ("submit", "metrics")]
        for thread in threads:
            thread.start()
        messages = m.receive(connection, m.ToEngine)
        next(messages), next(messages)
        connection.close()
        for thread in threads:
            thread.join(5)
        assert len(errors) == 2
        assert all("the engine stopped" in error for error in errors)
        client.close()
        scripted.close()


def test_a_caller_that_stops_waiting_withdraws_its_request() -> None:
    def give_up() -> None:
        raise KeyError

    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "engine")
        scripted = ScriptedEngine(path)
        client = EngineClient(path)
        connection = scripted.accept()
        assert client.wait_ready(5)
        with pytest.raises(KeyError):
            client.submit([1], ONE, waiting=give_up)
        messages = m.receive(connection, m.ToEngine)
        submit, cancel = next(messages), next(messages)
        assert isinstance(submit, m.Submit)
        assert cancel == m.Cancel(submit.request_id)
        client.close()
        connection.close()
        scripted.close()


def test_metrics_of_a_silent_engine_time_out() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "engine")
        scripted = ScriptedEngine(path)
        client = EngineClient(path)
        connection = scripted.accept()
        assert client.wait_ready(5)
        with pytest.raises(EngineError, match=r"did not answer within 0\.05 s"):
            client.metrics(timeout=0.05)
        client.close()
        connection.close()
        scripted.close()


def test_a_broken_frame_from_an_engine_is_survived() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "engine")
        scripted = ScriptedEngine(path)
        client = EngineClient(path)
        scripted.accept().sendall(b"\xff\xff\xff\xff")
        connection = scripted.accept()  # it came back
        assert client.wait_ready(5)
        client.close()
        connection.close()
        scripted.close()
