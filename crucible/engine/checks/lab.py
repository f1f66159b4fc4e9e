"""Lab: one loaded model and any number of short-lived engines on it, whose logits are recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crucible.config import EngineConfig, ModelConfig, SamplingParams
from crucible.engine.core import EngineCore
from crucible.engine.messages import Metrics
from crucible.engine.model_runner import ModelRunner
from crucible.engine.request import Request
from crucible.errors import RequestError
from crucible.kernels.problems import AttentionProblem
from crucible.native.batch import pages_for

Row = NDArray[np.float32]
Forward = Callable[..., Any]
Attend = Callable[[AttentionProblem, np.random.Generator], NDArray[Any]]
LARGEST_BATCH = 16


@dataclass(frozen=True)
class Job:
    """A request: ``arrival`` is the step before which it is submitted, ``cancel`` that before which it is withdrawn."""

    name: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    arrival: int = 0
    cancel: int | None = None
    salt: str | None = None

    @property
    def max_tokens(self) -> int:
        return self.params.max_tokens or 1


@dataclass
class Trace:
    """What a request got: a row of logits (float32 [vocab], a copy) for each token chosen, an eos included.

    reason is ``refused`` for a request that was not accepted.
    """

    logits: list[Row] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    reason: str = "refused"
    cached_tokens: int = 0


@dataclass(frozen=True)
class Difference:
    """The first place where a request was not answered as it is alone."""

    request: str
    position: int
    what: str

    def __str__(self) -> str:
        return f"request {self.request}, position {self.position}: {self.what}"


class Lab:
    """Engines over one model.

    make_cache(pages) allocates KV pages; one cache serves all engines, uncleared, so that each meets the rests of
    others: what was not written must not be read. threads: how many compute, unless a call says otherwise;
    set_threads: tells the kernels. make_runner: takes ModelRunner's arguments; ``forward`` is for ModelRunner.
    poison: fills a cache with NaN. attend: ways to compute attention, by name, whose bits must be equal. eager:
    arguments of make_runner that leave graphs out; replays: counts the graphs replayed. largest_batch: most requests
    that a check should run at once.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Any,
        ops: Any,
        make_cache: Callable[[int], Any],
        *,
        context: int,
        forward: Forward | None = None,
        threads: int | None = None,
        set_threads: Callable[[int | None], object] | None = None,
        make_runner: Callable[..., Any] | None = None,
        device: str = "cpu",
        poison: Callable[[Any], None] | None = None,
        attend: Mapping[str, Attend] | None = None,
        eager: Mapping[str, Any] | None = None,
        replays: Callable[[], int] = lambda: 0,
        largest_batch: int = LARGEST_BATCH,
    ) -> None:
        self.config = config
        self.context = context
        self.metrics: Metrics = {}
        self._weights, self._ops, self._make_cache = weights, ops, make_cache
        self._threads, self._set_threads = threads, set_threads
        self._make_runner = make_runner or partial(ModelRunner, forward=forward)
        self.device, self.largest_batch = device, largest_batch
        self.attend, self.eager, self.replays = dict(attend or {}), dict(eager or {}), replays
        self.step_rows: list[int] = []
        self._poison = poison
        self._cache: Any = None
        self._cache_pages = 0
        self._alone: dict[tuple[tuple[int, ...], SamplingParams, int | None], Trace] = {}

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str = "cpu",
        quant: str = "f32",
        threads: int | None = None,
        context: int = 1024,
    ) -> Lab:
        """The model directory ``path``; ``context`` is cut to the model's. Raises CheckpointError and ConfigError."""
        from crucible.checkpoint import open_checkpoint  # heavy: loaded on use

        with open_checkpoint(path) as checkpoint:
            context = min(context, checkpoint.config.context_length)
            if device == "cuda":
                from crucible.engine.checks.cuda_lab import cuda_lab

                return cuda_lab(checkpoint, quant, context)
            from crucible.engine.checks.cpu_lab import cpu_lab

            return cpu_lab(checkpoint, quant, context, threads)

    def run(
        self,
        jobs: Sequence[Job],
        *,
        kv_pages: int | None = None,
        max_batch: int = 16,
        prefill_budget: int = 128,
        threads: int | None = None,
        shuffle: np.random.Generator | None = None,
        poison: bool = False,
        runner: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> dict[str, Trace]:
        """Serve ``jobs`` to the end by one engine; ``settings`` are EngineConfig's. The prefix cache is off unless set.

        shuffle: hands pages out in random order. poison: NaN in all of the cache before. runner: arguments of
        make_runner. Raises RuntimeError when the page pool is not whole after any step. ``metrics`` are the engine's
        last, ``step_rows`` how many requests got a token in each step.
        """
        pages = kv_pages or sum(pages_for(len(job.token_ids) + job.max_tokens) for job in jobs) or 1
        core = self._engine(pages, max_batch, prefill_budget, threads, settings, len(jobs), runner or {})
        if poison and self._poison is not None:
            self._poison(self._cache)
        if shuffle is not None:
            shuffle_pages(core, shuffle)
        traces = {job.name: Trace() for job in jobs}
        self.step_rows = []

        def note(requests: list[Request], rows: Row) -> None:
            self.step_rows.append(len(requests))
            for request, row in zip(requests, rows, strict=True):
                traces[request.request_id].logits.append(row.copy())

        core.runner.on_logits = note  # type: ignore[attr-defined]
        step, end = 0, max((max(job.arrival, job.cancel or 0) for job in jobs), default=0)
        while step <= end or core.has_work():
            for job in jobs:
                if job.arrival == step:
                    self._submit(core, job, traces[job.name])
                if job.cancel == step:
                    core.cancel(job.name)
            output = core.step()
            core.check()
            for event in output.tokens:
                traces[event.request_id].tokens.append(event.token_id)
            for finished in output.finished:
                trace = traces[finished.request_id]
                trace.reason, trace.cached_tokens = finished.error or finished.finish_reason, finished.cached_tokens
            step += 1
        self.metrics = core.metrics()
        if self.metrics["kv_pages_used"]:
            raise RuntimeError(f"{self.metrics['kv_pages_used']} pages are held after the last request")
        return traces

    def alone(self, job: Job, threads: int | None = None) -> Trace:
        """What ``job`` gets from an engine of its own: its prompt at once, consecutive pages, no prefix cache."""
        key = job.token_ids, job.params, threads
        if key not in self._alone:
            single = Job("alone", job.token_ids, job.params)
            run = self.run([single], max_batch=1, prefill_budget=self.context, threads=threads)
            self._alone[key] = run["alone"]
        return self._alone[key]

    def forget(self) -> None:
        """Drop what ``alone`` keeps."""
        self._alone.clear()

    def _submit(self, core: EngineCore, job: Job, trace: Trace) -> None:
        try:
            core.add_request(job.name, job.token_ids, job.params, cache_salt=job.salt)
            trace.reason = "unfinished"
        except RequestError:
            if len(job.token_ids) + job.max_tokens <= min(self.context, core.engine_info().kv_pages * 16):
                raise  # only what can never fit may be refused

    def _engine(
        self,
        pages: int,
        max_batch: int,
        prefill_budget: int,
        threads: int | None,
        settings: dict[str, Any],
        jobs: int,
        switches: Mapping[str, Any],
    ) -> EngineCore:
        if self._set_threads is not None:
            self._set_threads(threads or self._threads)
        if self._cache_pages < pages:
            self._cache, self._cache_pages = self._make_cache(pages), pages
        config = EngineConfig(
            **{
                "device": self.device,
                "context": self.context,
                "max_batch": max_batch,
                "max_queue": jobs,
                "kv_pages": pages,
                "prefill_budget": prefill_budget,
                "prefix_cache": False,
                **settings,
            }
        )
        runner = self._make_runner(
            self._weights,
            self._ops,
            self._cache,
            max_rows=max_batch + prefill_budget,
            max_sequences=max_batch,
            context=self.context,
            token_count=self.config.token_count,
            **switches,
        )
        return EngineCore(config, self.config, runner)


def shuffle_pages(core: EngineCore, random: np.random.Generator) -> None:
    """Put the free list of an idle engine in random order."""
    pool = core.scheduler.pages.pool
    pages = pool.allocate(pool.free_count) or []
    for index in random.permutation(len(pages)):
        pool.release([pages[index]])


def difference(name: str, prompt_tokens: int, wanted: Trace, got: Trace) -> Difference | None:
    """The first bit in which ``got`` differs from ``wanted``, or ``None``. A cancelled request may have got less."""
    for number, (row, reference) in enumerate(zip(got.logits, wanted.logits, strict=False)):
        position = prompt_tokens - 1 + number
        if number and got.tokens[number - 1] != wanted.tokens[number - 1]:
            what = f"token {got.tokens[number - 1]}, expected {wanted.tokens[number - 1]}"
            return Difference(name, position, what)
        bits, expected = np.ascontiguousarray(row).view(np.uint32), np.ascontiguousarray(reference).view(np.uint32)
        unequal = bits != expected
        if unequal.any():
            index = int(unequal.argmax())
            what = (
                f"logit {index} is {row[index]!r} (0x{bits[index]:08x}), "
                f"expected {reference[index]!r} (0x{expected[index]:08x})"
            )
            return Difference(name, position, what)
    end = prompt_tokens - 1 + len(got.logits)
    if got.tokens != wanted.tokens[: len(got.tokens)]:
        return Difference(name, end, f"tokens {got.tokens[-3:]} end what should be {wanted.tokens[: len(got.tokens)]}")
    if got.reason == "cancelled":
        return None
    if (got.reason, len(got.logits), len(got.tokens)) != (wanted.reason, len(wanted.logits), len(wanted.tokens)):
        what = f"{len(got.logits)} tokens and {got.reason!r}, expected {len(wanted.logits)} and {wanted.reason!r}"
        return Difference(name, end, what)
    return None
