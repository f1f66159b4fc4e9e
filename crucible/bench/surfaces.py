"""The HTTP surfaces a load can be sent to: how a job becomes a body, and what a stream's events say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec


@dataclass(frozen=True, slots=True)
class Job:
    """One request: a prompt of ids or text, tokens to generate, and after how many the client hangs up, if it does."""

    prompt: Sequence[int] | str
    max_tokens: int
    hang_up_after: int | None = None


@dataclass(slots=True)
class Progress:
    """What the events of a stream said so far. ``tokens``: the server's own count, once it has told it."""

    events: int = 0
    tokens: int | None = None
    done: bool = False
    error: str | None = None


class Surface(Protocol):
    """``read`` takes one event into account and returns how many token events it was (0 or 1)."""

    path: str

    def body(self, job: Job) -> bytes: ...

    def read(self, progress: Progress, name: bytes, data: bytes) -> int: ...


class _Error(msgspec.Struct):
    message: str = ""


class _Done(msgspec.Struct):
    finish_reason: str = ""
    tokens_generated: int = 0
    error: _Error | None = None


class Native:
    """POST /v1/generate/stream. A token's event is counted without being parsed."""

    path = "/v1/generate/stream"

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_Done).decode

    def body(self, job: Job) -> bytes:
        prompt = job.prompt if isinstance(job.prompt, str) else list(job.prompt)
        return json.dumps({"prompt": prompt, "max_tokens": job.max_tokens, "ignore_eos": True}).encode()

    def read(self, progress: Progress, name: bytes, data: bytes) -> int:
        if name == b"token":
            progress.events += 1
            return 1
        if name == b"done":
            done = self._decode(data)
            progress.done = True
            progress.tokens = done.tokens_generated
            if done.finish_reason not in ("stop", "length"):
                progress.error = done.error.message if done.error is not None else done.finish_reason
        return 0


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class OpenAI:
    """POST /v1/completions with stream, as llama-server, vLLM and others speak it.

    Some servers put several tokens into an event: then ``Progress.tokens`` (from usage) is above ``events``.
    """

    path = "/v1/completions"

    def __init__(self, model: str | None = None) -> None:
        self._model = model
        self._decode = msgspec.json.Decoder(_Chunk).decode

    def body(self, job: Job) -> bytes:
        values: dict[str, Any] = {
            "prompt": job.prompt if isinstance(job.prompt, str) else list(job.prompt),
            "max_tokens": job.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        if self._model is not None:
            values["model"] = self._model
        return json.dumps(values).encode()

    def read(self, progress: Progress, name: bytes, data: bytes) -> int:
        if data == b"[DONE]":
            progress.done = True
            return 0
        chunk = self._decode(data)
        if chunk.error is not None:
            progress.error = str(chunk.error)
        if chunk.usage is not None and chunk.usage.completion_tokens:
            progress.tokens = chunk.usage.completion_tokens
        if not chunk.choices:
            return 0
        choice = chunk.choices[0]
        # The last event may carry only the finish reason; an incomplete character may make a token's text empty.
        counts = int(bool(choice.text) or choice.finish_reason is None)
        progress.events += counts
        return counts


def surface(api: str, model: str | None = None) -> Surface:
    """``native`` or ``openai``."""
    return OpenAI(model) if api == "openai" else Native()
