from __future__ import annotations

import numpy as np
import pytest

from crucible.config import SamplingParams
from crucible.engine.kv_cache import KVPages
from crucible.engine.prefix_cache import PrefixCache
from crucible.engine.request import Request
from crucible.native.batch import advance
from crucible.native.pages import PagePool

NONE = np.zeros(0, np.int32)


def request(prompt: list[int], max_tokens: int = 1, salt: str | None = None) -> Request:
    ids = np.array(prompt, np.int32)
    return Request("r", ids, max_tokens, SamplingParams(max_tokens=max_tokens), cache_salt=salt)


def serve(pages: KVPages, made: Request, *, release: bool = True) -> Request:
    """Compute the whole prompt but its last token, publish, and let the request go."""
    assert pages.reserve(made)
    advance([], [made], [made.prompt_tokens - 1 - made.computed], NONE, NONE)
    pages.prefix.publish([], [made])
    pages.check([made])
    if release:
        pages.release(made)
    return made


def test_the_page_of_the_last_prompt_token_is_never_shared() -> None:
    pages = KVPages(16, prefix_cache=True)
    serve(pages, request([7] * 65))
    for length, cached in ((65, 64), (64, 48), (49, 48), (48, 32), (17, 16), (16, 0), (1, 0)):
        made = request([7] * length)
        assert pages.reserve(made)
        assert (made.cached_tokens, made.computed) == (cached, cached)
        pages.check([made])
        pages.release(made)
    assert pages.prefix.hits == 5
    assert pages.prefix.hit_tokens == 64 + 48 + 48 + 32 + 16


def test_pages_found_are_not_room_for_new_ones() -> None:
    """Five pages, four of them cached: a request that shares three needs two more, of which there are two."""
    pages = KVPages(5, prefix_cache=True)
    serve(pages, request([7] * 65, max_tokens=1))
    assert (pages.cached, pages.used) == (4, 0)
    other = request([1] * 16, max_tokens=1)
    assert pages.reserve(other)  # takes the free page and reclaims the deepest
    assert pages.cached == 3
    wanted = request([7] * 50, max_tokens=15)  # 5 pages, 3 of them found, none of which may be reclaimed
    assert not pages.reserve(wanted)
    assert (wanted.page_count, pages.cached, pages.prefix.hits) == (0, 3, 0)
    pages.check([other])
    pages.release(other)
    assert pages.reserve(wanted)
    assert (wanted.cached_tokens, pages.used, pages.cached) == (48, 5, 0)
    pages.check([wanted])


def test_salts_separate() -> None:
    pages = KVPages(64, prefix_cache=True)
    for salt in (None, "a", "b", ""):
        assert serve(pages, request([7] * 33, salt=salt)).cached_tokens == 0
    for salt in (None, "a", "b", ""):
        assert serve(pages, request([7] * 33, salt=salt)).cached_tokens == 32
    root = pages.prefix.root("a")
    assert root >> 63 == 1
    assert PrefixCache(PagePool(1)).root("a") != root  # another process makes others


def test_off_finds_and_keeps_nothing() -> None:
    pages = KVPages(8)
    for _ in range(2):
        assert serve(pages, request([7] * 33)).cached_tokens == 0
    assert (pages.cached, pages.used, pages.prefix.hits) == (0, 0, 0)


def test_a_page_with_other_content_than_its_holders_is_reported() -> None:
    pages = KVPages(8, prefix_cache=True)
    made = serve(pages, request([7] * 33), release=False)
    made.tokens[20] = 8
    with pytest.raises(RuntimeError, match="of request r holds"):
        pages.check([made])


def test_what_is_forgotten_is_found_by_nobody_and_freed_by_its_holders() -> None:
    pages = KVPages(8, prefix_cache=True)
    made = serve(pages, request([7] * 33), release=False)
    sharing = request([7] * 33)
    assert pages.reserve(sharing)
    pages.prefix.forget(made)
    pages.release(made)
    pages.check([sharing])
    again = request([7] * 33)
    assert pages.reserve(again)
    assert again.cached_tokens == 0
    pages.check([sharing, again])
    pages.release(sharing)
    assert (pages.used, pages.cached) == (3, 0)
    pages.check([again])
