"""Scalar float64 operations, one an op: the oracle every kernel is compared with.

Written to be obviously right rather than fast: plain loops, one accumulator, no blocking, no fused steps. Imports
nothing else of Crucible, so that no mistake is shared with what it checks. Arrays are float64 unless said.
"""

from crucible.reference.activation import gelu, silu, swiglu
from crucible.reference.attention import attention
from crucible.reference.linear import embed, linear, next_nine_bits, nine_bits, quantize_groups
from crucible.reference.norm import layernorm, rmsnorm
from crucible.reference.rope import rope

__all__ = [
    "attention",
    "embed",
    "gelu",
    "layernorm",
    "linear",
    "next_nine_bits",
    "nine_bits",
    "quantize_groups",
    "rmsnorm",
    "rope",
    "silu",
    "swiglu",
]
