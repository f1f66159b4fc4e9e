"""One client of an engine process: a non-blocking socket with a bounded backlog of what it has not taken yet."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import msgspec

from crucible.engine.messages import FrameReader, Message, ToEngine, frame

MAX_BACKLOG_BYTES = 64 * 2**20
"""A client that leaves this much unread is stuck; its connection is cut so that the step loop never waits for it."""


class Connection:
    """``send`` never blocks and may be called from any thread; ``read``, ``flush`` and ``close`` by the I/O thread.

    ``on_backlog`` is called when bytes are left for the I/O thread to flush.
    """

    def __init__(self, connection: socket.socket, on_backlog: Callable[[], None]) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.requests: set[str] = set()
        self._reader = FrameReader(ToEngine)
        self._on_backlog = on_backlog
        self._lock = threading.Lock()
        self._backlog = bytearray()
        self._closed = False

    @property
    def backlog(self) -> int:
        """Bytes not taken by the peer yet."""
        return len(self._backlog)

    def send(self, message: msgspec.Struct) -> None:
        data = frame(message)
        with self._lock:
            if self._closed:
                return
            had_backlog = bool(self._backlog)
            self._backlog += data
            if len(self._backlog) > MAX_BACKLOG_BYTES:
                self._hang_up()
                return
            if not had_backlog:
                self._write()
            left = bool(self._backlog)
        if left and not had_backlog:
            self._on_backlog()

    def flush(self, seconds: float = 0.0) -> None:
        """Send what waits; with ``seconds``, wait that long for a slow peer (used once, before the process ends)."""
        with self._lock:
            if seconds and not self._closed:
                self.socket.settimeout(seconds)
            self._write()

    def _write(self) -> None:
        try:
            while self._backlog:
                del self._backlog[: self.socket.send(self._backlog)]
        except (BlockingIOError, TimeoutError):
            pass
        except OSError:
            self._hang_up()

    def _hang_up(self) -> None:
        """Give the peer up; the I/O thread then reads an end of file and drops the connection."""
        self._backlog.clear()
        self._closed = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def read(self) -> list[Message] | None:
        """Messages that have arrived, ``None`` at the end of file. Raises EngineError on a broken frame."""
        try:
            data = self.socket.recv(2**18)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        return list(self._reader.feed(data)) if data else None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._backlog.clear()
            self.socket.close()
