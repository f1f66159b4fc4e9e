"""``crucible bench kernels``: the projection kernels by shape and number of rows, against what the GPU can do at all.

The constants of crucible.kernels.cuda.geometry.cheapest come from this table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crucible.bench.gpu import Ceilings, Timer, ceilings, copies_of, open_device, random_bytes
from crucible.bench.inprocess import Say
from crucible.bench.report import Column, Report, Row, Table
from crucible.bench.statistics import Summary, alternating, paired_ratios, summarize, verdict
from crucible.kernels.cuda import geometry, pack

COLUMNS = (
    Column("outputs", "outputs"),
    Column("inputs", "inputs"),
    Column("batch", "rows"),
    Column("kernel", "kernel"),
    Column("us", "µs", ",.2f", detail=True),
    Column("gb_s", "weights GB/s", ",.0f"),
    Column("tflop_s", "TFLOP/s", ",.2f"),
    Column("ceiling", "% of ceiling", ",.0f"),
)
CHOICE_COLUMNS = (
    Column("outputs", "outputs"),
    Column("inputs", "inputs"),
    Column("batch", "rows"),
    Column("small", "best small"),
    Column("big", "best big"),
    Column("ratio", "small / big", ",.3f", detail=True),
    Column("winner", "wins"),
)
SHAPES_OF_120M = ((1152, 768), (768, 768), (4096, 768), (768, 2048), (50304, 768))
"""Outputs and inputs: qkv, attention output, gate and up, mlp output, head."""


@dataclass(frozen=True)
class Variant:
    """A kernel for a matrix of ``tiles`` and a number of rows."""

    name: str
    launch: geometry.Launch


def variants(tiles: int, inputs: int, rows: int, quant: str, processors: int) -> list[Variant]:
    """All kernels that can compute it."""
    found = []
    if quant != "f32":
        for tokens in geometry.SMALL_TOKENS:
            try:
                found.append(Variant(f"small{tokens}", geometry.small(tiles, inputs, rows, tokens, processors)))
            except ValueError:  # more inputs than its shared memory holds
                continue
        found += [Variant(f"big{tokens}", geometry.big(tiles, rows, tokens)) for tokens in geometry.BIG_TOKENS]
    return [*found, Variant("scalar", geometry.scalar(tiles, rows))]


class Bench:
    """A matrix of random weights, often enough that no cache holds all copies, and activations of ``rows`` rows."""

    def __init__(self, device: Any, outputs: int, inputs: int, rows: int, quant: str, seed: int) -> None:
        self.device, self.quant, self.outputs, self.inputs, self.rows = device, quant, outputs, inputs, rows
        self.tiles = -(-outputs // pack.TILE)
        blocks = -(-inputs // pack.BLOCK)
        width = blocks * pack.BLOCK
        each = self.tiles * pack.TILE * (4 * inputs if quant == "f32" else 2 * width if quant == "f16" else width)
        self.scale_bytes = self.tiles * blocks * 2 * pack.TILE * 2 if quant == "int8" else 0
        self.weight_bytes = each + self.scale_bytes
        self.copies = copies_of(each)
        kinds = {"f32": np.float32, "f16": np.float16, "int8": np.uint8}
        contents = random_bytes(each, seed) if quant == "int8" else self._floats(each, kinds[quant], seed)
        self._weights = device.zeros((self.copies, each // np.dtype(kinds[quant]).itemsize), kinds[quant])
        first = device.upload(contents)
        for copy in self._weights:
            device.copy(first, copy)
        ones = np.ones(self.scale_bytes // 2, np.float16)
        self._scales = device.upload(ones) if len(ones) else None
        self.activation = np.float32 if quant == "f32" else np.float16
        rng = np.random.default_rng(seed + 1)
        x = np.zeros((rows, width), self.activation)
        x[:, :inputs] = rng.standard_normal((rows, inputs), np.float32)
        self._x = device.upload(x)
        self._out = device.zeros((rows, outputs), np.float32)

    def _floats(self, size: int, kind: Any, seed: int) -> np.ndarray[Any, Any]:
        count = size // np.dtype(kind).itemsize
        values: np.ndarray[Any, Any] = np.random.default_rng(seed).standard_normal(count, np.float32).astype(kind)
        return values

    def launcher(self, variant: Variant) -> Callable[[int], None]:
        """``launch(i)`` of the kernel that stores float32, on copy i of the weights."""

        def launch(index: int) -> None:
            self.device.launch(
                f"crucible_linear_{variant.name}_{self.quant}_store", variant.launch.grid,
                self._weights[index % self.copies], self._scales, None, 1.0, self.tiles, self.inputs, self._x,
                self._x.shape[1], self.rows, self._out, self.outputs, self.outputs,
            )  # fmt: skip

        return launch

    @property
    def operations(self) -> int:
        return 2 * self.outputs * self.inputs * self.rows

    @property
    def moved(self) -> int:
        """Bytes that have to be moved: weights, activations, results."""
        activations = self.rows * self.inputs * np.dtype(self.activation).itemsize
        return self.weight_bytes + activations + 4 * self.rows * self.outputs


def kernels(
    command: str,
    say: Say,
    *,
    shapes: Sequence[tuple[int, int]],
    batches: Sequence[int],
    quant: str,
    trials: int,
    seed: int,
) -> Report:
    """Every kernel of each shape (outputs, inputs) and number of rows once a trial, in alternating order."""
    report = Report("kernels", command, trials)
    device = open_device(say)
    timer = Timer(device)
    say("measuring the ceilings")
    top = ceilings(timer)
    describe(report, device, top, quant=quant)
    table, choice = Table("Projections", COLUMNS), Table("Kernels for few rows and for many", CHOICE_COLUMNS)
    for outputs, inputs in shapes:
        for batch in batches:
            say(f"{outputs} × {inputs}, {batch} rows")
            bench = Bench(device, outputs, inputs, batch, quant, seed)
            found = measure(timer, bench, trials)
            size = {"outputs": outputs, "inputs": inputs, "batch": batch}
            table.rows.extend({**size, "kernel": name, **summarize(rows(bench, top, us))} for name, us in found.items())
            row = choose(found)
            if row is not None:
                choice.rows.append({**size, **row})
    report.tables += [table, choice] if choice.rows else [table]
    report.finish()
    return report


def measure(timer: Timer, bench: Bench, trials: int) -> dict[str, list[float]]:
    """Microseconds a launch of each kernel, a value a trial."""
    candidates = variants(bench.tiles, bench.inputs, bench.rows, bench.quant, timer.device.processors)
    ready = [timer.rounds(bench.launcher(variant)) for variant in candidates]
    found: dict[str, list[float]] = {variant.name: [] for variant in candidates}
    for trial in range(trials):
        for index in alternating(len(candidates), trial):
            found[candidates[index].name].append(ready[index]())
    return found


def rows(bench: Bench, top: Ceilings, microseconds: Sequence[float]) -> list[dict[str, float | None]]:
    least = top.microseconds(bench.moved, bench.operations)
    return [
        {
            "us": us,
            "gb_s": bench.weight_bytes / us / 1e3,
            "tflop_s": bench.operations / us / 1e6,
            "ceiling": 100 * least / us,
        }
        for us in microseconds
    ]


def choose(found: dict[str, list[float]]) -> Row | None:
    """The best kernel of each kind by its median, their paired ratio and who wins; None where there is one kind."""
    best = {}
    for kind in ("small", "big"):
        times = {name: Summary(tuple(us)).median for name, us in found.items() if name.startswith(kind)}
        if not times:
            return None
        best[kind] = min(times, key=lambda name: times[name])
    ratio = paired_ratios(found[best["small"]], found[best["big"]])
    if ratio is None:
        return None
    word = verdict(ratio)
    winner = {"higher": "big", "lower": "small"}.get(word, word)
    return {**best, "ratio": ratio, "winner": winner}


def describe(report: Report, device: Any, top: Ceilings | None = None, **settings: Any) -> None:
    """Writes the GPU and its ceilings into the report."""
    report.settings |= {"device": device.name, "processors": device.processors, **settings}
    if top is not None:
        report.settings["copy_gb_s"] = round(top.copy / 1e9, 1)
        report.settings["matmul_tflop_s"] = None if top.matmul is None else round(top.matmul / 1e12, 1)
        if top.matmul is None:
            report.notes.append("no matmul ceiling: CuPy has no cuBLAS here; % of ceiling counts memory alone")
