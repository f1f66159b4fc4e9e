"""Triton kernels of silu(gate) · up and its gradient, a program a row, with FP8 results and their row's scale.

Floors for a row of 2F gate and up values in bf16 (F = 2048, 65536 rows, 4.3 TB/s): forward reads 4F bytes and writes
2F (bf16) or F (e4m3): 0.19 or 0.16 ms. Backward reads 6F, writes 4F of gradient and 2F of the recomputed product, which
therefore need not be kept: 0.37 ms; the gradient in e5m2 adds 2F: 0.44 ms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from crucible_train.kernels import on_device


@triton.jit
def _forward(both, result, scales, inner, LARGEST: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < inner
    base = both + row * 2 * inner + lanes
    gate = tl.load(base, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(base + inner, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    if FP8:
        scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-30) / LARGEST
        tl.store(scales + row, scale)
        value = value / scale
        value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    tl.store(result + row * inner + lanes, value.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    both, d_inner, d_both, rounded, scales, product, inner, LARGEST: tl.constexpr, FP8: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < inner
    wide = row * 2 * inner + lanes
    gate = tl.load(both + wide, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + wide + inner, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(d_inner + row * inner + lanes, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = d * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    d_up = d * silu
    kind = d_both.dtype.element_ty
    tl.store(product + row * inner + lanes, (silu * up).to(kind), mask=inside)
    tl.store(d_both + wide, d_gate.to(kind), mask=inside)
    tl.store(d_both + wide + inner, d_up.to(kind), mask=inside)
    if FP8:
        largest = tl.maximum(tl.max(tl.abs(d_gate), 0), tl.max(tl.abs(d_up), 0))
        scale = tl.maximum(largest, 1e-30) / LARGEST
        tl.store(scales + row, scale)
        d_gate = tl.minimum(tl.maximum(d_gate / scale, -LARGEST), LARGEST)
        d_up = tl.minimum(tl.maximum(d_up / scale, -LARGEST), LARGEST)
        small = rounded.dtype.element_ty
        tl.store(rounded + wide, d_gate.to(small), mask=inside)
        tl.store(rounded + wide + inner, d_up.to(small), mask=inside)


def forward(both: Tensor, result: Tensor, scales: Tensor) -> None:
    """both [N, 2F] (gate, then up) → result [N, F]; of an FP8 type: with scales [N, 1]."""
    rows, inner = result.shape
    fp8 = result.element_size() == 1
    block = triton.next_power_of_2(inner)
    with on_device(both):
        _forward[(rows,)](
            both, result, scales, inner, LARGEST=torch.finfo(result.dtype).max, FP8=fp8, BLOCK=block,
            num_warps=_warps(block),
        )  # fmt: skip


def backward(
    both: Tensor, d_inner: Tensor, d_both: Tensor, rounded: Tensor, scales: Tensor, product: Tensor, fp8: bool
) -> None:
    """d_both [N, 2F] and the product [N, F]; with ``fp8`` also d_both ``rounded`` and its scales [N, 1]."""
    rows, inner = product.shape
    block = triton.next_power_of_2(inner)
    with on_device(both):
        _backward[(rows,)](
            both, d_inner, d_both, rounded, scales, product, inner, LARGEST=torch.finfo(rounded.dtype).max, FP8=fp8,
            BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip


def _warps(block: int) -> int:
    """Eight values a thread: 16 bytes a load."""
    return min(max(block // 256, 1), 16)
