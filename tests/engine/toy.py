"""A model without arithmetic: it writes token ids into the paged cache and hashes all that it reads back.

Any wrong page, slot, position, length or row changes its logits, and so does any token of the history.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from crucible.config import ModelConfig
from crucible.config.engine import PAGE_TOKENS
from crucible.config.model import Biases, NoPosition, Norm
from crucible.engine.batch import Batch
from crucible.engine.model_runner import ModelRunner

VOCAB, TOKENS, EOS = 37, 31, 5  # ids 31–36 are padding


def toy_config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "crucible_format": 1,
        "vocab_size": VOCAB,
        "token_count": TOKENS,
        "context_length": 1024,
        "hidden_size": 4,
        "intermediate_size": 4,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 4,
        "norm": Norm(type="rmsnorm", placement="pre", eps=1e-5, bias=False),
        "position": NoPosition(),
        "activation": "swiglu",
        "biases": Biases(qkv=False, attention_output=False, mlp=False),
        "tied_embeddings": True,
        "bos_token_id": None,
        "eos_token_ids": [EOS],
    }
    return ModelConfig(**{**values, **changes})


def toy_cache(pages: int) -> np.ndarray[Any, Any]:
    """uint64 [pages, 16] of noise: what was never written must never be read."""
    return np.random.default_rng(7).integers(0, 2**63, (pages, PAGE_TOKENS)).astype(np.uint64)


def mix(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The finaliser of SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def toy_forward(weights: Any, ops: Any, batch: Batch, cache: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Logits float32 [n, VOCAB]. Checks on its way that the batch's arrays agree with each other."""
    starts = batch.sequence_starts
    assert starts[0] == 0
    assert starts[-1] == len(batch.token_ids) == len(batch.positions) == len(batch.row_sequence)
    rows = np.arange(len(batch.token_ids))
    assert np.array_equal(batch.row_sequence, np.searchsorted(starts, rows, side="right") - 1)
    for sequence, (first, end) in enumerate(itertools.pairwise(starts)):
        length = batch.context_lengths[sequence]
        assert np.array_equal(batch.positions[first:end], np.arange(length - (end - first), length))
        assert not batch.page_tables[sequence, -(-length // PAGE_TOKENS) :].any()
    pages = batch.page_tables[batch.row_sequence, batch.positions // PAGE_TOKENS]
    with np.errstate(over="ignore"):
        written = mix(batch.token_ids.astype(np.uint64) + (batch.positions.astype(np.uint64) << np.uint64(32)))
        cache[pages, batch.positions % PAGE_TOKENS] = written
        logits = np.empty((len(batch.logit_rows), VOCAB), np.float32)
        for i, row in enumerate(batch.logit_rows):
            length = batch.positions[row] + 1
            table = batch.page_tables[batch.row_sequence[row]]
            history = cache[table[: -(-length // PAGE_TOKENS)]].reshape(-1)[:length]
            state = mix(history * (np.arange(length, dtype=np.uint64) + np.uint64(3))).sum(dtype=np.uint64)
            logits[i] = (mix(state + np.arange(VOCAB, dtype=np.uint64)) >> np.uint64(40)).astype(np.float32) / 2**21
    return logits


def toy_runner(pages: int, *, max_rows: int = 512, max_sequences: int = 16, context: int = 1024) -> ModelRunner:
    return ModelRunner(
        None,
        None,
        toy_cache(pages),
        max_rows=max_rows,
        max_sequences=max_sequences,
        context=context,
        token_count=TOKENS,
        forward=toy_forward,
    )
