"""RoPE frequencies and tables, ALiBi slopes: numbers that depend on the configuration alone."""

from __future__ import annotations

import math

import numpy as np

from crucible.config.model import LinearScaling, Llama3Scaling, Rope, YarnScaling
from crucible.model.ops import FloatArray


def rope_frequencies(rope: Rope, head_dim: int) -> tuple[FloatArray, float]:
    """Inverse frequencies float32 [head_dim / 2] in radians a position, and the factor on cos and sin.

    Computed in float32 like PyTorch implementations do, since models were trained with those values. Scalings:
    linear (arXiv:2306.15595), llama3 (Llama 3.1's), yarn (arXiv:2309.00071, section 3).
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = (np.float32(1.0) / np.power(np.float32(rope.theta), exponents, dtype=np.float32)).astype(np.float32)
    match rope.scaling:
        case None:
            return base, 1.0
        case LinearScaling(factor=factor):
            return (base / np.float32(factor)).astype(np.float32), 1.0
        case Llama3Scaling() as s:
            wavelength = 2 * math.pi / base
            original = s.original_context_length
            low, high = original / s.low_freq_factor, original / s.high_freq_factor
            smooth = (original / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
            between = (1 - smooth) * base / s.factor + smooth * base
            scaled = np.where(wavelength > low, base / s.factor, np.where(wavelength < high, base, between))
            return scaled.astype(np.float32), 1.0
        case YarnScaling() as s:

            def correction(rotations: float) -> float:
                periods = s.original_context_length / (rotations * 2 * math.pi)
                return head_dim * math.log(periods) / (2 * math.log(rope.theta))

            low = max(math.floor(correction(s.beta_fast)), 0)
            high = min(math.ceil(correction(s.beta_slow)), head_dim - 1)
            span = max(high - low, 0.001)
            interpolated = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / span, 0, 1)
            scaled = base / s.factor * interpolated + base * (1 - interpolated)
            return scaled.astype(np.float32), s.attention_factor


def rope_tables(rope: Rope, head_dim: int, context: int) -> tuple[FloatArray, FloatArray]:
    """cos and sin float32 [context, head_dim / 2] of position · frequency."""
    frequencies, factor = rope_frequencies(rope, head_dim)
    angles = np.arange(context, dtype=np.float32)[:, None] * frequencies[None, :]
    exact = angles.astype(np.float64)
    return (np.cos(exact) * factor).astype(np.float32), (np.sin(exact) * factor).astype(np.float32)


def alibi_slopes(num_heads: int) -> FloatArray:
    """Slopes float32 [heads] (arXiv:2108.12409): 2**(−8i/n) for a power of two, interleaved otherwise."""

    def powers(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    whole = 2 ** int(math.log2(num_heads))
    slopes = powers(whole) + powers(2 * whole)[0::2][: num_heads - whole]
    return np.array(slopes, dtype=np.float32)
