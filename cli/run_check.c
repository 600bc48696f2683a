/* run_check.c: the outputs of a run against the reference family's float64. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/elements.h"
#include "run.h"

static struct file_tensor as_float64(const struct file_tensor *tensor) {
    struct file_tensor wide;
    run_make_tensor(&wide, tensor->name, FDM_FLOAT64, tensor->ndim, tensor->shape);
    for (int64_t i = 0; i < file_tensor_elements(tensor); i++)
        element_store(wide.data, i, FDM_FLOAT64, element_load(tensor->data, i, tensor->dtype));
    return wide;
}

double run_tolerance(const fdm_plan *plan) {
    const double sums = strstr(plan->choice, "_F16Acc") ? 4 : 1;
    switch (plan->problem.dtype) {
    case FDM_FLOAT64: return 1e-12 * sums;
    case FDM_FLOAT32: return 1e-4 * sums;
    case FDM_FLOAT16: return 1e-2 * sums;
    default: return 5e-2 * sums;
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
        double truth = ((const double *)want->data)[i], value = element_load(have->data, i, have->dtype);
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

/* ---- the truth ---- */

static int run_reference(struct run *truth, int backward) {
    fdm_tensors tensors = run_view(truth, FDM_FORWARD);
    if (fdm_attention_forward(&tensors, &truth->options, NULL))
        return complain(0, "the float64 reference: %s", fdm_last_error());
    tensors = run_view(truth, FDM_BACKWARD);
    return !backward || !fdm_attention_backward(&tensors, &truth->options, NULL) ||
           complain(0, "the float64 reference: %s", fdm_last_error());
}

/* Rows first, ..., last of `axis` copied together; the other axes stay. */
static struct file_tensor gather(const struct file_tensor *from, int32_t axis, const struct run_truth *truth) {
    struct file_tensor to;
    int64_t shape[TENSOR_AXES_MAX], outer = 1;
    size_t inner = (size_t)fdm_dtype_bytes(from->dtype);
    memcpy(shape, from->shape, sizeof shape);
    shape[axis] = truth->num_rows;
    run_make_tensor(&to, from->name, from->dtype, from->ndim, shape);
    for (int32_t i = 0; i < from->ndim; i++)
        if (i < axis)
            outer *= shape[i];
        else if (i > axis)
            inner *= (size_t)shape[i];
    for (int64_t o = 0; o < outer; o++)
        for (int64_t r = 0; r < truth->num_rows; r++)
            memcpy((char *)to.data + (size_t)(o * truth->num_rows + r) * inner,
                   (const char *)from->data + (size_t)(o * from->shape[axis] + truth->rows[r]) * inner, inner);
    return to;
}

/* Which keys the chosen rows see, as a mask: their numbers are lost where they stand one after the other. */
static void make_mask(const struct run *run, struct run_truth *truth) {
    const struct file_tensor *start = &run->tensors[RUN_START], *end = &run->tensors[RUN_END];
    const int64_t seqlen_q = run->tensors[RUN_Q].shape[1], seqlen_k = run->tensors[RUN_K].shape[1];
    const int64_t shape[4] = {start->data ? start->shape[0] : 1, start->data ? start->shape[1] : 1, truth->num_rows,
                              seqlen_k};
    run_make_tensor(&truth->run.tensors[RUN_MASK], "mask", FDM_BOOL, 4, shape);
    uint8_t *mask = truth->run.tensors[RUN_MASK].data;
    for (int64_t head = 0; head < shape[0] * shape[1]; head++)
        for (int64_t r = 0; r < truth->num_rows; r++)
            for (int64_t j = 0; j < seqlen_k; j++) {
                const int64_t i = truth->rows[r], key = head * seqlen_k + j;
                const int in_interval =
                    !start->data || (((const int32_t *)start->data)[key] <= i && i < ((const int32_t *)end->data)[key]);
                *mask++ = in_interval && (!run->options.causal || j <= i + seqlen_k - seqlen_q);
            }
}

static int rows_are_alike(const struct run *run) {
    const struct file_tensor *bias = &run->tensors[RUN_BIAS];
    return !run->tensors[RUN_MASK].data && !run->tensors[RUN_ROW_START].data && !run->tensors[RUN_BLOCKS].data &&
           !run->tensors[RUN_TREE].data && (!bias->data || (bias->ndim == 4 && bias->shape[2] == 1)) &&
           run->options.window_left < 0 && run->options.window_right < 0;
}

static void choose_rows(const struct run *run, double products_max, struct run_truth *truth) {
    const struct file_tensor *q = &run->tensors[RUN_Q], *v = &run->tensors[RUN_V];
    const double of_row =
        (double)q->shape[0] * (double)q->shape[2] * (double)v->shape[1] * (double)(q->shape[3] + v->shape[3]);
    const int64_t seqlen_q = q->shape[1];
    if ((double)seqlen_q * of_row <= products_max || seqlen_q < 3 || !rows_are_alike(run))
        return;
    truth->num_rows = products_max / of_row < 2 ? 2 : (int64_t)(products_max / of_row);
    truth->rows = allocate_or_exit((size_t)truth->num_rows * sizeof *truth->rows);
    for (int64_t r = 0; r < truth->num_rows; r++)
        truth->rows[r] = r * (seqlen_q - 1) / (truth->num_rows - 1);
}

static void take_inputs(const struct run *run, struct run_truth *truth) {
    for (int i = 0; i < RUN_TENSORS; i++) {
        const int shared = i == RUN_MASK || i == RUN_START || i == RUN_END || (i >= RUN_ROW_START && i <= RUN_TREE);
        if (run->tensors[i].data && (i < RUN_OUT || (truth->backward && (i == RUN_DOUT || i == RUN_DLSE))))
            truth->run.tensors[i] = shared ? run->tensors[i] : as_float64(&run->tensors[i]);
    }
    if (!truth->rows)
        return;
    struct file_tensor all = truth->run.tensors[RUN_Q];
    truth->run.tensors[RUN_Q] = gather(&all, 1, truth);
    release(all.data);
    truth->run.tensors[RUN_START] = truth->run.tensors[RUN_END] = (struct file_tensor){0};
    make_mask(run, truth);
    truth->run.options.causal = 0;
}

int run_make_truth(struct run *run, int backward, double products_max, struct run_truth *truth) {
    *truth = (struct run_truth){.run = {.options = run->options}, .backward = backward};
    truth->run.options.family = "reference";
    truth->run.options.kernel = NULL;
    if (!backward)
        choose_rows(run, products_max, truth);
    progress("float64 reference");
    take_inputs(run, truth);
    run_allocate_outputs(&truth->run, backward);
    int fine = run_reference(&truth->run, backward);
    progress(NULL);
    return fine;
}

int32_t run_compare(struct run *run, const struct run_truth *truth, double tolerance, struct run_error *errors) {
    static const struct {
        enum run_tensor role;
        int32_t row_axis;
    } outputs[] = {{RUN_OUT, 1}, {RUN_LSE, 2}, {RUN_DQ, 1}, {RUN_DK, 1}, {RUN_DV, 1}, {RUN_DBIAS, 2}, {RUN_DSINK, 0}};
    int32_t count = 0;
    for (size_t i = 0; i < sizeof outputs / sizeof outputs[0]; i++) {
        const struct file_tensor *all = &run->tensors[outputs[i].role], *want = &truth->run.tensors[outputs[i].role];
        if (!all->data || !want->data)
            continue;
        struct file_tensor have = truth->rows ? gather(all, outputs[i].row_axis, truth) : *all;
        errors[count] = compare(&have, want, tolerance);
        errors[count++].name = run_tensor_names[outputs[i].role];
        if (truth->rows)
            release(have.data);
    }
    return count;
}

void run_release_truth(struct run *run, struct run_truth *truth) {
    for (int i = 0; i < RUN_TENSORS; i++)
        if (truth->run.tensors[i].data != run->tensors[i].data)
            release(truth->run.tensors[i].data);
    release(truth->rows);
}
