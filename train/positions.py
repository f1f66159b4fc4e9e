"""Rotary tables and rotation, ALiBi slopes and bias. The numbers are the engine's, to the bit."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from crucible.config.model import Rope
from crucible_train.errors import TrainingError
from crucible_train.norm import precise


def rope_tables(rope: Rope, head_dim: int, context: int) -> tuple[Tensor, Tensor]:
    """cos and sin float32 [context, head_dim / 2] of position · frequency (arXiv:2104.09864).

    Raises TrainingError for a model with RoPE scaling: those are served, not trained here.
    """
    if rope.scaling is not None:
        raise TrainingError("training does not know RoPE scaling; use a model whose position.scaling is null")
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1.0) / np.power(np.float32(rope.theta), exponents, dtype=np.float32)
    angles = (np.arange(context, dtype=np.float32)[:, None] * frequencies[None, :]).astype(np.float64)
    return torch.from_numpy(np.cos(angles).astype(np.float32)), torch.from_numpy(np.sin(angles).astype(np.float32))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """``x`` [B, T, heads, head_dim] turned by its position; cos, sin [T, head_dim / 2]. Computed in float32."""
    exact = precise(x)
    cos, sin = cos[:, None, :], sin[:, None, :]
    if interleaved:
        first, second = exact[..., 0::2], exact[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = exact.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def alibi_slopes(num_heads: int) -> Tensor:
    """Slopes float32 [heads] (arXiv:2108.12409): 2^(−8i/n) for a power of two, else every other one of twice as many
    after those of the largest power of two."""

    def powers(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    whole = 2 ** int(math.log2(num_heads))
    return torch.tensor(powers(whole) + powers(2 * whole)[0::2][: num_heads - whole], dtype=torch.float32)


def alibi_bias(slopes: Tensor, length: int) -> Tensor:
    """Added to attention scores, float32 [heads, T, T]: slope · (key − query), minus infinity for keys to come."""
    place = torch.arange(length, device=slopes.device)
    distance = place[None, :] - place[:, None]
    bias = slopes[:, None, None] * distance
    return bias.masked_fill(distance > 0, -math.inf)
