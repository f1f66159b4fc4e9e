"""What CudaOps hands around: packed matrices and how they are made, the KV cache, a batch on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crucible.kernels.cuda import pack
from crucible.model.ops import FloatArray, Projection
from crucible.quantized import QuantizedTensor

TILE_ROWS = 64  # most rows of an attention tile (cuda/attention_prefill.cu)


@dataclass(frozen=True)
class CudaMatrix:
    """A packed projection on the device (crucible/kernels/cuda/pack.py)."""

    quant: str
    weights: Any
    scales: Any | None
    bias: Any | None
    factor: float
    tiles: int
    inputs: int
    out_features: int
    nbytes: int


def pack_matrix(
    upload: Callable[[NDArray[Any]], Any],
    parts: Sequence[Projection],
    biases: Sequence[FloatArray] | None,
    quant: str,
    order: NDArray[np.int32],
    out_features: int,
) -> CudaMatrix:
    """Projections that read the same input as one matrix, its rows in ``order``; ``upload`` copies to the device."""
    bias = None if biases is None else np.concatenate(biases).astype(np.float32)
    if quant == "int8":
        stored = [part if isinstance(part, QuantizedTensor) else _quantized(part) for part in parts]
        whole = QuantizedTensor.concatenate(stored)
        packed = pack.pack_int8(whole.values, whole.scales, order, bias)
    else:
        rows = np.concatenate([part.dequantize() if isinstance(part, QuantizedTensor) else part for part in parts])
        packed = pack.pack_f16(rows, order, bias) if quant == "f16" else pack.pack_f32(rows, order, bias)
    return CudaMatrix(
        quant=packed.quant,
        weights=upload(packed.weights.reshape(-1)),
        scales=None if packed.scales is None else upload(packed.scales.reshape(-1)),
        bias=None if packed.bias is None else upload(packed.bias),
        factor=packed.factor,
        tiles=packed.tiles,
        inputs=packed.inputs,
        out_features=out_features,
        nbytes=packed.nbytes,
    )


def _quantized(rows: FloatArray) -> QuantizedTensor:
    from crucible.model.quantize import quantize  # Numba: only a float checkpoint needs it

    return quantize(rows)


@dataclass(frozen=True)
class CudaCache:
    """KV pages: k [pages, layers, kv_heads, 16, head_dim], v [pages, layers, kv_heads, head_dim, 16]."""

    k: Any
    v: Any


@dataclass(frozen=True)
class LastRows:
    """Rows ``rows`` (int32 on the device) of x, which nobody has copied."""

    x: Any
    rows: Any


def attention_tiles(starts: Sequence[int]) -> list[tuple[int, int]]:
    """First row and row count of each attention tile. starts: row offsets of sequences, and where the last ends."""
    return [
        (row, min(TILE_ROWS, end - row)) for first, end in pairwise(starts) for row in range(first, end, TILE_ROWS)
    ]


@dataclass(frozen=True)
class DeviceBatch:
    """A batch on the device; arrays as in engine.batch.Batch.

    Rows 0 … decode_rows − 1 are one a sequence; the others are prompt rows, cut into tiles of at most 64 rows of one
    sequence: tile_first, tile_rows int32 [tiles].
    """

    token_ids: Any
    positions: Any
    row_sequence: Any
    page_tables: Any
    logit_rows: Any
    tile_first: Any
    tile_rows: Any
    decode_rows: int
    splits: int = 1
    """Blocks that share the positions of one row and KV head in decode attention; no result depends on it."""
