"""exp, SiLU, GELU in float32 from explicit operations: vectorised or not, they give the same bits."""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from crucible.kernels.cpu.intrinsics import float_from_bits, fma

F = np.float32
LOG2E = F(1.4426950408889634)
LN2_HIGH = F(0.693145751953125)  # 13 trailing zero bits: n * LN2_HIGH is exact for |n| < 2**13
LN2_LOW = F(1.428606820309417e-06)
ROUND = F(12582912.0)  # 1.5 * 2**23: adding it rounds to the nearest integer


@njit(forceinline=True)
def exp_f32(x: float) -> float:
    """e**x, relative error below 2e-7 for −87 ≤ x ≤ 88; clamped outside.

    Cody–Waite reduction x = n·ln 2 + r and the Taylor polynomial of degree 7 on |r| ≤ ln 2 / 2.
    """
    x = min(max(x, F(-87.0)), F(88.0))
    n = fma(x, LOG2E, ROUND) - ROUND
    r = fma(-n, LN2_LOW, fma(-n, LN2_HIGH, x))
    p = F(1.0 / 5040.0)
    p = fma(p, r, F(1.0 / 720.0))
    p = fma(p, r, F(1.0 / 120.0))
    p = fma(p, r, F(1.0 / 24.0))
    p = fma(p, r, F(1.0 / 6.0))
    p = fma(p, r, F(0.5))
    p = fma(p, r, F(1.0))
    p = fma(p, r, F(1.0))
    return p * float_from_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@njit(forceinline=True)
def silu_f32(x: float) -> float:
    """x / (1 + e**−x)."""
    return x / (F(1.0) + exp_f32(-x))


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def gelu(x: np.ndarray, tanh: bool) -> None:
    """GELU in place over float32 [rows, n]: the erf form, or the tanh approximation (arXiv:1606.08415)."""
    rows, n = x.shape
    for row in prange(rows):
        for j in range(n):
            v = float(x[row, j])
            if tanh:
                y = 0.5 * v * (1.0 + math.tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)))
            else:
                y = 0.5 * v * (1.0 + math.erf(v * 0.7071067811865476))
            x[row, j] = F(y)
