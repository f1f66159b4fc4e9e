"""Projection, embedding and the int8 quantisation of weights."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit
def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """x [rows, K] · weightᵀ + bias; weight [N, K], bias [N]."""
    rows, k_count = x.shape
    out = np.empty((rows, weight.shape[0]))
    for r in range(rows):
        for n in range(weight.shape[0]):
            total = 0.0
            for k in range(k_count):
                total += x[r, k] * weight[n, k]
            out[r, n] = total + bias[n]
    return out


@njit
def embed(table: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Rows of table [vocab, d] for int token_ids [rows]."""
    out = np.empty((token_ids.shape[0], table.shape[1]))
    for r in range(token_ids.shape[0]):
        for j in range(table.shape[1]):
            out[r, j] = table[token_ids[r], j]
    return out


@njit
def quantize_rows(weight: np.ndarray) -> np.ndarray:
    """What int8 weights stand for: float32 [N, K] → float64, each row rounded to multiples of max|row| / 127.

    The scale and the quotient are float32, halves round to even, as a kernel's packing does.
    """
    out = np.zeros(weight.shape)
    for n in range(weight.shape[0]):
        top = np.float32(0.0)
        for k in range(weight.shape[1]):
            top = max(top, abs(weight[n, k]))
        scale = top / np.float32(127.0)
        if scale > 0.0:
            for k in range(weight.shape[1]):
                out[n, k] = float(np.rint(weight[n, k] / scale)) * float(scale)
    return out
