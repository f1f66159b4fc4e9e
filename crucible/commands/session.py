"""Session: one sequence through the forward pass, without the engine, for ``logits``, ``eval`` and ``--no-cache``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from crucible.checkpoint import open_checkpoint
from crucible.commands.options import announce_compilation, check_token_ids, progress
from crucible.config.engine import PAGE_TOKENS
from crucible.errors import EngineError
from crucible.model.direct import Consume, Direct, Part
from crucible.model.ops import FloatArray, IntArray
from crucible.native.sampling import select

CHUNK_TOKENS = 256
"""Rows a forward pass computes at once; any number gives the same bits, this one bounds the scratch memory."""
HEAD_ROWS = 64
"""Rows of logits that exist at once."""


class Session:
    """A model on ``device`` (cpu or cuda) and the KV cache of one sequence of at most ``context`` tokens.

    chunk: rows a forward pass computes at once. graph: single rows are computed by replaying a captured graph (cuda).
    threads is the CPU's; overlap and switches are the GPU's (options.gpu_settings). Its methods raise RequestError for
    a token id that is none of the model's, and EngineError where logits are not finite: the weights are damaged, or too
    large.
    """

    def __init__(
        self,
        path: Path,
        *,
        quant: str,
        context: int,
        threads: int | None = None,
        device: str = "cpu",
        overlap: bool = True,
        switches: Mapping[str, Any] | None = None,
        graph: bool = False,
        chunk: int = CHUNK_TOKENS,
    ) -> None:
        self.path = path
        pages = -(-context // PAGE_TOKENS)
        self._chunk = max(1, min(chunk, context))
        self._pages = np.arange(pages, dtype=np.int32)
        with announce_compilation() if device == "cpu" else nullcontext(), open_checkpoint(path) as checkpoint:
            self.config = checkpoint.config
            self._model = Direct.load(
                checkpoint,
                device=device,
                quant=quant,
                context=context,
                max_rows=self._chunk,
                head_rows=min(HEAD_ROWS, self._chunk),
                threads=threads,
                overlap=overlap,
                switches=switches,
                say=progress,
            )
            self._cache = self._model.ops.allocate_cache(pages)
            self._compute([0], 0, np.zeros(1, np.int32), lambda first, rows: None)  # compiling is part of the loading
        self._step = GraphStep(self._model, self._pages, self._cache) if graph else None

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

    def score(self, tokens: Sequence[int], see: Consume | None = None) -> npt.NDArray[np.float64]:
        """Log-probability float64 [n − 1] of each token but the first, given those before it (teacher forcing).

        ``see`` also gets the logits they come from: the position of the first row, and at most HEAD_ROWS rows.
        """
        check_token_ids(tokens, self.config.token_count)
        targets = np.asarray(tokens[1:], np.int64)
        scores = np.empty(len(targets))
        for start in range(0, len(targets), self._chunk):
            ids = tokens[start : min(start + self._chunk, len(targets))]

            def note(first: int, rows: FloatArray, start: int = start) -> None:
                places = slice(start + first, start + first + len(rows))
                scores[places] = log_probabilities(rows[:, : self.config.token_count], targets[places])
                if see is not None:
                    see(start + first, rows)

            self._forward(ids, start, np.arange(len(ids), dtype=np.int32), note)
        return scores

    def rows(self, tokens: Sequence[int], start: int = 0) -> FloatArray:
        """Logits of the positions from ``start`` on, float32 [len(tokens) − start, vocab].

        What an earlier call left of the positions before ``start`` is reused.
        """
        parts: list[FloatArray] = []
        for place in range(start, len(tokens), self._chunk):
            ids = tokens[place : place + self._chunk]
            self._forward(ids, place, np.arange(len(ids), dtype=np.int32), lambda _, rows: parts.append(rows.copy()))
        return np.concatenate(parts)

    def logits(self, tokens: Sequence[int], start: int = 0) -> FloatArray:
        """Computes positions ``start`` … len(tokens) − 1 and returns the last one's logits, float32 [vocab].

        What an earlier call left of the positions before ``start`` is reused; 0 recomputes everything.
        """
        alone = self._step is not None  # a graph computes one row: the last
        while len(tokens) - start > (1 if alone else self._chunk):
            end = min(start + self._chunk, len(tokens) - alone)
            self._forward(tokens[start:end], start, np.zeros(0, np.int32), lambda first, rows: None)
            start = end
        rows = tokens[start:]
        last: list[FloatArray] = []
        self._forward(rows, start, np.array([len(rows) - 1], np.int32), lambda _, found: last.append(found[0].copy()))
        return last[0]

    def _forward(self, tokens: Sequence[int], start: int, logit_rows: IntArray, consume: Consume) -> None:
        check_token_ids(tokens, self.config.token_count)  # no kernel checks the bounds of the embedding

        def check(first: int, rows: FloatArray) -> None:
            finite = np.isfinite(rows).all(axis=1)
            if not finite.all():
                position = start + int(logit_rows[first + int(finite.argmin())])
                raise EngineError(
                    f"{self.path}: the logits of position {position} hold NaN or infinity; the weights are damaged, or "
                    "too large for float32"
                )
            consume(first, rows)

        if self._step is not None and len(tokens) == len(logit_rows) == 1:
            check(0, self._step(tokens[0], start))
        else:
            self._compute(tokens, start, logit_rows, check)

    def _compute(self, tokens: Sequence[int], start: int, logit_rows: IntArray, consume: Consume) -> None:
        batch = self._model.batch([Part(np.asarray(tokens, np.int32), start, self._pages)], logit_rows)
        self._model.rows(batch, self._cache, consume)


class GraphStep:
    """One row at a time, by replaying the graph of a decode step: ``step(token, position)`` gives logits [1, vocab].

    Raises EngineError where the step cannot be captured.
    """

    def __init__(self, model: Direct, pages: IntArray, cache: object) -> None:
        device = model.device
        self._device = device
        self._host = device.pinned(2, np.int32)
        self._values = device.zeros(2, np.int32)
        zero = device.zeros(1, np.int32)
        nothing = device.zeros(0, np.int32)
        from crucible.model.cuda_ops import DeviceBatch

        view = DeviceBatch(
            token_ids=self._values[:1],
            positions=self._values[1:],
            row_sequence=zero,
            page_tables=device.upload(pages.reshape(1, -1)),
            logit_rows=zero,
            tile_first=nothing,
            tile_rows=nothing,
            decode_rows=1,
            splits=model.ops.decode_splits(1),
        )
        self._graph = device.capture(lambda: model.forward(view, cache))
        if self._graph is None:
            raise EngineError("the decode step could not be captured as a graph; leave --graph out")
        self._logits = model.ops.logit_rows(1)

    def __call__(self, token: int, position: int) -> FloatArray:
        self._host[:] = token, position
        self._device.to_device(self._host, self._values)
        self._device.replay(self._graph)
        logits: FloatArray = self._device.download(self._logits)
        return logits


def log_probabilities(logits: FloatArray, targets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Log-softmax float64 [rows] of ``logits`` [rows, tokens] at ``targets`` [rows]."""
    exact = logits.astype(np.float64)
    chosen = exact[np.arange(len(exact)), targets]
    peak = exact.max(axis=1)
    exact -= peak[:, None]
    result: npt.NDArray[np.float64] = chosen - peak - np.log(np.exp(exact, out=exact).sum(axis=1))
    return result
