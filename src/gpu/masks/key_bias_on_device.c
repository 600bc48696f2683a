/* key_bias_on_device.c: the launches of key_bias.cu. */
#include "gpu/masks/key_bias_on_device.h"

#include "base/error.h"
#include "gpu/features.h"
#include "gpu/masks/key_bias_threads.h"

void key_bias_request(int backward, struct cuda_kernel_request *request) {
    *request = (struct cuda_kernel_request){.file = "gpu/masks/key_bias.cu",
                                            .entry = backward ? "key_bias_backward" : "key_bias",
                                            .threads = backward ? KEY_BIAS_BACKWARD_THREADS : 32 * KEY_BIAS_WARPS};
}

fdm_status key_bias_on_device(int backward, const struct key_bias_call *call, int32_t device, void *stream) {
    struct cuda_kernel_request request;
    struct key_bias_call c = *call;
    const int64_t groups = (int64_t)c.batch * gpu_ceil_div(c.num_keys, 32), items = groups * c.heads;
    if (c.heads == 0 || (items == 0 && !backward))
        return FDM_OK;
    if (groups > INT32_MAX / 32 || items > INT32_MAX)
        return error_set(FDM_ERROR_UNSUPPORTED,
                         "dt has %d batches of %d keys and %d heads; CUDA devices take fewer than 2^31 keys of all "
                         "batches, and numbers for 2^31 groups of 32 keys of a head",
                         c.batch, c.num_keys, c.heads);
    struct key_bias_tensor *const tensors[] = {&c.dt, &c.a, &c.bias, &c.ddt, &c.da};
    for (int i = 0; i < 5; i++)
        tensors[i]->dtype = gpu_dtype((fdm_dtype)tensors[i]->dtype);
    key_bias_request(backward, &request);
    const int64_t blocks = backward ? c.heads : gpu_ceil_div(items, KEY_BIAS_WARPS);
    return cuda_run(device, &request, (uint32_t)blocks, &c, sizeof c, stream);
}
