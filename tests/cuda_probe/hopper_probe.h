/* hopper_probe.h: the contract of hopper_probe.cu: its constants, arguments and shared memory; for C and CUDA C. */
#ifndef FDM_HOPPER_PROBE_H
#define FDM_HOPPER_PROBE_H

#include "cuda/tensor_map.h"
#ifdef __CUDACC__
#    include "cuda/ptx/types.cuh"
#else
#    include <stdint.h>
#endif

/* The constants of hopper_probe:
 *   B_TRANSPOSED    0: b is [batch][n][k]; 1: [batch][k][n]
 *   A_IN_REGISTERS  1: a goes through registers, past the swizzle by hand
 *   WAITS           1: waits for the kernel before it; 0: does not, to see that it may begin early */
#define HOPPER_PROBE_BLOCK_M    128 /* two warpgroups of 64 rows */
#define HOPPER_PROBE_BLOCK_N    128
#define HOPPER_PROBE_BLOCK_K    64 /* 128 bytes: one row of the swizzle */
#define HOPPER_PROBE_STAGES     7
#define HOPPER_PROBE_CLUSTER    2
#define HOPPER_PROBE_THREADS    384
#define HOPPER_PROBE_TILE_BYTES (HOPPER_PROBE_BLOCK_M * HOPPER_PROBE_BLOCK_K * 2) /* of a, and as many of b */
/* All that a block of 9.0 can have, most of it used. */
#define HOPPER_PROBE_SHARED_BYTES (227 << 10)

/* Of the kernel before it: how long it holds back its writes. */
#define HOPPER_PROBE_DELAY_CLOCKS 100000

struct hopper_probe_operands {
    uint16_t *a, *b; /* bfloat16; a is [m][batch][k] */
    int64_t a_elements, b_elements;
};
struct hopper_probe_arguments {
    struct cuda_tensor_map a, b;
    float *c; /* [batch][m][n] */
    int32_t m, n, k, reserved;
};

/* Elements are eighths from -1 to 7/8, so that sums of 2^17 products are exact in float32, in any order. */
static inline
#ifdef __CUDACC__
    __device__
#endif
        int32_t
        hopper_probe_eighths(uint32_t index, uint32_t tensor) {
    uint32_t hash = (index * 2654435761u) ^ (tensor * 0x9e3779b9u);
    hash = (hash ^ hash >> 15) * 0x85ebca6bu;
    return (int32_t)(hash >> 28) - 8;
}

#endif
