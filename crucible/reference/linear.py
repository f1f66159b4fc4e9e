"""Projection, embedding and the int8 quantisation of weights."""

from __future__ import annotations

import math

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
def quantize_groups(weight: np.ndarray, group: int) -> np.ndarray:
    """What int8 weights stand for: float32 [N, K] → float64.

    Each run of ``group`` inputs of an output (the last may be shorter) is rounded to multiples of its scale: its
    largest magnitude / 127, rounded to 9 significant bits. Quotients are float32, halves round to even.
    """
    out = np.zeros(weight.shape)
    for n in range(weight.shape[0]):
        for start in range(0, weight.shape[1], group):
            end = min(start + group, weight.shape[1])
            top = np.float32(0.0)
            for k in range(start, end):
                top = max(top, abs(weight[n, k]))
            mantissa, exponent = math.frexp(top / np.float32(127.0))
            scale = np.float32(math.ldexp(math.floor(mantissa * 512.0 + 0.5) / 512.0, exponent))
            if scale > 0.0:
                for k in range(start, end):
                    out[n, k] = float(np.rint(weight[n, k] / scale)) * float(scale)
    return out
