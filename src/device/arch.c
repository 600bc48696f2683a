/* arch.c: what a CUDA architecture offers, from its compute capability. */
#include "base/error.h"
#include "base/struct_bytes.h"

static int32_t at_least(const fdm_device *device, int32_t major, int32_t minor) {
    return device->id.type == FDM_CUDA &&
           (device->compute_major > major || (device->compute_major == major && device->compute_minor >= minor));
}

int32_t fdm_supports_sm89_features(const fdm_device *device) {
    fdm_device room;
    return (device = STRUCT_READ(fdm_device, device, &room)) && at_least(device, 8, 9);
}
int32_t fdm_supports_sm90_features(const fdm_device *device) {
    fdm_device room;
    return (device = STRUCT_READ(fdm_device, device, &room)) && at_least(device, 9, 0);
}

fdm_status fdm_arch_optimization_config(const fdm_device *device, fdm_arch_config *config) {
    enum { HIGH_BYTES = 176 << 10, MEDIUM_BYTES = 144 << 10 };
    fdm_device room;
    if (!(device = STRUCT_READ(fdm_device, device, &room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    if (device->id.type != FDM_CUDA)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "device is '%s'; it must be a CUDA device", device->name);
    if (!at_least(device, 8, 0))
        return error_set(FDM_ERROR_UNSUPPORTED, "device has compute capability %d.%d; it must be at least 8.0",
                         device->compute_major, device->compute_minor);
    const fdm_arch_config offers = {.tier = device->shared_bytes >= HIGH_BYTES     ? FDM_MEMORY_HIGH
                                            : device->shared_bytes >= MEDIUM_BYTES ? FDM_MEMORY_MEDIUM
                                                                                   : FDM_MEMORY_LOW,
                                    .async_copy = 1,
                                    .float8 = at_least(device, 8, 9),
                                    .bulk_copy = at_least(device, 9, 0),
                                    .warpgroup_mma = device->compute_major == 9,
                                    .tensor_memory = device->compute_major == 10,
                                    .shared_bytes = device->shared_bytes};
    return STRUCT_WRITE(fdm_arch_config, config, &offers);
}
