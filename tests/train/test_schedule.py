"""Learning rates by step."""

from __future__ import annotations

from typing import Literal

import pytest

from crucible_train.schedule import Schedule


def schedule(kind: Literal["cosine", "wsd"], **changes: float) -> Schedule:
    values = {"peak": 1.0, "length": 100, "warmup": 10, "min_ratio": 0.1, "decay_fraction": 0.2, **changes}
    return Schedule(kind=kind, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_warm_up_is_linear_and_the_end_is_the_lowest(kind: Literal["cosine", "wsd"]) -> None:
    rates = schedule(kind)
    assert [rates.rate(step) for step in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])
    assert rates.rate(100) == pytest.approx(0.1)
    assert rates.rate(150) == pytest.approx(0.1)
    falling = [rates.rate(step) for step in range(10, 101)]
    assert falling == sorted(falling, reverse=True)


def test_cosine_is_halfway_in_the_middle() -> None:
    assert schedule("cosine").rate(55) == pytest.approx(0.55)


def test_wsd_is_flat_and_then_a_line() -> None:
    rates = schedule("wsd")
    assert [rates.rate(step) for step in (10, 50, 80)] == [1.0, 1.0, 1.0]
    assert rates.rate(90) == pytest.approx(0.55)


def test_no_warm_up_starts_at_the_peak() -> None:
    assert schedule("wsd", warmup=0).rate(1) == 1.0
    assert schedule("cosine", warmup=0, length=1).rate(1) == pytest.approx(0.1)
