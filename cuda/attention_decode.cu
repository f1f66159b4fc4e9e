/* Attention of rows that each have their own sequence (decode): a block for a row and KV head, or several.
 *
 * Grid (rows, kv_heads · ⌈group / 16⌉, splits), 256 threads; group = heads / kv_heads query heads share a KV head. Block
 * z takes the pieces z, z + splits, …. With one split it walks all pieces in order and merges them in registers. With
 * more, each piece's O, m and l go to ``partials`` and the last block of the row merges them in order: the same sums.
 *
 * Within a piece, each warp scores one of the eight pages; the probabilities meet in shared memory, and each warp then
 * computes an eighth of the dimensions over all pages in order.
 */
#include "attention.cuh"

static const int WARPS = PIECE_PAGES;

/* partials: [rows][heads][max_pieces][HD + 4] floats, O then m, l. counters: [rows][gridDim.y], 0 before and after. */
struct Decode {
    const f16* q; int q_stride;
    const f16 *k_cache, *v_cache;
    const int *positions, *row_sequence, *page_tables; int max_pages;
    int heads, kv_heads, layers, layer;
    const float* slopes;
    f16* out; int out_stride;
    float* partials; u32* counters; int max_pieces;
};

template <int HD> struct DecodeBlock {
    static const int TILES = HD / 8 / WARPS; /* groups of eight dimensions of a warp */
    static const int WIDTH = HD + 4;

    float m[2], l[2], o[TILES][4];

    /* Where piece 0 of a query head of this row is kept. */
    static __device__ __forceinline__ float* partial(const Decode& a, int head) {
        return a.partials + ((u64)blockIdx.x * a.heads + head) * a.max_pieces * WIDTH;
    }

    /* One piece: o = O_p, and m, l of it, in every warp. */
    __device__ __forceinline__ void compute(const f16x2 (*queries)[4], const Rows& rows, const Pages<f16>& k,
                                            const Pages<f16>& v, const int* table, int piece, int last) {
        /* The next piece may begin at once: it writes each array behind a barrier that follows the last reading. */
        __shared__ float tops[WARPS][16];
        __shared__ uint4 weights[PIECE_PAGES][WARP];
        const int lane = lane_id(), warp = warp_id(), g = lane >> 2;
        const int first = piece * PIECE, pages = min(PIECE_PAGES, (last - first) / PAGE + 1);
        const bool scores = warp < pages;
        table += piece * PIECE_PAGES;

        Keys<HD> keys;
        if (scores) keys.load(k[table[warp]], lane);
        uint2 values[PIECE_PAGES][TILES]; /* asked for now, used after the softmax */
#pragma unroll
        for (int page = 0; page < PIECE_PAGES; page++)
            if (page < pages) {
                const f16* at = v[table[page]];
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
                    values[page][tile] = load_values(at, (warp * TILES + tile) * 8, lane);
            }

        float s[8];
        m[0] = m[1] = minus_infinity();
        if (scores) {
            score_page<HD>(s, queries, keys, rows, first + warp * PAGE, lane);
            m[0] = quad_max(max_of_page(m[0], s));
            m[1] = quad_max(max_of_page(m[1], s + 4));
        }
        if ((lane & 3) == 0) tops[warp][g] = m[0], tops[warp][g + 8] = m[1];
        __syncthreads();
#pragma unroll
        for (int w = 0; w < WARPS; w++) m[0] = fmaxf(m[0], tops[w][g]), m[1] = fmaxf(m[1], tops[w][g + 8]);
        if (scores) {
            f16x2 p[4];
            weigh_page(p, s, m);
            weights[warp][lane] = make_uint4(p[0], p[1], p[2], p[3]);
        }
        __syncthreads();

        l[0] = l[1] = 0.0f;
        clear_sums();
#pragma unroll
        for (int page = 0; page < PIECE_PAGES; page++)
            if (page < pages) {
                const uint4 w = weights[page][lane];
                const f16x2 p[4] = {w.x, w.y, w.z, w.w};
                l[0] = add_rn(l[0], sum_page(p, 0));
                l[1] = add_rn(l[1], sum_page(p, 1));
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    const uint2 b = clear_values(values[page][tile], first + page * PAGE, last, lane);
                    mma_16816(o[tile], p, b.x, b.y);
                }
            }
        l[0] = quad_sum(l[0]);
        l[1] = quad_sum(l[1]);
    }

    __device__ __forceinline__ void clear_sums() {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[tile][i] = 0.0f;
    }

    __device__ __forceinline__ void clear() {
        m[0] = m[1] = minus_infinity();
        l[0] = l[1] = 0.0f;
        clear_sums();
    }

    __device__ __forceinline__ void add(const DecodeBlock& piece) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const Blend b = blend(m[row], piece.m[row], piece.l[row]);
            l[row] = merge(b, l[row], piece.l[row]);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int i = row * 2; i < row * 2 + 2; i++) o[tile][i] = merge(b, o[tile][i], piece.o[tile][i]);
        }
    }

    /* ``head``: the query head of this lane's row g; ``held``: how many heads from that of row 0 on there are. */
    __device__ __forceinline__ void write(const Decode& a, int head, int held) const {
        const int lane = lane_id(), dim = warp_id() * TILES * 8 + (lane & 3) * 2;
#pragma unroll
        for (int row = 0; row < 2; row++)
            if ((lane >> 2) + row * 8 < held) {
                const float scale = reciprocal(l[row]);
                f16* to = a.out + (u64)blockIdx.x * a.out_stride + (head + row * 8) * HD + dim;
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
                    *(f16x2*)(to + tile * 8) = pack_f16x2(mul_rn(o[tile][row * 2], scale), mul_rn(o[tile][row * 2 + 1], scale));
            }
    }

    __device__ __forceinline__ void keep(const Decode& a, int head, int held, int piece) const {
        const int lane = lane_id(), dim = warp_id() * TILES * 8 + (lane & 3) * 2;
#pragma unroll
        for (int row = 0; row < 2; row++)
            if ((lane >> 2) + row * 8 < held) {
                float* to = partial(a, head + row * 8) + (u64)piece * WIDTH;
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
                    *(float2*)(to + dim + tile * 8) = make_float2(o[tile][row * 2], o[tile][row * 2 + 1]);
                if (dim == 0) to[HD] = m[row], to[HD + 1] = l[row];
            }
    }
};

/* Merges the pieces of ``held`` heads from ``head`` on: a thread a dimension. */
template <int HD> static __device__ void merge_partials(const Decode& a, int head, int held, int pieces) {
    for (int i = threadIdx.x; i < held * HD; i += WARPS * WARP) {
        const int dim = i % HD;
        const float* from = DecodeBlock<HD>::partial(a, head + i / HD);
        float m = minus_infinity(), l = 0.0f, o = 0.0f;
        for (int piece = 0; piece < pieces; piece++, from += DecodeBlock<HD>::WIDTH) {
            const float l_piece = __ldcg(from + HD + 1);
            const Blend b = blend(m, __ldcg(from + HD), l_piece);
            l = merge(b, l, l_piece);
            o = merge(b, o, __ldcg(from + dim));
        }
        a.out[(u64)blockIdx.x * a.out_stride + (head + i / HD) * HD + dim] = to_f16(mul_rn(o, reciprocal(l)));
    }
}

template <int HD> static __device__ __forceinline__ void decode(const Decode& a) {
    dependency_wait();
    dependency_release();
    const int group = a.heads / a.kv_heads, tiles = (group + 15) / 16;
    const int kv_head = blockIdx.y / tiles, begin = blockIdx.y % tiles * 16; /* the tile's first head of the group */
    const int held = min(16, group - begin), row = lane_id() >> 2, head = kv_head * group + begin + row;
    const int last = a.positions[blockIdx.x], pieces = last / PIECE + 1;
    const int splits = min((int)gridDim.z, pieces);
    if ((int)blockIdx.z >= splits) return;

    f16x2 queries[HD / 16][4];
    Rows rows;
    const f16* q = a.q + (u64)blockIdx.x * a.q_stride + head * HD;
    load_queries<HD>(queries, row < held ? q : nullptr, row + 8 < held ? q + 8 * HD : nullptr, lane_id());
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const bool real = row + i * 8 < held;
        rows.position[i] = real ? last : -1;
        rows.slope[i] = real && a.slopes ? mul_rn(a.slopes[head + i * 8], LOG2_E) : 0.0f;
    }
    const Pages<f16> k(a.k_cache, a.kv_heads, a.layers, a.layer, kv_head, HD);
    const Pages<f16> v(a.v_cache, a.kv_heads, a.layers, a.layer, kv_head, HD);
    const int* table = a.page_tables + (u64)a.row_sequence[blockIdx.x] * a.max_pages;

    DecodeBlock<HD> sum, piece;
    sum.clear();
#pragma unroll 1
    for (int i = blockIdx.z; i < pieces; i += splits) {
        piece.compute(queries, rows, k, v, table, i, last);
        if (splits == 1) sum.add(piece);
        else piece.keep(a, head, held, i);
    }
    if (splits == 1) {
        sum.write(a, head, held);
        return;
    }
    __shared__ u32 before;
    __threadfence();
    __syncthreads();
    u32* counter = a.counters + blockIdx.x * gridDim.y + blockIdx.y;
    if (threadIdx.x == 0) before = atomicAdd(counter, 1u);
    __syncthreads();
    if (before != (u32)splits - 1) return;
    __threadfence();
    if (threadIdx.x == 0) *counter = 0; /* for the next launch */
    merge_partials<HD>(a, head - row, held, pieces);
}

#define DECODE(HD)                                                                                                   \
    KERNEL(256, 1) crucible_attention_decode_##HD(                                                                   \
        const f16* q, int q_stride, const f16* k_cache, const f16* v_cache, const int* positions,                    \
        const int* row_sequence, const int* page_tables, int max_pages, int heads, int kv_heads, int layers,         \
        int layer, const float* slopes, f16* out, int out_stride, float* partials, u32* counters, int max_pieces) {  \
        const Decode a = {q, q_stride, k_cache, v_cache, positions, row_sequence, page_tables, max_pages, heads,     \
                          kv_heads, layers, layer, slopes, out, out_stride, partials, counters, max_pieces};         \
        decode<HD>(a);                                                                                               \
    }

DECODE(64)
DECODE(128)
