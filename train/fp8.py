"""FP8 matrix products with scales found anew each time (arXiv:2209.05433): nothing is carried from step to step.

e4m3 holds activations and weights, e5m2 the gradients, whose range is wider. Activations and gradients have one scale a
row, which the kernel that produces a row finds while it holds it (a scale for the whole tensor needs another pass over
memory), weights one a tensor. Where torch._scaled_mm has no tensor cores to run on, the same rounded values are
multiplied in float32: the arithmetic is the same up to the order of sums.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor

from crucible_train.errors import TrainingError

Scales = Literal["row", "row-after", "tensor"]
"""Scales of activations and gradients: one a row, applied inside the product or to its result; or one a tensor."""
SCALES: Final[dict[str, Scales]] = {"fp8": "row", "fp8-after": "row-after", "fp8-tensor": "tensor"}
"""The scales of the matmuls in FP8."""

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
MULTIPLE = 16
"""Both dimensions of the second operand must be multiples of this (cuBLAS)."""
CAPABILITY = (8, 9)
"""The first compute capability with FP8 tensor cores (Ada)."""


def require(device: torch.device) -> None:
    """Raises TrainingError for a GPU without FP8 tensor cores; a CPU does the same arithmetic slowly."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        raise TrainingError(f"matmul fp8 needs a GPU of sm_89 or later, this one is sm_{major}{minor}; use matmul bf16")


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` as ``dtype`` and the float32 scale [] to multiply it by: the largest magnitude uses the whole range."""
    return _rounded(x, x.abs().amax(), dtype)


def quantise_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` [M, K] as ``dtype`` and float32 scales [M, 1], one a row."""
    return _rounded(x, x.abs().amax(-1, keepdim=True), dtype)


def quantise_as(x: Tensor, dtype: torch.dtype, scales: Scales) -> tuple[Tensor, Tensor]:
    return quantise(x, dtype) if scales == "tensor" else quantise_rows(x, dtype)


def _rounded(x: Tensor, magnitude: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    largest = torch.finfo(dtype).max
    scale = magnitude.float().clamp(min=1e-30) / largest  # an all-zero tensor has a scale too
    return (x.float() / scale).clamp(-largest, largest).to(dtype), scale


def scaled_matmul(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    dtype: torch.dtype,
    *,
    fast: bool = False,
    scales: Scales = "row",
) -> Tensor:
    """(a · scale_a) @ (b · scale_b) as ``dtype`` [M, N].

    a [M, K] row-major, b [K, N] column-major (that is the transpose of a contiguous [N, K]), both FP8; scale_a [] or
    [M, 1], scale_b []. ``fast`` accumulates with fewer bits, enough for a forward pass. On CUDA ``dtype`` is bfloat16,
    or float32 when scale_a is []. ``scales`` row-after multiplies by scale_a behind the product, for a cuBLAS whose
    kernels with a scale a row are slow or missing.
    """
    if not a.is_cuda:
        return (torch.mm(a.float(), b.float()) * (scale_a * scale_b)).to(dtype)
    if scale_a.ndim == 0:
        return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)
    if scales == "row-after":
        one = torch.ones((), device=a.device)
        y = torch._scaled_mm(a, b, scale_a=one, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)
        return (y.float() * scale_a).to(dtype)
    wide = scale_b.repeat(1, b.shape[1])
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=wide, out_dtype=dtype, use_fast_accum=fast)


def column_major(x: Tensor) -> Tensor:
    """``x`` [K, N] with its columns contiguous."""
    return x.t().contiguous().t()


class _Linear(torch.autograd.Function):
    """x [M, K] · weightᵀ [K, N]. The weight's gradient stays in x's type.

    As an FP8 product it would need both operands transposed in memory, which costs what it gains at widths of 1024
    and below; and it is the one product whose errors add up over training.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, scales: Scales) -> Tensor:  # type: ignore[no-untyped-def, override]
        x8, x_scale = quantise_as(x, E4M3, scales)
        w8, w_scale = quantise(weight, E4M3)
        ctx.save_for_backward(x, w8, w_scale)
        ctx.weight_dtype, ctx.scales = weight.dtype, scales
        return scaled_matmul(x8, w8.t(), x_scale, w_scale, x.dtype, fast=True, scales=scales)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def, override]
        x, w8, w_scale = ctx.saved_tensors
        g8, g_scale = quantise_as(gradient, E5M2, ctx.scales)
        dx = scaled_matmul(g8, column_major(w8), g_scale, w_scale, x.dtype, scales=ctx.scales)
        dw = torch.mm(gradient.to(x.dtype).t(), x)
        return dx, dw.to(ctx.weight_dtype), None


def linear(x: Tensor, weight: Tensor, scales: Scales = "row") -> Tensor:
    """x [..., K] · weightᵀ for weight [N, K], with FP8 products. Differentiable in both.

    The result has the autocast type, without autocast x's. K and N are multiples of MULTIPLE.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    rows = x.reshape(-1, x.shape[-1])
    with torch.autocast(device, enabled=False):
        y: Tensor = _Linear.apply(rows, weight, scales)
    return y.view(*x.shape[:-1], weight.shape[0])
