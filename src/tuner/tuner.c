/* tuner.c: fdm_tune(): candidates, compilation, measurement, and what comes of them. */
#include "tuner/tuner.h"

#include <string.h>
#include <time.h>

#include "base/error.h"
#include "base/integers.h"
#include "base/memory.h"
#include "base/struct_bytes.h"
#include "problem/problem.h"
#include "tuning/class.h"

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static fdm_status check_options(const fdm_device *device, const fdm_tune_options *o) {
    if (!device->present)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "device %s is not present; only a device of this machine is timed",
                         device->name);
    if (o->rounds < 0 || o->rounds > FDM_TUNE_SAMPLES)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "rounds is %d; it must be from 0 to %d", o->rounds,
                         (int)FDM_TUNE_SAMPLES);
    if (o->max_variants < 0 || o->window < 0 || !(o->seconds >= 0))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "max_variants, window and seconds must not be below 0");
    return FDM_OK;
}

/* Where blocks of both sizes are one, tensors say the smaller. */
static void describe_blocks(fdm_problem *p) {
    if (!p->block_mask_size)
        p->block_mask_batch = p->block_mask_heads = 1;
    else if (p->seqlen_q <= 64 && p->seqlen_k <= 64)
        p->block_mask_size = 64;
}

/* Pages that no sequence can hold are left out: a cache is as large as a machine's memory, and its choices are those of
 * a part of it. */
static void describe_cache(fdm_problem *p) {
    if (!p->has_cache)
        return;
    const int64_t each = p->page_size ? (p->seqlen_k + p->page_size - 1) / p->page_size : 1;
    p->max_pages = p->page_size ? (int32_t)smaller(p->max_pages, p->ragged_pages ? p->batch * each : each) : 0;
    p->ragged_pages &= p->page_size > 0;
    p->rotary_interleaved &= p->rotary_dim > 0;
    const int64_t held = !p->page_size ? p->batch : p->ragged_pages ? p->max_pages : p->batch * p->max_pages;
    p->num_pages = (int32_t)smaller(p->num_pages, held > 0 ? held : 1);
    p->total_k = 0;
}

/* The problem as tensors describe it: what it does not have is as fdm_problem_default() says. A problem made by hand
 * may hold anything there. */
static fdm_problem as_described(const fdm_problem *given) {
    const fdm_problem none = fdm_problem_default();
    fdm_problem p = *given;
    if (p.pass == FDM_FORWARD)
        p.needs_dq = p.needs_dk = p.needs_dv = p.needs_dbias = p.needs_dsink = p.has_dlse = 0;
    else
        p.needs_lse = 1;
    if (!p.has_mask)
        memcpy(p.mask_shape, none.mask_shape, sizeof p.mask_shape);
    if (!p.has_bias) {
        memcpy(p.bias_shape, none.bias_shape, sizeof p.bias_shape);
        p.bias_dtype = none.bias_dtype;
    }
    if (!p.has_intervals)
        p.interval_heads = none.interval_heads;
    if (!p.has_intervals || p.varlen)
        p.interval_batch = none.interval_batch;
    if (!p.has_row_intervals) {
        p.row_interval_heads = none.row_interval_heads;
        p.row_ranges = none.row_ranges;
    }
    if (!p.has_row_intervals || p.varlen)
        p.row_interval_batch = none.row_interval_batch;
    describe_blocks(&p);
    describe_cache(&p);
    if (!p.has_sink) {
        p.sink_dtype = none.sink_dtype;
        p.num_sinks = none.num_sinks;
    }
    return p;
}

static int64_t tune_window(const fdm_problem *problem, int64_t asked) {
    const int64_t keys = problem->seqlen_k / 8;
    return asked > 0 ? asked : keys > 0 ? keys : 1;
}

static fdm_status write_rows(const struct tuner *t, fdm_tune_row *rows, int32_t size, fdm_tune_result *result) {
    const uint32_t bytes = rows ? rows->struct_bytes : 0; /* from one to the next, in an array of the caller's */
    result->num_rows = t->count < size ? t->count : size;
    fdm_status status = FDM_OK;
    for (int32_t i = 0; i < result->num_rows && !status; i++) {
        void *to = (char *)rows + (size_t)i * bytes;
        memcpy(to, &bytes, sizeof bytes);
        status = STRUCT_WRITE(fdm_tune_row, to, &t->candidates[i].row);
    }
    return status;
}

static fdm_status tune(struct tuner *t, const fdm_device *device, fdm_tune_result *result) {
    const double begin = now();
    tune_compile(t);
    result->compile_seconds = now() - begin;
    if (t->options->compile_only)
        return FDM_OK;
    fdm_status status = t->operation->make_data(device, t->problem, t->options->window, &t->data);
    if (!status)
        status = tune_measure(t);
    result->best = status ? 0 : tune_best(t);
    if (!status && t->options->keep)
        result->kept = tune_keep(t, device, result->best);
    result->num_places = t->data.num_places;
    result->device_seconds = t->device_seconds;
    fdm_timer_release(t->timer);
    fdm_memory_release(device->id, t->workspace);
    tune_data_release(&t->data);
    return status;
}

fdm_status tune_read(struct tuner *t, const fdm_device *device, const fdm_tune_options *options, fdm_tune_options *room,
                     fdm_tune_row *rows, int32_t size, fdm_tune_result *result) {
    static const fdm_tune_options standard = {.struct_bytes = sizeof standard};
    if (options && !(options = STRUCT_READ(fdm_tune_options, options, room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    t->options = options ? options : &standard;
    fdm_status status = STRUCT_CHECK(fdm_tune_result, result);
    if (!status && size > 0)
        status = STRUCT_CHECK(fdm_tune_row, rows);
    return status ? status : check_options(device, t->options);
}

int32_t tune_most(const fdm_tune_options *options) {
    return options->max_variants ? options->max_variants : options->exhaustive ? -1 : 12;
}

fdm_status tune_run(struct tuner *t, const fdm_device *device, fdm_tune_row *rows, int32_t size,
                    fdm_tune_result *result) {
    fdm_tune_result made = {.struct_bytes = sizeof made};
    fdm_status status = t->candidates ? tune(t, device, &made) : FDM_ERROR_UNSUPPORTED;
    if (!status)
        status = write_rows(t, rows, size, &made);
    memory_release(t->candidates);
    return status ? status : STRUCT_WRITE(fdm_tune_result, result, &made);
}

/* ---- attention ---- */

static fdm_status prepare(const union tune_plan *plan) { return fdm_prepare(&plan->attention); }

static fdm_status run(const union tune_plan *plan, struct tune_data *data, int64_t number, void *workspace,
                      size_t bytes, void *stream) {
    const fdm_tensors tensors = tune_data_tensors(data, number);
    const fdm_launch launch = {.struct_bytes = sizeof launch, .stream = stream};
    return fdm_execute(&plan->attention, &tensors, workspace, bytes, &launch);
}

static fdm_status make_data(const fdm_device *device, const void *problem, int64_t window, struct tune_data *data) {
    const fdm_problem *p = problem;
    return tune_data_make(device, p, tune_window(p, window), data);
}

/* What looks at no kept choice keeps none either: its class is that of problems with more ways. */
static fdm_status key_of(const fdm_device *device, const void *problem, int32_t num_threads, char *key) {
    const fdm_problem *p = problem;
    if (p->deterministic || problem_fixes_splits(p))
        return error_set(FDM_ERROR_UNSUPPORTED, "calls that are deterministic or fix their splits take no kept choice");
    return tuning_key(device, p, num_threads, key);
}

const struct tune_operation tune_attention = {prepare, run, make_data, key_of};

fdm_status fdm_tune(const fdm_device *device, const fdm_problem *problem, const fdm_tune_options *options,
                    fdm_tune_row *rows, int32_t size, fdm_tune_result *result) {
    fdm_device device_room;
    fdm_tune_options options_room;
    fdm_problem described;
    struct tuner t = {.operation = &tune_attention, .problem = &described};
    if (!(device = STRUCT_READ(fdm_device, device, &device_room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    fdm_status status = fdm_problem_validate(problem);
    if (status || (status = tune_read(&t, device, options, &options_room, rows, size, result)))
        return status;
    described = as_described(problem);
    t.candidates =
        tune_candidates(device, &described, tune_most(t.options), tune_window(&described, t.options->window), &t.count);
    return tune_run(&t, device, rows, size, result);
}
