"""Studies with planted truth: how often a rule of judgement is wrong, and how often it finds a real difference.

Losses are simulated in units of the seed-to-seed standard deviation. The rules are those of crucible_train.analysis,
run over whole arrays of studies at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from crucible_train.analysis import ALPHA, holm, paired_test, two_sd_apart

Rule = Callable[[np.ndarray], np.ndarray]
"""Losses [studies, 1 + variants, seeds], the control first, to verdicts [studies, variants]: is it called different?"""


def paired_holm(losses: np.ndarray, alpha: float = ALPHA) -> np.ndarray:
    """Paired t tests with Holm's correction: the rule that verdicts come from."""
    return holm(paired_test(losses[:, 1:] - losses[:, :1])[2]) <= alpha


def two_sd(losses: np.ndarray) -> np.ndarray:
    """The rule of thumb: means apart by more than twice the larger standard deviation."""
    return two_sd_apart(losses[:, :1], losses[:, 1:])


def simulate(
    effects: Sequence[float], seeds: int, studies: int, rng: np.random.Generator, shared: float = 0.0
) -> np.ndarray:
    """Losses [studies, 1 + len(effects), seeds] of variants whose true differences are ``effects``.

    ``shared``: the share of the seed-to-seed variance that all runs of one seed have in common (pairing removes it).
    """
    own = rng.standard_normal((studies, 1 + len(effects), seeds))
    common = rng.standard_normal((studies, 1, seeds))
    noise = np.sqrt(shared) * common + np.sqrt(1 - shared) * own
    losses: np.ndarray = noise + np.array([0.0, *effects])[:, None]
    return losses


def false_verdict_rate(
    rule: Rule, *, seeds: int, variants: int, studies: int = 20_000, rng: np.random.Generator, shared: float = 0.0
) -> float:
    """The share of studies in which no variant differs and ``rule`` still calls one or more different."""
    return float(rule(simulate([0.0] * variants, seeds, studies, rng, shared)).any(-1).mean())


def power_curve(
    rule: Rule,
    effects: Sequence[float],
    *,
    seeds: int,
    variants: int,
    studies: int = 5_000,
    rng: np.random.Generator,
    shared: float = 0.0,
) -> list[float]:
    """For each true difference (in seed standard deviations) of one variant among null ones: how often it is found."""
    planted = ([effect] + [0.0] * (variants - 1) for effect in effects)
    return [float(rule(simulate(truth, seeds, studies, rng, shared))[:, 0].mean()) for truth in planted]
