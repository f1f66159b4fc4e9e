"""Projections: one or several matrices that read the same input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crucible_train import fp8
from crucible_train.compute import Matmul
from crucible_train.errors import TrainingError


def in_16_bits(x: Tensor) -> bool:
    """Whether products of ``x`` are in a type that the kernels of crucible_train.kernels take."""
    kind = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    return kind in (torch.bfloat16, torch.float16)


class Linear(nn.Module):
    """x · weightᵀ + bias; weight [out, in], float32. Values are left to the Transformer's initialisation."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, matmul: Matmul) -> None:
        super().__init__()
        if matmul != "bf16" and (inputs % fp8.MULTIPLE or outputs % fp8.MULTIPLE):
            raise TrainingError(
                f"fp8 needs multiples of {fp8.MULTIPLE}, got a matrix of {outputs} × {inputs}; use matmul bf16"
            )
        self.scales = fp8.SCALES.get(matmul)  # None: not in FP8
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.scales is None:
            return F.linear(x, self.weight, self.bias)
        y = fp8.linear(x, self.weight, self.scales)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class Projections(nn.Module):
    """Several Linear maps of one input: one stacked matrix (``fused``: fewer, larger products) or one each."""

    def __init__(self, inputs: int, outputs: Sequence[int], *, bias: bool, matmul: Matmul, fused: bool) -> None:
        super().__init__()
        self.outputs = tuple(outputs)
        self.fused = fused and len(outputs) > 1
        sizes = [sum(outputs)] if self.fused else list(outputs)
        self.parts = nn.ModuleList(Linear(inputs, size, bias=bias, matmul=matmul) for size in sizes)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [..., in] → one tensor [..., outputs[i]] for each; views of one result when fused."""
        if self.fused:
            return self.parts[0](x).split(self.outputs, dim=-1)
        return tuple(part(x) for part in self.parts)

    def slices(self) -> list[tuple[Linear, slice]]:
        """Where each map lives: its Linear and its rows there."""
        if not self.fused:
            return [(part, slice(None)) for part in self.parts]
        starts = [sum(self.outputs[:place]) for place in range(len(self.outputs))]
        return [(self.parts[0], slice(start, start + size)) for start, size in zip(starts, self.outputs, strict=True)]
