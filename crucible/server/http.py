"""waitress, made to fit: sized so that streams never starve /health, strict about framing, JSON for its own errors."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser, ParsingError
from waitress.receiver import ChunkedReceiver
from waitress.server import TcpWSGIServer
from waitress.task import ErrorTask, ThreadedTaskDispatcher, WSGITask
from waitress.utilities import BadRequest, RequestEntityTooLarge

from crucible.server.errors import ApiError, body_of

MAX_BODY_BYTES = 16 * 2**20
MAX_HEADER_BYTES = 64 * 2**10
MAX_DISCARD_BYTES = 2**30
"""A body above MAX_BODY_BYTES is read to its end and dropped, so that the client gets to read its 413; one that
announces more than this is cut off at once."""

RESERVED_THREADS = 16
"""Threads beyond max_batch + max_queue: for /health, /metrics and rejections when every stream is taken. A request
holds a thread from its last byte to its answer's last; those that hold one for long are the ones that the engine has
accepted, and that is at most max_batch + max_queue of all workers together."""

HEADER_S, BODY_S, IDLE_S = 30, 300, 60
"""Seconds a client may take to send headers, a body, or its next request."""


LINGER_S = 2.0
"""How long a connection that the server ends goes on taking and dropping what its client still sends: a close with
bytes unread would be a reset, which can destroy the answer before it is read."""

MAX_CONTROL_BYTES = 16 * 2**10
"""Bytes of a chunk's size line, and of the trailer. waitress searches them anew with each packet."""

MAX_BODY_IN_MEMORY = 2**20
"""A larger body goes to a temporary file while it arrives."""

HALF_SENT_S = 5.0
LOOK_S, QUIET_LOOKS = 0.05, 3
"""A drained worker leaves after being idle so many times in a row, so far apart."""


class Parser(HTTPRequestParser):  # type: ignore[misc]
    """RFC 9112 where waitress is lenient: one Host, and never both length headers."""

    body_rcv: Any
    discarding = 0
    expect_continue: bool

    def __init__(self, adj: Adjustments) -> None:
        super().__init__(adj)
        self.started = time.time()

    def parse_header(self, header_plus: bytes) -> None:
        try:
            super().parse_header(header_plus)
        except ValueError:  # more digits than int() takes, a URL that cannot be split
            raise ParsingError("the request's first line or a header is malformed") from None
        if self.error is not None or not hasattr(self, "path"):
            return
        if "CONTENT_LENGTH" in self.headers and (self.chunked or "TRANSFER_ENCODING" in self.headers):
            raise ParsingError("Content-Length and Transfer-Encoding together are ambiguous")
        if self.version not in ("1.0", "1.1"):
            raise ParsingError("the server speaks HTTP/1.1 and 1.0")
        if "TRANSFER_ENCODING" in self.headers:  # still there: waitress takes it from HTTP/1.1 only
            raise ParsingError("HTTP/1.0 has no Transfer-Encoding")
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
        body = self.body_rcv
        if self.completed and body is None:
            self.expect_continue = False  # there is nothing to go on with
        if isinstance(body, ChunkedReceiver) and max(len(body.control_line), len(body.trailer)) > MAX_CONTROL_BYTES:
            self.error = BadRequest("a chunk's size line or the trailer is too long")
            self.completed = True
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


class Task(WSGITask):  # type: ignore[misc]
    """Once the server drains, answers say that their connection is done with."""

    def service(self) -> None:
        if self.channel.server.draining:
            self.set_close_on_finish()
        super().service()


class Channel(HTTPChannel):  # type: ignore[misc]
    """Ends a connection by halves: see LINGER_S."""

    task_class = Task
    error_task_class = JsonErrorTask
    parser_class = Parser
    lingers_until: float | None = None
    _answered = False

    def handle_write(self) -> None:
        self._answered = self.close_when_flushed and not self.will_close
        super().handle_write()
        self._answered = False

    def handle_close(self) -> None:
        if self._answered and self.connected and not self.total_outbufs_len:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)
                self.will_close = False
                self.lingers_until = time.time() + LINGER_S
                return
        super().handle_close()

    def received(self, data: bytes) -> bool:
        return self.lingers_until is None and bool(super().received(data))


class HttpServer(TcpWSGIServer):  # type: ignore[misc]
    """Serves ``application`` on a bound socket that other workers may share."""

    channel_class = Channel
    draining = False

    def __init__(self, application: Callable[..., Any], listener: socket.socket, streams: int) -> None:
        adjustments = Adjustments(
            sockets=[listener],
            threads=streams + RESERVED_THREADS,
            connection_limit=2**20,  # ours makes room instead of keeping everybody out
            channel_request_lookahead=1,  # keeps reading, so that a disconnect is seen while a request is served
            asyncore_use_poll=True,
            recv_bytes=65536,
            max_request_body_size=MAX_BODY_BYTES,
            max_request_header_size=MAX_HEADER_BYTES,
            inbuf_overflow=MAX_BODY_IN_MEMORY,
            channel_timeout=IDLE_S,
            cleanup_interval=1,
            log_socket_errors=False,
            ident="crucible",
        )
        self.most_connections = _connection_limit()
        dispatcher = ThreadedTaskDispatcher()
        dispatcher.set_thread_count(adjustments.threads)
        address = (listener.family, listener.type, listener.proto, listener.getsockname())
        super().__init__(
            application, {}, True, listener, dispatcher=dispatcher, adj=adjustments, sockinfo=address, bind_socket=False
        )

    def handle_accept(self) -> None:
        """Over the limit, the connection goes that has been silent longest and is not being served."""
        super().handle_accept()
        channels = self.active_channels
        if len(channels) > self.most_connections:
            idle = [channel for channel in channels.values() if not (channel.requests or channel.will_close)]
            if idle:
                min(idle, key=lambda channel: channel.last_activity).will_close = True

    def maintenance(self, now: float) -> None:
        """Also drops clients that drip a request so slowly that they never count as idle, or do not hang up."""
        super().maintenance(now)
        for channel in self.active_channels.values():
            request = channel.request
            if channel.lingers_until is not None and now > channel.lingers_until:
                channel.will_close = True
            if request is not None and not channel.requests:
                limit = BODY_S if request.headers_finished else HEADER_S
                if now - request.started > limit:
                    channel.will_close = True

    def stop_accepting(self) -> None:
        """From any thread: close this process's copy of the listening socket."""
        self.draining = True

        def close() -> None:
            connected = select.poll()
            connected.register(self.socket, select.POLLIN)
            while connected.poll(0):  # whoever has connected is answered, not reset
                self.handle_accept()
            self.accepting = False
            self.del_channel()
            with contextlib.suppress(OSError):
                self.socket.close()

        self.trigger.pull_trigger(close)

    def leave_when_idle(self, leave: Callable[[], None]) -> None:
        """After ``stop_accepting``, wait until nobody is served, and call ``leave`` on the thread that reads.

        On that thread, so that no request arrives between the last look and the end.
        """
        quiet = 0

        def look() -> None:
            nonlocal quiet
            self.maintenance(time.time())  # which the closed listener called
            quiet = 0 if self.busy else quiet + 1
            if quiet == QUIET_LOOKS:
                leave()

        while quiet < QUIET_LOOKS:
            time.sleep(LOOK_S)
            self.trigger.pull_trigger(look)

    @property
    def busy(self) -> bool:
        """Whether a request is being served, an answer is not sent yet, or bytes have come that nobody has read.

        A client that stops in the middle of a request counts for HALF_SENT_S after its last byte.
        """
        poll, now = select.poll(), time.time()
        for channel in list(self.active_channels.values()):
            half_sent = channel.request is not None and now - channel.last_activity < HALF_SENT_S
            ending = channel.close_when_flushed or channel.lingers_until is not None
            if channel.requests or channel.total_outbufs_len or half_sent or ending:
                return True
            poll.register(channel.socket, select.POLLIN)
        return bool(poll.poll(0))


def _connection_limit() -> int:
    """As many connections as file descriptors allow, up to 4096."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8192 if hard == resource.RLIM_INFINITY else min(hard, 8192)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(64, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 128))
