"""THE forward pass. Eager, graph capture, profiler, packed prefill and CPU all call this one.

It knows the order of operations and nothing of devices, pages, requests or sampling.
"""

from __future__ import annotations

from typing import Any

from crucible.model.ops import BatchView, FloatArray, Ops
from crucible.model.weights import Weights


def forward(weights: Weights, ops: Ops, batch: BatchView, cache: Any) -> FloatArray:
    """Computes a ragged batch and returns logits float32 [len(batch.logit_rows), vocab_size].

    K and V of every row are written to ``cache`` before any attention of that layer reads them.
    """
    config = weights.config
    pre = config.norm.placement == "pre"
    mlp = ops.swiglu if config.activation == "swiglu" else ops.gelu

    x = ops.embed(weights.embedding, weights.positions, batch)
    for index, layer in enumerate(weights.layers):
        h = ops.norm(x, layer.attention_norm, layer.attention_norm_bias) if pre else x
        qkv = ops.qkv(h, layer.qkv, index, batch, cache)
        ops.project_add(ops.attention(qkv, index, batch, cache), layer.attention_output, x)
        if not pre:
            ops.norm(x, layer.attention_norm, layer.attention_norm_bias, out=x)
        h = ops.norm(x, layer.mlp_norm, layer.mlp_norm_bias) if pre else x
        ops.project_add(mlp(h, layer.mlp_in), layer.mlp_out, x)
        if not pre:
            ops.norm(x, layer.mlp_norm, layer.mlp_norm_bias, out=x)
    x = ops.norm(ops.take_rows(x, batch), weights.final_norm, weights.final_norm_bias)
    return ops.logits(x, weights.head, batch)
