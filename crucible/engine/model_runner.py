"""ModelRunner: computes plans. It owns the batch's buffers and knows the model as weights, ops and a forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from crucible.config.sampling import SamplingParams
from crucible.engine.batch import Batch
from crucible.engine.request import Request
from crucible.engine.sampler import Sampler
from crucible.engine.scheduler import Plan
from crucible.errors import EngineError
from crucible.native.batch import pages_for

Forward = Callable[[Any, Any, Batch, Any], NDArray[np.float32]]
LogitsHook = Callable[[list[Request], NDArray[np.float32]], None]


class Runner(Protocol):
    """What EngineCore needs of a runner: ``launch`` starts a plan and may return at once, ``collect`` waits for it."""

    def launch(self, plan: Plan) -> None:
        """Start computing ``plan``; at most one is in flight. The plan's requests do not change until ``collect``."""

    def collect(self) -> NDArray[np.int32]:
        """Token ids int32 [n], one for each request of the plan that had logits, in the plan's order.

        NO_TOKEN for a request whose logits hold a NaN or +inf.
        """


class AheadRunner(Runner, Protocol):
    """A runner that computes later than ``launch`` returns, and takes one plan made ahead of what it is to compute."""

    @property
    def overlaps(self) -> bool:
        """Whether it can with its present settings."""

    def abandon(self) -> None:
        """Forget what is in flight, so that it can be launched again."""


class ModelRunner:
    """Runs plans through ``forward`` on the host: ``launch`` computes, ``collect`` chooses the tokens.

    forward(weights, ops, batch, cache) returns logits float32 [len(batch.logit_rows), vocab]; None means the model's
    own. max_rows: rows of the largest plan; max_sequences: its requests; context: most tokens of one.
    ``logits`` are those of the last plan. ``on_logits``, if set, is called with the requests that get a token and
    their rows (views: copy what is to be kept) before any token is chosen.
    """

    def __init__(
        self,
        weights: Any,
        ops: Any,
        cache: Any,
        *,
        max_rows: int,
        max_sequences: int,
        context: int,
        token_count: int,
        forward: Forward | None = None,
    ) -> None:
        if forward is None:
            from crucible.model.forward import forward as model_forward  # kernels are heavy to import

            forward = model_forward
        self.weights = weights
        self.ops = ops
        self.cache = cache
        self.batch = Batch(max_rows, max_sequences, pages_for(context))
        self.sampler = Sampler(token_count)
        self.logits: NDArray[np.float32] | None = None
        self.on_logits: LogitsHook | None = None
        self._forward = forward
        self._plan: Plan | None = None

    def launch(self, plan: Plan) -> None:
        if self._plan is not None:
            raise EngineError("a plan is in flight: collect it before the next launch")
        self.batch.fill(plan.decode, plan.prefill, plan.counts)
        self.logits = self._forward(self.weights, self.ops, self.batch, self.cache)
        self._plan = plan

    def collect(self) -> NDArray[np.int32]:
        plan, self._plan = self._plan, None
        if plan is None or self.logits is None:
            raise EngineError("no plan is in flight")
        if len(self.logits) != len(self.batch.logit_rows):
            raise EngineError(f"{len(self.batch.logit_rows)} logit rows were asked for, {len(self.logits)} came back")
        if self.on_logits is not None:
            self.on_logits(sampled_requests(plan), self.logits)
        return self.sampler.pick(self.logits, self.batch)

    def warm_up(self) -> None:
        """Compute a short prompt and a decode over page 0, which must be free, so that kernels get compiled."""
        for count in (min(8, self.batch.max_rows), 1):
            request = Request("warm-up", np.zeros(count, np.int32), 1, SamplingParams(max_tokens=1))
            request.assign_pages([0])
            self.launch(Plan([], [request], [count]))
            self.collect()
        self.logits = None


def sampled_requests(plan: Plan) -> list[Request]:
    """The requests of a plan that get a token, in the order of the logit rows. Valid until the plan is committed."""
    last = [r for r, count in zip(plan.prefill, plan.counts, strict=True) if r.remaining == count]
    return plan.decode + last
