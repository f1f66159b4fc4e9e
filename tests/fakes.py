"""A core and a vocabulary without a model: token ids are bytes, and the answer to a prompt is the prompt, repeated.

Importable by path, so that spawned processes can be told to use them.
"""

from __future__ import annotations

import codecs
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from crucible.config import SamplingParams
from crucible.engine.messages import EngineInfo, Finished, FinishReason, Metrics, Ready, StepOutput, TokenEvent, frame
from crucible.errors import CheckpointError, EngineError, QueueFullError, RequestError

EOS = 256
PAGE = 16


@dataclass
class FakeRequest:
    token_ids: Sequence[int]
    params: SamplingParams
    prefill_left: int
    output: list[int] = field(default_factory=list)
    cancelled: bool = False
    cached: int = 0

    @property
    def pages(self) -> int:
        return -(-(len(self.token_ids) + (self.params.max_tokens or 0)) // PAGE)


class FakeCore:
    """First come, first served; a step sleeps ``step_s`` and gives every resident request a token, unless the file
    ``hold`` exists. A prompt that was served before with the same salt has its full pages cached.

    A prompt that starts with ``!raise`` makes the step fail, ``!kill`` kills the process, ``!stick`` makes the step
    last ``stick_s``, ``!refuse`` is refused.
    """

    asynchronous = False

    def __init__(self, *, step_s: float = 0.0, max_batch: int = 2, max_queue: int = 2, context: int = 4096,
                 prefill_steps: int = 0, hold: str = "", stick_s: float = 0.0) -> None:
        self.step_s, self.prefill_steps, self.hold, self.stick_s = step_s, prefill_steps, hold, stick_s
        self.info = EngineInfo(
            model_path="fake", device="cpu", quant="f32", dtype="float32", max_batch=max_batch, max_queue=max_queue,
            context=context, vocab_size=264, token_count=257, eos_token_ids=[EOS], kv_pages=max_batch * context // PAGE,
            page_tokens=PAGE,
        )
        self.requests: dict[str, FakeRequest] = {}
        names = ("completed_requests", "cancelled_requests", "failed_requests", "tokens_generated", "decode_steps")
        self.counters = dict.fromkeys(names, 0)
        self.failed = False
        self.served: set[tuple[str | None, bytes]] = set()
        self.started = time.monotonic()
        self._lock = threading.Lock()

    def add_request(
        self, request_id: str, token_ids: Sequence[int], params: SamplingParams, *, cache_salt: str | None = None
    ) -> None:
        if bytes(t for t in token_ids if t < 256).startswith(b"!refuse"):
            raise RequestError("refused by the core", "prompt")
        with self._lock:
            if len(self.requests) >= self.info.max_batch + self.info.max_queue:
                raise QueueFullError(f"full: {self.info.max_batch} running, {self.info.max_queue} waiting")
            request = FakeRequest(token_ids, params, self.prefill_steps)
            key = cache_salt, repr(token_ids).encode()
            request.cached = (len(token_ids) - 1) // PAGE * PAGE if key in self.served else 0
            self.served.add(key)
            self.requests[request_id] = request

    def cancel(self, request_id: str) -> bool:
        with self._lock:
            request = self.requests.get(request_id)
            if request is None:
                return False
            request.cancelled = True
            return True

    def has_work(self) -> bool:
        return bool(self.requests) or self.failed

    @property
    def resident(self) -> list[str]:
        return list(self.requests)[: self.info.max_batch]

    def launch(self) -> None:
        """What ``asynchronous`` promises; there is nothing to start."""

    def step(self) -> StepOutput:
        if self.failed:
            raise EngineError("the engine failed: RuntimeError: made to fail")
        time.sleep(self.step_s)
        output, sticks = StepOutput([], []), False
        with self._lock:
            self.counters["decode_steps"] += 1
            for request_id, request in list(self.requests.items()):
                if request.cancelled:
                    self._end(request_id, "cancelled", output)
            for request_id in self.resident:
                request = self.requests[request_id]
                text = bytes(token for token in request.token_ids if token < 256)
                if text.startswith(b"!kill"):
                    os.kill(os.getpid(), signal.SIGKILL)
                if text.startswith(b"!raise"):
                    self.failed = True
                elif text.startswith(b"!stick") and not request.output:
                    sticks = True
                    self._decode(request_id, request, output)
                elif self.hold and os.path.exists(self.hold):
                    continue
                elif request.prefill_left:
                    request.prefill_left -= 1
                else:
                    self._decode(request_id, request, output)
            if self.failed:
                for request_id in list(self.requests):
                    self._end(request_id, "error", output, "the engine failed: RuntimeError: made to fail")
        if sticks:
            time.sleep(self.stick_s)
        return output

    def _decode(self, request_id: str, request: FakeRequest, output: StepOutput) -> None:
        token = request.token_ids[len(request.output) % len(request.token_ids)]
        request.output.append(token)
        self.counters["tokens_generated"] += 1
        if token == EOS and not request.params.ignore_eos:
            self._end(request_id, "stop", output)
            return
        output.tokens.append(TokenEvent(request_id, token))
        if len(request.output) == request.params.max_tokens:
            self._end(request_id, "length", output)

    def _end(self, request_id: str, reason: FinishReason, output: StepOutput, error: str | None = None) -> None:
        request = self.requests.pop(request_id)
        kind = {"cancelled": "cancelled", "error": "failed"}.get(reason, "completed")
        self.counters[f"{kind}_requests"] += 1
        counts = len(request.token_ids), len(request.output)
        output.finished.append(Finished(request_id, reason, *counts, error, request.cached))

    def metrics(self) -> Metrics:
        with self._lock:
            resident = [self.requests[request_id] for request_id in self.resident]
            return {
                **self.counters,
                "active_requests": len(resident),
                "prefilling_requests": sum(request.prefill_left > 0 for request in resident),
                "queued_requests": len(self.requests) - len(resident),
                "kv_pages_used": sum(request.pages for request in resident),
                "kv_pages_total": self.info.kv_pages,
                "uptime_s": time.monotonic() - self.started,
            }

    def engine_info(self) -> EngineInfo:
        return self.info


def make_core(progress: Callable[[str], None], *, load_s: float = 0.0, gate: str = "", fail: str | None = None,
              **settings: Any) -> FakeCore:
    """A core factory that takes ``load_s``, and while the file ``gate`` exists. ``fail``: the error of a checkpoint
    that cannot be loaded."""
    progress("loading the fake model")
    time.sleep(load_s)
    while gate and os.path.exists(gate):
        time.sleep(0.01)
    if fail is not None:
        raise CheckpointError(fail)
    return FakeCore(**settings)


def crash(progress: Callable[[str], None], **settings: Any) -> FakeCore:
    """A core factory that dies without a word."""
    os._exit(7)


def short_lived_child(control: socket.socket) -> None:
    """A supervised child that works and dies at once."""
    control.sendall(frame(Ready(FakeCore().info)))
    os._exit(3)


class FakeDecoder:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id])) if token_id < 256 else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class FakeText:
    """A token a byte."""

    has_template = True
    longest = 1

    def __init__(self, path: str = "") -> None:
        if path == "broken":
            raise CheckpointError("no tokenizer here")

    def encode(self, prompt: str) -> list[int]:
        return list(prompt.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        for message in messages:
            if message["role"] not in ("system", "user", "assistant"):
                raise RequestError(f"unknown role {message['role']!r}", "messages")
        return list("".join(f"<{message['role']}>{message['content']}" for message in messages).encode())

    def decoder(self) -> FakeDecoder:
        return FakeDecoder()
