"""The live table of a sweep: redrawn in place on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from crucible_train.progress import duration
from crucible_train.study_runs import Point, last_point
from crucible_train.sweep import Progress

INTERVAL = 60.0
"""Seconds between summaries where there is no terminal."""


class StatusTable:
    """Draws the progress of a sweep to ``stream``; ``slots``: how many runs go at once, for the time left."""

    def __init__(self, directory: Path, steps: int, slots: int, stream: TextIO) -> None:
        self._directory, self._steps, self._slots, self._stream = directory, steps, max(1, slots), stream
        self._live = stream.isatty()
        self._drawn = 0
        self._last = -math.inf

    def event(self, line: str) -> None:
        """Prints ``line`` above the table."""
        self._erase()
        print(line, file=self._stream, flush=True)

    def tick(self, progress: Sequence[Progress]) -> None:
        """Draws the table, or without a terminal a summary each minute."""
        if not self._live and time.monotonic() - self._last < INTERVAL:
            return
        self._last = time.monotonic()
        lines = [self._summary(progress)]
        if self._live:
            lines += [self._row(item) for item in progress if item.phase == "running"]
        self._erase()
        print("\n".join(lines), file=self._stream, flush=True)
        self._drawn = len(lines) if self._live else 0

    def _erase(self) -> None:
        if self._drawn:
            self._stream.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def _summary(self, progress: Sequence[Progress]) -> str:
        counts = Counter(item.phase for item in progress)
        finished = counts["done"] + counts["skipped"]
        parts = [f"{finished}/{len(progress)} runs done"]
        parts += [f"{counts[phase]} {phase}" for phase in ("running", "waiting", "failed") if counts[phase]]
        left = time_left(progress, self._slots, self._share_done(progress))
        return " · ".join([*parts, f"about {duration(left)} left"] if left else parts)

    def _share_done(self, progress: Sequence[Progress]) -> float:
        points = (self._point(item) for item in progress if item.phase == "running")
        return sum(point.step / self._steps for point in points if point)

    def _point(self, item: Progress) -> Point | None:
        return last_point(self._directory / item.run.name)

    def _row(self, item: Progress) -> str:
        point = self._point(item)
        seconds = time.monotonic() - item.started
        if point is None:
            return f"  {item.run.name:<24} {item.where:<10} starting, {duration(seconds)}"
        speed = "" if math.isnan(point.tokens_per_second) else f"{point.tokens_per_second:>12,.0f} tok/s"
        done = f"step {point.step:>6}/{self._steps}"
        return f"  {item.run.name:<24} {item.where:<10} {done}  loss {point.loss:.4f}{speed}"


def time_left(progress: Sequence[Progress], slots: int, share_done: float) -> float | None:
    """Seconds until the sweep ends, from the runs finished so far; None before the first has.

    ``share_done``: how much of the running runs is done, in whole runs.
    """
    took = [item.seconds for item in progress if item.phase == "done"]
    if not took:
        return None
    ahead = sum(item.phase in ("running", "waiting") for item in progress)
    return max(0.0, ahead - share_done) * sum(took) / len(took) / slots
