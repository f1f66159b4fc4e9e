"""What the host does for a decode step, without a model: plan, fill the batch, commit, publish full pages."""

from __future__ import annotations

import time

import numpy as np
import pytest

from crucible.config import SamplingParams
from crucible.engine.batch import Batch
from crucible.engine.kv_cache import KVPages
from crucible.engine.scheduler import Scheduler


@pytest.mark.parametrize(("requests", "limit_us"), [(16, 50), (256, 200)])
def test_a_step_costs_little(requests: int, limit_us: float) -> None:
    """The median of 100 steps; and of those in which every request fills a page. The usual figures are 3 and 11 µs."""
    scheduler = Scheduler(
        KVPages(requests * 12, prefix_cache=True),
        max_batch=requests,
        max_queue=0,
        context=192,
        prefill_budget=requests * 32,
        token_count=1000,
    )
    batch = Batch(requests * 33, requests, 12)
    random = np.random.default_rng(0)
    for i in range(requests):
        scheduler.add(str(i), random.integers(0, 1000, 32), SamplingParams(max_tokens=120))
    seconds = []
    for tokens in random.integers(0, 1000, (101, requests)).astype(np.int32):
        start = time.perf_counter()
        plan = scheduler.plan()
        batch.fill(plan.decode, plan.prefill, plan.counts)
        scheduler.commit(plan, tokens)
        seconds.append(time.perf_counter() - start)
    steps = np.array(seconds[1:]) * 1e6
    assert len(scheduler.running) == requests
    assert scheduler.running[0].published == (32 + 100) // 16
    assert np.median(steps) < limit_us
    assert np.median(steps[15::16]) < limit_us
