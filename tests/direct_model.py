"""A model called directly, without an engine: batches made by hand, any pages in any order."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from crucible.checkpoint import open_checkpoint
from crucible.model.cpu_ops import CpuOps
from crucible.model.forward import forward
from crucible.model.weights import load_weights


class Model:
    """Weights, ops and a cache, and batches made by hand: (ids, first position, pages) for each sequence."""

    def __init__(self, path: Path, ops_class: Any = CpuOps, quant: str = "f32", pages: int = 64, **kw: Any) -> None:
        with open_checkpoint(path) as checkpoint:
            self.ops = ops_class(checkpoint.config, **({"context": 512, **kw} if ops_class is CpuOps else {}))
            self.weights = load_weights(checkpoint, self.ops, quant)
        self.cache = self.ops.allocate_cache(pages)

    def run(self, *sequences: tuple[list[int], int, list[int]], all_rows: bool = False) -> np.ndarray:
        def flat(values: list[list[int]]) -> np.ndarray:
            return np.array([v for part in values for v in part], np.int32)

        lengths = [len(ids) for ids, _, _ in sequences]
        width = max(len(pages) for _, _, pages in sequences)
        ends = np.cumsum(lengths)
        batch = SimpleNamespace(
            token_ids=flat([ids for ids, _, _ in sequences]),
            positions=flat([list(range(start, start + len(ids))) for ids, start, _ in sequences]),
            row_sequence=np.repeat(np.arange(len(sequences)), lengths).astype(np.int32),
            page_tables=np.array([pages + [0] * (width - len(pages)) for _, _, pages in sequences], np.int32),
            logit_rows=(np.arange(ends[-1]) if all_rows else ends - 1).astype(np.int32),
        )
        return np.array(forward(self.weights, self.ops, batch, self.cache))
