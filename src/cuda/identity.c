/* identity.c: what choices that were measured depend on besides a device's facts: product, driver, kernels' sources. */
#include <pthread.h>
#include <stdio.h>

#include "cuda/cache.h"
#include "cuda/cuda.h"
#include "cuda/driver.h"
#include "cuda/sources.h"

/* Asked once a device. */
static fdm_status ask_name(const struct cuda_driver *driver, int32_t index, char *name, int size) {
    cu_device device;
    struct cuda_capture_scope capture;
    const fdm_status status = cuda_capture_relax(driver, &capture);
    if (status)
        return status;
    cu_result result = driver->device_get(&device, index);
    if (!result)
        result = driver->device_name(name, size, device);
    cuda_capture_restore(driver, &capture);
    return result ? cuda_driver_error(driver, result, "asking for a device's name") : FDM_OK;
}

fdm_status cuda_device_product(int32_t index, char *name, size_t size, int32_t *driver_version) {
    enum { NAME_BYTES = 64 };
    static char names[CUDA_DEVICES_MAX][NAME_BYTES];
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    const struct cuda_driver *driver;
    fdm_device facts; /* whose query says what is wrong with an index */
    fdm_status status = cuda_driver_get(&driver);
    if (status || (status = cuda_device_facts(index, &facts)))
        return status;
    pthread_mutex_lock(&lock);
    if (!*names[index])
        status = ask_name(driver, index, names[index], NAME_BYTES);
    snprintf(name, size, "%s", names[index]);
    pthread_mutex_unlock(&lock);
    *driver_version = driver->version;
    return status;
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
