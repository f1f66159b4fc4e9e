"""BatchLoader: an endless stream of training batches that is a pure function of seed and step.

An epoch is the windows of ``context`` inputs, one after the other from an offset drawn for the epoch, in an order drawn
for the epoch. Sequence number n of the whole run is window n mod W of epoch n div W, and a step takes the next
batch · grad_accum · world of them: which rank or micro-batch a sequence falls to changes nothing about the step's set.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from crucible_train.shards import TokenDataset

if TYPE_CHECKING:
    import torch


class WindowOrder:
    """Where the sequences of a run begin: a function of (seed, sequence number) alone, on every machine."""

    def __init__(self, token_count: int, context: int, seed: int) -> None:
        self.windows = max(1, (token_count - context) // context)
        self._context = context
        self._seed = seed
        self._offsets = min(context, token_count - self.windows * context)
        self._epoch = -1
        self._order = np.empty(0, np.int64)
        self._offset = 0

    def starts(self, first: int, count: int) -> NDArray[np.int64]:
        """Offsets into the split of the sequences first … first + count − 1: int64 [count]."""
        numbers = np.arange(first, first + count, dtype=np.int64)
        epochs, within = np.divmod(numbers, self.windows)
        out = np.empty(count, np.int64)
        for epoch in np.unique(epochs):
            self._draw(int(epoch))
            chosen = epochs == epoch
            out[chosen] = self._order[within[chosen]] * self._context + self._offset
        return out

    def _draw(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        key = int(_mixed(_mixed(np.array([self._seed % 2**64], np.uint64)) + np.uint64(epoch))[0])
        keys = _mixed(np.arange(self.windows + 1, dtype=np.uint64) + np.uint64(key))
        self._order = np.argsort(keys[:-1], kind="stable")
        self._offset = int(keys[-1] % np.uint64(self._offsets))
        self._epoch = epoch


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014): a bijection that scatters all bits."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class BatchLoader:
    """Micro-batches for one rank, gathered ahead of time by a thread.

    ``next()`` gives (tokens, targets): int64 [batch, context] on ``device``, targets one id further. ``start_step``
    counts optimizer steps of ``grad_accum`` micro-batches. ``wait_seconds`` is the time that ``next`` waited for the
    thread: while it stays near zero the loader limits nothing. Raises TrainingError for a split of fewer than
    context + 1 tokens.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        batch: int,
        context: int,
        seed: int,
        *,
        rank: int = 0,
        world: int = 1,
        start_step: int = 0,
        grad_accum: int = 1,
        device: str | torch.device = "cpu",
        prefetch: int = 4,
    ) -> None:
        import torch

        dataset.require(context)
        self.wait_seconds = 0.0
        self._dataset = dataset
        self._batch, self._context = batch, context
        self._rank, self._world, self._grad_accum = rank, world, grad_accum
        self._device = torch.device(device)
        self._micro = start_step * grad_accum
        self._order = WindowOrder(dataset.token_count, context, seed)
        self._ready: queue.Queue[torch.Tensor | BaseException] = queue.Queue(prefetch)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(self._micro,), name="batches", daemon=True)
        self._thread.start()

    @property
    def step(self) -> int:
        """The optimizer step that the next micro-batch belongs to."""
        return self._micro // self._grad_accum

    @property
    def epoch(self) -> float:
        """How many times the split was gone through before that step."""
        sequences = self.step * self._grad_accum * self._world * self._batch
        return sequences / self._order.windows

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next micro-batch; on CUDA its copy may still be under way on the current stream."""
        begun = time.perf_counter()
        item = self._ready.get()
        self.wait_seconds += time.perf_counter() - begun
        if isinstance(item, BaseException):
            raise item
        self._micro += 1
        both = item.to(self._device, non_blocking=True)
        return both[0], both[1]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield self.next()

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _work(self, micro: int) -> None:
        try:
            while not self._stop.is_set():
                self._put(self._gather(micro))
                micro += 1
        except BaseException as error:  # the caller gets it from next()
            self._put(error)

    def _put(self, item: Any) -> None:
        while not self._stop.is_set():
            try:
                return self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def _gather(self, micro: int) -> torch.Tensor:
        """Inputs and targets together, int64 [2, batch, context]: one copy to the device, both contiguous there."""
        import torch

        first = (micro * self._world + self._rank) * self._batch
        ids = self._dataset.gather(self._order.starts(first, self._batch), self._context + 1)
        both = torch.empty(2, self._batch, self._context, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        array = both.numpy()
        array[0], array[1] = ids[:, :-1], ids[:, 1:]
        return both
