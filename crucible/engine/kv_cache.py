"""KVPages: which request holds which pages of the KV cache. It knows no memory, only page numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from crucible.config.engine import PAGE_TOKENS
from crucible.engine.prefix_cache import PrefixCache
from crucible.engine.request import Request
from crucible.native.pages import PagePool


class KVPages:
    """Pages for a request's whole life are taken by ``reserve`` and given back by ``release``, and nowhere else.

    prefix_cache: full pages are shared by content, and outlive their requests until their memory is needed.
    """

    def __init__(self, num_pages: int, *, prefix_cache: bool = False) -> None:
        self.pool = PagePool(num_pages)
        self.prefix = PrefixCache(self.pool, enabled=prefix_cache)

    @property
    def total(self) -> int:
        return self.pool.num_pages

    @property
    def used(self) -> int:
        """Pages held by live requests."""
        return self.pool.used

    @property
    def cached(self) -> int:
        """Pages that no request holds, kept for what they contain and given up when they are needed."""
        return self.pool.cached_count

    def reserve(self, request: Request) -> bool:
        """Give ``request`` pages for its prompt and all it may generate; False, and nothing taken, without enough.

        Those that hold the beginning of its prompt already are shared, not taken from the pool.
        """
        pool = self.pool
        shared, reclaimable, chain = self.prefix.match(request)
        fresh = request.pages_needed - len(shared)
        if fresh > pool.available - reclaimable:
            return False
        for page in shared:  # first, so that the allocation cannot reclaim them
            pool.retain(page)
        pages = pool.allocate(fresh)
        if pages is None:
            raise RuntimeError(f"{fresh} pages should be available, but {pool.available} are")
        request.assign_pages(shared + pages, len(shared) * PAGE_TOKENS, chain)
        self.prefix.count(request)
        return True

    def release(self, request: Request) -> None:
        """Take the request's pages back. A request without pages is left as it is."""
        self.pool.release(request.take_pages())

    def check(self, requests: Iterable[Request]) -> None:
        """Raises RuntimeError unless every page is free, cached, or referenced by exactly its holders.

        Their published pages must hold their tokens.
        """
        requests = list(requests)
        self.pool.check()
        held = Counter(int(page) for request in requests for page in request.page_row[: request.page_count])
        for page in range(self.pool.num_pages):
            if self.pool.references(page) != held[page]:
                raise RuntimeError(f"page {page} has {self.pool.references(page)} references but {held[page]} holders")
        self.prefix.check(requests)
