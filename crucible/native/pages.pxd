# What crucible.native.batch uses of PagePool at C level. Here, because Cython looks for it under the module's name.

from libc.stdint cimport int32_t, int64_t, uint64_t


cdef class PagePool:
    cdef readonly int num_pages
    cdef readonly int free_count
    cdef readonly int cached_count
    cdef readonly int64_t evictions
    cdef int32_t *_free
    cdef int32_t *_references
    cdef int32_t *_newer
    cdef int32_t *_older
    cdef uint64_t *_identity
    cdef uint64_t *_parent
    cdef int32_t *_tokens
    cdef int32_t *_buckets
    cdef int32_t *_next
    cdef uint64_t _mask
    cdef uint64_t _last_identity

    cdef uint64_t publish(self, int32_t *slot, uint64_t parent, const int32_t *tokens)
    cdef int32_t _find(self, uint64_t parent, const int32_t *tokens) noexcept
    cdef int32_t *_bucket(self, uint64_t parent, const int32_t *tokens) noexcept
    cdef void _forget(self, int32_t page) noexcept
    cdef void _append(self, int32_t page) noexcept
    cdef void _unlink(self, int32_t page) noexcept
    cdef int _require(self, int page) except -1
