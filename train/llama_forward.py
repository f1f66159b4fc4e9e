"""Logits of a Hugging Face Llama directory, in a few lines of torch that share nothing with the trained model.

It reads the written files by their published meaning (config.json's names, [out, in] matrices, half-split RoPE), so a
wrong name, order or constant in an export shows up as other logits. Slow; for verification only.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from crucible.safetensors_file import SafetensorsFile


@torch.no_grad()
def llama_logits(directory: Path, tokens: Tensor) -> Tensor:
    """Float32 logits [batch, time, vocabulary] of int64 ``tokens`` [batch, time]."""
    settings = json.loads((directory / "config.json").read_bytes())
    file = SafetensorsFile(directory / "model.safetensors")

    def weight(name: str) -> Tensor:
        return torch.from_numpy(file.read(name).copy())

    def linear(x: Tensor, name: str) -> Tensor:
        bias = weight(f"{name}.bias") if f"{name}.bias" in file.entries else None
        return F.linear(x, weight(f"{name}.weight"), bias)

    def rms_norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + settings["rms_norm_eps"]) * weight(f"{name}.weight")

    heads, size = settings["num_attention_heads"], settings["head_dim"]
    repeat = heads // settings["num_key_value_heads"]
    batch, length = tokens.shape
    frequency = settings["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos().float(), angle.sin().float()

    def split(x: Tensor) -> Tensor:
        return x.view(batch, length, -1, size).transpose(1, 2)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    x = F.embedding(tokens, weight("model.embed_tokens.weight"))
    for layer in range(settings["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        y = rms_norm(x, prefix + "input_layernorm")
        q, k, v = (split(linear(y, f"{prefix}self_attn.{name}_proj")) for name in "qkv")
        k, v = (part.repeat_interleave(repeat, 1) for part in (rotate(k), v))
        scores = (rotate(q) @ k.transpose(-1, -2) / size**0.5).masked_fill(future, float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1)
        x = x + linear(mixed, prefix + "self_attn.o_proj")
        y = rms_norm(x, prefix + "post_attention_layernorm")
        gate, up = (linear(y, f"{prefix}mlp.{name}_proj") for name in ("gate", "up"))
        x = x + linear(F.silu(gate) * up, prefix + "mlp.down_proj")
    head = "model.embed_tokens.weight" if settings["tie_word_embeddings"] else "lm_head.weight"
    return F.linear(rms_norm(x, "model.norm"), weight(head))
