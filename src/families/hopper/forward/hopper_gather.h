/* hopper_gather.h: the contract of hopper_gather.cu: its constants, parameters and shared memory; for C and CUDA C. */
#ifndef FDM_HOPPER_GATHER_H
#define FDM_HOPPER_GATHER_H

#include "families/hopper/forward/hopper_forward.h" /* orders of items, panels */

/* The constants that specialise the kernel, in the order of the cache's listing. */
#define HOPPER_GATHER_CONSTANTS(X)                                                             \
    HOPPER_FORWARD_TILE_CONSTANTS(X)                                                           \
    X(LOOK) /* keys that the producers test in a step */                                       \
    X(CONSUMER_REGISTERS)                                                                      \
    X(PING_PONG) /* 1: one warpgroup issues products at a time, the others make P meanwhile */ \
    X(SCHEDULER) /* ITEMS_* */

/* What a plan holds for it (contract/family.h). */
#define HOPPER_GATHER_PARAMETERS(X)              \
    X(TILE) /* of the list in hopper_gather.c */ \
    X(SCHEDULER)                                 \
    X(NUM_SMS) /* blocks of a grid whose order is not static */

struct hopper_gather_params {
    struct gpu_forward_params in;
    struct cuda_tensor_map q_map; /* [B, heads, S, D]: tiles of 64 columns */
    int32_t *items_begun;         /* ITEMS_DYNAMIC: 0 when the kernel begins */
    int32_t row_blocks, items;    /* of a head; of all heads */
    int32_t picks, reserved;      /* 1: only heads whose keys lie scattered, by the plan */
    struct tile_plan plan;
};

/* Registers of a producer's thread: what the consumers leave of the 65536 that a multiprocessor gives to its threads in
 * eights. */
#define HOPPER_GATHER_PRODUCER_REGISTERS(warpgroups, consumer_registers) \
    (((warpgroups) == 3 ? 512 : 504) - (warpgroups) * (consumer_registers))
/* Entries of each of the two lists of visible keys: a list holds less than two tiles before LOOK more keys. */
#define HOPPER_GATHER_LIST(look) (2 * (look))

/* Barriers and work items, at the end. */
#define HOPPER_GATHER_CONTROL_BYTES 512
/* Lists: two of key numbers, the rows that see those of one of them, both with biases; of a tile its numbers; of each
 * stage its rows and biases. The 1024 bytes are for alignment: the swizzle of TMA counts addresses. */
GPU_INLINE int32_t hopper_gather_shared_bytes(int32_t warpgroups, int32_t block_n, int32_t stages, int32_t q_stages,
                                              int32_t look, int32_t head_dim, int32_t head_dim_v, int32_t has_bias) {
    const int32_t d = HOPPER_PANELS(head_dim, 2), dv = HOPPER_PANELS(head_dim_v, 2), block_m = 64 * warpgroups;
    return 128 * (q_stages * block_m * (d > dv ? d : dv) + stages * block_n * (d + dv)) +
           4 * HOPPER_GATHER_LIST(look) * (has_bias ? 5 : 3) + 4 * block_n * (1 + stages * (has_bias ? 2 : 1)) +
           HOPPER_GATHER_CONTROL_BYTES + 1024;
}

#endif
