/* mma_summary.h: the contract of mma_summary.cu. */
#ifndef FDM_MMA_SUMMARY_H
#define FDM_MMA_SUMMARY_H

#include "families/mma/mma_arguments.h"

#define MMA_SUMMARY_WARPS 4

struct mma_summary_arguments {
    struct mma_scores mask;
    uint8_t *summary; /* [mask batch, mask heads, row blocks, num_tiles] */
    int32_t seqlen_q, seqlen_k, num_heads, num_tiles, block_m, block_n;
    int32_t aligned; /* keys are contiguous, rows start at multiples of 16 bytes, block_n is a multiple of 16 */
    int32_t reserved;
};

#endif
