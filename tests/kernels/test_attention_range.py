"""Attention where exp(score) leaves the range of float32: only differences to the maximum may matter."""

from __future__ import annotations

import numpy as np
import pytest

from crucible.kernels.cpu import runtime  # noqa: F401  (configures Numba before a kernel is defined)
from crucible.kernels.cpu.attention import attention


@pytest.mark.parametrize("size", [1.0, 1e3, -1e3, 1e30])
def test_scores_of_any_size(size: float) -> None:
    """Scores size · (0, 1, 2 …) over 20 positions: the largest wins outright, or all differences are small."""
    count, width = 20, 8
    k = np.zeros((2, 1, 1, width, 16), np.float32)
    v = np.zeros((2, 1, 1, 16, width), np.float32)
    for position in range(count):
        k[position // 16, 0, 0, 0, position % 16] = position
        v[position // 16, 0, 0, position % 16] = position + 1
    qkv = np.zeros((1, 3 * width), np.float32)
    qkv[0, 0] = size
    out = np.empty((1, width), np.float32)
    pages, row = np.array([[0, 1]], np.int32), np.zeros(1, np.int32)
    attention(qkv, np.array([count - 1], np.int32), row, pages, 1.0, np.zeros(1, np.float32), 0, k, v, out)

    scores = np.float64(np.float32(size)) * np.arange(count)
    weights = np.exp(scores - scores.max())
    np.testing.assert_allclose(out[0], weights @ (np.arange(count) + 1.0) / weights.sum(), rtol=1e-6)
