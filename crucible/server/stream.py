"""Server-sent events: framing, coalescing, pings, and the one place where a stream's end cancels its request.

An event's JSON is ASCII only: clients that split lines as str.splitlines does would break at a raw U+2028 or U+0085.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator

import falcon

from crucible.server.errors import ClientGone
from crucible.server.generation import Done, Event, Generation

log = logging.getLogger(__name__)

PING_S = 5.0
"""Silence after which a comment goes out, so that proxies and clients keep the connection."""

OPENING = b": accepted\n\n"
PING = b": ping\n\n"


class EventStream:
    """An iterable of chunks for ``resp.stream``. The server calls ``close`` however the response ends, also before
    the first chunk, where a generator's ``finally`` would not run."""

    def __init__(self, generation: Generation, render: Callable[[Event], str]) -> None:
        self._generation, self._render = generation, render
        self._chunks = self._run()

    def __iter__(self) -> Iterator[bytes]:
        return self._chunks

    def close(self) -> None:
        self._chunks.close()
        self._generation.close()

    def _run(self) -> Generator[bytes, None, None]:
        yield OPENING  # headers leave with the first chunk; the first token may be far away
        try:
            for batch in self._generation.batches(PING_S):
                yield "".join(map(self._render, batch)).encode("ascii") if batch else PING
        except ClientGone:
            return
        except Exception as error:  # too late for a status: the stream itself must say that it broke
            log.exception("a stream broke")
            yield self._render(Done("error", 0, 0, "", f"{type(error).__name__}: {error}")).encode("ascii")


def respond(response: falcon.Response, stream: EventStream) -> None:
    """Make ``response`` this stream."""
    response.content_type = "text/event-stream; charset=utf-8"
    response.set_header("Cache-Control", "no-cache")
    response.set_header("X-Accel-Buffering", "no")
    response.stream = stream

