"""Numbers that packed weights depend on, readable without importing Numba."""

QUANT_GROUP = 32
"""Inputs of an output that share one scale in int8 weights (docs/decisions/0005)."""

SCALE_TRIALS = 128
"""16-bit scales tried for a group, from the smallest that fits to one 25 … 50 % larger."""
