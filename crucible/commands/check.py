"""``logits --check``: the same tokens through Hugging Face transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from crucible.checkpoint import Checkpoint, open_checkpoint
from crucible.commands.options import progress
from crucible.config.model import LinearScaling, Llama3Scaling, ModelConfig, Rope, YarnScaling
from crucible.errors import ConfigError
from crucible.json_file import read_json
from crucible.model.ops import FloatArray

TOLERANCE = 1e-4
"""Largest |Δ| allowed, as a share of the position's largest |logit|: float32 rounding in another order."""


def compare(path: Path, prompt: list[int], tokens: list[int], logits: FloatArray) -> int:
    """Reports on standard error how the last position and the greedy choices compare. Returns 0, or 1 if they differ.

    A greedy choice may differ where the reference's two best logits are closer than ten times the measured error.
    """
    reference = transformers_logits(path, [*prompt, *tokens[:-1]])
    last = reference[-1]
    error = float(np.abs(logits - last).max())
    limit = TOLERANCE * float(np.abs(last).max())
    same_order = bool((np.argsort(-logits, kind="stable")[:10] == np.argsort(-last, kind="stable")[:10]).all())
    differing = []
    for index, token in enumerate(tokens):
        row = reference[len(prompt) - 1 + index]
        if row.max() - row[token] > 10 * error:
            differing.append(len(prompt) + index)
    passed = error <= limit and same_order and not differing
    progress(
        f"{'equal' if passed else 'DIFFERENT'}: max |Δ| {error:.2e} (limit {limit:.2e}), top 10 "
        f"{'in the same order' if same_order else 'in another order'}, "
        f"{len(tokens) - len(differing)} of {len(tokens)} greedy tokens agree"
    )
    return 0 if passed else 1


def transformers_logits(path: Path, ids: list[int]) -> FloatArray:
    """Logits float32 [len(ids), vocab] by transformers. Raises ConfigError where it is absent or has no such model."""
    try:
        import torch
        from transformers import LlamaForCausalLM
        from transformers.utils import logging
    except ImportError:
        raise ConfigError("--check needs transformers and torch: pip install transformers torch") from None
    logging.disable_progress_bar()
    if "crucible_format" in read_json(path / "config.json"):
        with open_checkpoint(path) as checkpoint:
            model = to_transformers(checkpoint)
    else:
        model = LlamaForCausalLM.from_pretrained(str(path), dtype=torch.float32, local_files_only=True)
    with torch.inference_mode():
        result: FloatArray = model.eval()(torch.tensor([ids])).logits[0].float().numpy()
    return result


def to_transformers(checkpoint: Checkpoint) -> Any:
    """The model of a native checkpoint as a LlamaForCausalLM with float32 weights. Raises ConfigError."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = checkpoint.config
    model = LlamaForCausalLM(LlamaConfig(**llama_fields(config)))
    state = {name: torch.from_numpy(np.array(checkpoint.read(name))) for name in checkpoint.names()}
    if config.tied_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model


def llama_fields(config: ModelConfig) -> dict[str, Any]:
    """LlamaConfig's arguments. Raises ConfigError where Llama has no such architecture."""
    rope = config.position
    norm, biases = config.norm, config.biases
    if (
        not isinstance(rope, Rope)
        or rope.pairing != "half"
        or (norm.type, norm.placement, norm.bias) != ("rmsnorm", "pre", False)
        or config.activation != "swiglu"
        or biases.qkv != biases.attention_output
    ):
        raise ConfigError("--check: transformers' Llama has no such architecture (RoPE in halves, pre-RMSNorm, SwiGLU)")
    return {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": norm.eps,
        "rope_theta": rope.theta,
        "rope_scaling": scaling_fields(rope),
        "attention_bias": biases.qkv,
        "mlp_bias": biases.mlp,
        "tie_word_embeddings": config.tied_embeddings,
    }


def scaling_fields(rope: Rope) -> dict[str, Any] | None:
    """``rope_scaling`` in transformers' words."""
    scaling = rope.scaling
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, Llama3Scaling):
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context_length,
        }
    if isinstance(scaling, YarnScaling):
        return {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "attention_factor": scaling.attention_factor,
            "original_max_position_embeddings": scaling.original_context_length,
        }
    return None
