"""``crucible bench attention``: the attention kernels by length of the context, batch and number of blocks a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crucible.bench.gpu import Timer, open_device
from crucible.bench.inprocess import Say
from crucible.bench.kernels import describe
from crucible.bench.report import Column, Report, Table
from crucible.bench.statistics import Summary, alternating, paired_ratios, summarize
from crucible.config.engine import PAGE_TOKENS
from crucible.errors import ConfigError
from crucible.model.cuda_ops import HEAD_DIMS, PARTIAL_EXTRA, PIECE
from crucible.model.direct import tiles

VARIANTS = ("decode", "prefill", "reference")

COLUMNS = (
    Column("rows", "rows"),
    Column("context", "context"),
    Column("kernel", "kernel"),
    Column("splits", "splits"),
    Column("us", "µs", ",.2f", detail=True),
    Column("kv_gb_s", "KV GB/s", ",.0f"),
    Column("tflop_s", "TFLOP/s", ",.2f"),
    Column("ratio", "× one split", ",.3f"),
)


@dataclass(frozen=True)
class Heads:
    """Geometry of attention: query heads, KV heads, dimensions of a head, layers whose caches are read in turn."""

    heads: int
    kv_heads: int
    head_dim: int
    layers: int = 12

    def check(self) -> None:
        """Raises ConfigError for a geometry without kernels."""
        if self.head_dim not in HEAD_DIMS:
            raise ConfigError(f"--head-dim must be {' or '.join(map(str, HEAD_DIMS))}, got {self.head_dim}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"--heads must be a multiple of --kv-heads, got {self.heads} and {self.kv_heads}")


class Case:
    """``rows`` sequences of ``context`` tokens: their last rows (decode), or of one sequence all rows (a prompt)."""

    def __init__(self, device: Any, heads: Heads, rows: int, context: int, prompt: bool, seed: int) -> None:
        self.device, self.heads, self.context, self.prompt = device, heads, context, prompt
        self.sequences = 1 if prompt else rows
        self.rows = context if prompt else rows
        pages = -(-context // PAGE_TOKENS)
        order = np.random.default_rng(seed).permutation(self.sequences * pages).astype(np.int32)
        cache = (self.sequences * pages, heads.layers, heads.kv_heads, PAGE_TOKENS * heads.head_dim)
        width = heads.heads * heads.head_dim
        q = np.random.default_rng(seed).standard_normal((self.rows, width), np.float32).astype(np.float16)
        positions = np.arange(context) if prompt else np.full(rows, context - 1)
        upload, zeros = device.upload, device.zeros
        self.pieces = -(-context // PIECE)
        self._out = zeros((self.rows, width), np.float16)
        row_sequence = np.zeros(self.rows, np.int32) if prompt else np.arange(rows, dtype=np.int32)
        self._common = (
            upload(q), width, zeros(cache, np.float16), zeros(cache, np.float16),
            upload(positions.astype(np.int32)), upload(row_sequence), upload(order.reshape(self.sequences, pages)),
            pages, heads.heads, heads.kv_heads, heads.layers,
        )  # fmt: skip
        group = heads.heads // heads.kv_heads
        self._groups = heads.kv_heads * -(-group // 16)
        if not prompt:
            self._partials = zeros((rows, heads.heads, self.pieces, heads.head_dim + PARTIAL_EXTRA), np.float32)
            self._counters = zeros(rows * self._groups, np.uint32)
        first, counts = tiles([self.rows], 0)
        self._tiles = upload(first), upload(counts)

    @property
    def kv_bytes(self) -> int:
        """K and V of a layer that are read, once for each query head group."""
        return 2 * 2 * self.sequences * self.context * self.heads.kv_heads * self.heads.head_dim

    @property
    def operations(self) -> int:
        pairs = self.context * (self.context + 1) // 2 if self.prompt else self.rows * self.context
        return 4 * pairs * self.heads.heads * self.heads.head_dim

    def _arguments(self, index: int) -> tuple[Any, ...]:
        return (*self._common, index % self.heads.layers, None, self._out, self._out.shape[1])

    def decode(self, splits: int) -> Callable[[int], None]:
        name = f"crucible_attention_decode_{self.heads.head_dim}"
        grid = (self.rows, self._groups, splits)
        return lambda index: self.device.launch(
            name, grid, *self._arguments(index), self._partials, self._counters, self.pieces
        )

    def prefill(self) -> Callable[[int], None]:
        name = f"crucible_attention_prefill_{self.heads.head_dim}"
        grid = (len(self._tiles[0]), self.heads.heads)
        return lambda index: self.device.launch(name, grid, *self._arguments(index), *self._tiles)

    def reference(self) -> Callable[[int], None]:
        grid = (self.rows, self.heads.heads)
        return lambda index: self.device.launch(
            "crucible_attention_reference_f16_f16", grid, *self._arguments(index), self.heads.head_dim
        )


def split_counts(pieces: int) -> list[int]:
    """1, 2, 4, … and all pieces."""
    return [2**i for i in range(pieces.bit_length()) if 2**i < pieces] + [pieces]


def attention(
    command: str,
    say: Say,
    *,
    heads: Heads,
    variants: Sequence[str],
    batches: Sequence[int],
    contexts: Sequence[int],
    iters: int,
    trials: int,
    seed: int,
) -> Report:
    """Each context: decode of each batch with each number of splits, the whole prompt, and the reference of both."""
    heads.check()
    report = Report("attention", command, trials)
    device = open_device(say)
    timer = Timer(device)
    describe(report, device, **{name: getattr(heads, name) for name in ("heads", "kv_heads", "head_dim", "layers")})
    table = Table("Attention", COLUMNS)
    for context in contexts:
        for prompt, rows in [*((False, batch) for batch in batches), (True, context)]:
            say(f"context {context}, {'the prompt' if prompt else f'{rows} rows'}")
            table.rows.extend(measure(timer, heads, variants, rows, context, prompt, iters, trials, seed))
    report.tables.append(table)
    report.finish()
    return report


def measure(
    timer: Timer,
    heads: Heads,
    variants: Sequence[str],
    rows: int,
    context: int,
    prompt: bool,
    iters: int,
    trials: int,
    seed: int,
) -> list[dict[str, Any]]:
    """The table's rows of one case, every kernel once a trial."""
    wanted = [name for name in variants if name != ("decode" if prompt else "prefill")]
    if not wanted:
        return []
    case = Case(timer.device, heads, rows, context, prompt, seed)
    cells: list[tuple[str, int | None, Callable[[int], None]]] = []
    for name in wanted:
        if name == "decode":
            cells += [(name, splits, case.decode(splits)) for splits in split_counts(case.pieces)]
        else:
            cells.append((name, None, case.prefill() if name == "prefill" else case.reference()))
    ready = [timer.rounds(launch, iters) for _, _, launch in cells]
    times: list[list[float]] = [[] for _ in cells]
    for trial in range(trials):
        for index in alternating(len(cells), trial):
            times[index].append(ready[index]())
    found = []
    for (name, splits, _), us in zip(cells, times, strict=True):
        values: list[dict[str, float | None]] = [
            {
                "us": value,
                "kv_gb_s": None if prompt else case.kv_bytes / value / 1e3,
                "tflop_s": case.operations / value / 1e6,
            }
            for value in us
        ]
        row: dict[str, Any] = {"rows": case.rows, "context": context, "kernel": name, "splits": splits}
        ratio: Summary | None = paired_ratios(us, times[0]) if name == "decode" else None
        found.append({**row, "ratio": ratio, **summarize(values)})
    return found
