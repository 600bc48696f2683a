/* hopper_latent.h: the contract of hopper_latent.cu; for C and CUDA C. */
#ifndef FDM_HOPPER_LATENT_H
#define FDM_HOPPER_LATENT_H

#include "cuda/constants.h"
#include "cuda/tensor_map.h"
#include "gpu/forward_params.h"
#include "gpu/problem_constants.h"

#define HOPPER_LATENT_CONSTANTS(X)                                                         \
    X(HEAD_DIM)  /* D, a multiple of 64 */                                                 \
    X(VALUE_DIM) /* Dv, the first columns of K: 64 fewer */                                \
    X(BLOCK_N)   /* keys of a step */                                                      \
    X(PAGE_BOX)  /* of them those of a box of TMA, which lies in one page: 16, 32 or 64 */ \
    X(SPLITS)    /* 1: the keys are split over blocks, and leave parts for gpu/combine_splits.cu */

/* What a plan holds for it (contract/family.h). */
#define HOPPER_LATENT_PARAMETERS(X) X(NUM_SPLITS) /* of the keys; 1: none */

struct hopper_latent_params {
    struct gpu_forward_params in;
    struct cuda_tensor_map k_map;     /* [pages, heads, rows of a page, D], or [B, heads, Sk, D]: 64 columns a box */
    int32_t row_blocks, reserved[15]; /* of the rows of a KV head */
};

#define HOPPER_LATENT_BLOCK_M 64
#define HOPPER_LATENT_STAGES  2
#define HOPPER_LATENT_THREADS 384
/* Of a thread of the producer's warpgroup, and of the two others. */
#define HOPPER_LATENT_PRODUCER_REGISTERS 40
#define HOPPER_LATENT_CONSUMER_REGISTERS 232

/* Barriers, the item, the pages that are there, maxima and sums. The further 1024 bytes are for alignment: the swizzle
 * of TMA counts addresses. */
#define HOPPER_LATENT_CONTROL_BYTES 1280
GPU_INLINE int32_t hopper_latent_shared_bytes(int32_t head_dim, int32_t block_n) {
    return 2 * head_dim * (HOPPER_LATENT_BLOCK_M + HOPPER_LATENT_STAGES * block_n) +
           2 * HOPPER_LATENT_BLOCK_M * block_n + HOPPER_LATENT_CONTROL_BYTES + 1024;
}

#endif
