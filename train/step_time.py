"""StepTimeMonitor: notices when steps have become lastingly slower or faster."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Shift:
    """Step time in milliseconds (medians) before and after a lasting change seen at ``step``."""

    step: int
    before_ms: float
    after_ms: float

    @property
    def ratio(self) -> float:
        """How many times slower (above 1) or, inverted, faster the steps are now; always above 1."""
        return max(self.before_ms, self.after_ms) / min(self.before_ms, self.after_ms)

    def __str__(self) -> str:
        word = "slower" if self.after_ms > self.before_ms else "faster"
        times = f"{self.before_ms:.4g} → {self.after_ms:.4g} ms"
        return f"steps are {self.ratio:.2f}× {word} since about step {self.step} ({times})"


class StepTimeMonitor:
    """Compares the last ``sustained`` step times with the median of up to ``history`` before them.

    A shift needs four fifths of the recent steps beyond ``threshold`` times the earlier median, so single slow steps
    (a save, a hiccup) say nothing. The first ``skip`` steps (compilation, warm-up) are not looked at. After a shift
    the new regime is what later steps are compared with.
    """

    def __init__(self, *, threshold: float = 1.5, sustained: int = 20, history: int = 100, skip: int = 5) -> None:
        self.threshold = threshold
        self._recent: deque[float] = deque(maxlen=sustained)
        self._earlier: deque[float] = deque(maxlen=history)
        self._skip = skip

    def add(self, step: int, milliseconds: float) -> Shift | None:
        """Takes the time of one step; returns a shift the moment that it has lasted."""
        if self._skip:
            self._skip -= 1
            return None
        full = len(self._recent) == self._recent.maxlen
        if full:
            self._earlier.append(self._recent[0])
        self._recent.append(milliseconds)
        if not full or len(self._earlier) < len(self._recent):
            return None
        before = statistics.median(self._earlier)
        ordered = sorted(self._recent)
        most = len(ordered) // 5
        slower = ordered[most] >= self.threshold * before
        faster = ordered[-1 - most] * self.threshold <= before
        if not (slower or faster):
            return None
        shift = Shift(step - len(ordered) + most + 1, before, statistics.median(ordered))
        self._earlier.clear()
        self._recent.clear()
        return shift
