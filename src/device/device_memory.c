/* device_memory.c: memory, copies and a stopwatch for callers without a CUDA toolkit; the host's own for FDM_CPU. */
#include <string.h>
#include <time.h>

#include "base/error.h"
#include "base/memory.h"
#include "cuda/cuda.h"

static fdm_status check_device(fdm_device_id device) {
    if (device.type != FDM_CPU && device.type != FDM_CUDA)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "device type is %d; it must be FDM_CPU (1) or FDM_CUDA (2)",
                         device.type);
    if (device.type == FDM_CPU && device.index != 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "CPU index is %d; there is one CPU device, index 0", device.index);
    return FDM_OK;
}

fdm_status fdm_memory_allocate(fdm_device_id device, size_t bytes, void **memory) {
    if (!memory)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "memory is NULL");
    fdm_status status = check_device(device);
    if (status || device.type == FDM_CUDA)
        return status ? status : cuda_memory_allocate(device.index, bytes, memory);
    void *made = memory_allocate(bytes);
    if (!made)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for %zu bytes", bytes);
    *memory = made;
    return FDM_OK;
}

fdm_status fdm_memory_release(fdm_device_id device, void *memory) {
    fdm_status status = check_device(device);
    if (status || device.type == FDM_CUDA)
        return status ? status : cuda_memory_release(device.index, memory);
    memory_release(memory);
    return FDM_OK;
}

fdm_status fdm_memory_copy(void *to, fdm_device_id to_device, const void *from, fdm_device_id from_device,
                           size_t bytes) {
    fdm_status status = check_device(to_device);
    if (status || (status = check_device(from_device)))
        return status;
    if (bytes > 0 && (!to || !from))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", to ? "from" : "to");
    int to_cuda = to_device.type == FDM_CUDA, from_cuda = from_device.type == FDM_CUDA;
    if (to_cuda && from_cuda && to_device.index != from_device.index)
        return error_set(FDM_ERROR_UNSUPPORTED, "copies between CUDA devices %d and %d are not offered",
                         from_device.index, to_device.index);
    if (to_cuda || from_cuda)
        return cuda_memory_copy(to_cuda ? to_device.index : from_device.index, to, from, bytes,
                                !from_cuda ? 0
                                : to_cuda  ? 2
                                           : 1);
    if (bytes > 0)
        memmove(to, from, bytes);
    return FDM_OK;
}

fdm_status fdm_memory_fill(fdm_device_id device, void *memory, uint8_t value, size_t bytes) {
    fdm_status status = check_device(device);
    if (!status && bytes > 0 && !memory)
        status = error_set(FDM_ERROR_INVALID_ARGUMENT, "memory is NULL");
    if (status || device.type == FDM_CUDA)
        return status ? status : cuda_memory_fill(device.index, memory, value, bytes);
    if (bytes > 0)
        memset(memory, value, bytes);
    return FDM_OK;
}

fdm_status fdm_synchronize(fdm_device_id device) {
    fdm_status status = check_device(device);
    return status || device.type == FDM_CPU ? status : cuda_synchronize(device.index);
}

/* ---- the stopwatch ---- */

struct fdm_timer {
    fdm_device_id device;
    struct cuda_event *from, *to; /* CUDA */
    struct timespec start;        /* CPU */
    int started;
};

fdm_status fdm_timer_create(fdm_device_id device, fdm_timer **timer) {
    if (!timer)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "timer is NULL");
    fdm_status status = check_device(device);
    if (status)
        return status;
    fdm_timer *made = memory_allocate(sizeof *made);
    if (!made)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for a timer");
    *made = (fdm_timer){.device = device};
    if (device.type == FDM_CUDA && ((status = cuda_event_create(device.index, &made->from)) ||
                                    (status = cuda_event_create(device.index, &made->to)))) {
        fdm_timer_release(made);
        return status;
    }
    *timer = made;
    return FDM_OK;
}

fdm_status fdm_timer_start(fdm_timer *timer, void *stream) {
    if (!timer)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "timer is NULL");
    fdm_status status = FDM_OK;
    if (timer->device.type == FDM_CUDA)
        status = cuda_event_record(timer->from, stream);
    else
        clock_gettime(CLOCK_MONOTONIC, &timer->start);
    timer->started = !status;
    return status;
}

fdm_status fdm_timer_stop(fdm_timer *timer, void *stream, double *seconds) {
    if (!timer || !seconds)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", timer ? "seconds" : "timer");
    if (!timer->started)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "the timer was not started; call fdm_timer_start() first");
    if (timer->device.type == FDM_CUDA) {
        fdm_status status = cuda_event_record(timer->to, stream);
        return status ? status : cuda_event_elapsed(timer->from, timer->to, seconds);
    }
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *seconds = (double)(now.tv_sec - timer->start.tv_sec) + 1e-9 * (double)(now.tv_nsec - timer->start.tv_nsec);
    return FDM_OK;
}

void fdm_timer_release(fdm_timer *timer) {
    if (!timer)
        return;
    cuda_event_release(timer->from);
    cuda_event_release(timer->to);
    memory_release(timer);
}
