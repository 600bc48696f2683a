/* gemm.h: the contract of the matrix products C = alpha A B + beta C: constants, parameters, shared memory; for C and
 * CUDA C. A is m x k, B k x n, C m x n with contiguous rows; batches of all three. */
#ifndef FDM_GEMM_H
#define FDM_GEMM_H

#include "cuda/constants.h"
#include "cuda/tensor_map.h"
#ifdef __CUDACC__
#    include "cuda/ptx/types.cuh"
#else
#    include <stdint.h>
#endif

/* DTYPE: the numbers of fdm_dtype. */
#define GEMM_FLOAT16  1
#define GEMM_BFLOAT16 2

/* One operand in memory: element (i, j) of batch z at data + z * batch + i * row + j * column, in elements; one of the
 * two strides is 1, or its extent is. */
struct gemm_matrix {
    char *data;
    int64_t batch, row, column;
};

/* What every kernel receives. */
struct gemm_params {
    struct gemm_matrix a, b, c, out; /* c is read where beta is not 0; may be out */
    float *partials;                 /* with splits: [split][batch][m][n] */
    int32_t m, n, k, batch;
    int32_t splits;
    float alpha, beta;
};

/* ---- gemm_naive, gemm_combine ---- */

#define GEMM_ELEMENT_CONSTANTS(X)          \
    X(DTYPE)                               \
    X(HAS_C)        /* 1: beta is not 0 */ \
    X(ACCUMULATE16) /* gemm_naive: 1: sums are rounded to float16 at every step */

enum { GEMM_ELEMENT_THREADS = 256 };

/* ---- gemm_sliced_k, gemm_mma_warp ---- */

#define GEMM_RUNG_CONSTANTS(X) \
    X(DTYPE)                   \
    X(HAS_C)

enum { GEMM_SLICED_BLOCK = 64, GEMM_SLICED_K = 16, GEMM_WARP_ROWS = 16, GEMM_WARP_COLUMNS = 8, GEMM_WARPS = 4 };

/* ---- gemm_mma ---- */

/* LAYOUT: how rows of a tile lie in shared memory. */
#define GEMM_ROWS_DENSE   0 /* one after the other: eight rows that ldmatrix reads meet few banks */
#define GEMM_ROWS_PADDED  1 /* 16 bytes between them */
#define GEMM_ROWS_SWIZZLE 2 /* chunks of 16 bytes permuted within a row */

#define GEMM_MMA_CONSTANTS(X)                                                      \
    X(DTYPE)        /* GEMM_FLOAT16 or GEMM_BFLOAT16 */                            \
    X(A_M_MAJOR)    /* 0: A's rows are contiguous, along k; 1: its columns */      \
    X(B_N_MAJOR)    /* 0: B's columns are contiguous, along k; 1: its rows */      \
    X(HAS_C)        /* 1: beta is not 0 */                                         \
    X(ACCUMULATE16) /* 1: sums in float16 */                                       \
    X(ALIGNED)      /* 1: rows of A, B and out begin at multiples of 16 bytes */   \
    X(BLOCK_N)      /* columns of a tile, 128 or 256: 64 x 32 or 64 x 64 a warp */ \
    X(BLOCK_K)      /* of k a step: 32 or 64 */                                    \
    X(STAGES)       /* tiles of A, and of B, in flight: 2 or more */               \
    X(LAYOUT)       /* GEMM_ROWS_* */                                              \
    X(L2_ORDER)     /* 1: blocks take tiles in groups of rows; 0: row by row */    \
    X(AHEAD)        /* 1: registers of the next 16 of k are loaded under this product */

enum { GEMM_MMA_BLOCK_M = 128, GEMM_MMA_THREADS = 256 };
/* Of A or B, `outer` by block_k; with padding the most that either order of rows takes. */
GPU_INLINE int32_t gemm_mma_operand_bytes(int32_t outer, int32_t block_k, int32_t layout) {
    return outer * (block_k * 2 + (layout == GEMM_ROWS_PADDED ? 16 : 0));
}

/* ---- gemm_skinny ---- */

#define GEMM_SKINNY_CONSTANTS(X)                                           \
    X(DTYPE)     /* GEMM_FLOAT16 or GEMM_BFLOAT16 */                       \
    X(B_N_MAJOR) /* 0: B's columns are contiguous, along k; 1: its rows */ \
    X(HAS_C)     /* 1: beta is not 0 */                                    \
    X(ROWS)      /* of A at most: a multiple of 8 */                       \
    X(DEPTH)     /* steps of B in registers: even */                       \
    X(PARTIAL)   /* 1: sums of a part of k, in float32, for gemm_combine */

enum {
    GEMM_SKINNY_ROWS_MAX = 32, /* of A */
    GEMM_SKINNY_COLUMNS = 64,  /* of C that a block owns */
    GEMM_SKINNY_WARPS = 8,
    GEMM_SKINNY_PITCH = 68, /* floats from one row of a warp's sums to the next: other banks */
    GEMM_SKINNY_A_PAIRS = 3 /* of a warp's pairs of steps whose part of A is in shared memory */
};
GPU_INLINE int32_t gemm_skinny_shared_bytes(int32_t rows) {
    return GEMM_SKINNY_WARPS * rows * GEMM_SKINNY_A_PAIRS * 128; /* the sums need less */
}

/* ---- gemm_mma_tma, gemm_hopper: tiles by TMA ---- */

enum { GEMM_TMA_BLOCK_K = 64, GEMM_GROUP = 16 }; /* of k a step; tiles of rows that are taken together */

struct gemm_tma_params {
    struct gemm_params in;
    struct cuda_tensor_map a_map, b_map, out_map; /* [batch, rows, columns] */
    int32_t a_rows; /* that a copy of A brings: fewer than the tile's where there are no more, as zeros take longer */
    int32_t a_batched, b_batched;    /* 0: all batches share it, and its map has one */
    int32_t row_tiles, column_tiles; /* of a cluster's height; of BLOCK_N */
    int32_t items;                   /* row_tiles * column_tiles * splits * batch */
    int32_t steps, steps_per_split;  /* of 64 of k */
};

/* Bytes of a stage of block_m rows of A and block_n columns of B, which come in panels of 64. */
GPU_INLINE int32_t gemm_tma_stage_bytes(int32_t block_m, int32_t block_n) {
    return (block_m + (block_n + 63) / 64 * 64) * GEMM_TMA_BLOCK_K * 2;
}

/* ---- gemm_mma_tma ---- */

#define GEMM_MMA_TMA_CONSTANTS(X)                                                   \
    X(DTYPE)     /* GEMM_FLOAT16 or GEMM_BFLOAT16 */                                \
    X(A_M_MAJOR) /* 0: A's rows are contiguous, along k; 1: its columns */          \
    X(B_N_MAJOR) /* 0: B's columns are contiguous, along k; 1: its rows */          \
    X(HAS_C)     /* 1: beta is not 0 */                                             \
    X(BLOCK_N)   /* columns of a tile, a multiple of 64: 64 x BLOCK_N / 4 a warp */ \
    X(STAGES)    /* tiles of A, and of B, in flight: 2 or more */

enum { GEMM_MMA_TMA_THREADS = 384 }; /* two warpgroups that compute, and one that copies */
/* Rows of a copy of k-major B: TMA takes 256 at most. */
GPU_INLINE int32_t gemm_mma_tma_box(int32_t block_n) { return block_n > 256 ? block_n / 2 : block_n; }
/* Stages, the staging of results, and barriers; 1024 are for alignment: the swizzle counts addresses. */
GPU_INLINE int32_t gemm_mma_tma_shared_bytes(int32_t block_n, int32_t stages) {
    return stages * gemm_tma_stage_bytes(GEMM_MMA_BLOCK_M, block_n) + 2 * GEMM_MMA_BLOCK_M * 128 + 256 + 1024;
}

/* ---- gemm_hopper ---- */

#define GEMM_HOPPER_CONSTANTS(X)                                                     \
    X(DTYPE)      /* GEMM_FLOAT16 or GEMM_BFLOAT16 */                                \
    X(A_M_MAJOR)  /* 0: A's rows are contiguous, along k; 1: its columns */          \
    X(B_N_MAJOR)  /* 0: B's columns are contiguous, along k; 1: its rows */          \
    X(HAS_C)      /* 1: beta is not 0 */                                             \
    X(WARPGROUPS) /* that compute: 64 rows each */                                   \
    X(BLOCK_N)    /* columns of a tile, a multiple of 32 to 256 */                   \
    X(STAGES)     /* tiles of A, and of B, in flight */                              \
    X(CLUSTER)    /* blocks, 1 or 2, whose tiles lie below each other and share B */ \
    X(PARTIAL)    /* 1: sums of a part of k, in float32, for gemm_combine */

/* Columns of C that are written at a time: tiles that are no multiple of 64 would write beside themselves. */
GPU_INLINE int32_t gemm_hopper_panel_columns(int32_t block_n) { return block_n % 64 ? 32 : 64; }
/* Stages, the staging of results, and barriers; 1024 are for alignment: the swizzle counts addresses. */
GPU_INLINE int32_t gemm_hopper_shared_bytes(int32_t warpgroups, int32_t block_n, int32_t stages, int32_t partial) {
    return stages * gemm_tma_stage_bytes(64 * warpgroups, block_n) + (partial ? 0 : warpgroups * 2 * 64 * 128) + 256 +
           1024;
}

#endif
