/* blackwell_forward.h: the contract of blackwell_forward.cu: its constants, parameters, tensor memory and shared
 * memory; for C and CUDA C. */
#ifndef FDM_BLACKWELL_FORWARD_H
#define FDM_BLACKWELL_FORWARD_H

#include "cuda/constants.h"
#include "cuda/tensor_map.h"
#include "gpu/forward_params.h"
#include "gpu/items.h"
#include "gpu/problem_constants.h"

/* The constants that specialise the kernel, in the order of the cache's listing. */
#define BLACKWELL_FORWARD_CONSTANTS(X)                                        \
    X(HEAD_DIM)       /* D rounded up to 64 */                                \
    X(HEAD_DIM_V)     /* 128 or 256: Dv is at most that */                    \
    X(Q_TILES)        /* of 128 query rows a block: 1, or with Dv of 128 2 */ \
    X(SCHEDULER)      /* ITEMS_* */                                           \
    X(EXP2_FREQUENCY) /* EXP2_RESIDUE of every EXP2_FREQUENCY pairs */        \
    X(EXP2_RESIDUE)   /* exponentials run on the FMA pipe */                  \
    X(EXP2_DEGREE)    /* by a polynomial of degree 3 or 4 */                  \
    X(REDO)           /* 1: rows whose sums are NaN are recomputed from the keys that they see (gpu/redo.cuh) */

/* What a plan holds for it (contract/family.h). */
#define BLACKWELL_FORWARD_PARAMETERS(X) \
    X(Q_TILES)                          \
    X(SCHEDULER)                        \
    X(EXP2_FREQUENCY)                   \
    X(EXP2_RESIDUE)                     \
    X(EXP2_DEGREE)                      \
    X(NUM_SMS) /* blocks of a grid whose order is static */

struct blackwell_forward_params {
    struct gpu_forward_params in;
    struct cuda_tensor_map q_map, k_map, v_map; /* [B, heads, S, D]: tiles of 64 columns, of 128 rows or 64 keys */
    int32_t row_blocks, items;                  /* of a head; of all heads */
    int32_t mask_batches, bias_batches;         /* 1 where batches share them */
    int32_t mask_group, bias_group;             /* query heads that share one head of them */
};

#define BLACKWELL_TILE          128 /* query rows of a block's tile, and keys of a step */
#define BLACKWELL_SLOT_BYTES    16384
#define BLACKWELL_CONTROL_BYTES 3072 /* barriers, items, factors, at the end */
#define BLACKWELL_COLUMNS       512  /* of tensor memory: all */

/* Warpgroups: softmax (one a query tile), correction, and the warps that multiply, load and schedule. */
#define BLACKWELL_FORWARD_THREADS(q_tiles) (128 * ((q_tiles) + 2))
/* Registers of their threads; of all together at most those of a block at launch: 504 or 512 of four threads. */
#define BLACKWELL_SOFTMAX_REGISTERS(q_tiles)    ((q_tiles) == 1 ? 256 : 176)
#define BLACKWELL_CORRECTION_REGISTERS(q_tiles) ((q_tiles) == 1 ? 152 : 80)
#define BLACKWELL_OTHER_REGISTERS(q_tiles)      ((q_tiles) == 1 ? 96 : 80)

/* Slots of the ring of K and V: what Q leaves of 224 KB. */
GPU_INLINE int32_t blackwell_forward_slots(int32_t q_tiles, int32_t head_dim) {
    return (224 * 1024 - q_tiles * BLACKWELL_TILE * head_dim * 2) / BLACKWELL_SLOT_BYTES;
}
/* Shared memory begins at a multiple of 1024, which the swizzle of TMA counts from. */
GPU_INLINE int32_t blackwell_forward_shared_bytes(int32_t q_tiles, int32_t head_dim) {
    return q_tiles * BLACKWELL_TILE * head_dim * 2 + blackwell_forward_slots(q_tiles, head_dim) * BLACKWELL_SLOT_BYTES +
           BLACKWELL_CONTROL_BYTES;
}

#endif
