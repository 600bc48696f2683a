/* key_bias.c: fdm_key_bias() and fdm_key_bias_backward(): their arguments are checked here; key_bias_on_cpu.c and
 * key_bias_on_device.c compute. */
#include "base/error.h"
#include "masks/key_bias/key_bias_on_device.h"
#include "problem/tensor.h"

/* Well formed, on dt's device, floating, and of this shape. */
static fdm_status check(const fdm_tensor *t, const char *name, int32_t ndim, enum tensor_role role,
                        const int64_t *shape, const fdm_tensor *dt) {
    if (!t)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", name);
    fdm_status status = tensor_check(t, name, ndim, role, 0);
    if (status)
        return status;
    const fdm_dtype dtype = fdm_dtype_of(t);
    if (dtype != FDM_FLOAT64 && dtype != FDM_FLOAT32 && dtype != FDM_FLOAT16 && dtype != FDM_BFLOAT16)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is %s; it must be floating", name, fdm_dtype_name(dtype));
    if (dtype == FDM_FLOAT64 && t->device.type == FDM_CUDA)
        return error_set(FDM_ERROR_UNSUPPORTED, "%s is float64; CUDA devices take float32, float16 and bfloat16", name);
    return shape ? tensor_check_as(t, name, ndim, role, dtype, shape, dt, "dt") : tensor_check_device_type(t, name);
}

static struct key_bias_tensor tensor_of(const fdm_tensor *t, int batch, int key, int head) {
    return (struct key_bias_tensor){tensor_data(t),         tensor_stride(t, batch),  tensor_stride(t, key),
                                    tensor_stride(t, head), (int32_t)fdm_dtype_of(t), 0};
}

static struct key_bias_tensor of_heads(const fdm_tensor *t) {
    return (struct key_bias_tensor){tensor_data(t), 0, 0, tensor_stride(t, 0), (int32_t)fdm_dtype_of(t), 0};
}

/* What forward and backward have in common; bias: of either, by its name. */
static fdm_status fill(const fdm_tensor *dt, const fdm_tensor *a, const fdm_tensor *padding, int32_t exponential,
                       const fdm_tensor *bias, const char *bias_name, enum tensor_role role,
                       struct key_bias_call *call) {
    fdm_status status = check(dt, "dt", 3, TENSOR_INPUT, NULL, dt);
    if (status)
        return status;
    for (int32_t i = 0; i < 3; i++)
        if (dt->shape[i] > INT32_MAX)
            return error_set(FDM_ERROR_INVALID_ARGUMENT, "dt has extent %lld on axis %d; at most 2^31 - 1 is taken",
                             (long long)dt->shape[i], i);
    const int64_t shape[3] = {dt->shape[0], dt->shape[2], dt->shape[1]};
    if ((status = check(a, "a", 1, TENSOR_INPUT, &shape[1], dt)) ||
        (status = check(bias, bias_name, 3, role, shape, dt)))
        return status;
    if (padding && (status = tensor_check_as(padding, "padding", 2, TENSOR_INPUT, FDM_BOOL, dt->shape, dt, "dt")))
        return status;
    *call = (struct key_bias_call){.dt = tensor_of(dt, 0, 1, 2),
                                   .a = of_heads(a),
                                   .bias = tensor_of(bias, 0, 2, 1),
                                   .padding = padding ? (const uint8_t *)tensor_data(padding) : NULL,
                                   .padding_batch = padding ? tensor_stride(padding, 0) : 0,
                                   .padding_key = padding ? tensor_stride(padding, 1) : 0,
                                   .batch = (int32_t)shape[0],
                                   .heads = (int32_t)shape[1],
                                   .num_keys = (int32_t)shape[2],
                                   .exponential = exponential != 0};
    return FDM_OK;
}

fdm_status fdm_key_bias(const fdm_tensor *dt, const fdm_tensor *a, const fdm_tensor *padding, int32_t exponential,
                        fdm_tensor *bias, void *stream) {
    struct key_bias_call call;
    fdm_status status = fill(dt, a, padding, exponential, bias, "bias", TENSOR_OUTPUT, &call);
    const struct named_tensor all[] = {
        {"dt", dt, 0, 0}, {"a", a, 0, 0}, {"padding", padding, 0, 0}, {"bias", bias, 1, 0}};
    if (status || (status = tensors_check_apart(all, 4)))
        return status;
    if (dt->device.type == FDM_CUDA)
        return key_bias_on_device(0, &call, dt->device.index, stream);
    key_bias_on_cpu(&call);
    return FDM_OK;
}

fdm_status fdm_key_bias_backward(const fdm_tensor *dt, const fdm_tensor *a, const fdm_tensor *padding,
                                 int32_t exponential, const fdm_tensor *dbias, fdm_tensor *ddt, fdm_tensor *da,
                                 void *stream) {
    struct key_bias_call call;
    fdm_status status = fill(dt, a, padding, exponential, dbias, "dbias", TENSOR_INPUT, &call);
    const struct named_tensor all[] = {{"dt", dt, 0, 0},       {"a", a, 0, 0},     {"padding", padding, 0, 0},
                                       {"dbias", dbias, 0, 0}, {"ddt", ddt, 1, 0}, {"da", da, 1, 0}};
    if (status || (ddt && (status = check(ddt, "ddt", 3, TENSOR_OUTPUT, dt->shape, dt))) ||
        (da && (status = check(da, "da", 1, TENSOR_OUTPUT, a->shape, dt))) || (status = tensors_check_apart(all, 6)))
        return status;
    call.ddt = ddt ? tensor_of(ddt, 0, 1, 2) : (struct key_bias_tensor){0};
    call.da = da ? of_heads(da) : (struct key_bias_tensor){0};
    if (dt->device.type == FDM_CUDA)
        return key_bias_on_device(1, &call, dt->device.index, stream);
    key_bias_backward_on_cpu(&call);
    return FDM_OK;
}
