"""ReferenceOps: the Ops protocol on the scalar float64 oracle, for comparing whole models. Slow on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crucible import reference
from crucible.config import ModelConfig
from crucible.config.engine import PAGE_TOKENS
from crucible.config.model import Alibi, Rope
from crucible.kernels.constants import QUANT_GROUP, SCALE_TRIALS
from crucible.model.ops import BatchView, FloatArray, Projection
from crucible.model.positions import alibi_slopes, rope_frequencies
from crucible.quantized import QuantizedTensor

Float64Array = NDArray[np.float64]


@dataclass(frozen=True)
class ReferenceMatrix:
    """A projection as float64 [N, K] with its bias [N]; int8 weights as the values they stand for."""

    weight: Float64Array
    bias: Float64Array
    out_features: int

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.bias.nbytes


@dataclass
class ReferenceCache:
    """K and V float64 [pages, layers, 16, kv_heads, head_dim]."""

    shape: tuple[int, ...]
    k: Float64Array = field(init=False)
    v: Float64Array = field(init=False)

    def __post_init__(self) -> None:
        self.k, self.v = np.zeros(self.shape), np.zeros(self.shape)


class ReferenceOps:
    """Operations of one model in float64. Activations are float64 [rows, features]."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        alibi = isinstance(config.position, Alibi)
        self._slopes = (alibi_slopes(config.num_heads) if alibi else np.zeros(config.num_heads)).astype(np.float64)

    def pack(self, parts: Sequence[Projection], biases: Sequence[FloatArray] | None, quant: str) -> ReferenceMatrix:
        stored = any(isinstance(part, QuantizedTensor) for part in parts)
        weight = np.concatenate([p.dequantize() if isinstance(p, QuantizedTensor) else p for p in parts])
        weight = weight.astype(np.float32)
        if quant == "int8" and not stored:
            exact: Float64Array = reference.quantize_groups(weight, QUANT_GROUP, SCALE_TRIALS)
        else:
            exact = weight.astype(np.float64)
        bias = np.zeros(len(weight)) if biases is None else np.concatenate(biases).astype(np.float64)
        return ReferenceMatrix(exact, bias, len(weight))

    def pack_qkv(self, parts: Sequence[Projection], biases: Sequence[FloatArray] | None, quant: str) -> ReferenceMatrix:
        return self.pack(parts, biases, quant)

    def pack_gated(
        self, gate: Projection, up: Projection, biases: Sequence[FloatArray] | None, quant: str
    ) -> ReferenceMatrix:
        return self.pack([gate, up], biases, quant)

    def vector(self, values: FloatArray) -> Float64Array:
        return np.array(values, dtype=np.float64)

    def allocate_cache(self, num_pages: int) -> ReferenceCache:
        c = self.config
        return ReferenceCache((num_pages, c.num_layers, PAGE_TOKENS, c.num_kv_heads, c.head_dim))

    def embed(self, table: ReferenceMatrix, positions_table: Float64Array | None, batch: BatchView) -> Float64Array:
        x: Float64Array = reference.embed(table.weight, batch.token_ids)
        return x if positions_table is None else x + reference.embed(positions_table, batch.positions)

    def norm(
        self, x: Float64Array, weight: Float64Array, bias: Float64Array | None, out: Float64Array | None = None
    ) -> Float64Array:
        offset = np.zeros_like(weight) if bias is None else bias
        if self.config.norm.type == "rmsnorm":
            y: Float64Array = reference.rmsnorm(x, weight, self.config.norm.eps) + offset
        else:
            y = reference.layernorm(x, weight, offset, self.config.norm.eps)
        if out is None:
            return y
        out[:] = y
        return out

    def qkv(
        self, x: Float64Array, matrix: ReferenceMatrix, layer: int, batch: BatchView, cache: ReferenceCache
    ) -> Float64Array:
        c = self.config
        qkv: Float64Array = reference.linear(x, matrix.weight, matrix.bias).reshape(len(x), -1, c.head_dim)
        turned = c.num_heads + c.num_kv_heads
        if isinstance(c.position, Rope):
            frequencies, factor = rope_frequencies(c.position, c.head_dim)
            positions = batch.positions.astype(np.float64)
            interleaved = c.position.pairing == "interleaved"
            qkv[:, :turned] = reference.rope(
                np.ascontiguousarray(qkv[:, :turned]), positions, frequencies.astype(np.float64), factor, interleaved
            )
        for row, (position, sequence) in enumerate(zip(batch.positions, batch.row_sequence, strict=True)):
            page, slot = batch.page_tables[sequence, position // PAGE_TOKENS], position % PAGE_TOKENS
            cache.k[page, layer, slot] = qkv[row, c.num_heads : turned]
            cache.v[page, layer, slot] = qkv[row, turned:]
        return qkv

    def attention(self, qkv: Float64Array, layer: int, batch: BatchView, cache: ReferenceCache) -> Float64Array:
        c = self.config
        out = np.empty((len(qkv), c.num_heads * c.head_dim))
        for row, (position, sequence) in enumerate(zip(batch.positions, batch.row_sequence, strict=True)):
            pages = batch.page_tables[sequence, : position // PAGE_TOKENS + 1]
            keys = cache.k[pages, layer].reshape(-1, c.num_kv_heads, c.head_dim)[: position + 1]
            values = cache.v[pages, layer].reshape(-1, c.num_kv_heads, c.head_dim)[: position + 1]
            q = np.ascontiguousarray(qkv[row : row + 1, : c.num_heads])
            out[row] = reference.attention(q, keys, values, int(position), self._slopes).reshape(-1)
        return out

    def project_add(self, x: Float64Array, matrix: ReferenceMatrix, residual: Float64Array) -> None:
        residual += reference.linear(x, matrix.weight, matrix.bias)

    def swiglu(self, x: Float64Array, matrix: ReferenceMatrix) -> Float64Array:
        both = reference.linear(x, matrix.weight, matrix.bias)
        half = both.shape[1] // 2
        return np.asarray(reference.swiglu(np.ascontiguousarray(both[:, :half]), np.ascontiguousarray(both[:, half:])))

    def gelu(self, x: Float64Array, matrix: ReferenceMatrix) -> Float64Array:
        y = reference.linear(x, matrix.weight, matrix.bias)
        return np.asarray(reference.gelu(y, self.config.activation == "gelu_tanh"))

    def take_rows(self, x: Float64Array, batch: BatchView) -> Float64Array:
        return x[batch.logit_rows]

    def logits(self, x: Float64Array, head: ReferenceMatrix, batch: BatchView) -> Any:
        return reference.linear(x, head.weight, head.bias)
