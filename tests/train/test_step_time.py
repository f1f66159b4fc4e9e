"""The detector of lasting changes of speed."""

from __future__ import annotations

import random

import pytest

from crucible_train.step_time import Shift, StepTimeMonitor


def shifts(times: list[float], **options: int) -> list[Shift]:
    monitor = StepTimeMonitor(**options)  # type: ignore[arg-type]
    found = [monitor.add(step, time) for step, time in enumerate(times, 1)]
    return [shift for shift in found if shift is not None]


def test_a_power_cap_that_comes_off_is_seen_once() -> None:
    """The case the detector is for: 2,520 ms a step, then 929, with nothing changed in the code."""
    (shift,) = shifts([2520.0] * 200 + [929.0] * 200)
    assert shift.step == 201
    assert shift.ratio == pytest.approx(2.71, abs=0.01)
    assert "2.71× faster" in str(shift)


def test_slower_is_seen_too_and_back_again() -> None:
    found = shifts([100.0] * 60 + [151.0] * 60 + [100.0] * 60)
    assert [(shift.before_ms, shift.after_ms) for shift in found] == [(100.0, 151.0), (151.0, 100.0)]
    assert "slower" in str(found[0])


def test_noise_pauses_and_smaller_changes_are_not_shifts() -> None:
    draw = random.Random(0)
    noisy = [draw.uniform(80, 120) for _ in range(500)]
    assert not shifts(noisy)
    assert not shifts([5000.0 if step % 10 == 0 else 100.0 for step in range(500)])
    assert not shifts([100.0] * 100 + [145.0] * 200)


def test_slow_first_steps_are_not_looked_at() -> None:
    assert not shifts([60_000.0, 900.0, 500.0] + [100.0] * 200)
    assert not shifts([900.0] * 25 + [100.0] * 200, skip=25, sustained=5)
    assert shifts([900.0] * 25 + [100.0] * 200, skip=0, sustained=5)


def test_a_shift_is_told_within_its_length() -> None:
    monitor = StepTimeMonitor(sustained=5, skip=0)
    told = [step for step in range(1, 41) if monitor.add(step, 10.0 if step <= 20 else 20.0)]
    assert told == [24]
