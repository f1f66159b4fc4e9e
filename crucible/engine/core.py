"""EngineCore: requests in, one StepOutput a step out. It joins scheduler, runner and counters; no sockets, no text."""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from crucible.config import EngineConfig, ModelConfig, SamplingParams
from crucible.config.engine import PAGE_TOKENS
from crucible.engine.kv_cache import KVPages
from crucible.engine.messages import EngineInfo, Finished, Metrics, StepOutput, TokenEvent
from crucible.engine.metrics import EngineMetrics
from crucible.engine.model_runner import AheadRunner, Runner
from crucible.engine.request import Request
from crucible.engine.scheduler import Plan, Scheduler
from crucible.engine.settings import choose_device, kv_dtype, resolve_config, sizes
from crucible.errors import CrucibleError, EngineError
from crucible.native.batch import STOPPED

log = logging.getLogger(__name__)

class EngineCore:
    """One model's engine: continuous batching over a runner, stepped by its owner.

    ``step`` belongs to one thread. ``add_request``, ``cancel``, ``has_work`` and ``metrics`` may be called from any
    thread, also while a step computes: they never wait for the device.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        runner: Runner,
        *,
        model_path: str = "",
        dtype: str = "float32",
        parameters: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``config`` may leave settings open (``resolve_config``). Raises ConfigError for what this model cannot do."""
        self.config = config = resolve_config(config, model_config)
        self.model_config = model_config
        self.runner = runner
        self.failure: str | None = None
        context, kv_pages, prefill_budget = sizes(config)
        self.scheduler = Scheduler(
            KVPages(kv_pages, prefix_cache=config.prefix_cache),
            max_batch=config.max_batch,
            max_queue=config.max_queue,
            context=context,
            prefill_budget=prefill_budget,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            min_packed=config.min_packed_prompts if config.batched_prefill else config.max_batch + 1,
            token_count=model_config.token_count,
            eos_token_ids=model_config.eos_token_ids,
        )
        self._info = EngineInfo(
            model_path=model_path,
            device=getattr(runner, "device_name", config.device),
            quant=config.quant,
            dtype=dtype,
            max_batch=config.max_batch,
            max_queue=config.max_queue,
            context=context,
            vocab_size=model_config.vocab_size,
            token_count=model_config.token_count,
            eos_token_ids=model_config.eos_token_ids,
            bos_token_id=model_config.bos_token_id,
            kv_pages=kv_pages,
            page_tokens=PAGE_TOKENS,
            parameters=parameters,
            prefill_budget=prefill_budget,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            threads=config.threads or 1,
        )
        self._clock = clock
        self._metrics = EngineMetrics(clock=clock)
        self._lock = threading.Lock()  # held for microseconds: never while the runner works
        self._plans: deque[Plan] = deque()  # in flight: one, or with async_steps two
        self._ahead = config.async_steps and bool(getattr(runner, "overlaps", False))

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, config: EngineConfig, on_progress: Callable[[str], None] | None = None
    ) -> EngineCore:
        """The engine of the model directory ``path``, ready to answer; ``on_progress`` gets a line for each phase.

        Raises CheckpointError and ConfigError.
        """
        report = on_progress or (lambda text: None)
        from crucible.checkpoint import expected_tensors, open_checkpoint, parameter_count  # heavy: loaded on use

        with open_checkpoint(path) as checkpoint:
            model = checkpoint.config
            device = choose_device(config.device)
            # Numba or CuPy: only the one that is wanted is loaded.
            engine = importlib.import_module(f"crucible.engine.{device}_engine")
            runner, config = engine.build_runner(checkpoint, replace(config, device=device), report)
        report("compiling kernels")
        runner.warm_up()
        parameters = parameter_count(expected_tensors(model))
        return cls(config, model, runner, model_path=str(path), dtype=kv_dtype(config), parameters=parameters)

    def add_request(
        self,
        request_id: str,
        token_ids: Sequence[int] | NDArray[np.integer],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request, which shares cached KV with those of the same ``cache_salt`` only.

        Raises RequestError (never servable), QueueFullError (try later) or EngineError (failed).
        """
        with self._lock:
            self._require_alive()
            self.scheduler.add(request_id, token_ids, params, arrival=self._clock(), cache_salt=cache_salt)

    def cancel(self, request_id: str) -> bool:
        """Withdraw a request in any state by the next step, which reports it as cancelled. False if it is not live."""
        with self._lock:
            return self.scheduler.cancel(request_id)

    @property
    def asynchronous(self) -> bool:
        """Whether ``launch`` only queues work: then it pays to call it before dealing with what ``step`` returned."""
        return self._ahead and self.failure is None

    def has_work(self) -> bool:
        """Whether ``step`` would do or report something. True for a failed engine, whose ``step`` raises."""
        with self._lock:
            return self.failure is not None or self.scheduler.has_work or bool(self._plans)

    def step(self) -> StepOutput:
        """Plan, compute and record one step. An idle engine's output is empty.

        When the step fails, its output reports every live request as ended by an error, ``failure`` says why, and
        every later call raises EngineError.
        """
        self.launch()
        self._launch_ahead()
        return self.collect()

    def launch(self) -> None:
        """The first half of ``step``: plan the work and start it. The owner may publish while the device computes.

        Does nothing while a plan is in flight.
        """
        with self._lock:
            self._require_alive()
        if not self._plans:
            self._start(self.scheduler.plan)

    def _launch_ahead(self) -> None:
        """Queue the plan after the one in flight, if it need not wait for its tokens."""
        if self._ahead and len(self._plans) == 1:
            self._start(lambda: self.scheduler.plan_ahead(self._plans[0]))

    def _start(self, make_plan: Callable[[], Plan | None]) -> None:
        try:
            with self._lock:
                plan = make_plan()
            if plan:
                self.runner.launch(plan)
                self._plans.append(plan)  # only now: an interrupted launch is planned again, the same
        except Exception as error:
            self._fail(error)
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """After an interrupt: compute again what is in flight. A plan made ahead has no ground without the one before,
        and one that was half launched may have put its own tokens where it should read those of the one before."""
        if self._ahead:
            self._plans.clear()
            cast(AheadRunner, self.runner).abandon()

    def collect(self) -> StepOutput:
        """The second half of ``step``: wait for the work, and report its tokens and the requests that ended."""
        tokens: list[TokenEvent] = []
        if self._plans:
            plan = self._plans.popleft()
            try:
                token_ids = self.runner.collect()
                with self._lock:
                    if plan.ahead:
                        plan, token_ids = self.scheduler.settle(plan, token_ids)
                    sampled = self.scheduler.commit(plan, token_ids)
                    if plan:
                        self._metrics.record_step(plan, len(sampled))
                tokens = [
                    TokenEvent(request.request_id, token_id)
                    for request, token_id in zip(sampled, token_ids[token_ids >= 0].tolist(), strict=True)
                    if request.finish_code != STOPPED
                ]
            except Exception as error:
                self._fail(error)
            except BaseException:
                self._abandon()
                raise
        with self._lock:
            finished = [self._report(request) for request in self.scheduler.take_finished()]
        return StepOutput(tokens, finished)

    def metrics(self) -> Metrics:
        """The counters of EngineMetrics and what is live now."""
        with self._lock:
            return self._metrics.snapshot(self.scheduler)

    def engine_info(self) -> EngineInfo:
        """What this engine is."""
        return self._info

    def check(self) -> None:
        """Raises RuntimeError unless the page pool is whole: every page free, cached, or held by resident requests."""
        with self._lock:
            self.scheduler.check()

    def close(self) -> None:
        """Give up the runner, and with it the model's memory. Live requests end unreported; later steps raise."""
        with self._lock:
            self.failure = self.failure or "the engine is closed"
            self.scheduler.fail()
            self._plans.clear()
            del self.runner

    def _require_alive(self) -> None:
        if self.failure is not None:
            raise EngineError(self.failure)

    def _fail(self, error: Exception) -> None:
        log.error("engine step failed", exc_info=error)
        with self._lock:
            self.failure = failure_text(error)
            self.scheduler.fail()
            self._plans.clear()

    def _report(self, request: Request) -> Finished:
        reason = request.finish_reason or "error"
        self._metrics.record_finished(reason, broken=request.error is not None)
        error = request.error or self.failure if reason == "error" else None
        return Finished(
            request.request_id, reason, request.prompt_tokens, request.generated, error, request.cached_tokens
        )


def failure_text(error: Exception) -> str:
    """One line that says that the engine failed, once, and why."""
    message = (str(error).splitlines() or [""])[0]
    text = message if message and isinstance(error, CrucibleError) else f"{type(error).__name__}: {message}"
    return text if text.startswith("the engine failed") else f"the engine failed: {text}"
