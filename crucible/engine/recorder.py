"""Recorder: what requests feel, as the engine process sees it, in histograms.

It stands where all http workers' requests meet, so their number does not change the answer. Times count from the
arrival of a request in this process to the moment its events are handed to the worker's socket: tokenization and HTTP
come on top.
"""

from __future__ import annotations

from crucible.engine.connection import Connection
from crucible.engine.histogram import Histogram
from crucible.engine.messages import Finished, HistogramValues

LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
"""Bounds of times of whole requests."""

GAP_S = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Bounds of times between tokens."""

ROWS = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0, 384.0, 512.0)
"""Bounds of batch sizes."""


class LiveRequest:
    """A request that ``connection`` waits for. submitted: when it came; published: when a token of it last left."""

    __slots__ = ("connection", "published", "submitted")

    def __init__(self, connection: Connection, submitted: float) -> None:
        self.connection = connection
        self.submitted = submitted
        self.published: float | None = None


class Recorder:
    """Not thread-safe. All times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self.first_token = Histogram(LATENCY_S)
        self.gap = Histogram(GAP_S)
        self.whole = Histogram(LATENCY_S)
        self.queue = Histogram(LATENCY_S)
        self.batch = Histogram(ROWS)
        self._queued: dict[str, float] = {}  # those that no step has admitted yet, oldest first
        self._gaps: dict[float, int] = {}  # of the step being published: its streams have few different ones

    def submitted(self, request_id: str, request: LiveRequest) -> None:
        self._queued[request_id] = request.submitted

    def withdrawn(self, request_id: str) -> None:
        self._queued.pop(request_id, None)

    @property
    def queued(self) -> int:
        """Requests not known to be admitted yet."""
        return len(self._queued)

    def admitted(self, waiting: int, step_started: float) -> None:
        """After a step that left ``waiting`` requests in the queue. Admission is first come, first served."""
        for request_id in list(self._queued)[: max(0, len(self._queued) - waiting)]:
            self.queue.observe(max(0.0, step_started - self._queued.pop(request_id)))

    def token(self, request: LiveRequest, now: float) -> None:
        """A token of ``request`` is published."""
        if request.published is None:
            self.first_token.observe(now - request.submitted)
        else:
            gap = now - request.published
            self._gaps[gap] = self._gaps.get(gap, 0) + 1
        request.published = now

    def finished(self, request: LiveRequest, end: Finished, now: float) -> None:
        """The last event of ``request`` is published."""
        self._queued.pop(end.request_id, None)
        if end.finish_reason in ("stop", "length"):
            self.whole.observe(now - request.submitted)

    def step(self, rows: int) -> None:
        """A step is published in which ``rows`` requests got a token."""
        if rows:
            self.batch.observe(rows)
        for gap, count in self._gaps.items():
            self.gap.observe(gap, count)
        self._gaps.clear()

    def values(self) -> dict[str, HistogramValues]:
        """Every histogram by its name in /metrics."""
        return {
            "time_to_first_token_seconds": self.first_token.values(),
            "inter_token_latency_seconds": self.gap.values(),
            "e2e_request_latency_seconds": self.whole.values(),
            "queue_time_seconds": self.queue.values(),
            "batch_size": self.batch.values(),
        }
