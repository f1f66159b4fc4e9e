"""Compute: how a Transformer calculates what its ModelConfig says. No choice changes the function it stands for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from crucible_train.errors import TrainingError

Gqa = Literal["fused", "materialised"]
Matmul = Literal["bf16", "fp8", "fp8-after", "fp8-tensor"]
HeadMatmul = Literal["bf16", "fp8", "fp8-two"]
Precision = Literal["bf16", "fp8-head", "fp8"]
Operation = Literal["fused", "plain"]
Loss = Literal["fused", "plain"]
Residual = Literal["compute", "float32"]
Backend = Literal["cudnn", "flash", "default"]


@dataclass(frozen=True)
class Compute:
    """Switches of speed and memory.

    gqa: query heads share K and V inside attention (``fused``), or K and V are repeated for each (``materialised``).
    matmul: products of the projections, in the autocast type (``bf16``) or, weights' gradients excepted, in FP8 with a
    scale a row of activations (``fp8``), the same applied behind the product (``fp8-after``), or one a tensor
    (``fp8-tensor``). head_matmul: those of the head, all three in FP8 or two of them (``fp8-two``: not the weight's
    gradient). fused_projections: one matrix for q, k, v and one for gate and up. mlp, qkv: SwiGLU, and q, k, v with
    their rotation, each in one operation with its products (``fused``; on CUDA with Triton in 16 bits, plain operations
    elsewhere). loss: linear_cross_entropy (``fused``) or whole logits. chunk: rows of logits alive at once in the fused
    loss, None for the device's default. residual: the stream between blocks in the autocast type (``compute``) or
    float32. attention_backend: which kernel CUDA tries first; ``default`` leaves it to torch.

    Raises TrainingError for another value.
    """

    gqa: Gqa = "fused"
    matmul: Matmul = "bf16"
    head_matmul: HeadMatmul = "bf16"
    mlp: Operation = "fused"
    qkv: Operation = "fused"
    fused_projections: bool = True
    loss: Loss = "fused"
    chunk: int | None = None
    residual: Residual = "compute"
    attention_backend: Backend = "cudnn"

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            choices, value = get_args(hint), getattr(self, name)
            if choices and isinstance(choices[0], str) and value not in choices:
                raise TrainingError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if self.chunk is not None and self.chunk < 1:
            raise TrainingError(f"chunk must be at least 1 row, got {self.chunk}")

    @classmethod
    def for_precision(cls, precision: Precision, **switches: Any) -> Compute:
        """With the products of ``train --matmul``: ``fp8-head`` is FP8 for the head's alone."""
        projections: Matmul = "bf16" if precision == "fp8-head" else precision
        return cls(matmul=projections, head_matmul="fp8" if precision == "fp8-head" else precision, **switches)

    def replace(self, **changes: Any) -> Compute:
        """A copy with ``changes``. Raises TrainingError for a switch that does not exist."""
        for name in changes:
            if name not in {field.name for field in dataclasses.fields(self)}:
                raise TrainingError(f"there is no compute switch {name!r}")
        return dataclasses.replace(self, **changes)
