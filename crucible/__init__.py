"""Crucible: train, understand and serve small Llama-style language models.

``LLM`` and ``SamplingParams`` are imported when they are first used, so that ``import crucible`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from crucible.config.sampling import SamplingParams
    from crucible.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from crucible.llm import LLM

        return LLM
    if name == "SamplingParams":
        from crucible.config.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
