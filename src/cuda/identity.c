/* identity.c: what choices that were measured depend on besides a device's facts: product, driver, kernels' sources. */
#include <string.h>

#include "cuda/cache.h"
#include "cuda/cuda.h"
#include "cuda/driver.h"
#include "cuda/sources.h"

fdm_status cuda_device_product(int32_t index, char *name, size_t size, int32_t *driver_version) {
    const struct cuda_driver *driver;
    fdm_device facts; /* whose query says what is wrong with an index */
    cu_device device;
    struct cuda_capture_scope capture;
    fdm_status status = cuda_driver_get(&driver);
    if (status || (status = cuda_device_facts(index, &facts)) || (status = cuda_capture_relax(driver, &capture)))
        return status;
    cu_result result = driver->device_get(&device, index);
    if (!result)
        result = driver->device_name(name, (int)size, device);
    cuda_capture_restore(driver, &capture);
    *driver_version = driver->version;
    return result ? cuda_driver_error(driver, result, "asking for a device's name") : FDM_OK;
}

uint64_t cuda_sources_hash(void) {
    uint64_t hash = 0;
    for (int32_t i = 0; i < cuda_num_sources; i++)
        hash = cache_checksum(hash, cuda_sources[i].closure, sizeof cuda_sources[i].closure);
    return hash;
}

int cuda_is_capturing(int32_t device, void *stream) {
    const struct cuda_driver *driver;
    struct cuda_context_scope scope;
    int status = 0;
    if (cuda_driver_get(&driver) || cuda_context_enter_relaxed(driver, device, &scope))
        return 1;
    const cu_result result = driver->stream_capturing(stream, &status);
    cuda_context_leave(driver, &scope);
    return result != 0 || status != 0;
}
