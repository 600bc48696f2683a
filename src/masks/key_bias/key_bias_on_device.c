/* key_bias_on_device.c: the launches of key_bias.cu. */
#include "masks/key_bias/key_bias_on_device.h"

#include "base/error.h"
#include "cuda/request_constants.h"
#include "gpu/features.h"
#include "masks/key_bias/key_bias_threads.h"

void key_bias_request(int backward, int32_t parts, struct cuda_kernel_request *request) {
    *request = (struct cuda_kernel_request){.file = "masks/key_bias/key_bias.cu",
                                            .entry = backward ? "key_bias_backward" : "key_bias",
                                            .threads = 32 * (backward ? KEY_BIAS_BACKWARD_WARPS : KEY_BIAS_WARPS)};
    GPU_SET_CONSTANTS(request, KEY_BIAS_CONSTANTS, .PARTS = parts);
}

int32_t key_bias_parts(int backward, int32_t compute_major) {
    return backward && (compute_major == 9 || compute_major == 10) ? KEY_BIAS_PARTS : 1;
}

fdm_status key_bias_on_device(int backward, const struct key_bias_call *call, int32_t device, void *stream) {
    struct cuda_kernel_request request;
    const struct cuda_kernel *kernel;
    fdm_device facts;
    struct key_bias_call c = *call;
    const int64_t groups = (int64_t)c.batch * gpu_ceil_div(c.num_keys, 32), items = groups * c.heads;
    if (c.heads == 0 || (items == 0 && !backward))
        return FDM_OK;
    if (groups > INT32_MAX / 32 || items > INT32_MAX || c.heads > INT32_MAX / KEY_BIAS_PARTS)
        return error_set(FDM_ERROR_UNSUPPORTED,
                         "dt has %d batches of %d keys and %d heads; CUDA devices take fewer than 2^31 keys of all "
                         "batches, and numbers for 2^31 groups of 32 keys of a head",
                         c.batch, c.num_keys, c.heads);
    struct key_bias_tensor *const tensors[] = {&c.dt, &c.a, &c.bias, &c.ddt, &c.da};
    for (int i = 0; i < 5; i++)
        tensors[i]->dtype = gpu_dtype((fdm_dtype)tensors[i]->dtype);
    fdm_status status = cuda_device_facts(device, &facts);
    if (status)
        return status;
    const int32_t parts = key_bias_parts(backward, facts.compute_major);
    key_bias_request(backward, parts, &request);
    if ((status = cuda_kernels_get(device, &request, 1, &kernel)))
        return status;
    const int64_t blocks = backward ? (int64_t)c.heads * parts : gpu_ceil_div(items, KEY_BIAS_WARPS);
    const struct cuda_launch launch = {.kernel = kernel,
                                       .grid = {(uint32_t)blocks, 1, 1},
                                       .threads = (uint32_t)request.threads,
                                       .cluster = (uint32_t)parts,
                                       .stream = stream,
                                       .arguments = &c,
                                       .arguments_bytes = sizeof c};
    return cuda_launch(&launch);
}
