"""The progress line of ``prepare`` on standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType

LINE_SECONDS = 10.0


class Progress:
    """Tokens, tokens a second and the share of the input read; nothing at all unless ``shown``.

    Where standard error is a terminal this is a tqdm bar, elsewhere a line every ten seconds.
    """

    def __init__(self, shown: bool, total_bytes: int, limit_tokens: int | None, before: int = 0) -> None:
        """``before``: tokens that an earlier run wrote."""
        self._shown = shown
        self._limit = limit_tokens
        self._total = total_bytes
        self._started = self._printed = time.monotonic()
        self._before = before
        self._bar = None
        if shown and sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=limit_tokens or total_bytes or None, unit=_unit(limit_tokens), unit_scale=True)

    def show(self, tokens: int, position: int) -> None:
        """``tokens`` are written, ``position`` bytes of the input are read."""
        if not self._shown:
            return
        now = time.monotonic()
        rate = (tokens - self._before) / max(now - self._started, 1e-9)
        text = f"{tokens / 1e6:.1f} M tokens, {rate / 1e6:.2f} M tokens/s"
        done = tokens if self._limit else position
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - self._bar.n)
        elif now - self._printed > LINE_SECONDS and sys.stderr is not None:
            self._printed = now
            total = self._limit or self._total
            share = f", {min(done / total, 1):.0%}" if total else ""
            print(f"prepare: {text}{share}", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _unit(limit_tokens: int | None) -> str:
    return " tokens" if limit_tokens else "B"
