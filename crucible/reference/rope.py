"""Rotary position embedding."""

from __future__ import annotations

import math

import numpy as np
from numba import njit


@njit
def rope(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray, factor: float, interleaved: bool) -> np.ndarray:
    """Rotates every head of x [rows, heads, head_dim] (arXiv:2104.09864).

    Pair i is (i, i + head_dim/2), or (2i, 2i + 1) when ``interleaved``; its angle is positions[row] · frequencies[i]
    radians; ``factor`` multiplies the result (YaRN's attention factor, 1 otherwise).
    """
    out = np.empty_like(x)
    half = x.shape[2] // 2
    for r in range(x.shape[0]):
        for h in range(x.shape[1]):
            for i in range(half):
                first = 2 * i if interleaved else i
                second = 2 * i + 1 if interleaved else i + half
                angle = positions[r] * frequencies[i]
                a, b = x[r, h, first], x[r, h, second]
                out[r, h, first] = (a * math.cos(angle) - b * math.sin(angle)) * factor
                out[r, h, second] = (b * math.cos(angle) + a * math.sin(angle)) * factor
    return out
