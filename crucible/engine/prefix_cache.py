"""PrefixCache: which requests may start from KV that earlier ones left behind. It knows no memory and no model.

The unit is the full page. The KV of a page depends on its tokens and those before it only (docs/architecture.md, "Why
neighbours do not matter"), so a shared page has the bits that the request would have computed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

from crucible.config.engine import PAGE_TOKENS
from crucible.engine.request import Request
from crucible.native.batch import publish
from crucible.native.pages import PagePool

SALTED = 1 << 63
"""Set in the root of every salt, and in no page's identity (crucible.native.pages)."""


class PrefixCache:
    """Finds and publishes the full pages of ``pool``; with ``enabled=False`` it does neither.

    hits: requests that started from cached pages. hit_tokens: prompt tokens they did not compute.
    """

    def __init__(self, pool: PagePool, *, enabled: bool = True) -> None:
        self.pool = pool
        self.enabled = enabled
        self.hits = 0
        self.hit_tokens = 0
        self._key = os.urandom(16)  # so that nobody can make two salts that share a root
        self._roots: tuple[str, int] | None = None  # the last salt's root: a waiting request asks in every plan

    def match(self, request: Request) -> tuple[list[int], int, int]:
        """The pages ``request`` may start from: (pages, how many have no holder, identity of the last or the root).

        Never the page of the prompt's last token: that token is computed for its logits, and a shared page is never
        written.
        """
        root = 0 if request.cache_salt is None else self.root(request.cache_salt)
        if not self.enabled:
            return [], 0, root
        return self.pool.match(request.tokens, (request.prompt_tokens - 1) // PAGE_TOKENS, root)

    def root(self, salt: str) -> int:
        """What the first page of every sequence with this salt follows: requests with different salts share nothing."""
        if self._roots is None or self._roots[0] != salt:
            digest = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8, key=self._key).digest()
            self._roots = salt, int.from_bytes(digest, "little") | SALTED
        return self._roots[1]

    def count(self, request: Request) -> None:
        """Count an admitted request."""
        if request.cached_tokens:
            self.hits += 1
            self.hit_tokens += request.cached_tokens

    def publish(self, decode: list[Request], prefill: list[Request]) -> None:
        """Share what a computed and recorded plan has filled. A request's page may be exchanged for an equal one."""
        if self.enabled:
            publish(self.pool, decode, prefill)

    def forget(self, request: Request) -> None:
        """Let nobody start from a page of ``request``, whose KV is in doubt."""
        self.pool.forget(request.page_row[: request.page_count].tolist())

    def check(self, requests: Iterable[Request]) -> None:
        """Raises RuntimeError unless the published pages of ``requests`` hold their tokens."""
        for request in requests:
            for index in range(request.published if self.enabled else 0):
                held = self.pool.tokens(int(request.page_row[index]))
                wanted = request.tokens[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS].tolist()
                if held is not None and held != wanted:  # None: forgotten, but still held
                    raise RuntimeError(f"page {request.page_row[index]} of request {request.request_id} holds {held}")
