"""Causal grouped-query attention."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from crucible.config.model import ModelConfig, Rope
from crucible_train import kernels, rotary
from crucible_train.compute import Compute
from crucible_train.linear import Linear, Projections, in_16_bits
from crucible_train.positions import rotate

_FALLBACKS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
PRIORITIES = {"cudnn": [SDPBackend.CUDNN_ATTENTION, *_FALLBACKS], "flash": _FALLBACKS}
"""CUDA kernels in the order they are tried; on Hopper cuDNN's is the fastest, where it takes the shapes."""


class Attention(nn.Module):
    """softmax(q · kᵀ / sqrt(head_dim) + bias) · v over positions up to the query's own, between two projections.

    Query head h reads KV head h // n_rep.
    """

    def __init__(self, config: ModelConfig, compute: Compute) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.interleaved = isinstance(config.position, Rope) and config.position.pairing == "interleaved"
        self.gqa, self.backend = compute.gqa, compute.attention_backend
        queries = self.heads * self.head_dim
        self.one_operation = (
            kernels.has_triton()
            and compute.qkv == "fused"
            and compute.fused_projections
            and compute.matmul != "fp8-tensor"
            and isinstance(config.position, Rope)
            and not self.interleaved
            and not config.biases.qkv
            and self.head_dim.bit_count() == 1  # the kernels' blocks are powers of two
        )
        self.qkv = Projections(
            config.hidden_size,
            (queries, config.kv_dim, config.kv_dim),
            bias=config.biases.qkv,
            matmul=compute.matmul,
            fused=compute.fused_projections,
        )
        self.output = Linear(queries, config.hidden_size, bias=config.biases.attention_output, matmul=compute.matmul)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, bias: Tensor | None) -> Tensor:
        """x [B, T, d] → [B, T, d]. rope: cos and sin [T, head_dim / 2]; bias [heads, T, T] includes the causal mask."""
        batch, length, _ = x.shape
        if self.one_operation and rope is not None and x.is_cuda and in_16_bits(x):
            projection = self.qkv.parts[0]
            q, k, v = rotary.project(x, projection.weight, rope, self.heads, self.kv_heads, projection.scales)
        else:
            q, k, v = (part.view(batch, length, -1, self.head_dim) for part in self.qkv(x))
            if rope is not None:
                q, k = (rotate(part, *rope, self.interleaved) for part in (q, k))
        out = self._attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias)
        result: Tensor = self.output(out.transpose(1, 2).reshape(batch, length, -1))
        return result

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        grouped = self.heads != self.kv_heads
        # No CUDA kernel but the slow one takes a bias and grouped heads together.
        if grouped and (self.gqa == "materialised" or (bias is not None and q.is_cuda)):
            n_rep = self.heads // self.kv_heads
            k, v = k.repeat_interleave(n_rep, dim=1), v.repeat_interleave(n_rep, dim=1)
            grouped = False
        mask = None if bias is None else bias.to(q.dtype)
        with self._kernels(q):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)

    def _kernels(self, q: Tensor) -> AbstractContextManager[object]:
        if not q.is_cuda or self.backend == "default":
            return nullcontext()
        return sdpa_kernel(PRIORITIES[self.backend], set_priority=True)
