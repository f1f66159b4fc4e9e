"""The words that a setting may take. Imports nothing: argument parsers read them on every ``--help``."""

from __future__ import annotations

DEVICES = ("auto", "cpu", "cuda")
QUANTS = ("f32", "f16", "int8")
"""Weight types; f16 on a GPU only."""
GEMMS = ("auto", "scalar", "small", "big")
"""Kernels of projections on a GPU."""
DECODE_GEMMS = ("same", *GEMMS)
"""Those of decode steps."""
ATTENTIONS = ("split", "single")
"""Decode attention on a GPU."""
PREFILL_ATTENTIONS = ("exact", "reference")
SAMPLINGS = ("greedy", "sampled", "wide", "mixed")
"""How the requests of a benchmark choose their tokens."""
PREFILLS = ("auto", "serial")
"""How a prompt is computed."""
