"""Sampler: the tokens of a batch's logit rows. The rules of choice are those of crucible.native.sampling."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from crucible.config.sampling import SamplingParams
from crucible.engine.batch import Batch
from crucible.errors import RequestError
from crucible.native import sampling


class Sampler:
    """Chooses among ids 0 … ``token_count`` − 1; the rows above them are padding."""

    def __init__(self, token_count: int) -> None:
        self.token_count = token_count

    def pick(self, logits: NDArray[np.float32], batch: Batch) -> NDArray[np.int32]:
        """One token id for each logit row, int32 [n]. logits: float32 [n, vocab], in the order of batch.logit_rows.

        NO_TOKEN (crucible.native.batch) for a row with a NaN or +inf.
        """
        token_ids = np.empty(len(logits), np.int32)
        sampling.select_rows(
            np.ascontiguousarray(logits),
            batch.temperatures,
            batch.top_ks,
            batch.seeds,
            batch.choices,
            batch.draw_positions,
            self.token_count,
            token_ids,
        )
        return token_ids

    def pick_row(self, logits: NDArray[np.float32], batch: Batch, row: int) -> int:
        """The token id of logit row ``row`` alone. logits: float32 [vocab]."""
        return sampling.select(
            np.ascontiguousarray(logits),
            float(batch.temperatures[row]),
            int(batch.top_ks[row]),
            int(batch.seeds[row]),
            int(batch.choices[row]),
            int(batch.draw_positions[row]),
            self.token_count,
        )


class Sampled(msgspec.Struct, frozen=True):
    """``candidates``: (id, probability) in canonical order; ``tokens``: the ids drawn."""

    candidates: list[tuple[int, float]]
    tokens: list[int]


def sample_once(
    logits: Sequence[float] | NDArray[np.float32],
    params: SamplingParams,
    *,
    count: int = 1,
    token_count: int | None = None,
    choice: int = 0,
    position: int = 0,
) -> Sampled:
    """What the engine's sampler makes of one row of logits, rounded to float32.

    ``count`` tokens are drawn as if at the positions from ``position`` on. ``token_count``: ids that may be chosen
    (all by default). Raises RequestError for an empty row or one that is not a vector of numbers.
    """
    try:
        row = np.asarray(logits, np.float32)
    except (TypeError, ValueError):
        raise RequestError("logits must be a list of numbers", "logits") from None
    if row.ndim != 1 or len(row) == 0:
        raise RequestError(f"logits must be a non-empty list of numbers, got shape {list(row.shape)}", "logits")
    allowed = len(row) if token_count is None else token_count
    temperature = params.temperature or 0.0
    ids, probabilities = sampling.candidates(row, temperature, params.effective_top_k, allowed)
    seed = params.effective_seed
    tokens = [
        sampling.select(row, temperature, params.effective_top_k, seed, choice, place, allowed)
        for place in range(position, position + count)
    ]
    return Sampled(list(zip(ids.tolist(), probabilities.tolist(), strict=True)), tokens)
