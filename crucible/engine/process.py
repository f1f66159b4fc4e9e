"""The engine process: a step loop, and an I/O thread that admits, rejects and answers while a step runs.

The I/O thread owns the sockets; it admits, rejects and cancels through the core, whose bookkeeping never waits for a
step, so neither does a 429. The step loop steps and publishes one frame a step and connection. Knows no model and no
text: the core is built by a factory named on start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from crucible.config import EngineConfig
from crucible.engine.connection import Connection
from crucible.engine.control import Control, load_object
from crucible.engine.interface import Core
from crucible.engine.messages import (
    Accepted,
    Cancel,
    Failed,
    Finished,
    MetricsReply,
    MetricsRequest,
    Ready,
    Rejected,
    Starting,
    StepOutput,
    Submit,
    TokenEvent,
)
from crucible.engine.recorder import LiveRequest, Recorder
from crucible.errors import CrucibleError, EngineError, QueueFullError, RequestError

log = logging.getLogger(__name__)


class EngineProcess:
    """Serves one core to every connection of ``listener`` (a listening AF_UNIX stream socket)."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._connections: set[Connection] = set()
        self._live: dict[str, LiveRequest] = {}
        self._recorder = Recorder()
        self._core: Core | None = None  # None until it is ready and once it has failed
        self._progress = "starting"
        self._rejected = 0
        self._step_started = 0.0  # written by the step loop; 0: idle
        self._selector = selectors.DefaultSelector()
        self._poke_in, self._poke_out = socket.socketpair()

    # -- step loop -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the I/O thread: from here on connections are accepted and told how loading goes."""
        threading.Thread(target=self._serve, name="engine-io", daemon=True).start()

    def progress(self, message: str) -> None:
        """Pass a line about loading to every connection."""
        with self._changed:
            self._progress = message
            for connection in self._connections:
                connection.send(Starting(message))

    def run(self, core: Core) -> None:
        """Step ``core`` for as long as it works. Raises EngineError once it has failed, after telling everyone."""
        with self._changed:
            self._core = core
            for connection in self._connections:
                connection.send(Ready(core.engine_info()))
        try:
            while True:
                with self._changed:
                    while not core.has_work():
                        self._step_started = 0.0
                        self._changed.wait()
                self._step_started = started = time.monotonic()
                output = core.step()
                self._note_admissions(core, started)
                if core.asynchronous:
                    core.launch()  # the device computes while clients are told
                self._publish(output)
        except Exception as error:
            message = str(error) if isinstance(error, CrucibleError) else f"the engine failed: {error!r}"
            if not isinstance(error, CrucibleError):
                log.exception("engine step failed")
            self._fail_all(message)
            raise EngineError(message) from error

    def _note_admissions(self, core: Core, started: float) -> None:
        with self._changed:
            if self._recorder.queued:
                self._recorder.admitted(int(core.metrics()["queued_requests"]), started)

    def _publish(self, output: StepOutput) -> None:
        """One frame a connection; what belongs to requests of clients that are gone is dropped."""
        shares: dict[Connection, tuple[list[TokenEvent], list[Finished]]] = {}
        now = time.monotonic()
        rows = len(output.tokens)
        with self._changed:
            live, recorder = self._live, self._recorder
            for token in output.tokens:
                if (request := live.get(token.request_id)) is not None:
                    recorder.token(request, now)
                    shares.setdefault(request.connection, ([], []))[0].append(token)
            for finished in output.finished:
                rows += finished.finish_reason == "stop"  # its last token is not sent
                if (request := live.pop(finished.request_id, None)) is not None:
                    recorder.finished(request, finished, now)
                    request.connection.requests.discard(finished.request_id)
                    shares.setdefault(request.connection, ([], []))[1].append(finished)
            recorder.step(rows)
        for connection, (tokens, finished_requests) in shares.items():
            connection.send(StepOutput(tokens, finished_requests))

    def _fail_all(self, message: str) -> None:
        with self._changed:
            self._core = None
            self._progress = message
            shares: dict[Connection, list[Finished]] = {}
            for request_id, request in self._live.items():
                shares.setdefault(request.connection, []).append(Finished(request_id, "error", 0, 0, message))
            self._live.clear()
            connections = list(self._connections)
        for connection in connections:
            connection.send(StepOutput([], shares.get(connection, [])))
            connection.send(Failed(message))
            connection.flush(seconds=1.0)

    # -- I/O thread ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._listener.setblocking(False)
        self._poke_out.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._poke_out, selectors.EVENT_READ, self._poked)
        while True:
            for key, events in self._selector.select():
                if isinstance(key.data, Connection):
                    self._serve_connection(key.data, events)
                else:
                    key.data()

    def _poke(self) -> None:
        self._poke_in.send(b"\0")

    def _poked(self) -> None:
        self._poke_out.recv(4096)
        with self._changed:
            connections = list(self._connections)
        for connection in connections:
            self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.backlog else 0)
        self._selector.modify(connection.socket, events, connection)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return
        connection = Connection(accepted, self._poke)
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        with self._changed:
            self._connections.add(connection)
            connection.send(Starting(self._progress) if self._core is None else Ready(self._core.engine_info()))

    def _serve_connection(self, connection: Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            connection.flush()
            self._watch(connection)
        if events & selectors.EVENT_READ:
            try:
                messages = connection.read()
            except CrucibleError as error:
                log.warning("dropping a client: %s", error)
                messages = None
            if messages is None:
                self._drop(connection)
                return
            for message in messages:
                if isinstance(message, Submit):
                    self._submit(connection, message)
                elif isinstance(message, Cancel):
                    self._cancel(connection, message.request_id)
                elif isinstance(message, MetricsRequest):
                    connection.send(self._report(message.number))

    def _submit(self, connection: Connection, submit: Submit) -> None:
        answer: Accepted | Rejected
        # Under the lock, so that the step loop finds the owner of the first token, and sends it after the answer.
        with self._changed:
            core = self._core
            if core is None:
                text = f"the engine is not ready ({self._progress})"
                answer = Rejected(submit.request_id, "unavailable", text)
            else:
                answer = self._admit(core, submit)
            if isinstance(answer, Accepted):
                self._live[submit.request_id] = request = LiveRequest(connection, time.monotonic())
                self._recorder.submitted(submit.request_id, request)
                connection.requests.add(submit.request_id)
                self._changed.notify()
            else:
                self._rejected += 1
            connection.send(answer)

    def _admit(self, core: Core, submit: Submit) -> Accepted | Rejected:
        request_id = submit.request_id
        if request_id in self._live:
            return Rejected(request_id, "invalid", f"request id {request_id!r} is in use")
        try:
            core.add_request(request_id, submit.token_ids, submit.params, cache_salt=submit.cache_salt)
        except RequestError as error:
            return Rejected(request_id, "invalid", str(error), error.param)
        except QueueFullError as error:
            return Rejected(request_id, "queue_full", str(error))
        except EngineError as error:
            return Rejected(request_id, "unavailable", str(error))
        return Accepted(request_id)

    def _cancel(self, connection: Connection, request_id: str) -> None:
        with self._changed:
            request = self._live.get(request_id)
            if self._core is not None and request is not None and request.connection is connection:
                self._core.cancel(request_id)
                self._recorder.withdrawn(request_id)
                self._changed.notify()

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.close()
        with self._changed:
            self._connections.discard(connection)
        for request_id in list(connection.requests):
            self._cancel(connection, request_id)

    def _report(self, number: int) -> MetricsReply:
        with self._changed:
            core, started = self._core, self._step_started
            histograms = self._recorder.values()
        values = {} if core is None else core.metrics()
        values["rejected_requests"] = self._rejected
        values["step_age_s"] = round(time.monotonic() - started, 3) if started else 0.0
        return MetricsReply(number, values, histograms)


def core_from_checkpoint(progress: Callable[[str], None], *, path: str, config: Mapping[str, Any]) -> Core:
    """The usual factory: an EngineCore over the checkpoint at ``path``; ``config`` holds EngineConfig's fields."""
    from crucible.engine.core import EngineCore

    core: Core = EngineCore.from_checkpoint(Path(path), EngineConfig(**config), progress)
    return core


def _remove_socket(path: str) -> None:
    """A supervisor that was killed could not; its directory holds nothing else."""
    with contextlib.suppress(OSError):
        os.unlink(path)
        os.rmdir(os.path.dirname(path))


def run_engine(control: socket.socket, *, listener: socket.socket, factory: str, arguments: Mapping[str, Any]) -> None:
    """Entry point of the child. ``factory`` is ``module:function``, called as factory(progress, **arguments) → Core."""
    logging.basicConfig(format="crucible-serve: %(levelname)s: %(message)s")
    line = Control(control)
    line.watch(on_orphaned=lambda: _remove_socket(listener.getsockname()))
    process = EngineProcess(listener)
    process.start()

    def progress(message: str) -> None:
        line.report(Starting(message))
        process.progress(message)

    try:
        core = load_object(factory)(progress, **arguments)
        line.report(Ready(core.engine_info()))
        process.run(core)
    except CrucibleError as error:
        line.report(Failed(str(error)))
        sys.exit(1)
    except Exception as error:
        log.exception("the engine could not start")
        line.report(Failed(f"{type(error).__name__}: {error}".splitlines()[0]))
        sys.exit(1)
