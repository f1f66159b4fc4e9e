# The random number of (seed, choice, position); included by sampling.pyx.

cdef void philox(uint32_t *counter, uint64_t key) noexcept nogil:
    """Philox4x32-10 in place: four counter words become four random words."""
    cdef uint32_t k0 = <uint32_t> key, k1 = <uint32_t> (key >> 32)
    cdef uint64_t product0, product1
    cdef int i
    for i in range(10):
        product0 = <uint64_t> 0xD2511F53U * counter[0]
        product1 = <uint64_t> 0xCD9E8D57U * counter[2]
        counter[0] = <uint32_t> (product1 >> 32) ^ counter[1] ^ k0
        counter[1] = <uint32_t> product1
        counter[2] = <uint32_t> (product0 >> 32) ^ counter[3] ^ k1
        counter[3] = <uint32_t> product0
        k0 += 0x9E3779B9U
        k1 += 0xBB67AE85U


cdef double uniform01(uint64_t seed, uint32_t choice, uint64_t position) noexcept nogil:
    cdef uint32_t[4] words
    words[0] = <uint32_t> position
    words[1] = <uint32_t> (position >> 32)
    words[2] = choice
    words[3] = 0
    philox(words, seed)
    return <double> (((<uint64_t> words[0] << 32) | words[1]) >> 11) * (1.0 / 9007199254740992.0)
