/* hopper_backward.h: the contract of hopper_backward.cu: its constants, parameters and shared memory; for C and CUDA C.
 */
#ifndef FDM_HOPPER_BACKWARD_H
#define FDM_HOPPER_BACKWARD_H

#include "cuda/tensor_map.h"
#include "gpu/backward_params.h"
#include "gpu/problem_constants.h"
#include "gpu/tile_plan.h"

/* The constants that specialise the kernel, in the order of the cache's listing. */
#define HOPPER_BACKWARD_CONSTANTS(X)                                                                                  \
    X(HEAD_DIM)     /* D rounded up to 32 */                                                                          \
    X(HEAD_DIM_V)   /* Dv rounded up to 32 */                                                                         \
    X(WARPGROUPS)   /* consumers, which own 64 keys each; one more loads, and makes dQ */                             \
    X(STAGES)       /* tiles of Q in flight */                                                                        \
    X(DOUT_STAGES)  /* of dO: as many, or one less */                                                                 \
    X(DS_STAGES)    /* tiles of dS in shared memory */                                                                \
    X(DS_REGISTERS) /* 1: dK takes dS from registers; 0: from shared memory, so that it is made under dV's product */ \
    X(DBIAS)        /* GPU_DBIAS_* */                                                                                 \
    X(KEYS)         /* HOPPER_KEYS_* */                                                                               \
    X(ROWS_DESCENDING) /* a block walks from the last rows to the first */                                            \
    X(DS_FROM_F32_P)   /* 1: dS is made of P in float32, whose residual lies meanwhile where dS will lie */           \
    X(EMPTY_ROWS)      /* rows may see no key */                                                                      \
    X(SCRUB)           /* HOPPER_SCRUB_* */                                                                           \
    X(PARTS)           /* 1: a block takes a part of a group of heads, and leaves sums of dK and dV in float32 */     \
    X(NEEDS_DQ)                                                                                                       \
    X(DQ_ADDER)      /* 1: one more warpgroup adds to dQ, from shared memory */                                       \
    X(FIRST_STORES)  /* DETERMINISTIC: the first block at a row of dQ stores, as some block reaches every row */      \
    X(DETERMINISTIC) /* 1: blocks add to dQ in the order of keys, to a shared bias' gradient in that of heads */

/* What a plan holds for it (contract/family.h). */
#define HOPPER_BACKWARD_PARAMETERS(X)                 \
    X(TILE)    /* of the list in hopper_backward.c */ \
    X(PARTS)   /* of a group of heads */              \
    X(IN_TURN) /* heads, or parts of groups, whose blocks are interleaved */

/* KEYS: in which order blocks take keys; block_order.h says whether they lie scattered. */
#define HOPPER_KEYS_PLACED    0 /* as they lie */
#define HOPPER_KEYS_SORTED    1 /* by key_sort.h */
#define HOPPER_KEYS_SCATTERED 2 /* the same; where they are not scattered nothing is done */
#define HOPPER_KEYS_RUNS      3 /* the longest walks first; where they are scattered nothing is done */
#define HOPPER_KEYS_EITHER    4 /* sorted where they are scattered, else as they lie, the longest walks first */

/* SCRUB: which rows of K and V become 0 in shared memory: what keys hold that no row sees must not count, and 0 times
 * NaN is not 0. */
#define HOPPER_SCRUB_NONE    0
#define HOPPER_SCRUB_HIDDEN  1 /* of keys that no row sees, by the block's list */
#define HOPPER_SCRUB_NUMBERS 2 /* of keys that hold NaN or inf: nothing says key by key who sees them */

struct hopper_backward_params {
    struct gpu_backward_params in;
    struct cuda_tensor_map q_map, k_map, v_map, dout_map; /* [B, heads, S, D or Dv]: tiles of 64 columns */
    int32_t key_blocks;                                   /* of a KV head */
    int32_t heads_in_turn;                     /* KV heads, or parts of groups, whose key blocks are interleaved */
    struct cuda_tensor_map mask_map, bias_map; /* with rows: [B, heads, Sq, Sk], tiles of 128 bytes */
    uint64_t *dq_order;                        /* DETERMINISTIC, where tiles of rows are listed: hopper_dq_order.h */
    int32_t row_tiles, dq_order_words;         /* of a head; of a tile */
    struct tile_plan plan; /* ROW_RUNS; of hopper_backward_2pass_dq.cu also of the keys, in their order */
};

/* Registers of a thread of the dQ warpgroup, of a consumer and of the dQ adder, which together fill the register file.
 * adder: there is one; wide: the head dim is above 96, where dQ is made in two halves. */
#define HOPPER_BACKWARD_DQ_REGISTERS(warpgroups, adder, wide) \
    ((warpgroups) == 3 ? 80 : !(adder) ? 88 : (wide) ? 72 : 96)
#define HOPPER_BACKWARD_KEY_REGISTERS(warpgroups, adder, wide) \
    ((warpgroups) == 3 ? 144 : (adder) && !(wide) ? 192 : 208)
#define HOPPER_BACKWARD_DQ_ADDER_REGISTERS(wide) ((wide) ? 24 : 32)

/* Words of each key in the list of keys: the first row that sees it, the row past the last, and its bias. */
#define HOPPER_BACKWARD_KEY_WORDS(keyed, bias) ((keyed) ? 2 + ((bias) != 0) : 0)
/* Bits in the list of tiles: query rows are at most 64 times as many. */
#define HOPPER_BACKWARD_TILES_MAX 2048

/* Barriers and words of single warps, at the end of shared memory. */
#define HOPPER_BACKWARD_CONTROL_BYTES 256

/* The inputs of scores that take shared memory: 0 or 1 each. */
struct hopper_score_inputs {
    int32_t keyed, mask_rows, bias, bias_rows, ranges; /* ranges: row intervals */
};
/* Beside Q, K, V, dO, dS and dQ: a tile of mask and bias, and words. */
GPU_INLINE int32_t hopper_score_input_bytes(struct hopper_score_inputs inputs, int32_t stages, int32_t block_n) {
    return 4 * HOPPER_BACKWARD_KEY_WORDS(inputs.keyed, inputs.bias) * block_n + (inputs.bias ? stages * 64 * 4 : 0) +
           (inputs.keyed || inputs.mask_rows || inputs.ranges ? HOPPER_BACKWARD_TILES_MAX / 8 : 0) +
           (inputs.ranges ? HOPPER_BACKWARD_TILES_MAX / 8 * (block_n / 64) : 0) +
           (inputs.mask_rows ? HOPPER_BACKWARD_TILES_MAX / 8 + 64 * block_n : 0) +
           (inputs.bias_rows ? 64 * block_n * 2 : 0);
}
/* Padding for shared memory that does not begin at a multiple of 1024, which the swizzle of TMA needs. With a tile of
 * bias or a list no padding fits: shared memory must begin at such a multiple. */
GPU_INLINE int32_t hopper_backward_spare_bytes(struct hopper_score_inputs inputs) {
    return inputs.bias_rows || inputs.keyed || inputs.ranges ? 0 : 1024;
}
GPU_INLINE int32_t hopper_backward_shared_bytes(int32_t warpgroups, int32_t stages, int32_t dout_stages,
                                                int32_t ds_stages, int32_t head_dim, int32_t head_dim_v,
                                                struct hopper_score_inputs inputs) {
    const int32_t block_m = 64, block_n = 64 * warpgroups, d = 128 * ((head_dim + 63) / 64),
                  dv = 128 * ((head_dim_v + 63) / 64);
    return block_n * (d + (d > dv ? d : dv)) + block_m * (stages * (d + 8) + dout_stages * dv) +
           ds_stages * block_m * block_n * 2 + block_m * head_dim * 4 +
           hopper_score_input_bytes(inputs, stages, block_n) + HOPPER_BACKWARD_CONTROL_BYTES +
           hopper_backward_spare_bytes(inputs);
}

#endif
