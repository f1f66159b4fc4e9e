"""Inputs for validating attention and selection, and a device that puts one chosen kernel in another's place."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from crucible.config.engine import PAGE_TOKENS
from crucible.kernels.cuda import geometry
from crucible.kernels.device import Device, Grid, Shape
from crucible.kernels.table import KernelRow, kernel

LINEAR = re.compile(r"crucible_linear_(?P<form>small\d+|big\d+|scalar)_(?P<weights>int8|f16|f32)_(?P<epilogue>\w+)")
UNUSED_PAGE = 1 << 28
"""In page tables past the pages in use: nothing may follow it."""


class Forced:
    """``device``, but a launch of any projection of ``wanted``'s op launches ``wanted``. ``launched``: all names."""

    def __init__(self, device: Any, wanted: KernelRow) -> None:
        self._device, self.wanted = device, wanted
        self.launched: set[str] = set()

    @property
    def processors(self) -> int:
        return int(self._device.processors)

    def zeros(self, shape: Shape, dtype: npt.DTypeLike) -> Any:
        return self._device.zeros(shape, dtype)

    def upload(self, values: NDArray[Any]) -> Any:
        return self._device.upload(values)

    def copy(self, source: Any, target: Any) -> None:
        self._device.copy(source, target)

    def download(self, source: Any) -> NDArray[Any]:
        """A host copy, once all that is queued is done. Raises EngineError when the device failed."""
        self._device.synchronize()
        values: NDArray[Any] = self._device.download(source)
        return values

    def launch(self, name: str, grid: Grid, *arguments: Any) -> None:
        if LINEAR.fullmatch(name) and LINEAR.fullmatch(self.wanted.name) and kernel(name).op == self.wanted.op:
            values = dict(zip((a.name for a in kernel(name).arguments), arguments, strict=True))
            name = self.wanted.name
            grid = linear_grid(name, values["tiles"], values["inputs"], values["rows"], self.processors)
        self.launched.add(name)
        self._device.launch(name, grid, *arguments)


def linear_grid(name: str, tiles: int, inputs: int, rows: int, processors: int) -> Grid:
    """The grid of a projection kernel. Raises ValueError for a name that is none and for more inputs than it takes."""
    match = LINEAR.fullmatch(name)
    if match is None:
        raise ValueError(f"{name} is no projection kernel")
    return geometry.launch(match["form"], tiles, inputs, rows, processors).grid


@dataclass(frozen=True)
class AttentionProblem:
    """A ragged batch over a paged cache whose pages lie in any order.

    q float32 [rows, heads, head_dim]; k, v: of each sequence float32 [positions, kv_heads, head_dim]; positions,
    row_sequence int32 [rows]; page_tables int32 [sequences, pages], UNUSED_PAGE past the used ones; page_count. All
    floats are halves, so that every element type of q and of the cache holds them exactly.
    """

    q: NDArray[np.float32]
    k: list[NDArray[np.float32]]
    v: list[NDArray[np.float32]]
    positions: NDArray[np.int32]
    row_sequence: NDArray[np.int32]
    page_tables: NDArray[np.int32]
    page_count: int

    def pages(self, layers: int, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """k and v float32 [pages, layers, kv_heads, 16, head_dim]: NaN in every slot that nobody has written."""
        _, kv_heads, width = self.k[0].shape
        shape = (self.page_count, layers, kv_heads, PAGE_TOKENS, width)
        caches = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        for sequence, both in enumerate(zip(self.k, self.v, strict=True)):
            at = np.arange(len(both[0]))
            page = self.page_tables[sequence, at // PAGE_TOKENS]
            for cache, values in zip(caches, both, strict=True):
                cache[page, layer, :, at % PAGE_TOKENS] = values
        return caches

    def remapped(self, random: np.random.Generator) -> AttentionProblem:
        """The same content on other pages."""
        page_tables, count = _tables([len(k) for k in self.k], random)
        return AttentionProblem(self.q, self.k, self.v, self.positions, self.row_sequence, page_tables, count)

    def rows(self, wanted: NDArray[np.intp]) -> AttentionProblem:
        """Some of the rows over the same cache."""
        return AttentionProblem(
            self.q[wanted], self.k, self.v, self.positions[wanted], self.row_sequence[wanted], self.page_tables,
            self.page_count,
        )  # fmt: skip

    def tiles(self, most: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """First rows and numbers of rows of tiles of at most ``most`` rows of one sequence, int32 each."""
        firsts, counts = [], []
        for sequence in np.unique(self.row_sequence):
            rows = np.flatnonzero(self.row_sequence == sequence)
            for first in range(int(rows[0]), int(rows[-1]) + 1, most):
                firsts.append(first)
                counts.append(min(most, int(rows[-1]) + 1 - first))
        return np.array(firsts, np.int32), np.array(counts, np.int32)


def attention_problem(
    random: np.random.Generator,
    lengths: tuple[int, ...],
    starts: tuple[int, ...],
    heads: int,
    kv_heads: int,
    width: int,
) -> AttentionProblem:
    """``lengths[i]`` rows of sequence i from position ``starts[i]`` on, whose earlier positions are in the cache.

    Values are 0.5 … 1.5, so that no sum cancels; queries and keys are normal, so that every head and every position has
    a weight of its own.
    """
    ends = [s + n for s, n in zip(starts, lengths, strict=True)]
    page_tables, count = _tables(ends, random)
    rows = sum(lengths)
    return AttentionProblem(
        q=halves(random.standard_normal((rows, heads, width))),
        k=[halves(random.standard_normal((end, kv_heads, width))) for end in ends],
        v=[halves(random.random((end, kv_heads, width)) + 0.5) for end in ends],
        positions=np.concatenate([np.arange(s, e) for s, e in zip(starts, ends, strict=True)]).astype(np.int32),
        row_sequence=np.repeat(np.arange(len(ends)), lengths).astype(np.int32),
        page_tables=page_tables,
        page_count=count,
    )


def _tables(ends: list[int], random: np.random.Generator) -> tuple[NDArray[np.int32], int]:
    pages = [-(-end // PAGE_TOKENS) for end in ends]
    total = sum(pages) + 3
    order = random.permutation(total)
    tables = np.full((len(ends), max(pages) + 1), UNUSED_PAGE, np.int32)
    taken = 0
    for row, count in zip(tables, pages, strict=True):
        row[:count] = order[taken : taken + count]
        taken += count
    return tables, total


def halves(values: NDArray[Any]) -> NDArray[np.float32]:
    """Rounded to the nearest halves, as float32."""
    return values.astype(np.float16).astype(np.float32)


# ---- selection


def selection_rows(random: np.random.Generator, width: int, token_count: int) -> NDArray[np.float32]:
    """Logits float32 [10, width]: ties, NaN, infinities and both zeros, with NaN and +inf in the padding."""
    rows = (random.standard_normal((10, width)) * 3).astype(np.float32)
    last, some = token_count - 1, token_count // 2
    rows[0, 0] = rows[1, some] = rows[2, last] = 99.0
    rows[3, [0, some, last]] = 99.0  # the lowest id wins
    rows[4] = np.round(rows[4])
    rows[5, :token_count:3] = np.nan
    rows[6] = np.nan
    rows[7] = np.where(np.arange(width) % 2, 0.0, -0.0)  # the first is −0, so that a first +0 would be wrong
    rows[8] = -np.inf
    rows[9, some] = np.inf
    rows[:, token_count:] = np.inf
    rows[::2, token_count:] = np.nan
    return rows


def ranked(row: NDArray[np.float32], token_count: int) -> NDArray[np.int32]:
    """All ids, best first: by logit, then by lower id; −0 equals +0, NaN comes after everything."""
    values = row[:token_count].astype(np.float64)
    nan = np.isnan(values)
    return np.lexsort((np.arange(token_count), -np.where(nan, 0.0, values), nan)).astype(np.int32)


def chosen(device: Device, kernel_name: str, logits: NDArray[np.float32], token_count: int, width: int) -> list[Any]:
    """What the kernel argmax or top_k makes of ``logits``: device arrays tokens and flags, or ids, values, flags."""
    rows, blocks = len(logits), max(1, -(-token_count // 4096))
    counters, flags = device.zeros(rows, np.uint32), device.zeros(rows, np.int32)
    common = (device.upload(logits), logits.shape[1], token_count)
    if kernel(kernel_name).op == "argmax":
        tokens = device.zeros(rows, np.int32)
        partials = device.zeros((rows, blocks), np.uint64)
        device.launch(kernel_name, (blocks, rows), *common, partials, counters, 0, tokens, flags)
        return [tokens, flags]
    partials = device.zeros((rows, blocks, width), np.uint64)
    ids, values = device.zeros((rows, width), np.int32), device.zeros((rows, width), np.float32)
    wanted = device.upload(np.full(rows, width, np.int32))
    device.launch(kernel_name, (blocks, rows), *common, wanted, width, partials, counters, ids, values, flags)
    return [ids, values, flags]


def expected_choice(logits: NDArray[np.float32], op: str, token_count: int, width: int) -> list[NDArray[Any]]:
    """What ``chosen`` must be. Rows of fewer than ``width`` ids are filled with zeros."""
    seen = logits[:, :token_count]
    flags = (np.isnan(seen) | (seen == np.inf)).any(axis=1).astype(np.int32)
    orders = [ranked(row, token_count) for row in logits]
    if op == "argmax":
        return [np.array([order[0] for order in orders], np.int32), flags]
    ids, values = np.zeros((len(logits), width), np.int32), np.zeros((len(logits), width), np.float32)
    count = min(width, token_count)
    for i, order in enumerate(orders):
        ids[i, :count] = order[:count]
        values[i, :count] = logits[i, order[:count]] + np.float32(0.0)
    return [ids, values, flags]
