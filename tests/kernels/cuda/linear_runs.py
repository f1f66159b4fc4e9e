"""Runs of the emulated linear kernels, and their arithmetic written once more in numpy."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crucible.kernels.cuda import geometry, pack
from crucible.kernels.cuda.pack import PackedMatrix
from crucible.model.quantize import quantize
from tests.emulator import Emulated

TENSOR_KERNELS = ("small8", "small16", "small32", "big64", "big128")
F32 = np.float32
PROCESSORS = 4


@cache
def kernels(family: str) -> Emulated:
    return Emulated(f"linear_{family}.cu")


def quantized(weights: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.uint16]]:
    made = quantize(weights)
    return made.values, made.scales


def packed(quant: str, weights: NDArray[np.float32], order: Any = None, bias: Any = None) -> PackedMatrix:
    order = pack.plain_order(len(weights)) if order is None else order
    if quant == "int8":
        return pack.pack_int8(*quantized(weights), order, bias)
    return (pack.pack_f16 if quant == "f16" else pack.pack_f32)(weights, order, bias)


def padded(x: NDArray[Any], dtype: Any = np.float16) -> NDArray[Any]:
    """Rows padded with zeros to a multiple of 64."""
    return np.pad(x, ((0, 0), (0, -x.shape[1] % 64))).astype(dtype)


def launch(
    kernel: str, quant: str, op: str, matrix: PackedMatrix, x: NDArray[Any], *arguments: Any, **how: Any
) -> None:
    """``kernel``: small8 … big128 or scalar; ``x``: padded activations; ``arguments``: those of the epilogue."""
    rows, family = len(x), kernel.rstrip("0123456789")
    plan = geometry.launch(kernel, matrix.tiles, matrix.inputs, rows, PROCESSORS)
    kernels(family).launch(
        f"crucible_linear_{kernel}_{quant}_{op}", plan.grid, plan.threads, plan.shared, matrix.weights, matrix.scales,
        matrix.bias, matrix.factor, matrix.tiles, matrix.inputs, x, x.shape[1], rows, *arguments, **how,
    )  # fmt: skip


def store(kernel: str, quant: str, matrix: PackedMatrix, x: NDArray[Any], **how: Any) -> NDArray[np.float32]:
    out = np.full((len(x), matrix.rows + 3), 7.0, F32)
    launch(kernel, quant, "store", matrix, x, out, out.shape[1], matrix.rows, **how)
    assert (out[:, matrix.rows :] == 7.0).all()
    return out[:, : matrix.rows].copy()


def walk() -> NDArray[np.int64]:
    """The inputs of a block in the order in which the emulated steps add their products."""
    j, p, q, i = np.indices((4, 2, 4, 2))
    return np.asarray(16 * q + 4 * j + 2 * p + i).reshape(-1)


def model(matrix: PackedMatrix, order: Any, x: NDArray[np.float16]) -> NDArray[np.float32]:
    """What every tensor-core kernel computes, before the epilogue; float32 [rows, outputs in the source's order]."""
    scaled = np.ldexp(pack.unpack(matrix, order), matrix.exponent)
    halves = padded(scaled)  # the product q · scale rounds to a half; halves stay what they are
    total = np.zeros((len(x), matrix.rows), F32)
    for chunk in range(0, halves.shape[1], pack.CHUNK):
        sums = np.zeros_like(total)
        for block in range(chunk, min(chunk + pack.CHUNK, halves.shape[1]), pack.BLOCK):
            for k in block + walk():
                sums += x[:, k, None].astype(F32) * halves[None, :, k].astype(F32)
        total = sums if chunk == 0 else total + sums
    out = total * F32(matrix.factor)
    if matrix.bias is not None:
        bias = np.zeros(matrix.rows, F32)
        bias[order[order >= 0]] = matrix.bias[order >= 0]
        out += bias
    return out
