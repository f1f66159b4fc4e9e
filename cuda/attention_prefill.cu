/* Attention of prompt rows: a block for a tile of up to 64 successive rows of one sequence, and a head.
 *
 * Grid (tiles, heads), 128 threads. tile_first [tiles], tile_rows [tiles] (1 … 64): the rows of a tile, which belong to
 * one sequence and have rising positions. Each warp takes sixteen of them and needs no other warp: scores of a piece
 * stay in its registers. The four warps read the same pages at about the same time, through the level 1 cache.
 */
#include "attention.cuh"

struct Prefill {
    const f16* q; int q_stride;
    const f16 *k_cache, *v_cache;
    const int *positions, *row_sequence, *page_tables; int max_pages;
    int heads, kv_heads, layers, layer;
    const float* slopes;
    f16* out; int out_stride;
    const int *tile_first, *tile_rows;
};

template <int HD> static __device__ __forceinline__ void prefill(const Prefill& a) {
    const int TILES = HD / 8;
    dependency_wait();
    dependency_release();
    const int lane = lane_id(), begin = warp_id() * 16, held = a.tile_rows[blockIdx.x] - begin;
    if (held <= 0) return;
    const int head = blockIdx.y, kv_head = head / (a.heads / a.kv_heads);
    const int first_row = a.tile_first[blockIdx.x] + begin, row = first_row + (lane >> 2);
    const int last = a.positions[first_row + min(held, 16) - 1];

    Rows rows;
    const f16* q = a.q + (u64)row * a.q_stride + head * HD;
    const bool real[2] = {(lane >> 2) < held, (lane >> 2) + 8 < held};
    rows.slope[0] = rows.slope[1] = a.slopes ? mul_rn(a.slopes[head], LOG2_E) : 0.0f;
    rows.position[0] = real[0] ? a.positions[row] : -1;
    rows.position[1] = real[1] ? a.positions[row + 8] : -1;
    const Pages<f16> k(a.k_cache, a.kv_heads, a.layers, a.layer, kv_head, HD);
    const Pages<f16> v(a.v_cache, a.kv_heads, a.layers, a.layer, kv_head, HD);
    const int* table = a.page_tables + (u64)a.row_sequence[first_row] * a.max_pages;

    float m[2] = {minus_infinity(), minus_infinity()}, l[2] = {0.0f, 0.0f};
    /* A thread's own sums, touched once a piece: in shared memory they leave the registers to scores and values. */
    __shared__ float4 sums[TILES][128];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) sums[tile][threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

#pragma unroll 1
    for (int first = 0; first <= last; first += PIECE, table += PIECE_PAGES) {
        const int pages = min(PIECE_PAGES, (last - first) / PAGE + 1);
        float s[PIECE_PAGES][8], m_piece[2] = {minus_infinity(), minus_infinity()}, l_piece[2] = {0.0f, 0.0f};
        __syncwarp(); /* keeps the compiler from holding the queries in registers while values are summed */
        f16x2 queries[HD / 16][4];
        load_queries<HD>(queries, real[0] ? q : nullptr, real[1] ? q + 8 * (u64)a.q_stride : nullptr, lane);
#pragma unroll
        for (int page = 0; page < PIECE_PAGES; page++)
            if (page < pages) {
                Keys<HD> keys;
                keys.load(k[table[page]], lane);
                score_page<HD>(s[page], queries, keys, rows, first + page * PAGE, lane);
                m_piece[0] = max_of_page(m_piece[0], s[page]);
                m_piece[1] = max_of_page(m_piece[1], s[page] + 4);
            }
        m_piece[0] = quad_max(m_piece[0]);
        m_piece[1] = quad_max(m_piece[1]);
        f16x2 p[PIECE_PAGES][4];
#pragma unroll
        for (int page = 0; page < PIECE_PAGES; page++)
            if (page < pages) {
                weigh_page(p[page], s[page], m_piece);
                l_piece[0] = add_rn(l_piece[0], sum_page(p[page], 0));
                l_piece[1] = add_rn(l_piece[1], sum_page(p[page], 1));
            }
        Blend b[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            l_piece[i] = quad_sum(l_piece[i]);
            b[i] = blend(m[i], m_piece[i], l_piece[i]);
            l[i] = merge(b[i], l[i], l_piece[i]);
        }
        float o[TILES][4];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[tile][i] = 0.0f;
#pragma unroll
        for (int page = 0; page < PIECE_PAGES; page++)
            if (page < pages) {
                const f16* values = v[table[page]];
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    const uint2 x = clear_values(load_values(values, tile * 8, lane), first + page * PAGE, last, lane);
                    mma_16816(o[tile], p[page], x.x, x.y);
                }
            }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            float4 sum = sums[tile][threadIdx.x];
            sum.x = merge(b[0], sum.x, o[tile][0]);
            sum.y = merge(b[0], sum.y, o[tile][1]);
            sum.z = merge(b[1], sum.z, o[tile][2]);
            sum.w = merge(b[1], sum.w, o[tile][3]);
            sums[tile][threadIdx.x] = sum;
        }
    }

    const float scale[2] = {reciprocal(l[0]), reciprocal(l[1])};
    f16* to = a.out + (u64)row * a.out_stride + head * HD + (lane & 3) * 2;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const float4 sum = sums[tile][threadIdx.x];
        if (real[0]) *(f16x2*)(to + tile * 8) = pack_f16x2(mul_rn(sum.x, scale[0]), mul_rn(sum.y, scale[0]));
        if (real[1])
            *(f16x2*)(to + 8 * (u64)a.out_stride + tile * 8) = pack_f16x2(mul_rn(sum.z, scale[1]), mul_rn(sum.w, scale[1]));
    }
}

#define PREFILL(HD)                                                                                                  \
    KERNEL(128, 2) crucible_attention_prefill_##HD(                                                                   \
        const f16* q, int q_stride, const f16* k_cache, const f16* v_cache, const int* positions,                    \
        const int* row_sequence, const int* page_tables, int max_pages, int heads, int kv_heads, int layers,         \
        int layer, const float* slopes, f16* out, int out_stride, const int* tile_first, const int* tile_rows) {     \
        const Prefill a = {q, q_stride, k_cache, v_cache, positions, row_sequence, page_tables, max_pages, heads,    \
                           kv_heads, layers, layer, slopes, out, out_stride, tile_first, tile_rows};                 \
        prefill<HD>(a);                                                                                              \
    }

PREFILL(64)
PREFILL(128)
