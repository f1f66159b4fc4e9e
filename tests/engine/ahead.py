"""A runner on the host that takes plans made ahead, for the toy model."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from crucible.engine.model_runner import ModelRunner, sampled_requests
from crucible.engine.scheduler import Plan


class AheadRunner(ModelRunner):
    """Computes when launched; tokens of a plan in flight are those that the next one reads. ``ahead`` counts."""

    overlaps = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.flights: deque[tuple[Plan, np.ndarray[Any, Any], np.ndarray[Any, Any]]] = deque()
        self.ahead = self.surplus = 0

    def launch(self, plan: Plan) -> None:
        assert len(self.flights) == plan.ahead
        self.batch.fill(plan.decode, plan.prefill, plan.counts, ahead=plan.ahead)
        if plan.ahead:
            self.ahead += 1
            assert not self.batch.temperatures.any()
            self.batch.token_ids[:] = np.maximum(self.flights[0][2], 0)
        logits = self._forward(self.weights, self.ops, self.batch, self.cache)
        self.flights.append((plan, logits, self.sampler.pick(logits, self.batch)))

    def abandon(self) -> None:
        self.flights.clear()

    def collect(self) -> np.ndarray[Any, Any]:
        plan, logits, tokens = self.flights.popleft()
        requests, rows = sampled_requests(plan), plan.surviving()
        if rows is not None:
            self.surplus += len(requests) - len(rows)
            requests, logits = [requests[row] for row in rows], logits[rows]
        if self.on_logits is not None:
            self.on_logits(requests, logits)
        return tokens
