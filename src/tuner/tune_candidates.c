/* tune_candidates.c: the ways to run a problem that a tuner times, and their kernels. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/error.h"
#include "base/memory.h"
#include "device/threads.h"
#include "plan/plan.h"
#include "tuner/tuner.h"

enum { CANDIDATES_MAX = 256 };

/* The bound of the checks by dtype, which the tool's `--check` uses too; twice that, since both sides err. */
static double bound_of(const fdm_plan *plan) {
    const double sums = strstr(plan->choice, "_F16Acc") ? 4 : 1;
    switch (plan->problem.dtype) {
    case FDM_FLOAT64: return 2e-12 * sums;
    case FDM_FLOAT32: return 2e-4 * sums;
    case FDM_FLOAT16: return 2e-2 * sums;
    default: return 1e-1 * sums;
    }
}

static void add(struct tune_candidate *all, int32_t *count, const fdm_plan *plan, int is_rule) {
    for (int32_t i = 0; i < *count; i++)
        if (strcmp(all[i].row.kernel, plan->kernel) == 0 && strcmp(all[i].row.choice, plan->choice) == 0 &&
            all[i].row.num_threads == plan->num_threads)
            return;
    struct tune_candidate *c = &all[(*count)++];
    *c = (struct tune_candidate){.plan.attention = *plan,
                                 .workspace_bytes = plan->workspace_bytes,
                                 .bound = bound_of(plan),
                                 .alive = 1,
                                 .calls = 1};
    c->row = (fdm_tune_row){.struct_bytes = sizeof c->row, .is_rule = is_rule, .state = FDM_TUNE_NOT_TIMED};
    c->row.num_threads = plan->num_threads;
    snprintf(c->row.kernel, sizeof c->row.kernel, "%s", plan->kernel);
    snprintf(c->row.choice, sizeof c->row.choice, "%s", plan->choice);
}

static int compare_predicted(const void *a, const void *b) {
    const double x = ((const struct tune_candidate *)a)->predicted, y = ((const struct tune_candidate *)b)->predicted;
    return (x > y) - (x < y);
}

/* Those behind the rules' choice by predicted time; of which nothing is known come last, in their order. */
static void rank(const fdm_device *device, struct tune_candidate *all, int32_t count, int64_t window) {
    for (int32_t i = 1; i < count; i++) {
        fdm_prediction prediction = {.struct_bytes = sizeof prediction};
        const int known =
            !fdm_plan_predict(device, &all[i].plan.attention, window, &prediction) && prediction.seconds > 0;
        all[i].predicted = known ? prediction.seconds : 1e9 + i;
    }
    qsort(all + 1, (size_t)count - 1, sizeof *all, compare_predicted);
}

struct tune_candidate *tune_candidates(const fdm_device *device, const fdm_problem *problem, int32_t most,
                                       int64_t window, int32_t *count) {
    struct tune_candidate *all = memory_allocate(CANDIDATES_MAX * sizeof *all);
    fdm_kernel_info kernel = {.struct_bytes = sizeof kernel};
    fdm_plan plan = {.struct_bytes = sizeof plan};
    *count = 0;
    if (!all) {
        error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for %d candidates", (int)CANDIDATES_MAX);
        return NULL;
    }
    if (plan_by_rules(device, problem, NULL, &plan)) {
        memory_release(all);
        return NULL;
    }
    add(all, count, &plan, 1);
    if (plan.num_threads > 1 && !plan_of_choice(device, problem, all->row.kernel, all->row.choice, plan.num_threads / 2,
                                                &plan)) /* CPU: where memory is what bounds */
        add(all, count, &plan, 0);
    for (int32_t i = 0; !fdm_kernel_list(i, &kernel); i++) {
        if (kernel.pass != problem->pass || kernel.device_type != device->id.type || !kernel.available ||
            !plan_may_tune(device, kernel.name))
            continue;
        for (int32_t n = 0; *count < CANDIDATES_MAX && !fdm_plan_variant(device, problem, kernel.name, n, &plan); n++)
            add(all, count, &plan, 0);
    }
    if (most >= 0 && *count > most + 1) {
        rank(device, all, *count, window);
        *count = most + 1;
    }
    return all;
}

/* ---- compilation ---- */

struct compilation {
    struct tuner *tuner;
    atomic_int next, done;
};

static void compile(void *argument, int32_t index) {
    struct compilation *c = argument;
    const fdm_tune_options *options = c->tuner->options;
    for (int32_t i; (i = atomic_fetch_add(&c->next, 1)) < c->tuner->count;) {
        struct tune_candidate *one = &c->tuner->candidates[i];
        if (c->tuner->operation->prepare(&one->plan)) {
            one->alive = 0;
            one->row.state = FDM_TUNE_FAILED;
            snprintf(one->row.why, sizeof one->row.why, "%s", fdm_last_error());
        }
        const int done = atomic_fetch_add(&c->done, 1) + 1;
        if (options->progress && index == 0)
            options->progress(options->context, "compiling", done, c->tuner->count);
    }
}

void tune_compile(struct tuner *tuner) {
    struct compilation c = {.tuner = tuner};
    const int32_t threads = threads_for(0, NULL);
    threads_run(NULL, threads < tuner->count ? threads : tuner->count, compile, &c);
}
