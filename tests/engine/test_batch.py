from __future__ import annotations

import numpy as np
import pytest

from crucible.config import SamplingParams
from crucible.config.engine import PAGE_TOKENS as CONFIG_PAGE_TOKENS
from crucible.engine.batch import Batch
from crucible.engine.request import Request, prompt_array
from crucible.errors import RequestError
from crucible.native.batch import FULL, PAGE_TOKENS, RUNS_ON, STOPPED, advance, pages_for, wasted_slots

NO_EOS = np.zeros(0, np.int32)


def request(name: str, prompt: int, max_tokens: int, first_page: int, computed: int = 0, **params: object) -> Request:
    """A request with ids name × 100 … and consecutive pages from ``first_page``."""
    ids = np.arange(prompt, dtype=np.int32) + 100 * int(name)
    made = Request(name, ids, max_tokens, SamplingParams(max_tokens=max_tokens, **params))  # type: ignore[arg-type]
    made.assign_pages(list(range(first_page, first_page + made.pages_needed)), computed)
    return made


def ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def test_a_page_is_what_the_configuration_says() -> None:
    assert PAGE_TOKENS == CONFIG_PAGE_TOKENS
    assert [pages_for(n) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]


def test_fill_writes_decode_rows_then_chunks() -> None:
    decode = request("1", 20, 5, 3, computed=19, temperature=0.5, top_k=7, seed=2**64 - 1)
    whole = request("2", 4, 60, 10)
    part = request("3", 40, 1, 20, computed=10)
    batch = Batch(max_rows=32, max_sequences=4, max_pages=5)
    batch.fill([decode], [whole, part], [4, 8])
    assert batch.token_ids.tolist() == [119, 200, 201, 202, 203, *range(310, 318)]
    assert batch.positions.tolist() == [19, 0, 1, 2, 3, *range(10, 18)]
    assert batch.row_sequence.tolist() == [0, 1, 1, 1, 1, *[2] * 8]
    assert batch.sequence_starts.tolist() == [0, 1, 5, 13]
    assert batch.context_lengths.tolist() == [20, 4, 18]
    assert batch.page_tables.tolist() == [[3, 4, 0, 0, 0], [10, 0, 0, 0, 0], [20, 21, 0, 0, 0]]
    assert batch.logit_rows.tolist() == [0, 4]
    assert batch.temperatures.tolist() == [0.5, 0]
    assert batch.top_ks[0] == 7
    assert batch.seeds[0] == 2**64 - 1
    assert batch.draw_positions.tolist() == [20, 4]
    assert all(view.dtype == np.int32 for view in (batch.token_ids, batch.page_tables, batch.logit_rows))


def test_a_shorter_plan_leaves_nothing_of_a_longer_one() -> None:
    batch = Batch(max_rows=80, max_sequences=2, max_pages=5)
    batch.fill([], [request("1", 70, 2, 1)], [70])
    assert batch.page_tables.tolist() == [[1, 2, 3, 4, 5]]
    batch.fill([], [request("2", 17, 2, 7)], [17])
    assert batch.page_tables.tolist() == [[7, 8, 0, 0, 0]]
    batch.fill([])
    assert (len(batch.token_ids), batch.page_tables.shape, batch.sequence_starts.tolist()) == (0, (0, 5), [0])


def test_views_share_the_preallocated_buffers() -> None:
    batch = Batch(8, 2, 2)
    one = request("1", 3, 2, 0)
    batch.fill([], [one], [3])
    first = batch.token_ids
    batch.fill([], [one], [3])
    assert np.shares_memory(first, batch.token_ids)


def test_what_does_not_fit_is_refused() -> None:
    one = request("1", 10, 2, 0)
    with pytest.raises(RuntimeError, match="does not fit a batch of 8 rows"):
        Batch(8, 2, 2).fill([], [one], [9])
    with pytest.raises(RuntimeError, match="does not fit"):
        Batch(64, 1, 2).fill([], [one, one], [1, 1])
    with pytest.raises(RuntimeError, match="does not fit"):
        Batch(64, 2, 1).fill([], [request("2", 20, 2, 0)], [20])
    for count in (0, -1, 11):
        with pytest.raises(RuntimeError, match="has no rows"):
            Batch(64, 2, 2).fill([], [one], [count])
    homeless = Request("3", ids(1, 2), 3, SamplingParams())
    with pytest.raises(RuntimeError, match="0 pages held"):
        Batch(64, 2, 2).fill([], [homeless], [2])
    with pytest.raises(RuntimeError, match="counts"):
        Batch(64, 2, 2).fill([], [one], [])
    with pytest.raises(TypeError):
        Batch(64, 2, 2).fill(["not a request"])  # type: ignore[list-item]


def test_advance_moves_positions_and_stores_tokens() -> None:
    decode, whole, part = request("1", 20, 5, 0, computed=19), request("2", 4, 60, 5), request("3", 40, 1, 20)
    sampled, ended = advance([decode], [whole, part], [4, 8], ids(7, 8), NO_EOS)
    assert sampled == [decode, whole]
    assert ended == []
    assert (decode.output, whole.output, part.output) == ([7], [8], [])
    assert [(r.length, r.computed, r.remaining) for r in (decode, whole, part)] == [(21, 20, 1), (5, 4, 1), (40, 8, 32)]
    assert decode.prompt.tolist() == list(range(100, 120))
    assert wasted_slots([decode, whole, part]) == (32 - 20) + (64 - 4) + (48 - 8)


def test_a_request_ends_by_eos_or_at_its_limit() -> None:
    stop, full, deaf = request("1", 4, 9, 0), request("2", 4, 1, 5), request("3", 4, 9, 9, ignore_eos=True)
    _, ended = advance([], [stop, full, deaf], [4, 4, 4], ids(6, 7, 6), ids(5, 6))
    assert ended == [stop, full]
    assert [r.finish_code for r in (stop, full, deaf)] == [STOPPED, FULL, RUNS_ON]
    last = request("4", 4, 1, 0)
    advance([], [last], [4], ids(6), ids(6))
    assert last.finish_code == STOPPED


def test_a_wrong_number_of_tokens_changes_nothing() -> None:
    one = request("1", 4, 9, 0)
    for tokens in (ids(), ids(1, 2)):
        with pytest.raises(RuntimeError, match="1 logit rows"):
            advance([], [one], [4], tokens, NO_EOS)
    assert (one.length, one.computed) == (4, 0)


def test_pages_are_assigned_once() -> None:
    one = request("1", 20, 5, 3)
    with pytest.raises(RuntimeError, match="cannot take"):
        one.assign_pages([9])
    assert one.take_pages() == [3, 4]
    assert one.take_pages() == []
    with pytest.raises(RuntimeError, match="cannot take"):
        one.assign_pages([1, 2, 3])
    with pytest.raises(RuntimeError, match="20 tokens computed"):
        one.assign_pages([1, 2], computed=20)


@pytest.mark.parametrize("bad", [[], [[1]], [1.0], ["a"], [True, False], [-1], [31], [2**70], [None], "text", None, 3])
def test_bad_prompts_are_refused(bad: object) -> None:
    with pytest.raises(RequestError) as caught:
        prompt_array(bad, 31)  # type: ignore[arg-type]
    assert caught.value.param == "prompt"


def test_good_prompts_become_int32() -> None:
    for good in ([0, 30], (0, 30), np.array([0, 30], np.uint8), np.array([0, 30], np.int64)):
        array = prompt_array(good, 31)
        assert array.dtype == np.int32
        assert array.tolist() == [0, 30]
