"""Rotary embedding settings of a Hugging Face config: ``rope_theta`` with ``rope_scaling``, or ``rope_parameters``.

The defaults are those of transformers' modeling_rope_utils; kinds whose frequencies depend on the sequence at hand
(dynamic, longrope) are refused.
"""

from __future__ import annotations

import math
from typing import Any

from crucible.config.model import LinearScaling, Llama3Scaling, Rope, YarnScaling
from crucible.errors import CheckpointError
from crucible.importers.hf_fields import Fields
from crucible.json_file import shown

_KNOWN = {
    "default": None,
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
             "mscale_all_dim", "truncate"},
}  # fmt: skip
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def parse_rope(fields: Fields, context: int) -> Rope:
    """The Rope of a Llama ``config.json``. Raises CheckpointError naming rope_scaling or rope_parameters."""
    scaling, parameters = fields.values.get("rope_scaling"), fields.values.get("rope_parameters")
    if scaling and parameters and scaling != parameters:
        raise CheckpointError(f"{fields.path}: rope_scaling and rope_parameters disagree; keep one")
    name = "rope_scaling" if scaling else "rope_parameters"
    chosen: Any = scaling or parameters or {}
    if not isinstance(chosen, dict):
        raise fields.error(name, "an object or null", chosen)
    rope = Fields(chosen, fields.path, f"{name}.")
    theta = rope.number("rope_theta") if "rope_theta" in chosen else fields.number("rope_theta", 10000.0)
    return Rope(theta=theta, pairing="half", scaling=_scaling(rope, name, fields, context))


def _scaling(
    rope: Fields, name: str, fields: Fields, context: int
) -> LinearScaling | Llama3Scaling | YarnScaling | None:
    values = rope.values
    kind = values.get("rope_type", values.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KNOWN:
        known = ", ".join(sorted(_KNOWN))
        raise CheckpointError(f"{rope.path}: {name}: rope_type {shown(kind)} is not supported; known are {known}")
    if "type" in values and values["type"] != kind:
        raise CheckpointError(f"{rope.path}: {name}: type {shown(values['type'])} and rope_type {kind!r} disagree")
    partial = values.get("partial_rotary_factor")
    if partial not in (None, 1):
        raise CheckpointError(f"{rope.path}: {name}: partial_rotary_factor {shown(partial)} is not supported")
    known_keys = _KNOWN[kind]
    if known_keys is None:
        return None
    for key in values:
        if key not in known_keys | _COMMON:
            raise CheckpointError(f"{rope.path}: {name}: unknown field {shown(key)} for rope_type {kind!r}")
    if kind == "linear":
        return LinearScaling(factor=rope.number("factor"))
    original = _original_context(rope, fields, context)
    if kind == "llama3":
        return Llama3Scaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_context_length=original,
        )
    if not rope.boolean("truncate", True):
        raise CheckpointError(f"{rope.path}: {name}.truncate false is not supported")
    factor = context / original if values.get("factor") is None else rope.number("factor")
    return YarnScaling(
        factor=factor,
        original_context_length=original,
        beta_fast=_or_default(rope, "beta_fast", 32.0),
        beta_slow=_or_default(rope, "beta_slow", 1.0),
        attention_factor=_attention_factor(rope, factor),
    )


def _original_context(rope: Fields, fields: Fields, context: int) -> int:
    """A field beside the rope object wins over the one inside, and the context is the default, as in transformers."""
    key = "original_max_position_embeddings"
    source = fields if fields.values.get(key) is not None else rope
    value = source.integer(key, context)
    if value < 1:
        raise source.error(key, "at least 1", value)
    return value


def _attention_factor(rope: Fields, factor: float) -> float:
    """YaRN's multiplier of cos and sin: given, or 0.1 ln(factor) + 1 with the two mscale corrections of DeepSeek."""
    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    weight, weight_all = (_or_default(rope, name, 0.0) for name in ("mscale", "mscale_all_dim"))
    if not weight or not weight_all:
        return mscale(1.0)
    if mscale(weight_all) == 0:
        raise rope.error("mscale_all_dim", "a number that leaves something of the attention", weight_all)
    return mscale(weight) / mscale(weight_all)


def _or_default(rope: Fields, name: str, default: float) -> float:
    """transformers reads these with ``or``: null and 0 mean the default."""
    return (rope.number(name) if rope.values.get(name) is not None else 0.0) or default
