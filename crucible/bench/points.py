"""What one point of a load test says: the records of its requests, and the server's counters around it, as numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from crucible.bench.load import ERRORS, HANG_UP, OK, Record
from crucible.bench.statistics import median, percentile

Values: TypeAlias = dict[str, float | None]

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Slo:
    """What a good request keeps, in seconds: its TTFT, and the 99th percentile of its own pauses. None: no limit."""

    ttft: float | None = None
    itl: float | None = None

    @property
    def given(self) -> bool:
        return self.ttft is not None or self.itl is not None

    def good(self, record: Record) -> bool:
        ttft, itl = record.ttft, percentile(record.gaps, 99)
        if record.outcome != OK or ttft is None:
            return False
        in_time = self.ttft is None or ttft <= self.ttft
        return in_time and (self.itl is None or itl is None or itl <= self.itl)


def measure(records: Sequence[Record], slo: Slo, streams: int | None = None, client_s: float = 0.0) -> Values:
    """The numbers of one point; times in ms, rates a second, ``None`` where nothing was seen.

    TTFT and ITL are of all requests that streamed, TPOT and E2E of those that completed. e2e_tok_s spans the whole
    window from the first request to the last end. steady_tok_s is streams / median gap a token; ``streams`` of None
    (open loop) means the average number that were streaming. client_s: CPU seconds that the load client used.
    """
    streamed = [record for record in records if record.outcome in (OK, HANG_UP) and record.times]
    completed = [record for record in streamed if record.outcome == OK]
    window = max(record.end for record in records) - min(record.due for record in records) if records else 0.0
    samples = {
        "ttft": [record.ttft for record in streamed if record.ttft is not None],
        "itl": [gap for record in streamed for gap in record.gaps],
        "tpot": [record.tpot for record in completed if record.tpot is not None],
        "e2e": [record.end - record.due for record in completed],
    }
    values: Values = {}
    for name, seconds in samples.items():
        for q in PERCENTILES:
            value = percentile(seconds, q)
            values[f"{name}_p{q}"] = None if value is None else 1000 * value
    tokens = sum(record.tokens for record in records)
    events = sum(sum(record.counts) for record in streamed)
    gap = median([gap for record in streamed for gap in record.token_gaps])
    average = sum(record.times[-1] - record.times[0] for record in streamed) / window if window else 0.0
    refused = percentile([record.end - record.due for record in records if record.outcome == "429"], 99)
    outcomes = Counter(record.outcome for record in records)
    values |= {
        "e2e_tok_s": tokens / window if window else None,
        "steady_tok_s": (average if streams is None else streams) / gap if gap else None,
        "req_s": len(completed) / window if window else None,
        "tokens_a_read": events / sum(len(record.times) for record in streamed) if streamed else None,
        "refused_p99": None if refused is None else 1000 * refused,
        "client_percent": 100 * client_s / window if window else None,
        "completed": len(completed),
        "hang_ups": outcomes[HANG_UP],
        "errors": sum(outcomes[name] for name in ERRORS),
        "short": sum(record.tokens < record.job.max_tokens for record in completed),
    }
    values |= {f"errors_{name}": outcomes[name] for name in ERRORS}
    if slo.given and window:
        good = sum(slo.good(record) for record in records)
        values |= {"good_req_s": good / window, "good_percent": 100 * good / len(records)}
    return values


def occupancy(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> float | None:
    """Tokens a decode step between two /metrics, whose counters are cumulative; ``None`` if the server has none."""
    rows = [decode_rows(metrics) for metrics in (before, after)]
    if before is None or after is None or rows[0] is None or rows[1] is None:
        return None
    steps = after["decode_steps"] - before["decode_steps"]
    return (rows[1] - rows[0]) / steps if steps > 0 else None


def cached_percent(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> float | None:
    """Prompt tokens that came from the server's prefix cache between two /metrics, in percent of all of them."""
    names = ("prefix_cache_tokens", "prefill_tokens")
    if before is None or after is None or not all(name in m for name in names for m in (before, after)):
        return None
    cached, computed = (after[name] - before[name] for name in names)
    return 100 * cached / (cached + computed) if cached + computed > 0 else None


def decode_rows(metrics: Mapping[str, Any] | None) -> float | None:
    """Tokens that decode steps made since the server started."""
    steps = None if metrics is None else metrics.get("decode_steps")
    if metrics is None or not isinstance(steps, int | float):
        return None
    average = metrics.get("batch_avg")
    if isinstance(average, int | float):
        return average * steps
    tokens = metrics.get("tokens_generated")  # includes the first tokens, which prefill makes: a little too many
    return tokens if isinstance(tokens, int | float) else None
