/* hopper_forward.h: the contract of hopper_forward.cu: its constants, parameters and shared memory; for C and CUDA C.
 */
#ifndef FDM_HOPPER_FORWARD_H
#define FDM_HOPPER_FORWARD_H

#include "cuda/constants.h"
#include "cuda/tensor_map.h"
#include "gpu/forward_params.h"
#include "gpu/items.h"
#include "gpu/problem_constants.h"
#include "gpu/tile_plan.h"

/* The constants of the tile, which hopper_forward.cu and hopper_gather.cu share. */
#define HOPPER_FORWARD_TILE_CONSTANTS(X)                 \
    X(HEAD_DIM)   /* D rounded up to 16 */               \
    X(HEAD_DIM_V) /* Dv rounded up to 16 */              \
    X(WARPGROUPS) /* that compute: 64 query rows each */ \
    X(BLOCK_N)    /* keys of a step */                   \
    X(STAGES)     /* tiles of K, and of V, in flight */  \
    X(Q_STAGES)   /* tiles of Q: with 2, the next item's is loaded under this one */

/* The constants that specialise the kernel, in the order of the cache's listing. */
#define HOPPER_FORWARD_CONSTANTS(X)                                                                    \
    HOPPER_FORWARD_TILE_CONSTANTS(X)                                                                   \
    X(SCORE_STAGES)   /* tiles of mask and bias in flight */                                           \
    X(PING_PONG)      /* 1: one warpgroup issues products at a time, the others make P meanwhile */    \
    X(SCHEDULER)      /* ITEMS_* */                                                                    \
    X(EXP2_FREQUENCY) /* EXP2_RESIDUE of every EXP2_FREQUENCY */                                       \
    X(EXP2_RESIDUE)   /* exponentials run on the FMA pipe */                                           \
    X(PACKED_HEADS)   /* query heads of a KV head that share a tile of rows; 1: a tile has one head */ \
    X(SPLITS)         /* 1: the keys are split over items, and leave parts for combine_splits.cu */    \
    X(REDO)           /* 1: rows whose sums are NaN are recomputed from the keys that they see (gpu/redo.cuh) */

/* What a plan holds for it (contract/family.h). */
#define HOPPER_FORWARD_PARAMETERS(X)                                             \
    X(TILE) /* of the list in hopper_forward.c */                                \
    X(SCHEDULER)                                                                 \
    X(EXP2_FREQUENCY)                                                            \
    X(EXP2_RESIDUE)                                                              \
    X(NUM_SMS) /* blocks of a grid whose order is not static */                  \
    X(PACKED_HEADS)                                                              \
    X(NUM_SPLITS) /* of the keys; 1: none */                                     \
    X(COPIES)     /* HOPPER_COPY_*: matrices of which the kernel reads copies */ \
    X(GATHER)     /* the tile of hopper_gather.c for heads whose keys lie scattered, from 1 on; 0: none */

struct hopper_forward_params {
    struct gpu_forward_params in;
    struct cuda_tensor_map q_map, k_map, v_map; /* [B, heads, S, D]: tiles of 64 columns; of a cache B is pages */
    struct cuda_tensor_map mask_map, bias_map;  /* [b, h, Sq, Sk]: tiles of 128 bytes a row */
    int32_t *items_begun;                       /* ITEMS_DYNAMIC: 0 when the kernel begins */
    int32_t row_blocks, items;                  /* of a head; of all heads */
    int32_t mask_batches, bias_batches;         /* 1 where batches share them */
    int32_t mask_group, bias_group;             /* query heads that share one head of them */
    int32_t gathers;                            /* 1: hopper_gather.cu computes heads whose keys lie scattered */
    int32_t part_shift;                         /* a cache: a tile's keys are copied in parts of 1 << part_shift */
    struct tile_plan plan;                      /* of ranges of rows */
};

/* Registers of a thread of the producer's warpgroup and of the others, which together fill the register file. A
 * producer that loads masks and biases, looks up lengths and pages (`more`), or walks a plan, needs more. */
#define HOPPER_PRODUCER_REGISTERS(warpgroups, more, ranged) ((warpgroups) == 3 ? 32 : (ranged) ? 56 : (more) ? 40 : 24)
#define HOPPER_CONSUMER_REGISTERS(warpgroups, more, ranged) \
    ((warpgroups) == 3 ? 160 : (ranged) ? 224 : (more) ? 232 : 240)

/* Rows of shared memory are 128 bytes: a panel has as many columns of a tile. */
#define HOPPER_PANELS(columns, element_bytes) (((columns) * (element_bytes) + 127) / 128)
/* Of a stage of K: which rows see its keys (hopper_ranges.cuh), in four rows that lie in different banks. */
#define HOPPER_RANGE_BYTES(block_n) (4 * ((block_n) + 16))
/* Barriers and work items, at the end. */
#define HOPPER_CONTROL_BYTES 512
/* The 1024 bytes are for alignment: the swizzle of TMA counts addresses. */
GPU_INLINE int32_t hopper_forward_shared_bytes(int32_t warpgroups, int32_t block_n, int32_t stages, int32_t q_stages,
                                               int32_t score_stages, int32_t head_dim, int32_t head_dim_v, int32_t mask,
                                               int32_t bias_bytes, int32_t ranged) {
    const int32_t d = HOPPER_PANELS(head_dim, 2), dv = HOPPER_PANELS(head_dim_v, 2), block_m = 64 * warpgroups;
    const int32_t scores = (mask ? HOPPER_PANELS(block_n, 1) : 0) + HOPPER_PANELS(block_n, bias_bytes);
    return 128 * (q_stages * block_m * (d > dv ? d : dv) + stages * block_n * (d + dv) +
                  score_stages * block_m * scores) +
           (ranged ? stages * HOPPER_RANGE_BYTES(block_n) : 0) + HOPPER_CONTROL_BYTES + 1024;
}

#endif
