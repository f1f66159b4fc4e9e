"""What CudaOps hands around: packed matrices, the KV cache, a batch on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
