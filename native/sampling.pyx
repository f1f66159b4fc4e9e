"""Token choice from logits: greedy, or a draw among the top k in canonical order. It knows no requests and no slots.

Rules, the same for every caller:

- Canonical order: higher logit first, then lower id (cuda/order_key.h). -0 equals +0. Ids from ``token_count`` on are
  padding and never considered.
- Greedy takes the first in that order and uses no randomness. A NaN never wins unless every logit is NaN; then, as
  when all are -inf, the lowest such id is the answer.
- A draw keeps the first ``top_k`` whose logit is above -inf (an id at -inf or NaN has probability 0), gives each the
  weight exp((logit - max) / temperature) in double precision, and walks the weights in candidate order until their sum
  exceeds u * total. Differences are never positive, so no temperature overflows. Logits of +inf share all the mass
  equally.
- u comes from Philox4x32-10, a counter-based generator (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy
  as 1, 2, 3", SC 2011): key = seed, counter = (position low, position high, choice, 0), the first 53 of the output's
  bits. So a token depends on its logits and on (seed, choice, position) only.
"""

cimport numpy as cnp
from libc.math cimport INFINITY, exp
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

import numpy as np

cnp.import_array()

cdef extern from "order_key.h" nogil:
    uint32_t crucible_order_bits(float logit)
    uint64_t crucible_order_key(float logit, uint32_t id)
    uint32_t crucible_key_id(uint64_t key)
    float crucible_key_logit(uint64_t key)

cdef enum:
    BLOCK = 32        # logits compared at once before any is looked at alone
    HEAP_LIMIT = 128  # up to here a heap finds the candidates; above, a histogram and a radix sort
    BINS = 2048       # 11 bits a digit


include "philox.pxi"
include "candidates.pxi"


# ---- draw

cdef double weigh(const float *logits, int32_t count, double temperature, double *weights) noexcept nogil:
    """Weights of candidates in canonical order, all above -inf. Returns their sum, at least 1."""
    cdef double top = logits[0], total = 0.0
    cdef int32_t i
    for i in range(count):
        weights[i] = 1.0 if logits[i] == top else exp((logits[i] - top) / temperature)
        total += weights[i]
    return total


cdef int32_t walk(const double *weights, int32_t count, double target) noexcept nogil:
    """The first candidate at which the cumulated weights exceed ``target`` (u * total with u < 1)."""
    cdef double sum = 0.0
    cdef int32_t i
    for i in range(count):
        sum += weights[i]
        if sum > target:
            return i
    return 0  # not reached: target < total, and the sum here is the sum that made total


cdef struct Scratch:
    uint64_t *keys
    uint64_t *spare
    float *logits
    double *weights


cdef int reserve(Scratch *scratch, int32_t count, int32_t k) noexcept nogil:
    """Room for ``k`` candidates of ``count`` logits. Returns 0 when there is no memory."""
    cdef int32_t room = k if k <= HEAP_LIMIT else count
    scratch.keys = <uint64_t *> malloc(room * sizeof(uint64_t))
    scratch.spare = <uint64_t *> malloc((room if k > HEAP_LIMIT else 1) * sizeof(uint64_t))
    scratch.logits = <float *> malloc(k * sizeof(float))
    scratch.weights = <double *> malloc(k * sizeof(double))
    return scratch.keys != NULL and scratch.spare != NULL and scratch.logits != NULL and scratch.weights != NULL


cdef void discard(Scratch *scratch) noexcept nogil:
    free(scratch.keys)
    free(scratch.spare)
    free(scratch.logits)
    free(scratch.weights)


cdef int32_t top(const float *logits, int32_t count, int32_t k, Scratch *scratch) noexcept nogil:
    """Keys and logits of the candidates in canonical order. Returns how many there are."""
    cdef int32_t i, m
    if k <= HEAP_LIMIT:
        m = top_by_heap(logits, count, k, scratch.keys)
    else:
        m = top_by_radix(logits, count, k, scratch.keys, scratch.spare)
    for i in range(m):
        scratch.logits[i] = crucible_key_logit(scratch.keys[i])
    return m


cdef int sound(const float *logits, int32_t count) noexcept nogil:
    """Whether every logit is below +inf and none is NaN."""
    cdef int32_t i, bad = 0
    for i in range(count):
        bad |= not logits[i] < INFINITY
    return not bad


cdef int32_t choose(const float *logits, int32_t count, double temperature, int64_t top_k, uint64_t seed, uint32_t choice,
                    uint64_t position) noexcept nogil:
    """The chosen id, or -1 when there is no memory."""
    cdef int32_t k = <int32_t> (top_k if top_k < count else count)
    cdef int32_t m, result
    cdef Scratch scratch
    cdef double total
    if temperature == 0.0:
        return best(logits, count)
    if not reserve(&scratch, count, k):
        discard(&scratch)
        return -1
    m = top(logits, count, k, &scratch)
    if m == 0:
        result = best(logits, count)
    else:
        total = weigh(scratch.logits, m, temperature, scratch.weights)
        result = crucible_key_id(scratch.keys[walk(scratch.weights, m, uniform01(seed, choice, position) * total)])
    discard(&scratch)
    return result


# ---- Python

cdef int require(double temperature, int64_t top_k, Py_ssize_t token_count, Py_ssize_t width) except -1:
    if not 0 <= temperature < INFINITY:
        raise ValueError(f"temperature must be finite and at least 0, got {temperature}")
    if temperature > 0 and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if not 1 <= token_count <= width:
        raise ValueError(f"token_count must lie in 1 … {width} (the row's length), got {token_count}")
    return 0


def select(const float[::1] logits not None, double temperature, top_k, uint64_t seed, uint32_t choice, uint64_t position,
           Py_ssize_t token_count):
    """The token of one logit row float32 [vocab]. ``position``: how many tokens precede it in its sequence."""
    cdef int64_t k = min(top_k, <int64_t> 2**31)
    cdef int32_t result
    require(temperature, k, token_count, logits.shape[0])
    with nogil:
        result = choose(&logits[0], <int32_t> token_count, temperature, k, seed, choice, position)
    if result < 0:
        raise MemoryError
    return result


def select_rows(const float[:, ::1] logits not None, const double[::1] temperatures not None,
                const int64_t[::1] top_ks not None, const uint64_t[::1] seeds not None, const int32_t[::1] choices not None,
                const int32_t[::1] positions not None, Py_ssize_t token_count, int32_t[::1] out not None):
    """``select`` for each row of logits float32 [rows, vocab] into ``out`` [rows]; the GIL is released meanwhile.

    A row with a NaN or +inf below ``token_count`` is no model's answer but the trace of a fault: -1, and no id.
    """
    cdef Py_ssize_t i, rows = logits.shape[0]
    if not (temperatures.shape[0] == top_ks.shape[0] == seeds.shape[0] == choices.shape[0] == positions.shape[0]
            == out.shape[0] == rows):
        raise ValueError(f"{rows} logit rows need as many temperatures, top_ks, seeds, choices, positions and outputs")
    for i in range(rows):
        require(temperatures[i], top_ks[i], token_count, logits.shape[1])
    cdef int failed = 0
    with nogil:
        for i in range(rows):
            if not sound(&logits[i, 0], <int32_t> token_count):
                out[i] = -1
                continue
            out[i] = choose(&logits[i, 0], <int32_t> token_count, temperatures[i], top_ks[i], seeds[i],
                            <uint32_t> choices[i], <uint64_t> positions[i])
            failed |= out[i] < 0
    if failed:
        raise MemoryError


def candidates(const float[::1] logits not None, double temperature, top_k, Py_ssize_t token_count):
    """What a draw chooses from: (ids int32 [m], probabilities float64 [m]) in canonical order. One id when greedy."""
    cdef int32_t count = <int32_t> token_count, i, m = 0, k
    cdef Scratch scratch
    cdef double total
    require(temperature, min(top_k, <int64_t> 2**31), token_count, logits.shape[0])
    if temperature > 0:
        k = <int32_t> min(top_k, <int64_t> token_count)
        try:
            if not reserve(&scratch, count, k):
                raise MemoryError
            m = top(&logits[0], count, k, &scratch)
            if m > 0:
                total = weigh(scratch.logits, m, temperature, scratch.weights)
                ids = np.array([crucible_key_id(scratch.keys[i]) for i in range(m)], np.int32)
                return ids, np.array([scratch.weights[i] / total for i in range(m)], np.float64)
        finally:
            discard(&scratch)
    return np.array([best(&logits[0], count)], np.int32), np.ones(1)


def draw(const int32_t[::1] ids not None, const float[::1] logits not None, double temperature, uint64_t seed,
         uint32_t choice, uint64_t position):
    """The token drawn among candidates that a device chose: ids and logits [m] in canonical order, at least one."""
    cdef int32_t m = 0
    require(temperature, 1, 1, ids.shape[0])
    if logits.shape[0] != ids.shape[0]:
        raise ValueError(f"{ids.shape[0]} ids need as many logits, got {logits.shape[0]}")
    while m < logits.shape[0] and logits[m] > -INFINITY:
        m += 1
    if temperature == 0 or m == 0:
        return ids[0]
    cdef double *weights = <double *> malloc(m * sizeof(double))
    if weights == NULL:
        raise MemoryError
    cdef double total = weigh(&logits[0], m, temperature, weights)
    m = walk(weights, m, uniform01(seed, choice, position) * total)
    free(weights)
    return ids[m]


def uniform(uint64_t seed, uint32_t choice, uint64_t position):
    """The number in [0, 1) that decides the token of (seed, choice, position)."""
    return uniform01(seed, choice, position)


def philox4x32(tuple counter, uint64_t key):
    """Four random words for four counter words; for tests against the published vectors."""
    cdef uint32_t[4] words
    for i in range(4):
        words[i] = counter[i]
    philox(words, key)
    return words[0], words[1], words[2], words[3]


def order_key(float logit, uint32_t token_id):
    """The 64-bit key of cuda/order_key.h: the larger comes first."""
    return crucible_order_key(logit, token_id)


def key_parts(uint64_t key):
    """(logit, id) of a key."""
    return crucible_key_logit(key), crucible_key_id(key)
