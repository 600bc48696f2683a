/* tune_companion.c: fdm_tune_gemm(), fdm_tune_softmax(): their ways, operands and calls. */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/struct_bytes.h"
#include "companions/gemm/gemm_plan.h"
#include "companions/softmax/softmax_plan.h"
#include "tuner/first_use.h"
#include "tuner/tuner.h"
#include "tuning/class.h"

/* ---- candidates ---- */

enum { CANDIDATES_MAX = 128 };

/* What differs between the two. */
struct companion {
    const struct companion_operation *operation;
    struct tune_operation tune;
    void (*put_plan)(const void *problem, const fdm_companion_choice *choice, union tune_plan *plan);
    double (*bound)(const void *problem);
};

static int has(const struct tune_candidate *all, int32_t count, const fdm_companion_choice *choice) {
    for (int32_t i = 0; i < count; i++)
        if (strcmp(all[i].row.kernel, choice->kernel) == 0 && strcmp(all[i].row.choice, choice->choice) == 0)
            return 1;
    return 0;
}

static void add(const struct companion *c, struct tuner *t, const fdm_companion_choice *choice) {
    if (t->count == CANDIDATES_MAX || has(t->candidates, t->count, choice))
        return;
    struct tune_candidate *one = &t->candidates[t->count];
    *one = (struct tune_candidate){
        .workspace_bytes = choice->workspace_bytes, .bound = c->bound(t->problem), .alive = 1, .calls = 1};
    one->row = (fdm_tune_row){
        .struct_bytes = sizeof one->row, .is_rule = t->count == 0, .state = FDM_TUNE_NOT_TIMED, .num_threads = 1};
    snprintf(one->row.kernel, sizeof one->row.kernel, "%s", choice->kernel);
    snprintf(one->row.choice, sizeof one->row.choice, "%s", choice->choice);
    c->put_plan(t->problem, choice, &one->plan);
    t->count++;
}

/* The rules' choice, then the first way of each kernel that is chosen freely, then their second ways, and so on: each
 * kernel lists its own by what it expects of them. most below 0: all. */
static fdm_status find_candidates(const struct companion *c, struct tuner *t, const fdm_device *device, int32_t most) {
    const struct companion_operation *o = c->operation;
    fdm_companion_choice choice;
    fdm_status status = companion_choose(o, device, t->problem, NULL, &choice);
    if (status)
        return status;
    if (!(t->candidates = memory_allocate(CANDIDATES_MAX * sizeof *t->candidates)))
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for %d candidates", (int)CANDIDATES_MAX);
    add(c, t, &choice);
    for (int32_t number = 0, found = 1; found; number++) {
        found = 0;
        for (int32_t i = 0; i < o->num_kernels && (most < 0 || t->count <= most); i++)
            if (o->kernels[i].chosen_freely &&
                !companion_variant(o, device, t->problem, o->kernels[i].name, number, &choice)) {
                add(c, t, &choice);
                found = 1;
            }
    }
    return FDM_OK;
}

/* ---- gemm ---- */

static void put_gemm(const void *problem, const fdm_companion_choice *choice, union tune_plan *plan) {
    plan->gemm = (fdm_gemm_plan){sizeof plan->gemm, *(const fdm_gemm_problem *)problem, *choice};
}
static fdm_status prepare_gemm(const union tune_plan *plan) { return fdm_prepare_gemm(&plan->gemm); }

static fdm_status run_gemm(const union tune_plan *plan, struct tune_data *data, int64_t number, void *workspace,
                           size_t bytes, void *stream) {
    const fdm_gemm_problem *p = &plan->gemm.problem;
    const fdm_gemm_tensors tensors = {.struct_bytes = sizeof tensors,
                                      .a = tune_data_tensor(data, TUNE_Q, number),
                                      .b = tune_data_tensor(data, TUNE_K, number),
                                      .c = tune_data_tensor(data, TUNE_V, number),
                                      .out = tune_data_tensor(data, TUNE_OUT, number)};
    fdm_gemm_options options = fdm_gemm_options_default();
    options.accumulate_float16 = p->accumulate_float16;
    options.beta = p->has_c ? 1 : 0;
    return fdm_execute_gemm(&plan->gemm, &tensors, &options, workspace, bytes, stream);
}

static fdm_status gemm_data(const fdm_device *device, const void *problem, int64_t window, struct tune_data *data) {
    const fdm_gemm_problem *p = problem;
    const struct tune_operand operands[] = {
        {TUNE_Q, p->dtype, 3, {p->batch, p->m, p->k}, !p->a_rows_contiguous},
        {TUNE_K, p->dtype, 3, {p->batch, p->k, p->n}, !p->b_rows_contiguous},
        {TUNE_OUT, p->dtype, 3, {p->batch, p->m, p->n}, 0},
        {TUNE_V, p->dtype, 3, {p->batch, p->m, p->n}, 0},
    };
    (void)window;
    return tune_data_make_of(device, operands, p->has_c ? 4 : 3, data);
}

/* Sums of k products in another order; float16 sums err by more than the results' own rounding. */
static double gemm_bound(const void *problem) {
    const fdm_gemm_problem *p = problem;
    return p->accumulate_float16 ? 0.5 : p->dtype == FDM_FLOAT16 ? 2e-2 : 1e-1;
}
static fdm_status gemm_key(const fdm_device *device, const void *problem, int32_t num_threads, char *key) {
    (void)num_threads;
    return companion_key(&gemm_operation, device, problem, key);
}
static const struct companion gemm = {
    &gemm_operation, {prepare_gemm, run_gemm, gemm_data, gemm_key}, put_gemm, gemm_bound};

/* ---- softmax ---- */

static void put_softmax(const void *problem, const fdm_companion_choice *choice, union tune_plan *plan) {
    plan->softmax = (fdm_softmax_plan){sizeof plan->softmax, *(const fdm_softmax_problem *)problem, *choice};
}
static fdm_status prepare_softmax(const union tune_plan *plan) { return fdm_prepare_softmax(&plan->softmax); }

static fdm_status run_softmax(const union tune_plan *plan, struct tune_data *data, int64_t number, void *workspace,
                              size_t bytes, void *stream) {
    const fdm_softmax_problem *p = &plan->softmax.problem;
    fdm_tensor *first = tune_data_tensor(data, TUNE_Q, number), *written = tune_data_tensor(data, TUNE_OUT, number);
    const int backward = p->pass == FDM_BACKWARD;
    const fdm_softmax_tensors tensors = {.struct_bytes = sizeof tensors,
                                         .x = backward ? NULL : first,
                                         .mask = tune_data_tensor(data, TUNE_MASK, number),
                                         .out = backward ? first : written,
                                         .dout = tune_data_tensor(data, TUNE_K, number),
                                         .dx = backward ? written : NULL};
    fdm_softmax_options options = fdm_softmax_options_default();
    options.log = p->log;
    options.scale = p->negative_scale ? -1 : 1;
    return fdm_execute_softmax(&plan->softmax, &tensors, &options, workspace, bytes, stream);
}

static fdm_status softmax_data(const fdm_device *device, const void *problem, int64_t window, struct tune_data *data) {
    const fdm_softmax_problem *p = problem;
    const int backward = p->pass == FDM_BACKWARD;
    struct tune_operand operands[3] = {{TUNE_Q, p->dtype, 2, {p->rows, p->columns}, 0},
                                       {TUNE_OUT, p->dtype, 2, {p->rows, p->columns}, 0},
                                       {TUNE_K, p->dtype, 2, {p->rows, p->columns}, 0}};
    if (p->has_mask && !backward)
        operands[2] = (struct tune_operand){TUNE_MASK, FDM_BOOL, 2, {p->rows, p->columns}, 0};
    (void)window;
    return tune_data_make_of(device, operands, backward || p->has_mask ? 3 : 2, data);
}

static double softmax_bound(const void *problem) {
    const fdm_dtype dtype = ((const fdm_softmax_problem *)problem)->dtype;
    return dtype == FDM_FLOAT32 ? 2e-4 : dtype == FDM_FLOAT16 ? 2e-2 : 1e-1;
}
static fdm_status softmax_key(const fdm_device *device, const void *problem, int32_t num_threads, char *key) {
    (void)num_threads;
    return companion_key(&softmax_operation, device, problem, key);
}
static const struct companion softmax = {
    &softmax_operation, {prepare_softmax, run_softmax, softmax_data, softmax_key}, put_softmax, softmax_bound};

/* ---- entries ---- */

static fdm_status tune(const struct companion *c, const fdm_device *device, const void *problem,
                       const fdm_tune_options *options, fdm_tune_row *rows, int32_t size, fdm_tune_result *result) {
    fdm_device device_room;
    fdm_tune_options options_room;
    struct tuner t = {.operation = &c->tune, .problem = problem};
    if (!(device = STRUCT_READ(fdm_device, device, &device_room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    fdm_status status = tune_read(&t, device, options, &options_room, rows, size, result);
    if (status || (status = find_candidates(c, &t, device, tune_most(t.options))))
        return status;
    return tune_run(&t, device, rows, size, result);
}

fdm_status fdm_tune_gemm(const fdm_device *device, const fdm_gemm_problem *problem, const fdm_tune_options *options,
                         fdm_tune_row *rows, int32_t size, fdm_tune_result *result) {
    fdm_gemm_plan plan = {.struct_bytes = sizeof plan};
    const fdm_status status = fdm_plan_gemm(device, problem, NULL, &plan); /* problem and device are right */
    return status ? status : tune(&gemm, device, problem, options, rows, size, result);
}

fdm_status fdm_tune_softmax(const fdm_device *device, const fdm_softmax_problem *problem,
                            const fdm_tune_options *options, fdm_tune_row *rows, int32_t size,
                            fdm_tune_result *result) {
    fdm_softmax_plan plan = {.struct_bytes = sizeof plan};
    const fdm_status status = fdm_plan_softmax(device, problem, NULL, &plan);
    return status ? status : tune(&softmax, device, problem, options, rows, size, result);
}

/* ---- the first use ---- */

static fdm_status first_gemm(const fdm_device *device, const void *problem, const fdm_tune_options *options,
                             fdm_tune_result *result) {
    return tune(&gemm, device, problem, options, NULL, 0, result);
}
static fdm_status first_softmax(const fdm_device *device, const void *problem, const fdm_tune_options *options,
                                fdm_tune_result *result) {
    return tune(&softmax, device, problem, options, NULL, 0, result);
}

int companion_measure_first(const struct companion_operation *operation, const fdm_device *device, const void *problem,
                            void *stream) {
    char key[TUNING_KEY_BYTES];
    return !companion_key(operation, device, problem, key) &&
           tune_class(device, operation == &gemm_operation ? first_gemm : first_softmax, problem, stream, key);
}
