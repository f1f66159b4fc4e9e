# Candidates in canonical order: the first one, the first k; included by sampling.pyx.

cdef int32_t best(const float *logits, int32_t count) noexcept nogil:
    """The first id in canonical order. Two passes that vectorise: the maximum, then where it stands first."""
    cdef float[BLOCK] lanes
    cdef float top = -INFINITY
    cdef int32_t i = 0, j
    for j in range(BLOCK):
        lanes[j] = -INFINITY
    while i + BLOCK <= count:
        for j in range(BLOCK):
            lanes[j] = logits[i + j] if logits[i + j] > lanes[j] else lanes[j]
        i += BLOCK
    while i < count:
        if logits[i] > top:
            top = logits[i]
        i += 1
    for j in range(BLOCK):
        if lanes[j] > top:
            top = lanes[j]
    for i in range(count):
        if logits[i] == top:
            return i
    return 0


cdef void sift_down(uint64_t *heap, int32_t size) noexcept nogil:
    """Restore the min-heap after its root was replaced."""
    cdef int32_t parent = 0, child
    cdef uint64_t key = heap[0]
    while True:
        child = 2 * parent + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if key <= heap[child]:
            break
        heap[parent] = heap[child]
        parent = child
    heap[parent] = key


cdef int32_t top_by_heap(const float *logits, int32_t count, int32_t k, uint64_t *keys) noexcept nogil:
    """The keys of the first ``k`` logits above -inf, in canonical order. Returns how many there are.

    Ids ascend, so a logit equal to the k-th best comes after it and only a greater one enters.
    """
    cdef int32_t size = 0, i = 0, j, child, parent, end
    cdef float floor = -INFINITY
    cdef int above
    cdef uint64_t key
    while i < count:
        end = i + BLOCK
        if end <= count:
            above = 0
            for j in range(BLOCK):
                above |= logits[i + j] > floor
            if not above:
                i = end
                continue
        else:
            end = count
        while i < end:
            if logits[i] > floor:
                key = crucible_order_key(logits[i], i)
                if size < k:
                    child = size
                    size += 1
                    while child > 0:
                        parent = (child - 1) >> 1
                        if keys[parent] <= key:
                            break
                        keys[child] = keys[parent]
                        child = parent
                    keys[child] = key
                else:
                    keys[0] = key
                    sift_down(keys, size)
                if size == k:
                    floor = crucible_key_logit(keys[0])
            i += 1
    for end in range(size - 1, 0, -1):
        key = keys[0]
        keys[0] = keys[end]
        keys[end] = key
        sift_down(keys, end)
    return size


cdef int32_t top_by_radix(const float *logits, int32_t count, int32_t k, uint64_t *keys, uint64_t *spare) noexcept nogil:
    """As ``top_by_heap`` for any ``k``: a histogram of the leading bits finds a floor, the logits above it are sorted.

    ``keys`` and ``spare`` hold ``count`` entries. Three stable passes of 11 bits over ids that ascend leave ties in
    the order of their ids.
    """
    cdef int32_t[BINS] bins
    cdef uint64_t *swap
    cdef uint32_t floor = 0, digit
    cdef int32_t i, m = 0, place, amount, shift
    memset(bins, 0, sizeof(bins))
    for i in range(count):
        if logits[i] > -INFINITY:
            bins[crucible_order_bits(logits[i]) >> 21] += 1
    amount = 0
    for i in range(BINS - 1, -1, -1):
        amount += bins[i]
        if amount >= k:
            floor = <uint32_t> i << 21
            break
    for i in range(count):
        if logits[i] > -INFINITY and crucible_order_bits(logits[i]) >= floor:
            keys[m] = crucible_order_key(logits[i], i)
            m += 1
    for shift in range(31, 64, 11):  # bits 32…63; bit 31 of every id's complement is 1 and changes nothing
        memset(bins, 0, sizeof(bins))
        for i in range(m):
            bins[(keys[i] >> shift) & (BINS - 1)] += 1
        place = 0
        for i in range(BINS - 1, -1, -1):
            amount = bins[i]
            bins[i] = place
            place += amount
        for i in range(m):
            digit = (keys[i] >> shift) & (BINS - 1)
            spare[bins[digit]] = keys[i]
            bins[digit] += 1
        swap = keys
        keys = spare
        spare = swap
    # After three passes the result stands in what the caller calls ``spare``.
    for i in range(m):
        spare[i] = keys[i]
    return m if m < k else k
