"""Session: one sequence through the forward pass, without the engine, for ``logits``, ``eval`` and ``--no-cache``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from crucible.checkpoint import open_checkpoint
from crucible.commands.options import announce_compilation, check_token_ids
from crucible.config.engine import PAGE_TOKENS
from crucible.errors import EngineError
from crucible.model.cpu_ops import CpuOps
from crucible.model.forward import forward
from crucible.model.ops import FloatArray, IntArray, Ops
from crucible.model.weights import load_weights
from crucible.native.sampling import select

CHUNK_TOKENS = 256
"""Rows a forward pass computes at once; any number gives the same bits, this one bounds the scratch memory."""


@dataclass(frozen=True)
class Rows:
    """A batch of consecutive tokens of one sequence whose pages are numbered from 0."""

    token_ids: IntArray
    positions: IntArray
    row_sequence: IntArray
    page_tables: IntArray
    logit_rows: IntArray


class Session:
    """A model on the CPU and the KV cache of one sequence of at most ``context`` tokens.

    Its methods raise RequestError for a token id that is none of the model's, and EngineError where logits are not
    finite: the weights are damaged, or too large for float32.
    """

    def __init__(self, path: Path, *, quant: str, context: int, threads: int | None = None) -> None:
        self.path = path
        pages = -(-context // PAGE_TOKENS)
        self._page_tables = np.arange(pages, dtype=np.int32).reshape(1, pages)
        with announce_compilation(), open_checkpoint(path) as checkpoint:
            self.config = checkpoint.config
            self._ops = cast(Ops, CpuOps(self.config, context, threads))
            self._weights = load_weights(checkpoint, self._ops, quant)
            self._cache = self._ops.allocate_cache(pages)
            self._compute([0], 0, np.zeros(1, np.int32))  # so that compiling is part of the loading; nobody reads it

    def decode(self, prompt: Sequence[int], count: int, *, cached: bool = True) -> tuple[list[int], FloatArray]:
        """``count`` greedy tokens after ``prompt``, and the logits float32 [vocab] of the last position computed.

        With ``cached`` each token computes one position, else all of them again; both give the same bits.
        """
        tokens = list(prompt)
        logits = self.logits(tokens)
        for _ in range(count):
            if len(tokens) > len(prompt):
                logits = self.logits(tokens, len(tokens) - 1 if cached else 0)
            tokens.append(select(logits, 0.0, 1, 0, 0, len(tokens), self.config.token_count))
        return tokens[len(prompt) :], logits

    def score(self, tokens: Sequence[int]) -> npt.NDArray[np.float64]:
        """Log-probability float64 [n − 1] of each token but the first, given those before it (teacher forcing)."""
        check_token_ids(tokens, self.config.token_count)
        scores = [np.empty(0)]
        for start in range(0, len(tokens) - 1, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, len(tokens) - 1)
            logits = self._forward(tokens[start:end], start, np.arange(end - start, dtype=np.int32)).astype(np.float64)
            logits = logits[:, : self.config.token_count]
            peak = logits.max(axis=1, keepdims=True)
            total = np.log(np.exp(logits - peak).sum(axis=1)) + peak[:, 0]
            scores.append(logits[np.arange(end - start), tokens[start + 1 : end + 1]] - total)
        return np.concatenate(scores)

    def rows(self, tokens: Sequence[int]) -> FloatArray:
        """Logits of every position, float32 [len(tokens), vocab]."""
        starts = range(0, len(tokens), CHUNK_TOKENS)
        chunks = [tokens[start : start + CHUNK_TOKENS] for start in starts]
        parts = [self._forward(ids, start, np.arange(len(ids), dtype=np.int32)).copy()
                 for ids, start in zip(chunks, starts, strict=True)]  # fmt: skip
        return np.concatenate(parts)

    def logits(self, tokens: Sequence[int], start: int = 0) -> FloatArray:
        """Computes positions ``start`` … len(tokens) − 1 and returns the last one's logits, float32 [vocab].

        What an earlier call left of the positions before ``start`` is reused; 0 recomputes everything.
        """
        while len(tokens) - start > CHUNK_TOKENS:
            self._forward(tokens[start : start + CHUNK_TOKENS], start, np.zeros(0, np.int32))
            start += CHUNK_TOKENS
        rows = tokens[start:]
        last: FloatArray = self._forward(rows, start, np.array([len(rows) - 1], np.int32))[0]
        return last.copy()

    def _forward(self, tokens: Sequence[int], start: int, logit_rows: IntArray) -> FloatArray:
        check_token_ids(tokens, self.config.token_count)  # no kernel checks the bounds of the embedding
        logits = self._compute(tokens, start, logit_rows)
        finite = np.isfinite(logits).all(axis=1)
        if not finite.all():
            position = start + int(logit_rows[int(finite.argmin())])
            raise EngineError(
                f"{self.path}: the logits of position {position} hold NaN or infinity; the weights are damaged, or too "
                "large for float32"
            )
        return logits

    def _compute(self, tokens: Sequence[int], start: int, logit_rows: IntArray) -> FloatArray:
        ids = np.asarray(tokens, np.int32)
        positions = np.arange(start, start + len(ids), dtype=np.int32)
        batch = Rows(ids, positions, np.zeros(len(ids), np.int32), self._page_tables, logit_rows)
        return forward(self._weights, self._ops, batch, self._cache)
