"""``crucible profile``: where a step's time goes, op by op, beside the step as it is served."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crucible.bench.inprocess import Say
from crucible.bench.report import Column, Report, Row, Table
from crucible.bench.statistics import median
from crucible.config.engine import PAGE_TOKENS
from crucible.errors import ConfigError
from crucible.model.direct import Direct, Part
from crucible.model.kv import kv_bytes_per_token
from crucible.model.timed_ops import OmittingOps, TimedOps, clock_of, op_labels

WARM_UP = 3
CHUNK = 1024
"""Tokens of a context that are computed at once, before anything is timed."""

OP_COLUMNS = (
    Column("op", "op"),
    Column("calls", "calls"),
    Column("us", "µs a step", ",.1f"),
    Column("share", "share %", ",.1f"),
    Column("call_us", "µs a call", ",.2f"),
    Column("mb", "MB read", ",.2f"),
    Column("gb_s", "GB/s", ",.0f"),
    Column("graph_us", "µs in the graph", ",.1f"),
)
STEP_COLUMNS = (Column("what", "time of"), Column("us", "µs", ",.1f"), Column("ratio", "× stages", ",.2f"))


@dataclass(frozen=True)
class Step:
    """A decode step of ``sequences`` rows behind ``warm`` tokens each, or their prompts of ``tokens`` tokens."""

    sequences: int
    tokens: int | None = None

    def __str__(self) -> str:
        return f"decode, batch {self.sequences}" if self.tokens is None else f"prefill {self.sequences}x{self.tokens}"

    @property
    def rows(self) -> int:
        return self.sequences * (self.tokens or 1)


def profile(
    model: Direct,
    command: str,
    say: Say,
    *,
    decode: Sequence[int],
    prefill: Sequence[tuple[int, int]],
    warm: int,
    steps: int,
    seed: int,
) -> Report:
    """Each decode batch, and each (prompts, tokens), ``steps`` times; medians over these."""
    report = Report("profile", command, steps)
    device = model.device
    report.settings |= {"device": "cpu" if device is None else device.name, "warm": warm, "steps": steps}
    for step in [*map(Step, decode), *(Step(*plan) for plan in prefill)]:
        say(str(step))
        one(model, report, step, warm, steps, np.random.default_rng(seed))
    report.finish()
    return report


def one(model: Direct, report: Report, step: Step, warm: int, steps: int, rng: np.random.Generator) -> None:
    batch, cache = prepare(model, step, warm, rng)
    clock, labels = clock_of(model.device), op_labels(model.weights)
    timed = TimedOps(model.ops, clock, labels)

    def eager() -> None:
        model.forward(batch, cache)

    for _ in range(WARM_UP):
        eager()
    times = [eager_times(model, eager)]
    graph = None if model.device is None else capture(model, eager)
    # The host queues ops and events more slowly than the device does them: replays before them keep it busy meanwhile.
    filler = 0 if graph is None else int(2 * times[0].submission_us / max(1.0, replay_us(model, graph, 3))) + 2
    passes = []
    for number in range(WARM_UP + steps):
        for _ in range(filler):
            model.device.replay(graph)
        model.forward(batch, cache, timed)
        found = timed.take()
        if number >= WARM_UP:
            passes.append(found)
            times.append(eager_times(model, eager))
    wall, submission = median([t.wall_us for t in times]) or 0.0, median([t.submission_us for t in times]) or 0.0
    rows = stages(passes, attention_bytes(model, step, warm))
    table = Table(f"{step}: ops", OP_COLUMNS, [*rows])
    total = sum(float(row["us"]) for row in rows)
    calls = sum(int(row["calls"]) for row in rows)
    whole: list[Row] = [
        {"what": f"stages, {calls} calls", "us": total, "ratio": 1.0},
        {"what": "eager step", "us": wall, "ratio": wall / total},
    ]
    if model.device is not None:
        empty = empty_us(clock, filler, lambda: model.device.replay(graph))
        whole.insert(1, {"what": "of these two events with nothing between", "us": calls * empty})
        whole.append({"what": "submission of the eager step", "us": submission})
    if graph is not None:
        replayed = replay_us(model, graph, steps)
        whole.append({"what": "graph-replayed step", "us": replayed, "ratio": replayed / total})
        for row in rows:
            row["graph_us"] = replayed - omitting(model, batch, cache, {str(row["op"])}, labels, steps)
        inside = sum(float(row["graph_us"]) for row in rows)
        whole.append({"what": "ops in the graph", "us": inside, "ratio": inside / total})
        report.notes.append(explain(step, total, calls * empty, replayed, inside))
    else:
        gap = 100 * (wall - total) / total
        report.notes.append(f"{step}: the eager step takes {gap:+.1f} % against its stages: Python between, and noise")
    report.tables += [table, Table(f"{step}: the step", STEP_COLUMNS, whole)]


def explain(step: Step, total: float, empty: float, replayed: float, inside: float) -> str:
    """Why stages and replay differ, in numbers."""
    net = total - empty
    return (
        f"{step}: the graph-replayed step takes {replayed:,.1f} µs, its stages {total:,.1f} µs "
        f"({100 * (total - replayed) / replayed:+.1f} %). {empty:,.1f} µs of these are the events' own; the other "
        f"{net - replayed:+,.1f} µs are launch gaps: between events each kernel starts only after the one before has "
        f"ended, in the graph it has started and asked for its weights by then. Left out of the graph one at a time "
        f"(column µs in the graph), the ops account for {100 * inside / replayed:.0f} % of it."
    )


@dataclass(frozen=True)
class EagerTimes:
    """Of one step: until it is done, and until the host has queued it."""

    wall_us: float
    submission_us: float


def eager_times(model: Direct, eager: Callable[[], None]) -> EagerTimes:
    begin = time.perf_counter()
    eager()
    queued = time.perf_counter()
    if model.device is not None:
        model.device.synchronize()
    return EagerTimes(1e6 * (time.perf_counter() - begin), 1e6 * (queued - begin))


def capture(model: Direct, eager: Callable[[], None]) -> Any:
    model.device.synchronize()
    return model.device.capture(eager)


def replay_us(model: Direct, graph: Any, steps: int) -> float:
    """Median device time of a replay, queued behind another one."""
    clock = clock_of(model.device)
    times = []
    for _ in range(steps):
        model.device.replay(graph)
        before = clock.mark()
        model.device.replay(graph)
        after = clock.mark()
        clock.wait()
        times.append(clock.microseconds(before, after))
    return median(times) or 0.0


def omitting(model: Direct, batch: Any, cache: Any, omitted: set[str], labels: dict[int, str], steps: int) -> float:
    """Device time of a replay of the step without these ops; that of the whole step where it cannot be captured."""
    ops = OmittingOps(model.ops, omitted, labels)
    graph = capture(model, lambda: model.forward(batch, cache, ops))
    return replay_us(model, graph, steps) if graph is not None else float("nan")


def empty_us(clock: Any, filler: int, fill: Callable[[], None]) -> float:
    """What two events with nothing between them measure on a busy device."""
    for _ in range(filler):
        fill()
    marks = [(clock.mark(), clock.mark()) for _ in range(32)]
    clock.wait()
    return median([clock.microseconds(first, last) for first, last in marks]) or 0.0


def prepare(model: Direct, step: Step, warm: int, rng: np.random.Generator) -> tuple[Any, Any]:
    """The step's batch, and a cache in which what lies before it has been computed. Raises ConfigError."""
    before = warm if step.tokens is None else 0
    length = before + (step.tokens or 1)
    if length > model.config.context_length:
        raise ConfigError(f"{step}: {length} tokens are more than the model's context of {model.config.context_length}")
    pages = -(-length // PAGE_TOKENS)
    numbers = np.arange(step.sequences * pages, dtype=np.int32).reshape(step.sequences, pages)
    cache = model.ops.allocate_cache(step.sequences * pages)
    ids = rng.integers(0, model.config.token_count, (step.sequences, length)).astype(np.int32)
    nothing = np.zeros(0, np.int32)
    for row, own in zip(ids, numbers, strict=True):
        for start in range(0, before, CHUNK):
            part = Part(row[start : min(start + CHUNK, before)], start, own)
            model.forward(model.batch([part], nothing), cache)
    parts = [Part(row[before:], before, own) for row, own in zip(ids, numbers, strict=True)]
    last = np.cumsum([len(part.ids) for part in parts]) - 1
    return model.batch(parts, last.astype(np.int32)), cache


def attention_bytes(model: Direct, step: Step, warm: int) -> int:
    """K and V that a decode step's attention reads in one layer; 0 for prompts, which share what they read."""
    if step.tokens is not None:
        return 0
    itemsize = 4 if model.device is None else np.dtype(model.ops.activation).itemsize
    return step.sequences * (warm + 1) * kv_bytes_per_token(model.config, itemsize) // model.config.num_layers


def stages(passes: Sequence[Sequence[tuple[str, int, float]]], attention: int) -> list[dict[str, Any]]:
    """A row for each op in the order in which the ops come first: medians over the passes of its sum over a step."""
    names = list(dict.fromkeys(label for label, _, _ in passes[0]))
    found: list[dict[str, Any]] = []
    for name in names:
        calls = sum(label == name for label, _, _ in passes[0])
        size = sum(size for label, size, _ in passes[0] if label == name) or (attention * calls * (name == "attention"))
        us = median([sum(us for label, _, us in one if label == name) for one in passes]) or 0.0
        found.append({"op": name, "calls": calls, "us": us, "call_us": us / calls, "mb": size / 1e6 if size else None})
        found[-1]["gb_s"] = size / us / 1e3 if size and us else None
    total = sum(row["us"] for row in found)
    for row in found:
        row["share"] = 100 * row["us"] / total if total else 0.0
    return found
