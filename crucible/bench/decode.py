"""``crucible bench decode``: the engine's step at each batch size, without HTTP, tokenizer or arrivals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any

from crucible.bench.inprocess import GREEDY, Driver, Say, count_bytes_to_host, describe, engine
from crucible.bench.report import Column, Report, Row, Table
from crucible.bench.statistics import alternating, median, paired_ratios, percentile, summarize, verdict
from crucible.config import EngineConfig, SamplingParams
from crucible.engine.core import EngineCore
from crucible.engine.settings import CPU_PREFILL_BUDGET, GPU_PREFILL_BUDGET, choose_device
from crucible.errors import EngineError

WARM_STEPS = 2

SAMPLED = SamplingParams(temperature=0.8, top_k=40)
WIDE = SamplingParams(temperature=0.8, top_k=500)
PARAMS = {"greedy": (GREEDY,), "sampled": (SAMPLED,), "wide": (WIDE,), "mixed": (GREEDY, SAMPLED, WIDE, GREEDY)}
"""How the requests of a batch choose their tokens, dealt to them in turn."""

BYTES = Column("bytes", "bytes to host", ",.0f")
COLUMNS = (
    Column("quant", "quant"),
    Column("batch", "batch"),
    Column("sampling", "sampling"),
    Column("tok_s", "tok/s", ",.1f", detail=True),
    Column("per_request", "per request", ",.1f"),
    Column("step_ms", "step ms", ",.3f"),
    Column("step_p99", "step p99 ms", ",.3f"),
    Column("ratio", "× smallest batch"),
    BYTES,
    Column("pages", "pages", ",.0f"),
    Column("wasted", "wasted slots", ",.0f"),
)
RATIO_COLUMNS = (
    Column("batch", "batch"),
    Column("sampling", "sampling"),
    Column("ratio", "A / B", ",.3f", detail=True),
    Column("verdict", "verdict"),
)


class Bench(Driver):
    """A Driver with what one engine's cells share. copied: bytes to the host so far; None on a CPU."""

    def __init__(self, core: EngineCore, seed: int, prompts: Sequence[int], steps: int) -> None:
        super().__init__(core, seed)
        self.prompts, self.steps = prompts, steps
        self.copied: Callable[[], int] | None = count_bytes_to_host(core)

    def measure(self, batch: int, sampling: str) -> dict[str, float | None]:
        """One cell once: prefill everything, then time the steps, in which every request decodes."""
        room = most_prefill_steps(batch, self.prompts, self.core.config) + WARM_STEPS + self.steps + 1
        params = PARAMS[sampling]
        ids = [
            self.submit(length, room, params[index % len(params)])
            for index, length in enumerate(lengths(batch, self.prompts))
        ]
        self.step_until(self.decoding(batch), "every request decoded")
        for _ in range(WARM_STEPS):
            self.step()
        times = []
        before = 0 if self.copied is None else self.copied()
        for _ in range(self.steps):
            seconds, output = self.step()
            if len(output.tokens) != batch:
                raise EngineError(f"a decode step of batch {batch} gave {len(output.tokens)} tokens")
            times.append(seconds)
        copied = None if self.copied is None else (self.copied() - before) / self.steps
        metrics = self.core.metrics()
        self.clear(ids)
        speed = batch * self.steps / sum(times)
        step_ms, p99 = median(times), percentile(times, 99)
        return {
            "tok_s": speed,
            "per_request": speed / batch,
            "step_ms": None if step_ms is None else 1000 * step_ms,
            "step_p99": None if p99 is None else 1000 * p99,
            "bytes": copied,
            "pages": metrics["kv_pages_used"],
            "wasted": metrics["wasted_slots"],
        }


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
    samplings: Sequence[str] = ("greedy",),
    **settings: Any,
) -> Report:
    """Every batch size and sampling (and with ``vs_quant`` both weight types) once a trial, in alternating order."""
    report = Report("decode", command, trials)
    quants = [quant] if vs_quant is None else [quant, vs_quant]
    lead = most_prefill_steps(max(batches), prompts, EngineConfig.from_environment(quant=quant, **settings))
    longest = max(prompts) + lead + WARM_STEPS + steps + 1
    cells = list(product(batches, samplings, range(len(quants))))
    results: list[list[dict[str, float | None]]] = [[] for _ in cells]
    with ExitStack() as stack:
        cores = [
            stack.enter_context(engine(model, say, quant=q, max_batch=max(batches), context=longest, **settings))
            for q in quants
        ]
        describe(cores[0], report)
        report.settings |= {"quant": " and ".join(quants), "steps": steps, "prompt_tokens": list(prompts)}
        report.settings["sampling"] = list(samplings)
        benches = [Bench(core, seed, prompts, steps) for core in cores]
        for trial in range(trials):
            for index in alternating(len(cells), trial):
                batch, sampling, which = cells[index]
                say(f"trial {trial + 1}/{trials}, batch {batch}, {sampling}")
                results[index].append(benches[which].measure(batch, sampling))
    speeds = {cell: [trial["tok_s"] for trial in result] for cell, result in zip(cells, results, strict=True)}
    rows: list[Row] = []
    for (batch, sampling, which), result in zip(cells, results, strict=True):
        ratio = paired_ratios(speeds[batch, sampling, which], speeds[min(batches), sampling, which])
        rows.append({"quant": quants[which], "batch": batch, "sampling": sampling, "ratio": ratio, **summarize(result)})
    columns = COLUMNS if any(row["bytes"] for row in rows) else [column for column in COLUMNS if column != BYTES]
    report.tables.append(Table("Decode", columns, rows))
    if vs_quant is not None:
        against: list[Row] = []
        for batch, sampling in product(batches, samplings):
            pair = paired_ratios(speeds[batch, sampling, 0], speeds[batch, sampling, 1])
            if pair is not None:
                against.append({"batch": batch, "sampling": sampling, "ratio": pair, "verdict": verdict(pair)})
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
