"""The native HTTP API's wire types: what a body may hold and what comes back. Shared by the server and its clients.

Absent and ``null`` mean the same. Unknown fields and wrong types are refused, naming the field.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

import msgspec

from crucible.errors import RequestError

MAX_SALT = 256
"""Characters of a cache salt."""

DEFAULT_MAX_TOKENS = 256
"""Tokens generated for a ``prompt`` without ``max_tokens``, or fewer where the context ends before; a conversation
(``messages``) without it may go on to the end of the context."""


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One turn. The chat template decides which roles exist."""

    role: str
    content: str


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """POST /v1/generate and /v1/generate/stream. Exactly one of ``prompt`` (text or token ids) and ``messages``.

    The sampling fields mean what they mean in SamplingParams. cache_salt: the request shares cached prompt prefixes
    with requests of the same salt only.
    """

    prompt: str | list[int] | None = None
    messages: list[ChatMessage] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None


class Usage(msgspec.Struct):
    """``completion_tokens`` counts an end-of-sequence id too. ``cached_tokens``: prompt tokens whose KV was cached."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = 0


class GenerateResponse(msgspec.Struct, kw_only=True):
    """``token_ids`` are those that ``text`` came from: an end-of-sequence id is counted but not among them."""

    model: str
    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    tokens_generated: int
    usage: Usage


class ErrorDetail(msgspec.Struct):
    """``param`` names the request field at fault, if one is."""

    message: str
    type: str
    param: str | None = None


class ErrorBody(msgspec.Struct):
    """Every error of every native route."""

    error: ErrorDetail


class StreamDone(msgspec.Struct, omit_defaults=True):
    """SSE ``done``: the last event. ``text`` is what the decoder still held, usually empty. ``usage`` is absent after
    an error."""

    finish_reason: Literal["stop", "length", "error"]
    tokens_generated: int
    text: str
    usage: Usage | None = None
    error: ErrorDetail | None = None


class SamplingDefaults(msgspec.Struct):
    """What an absent field means. ``top_k`` and ``seed`` count only with a positive temperature."""

    temperature: float
    top_k: int
    seed: int
    max_tokens: int


class HealthResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    """GET /health: 200 with ``status`` ok, or 503 with another status and ``error``.

    step_age_s: seconds that the engine's step under way has taken; 0 when idle.
    """

    status: Literal["ok", "loading", "restarting", "stalled", "draining"]
    version: str
    model: str
    device: str | None = None
    dtype: str | None = None
    quant: str | None = None
    max_batch: int | None = None
    max_queue: int | None = None
    context: int | None = None
    vocab_size: int | None = None
    parameters: int | None = None
    step_age_s: float | None = None
    chat_template: bool | None = None
    sampling: SamplingDefaults | None = None
    error: ErrorDetail | None = None


T = TypeVar("T", bound=msgspec.Struct)

_AT = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`$", re.DOTALL)


def decode_json(body: bytes, kind: type[T]) -> T:
    """``body`` as ``kind``. Raises RequestError: not JSON (no param), a wrong type or unknown fields (the field)."""
    if not body:
        raise RequestError("the body is empty; send a JSON object")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), body, kind) from None
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not valid JSON: {_one_line(error)}") from None
    except UnicodeDecodeError:
        raise RequestError("the body is not valid UTF-8") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None


def _invalid(message: str, body: bytes, kind: type[msgspec.Struct]) -> RequestError:
    at = _AT.search(message)
    path = at[1] if at else ""
    what = _AT.sub("", message)
    unknown = _UNKNOWN.match(what)
    if unknown is not None and not path:
        return _unknown_fields(body, kind)
    if unknown is not None:
        path, what = f"{path}.{unknown[1]}", "unknown field"
    if not path:
        return RequestError(f"the body must be a JSON object: {_one_line(what)}")
    return RequestError(f"{path}: {_one_line(what[:1].lower() + what[1:])}", path)


def _unknown_fields(body: bytes, kind: type[msgspec.Struct]) -> RequestError:
    """Names all of them, not only the one that decoding stopped at."""
    known = msgspec.structs.fields(kind)
    try:
        present: dict[str, Any] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return RequestError(f"the body is not valid JSON: {_one_line(error)}")
    names = [name for name in present if name not in {field.encode_name for field in known}]
    listed = ", ".join(_one_line(name)[:100] for name in names[:10])
    allowed = ", ".join(field.encode_name for field in known)
    plural = "s" if len(names) > 1 else ""
    return RequestError(f"unknown field{plural} {listed}; known are {allowed}", names[0][:100])


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
