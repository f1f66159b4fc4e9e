"""PrepareProgress: what ``prepare`` says while it works."""

from __future__ import annotations

from crucible_train.progress import Progress


class PrepareProgress(Progress):
    """Tokens, tokens a second and the share of the input (or of the limit) that is done."""

    def __init__(self, shown: bool, total_bytes: int, limit_tokens: int | None, before: int = 0) -> None:
        """``before``: tokens that an earlier run wrote."""
        self._total, self._limited, self._before = limit_tokens or total_bytes, limit_tokens is not None, before
        unit = " tokens" if self._limited else "B"
        super().__init__(shown=shown, total=self._total or None, unit=unit, unit_scale=True)

    def update(self, tokens: int, position: int) -> None:
        """``tokens`` are written, ``position`` bytes of the input are read."""
        rate = (tokens - self._before) / max(self.seconds, 1e-9)
        text = f"{tokens / 1e6:.1f} M tokens, {rate / 1e6:.2f} M tokens/s"
        done = tokens if self._limited else position
        share = f", {min(done / self._total, 1):.0%}" if self._total else ""
        self.show(done, text, lambda: f"prepare: {text}{share}")
