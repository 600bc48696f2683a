/* mma_family.c: the portable CUDA family: its algorithms in order of preference. */
#include "families/mma/mma_family.h"

#include "families/families.h"

static const struct gpu_algorithm *const algorithms[] = {
    &mma_decode_algorithm,    &mma_forward_d1024_algorithm,  &mma_forward_algorithm,    &mma_forward32_algorithm,
    &mma_backward_algorithm,  &mma_backward_d1024_algorithm, &mma_backward32_algorithm, &mma_split_kv_algorithm,
    &mma_split_q_algorithm,   &mma_share_kv_algorithm,       &mma_share_qkv_algorithm,  &mma_tiling_qk_algorithm,
    &mma_tiling_qkv_algorithm};
static const struct gpu_list list = {.arch_min = 80, .algorithms = algorithms};

const struct family family_mma = {
    .name = "mma", .num_kernels = sizeof algorithms / sizeof algorithms[0], .list = &list, GPU_FAMILY_ENTRIES};
