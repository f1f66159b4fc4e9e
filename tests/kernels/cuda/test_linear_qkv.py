"""The projection to q, k and v: rotation in registers, and where K and V are written."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from crucible import reference
from crucible.kernels.cuda import pack
from tests.kernels.cuda.linear_runs import F32, launch, model, packed, padded

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

LAYERS, LAYER, CONTEXT, PAGES = 2, 1, 80, 11
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32


def case(rows: int, pairing: str, seed: int = 1, head_dim: int = HEAD_DIM) -> SimpleNamespace:
    """Rows of two sequences with pages of their own; ``pairing``: half, interleaved or none."""
    rng = np.random.default_rng(seed)
    heads = HEADS + 2 * KV_HEADS
    frequencies = 1 / 500.0 ** (np.arange(0, head_dim, 2) / head_dim)
    angles = np.arange(CONTEXT)[:, None] * frequencies
    first = rows // 2
    return SimpleNamespace(
        rows=rows,
        head_dim=head_dim,
        interleaved=pairing == "interleaved",
        weights=rng.standard_normal((heads * head_dim, 100)).astype(F32) / F32(10),
        bias=rng.standard_normal(heads * head_dim).astype(F32),
        x=rng.standard_normal((rows, 100)).astype(F32),
        positions=np.array([*range(20, 20 + first), *range(7, 7 + rows - first)], np.int32),
        row_sequence=np.repeat(np.arange(2, dtype=np.int32), [first, rows - first]),
        page_tables=rng.permutation(PAGES)[:10].reshape(2, 5).astype(np.int32),
        frequencies=frequencies,
        cosines=None if pairing == "none" else np.cos(angles).astype(F32),
        sines=None if pairing == "none" else np.sin(angles).astype(F32),
    )


def run(
    kernel: str, quant: str, c: SimpleNamespace, kv: Any = np.float16, part: slice = slice(None), **how: Any
) -> Any:
    """q [rows, heads · head_dim], K and V caches; and the matrix with its order."""
    order = pack.head_order(HEADS + 2 * KV_HEADS, c.head_dim, c.interleaved)
    matrix = packed(quant, c.weights, order, c.bias)
    act = F32 if quant == "f32" else np.float16
    x = padded(c.x[part], act)
    q = np.zeros((len(x), HEADS * c.head_dim + 8), act)
    k = np.full((PAGES, LAYERS, KV_HEADS, 16, c.head_dim), 9.0, kv)
    v = np.full((PAGES, LAYERS, KV_HEADS, c.head_dim, 16), 9.0, kv)
    op = "qkv" if kv == np.float16 else "qkv32"
    launch(
        kernel, quant, op, matrix, x, q, q.shape[1], k, v, c.positions[part].copy(), c.row_sequence[part].copy(),
        c.page_tables, c.page_tables.shape[1], c.cosines, c.sines, HEADS, KV_HEADS, c.head_dim, int(c.interleaved),
        LAYER, LAYERS, **how,
    )  # fmt: skip
    assert not q[:, HEADS * c.head_dim :].any()
    return q[:, : HEADS * c.head_dim].copy(), k, v, matrix, order


def read_rows(k: NDArray[Any], v: NDArray[Any], c: SimpleNamespace) -> tuple[NDArray[Any], NDArray[Any]]:
    """What the caches hold for each row, [rows, kv_heads, head_dim]; checks that nothing else was written."""
    k, v = k.copy(), v.transpose(0, 1, 2, 4, 3).copy()
    pages, slots = c.page_tables[c.row_sequence, c.positions // 16], c.positions % 16
    rows = k[pages, LAYER, :, slots], v[pages, LAYER, :, slots]
    k[pages, LAYER, :, slots], v[pages, LAYER, :, slots] = 9.0, 9.0
    assert (k == 9.0).all()
    assert (v == 9.0).all()
    return rows


def rotate(c: SimpleNamespace, y: NDArray[np.float32]) -> NDArray[np.float32]:
    """[rows, heads, head_dim] turned like the kernels do it, in float32."""
    half = c.head_dim // 2
    first = np.arange(half) * 2 if c.interleaved else np.arange(half)
    second = first + 1 if c.interleaved else first + half
    cos, sin = c.cosines[c.positions][:, None], c.sines[c.positions][:, None]
    out = np.empty_like(y)
    out[..., first] = y[..., first] * cos - y[..., second] * sin
    out[..., second] = y[..., second] * cos + y[..., first] * sin
    return out


@pytest.mark.parametrize("pairing", ["half", "interleaved", "none"])
@pytest.mark.parametrize("quant", ["int8", "f16"])
@pytest.mark.parametrize("kernel", ["small8", "small32", "big64", "big128"])
def test_q_k_and_v_have_the_bits_of_their_arithmetic(kernel: str, quant: str, pairing: str) -> None:
    c = case(19, pairing)
    q, k, v, matrix, order = run(kernel, quant, c, order="shuffled")
    y = model(matrix, order, padded(c.x)).reshape(c.rows, -1, c.head_dim)
    turned = y if pairing == "none" else rotate(c, y)
    k_rows, v_rows = read_rows(k, v, c)
    assert np.array_equal(q, turned[:, :HEADS].reshape(c.rows, -1).astype(np.float16))
    assert np.array_equal(k_rows, turned[:, HEADS : HEADS + KV_HEADS].astype(np.float16))
    assert np.array_equal(v_rows, y[:, HEADS + KV_HEADS :].astype(np.float16))


@pytest.mark.parametrize("pairing", ["half", "interleaved", "none"])
@pytest.mark.parametrize("quant", ["int8", "f16", "f32"])
def test_the_scalar_kernel_with_a_float_cache_is_near_the_oracle(quant: str, pairing: str) -> None:
    c = case(6, pairing, seed=2, head_dim=64)
    q, k, v, matrix, order = run("scalar", quant, c, kv=F32)
    exact = pack.unpack(matrix, order).astype(np.float64)
    x = padded(c.x, F32 if quant == "f32" else np.float16)[:, :100].astype(np.float64)
    y = reference.linear(x, exact, c.bias.astype(np.float64)).reshape(c.rows, -1, c.head_dim)
    turned = HEADS + KV_HEADS
    if pairing != "none":
        y[:, :turned] = reference.rope(
            np.ascontiguousarray(y[:, :turned]), c.positions.astype(np.float64), c.frequencies, 1.0, c.interleaved
        )
    k_rows, v_rows = read_rows(k, v, c)
    assert np.abs(k_rows - y[:, HEADS:turned]).max() < 4e-6
    assert np.abs(v_rows - y[:, turned:]).max() < 4e-6
    assert np.abs(q.reshape(c.rows, HEADS, -1) - y[:, :HEADS]).max() < (4e-6 if quant == "f32" else 4e-3)


@pytest.mark.parametrize("quant", ["int8", "f16"])
def test_a_row_alone_writes_the_same_bits(quant: str) -> None:
    c = case(40, "half", seed=3, head_dim=64)
    q, k, v, *_ = run("big128", quant, c, kv=F32)
    k_rows, v_rows = read_rows(k, v, c)
    for kernel, row in (("small8", 0), ("small16", 17), ("small32", 25), ("big64", 39)):
        q1, k1, v1, *_ = run(kernel, quant, c, kv=F32, part=slice(row, row + 1))
        one = SimpleNamespace(**{**vars(c), "rows": 1})
        one.positions, one.row_sequence = c.positions[row : row + 1], c.row_sequence[row : row + 1]
        k1_rows, v1_rows = read_rows(k1, v1, one)
        assert np.array_equal(q1[0], q[row])
        assert np.array_equal(k1_rows[0], k_rows[row])
        assert np.array_equal(v1_rows[0], v_rows[row])
