"""A streaming HTTP/1.1 client for measuring: bytes are parsed where they arrive, with no task switch per token.

The parsers know no sockets; ``Connection`` is an asyncio protocol that feeds them. Neither knows what events mean.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from crucible.errors import ConfigError

MAX_HEAD_BYTES = 2**16
MAX_LINE_BYTES = 2**20

Consumer = Callable[[bytes, float], bool]
"""Gets the body's bytes and when they were read; True hangs up."""


class ProtocolError(Exception):
    """The peer's bytes are not HTTP."""


class Disconnected(Exception):
    """The peer closed the connection before the response was complete."""


class ResponseParser:
    """One response, however its bytes are split. ``status`` is 0 until its head is complete."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self._buffer = bytearray()
        self._left = 0
        self._state = self._head

    @property
    def keep_alive(self) -> bool:
        """Whether the connection can be used again once the response is complete."""
        return self.headers.get("connection", "").lower() != "close" and self._state != self._until_close

    def feed(self, data: bytes) -> bytes:
        """The body's bytes in ``data``, without framing. Raises ProtocolError."""
        self._buffer += data
        body = bytearray()
        while not self.complete and self._state(body):
            pass
        return bytes(body)

    def end(self) -> None:
        """The peer closed. Raises Disconnected unless that is how this response ends."""
        if self._state == self._until_close:
            self.complete = True
        if not self.complete:
            raise Disconnected("the server closed the connection before its response was complete")

    def _head(self, body: bytearray) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise ProtocolError(f"a response head of more than {MAX_HEAD_BYTES} bytes")
            return False
        lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        words = lines[0].split(" ", 2)
        if not words[0].startswith("HTTP/1.") or len(words) < 2 or not words[1].isdigit():
            raise ProtocolError(f"not an HTTP/1.1 status line: {lines[0][:80]!r}")
        status = int(words[1])
        if 100 <= status < 200:  # an interim answer; the real one follows
            return True
        self.status = status
        for line in lines[1:]:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        length = self.headers.get("content-length")
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._state = self._size
        elif length is None and status not in (204, 304):
            self._state = self._until_close
        elif length is not None and not length.isdigit():
            raise ProtocolError(f"Content-Length is {length[:80]!r}")
        else:
            self._left = int(length or 0)
            self._state = self._fixed
            self.complete = self._left == 0
        return True

    def _fixed(self, body: bytearray) -> bool:
        self._take(body)
        self.complete = self._left == 0
        return False

    def _until_close(self, body: bytearray) -> bool:
        self._left = len(self._buffer)
        self._take(body)
        return False

    def _size(self, body: bytearray) -> bool:
        line = self._line()
        if line is None:
            return False
        try:
            self._left = int(line.split(b";")[0].strip(), 16)
        except ValueError:
            raise ProtocolError(f"chunk size {bytes(line[:80])!r}") from None
        self._state = self._chunk if self._left else self._trailer
        return True

    def _chunk(self, body: bytearray) -> bool:
        self._take(body)
        if self._left:
            return False
        self._state = self._chunk_end
        return True

    def _chunk_end(self, body: bytearray) -> bool:
        line = self._line()
        if line:
            raise ProtocolError("a chunk is longer than its size")
        self._state = self._size if line is not None else self._state
        return line is not None

    def _trailer(self, body: bytearray) -> bool:
        line = self._line()
        self.complete = line is not None and not line
        return bool(line)

    def _line(self) -> bytearray | None:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise ProtocolError("a chunk's size line does not end")
            return None
        line = self._buffer[:end]
        del self._buffer[: end + 2]
        return line

    def _take(self, body: bytearray) -> None:
        taken = self._buffer[: self._left]
        body += taken
        del self._buffer[: len(taken)]
        self._left -= len(taken)


class EventParser:
    """Server-sent events: ``feed`` returns (name, data) of those completed; comments are skipped.

    Lines end with LF or CRLF (a lone CR, which the standard also allows, no server sends). The name of an event that
    has none is empty.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._name = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        events = []
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_LINE_BYTES:
            raise ProtocolError("an event's line does not end")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"event:"):
                self._name = line[6:].strip()
            elif not line:
                if self._data:
                    events.append((self._name, b"\n".join(self._data)))
                self._name, self._data = b"", []
        return events


@dataclass(frozen=True)
class Address:
    """Where a server is. ``prefix`` goes before every path."""

    host: str
    port: int
    secure: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises ConfigError for what is not an http(s) URL."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ConfigError(f"{url!r} is not a URL; give one such as http://127.0.0.1:8080") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"{url!r} is not an http URL; give one such as http://127.0.0.1:8080")
        secure = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if secure else 80), secure, parts.path.rstrip("/"))

    def request(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
        """The bytes of a request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {host}:{self.port}"]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class Connection(asyncio.Protocol):
    """One connection; one exchange at a time. ``reusable``: another exchange may follow."""

    def __init__(self) -> None:
        self.reusable = False
        self.response = ResponseParser()
        self._transport: asyncio.Transport | None = None
        self._consume: Consumer | None = None
        self._done: asyncio.Future[None] | None = None

    @classmethod
    async def open(cls, address: Address) -> Connection:
        """Raises OSError."""
        context: Any = ssl.create_default_context() if address.secure else None
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, address.host, address.port, ssl=context)
        return connection

    async def exchange(self, request: bytes, consume: Consumer) -> ResponseParser:
        """Send ``request`` and give the body's bytes to ``consume`` as they come, until the end or until it hangs up.

        Returns the response (not complete after a hang-up). Raises Disconnected, ProtocolError, OSError.
        """
        self.response = ResponseParser()
        self.reusable = False
        if self._transport is None or self._transport.is_closing():
            raise Disconnected("the connection is closed")
        self._consume = consume
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        finally:
            self._done = self._consume = None
            if not self.response.complete:
                self.close()
        self.reusable = self.response.keep_alive and not self._transport.is_closing()
        return self.response

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        done = self._done
        if done is None or done.done():
            self.close()  # bytes that nobody asked for
            return
        try:
            body = self.response.feed(data)
            hang_up = bool(body) and self._consume is not None and self._consume(body, now)
        except Exception as error:
            done.set_exception(error)
            return
        if hang_up or self.response.complete:
            done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        done = self._done
        if done is None or done.done():
            return
        try:
            self.response.end()
        except Disconnected as lost:
            done.set_exception(lost)
        else:
            done.set_result(None)
