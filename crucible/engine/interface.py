"""Core: what the engine process needs of an engine. EngineCore has it, and the fakes of the tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from crucible.config import SamplingParams
from crucible.engine.messages import EngineInfo, Metrics, StepOutput


class Core(Protocol):
    """``step`` is called by one thread, until its first error; the others by any, also during a step: they must not
    wait for it. ``metrics`` holds ``queued_requests``: those that no step has admitted. ``launch`` starts what the next
    ``step`` waits for; it is called only if ``asynchronous``, and returns at once."""

    @property
    def asynchronous(self) -> bool: ...

    def add_request(
        self, request_id: str, token_ids: Sequence[int], params: SamplingParams, *, cache_salt: str | None = None
    ) -> None: ...
    def cancel(self, request_id: str) -> object: ...
    def has_work(self) -> bool: ...
    def launch(self) -> None: ...
    def step(self) -> StepOutput: ...
    def metrics(self) -> Metrics: ...
    def engine_info(self) -> EngineInfo: ...
