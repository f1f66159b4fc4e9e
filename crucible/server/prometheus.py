"""The engine's counters as Prometheus text (exposition format 0.0.4) or OpenMetrics 1.0. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Iterator

from crucible.engine.messages import HistogramValues, MetricsReply

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PREFIX = "crucible_"

RENAMED = {"step_age_s": "step_age_seconds", "uptime_s": "uptime_seconds"}

GAUGES = {
    "active_requests": "Requests that hold pages of the KV cache.",
    "queued_requests": "Requests waiting to be admitted.",
    "prefilling_requests": "Active requests whose prompt is not computed yet.",
    "kv_pages_used": "Pages held by active requests; a shared page counts once.",
    "kv_pages_cached": "Pages held by no request and kept for their content; reclaimable.",
    "kv_pages_total": "Pages of the KV cache.",
    "wasted_slots": "Token slots that active requests have reserved and not filled yet.",
    "batch_last": "Decode rows of the last step that had any.",
    "batch_avg": "Mean decode rows of the steps that had any, since the engine started.",
    "last_prefill_chunk_tokens": "Prompt tokens of the last step that computed any.",
    "uptime_s": "Seconds since the engine started.",
    "step_age_s": "Seconds that the step under way has taken; 0 when idle.",
}
COUNTERS = {
    "completed_requests": "Requests that ended by an end-of-sequence token or their limit.",
    "cancelled_requests": "Requests withdrawn, nearly always because their client hung up.",
    "failed_requests": "Requests ended by an error.",
    "rejected_requests": "Requests not taken: queue full, invalid or engine not ready.",
    "tokens_generated": "Tokens generated, end-of-sequence tokens included.",
    "decode_steps": "Steps with decode rows.",
    "prefill_chunks": "Prompt chunks computed, one a request and step.",
    "prefill_tokens": "Prompt tokens computed.",
    "packed_calls": "Steps whose prompt tokens came from several requests.",
    "prefix_cache_hits": "Requests that started from cached pages.",
    "prefix_cache_tokens": "Prompt tokens not computed because their KV was cached.",
    "prefix_cache_evictions": "Cached pages reclaimed.",
    "nan_rows": "Requests failed because their logits held NaN or infinity.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request's arrival in the engine process until its first token left it.",
    "inter_token_latency_seconds": "Between two tokens of a request as they left the engine process.",
    "e2e_request_latency_seconds": "From a completed request's arrival in the engine process until its end left it.",
    "queue_time_seconds": "From a request's arrival in the engine process to the start of the step that admitted it.",
    "batch_size": "Requests that got a token in a step, of the steps that gave any.",
}


def exposition(report: MetricsReply, *, openmetrics: bool) -> str:
    """``report`` as text. A number that has no entry above comes from an engine that this server does not know."""
    lines: list[str] = []
    for key, value in report.values.items():
        name = PREFIX + RENAMED.get(key, key)
        if key in COUNTERS:
            family = name if openmetrics else f"{name}_total"
            lines += (*_head(family, "counter", COUNTERS[key]), f"{name}_total {_number(value)}")
        else:
            lines += (*_head(name, "gauge", GAUGES.get(key, "See docs/api.md.")), f"{name} {_number(value)}")
    for key, values in report.histograms.items():
        name = PREFIX + key
        lines += (*_head(name, "histogram", HISTOGRAMS.get(key, "See docs/api.md.")), *_histogram(name, values))
    if openmetrics:
        lines.append("# EOF")
    return "\n".join(lines) + "\n"


def _head(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _histogram(name: str, values: HistogramValues) -> Iterator[str]:
    count = 0
    for bound, inside in zip((*map(_number, values.bounds), "+Inf"), values.counts, strict=True):
        count += inside
        yield f'{name}_bucket{{le="{bound}"}} {count}'
    yield f"{name}_sum {_number(values.sum)}"
    yield f"{name}_count {count}"


def _number(value: float) -> str:
    return repr(value)
