"""RunProgress: what a run says while it trains, on standard error."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class RunProgress:
    """A bar with the time left on a terminal, else a line now and then; silent where ``enabled`` is false."""

    def __init__(
        self, *, start: int, steps: int, enabled: bool, stream: TextIO | None = None, interval: float = 10.0
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._enabled = enabled and self._stream is not None
        self._start, self._steps, self._interval = start, steps, interval
        self._began = time.monotonic()
        self._shown = float("-inf")
        self._bar = None
        if self._enabled and self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=steps, initial=start, unit="step", file=self._stream, dynamic_ncols=True)

    def update(self, step: int, **values: float | None) -> None:
        """Shows ``step`` of the run and the given figures; None is left out."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.set_postfix_str(_figures(values), refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        if now - self._shown < self._interval and step < self._steps:
            return
        self._shown = now
        left = (now - self._began) / max(1, step - self._start) * (self._steps - step)
        self._print(f"step {step}/{self._steps}: {_figures(values)}, {duration(left)} left")

    def say(self, line: str) -> None:
        """A line of its own."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            self._print(line)

    def warn(self, line: str) -> None:
        """A line that cannot be overlooked."""
        self.say(f"*** WARNING: {line} ***")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def _figures(values: dict[str, float | None]) -> str:
    named = {name.replace("_", " "): value for name, value in values.items() if value is not None}
    return ", ".join(
        f"{name} {value:,.0f}" if value >= 1000 else f"{name} {value:.4g}" for name, value in named.items()
    )


def duration(seconds: float) -> str:
    """``75`` as ``1:15``, ``3675`` as ``1:01:15``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
