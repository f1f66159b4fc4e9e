"""Evaluation: the loss on a fixed set of windows of the validation split."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from crucible_train.distributed import Workers
from crucible_train.shards import TokenDataset
from crucible_train.softmax import IGNORED

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(tokens [batch, context], targets [batch, context]) → summed loss in nats."""


@dataclass(frozen=True)
class Score:
    """Mean loss in nats a token; bits per byte of the text, None where the bytes are unknown.

    A byte's share of a token is that of the whole split, also where only some of its windows are looked at.
    """

    loss: float
    bits_per_byte: float | None


class Evaluation:
    """Up to ``max_tokens`` targets (0: all) of ``dataset`` in windows of ``context``, spread evenly over it.

    The windows depend on nothing else, so every evaluation of every run on the same data sees the same tokens. When
    all windows fit, the rest at the end counts too: then each token but the first is a target once. Windows are shared
    out over the processes, and the mean weighs each token alike.
    """

    def __init__(self, dataset: TokenDataset, *, context: int, batch: int, max_tokens: int, workers: Workers) -> None:
        self._dataset, self._context, self._batch, self._workers = dataset, context, batch, workers
        targets = dataset.token_count - 1
        windows = max(0, -(-targets // context))
        wanted = windows if max_tokens == 0 else max(1, max_tokens // context)
        if wanted < windows:
            whole = targets // context
            self._starts = np.linspace(0, whole - 1, min(wanted, whole)).round().astype(np.int64) * context
        else:
            self._starts = np.arange(windows, dtype=np.int64) * context

    @property
    def windows(self) -> int:
        """How many there are; 0 where the split has fewer than two tokens, so nothing to predict."""
        return len(self._starts)

    def run(self, loss: Loss) -> Score:
        """The score of what ``loss`` computes. Every process calls it and gets the same."""
        device = self._workers.device
        total = torch.zeros(2, dtype=torch.float64, device=device)
        with torch.no_grad():
            for tokens, targets in self._batches():
                count = (targets != IGNORED).sum()
                total += torch.stack((loss(tokens.to(device), targets.to(device)).double(), count.to(device).double()))
        nats, count = self._workers.sum(total).tolist()
        mean = nats / count
        width = self._dataset.bytes_per_token
        return Score(mean, mean / math.log(2) / width if width else None)

    def _batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This process's windows as full batches: a compiled loss sees one shape only."""
        mine = self._starts[self._workers.rank :: self._workers.world]
        last = self._dataset.token_count
        for first in range(0, len(mine), self._batch):
            starts = mine[first : first + self._batch]
            tokens = np.zeros((self._batch, self._context + 1), np.int64)
            tokens[:, 1:] = IGNORED
            for length in np.unique(np.minimum(last - starts, self._context + 1)):
                rows = np.flatnonzero(np.minimum(last - starts, self._context + 1) == length)
                tokens[rows, :length] = self._dataset.gather(starts[rows], int(length))
            inputs = np.where(tokens[:, :-1] == IGNORED, 0, tokens[:, :-1])
            yield torch.from_numpy(inputs), torch.from_numpy(tokens[:, 1:].copy())
