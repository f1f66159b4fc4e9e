"""``crucible bench scheduler``: microseconds a step that are not the model's: plan, fill and commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from crucible.bench.inprocess import Driver
from crucible.bench.report import Column, Report, Row, Table
from crucible.bench.statistics import alternating, median, percentile, summarize
from crucible.config import EngineConfig, ModelConfig
from crucible.config.engine import PAGE_TOKENS
from crucible.config.model import Biases, NoPosition, Norm
from crucible.engine.batch import Batch
from crucible.engine.core import EngineCore
from crucible.engine.scheduler import Plan

PROMPT = 128
COLUMNS = (
    Column("batch", "batch"),
    Column("plan", "plan µs"),
    Column("fill", "fill µs"),
    Column("commit", "commit µs"),
    Column("total", "plan + fill + commit µs", ",.2f", detail=True),
    Column("total_p99", "p99 µs"),
    Column("step", "engine step µs"),
)


class NoModel:
    """A runner that fills its batch and then knows every token to be 1."""

    def __init__(self, max_rows: int, max_sequences: int, max_pages: int) -> None:
        self.batch = Batch(max_rows, max_sequences, max_pages)
        self._tokens = np.ones(max_sequences, np.int32)

    def launch(self, plan: Plan) -> None:
        self.batch.fill(plan.decode, plan.prefill, plan.counts)

    def collect(self) -> NDArray[np.int32]:
        return self._tokens[: len(self.batch.logit_rows)]


def scheduler(
    command: str, say: Callable[[str], None], *, batches: Sequence[int], steps: int, trials: int, seed: int
) -> Report:
    """Each batch size in steady decode, once a trial."""
    report = Report("scheduler", command, trials)
    report.settings |= {"steps": steps, "prompt_tokens": PROMPT, "model": "none: a runner that computes nothing"}
    results: list[list[dict[str, float | None]]] = [[] for _ in batches]
    one(batches[0], 10, seed)
    for trial in range(trials):
        for index in alternating(len(batches), trial):
            say(f"trial {trial + 1}/{trials}, batch {batches[index]}")
            results[index].append(one(batches[index], steps, seed))
    rows: list[Row] = [{"batch": batch, **summarize(result)} for batch, result in zip(batches, results, strict=True)]
    report.tables.append(Table("Scheduling without a model", COLUMNS, rows))
    report.finish()
    return report


def one(batch: int, steps: int, seed: int) -> dict[str, float | None]:
    """``steps`` steps taken apart, then as many whole ones."""
    core, runner = make_core(batch, PROMPT + 2 * steps + batch + 16)
    driver = Driver(core, seed)
    ids = [driver.submit(PROMPT, 2 * steps + batch + 8) for _ in range(batch)]
    driver.step_until(driver.decoding(batch), "every request decoded")
    parts = np.empty((steps, 4))
    scheduler, clock = core.scheduler, time.perf_counter
    for row in parts:
        row[0] = clock()
        plan = scheduler.plan()
        row[1] = clock()
        runner.launch(plan)
        row[2] = clock()
        scheduler.commit(plan, runner.collect())
        row[3] = clock()
    micros = np.diff(parts, axis=1) * 1e6
    total = micros.sum(axis=1).tolist()
    whole = [1e6 * driver.step()[0] for _ in range(steps)]
    driver.clear(ids)
    names = ("plan", "fill", "commit")
    found: dict[str, float | None] = {name: float(np.median(micros[:, i])) for i, name in enumerate(names)}
    return found | {"total": median(total), "total_p99": percentile(total, 99), "step": median(whole)}


def make_core(batch: int, context: int) -> tuple[EngineCore, NoModel]:
    """An engine around ``NoModel``."""
    pages = -(-context // PAGE_TOKENS)
    budget = PROMPT * batch  # all prompts in one step
    runner = NoModel(batch + budget, batch, pages)
    config = EngineConfig(
        device="cpu", max_batch=batch, max_queue=0, context=context, kv_pages=batch * pages, prefill_budget=budget
    )
    return EngineCore(config, no_model_config(context), runner), runner


def no_model_config(context: int) -> ModelConfig:
    return ModelConfig(
        crucible_format=1,
        vocab_size=1024,
        token_count=1024,
        context_length=context,
        hidden_size=4,
        intermediate_size=4,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=4,
        norm=Norm(type="rmsnorm", placement="pre", eps=1e-5, bias=False),
        position=NoPosition(),
        activation="swiglu",
        biases=Biases(qkv=False, attention_output=False, mlp=False),
        tied_embeddings=True,
        bos_token_id=None,
        eos_token_ids=[0],
    )
