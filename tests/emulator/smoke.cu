/* What the emulator promises, one small kernel each. */
#include "common.cuh"

/* Sum of n floats: warps, a static shared array, a barrier. ``broken``: the barrier is left out. */
DEVICE void sum(const float* x, float* out, int n, bool broken) {
    __shared__ float part[4];
    float v = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) v = add_rn(v, x[i]);
    v = warp_sum(v);
    if (lane_id() == 0) part[warp_id()] = v;
    if (!broken) __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = part[0] + part[1] + part[2] + part[3];
}
KERNEL(128, 1) smoke_sum(const float* x, float* out, int n) { sum(x, out, n, false); }
KERNEL(128, 1) smoke_no_barrier(const float* x, float* out, int n) { sum(x, out, n, true); }

/* d[16][8] = a[16][16] · b[8][16]ᵀ. */
KERNEL(32, 1) smoke_mma(const f16* a, const f16* b, float* d) {
    int g = lane_id() >> 2, q = lane_id() & 3;
    const u32* rows = (const u32*)a;
    const u32* columns = (const u32*)b;
    f16x2 fragment[4] = {rows[g * 8 + q], rows[(g + 8) * 8 + q], rows[g * 8 + q + 4], rows[(g + 8) * 8 + q + 4]};
    float sums[4] = {};
    mma_16816(sums, fragment, columns[g * 8 + q], columns[g * 8 + q + 4]);
    for (int i = 0; i < 4; i++) d[(g + (i >> 1) * 8) * 8 + q * 2 + (i & 1)] = sums[i];
}

/* Copies 16 bytes a thread through dynamic shared memory; ``wait`` 0 leaves the wait out. */
KERNEL(64, 1) smoke_copy(const float* x, float* out, int n, int wait) {
    CRUCIBLE_SHARED(shared);
    int first = threadIdx.x * 4;
    copy_async_16(shared + threadIdx.x * 16, first < n ? x + first : x, first < n);
    copy_async_commit();
    if (wait) copy_async_wait<0>();
    __syncthreads();
    int other = blockDim.x - 1 - threadIdx.x;
    store_16(out + other * 4, load_16(shared + other * 16));
}

KERNEL(64, 1) smoke_bytes(const u32* bytes, f16x2* out, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) biased_to_f16(bytes[i], out[2 * i], out[2 * i + 1]);
}

/* Half a warp at a barrier of the block, the other half at a shuffle. */
KERNEL(32, 1) smoke_stuck(int* out) {
    if (lane_id() < 16) __syncthreads();
    else out[0] = __shfl_sync(ALL_LANES, 1, 0);
}

KERNEL(32, 1) smoke_write(int* out, int at, float unused, u64 large) {
    if (threadIdx.x == 0) out[at] = (int)(large >> 32);
}

KERNEL(64, 1) smoke_votes(u32* out, int* counter) {
    if (__any_sync(ALL_LANES, threadIdx.x == 5)) atomicAdd(counter, 1);
    out[threadIdx.x] = __ballot_sync(ALL_LANES, threadIdx.x & 1) + __shfl_down_sync(ALL_LANES, threadIdx.x, 1);
    if (threadIdx.x >= 32) return;
    out[threadIdx.x] += __shfl_xor_sync(0xffffu << (threadIdx.x & 16), threadIdx.x, 3);
}
