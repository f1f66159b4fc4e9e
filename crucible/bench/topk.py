"""``crucible bench topk``: choosing tokens on the device, against bringing rows of logits to the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from crucible.bench.gpu import Timer, open_device
from crucible.bench.inprocess import Say
from crucible.bench.kernels import describe
from crucible.bench.report import Column, Report, Row, Table
from crucible.bench.statistics import alternating, summarize
from crucible.engine.cuda_runner import IDS_A_BLOCK
from crucible.kernels.table import MAX_TOP_K
from crucible.native.sampling import select

COLUMNS = (
    Column("batch", "rows"),
    Column("way", "way"),
    Column("k", "k"),
    Column("device_us", "device µs", ",.2f", detail=True),
    Column("host_us", "host µs", ",.2f"),
    Column("bytes", "bytes to host", ",.0f"),
)


class Choice:
    """Rows of random logits on the device and all that the kernels of select.cu need."""

    def __init__(self, device: Any, rows: int, vocabulary: int, ks: Sequence[int], seed: int) -> None:
        self.device, self.rows, self.vocabulary = device, rows, vocabulary
        self.host = np.random.default_rng(seed).standard_normal((rows, vocabulary), np.float32)
        self._logits = device.upload(self.host)
        self._blocks = -(-vocabulary // IDS_A_BLOCK)
        self._partials = device.zeros((rows, self._blocks, MAX_TOP_K), np.uint64)
        self._counters = device.zeros(rows, np.uint32)
        self._tokens, self._flags = device.zeros(rows, np.int32), device.zeros(rows, np.int32)
        self._ids = device.zeros((rows, MAX_TOP_K), np.int32)
        self._values = device.zeros((rows, MAX_TOP_K), np.float32)
        self._wanted = {k: device.upload(np.full(rows, k, np.int32)) for k in ks}
        self._pinned = device.pinned((rows, vocabulary), np.float32)
        self._pinned_ids = device.pinned(rows * MAX_TOP_K, np.int32)
        self._pinned_values = device.pinned(rows * MAX_TOP_K, np.float32)

    def argmax(self) -> None:
        self.device.launch(
            "crucible_argmax", (self._blocks, self.rows), self._logits, self.vocabulary, self.vocabulary,
            self._partials, self._counters, 1, self._tokens, self._flags,
        )  # fmt: skip

    def bring_tokens(self) -> None:
        self.device.to_host(self._tokens, self._pinned_ids[: self.rows])

    def top_k(self, k: int) -> None:
        wanted = self._wanted[k]
        self.device.launch(
            "crucible_top_k", (self._blocks, self.rows), self._logits, self.vocabulary, self.vocabulary, wanted, k,
            self._partials, self._counters, self._ids, self._values, self._flags,
        )  # fmt: skip

    def bring_candidates(self, k: int) -> None:
        size = self.rows * k
        self.device.to_host(self._ids.reshape(-1)[:size], self._pinned_ids[:size])
        self.device.to_host(self._values.reshape(-1)[:size], self._pinned_values[:size])

    def whole_rows(self) -> None:
        self.device.to_host(self._logits, self._pinned)

    def on_the_host(self, k: int) -> float:
        """Microseconds in which the host draws a token of each row from its ``k`` candidates; greedily with 1."""
        begin = time.perf_counter()
        for row in self.host:
            select(row, 0.0 if k == 1 else 1.0, k, 1, 0, 0, self.vocabulary)
        return 1e6 * (time.perf_counter() - begin)


def topk(
    command: str,
    say: Say,
    *,
    batches: Sequence[int],
    ks: Sequence[int],
    vocabulary: int,
    trials: int,
    seed: int,
) -> Report:
    """Each number of rows: greedily and with each k on the device, and the same on the host."""
    report = Report("topk", command, trials)
    device = open_device(say)
    timer = Timer(device)
    describe(report, device, vocabulary=vocabulary)
    table = Table("Choosing tokens", COLUMNS)
    for batch in batches:
        say(f"{batch} rows")
        choice = Choice(device, batch, vocabulary, ks, seed)
        cells = ways(timer, choice, ks)
        results: list[list[dict[str, float | None]]] = [[] for _ in cells]
        for trial in range(trials):
            for index in alternating(len(cells), trial):
                cell = cells[index]
                device_us = timer.microseconds(cell.queue)
                results[index].append({"device_us": device_us, "host_us": cell.host() if cell.host else None})
        for cell, result in zip(cells, results, strict=True):
            row: Row = {
                "batch": batch, "way": cell.way, "k": cell.k, "bytes": cell.size, **summarize(result),
            }  # fmt: skip
            table.rows.append(row)
    report.tables.append(table)
    report.finish()
    return report


@dataclass(frozen=True)
class Way:
    """queue: what the device does, copies included; host: microseconds of the host's part; size: bytes it gets."""

    way: str
    k: int
    queue: Callable[[], None]
    size: int
    host: Callable[[], float] | None = None


def ways(timer: Timer, choice: Choice, ks: Sequence[int]) -> list[Way]:
    """Greedily (k of 1) and with each k: on the device, and by whole rows on the host."""
    whole = choice.host.nbytes
    found = []
    for k in dict.fromkeys([1, *ks]):
        if k == 1:
            queue = both(timer.replayable(choice.argmax), choice.bring_tokens)
            found.append(Way("device", 1, queue, 4 * choice.rows))
        elif k <= MAX_TOP_K:
            queue = both(timer.replayable(partial(choice.top_k, k)), partial(choice.bring_candidates, k))
            found.append(Way("device", k, queue, 8 * choice.rows * k))
        found.append(Way("host", k, choice.whole_rows, whole, partial(choice.on_the_host, k)))
    return found


def both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        first()
        second()

    return run
