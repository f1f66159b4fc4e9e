/* Embedding: rows of the packed matrix (crucible/kernels/cuda/pack.py, natural order) become floats, exactly.
 *
 * Launch: 128 threads, grid (rows). out [rows, out_stride] floats; learned [context, width] floats are added at each
 * row's position, unless null. The head's projection may read the same matrix.
 */
#include "common.cuh"

struct EmbedInt8 {
    static __device__ __forceinline__ float value(const void* weights, const void* scales, int width, int n, int k) {
        const int tile = n >> 4, g = n & 7, high = n >> 3 & 1;
        const size_t at = (size_t)tile * ((width + 63) / 64) + (k >> 6);
        const int q = k >> 4 & 3, j = k >> 2 & 3, pair = k >> 1 & 1;
        const u8 byte = ((const u8*)weights)[at * 1024 + (j >> 1) * 512 + (g * 4 + q) * 16 + (j & 1) * 8 + pair * 4 +
                                             high * 2 + (k & 1)];
        return mul_rn((float)((int)byte - 128), to_f32(((const f16*)scales)[at * 32 + (q >> 1) * 16 + g * 2 + high]));
    }
};

struct EmbedHalf {
    static __device__ __forceinline__ float value(const void* weights, const void*, int width, int n, int k) {
        const int tile = n >> 4, g = n & 7, high = n >> 3 & 1;
        const size_t at = (size_t)tile * ((width + 63) / 64) + (k >> 6);
        const int q = k >> 4 & 3, j = k >> 2 & 3, pair = k >> 1 & 1;
        return to_f32(((const f16*)weights)[at * 1024 + j * 256 + (g * 4 + q) * 8 + pair * 4 + high * 2 + (k & 1)]);
    }
};

struct EmbedFloat {
    static __device__ __forceinline__ float value(const void* weights, const void*, int width, int n, int k) {
        return ((const float*)weights)[(((size_t)(n >> 4) * width + k) * 8 + (n & 7)) * 2 + (n >> 3 & 1)];
    }
};

template <class Weights>
DEVICE void embed(const void* weights, const void* scales, float factor, int width, const int* token_ids,
                  const float* learned, const int* positions, float* out, int out_stride) {
    dependency_wait();
    const int row = blockIdx.x, token = max(token_ids[row], 0);  // −1: argmax found none, and the row will be dropped
    const float* place = learned ? learned + (size_t)positions[row] * width : nullptr;
    for (int k = threadIdx.x; k < width; k += blockDim.x) {
        float v = mul_rn(Weights::value(weights, scales, width, token, k), factor);
        if (place) v = add_rn(v, place[k]);
        out[(size_t)row * out_stride + k] = v;
    }
    dependency_release();
}

#define EMBED_KERNEL(name, Weights)                                                                                   \
    KERNEL(128, 1) name(const void* weights, const void* scales, float factor, int width, const int* token_ids,       \
                        const float* learned, const int* positions, float* out, int out_stride) {                     \
        embed<Weights>(weights, scales, factor, width, token_ids, learned, positions, out, out_stride);               \
    }
EMBED_KERNEL(crucible_embed_int8, EmbedInt8)
EMBED_KERNEL(crucible_embed_f16, EmbedHalf)
EMBED_KERNEL(crucible_embed_f32, EmbedFloat)
