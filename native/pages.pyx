"""PagePool: which pages of the KV cache are free, and what the full ones hold. It knows requests and memory not at all.

A page is *free* (nothing worth keeping), *held* (one reference or more) or *cached*: published, without references,
reclaimed from the least recently used on when free pages run out.

A published page says "these 16 tokens, after that parent page". Its identity is a number given once and never again,
and its parent is named by identity, so a chain of identities stands for one exact sequence of tokens from position 0
on. The hash only picks a bucket: parent and tokens are always compared. The first page's parent is a *root*, a number
of the caller's (0, or one with the highest bit set) that separates those who may not share.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memset

cdef enum:
    PAGE_TOKENS = 16


cdef class PagePool:
    """``num_pages`` pages with reference counts; the free ones form a last-in first-out list.

    A page just returned is handed out next: its memory is the most likely to be still in a cache.
    """

    def __cinit__(self, int num_pages):
        if num_pages < 1:
            raise ValueError(f"a pool needs at least 1 page, got {num_pages}")
        cdef size_t pages = num_pages, buckets = 1
        while buckets < pages:
            buckets *= 2
        self._free = <int32_t *> malloc(pages * sizeof(int32_t))
        self._references = <int32_t *> calloc(pages, sizeof(int32_t))
        self._newer = <int32_t *> malloc((pages + 1) * sizeof(int32_t))
        self._older = <int32_t *> malloc((pages + 1) * sizeof(int32_t))
        self._identity = <uint64_t *> calloc(pages, sizeof(uint64_t))
        self._parent = <uint64_t *> calloc(pages, sizeof(uint64_t))
        self._tokens = <int32_t *> calloc(pages * PAGE_TOKENS, sizeof(int32_t))
        self._next = <int32_t *> malloc(pages * sizeof(int32_t))
        self._buckets = <int32_t *> malloc(buckets * sizeof(int32_t))
        if (self._free == NULL or self._references == NULL or self._newer == NULL or self._older == NULL
                or self._identity == NULL or self._parent == NULL or self._tokens == NULL or self._next == NULL
                or self._buckets == NULL):
            raise MemoryError
        memset(self._buckets, 0xFF, buckets * sizeof(int32_t))
        self._mask = buckets - 1
        self._newer[num_pages] = self._older[num_pages] = num_pages  # the list's two ends meet in one entry too many
        self.num_pages = self.free_count = num_pages
        cdef int i
        for i in range(num_pages):
            self._free[i] = num_pages - 1 - i

    def __dealloc__(self):
        free(self._free)
        free(self._references)
        free(self._newer)
        free(self._older)
        free(self._identity)
        free(self._parent)
        free(self._tokens)
        free(self._next)
        free(self._buckets)

    @property
    def used(self):
        """Pages with a reference."""
        return self.num_pages - self.free_count - self.cached_count

    @property
    def available(self):
        """Pages that ``allocate`` could give: the free and the cached ones."""
        return self.free_count + self.cached_count

    def allocate(self, int count):
        """``count`` pages with one reference each, or ``None`` (and nothing taken) when fewer are available.

        Free pages go first, then the least recently used cached ones, whose content is forgotten.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > self.free_count + self.cached_count:
            return None
        cdef list pages = []
        cdef int32_t page
        for _ in range(count):
            if self.free_count:
                self.free_count -= 1
                page = self._free[self.free_count]
            else:
                page = self._newer[self.num_pages]
                self._unlink(page)
                self._forget(page)
                self.evictions += 1
            self._references[page] = 1
            pages.append(page)
        return pages

    def retain(self, int page):
        """One more reference to a held or cached page. Raises RuntimeError for a free page."""
        if 0 <= page < self.num_pages and self._references[page] == 0 and self._identity[page]:
            self._unlink(page)
        else:
            self._require(page)
        self._references[page] += 1

    def release(self, list pages):
        """Drop one reference of each page; one without references is cached if it is published, else free.

        ``pages`` are in the order of their positions: of those that become cached together the last is reclaimed
        first, so that what is left can be reached. Raises RuntimeError for a page that is not in use (a double free);
        nothing has changed then.
        """
        cdef Py_ssize_t i, done = 0
        cdef int page
        try:
            for i in range(len(pages)):
                page = pages[i]
                self._require(page)
                self._references[page] -= 1
                done = i + 1
        except BaseException:
            for i in range(done):
                self._references[<int> pages[i]] += 1
            raise
        for i in range(done - 1, -1, -1):
            page = pages[i]
            if self._references[page] == 0:
                self._references[page] = -1  # listed once, though the call may name the page several times
                if self._identity[page]:
                    self._append(page)
                else:
                    self._free[self.free_count] = page
                    self.free_count += 1
        for i in range(done):
            page = pages[i]
            if self._references[page] < 0:
                self._references[page] = 0

    def references(self, int page):
        """How many holders a page has; 0 when it is free or cached."""
        if not 0 <= page < self.num_pages:
            raise RuntimeError(f"page {page} is not one of the pool's {self.num_pages}")
        return self._references[page]

    # -- content

    def match(self, const int32_t[::1] tokens not None, int count, uint64_t root=0):
        """The published pages that hold the first ``count`` pages of ``tokens``, as far as there are any.

        Returns (pages, how many of them are cached, identity of the last, or ``root``). Takes no reference.
        """
        if count < 0 or count * PAGE_TOKENS > tokens.shape[0]:
            raise ValueError(f"{tokens.shape[0]} tokens do not fill {count} pages")
        cdef list pages = []
        cdef int i, cached = 0
        cdef int32_t page
        for i in range(count):
            page = self._find(root, &tokens[i * PAGE_TOKENS])
            if page < 0:
                break
            pages.append(page)
            cached += self._references[page] == 0
            root = self._identity[page]
        return pages, cached, root

    def tokens(self, int page):
        """The ids a published page holds; ``None`` for any other."""
        if not 0 <= page < self.num_pages:
            raise RuntimeError(f"page {page} is not one of the pool's {self.num_pages}")
        if not self._identity[page]:
            return None
        return [self._tokens[page * PAGE_TOKENS + i] for i in range(PAGE_TOKENS)]

    def forget(self, list pages not None):
        """No later request finds these pages; a cached one becomes free. What is not published is left as it is."""
        cdef int page
        for page in pages:
            self.references(page)
            if self._identity[page]:
                self._forget(page)
                if self._references[page] == 0:
                    self._unlink(page)
                    self._free[self.free_count] = page
                    self.free_count += 1

    cdef uint64_t publish(self, int32_t *slot, uint64_t parent, const int32_t *tokens):
        """Let others find page ``slot[0]``, which holds ``tokens`` after ``parent`` and has one holder, the caller.

        Where another page holds the same already, the caller's is freed and ``slot`` names the other, with a reference:
        their contents are equal, and whoever holds a page holds its parents. Returns the identity of the page in
        ``slot``.
        """
        cdef int32_t page = slot[0], other = self._find(parent, tokens)
        cdef int32_t *bucket
        if other >= 0:
            if other != page:
                if self._references[other] == 0:
                    self._unlink(other)
                self._references[other] += 1
                self._references[page] = 0
                self._free[self.free_count] = page
                self.free_count += 1
                slot[0] = other
            return self._identity[other]
        self._last_identity += 1
        self._identity[page] = self._last_identity
        self._parent[page] = parent
        memcpy(self._tokens + page * PAGE_TOKENS, tokens, PAGE_TOKENS * sizeof(int32_t))
        bucket = self._bucket(parent, tokens)
        self._next[page] = bucket[0]
        bucket[0] = page
        return self._last_identity

    cdef int32_t *_bucket(self, uint64_t parent, const int32_t *tokens) noexcept:
        cdef uint64_t state = (parent + 1) * 0x9E3779B97F4A7C15ULL
        cdef int i
        for i in range(PAGE_TOKENS):
            state = (state ^ <uint64_t> tokens[i]) * 0xD6E8FEB86659FD93ULL
            state ^= state >> 32
        return self._buckets + (state & self._mask)

    cdef int32_t _find(self, uint64_t parent, const int32_t *tokens) noexcept:
        """The page that holds ``tokens`` after ``parent``, or -1."""
        cdef int32_t page = self._bucket(parent, tokens)[0]
        while page >= 0:
            if self._parent[page] == parent and memcmp(
                    self._tokens + page * PAGE_TOKENS, tokens, PAGE_TOKENS * sizeof(int32_t)) == 0:
                return page
            page = self._next[page]
        return -1

    cdef void _forget(self, int32_t page) noexcept:
        """Take a published page out of its bucket."""
        cdef int32_t *link = self._bucket(self._parent[page], self._tokens + page * PAGE_TOKENS)
        while link[0] != page:
            link = self._next + link[0]
        link[0] = self._next[page]
        self._identity[page] = 0

    # -- cached pages, from the least recently used (_newer of the end) to the most

    cdef void _append(self, int32_t page) noexcept:
        cdef int32_t end = self.num_pages, last = self._older[end]
        self._older[page] = last
        self._newer[page] = end
        self._newer[last] = page
        self._older[end] = page
        self.cached_count += 1

    cdef void _unlink(self, int32_t page) noexcept:
        self._newer[self._older[page]] = self._newer[page]
        self._older[self._newer[page]] = self._older[page]
        self.cached_count -= 1

    def check(self):
        """Raises RuntimeError unless every page is free (listed once), cached (listed once, findable) or referenced."""
        cdef int i, page, referenced = 0, cached = 0
        seen = bytearray(self.num_pages)
        for i in range(self.free_count):
            page = self._free[i]
            if not 0 <= page < self.num_pages or seen[page]:
                raise RuntimeError(f"the free list names page {page} twice or out of range")
            seen[page] = 1
            if self._references[page] != 0 or self._identity[page]:
                raise RuntimeError(f"free page {page} has {self._references[page]} references or is published")
        page = self._newer[self.num_pages]
        while page != self.num_pages:
            if not 0 <= page < self.num_pages or seen[page]:
                raise RuntimeError(f"page {page} is cached twice, or free and cached")
            seen[page] = 1
            cached += 1
            if self._references[page] != 0 or not self._identity[page]:
                raise RuntimeError(f"cached page {page} has {self._references[page]} references or is not published")
            page = self._newer[page]
        for page in range(self.num_pages):
            if self._references[page] < 0 or (self._references[page] == 0 and not seen[page]):
                raise RuntimeError(f"page {page} has {self._references[page]} references and is neither free nor cached")
            referenced += self._references[page] > 0
            if self._identity[page] and self._find(self._parent[page], self._tokens + page * PAGE_TOKENS) != page:
                raise RuntimeError(f"page {page} is published but cannot be found")
        if cached != self.cached_count or referenced != self.num_pages - self.free_count - cached:
            raise RuntimeError(
                f"{referenced} pages are referenced, {cached} cached ({self.cached_count} counted) and "
                f"{self.free_count} free, but the pool has {self.num_pages}"
            )

    cdef int _require(self, int page) except -1:
        if not 0 <= page < self.num_pages:
            raise RuntimeError(f"page {page} is not one of the pool's {self.num_pages}")
        if self._references[page] < 1:
            raise RuntimeError(f"page {page} is free: it was returned twice or never taken")
        return 0
