"""Causal attention of a ragged batch over paged K and V: one loop for decode, prefill and any mixture.

A row attends to positions 0 … p of its own sequence. Scores are sums over head_dim in order, sixteen positions wide;
the softmax denominator has sixteen lanes (position mod 16) added in a fixed order; values are added in position
order. So the bits depend on the positions alone, not on pages, chunks, neighbours or threads.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from crucible.kernels.cpu.activation import exp_f32
from crucible.kernels.cpu.intrinsics import fma

F = np.float32
PAGE = 16


@njit(forceinline=True)
def _scores(q: np.ndarray, k_page: np.ndarray, out: np.ndarray) -> None:
    """out[16] = q[head_dim] · k_page[head_dim, 16], head_dim in order (a multiple of 8 or finished one by one)."""
    d = q.shape[0]
    out[:] = F(0.0)
    whole = d // 8 * 8
    for i in range(0, whole, 8):
        q0, q1, q2, q3, q4, q5, q6, q7 = q[i], q[i + 1], q[i + 2], q[i + 3], q[i + 4], q[i + 5], q[i + 6], q[i + 7]
        for j in range(PAGE):
            v = fma(q0, k_page[i, j], out[j])
            v = fma(q1, k_page[i + 1, j], v)
            v = fma(q2, k_page[i + 2, j], v)
            v = fma(q3, k_page[i + 3, j], v)
            v = fma(q4, k_page[i + 4, j], v)
            v = fma(q5, k_page[i + 5, j], v)
            v = fma(q6, k_page[i + 6, j], v)
            out[j] = fma(q7, k_page[i + 7, j], v)
    for i in range(whole, d):
        qi = q[i]
        for j in range(PAGE):
            out[j] = fma(qi, k_page[i, j], out[j])


@njit(forceinline=True)
def _values(p: np.ndarray, v_page: np.ndarray, count: int, acc: np.ndarray) -> None:
    """acc[head_dim] += Σ p[j] * v_page[j], j = 0 … count − 1 in order."""
    d = acc.shape[0]
    whole = count // 4 * 4
    for j in range(0, whole, 4):
        p0, p1, p2, p3 = p[j], p[j + 1], p[j + 2], p[j + 3]
        for i in range(d):
            v = fma(p1, v_page[j + 1, i], fma(p0, v_page[j, i], acc[i]))
            acc[i] = fma(p3, v_page[j + 3, i], fma(p2, v_page[j + 2, i], v))
    for j in range(whole, count):
        pj = p[j]
        for i in range(d):
            acc[i] = fma(pj, v_page[j, i], acc[i])


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def attention(
    qkv: np.ndarray,
    positions: np.ndarray,
    row_sequence: np.ndarray,
    page_tables: np.ndarray,
    scale: float,
    slopes: np.ndarray,
    layer: int,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    out: np.ndarray,
) -> None:
    """out float32 [rows, heads · head_dim] from the Q columns of ``qkv`` and the cache (layouts: rope.py).

    ``scale`` multiplies the scores; ``slopes`` float32 [heads] is ALiBi's, zeros without it. Query head h reads KV
    head h // (heads / kv_heads).
    """
    rows = qkv.shape[0]
    kv_heads, head_dim = v_cache.shape[2], v_cache.shape[4]
    heads = slopes.shape[0]
    n_rep = heads // kv_heads
    factor = F(scale)
    items = rows * heads
    half = (items + 1) // 2
    for item in prange(items):
        # Later rows see more positions; threads take contiguous ranges, so even items come first, then odd ones.
        index = 2 * item if item < half else 2 * (item - half) + 1
        row, h = index // heads, index % heads
        position = positions[row]
        pages = page_tables[row_sequence[row]]
        page_count = position // PAGE + 1
        last = position % PAGE + 1
        kv_head = h // n_rep
        q = qkv[row, h * head_dim : (h + 1) * head_dim]
        scores = np.empty((page_count, PAGE), np.float32)
        slope = slopes[h]
        top = F(-np.inf)
        for n in range(page_count):
            s = scores[n]
            _scores(q, k_cache[pages[n], layer, kv_head], s)
            count = PAGE if n < page_count - 1 else last
            for j in range(count):
                v = s[j] * factor + slope * F(n * PAGE + j - position)
                s[j] = v
                top = max(top, v)
        lanes = np.zeros(PAGE, np.float32)
        for n in range(page_count):
            s = scores[n]
            count = PAGE if n < page_count - 1 else last
            for j in range(count):
                e = exp_f32(s[j] - top)
                s[j] = e
                lanes[j] += e
        total = F(0.0)
        for j in range(PAGE):
            total += lanes[j]
        acc = np.zeros(head_dim, np.float32)
        for n in range(page_count):
            count = PAGE if n < page_count - 1 else last
            _values(scores[n], v_cache[pages[n], layer, kv_head], count, acc)
        inverse = F(1.0) / total
        for i in range(head_dim):
            out[row, h * head_dim + i] = acc[i] * inverse
