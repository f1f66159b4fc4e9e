"""Causal grouped-query attention of one sequence."""

from __future__ import annotations

import math

import numpy as np
from numba import njit


@njit
def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int, slopes: np.ndarray) -> np.ndarray:
    """softmax(q · kᵀ / sqrt(head_dim) + slope · (key − query position)) · v.

    q [rows, heads, head_dim] are the queries at positions first, first + 1, …; k, v [positions, kv_heads, head_dim];
    a query sees positions 0 … its own; head h reads KV head h // (heads / kv_heads); slopes [heads] are zero
    without ALiBi. Returns [rows, heads, head_dim].
    """
    rows, heads, head_dim = q.shape
    group = heads // k.shape[1]
    out = np.zeros((rows, heads, head_dim))
    for r in range(rows):
        position = first + r
        for h in range(heads):
            scores = np.empty(position + 1)
            for p in range(position + 1):
                dot = 0.0
                for i in range(head_dim):
                    dot += q[r, h, i] * k[p, h // group, i]
                scores[p] = dot / math.sqrt(head_dim) + slopes[h] * (p - position)
            top = scores.max()
            total = 0.0
            for p in range(position + 1):
                total += math.exp(scores[p] - top)
            for p in range(position + 1):
                weight = math.exp(scores[p] - top) / total
                for i in range(head_dim):
                    out[r, h, i] += weight * v[p, h // group, i]
    return out
