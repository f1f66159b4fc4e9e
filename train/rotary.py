"""Queries, keys and values: their common projection and the rotation, as one differentiable operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crucible_train import fp8, kernels
from crucible_train.positions import rotate


@torch.library.custom_op(
    "crucible_train::rotary",
    mutates_args=(),
    schema="(Tensor qkv, Tensor cos, Tensor sin, SymInt batch, int heads, int kv_heads) -> (Tensor, Tensor)",
)
def rotary_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, batch: int, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor]:
    """qkv [B · T, (heads + 2 · kv_heads) · D], cos and sin [T, D / 2] → q [B, T, heads, D], k [B, T, kv_heads, D]."""
    q, k = _forward_shapes(qkv, cos, sin, batch, heads, kv_heads)
    if kernels.usable(qkv):
        from crucible_train import rotary_kernel

        rotary_kernel.forward(qkv.contiguous(), cos.contiguous(), sin.contiguous(), q, k)
        return q, k
    flat_q, flat_k, _ = qkv.view(*q.shape[:2], -1).split((heads * q.shape[3], *[kv_heads * q.shape[3]] * 2), dim=-1)
    q.copy_(rotate(flat_q.view(q.shape), cos, sin, False))
    k.copy_(rotate(flat_k.view(k.shape), cos, sin, False))
    return q, k


@rotary_forward.register_fake
def _forward_shapes(
    qkv: Tensor, cos: Tensor, sin: Tensor, batch: int, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor]:
    length, head_dim = qkv.shape[0] // batch, qkv.shape[1] // (heads + 2 * kv_heads)
    return qkv.new_empty((batch, length, heads, head_dim)), qkv.new_empty((batch, length, kv_heads, head_dim))


@torch.library.custom_op(
    "crucible_train::rotary_backward",
    mutates_args=(),
    schema="(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, bool fp8) -> (Tensor, Tensor, Tensor)",
)
def rotary_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, use_fp8: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v [B, T, heads, D] → that of qkv [B · T, W], the same in e5m2 and its scales [B · T, 1].

    Without ``use_fp8`` the last two are empty.
    """
    d_qkv, rounded, scales = _backward_shapes(dq, dk, dv, cos, sin, use_fp8)
    if kernels.usable(dq):
        from crucible_train import rotary_kernel

        parts = [d if d.stride(-1) == 1 else d.contiguous() for d in (dq, dk, dv)]
        rotary_kernel.backward(*parts, cos.contiguous(), sin.contiguous(), d_qkv, rounded, scales, use_fp8)
        return d_qkv, rounded, scales
    turned_parts = [rotate(d, cos, -sin, False) for d in (dq, dk)]
    d_qkv.copy_(torch.cat([part.flatten(2) for part in (*turned_parts, dv)], -1).flatten(0, 1))
    if use_fp8:
        rounded, scales = fp8.quantise_rows(d_qkv, fp8.E5M2)
    return d_qkv, rounded, scales


@rotary_backward.register_fake
def _backward_shapes(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, use_fp8: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = dq.shape[0] * dq.shape[1], (dq.shape[2] + 2 * dk.shape[2]) * dq.shape[3]
    rounded = dq.new_empty((rows, width) if use_fp8 else (0, 0), dtype=fp8.E5M2)
    scales = dq.new_empty((rows, 1) if use_fp8 else (0,), dtype=torch.float32)
    return dq.new_empty((rows, width)), rounded, scales


class _Project(torch.autograd.Function):
    """x [B · T, d] and weight [W, d] → q, k, v. The gradient of the weight is a product in x's type."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        sizes: tuple[int, int, int],
        scales: fp8.Scales | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, heads, kv_heads = sizes
        ctx.scales, ctx.weight_dtype = scales, weight.dtype
        if scales is None:
            weight = weight.to(x.dtype)
            qkv = torch.mm(x, weight.t())
            ctx.save_for_backward(x, cos, sin, weight)
        else:
            x8, x_scale = fp8.quantise_as(x, fp8.E4M3, scales)
            w8, w_scale = fp8.quantise(weight, fp8.E4M3)
            qkv = fp8.scaled_matmul(x8, w8.t(), x_scale, w_scale, x.dtype, fast=True, scales=scales)
            ctx.save_for_backward(x, cos, sin, w8, w_scale)
        q, k = rotary_forward(qkv, cos, sin, batch, heads, kv_heads)
        width = kv_heads * q.shape[3]
        return q, k, qkv.view(*q.shape[:2], -1)[..., -width:].unflatten(-1, k.shape[2:])

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, cos, sin, weight, *weight_scale = ctx.saved_tensors
        d_qkv, d8, d_scale = rotary_backward(dq, dk, dv, cos, sin, ctx.scales is not None)
        if ctx.scales is None:
            dx = torch.mm(d_qkv, weight)
        else:
            columns = fp8.column_major(weight)
            dx = fp8.scaled_matmul(d8, columns, d_scale, weight_scale[0], x.dtype, scales=ctx.scales)
        return dx, torch.mm(d_qkv.t(), x).to(ctx.weight_dtype), None, None, None, None


def project(
    x: Tensor, weight: Tensor, rope: tuple[Tensor, Tensor], heads: int, kv_heads: int, scales: fp8.Scales | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, T, d], weight [(heads + 2 · kv_heads) · D, d] (queries, keys, values) → q [B, T, heads, D], k and v
    [B, T, kv_heads, D]; q and k turned by rope's cos and sin [T, D / 2], halves paired, D a power of two.

    The result has the autocast type, without autocast x's. ``scales``: the product in FP8 with these, row-wise.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    sizes = x.shape[0], heads, kv_heads
    with torch.autocast(device, enabled=False):
        q, k, v = _Project.apply(x.reshape(-1, x.shape[-1]), weight, *rope, sizes, scales)
    return q, k, v
