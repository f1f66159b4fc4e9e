"""Histogram: how often values fell between fixed bounds. It knows no clock and no requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from crucible.engine.messages import HistogramValues


class Histogram:
    """``bounds``: upper ends of the buckets, ascending, each belonging to its bucket; one more bucket lies above."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, a number, ``times`` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def values(self) -> HistogramValues:
        """A copy of the counts."""
        return HistogramValues(self._bounds, self._counts.copy(), self._sum)
