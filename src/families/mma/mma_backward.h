/* mma_backward.h: the contract of the mma family's backward: what a tile costs in shared memory and registers; for C
 * and CUDA C.
 *
 * A block of 8 warps owns block_n keys and walks the queries block_m rows at a time. Shared memory, bytes:
 *
 *     2D (M q + M + N [V not in registers]) + 2D N + 2N MS + 8M
 *        Q      dO   V                        K      dS       lse and row sum of dO * O
 *
 * with q = 1 or 2 buffers of Q, and with MS the rows of score tiles that pass through shared memory at a time. Head
 * dims are those of q, k (D) and of v, out (Dv), rounded up to 16; dO and V count with Dv. */
#ifndef FDM_MMA_BACKWARD_H
#define FDM_MMA_BACKWARD_H

#include "families/mma/mma_arguments.h"

#ifdef __CUDACC__
#    define MMA_BACKWARD_INLINE __host__ __device__ constexpr
#else
#    define MMA_BACKWARD_INLINE static inline
#endif

#define MMA_BACKWARD_WARPS 8

/* Accumulators of dK and dV a thread may hold, and those plus the registers of V. More than that spills (N = 128 above
 * head dim 128; 64 keys with V in registers at head dim 256). */
#define MMA_BACKWARD_ACCUMULATORS_MAX 128
#define MMA_BACKWARD_REGISTERS_MAX    160

/* MS. 128 keys: 16 a warp, P stays in registers as the operand of dV, and only dS passes, 64 rows at a time, or 32
 * above head dim 96, where 64 would spill. Fewer keys: two or four warps share each 16 keys, so P passes beside dS, 64
 * rows of each. */
MMA_BACKWARD_INLINE int32_t mma_backward_staged_rows(int32_t block_n, int32_t head_dim, int32_t head_dim_v) {
    if (block_n < 128)
        return 128;
    return (head_dim > head_dim_v ? head_dim : head_dim_v) > 96 ? 32 : 64;
}

/* 128x64 and 64x128 above head dim 96, single-buffered with V in shared memory, lay what passes over rows of dO that
 * are already consumed, 64 and 32 at a time; with that they fit 99 KB. What Dv below 128 leaves uncovered has its own
 * room. */
MMA_BACKWARD_INLINE int32_t mma_backward_overlays(int32_t block_m, int32_t block_n, int32_t stages,
                                                  int32_t v_in_registers, int32_t head_dim, int32_t head_dim_v) {
    const int32_t widest = head_dim > head_dim_v ? head_dim : head_dim_v;
    return block_m * block_n == 128 * 64 && stages == 1 && !v_in_registers && widest > 96 && widest <= 128;
}

MMA_BACKWARD_INLINE int32_t mma_backward_shared_bytes(int32_t block_m, int32_t block_n, int32_t stages,
                                                      int32_t v_in_registers, int32_t head_dim, int32_t head_dim_v) {
    const int32_t q = 2 * head_dim * block_m * stages, k = 2 * head_dim * block_n;
    const int32_t dout = 2 * head_dim_v * block_m, v = v_in_registers ? 0 : 2 * head_dim_v * block_n;
    const int32_t staged = 2 * block_n * mma_backward_staged_rows(block_n, head_dim, head_dim_v);
    const int32_t covered = mma_backward_overlays(block_m, block_n, stages, v_in_registers, head_dim, head_dim_v)
                                ? 2 * head_dim_v * (block_n < 128 ? 64 : 32)
                                : 0;
    return q + dout + v + k + (staged > covered ? staged - covered : 0) + 8 * block_m;
}

/* fp32 accumulators of dK and dV a thread. */
MMA_BACKWARD_INLINE int32_t mma_backward_accumulators(int32_t block_n, int32_t head_dim, int32_t head_dim_v) {
    return block_n * (head_dim + head_dim_v) / (32 * MMA_BACKWARD_WARPS);
}

/* Registers of V a thread: each warp holds its 16 keys, two elements a register. */
MMA_BACKWARD_INLINE int32_t mma_backward_v_registers(int32_t head_dim_v) { return 16 * head_dim_v / 64; }

#endif
