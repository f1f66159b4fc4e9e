"""Ops with host arrays in and out, so that one case runs on a device, in float64 and on the CPU alike.

What rows of ops_table call is here. A case's numbers are exact in the types of the kernel: inputs of projections are
halves where it reads halves, and quantised weights are quantised once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crucible.config import ModelConfig
from crucible.config.engine import PAGE_TOKENS
from crucible.kernels.cuda import pack
from crucible.kernels.problems import AttentionProblem, Forced, halves
from crucible.kernels.table import KernelRow
from crucible.model.cuda_ops import CudaCache, CudaMatrix, CudaOps, DeviceBatch, LastRows
from crucible.model.ops import FloatArray, Projection

Host = NDArray[Any]
NO_TILES = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Picked:
    """The rows ``rows`` of x, not copied yet."""

    x: Host
    rows: NDArray[np.int32]


def given(parts: Sequence[FloatArray], quant: str) -> list[Projection]:
    """Weights as both sides take them: quantised once, or rounded to the type they are kept in."""
    if quant == "int8":
        from crucible.model.quantize import quantize  # Numba

        return [quantize(np.ascontiguousarray(part)) for part in parts]
    return [halves(part) if quant == "f16" else part for part in parts]


class Expected:
    """The side that is compared with: ReferenceOps or CpuOps; half: inputs of projections are rounded to halves."""

    def __init__(self, ops: Any, *, half: bool) -> None:
        self._ops, self._half = ops, half

    def _input(self, x: Host) -> Host:
        return x.astype(np.float16).astype(x.dtype) if self._half else x

    def pack(self, parts: Sequence[FloatArray], biases: Sequence[FloatArray] | None, quant: str) -> Any:
        make = self._ops.pack_qkv if len(parts) == 3 else self._ops.pack
        return make(given(parts, quant), biases, "int8" if quant == "int8" else "f32")

    def pack_gated(self, gate: FloatArray, up: FloatArray, biases: Sequence[FloatArray] | None, quant: str) -> Any:
        both = given([gate, up], quant)
        return self._ops.pack_gated(*both, biases, "int8" if quant == "int8" else "f32")

    def vector(self, values: FloatArray) -> Any:
        return self._ops.vector(values)

    def allocate_cache(self, pages: int) -> Any:
        return self._ops.allocate_cache(pages)

    def embed(self, table: Any, learned: Any, batch: Any) -> Host:
        return np.array(self._ops.embed(table, learned, batch))

    def norm(self, x: Host, weight: Any, bias: Any) -> Host:
        return np.array(self._ops.norm(x, weight, bias))

    def qkv(self, x: Host, matrix: Any, layer: int, batch: Any, cache: Any) -> Host:
        return np.array(self._ops.qkv(self._input(x), matrix, layer, batch, cache)).reshape(len(x), -1)

    def project_add(self, x: Host, matrix: Any, residual: Host) -> None:
        self._ops.project_add(self._input(x), matrix, residual)

    def swiglu(self, x: Host, matrix: Any) -> Host:
        return np.array(self._ops.swiglu(self._input(x), matrix))

    def gelu(self, x: Host, matrix: Any) -> Host:
        return np.array(self._ops.gelu(self._input(x), matrix))

    def take_rows(self, x: Host, batch: Any) -> Host:
        return np.array(self._ops.take_rows(x, batch))

    def logits(self, x: Host, head: Any, batch: Any) -> Host:
        return np.array(self._ops.logits(self._input(x), head, batch))

    def attend(self, problem: AttentionProblem) -> Host:
        """float [rows, heads · head_dim]."""
        layers = self._ops.config.num_layers
        cache = self._ops.allocate_cache(problem.page_count)
        k, v = problem.pages(layers, layers - 1)
        if cache.k.dtype == np.float64:  # the oracle's: [pages, layers, 16, kv_heads, head_dim]
            cache.k[...], cache.v[...] = k.swapaxes(2, 3), v.swapaxes(2, 3)
            qkv = problem.q.astype(np.float64)
        else:  # the CPU's: k [pages, layers, kv_heads, head_dim, 16], v [pages, layers, kv_heads, 16, head_dim]
            cache.k[...], cache.v[...] = k.swapaxes(3, 4), v
            rest = np.zeros((len(problem.q), 2 * self._ops.config.kv_dim), np.float32)
            qkv = np.concatenate([problem.q.reshape(len(rest), -1), rest], axis=1)
        return np.array(self._ops.attention(qkv, layers - 1, problem, cache))


class OnDevice:
    """One kernel on a device, through CudaOps. ``faults``: what it did beside its results.

    rows: of the batches; context: positions of the longest sequence; splits: blocks that share a row in decode
    attention (0: as CudaOps would).
    """

    def __init__(
        self, kernel: KernelRow, config: ModelConfig, device: Any, *, rows: int, context: int, splits: int = 0
    ) -> None:
        self.kernel, self.config, self.splits = kernel, config, splits
        self.device = Forced(device, kernel)
        quant = kernel.weights or ("f32" if kernel.name.endswith("_f32") else "int8")
        self.cache_type = np.float32 if kernel.name.endswith(("_qkv32", "_f32")) else np.float16
        reference = kernel.name.startswith("crucible_attention_reference")
        if reference:
            quant = "f32"  # any head_dim
        self._ops: Any = CudaOps(
            config, self.device, quant=quant, max_rows=rows, max_sequences=rows, context=context,
            gemm="scalar" if "_scalar_" in kernel.name else "auto",
        )  # fmt: skip
        if kernel.op == "qkv":
            self._ops.exact = kernel.name.endswith("_qkv32")  # which of the two epilogues is asked for
        queries = kernel.name.split("_")[-2] if reference else kernel.weights
        self.activation = np.float32 if queries == "f32" else np.float16
        self.faults: list[str] = []
        self.inputs: dict[str, Host] = {}

    def _note(self, name: str, values: Host) -> None:
        self.inputs[f"{name}_{sum(key.startswith(f'{name}_') for key in self.inputs)}"] = np.array(values)

    # ---- what rows of ops_table call

    def pack(self, parts: Sequence[FloatArray], biases: Sequence[FloatArray] | None, quant: str) -> CudaMatrix:
        self._note_weights(parts, biases)
        make = self._ops.pack_qkv if len(parts) == 3 else self._ops.pack
        matrix: CudaMatrix = make(given(parts, quant), biases, quant)
        return matrix

    def pack_gated(
        self, gate: FloatArray, up: FloatArray, biases: Sequence[FloatArray] | None, quant: str
    ) -> CudaMatrix:
        self._note_weights([gate, up], biases)
        matrix: CudaMatrix = self._ops.pack_gated(*given([gate, up], quant), biases, quant)
        return matrix

    def _note_weights(self, parts: Sequence[FloatArray], biases: Sequence[FloatArray] | None) -> None:
        for part in parts:
            self._note("weights", part)
        for bias in biases or ():
            self._note("bias", bias)

    def vector(self, values: FloatArray) -> Host:
        self._note("vector", values)
        return np.array(values, np.float32)

    def allocate_cache(self, pages: int) -> CudaCache:
        c = self.config
        shape = (pages, c.num_layers, c.num_kv_heads)
        return self._upload_cache(
            np.full((*shape, PAGE_TOKENS, c.head_dim), np.nan), np.full((*shape, c.head_dim, PAGE_TOKENS), np.nan)
        )

    def embed(self, table: CudaMatrix, learned: Host | None, batch: Any) -> Host:
        places = None if learned is None else self.device.upload(learned)
        return self.device.download(self._ops.embed(table, places, self._batch(batch)))

    def norm(self, x: Host | Picked, weight: Host, bias: Host | None) -> Host:
        upload = self.device.upload
        source = LastRows(upload(x.x), upload(x.rows)) if isinstance(x, Picked) else upload(x)
        return self._finish(
            self._ops.norm(source, upload(weight), None if bias is None else upload(bias)), self.config.hidden_size
        )

    def qkv(self, x: Host, matrix: CudaMatrix, layer: int, batch: Any, cache: CudaCache) -> Host:
        q = self._finish(
            self._ops.qkv(self._input(x), matrix, layer, self._batch(batch), cache),
            self.config.num_heads * self.config.head_dim,
        )
        page = batch.page_tables[batch.row_sequence, batch.positions // PAGE_TOKENS]
        slot = batch.positions % PAGE_TOKENS
        k, v = self.device.download(cache.k), self.device.download(cache.v).swapaxes(3, 4)
        stored = [half[page, layer, :, slot].reshape(len(x), -1) for half in (k, v)]
        for name, half in (("k", k), ("v", v)):
            half[page, layer, :, slot] = np.nan
            if not np.isnan(half).all():
                self.faults.append(f"{name} was written at {np.argwhere(~np.isnan(half))[0].tolist()}, no row's place")
        return np.concatenate([q, *stored], axis=1)

    def project_add(self, x: Host, matrix: CudaMatrix, residual: Host) -> None:
        target = self.device.upload(residual)
        self._ops.project_add(self._input(x), matrix, target)
        residual[...] = self.device.download(target)

    def swiglu(self, x: Host, matrix: CudaMatrix) -> Host:
        return self._finish(self._ops.swiglu(self._input(x), matrix), matrix.out_features)

    def gelu(self, x: Host, matrix: CudaMatrix) -> Host:
        return self._finish(self._ops.gelu(self._input(x), matrix), matrix.out_features)

    def take_rows(self, x: Host, batch: Any) -> Picked:
        return Picked(x, batch.logit_rows)

    def logits(self, x: Picked, head: CudaMatrix, batch: Any) -> Host:
        return self.device.download(self._ops.logits(self._input(x.x[x.rows]), head, self._batch(batch)))

    # ---- attention

    def attend(self, problem: AttentionProblem, tile_rows: int = 64) -> Host:
        """[rows, heads · head_dim] by the kernel, in the type it makes; rows of a sequence follow one another."""
        c, upload = self.config, self.device.upload
        for name in ("q", "positions", "row_sequence", "page_tables"):
            self._note(name, getattr(problem, name))
        layers, rows = c.num_layers, len(problem.q)
        k, v = problem.pages(layers, layers - 1)
        cache = self._upload_cache(k, v.swapaxes(3, 4))
        q = self._input(problem.q.reshape(rows, -1))
        batch = self._batch(problem)
        width = c.num_heads * c.head_dim
        if self.kernel.name.startswith("crucible_attention_reference"):
            out = self.device.zeros((rows, q.shape[1]), self.activation)
            self.device.launch(
                self.kernel.name, (rows, c.num_heads), q, q.shape[1], cache.k, cache.v, batch.positions,
                batch.row_sequence, batch.page_tables, batch.page_tables.shape[1], c.num_heads, c.num_kv_heads, layers,
                layers - 1, self._ops._slopes, out, out.shape[1], c.head_dim,
            )  # fmt: skip
            return self._finish(out, width)
        if "_prefill_" in self.kernel.name:
            firsts, counts = problem.tiles(tile_rows)
            batch = self._batch(problem, decode_rows=0, tile_first=upload(firsts), tile_rows=upload(counts))
        return self._finish(self._ops.attention(q, layers - 1, batch, cache), width)

    # ---- between the host and the device

    def _input(self, x: Host) -> Any:
        """Activations of rows padded with zeros to a multiple of 64."""
        padded = np.zeros((len(x), -(-x.shape[1] // pack.BLOCK) * pack.BLOCK), self.activation)
        padded[:, : x.shape[1]] = x
        return self.device.upload(padded)

    def _finish(self, result: Any, width: int) -> Host:
        values = self.device.download(result)
        if values[:, width:].any():
            self.faults.append(f"the padding of the output was written, which is {width} wide")
        return np.ascontiguousarray(values[:, :width])

    def _upload_cache(self, k: Host, v: Host) -> CudaCache:
        parts = (np.ascontiguousarray(values, self.cache_type) for values in (k, v))
        return CudaCache(*(self.device.upload(part) for part in parts))

    def _batch(self, batch: Any, **changes: Any) -> DeviceBatch:
        upload, rows = self.device.upload, len(batch.positions)
        values: dict[str, Any] = {
            name: upload(np.asarray(getattr(batch, name)))
            for name in ("token_ids", "positions", "row_sequence", "page_tables", "logit_rows")
            if hasattr(batch, name)
        }
        splits = self.splits or self._ops.decode_splits(rows)
        both: dict[str, Any] = {
            "token_ids": None, "logit_rows": None, "tile_first": NO_TILES, "tile_rows": NO_TILES, "decode_rows": rows,
            "splits": splits, **values, **changes,
        }  # fmt: skip
        return DeviceBatch(**both)
