from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from crucible_train.analysis import Verdict, analyze, holm, paired_test
from crucible_train.errors import TrainingError

SEEDS = range(5)
CONTROL = {seed: 4.0 + 0.1 * seed for seed in SEEDS}
NOISE = (0.002, -0.001, 0.001, -0.002, 0.0)


def shifted(by: float) -> dict[int, float]:
    return {seed: CONTROL[seed] + by + NOISE[seed] for seed in SEEDS}


def judge(losses, seeds=SEEDS, **options):
    planned = {name: list(seeds) for name in losses}
    return analyze(losses, control="control", planned=planned, **options)


def test_paired_differences_find_what_the_seed_spread_hides() -> None:
    analysis = judge({"control": CONTROL, "worse": shifted(0.02), "better": shifted(-0.02), "same": shifted(0.0)})
    worse, better, same = analysis.variants
    assert (worse.verdict, better.verdict, same.verdict) == (Verdict.WORSE, Verdict.BETTER, Verdict.NONE)
    assert {row.two_sd for row in analysis.variants} == {Verdict.NONE}
    assert worse.pairs == 5
    assert worse.difference == pytest.approx(0.02)
    assert worse.interval[0] < 0.02 < worse.interval[1]
    assert analysis.tested == 3


def test_interval_and_p_agree_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    row = judge({"control": CONTROL, "variant": shifted(0.001)}).variants[0]
    wanted = stats.ttest_rel([shifted(0.001)[seed] for seed in SEEDS], list(CONTROL.values()))
    interval = wanted.confidence_interval(0.95)
    assert row.p == pytest.approx(wanted.pvalue)
    assert row.interval == pytest.approx((interval.low, interval.high))
    assert row.p_adjusted == row.p


@pytest.mark.parametrize("loss", [CONTROL[2] + 1.31, math.nan, math.inf, None])
def test_a_diverged_seed_makes_the_variant_unstable_and_stays_out_of_the_mean(loss: float | None) -> None:
    row = judge({"control": CONTROL, "post": {**shifted(0.0), 2: loss}}).variants[0]
    assert row.verdict is row.two_sd is Verdict.UNSTABLE
    assert row.diverged == (2,)
    assert row.pairs == 4
    assert row.mean == pytest.approx(4.2, abs=0.01)


def test_just_below_the_limit_is_worse_not_diverged() -> None:
    limit = 4.2 + 1.0  # the control's mean and the threshold
    row = judge({"control": CONTROL, "bad": dict.fromkeys(SEEDS, limit - 1e-6)}).variants[0]
    assert row.diverged == ()
    assert judge({"control": CONTROL, "bad": dict.fromkeys(SEEDS, limit + 1e-6)}).variants[0].diverged == tuple(SEEDS)


def test_every_seed_diverged_leaves_nothing_to_compare() -> None:
    row = judge({"control": CONTROL, "bad": dict.fromkeys(SEEDS, 9.0)}).variants[0]
    assert (row.verdict, row.pairs, row.mean, row.p) == (Verdict.UNSTABLE, 0, None, None)


def test_a_diverged_control_seed_neither_hides_others_nor_makes_pairs() -> None:
    analysis = judge({"control": {**CONTROL, 4: 9.0}, "variant": shifted(0.02)})
    assert analysis.control.diverged == (4,)
    assert analysis.control.mean == pytest.approx(4.15)
    assert analysis.variants[0].pairs == 4
    assert judge({"control": {0: 4.0, 1: 9.0}, "bad": {0: 6.0}}, seeds=range(2)).variants[0].diverged == (0,)


def test_one_seed_is_unknown() -> None:
    row = judge({"control": {0: 4.0}, "variant": {0: 3.0}}, seeds=[0]).variants[0]
    assert row.verdict is row.two_sd is Verdict.UNKNOWN
    assert (row.difference, row.p, row.interval) == (-1.0, None, None)


def test_seeds_pair_by_number_and_missing_ones_are_named() -> None:
    row = judge({"control": CONTROL, "variant": {0: 4.01, 2: 4.21, 3: 4.31}}).variants[0]
    assert row.pairs == 3
    assert row.missing == (1, 4)
    assert row.difference == pytest.approx(0.01)


def test_the_same_model_twice_is_noticed() -> None:
    row = judge({"control": CONTROL, "variant": dict(CONTROL)}).variants[0]
    assert row.identical
    assert (row.verdict, row.p) == (Verdict.NONE, 1.0)


def test_no_trained_control_is_an_error() -> None:
    for control in ({}, {0: None}, {0: math.nan}):
        with pytest.raises(TrainingError, match="control"):
            judge({"control": control, "variant": {0: 4.0}}, seeds=[0])


def test_holm_by_hand() -> None:
    # 4·0.005, 3·0.01, 2·0.03, 1·0.04 raised to the one before (Holm 1979's step-down).
    np.testing.assert_allclose(holm(np.array([0.01, 0.04, 0.03, 0.005])), [0.03, 0.06, 0.06, 0.02])


@given(arrays(float, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=st.floats(0, 1)))
def test_holm_lies_between_the_raw_p_and_bonferroni_and_keeps_the_order(p: np.ndarray) -> None:
    adjusted = holm(p)
    assert (adjusted >= p).all()
    assert (adjusted <= np.minimum(1, p * p.shape[-1]) + 1e-15).all()
    order = np.argsort(p, -1)
    assert (np.diff(np.take_along_axis(adjusted, order, -1)) >= 0).all()


def test_paired_test_over_an_array_is_that_of_each_row() -> None:
    differences = np.random.default_rng(0).standard_normal((3, 4, 5))
    whole = paired_test(differences)
    for index in np.ndindex(3, 4):
        np.testing.assert_allclose([part[index] for part in whole], paired_test(differences[index]))
