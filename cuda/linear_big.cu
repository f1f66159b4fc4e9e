/* Projections of many rows (prefill): a block computes 128 outputs of 64 or 128 tokens.
 *
 * Launch: 256 threads, grid (ceil(tiles / 8), ceil(rows / tokens)), dynamic shared memory 4 · tokens · 144 bytes.
 * Activations go through four stages of shared memory by asynchronous copies; a token's 64 halves are followed by 8
 * unused ones, so that the 8 lanes of a 128-bit read meet different banks. Weights go from global memory to registers,
 * a block ahead, and are turned into halves once for all tokens of the warp.
 */
#include "linear.cuh"

static const int STAGES = 4;
static const int STRIDE = BLOCK + 8;    /* halves between the tokens of a stage */
static const int PAIR_STRIDE = 64 + 2;  /* float2 between the tokens of the results: 64 pairs are 128 outputs */
static const int THREADS = 256;

/* Copies block ``block`` of TOKENS rows into a stage; zeros beyond the last row. */
template <int TOKENS> DEVICE void stage_block(const Linear& p, f16* stage, int first_row, int block) {
#pragma unroll
    for (int i = 0; i < TOKENS * 8 / THREADS; i++) {
        const int piece = threadIdx.x + i * THREADS, token = piece >> 3, part = piece & 7;
        const bool valid = first_row + token < p.rows;
        const size_t row = valid ? first_row + token : 0;
        copy_async_16(stage + token * STRIDE + part * 8, (const f16*)p.x + row * p.x_stride + block * BLOCK + part * 8,
                      valid);
    }
}

/* A warp has M tiles and N groups of 8 tokens; W warps share the tokens of the block, 8 / W its tiles. */
template <class Weights, int M, int N, int W, class Epilogue>
DEVICE void linear_big(const Linear p, const Epilogue epilogue) {
    CRUCIBLE_SHARED(shared);
    const int TOKENS = W * N * 8;
    f16* const stages = (f16*)shared;
    const int lane = lane_id(), g = lane >> 2, q = lane & 3;
    const int blocks = (p.inputs + BLOCK - 1) / BLOCK;
    const int first_row = blockIdx.y * TOKENS;
    const int local = warp_id() / W * M, first_token = warp_id() % W * (N * 8);

    int tiles[M]; /* beyond the last tile a warp computes that one again, and its results are dropped */
    Weights ahead[M];
#pragma unroll
    for (int m = 0; m < M; m++) {
        tiles[m] = min((int)blockIdx.x * 8 + local + m, p.tiles - 1);
        ahead[m].load(0, p, (size_t)tiles[m] * blocks, lane);
        ahead[m].load(1, p, (size_t)tiles[m] * blocks, lane);
    }
    dependency_wait();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < blocks) stage_block<TOKENS>(p, stages + s * TOKENS * STRIDE, first_row, s);
        copy_async_commit();
    }

    float sums[M][N][4] = {}, totals[M][N][4];
#pragma unroll
    for (int i = 0; i < M * N * 4; i++) (&totals[0][0][0])[i] = -0.0f; /* plus chunk 0 is chunk 0, a -0 included */
#pragma unroll 1
    for (int block = 0; block < blocks; block++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads(); /* the stage is there for all, and all are done with the one that is filled next */
        const int next = block + STAGES - 1;
        if (next < blocks) stage_block<TOKENS>(p, stages + next % STAGES * TOKENS * STRIDE, first_row, next);
        copy_async_commit();
        const f16* x = stages + (block % STAGES * TOKENS + first_token + g) * STRIDE + q * 16;
#pragma unroll
        for (int part = 0; part < 2; part++) {
            f16x2 a[M][2][4];
#pragma unroll
            for (int m = 0; m < M; m++) {
                ahead[m].fragments(part, a[m]);
                if (block + 1 < blocks) ahead[m].load(part, p, (size_t)tiles[m] * blocks + block + 1, lane);
            }
#pragma unroll
            for (int n = 0; n < N; n++) {
                const uint4 v = load_16(x + n * 8 * STRIDE + part * 8);
#pragma unroll
                for (int m = 0; m < M; m++) add_part(sums[m][n], a[m], v);
            }
        }
        if (block % CHUNK_BLOCKS == CHUNK_BLOCKS - 1 || block == blocks - 1) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        totals[m][n][i] = add_rn(totals[m][n][i], sums[m][n][i]);
                        sums[m][n][i] = 0.0f;
                    }
        }
    }
    dependency_release();
    copy_async_wait<0>();
    __syncthreads(); /* the stages become [token][pair] */
    float2* const results = (float2*)shared;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++) {
            float2* to = results + (first_token + n * 8 + 2 * q) * PAIR_STRIDE + (local + m) * 8 + g;
            to[0] = make_float2(totals[m][n][0], totals[m][n][2]);
            to[PAIR_STRIDE] = make_float2(totals[m][n][1], totals[m][n][3]);
        }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < TOKENS * 64; i += THREADS) {
        const int pair = i & 63, token = i >> 6, tile = blockIdx.x * 8 + (pair >> 3), row = first_row + token;
        if (row >= p.rows || tile >= p.tiles) continue;
        const float2 total = results[token * PAIR_STRIDE + pair];
        finish(p, epilogue, tile, pair & 7, row, total.x, total.y);
    }
}

#define INT8_64(p, e) linear_big<Int8, 1, 8, 1>(p, e)
#define INT8_128(p, e) linear_big<Int8, 2, 8, 2>(p, e)
#define F16_64(p, e) linear_big<Half, 1, 8, 1>(p, e)
#define F16_128(p, e) linear_big<Half, 2, 8, 2>(p, e)

LINEAR_KERNELS((256, 1), crucible_linear_big64_int8, f16, INT8_64)
LINEAR_KERNELS((256, 1), crucible_linear_big128_int8, f16, INT8_128)
LINEAR_KERNELS((256, 1), crucible_linear_big64_f16, f16, F16_64)
LINEAR_KERNELS((256, 1), crucible_linear_big128_f16, f16, F16_128)
