/* run.c: one attention call of the tool. */
#include "run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "half.h"

const char *const run_tensor_names[RUN_TENSORS] = {
    "q",    "k",    "v",  "mask", "bias", "interval_start", "interval_end", "out", "lse",
    "dout", "dlse", "dq", "dk",   "dv",   "dbias"};

fdm_tensors run_view(struct run *run, fdm_pass pass) {
    fdm_tensor *view[RUN_TENSORS];
    for (int i = 0; i < RUN_TENSORS; i++) {
        struct file_tensor *t = &run->tensors[i];
        run->views[i] = (fdm_tensor){t->data, {FDM_CPU, 0}, t->ndim, fdm_data_type_of(t->dtype), t->shape, NULL, 0};
        view[i] = t->data ? &run->views[i] : NULL;
    }
    fdm_tensors t = {.q = view[RUN_Q],
                     .k = view[RUN_K],
                     .v = view[RUN_V],
                     .mask = view[RUN_MASK],
                     .bias = view[RUN_BIAS],
                     .interval_start = view[RUN_START],
                     .interval_end = view[RUN_END],
                     .out = view[RUN_OUT],
                     .lse = view[RUN_LSE]};
    if (pass == FDM_BACKWARD) {
        t.dout = view[RUN_DOUT];
        t.dlse = view[RUN_DLSE];
        t.dq = view[RUN_DQ];
        t.dk = view[RUN_DK];
        t.dv = view[RUN_DV];
        t.dbias = view[RUN_DBIAS];
    }
    return t;
}

static void make_tensor(struct file_tensor *tensor, const char *name, fdm_dtype dtype, int32_t ndim,
                        const int64_t *shape) {
    *tensor = (struct file_tensor){.dtype = dtype, .ndim = ndim};
    snprintf(tensor->name, sizeof tensor->name, "%s", name);
    memcpy(tensor->shape, shape, (size_t)ndim * sizeof *shape);
    tensor->bytes = (size_t)(file_tensor_elements(tensor) * fdm_dtype_bytes(dtype));
    tensor->data = allocate_or_exit(tensor->bytes);
    memset(tensor->data, 0xff, tensor->bytes);
}

static void make_like(struct run *run, enum run_tensor which, enum run_tensor like) {
    const struct file_tensor *t = &run->tensors[like];
    if (t->data)
        make_tensor(&run->tensors[which], run_tensor_names[which], t->dtype, t->ndim, t->shape);
}

void run_allocate_outputs(struct run *run, int backward) {
    const struct file_tensor *q = &run->tensors[RUN_Q], *v = &run->tensors[RUN_V];
    const int64_t out[4] = {q->shape[0], q->shape[1], q->shape[2], v->shape[3]};
    const int64_t lse[3] = {q->shape[0], q->shape[2], q->shape[1]};
    make_tensor(&run->tensors[RUN_OUT], "out", q->dtype, 4, out);
    make_tensor(&run->tensors[RUN_LSE], "lse", q->dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32, 3, lse);
    if (!backward)
        return;
    if (!run->tensors[RUN_DOUT].data)
        run_make_normal(&run->tensors[RUN_DOUT], "dout", q->dtype, 4, out, 4);
    make_like(run, RUN_DQ, RUN_Q);
    make_like(run, RUN_DK, RUN_K);
    make_like(run, RUN_DV, RUN_V);
    make_like(run, RUN_DBIAS, RUN_BIAS);
}

static double load(const void *data, int64_t i, fdm_dtype dtype) {
    switch (dtype) {
    case FDM_FLOAT64: return ((const double *)data)[i];
    case FDM_FLOAT16: return float16_to_float(((const uint16_t *)data)[i]);
    case FDM_BFLOAT16: return bfloat16_to_float(((const uint16_t *)data)[i]);
    default: return ((const float *)data)[i];
    }
}

static void store(void *data, int64_t i, fdm_dtype dtype, double value) {
    switch (dtype) {
    case FDM_FLOAT64: ((double *)data)[i] = value; break;
    case FDM_FLOAT16: ((uint16_t *)data)[i] = float_to_float16((float)value); break;
    case FDM_BFLOAT16: ((uint16_t *)data)[i] = float_to_bfloat16((float)value); break;
    default: ((float *)data)[i] = (float)value;
    }
}

/* Sum of four uniform numbers of splitmix64: mean 0, variance 1, near enough to normal for timing and checking. */
void run_make_normal(struct file_tensor *tensor, const char *name, fdm_dtype dtype, int32_t ndim, const int64_t *shape,
                     uint64_t seed) {
    make_tensor(tensor, name, dtype, ndim, shape);
    int64_t elements = file_tensor_elements(tensor);
    for (int64_t i = 0; i < elements; i++) {
        uint64_t z = (seed << 40) + (uint64_t)i * 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        z ^= z >> 31;
        double sum = (double)(z & 0xffff) + (double)(z >> 16 & 0xffff) + (double)(z >> 32 & 0xffff) + (double)(z >> 48);
        store(tensor->data, i, dtype, (sum / 65535 - 2) * 1.7320508075688772);
    }
}

fdm_status run_make_topk(struct run *run, int64_t window) {
    struct file_tensor *bias = &run->tensors[RUN_BIAS];
    const int64_t shape[3] = {bias->shape[0], bias->shape[1], bias->shape[bias->ndim - 1]};
    make_tensor(&run->tensors[RUN_START], "interval_start", FDM_INT32, 3, shape);
    make_tensor(&run->tensors[RUN_END], "interval_end", FDM_INT32, 3, shape);
    run_view(run, FDM_FORWARD);
    return fdm_topk_intervals(&run->views[RUN_BIAS], NULL, window, run->tensors[RUN_Q].shape[1], &run->views[RUN_START],
                              &run->views[RUN_END], NULL, 0);
}

fdm_status run_timed(struct run *run, fdm_pass pass, int32_t iters, fdm_plan *plan, double *seconds) {
    fdm_device device;
    fdm_problem problem;
    fdm_tensors tensors = run_view(run, pass);
    fdm_status status = fdm_device_query(FDM_CPU, 0, &device);
    if (status || (status = fdm_describe(pass, &tensors, &run->options, &problem)) ||
        (status = fdm_plan_attention(&device, &problem, &run->options, plan)))
        return status;
    size_t bytes = (size_t)plan->workspace_bytes;
    void *workspace = allocate_or_exit(bytes);
    for (int32_t i = -1; i < iters && !status; i++) {
        double begin = seconds_now();
        status = fdm_execute(plan, &tensors, workspace, bytes, NULL);
        if (i >= 0)
            seconds[i] = seconds_now() - begin;
    }
    free(workspace);
    return status;
}

/* ---- comparison with float64 ---- */

static struct file_tensor as_float64(const struct file_tensor *tensor) {
    struct file_tensor wide;
    make_tensor(&wide, tensor->name, FDM_FLOAT64, tensor->ndim, tensor->shape);
    for (int64_t i = 0; i < file_tensor_elements(tensor); i++)
        store(wide.data, i, FDM_FLOAT64, load(tensor->data, i, tensor->dtype));
    return wide;
}

double run_tolerance(fdm_dtype dtype) {
    switch (dtype) {
    case FDM_FLOAT64: return 1e-12;
    case FDM_FLOAT32: return 1e-4;
    case FDM_FLOAT16: return 1e-2;
    default: return 5e-2;
    }
}

/* Infinite where one is NaN and the other is not: a NaN would be lost in the next comparison. */
static double difference_of(double value, double truth) {
    if (value == truth || (isnan(value) && isnan(truth)))
        return 0;
    double difference = fabs(value - truth);
    return isnan(difference) ? INFINITY : difference;
}

static double row_error(const struct file_tensor *have, const struct file_tensor *want, int64_t row, int64_t width,
                        double floor, struct run_error *error) {
    double worst = 0, largest = floor;
    for (int64_t i = row * width; i < (row + 1) * width; i++) {
        double truth = ((const double *)want->data)[i], value = load(have->data, i, have->dtype);
        double difference = difference_of(value, truth);
        worst = fmax(difference, worst);
        largest = isfinite(truth) && fabs(truth) > largest ? fabs(truth) : largest;
        error->rms += difference * difference;
    }
    error->max_abs = fmax(worst, error->max_abs);
    return largest > 0 ? worst / largest : worst;
}

static struct run_error compare(const struct file_tensor *have, const struct file_tensor *want, double tolerance) {
    struct run_error error = {.name = want->name};
    int64_t elements = file_tensor_elements(want), width = want->shape[want->ndim - 1];
    double square = 0;
    for (int64_t i = 0; i < elements; i++) {
        double value = ((const double *)want->data)[i];
        square += isfinite(value) ? value * value : 0;
    }
    double floor = elements ? sqrt(square / (double)elements) : 0;
    for (int64_t row = 0; width > 0 && row < elements / width; row++) {
        double relative = row_error(have, want, row, width, floor, &error);
        error.worst_row = fmax(relative, error.worst_row);
    }
    error.rms = elements ? sqrt(error.rms / (double)elements) : 0;
    error.failed = !(error.worst_row <= tolerance);
    return error;
}

static int run_reference(struct run *truth, int backward) {
    fdm_tensors tensors = run_view(truth, FDM_FORWARD);
    if (fdm_attention_forward(&tensors, &truth->options, NULL))
        return complain(0, "the float64 reference: %s", fdm_last_error());
    tensors = run_view(truth, FDM_BACKWARD);
    return !backward || !fdm_attention_backward(&tensors, &truth->options, NULL) ||
           complain(0, "the float64 reference: %s", fdm_last_error());
}

int32_t run_check(struct run *run, int backward, struct run_error *errors) {
    static const enum run_tensor outputs[] = {RUN_OUT, RUN_LSE, RUN_DQ, RUN_DK, RUN_DV, RUN_DBIAS};
    struct run truth = {.options = run->options};
    int32_t count = 0;
    truth.options.family = "reference";
    truth.options.kernel = NULL;
    for (int i = 0; i < RUN_OUT; i++)
        truth.tensors[i] = i == RUN_MASK || i == RUN_START || i == RUN_END || !run->tensors[i].data
                               ? run->tensors[i]
                               : as_float64(&run->tensors[i]);
    if (backward)
        truth.tensors[RUN_DOUT] = as_float64(&run->tensors[RUN_DOUT]);
    run_allocate_outputs(&truth, backward);
    int fine = run_reference(&truth, backward);
    for (size_t i = 0; i < sizeof outputs / sizeof outputs[0] && fine; i++)
        if (run->tensors[outputs[i]].data && truth.tensors[outputs[i]].data) {
            errors[count] = compare(&run->tensors[outputs[i]], &truth.tensors[outputs[i]],
                                    run_tolerance(run->tensors[RUN_Q].dtype));
            errors[count++].name = run_tensor_names[outputs[i]];
        }
    for (int i = 0; i < RUN_TENSORS; i++)
        if (truth.tensors[i].data != run->tensors[i].data)
            free(truth.tensors[i].data);
    return fine ? count : -1;
}
