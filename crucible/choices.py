"""The words that a setting may take. Imports nothing: argument parsers read them on every ``--help``."""

from __future__ import annotations

DEVICES = ("auto", "cpu", "cuda")
QUANTS = ("f32", "int8")
"""Weight types."""
