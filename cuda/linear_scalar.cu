/* Projections one multiply-add at a time, inputs in order: what the tensor-core kernels are compared with.
 *
 * Launch: 256 threads, grid (tiles, ceil(rows / 32)), no dynamic shared memory. A thread computes a pair of outputs of
 * one token. int8 weights are q · scale, exact in float32. f32 weights take float activations [rows, x_stride] and make
 * float ones; their x_stride need only be K.
 */
#include "linear.cuh"

/* sum(): the rows g and g + 8 of a tile times a token. */
struct ScalarInt8 {
    typedef f16 Activation;
    static __device__ __forceinline__ float2 sum(const Linear& p, const f16* x, int tile, int g) {
        const int blocks = (p.inputs + BLOCK - 1) / BLOCK;
        float2 sums = make_float2(0.0f, 0.0f);
        for (int block = 0; block < blocks; block++) {
            const size_t at = (size_t)tile * blocks + block;
            const f16x2* scales = (const f16x2*)p.scales + at * 16 + g;
            for (int piece = 0; piece < 16; piece++) { /* 4 inputs: q = piece / 4, j = piece % 4 */
                const int q = piece >> 2, j = piece & 3;
                const u32* w = (const u32*)p.weights + at * 256 + (j >> 1) * 128 + (g * 4 + q) * 4 + (j & 1) * 2;
                const f16x2 scale = scales[(q >> 1) * 8];
                for (int i = 0; i < 4; i++) {
                    const u32 bytes = w[i >> 1] >> ((i & 1) * 8);
                    const float v = to_f32(x[block * BLOCK + piece * 4 + i]);
                    sums.x = fmaf(v, mul_rn((float)((int)(bytes & 255) - 128), low_f32(scale)), sums.x);
                    sums.y = fmaf(v, mul_rn((float)((int)(bytes >> 16 & 255) - 128), high_f32(scale)), sums.y);
                }
            }
        }
        return sums;
    }
};

struct ScalarHalf {
    typedef f16 Activation;
    static __device__ __forceinline__ float2 sum(const Linear& p, const f16* x, int tile, int g) {
        const int blocks = (p.inputs + BLOCK - 1) / BLOCK;
        float2 sums = make_float2(0.0f, 0.0f);
        for (int block = 0; block < blocks; block++)
            for (int piece = 0; piece < 16; piece++) {
                const int q = piece >> 2, j = piece & 3;
                const f16* w = (const f16*)p.weights + ((size_t)tile * blocks + block) * 1024 + j * 256 + (g * 4 + q) * 8;
                for (int i = 0; i < 4; i++) {
                    const int at = (i >> 1) * 4 + (i & 1);
                    const float v = to_f32(x[block * BLOCK + piece * 4 + i]);
                    sums.x = fmaf(v, to_f32(w[at]), sums.x);
                    sums.y = fmaf(v, to_f32(w[at + 2]), sums.y);
                }
            }
        return sums;
    }
};

struct ScalarFloat {
    typedef float Activation;
    static __device__ __forceinline__ float2 sum(const Linear& p, const float* x, int tile, int g) {
        const float2* w = (const float2*)p.weights + (size_t)tile * p.inputs * 8 + g;
        float2 sums = make_float2(0.0f, 0.0f);
        for (int k = 0; k < p.inputs; k++) {
            const float2 pair = w[(size_t)k * 8];
            const float v = x[k];
            sums.x = fmaf(v, pair.x, sums.x);
            sums.y = fmaf(v, pair.y, sums.y);
        }
        return sums;
    }
};

template <class Weights, class Epilogue> DEVICE void linear_scalar(const Linear p, const Epilogue epilogue) {
    const int g = threadIdx.x & 7, row = blockIdx.y * 32 + (threadIdx.x >> 3), tile = blockIdx.x;
    if (row >= p.rows) return;
    dependency_wait();
    const typename Weights::Activation* x = (const typename Weights::Activation*)p.x + (size_t)row * p.x_stride;
    const float2 total = Weights::sum(p, x, tile, g);
    finish(p, epilogue, tile, g, row, total.x, total.y);
}

#define SCALAR_INT8(p, e) linear_scalar<ScalarInt8>(p, e)
#define SCALAR_F16(p, e) linear_scalar<ScalarHalf>(p, e)
#define SCALAR_F32(p, e) linear_scalar<ScalarFloat>(p, e)

LINEAR_KERNELS((256), crucible_linear_scalar_int8, f16, SCALAR_INT8)
LINEAR_KERNELS((256), crucible_linear_scalar_f16, f16, SCALAR_F16)
LINEAR_KERNELS((256), crucible_linear_scalar_f32, float, SCALAR_F32)
