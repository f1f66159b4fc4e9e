"""Embedding and norms: emulated kernels against their arithmetic in numpy and the float64 oracle."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from crucible import reference
from crucible.kernels.cuda import pack
from tests.emulator import Emulated
from tests.kernels.cuda.linear_runs import F32, packed

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@cache
def kernels(source: str) -> Emulated:
    return Emulated(source)


@pytest.mark.parametrize("quant", ["int8", "f16", "f32"])
@pytest.mark.parametrize("width", [64, 97, 320])
@pytest.mark.parametrize("learned", [False, True])
def test_embedding_is_exact(quant: str, width: int, learned: bool) -> None:
    rng = np.random.default_rng(width)
    matrix = packed(quant, rng.standard_normal((50, width)).astype(F32))
    table = rng.standard_normal((9, width)).astype(F32)
    tokens, positions = np.array([0, 49, 7, 8, 17, 7], np.int32), np.array([8, 0, 3, 1, 1, 5], np.int32)
    out = np.full((6, width + 5), 3.0, F32)
    kernels("embed.cu").launch(
        f"crucible_embed_{quant}", 6, 128, 0, matrix.weights, matrix.scales, matrix.factor, width, tokens,
        table if learned else None, positions if learned else None, out, width + 5, order="shuffled",
    )  # fmt: skip
    want = pack.unpack(matrix, pack.plain_order(50))[tokens]
    assert np.array_equal(out[:, :width], want + table[positions] if learned else want)
    assert (out[:, width:] == 3.0).all()


def run(
    kind: str, x: NDArray[np.float32], weight: Any, bias: Any, rows: Any = None, dtype: Any = F32, **how: Any
) -> NDArray[Any]:
    width = len(weight)
    count = len(x) if rows is None else len(rows)
    out = np.full((count, -(-width // 64) * 64), 7.0, dtype)
    name = f"crucible_{kind}_{'f32' if dtype is F32 else 'f16'}"
    kernels("norm.cu").launch(
        name, count, 256, 0, x, x.shape[1], rows, weight, bias, 1e-5, width, out, out.shape[1], **how
    )
    assert (out[:, width:] == (7.0 if dtype is F32 else 0.0)).all()
    return out[:, :width].copy()


def lane_sums(values: NDArray[np.float32], add: Callable[[Any, Any], Any]) -> NDArray[np.float32]:
    """Sums of the rows of values [rows, n] in the kernels' order; ``add`` takes a value and the sum before it."""
    lanes = np.zeros((len(values), 256), F32)
    for start in range(0, values.shape[1], 256):
        part = values[:, start : start + 256]
        lanes[:, : part.shape[1]] = add(part, lanes[:, : part.shape[1]])
    warps = lanes.reshape(len(values), 8, 32)
    for bit in (16, 8, 4, 2, 1):
        warps = warps + warps[:, :, np.arange(32) ^ bit]
    total = warps[:, 0, 0].copy()
    for warp in range(1, 8):
        total += warps[:, warp, 0]
    return total


@pytest.mark.parametrize("width", [64, 97, 320, 1500])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norms_are_near_the_oracle_and_round_once_to_halves(kind: str, width: int, bias: bool) -> None:
    rng = np.random.default_rng(width)
    x = (rng.random((17, width + 3)) + 0.5).astype(F32)
    weight, offset = ((rng.random(width) + 0.5).astype(F32) for _ in "wb")
    got = run(kind, x, weight, offset if bias else None)
    exact = (x[:, :width].astype(np.float64), weight.astype(np.float64), offset.astype(np.float64) * bias)
    if kind == "rmsnorm":
        want = reference.rmsnorm(exact[0], exact[1], 1e-5) + exact[2]
    else:
        want = reference.layernorm(*exact, 1e-5)
    assert np.abs(got - want).max() / np.abs(want).max() <= (2e-7 if kind == "rmsnorm" else 4e-7)
    assert np.array_equal(run(kind, x, weight, offset if bias else None, dtype=np.float16), got.astype(np.float16))


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norms_have_the_bits_of_their_arithmetic(kind: str) -> None:
    rng = np.random.default_rng(3)
    x, weight = rng.standard_normal((60, 700)).astype(F32), rng.standard_normal(700).astype(F32)
    got = run(kind, x, weight, weight)
    centred = x - (lane_sums(x, lambda v, s: v + s) / F32(700))[:, None] if kind == "layernorm" else x
    square = lane_sums(centred, lambda v, s: (v.astype(np.float64) ** 2 + s).astype(F32)) / F32(700)
    factor = F32(1) / np.sqrt(square + F32(1e-5))
    assert np.array_equal(got, centred * factor[:, None] * weight + weight)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_a_row_depends_on_itself_alone(kind: str) -> None:
    rng = np.random.default_rng(4)
    x, weight = rng.standard_normal((8, 130)).astype(F32), rng.standard_normal(130).astype(F32)
    want = run(kind, x, weight, None)
    assert np.array_equal(run(kind, x[5:6].copy(), weight, None), want[5:6])
    rows = np.array([7, 0, 5], np.int32)
    assert np.array_equal(run(kind, x, weight, None, rows), want[rows])
    for order in ("reversed", "shuffled"):
        assert np.array_equal(run(kind, x, weight, None, order=order), want)
    x[3, 3], x[6] = np.nan, np.inf
    got = run(kind, x, weight, None, dtype=np.float16)
    others = [0, 1, 2, 4, 5, 7]
    assert np.array_equal(got[others], want[others].astype(np.float16))
    assert np.isnan(got[3]).all()


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_a_norm_may_replace_its_input(kind: str) -> None:
    rng = np.random.default_rng(5)
    x, weight = rng.standard_normal((4, 600)).astype(F32), rng.standard_normal(600).astype(F32)
    want = run(kind, x, weight, weight)
    kernels("norm.cu").launch(
        f"crucible_{kind}_f32", 4, 256, 0, x, 600, None, weight, weight, 1e-5, 600, x, 600, order="shuffled"
    )
    assert np.array_equal(x, want)
