"""waitress, made to fit: sized so that streams never starve /health, strict about framing, JSON for its own errors."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser, ParsingError
from waitress.server import TcpWSGIServer
from waitress.task import ErrorTask, ThreadedTaskDispatcher
from waitress.utilities import RequestEntityTooLarge

from crucible.server.errors import ApiError, body_of

MAX_BODY_BYTES = 16 * 2**20
MAX_HEADER_BYTES = 64 * 2**10
MAX_DISCARD_BYTES = 2**30
"""A body above MAX_BODY_BYTES is read to its end and dropped, so that the client gets to read its 413; one that
announces more than this is cut off at once."""

RESERVED_THREADS = 16
"""Threads beyond max_batch + max_queue: for /health, /metrics and rejections when every stream is taken."""

HEADER_S, BODY_S, IDLE_S = 30, 300, 60
"""Seconds a client may take to send headers, a body, or its next request."""


class Parser(HTTPRequestParser):  # type: ignore[misc]
    """RFC 9112 where waitress is lenient: one Host, and never both length headers."""

    discarding = 0
    expect_continue: bool

    def __init__(self, adj: Adjustments) -> None:
        super().__init__(adj)
        self.started = time.time()

    def parse_header(self, header_plus: bytes) -> None:
        super().parse_header(header_plus)
        if self.error is not None or not hasattr(self, "path"):
            return
        if "CONTENT_LENGTH" in self.headers and (self.chunked or "TRANSFER_ENCODING" in self.headers):
            raise ParsingError("Content-Length and Transfer-Encoding together are ambiguous")
        host = self.headers.get("HOST")
        if (self.version == "1.1" and host is None) or "," in (host or ""):
            raise ParsingError("a request needs exactly one Host header")

    def received(self, data: bytes) -> int:
        if self.discarding:
            taken = min(len(data), self.discarding)
            self.discarding -= taken
            self.completed = not self.discarding
            return taken
        consumed: int = super().received(data)
        if self.completed and self.error is not None:
            if isinstance(self.error, RequestEntityTooLarge) and not self.expect_continue:
                self.body_rcv = None
                self.discarding = self.content_length if self.content_length <= MAX_DISCARD_BYTES else 0
                self.completed = not self.discarding
            self.expect_continue = False  # a refused body must not be asked for
        return consumed


class JsonErrorTask(ErrorTask):  # type: ignore[misc]
    """waitress's own refusals (framing, sizes) in the surface's error shape."""

    def execute(self) -> None:
        refusal = self.request.error
        message = " ".join(str(refusal.body).split())
        if refusal.code == 413:
            message = f"the body is larger than {MAX_BODY_BYTES} bytes"
        error = ApiError(refusal.code, message)
        body = body_of(error, getattr(self.request, "path", "") or "")
        self.status = f"{refusal.code} {refusal.reason}"
        self.response_headers.append(("Content-Type", "application/json"))
        self.set_close_on_finish()
        self.content_length = len(body)
        self.write(b"" if getattr(self.request, "command", "") == "HEAD" else body)


class Channel(HTTPChannel):  # type: ignore[misc]
    error_task_class = JsonErrorTask
    parser_class = Parser


class HttpServer(TcpWSGIServer):  # type: ignore[misc]
    """Serves ``application`` on a bound socket that other workers may share."""

    channel_class = Channel

    def __init__(self, application: Callable[..., Any], listener: socket.socket, streams: int) -> None:
        adjustments = Adjustments(
            sockets=[listener],
            threads=streams + RESERVED_THREADS,
            connection_limit=_connection_limit(),
            channel_request_lookahead=1,  # keeps reading, so that a disconnect is seen while a request is served
            asyncore_use_poll=True,
            recv_bytes=65536,
            max_request_body_size=MAX_BODY_BYTES,
            max_request_header_size=MAX_HEADER_BYTES,
            inbuf_overflow=MAX_BODY_BYTES,
            channel_timeout=IDLE_S,
            cleanup_interval=5,
            log_socket_errors=False,
            ident="crucible",
        )
        dispatcher = ThreadedTaskDispatcher()
        dispatcher.set_thread_count(adjustments.threads)
        address = (listener.family, listener.type, listener.proto, listener.getsockname())
        super().__init__(
            application, {}, True, listener, dispatcher=dispatcher, adj=adjustments, sockinfo=address, bind_socket=False
        )

    def maintenance(self, now: float) -> None:
        """Also drops clients that drip a request so slowly that they never count as idle."""
        super().maintenance(now)
        for channel in self.active_channels.values():
            request = channel.request
            if request is not None and not channel.requests:
                limit = BODY_S if request.headers_finished else HEADER_S
                if now - request.started > limit:
                    channel.will_close = True

    def stop_accepting(self) -> None:
        """From any thread: close this process's copy of the listening socket."""

        def close() -> None:
            known = -1
            while known != len(self._map):  # whoever has connected is answered, not reset
                known = len(self._map)
                self.handle_accept()
            self.accepting = False
            self.del_channel()
            with contextlib.suppress(OSError):
                self.socket.close()

        self.trigger.pull_trigger(close)

    @property
    def busy(self) -> bool:
        """Whether a request is being served or an answer is not sent yet."""
        channels = list(self.active_channels.values())
        return any(channel.requests or channel.total_outbufs_len for channel in channels)


def _connection_limit() -> int:
    """As many connections as file descriptors allow, up to 4096; idle ones must not keep others out."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8192 if hard == resource.RLIM_INFINITY else min(hard, 8192)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(64, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 128))
