/* launch.c: enqueues a kernel on the caller's stream. */
#include "base/error.h"
#include "cuda/cuda.h"
#include "cuda/driver.h"
#include "cuda/loaded_kernels.h"

/* Why a launch failed. A plan may have been made for another device. A stream of a context that the caller made is no
 * stream of the primary one, in which kernels are loaded; the driver says only that some handle is invalid. */
static fdm_status refuse(const struct cuda_driver *driver, const struct cuda_launch *launch, cu_result result) {
    struct cuda_context_scope scope;
    cu_context of_stream = NULL, primary = NULL;
    cu_result asked = 1;
    fdm_device facts;
    if ((launch->cluster > 1 || launch->programmatic_launch) && !cuda_device_facts(launch->kernel->device, &facts) &&
        facts.compute_major < 9)
        return error_set(FDM_ERROR_UNSUPPORTED,
                         "the launch has clusters or begins early, for compute capability 9.0 and above; the CUDA "
                         "device has %d.%d",
                         facts.compute_major, facts.compute_minor);
    if (result != CU_ERROR_INVALID_HANDLE && result != CU_ERROR_INVALID_CONTEXT)
        return cuda_driver_error(driver, result, "launching a kernel");
    if (launch->stream && !cuda_context_enter_relaxed(driver, launch->kernel->device, &scope)) {
        asked = driver->stream_context(launch->stream, &of_stream);
        asked = asked ? asked : driver->context_current(&primary);
        cuda_context_leave(driver, &scope);
    }
    if (!asked && of_stream != primary)
        return error_set(
            FDM_ERROR_INVALID_ARGUMENT,
            "the stream belongs to another context than the primary one of CUDA device %d; make it on that "
            "device, in its primary context",
            launch->kernel->device);
    return cuda_driver_error(driver, result, "launching a kernel");
}

fdm_status cuda_launch(const struct cuda_launch *launch) {
    const struct cuda_driver *driver;
    struct cuda_context_scope scope;
    const struct cuda_kernel *kernel = launch->kernel;
    fdm_status status = cuda_driver_get(&driver);
    if (status || (status = cuda_context_enter(driver, kernel->device, &scope)))
        return status;
    struct cu_launch_attribute attributes[3];
    struct cu_launch_config config = {.grid = {launch->grid[0], launch->grid[1], launch->grid[2]},
                                      .block = {launch->threads, 1, 1},
                                      .shared_bytes = (unsigned)kernel->shared_bytes,
                                      .stream = launch->stream,
                                      .attributes = attributes};
    if (launch->cluster > 1) {
        struct cu_launch_attribute *a = &attributes[config.num_attributes++];
        *a = (struct cu_launch_attribute){.id = CU_LAUNCH_CLUSTER_DIMENSION};
        a->value.cluster.x = launch->cluster;
        a->value.cluster.y = a->value.cluster.z = 1;
    }
    if (launch->programmatic_launch) {
        struct cu_launch_attribute *a = &attributes[config.num_attributes++];
        *a = (struct cu_launch_attribute){.id = CU_LAUNCH_PROGRAMMATIC_SERIALIZATION};
        a->value.programmatic_serialization = 1;
    }
    if (launch->cooperative) {
        struct cu_launch_attribute *a = &attributes[config.num_attributes++];
        *a = (struct cu_launch_attribute){.id = CU_LAUNCH_COOPERATIVE};
        a->value.cooperative = 1;
    }
    void *arguments[1] = {(void *)(uintptr_t)launch->arguments};
    cu_result result = driver->launch(&config, kernel->function, arguments, NULL);
    cuda_context_leave(driver, &scope);
    return result ? refuse(driver, launch, result) : FDM_OK;
}

fdm_status cuda_run(int32_t device, const struct cuda_kernel_request *request, uint32_t blocks, const void *arguments,
                    size_t arguments_bytes, void *stream) {
    const struct cuda_kernel *kernel;
    fdm_status status = cuda_kernels_get(device, request, 1, &kernel);
    if (status)
        return status;
    const struct cuda_launch launch = {.kernel = kernel,
                                       .grid = {blocks, 1, 1},
                                       .threads = (uint32_t)request->threads,
                                       .stream = stream,
                                       .arguments = arguments,
                                       .arguments_bytes = arguments_bytes};
    return cuda_launch(&launch);
}
