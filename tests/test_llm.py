"""LLM: the engine in this process."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crucible import LLM, SamplingParams
from crucible.config.processors import available_processors
from crucible.errors import CheckpointError, ConfigError, EngineError, RequestError
from crucible.llm import Delta

PROMPTS = ["x" * 40, "Hello", "The sea was", [72, 105]]  # the first to be computed is the last to be done


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Path) -> Iterator[LLM]:
    with LLM(
        tiny_checkpoint, quant="f32", max_batch=4, max_queue=2, prefill_budget=16, prefill_chunk_tokens=4
    ) as loaded:
        yield loaded


@pytest.fixture(autouse=True)
def idle_afterwards(llm: LLM) -> Iterator[None]:
    """Whatever a test did, no request and no page may be left behind."""
    yield
    assert not llm.core.has_work()
    assert llm.core.metrics()["kv_pages_used"] == 0


def test_completions_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    together = llm.generate(PROMPTS, params)
    assert together == [llm.generate(prompt, params)[0] for prompt in PROMPTS]
    for prompt, completion in zip(PROMPTS, together, strict=True):
        assert completion.finish_reason == "length"
        assert completion.prompt_tokens == len(prompt)
        assert completion.completion_tokens == len(completion.token_ids) == 6


def test_more_prompts_than_the_queue_holds(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    completions = llm.generate([[number] for number in range(20)], params)
    assert [completion.token_ids for completion in completions] == [
        llm.generate([number], params)[0].token_ids for number in range(20)
    ]


def test_stream_pieces_make_the_completion(llm: LLM) -> None:
    held = 0
    for seed in range(20):  # random bytes: some end inside a character, which only the last delta can give
        params = SamplingParams(max_tokens=12, temperature=2.0, top_k=259, seed=seed)
        whole = llm.generate("Hello", params)[0]
        deltas = list(llm.stream("Hello", params))
        assert "".join(delta.text for delta in deltas) == whole.text
        assert [delta.token_id for delta in deltas[:-1]] == whole.token_ids
        assert (deltas[-1].token_id, deltas[-1].finish_reason) == (None, whole.finish_reason)
        assert deltas[-1].completion_tokens == whole.completion_tokens
        held += bool(deltas[-1].text)
    assert held


def test_a_closed_stream_gives_its_pages_back(llm: LLM) -> None:
    stream = llm.stream("Hello", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    assert llm.core.metrics()["kv_pages_used"] > 0
    stream.close()


def test_an_interrupted_call_leaves_an_idle_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = llm.core.step, iter(range(100))

    def interrupted() -> object:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SamplingParams(max_tokens=50, ignore_eos=True))


def test_a_seed_draws_the_same_and_another_does_not(llm: LLM) -> None:
    def ids(seed: int | None) -> list[int]:
        return llm.generate("Hello", SamplingParams(max_tokens=24, temperature=1.5, seed=seed, ignore_eos=True))[
            0
        ].token_ids

    assert ids(7) == ids(7)
    assert ids(7) != ids(8)
    assert ids(None) == ids(1234)


def test_an_end_of_sequence_id_is_counted_and_has_no_text(llm: LLM, tmp_path: Path) -> None:
    """A model whose end-of-sequence id is what this one says third stops there."""
    from tests.conftest import make_text_checkpoint

    ids = llm.generate("Hello", SamplingParams(max_tokens=6, ignore_eos=True))[0].token_ids
    eos = ids[2]
    expected = ids[: ids.index(eos)]
    with LLM(make_text_checkpoint(tmp_path / "stops", eos_token_ids=[eos]), quant="f32") as stopping:
        completion = stopping.generate("Hello", SamplingParams(max_tokens=6))[0]
    assert completion.finish_reason == "stop"
    assert completion.token_ids == expected
    assert completion.completion_tokens == len(expected) + 1


def test_no_max_tokens_means_up_to_the_context(llm: LLM) -> None:
    completion = llm.generate("Hello", SamplingParams(ignore_eos=True))[0]
    assert completion.prompt_tokens + completion.completion_tokens == llm.context


def test_chat_uses_the_template(tiny_chat_checkpoint: Path) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(tiny_chat_checkpoint, quant="f32") as chat:
        conversation = [{"role": "user", "content": "Hi"}]
        (one,) = chat.chat(conversation, params)
        ids = chat.encode("Hi", chat=True)
        assert ids[0] == 257
        assert chat.generate(ids, params) == [one]
        assert chat.chat([conversation, conversation], params) == [one, one]


@pytest.mark.parametrize("prompt", ["", [], [300], [262], [-1], "x" * 128])
def test_what_can_never_be_served_is_refused(llm: LLM, prompt: str | list[int]) -> None:
    with pytest.raises(RequestError):
        llm.generate([prompt, "Hello"] if prompt != [] else [[]], SamplingParams(max_tokens=4))


def test_an_unknown_setting_is_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="cuda"):
        LLM(tiny_checkpoint, device="cuda")
    with pytest.raises(TypeError):
        LLM(tiny_checkpoint, no_such_setting=1)


def test_a_failing_engine_is_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from crucible.llm import raise_failure

    raise_failure("stop", None)
    with pytest.raises(EngineError, match="broken"):
        raise_failure("error", "broken")


def test_calls_interleave(llm: LLM) -> None:
    """Each call gets the events of its own requests, whoever steps the engine."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    alone = list(llm.stream("The sea was", params)), list(llm.stream("Hello", params)), llm.generate(PROMPTS, params)
    first, second = llm.stream("The sea was", params), llm.stream("Hello", params)
    got: tuple[list[Delta], list[Delta]] = [next(first)], [next(second)]
    assert llm.generate(PROMPTS, params) == alone[2]
    for _ in range(5):
        got[0].append(next(first))
        got[1].append(next(second))
    assert llm.generate("x", params)
    got[1].extend(second)
    got[0].extend(first)
    assert got == alone[:2]


def test_a_closed_stream_leaves_the_others_alone(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    whole = list(llm.stream("Hello", params))
    kept, closed = llm.stream("Hello", params), llm.stream("The sea was", params)
    got = [next(kept)]
    next(closed)
    closed.close()
    assert [*got, *kept] == whole


def test_a_stream_that_fills_the_queue_does_not_hang_the_next_call(tiny_checkpoint: Path) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(tiny_checkpoint, quant="f32", max_batch=1, max_queue=0) as narrow:
        whole = list(narrow.stream("Hello", params))
        stream = narrow.stream("Hello", params)
        got = [next(stream)]
        assert len(narrow.generate(["a", "b"], params)) == 2
        assert [*got, *stream] == whole


def test_a_stream_whose_model_was_closed_ends(tiny_checkpoint: Path) -> None:
    """Resumed it says so, and thrown away it is silent (pytest turns an unraisable exception into a warning)."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(tiny_checkpoint, quant="f32") as closing:
        resumed, dropped = closing.stream("Hello", params), closing.stream("Hello", params)
        next(resumed), next(dropped)
    with pytest.raises(EngineError, match="closed"):
        list(resumed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dropped.close()


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint16])
def test_arrays_are_prompts(llm: LLM, kind: type) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    (expected,) = llm.generate([72, 105], params)
    ids = np.array([72, 105], kind)
    assert llm.generate(ids, params) == [expected]
    assert llm.generate(list(ids), params) == [expected]
    assert llm.generate(ids.reshape(1, 2), params) == [expected]
    assert llm.generate([ids, "Hi", tuple(ids)], params) == [expected] * 3
    assert list(llm.stream(ids, params)) == list(llm.stream([72, 105], params))


@pytest.mark.parametrize(
    "prompt",
    [b"Hi", bytearray(b"Hi"), 5, np.int64(5), np.array(5), 1.5, {"prompt": "Hi"}, [b"Hi"], [5, "Hi"], [["Hi"]], [1.0],
     [[1.0]], np.array([1.0]), [True], [[1, 2], 3], [None], None, [{1, 2}]],
)  # fmt: skip
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        llm.generate(prompt, SamplingParams(max_tokens=1))
    assert "\n" not in str(refusal.value)
    with pytest.raises(RequestError):
        next(llm.stream(prompt, SamplingParams(max_tokens=1)))


def test_params_of_another_kind_are_refused(llm: LLM) -> None:
    parameters: Any = {"max_tokens": 3}
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate("Hi", parameters)


@pytest.mark.skipif(available_processors() < 2, reason="needs two processors")
def test_the_number_of_threads_belongs_to_the_model(tiny_checkpoint: Path) -> None:
    """Numba keeps it for each thread that launches kernels, and models share a process."""
    import numba

    used: list[int] = []

    def compute(model: LLM) -> None:
        model.generate("Hello", SamplingParams(max_tokens=2))
        used.append(numba.get_num_threads())

    with LLM(tiny_checkpoint, quant="f32", threads=1) as one, LLM(tiny_checkpoint, quant="f32", threads=2) as two:
        compute(one)
        compute(two)
        compute(one)
        for model in (one, two):
            thread = threading.Thread(target=compute, args=(model,))
            thread.start()
            thread.join()
    assert used == [1, 2, 1, 1, 2]


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    from tests.conftest import make_text_checkpoint

    larger = make_text_checkpoint(tmp_path / "larger", vocab_size=258, token_count=258)
    with pytest.raises(CheckpointError, match=r"the tokenizer has 259 ids and the model only 258 "):
        LLM(larger)
    smaller = make_text_checkpoint(tmp_path / "smaller", token_count=264)
    with pytest.raises(CheckpointError, match=r"may generate 264 ids \(token_count\) and the tokenizer has only 259"):
        LLM(smaller)


def test_an_id_that_the_vocabulary_leaves_out_may_be_chosen(tmp_path: Path) -> None:
    """Every id but two letters is a hole, so the model speaks almost nothing else."""
    from crucible.vocabulary import Vocabulary
    from tests.checkpoints import make_checkpoint

    tokens = [b"", b"a", b"b", *[b""] * 91, b"<end>"]
    files = {"tokenizer.vocab": Vocabulary("gpt2", tokens, frozenset([94])).to_bytes()}
    holes = make_checkpoint(tmp_path / "holes", files=files, token_count=95)
    params = SamplingParams(max_tokens=30, temperature=2.0, ignore_eos=True)
    with LLM(holes, quant="f32") as model:
        (whole,) = model.generate("ab", params)
        assert set(whole.token_ids) - {1, 2, 94}
        deltas = list(model.stream("ab", params))
    assert (
        "".join(delta.text for delta in deltas)
        == whole.text
        == "".join({1: "a", 2: "b"}.get(token, "") for token in whole.token_ids)
    )
