"""``crucible bench prefill``: prompt tokens a second until the first generated token, alone or several at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from crucible.bench.inprocess import Driver, Say, describe, engine
from crucible.bench.report import Column, Report, Row, Table
from crucible.bench.statistics import alternating, summarize

COLUMNS = (
    Column("tokens", "tokens"),
    Column("requests", "requests"),
    Column("tok_s", "tok/s", ",.1f", detail=True),
    Column("ttft_ms", "first token ms"),
    Column("all_ms", "all first tokens ms"),
    Column("steps", "steps", ",.0f"),
)


def prefill(
    model: str | None,
    command: str,
    say: Say,
    *,
    lengths: Sequence[int],
    requests: int,
    trials: int,
    seed: int,
    **settings: Any,
) -> Report:
    """``requests`` prompts of each length at once, every length once a trial."""
    report = Report("prefill", command, trials)
    with engine(model, say, max_batch=requests, context=max(lengths) + 1, **settings) as core:
        describe(core, report)
        driver = Driver(core, seed)
        one(driver, min(lengths), requests)  # the first run of anything is slow
        results: list[list[dict[str, float | None]]] = [[] for _ in lengths]
        for trial in range(trials):
            for index in alternating(len(lengths), trial):
                say(f"trial {trial + 1}/{trials}, {lengths[index]} tokens")
                results[index].append(one(driver, lengths[index], requests))
        rows: list[Row] = [
            {"tokens": length, "requests": requests, **summarize(result)}
            for length, result in zip(lengths, results, strict=True)
        ]
        if core.config.device == "cuda":
            from crucible.bench.prompt_steps import prompt_steps

            report.tables.append(prompt_steps(core, say, lengths, requests, trials, seed))
    report.tables.insert(0, Table("Prefill", COLUMNS, rows))
    report.finish()
    return report


def one(driver: Driver, tokens: int, requests: int) -> dict[str, float | None]:
    """From submission until each request has its one token."""
    begin = time.perf_counter()
    for _ in range(requests):
        driver.submit(tokens, 1)
    first, steps, left = 0.0, 0, requests
    while left:
        _, output = driver.step()
        steps += 1
        left -= len(output.finished)
        if output.tokens and not first:
            first = time.perf_counter() - begin
    seconds = time.perf_counter() - begin
    return {
        "tok_s": tokens * requests / seconds,
        "ttft_ms": 1000 * first,
        "all_ms": 1000 * seconds,
        "steps": steps,
    }
