from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from crucible.config import SamplingParams
from crucible.engine.kv_cache import KVPages
from crucible.engine.request import Request, RequestState
from crucible.engine.scheduler import Plan, Scheduler
from crucible.errors import QueueFullError, RequestError
from crucible.native.batch import NO_TOKEN

EOS = 5


def scheduler(pages: int = 64, **changes: Any) -> Scheduler:
    values = {"max_batch": 4, "max_queue": 8, "context": 256, "prefill_budget": 32, "token_count": 31}
    return Scheduler(KVPages(pages), eos_token_ids=[EOS], **{**values, **changes})


def add(s: Scheduler, name: str, prompt: int = 10, max_tokens: int | None = 4, **params: Any) -> Request:
    return s.add(name, [1] * prompt, SamplingParams(max_tokens=max_tokens, **params))


def names(requests: Any) -> list[str]:
    return [request.request_id for request in requests]


def shape(plan: Plan) -> tuple[list[str], list[tuple[str, int]]]:
    return names(plan.decode), list(zip(names(plan.prefill), plan.counts, strict=True))


def run(s: Scheduler, plan: Plan, token: int = 9) -> list[Request]:
    wanted = len(plan.decode) + sum(r.remaining == n for r, n in zip(plan.prefill, plan.counts, strict=True))
    return s.commit(plan, np.full(wanted, token, np.int32))


def step(s: Scheduler, token: int = 9) -> tuple[list[str], list[tuple[str, int]]]:
    plan = s.plan()
    planned = shape(plan)
    run(s, plan, token)
    return planned


def test_a_request_is_prefilled_then_decoded_then_retired() -> None:
    s = scheduler()
    request = add(s, "a", prompt=50, max_tokens=3)
    assert request.state is RequestState.WAITING
    assert s.pages.used == 0
    assert step(s) == ([], [("a", 32)])
    assert request.state is RequestState.PREFILLING
    assert s.pages.used == 4  # ceil(53 / 16), taken at once
    assert step(s) == ([], [("a", 18)])
    assert (request.state, request.output) == (RequestState.RUNNING, [9])
    assert step(s) == (["a"], [])
    assert s.wasted_slots == 4 * 16 - 51
    assert step(s) == (["a"], [])
    assert (request.state, request.finish_reason, request.output) == (RequestState.FINISHED, "length", [9, 9, 9])
    assert (s.pages.used, s.live, s.has_work) == (0, 0, True)
    assert s.take_finished() == [request]
    assert not s.has_work
    assert not s.plan()


def test_decode_rows_come_before_chunks_oldest_first_within_the_budget() -> None:
    s = scheduler(max_batch=8)
    add(s, "a", prompt=8)
    step(s)
    for name, prompt in (("b", 20), ("c", 9), ("d", 30)):
        add(s, name, prompt)
    assert step(s) == (["a"], [("b", 20), ("c", 9), ("d", 3)])
    assert step(s) == (["a", "b", "c"], [("d", 27)])


def test_a_chunk_cap_bounds_each_request() -> None:
    s = scheduler(prefill_chunk_tokens=7)
    add(s, "a", 20)
    add(s, "b", 5)
    add(s, "c", 40)
    assert step(s) == ([], [("a", 7), ("b", 5), ("c", 7)])
    assert step(s) == (["b"], [("a", 7), ("c", 7)])


def test_prompts_take_turns() -> None:
    s = scheduler(prefill_chunk_tokens=16)
    for name in "abc":
        add(s, name, prompt=60)
    assert step(s) == ([], [("a", 16), ("b", 16)])
    assert step(s) == ([], [("c", 16), ("a", 16)])
    add(s, "d", prompt=5)
    assert step(s) == ([], [("b", 16), ("c", 16)])
    assert step(s) == ([], [("a", 16), ("d", 5), ("b", 11)])  # an arrival is behind those who wait only
    assert names(s.prefilling) == ["c", "a", "b"]


def test_a_turn_that_was_planned_but_not_computed_is_planned_again() -> None:
    s = scheduler(prefill_chunk_tokens=16)
    for name in "abc":
        add(s, name, prompt=60)
    assert shape(s.plan()) == shape(s.plan()) == ([], [("a", 16), ("b", 16)])


def test_a_plan_that_reaches_too_few_prompts_computes_one() -> None:
    s = scheduler(min_packed=3, prefill_budget=24)
    add(s, "a", prompt=20)
    add(s, "b", prompt=20)
    assert step(s) == ([], [("a", 20)])
    add(s, "c", prompt=1)
    add(s, "d", prompt=1)
    assert step(s) == (["a"], [("b", 20), ("c", 1), ("d", 1)])
    s = scheduler(min_packed=5)
    for name in "abc":
        add(s, name, prompt=3)
    assert [step(s)[1] for _ in range(3)] == [[("a", 3)], [("b", 3)], [("c", 3)]]


def test_a_row_without_a_token_ends_its_request_alone() -> None:
    s = scheduler()
    decoding, other, prompt = add(s, "a"), add(s, "b"), None
    step(s)
    prompt = add(s, "c", max_tokens=9)
    plan = s.plan()
    sampled = s.commit(plan, np.array([NO_TOKEN, 9, NO_TOKEN], np.int32))
    assert names(sampled) == ["b"]
    for request, known in ((decoding, 11), (prompt, 10)):
        assert (request.state, request.finish_reason) == (RequestState.FINISHED, "error")
        assert request.error == f"the model's logits after {known} tokens of this request hold NaN or infinity"
        assert request.length == known
    assert (names(s.running), names(s.prefilling), names(s.take_finished())) == (["b"], [], ["a", "c"])
    s.check()
    while s.live:
        step(s)
    assert other.finish_reason == "length"
    assert s.pages.used == 0


def test_admission_is_first_come_first_served_and_bounded() -> None:
    s = scheduler(pages=4, max_batch=2)
    add(s, "a", prompt=20, max_tokens=12)  # 2 pages
    add(s, "b", prompt=40, max_tokens=8)  # 3 pages: waits for a
    add(s, "c", prompt=1, max_tokens=1)  # would fit, but is behind b
    step(s)
    assert (names(s.prefilling), names(s.running), names(s.waiting)) == ([], ["a"], ["b", "c"])
    while s.running:
        step(s)
    step(s)
    assert (names(s.prefilling), names(s.running)) == (["c", "b"], [])  # admitted both; b has had its turn
    assert names(s.waiting) == []
    s = scheduler(max_batch=2)
    for name in "abc":
        add(s, name, prompt=1)
    step(s)
    assert (names(s.running), names(s.waiting)) == (["a", "b"], ["c"])


def test_eos_ends_a_request_unless_ignored() -> None:
    s = scheduler()
    stop, deaf = add(s, "a"), add(s, "b", ignore_eos=True)
    step(s, EOS)
    assert (stop.finish_reason, stop.output) == ("stop", [EOS])
    assert deaf.state is RequestState.RUNNING
    assert names(s.take_finished()) == ["a"]


def test_no_max_tokens_means_up_to_the_context() -> None:
    s = scheduler(context=40)
    request = add(s, "a", prompt=30, max_tokens=None)
    while s.live:
        step(s)
    assert (len(request.output), request.finish_reason) == (10, "length")


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param", "message"),
    [
        ([1] * 250, 7, "max_tokens", "exceed the context of 256; at most 6 fit"),
        ([1] * 256, None, "prompt", "the prompt of 256 tokens leaves no room in the context of 256"),
        ([], 1, "prompt", "the prompt is empty"),
        ([1, 31], 1, "prompt", "token id 31 at index 1 is not in 0 … 30"),
        ([-1], 1, "prompt", "token id -1 at index 0"),
    ],
)
def test_what_can_never_be_served_is_refused(prompt: list[int], max_tokens: int, param: str, message: str) -> None:
    s = scheduler()
    with pytest.raises(RequestError) as caught:
        s.add("a", prompt, SamplingParams(max_tokens=max_tokens))
    assert caught.value.param == param
    assert message in str(caught.value)
    assert s.live == 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param"), [(30, 35, "max_tokens"), (30, None, "max_tokens"), (64, 1, "prompt")]
)
def test_more_pages_than_the_pool_are_refused(prompt: int, max_tokens: int | None, param: str) -> None:
    s = scheduler(pages=4)
    with pytest.raises(RequestError, match="KV cache of 64") as caught:
        add(s, "a", prompt, max_tokens)
    assert caught.value.param == param
    add(s, "b", 30, 34)  # exactly the pool
    step(s)
    assert s.pages.used == 4


def test_the_queue_is_bounded_and_recovers() -> None:
    s = scheduler(max_batch=2, max_queue=1)
    for name in "abc":
        add(s, name, prompt=1, max_tokens=1)
    with pytest.raises(QueueFullError, match="2 resident and 1 waiting"):
        add(s, "d")
    with pytest.raises(RequestError):  # can never be served: said even when the queue is full
        add(s, "d", prompt=300)
    step(s)
    add(s, "d")


def test_a_live_id_cannot_be_used_twice() -> None:
    s = scheduler()
    add(s, "a", max_tokens=1)
    with pytest.raises(RequestError, match="'a' is in use") as caught:
        add(s, "a")
    assert caught.value.param == "request_id"
    step(s)
    add(s, "a")


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_cancel_in_every_state(steps: int) -> None:
    """Waiting, after one chunk, after the prompt, while decoding."""
    s = scheduler()
    other = add(s, "b")
    request = add(s, "a", prompt=60, max_tokens=9)
    for _ in range(steps):
        step(s)
    assert s.cancel("a")
    assert not s.cancel("a")
    s.plan()
    assert (request.state, request.finish_reason, request.page_count) == (RequestState.FINISHED, "cancelled", 0)
    s.check()
    while other.state is not RequestState.FINISHED:
        step(s)
    assert len(other.output) == 4
    assert s.pages.used == 0
    assert not s.cancel("a")
    assert not s.cancel("never seen")


def test_pages_of_a_step_in_flight_are_kept_until_it_is_committed() -> None:
    s = scheduler(max_batch=1)
    add(s, "a")
    add(s, "b")
    plan = s.plan()
    used = s.pages.used
    s.cancel("a")
    assert s.pages.used == used
    run(s, plan)
    assert s.pages.used == used
    assert shape(s.plan()) == ([], [("b", 10)])
    assert names(s.take_finished()) == ["a"]


def test_a_cancelled_request_that_ends_in_the_step_in_flight_ends_once() -> None:
    s = scheduler()
    request = add(s, "a", max_tokens=1)
    plan = s.plan()
    s.cancel("a")
    run(s, plan)
    s.plan()
    assert s.take_finished() == [request]
    assert request.finish_reason == "length"
    assert not s.has_work


def test_fail_ends_everything() -> None:
    s = scheduler(max_batch=2)
    requests = [add(s, name, prompt=40) for name in "abc"]
    step(s)
    s.cancel("a")
    s.fail()
    assert {request.finish_reason for request in requests} == {"error"}
    assert (s.live, s.pages.used, len(s.take_finished()), s.has_work) == (0, 0, 3, False)
    assert not s.plan()
