"""down(silu(gate) · up) between two products, as one differentiable operation.

Only the input and gate and up are kept: the backward kernel computes the product anew while it reads them. In FP8 the
kernels emit the values that the next product reads, with a scale a row, so that no pass looks for a maximum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from crucible_train import fp8, kernels
from crucible_train.norm import precise


@torch.library.custom_op(
    "crucible_train::swiglu", mutates_args=(), schema="(Tensor both, bool fp8) -> (Tensor, Tensor)"
)
def product(both: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:
    """both [N, 2F] → silu(gate) · up [N, F] in its type and scales [0]; or in e4m3 with scales float32 [N, 1]."""
    result, scales = _product_shapes(both, use_fp8)
    if kernels.usable(both):
        from crucible_train import swiglu_kernel

        swiglu_kernel.forward(both.contiguous(), result, scales)
        return result, scales
    gate, up = precise(both).chunk(2, -1)
    value = F.silu(gate) * up
    return fp8.quantise_rows(value, fp8.E4M3) if use_fp8 else (value.to(both.dtype), scales)


@product.register_fake
def _product_shapes(both: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor]:
    rows, width = both.shape
    result = both.new_empty((rows, width // 2), dtype=fp8.E4M3 if use_fp8 else both.dtype)
    return result, both.new_empty((rows, 1) if use_fp8 else (0,), dtype=torch.float32)


@torch.library.custom_op(
    "crucible_train::swiglu_backward",
    mutates_args=(),
    schema="(Tensor both, Tensor d_inner, bool fp8) -> (Tensor, Tensor, Tensor, Tensor)",
)
def product_gradient(both: Tensor, d_inner: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient of both [N, 2F] in its type, the same in e5m2, its scales [N, 1], and silu(gate) · up [N, F].

    Without ``use_fp8`` the second and third are empty.
    """
    d_both, rounded, scales, inner = _gradient_shapes(both, d_inner, use_fp8)
    if kernels.usable(both):
        from crucible_train import swiglu_kernel

        swiglu_kernel.backward(both.contiguous(), d_inner.contiguous(), d_both, rounded, scales, inner, use_fp8)
        return d_both, rounded, scales, inner
    gate, up = precise(both).chunk(2, -1)
    d = precise(d_inner)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    exact = torch.cat((d * up * sigmoid * (1 + gate * (1 - sigmoid)), d * silu), -1)
    if use_fp8:
        rounded, scales = fp8.quantise_rows(exact, fp8.E5M2)
    return exact.to(both.dtype), rounded, scales, (silu * up).to(both.dtype)


@product_gradient.register_fake
def _gradient_shapes(both: Tensor, d_inner: Tensor, use_fp8: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, width = both.shape
    rounded = both.new_empty((rows, width) if use_fp8 else (0, 0), dtype=fp8.E5M2)
    scales = both.new_empty((rows, 1) if use_fp8 else (0,), dtype=torch.float32)
    return both.new_empty((rows, width)), rounded, scales, both.new_empty((rows, width // 2))


class _FeedForward(torch.autograd.Function):
    """x [N, d], inputs [2F, d], down [d, F] → [N, d]. Gradients of the weights are products in x's type."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, inputs: Tensor, down: Tensor, scales: fp8.Scales | None
    ) -> Tensor:
        ctx.scales, ctx.types = scales, (inputs.dtype, down.dtype)
        if scales is None:
            inputs, down = inputs.to(x.dtype), down.to(x.dtype)
            both = torch.mm(x, inputs.t())
            ctx.save_for_backward(x, both, inputs, down)
            return torch.mm(product(both, False)[0], down.t())
        x8, x_scale = fp8.quantise_as(x, fp8.E4M3, scales)
        inputs8, inputs_scale = fp8.quantise(inputs, fp8.E4M3)
        down8, down_scale = fp8.quantise(down, fp8.E4M3)
        both = fp8.scaled_matmul(x8, inputs8.t(), x_scale, inputs_scale, x.dtype, fast=True, scales=scales)
        inner8, inner_scale = product(both, True)
        ctx.save_for_backward(x, both, inputs8, down8, inputs_scale, down_scale)
        return fp8.scaled_matmul(inner8, down8.t(), inner_scale, down_scale, x.dtype, fast=True, scales=scales)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, both, inputs, down, *weight_scales = ctx.saved_tensors
        gradient = gradient.to(x.dtype)
        if ctx.scales is None:
            d_both, _, _, inner = product_gradient(both, torch.mm(gradient, down), False)
            dx = torch.mm(d_both, inputs)
        else:
            inputs_scale, down_scale = weight_scales
            g8, g_scale = fp8.quantise_as(gradient, fp8.E5M2, ctx.scales)
            d_inner = fp8.scaled_matmul(g8, fp8.column_major(down), g_scale, down_scale, x.dtype, scales=ctx.scales)
            d_both, d8, d_scale, inner = product_gradient(both, d_inner, True)
            dx = fp8.scaled_matmul(d8, fp8.column_major(inputs), d_scale, inputs_scale, x.dtype, scales=ctx.scales)
        d_inputs, d_down = torch.mm(d_both.t(), x), torch.mm(gradient.t(), inner)
        return dx, d_inputs.to(ctx.types[0]), d_down.to(ctx.types[1]), None


def feed_forward(x: Tensor, inputs: Tensor, down: Tensor, scales: fp8.Scales | None = None) -> Tensor:
    """x [..., d] → down · (silu(gate) · up) [..., d] for inputs [2F, d] (gate, then up) and down [d, F].

    The result has the autocast type, without autocast x's. ``scales``: products in FP8 with these, d and F being
    multiples of fp8.MULTIPLE; row-wise ones, since the kernels know no other.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    rows = x.reshape(-1, x.shape[-1])
    with torch.autocast(device, enabled=False):
        y: Tensor = _FeedForward.apply(rows, inputs, down, scales)
    return y.view(*x.shape[:-1], down.shape[0])
