"""EngineMetrics: the engine's counters. It knows requests only by how they ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from crucible.engine.messages import FinishReason, Metrics
from crucible.engine.scheduler import Plan, Scheduler


@dataclass(slots=True)
class EngineMetrics:
    """Counts since the engine started.

    completed_requests ended by eos or length. batch_last and batch_avg: decode rows of the last and the average step
    that had any (decode_steps of them). prefill_chunks: prompt chunks computed, one a request and step;
    prefill_tokens: their tokens; last_prefill_chunk_tokens: prompt tokens of the last step that had any;
    packed_calls: steps whose prompt tokens came from several requests. nan_rows: requests failed because their logits
    held NaN or +inf.
    """

    completed_requests: int = 0
    cancelled_requests: int = 0
    failed_requests: int = 0
    tokens_generated: int = 0
    batch_last: int = 0
    decode_rows: int = 0
    decode_steps: int = 0
    prefill_chunks: int = 0
    prefill_tokens: int = 0
    last_prefill_chunk_tokens: int = 0
    packed_calls: int = 0
    nan_rows: int = 0
    clock: Callable[[], float] = time.monotonic
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    def record_step(self, plan: Plan, tokens: int) -> None:
        """Count a computed plan that yielded ``tokens`` tokens."""
        self.tokens_generated += tokens
        if plan.decode:
            self.batch_last = len(plan.decode)
            self.decode_rows += len(plan.decode)
            self.decode_steps += 1
        if plan.prefill:
            self.prefill_chunks += len(plan.prefill)
            self.last_prefill_chunk_tokens = sum(plan.counts)
            self.prefill_tokens += self.last_prefill_chunk_tokens
            self.packed_calls += len(plan.prefill) > 1

    def record_finished(self, reason: FinishReason | None, *, broken: bool = False) -> None:
        """Count a request that ended. ``broken``: for want of finite logits."""
        self.nan_rows += broken
        if reason == "cancelled":
            self.cancelled_requests += 1
        elif reason == "error":
            self.failed_requests += 1
        else:
            self.completed_requests += 1

    def snapshot(self, scheduler: Scheduler) -> Metrics:
        """All counters and the scheduler's present state.

        active_requests: those that hold pages. kv_pages_used: pages they hold, a shared one counted once;
        kv_pages_cached: further pages kept for their content, reclaimable; the rest of kv_pages_total is free.
        prefix_cache_hits: requests that started from cached pages; prefix_cache_tokens: prompt tokens they did not
        compute; prefix_cache_evictions: cached pages reclaimed.
        """
        pages = scheduler.pages
        return {
            "active_requests": len(scheduler.prefilling) + len(scheduler.running),
            "queued_requests": len(scheduler.waiting),
            "prefilling_requests": len(scheduler.prefilling),
            "completed_requests": self.completed_requests,
            "cancelled_requests": self.cancelled_requests,
            "failed_requests": self.failed_requests,
            "tokens_generated": self.tokens_generated,
            "kv_pages_used": pages.used,
            "kv_pages_cached": pages.cached,
            "kv_pages_total": pages.total,
            "wasted_slots": scheduler.wasted_slots,
            "batch_last": self.batch_last,
            "batch_avg": self.decode_rows / self.decode_steps if self.decode_steps else 0.0,
            "decode_steps": self.decode_steps,
            "prefill_chunks": self.prefill_chunks,
            "prefill_tokens": self.prefill_tokens,
            "last_prefill_chunk_tokens": self.last_prefill_chunk_tokens,
            "packed_calls": self.packed_calls,
            "prefix_cache_hits": pages.prefix.hits,
            "prefix_cache_tokens": pages.prefix.hit_tokens,
            "prefix_cache_evictions": pages.pool.evictions,
            "nan_rows": self.nan_rows,
            "uptime_s": self.clock() - self.started,
        }
