"""Ops: what the forward pass asks of a device. One implementation a device (cpu_ops; later cuda_ops, timed_ops).

Arrays an op returns live in the Ops object's scratch memory and are valid until the same op is called again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from crucible.quantized import QuantizedTensor

Array = Any
"""A device array: numpy on the CPU. Activations are float32 [rows, features]."""

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]

Projection = FloatArray | QuantizedTensor
"""A projection's weights [N, K] to pack. Quantised ones are taken as they are, as ``int8`` only."""


class Matrix(Protocol):
    """Packed weights of one or several projections; only the Ops that packed it reads it."""

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class BatchView(Protocol):
    """What ops read of a batch (engine/batch.py fills it); int32 arrays.

    token_ids, positions, row_sequence [rows]; page_tables [sequences, pages]; logit_rows [wanted].
    """

    @property
    def token_ids(self) -> IntArray: ...
    @property
    def positions(self) -> IntArray: ...
    @property
    def row_sequence(self) -> IntArray: ...
    @property
    def page_tables(self) -> IntArray: ...
    @property
    def logit_rows(self) -> IntArray: ...


class Ops(Protocol):
    """The operations of a decoder-only transformer over a ragged batch and a paged KV cache."""

    def pack(self, parts: Sequence[Projection], biases: Sequence[FloatArray] | None, quant: str) -> Matrix:
        """Packs projections [n_i, K] of one input, all float or all quantised, into one matrix of Σ n_i outputs."""

    def pack_qkv(self, parts: Sequence[Projection], biases: Sequence[FloatArray] | None, quant: str) -> Matrix:
        """``pack`` for q, k and v, in this order, as ``qkv`` reads them."""

    def pack_gated(self, gate: Projection, up: Projection, biases: Sequence[FloatArray] | None, quant: str) -> Matrix:
        """Packs the two projections of a SwiGLU, both float or both quantised, for ``swiglu``."""

    def vector(self, values: FloatArray) -> Array:
        """A device copy of a float32 array that is not packed (norm weights, learned positions)."""

    def allocate_cache(self, num_pages: int) -> Any:
        """KV memory of ``num_pages`` pages."""

    def embed(self, table: Matrix, positions_table: Array | None, batch: BatchView) -> Array:
        """[rows, d]: rows of ``table``, plus learned positions."""

    def norm(self, x: Array, weight: Array, bias: Array | None, out: Array | None = None) -> Array:
        """The model's norm over each row; ``out`` may be ``x``."""

    def qkv(self, x: Array, matrix: Matrix, layer: int, batch: BatchView, cache: Any) -> Array:
        """[rows, q + 2 · kv]: projected, positions applied, K and V written to the cache."""

    def attention(self, qkv: Array, layer: int, batch: BatchView, cache: Any) -> Array:
        """[rows, q]: causal attention of each row over its sequence's cache."""

    def project_add(self, x: Array, matrix: Matrix, residual: Array) -> None:
        """residual += projection of x."""

    def swiglu(self, x: Array, matrix: Matrix) -> Array:
        """[rows, ffn]: silu(gate) * up."""

    def gelu(self, x: Array, matrix: Matrix) -> Array:
        """[rows, ffn]: gelu of the projection."""

    def logits(self, x: Array, head: Matrix, batch: BatchView) -> FloatArray:
        """float32 [wanted, vocab] for the rows ``batch.logit_rows`` of ``x`` (already normed)."""

    def take_rows(self, x: Array, batch: BatchView) -> Array:
        """The rows ``batch.logit_rows`` of ``x``, so that the final norm runs on them alone."""
