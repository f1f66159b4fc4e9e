/* The canonical order of candidates as one 64-bit key: a higher logit first, then a lower token id.
 *
 * Keys are compared as unsigned integers; the larger key comes first. No two ids of one row share a key, so the
 * order is total and does not depend on how a selection is parallelised. NaN sorts below -inf; -0 equals +0.
 * High half: the order-preserving map of the float's bits (the usual radix-sort trick: flip the sign bit of a
 * positive float, all bits of a negative one). Low half: the complement of the id.
 *
 * Compiled by Cython's C compiler and by NVRTC, which has no stdint.h.
 */
#ifndef CRUCIBLE_ORDER_KEY_H
#define CRUCIBLE_ORDER_KEY_H

#ifdef __CUDACC_RTC__
typedef unsigned int crucible_u32;
typedef unsigned long long crucible_u64;
#else
#include <stdint.h>
typedef uint32_t crucible_u32;
typedef uint64_t crucible_u64;
#endif

#ifdef __CUDACC__
#define CRUCIBLE_INLINE static __host__ __device__ __forceinline__
#else
#define CRUCIBLE_INLINE static inline
#endif

/* The bits of a float. A union, because NVRTC has no memcpy declaration for host-style code. */
CRUCIBLE_INLINE crucible_u32 crucible_float_bits(float value) {
    union { float value; crucible_u32 bits; } pun;
    pun.value = value;
    return pun.bits;
}

/* Unsigned order of the result = order of the floats; NaN is 0, -inf 0x007fffff, both zeros 0x80000000. */
CRUCIBLE_INLINE crucible_u32 crucible_order_bits(float logit) {
    crucible_u32 bits = crucible_float_bits(logit);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0u; /* by its bits: fastmath may drop logit != logit */
    if (bits == 0x80000000u) return 0x80000000u;
    return (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
}

CRUCIBLE_INLINE crucible_u64 crucible_order_key(float logit, crucible_u32 id) {
    return ((crucible_u64)crucible_order_bits(logit) << 32) | (crucible_u32)~id;
}

CRUCIBLE_INLINE crucible_u32 crucible_key_id(crucible_u64 key) { return ~(crucible_u32)key; }

/* The logit of a key: -0 comes back as +0, a NaN as the quiet NaN 0x7fffffff. */
CRUCIBLE_INLINE float crucible_key_logit(crucible_u64 key) {
    union { crucible_u32 bits; float value; } pun;
    crucible_u32 order = (crucible_u32)(key >> 32);
    pun.bits = (order & 0x80000000u) ? order & 0x7fffffffu : ~order;
    if (order == 0u) pun.bits = 0x7fffffffu;
    return pun.value;
}

#endif
