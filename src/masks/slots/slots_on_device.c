/* slots_on_device.c: the launches of topk_append.cu and topk_fill.cu. */
#include "masks/slots/slots_on_device.h"

#include "base/error.h"
#include "cuda/request_constants.h"
#include "gpu/features.h"
#include "masks/slots/slot_threads.h"

/* A thread a few slots, so that it reads them all in one go where 1024 threads are enough for that. */
static int32_t append_threads(int32_t window) {
    int32_t threads = APPEND_THREADS_MIN;
    while (threads < APPEND_THREADS_MAX && threads * APPEND_SLOTS < window)
        threads *= 2;
    return threads;
}

void topk_slots_request(int fill, fdm_dtype dtype, int32_t window, struct cuda_kernel_request *request) {
    *request = (struct cuda_kernel_request){.file = fill ? "masks/slots/topk_fill.cu" : "masks/slots/topk_append.cu",
                                            .entry = fill ? "topk_fill" : "topk_append",
                                            .threads = fill ? FILL_THREADS : append_threads(window)};
    GPU_SET_CONSTANTS(request, SLOT_CONSTANTS, .DTYPE = gpu_dtype(dtype), .THREADS = request->threads);
}

fdm_status topk_slots_on_device(int fill, const struct slot_call *call, int32_t device, void *stream) {
    struct cuda_kernel_request request;
    const int64_t rows = (int64_t)call->batch * call->heads;
    if (rows > INT32_MAX)
        return error_set(FDM_ERROR_UNSUPPORTED, "bias has %lld heads; fewer than 2^31 are taken", (long long)rows);
    if (rows == 0)
        return FDM_OK;
    topk_slots_request(fill, (fdm_dtype)call->dtype, call->window, &request);
    return cuda_run(device, &request, (uint32_t)rows, call, sizeof *call, stream);
}
