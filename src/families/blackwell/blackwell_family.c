/* blackwell_family.c: kernels for compute capabilities 10.0 and 10.3, by tcgen05 and TMA, in order of preference. */
#include "families/blackwell/blackwell_family.h"

#include "families/families.h"

static const struct gpu_algorithm *const algorithms[] = {&blackwell_forward_algorithm, &blackwell_backward_algorithm};
static const struct gpu_list list = {.arch_min = 100, .arch_max = 103, .algorithms = algorithms};

const struct family family_blackwell = {
    .name = "blackwell", .num_kernels = sizeof algorithms / sizeof algorithms[0], .list = &list, GPU_FAMILY_ENTRIES};

const char *blackwell_refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    if (device->compute_minor != 0 && device->compute_minor != 3)
        return "it is compiled for compute capabilities 10.0 and 10.3";
    if (device->nvrtc_version > 0 && device->nvrtc_version < (device->compute_minor ? 12090 : 12080))
        return device->compute_minor ? "the NVRTC that was found is older than 12.9, the first that knows sm_103a"
                                     : "the NVRTC that was found is older than 12.8, the first that knows sm_100a";
    const char *clause = gpu_shape_refusal(p, 0, 256, text, size);
    if (clause)
        return clause;
    if (!p->q_mappable || !p->keys_mappable)
        return "TMA needs strides above 0 and below 2^40 bytes";
    if (gpu_loads_nothing(p))
        return "there is nothing to load";
    return NULL;
}
