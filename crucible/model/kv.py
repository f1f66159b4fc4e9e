"""Sizes of the paged KV cache."""

from __future__ import annotations

from crucible.config import ModelConfig
from crucible.config.engine import PAGE_TOKENS


def kv_bytes_per_token(config: ModelConfig, element_bytes: int = 4) -> int:
    """Bytes of K and V over all layers for one token."""
    return 2 * config.num_layers * config.kv_dim * element_bytes


def kv_bytes_per_page(config: ModelConfig, element_bytes: int = 4) -> int:
    """Bytes of one page of PAGE_TOKENS tokens."""
    return PAGE_TOKENS * kv_bytes_per_token(config, element_bytes)
