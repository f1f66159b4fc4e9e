"""Token embedding read from the packed matrix (a tied head shares it), and learned positions."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from crucible.kernels.cpu.intrinsics import scale_to_float
from crucible.kernels.cpu.linear import GROUP, LANES

F = np.float32


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def embed(w: np.ndarray, scale: np.ndarray, token_ids: np.ndarray, out: np.ndarray) -> None:
    """out float32 [rows, d] = row token_ids[r] of the matrix packed as w [blocks, d, 64]."""
    rows, d = out.shape
    for row in prange(rows):
        token = token_ids[row]
        block = w[token // LANES]
        lane = token % LANES
        scales = scale[token // LANES]
        depth = GROUP if scales.shape[0] > 1 else d
        for k in range(d):
            out[row, k] = F(block[k, lane]) * scale_to_float(scales[k // depth, lane])


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def add_positions(x: np.ndarray, table: np.ndarray, positions: np.ndarray) -> None:
    """x [rows, d] += table[positions[r]], table float32 [context, d]."""
    rows, d = x.shape
    for row in prange(rows):
        source = table[positions[row]]
        for j in range(d):
            x[row, j] += source[j]
