/* tune_measure.c: the order of measuring: a check of each candidate, then rounds in which the slower ones drop out. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "tuner/tuner.h"

static const double sample_seconds = 1e-3, warm_seconds = 5e-3;
enum { CALLS_MAX = 200, FEW = 5, FINALISTS = 3 };

/* ---- one candidate ---- */

static fdm_status run_once(struct tuner *t, const struct tune_candidate *c) {
    return t->operation->run(&c->plan, &t->data, t->num_calls++, t->workspace, (size_t)c->workspace_bytes,
                             t->options->stream);
}

/* Mean seconds of a call of c->calls one after the other. */
static fdm_status sample(struct tuner *t, const struct tune_candidate *c, double *seconds) {
    fdm_status status = fdm_timer_start(t->timer, t->options->stream);
    for (int32_t i = 0; i < c->calls && !status; i++)
        status = run_once(t, c);
    if (!status)
        status = fdm_timer_stop(t->timer, t->options->stream, seconds);
    if (status)
        return status;
    t->device_seconds += *seconds;
    *seconds /= c->calls;
    return FDM_OK;
}

static double limit_of(const struct tuner *t) {
    return t->options->seconds > 0 ? t->options->seconds : t->options->exhaustive ? HUGE_VAL : 2;
}
static int is_late(const struct tuner *t) { return t->device_seconds >= limit_of(t); }

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void add_sample(fdm_tune_row *row, double seconds) {
    double sorted[FDM_TUNE_SAMPLES];
    row->samples[row->num_samples++] = seconds;
    const int32_t n = row->num_samples;
    memcpy(sorted, row->samples, (size_t)n * sizeof *sorted);
    qsort(sorted, (size_t)n, sizeof *sorted, compare_doubles);
    row->seconds = n % 2 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
    row->quartile_low = sorted[n / 4];
    row->quartile_high = sorted[n - 1 - n / 4];
    row->state = FDM_TUNE_TIMED;
}

static void fail(struct tune_candidate *c, fdm_tune_state state) {
    c->alive = 0;
    c->row.state = state;
    snprintf(c->row.why, sizeof c->row.why, "%s", fdm_last_error());
}

/* ---- the check ---- */

/* One call on the first place from outputs of NaN bytes. */
static fdm_status run_for_check(struct tuner *t, const struct tune_candidate *c, struct tune_sample *have) {
    fdm_status status = tune_data_poison(&t->data);
    t->num_calls = 0;
    if (!status)
        status = fdm_synchronize(t->data.device); /* the call's stream may not wait for what fills */
    if (!status)
        status = run_once(t, c);
    if (!status)
        status = fdm_synchronize(t->data.device);
    return status ? status : tune_data_sample(&t->data, have);
}

/* What the rules' choice cannot do is an error of the whole; what another cannot do is that one's. */
static fdm_status check_candidates(struct tuner *t) {
    struct tune_sample want = {0}, have = {0};
    fdm_status status = run_for_check(t, &t->candidates[0], &want);
    for (int32_t i = 1; i < t->count && !status; i++) {
        struct tune_candidate *c = &t->candidates[i];
        if (!c->alive)
            continue;
        if (run_for_check(t, c, &have)) {
            fail(c, FDM_TUNE_FAILED);
            status = fdm_synchronize(t->data.device); /* a fault of a kernel ends everything */
            continue;
        }
        c->row.difference = tune_data_difference(&t->data, &have, &want);
        if (c->row.difference <= c->bound)
            continue;
        c->alive = 0;
        c->row.state = FDM_TUNE_WRONG;
        snprintf(c->row.why, sizeof c->row.why, "its results differ by %.3g of a row, %.3g is allowed",
                 c->row.difference, c->bound);
    }
    memory_release(want.values);
    memory_release(have.values);
    return status;
}

/* ---- rounds ---- */

/* One sample of every candidate that is still in it, in turn. */
static fdm_status run_round(struct tuner *t, int32_t number) {
    for (int32_t i = 0; i < t->count; i++) {
        struct tune_candidate *c = &t->candidates[i];
        double seconds;
        if (!c->alive || (is_late(t) && (i || number))) /* the rules' choice gets one sample at least */
            continue;
        if (t->options->progress)
            t->options->progress(t->options->context, "timing", i, t->count);
        fdm_status status = FDM_OK;
        if (number == 0 && !(status = sample(t, c, &seconds)) && !(status = sample(t, c, &seconds)))
            c->calls = seconds * CALLS_MAX < sample_seconds ? CALLS_MAX : (int32_t)ceil(sample_seconds / seconds);
        if (!status)
            status = sample(t, c, &seconds);
        if (status && i == 0)
            return status;
        status ? fail(c, FDM_TUNE_FAILED) : add_sample(&c->row, seconds);
    }
    return FDM_OK;
}

static double best_seconds(const struct tuner *t) {
    double best = HUGE_VAL;
    for (int32_t i = 0; i < t->count; i++)
        if (t->candidates[i].row.state == FDM_TUNE_TIMED)
            best = fmin(best, t->candidates[i].row.seconds);
    return best;
}

/* The rules' choice stays in whatever it takes: the others are compared with it. */
static void drop_slower_than(struct tuner *t, double factor) {
    const double limit = best_seconds(t) * factor;
    for (int32_t i = 1; i < t->count; i++)
        if (t->candidates[i].row.state == FDM_TUNE_TIMED && t->candidates[i].row.seconds > limit)
            t->candidates[i].alive = 0;
}

static void keep_best(struct tuner *t, int32_t most) {
    for (int32_t i = 1; i < t->count; i++) {
        int32_t faster = 0;
        for (int32_t j = 0; j < t->count; j++)
            faster += t->candidates[j].alive && t->candidates[j].row.seconds < t->candidates[i].row.seconds;
        if (faster >= most)
            t->candidates[i].alive = 0;
    }
}

/* Whether the fastest is ahead of each other that is in it by more than their quartiles. */
static int is_decided(const struct tuner *t) {
    const struct tune_candidate *best = NULL;
    for (int32_t i = 0; i < t->count; i++)
        if (t->candidates[i].alive && (!best || t->candidates[i].row.seconds < best->row.seconds))
            best = &t->candidates[i];
    for (int32_t i = 0; i < t->count; i++)
        if (t->candidates[i].alive && &t->candidates[i] != best &&
            t->candidates[i].row.quartile_low <= best->row.quartile_high)
            return 0;
    return 1;
}

/* Clocks come up under work. */
static fdm_status warm_up(struct tuner *t) {
    fdm_status status = FDM_OK;
    double seconds = 0;
    for (double warm = 0; warm < warm_seconds && !status; warm += seconds + 1e-5)
        status = sample(t, &t->candidates[0], &seconds);
    return status;
}

static fdm_status measure_all(struct tuner *t) {
    const int32_t rounds = t->options->rounds > 0 ? t->options->rounds : FEW;
    fdm_status status = FDM_OK;
    for (int32_t round = 0; round < rounds && !status && !is_late(t); round++) {
        status = run_round(t, round);
        drop_slower_than(t, 3);
    }
    return status;
}

static fdm_status measure_halving(struct tuner *t) {
    fdm_status status = run_round(t, 0);
    drop_slower_than(t, 1.3);
    for (int32_t round = 1; round < FDM_TUNE_SAMPLES && !status && !is_late(t); round++) {
        status = run_round(t, round);
        if (round + 1 == FEW)
            keep_best(t, FINALISTS);
        if (round + 1 >= FEW && is_decided(t))
            break;
    }
    return status;
}

static fdm_status allocate(struct tuner *t) {
    int64_t most = 0;
    for (int32_t i = 0; i < t->count; i++)
        most = t->candidates[i].workspace_bytes > most ? t->candidates[i].workspace_bytes : most;
    fdm_status status = fdm_memory_allocate(t->data.device, (size_t)most, &t->workspace);
    return status ? status : fdm_timer_create(t->data.device, &t->timer);
}

fdm_status tune_measure(struct tuner *t) {
    if (!t->candidates[0].alive)
        return error_set(FDM_ERROR_UNSUPPORTED, "%s", t->candidates[0].row.why);
    fdm_status status = allocate(t);
    if (!status)
        status = check_candidates(t);
    if (!status)
        status = warm_up(t);
    if (!status)
        status = t->options->exhaustive ? measure_all(t) : measure_halving(t);
    return status;
}

int32_t tune_best(const struct tuner *t) {
    const fdm_tune_row *rule = &t->candidates[0].row;
    int32_t best = 0;
    for (int32_t i = 1; i < t->count; i++) {
        const fdm_tune_row *row = &t->candidates[i].row;
        const double saved = rule->seconds - row->seconds,
                     spread = fmax(rule->quartile_high - rule->quartile_low, row->quartile_high - row->quartile_low);
        if (row->state == FDM_TUNE_TIMED && row->num_samples >= FEW && saved >= 0.01 * rule->seconds &&
            saved > spread && row->seconds < t->candidates[best].row.seconds)
            best = i;
    }
    return best;
}
