"""A generation as the routes see it: text pieces out of an engine's stream, and a client that may be gone.

Every surface builds on this; none of them touches the engine's events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from crucible.config import SamplingParams
from crucible.engine.client import POLL_S, EngineClient, Stream
from crucible.engine.messages import EngineInfo, Finished, TokenEvent
from crucible.errors import RequestError
from crucible.server.errors import ClientGone
from crucible.server.text import Decoder


class Piece(NamedTuple):
    """One token and the text that became certain with it."""

    token_id: int
    text: str


class Done(NamedTuple):
    """The end. ``text`` is what the decoder still held; ``error`` is set when ``finish_reason`` is ``error``."""

    finish_reason: str
    prompt_tokens: int
    tokens_generated: int
    text: str
    error: str | None
    cached_tokens: int = 0


Event: TypeAlias = Piece | Done


def check_prompt(token_ids: Sequence[int], info: EngineInfo, param: str) -> None:
    """Raises RequestError unless these ids can be served with at least one token to follow."""
    if not token_ids:
        raise RequestError("the prompt is empty", param)
    if len(token_ids) >= room(info):  # first: a body has room for millions of ids
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens and leaves no room in the context of {room(info)}", param
        )
    for token_id in token_ids:
        if not 0 <= token_id < info.token_count:
            raise RequestError(f"token id {token_id} lies outside 0 … {info.token_count - 1}", param)


def choose_max_tokens(asked: int | None, prompt_tokens: int, info: EngineInfo, default: int | None) -> int:
    """``asked``, refused where it does not fit; absent, ``default`` (``None``: no limit) or the room that is left."""
    left = room(info) - prompt_tokens
    if asked is None:
        return left if default is None else min(default, left)
    if asked > left:
        raise RequestError(
            f"max_tokens is {asked}, but after {prompt_tokens} prompt tokens the context of {room(info)} has room "
            f"for {left}",
            "max_tokens",
        )
    return asked


def room(info: EngineInfo) -> int:
    """Most tokens one request can hold: the context, or the whole page pool when that is smaller."""
    return min(info.context, info.kv_pages * info.page_tokens)


class Generation:
    """An accepted request. ``gone`` tells whether its client has hung up; iteration then raises ClientGone.

    The caller must ``close`` it however the response ends.
    """

    def __init__(self, stream: Stream, decoder: Decoder, gone: Callable[[], bool]) -> None:
        self._stream, self._decoder, self._gone = stream, decoder, gone
        self._pieces = 0

    @classmethod
    def start(
        cls,
        client: EngineClient,
        token_ids: Sequence[int],
        params: SamplingParams,
        decoder: Decoder,
        gone: Callable[[], bool],
        *,
        cache_salt: str | None = None,
    ) -> Generation:
        """Queue a request. Raises RequestError, QueueFullError, EngineError, or ClientGone."""

        def waiting() -> None:
            if gone():
                raise ClientGone

        return cls(client.submit(token_ids, params, waiting, cache_salt=cache_salt), decoder, gone)

    def batches(self, silence_s: float) -> Iterator[list[Event]]:
        """Lists of the events that are ready, the last ending in Done; [] after each ``silence_s`` without any."""
        heard = time.monotonic()
        while True:
            events = self._stream.get(POLL_S)
            if self._gone():
                raise ClientGone
            if events:
                heard = time.monotonic()
                batch = [self._event(event) for event in events]
                yield batch
                if isinstance(batch[-1], Done):
                    return
            elif time.monotonic() - heard >= silence_s:
                heard = time.monotonic()
                yield []

    def _event(self, event: TokenEvent | Finished) -> Event:
        if isinstance(event, TokenEvent):
            self._pieces += 1
            return Piece(event.token_id, self._decoder.push(event.token_id))
        # An engine that died could not count; the pieces are what its client has.
        generated = max(event.completion_tokens, self._pieces)
        text = self._decoder.flush()
        return Done(event.finish_reason, event.prompt_tokens, generated, text, event.error, event.cached_tokens)

    def close(self) -> None:
        """Withdraw the request unless it has ended."""
        self._stream.cancel()
