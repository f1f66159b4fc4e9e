"""The rules of judgement on studies whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from crucible_train.analysis import Verdict, analyze
from crucible_train.planted import false_verdict_rate, paired_holm, power_curve, simulate, two_sd
from crucible_train.student_t import power


def generator() -> np.random.Generator:
    return np.random.default_rng(20260)


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
@pytest.mark.parametrize("shared", [0.0, 0.6])
def test_a_null_study_gets_a_false_verdict_at_most_five_times_in_a_hundred(seeds: int, shared: float) -> None:
    studies = 40_000  # standard error 0.11 %
    rate = false_verdict_rate(paired_holm, seeds=seeds, variants=8, studies=studies, rng=generator(), shared=shared)
    assert rate <= 0.05 + 0.002


def test_the_rule_of_thumb_is_wrong_about_one_null_study_in_five() -> None:
    rate = false_verdict_rate(two_sd, seeds=3, variants=8, studies=40_000, rng=generator())
    assert rate == pytest.approx(0.22, abs=0.015)


def test_the_power_curve_rises_and_lies_between_bonferroni_and_no_correction() -> None:
    effects = [0.0, 1.0, 2.0, 3.0, 5.0]
    curve = power_curve(paired_holm, effects, seeds=5, variants=8, studies=8_000, rng=generator())
    assert curve == sorted(curve)
    assert curve[0] < 0.02
    assert curve[-1] > 0.9
    for effect, found in zip(effects, curve, strict=True):
        shift = effect * np.sqrt(5 / 2)  # a difference of two runs has twice the variance
        assert power(shift, 4, 0.05 / 8) - 0.02 <= found <= power(shift, 4, 0.05) + 0.02


def test_pairing_removes_what_a_seed_does_to_every_run() -> None:
    alone = power_curve(paired_holm, [2.0], seeds=5, variants=8, studies=4_000, rng=generator())
    paired = power_curve(paired_holm, [2.0], seeds=5, variants=8, studies=4_000, rng=generator(), shared=0.75)
    assert paired[0] > alone[0] + 0.3


def test_simulated_losses_have_the_spread_and_correlation_asked_for() -> None:
    losses = simulate([0.0, 3.0], 4, 50_000, generator(), shared=0.6)
    assert losses.shape == (50_000, 3, 4)
    np.testing.assert_allclose(losses.std(0), 1.0, atol=0.02)
    np.testing.assert_allclose(losses.mean((0, 2)), [0.0, 0.0, 3.0], atol=0.02)
    assert np.corrcoef(losses[:, 0, 0], losses[:, 1, 0])[0, 1] == pytest.approx(0.6, abs=0.02)
    assert np.corrcoef(losses[:, 0, 0], losses[:, 1, 1])[0, 1] == pytest.approx(0.0, abs=0.02)


def test_planted_effects_and_divergence_through_the_whole_analysis() -> None:
    effects = {"position-none": 0.26, "position-learned": 0.18, "activation-gelu": 0.0, "placement-post": 0.0}
    rng, wrong, found = generator(), 0, 0
    for _ in range(100):
        losses = 4.37 + 0.016 * simulate([value / 0.016 for value in effects.values()], 5, 1, rng)[0]
        losses[4, 1] += 1.5
        named = {name: dict(enumerate(row)) for name, row in zip(["control", *effects], losses.tolist(), strict=True)}
        analysis = analyze(named, control="control", planned={name: range(5) for name in named})
        verdicts = {row.name: row.verdict for row in analysis.variants}
        assert verdicts["placement-post"] is Verdict.UNSTABLE
        found += verdicts["position-none"] is verdicts["position-learned"] is Verdict.WORSE
        wrong += verdicts["activation-gelu"] is not Verdict.NONE
    assert found >= 97
    assert wrong <= 8
