/* mma_forward_d1024.h: contract of the forward kernel for large head dims, between mma_forward_d1024.c and
 * mma_forward_d1024.cu.
 *
 * The warps of a block hold a BLOCK_M x HEAD_DIM_V block of O in registers as a grid of 32 rows x up to 128 columns
 * each; a cluster of two blocks shares the rows and splits the columns. */
#ifndef FDM_MMA_FORWARD_D1024_H
#define FDM_MMA_FORWARD_D1024_H

#include "cuda/constants.h"
#include "gpu/forward_params.h"
#include "gpu/problem_constants.h"

/* Constants of a specialisation.
 * HEAD_DIM, HEAD_DIM_V   padded: multiples of SLICE_D, and of 64 * CLUSTER * SLICE_PARTS
 * WARPS                  8, or 4: two blocks share a multiprocessor
 * BLOCK_M, BLOCK_N       query rows and keys of one step, of the whole cluster
 * SLICE_D                K goes through the ring in slices of BLOCK_N / CLUSTER keys x SLICE_D
 * SLICE_KEYS SLICE_PARTS V goes through it in slices of SLICE_KEYS keys x HEAD_DIM_V / CLUSTER / SLICE_PARTS
 * STAGES                 slices in the ring
 * BIAS                   GPU_BIAS_* */
#define MMA_FORWARD_D1024_CONSTANTS(X) \
    X(HEAD_DIM)                        \
    X(HEAD_DIM_V)                      \
    X(WARPS)                           \
    X(BLOCK_M)                         \
    X(BLOCK_N)                         \
    X(SLICE_D)                         \
    X(SLICE_KEYS)                      \
    X(SLICE_PARTS)                     \
    X(STAGES)                          \
    X(CLUSTER)                         \
    X(REDO) /* 1: rows whose sums are NaN are done again, by what they see (gpu/redo.cuh) */

/* What a plan holds for it (contract/family.h). */
#define MMA_FORWARD_D1024_PARAMETERS(X) X(TILE) /* of the list in mma_forward_d1024.c */

enum { MMA_FORWARD_D1024_WARP_ROWS = 32 };

/* Shared memory, in this order: Q, P, ring, row statistics of every warp that sees a row, barriers and votes, a
 * sequence in pages. Every
 * macro takes the numbers of one specialisation, so that the plan and the kernel ask the same formula. */
#define MMA_FORWARD_D1024_MAX(a, b) ((a) > (b) ? (a) : (b))
/* Warps side by side over the columns of one block's part of O. */
#define MMA_FORWARD_D1024_COLUMN_GROUPS(warps, block_m) ((warps)*MMA_FORWARD_D1024_WARP_ROWS / (block_m))
#define MMA_FORWARD_D1024_Q_BYTES(block_m, head_dim)    ((block_m) * (head_dim)*2)
#define MMA_FORWARD_D1024_P_PITCH(block_n)              MMA_FORWARD_D1024_MAX((block_n)*2, 128)
#define MMA_FORWARD_D1024_P_BYTES(block_m, block_n)     ((block_m)*MMA_FORWARD_D1024_P_PITCH(block_n))
#define MMA_FORWARD_D1024_STAGE_BYTES(block_n, slice_d, slice_keys, slice_parts, head_dim_v, cluster) \
    MMA_FORWARD_D1024_MAX((block_n) / (cluster) * (slice_d)*2,                                        \
                          (slice_keys) * ((head_dim_v) / (cluster) / (slice_parts)) * 2)
#define MMA_FORWARD_D1024_STATISTICS_BYTES(warps, cluster) ((warps)*MMA_FORWARD_D1024_WARP_ROWS * (cluster)*4)
/* Row groups have at most four barriers and votes of each kind. */
#define MMA_FORWARD_D1024_BARRIER_BYTES(stages) ((2 * (stages) + 8) * 8 + 64)
/* The facts of a sequence whose keys lie in pages. */
#define MMA_FORWARD_D1024_SEQUENCE_BYTES 64

#define MMA_FORWARD_D1024_SHARED_BYTES(head_dim, head_dim_v, warps, block_m, block_n, slice_d, slice_keys,           \
                                       slice_parts, stages, cluster, paged)                                          \
    (MMA_FORWARD_D1024_MAX(                                                                                          \
         MMA_FORWARD_D1024_Q_BYTES(block_m, head_dim) + MMA_FORWARD_D1024_P_BYTES(block_m, block_n) +                \
             (stages)*MMA_FORWARD_D1024_STAGE_BYTES(block_n, slice_d, slice_keys, slice_parts, head_dim_v, cluster), \
         (block_m) * ((head_dim_v) / (cluster)) * 2) +                                                               \
     MMA_FORWARD_D1024_STATISTICS_BYTES(warps, cluster) + MMA_FORWARD_D1024_BARRIER_BYTES(stages) +                  \
     ((paged) ? MMA_FORWARD_D1024_SEQUENCE_BYTES : 0))

#endif
