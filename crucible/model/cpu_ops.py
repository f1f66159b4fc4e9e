"""CpuOps: the Ops protocol on Numba kernels. Weights int8 or float32, activations and KV float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crucible.config import ModelConfig
from crucible.config.engine import PAGE_TOKENS
from crucible.config.model import Alibi, Rope
from crucible.errors import ConfigError
from crucible.kernels.cpu import (
    activation,
    embedding,
    linear,
    norm,
    rope,
    runtime,  # first: it configures Numba
)
from crucible.kernels.cpu.attention import attention
from crucible.model.ops import BatchView, FloatArray, Projection
from crucible.model.positions import alibi_slopes, rope_tables
from crucible.quantized import QuantizedTensor

LANES = linear.LANES
FEW_ROWS = 4  # up to here a cheap operation is done before another thread is awake
SCALE_ONE = 0x7F00  # 1.0 (kernels/cpu/intrinsics.py)


@dataclass(frozen=True)
class CpuMatrix:
    """Weights in blocks of 64 outputs; w, scale and bias are laid out as kernels/cpu/linear.py says."""

    w: np.ndarray[Any, Any]
    scale: NDArray[np.uint16]
    bias: FloatArray
    out_features: int

    @property
    def nbytes(self) -> int:
        return self.w.nbytes + self.scale.nbytes + self.bias.nbytes


@dataclass(frozen=True)
class CpuCache:
    """KV pages; layouts in kernels/cpu/rope.py. Memory is touched, and so resident, only where a page was written."""

    k: FloatArray
    v: FloatArray


class CpuOps:
    """Operations of one model on the CPU. Not thread-safe: one thread at a time launches kernels.

    ``context``: positions the RoPE tables cover. ``threads``: how many compute each kernel.
    """

    def __init__(self, config: ModelConfig, context: int, threads: int | None = None) -> None:
        self.config = config
        self.set_threads(threads)
        self._scratch: dict[str, tuple[FloatArray, FloatArray]] = {}
        self._no_bias = np.zeros(config.hidden_size, np.float32)
        self._rotate = isinstance(config.position, Rope)
        self._interleaved = isinstance(config.position, Rope) and config.position.pairing == "interleaved"
        if isinstance(config.position, Rope):
            self._cos, self._sin = rope_tables(config.position, config.head_dim, context)
        else:
            self._cos = self._sin = np.zeros((1, 1), np.float32)
        alibi = isinstance(config.position, Alibi)
        self._slopes = alibi_slopes(config.num_heads) if alibi else np.zeros(config.num_heads, np.float32)

    def set_threads(self, threads: int | None) -> int:
        """Change ``threads`` (``None``: one a processor) and return the number. Raises ConfigError."""
        self.threads = runtime.set_threads(threads)
        return self.threads

    def _buffer(self, name: str, rows: int, columns: int) -> FloatArray:
        """Scratch [rows, columns] that grows and is reused; the last view is kept, since decode asks for it again."""
        held, view = self._scratch.get(name, (None, None))
        if view is not None and view.shape == (rows, columns):
            return view
        if held is None or held.shape[0] < rows or held.shape[1] != columns:
            held = np.empty((rows, columns), np.float32)
        view = held[:rows]
        self._scratch[name] = held, view
        return view

    def pack(self, parts: Sequence[Projection], biases: Sequence[FloatArray] | None, quant: str) -> CpuMatrix:
        rows = _joined(parts)
        n, k = rows.shape
        matrix = self._empty(n, n, k, quant)
        _fill(matrix, rows, quant, first_block=0, step=1)
        if biases is not None:
            matrix.bias[:n] = np.concatenate(biases)
        return matrix

    def pack_qkv(self, parts: Sequence[Projection], biases: Sequence[FloatArray] | None, quant: str) -> CpuMatrix:
        return self.pack(parts, biases, quant)

    def pack_gated(
        self, gate: Projection, up: Projection, biases: Sequence[FloatArray] | None, quant: str
    ) -> CpuMatrix:
        n, k = gate.shape
        padded = -(-n // LANES) * LANES
        matrix = self._empty(n, 2 * padded, k, quant)
        for first, rows in enumerate((gate, up)):
            _fill(matrix, _joined([rows]), quant, first_block=first, step=2)
            if biases is not None:
                lanes = matrix.bias.reshape(-1, LANES)[first::2]
                lanes[:] = np.pad(biases[first], (0, padded - n)).reshape(-1, LANES)
        return matrix

    def _empty(self, out_features: int, rows: int, k: int, quant: str) -> CpuMatrix:
        if quant not in ("f32", "int8"):
            raise ConfigError(f"quant {quant} needs device cuda; use int8 or f32 on a CPU")
        blocks = -(-rows // LANES)
        groups = -(-k // linear.GROUP) if quant == "int8" else 1
        return CpuMatrix(
            w=np.zeros((blocks, k, LANES), np.int8 if quant == "int8" else np.float32),
            scale=np.full((blocks, groups, LANES), SCALE_ONE, np.uint16),
            bias=np.zeros(blocks * LANES, np.float32),
            out_features=out_features,
        )

    def vector(self, values: FloatArray) -> FloatArray:
        return np.array(values, dtype=np.float32)

    def allocate_cache(self, num_pages: int) -> CpuCache:
        c = self.config
        shape = (num_pages, c.num_layers, c.num_kv_heads)
        return CpuCache(
            k=np.zeros((*shape, c.head_dim, PAGE_TOKENS), np.float32),
            v=np.zeros((*shape, PAGE_TOKENS, c.head_dim), np.float32),
        )

    def embed(self, table: CpuMatrix, positions_table: FloatArray | None, batch: BatchView) -> FloatArray:
        # Every pass begins here. Numba's count belongs to the launching thread: this one need not be the one that made
        # these ops, and another model of the process may have set its own.
        runtime.use_threads(self.threads)
        out = self._buffer("x", len(batch.token_ids), self.config.hidden_size)
        embedding.embed(table.w, table.scale, batch.token_ids, out)
        if positions_table is not None:
            embedding.add_positions(out, positions_table, batch.positions)
        return out

    def norm(
        self, x: FloatArray, weight: FloatArray, bias: FloatArray | None, out: FloatArray | None = None
    ) -> FloatArray:
        out = self._buffer("norm", *x.shape) if out is None else out
        if self.config.norm.type == "rmsnorm":
            if len(x) == 1:
                norm.rmsnorm_row(x[0], weight, self.config.norm.eps, out[0])
            else:
                norm.rmsnorm(x, weight, self.config.norm.eps, out)
            if bias is not None:
                out += bias
        else:
            norm.layernorm(x, weight, self._no_bias if bias is None else bias, self.config.norm.eps, out)
        return out

    def qkv(self, x: FloatArray, matrix: CpuMatrix, layer: int, batch: BatchView, cache: CpuCache) -> FloatArray:
        out = self._project("qkv", x, matrix)
        store = rope.rope_and_store_rows if len(out) <= FEW_ROWS else rope.rope_and_store
        store(
            out, self._cos, self._sin, self._rotate, self._interleaved, batch.positions, batch.row_sequence,
            batch.page_tables, self.config.num_heads, layer, cache.k, cache.v,
        )  # fmt: skip
        return out

    def attention(self, qkv: FloatArray, layer: int, batch: BatchView, cache: CpuCache) -> FloatArray:
        c = self.config
        out = self._buffer("attention", qkv.shape[0], c.num_heads * c.head_dim)
        attention(
            qkv, batch.positions, batch.row_sequence, batch.page_tables, c.head_dim**-0.5, self._slopes, layer,
            cache.k, cache.v, out,
        )  # fmt: skip
        return out

    def _project(self, name: str, x: FloatArray, matrix: CpuMatrix) -> FloatArray:
        out = self._buffer(name, x.shape[0], matrix.out_features)
        if len(x):  # a prompt chunk that is not the last wants no logits: no walk over the head for nothing
            linear.project(x, matrix.w, matrix.scale, matrix.bias, out, False)
        return out

    def project_add(self, x: FloatArray, matrix: CpuMatrix, residual: FloatArray) -> None:
        linear.project(x, matrix.w, matrix.scale, matrix.bias, residual, True)

    def swiglu(self, x: FloatArray, matrix: CpuMatrix) -> FloatArray:
        out = self._buffer("mlp", x.shape[0], matrix.out_features)
        if len(x) == 1:
            blocks = self._buffer("gate and up", len(matrix.w), LANES)
            linear.swiglu_row(x[0], matrix.w, matrix.scale, matrix.bias, blocks, out[0])
        else:
            linear.swiglu(x, matrix.w, matrix.scale, matrix.bias, out)
        return out

    def gelu(self, x: FloatArray, matrix: CpuMatrix) -> FloatArray:
        out = self._project("mlp", x, matrix)
        activation.gelu(out, self.config.activation == "gelu_tanh")
        return out

    def take_rows(self, x: FloatArray, batch: BatchView) -> FloatArray:
        out = self._buffer("last", len(batch.logit_rows), x.shape[1])
        np.take(x, batch.logit_rows, axis=0, out=out)
        return out

    def logits(self, x: FloatArray, head: CpuMatrix, batch: BatchView) -> FloatArray:
        return self._project("logits", x, head)


def _joined(parts: Sequence[Projection]) -> Projection:
    quantized = [part for part in parts if isinstance(part, QuantizedTensor)]
    if quantized:  # copied even if it is one: Numba compiles a second kernel for read-only arrays
        return QuantizedTensor.concatenate(quantized)
    floats = [part for part in parts if not isinstance(part, QuantizedTensor)]
    return floats[0] if len(floats) == 1 else np.concatenate(floats)


def _fill(matrix: CpuMatrix, rows: Projection, quant: str, first_block: int, step: int) -> None:
    if isinstance(rows, QuantizedTensor):
        linear.pack_quantized(rows.values, rows.scales, matrix.w, matrix.scale, first_block, step)
    elif quant == "int8":
        linear.pack_i8(rows, matrix.w, matrix.scale, first_block, step)
    else:
        linear.pack_f32(rows, matrix.w, first_block, step)
