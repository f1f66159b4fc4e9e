from __future__ import annotations

import math

import numpy as np
import pytest

from crucible.bench.statistics import Summary, alternating, median, paired_ratios, percentile, summarize, verdict


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("q", [0, 1, 50, 90, 99, 100])
def test_percentiles_are_numpys(count: int, q: float) -> None:
    values = np.random.default_rng(count).normal(size=count).tolist()
    assert percentile(values, q) == pytest.approx(np.percentile(values, q))


def test_nothing_has_no_percentile() -> None:
    assert percentile([], 50) is None
    assert median([]) is None


def test_spread_is_of_the_median_and_flagged_above_30_percent() -> None:
    summary = Summary((90.0, 100.0, 119.0))
    assert (summary.median, summary.min, summary.max) == (100, 90, 119)
    assert summary.spread == pytest.approx(29)
    assert not summary.flagged
    assert Summary((90.0, 100.0, 121.0)).flagged
    assert Summary((5.0,)).spread == 0
    assert Summary((0.0, 0.0)).spread == 0
    assert Summary((-1.0, 0.0, 1.0)).spread == math.inf


def test_quantities_that_a_trial_lacks_are_left_out_of_it() -> None:
    found = summarize([{"a": 1.0, "b": None}, {"a": 3.0, "b": None, "c": 2.0}])
    assert found == {"a": Summary((1.0, 3.0)), "b": None, "c": Summary((2.0,))}


def test_pairing_cancels_drift() -> None:
    drift = [1.0, 0.5, 2.0]
    ratio = paired_ratios([30 * x for x in drift], [20 * x for x in drift])
    assert ratio is not None
    assert ratio.values == pytest.approx([1.5, 1.5, 1.5])
    assert ratio.spread == pytest.approx(0)


def test_trials_without_a_pair_are_left_out() -> None:
    assert paired_ratios([1.0, None, 3.0, 4.0], [2.0, 2.0, None, 0.0]) == Summary((0.5,))
    assert paired_ratios([None], [1.0]) is None


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ((1.5, 1.6), "too few trials"),
        ((1.5, 1.6, 1.55), "higher"),
        ((0.5, 0.6, 0.55), "lower"),
        ((0.951, 0.948, 0.998), "not distinguishable"),  # one side, but further from each other than from 1
        ((0.99, 1.5, 1.5, 1.5, 1.5, 1.5), "not distinguishable"),
        ((1.01, 1.5, 1.2, 1.3, 1.1, 1.05), "higher"),
    ],
)
def test_verdict(ratios: tuple[float, ...], expected: str) -> None:
    assert verdict(Summary(ratios)) == expected


def test_every_other_trial_goes_backwards() -> None:
    assert [alternating(3, trial) for trial in range(3)] == [[0, 1, 2], [2, 1, 0], [0, 1, 2]]
