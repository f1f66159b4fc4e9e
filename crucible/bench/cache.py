"""``crucible bench cache``: what the KV cache saves: a cached step against computing the whole prefix anew."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from crucible.bench.inprocess import Driver, Say, describe, engine
from crucible.bench.report import Column, Report, Row, Table
from crucible.bench.statistics import alternating, paired_ratios, summarize

COLUMNS = (
    Column("length", "length"),
    Column("cached_ms", "cached ms/token", ",.3f"),
    Column("recompute_ms", "recompute ms/token", ",.3f"),
    Column("cached_tok_s", "cached tok/s", ",.1f"),
    Column("recompute_tok_s", "recompute tok/s", ",.1f"),
    Column("ratio", "recompute / cached", ",.2f", detail=True),
)


def cache(
    model: str | None,
    command: str,
    say: Say,
    *,
    lengths: Sequence[int],
    steps: int,
    trials: int,
    seed: int,
    **settings: Any,
) -> Report:
    """``steps`` tokens after a prompt of each length, both ways in each trial, in alternating order."""
    report = Report("cache", command, trials)
    longest = max(lengths) + steps + 1
    # One step a prefix, however long: the reference pays for its tokens and not for the engine's chunks.
    with engine(model, say, max_batch=1, context=longest, prefill_budget=longest, **settings) as core:
        describe(core, report)
        report.settings["steps"] = steps
        driver = Driver(core, seed)
        ways = (cached, recomputed)
        for way in ways:
            way(driver, min(lengths), 1)
        results: list[list[dict[str, float | None]]] = [[] for _ in lengths]
        for trial in range(trials):
            for index in alternating(len(lengths), trial):
                say(f"trial {trial + 1}/{trials}, length {lengths[index]}")
                seconds = [0.0, 0.0]
                for turn in alternating(len(ways), trial):
                    seconds[turn] = ways[turn](driver, lengths[index], steps)
                results[index].append(values(*seconds))
    rows: list[Row] = []
    for length, result in zip(lengths, results, strict=True):
        ratio = paired_ratios([t["recompute_ms"] for t in result], [t["cached_ms"] for t in result])
        rows.append({"length": length, "ratio": ratio, **summarize(result)})
    report.tables.append(Table("Cached decode against recomputing the prefix", COLUMNS, rows))
    report.finish()
    return report


def values(cached_s: float, recompute_s: float) -> dict[str, float | None]:
    return {
        "cached_ms": 1000 * cached_s,
        "recompute_ms": 1000 * recompute_s,
        "cached_tok_s": 1 / cached_s,
        "recompute_tok_s": 1 / recompute_s,
    }


def cached(driver: Driver, length: int, steps: int) -> float:
    """Seconds a token after a prompt of ``length`` tokens."""
    request = driver.submit(length, steps + 1)
    driver.step_until(driver.decoding(1), "the prompt was computed")
    seconds = sum(driver.step()[0] for _ in range(steps))
    driver.clear([request])
    return seconds / steps


def recomputed(driver: Driver, length: int, steps: int) -> float:
    """The same tokens' cost without a cache: each computes all that comes before it.

    Every prefix is of new random ids, so that a prefix cache has nothing to give.
    """
    begin = time.perf_counter()
    for step in range(steps):
        driver.submit(length + step + 1, 1)
        driver.step_until(lambda: not driver.core.has_work(), "the prefix was computed")
    return (time.perf_counter() - begin) / steps
