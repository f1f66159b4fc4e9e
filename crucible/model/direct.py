"""Direct: a model's weights, ops and batches made by hand, without an engine: scoring, logits, profiles.

One code path for every device: what computes and where arrays lie is the Ops' and the batch's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from crucible.checkpoint import Checkpoint
from crucible.config import ModelConfig
from crucible.config.engine import require_quant
from crucible.model.cuda_arrays import DeviceBatch, attention_tiles
from crucible.model.forward import forward
from crucible.model.ops import FloatArray, IntArray
from crucible.model.weights import Weights, load_weights

Consume = Callable[[int, FloatArray], None]
"""Gets the index of the first of some logit rows, and these rows on the host: float32 [rows, vocab]; views."""


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of one sequence: ids int32 [n] at positions start …, and its pages."""

    ids: IntArray
    start: int
    pages: IntArray


@dataclass(frozen=True)
class Rows:
    """A batch on the host (model.ops.BatchView)."""

    token_ids: IntArray
    positions: IntArray
    row_sequence: IntArray
    page_tables: IntArray
    logit_rows: IntArray


class Direct:
    """A loaded model. ``device``: a kernels.device.Device, or None where arrays are numpy's.

    head_rows: logit rows that are computed at once, so that memory does not grow with the rows that are wanted.
    """

    def __init__(self, config: ModelConfig, ops: Any, weights: Weights, *, head_rows: int, device: Any = None) -> None:
        self.config, self.ops, self.weights, self.device = config, ops, weights, device
        self.head_rows = head_rows

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        device: str,
        quant: str,
        context: int,
        max_rows: int,
        head_rows: int,
        max_sequences: int = 1,
        threads: int | None = None,
        overlap: bool = True,
        switches: Mapping[str, Any] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> Direct:
        """The model on ``cpu`` or ``cuda``; only that one's libraries are imported.

        context: positions of a sequence; max_rows, max_sequences: of a batch. threads is the CPU's; overlap (of
        kernels) and switches (CudaOps' arguments that choose kernels) are the GPU's. Raises ConfigError and
        CheckpointError.
        """
        config = checkpoint.config
        if device == "cpu":
            require_quant(quant, device)
            from crucible.model.cpu_ops import CpuOps

            ops: Any = CpuOps(config, context, threads)
            return cls(config, ops, load_weights(checkpoint, ops, quant), head_rows=head_rows)
        from crucible.kernels.device import CudaDevice
        from crucible.model.cuda_ops import CudaOps

        gpu = CudaDevice(overlap=overlap, say=say)
        ops = CudaOps(
            config,
            gpu,
            quant=quant,
            max_rows=max_rows,
            max_sequences=max(head_rows, max_sequences),
            context=context,
            **(switches or {}),
        )
        return cls(config, ops, load_weights(checkpoint, ops, quant), head_rows=head_rows, device=gpu)

    def batch(self, parts: Sequence[Part], logit_rows: IntArray) -> Any:
        """A batch of ``parts`` for ``forward``. On a GPU leading parts of one token are decode rows."""
        rows = host_batch(parts, logit_rows)
        if self.device is None:
            return rows
        lengths = [len(part.ids) for part in parts]
        decode_rows = next((i for i, length in enumerate(lengths) if length > 1), len(lengths))
        first, counts = tiles(lengths, decode_rows)
        device = self.device

        def upload(values: IntArray) -> Any:
            return device.upload(values) if values.size else device.zeros(1, values.dtype)[:0]

        return DeviceBatch(
            token_ids=upload(rows.token_ids),
            positions=upload(rows.positions),
            row_sequence=upload(rows.row_sequence),
            page_tables=upload(rows.page_tables),
            logit_rows=upload(rows.logit_rows),
            tile_first=upload(first),
            tile_rows=upload(counts),
            decode_rows=decode_rows,
            splits=self.ops.decode_splits(decode_rows),
        )

    def forward(self, batch: Any, cache: Any, ops: Any = None) -> Any:
        """The forward pass: logits float32 [len(batch.logit_rows), vocab] where the device keeps them.

        At most ``head_rows`` of them. ops: instead of the model's own, such as TimedOps around these.
        """
        return forward(self.weights, ops or self.ops, batch, cache)

    def rows(self, batch: Any, cache: Any, consume: Consume) -> None:
        """The forward pass with any number of logit rows: ``consume`` gets them in order, ``head_rows`` at a time."""
        ops: Any = ChunkedHead(self, consume)
        forward(self.weights, ops, batch, cache)

    def download(self, array: Any) -> FloatArray:
        """A device array on the host, once it is computed. On the CPU the array itself."""
        result: FloatArray = array if self.device is None else self.device.download(array)
        return result


class ChunkedHead:
    """Ops whose head computes some rows at a time and hands each part over; all else is the model's Ops."""

    def __init__(self, model: Direct, consume: Consume) -> None:
        self._model, self._consume = model, consume

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model.ops, name)

    def logits(self, x: Any, head: Any, batch: Any) -> None:
        step = self._model.head_rows
        for first in range(0, len(batch.logit_rows), step):
            part = self._model.ops.logits(x[first : first + step], head, batch)
            self._consume(first, self._model.download(part))


def host_batch(parts: Sequence[Part], logit_rows: IntArray) -> Rows:
    lengths = [len(part.ids) for part in parts]
    width = max(len(part.pages) for part in parts)
    pages = np.zeros((len(parts), width), np.int32)
    for row, part in zip(pages, parts, strict=True):
        row[: len(part.pages)] = part.pages
    return Rows(
        token_ids=np.concatenate([part.ids for part in parts]).astype(np.int32),
        positions=np.concatenate([np.arange(p.start, p.start + len(p.ids), dtype=np.int32) for p in parts]),
        row_sequence=np.repeat(np.arange(len(parts), dtype=np.int32), lengths),
        page_tables=pages,
        logit_rows=np.asarray(logit_rows, np.int32),
    )


def tiles(lengths: Sequence[int], decode_rows: int) -> tuple[IntArray, IntArray]:
    """First row and number of rows of each attention tile of the rows behind the decode rows."""
    starts = list(accumulate(lengths[decode_rows:], initial=decode_rows))
    table = np.array(attention_tiles(starts), np.int32).reshape(-1, 2)
    return np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])
