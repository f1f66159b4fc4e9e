"""KVPages: which request holds which pages of the KV cache. It knows no memory, only page numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from crucible.engine.request import Request
from crucible.native.pages import PagePool


class KVPages:
    """Pages for a request's whole life are taken by ``reserve`` and given back by ``release``, and nowhere else."""

    def __init__(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)

    @property
    def total(self) -> int:
        return self.pool.num_pages

    @property
    def used(self) -> int:
        """Pages held by live requests."""
        return self.pool.used

    def reserve(self, request: Request) -> bool:
        """Give ``request`` pages for its prompt and all it may generate; False, and nothing taken, without enough."""
        pages = self.pool.allocate(request.pages_needed)
        if pages is None:
            return False
        request.assign_pages(pages)
        return True

    def release(self, request: Request) -> None:
        """Take the request's pages back. A request without pages is left as it is."""
        self.pool.release(request.take_pages())

    def check(self, requests: Iterable[Request]) -> None:
        """Raises RuntimeError unless the pool is consistent and its references are exactly those of ``requests``."""
        self.pool.check()
        held = Counter(int(page) for request in requests for page in request.page_row[: request.page_count])
        for page in range(self.pool.num_pages):
            if self.pool.references(page) != held[page]:
                raise RuntimeError(f"page {page} has {self.pool.references(page)} references but {held[page]} holders")
