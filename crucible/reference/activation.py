"""SiLU, SwiGLU and GELU."""

from __future__ import annotations

import math

import numpy as np
from numba import njit


@njit
def silu(x: float) -> float:
    """x · sigmoid(x)."""
    return x / (1.0 + math.exp(-x))


@njit
def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """silu(gate) · up, elementwise over [rows, n] (arXiv:2002.05202)."""
    out = np.empty_like(gate)
    for r in range(gate.shape[0]):
        for j in range(gate.shape[1]):
            out[r, j] = silu(gate[r, j]) * up[r, j]
    return out


@njit
def gelu(x: np.ndarray, tanh: bool) -> np.ndarray:
    """x · Φ(x) over [rows, n], or its tanh approximation (arXiv:1606.08415)."""
    out = np.empty_like(x)
    for r in range(x.shape[0]):
        for j in range(x.shape[1]):
            v = x[r, j]
            if tanh:
                out[r, j] = 0.5 * v * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (v + 0.044715 * v**3)))
            else:
                out[r, j] = 0.5 * v * (1.0 + math.erf(v / math.sqrt(2.0)))
    return out
