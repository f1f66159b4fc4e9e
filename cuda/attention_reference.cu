/* Attention in float32 with plain loops, a block for a row and query head: what the fast kernels are compared with.
 *
 * Grid (rows, heads), 128 threads, any head_dim up to 256. Activations and cache are f16 or f32. The maximum over all
 * positions first; then 128 positions at a time, their weights in shared memory and a thread a dimension. Bits depend on
 * the row alone, here too, but are not those of the tensor-core kernels.
 */
#include "attention.cuh"

static const int THREADS = 128;

DEVICE float value_of(f16 v) { return to_f32(v); }
DEVICE float value_of(float v) { return v; }
DEVICE void set(f16* to, float v) { *to = to_f16(v); }
DEVICE void set(float* to, float v) { *to = v; }

template <class A, class C> struct Reference {
    const A* q; int q_stride;
    const C *k_cache, *v_cache;
    const int *positions, *row_sequence, *page_tables; int max_pages;
    int heads, kv_heads, layers, layer;
    const float* slopes;
    A* out; int out_stride;
    int head_dim;
};

template <class A, class C>
static __device__ float score(const A* q, const C* k, int head_dim, float slope, int behind) {
    float dot = 0.0f;
    for (int i = 0; i < head_dim; i++) dot = fmaf(value_of(q[i]), value_of(k[i]), dot);
    return fmaf(slope, (float)behind, __fdiv_rn(dot, __fsqrt_rn((float)head_dim)));
}

template <class A, class C> static __device__ void reference(const Reference<A, C>& a) {
    __shared__ float weights[THREADS];
    __shared__ float tops[THREADS / WARP];
    dependency_wait();
    dependency_release();
    const int row = blockIdx.x, head = blockIdx.y, kv_head = head / (a.heads / a.kv_heads), hd = a.head_dim;
    const int last = a.positions[row], t = threadIdx.x;
    const float slope = a.slopes ? a.slopes[head] : 0.0f;
    const A* q = a.q + (u64)row * a.q_stride + head * hd;
    const int* table = a.page_tables + (u64)a.row_sequence[row] * a.max_pages;
    const Pages<C> k(a.k_cache, a.kv_heads, a.layers, a.layer, kv_head, hd);
    const Pages<C> v(a.v_cache, a.kv_heads, a.layers, a.layer, kv_head, hd);

    float top = minus_infinity();
    for (int p = t; p <= last; p += THREADS)
        top = fmaxf(top, score(q, k[table[p / PAGE]] + p % PAGE * hd, hd, slope, p - last));
    top = warp_max(top);
    if (lane_id() == 0) tops[warp_id()] = top;
    __syncthreads();
    for (int w = 0; w < THREADS / WARP; w++) top = fmaxf(top, tops[w]);

    float total = 0.0f, sum[2] = {0.0f, 0.0f};
    for (int first = 0; first <= last; first += THREADS) {
        const int p = first + t, count = min(THREADS, last + 1 - first);
        __syncthreads();
        if (t < count)
            weights[t] = expf(sub_rn(score(q, k[table[p / PAGE]] + p % PAGE * hd, hd, slope, p - last), top));
        __syncthreads();
        for (int i = 0; i < count; i++) {
            total = add_rn(total, weights[i]);
            const C* page = v[table[(first + i) / PAGE]] + (first + i) % PAGE;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int dim = t + j * THREADS;
                if (dim < hd) sum[j] = fmaf(weights[i], value_of(page[dim * PAGE]), sum[j]);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < 2; j++)
        if (t + j * THREADS < hd) set(a.out + (u64)row * a.out_stride + head * hd + t + j * THREADS, __fdiv_rn(sum[j], total));
}

#define REFERENCE(names, A, C)                                                                                      \
    KERNEL(128, 1) crucible_attention_reference_##names(                                                            \
        const A* q, int q_stride, const C* k_cache, const C* v_cache, const int* positions, const int* row_sequence, \
        const int* page_tables, int max_pages, int heads, int kv_heads, int layers, int layer, const float* slopes, \
        A* out, int out_stride, int head_dim) {                                                                     \
        const Reference<A, C> a = {q, q_stride, k_cache, v_cache, positions, row_sequence, page_tables, max_pages,  \
                                   heads, kv_heads, layers, layer, slopes, out, out_stride, head_dim};              \
        reference(a);                                                                                               \
    }

REFERENCE(f16_f16, f16, f16)
REFERENCE(f16_f32, f16, float)
REFERENCE(f32_f16, float, f16)
REFERENCE(f32_f32, float, float)
