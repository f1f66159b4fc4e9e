# cython: boundscheck=False, wraparound=False, initializedcheck=False
"""Byte-level BPE: UTF-8 to token ids and back (Sennrich et al., arXiv:1508.07909; GPT-2's byte-level form).

The text is cut into pieces (scanner.pxi). A piece that is a token is looked up (tables.pxi); any other piece starts
as single bytes and its leftmost pair of lowest rank is merged until no pair has a rank (merging.pxi). Short pieces
scan for that pair, long ones keep a heap, so a piece of n bytes costs n log n.

Knows nothing of special tokens in text, of files, or of invalid UTF-8: that is crucible/tokenizer.py.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.pythread cimport (
    NOWAIT_LOCK, PyThread_acquire_lock, PyThread_allocate_lock, PyThread_free_lock, PyThread_release_lock,
    PyThread_type_lock)
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memset

include "scanner.pxi"
include "tables.pxi"
include "merging.pxi"

cdef enum:
    REMEMBERED = 11              # most tokens of a remembered piece: an entry fills one cache line
    CACHE_BITS = 15

cdef struct Remembered:          # the tokens of a piece of at most SHORT bytes that was merged before
    uint64_t low, high
    uint16_t length, count
    uint32_t tokens[REMEMBERED]


def pieces(str pattern, bytes data not None) -> list:
    """The pieces of valid UTF-8 under a pattern (for tests)."""
    cdef const uint8_t* s = <const uint8_t*>PyBytes_AS_STRING(data)
    cdef Py_ssize_t i = 0, end, n = len(data)
    cdef int number = PATTERNS[pattern]
    cdef list found = []
    while i < n:
        end = piece_end(s, i, n, number)
        found.append(data[i:end])
        i = end
    return found


@cython.final
cdef class BytePairEncoder:
    """The tables of one vocabulary. Immutable apart from a cache of pieces, which one thread at a time may use."""

    cdef readonly Py_ssize_t token_count
    cdef int pattern
    cdef Tables tables
    cdef Remembered* cache
    cdef PyThread_type_lock cache_lock
    cdef list numbers            # int objects of all ids: a result takes a reference instead of making one

    def __cinit__(self, str pattern, list tokens, bytes ranked, const uint32_t[:, ::1] merges=None,
                  bint whole_pieces=True):
        """``tokens[id]`` is the token's bytes (empty: no such id), ``ranked[id]`` is 1 when text may become it.

        ``merges``: rows of (left id, right id) in order of priority; None: any two neighbours whose bytes make a
        ranked token merge, lowest id first. ``whole_pieces``: a piece that is a ranked token becomes it, whatever
        the merges say. Raises ValueError on a vocabulary past the table limits, or that contradicts itself.
        """
        self.pattern = PATTERNS[pattern]
        store_tokens(&self.tables, tokens, ranked)
        index_tokens(&self.tables)
        if merges is None:
            add_every_split(&self.tables)
        else:
            add_merges(&self.tables, merges)
        if not whole_pieces:
            self.forget_unreachable()
        self.token_count = self.tables.count
        self.numbers = list(range(self.token_count))
        self.cache = <Remembered*>allocate(1 << CACHE_BITS, sizeof(Remembered))
        self.cache_lock = PyThread_allocate_lock()
        if self.cache_lock == NULL:
            raise MemoryError

    def __dealloc__(self):
        free_tables(&self.tables)
        free(self.cache)
        if self.cache_lock != NULL:
            PyThread_free_lock(self.cache_lock)

    cdef int forget_unreachable(self) except -1:
        """Keep for lookup only the tokens that the merges alone make of their bytes."""
        cdef Tables* t = &self.tables
        cdef Py_ssize_t i, count, longest = 1
        cdef uint32_t* out
        for i in range(t.count):
            longest = max(longest, token_size(t, i))
        out = <uint32_t*>allocate(longest, 4)
        cdef bytearray keep = bytearray(t.count)
        for i in range(t.count):
            if t.ranked[i]:
                count = merge_piece(t, t.blob + t.starts[i], token_size(t, i), out)
                keep[i] = count == 1 and out[0] == <uint32_t>i
        free(out)
        for i in range(t.count):
            t.ranked[i] = keep[i]
        return index_tokens(t)

    cdef inline Py_ssize_t encode_piece(self, const uint8_t* p, Py_ssize_t length, Py_ssize_t readable, uint32_t* out,
                                        bint cached) noexcept nogil:
        """As merge_piece, with the lookups before it."""
        cdef uint64_t low, high
        cdef uint32_t token
        cdef Py_ssize_t count, i
        cdef Remembered* entry
        if length > SHORT:
            out[0] = find_longer(&self.tables, p, length)
            return 1 if out[0] != NONE else merge_piece(&self.tables, p, length, out)
        load_key(p, length, readable, &low, &high)
        token = find_word(&self.tables, low, high, length)
        if token != NONE:
            out[0] = token
            return 1
        if not cached:
            return merge_piece(&self.tables, p, length, out)
        entry = &self.cache[hash_key(low, high, length) >> (64 - CACHE_BITS)]
        if entry.low == low and entry.high == high and entry.length == length:
            for i in range(entry.count):
                out[i] = entry.tokens[i]
            return entry.count
        count = merge_piece(&self.tables, p, length, out)
        if 0 < count <= REMEMBERED:
            entry.low = low
            entry.high = high
            entry.length = <uint16_t>length
            entry.count = <uint16_t>count
            memcpy(entry.tokens, out, count * 4)
        return count

    cdef Py_ssize_t run(self, bytes data, bint split, uint32_t** ids, Py_ssize_t* last) except -1:
        """Encode ``data`` into ``ids`` (allocated here, freed by the caller); ``last``: tokens of the last piece.

        Raises LookupError(offset) at a byte that has no token.
        """
        cdef const uint8_t* s = <const uint8_t*>PyBytes_AS_STRING(data)
        cdef Py_ssize_t n = PyBytes_GET_SIZE(data), i = 0, end = 0, count = 0, got = 0
        cdef uint32_t* out
        cdef bint cached
        if n >= NONE:
            raise OverflowError("a text of 4 GiB or more; encode it in parts")
        out = <uint32_t*>malloc(<size_t>(n + 1) * 4)
        if out == NULL:
            raise MemoryError
        with nogil:
            cached = PyThread_acquire_lock(self.cache_lock, NOWAIT_LOCK)
            while i < n:
                end = piece_end(s, i, n, self.pattern) if split else n
                got = self.encode_piece(s + i, end - i, n - i, out + count, cached)
                if got < 0:
                    break
                count += got
                i = end
            if cached:
                PyThread_release_lock(self.cache_lock)
        if got < 0:
            free(out)
            if -1 - got == end - i:
                raise MemoryError
            raise LookupError(i - 1 - got)
        ids[0] = out
        last[0] = got
        return count

    cdef list as_list(self, const uint32_t* ids, Py_ssize_t count):
        cdef list result = PyList_New(count)
        cdef list numbers = self.numbers
        cdef Py_ssize_t i
        cdef object number
        for i in range(count):
            number = numbers[ids[i]]
            Py_INCREF(number)
            PyList_SET_ITEM(result, i, number)
        return result

    def encode(self, bytes data not None) -> tuple:
        """(ids, tokens of the last piece) of valid UTF-8."""
        cdef uint32_t* ids = NULL
        cdef Py_ssize_t last = 0
        cdef Py_ssize_t count = self.run(data, True, &ids, &last)
        try:
            return self.as_list(ids, count), last
        finally:
            free(ids)

    def encode_packed(self, bytes data not None) -> bytes:
        """The ids of valid UTF-8 as native uint32."""
        cdef uint32_t* ids = NULL
        cdef Py_ssize_t last = 0
        cdef Py_ssize_t count = self.run(data, True, &ids, &last)
        try:
            return (<char*>ids)[:4 * count]
        finally:
            free(ids)

    def encode_unsplit(self, bytes data not None) -> list:
        """The ids of any bytes taken as one piece."""
        cdef uint32_t* ids = NULL
        cdef Py_ssize_t last = 0
        cdef Py_ssize_t count = self.run(data, False, &ids, &last)
        try:
            return self.as_list(ids, count)
        finally:
            free(ids)

    cdef inline Py_ssize_t known(self, Py_ssize_t token) except -1:
        if token < 0 or token >= self.token_count or token_size(&self.tables, token) == 0:
            raise IndexError(token)
        return token

    def decode(self, ids) -> bytes:
        """The bytes of the tokens, joined. Raises IndexError(id) for an id without a token."""
        cdef Py_ssize_t total = 0, token, size
        cdef list items = list(ids)  # a copy: nobody else can change it between the two passes
        cdef object item, result
        cdef char* p
        for item in items:
            total += token_size(&self.tables, self.known(item))
        result = PyBytes_FromStringAndSize(NULL, total)
        p = PyBytes_AS_STRING(result)
        for item in items:
            token = item
            size = token_size(&self.tables, token)
            memcpy(p, self.tables.blob + self.tables.starts[token], size)
            p += size
        return result

    def token(self, Py_ssize_t token) -> bytes:
        """The bytes of one token. Raises IndexError(id) for an id without a token."""
        return token_bytes(&self.tables, self.known(token))
