"""Projections y = x · Wᵀ over weights packed for outputs-wide vectors.

Layout: ``w`` [blocks, K, 64], int8 or float32: row n of W is lane n % 64 of block n // 64, missing rows are zero.
``scale`` uint16 [blocks, groups, 64] (``intrinsics.scale_to_float``): one for each output and group of 32 inputs
(int8), or a single group of ones (float32). ``bias`` float32 [blocks * 64], zeros where there is none.

Every output is, for each group g in order, acc = 0; acc = fma(x[k], w[k], acc) for the k of the group in order;
y = fma(acc, scale[g], y); at the end y + bias. The order does not depend on the number of rows: few rows use ``_row``
(weights stream past one row), more use ``_tile``, which turns a piece of the block into float32 once and reuses it
for four rows at a time. Both walk K alike.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from crucible.kernels.constants import QUANT_GROUP, SCALE_TRIALS
from crucible.kernels.cpu.activation import silu_f32
from crucible.kernels.cpu.intrinsics import fma, scale_from_float, scale_to_float

F = np.float32
LANES = 64
GROUP = QUANT_GROUP  # inputs that share a scale, and a tile
SMALLEST_SCALE = 256  # codes below are denormal
TILE_ROWS = 8  # from this many rows on, converting a tile once pays
ROW_CHUNK = 64  # rows taken through a block at a time: their sums (16 KiB) stay in the level 1 cache


@njit(forceinline=True)
def _row(x: np.ndarray, w: np.ndarray, scale: np.ndarray, acc: np.ndarray, y: np.ndarray) -> None:
    """y[64] = one row x[K] over one block w[K, 64]; K in steps of 8 keeps the sums in registers."""
    k_count = x.shape[0]
    groups = scale.shape[0]
    depth = GROUP if groups > 1 else k_count
    y[:] = F(0.0)
    for g in range(groups):
        first = g * depth
        last = min(first + depth, k_count)
        whole = first + (last - first) // 8 * 8
        acc[:] = F(0.0)
        for k in range(first, whole, 8):
            x0, x1, x2, x3 = x[k], x[k + 1], x[k + 2], x[k + 3]
            x4, x5, x6, x7 = x[k + 4], x[k + 5], x[k + 6], x[k + 7]
            for j in range(LANES):
                v = acc[j]
                v = fma(x0, F(w[k, j]), v)
                v = fma(x1, F(w[k + 1, j]), v)
                v = fma(x2, F(w[k + 2, j]), v)
                v = fma(x3, F(w[k + 3, j]), v)
                v = fma(x4, F(w[k + 4, j]), v)
                v = fma(x5, F(w[k + 5, j]), v)
                v = fma(x6, F(w[k + 6, j]), v)
                v = fma(x7, F(w[k + 7, j]), v)
                acc[j] = v
        for k in range(whole, last):
            xk = x[k]
            for j in range(LANES):
                acc[j] = fma(xk, F(w[k, j]), acc[j])
        for j in range(LANES):
            y[j] = fma(acc[j], scale_to_float(scale[g, j]), y[j])


@njit(forceinline=True)
def _four_rows(x: np.ndarray, m: int, start: int, depth: int, tile: np.ndarray, acc: np.ndarray) -> None:
    """acc[m … m + 3] += x[m … m + 3, start …] · tile[depth, 64]."""
    a0, a1, a2, a3 = acc[m], acc[m + 1], acc[m + 2], acc[m + 3]
    r0 = x[m, start : start + depth]
    r1 = x[m + 1, start : start + depth]
    r2 = x[m + 2, start : start + depth]
    r3 = x[m + 3, start : start + depth]
    whole = depth // 4 * 4
    for k in range(0, whole, 4):
        t0, t1, t2, t3 = tile[k], tile[k + 1], tile[k + 2], tile[k + 3]
        x00, x01, x02, x03 = r0[k], r0[k + 1], r0[k + 2], r0[k + 3]
        x10, x11, x12, x13 = r1[k], r1[k + 1], r1[k + 2], r1[k + 3]
        x20, x21, x22, x23 = r2[k], r2[k + 1], r2[k + 2], r2[k + 3]
        x30, x31, x32, x33 = r3[k], r3[k + 1], r3[k + 2], r3[k + 3]
        for j in range(LANES):
            w0, w1, w2, w3 = t0[j], t1[j], t2[j], t3[j]
            v0, v1, v2, v3 = a0[j], a1[j], a2[j], a3[j]
            v0, v1, v2, v3 = fma(x00, w0, v0), fma(x10, w0, v1), fma(x20, w0, v2), fma(x30, w0, v3)
            v0, v1, v2, v3 = fma(x01, w1, v0), fma(x11, w1, v1), fma(x21, w1, v2), fma(x31, w1, v3)
            v0, v1, v2, v3 = fma(x02, w2, v0), fma(x12, w2, v1), fma(x22, w2, v2), fma(x32, w2, v3)
            v0, v1, v2, v3 = fma(x03, w3, v0), fma(x13, w3, v1), fma(x23, w3, v2), fma(x33, w3, v3)
            a0[j], a1[j], a2[j], a3[j] = v0, v1, v2, v3
    for k in range(whole, depth):
        x0, x1, x2, x3 = r0[k], r1[k], r2[k], r3[k]
        t0 = tile[k]
        for j in range(LANES):
            a0[j] = fma(x0, t0[j], a0[j])
            a1[j] = fma(x1, t0[j], a1[j])
            a2[j] = fma(x2, t0[j], a2[j])
            a3[j] = fma(x3, t0[j], a3[j])


@njit(forceinline=True)
def _last_row(x: np.ndarray, m: int, start: int, depth: int, tile: np.ndarray, acc: np.ndarray) -> None:
    """acc[m] += x[m, start …] · tile[depth, 64]."""
    a = acc[m]
    row = x[m, start : start + depth]
    whole = depth // 4 * 4
    for k in range(0, whole, 4):
        t0, t1, t2, t3 = tile[k], tile[k + 1], tile[k + 2], tile[k + 3]
        x0, x1, x2, x3 = row[k], row[k + 1], row[k + 2], row[k + 3]
        for j in range(LANES):
            a[j] = fma(x3, t3[j], fma(x2, t2[j], fma(x1, t1[j], fma(x0, t0[j], a[j]))))
    for k in range(whole, depth):
        x0, t0 = row[k], tile[k]
        for j in range(LANES):
            a[j] = fma(x0, t0[j], a[j])


@njit(forceinline=True)
def _tile(x: np.ndarray, w: np.ndarray, scale: np.ndarray, tile: np.ndarray, acc: np.ndarray, y: np.ndarray) -> None:
    """y[rows, 64] = x[rows, K] over one block w[K, 64]; tile [GROUP, 64] and acc [rows, 64] are scratch."""
    rows, k_count = x.shape
    groups = scale.shape[0]
    y[:] = F(0.0)
    acc[:] = F(0.0)
    fours = rows // 4 * 4
    for start in range(0, k_count, GROUP):
        depth = min(GROUP, k_count - start)
        for k in range(depth):
            for j in range(LANES):
                tile[k, j] = F(w[start + k, j])
        for m in range(0, fours, 4):
            _four_rows(x, m, start, depth, tile, acc)
        for m in range(fours, rows):
            _last_row(x, m, start, depth, tile, acc)
        if groups > 1 or start + depth == k_count:
            s = scale[start // GROUP if groups > 1 else 0]
            for m in range(rows):
                for j in range(LANES):
                    y[m, j] = fma(acc[m, j], scale_to_float(s[j]), y[m, j])
                    acc[m, j] = F(0.0)


@njit(forceinline=True)
def _block(x: np.ndarray, w: np.ndarray, scale: np.ndarray, tile: np.ndarray, acc: np.ndarray, y: np.ndarray) -> None:
    """y[rows, 64] for one block, by the cheaper of the two loops."""
    rows = x.shape[0]
    if rows < TILE_ROWS:
        for m in range(rows):
            _row(x[m], w, scale, acc[0], y[m])
    else:
        _tile(x, w, scale, tile, acc, y)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def project(x: np.ndarray, w: np.ndarray, scale: np.ndarray, bias: np.ndarray, out: np.ndarray, add: bool) -> None:
    """out [rows, N] = x [rows, K] · Wᵀ, or out += the same (the fused residual) when ``add``."""
    rows, n = out.shape
    for b in prange(w.shape[0]):
        acc = np.empty((min(rows, ROW_CHUNK), LANES), np.float32)
        y = np.empty((min(rows, ROW_CHUNK), LANES), np.float32)
        tile = np.empty((GROUP if rows >= TILE_ROWS else 1, LANES), np.float32)
        first = b * LANES
        width = min(LANES, n - first)
        for start in range(0, rows, ROW_CHUNK):
            end = min(rows, start + ROW_CHUNK)
            _block(x[start:end], w[b], scale[b], tile, acc[: end - start], y[: end - start])
            for m in range(start, end):
                for j in range(width):
                    v = y[m - start, j] + bias[first + j]
                    out[m, first + j] = out[m, first + j] + v if add else v


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def swiglu(x: np.ndarray, w: np.ndarray, scale: np.ndarray, bias: np.ndarray, out: np.ndarray) -> None:
    """out [rows, N] = silu(gate) * up (arXiv:2002.05202).

    Block 2i of ``w`` is the gate of the outputs 64i … 64i + 63, block 2i + 1 their up projection.
    """
    rows, n = out.shape
    for pair in prange(w.shape[0] // 2):
        acc = np.empty((min(rows, ROW_CHUNK), LANES), np.float32)
        gate = np.empty((min(rows, ROW_CHUNK), LANES), np.float32)
        up = np.empty((min(rows, ROW_CHUNK), LANES), np.float32)
        tile = np.empty((GROUP if rows >= TILE_ROWS else 1, LANES), np.float32)
        first = pair * LANES
        at = 2 * first
        width = min(LANES, n - first)
        for start in range(0, rows, ROW_CHUNK):
            end = min(rows, start + ROW_CHUNK)
            held = acc[: end - start]
            _block(x[start:end], w[2 * pair], scale[2 * pair], tile, held, gate[: end - start])
            _block(x[start:end], w[2 * pair + 1], scale[2 * pair + 1], tile, held, up[: end - start])
            for m in range(start, end):
                for j in range(width):
                    g = gate[m - start, j] + bias[at + j]
                    u = up[m - start, j] + bias[at + LANES + j]
                    out[m, first + j] = silu_f32(g) * u


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def swiglu_row(
    x: np.ndarray, w: np.ndarray, scale: np.ndarray, bias: np.ndarray, y: np.ndarray, out: np.ndarray
) -> None:
    """``swiglu`` of a single row: x [K], out [N]; y float32 [blocks, 64] is scratch.

    The same arithmetic with every block a work item of its own: a loop over one matrix reads memory a third faster
    than one that alternates between two.
    """
    n = out.shape[0]
    for b in prange(w.shape[0]):
        acc = np.empty(LANES, np.float32)
        _row(x, w[b], scale[b], acc, y[b])
    for pair in range(w.shape[0] // 2):
        first = pair * LANES
        at = 2 * first
        for j in range(min(LANES, n - first)):
            g = y[2 * pair, j] + bias[at + j]
            u = y[2 * pair + 1, j] + bias[at + LANES + j]
            out[first + j] = silu_f32(g) * u


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def pack_f32(rows: np.ndarray, w: np.ndarray, first_block: int, step: int) -> None:
    """Copies rows float32 [N, K] into every ``step``-th block of w [blocks, K, 64] from ``first_block`` on."""
    n, k_count = rows.shape
    for i in prange((n + LANES - 1) // LANES):
        block = w[first_block + i * step]
        for j in range(min(LANES, n - i * LANES)):
            source = rows[i * LANES + j]
            for k in range(k_count):
                block[k, j] = source[k]


@njit(forceinline=True)
def _best_scale(source: np.ndarray, code: int, trial: np.ndarray) -> int:
    """Of the SCALE_TRIALS 16-bit scales from ``code`` upwards, the first with the least squared error of ``source``.

    trial float32 [3, SCALE_TRIALS] is scratch: scales, their inverses, errors. The errors are summed in order.
    """
    for d in range(SCALE_TRIALS):
        trial[0, d] = scale_to_float(code + d)
        trial[1, d] = F(1.0) / trial[0, d]
        trial[2, d] = F(0.0)
    for k in range(source.shape[0]):
        v = source[k]
        for d in range(SCALE_TRIALS):
            r = v - np.rint(v * trial[1, d]) * trial[0, d]
            trial[2, d] += r * r
    best = 0
    for d in range(1, SCALE_TRIALS):
        if trial[2, d] < trial[2, best]:
            best = d
    return code + best


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def pack_i8(rows: np.ndarray, w: np.ndarray, scale: np.ndarray, first_block: int, step: int) -> None:
    """The same as int8, symmetric in each group: q = round-half-even(w · (1 / scale)).

    The scale is searched upwards from max |w| / 127 (``_best_scale``). That is rounded to 16 bits, by at most 1/512 of
    it: the largest quotient, 127.25, stays 127. A group below 1e-36 becomes zero, with scale zero.
    """
    n, k_count = rows.shape
    for i in prange((n + LANES - 1) // LANES):
        at = first_block + i * step
        block = w[at]
        trial = np.empty((3, SCALE_TRIALS), np.float32)
        for j in range(min(LANES, n - i * LANES)):
            for g in range(scale.shape[1]):
                source = rows[i * LANES + j, g * GROUP : min((g + 1) * GROUP, k_count)]
                top = F(0.0)
                for k in range(len(source)):
                    top = max(top, abs(source[k]))
                scale[at, g, j] = 0
                code = np.int64(scale_from_float(top / F(127.0)))
                if code >= SMALLEST_SCALE:
                    code = _best_scale(source, code, trial)
                    scale[at, g, j] = code
                    inverse = F(1.0) / scale_to_float(code)
                    for k in range(len(source)):
                        block[g * GROUP + k, j] = np.int8(np.rint(source[k] * inverse))


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def pack_quantized(
    values: np.ndarray, scales: np.ndarray, w: np.ndarray, scale: np.ndarray, first_block: int, step: int
) -> None:
    """What ``pack_i8`` made before, int8 values [N, K] and uint16 scales [N, groups], into the same places."""
    n, k_count = values.shape
    for i in prange((n + LANES - 1) // LANES):
        at = first_block + i * step
        for j in range(min(LANES, n - i * LANES)):
            row = i * LANES + j
            for k in range(k_count):
                w[at, k, j] = values[row, k]
            for g in range(scale.shape[1]):
                scale[at, g, j] = scales[row, g]
