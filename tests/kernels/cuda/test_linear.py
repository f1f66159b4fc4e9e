"""The projections: emulated kernels against their arithmetic in numpy (equal bits) and the float64 oracle (bounds).

Real tensor cores add the 16 products of a step in an order of their own; all else is as emulated.
"""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from crucible import reference
from crucible.kernels.cuda import geometry, pack
from tests.kernels.cuda.linear_runs import F32, TENSOR_KERNELS, launch, model, packed, padded, store

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

HALF = 2.0**-11  # half a unit in the last place of a half, relative
SHAPES = [(64, 40), (97, 33), (320, 48), (576, 16), (300, 200)]  # inputs, outputs


def dense(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return (rng.random(shape) + 0.5).astype(F32)


def signed(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return rng.standard_normal(shape).astype(F32)


@pytest.mark.parametrize("quant", ["int8", "f16"])
@pytest.mark.parametrize("kernel", TENSOR_KERNELS)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES[1:4])
def test_a_projection_has_the_bits_of_its_arithmetic(kernel: str, quant: str, inputs: int, outputs: int) -> None:
    rng = np.random.default_rng(inputs)
    matrix = packed(quant, signed(rng, outputs, inputs), bias=signed(rng, outputs))
    x = padded(signed(rng, 17, inputs))
    got = store(kernel, quant, matrix, x)
    assert np.array_equal(got, model(matrix, pack.plain_order(outputs), x))


@pytest.mark.parametrize("quant", ["int8", "f16", "f32"])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_projection_is_near_the_oracle(quant: str, inputs: int, outputs: int) -> None:
    """Dense positive values. A half has 2⁻¹¹: the activation is exact here, so only int8's product rounds, or the
    half weight; then K + 1 float32 roundings."""
    rng = np.random.default_rng(inputs)
    weights, x = dense(rng, outputs, inputs), dense(rng, 3, inputs)
    if quant == "f32":
        activations, exact = x.copy(), weights.astype(np.float64)
    else:
        activations = padded(x)
        x = activations[:, :inputs].astype(F32)
        exact = reference.quantize_groups(weights, 32, 128) if quant == "int8" else weights.astype(np.float64)
    matrix = packed(quant, weights)
    want = reference.linear(x.astype(np.float64), exact, np.zeros(outputs))
    sums = (inputs + 1) * 2.0**-24
    scalar = store("scalar", quant, matrix, activations)
    assert np.abs(scalar / want - 1).max() <= sums + (HALF if quant == "f16" else 0)
    if quant != "f32":
        assert np.abs(store("small8", quant, matrix, activations) / want - 1).max() <= sums + HALF


@pytest.mark.parametrize("quant", ["int8", "f16"])
def test_a_row_has_the_same_bits_in_every_kernel_and_batch(quant: str) -> None:
    rng = np.random.default_rng(5)
    matrix = packed(quant, signed(rng, 150, 300), bias=signed(rng, 150))
    x = padded(signed(rng, 130, 300))
    want = store("big128", quant, matrix, x)
    assert np.array_equal(store("big64", quant, matrix, x), want)
    for kernel, rows in (("small8", 1), ("small8", 8), ("small16", 3), ("small32", 40), ("big64", 1), ("small16", 17)):
        first = int(rng.integers(0, 131 - rows))
        got = store(kernel, quant, matrix, x[first : first + rows].copy())
        assert np.array_equal(got, want[first : first + rows]), (kernel, rows)


@pytest.mark.parametrize("kernel", TENSOR_KERNELS)
@pytest.mark.parametrize("order", ["reversed", "shuffled"])
def test_threads_and_blocks_may_run_in_any_order(kernel: str, order: str) -> None:
    rng = np.random.default_rng(6)
    matrix = packed("int8", signed(rng, 150, 530))
    x = padded(signed(rng, 9, 530))
    want = store(kernel, "int8", matrix, x)
    assert np.array_equal(store(kernel, "int8", matrix, x, order=order, seed=1), want)


@pytest.mark.parametrize("kernel", [*TENSOR_KERNELS, "scalar"])
@pytest.mark.parametrize("quant", ["int8", "f16"])
def test_a_bad_row_leaves_the_others_alone(kernel: str, quant: str) -> None:
    rng = np.random.default_rng(7)
    matrix = packed(quant, signed(rng, 40, 100))
    x = padded(signed(rng, 11, 100))
    want = store(kernel, quant, matrix, x)
    x[4, 50], x[6] = np.nan, np.inf
    got = store(kernel, quant, matrix, x)
    others = [0, 1, 2, 3, 5, 7, 8, 9, 10]
    assert np.array_equal(got[others], want[others])
    assert np.isnan(got[4]).all()
    assert not np.isfinite(got[6]).any()


@pytest.mark.parametrize("kernel", ["small8", "big64", "scalar"])
@pytest.mark.parametrize("quant", ["int8", "f16"])
def test_the_residual_is_added_to(kernel: str, quant: str) -> None:
    rng = np.random.default_rng(8)
    matrix = packed(quant, signed(rng, 33, 97))
    x, residual = padded(signed(rng, 5, 97)), signed(rng, 5, 33)
    out = residual.copy()
    launch(kernel, quant, "add", matrix, x, out, 33, 33)
    assert np.array_equal(out, residual + store(kernel, quant, matrix, x))


def activation_run(kernel: str, quant: str, op: str, matrix: Any, x: Any, outputs: int, *more: int) -> NDArray[Any]:
    dtype = F32 if quant == "f32" else np.float16
    out = np.zeros((len(x), -(-outputs // 64) * 64), dtype)
    launch(kernel, quant, op, matrix, x, out, out.shape[1], outputs, *more)
    assert not out[:, outputs:].any()
    return out[:, :outputs]


@pytest.mark.parametrize("quant", ["int8", "f16", "f32"])
@pytest.mark.parametrize("op", ["swiglu", "gelu", "gelu_tanh"])
def test_activations_are_near_the_oracle_and_alike_everywhere(quant: str, op: str) -> None:
    rng = np.random.default_rng(9)
    outputs, inputs = 21, 130
    gated = op == "swiglu"
    count = 2 * outputs if gated else outputs
    weights, bias = signed(rng, count, inputs) / F32(12), signed(rng, count)
    order = pack.gated_order(outputs) if gated else pack.plain_order(count)
    matrix = packed(quant, weights, order, bias)
    x = padded(signed(rng, 10, inputs), F32 if quant == "f32" else np.float16)
    more = () if gated else (int(op == "gelu_tanh"),)
    name = "swiglu" if gated else "gelu"
    results = {
        kernel: activation_run(kernel, quant, name, matrix, x, outputs, *more)
        for kernel in (("scalar",) if quant == "f32" else ("scalar", "small8", "small32", "big64", "big128"))
    }
    exact = pack.unpack(matrix, order).astype(np.float64)
    y = reference.linear(x[:, :inputs].astype(np.float64), exact, bias.astype(np.float64))
    want = reference.swiglu(y[:, :outputs], y[:, outputs:]) if gated else reference.gelu(y, op == "gelu_tanh")
    for kernel, got in results.items():
        bound = 2e-6 if quant == "f32" else HALF * (1 if kernel == "scalar" else 3)
        # the result's own rounding is relative; the sum's, of |x · w| terms, is not
        assert (np.abs(got - want) <= bound * np.abs(want) + (1e-6 if kernel == "scalar" else 1e-3)).all(), kernel
        if kernel not in ("scalar", "small8"):
            assert np.array_equal(got, results["small8"])


def test_small_launches_fit_and_supply_every_processor() -> None:
    for inputs in (64, 576, 2048, 14336, 40448):
        for rows in (1, 8, 9, 33):
            tokens = geometry.small_tokens(rows, inputs)
            for tiles in (1, 48, 3144):
                (blocks, groups), threads, shared = geometry.small(tiles, inputs, rows, tokens, 132)
                assert blocks >= min(tiles, 132)
                assert groups * tokens >= rows
                assert threads == 256
                assert 0 < shared <= 99 * 1024
    assert [geometry.small_tokens(rows, 768) for rows in (1, 8, 9, 16, 17, 32, 100)] == [8, 8, 16, 16, 32, 32, 32]
    assert geometry.small_tokens(32, 40448) == 8
    with pytest.raises(ValueError, match="cannot take 40960 inputs"):
        geometry.small(1, 40960, 1, 8, 132)
