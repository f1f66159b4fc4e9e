"""CudaOps: the Ops protocol on the kernels of cuda/. Arithmetic and layouts: docs/decisions/0007, cuda/*.cuh.

Residual stream float32; what projections read is float16 (float32 with quant f32, the reference path), made by the op
before, in rows padded to 64 elements. All scratch is allocated once: the addresses in a captured graph stay valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from crucible.config import ModelConfig
from crucible.config.engine import PAGE_TOKENS
from crucible.config.model import Alibi, Rope
from crucible.errors import ConfigError, EngineError
from crucible.kernels.cuda import geometry, pack
from crucible.kernels.device import Device
from crucible.model.cuda_arrays import CudaCache as CudaCache
from crucible.model.cuda_arrays import CudaMatrix as CudaMatrix
from crucible.model.cuda_arrays import DeviceBatch as DeviceBatch
from crucible.model.cuda_arrays import LastRows as LastRows
from crucible.model.cuda_arrays import pack_matrix
from crucible.model.ops import FloatArray, Projection
from crucible.model.positions import alibi_slopes, rope_tables

HEAD_DIMS = (64, 128)
"""What the tensor-core attention kernels are compiled for."""
PIECE = 128  # positions of a piece (cuda/attention.cuh)
PARTIAL_EXTRA = 4  # floats beside the sums of a piece


class CudaOps:
    """Operations of one model on one GPU, queued on its stream.

    quant: weight type, f32, f16 or int8. max_rows, max_sequences: of a batch. context: positions the tables cover.
    gemm: kernels of projections, ``auto``, ``scalar`` (the reference), ``small`` or
    ``big``; decode_gemm: those of batches of decode rows alone, or ``same``. All but ``scalar`` have equal bits.
    attn: decode attention is ``split`` over blocks or one block's (``single``), with equal bits. prefill_attn: prompt
    rows by the tensor-core kernel (``exact``) or the ``reference``. Raises ConfigError for a geometry without kernels.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: Device,
        *,
        quant: str,
        max_rows: int,
        max_sequences: int,
        context: int,
        gemm: str = "auto",
        decode_gemm: str = "same",
        attn: str = "split",
        prefill_attn: str = "exact",
    ) -> None:
        self.config, self.device, self.quant = config, device, quant
        self.exact = quant == "f32"
        if not self.exact and config.head_dim not in HEAD_DIMS:
            sizes = " or ".join(map(str, HEAD_DIMS))
            what = f"device cuda needs head_dim {sizes}, this model has {config.head_dim}"
            raise ConfigError(f"{what}; use quant f32 or device cpu")
        self._gemm = "scalar" if self.exact else gemm
        self._decode_gemm = self._gemm if self._gemm == "scalar" or decode_gemm == "same" else decode_gemm
        self._split, self._prefill_reference = attn == "split", prefill_attn == "reference"
        self._decoding = False  # the batch of this pass is one of decode rows alone
        self.activation = np.float32 if self.exact else np.float16
        self.kind = "f32" if self.exact else "f16"
        queries = config.num_heads * config.head_dim
        self._x = device.zeros((max_rows, config.hidden_size), np.float32)
        self._normed = self._activations(max_rows, config.hidden_size)
        self._q = self._activations(max_rows, queries)
        self._attended = self._activations(max_rows, queries)
        self._mlp = self._activations(max_rows, config.intermediate_size)
        self._logits = device.zeros((max_sequences, config.vocab_size), np.float32)
        self.max_pieces = -(-context // PIECE)
        scratch = (max_sequences, config.num_heads, self.max_pieces, config.head_dim + PARTIAL_EXTRA)
        self._partials = device.zeros(scratch, np.float32)
        group_tiles = -(-config.n_rep // 16)
        self._counters = device.zeros(max_sequences * config.num_kv_heads * group_tiles, np.uint32)
        self._group_tiles = group_tiles
        self._cos = self._sin = None
        self._interleaved = 0
        if isinstance(config.position, Rope):
            cos, sin = rope_tables(config.position, config.head_dim, context)
            self._cos, self._sin = device.upload(cos), device.upload(sin)
            self._interleaved = int(config.position.pairing == "interleaved")
        alibi = isinstance(config.position, Alibi)
        self._slopes = device.upload(alibi_slopes(config.num_heads)) if alibi else None
        self._scratch = {
            "x": self._x,
            "normed": self._normed,
            "q": self._q,
            "attended": self._attended,
            "mlp": self._mlp,
            "logits": self._logits,
        }
        self._views: dict[tuple[str, int], Any] = {}
        self._grids: dict[tuple[int, int, int, str], tuple[str, tuple[int, int]]] = {}

    def _first(self, name: str, rows: int) -> Any:
        """The first rows of a scratch array. Kept: making a view takes as long as a launch; max_rows bounds them."""
        view = self._views.get((name, rows))
        if view is None:
            view = self._views[name, rows] = self._scratch[name][:rows]
        return view

    def _activations(self, rows: int, width: int) -> Any:
        """Zeros, which stay zeros beyond ``width``."""
        return self.device.zeros((rows, -(-width // pack.BLOCK) * pack.BLOCK), self.activation)

    # ---- weights

    def pack(self, parts: Sequence[Projection], biases: Sequence[FloatArray] | None, quant: str) -> CudaMatrix:
        rows = sum(part.shape[0] for part in parts)
        return pack_matrix(self.device.upload, parts, biases, quant, pack.plain_order(rows), rows)

    def pack_qkv(self, parts: Sequence[Projection], biases: Sequence[FloatArray] | None, quant: str) -> CudaMatrix:
        c = self.config
        heads = c.num_heads + 2 * c.num_kv_heads
        order = pack.head_order(heads, c.head_dim, bool(self._interleaved))
        return pack_matrix(self.device.upload, parts, biases, quant, order, heads * c.head_dim)

    def pack_gated(
        self, gate: Projection, up: Projection, biases: Sequence[FloatArray] | None, quant: str
    ) -> CudaMatrix:
        outputs = gate.shape[0]
        return pack_matrix(self.device.upload, [gate, up], biases, quant, pack.gated_order(outputs), outputs)

    def vector(self, values: FloatArray) -> Any:
        return self.device.upload(np.array(values, dtype=np.float32))

    def allocate_cache(self, num_pages: int) -> CudaCache:
        c = self.config
        shape = (num_pages, c.num_layers, c.num_kv_heads)
        return CudaCache(
            k=self.device.zeros((*shape, PAGE_TOKENS, c.head_dim), self.activation),
            v=self.device.zeros((*shape, c.head_dim, PAGE_TOKENS), self.activation),
        )

    # ---- operations

    def embed(self, table: CudaMatrix, positions_table: Any | None, batch: DeviceBatch) -> Any:
        rows = len(batch.token_ids)
        if rows > len(self._x):  # a kernel would write beyond its scratch
            raise EngineError(f"a batch of {rows} rows is larger than the {len(self._x)} that there is room for")
        self._decoding = batch.decode_rows == rows
        x = self._first("x", rows)
        self.device.launch(
            f"crucible_embed_{table.quant}", (rows,), table.weights, table.scales, table.factor,
            self.config.hidden_size, batch.token_ids, positions_table, batch.positions, x, x.shape[1],
        )  # fmt: skip
        return x

    def norm(self, x: Any, weight: Any, bias: Any | None, out: Any | None = None) -> Any:
        """Activations for a projection; with ``out`` float32, where the residual stream itself is normed."""
        picked = x.rows if isinstance(x, LastRows) else None
        source = x.x if isinstance(x, LastRows) else x
        rows = source.shape[0] if picked is None else len(picked)
        kind = self.kind if out is None else "f32"
        target = self._first("normed", rows) if out is None else out
        name = "rmsnorm" if self.config.norm.type == "rmsnorm" else "layernorm"
        if rows:
            self.device.launch(
                f"crucible_{name}_{kind}", (rows,), source, source.shape[1], picked, weight, bias,
                self.config.norm.eps, self.config.hidden_size, target, target.shape[1],
            )  # fmt: skip
        return target

    def qkv(self, x: Any, matrix: CudaMatrix, layer: int, batch: DeviceBatch, cache: CudaCache) -> Any:
        c = self.config
        q = self._first("q", x.shape[0])
        self._linear(
            "qkv32" if self.exact else "qkv", matrix, x, q, q.shape[1], cache.k, cache.v, batch.positions,
            batch.row_sequence, batch.page_tables, batch.page_tables.shape[1], self._cos, self._sin, c.num_heads,
            c.num_kv_heads, c.head_dim, self._interleaved, layer, c.num_layers,
        )  # fmt: skip
        return q

    def attention(self, qkv: Any, layer: int, batch: DeviceBatch, cache: CudaCache) -> Any:
        c = self.config
        rows = qkv.shape[0]
        out = self._first("attended", rows)
        if self.exact:
            self._attention_reference("f32_f32", 0, qkv, layer, batch, cache, out)
            return out
        common = (
            qkv, qkv.shape[1], cache.k, cache.v, batch.positions, batch.row_sequence, batch.page_tables,
            batch.page_tables.shape[1], c.num_heads, c.num_kv_heads, c.num_layers, layer, self._slopes, out,
            out.shape[1],
        )  # fmt: skip
        if batch.decode_rows:
            grid = (batch.decode_rows, c.num_kv_heads * self._group_tiles, batch.splits)
            name = f"crucible_attention_decode_{c.head_dim}"
            self.device.launch(name, grid, *common, self._partials, self._counters, self.max_pieces)
        if self._prefill_reference and batch.decode_rows < rows:
            self._attention_reference("f16_f16", batch.decode_rows, qkv, layer, batch, cache, out)
        elif len(batch.tile_first):
            name = f"crucible_attention_prefill_{c.head_dim}"
            tiles = (len(batch.tile_first), c.num_heads)
            self.device.launch(name, tiles, *common, batch.tile_first, batch.tile_rows)
        return out

    def _attention_reference(
        self, types: str, skip: int, qkv: Any, layer: int, batch: DeviceBatch, cache: CudaCache, out: Any
    ) -> None:
        """The plain kernel for the rows from ``skip`` on."""
        c = self.config
        self.device.launch(
            f"crucible_attention_reference_{types}", (qkv.shape[0] - skip, c.num_heads), qkv[skip:], qkv.shape[1],
            cache.k, cache.v, batch.positions[skip:], batch.row_sequence[skip:], batch.page_tables,
            batch.page_tables.shape[1], c.num_heads, c.num_kv_heads, c.num_layers, layer, self._slopes, out[skip:],
            out.shape[1], c.head_dim,
        )  # fmt: skip

    def project_add(self, x: Any, matrix: CudaMatrix, residual: Any) -> None:
        self._linear("add", matrix, x, residual, residual.shape[1], matrix.out_features)

    def swiglu(self, x: Any, matrix: CudaMatrix) -> Any:
        out = self._first("mlp", x.shape[0])
        self._linear("swiglu", matrix, x, out, out.shape[1], matrix.out_features)
        return out

    def gelu(self, x: Any, matrix: CudaMatrix) -> Any:
        out = self._first("mlp", x.shape[0])
        tanh = int(self.config.activation == "gelu_tanh")
        self._linear("gelu", matrix, x, out, out.shape[1], matrix.out_features, tanh)
        return out

    def take_rows(self, x: Any, batch: DeviceBatch) -> LastRows:
        return LastRows(x, batch.logit_rows)

    def logits(self, x: Any, head: CudaMatrix, batch: DeviceBatch) -> Any:
        out = self.logit_rows(x.shape[0])
        self._linear("store", head, x, out, out.shape[1], head.out_features)
        return out

    def logit_rows(self, count: int) -> Any:
        """Where ``logits`` leaves its result."""
        return self._first("logits", count)

    def decode_splits(self, rows: int) -> int:
        """Blocks for the positions of each row and KV head that keep every processor supplied."""
        if not self._split:
            return 1
        blocks = max(1, rows * self.config.num_kv_heads * self._group_tiles)
        return max(1, min(self.max_pieces, 2 * self.device.processors // blocks))

    def _linear(self, epilogue: str, matrix: CudaMatrix, x: Any, *tail: Any) -> None:
        rows = x.shape[0]
        if not rows:  # a prompt chunk that is not the last wants no logits
            return
        if not self.exact and x.dtype == np.float32:  # the residual stream of a post-norm model
            target = self._first("normed", rows)
            self.device.copy(x, target[:, : x.shape[1]])
            x = target
        name, grid = self._form(matrix.tiles, matrix.inputs, rows)
        self.device.launch(
            f"crucible_linear_{name}_{matrix.quant}_{epilogue}", grid, matrix.weights, matrix.scales,
            matrix.bias, matrix.factor, matrix.tiles, matrix.inputs, x, x.shape[1], rows, *tail,
        )  # fmt: skip

    def _form(self, tiles: int, inputs: int, rows: int) -> tuple[str, tuple[int, int]]:
        """The kernel for ``rows`` rows of a matrix, and its grid."""
        gemm = self._decode_gemm if self._decoding else self._gemm
        found = self._grids.get((tiles, inputs, rows, gemm))
        if found is None:
            found = self._grids[tiles, inputs, rows, gemm] = self._choose(gemm, tiles, inputs, rows)
        return found

    def _choose(self, gemm: str, tiles: int, inputs: int, rows: int) -> tuple[str, tuple[int, int]]:
        if gemm == "scalar":
            form = "scalar"
        elif gemm == "auto":
            form = geometry.cheapest(tiles, inputs, rows, self.device.processors)
        elif gemm == "small":
            form = f"small{geometry.small_tokens(rows, inputs)}"
        else:
            form = f"big{geometry.BIG_TOKENS[rows > geometry.BIG_TOKENS[0]]}"
        return form, geometry.launch(form, tiles, inputs, rows, self.device.processors).grid
