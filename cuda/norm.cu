/* RMSNorm (arXiv:1910.07467) and LayerNorm (arXiv:1607.06450) of float rows; results are halves or floats.
 *
 * Launch: 256 threads, grid (rows). Row r of the result is the norm of row r of x, or of row source_rows[r] where that
 * is not null. Halves are followed by zeros up to out_stride; a float result may be x itself (without source_rows).
 * Sums: thread t adds t, t + 256, …; a butterfly over the warp; the warps in order. So a row's bits depend on it alone.
 */
#include "common.cuh"

static const int THREADS = 256;

DEVICE float block_sum(float v, float* parts) {
    v = warp_sum(v);
    if (lane_id() == 0) parts[warp_id()] = v;
    __syncthreads();
    float sum = parts[0];
#pragma unroll
    for (int i = 1; i < THREADS / WARP; i++) sum = add_rn(sum, parts[i]);
    return sum;
}

DEVICE void put(f16* p, float v) { *p = to_f16(v); }
DEVICE void put(float* p, float v) { *p = v; }
DEVICE void pad(f16* row, int width, int stride) {
    for (int i = width + threadIdx.x; i < stride; i += THREADS) put(row + i, 0.0f);
}
DEVICE void pad(float*, int, int) {}

template <bool CENTRED, class T>
DEVICE void norm(const float* x, int x_stride, const int* source_rows, const float* weight, const float* bias, float eps,
                 int width, T* out, int out_stride) {
    __shared__ float parts[2][THREADS / WARP];
    dependency_wait();
    const int row = blockIdx.x;
    const float* from = x + (size_t)(source_rows ? source_rows[row] : row) * x_stride;
    T* to = out + (size_t)row * out_stride;
    float mean = 0.0f, sum = 0.0f;
    if (CENTRED) {
        for (int i = threadIdx.x; i < width; i += THREADS) sum = add_rn(sum, from[i]);
        mean = __fdiv_rn(block_sum(sum, parts[0]), (float)width);
        sum = 0.0f;
    }
    for (int i = threadIdx.x; i < width; i += THREADS) {
        const float v = CENTRED ? sub_rn(from[i], mean) : from[i];
        sum = fmaf(v, v, sum);
    }
    const float square = __fdiv_rn(block_sum(sum, parts[1]), (float)width);
    const float factor = __fdiv_rn(1.0f, __fsqrt_rn(add_rn(square, eps)));
    for (int i = threadIdx.x; i < width; i += THREADS) {
        float v = CENTRED ? sub_rn(from[i], mean) : from[i];
        v = mul_rn(mul_rn(v, factor), weight[i]);
        put(to + i, bias ? add_rn(v, bias[i]) : v);
    }
    pad(to, width, out_stride);
    dependency_release();
}

#define NORM_KERNEL(name, CENTRED, T)                                                                                 \
    KERNEL(256, 1) name(const float* x, int x_stride, const int* source_rows, const float* weight, const float* bias, \
                        float eps, int width, T* out, int out_stride) {                                               \
        norm<CENTRED, T>(x, x_stride, source_rows, weight, bias, eps, width, out, out_stride);                        \
    }
NORM_KERNEL(crucible_rmsnorm_f16, false, f16)
NORM_KERNEL(crucible_rmsnorm_f32, false, float)
NORM_KERNEL(crucible_layernorm_f16, true, f16)
NORM_KERNEL(crucible_layernorm_f32, true, float)
