"""``crucible bench stall``: what streams that are under way feel when a prompt arrives, in the engine or over HTTP."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from crucible.bench.http_stream import Address
from crucible.bench.inprocess import Driver, Say, describe, engine
from crucible.bench.load import HANG_UP, OK, LoadClient, Record
from crucible.bench.report import Column, Report, Row, Table
from crucible.bench.serve import id_limit
from crucible.bench.statistics import alternating, median, summarize
from crucible.bench.surfaces import Job, surface
from crucible.bench.workload import Lengths, Workload
from crucible.errors import ConfigError, EngineError

STREAM_PROMPT = 32
BEFORE, AFTER = 24, 8
"""Tokens of each stream between its own admission and the arrival, and after the arrival's first token."""

SKIPPED = 4
"""Gaps after the last stream's admission that may still belong to it."""

ONE = Lengths.parse("1")

COLUMNS = (
    Column("where", "where"),
    Column("streams", "streams"),
    Column("prompt", "arriving prompt"),
    Column("median_ms", "median gap ms", ",.3f"),
    Column("worst_ms", "worst gap ms", ",.2f", detail=True),
    Column("stall", "worst / median", ",.1f"),
    Column("ttft_ms", "TTFT ms"),
)

Cell = tuple[int, int]
Results = list[list[dict[str, float | None]]]


def stall(
    model: str | None,
    command: str,
    say: Say,
    *,
    streams: Sequence[int],
    prompts: Sequence[int],
    trials: int,
    seed: int,
    url: str | None = None,
    api: str = "native",
    api_model: str | None = None,
    timeout: float = 120.0,
    **settings: Any,
) -> Report:
    """Every number of streams × length of the arriving prompt once a trial; over HTTP when ``url`` is given."""
    report = Report("stall", command, trials)
    cells = [(count, prompt) for count in streams for prompt in prompts]
    if url is None:
        where, results = "in-process", in_process(model, say, report, cells, trials, seed, settings)
    else:
        client = LoadClient(Address.parse(url), surface(api, api_model), timeout=timeout)
        report.settings["url"] = url
        where, results = "HTTP", asyncio.run(over_http(client, say, report, cells, trials, seed))
    rows: list[Row] = [
        {"where": where, "streams": count, "prompt": prompt, **summarize(result)}
        for (count, prompt), result in zip(cells, results, strict=True)
    ]
    report.tables.append(Table("What established streams feel when a prompt arrives", COLUMNS, rows))
    report.finish()
    return report


def figures(before: Sequence[float], after: Sequence[float], ttft: float) -> dict[str, float | None]:
    """From gaps in seconds: those without and those with the arrival."""
    middle = median(before)
    if middle is None or not after:
        raise EngineError("the streams ended before the prompt was answered; a larger context is needed")
    worst = max(after)
    stalled = worst / middle if middle else None
    return {"median_ms": 1000 * middle, "worst_ms": 1000 * worst, "stall": stalled, "ttft_ms": 1000 * ttft}


def in_process(
    model: str | None, say: Say, report: Report, cells: Sequence[Cell], trials: int, seed: int, settings: dict[str, Any]
) -> Results:
    most, longest = max(count for count, _ in cells), max(prompt for _, prompt in cells)
    # Streams go on while the prompt is computed: at the smallest sensible chunk, a step for each 16 of its tokens.
    room = most + SKIPPED + BEFORE + longest // 16 + AFTER + 8
    context = max(longest + 1, STREAM_PROMPT + room)
    with engine(model, say, max_batch=most + 1, context=context, **settings) as core:
        describe(core, report)
        driver = Driver(core, seed)
        results: Results = [[] for _ in cells]
        arrive(driver, *cells[0], room)
        for trial in range(trials):
            for index in alternating(len(cells), trial):
                count, prompt = cells[index]
                say(f"trial {trial + 1}/{trials}, {count} streams, prompt {prompt}")
                results[index].append(arrive(driver, count, prompt, room))
    return results


def arrive(driver: Driver, streams: int, prompt: int, room: int) -> dict[str, float | None]:
    """One arrival in the engine; a gap is the time between a stream's tokens as ``step`` hands them out."""
    times: dict[str, list[float]] = {driver.submit(STREAM_PROMPT, room): [] for _ in range(streams)}
    ids = list(times)
    driver.step_until(driver.decoding(streams), "every stream decoded")
    arrival: str | None = None
    submitted = first = 0.0
    after = 0
    while after < AFTER:
        if arrival is None and all(len(seen) >= SKIPPED + BEFORE for seen in times.values()):
            submitted = time.perf_counter()
            arrival = driver.submit(prompt, 1)
        _, output = driver.step()
        now = time.perf_counter()
        for event in output.tokens:
            if event.request_id == arrival:
                first = now - submitted
            else:
                times[event.request_id].append(now)
        after += bool(first)
        if any(done.request_id in times for done in output.finished):
            raise EngineError("a stream ended before the prompt was answered; a larger context is needed")
    driver.clear(ids)
    return figures(*split(list(times.values()), submitted), first)


def split(streams: Sequence[Sequence[float]], arrival: float) -> tuple[list[float], list[float]]:
    """The gaps of all streams that ended before ``arrival`` (without the first few), and those that ended after it."""
    before, after = [], []
    for times in streams:
        for index, (begin, end) in enumerate(pairwise(times)):
            if end > arrival:
                after.append(end - begin)
            elif index >= SKIPPED:
                before.append(end - begin)
    return before, after


async def over_http(
    client: LoadClient, say: Say, report: Report, cells: Sequence[Cell], trials: int, seed: int
) -> Results:
    health = await client.get_json("/health") or {}
    report.settings |= {name: health[name] for name in ("model", "quant", "device", "version") if name in health}
    context, vocabulary, max_batch = (health.get(name) for name in ("context", "vocab_size", "max_batch"))
    most = max(count for count, _ in cells)
    if isinstance(max_batch, int) and most >= max_batch:
        raise ConfigError(
            f"{most} streams and an arrival need a server of max_batch {most + 1}, this one has {max_batch}"
        )
    room = 1024 if not isinstance(context, int) else min(1024, context - STREAM_PROMPT)
    workload = Workload(ONE, ONE, id_limit(vocabulary), nonce=secrets.randbits(64))  # unknown to its prefix cache
    results: Results = [[] for _ in cells]
    try:
        for trial in range(trials):
            for index in alternating(len(cells), trial):
                count, prompt = cells[index]
                say(f"trial {trial + 1}/{trials}, {count} streams, prompt {prompt}")
                prompts = replace(workload, prompt=Lengths.parse(str(STREAM_PROMPT))).jobs(seed + 1000 * trial + index)
                jobs = [replace(next(prompts), max_tokens=room) for _ in range(count)]
                arriving = next(
                    replace(workload, prompt=Lengths.parse(str(prompt))).jobs(seed - 1000 * trial - index - 1)
                )
                results[index].append(await arrive_over_http(client, jobs, arriving))
    finally:
        client.close()
    return results


async def arrive_over_http(client: LoadClient, jobs: Sequence[Job], arriving: Job) -> dict[str, float | None]:
    """One arrival at a server. The streams hang up when they have seen enough. Raises EngineError when one fails."""
    established: set[int] = set()
    ready = asyncio.Event()
    after: dict[int, int] = {}
    answered = False

    def watch(record: Record) -> bool:
        key = id(record)
        if len(record.times) >= SKIPPED + BEFORE:
            established.add(key)
            if len(established) == len(jobs):
                ready.set()
        after[key] = after.get(key, 0) + 1 if answered else 0
        return after[key] >= AFTER

    tasks = [asyncio.create_task(client.send(job, watch=watch)) for job in jobs]
    waiter = asyncio.create_task(ready.wait())
    await asyncio.wait([*tasks, waiter], return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    arrival: Record | None = None
    if ready.is_set():
        arrival = await client.send(arriving)
        answered = True
    else:
        for task in tasks:
            task.cancel()
    records = [r for r in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(r, Record)]
    for record in [*records, *([] if arrival is None else [arrival])]:
        if record.outcome not in (OK, HANG_UP):
            raise EngineError(f"a stream failed ({record.outcome}): {record.detail}")
    if arrival is None or arrival.ttft is None or any(record.outcome == OK for record in records):
        raise EngineError("a stream ended before the prompt was answered; the server's context is too small for this")
    return figures(*split([record.times for record in records], arrival.due), arrival.ttft)
