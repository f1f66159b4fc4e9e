"""PagePool: which pages of the KV cache are free. It knows nothing of requests, tokens or memory."""

from libc.stdint cimport int32_t
from libc.stdlib cimport calloc, free, malloc


cdef class PagePool:
    """``num_pages`` pages with reference counts; the free ones form a last-in first-out list.

    A page just returned is handed out next: its memory is the most likely to be still in a cache.
    """

    cdef readonly int num_pages
    cdef readonly int free_count
    cdef int32_t *_free
    cdef int32_t *_references

    def __cinit__(self, int num_pages):
        if num_pages < 1:
            raise ValueError(f"a pool needs at least 1 page, got {num_pages}")
        self._free = <int32_t *> malloc(num_pages * sizeof(int32_t))
        self._references = <int32_t *> calloc(num_pages, sizeof(int32_t))
        if self._free == NULL or self._references == NULL:
            raise MemoryError
        self.num_pages = self.free_count = num_pages
        cdef int i
        for i in range(num_pages):
            self._free[i] = num_pages - 1 - i

    def __dealloc__(self):
        free(self._free)
        free(self._references)

    @property
    def used(self):
        return self.num_pages - self.free_count

    def allocate(self, int count):
        """``count`` free pages with one reference each, or ``None`` (and nothing taken) when there are fewer."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > self.free_count:
            return None
        cdef list pages = []
        cdef int page
        for _ in range(count):
            self.free_count -= 1
            page = self._free[self.free_count]
            self._references[page] = 1
            pages.append(page)
        return pages

    def retain(self, int page):
        """One more reference to a page in use. Raises RuntimeError for a free page."""
        self._require(page)
        self._references[page] += 1

    def release(self, list pages):
        """Drop one reference of each page; a page without references is free.

        Raises RuntimeError for a page that is not in use (a double free); nothing has changed then.
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
        for i in range(done):
            page = pages[i]
            if self._references[page] == 0:
                self._references[page] = -1  # listed once, though the call may name the page several times
                self._free[self.free_count] = page
                self.free_count += 1
        for i in range(done):
            page = pages[i]
            if self._references[page] < 0:
                self._references[page] = 0

    def references(self, int page):
        """How many holders a page has; 0 when it is free."""
        if not 0 <= page < self.num_pages:
            raise RuntimeError(f"page {page} is not one of the pool's {self.num_pages}")
        return self._references[page]

    def check(self):
        """Raises RuntimeError unless every page is either free (listed once, no reference) or referenced."""
        cdef int i, page, referenced = 0
        seen = bytearray(self.num_pages)
        for i in range(self.free_count):
            page = self._free[i]
            if not 0 <= page < self.num_pages or seen[page]:
                raise RuntimeError(f"the free list names page {page} twice or out of range")
            seen[page] = 1
            if self._references[page] != 0:
                raise RuntimeError(f"free page {page} has {self._references[page]} references")
        for page in range(self.num_pages):
            if self._references[page] < 0:
                raise RuntimeError(f"page {page} has {self._references[page]} references")
            referenced += self._references[page] > 0
        if referenced != self.num_pages - self.free_count:
            raise RuntimeError(
                f"{referenced} pages are referenced, {self.free_count} free, but the pool has {self.num_pages}"
            )

    cdef int _require(self, int page) except -1:
        if not 0 <= page < self.num_pages:
            raise RuntimeError(f"page {page} is not one of the pool's {self.num_pages}")
        if self._references[page] < 1:
            raise RuntimeError(f"page {page} is free: it was returned twice or never taken")
        return 0
