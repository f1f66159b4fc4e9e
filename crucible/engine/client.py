"""EngineClient: an http worker's (or test's) end of the stream to one engine process.

One reader thread fans messages out to the streams of the requests they belong to. When the engine dies, exactly its
requests fail, and the thread connects to whichever engine next listens on the same path. Imports no kernels.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from crucible.config import SamplingParams
from crucible.engine.messages import (
    Accepted,
    Cancel,
    EngineInfo,
    Failed,
    Finished,
    FromEngine,
    Metrics,
    MetricsReply,
    MetricsRequest,
    Ready,
    Rejected,
    Starting,
    StepOutput,
    Submit,
    TokenEvent,
    frame,
    receive,
)
from crucible.errors import EngineError, QueueFullError, RequestError

POLL_S = 0.2
"""How often a waiting caller's ``waiting`` callback runs."""

Event: TypeAlias = TokenEvent | Finished


class Stream:
    """The events of one accepted request. Used by one thread; ``cancel`` by any."""

    def __init__(self, request_id: str, cancel: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.inbox: queue.SimpleQueue[Accepted | Rejected | Event] = queue.SimpleQueue()
        self._cancel = cancel
        self._done = False

    def get(self, timeout: float | None = None) -> list[Event]:
        """All events that are ready, waiting up to ``timeout`` seconds for the first; [] when it passed or at the end.

        The last event of a request is its Finished.
        """
        events: list[Event] = []
        if self._done:
            return events
        try:
            event = self.inbox.get(timeout=timeout)
            while True:
                if isinstance(event, (TokenEvent, Finished)):
                    events.append(event)
                    self._done = isinstance(event, Finished)
                event = self.inbox.get_nowait()
        except queue.Empty:
            return events

    def __iter__(self) -> Iterator[Event]:
        while not self._done:
            yield from self.get()

    def cancel(self) -> None:
        """Withdraw the request; nothing when it has ended."""
        if not self._done:
            self._done = True
            self._cancel(self.request_id)


class EngineClient:
    """Connects to the engine that listens on ``path`` and stays connected to its successors."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()  # guards the fields below and writes to the socket
        self._socket: socket.socket | None = None
        self._streams: dict[str, Stream] = {}
        self._replies: dict[int, queue.SimpleQueue[MetricsReply | None]] = {}
        self._info: EngineInfo | None = None
        self._last_info: EngineInfo | None = None
        self._status = "connecting"
        self._closed = threading.Event()
        self._prefix = os.urandom(6).hex()  # makes ids unique over all workers of an engine
        self._numbers = itertools.count(1)
        self._ready = threading.Event()
        self._heard = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine-client", daemon=True)
        self._thread.start()

    # -- callers -------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    @property
    def status(self) -> str:
        """One line about an engine that is not ready: what it is loading, or that it is gone."""
        return self._status

    @property
    def silence_s(self) -> float:
        """Seconds since the engine last sent anything."""
        return time.monotonic() - self._heard

    def wait_ready(self, timeout: float | None = None) -> bool:
        return self._ready.wait(timeout)

    def info(self) -> EngineInfo:
        """What the engine is (of the last one, while its successor loads). Raises EngineError before the first."""
        if self._last_info is None:
            raise EngineError(f"the engine is not ready: {self._status}")
        return self._last_info

    def submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        waiting: Callable[[], None] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> Stream:
        """Queue a request and return its stream once the engine has taken it.

        ``waiting`` is called a few times a second until then; an exception it raises withdraws the request. It shares
        cached KV with requests of the same ``cache_salt`` only. Raises RequestError, QueueFullError, or EngineError
        when no engine is ready or it died.
        """
        stream = Stream(f"{self._prefix}{next(self._numbers)}", self._withdraw)
        request = frame(Submit(stream.request_id, list(token_ids), params, cache_salt))
        with self._lock:
            if self._info is None:
                raise EngineError(f"the engine is not ready: {self._status}")
            self._streams[stream.request_id] = stream
            self._write(request)
        try:
            answer = self._answer(stream, waiting)
        except BaseException:
            stream.cancel()
            raise
        if isinstance(answer, Accepted):
            return stream
        with self._lock:
            self._streams.pop(stream.request_id, None)
        if isinstance(answer, Finished):
            raise EngineError(answer.error or "the engine failed")
        if answer.reason == "invalid":
            raise RequestError(answer.message, answer.param)
        raise (QueueFullError if answer.reason == "queue_full" else EngineError)(answer.message)

    @staticmethod
    def _answer(stream: Stream, waiting: Callable[[], None] | None) -> Accepted | Rejected | Finished:
        while True:
            try:
                answer = stream.inbox.get(timeout=POLL_S)
            except queue.Empty:
                if waiting is not None:
                    waiting()
                continue
            if not isinstance(answer, TokenEvent):
                return answer

    def metrics(self, timeout: float = 2.0) -> Metrics:
        """The engine's counters. Raises EngineError when there is none or it does not answer in time."""
        return self.report(timeout).values

    def report(self, timeout: float = 2.0) -> MetricsReply:
        """The same with the histograms."""
        reply: queue.SimpleQueue[MetricsReply | None] = queue.SimpleQueue()
        number = next(self._numbers)
        with self._lock:
            if self._info is None:
                raise EngineError(f"the engine is not ready: {self._status}")
            self._replies[number] = reply
            self._write(frame(MetricsRequest(number)))
        try:
            answer = reply.get(timeout=timeout)
        except queue.Empty:
            raise EngineError(f"the engine did not answer within {timeout:g} s") from None
        finally:
            self._replies.pop(number, None)
        if answer is None:
            raise EngineError("the engine stopped")
        return answer

    def close(self) -> None:
        """Hang up and stop the reader; live requests fail."""
        with self._lock:
            self._closed.set()
            if self._socket is not None:
                self._hang_up(self._socket)
        self._thread.join(timeout=5)

    def _withdraw(self, request_id: str) -> None:
        with self._lock:
            if self._streams.pop(request_id, None) is not None:
                self._write(frame(Cancel(request_id)))

    def _write(self, data: bytes) -> None:
        """Send under the lock. A dead engine is the reader's to notice: it fails whatever waits."""
        if self._socket is None:
            return
        try:
            self._socket.sendall(data)
        except OSError:
            self._hang_up(self._socket)

    @staticmethod
    def _hang_up(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    # -- reader thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = 0.02
        while not self._closed.is_set():
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(self._path)
                with self._lock:
                    self._socket = connection
                if self._closed.is_set():
                    break
                for message in receive(connection, FromEngine):
                    pause = 0.02
                    self._deliver(message)
            except (OSError, EngineError) as error:
                self._status = f"no connection to the engine: {error}"
            finally:
                self._lost(connection)
            self._closed.wait(pause)
            pause = min(2 * pause, 1.0)

    def _deliver(self, message: object) -> None:
        self._heard = time.monotonic()
        if isinstance(message, StepOutput):
            streams = self._streams
            for token in message.tokens:
                if (stream := streams.get(token.request_id)) is not None:
                    stream.inbox.put(token)
            for finished in message.finished:
                with self._lock:
                    ended = streams.pop(finished.request_id, None)
                if ended is not None:
                    ended.inbox.put(finished)
        elif isinstance(message, (Accepted, Rejected)):
            if (stream := self._streams.get(message.request_id)) is not None:
                stream.inbox.put(message)
        elif isinstance(message, MetricsReply):
            if (reply := self._replies.get(message.number)) is not None:
                reply.put(message)
        elif isinstance(message, Ready):
            with self._lock:
                self._info = self._last_info = message.info
            self._status = "ready"
            self._ready.set()
        elif isinstance(message, Starting):
            self._status = message.message
        elif isinstance(message, Failed):
            with self._lock:
                self._info = None
            self._ready.clear()
            self._status = message.message

    def _lost(self, connection: socket.socket) -> None:
        with self._lock:
            self._socket = None
            was_ready, self._info = self._info is not None, None
            self._ready.clear()
            streams, self._streams = self._streams, {}
            replies = list(self._replies.values())
            connection.close()
        if was_ready:  # it died without a word
            self._status = "the engine stopped and is being restarted"
        for stream in streams.values():
            message = "the engine stopped while it served this request"
            stream.inbox.put(Finished(stream.request_id, "error", 0, 0, message))
        for reply in replies:
            reply.put(None)
