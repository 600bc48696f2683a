/* merge.c: combines two partial results over disjoint sets of keys, on the CPU; gpu/merge_on_device.c on CUDA
 * devices. */
#include <math.h>

#include "base/error.h"
#include "base/half.h"
#include "base/struct_bytes.h"
#include "gpu/merge_on_device.h"
#include "problem/tensor.h"

struct merge {
    const fdm_merge_tensors *tensors;
    fdm_dtype dtype, lse_dtype;
};

/* ---- checks ---- */

enum { OUT1, LSE1, LSE_LOW1, OUT2, LSE2, LSE_LOW2, OUT, LSE, LSE_LOW, NUM_TENSORS };

/* Shapes, dtypes and devices beside out1, which is well formed. */
static fdm_status check_each(struct merge *m, const struct named_tensor all[NUM_TENSORS]) {
    const fdm_tensor *out1 = m->tensors->out1;
    const int64_t *shape = out1->shape, rows[3] = {shape[0], shape[2], shape[1]};
    for (int32_t i = 0; i < NUM_TENSORS; i++) {
        const int of_rows = i % 3 != OUT1, may_be_absent = i % 3 == LSE_LOW1;
        if (may_be_absent && !all[i].tensor)
            continue;
        const fdm_status status =
            tensor_check_as(all[i].tensor, all[i].name, of_rows ? 3 : 4, all[i].written ? TENSOR_OUTPUT : TENSOR_INPUT,
                            of_rows ? m->lse_dtype : m->dtype, of_rows ? rows : shape, out1, "out1");
        if (status)
            return status;
    }
    return FDM_OK;
}

static fdm_status check_all(struct merge *m) {
    const fdm_merge_tensors *t = m->tensors;
    if (!t->out1)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "out1 is NULL");
    fdm_status status = tensor_check(t->out1, "out1", 4, TENSOR_INPUT, 0);
    if (status)
        return status;
    m->dtype = fdm_dtype_of(t->out1);
    if (m->dtype != FDM_FLOAT32 && m->dtype != FDM_FLOAT16 && m->dtype != FDM_BFLOAT16 && m->dtype != FDM_FLOAT64)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "out1 is %s; it must be float32, float16, bfloat16 or float64",
                         fdm_dtype_name(m->dtype));
    if ((status = tensor_check_device_type(t->out1, "out1")))
        return status;
    m->lse_dtype = m->dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32;
    const struct named_tensor all[NUM_TENSORS] = {
        [OUT1] = {"out1", t->out1, 0, 0},
        [LSE1] = {"lse1", t->lse1, 0, 0},
        [LSE_LOW1] = {"lse_low1", t->lse_low1, 0, 0},
        [OUT2] = {"out2", t->out2, 0, 0},
        [LSE2] = {"lse2", t->lse2, 0, 0},
        [LSE_LOW2] = {"lse_low2", t->lse_low2, 0, 0},
        [OUT] = {"out", t->out, 1, 1u << OUT1 | 1u << OUT2},
        [LSE] = {"lse", t->lse, 1, 1u << LSE1 | 1u << LSE2},
        [LSE_LOW] = {"lse_low", t->lse_low, 1, 1u << LSE_LOW1 | 1u << LSE_LOW2},
    };
    status = check_each(m, all);
    return status ? status : tensors_check_apart(all, NUM_TENSORS);
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

/* Of a tensor of rows, 0 where there is none. */
static double load_row(const struct merge *m, const fdm_tensor *rows, int64_t b, int64_t h, int64_t i) {
    return rows ? load(element(rows, b, h, i), m->lse_dtype) : 0;
}

/* A logarithm in two numbers, the second of which is small beside the first. */
struct logarithm {
    double high, low;
};

/* high + low, rounded to lse's dtype, and what that rounds away; both may be as large. */
static struct logarithm rounded(double high, double low, fdm_dtype dtype) {
    const double sum = dtype == FDM_FLOAT32 ? (double)(float)(high + low) : high + low;
    if (isinf(sum))
        return (struct logarithm){sum, 0};
    const double of_low = sum - high; /* Knuth 1969, 4.2.2, theorem B */
    return (struct logarithm){sum, (high - (sum - of_low)) + (low - of_low)};
}

/* A part of a row: the logarithm of its sum of exponentials, and its share in both. */
struct part {
    struct logarithm lse;
    double share;
    int is_empty; /* infinite: without keys, and without a share */
};

/* Fills in the shares; returns the logarithm of the sum. NaN in a part with keys makes both shares NaN, and the sum. */
static struct logarithm combine(struct part *one, struct part *two, fdm_dtype dtype) {
    one->is_empty = isinf(one->lse.high), two->is_empty = isinf(two->lse.high);
    one->share = two->share = 0;
    if (one->is_empty && two->is_empty)
        return (struct logarithm){INFINITY, 0};
    double difference = 0, less = 0; /* of the smaller part's sum to the larger's */
    if (!one->is_empty && !two->is_empty) {
        /* Numbers of one size first: what cancels there is exact, and the low ones are not lost beside them. */
        difference = (one->lse.high - two->lse.high) + (one->lse.low - two->lse.low);
        less = exp(-fabs(difference));
    }
    const int first =
        !one->is_empty && (two->is_empty || difference > 0 || (!(difference < 0) && one->lse.high >= two->lse.high));
    struct part *more = first ? one : two;
    const double is_nan = 0 * (more->lse.high + more->lse.low);
    more->share = 1 / (1 + less) + is_nan;
    (first ? two : one)->share = less / (1 + less) + is_nan;
    return rounded(more->lse.high, more->lse.low + log1p(less), dtype);
}

static void merge_row(const struct merge *m, int64_t b, int64_t i, int64_t h) {
    const fdm_merge_tensors *t = m->tensors;
    struct part one = {.lse = {load_row(m, t->lse1, b, h, i), load_row(m, t->lse_low1, b, h, i)}};
    struct part two = {.lse = {load_row(m, t->lse2, b, h, i), load_row(m, t->lse_low2, b, h, i)}};
    const struct logarithm lse = combine(&one, &two, m->lse_dtype);
    const char *in1 = element(t->out1, b, i, h), *in2 = element(t->out2, b, i, h);
    char *out = element(t->out, b, i, h);
    const int64_t bytes = fdm_dtype_bytes(m->dtype), step = tensor_stride(t->out, 3) * bytes;
    const int64_t step1 = tensor_stride(t->out1, 3) * bytes, step2 = tensor_stride(t->out2, 3) * bytes;
    for (int64_t d = 0; d < t->out->shape[3]; d++) {
        /* What a part without keys holds does not count, not even NaN; that of one with keys does, however small. */
        const double part1 = one.is_empty ? 0 : one.share * load(in1 + d * step1, m->dtype);
        const double part2 = two.is_empty ? 0 : two.share * load(in2 + d * step2, m->dtype);
        store(out + d * step, part1 + part2, m->dtype);
    }
    store(element(t->lse, b, h, i), lse.high, m->lse_dtype);
    if (t->lse_low)
        store(element(t->lse_low, b, h, i), lse.low, m->lse_dtype);
}

fdm_status fdm_merge(const fdm_merge_tensors *tensors, void *stream) {
    fdm_merge_tensors room;
    if (!(tensors = STRUCT_READ(fdm_merge_tensors, tensors, &room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    struct merge m = {.tensors = tensors};
    const fdm_status status = check_all(&m);
    if (status)
        return status;
    const fdm_tensor *out = tensors->out;
    if (out->device.type == FDM_CUDA)
        return merge_on_device(tensors, stream);
    for (int64_t b = 0; b < out->shape[0]; b++)
        for (int64_t i = 0; i < out->shape[1]; i++)
            for (int64_t h = 0; h < out->shape[2]; h++)
                merge_row(&m, b, i, h);
    return FDM_OK;
}
