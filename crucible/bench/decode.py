"""``crucible bench decode``: the engine's step at each batch size, without HTTP, tokenizer or arrivals."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from crucible.bench.inprocess import Driver, Say, describe, engine
from crucible.bench.report import Column, Report, Row, Table
from crucible.bench.statistics import alternating, median, paired_ratios, percentile, summarize, verdict
from crucible.config import EngineConfig
from crucible.engine.core import EngineCore
from crucible.engine.settings import CPU_PREFILL_BUDGET, GPU_PREFILL_BUDGET, choose_device
from crucible.errors import EngineError

WARM_STEPS = 2

COLUMNS = (
    Column("quant", "quant"),
    Column("batch", "batch"),
    Column("tok_s", "tok/s", ",.1f", detail=True),
    Column("per_request", "per request", ",.1f"),
    Column("step_ms", "step ms", ",.3f"),
    Column("step_p99", "step p99 ms", ",.3f"),
    Column("ratio", "× smallest batch"),
    Column("pages", "pages", ",.0f"),
    Column("wasted", "wasted slots", ",.0f"),
)
RATIO_COLUMNS = (Column("batch", "batch"), Column("ratio", "A / B", ",.3f", detail=True), Column("verdict", "verdict"))


def decode(
    model: str | None,
    command: str,
    say: Say,
    *,
    quant: str,
    vs_quant: str | None = None,
    batches: Sequence[int],
    prompts: Sequence[int],
    steps: int,
    trials: int,
    seed: int,
    **settings: Any,
) -> Report:
    """Every batch size (and with ``vs_quant`` both weight types) once a trial, in alternating order."""
    report = Report("decode", command, trials)
    quants = [quant] if vs_quant is None else [quant, vs_quant]
    lead = most_prefill_steps(max(batches), prompts, EngineConfig.from_environment(quant=quant, **settings))
    longest = max(prompts) + lead + WARM_STEPS + steps + 1
    with ExitStack() as stack:
        cores = [
            stack.enter_context(engine(model, say, quant=q, max_batch=max(batches), context=longest, **settings))
            for q in quants
        ]
        describe(cores[0], report)
        report.settings |= {"quant": " and ".join(quants), "steps": steps, "prompt_tokens": list(prompts)}
        cells = [(core, batch) for batch in batches for core in cores]
        results: list[list[dict[str, float | None]]] = [[] for _ in cells]
        drivers = {id(core): Driver(core, seed) for core in cores}
        for trial in range(trials):
            for index in alternating(len(cells), trial):
                core, batch = cells[index]
                say(f"trial {trial + 1}/{trials}, batch {batch}")
                results[index].append(one(core, drivers[id(core)], batch, prompts, steps))
    speeds = [[trial["tok_s"] for trial in result] for result in results]
    rows: list[Row] = []
    smallest = min(range(len(batches)), key=lambda i: batches[i])
    for index, result in enumerate(results):
        q = index % len(quants)
        ratio = paired_ratios(speeds[index], speeds[smallest * len(quants) + q])
        rows.append({"quant": quants[q], "batch": batches[index // len(quants)], "ratio": ratio, **summarize(result)})
    report.tables.append(Table("Decode", COLUMNS, rows))
    if vs_quant is not None:
        pairs = [paired_ratios(speeds[2 * i], speeds[2 * i + 1]) for i in range(len(batches))]
        against: list[Row] = [
            {"batch": batch, "ratio": pair, "verdict": verdict(pair)}
            for batch, pair in zip(batches, pairs, strict=True)
            if pair is not None
        ]
        report.tables.append(Table(f"A = {quant}, B = {vs_quant}: tok/s, paired", RATIO_COLUMNS, against))
    report.finish()
    return report


def lengths(batch: int, prompts: Sequence[int]) -> list[int]:
    """The prompt lengths of a batch: ``prompts``, round and round."""
    return [prompts[i % len(prompts)] for i in range(batch)]


def most_prefill_steps(batch: int, prompts: Sequence[int], config: EngineConfig) -> int:
    """Steps until the last prompt is computed, if no two share one: what the first may generate meanwhile."""
    default = GPU_PREFILL_BUDGET if choose_device(config.device) == "cuda" else CPU_PREFILL_BUDGET
    budget = 1 if config.prefill == "serial" else config.prefill_budget or default
    chunk = min(budget, config.prefill_chunk_tokens or budget)
    return sum(-(-length // chunk) for length in lengths(batch, prompts))


def one(core: EngineCore, driver: Driver, batch: int, prompts: Sequence[int], steps: int) -> dict[str, float | None]:
    """One batch size once: prefill everything, then time ``steps`` steps in which every request decodes."""
    room = most_prefill_steps(batch, prompts, core.config) + WARM_STEPS + steps + 1
    ids = [driver.submit(length, room) for length in lengths(batch, prompts)]
    driver.step_until(driver.decoding(batch), "every request decoded")
    for _ in range(WARM_STEPS):
        driver.step()
    times = []
    for _ in range(steps):
        seconds, output = driver.step()
        if len(output.tokens) != batch:
            raise EngineError(f"a decode step of batch {batch} gave {len(output.tokens)} tokens")
        times.append(seconds)
    metrics = core.metrics()
    driver.clear(ids)
    speed = batch * steps / sum(times)
    step_ms, p99 = median(times), percentile(times, 99)
    return {
        "tok_s": speed,
        "per_request": speed / batch,
        "step_ms": None if step_ms is None else 1000 * step_ms,
        "step_p99": None if p99 is None else 1000 * p99,
        "pages": metrics["kv_pages_used"],
        "wasted": metrics["wasted_slots"],
    }
