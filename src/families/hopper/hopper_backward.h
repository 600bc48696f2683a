/* hopper_backward.h: the contract of hopper_backward.cu: its constants, parameters and shared memory; for C and CUDA C.
 */
#ifndef FDM_HOPPER_BACKWARD_H
#define FDM_HOPPER_BACKWARD_H

#include "cuda/tensor_map.h"
#include "gpu/backward_params.h"

/* The constants that specialise the kernel, in the order of the cache's listing. */
#define HOPPER_BACKWARD_CONSTANTS(X)                                                                                  \
    X(DTYPE)        /* GPU_FLOAT16 or GPU_BFLOAT16 */                                                                 \
    X(HEAD_DIM)     /* D rounded up to 32 */                                                                          \
    X(HEAD_DIM_V)   /* Dv rounded up to 32 */                                                                         \
    X(WARPGROUPS)   /* that own 64 keys each; one more loads, and makes dQ */                                         \
    X(STAGES)       /* tiles of Q in flight */                                                                        \
    X(DOUT_STAGES)  /* of dO: as many, or one less */                                                                 \
    X(DS_STAGES)    /* tiles of dS in shared memory */                                                                \
    X(DS_REGISTERS) /* 1: dK takes dS from registers; 0: from shared memory, so that it is made under dV's product */ \
    X(WINDOW)       /* causal or window */                                                                            \
    X(MASK)         /* a mask of each key */                                                                          \
    X(INTERVALS)                                                                                                      \
    X(GATHER)     /* keys in the order that key_sort.cu gives them */                                                 \
    X(EMPTY_ROWS) /* rows may see no key */                                                                           \
    X(PARTS)      /* 1: a block takes a part of a group of heads, and leaves sums of dK and dV in float32 */          \
    X(DQ)         /* HOPPER_DQ_* */

/* What a plan holds for it (families/family.h). */
#define HOPPER_BACKWARD_PARAMETERS(X)                 \
    X(TILE)    /* of the list in hopper_backward.c */ \
    X(PARTS)   /* of a group of heads */              \
    X(IN_TURN) /* heads_in_turn */                    \
    X(DQ)      /* HOPPER_DQ_* */

/* DQ: how dQ is made. */
#define HOPPER_DQ_NONE    0
#define HOPPER_DQ_ADDED   1 /* blocks add to sums that were zeroed before and are rounded after by other kernels */
#define HOPPER_DQ_ROUNDED 2 /* the first block of rows begins the sums and the last rounds them (hopper_dq.cuh) */
#define HOPPER_DQ_TURNS   3 /* the same, and blocks add in a fixed order */

struct hopper_backward_params {
    struct gpu_backward_params in;
    struct cuda_tensor_map q_map, k_map, v_map, dout_map; /* [B, heads, S, D or Dv]: tiles of 64 columns */
    int32_t key_blocks;                                   /* of a KV head */
    int32_t heads_in_turn; /* KV heads, or parts of groups, whose key blocks take turns */
};

/* Registers of a thread of the warpgroup that loads and makes dQ, and of the others: they fill the register file. */
#define HOPPER_BACKWARD_SERVICE_REGISTERS(warpgroups) ((warpgroups) == 3 ? 80 : 88)
#define HOPPER_BACKWARD_KEY_REGISTERS(warpgroups)     ((warpgroups) == 3 ? 144 : 208)

/* Where something says key by key which rows see it: of each key the first row, the row past the last, and its number;
 * and a bit for each of so many tiles of query rows that some key of the block is seen by. */
#define HOPPER_BACKWARD_KEY_WORDS 3
#define HOPPER_BACKWARD_TILES_MAX 2048

/* Barriers, at the end. */
#define HOPPER_BACKWARD_CONTROL_BYTES 128
/* The 1024 bytes are for alignment: the swizzle of TMA counts addresses. */
static inline
#ifdef __CUDACC__
    __host__ __device__ constexpr
#endif
    int32_t
    hopper_backward_shared_bytes(int32_t warpgroups, int32_t stages, int32_t dout_stages, int32_t ds_stages,
                                 int32_t head_dim, int32_t head_dim_v, int32_t keyed) {
    const int32_t block_m = 64, block_n = 64 * warpgroups, d = 128 * ((head_dim + 63) / 64),
                  dv = 128 * ((head_dim_v + 63) / 64);
    return block_n * (d + (d > dv ? d : dv)) + block_m * (stages * (d + 8) + dout_stages * dv) +
           ds_stages * block_m * block_n * 2 + block_m * head_dim * 4 +
           (keyed ? 4 * HOPPER_BACKWARD_KEY_WORDS * block_n + HOPPER_BACKWARD_TILES_MAX / 8 : 0) +
           HOPPER_BACKWARD_CONTROL_BYTES + 1024;
}

#endif
