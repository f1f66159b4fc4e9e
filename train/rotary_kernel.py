"""Triton kernels that take q, k and v out of their common projection and turn them, and back, a program a token.

Floors for a row of W values in bf16 (1152 for 12 + 2 · 3 heads of 64; 65536 rows, 4.3 TB/s): forward moves q and k once
in and once out, 0.06 ms; backward reads and writes the row, 0.07 ms, 0.09 ms with its e5m2 copy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crucible_train.kernels import on_device


@triton.jit
def _forward(
    qkv, cos, sin, q, k, length, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    turn = (row % length) * HALF + lane
    c = tl.load(cos + turn)
    s = tl.load(sin + turn)
    source = qkv + row * (HEADS + 2 * KV_HEADS) * 2 * HALF + head * 2 * HALF + lane
    inside = head < HEADS + KV_HEADS
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    first = (a * c - b * s).to(q.dtype.element_ty)
    second = (b * c + a * s).to(q.dtype.element_ty)
    is_query = head < HEADS
    target = q + row * HEADS * 2 * HALF + head * 2 * HALF + lane
    tl.store(target, first, mask=is_query)
    tl.store(target + HALF, second, mask=is_query)
    is_key = inside & (head >= HEADS)
    target = k + row * KV_HEADS * 2 * HALF + (head - HEADS) * 2 * HALF + lane
    tl.store(target, first, mask=is_key)
    tl.store(target + HALF, second, mask=is_key)


@triton.jit
def _backward(
    dq, dk, dv, cos, sin, d_qkv, rounded, scales, length,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr,
    LARGEST: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // length, row % length
    head = tl.arange(0, BLOCK)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    c = tl.load(cos + token * HALF + lane)
    s = tl.load(sin + token * HALF + lane)
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    from_q = dq + batch * q_batch + token * q_token + head * q_head + lane
    from_k = dk + batch * k_batch + token * k_token + (head - HEADS) * k_head + lane
    a = tl.load(from_q, mask=is_query, other=0.0).to(tl.float32)
    a += tl.load(from_k, mask=is_key, other=0.0).to(tl.float32)
    b = tl.load(from_q + HALF, mask=is_query, other=0.0).to(tl.float32)
    b += tl.load(from_k + HALF, mask=is_key, other=0.0).to(tl.float32)
    first = a * c + b * s
    second = b * c - a * s
    kv_head = tl.arange(0, KV_BLOCK)[:, None]
    wide = tl.arange(0, 2 * HALF)[None, :]
    is_value = kv_head < KV_HEADS
    v = tl.load(dv + batch * v_batch + token * v_token + kv_head * v_head + wide, mask=is_value, other=0.0)
    v = v.to(tl.float32)
    start = row * (HEADS + 2 * KV_HEADS) * 2 * HALF
    turned = start + head * 2 * HALF + lane
    values = start + (HEADS + KV_HEADS) * 2 * HALF + kv_head * 2 * HALF + wide
    inside = head < HEADS + KV_HEADS
    kind = d_qkv.dtype.element_ty
    tl.store(d_qkv + turned, first.to(kind), mask=inside)
    tl.store(d_qkv + turned + HALF, second.to(kind), mask=inside)
    tl.store(d_qkv + values, v.to(kind), mask=is_value)
    if FP8:
        largest = tl.maximum(tl.max(tl.maximum(tl.abs(first), tl.abs(second))), tl.max(tl.abs(v)))
        scale = tl.maximum(largest, 1e-30) / LARGEST
        tl.store(scales + row, scale)
        small = rounded.dtype.element_ty
        first = tl.minimum(tl.maximum(first / scale, -LARGEST), LARGEST)
        second = tl.minimum(tl.maximum(second / scale, -LARGEST), LARGEST)
        v = tl.minimum(tl.maximum(v / scale, -LARGEST), LARGEST)
        tl.store(rounded + turned, first.to(small), mask=inside)
        tl.store(rounded + turned + HALF, second.to(small), mask=inside)
        tl.store(rounded + values, v.to(small), mask=is_value)


def forward(qkv: Tensor, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor) -> None:
    """qkv [B · T, W] contiguous; cos, sin [T, D / 2] float32 → q [B, T, heads, D], k [B, T, kv_heads, D], turned."""
    batch, length, heads, head_dim = q.shape
    block = triton.next_power_of_2(heads + k.shape[2])
    with on_device(qkv):
        _forward[(batch * length,)](
            qkv, cos, sin, q, k, length, HEADS=heads, KV_HEADS=k.shape[2], HALF=head_dim // 2, BLOCK=block,
            num_warps=_warps(block * head_dim),
        )  # fmt: skip


def backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, d_qkv: Tensor, rounded: Tensor, scales: Tensor,
    fp8: bool,
) -> None:  # fmt: skip
    """dq, dk, dv [B, T, heads, D] of any strides but a last of 1 → d_qkv [B · T, W]; ``fp8``: also rounded, scales."""
    batch, length, heads, head_dim = dq.shape
    kv_heads = dk.shape[2]
    block = triton.next_power_of_2(heads + kv_heads)
    with on_device(dq):
        _backward[(batch * length,)](
            dq, dk, dv, cos, sin, d_qkv, rounded, scales, length,
            *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
            HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2, BLOCK=block,
            KV_BLOCK=triton.next_power_of_2(kv_heads), LARGEST=torch.finfo(rounded.dtype).max, FP8=fp8,
            num_warps=_warps(block * head_dim),
        )  # fmt: skip


def _warps(values: int) -> int:
    return min(max(values // 512, 1), 8)
