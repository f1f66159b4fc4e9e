"""The decoder: tokens to hidden states, everything of a model but its head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from crucible.config.model import Alibi, Learned, ModelConfig, Rope
from crucible_train.attention import Attention
from crucible_train.compute import Compute
from crucible_train.errors import TrainingError
from crucible_train.feed_forward import FeedForward
from crucible_train.norm import make_norm
from crucible_train.positions import alibi_bias, alibi_slopes, rope_tables


class Block(nn.Module):
    """``pre``: x + f(norm(x)); ``post``: norm(x + f(x)); for attention, then for the feed-forward half."""

    def __init__(self, config: ModelConfig, compute: Compute) -> None:
        super().__init__()
        self.pre = config.norm.placement == "pre"
        self.attention_norm = make_norm(config.norm, config.hidden_size)
        self.attention = Attention(config, compute)
        self.mlp_norm = make_norm(config.norm, config.hidden_size)
        self.mlp = FeedForward(config, compute)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, bias: Tensor | None) -> Tensor:
        if self.pre:
            x = x + self.attention(self.attention_norm(x), rope, bias)
            result: Tensor = x + self.mlp(self.mlp_norm(x))
            return result
        x = self.attention_norm(x + self.attention(x, rope, bias))
        result = self.mlp_norm(x + self.mlp(x))
        return result


class Decoder(nn.Module):
    """Embedding, blocks and the final norm. Parameters are float32; computation follows autocast."""

    def __init__(self, config: ModelConfig, compute: Compute) -> None:
        super().__init__()
        self.config, self.residual = config, compute.residual
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = isinstance(config.position, Learned)
        self.embed_positions = nn.Embedding(config.context_length, config.hidden_size) if learned else None
        self.layers = nn.ModuleList(Block(config, compute) for _ in range(config.num_layers))
        self.norm = make_norm(config.norm, config.hidden_size)
        # Tables that follow from the configuration are no part of the state.
        self.rotary, self.alibi = isinstance(config.position, Rope), isinstance(config.position, Alibi)
        if isinstance(config.position, Rope):
            cos, sin = rope_tables(config.position, config.head_dim, config.context_length)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)
        if self.alibi:
            self.register_buffer("slopes", alibi_slopes(config.num_heads), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] → [B, T, d], in the residual's type. Raises TrainingError past the context."""
        length = tokens.shape[1]
        if length > self.config.context_length:
            raise TrainingError(f"{length} tokens are more than the context of {self.config.context_length}")
        x = self.embed_tokens(tokens)
        if self.embed_positions is not None:
            x = x + self.embed_positions.weight[:length]
        device = x.device.type
        if self.residual == "compute" and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        rope = (self.cos[:length], self.sin[:length]) if self.rotary else None
        bias = alibi_bias(self.slopes, length) if self.alibi else None
        for layer in self.layers:
            x = layer(x, rope, bias)
        result: Tensor = self.norm(x)
        return result
