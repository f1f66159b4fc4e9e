"""Load on a server: closed loop (so many clients, each waits for its answer) and open loop (arrivals that do not)."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from crucible.bench.http_stream import Address, Connection, Disconnected, EventParser, ProtocolError
from crucible.bench.surfaces import Job, Progress, Surface

OK, HANG_UP = "ok", "hang-up"
ERRORS = ("429", "4xx", "5xx", "connect", "disconnect", "timeout", "protocol", "stream")
"""Classes of failure. ``disconnect``: the server closed early; ``stream``: it reported an error inside the stream;
``connect``: no connection, or more than the limit of open ones."""

PAUSE_S = 0.05
"""What a client of the closed loop waits after a refusal, so that it does not burn its requests on a full queue."""

READ_LIMIT = 2**22


@dataclass(slots=True)
class Record:
    """One request. ``due``: when it was to be sent (its latencies count from there); all times in seconds.

    ``times[i]``: when the i-th read that had tokens came, with ``counts[i]`` token events in it.
    """

    job: Job
    due: float
    end: float = 0.0
    outcome: str = OK
    detail: str = ""
    tokens: int = 0
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    @property
    def ttft(self) -> float | None:
        return self.times[0] - self.due if self.times else None

    @property
    def gaps(self) -> list[float]:
        """Pauses between reads that had tokens."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    @property
    def token_gaps(self) -> list[float]:
        """The same a token: a pause that ended with k tokens counts as k pauses of a k-th."""
        events = sum(self.counts)
        scale = self.tokens / events if events else 1.0  # servers that put several tokens into an event
        gaps = []
        for gap, count in zip(self.gaps, self.counts[1:], strict=True):
            gaps += [gap / (count * scale)] * count
        return gaps

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first."""
        rest = sum(self.counts[1:])
        if not rest:
            return None
        return (self.times[-1] - self.times[0]) / (rest * self.tokens / sum(self.counts))


Watch = Callable[[Record], bool]
"""Called after each read that had tokens; True hangs up."""


@dataclass(frozen=True)
class Bounds:
    """A loop starts no request after so many requests or seconds; what is under way ends by its own timeout."""

    requests: int
    seconds: float


class LoadClient:
    """Sends jobs to one server over kept connections. ``timeout``: seconds for a whole request."""

    def __init__(self, address: Address, surface: Surface, *, timeout: float) -> None:
        self.address, self.surface, self.timeout = address, surface, timeout
        self._free: list[Connection] = []

    async def send(self, job: Job, due: float | None = None, watch: Watch | None = None) -> Record:
        """One request from its sending to its end; failures are the record's ``outcome``, never raised."""
        record = Record(job, time.perf_counter() if due is None else due)
        progress = Progress()
        try:
            async with asyncio.timeout(self.timeout):
                await self._exchange(record, progress, watch)
        except TimeoutError:
            record.outcome = "timeout"
        except (ProtocolError, msgspec.MsgspecError) as error:
            record.outcome, record.detail = "protocol", str(error)
        except Disconnected as error:
            record.outcome, record.detail = "disconnect", str(error)
        except OSError as error:
            record.outcome, record.detail = "connect", error.strerror or str(error)
        record.end = time.perf_counter()
        record.tokens = progress.events if progress.tokens is None else progress.tokens
        return record

    async def _exchange(self, record: Record, progress: Progress, watch: Watch | None) -> None:
        request = self.address.request("POST", self.surface.path, self.surface.body(record.job))
        parser, read, limit = EventParser(), self.surface.read, record.job.hang_up_after
        refusal = bytearray()

        def consume(data: bytes, now: float) -> bool:
            if connection.response.status != 200:
                refusal.extend(data[: 2**16 - len(refusal)])
                return False
            count = sum([read(progress, name, event) for name, event in parser.feed(data)])
            if not count:
                return False
            record.times.append(now)
            record.counts.append(count)
            stop = (limit is not None and progress.events >= limit) or (watch is not None and watch(record))
            if stop and not progress.done:
                record.outcome = HANG_UP
                return True
            return False

        while True:
            reused = bool(self._free)
            connection = self._free.pop() if reused else await Connection.open(self.address)
            try:
                response = await connection.exchange(request, consume)
                break
            except Disconnected:
                if not (reused and not connection.response.status):
                    raise
                # else the server had closed this kept connection: a new one tells
        if connection.reusable:
            self._free.append(connection)
        if response.status != 200:
            code = response.status
            record.outcome = "429" if code == 429 else "5xx" if code >= 500 else "4xx"
            record.detail = f"HTTP {code}: {refusal.decode(errors='replace')[:300]}"
        elif progress.error is not None:
            record.outcome, record.detail = "stream", progress.error
        elif record.outcome == OK and not progress.done:
            record.outcome, record.detail = "disconnect", "the stream ended without its last event"

    async def get_json(self, path: str) -> dict[str, Any] | None:
        """The JSON object at ``path``; ``None`` when there is none (other servers, other formats)."""
        data = bytearray()

        def consume(part: bytes, now: float) -> bool:
            data.extend(part)
            return len(data) > READ_LIMIT

        connection: Connection | None = None
        try:
            async with asyncio.timeout(min(self.timeout, 10)):
                connection = await Connection.open(self.address)
                headers = {"Accept": "application/json", "Connection": "close"}
                response = await connection.exchange(self.address.request("GET", path, headers=headers), consume)
            value = json.loads(data) if response.status == 200 else None
        except (OSError, TimeoutError, ValueError, RecursionError, ProtocolError, Disconnected):
            return None
        finally:
            if connection is not None:
                connection.close()
        return value if isinstance(value, dict) else None

    def close(self) -> None:
        for connection in self._free:
            connection.close()
        self._free.clear()


async def closed_loop(client: LoadClient, jobs: Iterator[Job], clients: int, bounds: Bounds) -> list[Record]:
    """``clients`` clients, each of which sends its next request when the last one has ended."""
    records: list[Record] = []
    stop = time.perf_counter() + bounds.seconds
    started = 0

    async def run() -> None:
        nonlocal started
        while started < bounds.requests and time.perf_counter() < stop:
            started += 1
            record = await client.send(next(jobs))
            records.append(record)
            if record.outcome not in (OK, HANG_UP):
                await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*[run() for _ in range(clients)])
    return records


async def open_loop(
    client: LoadClient, jobs: Iterator[Job], rate: float, bounds: Bounds, *, seed: int, max_open: int
) -> list[Record]:
    """Poisson arrivals, ``rate`` a second on average, whether or not the server keeps up.

    Latencies count from when a request was due. A request that would be the ``max_open + 1``-th in flight is not
    sent; it counts as failed (``connect``).
    """
    rng = random.Random(seed)
    records: list[Record] = []
    tasks: set[asyncio.Task[None]] = set()

    async def run(job: Job, due: float) -> None:
        records.append(await client.send(job, due))

    begin = due = time.perf_counter()
    for _ in range(bounds.requests):
        due += rng.expovariate(rate)
        if due - begin > bounds.seconds:
            break
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        job = next(jobs)
        if len(tasks) >= max_open:
            now = time.perf_counter()
            records.append(Record(job, due, now, "connect", f"{max_open} requests were already open"))
            continue
        task = asyncio.create_task(run(job, due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return records
