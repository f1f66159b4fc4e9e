# Byte pair merging inside one piece. Included by bpe.pyx.

cdef enum:
    SCAN = 64                    # longest piece that is merged by scanning for the lowest rank


cdef Py_ssize_t merge_piece(const Tables* t, const uint8_t* p, Py_ssize_t n, uint32_t* ids) noexcept nogil:
    """Turn the ``n`` ≥ 1 bytes of a piece into tokens in ``ids`` (room for ``n``); their number.

    A failure is negative: -1 - (offset of a byte without a token), or -1 - n when memory ran out.
    """
    cdef Py_ssize_t i
    for i in range(n):
        ids[i] = t.bytes[p[i]]
        if ids[i] == NONE:
            return -1 - i
    return merge_scan(t, n, ids) if n <= SCAN else merge_heap(t, n, ids)


cdef Py_ssize_t merge_scan(const Tables* t, Py_ssize_t n, uint32_t* ids) noexcept nogil:
    cdef uint32_t ranks[SCAN]    # ranks[i]: of ids[i] with ids[i + 1]
    cdef uint32_t lowest
    cdef Py_ssize_t i, at
    for i in range(n - 1):
        ranks[i] = rank_of(t, ids[i], ids[i + 1])
    while n > 1:
        lowest = NONE
        at = 0
        for i in range(n - 1):
            if ranks[i] < lowest:
                lowest = ranks[i]
                at = i
        if lowest == NONE:
            break
        ids[at] = t.merged[lowest]
        n -= 1
        for i in range(at + 1, n):
            ids[i] = ids[i + 1]
        for i in range(at + 1, n - 1):
            ranks[i] = ranks[i + 1]
        if at + 1 < n:
            ranks[at] = rank_of(t, ids[at], ids[at + 1])
        if at > 0:
            ranks[at - 1] = rank_of(t, ids[at - 1], ids[at])
    return n


cdef Py_ssize_t merge_heap(const Tables* t, Py_ssize_t n, uint32_t* ids) noexcept nogil:
    """A linked list of tokens and a heap of (rank, position): leftmost of the lowest first, as in the scan.

    An entry is checked when it comes out: it is stale when its position has another rank by then.
    """
    cdef uint64_t* heap = <uint64_t*>malloc(<size_t>n * (3 * 8 + 3 * 4))
    if heap == NULL:
        return -1 - n
    cdef uint32_t* ranks = <uint32_t*>(heap + 3 * n)  # at most n - 1 first entries and two more for every merge
    cdef uint32_t* after = ranks + n
    cdef uint32_t* before = after + n
    cdef Py_ssize_t size = 0, i, count = 0
    cdef uint32_t at, right, rank
    for i in range(n):
        before[i] = <uint32_t>(i - 1) if i else NONE
        after[i] = <uint32_t>(i + 1) if i + 1 < n else NONE
        ranks[i] = rank_of(t, ids[i], ids[i + 1]) if i + 1 < n else NONE
        if ranks[i] != NONE:
            heap[size] = <uint64_t>ranks[i] << 32 | <uint64_t>i
            size += 1
    for i in range((size >> 1) - 1, -1, -1):
        sift_down(heap, i, size)
    while size:
        rank = <uint32_t>(heap[0] >> 32)
        at = <uint32_t>heap[0]
        size -= 1
        heap[0] = heap[size]
        sift_down(heap, 0, size)
        if ranks[at] != rank:
            continue
        right = after[at]
        ids[at] = t.merged[rank]
        ranks[right] = NONE
        after[at] = after[right]
        if after[at] != NONE:
            before[after[at]] = at
            ranks[at] = rank_of(t, ids[at], ids[after[at]])
            if ranks[at] != NONE:
                size = push(heap, size, <uint64_t>ranks[at] << 32 | at)
        else:
            ranks[at] = NONE
        right = at
        at = before[at]
        if at != NONE:
            ranks[at] = rank_of(t, ids[at], ids[right])
            if ranks[at] != NONE:
                size = push(heap, size, <uint64_t>ranks[at] << 32 | at)
    at = 0
    while at != NONE:
        ids[count] = ids[at]
        count += 1
        at = after[at]
    free(heap)
    return count


cdef inline void sift_down(uint64_t* heap, Py_ssize_t i, Py_ssize_t size) noexcept nogil:
    cdef uint64_t item
    cdef Py_ssize_t child
    if i >= size:
        return
    item = heap[i]
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= item:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = item


cdef inline Py_ssize_t push(uint64_t* heap, Py_ssize_t size, uint64_t item) noexcept nogil:
    """The heap's new size."""
    cdef Py_ssize_t i = size, parent
    while i:
        parent = (i - 1) >> 1
        if heap[parent] <= item:
            break
        heap[i] = heap[parent]
        i = parent
    heap[i] = item
    return size + 1
