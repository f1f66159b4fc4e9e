"""The bookkeeping of a step without Python per token: a request's arrays, the batch filled from them, the advance after it.

``RequestRow`` holds what a step reads of a request; ``BatchFiller`` writes the metadata of a plan into preallocated
buffers; ``advance`` stores the sampled tokens. A row of the batch whose position is the request's last known token
yields logits: that is a decode row, or the last row of a prompt's last chunk.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy, memset

from crucible.native.pages cimport PagePool

import numpy as np

cnp.import_array()

cdef enum:
    PAGE_SHIFT = 4
    FAULT = 3

PAGE_TOKENS = 1 << PAGE_SHIFT

RUNS_ON, STOPPED, FULL, BROKEN = 0, 1, 2, FAULT

NO_TOKEN = -1
"""In the place of a token id: the row's logits hold a NaN or +inf, and its request cannot go on."""


cdef class RequestRow:
    """What a step needs of a request.

    tokens int32 [limit]: the prompt, then the generated ids; ``length`` of them are known, and the KV of the first
    ``computed`` is in the cache. page_row int32: the pages held, in the order of the positions; ``page_count``
    are valid, and the first ``published`` can be found by others; ``chain`` is the identity of the last of those.
    cached_tokens: those whose KV was found when the pages were assigned.
    """

    cdef readonly str request_id
    cdef readonly object tokens
    cdef readonly object page_row
    cdef readonly int prompt_tokens
    cdef readonly int limit
    cdef readonly int length
    cdef readonly int computed
    cdef readonly int page_count
    cdef readonly int published
    cdef readonly uint64_t chain
    cdef readonly int cached_tokens
    cdef readonly int finish_code
    cdef readonly int choice
    cdef readonly bint ignore_eos
    cdef readonly double temperature
    cdef readonly int64_t top_k
    cdef readonly uint64_t seed
    cdef int32_t *_tokens
    cdef int32_t *_pages

    def __init__(self, str request_id not None, cnp.ndarray prompt not None, int max_tokens, *, double temperature=0.0,
                 int64_t top_k=0, uint64_t seed=0, int choice=0, bint ignore_eos=False):
        """prompt int32 [prompt_tokens], at least one id. temperature 0 is greedy."""
        if prompt.ndim != 1 or prompt.dtype != np.int32 or prompt.shape[0] < 1 or max_tokens < 1:
            raise ValueError("a request needs a non-empty int32 vector of ids and max_tokens of at least 1")
        cdef int count = prompt.shape[0]
        self.request_id = request_id
        self.prompt_tokens = self.length = count
        self.limit = count + max_tokens
        self.tokens = np.zeros(self.limit, np.int32)
        self.tokens[:count] = prompt
        self.page_row = np.zeros(pages_for(self.limit), np.int32)
        self._tokens = <int32_t *> cnp.PyArray_DATA(self.tokens)
        self._pages = <int32_t *> cnp.PyArray_DATA(self.page_row)
        self.temperature = temperature
        self.top_k = top_k
        self.seed = seed
        self.choice = choice
        self.ignore_eos = ignore_eos

    @property
    def pages_needed(self):
        """Pages for the request's whole life: ceil(limit / 16)."""
        return pages_for(self.limit)

    @property
    def remaining(self):
        """Known tokens whose KV is not in the cache yet; 1 for a request that decodes."""
        return self.length - self.computed

    @property
    def generated(self):
        """Tokens generated so far."""
        return self.length - self.prompt_tokens

    def assign_pages(self, list pages not None, int computed=0, uint64_t chain=0):
        """Take over the references to ``pages``; the first ``computed`` tokens are in them already.

        chain: the identity of the last full page among those tokens, or the root (crucible.native.pages).
        """
        cdef int i, count = len(pages)
        if self.page_count or count > self.page_row.shape[0] or not 0 <= computed < self.length:
            raise RuntimeError(f"request {self.request_id} cannot take {count} pages with {computed} tokens computed")
        for i in range(count):
            self._pages[i] = pages[i]
        self.page_count = count
        self.computed = self.cached_tokens = computed
        self.published = computed >> PAGE_SHIFT
        self.chain = chain

    def take_pages(self):
        """Give up the page references: the list to release. Empty when none are held."""
        cdef list pages = [self._pages[i] for i in range(self.page_count)]
        self.page_count = 0
        return pages


def publish(PagePool pool not None, list decode not None, list prefill not None):
    """Let others find the pages that a computed plan has filled. ``page_row`` may change: see PagePool.publish."""
    cdef Py_ssize_t i, decoding = len(decode)
    cdef RequestRow request
    for i in range(decoding + len(prefill)):
        request = <RequestRow?> (decode[i] if i < decoding else prefill[i - decoding])
        if request.finish_code == FAULT:
            continue
        while (request.published + 1) << PAGE_SHIFT <= request.computed:
            request.chain = pool.publish(request._pages + request.published, request.chain,
                                         request._tokens + (request.published << PAGE_SHIFT))
            request.published += 1


def wasted_slots(list requests not None):
    """Reserved token slots of all ``requests`` that hold nothing yet."""
    cdef int64_t total = 0
    for request in requests:
        total += (<RequestRow?> request).page_count * (1 << PAGE_SHIFT) - (<RequestRow> request).computed
    return total


cpdef int pages_for(int tokens):
    """Pages that hold ``tokens`` tokens."""
    return (tokens + (1 << PAGE_SHIFT) - 1) >> PAGE_SHIFT


cdef class BatchFiller:
    """Writes plans into buffers that it keeps alive; all int32 unless noted, C-contiguous.

    token_ids, positions, row_sequence [rows]; sequence_starts [sequences + 1]; context_lengths [sequences];
    page_tables [sequences, pages]; logit_rows, choices, draw_positions [sequences]; temperatures float64, top_ks
    int64, seeds uint64 [sequences].
    """

    cdef object _buffers
    cdef int _max_rows, _max_sequences, _max_pages
    cdef int32_t *_token_ids
    cdef int32_t *_positions
    cdef int32_t *_row_sequence
    cdef int32_t *_sequence_starts
    cdef int32_t *_context_lengths
    cdef int32_t *_page_tables
    cdef int32_t *_logit_rows
    cdef int32_t *_choices
    cdef int32_t *_draw_positions
    cdef double *_temperatures
    cdef int64_t *_top_ks
    cdef uint64_t *_seeds
    cdef object _written  # int32 [sequences]: page entries that may be non-zero, so that only those are cleared

    cdef readonly int rows
    cdef readonly int sequences
    cdef readonly int logits

    def __init__(self, *, token_ids, positions, row_sequence, sequence_starts, context_lengths, page_tables,
                 logit_rows, choices, draw_positions, temperatures, top_ks, seeds):
        cdef int rows = token_ids.shape[0]
        cdef int sequences = page_tables.shape[0]
        self._max_rows, self._max_sequences, self._max_pages = rows, sequences, page_tables.shape[1]
        self._token_ids = <int32_t *> data_of(token_ids, np.int32, (rows,))
        self._positions = <int32_t *> data_of(positions, np.int32, (rows,))
        self._row_sequence = <int32_t *> data_of(row_sequence, np.int32, (rows,))
        self._sequence_starts = <int32_t *> data_of(sequence_starts, np.int32, (sequences + 1,))
        self._context_lengths = <int32_t *> data_of(context_lengths, np.int32, (sequences,))
        self._page_tables = <int32_t *> data_of(page_tables, np.int32, (sequences, self._max_pages))
        self._logit_rows = <int32_t *> data_of(logit_rows, np.int32, (sequences,))
        self._choices = <int32_t *> data_of(choices, np.int32, (sequences,))
        self._draw_positions = <int32_t *> data_of(draw_positions, np.int32, (sequences,))
        self._temperatures = <double *> data_of(temperatures, np.float64, (sequences,))
        self._top_ks = <int64_t *> data_of(top_ks, np.int64, (sequences,))
        self._seeds = <uint64_t *> data_of(seeds, np.uint64, (sequences,))
        self._written = np.full(sequences, self._max_pages, np.int32)
        self._buffers = (token_ids, positions, row_sequence, sequence_starts, context_lengths, page_tables,
                         logit_rows, choices, draw_positions, temperatures, top_ks, seeds)

    def fill(self, list decode not None, list prefill not None, list counts not None, bint ahead=False):
        """Metadata of one step: a row for each request of ``decode``, then ``counts[i]`` rows for ``prefill[i]``.

        ahead: of the step after one that is not recorded yet, so that each row is one further and its token unknown
        (what token_ids then holds means nothing). Sets ``rows``, ``sequences`` and ``logits``. Raises RuntimeError for a plan that does not fit the buffers,
        or rows beyond a request's known tokens or pages.
        """
        self.rows = self.sequences = self.logits = 0
        self._sequence_starts[0] = 0
        cdef Py_ssize_t i
        if len(prefill) != len(counts):
            raise RuntimeError(f"{len(prefill)} requests prefill but {len(counts)} counts are given")
        for i in range(len(decode)):
            self._add(<RequestRow?> decode[i], 1, ahead)
        for i in range(len(prefill)):
            self._add(<RequestRow?> prefill[i], counts[i], 0)

    cdef int _add(self, RequestRow request, int count, int ahead) except -1:
        cdef int start = request.computed + ahead
        cdef int known = request.length + ahead if request.length < request.limit else request.length
        cdef int end = start + count
        cdef int pages = pages_for(end)
        cdef int s = self.sequences, row = self.rows
        cdef int i
        if s == self._max_sequences or row + count > self._max_rows or pages > self._max_pages:
            raise RuntimeError(f"the plan does not fit a batch of {self._max_rows} rows, {self._max_sequences} "
                               f"requests and {self._max_pages} pages")
        if count < 1 or end > known or pages > request.page_count:
            raise RuntimeError(f"request {request.request_id} has no rows {start}…{end} to compute: {known} "
                               f"tokens are known and {request.page_count} pages held")
        memcpy(self._token_ids + row, request._tokens + start, count * sizeof(int32_t))
        for i in range(count):
            self._positions[row + i] = start + i
            self._row_sequence[row + i] = s
        self._sequence_starts[s + 1] = row + count
        self._context_lengths[s] = end
        cdef int32_t *table = self._page_tables + <Py_ssize_t> s * self._max_pages
        cdef int32_t *written = <int32_t *> cnp.PyArray_DATA(self._written) + s
        memcpy(table, request._pages, pages * sizeof(int32_t))
        if written[0] > pages:
            memset(table + pages, 0, (written[0] - pages) * sizeof(int32_t))
        written[0] = pages
        if end == known:
            i = self.logits
            self._logit_rows[i] = row + count - 1
            self._choices[i] = request.choice
            self._draw_positions[i] = end
            self._temperatures[i] = request.temperature
            self._top_ks[i] = request.top_k
            self._seeds[i] = request.seed
            self.logits += 1
        self.sequences += 1
        self.rows += count
        return 0


def advance(list decode not None, list prefill not None, list counts not None, const int32_t[::1] token_ids,
            const int32_t[::1] eos_ids):
    """Account for a computed plan: KV positions, then one token for each request that had logits, in that order.

    Returns (requests that got a token, requests that ended). ``finish_code`` of the latter is STOPPED (an eos id,
    unless the request ignores them), FULL (its limit) or BROKEN (NO_TOKEN came back, and it got none). Raises
    RuntimeError, before anything changes, when the number of tokens is not the number of logit rows.
    """
    cdef list sampled = []
    cdef list finished = []
    cdef Py_ssize_t i, j, k = 0
    cdef Py_ssize_t decoding = len(decode), total = decoding + len(prefill)
    cdef RequestRow request
    cdef int32_t token
    for i in range(total):
        request = decode[i] if i < decoding else prefill[i - decoding]
        k += request.computed + (1 if i < decoding else <int> counts[i - decoding]) == request.length
    if k != token_ids.shape[0]:
        raise RuntimeError(f"the step has {k} logit rows but {token_ids.shape[0]} tokens came back")
    k = 0
    for i in range(total):
        request = decode[i] if i < decoding else prefill[i - decoding]
        request.computed += 1 if i < decoding else <int> counts[i - decoding]
        if request.computed != request.length:
            continue
        token = token_ids[k]
        k += 1
        if token < 0:
            request.finish_code = FAULT
            finished.append(request)
            continue
        request._tokens[request.length] = token
        request.length += 1
        sampled.append(request)
        if not request.ignore_eos:
            for j in range(eos_ids.shape[0]):
                if token == eos_ids[j]:
                    request.finish_code = STOPPED
        if request.finish_code == RUNS_ON and request.length == request.limit:
            request.finish_code = FULL
        if request.finish_code != RUNS_ON:
            finished.append(request)
    return sampled, finished


cdef void *data_of(cnp.ndarray array, object dtype, tuple shape) except NULL:
    if array.dtype != dtype or (<object> array).shape != shape or not (<object> array).flags.c_contiguous:
        raise ValueError(f"a batch buffer must be {np.dtype(dtype)} {shape}, got {array.dtype} {(<object> array).shape}")
    return cnp.PyArray_DATA(array)
