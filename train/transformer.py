"""Transformer: the model that is trained, built from a ModelConfig alone. It computes what the engine computes."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from crucible.config.model import ModelConfig
from crucible_train.compute import Compute
from crucible_train.decoder import Decoder
from crucible_train.errors import TrainingError
from crucible_train.fp8 import MULTIPLE
from crucible_train.loss import IGNORED, cross_entropy_reference, linear_cross_entropy
from crucible_train.tensors import initialise


class Transformer(nn.Module):
    """A decoder and its head. Parameters are float32; computation follows autocast.

    Raises TrainingError for what training does not know (RoPE scaling, FP8 with sizes that are no multiples of 16).
    crucible_train.tensors translates between its parameters and a checkpoint's tensors.
    """

    def __init__(self, config: ModelConfig, compute: Compute | None = None, **switches: Any) -> None:
        """``switches`` replace single fields of ``compute``, such as ``gqa="materialised"``."""
        super().__init__()
        self.config = config
        self.compute = (compute or Compute()).replace(**switches)
        rows, width = config.vocab_size, config.hidden_size
        if self.compute.head_matmul != "bf16" and (rows % MULTIPLE or width % MULTIPLE):
            raise TrainingError(
                f"an fp8 head needs multiples of {MULTIPLE}, got {rows} × {width}; use matmul bf16"
            )
        self.model = Decoder(config, self.compute)
        self.lm_head = None if config.tied_embeddings else nn.Linear(width, rows, bias=False)
        initialise(self)

    @property
    def head(self) -> nn.Parameter:
        """The head [vocab, d]: the embedding itself when they are tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None, reduction: str = "mean") -> Tensor:
        """tokens [B, T] of ids → the last hidden states [B, T, d] after the final norm; with ``targets``, loss().

        The second form is for wrappers such as DistributedDataParallel, which see only calls of the module itself.
        """
        if targets is not None:
            return self.loss(tokens, targets, reduction)
        result: Tensor = self.model(tokens)
        return result

    def logits(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] → [B, T, vocab]."""
        return F.linear(self.model(tokens), self.head)

    def loss(self, tokens: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Cross-entropy in nats, float32 []: the mean over targets that are not −1, or their ``sum``.

        tokens, targets [B, T]. Without any target the mean is 0.
        """
        if reduction not in ("mean", "sum"):
            raise TrainingError(f"reduction must be mean or sum, got {reduction!r}")
        hidden, wanted = self.model(tokens).flatten(0, 1), targets.flatten()
        if self.compute.loss == "fused":
            chunk, precision = self.compute.chunk, self.compute.head_matmul
            total, count = linear_cross_entropy(hidden, self.head, wanted, chunk=chunk, precision=precision)
        else:
            total, count = cross_entropy_reference(hidden, self.head, wanted), (wanted != IGNORED).sum()
        return total if reduction == "sum" else total / count.clamp(min=1)
