"""Any mix of requests on any engine settings: each request gets, bit by bit, what it gets alone.

The lone request runs on one kernel thread and the mix on one or two, so the number of threads is compared as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from crucible.config import SamplingParams
from crucible.engine.checks.lab import Job, Lab, difference
from crucible.models import resolve
from tests.checkpoints import make_checkpoint
from tests.engine.toy import toy_cache, toy_config, toy_forward

LONGEST = 600


@dataclass
class Workload:
    jobs: list[Job]
    settings: dict[str, Any] = field(default_factory=dict)


@st.composite
def jobs(draw: st.DrawFn, name: str, token_count: int, stems: list[np.ndarray], most_new: int) -> Job:
    """A prompt is the beginning of a stem, tokens of its own, or both."""
    total = draw(
        st.one_of(st.integers(1, LONGEST), st.integers(1, 80), st.integers(80, 200), st.integers(500, LONGEST))
    )
    shared = draw(st.one_of(st.just(0), st.integers(total // 2, total), st.just(total)))
    own = np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, token_count, total - shared)
    ids = stems[draw(st.integers(0, len(stems) - 1))][:shared].tolist() + own.tolist()
    drawn = {} if draw(st.booleans()) else {
        "temperature": draw(st.sampled_from([0.3, 0.7, 1.0, 2.5])),
        "top_k": draw(st.sampled_from([5, 40, 129, 500])),
        "seed": draw(st.integers(0, 2**64 - 1)),
    }  # fmt: skip
    params = SamplingParams(max_tokens=draw(st.integers(1, most_new)), ignore_eos=draw(st.booleans()), **drawn)
    arrival = draw(st.integers(0, 12))
    cancel = draw(st.one_of(st.none(), st.none(), st.integers(arrival + 1, arrival + 15)))
    return Job(name, tuple(ids), params, arrival, cancel, draw(st.sampled_from([None, None, None, None, "salt"])))


@st.composite
def workloads(draw: st.DrawFn, token_count: int, most: int = 8, most_new: int = 24) -> Workload:
    seed = draw(st.integers(0, 2**32))
    stems = [np.random.default_rng([seed, i]).integers(0, token_count, LONGEST) for i in range(2)]
    count = draw(st.one_of(st.integers(1, most), st.integers(most // 2, most)))
    return Workload(
        [draw(jobs(f"r{i}", token_count, stems, most_new)) for i in range(count)],
        {
            "kv_pages": draw(st.one_of(st.integers(32, 96), st.integers(32, 44))),
            "max_batch": draw(st.one_of(st.integers(1, 8), st.integers(3, 8))),
            "prefill_budget": draw(st.integers(7, 300)),
            "prefill_chunk_tokens": draw(st.one_of(st.none(), st.integers(7, 300))),
            "min_packed_prompts": draw(st.sampled_from([2, 2, 3])),
            "batched_prefill": draw(st.sampled_from([True, True, True, False])),
            "prefix_cache": draw(st.sampled_from([True, True, True, False])),
            "threads": draw(st.sampled_from([1, 2])),
        },
    )


def check(lab: Lab, workload: Workload) -> None:
    lab.forget()
    room = min(lab.context, workload.settings["kv_pages"] * 16)
    traces = lab.run(workload.jobs, **workload.settings)  # and after every step the pool is whole
    for job in workload.jobs:
        got = traces[job.name]
        assert (got.reason == "refused") == (len(job.token_ids) + job.max_tokens > room)
        if got.reason == "refused":
            continue
        assert got.reason in ("length", "stop", "cancelled")
        assert got.reason != "cancelled" or job.cancel is not None
        assert difference(job.name, len(job.token_ids), lab.alone(job, threads=1), got) is None
        assert workload.settings["prefix_cache"] or got.cached_tokens == 0
    lab.forget()


def many(lab: Lab, examples: int, **bounds: Any) -> Callable[[], None]:
    """A property over ``examples`` workloads for ``lab``."""

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(workloads(lab.config.token_count, **bounds))
    def run(workload: Workload) -> None:
        check(lab, workload)

    return run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Two layers; untied, so that the answers vary."""
    path = tmp_path_factory.mktemp("workloads") / "model"
    return Lab.load(make_checkpoint(path, context_length=1024, tied_embeddings=False), threads=2)


def test_on_a_toy() -> None:
    many(Lab(toy_config(), None, None, toy_cache, context=1024, forward=toy_forward), 200)()


def test_on_a_small_model(tiny: Lab) -> None:
    many(tiny, 25)()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_on_a_small_model(tiny: Lab) -> None:
    many(tiny, 500)()


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_on_smollm2() -> None:
    path: Path = resolve("smollm2-135m-instruct")
    many(Lab.load(path, quant="int8", threads=2), 50, most=5, most_new=8)()
