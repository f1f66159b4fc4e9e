from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from crucible.native.batch import PAGE_TOKENS, RequestRow, advance, publish
from crucible.native.pages import PagePool


def test_allocates_all_or_nothing() -> None:
    pool = PagePool(4)
    assert pool.allocate(5) is None
    assert pool.free_count == 4
    taken = pool.allocate(4)
    assert taken is not None
    assert sorted(taken) == [0, 1, 2, 3]
    assert (pool.used, pool.free_count, pool.allocate(1), pool.allocate(0)) == (4, 0, None, [])


def test_free_list_is_last_in_first_out() -> None:
    pool = PagePool(8)
    pages = pool.allocate(3)
    assert pages
    pool.release([pages[0]])
    pool.release([pages[2]])
    assert pool.allocate(2) == [pages[2], pages[0]]


def test_a_retained_page_stays_until_its_last_release() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    assert pages
    pool.retain(pages[0])
    pool.release(pages)
    assert (pool.used, pool.references(pages[0])) == (1, 1)
    pool.release(pages)
    assert (pool.used, pool.references(pages[0])) == (0, 0)
    pool.check()


def test_double_free_is_an_error_and_changes_nothing() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    assert pages
    pool.release([pages[0]])
    with pytest.raises(RuntimeError, match=f"page {pages[0]} is free"):
        pool.release([pages[1], pages[0]])
    assert pool.references(pages[1]) == 1
    with pytest.raises(RuntimeError, match="is free"):
        pool.release([pages[1], pages[1]])
    assert (pool.used, pool.references(pages[1])) == (1, 1)
    pool.check()


@pytest.mark.parametrize("page", [-1, 4, 2**20])
def test_unknown_pages_are_refused(page: int) -> None:
    pool = PagePool(4)
    for call in (lambda: pool.release([page]), lambda: pool.retain(page), lambda: pool.references(page)):
        with pytest.raises(RuntimeError, match="not one of the pool's 4"):
            call()


def test_a_page_named_twice_in_one_release_is_listed_once() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    assert pages
    pool.retain(pages[0])
    pool.release(pages * 2)
    pool.check()
    assert pool.free_count == 2


@pytest.mark.parametrize("pages", [0, -3])
def test_an_empty_pool_is_refused(pages: int) -> None:
    with pytest.raises(ValueError, match="at least 1 page"):
        PagePool(pages)


# -- published pages


def ids(pages: list[int]) -> np.ndarray:
    """A page of equal ids for each number."""
    return np.repeat(np.array(pages, np.int32), PAGE_TOKENS)


def store(pool: PagePool, content: list[int], *, root: int = 0, share: bool = True) -> RequestRow | None:
    """A request whose prompt fills the pages ``content``, computed and published; ``None`` without enough pages."""
    row = RequestRow("r", np.append(ids(content), np.int32(0)), 1)
    found, cached, chain = pool.match(row.tokens, len(content) if share else 0, root)
    if len(content) - len(found) > pool.available - cached:
        return None
    for page in found:
        pool.retain(page)
    row.assign_pages(found + (pool.allocate(len(content) - len(found)) or []), len(found) * PAGE_TOKENS, chain)
    compute(row, (len(content) - len(found)) * PAGE_TOKENS)
    publish(pool, [], [row])
    return row


def compute(row: RequestRow, count: int) -> None:
    advance([], [row], [count], np.zeros(0, np.int32), np.zeros(0, np.int32))


def pages_of(row: RequestRow | None) -> list[int]:
    assert row is not None
    return row.page_row[: row.page_count].tolist()


def test_published_pages_are_found_by_content_and_outlive_their_holder() -> None:
    pool = PagePool(8)
    row = store(pool, [1, 2, 3])
    pages = pages_of(row)
    assert row
    assert pool.match(ids([1, 2, 3, 4]), 4)[:2] == (pages, 0)
    assert pool.match(ids([1, 2, 4]), 3)[0] == pages[:2]
    assert pool.match(ids([2, 3]), 2)[0] == []  # the same pages after others
    assert pool.match(ids([1, 2, 3]), 2)[0] == pages[:2]
    pool.release(row.take_pages())
    assert (pool.used, pool.cached_count, pool.free_count, pool.available) == (0, 3, 5, 8)
    assert pool.match(ids([1, 2, 3]), 3)[:2] == (pages, 3)
    assert pool.tokens(pages[1]) == [2] * 16
    pool.retain(pages[0])
    assert (pool.used, pool.cached_count) == (1, 2)
    pool.check()


def test_only_computed_pages_are_published() -> None:
    pool = PagePool(4)
    row = RequestRow("r", ids([1, 2]), 1)
    row.assign_pages(pool.allocate(3) or [])
    for count, found in ((15, 0), (1, 1), (15, 1)):
        compute(row, count)
        publish(pool, [], [row])
        assert len(pool.match(ids([1, 2]), 2)[0]) == found


def test_roots_share_nothing() -> None:
    pool = PagePool(8)
    first, second = store(pool, [1, 2]), store(pool, [1, 2], root=1 << 63)
    assert not set(pages_of(first)) & set(pages_of(second))
    assert pool.match(ids([1]), 1, 1 << 63)[0] == pages_of(second)[:1]
    assert pool.match(ids([1]), 1, 1 << 63 | 1)[0] == []


def test_the_least_recently_used_goes_first_and_a_chain_from_its_end() -> None:
    pool = PagePool(6)
    old, new = store(pool, [1, 2]), store(pool, [3, 4])
    assert old
    assert new
    (a, b), (c, d) = pages_of(old), pages_of(new)
    pool.release(old.take_pages())
    pool.release(new.take_pages())
    pool.allocate(2)  # the free ones
    assert pool.evictions == 0
    again = store(pool, [1])  # a is used once more
    assert pool.allocate(1) == [b]
    assert pool.match(ids([1, 2]), 2)[0] == [a]
    assert again
    pool.release(again.take_pages())
    assert pool.allocate(3) == [d, c, a]
    assert (pool.allocate(1), pool.evictions) == (None, 4)
    assert pool.tokens(a) is None
    pool.check()


def test_a_page_computed_twice_is_held_once() -> None:
    """Two requests in flight computed the same: the second gives up its copy, and the pages after it hang on."""
    pool = PagePool(9)
    first, second = store(pool, [1, 2]), store(pool, [1, 2, 3], share=False)
    assert first
    assert second
    assert pages_of(second)[:2] == pages_of(first)
    assert (pool.used, [pool.references(page) for page in pages_of(second)]) == (3, [2, 2, 1])
    pool.release(first.take_pages())
    pool.release(second.take_pages())
    pool.check()
    assert (pool.free_count, pool.cached_count, len(pool.match(ids([1, 2, 3]), 3)[0])) == (6, 3, 3)
    third = store(pool, [1, 2], share=False)  # also where the other copy has no holder
    assert (pool.used, pool.cached_count, pages_of(third)) == (2, 1, pool.match(ids([1, 2]), 2)[0])
    pool.check()


def test_a_parent_computed_anew_is_another_parent() -> None:
    """A page whose parent was forgotten is out of reach, not found after something else."""
    pool = PagePool(8)
    row = store(pool, [1, 2])
    pages = pages_of(row)
    assert row
    pool.forget(pages[:1])
    assert (pool.match(ids([1, 2]), 2)[0], pool.tokens(pages[0])) == ([], None)
    pool.check()
    again = store(pool, [1])
    assert pool.match(ids([1, 2]), 2)[0] == pages_of(again)
    pool.release(row.take_pages())
    assert (pool.cached_count, pool.free_count) == (1, 6)
    pool.forget(pages)
    assert (pool.cached_count, pool.free_count) == (0, 7)
    pool.forget(pages)
    pool.check()


def test_content_is_compared_where_hashes_collide() -> None:
    """A pool of one page has one bucket."""
    pool = PagePool(1)
    row = store(pool, [1])
    assert row
    for other in (0, 2, 3):
        assert pool.match(ids([other]), 1)[0] == []
        tokens = ids([1])
        tokens[other * 5] += 1
        assert pool.match(tokens, 1)[0] == []
    assert pool.match(ids([1]), 1, 1 << 63)[0] == []


def test_match_needs_its_tokens() -> None:
    for count in (-1, 3):
        with pytest.raises(ValueError, match="do not fill"):
            PagePool(1).match(ids([1, 2]), count)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a counter of references and a list of what was published."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12)
        self.model: Counter[int] = Counter()
        self.rows: list[RequestRow] = []

    @rule(count=st.integers(0, 14))
    def allocate(self, count: int) -> None:
        pages = self.pool.allocate(count)
        assert (pages is None) == (count > 12 - len(+self.model))
        if pages is not None:
            assert len(set(pages)) == count
            assert not any(self.model[page] for page in pages)
            assert not any(self.pool.tokens(page) for page in pages)
            self.model.update(pages)

    @precondition(lambda self: +self.model)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(+self.model)))
        self.pool.retain(page)
        self.model[page] += 1

    @rule(pages=st.lists(st.integers(0, 11), max_size=6))
    def release(self, pages: list[int]) -> None:
        wanted = Counter(pages)
        free = self.model - Counter(page for row in self.rows for page in pages_of(row))
        if wanted <= free:  # what a row holds, it releases
            self.pool.release(pages)
            self.model -= wanted
        elif not wanted <= self.model:
            with pytest.raises(RuntimeError, match="is free"):
                self.pool.release(pages)

    @rule(
        content=st.lists(st.integers(1, 3), min_size=1, max_size=5),
        root=st.sampled_from([0, 1 << 63]),
        share=st.booleans(),
    )
    def store(self, content: list[int], root: int, share: bool) -> None:
        row = store(self.pool, content, root=root, share=share)
        if row is not None:
            assert pages_of(row) == self.pool.match(ids(content), len(content), root)[0]
            assert [self.pool.tokens(page) for page in pages_of(row)] == [[one] * 16 for one in content]
            self.model.update(pages_of(row))
            self.rows.append(row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        row = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        pages = row.take_pages()
        self.pool.release(pages)
        self.model -= Counter(pages)
        assert all(self.pool.tokens(page) for page in pages)

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert [self.pool.references(page) for page in range(12)] == [self.model[page] for page in range(12)]
        assert self.pool.used == len(+self.model)
        for row in self.rows:
            assert all(self.pool.tokens(page) for page in pages_of(row))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
