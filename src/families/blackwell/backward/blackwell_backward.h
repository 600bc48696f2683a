/* blackwell_backward.h: the contract of blackwell_backward.cu: its constants, parameters, tensor memory and shared
 * memory; for C and CUDA C. */
#ifndef FDM_BLACKWELL_BACKWARD_H
#define FDM_BLACKWELL_BACKWARD_H

#include "cuda/tensor_map.h"
#include "gpu/backward_params.h"
#include "gpu/problem_constants.h"

/* The constants that specialise the kernel, in the order of the cache's listing. */
#define BLACKWELL_BACKWARD_CONSTANTS(X)                                      \
    X(HEAD_DIM)   /* 128 or 256: D and Dv are at most that */                \
    X(OWN_KEYS)   /* a block owns 1: keys, and walks rows; 0: the reverse */ \
    X(MAKES_DS)   /* dS is made: for dQ, or with OWN_KEYS for dK */          \
    X(MAKES_DV)   /* with OWN_KEYS */                                        \
    X(SCHEDULER)  /* ITEMS_* */                                              \
    X(EMPTY_ROWS) /* rows may see no key, or no row see a key */             \
    X(PARTS)      /* 1: a block takes a part of a group of heads, and leaves sums of dK and dV in float32 */

/* What a plan holds for it (contract/family.h). */
#define BLACKWELL_BACKWARD_PARAMETERS(X) \
    X(SCHEDULER)                         \
    X(NUM_SMS)                           \
    X(PARTS) /* of a group of heads */

struct blackwell_backward_params {
    struct gpu_backward_params in;
    struct cuda_tensor_map q_map, k_map, v_map, dout_map; /* [B, heads, S, D or Dv]: tiles of 64 rows and columns */
    int32_t pairs;         /* of a head: of tiles of rows, or (OWN_KEYS) of a part of a group: of tiles of keys */
    int32_t items;         /* pairs of all of them */
    int32_t heads_in_turn; /* heads, or parts of groups, whose pairs are interleaved */
    int32_t reserved;
};

#define BLACKWELL_BACKWARD_TILE          128 /* rows, and keys, of a block's tiles; a pair of blocks owns two */
#define BLACKWELL_BACKWARD_COMPUTE_WARPS 8   /* then one that multiplies, one that loads, one that takes items */
#define BLACKWELL_BACKWARD_THREADS       (32 * (BLACKWELL_BACKWARD_COMPUTE_WARPS + 3))
/* That a thread has: warps get them by fours. */
#define BLACKWELL_BACKWARD_REGISTERS     168
#define BLACKWELL_BACKWARD_COLUMNS       512   /* of tensor memory: all */
#define BLACKWELL_BACKWARD_SLOT_BYTES    16384 /* two boxes of 64 rows and 64 columns */
#define BLACKWELL_BACKWARD_CONTROL_BYTES 512

/* The own operands: K or Q, and beside dS V or dO. */
GPU_INLINE int32_t blackwell_backward_operand_bytes(int32_t head_dim, int32_t makes_ds) {
    return (makes_ds ? 2 : 1) * BLACKWELL_BACKWARD_TILE * head_dim * 2;
}
/* Of the ring: what the own operands leave of 224 KB. */
GPU_INLINE int32_t blackwell_backward_slots(int32_t head_dim, int32_t makes_ds) {
    return (224 * 1024 - blackwell_backward_operand_bytes(head_dim, makes_ds)) / BLACKWELL_BACKWARD_SLOT_BYTES;
}
/* lse, and beside dS delta, of the rows that are walked: stages of them. */
GPU_INLINE int32_t blackwell_backward_row_stages(int32_t makes_ds) { return makes_ds ? 2 : 4; }
GPU_INLINE int32_t blackwell_backward_row_bytes(int32_t makes_ds) {
    return (makes_ds ? 2 : 1) * BLACKWELL_BACKWARD_TILE * 4;
}
/* Shared memory begins at a multiple of 1024, which the swizzle of TMA counts from. */
GPU_INLINE int32_t blackwell_backward_shared_bytes(int32_t head_dim, int32_t makes_ds) {
    return blackwell_backward_operand_bytes(head_dim, makes_ds) +
           blackwell_backward_slots(head_dim, makes_ds) * BLACKWELL_BACKWARD_SLOT_BYTES +
           blackwell_backward_row_stages(makes_ds) * blackwell_backward_row_bytes(makes_ds) +
           BLACKWELL_BACKWARD_CONTROL_BYTES;
}
/* Tiles of scores in tensor memory: two where dS takes no columns. */
GPU_INLINE int32_t blackwell_backward_score_stages(int32_t makes_ds) { return makes_ds ? 1 : 2; }

#endif
