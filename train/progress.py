"""Progress on standard error: a tqdm bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

LINE_SECONDS = 10.0


class Progress:
    """Shows how much of ``total`` (None: unknown) is done; nothing at all unless ``shown``.

    ``at_once``: the first line does not wait for LINE_SECONDS. ``unit_scale``: the bar counts in k, M, G.
    """

    def __init__(
        self,
        *,
        shown: bool,
        total: int | None,
        initial: int = 0,
        unit: str,
        unit_scale: bool = False,
        at_once: bool = False,
    ) -> None:
        self._stream = sys.stderr
        self._shown = shown and self._stream is not None
        self._began = time.monotonic()
        self._printed = float("-inf") if at_once else self._began
        self._bar = None
        if self._shown and self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total, initial=initial, unit=unit, unit_scale=unit_scale, file=self._stream, dynamic_ncols=True
            )

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._began

    def show(self, done: int, figures: str, line: Callable[[], str], *, last: bool = False) -> None:
        """``done`` of the total: the bar with ``figures`` behind it, or ``line()`` when one is due or ``last``."""
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.set_postfix_str(figures, refresh=False)
            self._bar.update(done - self._bar.n)
        elif last or time.monotonic() - self._printed >= LINE_SECONDS:
            self._printed = time.monotonic()
            self.say(line())

    def say(self, line: str) -> None:
        """A line of its own."""
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)

    def warn(self, line: str) -> None:
        """A line that cannot be overlooked."""
        self.say(f"*** WARNING: {line} ***")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def duration(seconds: float) -> str:
    """``seconds`` as 45 s, 12 min or 3 h 05 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"
