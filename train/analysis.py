"""The statistics of an ablation study: pure functions of validation losses; no files, no clock, no randomness.

A study has one control and some variants, each trained with the same seeds; seed *i* gives every one of them the
same data in the same order. Order of judgement:

1. Divergence. A run whose best loss lies more than ``DIVERGENCE`` above the control's mean has failed to train. It is
   kept out of the means, and its variant is UNSTABLE however its other seeds did.
2. A paired t test a variant, on the differences to the control at the same seed.
3. Holm's step-down correction over the variants that could be tested (Scand. J. Stat. 6, 1979), so that the chance of
   one false verdict or more in the whole study stays below ``alpha``.

The rule of thumb "apart by more than two standard deviations" is computed beside it for comparison only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from crucible_train.errors import TrainingError
from crucible_train.student_t import critical_value, detectable_shift, two_sided_p

DIVERGENCE = 1.0
"""Nats a token above the control's mean from which a run counts as diverged."""
ALPHA = 0.05
POWER = 0.8
UNCOVERED = 0.05
"""Of the confidence interval, whatever alpha is."""


class Verdict(StrEnum):
    CONTROL = "control"
    BETTER = "better"
    WORSE = "worse"
    NONE = "no difference shown"
    UNSTABLE = "UNSTABLE"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class VariantResult:
    """One row of the report. Losses in nats a token; ``None`` where too few seeds are left to say.

    ``difference``, ``interval`` (95 %, not adjusted for the number of variants), ``p`` and
    ``p_adjusted`` (Holm) come from the ``pairs`` seeds at which both this variant and the control trained.
    ``detectable``: the difference that the study would find with 80 % power at the strictest step of the correction.
    """

    name: str
    seeds: tuple[int, ...]
    diverged: tuple[int, ...]
    missing: tuple[int, ...]
    mean: float | None
    sd: float | None
    pairs: int = 0
    difference: float | None = None
    error: float | None = None  # standard error of the difference
    interval: tuple[float, float] | None = None
    p: float | None = None
    p_adjusted: float | None = None
    detectable: float | None = None
    verdict: Verdict = Verdict.UNKNOWN
    two_sd: Verdict = Verdict.UNKNOWN
    identical: bool = False  # every paired loss equals the control's: most likely the same model twice


@dataclass(frozen=True)
class Analysis:
    control: VariantResult
    variants: tuple[VariantResult, ...]
    tested: int  # variants in Holm's family
    alpha: float

    @property
    def rows(self) -> tuple[VariantResult, ...]:
        return (self.control, *self.variants)


def paired_test(differences: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, standard error and two-sided p of a paired t test over the last axis (at least 2 pairs).

    Differences that are all alike have no standard error: p is then 1 for zeros and 0 for anything else.
    """
    pairs = differences.shape[-1]
    mean = differences.mean(-1)
    error = differences.std(-1, ddof=1) / math.sqrt(pairs)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(error > 0, mean / error, np.where(mean == 0, 0.0, np.inf))
    return mean, error, two_sided_p(t, pairs - 1)


def holm(p: np.ndarray) -> np.ndarray:
    """Holm-adjusted p values over the last axis: reject where they are ≤ alpha."""
    order = np.argsort(p, -1)
    factors = np.arange(p.shape[-1], 0, -1)
    stepped = np.maximum.accumulate(np.take_along_axis(p, order, -1) * factors, -1)
    adjusted = np.empty_like(stepped)
    np.put_along_axis(adjusted, order, np.minimum(stepped, 1.0), -1)
    return adjusted


def two_sd_apart(control: np.ndarray, variant: np.ndarray) -> np.ndarray:
    """The rule of thumb over the last axis: the means differ by more than twice the larger standard deviation."""
    spread = np.maximum(control.std(-1, ddof=1), variant.std(-1, ddof=1))
    apart: np.ndarray = np.abs(variant.mean(-1) - control.mean(-1)) > 2 * spread
    return apart


def analyze(
    losses: Mapping[str, Mapping[int, float | None]],
    *,
    control: str,
    planned: Mapping[str, Sequence[int]],
    alpha: float = ALPHA,
) -> Analysis:
    """Judges every variant of ``losses`` (variant → seed → best validation loss of a finished run).

    A loss that is ``None`` or not finite is that of a run that finished but blew up: diverged. A seed of ``planned``
    (variant → seeds) that is absent is missing. Raises TrainingError when no run of ``control`` trained.
    """
    if not 0 < alpha < 1:
        raise TrainingError(f"alpha must lie between 0 and 1, got {alpha}")
    if not any(loss is not None and math.isfinite(loss) for loss in losses.get(control, {}).values()):
        raise TrainingError(f"no finished run of the control ({control}) has a loss: run the sweep for it first")
    ceiling = _control_mean(losses[control]) + DIVERGENCE
    kept: dict[str, dict[int, float]] = {}
    rows: dict[str, VariantResult] = {}
    for name, by_seed in losses.items():
        kept[name] = {seed: loss for seed, loss in sorted(by_seed.items()) if loss is not None and loss <= ceiling}
        values = np.array(list(kept[name].values()))
        rows[name] = VariantResult(
            name=name,
            seeds=tuple(kept[name]),
            diverged=tuple(seed for seed in sorted(by_seed) if seed not in kept[name]),
            missing=tuple(seed for seed in planned[name] if seed not in by_seed),
            mean=float(values.mean()) if len(values) else None,
            sd=float(values.std(ddof=1)) if len(values) > 1 else None,
        )
    first = replace(rows[control], verdict=Verdict.CONTROL, two_sd=Verdict.CONTROL)
    variants = [_compare(rows[name], kept[control], kept[name]) for name in losses if name != control]
    tested = [row.p for row in variants if row.p is not None]
    adjusted = iter(holm(np.array(tested)) if tested else ())
    judged = (row if row.p is None else _judge(row, float(next(adjusted)), len(tested), alpha) for row in variants)
    return Analysis(first, tuple(judged), len(tested), alpha)


def _control_mean(by_seed: Mapping[int, float | None]) -> float:
    """The mean of the control's own runs that trained: those within DIVERGENCE of its lower median."""
    finite = sorted(loss for loss in by_seed.values() if loss is not None and math.isfinite(loss))
    middle = finite[(len(finite) - 1) // 2]
    return float(np.mean([loss for loss in finite if loss <= middle + DIVERGENCE]))


def _compare(row: VariantResult, control: Mapping[int, float], variant: Mapping[int, float]) -> VariantResult:
    """``row`` with the paired difference, its p and the rule of thumb's verdict."""
    paired = [seed for seed in variant if seed in control]
    differences = np.array([variant[seed] - control[seed] for seed in paired])
    row = replace(row, pairs=len(paired), difference=float(differences.mean()) if paired else None)
    if len(paired) > 1:
        _, error, p = paired_test(differences)
        row = replace(row, error=float(error), p=float(p), identical=not differences.any())
    first, second = (np.array(list(side.values())) for side in (control, variant))
    if row.diverged:
        return replace(row, verdict=Verdict.UNSTABLE, two_sd=Verdict.UNSTABLE)
    if min(len(first), len(second)) < 2:
        return row
    apart = bool(two_sd_apart(first, second))
    direction = Verdict.WORSE if second.mean() > first.mean() else Verdict.BETTER
    return replace(row, two_sd=direction if apart else Verdict.NONE)


def _judge(row: VariantResult, adjusted: float, tested: int, alpha: float) -> VariantResult:
    """``row`` with what depends on the whole family of ``tested`` variants, and the confidence interval."""
    assert row.difference is not None  # it was tested
    assert row.error is not None
    df = row.pairs - 1
    reach = critical_value(UNCOVERED, df) * row.error
    verdict = row.verdict
    if verdict is not Verdict.UNSTABLE:
        direction = Verdict.WORSE if row.difference > 0 else Verdict.BETTER
        verdict = direction if adjusted <= alpha else Verdict.NONE
    return replace(
        row,
        interval=(row.difference - reach, row.difference + reach),
        p_adjusted=adjusted,
        detectable=detectable_shift(df, alpha / tested, POWER) * row.error,
        verdict=verdict,
    )
