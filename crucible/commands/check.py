"""``logits --check``: every position of the same tokens through Hugging Face transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from crucible.checkpoint import Checkpoint, open_checkpoint
from crucible.commands.options import progress
from crucible.config.model import LinearScaling, Llama3Scaling, ModelConfig, Rope, YarnScaling
from crucible.errors import ConfigError, CrucibleError
from crucible.json_file import read_json
from crucible.model.ops import FloatArray

TOLERANCE = 1e-4
"""Largest |Δ| allowed, as a share of the position's largest |logit|: float32 rounding in another order."""


SLACK = 10
"""Two logits closer than this many times the position's error are a tie that either side may break."""

TOP = 10


def require(config: ModelConfig) -> None:
    """Raises ConfigError where transformers is absent or its Llama has no such architecture."""
    llama_fields(config)
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError:
        raise ConfigError("--check needs transformers and torch: pip install transformers torch") from None


def compare(path: Path, prompt: list[int], tokens: list[int], rows: FloatArray) -> int:
    """Reports on standard error how every position and the greedy choices compare. Returns 0, or 1 if they differ.

    rows: float32 [positions, vocab], the logits of prompt + tokens[:-1]. At each position max |Δ| is at most TOLERANCE
    of the largest |logit|, the TOP first ids are the same in the same order, and a greedy choice is the first of them;
    ids may change places where the reference's logits are closer than SLACK times that position's error.
    """
    reference = transformers_logits(path, [*prompt, *tokens[:-1]])
    if reference.shape != rows.shape:
        raise ConfigError(f"--check: transformers has logits {reference.shape} where there are {rows.shape} here")
    errors = np.abs(rows - reference).max(axis=1)
    shares = errors / np.abs(reference).max(axis=1)
    exceeding = np.flatnonzero(~(shares <= TOLERANCE))  # a NaN exceeds, too
    disordered = [place for place, error in enumerate(errors) if not same_order(rows[place], reference[place], error)]
    chosen = range(len(prompt) - 1, len(prompt) - 1 + len(tokens))
    differing = [
        place
        for place, token in zip(chosen, tokens, strict=True)
        if reference[place].max() - reference[place, token] > SLACK * errors[place]
    ]
    faults = sorted({*exceeding.tolist(), *disordered, *differing})
    worst = int(np.nanargmax(np.where(np.isnan(shares), np.inf, shares)))
    progress(
        f"{f'DIFFERENT from position {faults[0]} on' if faults else 'equal'}: {len(rows)} positions, "
        f"max |Δ| / max |logit| {shares[worst]:.1e} at position {worst} (limit {TOLERANCE:.0e}), top {TOP} "
        f"{f'in another order at {len(disordered)}' if disordered else 'in the same order'}, "
        f"{len(tokens) - len(differing)} of {len(tokens)} greedy tokens agree"
    )
    return 1 if faults else 0


def same_order(row: FloatArray, reference: FloatArray, error: float) -> bool:
    """Whether both rows have the same TOP first ids in the same order, ties aside."""
    ours, theirs = (np.argsort(-values, kind="stable")[:TOP] for values in (row, reference))
    return bool((np.abs(reference[ours] - reference[theirs]) <= SLACK * error).all())


def transformers_logits(path: Path, ids: list[int]) -> FloatArray:
    """Logits float32 [len(ids), vocab] by transformers. Raises ConfigError where it is absent or fails."""
    import torch
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        if "crucible_format" in read_json(path / "config.json"):
            with open_checkpoint(path) as checkpoint:
                model = to_transformers(checkpoint)
        else:
            model = LlamaForCausalLM.from_pretrained(str(path), dtype=torch.float32, local_files_only=True)
        with torch.inference_mode():
            result: FloatArray = model.eval()(torch.tensor([ids])).logits[0].float().numpy()
    except CrucibleError:
        raise
    except Exception as error:  # whatever another library makes of this model, it is no traceback of ours
        reason = " ".join(str(error).split())
        raise ConfigError(f"--check: transformers fails on this model: {type(error).__name__}: {reason}") from None
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
