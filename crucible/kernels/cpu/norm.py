"""RMSNorm and LayerNorm over rows, sums in float64 over eight lanes in a fixed order."""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

F = np.float32
LANES = 8


@njit(forceinline=True)
def _sum(x: np.ndarray, shift: float, square: bool) -> float:
    """Σ (x − shift) or Σ (x − shift)² in float64: lane j adds the elements j, j + 8, …; lanes are added 0 … 7."""
    acc = np.zeros(LANES, np.float64)
    n = x.shape[0]
    whole = n // LANES * LANES
    for i in range(0, whole, LANES):
        for j in range(LANES):
            v = float(x[i + j]) - shift
            acc[j] += v * v if square else v
    for i in range(whole, n):
        v = float(x[i]) - shift
        acc[i - whole] += v * v if square else v
    total = 0.0
    for j in range(LANES):
        total += acc[j]
    return total


@njit(forceinline=True)
def _rms(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray) -> None:
    d = x.shape[0]
    factor = F(1.0 / math.sqrt(_sum(x, 0.0, True) / d + eps))
    for j in range(d):
        out[j] = x[j] * factor * weight[j]


@njit(nogil=True, cache=True, error_model="numpy")
def rmsnorm_row(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray) -> None:
    """``rmsnorm`` of a single row [d]: waking other threads for it would take longer than the row."""
    _rms(x, weight, eps, out)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def rmsnorm(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray) -> None:
    """out = x / sqrt(mean(x²) + eps) * weight (arXiv:1910.07467); x, out float32 [rows, d] (may be the same array)."""
    for row in prange(x.shape[0]):
        _rms(x[row], weight, eps, out[row])


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def layernorm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float, out: np.ndarray) -> None:
    """out = (x − mean) / sqrt(var + eps) * weight + bias (arXiv:1607.06450); biased variance, two passes."""
    rows, d = x.shape
    for row in prange(rows):
        mean = _sum(x[row], 0.0, False) / d
        factor = 1.0 / math.sqrt(_sum(x[row], mean, True) / d + eps)
        for j in range(d):
            out[row, j] = F((float(x[row, j]) - mean) * factor) * weight[j] + bias[j]
