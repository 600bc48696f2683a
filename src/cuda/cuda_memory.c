/* cuda_memory.c: device memory, copies, and events. */
#include <stdio.h>

#include "base/error.h"
#include "base/memory.h"
#include "cuda/cuda.h"
#include "cuda/driver.h"

/* Runs one driver call in the device's context; `call` is an expression of type cu_result that may use `driver`. */
#define IN_CONTEXT(device, what, call)                                               \
    do {                                                                             \
        const struct cuda_driver *driver;                                            \
        struct cuda_context_scope scope;                                             \
        fdm_status status = cuda_driver_get(&driver);                                \
        if (status || (status = cuda_context_enter_relaxed(driver, device, &scope))) \
            return status;                                                           \
        cu_result result = call;                                                     \
        cuda_context_leave(driver, &scope);                                          \
        return result ? cuda_driver_error(driver, result, what) : FDM_OK;            \
    } while (0)

static cu_address address_of(const void *memory) { return (cu_address)(uintptr_t)memory; }

fdm_status cuda_memory_allocate(int32_t device, size_t bytes, void **memory) {
    cu_address address = 0;
    char what[64];
    const struct cuda_driver *driver;
    struct cuda_context_scope scope;
    fdm_status status = cuda_driver_get(&driver);
    if (status || (status = cuda_context_enter_relaxed(driver, device, &scope)))
        return status;
    cu_result result = driver->memory_allocate(&address, bytes ? bytes : 1);
    cuda_context_leave(driver, &scope);
    if (result) {
        snprintf(what, sizeof what, "allocating %zu bytes of device memory", bytes);
        return cuda_driver_error(driver, result, what);
    }
    *memory = (void *)(uintptr_t)address;
    return FDM_OK;
}

fdm_status cuda_memory_release(int32_t device, void *memory) {
    if (!memory)
        return FDM_OK;
    IN_CONTEXT(device, "releasing device memory", driver->memory_free(address_of(memory)));
}

/* The driver's copies wait for the legacy default stream and those that follow it, not for others, and may return
 * before the device has the bytes (CUDA Driver API, "API synchronization behavior"). */
static cu_result copy(const struct cuda_driver *driver, void *to, const void *from, size_t bytes, int32_t direction) {
    cu_result result = driver->context_synchronize();
    if (!result)
        result = direction == 0   ? driver->copy_to_device(address_of(to), from, bytes)
                 : direction == 1 ? driver->copy_to_host(to, address_of(from), bytes)
                                  : driver->copy_on_device(address_of(to), address_of(from), bytes);
    return result || direction == 1 ? result : driver->context_synchronize();
}

static cu_result fill(const struct cuda_driver *driver, void *memory, uint8_t value, size_t bytes) {
    cu_result result = driver->context_synchronize();
    if (!result)
        result = driver->memory_fill(address_of(memory), value, bytes);
    return result ? result : driver->context_synchronize();
}

fdm_status cuda_memory_copy(int32_t device, void *to, const void *from, size_t bytes, int32_t direction) {
    if (bytes == 0)
        return FDM_OK;
    IN_CONTEXT(device, "copying device memory", copy(driver, to, from, bytes, direction));
}

fdm_status cuda_memory_fill(int32_t device, void *memory, uint8_t value, size_t bytes) {
    if (bytes == 0)
        return FDM_OK;
    IN_CONTEXT(device, "filling device memory", fill(driver, memory, value, bytes));
}

/* Enqueued, as a kernel is: a stream that is captured takes it as part of the graph. */
fdm_status cuda_memory_fill_async(int32_t device, void *memory, uint8_t value, size_t bytes, void *stream) {
    const struct cuda_driver *driver;
    struct cuda_context_scope scope;
    fdm_status status = cuda_driver_get(&driver);
    if (status || (status = cuda_context_enter(driver, device, &scope)))
        return status;
    const cu_result result = driver->memory_fill_async(address_of(memory), value, bytes, (cu_stream)stream);
    cuda_context_leave(driver, &scope);
    return result ? cuda_driver_error(driver, result, "filling device memory") : FDM_OK;
}

fdm_status cuda_synchronize(int32_t device) {
    IN_CONTEXT(device, "waiting for the CUDA device", driver->context_synchronize());
}

/* ---- events ---- */

struct cuda_event {
    int32_t device;
    cu_event event;
};

fdm_status cuda_stream_done(int32_t device, void *stream, int32_t *done) {
    const struct cuda_driver *driver;
    struct cuda_context_scope scope;
    fdm_status status = cuda_driver_get(&driver);
    *done = 0;
    if (status || (status = cuda_context_enter_relaxed(driver, device, &scope)))
        return status;
    const cu_result result = driver->stream_query(stream);
    cuda_context_leave(driver, &scope);
    *done = result == 0;
    return result && result != CU_ERROR_NOT_READY ? cuda_driver_error(driver, result, "asking a CUDA stream") : FDM_OK;
}

fdm_status cuda_event_create(int32_t device, struct cuda_event **event) {
    const struct cuda_driver *driver;
    struct cuda_context_scope scope;
    *event = NULL;
    fdm_status status = cuda_driver_get(&driver);
    if (status || (status = cuda_context_enter_relaxed(driver, device, &scope)))
        return status;
    struct cuda_event *made = memory_allocate(sizeof *made);
    cu_result result = 0;
    if (!made) {
        status = error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for an event");
    } else if ((result = driver->event_create(&made->event, 0))) {
        status = cuda_driver_error(driver, result, "making a CUDA event");
        memory_release(made);
    } else {
        made->device = device;
        *event = made;
    }
    cuda_context_leave(driver, &scope);
    return status;
}

/* Enqueued, so that a stream that is captured takes it as part of the graph. */
fdm_status cuda_event_record(struct cuda_event *event, void *stream) {
    const struct cuda_driver *driver;
    struct cuda_context_scope scope;
    fdm_status status = cuda_driver_get(&driver);
    if (status || (status = cuda_context_enter(driver, event->device, &scope)))
        return status;
    const cu_result result = driver->event_record(event->event, stream);
    cuda_context_leave(driver, &scope);
    return result ? cuda_driver_error(driver, result, "recording a CUDA event") : FDM_OK;
}

fdm_status cuda_event_elapsed(struct cuda_event *from, struct cuda_event *to, double *seconds) {
    const struct cuda_driver *driver;
    struct cuda_context_scope scope;
    float milliseconds = 0;
    fdm_status status = cuda_driver_get(&driver);
    if (status || (status = cuda_context_enter_relaxed(driver, to->device, &scope)))
        return status;
    cu_result result = driver->event_synchronize(to->event);
    if (!result)
        result = driver->event_elapsed(&milliseconds, from->event, to->event);
    cuda_context_leave(driver, &scope);
    if (result)
        return cuda_driver_error(driver, result, "waiting for a CUDA event");
    *seconds = milliseconds * 1e-3;
    return FDM_OK;
}

void cuda_event_release(struct cuda_event *event) {
    const struct cuda_driver *driver;
    struct cuda_context_scope scope;
    if (!event)
        return;
    if (!cuda_driver_get(&driver)) {
        const fdm_status outside = cuda_context_enter_relaxed(driver, event->device, &scope);
        driver->event_destroy(event->event); /* outside too: it knows its context */
        if (!outside)
            cuda_context_leave(driver, &scope);
    }
    memory_release(event);
}
