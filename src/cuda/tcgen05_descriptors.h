/* tcgen05_descriptors.h: what tcgen05.mma is told of its operands, as numbers (PTX ISA, "Tcgen05 shared memory
 * descriptor", "Instruction descriptor"); for C and CUDA C. */
#ifndef FDM_CUDA_TCGEN05_DESCRIPTORS_H
#define FDM_CUDA_TCGEN05_DESCRIPTORS_H

#ifdef __CUDACC__
#    include "cuda/ptx/types.cuh"
#    define FDM_DESCRIPTOR __device__ __forceinline__ constexpr
#else
#    include <stdint.h>
#    define FDM_DESCRIPTOR static inline
#endif

/* ---- a matrix in shared memory, as TMA leaves it with the 128-byte swizzle ----
 *
 * Rows of 128 bytes, eight of them swizzled together, each such group 1024 bytes after the one before. Bits 0-13 are
 * the address, 16-29 the leading and 32-45 the stride offset, each in units of 16 bytes; 46-48 the version, 1; 49-51
 * the base offset, 0 for what begins at a multiple of 1024; 52 relative offsets; 61-63 the swizzle, 2 for 128 bytes. A
 * matrix is walked by adding to the address: `address` below is a multiple of 1024 plus what has been walked. */

/* Rows (of M or N) of 64 elements of K: 16 elements of K further on are 32 bytes, 64 of them the next matrix. */
FDM_DESCRIPTOR uint64_t tcgen05_k_major(uint32_t address) {
    return 2ull << 61 | 1ull << 46 | (uint64_t)(1024 >> 4) << 32 | 1ull << 16 | (address & 0x3ffff) >> 4;
}
/* Rows (of K) of 64 elements of M or N: 16 elements of K further on are 2048 bytes. chunk_bytes: from one run of 64
 * elements of M or N to the next. */
FDM_DESCRIPTOR uint64_t tcgen05_mn_major(uint32_t address, uint32_t chunk_bytes) {
    return 2ull << 61 | 1ull << 46 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)(chunk_bytes >> 4) << 16 |
           (address & 0x3ffff) >> 4;
}

/* ---- the product ----
 *
 * Of m x n sums in float32 of float16 (f16) or bfloat16; m and n are those of the pair where two blocks multiply. Bits
 * 4-5 are the type of the sums, 1 for float32; 7-9 that of a and 10-12 that of b, 1 for bfloat16; 13 and 14 negate a
 * and b; 15 and 16 say that a and b are MN-major; 17-22 are n / 8, 24-28 m / 16. */
FDM_DESCRIPTOR uint32_t tcgen05_shape(int f16, int m, int n, int a_mn_major, int b_mn_major) {
    return 1u << 4 | (f16 ? 0u : 1u) << 7 | (f16 ? 0u : 1u) << 10 | (a_mn_major ? 1u : 0u) << 15 |
           (b_mn_major ? 1u : 0u) << 16 | (uint32_t)(n / 8) << 17 | (uint32_t)(m / 16) << 24;
}
#undef FDM_DESCRIPTOR

#endif
