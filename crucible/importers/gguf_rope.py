"""Rotary embedding settings of a GGUF Llama: ``llama.rope.*`` and the tensor ``rope_freqs.weight``."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from crucible.config.model import LinearScaling, Llama3Scaling, Rope, YarnScaling
from crucible.errors import CheckpointError
from crucible.importers.hf_fields import Fields
from crucible.json_file import shown

ROPE_FACTORS = "rope_freqs.weight"
"""[head_dim / 2] divisors of the frequencies; llama.cpp's converter writes Llama 3.1's scaling as this tensor."""


def parse_rope(fields: Fields, head_dim: int, factors: NDArray[np.float32] | None) -> Rope:
    """The Rope of a GGUF whose q and k are put back into half-split order.

    fields: the metadata after ``llama.``; factors: ROPE_FACTORS when the file has it. Raises CheckpointError.
    """
    values = fields.values
    theta = fields.number("rope.freq_base", 10000.0)
    kind = values.get("rope.scaling.type", "linear" if "rope.scale_linear" in values else "none")
    if factors is not None:
        if kind != "none":
            fault = f"beside rope.scaling.type {shown(kind)} is not supported"
            raise CheckpointError(f"{fields.path}: {ROPE_FACTORS} {fault}")
        return Rope(theta=theta, pairing="half", scaling=_llama3(fields, theta, head_dim, factors))
    if kind == "none":
        return Rope(theta=theta, pairing="half", scaling=None)
    if kind == "linear":
        factor = fields.number("rope.scaling.factor", values.get("rope.scale_linear"))
        return Rope(theta=theta, pairing="half", scaling=LinearScaling(factor=factor))
    if kind == "yarn":
        return Rope(theta=theta, pairing="half", scaling=_yarn(fields))
    raise CheckpointError(f"{fields.path}: {fields.prefix}rope.scaling.type {shown(kind)} is not supported")


def _yarn(fields: Fields) -> YarnScaling:
    """ggml multiplies cos and sin by attn_factor (default 1) and by 0.1 ln(factor) + 1."""
    if fields.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise CheckpointError(f"{fields.path}: {fields.prefix}rope.scaling.yarn_ext_factor must be 1")
    factor = fields.number("rope.scaling.factor")
    return YarnScaling(
        factor=factor,
        original_context_length=fields.integer("rope.scaling.original_context_length"),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0) * (0.1 * math.log(max(factor, 1.0)) + 1.0),
    )


def _llama3(
    fields: Fields, theta: float, head_dim: int, factors: NDArray[np.float32]
) -> Llama3Scaling | None:
    """The parameters behind the divisors, when Llama 3.1's formula with its published bands gives exactly these.

    The tensor does not name them: factor is its largest divisor; bands 1 and 4 and the original context of 8192 are
    what every published Llama 3.x uses. Anything else is refused rather than approximated.
    """
    if factors.shape != (head_dim // 2,):
        raise CheckpointError(f"{fields.path}: {ROPE_FACTORS} has {factors.size} elements, expected {head_dim // 2}")
    if (factors == 1).all():
        return None
    largest = float(factors.max())
    original = fields.integer("rope.scaling.original_context_length", 8192)
    scaling = Llama3Scaling(factor=largest, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=original)
    if not np.allclose(factors, llama3_divisors(theta, head_dim, scaling), rtol=1e-5, atol=0):
        raise CheckpointError(f"{fields.path}: {ROPE_FACTORS} is not Llama 3's scaling from {original} tokens")
    return scaling


def llama3_divisors(theta: float, head_dim: int, scaling: Llama3Scaling) -> NDArray[np.float64]:
    """[head_dim / 2] what Llama 3.1's rule divides each frequency by; not finite for an impossible theta or factor."""
    with np.errstate(all="ignore"):
        frequency = np.float64(theta) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        turns = scaling.original_context_length * frequency / (2 * math.pi)
        band = scaling.high_freq_factor - scaling.low_freq_factor
        keep = np.clip((turns - scaling.low_freq_factor) / band, 0.0, 1.0)
        return np.asarray(1.0 / ((1.0 - keep) / scaling.factor + keep))
