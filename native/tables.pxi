# The tables of one vocabulary: token bytes by id, ids by bytes, and the rank of every pair that merges. Included by
# bpe.pyx. Open addressing with linear probing, at most half full; built once, then only read.

cdef enum:
    ID_LIMIT = (1 << 20) - 1     # a pair entry packs two ids of 20 bits and a rank of 24
    RANK_LIMIT = (1 << 24) - 1
    SHORT = 16                   # bytes of a token that is its own hash key

cdef uint32_t NONE = 0xFFFFFFFF  # no rank, no token, no node
cdef uint64_t ONES = 0xFFFFFFFFFFFFFFFF
cdef uint64_t MIX = 0x9E3779B97F4A7C15
cdef uint64_t MIX2 = 0xD6E8FEB86659FD93

cdef struct Word:                # a token of at most SHORT bytes, zero-padded; length 0 marks a free slot
    uint64_t low, high
    uint32_t token, length

cdef struct Tables:
    Py_ssize_t count             # of ids
    uint8_t* blob                # the bytes of all tokens, in id order
    uint32_t* starts             # [count + 1] into blob
    uint8_t* ranked              # [count] 1: the lookups below know it
    uint32_t bytes[256]          # ids of the single bytes
    Word* words                  # tokens of at most SHORT bytes
    int word_bits
    uint32_t* longer             # ids + 1 of the other tokens
    int longer_bits
    uint64_t* pairs              # left << 44 | right << 24 | rank; ONES marks a free slot
    int pair_bits
    uint32_t* merged             # [ranks] the token that a merge makes


cdef inline void load_key(const uint8_t* p, Py_ssize_t length, Py_ssize_t readable, uint64_t* low,
                          uint64_t* high) noexcept nogil:
    """The 1 … SHORT bytes at ``p`` as two words, zero-padded (little-endian); ``readable`` bytes may be read."""
    low[0] = 0
    high[0] = 0
    if readable >= 16:
        memcpy(low, p, 8)
        if length > 8:
            memcpy(high, p + 8, 8)
            high[0] &= ONES >> (8 * (16 - length))
        else:
            low[0] &= ONES >> (8 * (8 - length))
    elif length > 8:
        memcpy(low, p, 8)
        memcpy(high, p + 8, length - 8)
    else:
        memcpy(low, p, length)


cdef inline uint64_t hash_key(uint64_t low, uint64_t high, Py_ssize_t length) noexcept nogil:
    cdef uint64_t h = low * MIX ^ (high + <uint64_t>length) * MIX2
    h ^= h >> 32
    return h * MIX


cdef inline uint64_t hash_bytes(const uint8_t* p, Py_ssize_t length) noexcept nogil:
    cdef uint64_t h = <uint64_t>length
    cdef Py_ssize_t i
    for i in range(length):
        h = (h ^ p[i]) * MIX
        h ^= h >> 29
    return h


cdef inline Py_ssize_t token_size(const Tables* t, Py_ssize_t token) noexcept nogil:
    return t.starts[token + 1] - t.starts[token]


cdef inline uint32_t find_word(const Tables* t, uint64_t low, uint64_t high, Py_ssize_t length) noexcept nogil:
    cdef uint64_t mask = (<uint64_t>1 << t.word_bits) - 1
    cdef uint64_t slot = hash_key(low, high, length) >> (64 - t.word_bits)
    cdef const Word* word
    while True:
        word = &t.words[slot]
        if word.low == low and word.high == high and word.length == <uint32_t>length:
            return word.token
        if word.length == 0:
            return NONE
        slot = (slot + 1) & mask


cdef inline uint32_t find_longer(const Tables* t, const uint8_t* p, Py_ssize_t length) noexcept nogil:
    cdef uint64_t mask = (<uint64_t>1 << t.longer_bits) - 1
    cdef uint64_t slot = hash_bytes(p, length) >> (64 - t.longer_bits)
    cdef uint32_t token
    while t.longer[slot]:
        token = t.longer[slot] - 1
        if token_size(t, token) == length and memcmp(t.blob + t.starts[token], p, length) == 0:
            return token
        slot = (slot + 1) & mask
    return NONE


cdef uint32_t find(const Tables* t, const uint8_t* p, Py_ssize_t length) noexcept nogil:
    """The ranked token whose bytes are ``p[:length]``, length ≥ 1, or NONE."""
    cdef uint64_t low, high
    if length > SHORT:
        return find_longer(t, p, length)
    load_key(p, length, length, &low, &high)
    return find_word(t, low, high, length)


cdef inline uint32_t rank_of(const Tables* t, uint64_t left, uint64_t right) noexcept nogil:
    """The rank of merging two neighbours, or NONE."""
    cdef uint64_t key = left << 20 | right
    cdef uint64_t mask = (<uint64_t>1 << t.pair_bits) - 1
    cdef uint64_t slot = key * MIX >> (64 - t.pair_bits)
    cdef uint64_t entry
    while True:
        entry = t.pairs[slot]
        if entry >> 24 == key:
            return <uint32_t>(entry & 0xFFFFFF)
        if entry == ONES:
            return NONE
        slot = (slot + 1) & mask


cdef void* allocate(size_t count, size_t size) except NULL:
    """Zeroed memory."""
    cdef void* memory = calloc(count if count else 1, size)
    if memory == NULL:
        raise MemoryError
    return memory


cdef int table_bits(Py_ssize_t entries) noexcept:
    cdef int bits = 4
    while (<Py_ssize_t>1 << bits) < 2 * entries:
        bits += 1
    return bits


cdef int store_tokens(Tables* t, list tokens, bytes ranked) except -1:
    cdef Py_ssize_t i, total = 0
    cdef bytes token
    t.count = len(tokens)
    if t.count > ID_LIMIT or len(ranked) != t.count:
        raise ValueError(f"at most {ID_LIMIT} tokens, each ranked or not")
    for token in tokens:
        total += len(token)
    if total >= 1 << 31:
        raise ValueError("the tokens hold 2 GiB or more")
    t.blob = <uint8_t*>allocate(total, 1)
    t.starts = <uint32_t*>allocate(t.count + 1, 4)
    t.ranked = <uint8_t*>allocate(t.count, 1)
    memcpy(t.ranked, PyBytes_AS_STRING(ranked), t.count)
    for i in range(t.count):
        token = tokens[i]
        if t.ranked[i] and not token:
            raise ValueError(f"token {i} is ranked and has no bytes")
        memcpy(t.blob + t.starts[i], PyBytes_AS_STRING(token), len(token))
        t.starts[i + 1] = t.starts[i] + <uint32_t>len(token)
    return 0


cdef int index_tokens(Tables* t) except -1:
    """Make the lookups from bytes, of the ranked tokens."""
    cdef Py_ssize_t i, length, longs = 0, all_ranked = 0
    cdef uint64_t low, high, slot
    cdef const uint8_t* p
    free(t.words)
    free(t.longer)
    t.words = NULL
    t.longer = NULL
    memset(t.bytes, 0xFF, sizeof(t.bytes))
    for i in range(t.count):
        all_ranked += t.ranked[i]
        longs += t.ranked[i] and token_size(t, i) > SHORT
    t.word_bits = table_bits(all_ranked - longs)
    t.longer_bits = table_bits(longs)
    t.words = <Word*>allocate(<size_t>1 << t.word_bits, sizeof(Word))
    t.longer = <uint32_t*>allocate(<size_t>1 << t.longer_bits, 4)
    for i in range(t.count):
        if not t.ranked[i]:
            continue
        length = token_size(t, i)
        p = t.blob + t.starts[i]
        if find(t, p, length) != NONE:
            raise ValueError(f"token {i} has the same bytes as another")
        if length == 1:
            t.bytes[p[0]] = <uint32_t>i
        if length > SHORT:
            slot = hash_bytes(p, length) >> (64 - t.longer_bits)
            while t.longer[slot]:
                slot = (slot + 1) & ((<uint64_t>1 << t.longer_bits) - 1)
            t.longer[slot] = <uint32_t>i + 1
        else:
            load_key(p, length, length, &low, &high)
            slot = hash_key(low, high, length) >> (64 - t.word_bits)
            while t.words[slot].length:
                slot = (slot + 1) & ((<uint64_t>1 << t.word_bits) - 1)
            t.words[slot] = Word(low, high, <uint32_t>i, <uint32_t>length)
    return 0


cdef int allocate_pairs(Tables* t, Py_ssize_t count) except -1:
    t.pair_bits = table_bits(count)
    t.pairs = <uint64_t*>allocate(<size_t>1 << t.pair_bits, 8)
    memset(t.pairs, 0xFF, <size_t>8 << t.pair_bits)
    return 0


cdef void add_pair(Tables* t, uint64_t left, uint64_t right, uint64_t rank) noexcept nogil:
    """A pair that is there already gets the new rank, as in Hugging Face tokenizers."""
    cdef uint64_t key = left << 20 | right
    cdef uint64_t slot = key * MIX >> (64 - t.pair_bits)
    while t.pairs[slot] != ONES and t.pairs[slot] >> 24 != key:
        slot = (slot + 1) & ((<uint64_t>1 << t.pair_bits) - 1)
    t.pairs[slot] = key << 24 | rank


cdef int add_every_split(Tables* t) except -1:
    """Every way to cut a ranked token in two ranked tokens is a merge, and its rank is the token's id."""
    cdef Py_ssize_t i, cut, length, count
    cdef uint32_t left, right
    cdef const uint8_t* p
    cdef int step
    t.merged = <uint32_t*>allocate(t.count, 4)
    for step in range(2):  # count, then fill
        count = 0
        for i in range(t.count):
            t.merged[i] = <uint32_t>i
            if not t.ranked[i]:
                continue
            length = token_size(t, i)
            p = t.blob + t.starts[i]
            for cut in range(1, length):
                left = find(t, p, cut)
                right = find(t, p + cut, length - cut) if left != NONE else NONE
                if right != NONE:
                    count += 1
                    if step:
                        add_pair(t, left, right, i)
        if not step:
            allocate_pairs(t, count)
    return 0


cdef int add_merges(Tables* t, const uint32_t[:, ::1] merges) except -1:
    cdef Py_ssize_t rank, count = merges.shape[0]
    cdef uint32_t left, right, token
    cdef bytes joined
    if count >= RANK_LIMIT or merges.shape[1] != 2:
        raise ValueError(f"at most {RANK_LIMIT - 1} merges, each of two ids")
    t.merged = <uint32_t*>allocate(count, 4)
    allocate_pairs(t, count)
    for rank in range(count):
        left = merges[rank, 0]
        right = merges[rank, 1]
        if left >= <uint32_t>t.count or right >= <uint32_t>t.count:
            raise ValueError(f"merge {rank} names a token id past {t.count - 1}")
        joined = token_bytes(t, left) + token_bytes(t, right)
        token = find(t, <const uint8_t*>PyBytes_AS_STRING(joined), len(joined)) if joined else NONE
        if token == NONE:
            raise ValueError(f"merge {rank} of {left} and {right} makes {joined}, which is no ordinary token")
        t.merged[rank] = token
        add_pair(t, left, right, rank)
    return 0


cdef bytes token_bytes(const Tables* t, Py_ssize_t token):
    return (<const char*>t.blob + t.starts[token])[:token_size(t, token)]


cdef void free_tables(Tables* t) noexcept:
    free(t.blob)
    free(t.starts)
    free(t.ranked)
    free(t.words)
    free(t.longer)
    free(t.pairs)
    free(t.merged)
