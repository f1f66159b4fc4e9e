"""Decode steps launched before the tokens of the one before are known: nothing but the time changes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from crucible.config import EngineConfig, SamplingParams
from crucible.engine.checks.lab import Job, Lab
from crucible.engine.core import EngineCore
from tests.engine.ahead import AheadRunner
from tests.engine.test_workloads import Workload, check, workloads
from tests.engine.toy import EOS, TOKENS, toy_cache, toy_config, toy_forward

CONTEXT = 1024


def engine(runner: type = AheadRunner, forward: Any = toy_forward, **changes: Any) -> EngineCore:
    settings = {"max_batch": 4, "context": 256, "kv_pages": 40, "prefill_budget": 64, "threads": 1, "async_steps": True}
    settings |= changes
    config = EngineConfig(device="cpu", **settings)
    made = runner(
        None, None, toy_cache(40), max_rows=80, max_sequences=4, context=256, token_count=TOKENS, forward=forward
    )
    return EngineCore(config, toy_config(context_length=256), made)


def greedy(count: int, *, ignore_eos: bool = True) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=ignore_eos)


def all_greedy(job: Job) -> Job:
    return replace(job, params=greedy(job.max_tokens, ignore_eos=job.params.ignore_eos))


def run(core: EngineCore) -> tuple[dict[str, list[int]], dict[str, str]]:
    tokens: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    while core.has_work():
        output = core.step()
        core.check()
        for event in output.tokens:
            tokens.setdefault(event.request_id, []).append(event.token_id)
        ends |= {end.request_id: end.finish_reason for end in output.finished}
    assert core.failure is None
    return tokens, ends


def test_any_workload_has_the_bits_of_steps_one_after_the_other() -> None:
    plain = Lab(toy_config(), None, None, toy_cache, context=CONTEXT, forward=toy_forward)
    runners: list[AheadRunner] = []

    def make(*args: Any, **options: Any) -> AheadRunner:
        runners.append(AheadRunner(*args, **options, forward=toy_forward))
        return runners[-1]

    lab = Lab(toy_config(), None, None, toy_cache, context=CONTEXT, make_runner=make)
    lab.alone, lab.forget = plain.alone, plain.forget  # type: ignore[method-assign]
    lab.run = partial(lab.run, async_steps=True)  # type: ignore[method-assign]

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(workloads(TOKENS), st.booleans())
    def any_workload(workload: Workload, mixed: bool) -> None:
        if not mixed:
            workload = replace(workload, jobs=[all_greedy(job) for job in workload.jobs])
        check(lab, workload)

    any_workload()
    assert sum(runner.ahead for runner in runners) > 500
    assert sum(runner.surplus for runner in runners) > 10


def test_a_greedy_decode_step_is_launched_before_the_last_one_is_collected() -> None:
    core = engine()
    core.add_request("a", [1, 2, 3], greedy(6))
    core.step()  # the prompt
    assert [event.request_id for event in core.step().tokens] == ["a"]
    assert len(core.runner.flights) == 1  # type: ignore[attr-defined]
    core.launch()  # for callers that launch before they publish: the next step is queued already
    assert len(core.runner.flights) == 1  # type: ignore[attr-defined]
    assert len(run(core)[0]["a"]) == 4
    # The last step at the limit is known to be the last: no row was computed in vain.
    assert (core.runner.ahead, core.runner.surplus) == (4, 0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", ["sampled", "switched off", "a runner that cannot"])
def test_other_steps_wait(case: str) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.8, top_k=5, seed=1, ignore_eos=True)
    core = engine(async_steps=case != "switched off")
    if case == "a runner that cannot":
        core.runner.overlaps = False  # type: ignore[attr-defined]
        core = EngineCore(core.config, core.model_config, core.runner)
    core.add_request("a", [1, 2, 3], params if case == "sampled" else greedy(6))
    assert len(run(core)[0]["a"]) == 6
    assert core.runner.ahead == 0  # type: ignore[attr-defined]


def test_a_drawn_row_keeps_its_whole_step_waiting() -> None:
    core = engine()
    core.add_request("a", [1, 2, 3], greedy(9))
    core.add_request("b", [4, 5], SamplingParams(max_tokens=3, temperature=0.8, top_k=5, seed=1, ignore_eos=True))
    for _ in range(3):
        assert core.runner.ahead == 0  # type: ignore[attr-defined]
        core.step()
    run(core)
    assert core.runner.ahead == 5  # type: ignore[attr-defined]


def test_an_end_is_noticed_a_step_late_and_the_surplus_token_dropped() -> None:
    def forward(weights: Any, ops: Any, batch: Any, cache: Any) -> Any:
        logits = toy_forward(weights, ops, batch, cache)
        logits[batch.positions[batch.logit_rows] == 6, EOS] = 1e9  # the eighth token of every request
        return logits

    core, plain = engine(forward=forward), engine(forward=forward, async_steps=False)
    for made in (core, plain):
        for index, length in enumerate((3, 5, 2)):
            made.add_request(f"r{index}", list(range(6, 6 + length)), greedy(40, ignore_eos=index == 2))
    outcome = run(core)
    assert outcome == run(plain)
    assert outcome[1] == {"r0": "stop", "r1": "stop", "r2": "length"}
    assert core.runner.surplus == 2  # type: ignore[attr-defined]
    assert core.metrics()["tokens_generated"] == plain.metrics()["tokens_generated"]


def test_a_broken_row_ends_its_request_alone() -> None:
    def forward(weights: Any, ops: Any, batch: Any, cache: Any) -> Any:
        logits = toy_forward(weights, ops, batch, cache)
        logits[batch.positions[batch.logit_rows] == 9, 3] = np.nan
        return logits

    core, plain = engine(forward=forward), engine(forward=forward, async_steps=False)
    for made in (core, plain):
        made.add_request("long", [1] * 12, greedy(20))
        made.add_request("broken", [1] * 7, greedy(20))
    outcome = run(core)
    assert outcome == run(plain)
    assert outcome[1] == {"broken": "error", "long": "length"}
    assert core.runner.surplus == 1  # type: ignore[attr-defined]


def test_a_cancelled_request_gets_nothing_more_and_is_reported_by_the_next_step() -> None:
    core = engine()
    core.add_request("a", [1, 2, 3], greedy(30))
    core.add_request("b", [1, 2, 4], greedy(30))
    for _ in range(4):
        core.step()
    core.cancel("a")
    output = core.step()
    assert [(end.request_id, end.finish_reason) for end in output.finished] == [("a", "cancelled")]
    assert [event.request_id for event in output.tokens] == ["b"]
    core.check()
    assert len(run(core)[0]["b"]) == 30 - 5


def test_what_waits_for_room_does_not_stop_steps_that_leave_none() -> None:
    core = engine(max_batch=2)
    for index in range(3):
        core.add_request(f"r{index}", [1, 2, index], greedy(8))
    core.step()
    core.step()
    assert core.runner.ahead == 1  # type: ignore[attr-defined]
    tokens, _ = run(core)
    assert len(tokens["r2"]) == 8


def test_a_prompt_that_comes_is_computed_in_the_next_step_but_one() -> None:
    core = engine()
    core.add_request("a", [1, 2, 3], greedy(30))
    core.step()
    core.step()
    core.add_request("b", [1, 2, 4], greedy(30))
    core.step()
    assert "b" in [event.request_id for event in core.step().tokens]


def test_a_step_that_computed_only_what_had_ended_is_collected() -> None:
    core = engine()
    core.add_request("a", [1, 2, 3], SamplingParams(max_tokens=30))
    while not core.step().finished:
        pass
    assert not core.scheduler.has_work
    assert core.has_work() == bool(core.runner.flights)  # type: ignore[attr-defined]
    run(core)
    assert not core.runner.flights  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["before", "after"])
def test_an_interrupt_loses_no_token(where: str) -> None:
    core, plain = engine(), engine(async_steps=False)
    for made in (core, plain):
        made.add_request("a", [1, 2, 3], greedy(12))
    collect, calls = core.runner.collect, 0

    def interrupted() -> Any:
        nonlocal calls
        calls += 1
        if calls == 5 and where == "before":
            core.runner.flights.popleft()  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        tokens = collect()
        if calls == 5:
            raise KeyboardInterrupt
        return tokens

    core.runner.collect = interrupted  # type: ignore[method-assign]
    tokens: list[int] = []
    while core.has_work():
        try:
            tokens += [event.token_id for event in core.step().tokens]
        except KeyboardInterrupt:
            assert not core._plans
    assert tokens == run(plain)[0]["a"]
