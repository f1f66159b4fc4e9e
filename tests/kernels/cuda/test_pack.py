"""Packed weights stand for the weights they were made of, in the order that linear.cuh reads."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from crucible.kernels.cuda import pack
from crucible.kernels.cuda.pack import PackedMatrix
from tests.kernels.cuda.linear_runs import quantized


def weights(rows: int, inputs: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, inputs)).astype(np.float32)


def dequantize(values: NDArray[np.int8], scales: NDArray[np.uint16]) -> NDArray[np.float32]:
    real = (scales.astype(np.uint32) << 15).view(np.float32)
    return values * np.repeat(real, pack.GROUP, axis=1)[:, : values.shape[1]]


@pytest.mark.parametrize(("rows", "inputs"), [(16, 64), (5, 64), (33, 320), (100, 33), (48, 97)])
def test_unpacking_gives_the_weights_back(rows: int, inputs: int) -> None:
    w, order = weights(rows, inputs), pack.plain_order(rows)
    assert np.array_equal(pack.unpack(pack.pack_f32(w, order), order), w)
    halves = pack.pack_f16(w, order)
    exact = np.ldexp(np.ldexp(w, halves.exponent).astype(np.float16).astype(np.float32), -halves.exponent)
    assert np.array_equal(pack.unpack(halves, order), exact)
    values, scales = quantized(w)
    assert np.array_equal(pack.unpack(pack.pack_int8(values, scales, order), order), dequantize(values, scales))


def test_the_place_of_each_weight() -> None:
    """Written out once more, element by element."""
    w = weights(32, 128)
    values, scales = quantized(w)
    order = pack.plain_order(32)
    as_int8, as_f16 = pack.pack_int8(values, scales, order), pack.pack_f16(w, order)
    halves = np.ldexp(w, as_f16.exponent).astype(np.float16)
    flat8, flat16 = as_int8.weights.reshape(2, 2, 1024), as_f16.weights.reshape(2, 2, 1024)
    for n in range(32):
        for k in range(128):
            tile, g, h = n // 16, n % 8, n % 16 // 8
            block, q, j, p, i = k // 64, k % 64 // 16, k % 16 // 4, k % 4 // 2, k % 2
            lane = g * 4 + q
            byte = flat8[tile, block, (j // 2) * 512 + lane * 16 + (j % 2) * 8 + p * 4 + h * 2 + i]
            assert byte == int(values[n, k]) + 128
            assert flat16[tile, block, j * 256 + lane * 8 + p * 4 + h * 2 + i] == halves[n, k]
            assert as_int8.scales is not None
            scale = float(as_int8.scales[tile, block, q // 2, g, h]) * as_int8.factor
            assert scale == (scales[n, k // 32].astype(np.uint32) << 15).view(np.float32)


@pytest.mark.parametrize("size", [1e-30, 3e-4, 0.9, 1.0, 200.0, 1e30])
def test_the_largest_weight_lies_between_128_and_256(size: float) -> None:
    w = (np.random.default_rng(2).uniform(-1, 1, (20, 70)) * size).astype(np.float32)
    w[3, 5] = size
    order = pack.plain_order(20)
    for matrix in (pack.pack_f16(w, order), pack.pack_int8(*quantized(w), order)):
        largest = np.ldexp(np.abs(pack.unpack(matrix, order)).max(), matrix.exponent)
        assert 128 <= largest < 256
        assert np.float32(matrix.factor) == np.ldexp(1.0, -matrix.exponent)


def test_small_scales_are_rounded_to_subnormal_halves_and_unused_ones_dropped() -> None:
    values = np.ones((16, 96), np.int8)
    values[:, 64:] = 0
    scales = np.full((16, 3), 0x7F00, np.uint16)  # 1
    scales[1, 1] = 0x7F00 - (25 << 8) + 0x80  # 1.5 · 2⁻²⁵
    scales[2, 2] = 0xFE00  # of a group of zeros: 2¹²⁷
    order = pack.plain_order(16)
    matrix = pack.pack_int8(values, scales, order)
    assert matrix.exponent == 7
    assert matrix.scales is not None
    assert matrix.scales[0, 0, 1, 1, 0] == np.float16(1.5 * 2**-18)
    assert np.isfinite(matrix.scales).all()
    assert not pack.unpack(matrix, order)[:, 64:].any()


def test_zeros_have_exponent_zero() -> None:
    zeros = np.zeros((16, 64), np.float32)
    order = pack.plain_order(16)
    for matrix in (pack.pack_f16(zeros, order), pack.pack_int8(*quantized(zeros), order)):
        assert matrix.exponent == 0
        assert not pack.unpack(matrix, order).any()


def pairs(order: NDArray[np.int32]) -> NDArray[np.int32]:
    """[pairs, 2]: the rows that share a lane, tile after tile."""
    return order.reshape(-1, 2, 8).transpose(0, 2, 1).reshape(-1, 2)


def test_orders_put_what_belongs_together_into_one_lane() -> None:
    assert pairs(pack.plain_order(10))[:3].tolist() == [[0, 8], [1, 9], [2, -1]]
    half = pairs(pack.head_order(3, 64, interleaved=False))
    assert half.tolist() == [[h * 64 + i, h * 64 + i + 32] for h in range(3) for i in range(32)]
    interleaved = pairs(pack.head_order(2, 32, interleaved=True))
    assert interleaved.tolist() == [[h * 32 + 2 * i, h * 32 + 2 * i + 1] for h in range(2) for i in range(16)]
    gated = pairs(pack.gated_order(11))
    assert gated.tolist() == [[j, j + 11] for j in range(11)] + [[-1, -1]] * 5
    for order, rows in ((pack.head_order(3, 64, True), 192), (pack.gated_order(13), 26), (pack.plain_order(37), 37)):
        assert sorted(order[order >= 0].tolist()) == list(range(rows))


@pytest.mark.parametrize("quant", ["f32", "f16", "int8"])
def test_orders_move_rows_and_biases(quant: str) -> None:
    w, bias = weights(22, 80), weights(1, 22)[0]
    order = pack.gated_order(11)

    def packed(rows: NDArray[np.int32]) -> PackedMatrix:
        if quant == "int8":
            return pack.pack_int8(*quantized(w), rows, bias)
        return (pack.pack_f16 if quant == "f16" else pack.pack_f32)(w, rows, bias)

    moved, plain = packed(order), packed(pack.plain_order(22))
    assert np.array_equal(pack.unpack(moved, order), pack.unpack(plain, pack.plain_order(22)))
    assert moved.bias is not None
    assert np.array_equal(moved.bias[order >= 0], bias[order[order >= 0]])
    assert not moved.bias[order < 0].any()
    scales = 0 if moved.scales is None else moved.scales.nbytes
    assert moved.nbytes == moved.weights.nbytes + moved.bias.nbytes + scales


def test_many_tiles_are_packed_slab_by_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weights(100, 64)
    order = pack.plain_order(100)
    values, scales = quantized(w)
    whole = [pack.pack_int8(values, scales, order), pack.pack_f16(w, order), pack.pack_f32(w, order)]
    monkeypatch.setattr(pack, "_SLAB", 2)
    parts = [pack.pack_int8(values, scales, order), pack.pack_f16(w, order), pack.pack_f32(w, order)]
    for a, b in zip(whole, parts, strict=True):
        assert np.array_equal(a.weights, b.weights)
