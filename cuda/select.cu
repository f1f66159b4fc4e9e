/* The first token, or the first k, of each row of logits in canonical order: a higher logit, then a lower id (order_key.h).
 *
 * Grid (blocks, rows), 512 threads; each block takes a slice of the vocabulary, and the last block of a row to finish
 * joins what they found. Keys are distinct and compared as integers, so nothing depends on the number of blocks or on
 * their order. Ids from token_count on are padding and never read. A row that holds NaN or +inf is flagged.
 *
 * counters [rows]: 0 before and after a launch; the low half counts blocks, the high half those that met NaN or +inf.
 */
#include "common.cuh"
#include "order_key.h"

static const int THREADS = 512;
static const int WARPS = THREADS / WARP;
static const int BINS = 2048;
static const int MAX_K = 1024;

DEVICE u32 is_bad(float v) {
    const u32 bits = __float_as_uint(v);
    return bits == 0x7f800000u || (bits & 0x7fffffffu) > 0x7f800000u;
}

DEVICE u64 larger(u64 a, u64 b) { return a > b ? a : b; }

DEVICE u64 warp_largest(u64 key) {
#pragma unroll
    for (int bit = 16; bit; bit >>= 1) key = larger(key, __shfl_xor_sync(ALL_LANES, key, bit));
    return key;
}

/* Ids begin … end − 1 are the block's. */
struct Slice {
    int size, begin, end;

    __device__ __forceinline__ Slice(int count) {
        size = (count + gridDim.x - 1) / gridDim.x;
        begin = min((int)blockIdx.x * size, count);
        end = min(begin + size, count);
    }
};

/* Whether this block is the last of its row; all its threads call it after their writes. bad: in, of this block; out, of
 * the row. */
static __device__ bool last_of_row(u32* counters, u32& bad) {
    __shared__ u32 before;
    bad = __syncthreads_or(bad) != 0;
    if (threadIdx.x == 0) {
        __threadfence();
        before = atomicAdd(counters + blockIdx.y, 1u + (bad << 16));
        __threadfence();
    }
    __syncthreads();
    if ((before & 0xffffu) + 1 != gridDim.x) return false;
    bad |= before >> 16 != 0;
    if (threadIdx.x == 0) counters[blockIdx.y] = 0;
    return true;
}

/* partials: [rows][blocks]. tokens [rows]; with guard, −1 for a flagged row. flags [rows] or null. */
KERNEL(512, 1) crucible_argmax(const float* logits, int stride, int token_count, u64* partials, u32* counters, int guard,
                               int* tokens, int* flags) {
    __shared__ u64 tops[WARPS];
    dependency_wait();
    dependency_release();
    const int row = blockIdx.y, blocks = gridDim.x;
    const float* x = logits + (u64)row * stride;
    const Slice slice(token_count);
    u64 best = 0;
    u32 bad = 0;
#pragma unroll 4
    for (int i = slice.begin + threadIdx.x; i < slice.end; i += THREADS) {
        const float v = x[i];
        best = larger(best, crucible_order_key(v, i));
        bad |= is_bad(v);
    }
    best = warp_largest(best);
    if (lane_id() == 0) tops[warp_id()] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < WARPS; w++) best = larger(best, tops[w]);
        partials[(u64)row * blocks + blockIdx.x] = best;
    }
    if (!last_of_row(counters, bad) || warp_id() != 0) return;
    best = 0;
    for (int i = lane_id(); i < blocks; i += WARP) best = larger(best, __ldcg(partials + (u64)row * blocks + i));
    best = warp_largest(best);
    if (lane_id() == 0) {
        tokens[row] = guard && bad ? -1 : (int)crucible_key_id(best);
        if (flags) flags[row] = bad;
    }
}

/* ---- top k ---- */

struct Radix {
    u32 bins[BINS];
    u32 sums[WARPS];
    u32 digit, above, inside; /* the bin of the k-th key, and how many keys lie above it and in it */
    u32 taken;
};

/* Of the bins from the highest digit down, the one in which the k-th key lies. A thread looks at four. */
static __device__ void find_digit(Radix& s, u32 k) {
    const int first = BINS - 1 - threadIdx.x * 4;
    u32 own = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) own += s.bins[first - j];
    u32 sum = own;
#pragma unroll
    for (int by = 1; by < WARP; by <<= 1) {
        const u32 other = __shfl_up_sync(ALL_LANES, sum, by);
        if (lane_id() >= by) sum += other;
    }
    if (lane_id() == WARP - 1) s.sums[warp_id()] = sum;
    __syncthreads();
    for (int w = 0; w < warp_id(); w++) sum += s.sums[w];
    u32 above = sum - own;
    if (above < k && k <= sum) {
        int bin = first;
        while (above + s.bins[bin] < k) above += s.bins[bin--];
        s.digit = bin;
        s.above = above;
        s.inside = s.bins[bin];
    }
    __syncthreads();
}

/* A bound that exactly the first k of n distinct keys reach, 0 < k ≤ n. key_at(i): the i-th key. */
template <class Keys> static __device__ u64 bound_of_first(Radix& s, const Keys& key_at, int n, u32 k) {
    if (k == (u32)n) return 0;
    u64 bound = 0, known = 0;
#pragma unroll 1
    for (int pass = 0; pass < 5; pass++) {
        /* Digits of 11, 11 and 10 bits of the logit, then 11 and 10 of the id: its upper 11 are 0, their complement 1. */
        const int shift = pass == 0 ? 53 : pass == 1 ? 42 : pass == 2 ? 32 : pass == 3 ? 10 : 0;
        const u32 digits = pass == 2 || pass == 4 ? 1023 : 2047;
        if (pass == 3) bound |= 0xffe00000ull, known |= 0xffe00000ull;
        for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += THREADS) {
            const u64 key = key_at(i);
            if ((key & known) == bound) atomicAdd(&s.bins[key >> shift & digits], 1u);
        }
        __syncthreads();
        find_digit(s, k);
        bound |= (u64)s.digit << shift;
        known |= (u64)digits << shift;
        k -= s.above;
        if (s.inside == k) break; /* the whole bin is among the first */
    }
    return bound;
}

/* The first k of n keys into ``to``, in any order. */
template <class Keys> static __device__ void take_first(Radix& s, const Keys& key_at, int n, int k, u64* to) {
    const u64 bound = bound_of_first(s, key_at, n, k);
    if (threadIdx.x == 0) s.taken = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += THREADS) {
        const u64 key = key_at(i);
        if (key >= bound) to[atomicAdd(&s.taken, 1u)] = key;
    }
    __syncthreads();
}

/* Bitonic sort of the first ``count`` keys, larger ones first; the rest up to a power of two is filled with 0. */
static __device__ void sort_descending(u64* keys, int count) {
    int size = 1;
    while (size < count) size <<= 1;
    for (int i = count + threadIdx.x; i < size; i += THREADS) keys[i] = 0;
    __syncthreads();
    for (int run = 2; run <= size; run <<= 1)
        for (int step = run >> 1; step; step >>= 1) {
            for (int i = threadIdx.x; i < size / 2; i += THREADS) {
                const int low = (i & ~(step - 1)) * 2 + (i & (step - 1)), high = low + step;
                const u64 a = keys[low], b = keys[high];
                const bool descending = (low & run) == 0;
                if (descending == (a < b)) keys[low] = b, keys[high] = a;
            }
            __syncthreads();
        }
}

struct SliceKeys {
    const float* x;
    int begin;
    __device__ __forceinline__ u64 operator()(int i) const { return crucible_order_key(x[begin + i], begin + i); }
};

struct KeptKeys {
    const u64* keys;
    __device__ __forceinline__ u64 operator()(int i) const { return __ldcg(keys + i); }
};

/* top_ks [rows]: how many; at most token_count come. A row of 0, or of more than max_k, is left alone: nothing of it is
 * written. partials: [rows][blocks][max_k]. ids, values: [rows][max_k], in canonical order; values are the logits with −0
 * as +0. flags [rows]. */
KERNEL(512, 1) crucible_top_k(const float* logits, int stride, int token_count, const int* top_ks, int max_k, u64* partials,
                              u32* counters, int* ids, float* values, int* flags) {
    __shared__ Radix radix;
    __shared__ u64 chosen[MAX_K];
    dependency_wait();
    dependency_release();
    const int row = blockIdx.y, wanted = top_ks[row];
    if (wanted <= 0 || wanted > max_k) return;
    const SliceKeys keys = {logits + (u64)row * stride, Slice(token_count).begin};
    const Slice slice(token_count);
    const int size = slice.end - slice.begin, each = min(wanted, slice.size);
    u64* kept = partials + (u64)row * gridDim.x * max_k;

    u32 bad = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < size; i += THREADS) bad |= is_bad(keys.x[slice.begin + i]);
    if (size > 0) take_first(radix, keys, size, min(wanted, size), kept + (u64)blockIdx.x * each);
    __threadfence(); /* every thread wrote some of the keys */
    if (!last_of_row(counters, bad)) return;

    /* All slices but the last that is not empty are whole, so the keys lie side by side. */
    const int whole = token_count / slice.size, found = whole * each + min(wanted, token_count - whole * slice.size);
    const int count = min(wanted, token_count);
    take_first(radix, KeptKeys{kept}, found, count, chosen);
    sort_descending(chosen, count);
    for (int i = threadIdx.x; i < count; i += THREADS) {
        ids[(u64)row * max_k + i] = crucible_key_id(chosen[i]);
        values[(u64)row * max_k + i] = crucible_key_logit(chosen[i]);
    }
    if (threadIdx.x == 0) flags[row] = bad;
}
