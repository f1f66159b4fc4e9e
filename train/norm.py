"""RMSNorm and LayerNorm, written as plain operations so that torch.compile joins them with the residual around them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from crucible.config.model import Norm as NormConfig


class RmsNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last axis (arXiv:1910.07467), computed in at least float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        exact = precise(x)
        scaled = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight).to(x.dtype)


class LayerNorm(nn.Module):
    """(x − mean) / sqrt(variance + eps) · weight + bias over the last axis (arXiv:1607.06450)."""

    def __init__(self, size: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        exact = precise(x)
        centred = exact - exact.mean(-1, keepdim=True)
        y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def make_norm(config: NormConfig, size: int) -> RmsNorm | LayerNorm:
    if config.type == "rmsnorm":
        return RmsNorm(size, config.eps)
    return LayerNorm(size, config.eps, config.bias)


def precise(x: Tensor) -> Tensor:
    """``x`` in float32, or as it is if it has more bits."""
    return x if x.dtype == torch.float64 else x.float()
