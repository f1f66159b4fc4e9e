"""Student's t for whole degrees of freedom: two-sided p, critical value and the power of a t test.

Own code, so that reading a study needs numpy and nothing more. The tests hold it against SciPy.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

BISECTIONS = 100
WIDTH = 10.0
"""The integral over the standard error ends WIDTH/√df above its mean: 14 of its standard deviations."""
POINTS = 8001


def two_sided_p(t: np.ndarray | float, df: int) -> np.ndarray:
    """P(|T| ≥ |t|) for ``df`` degrees of freedom, shape of ``t``; absolute error about 1e-15.

    The finite sums of Abramowitz & Stegun 26.7.3 and 26.7.4. NaN in gives NaN out, infinity gives 0.
    """
    if df < 1:
        raise ValueError(f"df must be at least 1, got {df}")
    angle = np.arctan(np.abs(np.asarray(t, np.float64)) / math.sqrt(df))
    sine, cosine = np.sin(angle), np.cos(angle)
    term = cosine.copy() if df % 2 else np.ones_like(cosine)
    total = np.zeros_like(cosine)
    for k in range(df % 2, df - 1, 2):  # k: the power of the cosine, less one for odd df
        total += term
        term = term * cosine**2 * ((k + 1) / (k + 2))
    inside = 2 / math.pi * (angle + sine * total) if df % 2 else sine * total
    return np.clip(1.0 - inside, 0.0, 1.0)


@lru_cache(maxsize=256)
def critical_value(alpha: float, df: int) -> float:
    """The t with ``two_sided_p(t, df) == alpha``, by bisection. ``0 < alpha < 1``."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie between 0 and 1, got {alpha}")
    low, high = 0.0, 1.0
    while float(two_sided_p(high, df)) > alpha:
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if float(two_sided_p(middle, df)) > alpha else (low, middle)
    return (low + high) / 2


@lru_cache(maxsize=256)
def _standard_error(df: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights (trapezoid times density) of √(χ²/df): the estimated over the true standard deviation."""
    nodes = np.linspace(0.0, 1.0 + WIDTH / math.sqrt(df), POINTS)
    log_constant = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)
    with np.errstate(divide="ignore"):
        powers = (df - 1) * np.log(nodes) if df > 1 else np.zeros_like(nodes)
    weights = np.exp(log_constant + powers - df * nodes**2 / 2) * (nodes[1] - nodes[0])
    weights[[0, -1]] /= 2
    return nodes, weights


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _normal_cdf(x: np.ndarray) -> np.ndarray:
    below: np.ndarray = 0.5 * (1.0 + _erf(x / math.sqrt(2)))
    return below


def power(shift: float, df: int, alpha: float) -> float:
    """The chance that a two-sided t test at ``alpha`` rejects when the true mean lies ``shift`` standard errors from 0.

    The non-central t, integrated over the estimated standard deviation; absolute error below 2e-5.
    """
    critical = critical_value(alpha, df)
    nodes, weights = _standard_error(df)
    beyond = _normal_cdf(shift - critical * nodes) + _normal_cdf(-shift - critical * nodes)
    return float(min(1.0, weights @ beyond))


@lru_cache(maxsize=256)
def detectable_shift(df: int, alpha: float, wanted: float) -> float:
    """The true mean, in standard errors, that a two-sided test at ``alpha`` finds with probability ``wanted``."""
    low, high = 0.0, 1.0
    while power(high, df, alpha) < wanted:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, df, alpha) < wanted else (low, middle)
    return (low + high) / 2
