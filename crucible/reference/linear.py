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
def quantize_groups(weight: np.ndarray, group: int, trials: int) -> np.ndarray:
    """What int8 weights stand for: float32 [N, K] → float64.

    Each run of ``group`` inputs of an output (the last may be shorter) is rounded to multiples of one scale, halves to
    even. Scales have 9 significant bits; of the ``trials`` from max |w| / 127 upwards (itself rounded to nearest) it is
    the first with the least squared error. Everything is computed in float32.
    """
    out = np.zeros(weight.shape)
    for n in range(weight.shape[0]):
        for start in range(0, weight.shape[1], group):
            part = weight[n, start : start + group]
            top = np.float32(0.0)
            for w in part:
                top = max(top, abs(w))
            if top > 0.0:
                scale = nine_bits(top / np.float32(127.0))
                best, least = scale, squared_error(part, scale)
                for _ in range(trials - 1):
                    scale = next_nine_bits(scale)
                    error = squared_error(part, scale)
                    if error < least:
                        best, least = scale, error
                inverse = np.float32(1.0) / best
                for k in range(len(part)):
                    out[n, start + k] = float(np.rint(part[k] * inverse)) * float(best)
    return out


@njit
def nine_bits(x: float) -> np.float32:
    """A positive number rounded to 9 significant bits, halves up."""
    mantissa, exponent = math.frexp(x)
    return np.float32(math.ldexp(math.floor(mantissa * 512.0 + 0.5) / 512.0, exponent))


@njit
def next_nine_bits(x: float) -> np.float32:
    """The next larger number of 9 significant bits."""
    mantissa, exponent = math.frexp(x)
    return np.float32(math.ldexp(mantissa + 1.0 / 512.0, exponent))


@njit
def squared_error(part: np.ndarray, scale: np.float32) -> np.float32:
    """What rounding ``part`` to multiples of ``scale`` costs, summed in order."""
    inverse = np.float32(1.0) / scale
    total = np.float32(0.0)
    for w in part:
        r = w - np.rint(w * inverse) * scale
        total += r * r
    return total
