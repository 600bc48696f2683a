/* instructions.h: what the kernels that try each wrapper of src/cuda/ptx are given; for C and CUDA C. */
#ifndef FDM_INSTRUCTIONS_H
#define FDM_INSTRUCTIONS_H

#include "cuda/tensor_map.h"
#ifdef __CUDACC__
#    include "cuda/ptx/types.cuh"
#else
#    include <stdint.h>
#endif

#define INSTRUCTION_THREADS 128
#define INSTRUCTION_IN      12800 /* words of operands */
#define INSTRUCTION_OUT     128   /* words of results of each thread */
#define INSTRUCTION_SHARED  (96 << 10)

/* The constant INSTRUCTION of instructions_portable.cu, from TRY_CLUSTER on of instructions_hopper.cu, and from
 * TRY_PRODUCT on of instructions_blackwell.cu. */
#define TRY_LDMATRIX_X4        0
#define TRY_LDMATRIX_X4_TRANS  1
#define TRY_LDMATRIX_X2        2
#define TRY_LDMATRIX_X2_TRANS  3
#define TRY_MMA_BF16           4
#define TRY_MMA_F16            5
#define TRY_MMA_F16_F16        6
#define TRY_MMA_TF32           7
#define TRY_APPROXIMATE        8
#define TRY_CONVERSIONS        9
#define TRY_SHARED             10
#define TRY_CP_ASYNC           11
#define TRY_BARRIERS           12
#define TRY_MBARRIERS          13
#define TRY_GLOBAL             14
#define TRY_CONTROL            15
#define TRY_OPAQUE             16
#define TRY_CLUSTER            20
#define TRY_TILE               21
#define TRY_TILE_4D            22
#define TRY_MULTICAST          23
#define TRY_BULK               24
#define TRY_WGMMA_SHARED       25
#define TRY_WGMMA_SHARED_T     26
#define TRY_WGMMA_REGISTERS    27
#define TRY_WGMMA_REGISTERS_T  28
#define TRY_RED_ADD_4          29
#define TRY_STMATRIX           30
#define TRY_STMATRIX_TRANS     31
#define TRY_BULK_ADD           32
#define TRY_WGMMA_BOTH_T       33
#define TRY_TILE_STORE         34
#define TRY_PRODUCT            40
#define TRY_PACKED             41
#define TRY_PAIR               42
#define TRY_PAIR_4D            43
#define TRY_CLUSTERS           44
#define TRY_CLUSTERS_MULTICAST 45
/* and of the products: WGMMA_N columns, WGMMA_F16; of TRY_PRODUCT what tile_product.cuh asks for, PRODUCT_F16 */

struct instruction_arguments {
    struct cuda_tensor_map map;
    const uint32_t *in;
    uint32_t *out;  /* [block][thread][INSTRUCTION_OUT], zeros */
    float *sums;    /* zeros */
    int32_t *flags; /* zeros */
    int32_t at[4];  /* where the tile begins */
    int32_t tile_bytes;
};

#endif
