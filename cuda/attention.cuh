/* The arithmetic of attention, one for decode and prefill: what is shared here makes their bits equal.
 *
 * Sixteen query rows are the A operand of the tensor-core steps: the query heads of one KV head (decode) or successive
 * rows of one head (prefill). Rows do not influence each other. Positions are cut into pieces of 128, that is 8 pages:
 *   t   = q·k · log2(e)/√HD + slope · log2(e) · (position − row's position)      -inf beyond the row's position
 *   m_p = max t,  p = 2^(t − m_p) rounded to f16,  l_p = Σ p,  O_p = Σ p·v       pages in order
 * and pieces are merged in order 0, 1, 2, …:
 *   m' = max(m, m_p),  O = O · 2^(m − m') + O_p · 2^(m_p − m'),  l likewise;     a piece that a row does not see changes
 * nothing. The result is O / l, rounded to f16.
 *
 * Pages: K [16 positions][HD], V [HD][16 positions]. Of lane (g = lane >> 2, q = lane & 3): the halves 16q … 16q + 15 of
 * each 64 of head_dim, step j of a block taking 4j … 4j + 3 of them; score columns are permuted so that the lane's
 * probabilities are those of positions 4q … 4q + 3 of the page, which is its A operand for P·V, and its V operand
 * 8 consecutive bytes.
 */
#ifndef CRUCIBLE_ATTENTION_CUH
#define CRUCIBLE_ATTENTION_CUH

#include "common.cuh"

static const int PAGE = 16;
static const int PIECE_PAGES = 8;
static const int PIECE = PAGE * PIECE_PAGES;
static const float LOG2_E = 1.4426950408889634f;

DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }

/* ---- where things are ---- */

/* K or V of one layer and KV head: page p begins at base + p · stride. */
template <class T> struct Pages {
    const T* base;
    u64 stride;

    __device__ __forceinline__ Pages(const T* cache, int kv_heads, int layers, int layer, int kv_head, int head_dim) {
        stride = (u64)layers * kv_heads * (PAGE * head_dim);
        base = cache + ((u64)layer * kv_heads + kv_head) * (PAGE * head_dim);
    }
    __device__ __forceinline__ const T* operator[](int page) const { return base + (u64)page * stride; }
};

/* ---- operands ---- */

/* The A operand of sixteen query rows, of which a lane holds g and g + 8; null is a row of zeros. */
template <int HD> DEVICE void load_queries(f16x2 (*a)[4], const f16* row0, const f16* row1, int lane) {
    const uint4 zero = {0, 0, 0, 0};
#pragma unroll
    for (int block = 0; block < HD / 64; block++) {
        const int at = block * 64 + (lane & 3) * 16;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 x = row0 ? load_16(row0 + at + half * 8) : zero;
            const uint4 y = row1 ? load_16(row1 + at + half * 8) : zero;
            f16x2* step = a[block * 4 + half * 2];
            step[0] = x.x, step[1] = y.x, step[2] = x.y, step[3] = y.y;
            step[4] = x.z, step[5] = y.z, step[6] = x.w, step[7] = y.w;
        }
    }
}

/* The lane's part of a K page: for each of two groups of eight positions, 32 bytes of each 64 halves. */
template <int HD> struct Keys {
    uint4 x[2][HD / 64][2];

    __device__ __forceinline__ void load(const f16* page, int lane) {
        const int g = lane >> 2;
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            const f16* row = page + ((g >> 1) * 4 + (g & 1) + 2 * tile) * HD + (lane & 3) * 16;
#pragma unroll
            for (int block = 0; block < HD / 64; block++)
#pragma unroll
                for (int half = 0; half < 2; half++) x[tile][block][half] = load_16(row + block * 64 + half * 8);
        }
    }
};

/* The lane's V operand for eight dimensions: positions 4q … 4q + 3 of dimension ``dim`` + g. */
DEVICE uint2 load_values(const f16* page, int dim, int lane) {
    return *(const uint2*)(page + (dim + (lane >> 2)) * PAGE + (lane & 3) * 4);
}

/* What lies behind the last position may be anything, NaN too, and 0 · NaN is NaN: it is cleared. */
DEVICE uint2 clear_values(uint2 v, int first, int last, int lane) {
    const int held = last + 1 - (first + (lane & 3) * 4); /* how many of the lane's four positions exist */
    v.x = held >= 2 ? v.x : held == 1 ? v.x & 0xffffu : 0u;
    v.y = held >= 4 ? v.y : held == 3 ? v.y & 0xffffu : 0u;
    return v;
}

/* ---- one page ---- */

/* The two rows g and g + 8 of a lane. position −1: no row, it sees nothing. slope: of ALiBi, times log2(e). */
struct Rows {
    int position[2];
    float slope[2];
};

/* t of a page: s[0…3] row g, s[4…7] row g + 8, at positions first + 4q … + 3. */
template <int HD>
DEVICE void score_page(float* s, const f16x2 (*queries)[4], const Keys<HD>& keys, const Rows& rows, int first, int lane) {
    const float scale = HD == 64 ? 0.125f * LOG2_E : 0.08838834764831845f * LOG2_E;
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
        float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int block = 0; block < HD / 64; block++) {
            const uint4 x = keys.x[tile][block][0], y = keys.x[tile][block][1];
            mma_16816(d, queries[block * 4], x.x, x.y);
            mma_16816(d, queries[block * 4 + 1], x.z, x.w);
            mma_16816(d, queries[block * 4 + 2], y.x, y.y);
            mma_16816(d, queries[block * 4 + 3], y.z, y.w);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = i >> 1, behind = first + (lane & 3) * 4 + tile * 2 + (i & 1) - rows.position[row];
            const float t = fmaf(rows.slope[row], (float)behind, mul_rn(d[i], scale));
            s[row * 4 + tile * 2 + (i & 1)] = behind <= 0 ? t : minus_infinity();
        }
    }
}

DEVICE float max_of_page(float m, const float* s) { return fmaxf(fmaxf(fmaxf(m, s[0]), fmaxf(s[1], s[2])), s[3]); }

/* The maximum over the four lanes that share a row. */
DEVICE float quad_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(ALL_LANES, v, 1));
    return fmaxf(v, __shfl_xor_sync(ALL_LANES, v, 2));
}

DEVICE float quad_sum(float v) {
    v = add_rn(v, __shfl_xor_sync(ALL_LANES, v, 1));
    return add_rn(v, __shfl_xor_sync(ALL_LANES, v, 2));
}

/* The A operand of P·V from a page's scores and the two rows' maxima. */
DEVICE void weigh_page(f16x2* p, const float* s, const float* m) {
#pragma unroll
    for (int row = 0; row < 2; row++) {
        /* A row that sees nothing has maximum -inf: −inf − 0 gives weight 0, where −inf − −inf would be NaN. */
        const float top = m[row] == minus_infinity() ? 0.0f : m[row];
        const float* t = s + row * 4;
        p[row] = pack_f16x2(exp2_fast(sub_rn(t[0], top)), exp2_fast(sub_rn(t[1], top)));
        p[row + 2] = pack_f16x2(exp2_fast(sub_rn(t[2], top)), exp2_fast(sub_rn(t[3], top)));
    }
}

/* The lane's part of Σ p of a page for row 0 or 1. */
DEVICE float sum_page(const f16x2* p, int row) {
    return add_rn(add_rn(low_f32(p[row]), high_f32(p[row])), add_rn(low_f32(p[row + 2]), high_f32(p[row + 2])));
}

/* ---- merging pieces ---- */

/* How much of what was merged before and of the new piece remains. seen: false when the row does not see the piece. */
struct Blend {
    float old, fresh;
    bool seen;
};

/* A row sees a piece when its Σ p is not 0: the maximum has p = 1, and NaN is not 0 and stays NaN. */
DEVICE Blend blend(float& m, float m_piece, float l_piece) {
    Blend b;
    const float top = fmaxf(m, m_piece);
    b.seen = l_piece != 0.0f;
    b.old = exp2_fast(sub_rn(m, top));
    b.fresh = exp2_fast(sub_rn(m_piece, top));
    m = b.seen ? top : m;
    return b;
}

DEVICE float merge(const Blend& b, float old, float piece) {
    return b.seen ? fmaf(old, b.old, mul_rn(piece, b.fresh)) : old;
}

DEVICE float reciprocal(float v) { return __fdiv_rn(1.0f, v); }

#endif
