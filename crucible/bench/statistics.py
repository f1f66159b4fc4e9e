"""What is said about repeated measurements: percentiles, spread, and ratios of pairs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

SPREAD_LIMIT = 30.0
"""Percent. A wider spread is the signature of a throttled, capped or shared machine: such a result is flagged."""


def percentile(values: Iterable[float], q: float) -> float | None:
    """The ``q``-th percentile (0 … 100), linear between the two nearest ranks; ``None`` of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Iterable[float]) -> float | None:
    return percentile(values, 50)


@dataclass(frozen=True, slots=True)
class Summary:
    """One quantity over the trials, in their order."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return percentile(self.values, 50) or 0.0

    @property
    def min(self) -> float:
        return min(self.values)

    @property
    def max(self) -> float:
        return max(self.values)

    @property
    def spread(self) -> float:
        """Highest minus lowest trial, in percent of the median; 0 where all are equal."""
        width = self.max - self.min
        if width == 0:
            return 0.0
        return 100 * width / abs(self.median) if self.median else math.inf

    @property
    def flagged(self) -> bool:
        return self.spread > SPREAD_LIMIT


def summarize(trials: Sequence[Mapping[str, float | None]]) -> dict[str, Summary | None]:
    """Each quantity of the trials' dictionaries; ``None`` where no trial could tell."""
    names = dict.fromkeys(name for trial in trials for name in trial)
    found = {name: [value for trial in trials if (value := trial.get(name)) is not None] for name in names}
    return {name: Summary(tuple(values)) if values else None for name, values in found.items()}


def paired_ratios(a: Sequence[float | None], b: Sequence[float | None]) -> Summary | None:
    """a / b within each trial, so that drift of the machine cancels; trials that lack one of the two are left out."""
    pairs = zip(a, b, strict=True)
    ratios = tuple(x / y for x, y in pairs if x is not None and y is not None and y != 0)
    return Summary(ratios) if ratios else None


def verdict(ratio: Summary) -> str:
    """Whether a paired ratio differs from 1: every trial lies on the same side of it, and chance would not do that.

    Six trials on one side happen by chance once in 32 times. Fewer must also differ from 1 by more than they differ
    from each other; fewer than three say nothing.
    """
    if len(ratio.values) < 3:
        return "too few trials"
    same_side = ratio.min > 1 or ratio.max < 1
    clear = len(ratio.values) >= 6 or abs(ratio.median - 1) > ratio.max - ratio.min
    if not (same_side and clear):
        return "not distinguishable"
    return "higher" if ratio.min > 1 else "lower"


def alternating(count: int, trial: int) -> list[int]:
    """The order in which ``count`` things are measured in a trial: forwards, then backwards, and so on."""
    order = list(range(count))
    return order[::-1] if trial % 2 else order
