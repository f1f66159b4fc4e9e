# The pre-tokenizer: cuts valid UTF-8 into the pieces inside which byte pairs may merge. Included by bpe.pyx.
#
# Each pattern below is the regular expression that a family of tokenizers was trained with, written out as a scanner:
# one look at each character, no backtracking, so the time is linear in the text.

cdef extern from "unicode_tables.h" nogil:
    const int LETTER_RANGES, NUMBER_RANGES, SPACE_RANGES
    const uint32_t letter_ranges[1][2]
    const uint32_t number_ranges[1][2]
    const uint32_t space_ranges[1][2]

cdef enum:
    OTHER = 0
    LETTER = 1
    NUMBER = 2
    SPACE = 3
    CODE_POINTS = 0x110000

cdef enum:
    GPT2 = 0    # '(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s
    SMOLLM = 1  # the same, but every \p{N} stands alone, before which white space is not split
    LLAMA3 = 2  # (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*
                # |\s*[\r\n]+|\s+(?!\S)|\s+
    QWEN2 = 3   # the same, but every \p{N} stands alone

PATTERNS = {"gpt2": GPT2, "smollm": SMOLLM, "llama3": LLAMA3, "qwen2": QWEN2}

# One byte a code point; only the few hundred KB of pages that hold a class are ever touched. Written once, at import.
cdef uint8_t classes[CODE_POINTS]


cdef void fill_class(const uint32_t (*ranges)[2], int count, uint8_t value) noexcept:
    cdef int i
    for i in range(count):
        memset(&classes[ranges[i][0]], value, ranges[i][1] - ranges[i][0] + 1)


fill_class(letter_ranges, LETTER_RANGES, LETTER)
fill_class(number_ranges, NUMBER_RANGES, NUMBER)
fill_class(space_ranges, SPACE_RANGES, SPACE)


cdef inline int class_at(const uint8_t* s, Py_ssize_t i, Py_ssize_t* after) noexcept nogil:
    """The class of the character that starts at byte ``i`` of valid UTF-8; ``after`` becomes where the next starts."""
    cdef uint32_t c = s[i]
    if c < 0x80:
        after[0] = i + 1
        return classes[c]
    if c < 0xE0:
        after[0] = i + 2
        return classes[(c & 0x1F) << 6 | (s[i + 1] & 0x3F)]
    if c < 0xF0:
        after[0] = i + 3
        return classes[(c & 0x0F) << 12 | <uint32_t>(s[i + 1] & 0x3F) << 6 | (s[i + 2] & 0x3F)]
    after[0] = i + 4
    return classes[(c & 0x07) << 18 | <uint32_t>(s[i + 1] & 0x3F) << 12 | <uint32_t>(s[i + 2] & 0x3F) << 6
                   | (s[i + 3] & 0x3F)]


cdef inline Py_ssize_t skip(const uint8_t* s, Py_ssize_t i, Py_ssize_t n, int wanted) noexcept nogil:
    """The end of the run of ``wanted`` characters that starts at ``i`` (``i`` itself when there is none)."""
    cdef Py_ssize_t after = i
    while i < n and class_at(s, i, &after) == wanted:
        i = after
    return i


cdef inline Py_ssize_t contraction(const uint8_t* s, Py_ssize_t i, Py_ssize_t n) noexcept nogil:
    """The length of 's 'd 'm 't 'll 've 're at ``i``, where an apostrophe stands; 0 when none does."""
    if i + 1 >= n:
        return 0
    cdef uint8_t c = s[i + 1]
    if c == b's' or c == b'd' or c == b'm' or c == b't':
        return 2
    if i + 2 < n:
        if c == b'l' and s[i + 2] == b'l':
            return 3
        if (c == b'v' or c == b'r') and s[i + 2] == b'e':
            return 3
    return 0


cdef inline Py_ssize_t contraction_any_case(const uint8_t* s, Py_ssize_t i, Py_ssize_t n) noexcept nogil:
    """As ``contraction``, in either case; U+017F (long s) folds to s, as in the regex engines."""
    if i + 1 >= n:
        return 0
    cdef uint8_t c = s[i + 1] | 0x20
    cdef uint8_t d
    if c == b's' or c == b'd' or c == b'm' or c == b't':
        return 2
    if i + 2 < n:
        if s[i + 1] == 0xC5 and s[i + 2] == 0xBF:
            return 3
        d = s[i + 2] | 0x20
        if c == b'l' and d == b'l':
            return 3
        if (c == b'v' or c == b'r') and d == b'e':
            return 3
    return 0


cdef inline Py_ssize_t end_gpt2(const uint8_t* s, Py_ssize_t start, Py_ssize_t n, bint lone_digits) noexcept nogil:
    """The end of the piece that starts at ``start`` < ``n``: patterns GPT2 and SMOLLM."""
    cdef Py_ssize_t i = start, after = start, last = start, length
    cdef int kind
    if s[start] == b"'":
        length = contraction(s, start, n)
        if length:
            return start + length
    if s[start] == b' ' and start + 1 < n:  # ' ?'
        i += 1
    kind = class_at(s, i, &after)
    if i > start and (kind == SPACE or (kind == NUMBER and lone_digits)):  # this space belongs to white space after all
        i = start
        after = start + 1
        kind = SPACE
    if kind == NUMBER and lone_digits:
        return after
    if kind != SPACE:
        return skip(s, after, n, kind)
    i = after
    while i < n:
        kind = class_at(s, i, &after)
        if kind != SPACE:
            break
        last = i
        i = after
    if i == n or (lone_digits and kind == NUMBER):
        return i
    return last if last > start else i  # \s+(?!\S): the last one is left to the word


cdef inline Py_ssize_t end_llama3(const uint8_t* s, Py_ssize_t start, Py_ssize_t n, int digits) noexcept nogil:
    """The end of the piece that starts at ``start`` < ``n``: patterns LLAMA3 (3 digits) and QWEN2 (1)."""
    cdef Py_ssize_t i, after = start, last = start, newline = 0, length
    cdef uint8_t c = s[start]
    cdef int kind, second = SPACE
    if c == b"'":
        length = contraction_any_case(s, start, n)
        if length:
            return start + length
    kind = class_at(s, start, &i)
    if kind == LETTER:
        return skip(s, i, n, LETTER)
    if kind == NUMBER:
        while digits > 1 and i < n and class_at(s, i, &after) == NUMBER:
            i = after
            digits -= 1
        return i
    if i < n:
        second = class_at(s, i, &after)
        if second == LETTER and c != b'\r' and c != b'\n':
            return skip(s, after, n, LETTER)
    if kind == OTHER or (c == b' ' and second == OTHER):
        i = skip(s, i, n, OTHER)
        while i < n and (s[i] == b'\r' or s[i] == b'\n'):
            i += 1
        return i
    i = start
    while i < n and class_at(s, i, &after) == SPACE:
        if s[i] == b'\r' or s[i] == b'\n':
            newline = after
        last = i
        i = after
    if newline:  # \s*[\r\n]+: up to the last line end of the run
        return newline
    if i == n:
        return i
    return last if last > start else i


cdef inline Py_ssize_t piece_end(const uint8_t* s, Py_ssize_t start, Py_ssize_t n, int pattern) noexcept nogil:
    if pattern == GPT2:
        return end_gpt2(s, start, n, False)
    if pattern == SMOLLM:
        return end_gpt2(s, start, n, True)
    if pattern == LLAMA3:
        return end_llama3(s, start, n, 3)
    return end_llama3(s, start, n, 1)


def character_classes() -> bytes:
    """One byte a code point: 0 other, 1 \\p{L}, 2 \\p{N}, 3 \\s (for tests)."""
    return (<const char*>classes)[:CODE_POINTS]
