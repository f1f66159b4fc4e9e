"""RunProgress: what a run says while it trains."""

from __future__ import annotations

from crucible_train.progress import Progress, duration


class RunProgress(Progress):
    """The steps of a run from ``start`` on, with the latest figures and the time left."""

    def __init__(self, *, start: int, steps: int, shown: bool) -> None:
        super().__init__(shown=shown, total=steps, initial=start, unit="step", at_once=True)
        self._start, self._steps = start, steps

    def update(self, step: int, **values: float | None) -> None:
        """Shows ``step`` of the run and the given figures; None is left out."""
        figures = _figures(values)

        def line() -> str:
            left = self.seconds / max(1, step - self._start) * (self._steps - step)
            return f"step {step}/{self._steps}: {figures}, {duration(left)} left"

        self.show(step, figures, line, last=step >= self._steps)


def _figures(values: dict[str, float | None]) -> str:
    named = {name.replace("_", " "): value for name, value in values.items() if value is not None}
    return ", ".join(
        f"{name} {value:,.0f}" if value >= 1000 else f"{name} {value:.4g}" for name, value in named.items()
    )
