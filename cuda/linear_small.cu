/* Projections of few rows (decode): 8, 16 or 32 tokens a block, weights read once, past no shared memory.
 *
 * Launch: 256 threads (any multiple of 32), grid (blocks, ceil(rows / tokens)); a block has T = ceil(tiles / blocks)
 * tiles, whose T · chunks tasks its warps take in turn; dynamic shared memory T · chunks · tokens · 80 bytes
 * (crucible/kernels/cuda/geometry.py). A warp loads its first weights before it waits for the kernel before this one.
 */
#include "linear.cuh"

static const int PAIRS = 10; /* a token's 8 pairs of a tile, padded so that the lanes of a store meet different banks */

template <class Weights> struct Chunk {
    Weights block[CHUNK_BLOCKS];

    __device__ __forceinline__ void load(const Linear& p, int tile, int chunk, int blocks, int lane) {
#pragma unroll
        for (int b = 0; b < CHUNK_BLOCKS; b++) {
            const int at = chunk * CHUNK_BLOCKS + b;
            if (at < blocks) {
                block[b].load(0, p, (size_t)tile * blocks + at, lane);
                block[b].load(1, p, (size_t)tile * blocks + at, lane);
            }
        }
    }
};

/* N: groups of 8 tokens. */
template <class Weights, int N, class Epilogue> DEVICE void linear_small(const Linear p, const Epilogue epilogue) {
    CRUCIBLE_SHARED(shared);
    float2* const parts = (float2*)shared; /* [tile of the block][chunk][token][pair] */
    const int lane = lane_id(), g = lane >> 2, q = lane & 3;
    const int blocks = (p.inputs + BLOCK - 1) / BLOCK, chunks = (blocks + CHUNK_BLOCKS - 1) / CHUNK_BLOCKS;
    const int block_tiles = (p.tiles + gridDim.x - 1) / gridDim.x, first_tile = blockIdx.x * block_tiles;
    const int own_tiles = min(block_tiles, p.tiles - first_tile), tasks = own_tiles * chunks;
    const int first_row = blockIdx.y * (N * 8);

    int task = warp_id();
    Chunk<Weights> weights;
    if (task < tasks) weights.load(p, first_tile + task / chunks, task % chunks, blocks, lane);
    dependency_wait();
    while (task < tasks) {
        const int chunk = task % chunks;
        float sums[N][4] = {};
#pragma unroll
        for (int b = 0; b < CHUNK_BLOCKS; b++) {
            const int block = chunk * CHUNK_BLOCKS + b;
            if (block < blocks) {
#pragma unroll
                for (int part = 0; part < 2; part++) {
                    f16x2 a[2][4];
                    weights.block[b].fragments(part, a);
#pragma unroll
                    for (int n = 0; n < N; n++) {
                        const int row = first_row + n * 8 + g;
                        uint4 x = make_uint4(0, 0, 0, 0);
                        const f16* from = (const f16*)p.x + (size_t)row * p.x_stride + block * BLOCK + q * 16;
                        if (row < p.rows) x = load_16(from + part * 8);
                        add_part(sums[n], a, x);
                    }
                }
            }
        }
        float2* part = parts + task * (N * 8 * PAIRS) + 2 * q * PAIRS + g;
#pragma unroll
        for (int n = 0; n < N; n++) {
            part[n * 8 * PAIRS] = make_float2(sums[n][0], sums[n][2]);
            part[n * 8 * PAIRS + PAIRS] = make_float2(sums[n][1], sums[n][3]);
        }
        task += blockDim.x / WARP;
        if (task < tasks) weights.load(p, first_tile + task / chunks, task % chunks, blocks, lane);
    }
    dependency_release();
    __syncthreads();
    for (int i = threadIdx.x; i < own_tiles * N * 64; i += blockDim.x) {
        const int pair = i & 7, token = (i >> 3) % (N * 8), own = i / (N * 64), row = first_row + token;
        if (row >= p.rows) continue;
        const float2* part = parts + (own * chunks * N * 8 + token) * PAIRS + pair;
        float2 total = part[0];
        for (int c = 1; c < chunks; c++) {
            const float2 next = part[c * (N * 8 * PAIRS)];
            total.x = add_rn(total.x, next.x);
            total.y = add_rn(total.y, next.y);
        }
        finish(p, epilogue, first_tile + own, pair, row, total.x, total.y);
    }
}

#define INT8_1(p, e) linear_small<Int8, 1>(p, e)
#define INT8_2(p, e) linear_small<Int8, 2>(p, e)
#define INT8_4(p, e) linear_small<Int8, 4>(p, e)
#define F16_1(p, e) linear_small<Half, 1>(p, e)
#define F16_2(p, e) linear_small<Half, 2>(p, e)
#define F16_4(p, e) linear_small<Half, 4>(p, e)

LINEAR_KERNELS((256, 2), crucible_linear_small8_int8, f16, INT8_1)
LINEAR_KERNELS((256, 2), crucible_linear_small16_int8, f16, INT8_2)
LINEAR_KERNELS((256, 1), crucible_linear_small32_int8, f16, INT8_4)
LINEAR_KERNELS((256, 2), crucible_linear_small8_f16, f16, F16_1)
LINEAR_KERNELS((256, 2), crucible_linear_small16_f16, f16, F16_2)
LINEAR_KERNELS((256, 1), crucible_linear_small32_f16, f16, F16_4)
