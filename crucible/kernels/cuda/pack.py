"""Weights in the order in which the tensor-core step reads them (cuda/linear.cuh). Pure numpy.

A matrix [outputs, K] becomes tiles of 16 rows and blocks of 64 inputs, both padded with zeros. Lane (g, q), with
g = lane >> 2 and q = lane & 3, holds of a tile and block the rows g and g + 8 and the 16 inputs 16q … 16q + 15; step j
(0 … 3) takes the inputs 4j … 4j + 3 of these. So the lane's values come as [j][p: 4j + 2p, + 1][row g, row g + 8]
[2 inputs], cut into vectors of 16 bytes, which lie beside those of the other lanes:

- int8: uint8 [tiles, blocks, 2, 32, 16], biased by 128; scales float16 [tiles, blocks, 2, 8, 2]: of the two groups of
  32 inputs, the rows g and g + 8;
- f16: float16 [tiles, blocks, 4, 32, 8];
- f32: float32 [tiles, K, 8, 2]: for each input the rows g and g + 8; not for tensor cores.

Weights are kept times 2^e, e such that the largest lies in [2^7, 2^8): far from where halves lose bits. Kernels
multiply their sums by ``factor`` = 2^-e. A scale below 2^-14 after that is rounded to a multiple of 2^-24.

Which row lies where is an order: int32 [16 · tiles], for each packed row its row in the source or -1. Rows g and g + 8
meet in one lane; orders put there what an epilogue combines: the halves of a rotation, a gate and what it gates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE = 16
BLOCK = 64
GROUP = 32
CHUNK = 256  # inputs whose products are summed before they are added to the total
_SLAB = 2048  # tiles reordered in one go: bounds the memory that packing takes

Order = NDArray[np.int32]


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix for the kernels of linear_*.cu; arrays as the module says, ``bias`` float32 [16 · tiles] or None."""

    quant: str
    weights: NDArray[Any]
    scales: NDArray[np.float16] | None
    bias: NDArray[np.float32] | None
    exponent: int
    inputs: int
    rows: int  # of the source matrix

    @property
    def tiles(self) -> int:
        return len(self.weights)

    @property
    def factor(self) -> float:
        """What kernels multiply their sums by: 2^-e."""
        return 2.0**-self.exponent

    @property
    def nbytes(self) -> int:
        extra = (a.nbytes for a in (self.scales, self.bias) if a is not None)
        return self.weights.nbytes + sum(extra)


def plain_order(rows: int) -> Order:
    """The natural order."""
    order = np.full(-(-rows // TILE) * TILE, -1, np.int32)
    order[:rows] = np.arange(rows)
    return order


def head_order(heads: int, head_dim: int, interleaved: bool) -> Order:
    """Rows of ``heads`` heads (of q, k and v alike): pair i of a head is rows g and g + 8 of its tile i // 8.

    A pair is the dimensions i and i + head_dim / 2, or 2i and 2i + 1 when ``interleaved``. ``head_dim`` is a multiple
    of 16.
    """
    pair = np.arange(head_dim // 2).reshape(-1, 1, 8)
    both = np.concatenate([2 * pair, 2 * pair + 1] if interleaved else [pair, pair + head_dim // 2], axis=1)
    order: Order = (np.arange(heads)[:, None] * head_dim + both.reshape(-1)).reshape(-1).astype(np.int32)
    return order


def gated_order(outputs: int) -> Order:
    """Gates are rows 0 … outputs - 1 of the source, what they gate the next: output j is a pair of tile j // 8."""
    tiles = -(-outputs // 8)
    j = np.arange(tiles * 8).reshape(tiles, 1, 8)
    order = np.where(j < outputs, np.concatenate([j, j + outputs], axis=1), -1)
    return order.reshape(-1).astype(np.int32)


def pack_int8(
    values: NDArray[np.int8], scales: NDArray[np.uint16], order: Order, bias: NDArray[np.float32] | None = None
) -> PackedMatrix:
    """int8 [N, K] and 16-bit scales [N, ceil(K / 32)] (docs/decisions/0005) in fragment order."""
    rows, inputs = values.shape
    blocks = -(-inputs // BLOCK)
    grouped = np.zeros((rows, 2 * blocks * GROUP), np.int8)
    grouped[:, :inputs] = values
    largest = np.abs(grouped.reshape(rows, -1, GROUP).astype(np.int16)).max(axis=2)
    real = np.zeros((rows, 2 * blocks), np.float32)
    real[:, : scales.shape[1]] = (scales.astype(np.uint32) << np.uint32(15)).view(np.float32)
    real[largest == 0] = 0.0
    exponent = _exponent(float((largest * real.astype(np.float64)).max(initial=0.0)))
    halves = np.ldexp(real.astype(np.float64), exponent).astype(np.float16)

    tiles = len(order) // TILE
    packed = np.empty((tiles, blocks, 2, 32, 16), np.uint8)
    biased = np.zeros((rows + 1, blocks * BLOCK), np.uint8)
    biased[:rows] = grouped.view(np.uint8)
    biased ^= np.uint8(128)  # two's complement biased by 128; the padding row becomes zeros too
    for first in range(0, tiles, _SLAB):
        part = _tiles(biased.view(np.uint16), order, first)  # pairs of inputs move as one
        count = len(part)
        # [tile, h, g, block, q, j of a vector's two, j, p] to [tile, block, vector, g, q, j, p, h]
        moved = part.reshape(count, 2, 8, blocks, 4, 2, 2, 2).transpose(0, 3, 5, 2, 4, 6, 7, 1)
        packed[first : first + count] = np.ascontiguousarray(moved).view(np.uint8).reshape(count, blocks, 2, 32, 16)
    padded = np.concatenate([halves, np.zeros((1, 2 * blocks), np.float16)])
    ordered = padded[order].reshape(tiles, 2, 8, blocks, 2).transpose(0, 3, 4, 2, 1)
    return PackedMatrix("int8", packed, np.ascontiguousarray(ordered), _bias(bias, order), exponent, inputs, rows)


def pack_f16(weights: NDArray[Any], order: Order, bias: NDArray[np.float32] | None = None) -> PackedMatrix:
    """Floats [N, K], rounded to nearest halves after the scaling by 2^e, in fragment order."""
    rows, inputs = weights.shape
    blocks = -(-inputs // BLOCK)
    exponent = _exponent(float(np.abs(weights).max(initial=0.0)))
    tiles = len(order) // TILE
    halves = np.zeros((rows + 1, blocks * BLOCK), np.float16)
    halves[:rows, :inputs] = np.ldexp(weights.astype(np.float32, copy=False), exponent)
    packed = np.empty((tiles, blocks, 4, 32, 8), np.float16)
    for first in range(0, tiles, _SLAB):
        part = _tiles(halves.view(np.uint32), order, first)
        count = len(part)
        # [tile, h, g, block, q, j, p] to [tile, block, j, g, q, p, h]
        moved = part.reshape(count, 2, 8, blocks, 4, 4, 2).transpose(0, 3, 5, 2, 4, 6, 1)
        packed[first : first + count] = np.ascontiguousarray(moved).view(np.float16).reshape(count, blocks, 4, 32, 8)
    return PackedMatrix("f16", packed, None, _bias(bias, order), exponent, inputs, rows)


def pack_f32(weights: NDArray[np.float32], order: Order, bias: NDArray[np.float32] | None = None) -> PackedMatrix:
    """float32 [N, K] as it is, for the scalar kernels."""
    rows, inputs = weights.shape
    tiles = len(order) // TILE
    packed = np.zeros((tiles, inputs, 8, 2), np.float32)
    for first in range(0, tiles, _SLAB):
        part = order[first * TILE : (first + _SLAB) * TILE].reshape(-1, 2, 8)
        values = np.where(part[..., None] >= 0, weights[part], np.float32(0.0))
        packed[first : first + len(part)] = values.transpose(0, 3, 2, 1)
    return PackedMatrix("f32", packed, None, _bias(bias, order), 0, inputs, rows)


def unpack(matrix: PackedMatrix, order: Order) -> NDArray[np.float32]:
    """The weights a packed matrix stands for, float32 [N, K] in the source's order; for tests and debugging."""
    tiles = matrix.tiles
    if matrix.quant == "f32":
        rows = matrix.weights.transpose(0, 3, 2, 1).reshape(tiles * TILE, -1)
    elif matrix.quant == "f16":
        blocks = matrix.weights.shape[1]
        split = matrix.weights.reshape(tiles, blocks, 4, 8, 4, 2, 2, 2)  # tile, block, j, g, q, p, h, input
        rows = split.transpose(0, 6, 3, 1, 4, 2, 5, 7).reshape(tiles * TILE, -1).astype(np.float32)
    else:
        assert matrix.scales is not None
        blocks = matrix.weights.shape[1]
        split = matrix.weights.reshape(tiles, blocks, 2, 8, 4, 2, 2, 2, 2)  # tile, block, vector, g, q, j, p, h, input
        values = split.transpose(0, 7, 3, 1, 4, 2, 5, 6, 8).reshape(tiles * TILE, -1).astype(np.float32) - 128
        scales = matrix.scales.transpose(0, 4, 3, 1, 2).reshape(tiles * TILE, -1).astype(np.float32)
        rows = values * np.repeat(scales, GROUP, axis=1)
    out = np.zeros((matrix.rows, matrix.inputs), np.float32)
    out[order[order >= 0]] = np.ldexp(rows[order >= 0, : matrix.inputs], -matrix.exponent)
    return out


def _exponent(largest: float) -> int:
    """e with largest · 2^e in [2^7, 2^8); 0 for a matrix of zeros."""
    return 8 - int(np.frexp(largest)[1]) if largest > 0.0 else 0


def _tiles(rows: NDArray[Any], order: Order, first: int) -> NDArray[Any]:
    """[tiles, 16, …]: up to _SLAB tiles from ``first`` on; the last row of ``rows`` stands for missing ones."""
    part = order[first * TILE : (first + _SLAB) * TILE]
    return rows[part].reshape(-1, TILE, rows.shape[1])


def _bias(bias: NDArray[np.float32] | None, order: Order) -> NDArray[np.float32] | None:
    if bias is None:
        return None
    return np.where(order >= 0, bias[order], np.float32(0.0)).astype(np.float32)
