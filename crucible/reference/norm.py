"""RMSNorm and LayerNorm."""

from __future__ import annotations

import math

import numpy as np
from numba import njit


@njit
def rmsnorm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x²) + eps) · weight over the rows of [rows, d] (arXiv:1910.07467)."""
    out = np.empty_like(x)
    rows, d = x.shape
    for r in range(rows):
        total = 0.0
        for j in range(d):
            total += x[r, j] * x[r, j]
        for j in range(d):
            out[r, j] = x[r, j] / math.sqrt(total / d + eps) * weight[j]
    return out


@njit
def layernorm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    """(x − mean) / sqrt(var + eps) · weight + bias over the rows of [rows, d]; var is biased (arXiv:1607.06450)."""
    out = np.empty_like(x)
    rows, d = x.shape
    for r in range(rows):
        mean = 0.0
        for j in range(d):
            mean += x[r, j] / d
        var = 0.0
        for j in range(d):
            var += (x[r, j] - mean) ** 2 / d
        for j in range(d):
            out[r, j] = (x[r, j] - mean) / math.sqrt(var + eps) * weight[j] + bias[j]
    return out
