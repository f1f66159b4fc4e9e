from __future__ import annotations

import numpy as np
import pytest

from crucible.config import SamplingParams
from crucible.engine.batch import Batch
from crucible.engine.model_runner import ModelRunner
from crucible.engine.request import Request
from crucible.engine.scheduler import Plan
from crucible.errors import EngineError
from tests.engine.toy import TOKENS, VOCAB, toy_cache, toy_forward, toy_runner


def request(name: str, prompt: int, pages: list[int]) -> Request:
    made = Request(name, np.arange(prompt, dtype=np.int32) % TOKENS, 16, SamplingParams(max_tokens=16))
    made.assign_pages(pages)
    return made


def test_tokens_come_in_the_order_of_the_plan() -> None:
    runner = toy_runner(16)
    a, b, c = request("a", 5, [3, 9]), request("b", 20, [2, 1, 4]), request("c", 3, [7, 8])
    seen: list[tuple[list[str], np.ndarray]] = []
    runner.on_logits = lambda requests, logits: seen.append(([r.request_id for r in requests], logits.copy()))
    runner.launch(Plan([], [a, b, c], [5, 7, 3]))
    tokens = runner.collect()
    assert tokens.dtype == np.int32
    assert seen[0][0] == ["a", "c"]
    assert seen[0][1].shape == (2, VOCAB)
    assert tokens.tolist() == [int(row[:TOKENS].argmax()) for row in seen[0][1]]
    assert np.array_equal(runner.logits, seen[0][1])


def test_a_step_without_logits_yields_no_tokens() -> None:
    runner = toy_runner(16)
    runner.launch(Plan([], [request("b", 20, [2, 1, 4])], [7]))
    assert runner.collect().shape == (0,)


def test_chunks_and_pages_do_not_change_the_logits() -> None:
    def last_row(pages: list[int], chunks: list[int]) -> np.ndarray:
        runner, one = toy_runner(16), request("a", 40, pages)
        for count in chunks:
            runner.launch(Plan([], [one], [count]))
            runner.collect()
            one.assign_pages(one.take_pages(), min(one.computed + count, 39))
        assert runner.logits is not None
        return runner.logits

    whole = last_row([0, 1, 2, 3], [40])
    for pages, chunks in (([9, 3, 12, 5], [40]), ([3, 2, 1, 0], [16, 16, 8]), ([0, 1, 2, 3], [1, 14, 2, 22, 1])):
        assert np.array_equal(last_row(pages, chunks), whole)


def test_launch_and_collect_alternate() -> None:
    runner = toy_runner(16)
    with pytest.raises(EngineError, match="no plan is in flight"):
        runner.collect()
    plan = Plan([], [request("a", 5, [3, 9])], [5])
    runner.launch(plan)
    with pytest.raises(EngineError, match="is in flight"):
        runner.launch(plan)
    runner.collect()
    runner.launch(plan)


def test_a_forward_that_returns_other_rows_is_an_error() -> None:
    def wrong(weights: object, ops: object, batch: Batch, cache: np.ndarray) -> np.ndarray:
        return toy_forward(weights, ops, batch, cache)[:0]

    runner = ModelRunner(
        None, None, toy_cache(4), max_rows=8, max_sequences=2, context=64, token_count=TOKENS, forward=wrong
    )
    runner.launch(Plan([], [request("a", 5, [3, 1])], [5]))
    with pytest.raises(EngineError, match="1 logit rows were asked for, 0 came back"):
        runner.collect()


def test_warm_up_needs_one_page_and_leaves_nothing_in_flight() -> None:
    runner = toy_runner(1, max_rows=2, max_sequences=1, context=16)
    runner.warm_up()
    runner.launch(Plan([], [request("a", 2, [0, 0])], [2]))
    assert len(runner.collect()) == 1
