/* hopper_family.c: kernels for compute capability 9.0, by wgmma and TMA, in order of preference. */
#include "families/hopper/hopper_family.h"

static const struct gpu_algorithm *const algorithms[] = {&hopper_forward_algorithm};
static const struct gpu_list list = {.arch_min = 90, .arch_max = 90, .algorithms = algorithms};

const struct family family_hopper = {.name = "hopper",
                                     .device_type = FDM_CUDA,
                                     .num_kernels = sizeof algorithms / sizeof algorithms[0],
                                     .list = &list,
                                     .kernel = gpu_family_kernel,
                                     .available = gpu_family_available,
                                     .chosen_freely = gpu_family_chosen_freely,
                                     .choose = gpu_family_choose,
                                     .variant = gpu_family_variant,
                                     .prepare = gpu_family_prepare,
                                     .launches = gpu_family_launches,
                                     .execute = gpu_family_execute};
