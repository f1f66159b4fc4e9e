"""What an engine and its clients say to each other: tagged msgspec structures in length-prefixed frames.

A frame is a 4-byte big-endian length and that many bytes of MessagePack. Nothing here knows of sockets' lifetimes,
models or text: token ids only. A worker opens one AF_UNIX stream to an engine and

- sends Submit, Cancel, MetricsRequest;
- receives Starting… and Ready (or Failed) first, then Accepted or Rejected per Submit, StepOutput, MetricsReply.

End of file is the death notice in both directions.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

from crucible.config.sampling import SamplingParams
from crucible.errors import EngineError

MAX_FRAME_BYTES = 32 * 2**20
"""Largest body of a frame. A prompt of a million ids takes at most 5 MB; anything above this is a broken peer."""

FinishReason: TypeAlias = Literal["stop", "length", "error", "cancelled"]
Metrics: TypeAlias = dict[str, int | float]


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """One generated token of a request that has text (an end-of-sequence id that ends a request sends none)."""

    request_id: str
    token_id: int


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """The last word about a request. ``completion_tokens`` counts an end-of-sequence id too.

    cached_tokens: prompt tokens whose KV the prefix cache had.
    """

    request_id: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    error: str | None = None
    cached_tokens: int = 0


class StepOutput(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Everything one engine step produced, tokens in the order of their requests, then the requests that ended.

    A request's tokens of this step come before its Finished.
    """

    tokens: list[TokenEvent] = []
    finished: list[Finished] = []


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a running engine is. ``context`` is the most tokens (prompt + generated) a request may hold.

    device: ``cpu`` or the GPU's name. quant: type of the weights. dtype: type of activations and KV.
    token_count: ids 0 … token_count − 1 mean something; ids above are refused as input.
    """

    model_path: str
    device: str
    quant: str
    dtype: str
    max_batch: int
    max_queue: int
    context: int
    vocab_size: int
    token_count: int
    eos_token_ids: list[int]
    bos_token_id: int | None = None
    kv_pages: int
    page_tokens: int
    parameters: int = 0
    prefill_budget: int = 0
    prefill_chunk_tokens: int | None = None
    threads: int = 1


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """A new request. ``request_id`` is the client's, unique on its connection.

    cache_salt: it shares cached KV with requests of the same salt only.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Withdraw a request in any state; unknown and finished ids are ignored. No answer: its id is free at once."""

    request_id: str


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """The request is in the engine's queue."""

    request_id: str


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="rejected"):
    """The request was not taken: ``queue_full`` (try later), ``invalid`` (never) or ``unavailable`` (still loading)."""

    request_id: str
    reason: Literal["queue_full", "invalid", "unavailable"]
    message: str
    param: str | None = None


class MetricsRequest(msgspec.Struct, frozen=True, array_like=True, tag="metrics?"):
    """Ask for the engine's counters; answered at once from the copy made after the last step."""

    number: int


class HistogramValues(msgspec.Struct, frozen=True, array_like=True):
    """``counts[i]`` values were at most ``bounds[i]`` and above the bound before; the last were above all of them."""

    bounds: list[float]
    counts: list[int]
    sum: float


class MetricsReply(msgspec.Struct, frozen=True, array_like=True, tag="metrics"):
    """The engine's counters, ``step_age_s`` (seconds since the step loop last made progress, 0 when idle) and
    histograms by name."""

    number: int
    values: Metrics
    histograms: dict[str, HistogramValues] = {}


class Starting(msgspec.Struct, frozen=True, array_like=True, tag="starting"):
    """Progress of loading: one line for a human."""

    message: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The engine takes requests."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The engine cannot start, or cannot go on; one line for a human."""

    message: str


class Serving(msgspec.Struct, frozen=True, array_like=True, tag="serving"):
    """An http worker to its supervisor: it has found its engine ready (until then it answers with 503)."""


class Drain(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """A supervisor to its child: take nothing new, finish what is live, then end."""


ToEngine: TypeAlias = Submit | Cancel | MetricsRequest
FromEngine: TypeAlias = Accepted | Rejected | StepOutput | MetricsReply | Starting | Ready | Failed
FromChild: TypeAlias = Starting | Ready | Failed | Serving
ToChild: TypeAlias = Drain
Message: TypeAlias = ToEngine | FromEngine | Serving | Drain

_LENGTH = struct.Struct(">I")


def frame(message: msgspec.Struct) -> bytes:
    """One frame. Raises EngineError when the message is larger than MAX_FRAME_BYTES."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise EngineError(f"message of {len(body)} bytes is above the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into messages, however the bytes were split.

    ``kind`` is ToEngine or FromEngine: a message of the other direction is an error, as is a frame above the limit.
    """

    def __init__(self, kind: object, limit: int = MAX_FRAME_BYTES) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages completed by ``data``, in order. Raises EngineError on a broken frame."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(buffer, start)
                if size > self._limit:
                    raise EngineError(f"frame of {size} bytes is above the limit of {self._limit}")
                end = start + _LENGTH.size + size
                if len(buffer) < end:
                    break
                body = bytes(memoryview(buffer)[start + _LENGTH.size : end])
                start = end
                try:
                    message: Message = self._decode(body)
                except msgspec.MsgspecError as error:
                    raise EngineError(f"broken frame: {error}") from None
                yield message
        finally:
            del buffer[:start]

    @property
    def partial(self) -> bool:
        """Whether the stream stands inside a frame (an end of file here cut a message)."""
        return bool(self._buffer)


def receive(connection: socket.socket, kind: object, chunk: int = 2**16) -> Iterator[Message]:
    """Messages from a blocking socket until its end of file. Raises EngineError on a broken frame."""
    reader = FrameReader(kind)
    while True:
        try:
            data = connection.recv(chunk)
        except (ConnectionError, TimeoutError):
            return
        if not data:
            return
        yield from reader.feed(data)
