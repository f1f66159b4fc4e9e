"""An engine in this process, and what the in-process modes do with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from crucible.bench.report import Report
from crucible.config import EngineConfig, SamplingParams
from crucible.engine.core import EngineCore
from crucible.engine.messages import StepOutput
from crucible.errors import EngineError
from crucible.models import resolve

Say = Callable[[str], None]

GREEDY = SamplingParams()

MAX_STEPS = 1_000_000
"""No benchmark steps an engine more often than this: a scheduler that starves a request must not hang it."""


@contextmanager
def engine(model: str | None, say: Say, **settings: Any) -> Iterator[EngineCore]:
    """The engine of ``model`` with ``settings`` (fields of EngineConfig; None means its default)."""
    path = resolve(model)
    core = EngineCore.from_checkpoint(path, EngineConfig.from_environment(**settings), say)
    try:
        yield core
    finally:
        core.close()


def describe(core: EngineCore, report: Report) -> None:
    """Writes what the engine is into the report."""
    info = core.engine_info()
    names = ("model_path", "parameters", "device", "quant", "dtype", "threads", "max_batch", "context", "kv_pages")
    report.settings |= {name: getattr(info, name) for name in (*names, "prefill_budget", "prefill_chunk_tokens")}
    gpu = getattr(getattr(core.runner, "device", None), "name", None)
    if gpu is not None:
        report.settings["gpu"] = gpu


def count_bytes_to_host(core: EngineCore) -> Callable[[], int] | None:
    """How many bytes the engine has copied from its device to the host from now on; None where it has no device."""
    device = getattr(core.runner, "device", None)
    if device is None:
        return None
    total, to_host, download = 0, device.to_host, device.download

    def counted_to_host(source: Any, host: Any) -> None:
        nonlocal total
        total += host.nbytes
        to_host(source, host)

    def counted_download(source: Any) -> Any:
        nonlocal total
        host = download(source)
        total += host.nbytes
        return host

    device.to_host, device.download = counted_to_host, counted_download
    return lambda: total


class Driver:
    """Submits random prompts to a core and steps it. Prompts are seeded, so runs compute the same thing."""

    def __init__(self, core: EngineCore, seed: int) -> None:
        self.core = core
        self._rng = np.random.default_rng(seed)
        self._count = 0

    def submit(self, prompt_tokens: int, max_tokens: int, sampling: SamplingParams = GREEDY) -> str:
        """A request of random ids that no end-of-sequence id ends; ``sampling`` chooses tokens. Returns its id."""
        self._count += 1
        request_id = f"bench-{self._count}"
        ids = self._rng.integers(0, self.core.engine_info().token_count, prompt_tokens)
        params = msgspec.structs.replace(sampling, max_tokens=max_tokens, ignore_eos=True)
        self.core.add_request(request_id, ids, params)
        return request_id

    def step(self) -> tuple[float, StepOutput]:
        """One step and its seconds. Raises EngineError when the engine has failed."""
        begin = time.perf_counter()
        output = self.core.step()
        seconds = time.perf_counter() - begin
        if self.core.failure is not None:
            raise EngineError(self.core.failure)
        return seconds, output

    def step_until(self, reached: Callable[[], bool], what: str) -> int:
        """Steps until ``reached`` and returns how many it took. Raises EngineError when it never comes to that."""
        for steps in range(MAX_STEPS):
            if reached():
                return steps
            if not self.core.has_work():
                break
            self.step()
        raise EngineError(f"the engine ran out of work before {what}")

    def decoding(self, requests: int) -> Callable[[], bool]:
        """Whether ``requests`` requests decode and none waits or prefills."""

        def check() -> bool:
            metrics = self.core.metrics()
            waiting = metrics["queued_requests"] + metrics["prefilling_requests"]
            return not waiting and metrics["active_requests"] == requests

        return check

    def clear(self, request_ids: list[str]) -> None:
        """Withdraws the requests and steps until the engine is idle."""
        for request_id in request_ids:
            self.core.cancel(request_id)
        while self.core.has_work():
            self.step()
