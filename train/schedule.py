"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to ``peak``, then cosine decay (arXiv:1608.03983) or, for ``wsd``, a plateau and a linear decay
    over the last ``decay_fraction`` of ``length`` (warmup-stable-decay, arXiv:2404.06395), to ``peak · min_ratio``.
    """

    kind: Literal["cosine", "wsd"]
    peak: float
    length: int
    warmup: int
    min_ratio: float
    decay_fraction: float

    def rate(self, step: int) -> float:
        """The learning rate of update ``step`` (the first is 1); the lowest one from ``length`` on."""
        if step <= self.warmup:
            return self.peak * step / self.warmup
        low = self.peak * self.min_ratio
        if self.kind == "cosine":
            done = (step - self.warmup) / max(1, self.length - self.warmup)
            return low + (self.peak - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        decay_steps = max(1, round(self.length * self.decay_fraction))
        done = (step - (self.length - decay_steps)) / decay_steps
        return self.peak + (low - self.peak) * min(1.0, max(0.0, done))
