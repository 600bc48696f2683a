/* mma_family.h: the algorithms of the mma family. */
#ifndef FDM_MMA_FAMILY_H
#define FDM_MMA_FAMILY_H

#include "gpu/gpu_family.h"

extern const struct gpu_algorithm mma_decode_algorithm;
extern const struct gpu_algorithm mma_forward_algorithm;
extern const struct gpu_algorithm mma_forward32_algorithm;
extern const struct gpu_algorithm mma_forward_d1024_algorithm;
extern const struct gpu_algorithm mma_backward_algorithm;
extern const struct gpu_algorithm mma_backward_d1024_algorithm;
extern const struct gpu_algorithm mma_backward32_algorithm;
/* mma_textbook.c */
extern const struct gpu_algorithm mma_split_kv_algorithm, mma_split_q_algorithm, mma_share_kv_algorithm,
    mma_share_qkv_algorithm, mma_tiling_qk_algorithm, mma_tiling_qkv_algorithm;

#endif
