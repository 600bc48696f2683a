/* tuner.c: fdm_tune(): candidates, compilation, measurement, and what comes of them. */
#include "tuner/tuner.h"

#include <string.h>
#include <time.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/struct_bytes.h"

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
    if (!p.has_sink) {
        p.sink_dtype = none.sink_dtype;
        p.num_sinks = none.num_sinks;
    }
    return p;
}

static int64_t window_of(const fdm_problem *problem, const fdm_tune_options *o) {
    const int64_t keys = problem->seqlen_k / 8;
    return o->window > 0 ? o->window : keys > 0 ? keys : 1;
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

static fdm_status tune(struct tuner *t, const fdm_device *device, const fdm_problem *problem, fdm_tune_result *result) {
    const double begin = now();
    tune_compile(t->candidates, t->count, t->options);
    result->compile_seconds = now() - begin;
    if (t->options->compile_only)
        return FDM_OK;
    fdm_status status = tune_data_make(device, problem, window_of(problem, t->options), &t->data);
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

fdm_status fdm_tune(const fdm_device *device, const fdm_problem *problem, const fdm_tune_options *options,
                    fdm_tune_row *rows, int32_t size, fdm_tune_result *result) {
    static const fdm_tune_options standard = {.struct_bytes = sizeof standard};
    fdm_device device_room;
    fdm_tune_options options_room;
    fdm_tune_result made = {.struct_bytes = sizeof made};
    if (!(device = STRUCT_READ(fdm_device, device, &device_room)) ||
        (options && !(options = STRUCT_READ(fdm_tune_options, options, &options_room))))
        return FDM_ERROR_INVALID_ARGUMENT;
    fdm_status status = STRUCT_CHECK(fdm_tune_result, result);
    if (!status && size > 0)
        status = STRUCT_CHECK(fdm_tune_row, rows);
    if (status || (status = fdm_problem_validate(problem)))
        return status;
    const fdm_problem described = as_described(problem);
    struct tuner t = {.options = options ? options : &standard};
    if ((status = check_options(device, t.options)))
        return status;
    const int32_t most = t.options->max_variants ? t.options->max_variants : t.options->exhaustive ? -1 : 12;
    if (!(t.candidates = tune_candidates(device, &described, most, window_of(&described, t.options), &t.count)))
        return FDM_ERROR_UNSUPPORTED;
    status = tune(&t, device, &described, &made);
    if (!status)
        status = write_rows(&t, rows, size, &made);
    memory_release(t.candidates);
    return status ? status : STRUCT_WRITE(fdm_tune_result, result, &made);
}
