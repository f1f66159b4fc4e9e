"""A scripted HTTP server: a test says byte for byte what each path answers. Standard library only."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Script = Callable[["Exchange"], None]


@dataclass
class Exchange:
    """One request and the way to answer it. ``number`` counts requests to the path, from 0."""

    server: FakeServer
    connection: socket.socket
    path: str
    body: Any
    number: int

    def raw(self, data: bytes) -> None:
        self.connection.sendall(data)

    def answer(self, status: int, body: bytes = b"", headers: str = "") -> None:
        self.raw(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body)

    def json(self, value: Any, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode())

    def start_stream(self) -> None:
        self.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        self.raw(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def native(self, tokens: int, *, pause: Callable[[], None] | None = None) -> None:
        """A whole native stream; a hang-up of the client is noted in ``server.hang_ups``."""
        self.start_stream()
        self.chunk(b": accepted\n\n")
        try:
            for _ in range(tokens):
                if pause is not None:
                    pause()
                self.chunk(b'event: token\ndata: {"token_id":5,"text":"a"}\n\n')
        except OSError:
            self.server.hang_ups += 1
            raise
        done = {"finish_reason": "length", "tokens_generated": tokens, "text": ""}
        self.chunk(b"event: done\ndata: " + json.dumps(done).encode() + b"\n\n")
        self.chunk(b"")

    def close(self) -> None:
        """Close at once, without what is still to come."""
        self.connection.shutdown(socket.SHUT_RDWR)


@dataclass
class FakeServer:
    scripts: dict[str, Script]
    url: str = ""
    hang_ups: int = 0
    connections: int = 0
    open: int = 0
    most_open: int = 0
    bodies: list[Any] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    _counts: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as reader:
            while request := read_request(reader):
                path, body = request
                with self._lock:
                    number = self._counts.get(path, 0)
                    self._counts[path] = number + 1
                    self.bodies.append(body)
                    self.open += body is not None
                    self.most_open = max(self.most_open, self.open)
                exchange = Exchange(self, connection, path, body, number)
                try:
                    self.scripts.get(path, lambda e: e.answer(404))(exchange)
                finally:
                    with self._lock:
                        self.open -= body is not None


def read_request(reader: Any) -> tuple[str, Any] | None:
    line = reader.readline().decode()
    if not line:
        return None
    length = 0
    while (header := reader.readline().decode().strip()):
        name, _, value = header.partition(":")
        length = int(value) if name.lower() == "content-length" else length
    return line.split(" ")[1], json.loads(reader.read(length)) if length else None


@contextlib.contextmanager
def fake_server(**scripts: Script) -> Iterator[FakeServer]:
    """``generate``, ``completions``, ``health``, ``metrics``: scripts of those routes."""
    routes = {
        "generate": "/v1/generate/stream",
        "completions": "/v1/completions",
        "health": "/health",
        "metrics": "/metrics",
    }
    server = FakeServer({routes[name]: script for name, script in scripts.items()})
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        server.url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(5)
                server.connections += 1
                threading.Thread(target=server.serve, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)


def in_turn(scripts: Sequence[Script]) -> Script:
    """Each request to a path gets the next script, the last one again and again."""
    return lambda exchange: scripts[min(exchange.number, len(scripts) - 1)](exchange)
