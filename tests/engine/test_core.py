from __future__ import annotations

import itertools
import logging
import threading
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from crucible.config import EngineConfig, SamplingParams
from crucible.config.limits import CPU_CONTEXT
from crucible.engine.core import EngineCore, failure_text
from crucible.engine.messages import Finished, StepOutput, TokenEvent
from crucible.engine.model_runner import ModelRunner
from crucible.engine.scheduler import Plan
from crucible.engine.settings import CPU_PREFILL_BUDGET, resolve_config
from crucible.errors import ConfigError, EngineError, QueueFullError, RequestError
from crucible.native import sampling
from tests.checkpoints import make_checkpoint
from tests.engine.toy import EOS, TOKENS, toy_config, toy_runner

GREEDY = SamplingParams(max_tokens=8)


def make_core(
    *, pages: int = 64, runner: Any = None, model: dict[str, Any] | None = None, **changes: Any
) -> EngineCore:
    values: dict[str, Any] = {"context": 256, "max_batch": 4, "max_queue": 32, "kv_pages": pages, "prefill_budget": 32}
    config = EngineConfig(**{**values, **changes})
    rows = config.max_batch + (config.prefill_budget or 128)
    runner = runner or toy_runner(pages, max_rows=rows, max_sequences=config.max_batch, context=config.context or 1024)
    return EngineCore(config, toy_config(**(model or {})), runner)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, TOKENS, length).tolist()


class Answers:
    """What an engine said about each request, checked for order."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, Finished] = {}

    def take(self, output: StepOutput) -> None:
        for event in output.tokens:
            assert event.request_id not in self.finished
            self.tokens.setdefault(event.request_id, []).append(event.token_id)
        for finished in output.finished:
            assert finished.request_id not in self.finished
            self.finished[finished.request_id] = finished

    def drain(self, core: EngineCore, limit: int = 5000) -> Answers:
        for _ in range(limit):
            if not core.has_work():
                return self
            self.take(core.step())
        raise AssertionError("the engine does not come to rest")


def alone(token_ids: list[int], params: SamplingParams) -> tuple[list[int], list[bytes], Finished]:
    """Tokens, logit bits and the end of a request that has an engine to itself and computes its prompt at once."""
    core = make_core(max_batch=1, prefill_budget=256)
    logits: list[bytes] = []
    core.runner.on_logits = lambda requests, rows: logits.append(rows[0].tobytes())  # type: ignore[attr-defined]
    core.add_request("x", token_ids, params)
    answers = Answers().drain(core)
    return answers.tokens.get("x", []), logits, answers.finished["x"]


def test_a_request_from_prompt_to_end() -> None:
    core = make_core()
    core.add_request("a", prompt(50), GREEDY)
    assert core.step() == StepOutput()  # 32 of 50 prompt tokens
    first = core.step()
    assert [type(event) for event in first.tokens] == [TokenEvent]
    answers = Answers()
    answers.take(first)
    answers.drain(core)
    assert answers.finished["a"].finish_reason in ("length", "stop")
    assert answers.tokens["a"] == alone(prompt(50), GREEDY)[0]
    assert core.step() == StepOutput()
    core.check()


def test_eos_is_counted_and_sends_no_event() -> None:
    for seed in range(50):
        tokens, logits, end = alone(prompt(9, seed), SamplingParams(max_tokens=60, temperature=5.0, seed=seed))
        assert EOS not in tokens
        assert end.completion_tokens == len(logits) == len(tokens) + (end.finish_reason == "stop")
        assert end.prompt_tokens == 9
        if end.finish_reason == "stop":
            break
    else:
        raise AssertionError("no request ended by eos")
    deaf = SamplingParams(max_tokens=60, temperature=5.0, seed=seed, ignore_eos=True)
    longer, _, end = alone(prompt(9, seed), deaf)
    assert longer[: len(tokens) + 1] == [*tokens, EOS]
    assert (end.finish_reason, end.completion_tokens) == ("length", 60)


@pytest.mark.parametrize(
    ("params", "top_k", "seed"),
    [
        ({"temperature": 2.0}, 40, 1234),
        ({"temperature": 2.0, "seed": 2**64 - 1}, 40, 2**64 - 1),
        ({"temperature": 0.5, "top_k": 3, "seed": 0}, 3, 0),
        ({"temperature": 0.5, "top_k": 2**40}, TOKENS, 1234),
    ],
)
def test_a_token_is_the_draw_of_its_logits_seed_and_position(params: dict[str, Any], top_k: int, seed: int) -> None:
    ids = prompt(21)
    tokens, logits, _ = alone(ids, SamplingParams(max_tokens=30, ignore_eos=True, **params))
    rows = [np.frombuffer(bits, np.float32) for bits in logits]
    wanted = [
        sampling.select(row, params["temperature"], top_k, seed, 0, len(ids) + i, TOKENS) for i, row in enumerate(rows)
    ]
    assert tokens == wanted


def test_launch_and_collect_may_be_called_apart() -> None:
    core = make_core()
    core.add_request("a", prompt(5), GREEDY)
    core.launch()
    core.launch()  # one is in flight: nothing happens
    core.cancel("a")
    assert len(core.collect().tokens) == 1
    assert core.collect() == StepOutput()
    assert [f.finish_reason for f in core.step().finished] == ["cancelled"]


def test_an_interrupted_launch_is_planned_again() -> None:
    core = make_core()
    forward, calls = core.runner._forward, iter([KeyboardInterrupt])  # type: ignore[attr-defined]

    def interrupted(*arguments: Any) -> Any:
        for error in calls:
            raise error
        return forward(*arguments)

    core.runner._forward = interrupted  # type: ignore[attr-defined]
    core.add_request("a", prompt(5), GREEDY)
    with pytest.raises(KeyboardInterrupt):
        core.step()
    assert Answers().drain(core).tokens["a"] == alone(prompt(5), GREEDY)[0]


def test_refusals_leave_nothing_behind() -> None:
    core = make_core(max_batch=1, max_queue=0)
    with pytest.raises(RequestError):
        core.add_request("a", [], GREEDY)
    core.add_request("a", [1], GREEDY)
    with pytest.raises(QueueFullError):
        core.add_request("b", [1], GREEDY)
    assert set(Answers().drain(core).finished) == {"a"}


def test_cancel_is_reported_by_the_next_step() -> None:
    core = make_core(max_batch=1)
    for name in "abc":
        core.add_request(name, prompt(40), GREEDY)
    core.step()
    assert core.cancel("a")
    assert core.cancel("c")
    assert not core.cancel("nobody")
    output = core.step()
    assert {(f.request_id, f.finish_reason, f.prompt_tokens, f.completion_tokens) for f in output.finished} == {
        ("a", "cancelled", 40, 0),
        ("c", "cancelled", 40, 0),
    }
    answers = Answers()
    answers.take(output)
    assert answers.drain(core).tokens["b"] == alone(prompt(40), GREEDY)[0]
    assert core.metrics()["cancelled_requests"] == 2
    assert core.metrics()["kv_pages_used"] == 0


def test_metrics_count_what_happened() -> None:
    clock = itertools.count(100.0)
    core = EngineCore(
        EngineConfig(context=256, max_batch=4, kv_pages=64, prefill_budget=32), toy_config(eos_token_ids=[]),
        toy_runner(64), clock=lambda: next(clock),
    )  # fmt: skip
    core.add_request("a", prompt(8), SamplingParams(max_tokens=3))
    core.add_request("b", prompt(40), SamplingParams(max_tokens=2))
    core.step()
    assert core.metrics() | {"uptime_s": 0} == {
        "active_requests": 2, "queued_requests": 0, "prefilling_requests": 1, "completed_requests": 0,
        "cancelled_requests": 0, "failed_requests": 0, "tokens_generated": 1, "kv_pages_used": 4,
        "kv_pages_cached": 0, "kv_pages_total": 64, "wasted_slots": (16 - 8) + (48 - 24), "batch_last": 0,
        "batch_avg": 0.0, "decode_steps": 0, "prefill_chunks": 2, "prefill_tokens": 32, "last_prefill_chunk_tokens": 32,
        "packed_calls": 1, "prefix_cache_hits": 0, "prefix_cache_tokens": 0, "prefix_cache_evictions": 0,
        "nan_rows": 0, "uptime_s": 0,
    }  # fmt: skip
    Answers().drain(core)
    done = core.metrics()
    assert (done["completed_requests"], done["tokens_generated"], done["active_requests"]) == (2, 5, 0)
    assert (done["decode_steps"], done["batch_last"], done["batch_avg"]) == (2, 2, 1.5)
    assert (done["prefill_tokens"], done["packed_calls"], done["wasted_slots"]) == (48, 1, 0)
    assert done["uptime_s"] > 0


def test_a_known_beginning_is_not_computed_again() -> None:
    core = make_core(model={"eos_token_ids": []})
    core.add_request("a", prompt(50), GREEDY)
    first = Answers().drain(core)
    assert (first.finished["a"].cached_tokens, core.metrics()["kv_pages_cached"]) == (0, 3)
    core.add_request("b", prompt(50), GREEDY)
    core.add_request("c", prompt(50)[:48], GREEDY)  # the page of its last token is not taken
    core.add_request("d", prompt(50), GREEDY, cache_salt="mine")
    answers = Answers().drain(core)
    assert [answers.finished[name].cached_tokens for name in "bcd"] == [48, 32, 0]
    assert answers.tokens["b"] == answers.tokens["d"] == first.tokens["a"]
    assert answers.tokens["c"] == alone(prompt(50)[:48], GREEDY)[0]
    metrics = core.metrics()
    assert (metrics["prefix_cache_hits"], metrics["prefix_cache_tokens"], metrics["prefill_tokens"]) == (2, 80, 118)
    core.add_request("e", prompt(50), SamplingParams(max_tokens=20))
    answer = Answers().drain(core).tokens["e"]
    core.add_request("f", [*prompt(50), *answer, 3], GREEDY)  # the answer's full page is found too
    assert Answers().drain(core).finished["f"].cached_tokens == 64
    core.check()


def test_the_prefix_cache_can_be_off() -> None:
    core = make_core(prefix_cache=False)
    for name in "ab":
        core.add_request(name, prompt(50), GREEDY)
        assert Answers().drain(core).finished[name].cached_tokens == 0
    assert (core.metrics()["kv_pages_cached"], core.metrics()["prefix_cache_hits"]) == (0, 0)


def test_prompts_are_computed_one_a_step_without_batched_prefill() -> None:
    core = make_core(batched_prefill=False)
    for name in "abc":
        core.add_request(name, prompt(4, ord(name)), GREEDY)
    answers = Answers().drain(core)
    assert core.metrics()["packed_calls"] == 0
    for name in "abc":
        assert answers.tokens[name] == alone(prompt(4, ord(name)), GREEDY)[0]


@pytest.mark.parametrize(("settings", "largest", "chunks"), [
    ({"prefill": "serial"}, 1, 70 + 5 + 40), ({"chunked_prefill": False}, 70, 3), ({"prefill_budget": 256}, 70, 3),
])  # fmt: skip
def test_a_prompt_at_once_or_token_by_token(settings: dict[str, Any], largest: int, chunks: int) -> None:
    runner = toy_runner(64, max_rows=4 + 256, max_sequences=4, context=256)
    core = make_core(runner=runner, **{"prefill_budget": None, "batched_prefill": False, **settings})
    seen = 0
    for name, length in (("a", 70), ("b", 5), ("c", 40)):
        core.add_request(name, prompt(length, ord(name)), GREEDY)
    answers = Answers()
    while core.has_work():
        answers.take(core.step())
        seen = max(seen, int(core.metrics()["last_prefill_chunk_tokens"]))
    assert (seen, core.metrics()["prefill_chunks"]) == (largest, chunks)
    for name, length in (("a", 70), ("b", 5), ("c", 40)):
        assert answers.tokens[name] == alone(prompt(length, ord(name)), GREEDY)[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 3])
def test_a_request_without_finite_logits_fails_alone(bad: float, at: int) -> None:
    """``at`` 0: the prompt's logits; else a decode step's."""
    core = make_core(model={"eos_token_ids": []})
    forward = core.runner._forward  # type: ignore[attr-defined]
    ids = prompt(40, 1)

    def faulty(weights: Any, ops: Any, batch: Any, cache: Any) -> Any:
        logits = forward(weights, ops, batch, cache)
        for i, row in enumerate(batch.logit_rows):
            sequence = batch.row_sequence[row]
            if batch.context_lengths[sequence] == len(ids) + at and batch.page_tables[sequence, 0] == poisoned[0]:
                logits[i, 7] = bad
        logits[:, TOKENS:] = np.nan  # padding is nobody's business
        logits[:, 3] = -np.inf  # a forbidden token is not a fault
        return logits

    core.runner._forward = faulty  # type: ignore[attr-defined]
    core.add_request("a", prompt(40, 0), GREEDY)
    core.add_request("b", ids, GREEDY)
    core.launch()
    poisoned = [core.scheduler.prefilling[1].page_row[0]]
    answers = Answers()
    answers.take(core.collect())
    answers.drain(core)
    assert answers.finished["a"].finish_reason == "length"
    assert len(answers.tokens["a"]) == 8
    end = answers.finished["b"]
    assert (end.finish_reason, end.completion_tokens, len(answers.tokens.get("b", []))) == ("error", at, at)
    assert end.error == f"the model's logits after {40 + at} tokens of this request hold NaN or infinity"
    assert core.failure is None
    metrics = core.metrics()
    assert (metrics["nan_rows"], metrics["failed_requests"], metrics["kv_pages_used"]) == (1, 1, 0)
    poisoned = [-1]
    core.add_request("c", ids, GREEDY)  # and what the failed request computed is not used again
    core.add_request("d", prompt(40, 0), GREEDY)
    again = Answers().drain(core)
    assert [again.finished[name].cached_tokens for name in "cd"] == [0, 32]
    assert again.finished["c"].finish_reason == "length"
    core.check()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("odd"), "the engine failed: ValueError: odd"),
        (EngineError("1 logit row is missing"), "the engine failed: 1 logit row is missing"),
        (EngineError("the engine failed: it is gone"), "the engine failed: it is gone"),
        (EngineError("two\nlines"), "the engine failed: two"),
        (EngineError(), "the engine failed: EngineError: "),
    ],
)
def test_a_failure_says_so_once(error: Exception, text: str) -> None:
    assert failure_text(error) == text


def test_engine_info_says_what_was_resolved() -> None:
    info = make_core().engine_info()
    assert (info.device, info.context, info.kv_pages, info.page_tokens) == ("cpu", 256, 64, 16)
    assert (info.token_count, info.eos_token_ids) == (TOKENS, [EOS])


class Flaky:
    """A runner that fails in ``launch`` or ``collect`` at its third step."""

    def __init__(self, where: str) -> None:
        self.inner: ModelRunner = toy_runner(64)
        self.where, self.steps = where, 0

    def launch(self, plan: Plan) -> None:
        self.steps += 1
        if self.where == "launch" and self.steps == 3:
            raise ZeroDivisionError("no\nluck")
        self.inner.launch(plan)

    def collect(self) -> Any:
        if self.where == "collect" and self.steps == 3:
            raise ZeroDivisionError("no\nluck")
        return self.inner.collect()


@pytest.mark.parametrize("where", ["launch", "collect"])
def test_a_failing_step_fails_everything_with_one_clear_line(where: str, caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(runner=Flaky(where), max_batch=2, model={"eos_token_ids": []})
    for name in "abc":
        core.add_request(name, prompt(20), GREEDY)
    answers = Answers()
    with caplog.at_level(logging.CRITICAL):
        for _ in range(3):
            answers.take(core.step())
    assert set(answers.finished) == set("abc")
    assert {f.finish_reason for f in answers.finished.values()} == {"error"}
    assert {f.error for f in answers.finished.values()} == {"the engine failed: ZeroDivisionError: no"}
    assert core.failure == "the engine failed: ZeroDivisionError: no"
    assert core.has_work()  # so that its owner meets the error
    for call in (core.step, lambda: core.add_request("d", [1], GREEDY)):
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            call()
    assert core.metrics()["failed_requests"] == 3
    assert core.metrics()["kv_pages_used"] == 0
    core.check()


def test_a_closed_engine_refuses() -> None:
    core = make_core()
    core.close()
    with pytest.raises(EngineError, match="closed"):
        core.add_request("a", [1], GREEDY)


def test_requests_may_come_from_other_threads_while_steps_run() -> None:
    core = make_core(max_queue=1000)
    wanted = {f"{t}-{i}": prompt(5 + i % 30, 100 * t + i) for t in range(3) for i in range(40)}

    def submit(thread: int) -> None:
        for i in range(40):
            core.add_request(f"{thread}-{i}", wanted[f"{thread}-{i}"], GREEDY)
            if i % 5 == 0:
                core.cancel(f"{thread}-{i}")
            core.metrics()

    threads = [threading.Thread(target=submit, args=(t,)) for t in range(3)]
    answers = Answers()
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or core.has_work():
        answers.take(core.step())
    assert set(answers.finished) == set(wanted)
    for name, end in answers.finished.items():
        if end.finish_reason != "cancelled":
            assert answers.tokens.get(name, []) == alone(wanted[name], GREEDY)[0]
    core.check()


# -- a request's answer does not depend on the others

requests = st.tuples(
    st.integers(1, 200),  # prompt tokens
    st.integers(1, 40),  # max_tokens
    st.sampled_from([None, 0.7, 3.0]),  # temperature
    st.integers(0, 9),  # arrival, in steps
    st.one_of(st.none(), st.none(), st.integers(0, 12)),  # cancelled so many steps after
)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(requests, min_size=1, max_size=10),
    st.integers(1, 5),
    st.integers(1, 90),
    st.one_of(st.none(), st.integers(1, 50)),
    st.sampled_from([16, 20, 40]),
)
def test_answers_are_those_a_request_gets_alone(
    load: list[Any], max_batch: int, budget: int, chunk: int | None, pages: int
) -> None:
    """Tokens and logit bits, under arrivals, cancellations, chunk caps, budgets and pools that force waiting."""
    core = make_core(pages=pages, max_batch=max_batch, prefill_budget=budget, prefill_chunk_tokens=chunk)
    logits: dict[str, list[bytes]] = {}

    def note(sampled: Any, rows: Any) -> None:
        for request, row in zip(sampled, rows, strict=True):
            logits.setdefault(request.request_id, []).append(row.tobytes())

    core.runner.on_logits = note  # type: ignore[attr-defined]
    answers = Answers()
    accepted: dict[str, tuple[list[int], SamplingParams]] = {}
    for now in range(25):
        for number, (length, max_tokens, temperature, arrival, cancel) in enumerate(load):
            name = str(number)
            if arrival == now:
                seed = None if temperature is None else number
                params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
                try:
                    core.add_request(name, prompt(length, number), params)
                    accepted[name] = prompt(length, number), params
                except RequestError:
                    assert length + max_tokens > min(256, pages * 16)
            if cancel is not None and arrival + cancel == now:
                core.cancel(name)
        answers.take(core.step())
        core.check()
    answers.drain(core)
    assert set(answers.finished) == set(accepted)
    for name, (ids, params) in accepted.items():
        tokens, bits, end = alone(ids, params)
        got, seen = answers.tokens.get(name, []), logits.get(name, [])
        if answers.finished[name].finish_reason == "cancelled":
            assert load[int(name)][4] is not None
            assert got == tokens[: len(got)]
            assert seen == bits[: len(seen)]
        else:
            assert (got, answers.finished[name].finish_reason) == (tokens, end.finish_reason)
            assert seen == bits
    core.check()
    assert core.metrics()["kv_pages_used"] == 0


def test_a_real_model_answers_as_alone(tmp_path: Path) -> None:
    phases: list[str] = []
    config = EngineConfig(context=64, max_batch=4, prefill_budget=20, kv_pages=12)
    core = EngineCore.from_checkpoint(make_checkpoint(tmp_path / "model"), config, phases.append)
    assert phases == ["loading weights", "compiling kernels"]
    count = core.engine_info().token_count
    load = {str(i): [(7 * i + j * j) % count for j in range(1 + 6 * i)] for i in range(7)}
    params = SamplingParams(max_tokens=6, temperature=0.9, ignore_eos=True)
    for name, ids in load.items():
        core.add_request(name, ids, params)
    together = Answers().drain(core).tokens
    for name, ids in load.items():
        core.add_request(name, ids, params)
        assert Answers().drain(core).tokens[name] == together[name]
    core.check()


# -- configuration


def test_defaults_come_from_the_model_and_the_machine() -> None:
    config = resolve_config(EngineConfig(), toy_config(context_length=8192))
    assert (config.device, config.context, config.prefill_budget) == ("cpu", CPU_CONTEXT, CPU_PREFILL_BUDGET)
    assert config.kv_pages == 16 * CPU_CONTEXT // 16
    assert config.threads
    assert resolve_config(config, toy_config(context_length=8192)) == config
    assert resolve_config(EngineConfig(), toy_config(context_length=100)).context == 100
    assert resolve_config(EngineConfig(max_batch=3), toy_config(context_length=100)).kv_pages == 3 * 7


def test_kv_memory_becomes_pages() -> None:
    page = 16 * 2 * 4 * 4  # tokens × (K and V) × kv_dim × float32
    assert resolve_config(EngineConfig(kv_memory=5 * page + 1), toy_config()).kv_pages == 5
    with pytest.raises(ConfigError, match="holds no page of 512 bytes"):
        resolve_config(EngineConfig(kv_memory=page - 1), toy_config())


def test_what_a_model_or_machine_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="context 1025 is above the model's 1024"):
        resolve_config(EngineConfig(context=1025), toy_config())
    with pytest.raises(ConfigError, match="quant f16 needs device cuda; use int8 or f32 on a CPU"):
        resolve_config(EngineConfig(device="cpu", quant="f16"), toy_config())
    assert resolve_config(EngineConfig(device="cuda", quant="f16"), toy_config()).quant == "f16"


def test_ways_to_prefill_become_a_budget() -> None:
    serial = resolve_config(EngineConfig(prefill="serial"), toy_config())
    assert (serial.prefill_budget, serial.prefill) == (1, "auto")
    whole = resolve_config(EngineConfig(chunked_prefill=False, context=700), toy_config())
    assert (whole.prefill_budget, whole.batched_prefill, whole.chunked_prefill) == (700, False, True)
    for config in (serial, whole):
        assert resolve_config(config, toy_config()) == config
