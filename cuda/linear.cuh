/* Projections y = x · Wᵀ: how weights lie, the sum of a block of inputs, and what becomes of the results.
 *
 * Weights (crucible/kernels/cuda/pack.py) are the A operand of the tensor-core step: tiles of 16 outputs; tokens are
 * its 8 columns. The inputs are walked in chunks of 256, a chunk in blocks of 64, a block in four steps of 16. A chunk
 * is summed from zero; the total is chunk 0, plus chunk 1, plus chunk 2, …. Which warp sums a chunk may differ, this
 * order may not: so a row has the same bits in every kernel but the scalar ones, however many rows there are.
 *
 * Within a block lane q = lane & 3 owns the inputs 16q … 16q + 15, of weights and activations alike; step j takes 4j …
 * 4j + 3 of them. So a lane reads 32 consecutive bytes of a token.
 *
 * Activations: halves [rows, x_stride], x_stride a multiple of 64 and at least K, zeros from K on.
 */
#ifndef CRUCIBLE_LINEAR_CUH
#define CRUCIBLE_LINEAR_CUH

#include "common.cuh"

static const int TILE = 16;
static const int BLOCK = 64;        /* inputs of a block */
static const int CHUNK_BLOCKS = 4;  /* blocks of a chunk */
static const int PAGE = 16;         /* tokens of a KV page */

/* What all linear kernels take; in this order their arguments begin. ``scales`` of int8, ``bias`` float [16 · tiles]
 * in packed order or null; ``factor`` 2^-e (pack.py). */
struct Linear {
    const void* weights;
    const void* scales;
    const float* bias;
    float factor;
    int tiles, inputs;
    const void* x;
    int x_stride, rows;
};
#define LINEAR_PARAMETERS                                                                                    \
    const void *weights, const void *scales, const float *bias, float factor, int tiles, int inputs,         \
        const void *x, int x_stride, int rows
#define LINEAR_ARGUMENTS Linear{weights, scales, bias, factor, tiles, inputs, x, x_stride, rows}

/* ---- weights: a lane's part of 16 outputs × 64 inputs, in two parts of two steps each ----
 * Kernels turn one part into fragments and use it for all tokens before the next, which halves the registers. */

struct Int8 {
    uint4 bytes[2];
    f16x2 scale; /* of rows g and g + 8, for the lane's group of 32 inputs; comes with the second part */

    /* ``at``: tile · blocks + block. */
    __device__ __forceinline__ void load(int part, const Linear& p, size_t at, int lane) {
        bytes[part] = __ldg((const uint4*)p.weights + at * 64 + part * 32 + lane);
        if (part) scale = __ldg((const f16x2*)p.scales + at * 16 + ((lane & 2) << 2) + (lane >> 2));
    }

    /* The A operands of two steps: half(q) · half(scale), rounded to nearest. */
    __device__ __forceinline__ void fragments(int part, f16x2 (&a)[2][4]) const {
        const f16x2 low = __byte_perm(scale, 0, 0x1010), high = __byte_perm(scale, 0, 0x3232);
        biased_to_f16(bytes[part].x, a[0][0], a[0][1]);
        biased_to_f16(bytes[part].y, a[0][2], a[0][3]);
        biased_to_f16(bytes[part].z, a[1][0], a[1][1]);
        biased_to_f16(bytes[part].w, a[1][2], a[1][3]);
#pragma unroll
        for (int i = 0; i < 8; i++) a[i >> 2][i & 3] = mul_f16x2(a[i >> 2][i & 3], i & 1 ? high : low);
    }
};

struct Half {
    uint4 halves[4];

    __device__ __forceinline__ void load(int part, const Linear& p, size_t at, int lane) {
        const uint4* w = (const uint4*)p.weights + at * 128 + part * 64 + lane;
        halves[2 * part] = __ldg(w);
        halves[2 * part + 1] = __ldg(w + 32);
    }

    __device__ __forceinline__ void fragments(int part, f16x2 (&a)[2][4]) const {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint4 v = halves[2 * part + j];
            a[j][0] = v.x;
            a[j][1] = v.y;
            a[j][2] = v.z;
            a[j][3] = v.w;
        }
    }
};

/* sums += one part of a block of weights times 8 inputs of the token that the lane reads. */
DEVICE void add_part(float* sums, const f16x2 (&a)[2][4], uint4 x) {
    mma_16816(sums, a[0], x.x, x.y);
    mma_16816(sums, a[1], x.z, x.w);
}

/* ---- what becomes of a pair of outputs: rows g and g + 8 of a tile, for one token ---- */

DEVICE void put(f16* p, float v) { *p = to_f16(v); }
DEVICE void put(float* p, float v) { *p = v; }

/* Floats [rows, outputs]. */
struct Store {
    float* out;
    int stride, outputs;

    __device__ __forceinline__ void operator()(int tile, int g, int row, float low, float high) const {
        float* to = out + (size_t)row * stride;
        const int n = tile * TILE + g;
        if (n < outputs) to[n] = low;
        if (n + 8 < outputs) to[n + 8] = high;
    }
};
#define STORE_PARAMETERS(T) float *out, int stride, int outputs
#define STORE_ARGUMENTS {out, stride, outputs}

/* The residual stream: floats [rows, outputs] +=. */
struct Add {
    float* out;
    int stride, outputs;

    __device__ __forceinline__ void operator()(int tile, int g, int row, float low, float high) const {
        float* to = out + (size_t)row * stride;
        const int n = tile * TILE + g;
        if (n < outputs) to[n] = add_rn(to[n], low);
        if (n + 8 < outputs) to[n + 8] = add_rn(to[n + 8], high);
    }
};
#define ADD_PARAMETERS(T) float *out, int stride, int outputs
#define ADD_ARGUMENTS {out, stride, outputs}

/* silu(gate) · up (arXiv:2002.05202); rows g and g + 8 are the gate and the up projection of output 8 · tile + g. */
template <class T> struct Swiglu {
    T* out;
    int stride, outputs;

    __device__ __forceinline__ void operator()(int tile, int g, int row, float gate, float up) const {
        const int n = tile * 8 + g;
        const float silu = __fdiv_rn(gate, add_rn(1.0f, expf(-gate)));
        if (n < outputs) put(out + (size_t)row * stride + n, mul_rn(silu, up));
    }
};
#define SWIGLU_PARAMETERS(T) T *out, int stride, int outputs
#define SWIGLU_ARGUMENTS {out, stride, outputs}

/* x · Φ(x), or its tanh approximation (arXiv:1606.08415). */
DEVICE float gelu(float x, int tanh_form) {
    const float half = mul_rn(0.5f, x);
    if (tanh_form) {
        const float inner = mul_rn(0.7978845608028654f, fmaf(mul_rn(0.044715f, mul_rn(x, x)), x, x));
        return mul_rn(half, add_rn(1.0f, tanhf(inner)));
    }
    return mul_rn(half, add_rn(1.0f, erff(mul_rn(x, 0.7071067811865476f))));
}

template <class T> struct Gelu {
    T* out;
    int stride, outputs, tanh_form;

    __device__ __forceinline__ void operator()(int tile, int g, int row, float low, float high) const {
        T* to = out + (size_t)row * stride;
        const int n = tile * TILE + g;
        if (n < outputs) put(to + n, gelu(low, tanh_form));
        if (n + 8 < outputs) put(to + n + 8, gelu(high, tanh_form));
    }
};
#define GELU_PARAMETERS(T) T *out, int stride, int outputs, int tanh_form
#define GELU_ARGUMENTS {out, stride, outputs, tanh_form}

/* Heads of q, k and v; pair i of a head is turned by the angle of (position, i). Q becomes T [rows, q_stride];
 * K and V, as Cache, go to the row's page: K [page][layer][kv_head][16 positions][head_dim], V [page][layer][kv_head][head_dim]
 * [16 positions]. cosines, sines: [context, head_dim / 2], null for no rotation. */
template <class T, class Cache> struct Qkv {
    T* q;
    int q_stride;
    Cache *k_cache, *v_cache;
    const int *positions, *row_sequence, *page_tables;
    int max_pages;
    const float *cosines, *sines;
    int heads, kv_heads, head_dim, interleaved, layer, layers;

    __device__ __forceinline__ void operator()(int tile, int g, int row, float low, float high) const {
        const int head_tiles = head_dim / TILE, head = tile / head_tiles;
        const int pair = tile % head_tiles * 8 + g;
        const int first = interleaved ? 2 * pair : pair;
        const int second = interleaved ? first + 1 : pair + head_dim / 2;
        const int position = positions[row];
        if (cosines && head < heads + kv_heads) {
            const size_t angle = (size_t)position * (head_dim / 2) + pair;
            const float c = cosines[angle], s = sines[angle], x = low, y = high;
            low = sub_rn(mul_rn(x, c), mul_rn(y, s));
            high = add_rn(mul_rn(y, c), mul_rn(x, s));
        }
        if (head < heads) {
            T* to = q + (size_t)row * q_stride + head * head_dim;
            put(to + first, low);
            put(to + second, high);
            return;
        }
        const int slot = position % PAGE;
        const bool value = head >= heads + kv_heads;
        const int kv_head = head - heads - (value ? kv_heads : 0);
        const size_t page = page_tables[(size_t)row_sequence[row] * max_pages + position / PAGE];
        const size_t at = ((page * layers + layer) * kv_heads + kv_head) * PAGE * head_dim;
        if (value) {
            put(v_cache + at + first * PAGE + slot, low);
            put(v_cache + at + second * PAGE + slot, high);
        } else {
            put(k_cache + at + slot * head_dim + first, low);
            put(k_cache + at + slot * head_dim + second, high);
        }
    }
};
template <class T> using Qkv16 = Qkv<T, f16>;
template <class T> using Qkv32 = Qkv<T, float>;
#define QKV_PARAMETERS(T, Cache)                                                                                    \
    T *q, int q_stride, Cache *k_cache, Cache *v_cache, const int *positions, const int *row_sequence,              \
        const int *page_tables, int max_pages, const float *cosines, const float *sines, int heads, int kv_heads,   \
        int head_dim, int interleaved, int layer, int layers
#define QKV16_PARAMETERS(T) QKV_PARAMETERS(T, f16)
#define QKV32_PARAMETERS(T) QKV_PARAMETERS(T, float)
#define QKV16_ARGUMENTS QKV_ARGUMENTS
#define QKV32_ARGUMENTS QKV_ARGUMENTS
#define QKV_ARGUMENTS                                                                                              \
    {q, q_stride, k_cache, v_cache, positions, row_sequence, page_tables, max_pages, cosines, sines, heads, kv_heads, \
     head_dim, interleaved, layer, layers}

/* The total of a pair becomes the result: times 2^-e, plus bias. */
template <class Epilogue>
DEVICE void finish(const Linear& p, const Epilogue& epilogue, int tile, int g, int row, float low, float high) {
    low = mul_rn(low, p.factor);
    high = mul_rn(high, p.factor);
    if (p.bias) {
        low = add_rn(low, p.bias[tile * TILE + g]);
        high = add_rn(high, p.bias[tile * TILE + g + 8]);
    }
    epilogue(tile, g, row, low, high);
}

/* One kernel for each epilogue: prefix_store, _add, _swiglu, _gelu, _qkv, and _qkv32 for a float cache. What they make
 * for the next kernel is T. BODY(p, epilogue) computes; ``bounds`` are those of __launch_bounds__. */
#define LINEAR_KERNELS(bounds, prefix, T, BODY)                                                                      \
    LINEAR_KERNEL(bounds, prefix##_store, T, Store, STORE, BODY)                                                     \
    LINEAR_KERNEL(bounds, prefix##_add, T, Add, ADD, BODY)                                                           \
    LINEAR_KERNEL(bounds, prefix##_swiglu, T, Swiglu<T>, SWIGLU, BODY)                                               \
    LINEAR_KERNEL(bounds, prefix##_gelu, T, Gelu<T>, GELU, BODY)                                                     \
    LINEAR_KERNEL(bounds, prefix##_qkv, T, Qkv16<T>, QKV16, BODY)                                                    \
    LINEAR_KERNEL(bounds, prefix##_qkv32, T, Qkv32<T>, QKV32, BODY)
#define LINEAR_KERNEL(bounds, name, T, EPILOGUE, LIST, BODY)                                                         \
    extern "C" __global__ void __launch_bounds__ bounds name(LINEAR_PARAMETERS, LIST##_PARAMETERS(T)) {              \
        BODY(LINEAR_ARGUMENTS, (EPILOGUE LIST##_ARGUMENTS));                                                         \
    }

#endif
