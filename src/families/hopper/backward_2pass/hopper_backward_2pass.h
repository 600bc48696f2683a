/* hopper_backward_2pass.h: the contract of the backward for head dims above 128, in two kernels,
 * hopper_backward_2pass_dq.cu and hopper_backward_2pass_dkv.cu: constants and shared memory; for C and CUDA C. Their
 * parameters are struct hopper_backward_params, with key blocks of 64 keys. */
#ifndef FDM_HOPPER_BACKWARD_2PASS_H
#define FDM_HOPPER_BACKWARD_2PASS_H

#include "families/hopper/backward/hopper_backward.h"
#include "gpu/problem_constants.h"

/* The constants that specialise both, in the order of the cache's listing. */
#define HOPPER_BACKWARD_2PASS_CONSTANTS(X)                                                         \
    X(HEAD_DIM)   /* D rounded up to 32 */                                                         \
    X(HEAD_DIM_V) /* Dv rounded up to 32 */                                                        \
    X(V_STAGES)   /* dq: tiles of V in flight; of K there are two */                               \
    X(P_STAGES)   /* dkv: tiles of P between the warpgroups */                                     \
    X(DBIAS)      /* dq: GPU_DBIAS_DIRECT or none */                                               \
    X(EMPTY_ROWS) /* rows may see no key */                                                        \
    X(SCRUB)      /* keys may be hidden from every row, by pairs: what they hold must not count */ \
    X(PARTS)      /* dkv: 1: a block takes a part of a group of heads, and leaves sums in float32 */

/* What a plan holds for them (contract/family.h). */
#define HOPPER_BACKWARD_2PASS_PARAMETERS(X) \
    X(V_STAGES)                             \
    X(P_STAGES)                             \
    X(PARTS)   /* of a group of heads */    \
    X(IN_TURN) /* heads, or parts of groups, whose blocks are interleaved */

#define HOPPER_BACKWARD_2PASS_DQ_ROWS 128 /* query rows of a block of the first kernel */
#define HOPPER_BACKWARD_2PASS_KEYS    64  /* keys of its step, and of a block of the second, whose steps have 64 rows */
#define HOPPER_BACKWARD_2PASS_STAGES  2   /* of K in the first, of Q and dO in the second */
#define HOPPER_BACKWARD_2PASS_THREADS 384
#define HOPPER_BACKWARD_2PASS_MASK    64 /* rows and keys of a tile of the block mask */

/* Registers of a thread of the warpgroup that loads, and of the two others. */
#define HOPPER_BACKWARD_2PASS_PRODUCER_REGISTERS 24
#define HOPPER_BACKWARD_2PASS_CONSUMER_REGISTERS 240

#define HOPPER_BACKWARD_2PASS_CONTROL_BYTES 256
GPU_INLINE int32_t hopper_backward_2pass_row_bytes(int32_t head_dim) { return (head_dim + 63) / 64 * 128; }
/* The 1024 bytes are for alignment: the swizzle of TMA counts addresses. What is asked: see hopper_backward.h. */
GPU_INLINE int32_t hopper_backward_2pass_dq_bytes(int32_t head_dim, int32_t head_dim_v, int32_t v_stages,
                                                  struct hopper_score_inputs inputs) {
    return hopper_backward_2pass_row_bytes(head_dim) *
               (HOPPER_BACKWARD_2PASS_DQ_ROWS + HOPPER_BACKWARD_2PASS_STAGES * HOPPER_BACKWARD_2PASS_KEYS) +
           hopper_backward_2pass_row_bytes(head_dim_v) *
               (HOPPER_BACKWARD_2PASS_DQ_ROWS + v_stages * HOPPER_BACKWARD_2PASS_KEYS) +
           (inputs.keyed || inputs.mask_rows || inputs.ranges ? 3 * HOPPER_BACKWARD_TILES_MAX / 8 : 0) +
           HOPPER_BACKWARD_2PASS_CONTROL_BYTES + 1024;
}
/* A tile of mask is of 128 keys, those of the block and of the one beside it. */
GPU_INLINE int32_t hopper_backward_2pass_dkv_bytes(int32_t head_dim, int32_t head_dim_v, int32_t p_stages,
                                                   struct hopper_score_inputs inputs) {
    return (hopper_backward_2pass_row_bytes(head_dim) + hopper_backward_2pass_row_bytes(head_dim_v)) *
               HOPPER_BACKWARD_2PASS_KEYS * (1 + HOPPER_BACKWARD_2PASS_STAGES) +
           p_stages * HOPPER_BACKWARD_2PASS_KEYS * HOPPER_BACKWARD_2PASS_KEYS * 4 +
           HOPPER_BACKWARD_2PASS_STAGES * HOPPER_BACKWARD_2PASS_KEYS * 8 +
           hopper_score_input_bytes(inputs, HOPPER_BACKWARD_2PASS_STAGES, HOPPER_BACKWARD_2PASS_KEYS) +
           (inputs.mask_rows ? HOPPER_BACKWARD_2PASS_KEYS * 64 : 0) + HOPPER_BACKWARD_2PASS_CONTROL_BYTES +
           hopper_backward_spare_bytes(inputs);
}

#endif
