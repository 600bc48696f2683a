/* hopper_family.c: kernels for compute capability 9.0, by wgmma and TMA, in order of preference. */
#include "families/hopper/hopper_family.h"

#include "families/families.h"

static const struct gpu_algorithm *const algorithms[] = {&hopper_latent_algorithm, &hopper_forward_algorithm,
                                                         &hopper_gather_algorithm, &hopper_backward_algorithm,
                                                         &hopper_backward_2pass_algorithm};
static const struct gpu_list list = {.arch_min = 90, .arch_max = 90, .algorithms = algorithms};

const struct family family_hopper = {
    .name = "hopper", .num_kernels = sizeof algorithms / sizeof algorithms[0], .list = &list, GPU_FAMILY_ENTRIES};
