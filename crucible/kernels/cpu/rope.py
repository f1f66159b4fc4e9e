"""Rotary embedding of Q and K, and the write of K and V into their pages."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

PAGE = 16


@njit(forceinline=True)
def _rotate(head: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> None:
    """Rotates one head [head_dim] in place by the angles of one position."""
    half = cos.shape[0]
    for i in range(half):
        a_at = 2 * i if interleaved else i
        b_at = 2 * i + 1 if interleaved else i + half
        a, b = head[a_at], head[b_at]
        head[a_at] = a * cos[i] - b * sin[i]
        head[b_at] = b * cos[i] + a * sin[i]


@njit(forceinline=True)
def _rotate_and_store_row(
    row: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    rotate: bool,
    interleaved: bool,
    position: int,
    page: int,
    num_heads: int,
    layer: int,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
) -> None:
    kv_heads, head_dim = v_cache.shape[2], v_cache.shape[4]
    slot = position % PAGE
    for h in range(num_heads + kv_heads):
        if rotate:
            _rotate(row[h * head_dim : (h + 1) * head_dim], cos[position], sin[position], interleaved)
    for h in range(kv_heads):
        k_at = (num_heads + h) * head_dim
        v_at = (num_heads + kv_heads + h) * head_dim
        k_page = k_cache[page, layer, h]
        v_slot = v_cache[page, layer, h, slot]
        for i in range(head_dim):
            k_page[i, slot] = row[k_at + i]
            v_slot[i] = row[v_at + i]


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def rope_and_store(
    qkv: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    rotate: bool,
    interleaved: bool,
    positions: np.ndarray,
    row_sequence: np.ndarray,
    page_tables: np.ndarray,
    num_heads: int,
    layer: int,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
) -> None:
    """Rotates Q and K in place (``rotate``) and stores K and V.

    qkv float32 [rows, (heads + 2 · kv_heads) · head_dim]; cos, sin float32 [context, head_dim / 2];
    k_cache float32 [pages, layers, kv_heads, head_dim, 16] (transposed: scores vectorise over the 16 positions);
    v_cache float32 [pages, layers, kv_heads, 16, head_dim].
    """
    for row in prange(qkv.shape[0]):
        position = positions[row]
        page = page_tables[row_sequence[row], position // PAGE]
        _rotate_and_store_row(
            qkv[row], cos, sin, rotate, interleaved, position, page, num_heads, layer, k_cache, v_cache
        )


@njit(nogil=True, cache=True, error_model="numpy")
def rope_and_store_rows(
    qkv: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    rotate: bool,
    interleaved: bool,
    positions: np.ndarray,
    row_sequence: np.ndarray,
    page_tables: np.ndarray,
    num_heads: int,
    layer: int,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
) -> None:
    """``rope_and_store`` for few rows, on the calling thread: waking others would take longer."""
    for row in range(qkv.shape[0]):
        position = positions[row]
        page = page_tables[row_sequence[row], position // PAGE]
        _rotate_and_store_row(
            qkv[row], cos, sin, rotate, interleaved, position, page, num_heads, layer, k_cache, v_cache
        )
