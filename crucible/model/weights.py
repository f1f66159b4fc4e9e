"""Weights: a checkpoint's tensors packed by an Ops, layer by layer, so that source pages can be given back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from crucible.checkpoint import Checkpoint, check_finite
from crucible.config import ModelConfig
from crucible.config.model import Learned
from crucible.model.ops import Array, FloatArray, Matrix, Ops, Projection
from crucible.quantized import QuantizedTensor


@dataclass(frozen=True)
class LayerWeights:
    """One transformer layer. ``qkv`` is q, k, v in this order; ``mlp_in`` is gate and up, or up alone for GELU."""

    attention_norm: Array
    attention_norm_bias: Array | None
    qkv: Matrix
    attention_output: Matrix
    mlp_norm: Array
    mlp_norm_bias: Array | None
    mlp_in: Matrix
    mlp_out: Matrix


@dataclass(frozen=True)
class Weights:
    """All weights on the device. ``head`` is ``embedding`` itself when the embeddings are tied."""

    config: ModelConfig
    embedding: Matrix
    positions: Array | None
    layers: list[LayerWeights]
    final_norm: Array
    final_norm_bias: Array | None
    head: Matrix

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrices."""
        matrices = {id(m): m for m in (self.embedding, self.head)}
        for layer in self.layers:
            for matrix in (layer.qkv, layer.attention_output, layer.mlp_in, layer.mlp_out):
                matrices[id(matrix)] = matrix
        return sum(matrix.nbytes for matrix in matrices.values())


def load_weights(
    checkpoint: Checkpoint, ops: Ops, quant: str, on_progress: Callable[[float], None] | None = None
) -> Weights:
    """Packs every tensor of ``checkpoint`` as ``quant`` (``f32`` or ``int8``); ``on_progress`` gets 0 … 1.

    What is stored as int8 is packed as it is, or as the float32 it stands for. Raises CheckpointError for a tensor that
    check_finite refuses.
    """
    config = checkpoint.config
    reader = _Reader(checkpoint, ops, quant)
    embedding = ops.pack(reader.matrices("model.embed_tokens.weight"), None, quant)
    reader.done()
    layers = []
    for index in range(config.num_layers):
        layers.append(_load_layer(reader, f"model.layers.{index}.", quant))
        reader.done()
        if on_progress:
            on_progress((index + 1) / config.num_layers)
    head = embedding
    if not config.tied_embeddings:
        head = ops.pack(reader.matrices("lm_head.weight"), None, quant)
    positions = None
    if isinstance(config.position, Learned):
        positions = ops.vector(reader.read("model.embed_positions.weight"))
    final_norm, final_norm_bias = reader.norm("model.norm")
    reader.done()
    return Weights(
        config=config,
        embedding=embedding,
        positions=positions,
        layers=layers,
        final_norm=final_norm,
        final_norm_bias=final_norm_bias,
        head=head,
    )


class _Reader:
    """Reads tensors by name and remembers them, to release their source pages once they are packed."""

    def __init__(self, checkpoint: Checkpoint, ops: Ops, quant: str) -> None:
        self.checkpoint, self.ops, self.quant = checkpoint, ops, quant
        self._names: list[str] = []

    def read(self, name: str) -> FloatArray:
        self._names.append(name)
        values = self.checkpoint.read(name)
        with np.errstate(over="ignore", invalid="ignore"):
            total = values.sum()  # one NaN or infinity makes the sum one; much faster than looking at each
        if not np.isfinite(total):
            check_finite(self.checkpoint)
        return values

    def matrices(self, *names: str) -> list[Projection]:
        """The tensors ``names``, which are packed together: quantised if any is stored so and int8 is wanted."""
        stored = {name: self.checkpoint.read_quantized(name) for name in names}
        parts: list[Projection] = []
        for name, part in stored.items():
            if part is None:
                parts.append(self.read(name))
                continue
            self._names.append(name)
            if part.fault() is not None:
                check_finite(self.checkpoint)
            parts.append(part if self.quant == "int8" else part.dequantize())
        if any(isinstance(part, QuantizedTensor) for part in parts):
            from crucible.model.quantize import quantize  # brings Numba, which other Ops than the CPU's do without

            return [part if isinstance(part, QuantizedTensor) else quantize(part) for part in parts]
        return parts

    def norm(self, name: str) -> tuple[Array, Array | None]:
        bias = self.ops.vector(self.read(f"{name}.bias")) if self.checkpoint.config.norm.bias else None
        return self.ops.vector(self.read(f"{name}.weight")), bias

    def done(self) -> None:
        for name in self._names:
            self.checkpoint.release(name)
        self._names.clear()


def _load_layer(reader: _Reader, prefix: str, quant: str) -> LayerWeights:
    biases, ops = reader.checkpoint.config.biases, reader.ops

    def matrices(*names: str) -> list[Projection]:
        return reader.matrices(*(f"{prefix}{name}.weight" for name in names))

    def bias_vectors(present: bool, *names: str) -> list[FloatArray] | None:
        return [reader.read(f"{prefix}{name}.bias") for name in names] if present else None

    qkv_names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    if reader.checkpoint.config.activation == "swiglu":
        gated = ("mlp.gate_proj", "mlp.up_proj")
        gate, up = matrices(*gated)
        mlp_in = ops.pack_gated(gate, up, bias_vectors(biases.mlp, *gated), quant)
    else:
        mlp_in = ops.pack(matrices("mlp.up_proj"), bias_vectors(biases.mlp, "mlp.up_proj"), quant)
    attention_norm, attention_norm_bias = reader.norm(f"{prefix}input_layernorm")
    mlp_norm, mlp_norm_bias = reader.norm(f"{prefix}post_attention_layernorm")
    return LayerWeights(
        attention_norm=attention_norm,
        attention_norm_bias=attention_norm_bias,
        qkv=ops.pack_qkv(matrices(*qkv_names), bias_vectors(biases.qkv, *qkv_names), quant),
        attention_output=ops.pack(
            matrices("self_attn.o_proj"), bias_vectors(biases.attention_output, "self_attn.o_proj"), quant
        ),
        mlp_norm=mlp_norm,
        mlp_norm_bias=mlp_norm_bias,
        mlp_in=mlp_in,
        mlp_out=ops.pack(matrices("mlp.down_proj"), bias_vectors(biases.mlp, "mlp.down_proj"), quant),
    )
