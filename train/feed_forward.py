"""The feed-forward half of a block: SwiGLU (arXiv:2002.05202) or GELU (arXiv:1606.08415)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from crucible.config.model import ModelConfig
from crucible_train import kernels, swiglu
from crucible_train.compute import Compute
from crucible_train.linear import Linear, Projections, in_16_bits


class FeedForward(nn.Module):
    """down(silu(gate(x)) · up(x)), or down(gelu(up(x)))."""

    def __init__(self, config: ModelConfig, compute: Compute) -> None:
        super().__init__()
        self.activation = config.activation
        inner = config.intermediate_size
        self.one_operation = (
            kernels.has_triton()
            and config.activation == "swiglu"
            and compute.mlp == "fused"
            and compute.fused_projections
            and not config.biases.mlp
            and compute.matmul != "fp8-tensor"
        )
        self.inputs = Projections(
            config.hidden_size,
            (inner, inner) if config.activation == "swiglu" else (inner,),
            bias=config.biases.mlp,
            matmul=compute.matmul,
            fused=compute.fused_projections,
        )
        self.down = Linear(inner, config.hidden_size, bias=config.biases.mlp, matmul=compute.matmul)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d] → [..., d]."""
        if self.one_operation and x.is_cuda and in_16_bits(x):
            return swiglu.feed_forward(x, self.inputs.parts[0].weight, self.down.weight, self.down.scales)
        if self.activation == "swiglu":
            gate, up = self.inputs(x)
            inner = F.silu(gate) * up
        else:
            (up,) = self.inputs(x)
            inner = F.gelu(up, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        result: Tensor = self.down(inner)
        return result
