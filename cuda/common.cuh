/* What every kernel is made of: halves, vector loads, the tensor-core step, asynchronous copies, warp sums.
 *
 * Compiled by NVRTC without any header of CUDA's, and by g++ against tests/emulator. Each inline asm has a twin there.
 * Halves are bits in a struct, so that none becomes an integer unnoticed. Where the bits of a sum matter, kernels write
 * mul_rn, add_rn and fmaf, which the compiler neither contracts nor splits.
 */
#ifndef CRUCIBLE_COMMON_CUH
#define CRUCIBLE_COMMON_CUH

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef CRUCIBLE_EMULATED
#include "emulator.h"
#define CRUCIBLE_SHARED(name) u8* const name = (u8*)emulator::state.shared
#else
#define CRUCIBLE_SHARED(name) extern __shared__ __align__(16) u8 name[] /* dynamic shared memory */
#endif

#define DEVICE static __device__ __forceinline__
#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)

/* An IEEE half; of an f16x2, the low half has the lower address. */
struct __align__(2) f16 { u16 bits; };
typedef u32 f16x2;

static const int WARP = 32;
static const u32 ALL_LANES = 0xffffffffu;

DEVICE int lane_id() { return threadIdx.x & 31; }
DEVICE int warp_id() { return threadIdx.x >> 5; }

/* ---- floats: one rounding each ---- */

DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }
DEVICE float add_rn(float a, float b) { return __fadd_rn(a, b); }
DEVICE float sub_rn(float a, float b) { return __fsub_rn(a, b); }

/* 2^x within 2 ulp, 0 for -inf; the same instruction on every architecture. */
DEVICE float exp2_fast(float x) {
#ifdef CRUCIBLE_EMULATED
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

/* e^x; the relative error grows with |x| · 2^-24. */
DEVICE float exp_fast(float x) { return exp2_fast(mul_rn(x, 1.4426950408889634f)); }

/* ---- halves ---- */

DEVICE f16 to_f16(float value) { /* to nearest, ties to even; infinite beyond 65504 */
    f16 h;
#ifdef CRUCIBLE_EMULATED
    h.bits = emulator::float_to_half(value);
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(value));
#endif
    return h;
}

DEVICE float to_f32(f16 h) {
#ifdef CRUCIBLE_EMULATED
    return emulator::half_to_float(h.bits);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(h.bits));
    return value;
#endif
}

DEVICE f16x2 pack_f16x2(float low, float high) {
#ifdef CRUCIBLE_EMULATED
    return (u32)emulator::float_to_half(high) << 16 | emulator::float_to_half(low);
#else
    f16x2 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#endif
}

DEVICE float low_f32(f16x2 both) { f16 h; h.bits = (u16)both; return to_f32(h); }
DEVICE float high_f32(f16x2 both) { f16 h; h.bits = (u16)(both >> 16); return to_f32(h); }

DEVICE f16x2 mul_f16x2(f16x2 a, f16x2 b) {
#ifdef CRUCIBLE_EMULATED
    return pack_f16x2(low_f32(a) * low_f32(b), high_f32(a) * high_f32(b)); /* exact in float32, so rounded once */
#else
    f16x2 c;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
#endif
}

DEVICE f16x2 sub_f16x2(f16x2 a, f16x2 b) {
#ifdef CRUCIBLE_EMULATED
    return pack_f16x2(low_f32(a) - low_f32(b), high_f32(a) - high_f32(b));
#else
    f16x2 c;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
#endif
}

/* Four bytes biased by 128 as halves: 0x64xx is 1024 + xx, minus 1152 leaves the signed value, exactly. */
DEVICE void biased_to_f16(u32 bytes, f16x2& low, f16x2& high) {
    low = sub_f16x2(__byte_perm(bytes, 0x64646464u, 0x4140), 0x64806480u);
    high = sub_f16x2(__byte_perm(bytes, 0x64646464u, 0x4342), 0x64806480u);
}

/* ---- vectors of 16 bytes; addresses are multiples of 16 ---- */

DEVICE uint4 load_16(const void* p) { return *(const uint4*)p; }
DEVICE uint4 load_16_constant(const void* p) { return __ldg((const uint4*)p); } /* not written while the kernel runs */
DEVICE void store_16(void* p, uint4 v) { *(uint4*)p = v; }

/* ---- the tensor-core step: d[16 × 8] += a[16 × 16] · b[16 × 8] ----
 * Of lane (g = lane >> 2, q = lane & 3): a0 row g, columns 2q, 2q + 1; a1 row g + 8; a2, a3 the same of columns + 8;
 * b0 rows 2q, 2q + 1 of column g; b1 rows + 8; d0, d1 row g, columns 2q, 2q + 1; d2, d3 row g + 8. */
DEVICE void mma_16816(float* d, const f16x2* a, f16x2 b0, f16x2 b1) {
#ifdef CRUCIBLE_EMULATED
    emulator::mma_16816(d, a, b0, b1);
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

/* ---- asynchronous copies of 16 bytes from global to shared memory, past the level 1 cache ---- */

/* Zeros when not ``valid``; then ``from`` must still be an address of the array, but is not read. */
DEVICE void copy_async_16(void* shared, const void* from, bool valid) {
#ifdef CRUCIBLE_EMULATED
    emulator::copy_async(shared, from, 16, valid ? 16 : 0);
#else
    u64 to;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(to) : "l"(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)to), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
#endif
}

DEVICE void copy_async_commit() {
#ifdef CRUCIBLE_EMULATED
    emulator::copy_async_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Waits until at most the NEWEST groups committed by this thread are under way. A barrier must follow for others. */
template <int NEWEST> DEVICE void copy_async_wait() {
#ifdef CRUCIBLE_EMULATED
    emulator::copy_async_wait(NEWEST);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(NEWEST) : "memory");
#endif
}

/* ---- warps: butterflies, so that every lane gets the same bits in one fixed order ---- */

DEVICE float warp_sum(float v) {
#pragma unroll
    for (int bit = 16; bit; bit >>= 1) v = add_rn(v, __shfl_xor_sync(ALL_LANES, v, bit));
    return v;
}

DEVICE float warp_max(float v) {
#pragma unroll
    for (int bit = 16; bit; bit >>= 1) v = fmaxf(v, __shfl_xor_sync(ALL_LANES, v, bit));
    return v;
}

/* ---- programmatic dependent launch: nothing unless compiled with -DCRUCIBLE_PDL for sm_90 or later ---- */

/* Before the first read of what an earlier kernel of the stream wrote, and the first write of what it reads. */
DEVICE void dependency_wait() {
#if defined(CRUCIBLE_PDL) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* From here on the next kernel may start its preamble. */
DEVICE void dependency_release() {
#if defined(CRUCIBLE_PDL) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif
