"""Which models are plain Llama: what transformers' LlamaForCausalLM and llama.cpp's ``llama`` compute."""

from __future__ import annotations

from crucible.config.model import ModelConfig, Rope
from crucible_train.errors import TrainingError


def require_plain_llama(config: ModelConfig, form: str) -> Rope:
    """The model's RoPE. Raises TrainingError, naming the axis, for a model that ``form`` cannot describe."""
    rope, norm, biases = config.position, config.norm, config.biases
    faults = [
        (not isinstance(rope, Rope), "position", "rope", type(rope).__name__.lower()),
        (config.activation != "swiglu", "activation", "swiglu", config.activation),
        (norm.type != "rmsnorm", "norm", "rmsnorm", norm.type),
        (norm.placement != "pre", "norm placement", "pre", norm.placement),
        (biases.qkv != biases.attention_output, "biases", "on all attention projections or none", "on some"),
    ]
    if isinstance(rope, Rope):
        faults.append((rope.pairing != "half", "RoPE pairing", "half", rope.pairing))
        faults.append((rope.scaling is not None, "RoPE scaling", "none", type(rope.scaling).__name__))
    for wrong, axis, wanted, have in faults:
        if wrong:
            advice = "use export, whose native format describes every model"
            raise TrainingError(f"{form} needs a plain Llama: {axis} must be {wanted}, not {have}; {advice}")
    if not isinstance(rope, Rope):  # refused above; for the type checker
        raise TypeError
    return rope
