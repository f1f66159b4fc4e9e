"""``crucible bench serve``: load on one server, or on two in turns, point by point."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from crucible.bench.http_stream import Address
from crucible.bench.load import Bounds, LoadClient, Record, closed_loop, open_loop
from crucible.bench.points import Slo, Values, cached_percent, measure, occupancy
from crucible.bench.report import Column, Report, Row, Table
from crucible.bench.statistics import Summary, alternating, paired_ratios, summarize, verdict
from crucible.bench.surfaces import surface
from crucible.bench.workload import Workload
from crucible.errors import ConfigError

IDLE_S = 10.0
"""How long a server may take after a point until it holds no request."""

BUSY_PERCENT = 70.0
"""A client that computes for more of the time than this may be what was measured."""

OTHER_ID_LIMIT = 20_000
"""Prompt ids are drawn below this when the server does not tell its vocabulary; below every common one."""

LATENCY = tuple(
    Column(f"{name}_p{q}", f"{name.upper()} p{q} ms") for name in ("ttft", "itl", "tpot", "e2e") for q in (50, 90, 99)
)
SPEED = (
    Column("e2e_tok_s", "e2e tok/s", ",.1f", detail=True),
    Column("steady_tok_s", "steady tok/s", ",.1f"),
    Column("per_request", "per request", ",.1f"),
    Column("req_s", "req/s"),
    Column("batch", "batch"),
    Column("cached_percent", "cached %", ",.1f", steady=False),
    Column("tokens_a_read", "tokens/read"),
)
OUTCOME = (
    Column("completed", "completed", ",.0f", steady=False),
    Column("hang_ups", "hang-ups", ",.0f", steady=False),
    Column("errors", "errors", ",.0f", steady=False),
    Column("classes", "classes"),
    Column("short", "short", ",.0f", steady=False),
    Column("refused_p99", "429 p99 ms", steady=False),
    Column("good_req_s", "good req/s", steady=False),
    Column("good_percent", "good %", ",.1f", steady=False),
    Column("pages_left", "pages left", ",.0f", steady=False),
    Column("client_percent", "client %", ",.0f", steady=False),
)
RATIOS = (
    Column("point", "point"),
    Column("metric", "quantity"),
    Column("ratio", "A / B", ",.3f", detail=True),
    Column("verdict", "verdict"),
)
COMPARED = (
    ("e2e_tok_s", "e2e tok/s"),
    ("steady_tok_s", "steady tok/s"),
    ("ttft_p50", "TTFT p50"),
    ("itl_p50", "ITL p50"),
)


@dataclass(frozen=True)
class Server:
    """``label``: how the tables call it. ``api``: native or openai; ``model``: the name in an OpenAI body."""

    label: str
    url: str
    api: str = "native"
    model: str | None = None


@dataclass(frozen=True)
class Point:
    """So many clients in a closed loop, or a rate of arrivals a second."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def label(self) -> str:
        return f"{self.concurrency} clients" if self.rate is None else f"{self.rate:g} req/s"


@dataclass(frozen=True)
class ServePlan:
    """requests: bound of each point, or None for 4 a client (at least 8; open loop: what fits ``duration``).

    duration: seconds in which a point starts requests. warmup: uncounted requests before each point.
    """

    servers: Sequence[Server]
    points: Sequence[Point]
    workload: Workload
    trials: int = 3
    requests: int | None = None
    duration: float = 60.0
    timeout: float = 120.0
    warmup: int = 2
    max_open: int = 512
    slo: Slo = field(default_factory=Slo)
    seed: int = 1

    def bounds(self, point: Point) -> Bounds:
        if self.requests is not None:
            return Bounds(self.requests, self.duration)
        if point.rate is not None:
            return Bounds(max(1, round(2 * point.rate * self.duration)), self.duration)
        return Bounds(max(8, 4 * (point.concurrency or 1)), self.duration)


@dataclass
class Side:
    """A server while it is measured."""

    server: Server
    client: LoadClient
    workload: Workload
    max_batch: int | None
    trials: list[list[Values]]
    details: Counter[str] = field(default_factory=Counter)


def serve(plan: ServePlan, command: str, say: Callable[[str], None]) -> Report:
    """Runs the plan. Raises ConfigError when a server does not answer at all."""
    report = Report("serve", command, plan.trials)
    sides = asyncio.run(_run(plan, report, say))
    both = len(sides) > 1
    where = (Column("server", "server"),) if both else ()
    rows = [row(side, index, point) for index, point in enumerate(plan.points) for side in sides]
    point_column = (*where, Column("point", "load"))
    report.tables = [
        Table("Throughput", [*point_column, *SPEED], rows),
        Table("Latency", [*point_column, *LATENCY], rows),
        Table("Outcome", [*point_column, *OUTCOME], rows),
    ]
    if both:
        report.tables.append(Table("A against B, paired within each trial", RATIOS, ratios(plan.points, *sides)))
    for side in sides:
        report.notes += [f"{side.server.label}: {count} × {text}" for text, count in side.details.most_common(5)]
    busy = [cell.max for r in rows if isinstance(cell := r.get("client_percent"), Summary)]
    if busy and max(busy) > BUSY_PERCENT:
        report.notes.append(f"the load client computed up to {max(busy):.0f} % of the time: it may be the bottleneck")
    report.finish()
    return report


async def _run(plan: ServePlan, report: Report, say: Callable[[str], None]) -> list[Side]:
    sides = []
    for server in plan.servers:
        client = LoadClient(Address.parse(server.url), surface(server.api, server.model), timeout=plan.timeout)
        sides.append(await open_side(server, client, plan, report))
    try:
        for trial in range(plan.trials):
            for index in alternating(len(plan.points), trial):
                for turn in alternating(len(sides), trial + index):
                    side, point = sides[turn], plan.points[index]
                    say(f"trial {trial + 1}/{plan.trials}, {point.label}, {side.server.label}")
                    side.trials[index].append(await one_point(side, plan, point, plan.seed + 1000 * trial + index))
    finally:
        for side in sides:
            side.client.close()
    return sides


async def open_side(server: Server, client: LoadClient, plan: ServePlan, report: Report) -> Side:
    """Asks the server what it is; one that answers nothing is refused here rather than measured."""
    health = await client.get_json("/health")
    if health is None and server.api == "native":
        raise ConfigError(f"{server.url} does not answer /health as a Crucible server; start it, or use --api openai")
    named = health or {}
    known: dict[str, Any] = {
        name: named[name] for name in ("model", "quant", "device", "dtype", "version", "context") if name in named
    }
    report.settings[f"{server.label} url"] = server.url
    report.settings |= {f"{server.label} {name}": value for name, value in known.items()}
    vocabulary, max_batch = named.get("vocab_size"), named.get("max_batch")
    workload = plan.workload
    if not workload.id_limit:
        workload = replace(workload, id_limit=id_limit(vocabulary))
    workload = replace(workload, nonce=secrets.randbits(64))  # each server and run gets prompts that it has not seen
    first = await client.send(next(workload.jobs(plan.seed - 1)))
    if first.outcome in ("connect", "4xx"):
        raise ConfigError(f"{server.url}: {first.detail or first.outcome}")
    return Side(server, client, workload, max_batch if isinstance(max_batch, int) else None, [[] for _ in plan.points])


def id_limit(vocabulary: object) -> int:
    """Prompt ids lie below it. The topmost rows of a vocabulary may be padding or special tokens."""
    return vocabulary * 9 // 10 if isinstance(vocabulary, int) else OTHER_ID_LIMIT


async def one_point(side: Side, plan: ServePlan, point: Point, seed: int) -> Values:
    """One point once: warm-up, the load between two looks at the counters, and the way back to idle."""
    client, bounds = side.client, plan.bounds(point)
    if plan.warmup:
        jobs = side.workload.jobs(seed + 500_000)
        await closed_loop(client, jobs, min(plan.warmup, point.concurrency or 1), Bounds(plan.warmup, plan.duration))
    before = await settle(client)
    jobs, used = side.workload.jobs(seed), time.process_time()
    if point.rate is not None:
        records = await open_loop(client, jobs, point.rate, bounds, seed=seed, max_open=plan.max_open)
    else:
        records = await closed_loop(client, jobs, point.concurrency or 1, bounds)
    used = time.process_time() - used
    after = await settle(client)
    side.details.update(explain(record) for record in records if record.detail)
    streams = point.concurrency
    if streams is not None:
        streams = min(streams, bounds.requests, side.max_batch or streams)
    values = measure(records, plan.slo, streams, used)
    rate = values["e2e_tok_s"]
    values["per_request"] = rate / point.concurrency if rate is not None and point.concurrency else None
    values["batch"] = occupancy(before, after)
    values["cached_percent"] = cached_percent(before, after)
    values["pages_left"] = after.get("kv_pages_used") if after is not None else None
    return values


def explain(record: Record) -> str:
    return f"{record.outcome}: {record.detail}"


async def settle(client: LoadClient) -> dict[str, Any] | None:
    """/metrics once no request is live there, or after IDLE_S; ``None`` where it is not JSON."""
    end = time.monotonic() + IDLE_S
    while True:
        metrics = await client.get_json("/metrics")
        if metrics is None or time.monotonic() > end:
            return metrics
        if not any(metrics.get(name) for name in ("active_requests", "queued_requests")):
            return metrics
        await asyncio.sleep(0.05)


def row(side: Side, index: int, point: Point) -> Row:
    summary = summarize(side.trials[index])
    classes = [name.removeprefix("errors_") for name in summary if name.startswith("errors_")]
    counts = {name: sum(int(trial[f"errors_{name}"] or 0) for trial in side.trials[index]) for name in classes}
    listed = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    return {"server": side.server.label, "point": point.label, "classes": listed or "none", **summary}


def ratios(points: Sequence[Point], a: Side, b: Side) -> list[Row]:
    rows: list[Row] = []
    for index, point in enumerate(points):
        for key, title in COMPARED:
            values = [[trial.get(key) for trial in side.trials[index]] for side in (a, b)]
            ratio = paired_ratios(*values)
            if ratio is not None:
                rows.append({"point": point.label, "metric": title, "ratio": ratio, "verdict": verdict(ratio)})
    return rows
