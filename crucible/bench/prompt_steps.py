"""What a prompt step consists of on a GPU: queueing, computing, and what a graph saves. Part of bench prefill."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from crucible.bench.inprocess import Say
from crucible.bench.report import Column, Row, Table
from crucible.bench.statistics import alternating, summarize
from crucible.config import SamplingParams
from crucible.engine.core import EngineCore
from crucible.engine.cuda_runner import CudaRunner
from crucible.engine.request import Request
from crucible.engine.scheduler import Plan
from crucible.model.direct import Direct, Part
from crucible.model.timed_ops import clock_of
from crucible.native.batch import pages_for

REPEATS = 5
"""Steps a trial; the fastest counts."""
WARM_UP = 3
"""Steps of each way before any is timed: a graph is captured once its shape comes again."""

STEP_COLUMNS = (
    Column("tokens", "tokens"),
    Column("requests", "requests"),
    Column("way", "way"),
    Column("step_us", "step µs", ",.1f", detail=True),
    Column("submit_us", "submission µs", ",.1f"),
    Column("tok_s", "tok/s", ",.0f"),
)

Values = dict[str, float | None]


def prompt_steps(core: EngineCore, say: Say, lengths: Sequence[int], requests: int, trials: int, seed: int) -> Table:
    """One step that computes ``requests`` whole prompts, for each length that fits in a step. The engine is idle.

    engine: a runner's launch and collect, with graphs of prompt steps and without. forward, eager: the forward pass
    alone, until the device is done. forward, replay: the device time of that pass captured.
    """
    loaded: Any = core.runner
    info = core.engine_info()
    runners = {
        name: CudaRunner(
            loaded.weights,
            loaded.ops,
            loaded.cache,
            device=loaded.device,
            max_rows=loaded.batch.max_rows,
            max_sequences=loaded.batch.max_sequences,
            context=info.context,
            token_count=info.token_count,
            graphs=False,
            prefill_graphs=name == "graph",
        )
        for name in ("graph", "eager")
    }
    rng = np.random.default_rng(seed)
    table = Table("Prompt steps", STEP_COLUMNS)
    for length in lengths:
        if length * requests > loaded.batch.max_rows or length > info.context:
            continue
        say(f"steps of {requests} prompts of {length} tokens")
        ids = rng.integers(0, info.token_count, (requests, length)).astype(np.int32)
        pages = np.arange(requests * pages_for(length + 1), dtype=np.int32).reshape(requests, -1)
        ways = make_ways(runners, ids, pages)
        for way in ways.values():
            for _ in range(WARM_UP):
                way()
        names = list(ways)
        results: list[list[Values]] = [[] for _ in names]
        for trial in range(trials):
            for index in alternating(len(names), trial):
                best = min((ways[names[index]]() for _ in range(REPEATS)), key=lambda found: found["step_us"] or 0.0)
                results[index].append({**best, "tok_s": 1e6 * length * requests / (best["step_us"] or 1.0)})
        for name, result in zip(names, results, strict=True):
            row: Row = {"tokens": length, "requests": requests, "way": name, **summarize(result)}
            table.rows.append(row)
    return table


def make_ways(runners: dict[str, CudaRunner], ids: Any, pages: Any) -> dict[str, Callable[[], Values]]:
    """What measures one step each way."""
    runner = runners["eager"]
    model = Direct(runner.weights.config, runner.ops, runner.weights, head_rows=len(ids), device=runner.device)
    parts = [Part(row, 0, own) for row, own in zip(ids, pages, strict=True)]
    batch = model.batch(parts, (np.arange(1, len(ids) + 1) * ids.shape[1] - 1).astype(np.int32))

    def forward() -> None:
        model.forward(batch, runner.cache)

    ways: dict[str, Callable[[], Values]] = {
        f"engine, {name}": partial(engine_step, own, ids, pages) for name, own in runners.items()
    }
    ways["forward, eager"] = partial(eager, runner.device, forward)
    forward()
    runner.device.synchronize()
    captured = runner.device.capture(forward)
    if captured is not None:
        ways["forward, replay"] = partial(replay, runner.device, captured)
    return ways


def engine_step(runner: CudaRunner, ids: Any, pages: Any) -> Values:
    requests = []
    for row, own in zip(ids, pages, strict=True):
        request = Request("bench", row, 1, SamplingParams(max_tokens=1))
        request.assign_pages(own.tolist())
        requests.append(request)
    plan = Plan([], requests, [len(row) for row in ids])
    begin = time.perf_counter()
    runner.launch(plan)
    queued = time.perf_counter()
    runner.collect()
    return {"step_us": 1e6 * (time.perf_counter() - begin), "submit_us": 1e6 * (queued - begin)}


def eager(device: Any, forward: Callable[[], None]) -> Values:
    begin = time.perf_counter()
    forward()
    queued = time.perf_counter()
    device.synchronize()
    return {"step_us": 1e6 * (time.perf_counter() - begin), "submit_us": 1e6 * (queued - begin)}


def replay(device: Any, captured: Any) -> Values:
    """Device time of a replay behind another, and the host's time to queue one."""
    clock = clock_of(device)
    device.replay(captured)
    before = clock.mark()
    begin = time.perf_counter()
    device.replay(captured)
    queued = time.perf_counter()
    after = clock.mark()
    clock.wait()
    return {"step_us": clock.microseconds(before, after), "submit_us": 1e6 * (queued - begin)}
