/* merge.c: combines two partial results over disjoint sets of keys, on the CPU; gpu/merge_on_device.c on CUDA
 * devices. */
#include <math.h>

#include "base/error.h"
#include "base/half.h"
#include "gpu/merge_on_device.h"
#include "problem/tensor.h"

struct merge {
    const fdm_tensor *out1, *lse1, *out2, *lse2;
    fdm_tensor *out, *lse;
    fdm_dtype dtype, lse_dtype;
};

/* ---- checks ---- */

static fdm_status check_one(const fdm_tensor *tensor, const char *name, int32_t ndim, enum tensor_role role,
                            fdm_dtype dtype, const int64_t *shape, const fdm_tensor *out1) {
    return tensor_check_as(tensor, name, ndim, role, dtype, shape, out1, "out1");
}

static fdm_status check_all(struct merge *m) {
    if (!m->out1)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "out1 is NULL");
    fdm_status status = tensor_check(m->out1, "out1", 4, TENSOR_INPUT, 0);
    if (status)
        return status;
    m->dtype = fdm_dtype_of(m->out1);
    if (m->dtype != FDM_FLOAT32 && m->dtype != FDM_FLOAT16 && m->dtype != FDM_BFLOAT16 && m->dtype != FDM_FLOAT64)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "out1 is %s; it must be float32, float16, bfloat16 or float64",
                         fdm_dtype_name(m->dtype));
    if ((status = tensor_check_device_type(m->out1, "out1")))
        return status;
    m->lse_dtype = m->dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32;
    const int64_t *shape = m->out1->shape, rows[3] = {shape[0], shape[2], shape[1]};
    if ((status = check_one(m->out1, "out1", 4, TENSOR_INPUT, m->dtype, shape, m->out1)) ||
        (status = check_one(m->lse1, "lse1", 3, TENSOR_INPUT, m->lse_dtype, rows, m->out1)) ||
        (status = check_one(m->out2, "out2", 4, TENSOR_INPUT, m->dtype, shape, m->out1)) ||
        (status = check_one(m->lse2, "lse2", 3, TENSOR_INPUT, m->lse_dtype, rows, m->out1)) ||
        (status = check_one(m->out, "out", 4, TENSOR_OUTPUT, m->dtype, shape, m->out1)) ||
        (status = check_one(m->lse, "lse", 3, TENSOR_OUTPUT, m->lse_dtype, rows, m->out1)))
        return status;
    return FDM_OK;
}

/* ---- one row ---- */

/* The address of element [b, i, j, 0], or [b, i, j] of a tensor of three axes. */
static char *element(const fdm_tensor *tensor, int64_t b, int64_t i, int64_t j) {
    int64_t offset = b * tensor_stride(tensor, 0) + i * tensor_stride(tensor, 1) + j * tensor_stride(tensor, 2);
    return tensor_data(tensor) + offset * fdm_dtype_bytes(fdm_dtype_of(tensor));
}

static double load(const char *p, fdm_dtype dtype) {
    switch (dtype) {
    case FDM_FLOAT32: return *(const float *)(const void *)p;
    case FDM_FLOAT16: return float16_to_float(*(const uint16_t *)(const void *)p);
    case FDM_BFLOAT16: return bfloat16_to_float(*(const uint16_t *)(const void *)p);
    default: return *(const double *)(const void *)p;
    }
}

static void store(char *p, double value, fdm_dtype dtype) {
    switch (dtype) {
    case FDM_FLOAT32: *(float *)(void *)p = (float)value; break;
    case FDM_FLOAT16: *(uint16_t *)(void *)p = float_to_float16((float)value); break;
    case FDM_BFLOAT16: *(uint16_t *)(void *)p = float_to_bfloat16((float)value); break;
    default: *(double *)(void *)p = value; break;
    }
}

/* The shares of both parts in the sum of exponentials, and its logarithm; a part without keys has share 0. */
static double shares(double lse1, double lse2, double *share1, double *share2) {
    int empty1 = isinf(lse1), empty2 = isinf(lse2);
    *share1 = empty1 ? 0 : 1;
    *share2 = empty2 ? 0 : 1;
    if (empty1 || empty2)
        return !empty1 ? lse1 : !empty2 ? lse2 : (double)INFINITY;
    double max = fmax(lse1, lse2), e1 = exp(lse1 - max), e2 = exp(lse2 - max);
    *share1 = e1 / (e1 + e2);
    *share2 = e2 / (e1 + e2);
    return max + log(e1 + e2);
}

static void merge_row(const struct merge *m, int64_t b, int64_t i, int64_t h) {
    double share1, share2;
    double lse = shares(load(element(m->lse1, b, h, i), m->lse_dtype), load(element(m->lse2, b, h, i), m->lse_dtype),
                        &share1, &share2);
    const char *in1 = element(m->out1, b, i, h), *in2 = element(m->out2, b, i, h);
    char *out = element(m->out, b, i, h);
    int64_t bytes = fdm_dtype_bytes(m->dtype);
    int64_t step1 = tensor_stride(m->out1, 3) * bytes, step2 = tensor_stride(m->out2, 3) * bytes;
    int64_t step = tensor_stride(m->out, 3) * bytes;
    for (int64_t d = 0; d < m->out->shape[3]; d++) {
        /* What a part without keys holds does not count, not even NaN. */
        double part1 = share1 == 0 ? 0 : share1 * load(in1 + d * step1, m->dtype);
        double part2 = share2 == 0 ? 0 : share2 * load(in2 + d * step2, m->dtype);
        store(out + d * step, part1 + part2, m->dtype);
    }
    store(element(m->lse, b, h, i), lse, m->lse_dtype);
}

fdm_status fdm_merge(const fdm_tensor *out1, const fdm_tensor *lse1, const fdm_tensor *out2, const fdm_tensor *lse2,
                     fdm_tensor *out, fdm_tensor *lse, void *stream) {
    struct merge m = {.out1 = out1, .lse1 = lse1, .out2 = out2, .lse2 = lse2, .out = out, .lse = lse};
    fdm_status status = check_all(&m);
    if (status)
        return status;
    if (out->device.type == FDM_CUDA)
        return merge_on_device(out1, lse1, out2, lse2, out, lse, stream);
    for (int64_t b = 0; b < out->shape[0]; b++)
        for (int64_t i = 0; i < out->shape[1]; i++)
            for (int64_t h = 0; h < out->shape[2]; h++)
                merge_row(&m, b, i, h);
    return FDM_OK;
}
