from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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


class PoolMachine(RuleBasedStateMachine):
    """The pool against a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12)
        self.model: Counter[int] = Counter()

    @rule(count=st.integers(0, 14))
    def allocate(self, count: int) -> None:
        pages = self.pool.allocate(count)
        free = 12 - len(+self.model)
        assert (pages is None) == (count > free)
        if pages is not None:
            assert len(set(pages)) == count
            assert not any(self.model[page] for page in pages)
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
        if wanted <= self.model:
            self.pool.release(pages)
            self.model -= wanted
        else:
            with pytest.raises(RuntimeError, match="is free"):
                self.pool.release(pages)

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert [self.pool.references(page) for page in range(12)] == [self.model[page] for page in range(12)]
        assert self.pool.used == len(+self.model)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
