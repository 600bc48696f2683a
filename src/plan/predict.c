/* predict.c: the predicted time of a plan. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/struct_bytes.h"
#include "plan/plan.h"
#include "tuning/model.h"

/* The plan's parameter of one of these names; 1 where it has none. */
static int32_t parameter(const struct family *family, const fdm_plan *plan, const char *first, const char *second) {
    const char *const *names = family->parameters ? family->parameters(family, plan->kernel_index) : NULL;
    for (int32_t i = 0; names && names[i]; i++)
        if (strcmp(names[i], first) == 0 || strcmp(names[i], second) == 0)
            return plan->parameters[i];
    return 1;
}

static int32_t parts_of(const fdm_plan *plan) {
    const char *parts = strstr(plan->choice, "_Parts");
    int32_t number = 0;
    for (parts = parts ? parts + 6 : ""; *parts >= '0' && *parts <= '9' && number < 1000; parts++)
        number = 10 * number + (*parts - '0');
    return number;
}

/* Kernels with roles take a multiprocessor's registers; eight warps of mma.decode do. */
static int32_t resident_of(const struct family *family, const fdm_plan *plan) {
    const int32_t warps = strcmp(plan->kernel, "mma.decode") == 0 ? parameter(family, plan, "WARPS", "") : 0;
    return warps > 0 ? 8 / warps : strncmp(plan->kernel, "hopper.", 7) == 0 ? 1 : 0;
}

static enum model_order order_of(const fdm_plan *plan, int gathers) {
    const fdm_problem *p = &plan->problem;
    if (strstr(plan->choice, "_Static"))
        return p->causal || p->window_left >= 0 || p->window_right >= 0 ? MODEL_PAIRS : MODEL_STATIC;
    return strstr(plan->choice, "_Dynamic") && (p->varlen || gathers) ? MODEL_ASKS_EARLY : MODEL_FREE;
}

static struct model_way way_of(const struct family *family, const fdm_plan *plan, int64_t window) {
    const int32_t parts = parts_of(plan);
    struct model_way way = {.plan = plan, .window = window, .packed = parameter(family, plan, "PACKED_HEADS", "")};
    way.splits = plan->problem.pass == FDM_BACKWARD ? parts ? parts : parameter(family, plan, "GROUP_PARTS", "")
                                                    : parameter(family, plan, "NUM_SPLITS", "SPLITS");
    way.kernels_own = strstr(plan->choice, "_Gather") != NULL || strstr(plan->kernel, ".gather") != NULL;
    way.resident = resident_of(family, plan);
    way.order = order_of(plan, way.kernels_own);
    if (strcmp(plan->kernel, "mma.decode") == 0 && plan->problem.heads_kv > 0) /* rows of a group in one block */
        way.packed = (int32_t)(plan->problem.heads / plan->problem.heads_kv);
    if (window <= 0)
        way.window = plan->problem.seqlen_k / 8 + 1;
    return way;
}

fdm_status fdm_plan_predict(const fdm_device *device, const fdm_plan *plan, int64_t window,
                            fdm_prediction *prediction) {
    fdm_plan plan_room;
    fdm_device device_room;
    char name[MODEL_NAME_BYTES];
    fdm_prediction made = {.struct_bytes = sizeof made};
    if (!(plan = plan_read(plan, &plan_room)) || !(device = STRUCT_READ(fdm_device, device, &device_room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    const fdm_status status = STRUCT_CHECK(fdm_prediction, prediction);
    if (status)
        return status;
    const struct family *family = plan_family(plan);
    if (!family || !plan_names_row(plan, family))
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "the plan names kernel '%s' of family '%s', which this library does not have", plan->kernel,
                         plan->family);
    if (family->device_type != FDM_CUDA)
        return error_set(FDM_ERROR_UNSUPPORTED, "times of kernels of CUDA devices alone are predicted");
    const struct model_way way = way_of(family, plan, window);
    model_name(&way, name);
    model_features(device, &way, made.features);
    memcpy(made.name, name, sizeof made.name);
    const struct model_row *row = model_find(device, &way);
    if (row) {
        made.seconds = model_seconds(row, made.features);
        made.residual = (double)row->residual;
        made.num_samples = row->num_samples;
    }
    return STRUCT_WRITE(fdm_prediction, prediction, &made);
}

/* ---- the model's choice ---- */

/* scripts/tune_fit.py judges the model by these: a way is surely faster where it is predicted to take LEAD less time,
 * and SURE times what both rows err together less. */
static const double LEAD = 0.02, SURE = 2;

static double lead_of(const fdm_prediction *rule, const fdm_prediction *way) {
    return fmax(LEAD, SURE * hypot(rule->residual, way->residual));
}

void plan_apply_predicted(const fdm_device *facts, fdm_plan *plan) {
    fdm_device device = *facts;
    fdm_kernel_info kernel = {.struct_bytes = sizeof kernel};
    fdm_prediction rule = {.struct_bytes = sizeof rule}, way = rule;
    fdm_plan other = {.struct_bytes = sizeof other}, best;
    double least = HUGE_VAL;
    device.struct_bytes = sizeof device;
    if (fdm_plan_predict(&device, plan, 0, &rule) || rule.seconds <= 0)
        return;
    for (int32_t i = 0; !fdm_kernel_list(i, &kernel); i++) {
        if (kernel.pass != plan->problem.pass || kernel.device_type != device.id.type ||
            !plan_may_tune(&device, kernel.name))
            continue;
        for (int32_t n = 0; !fdm_plan_variant(&device, &plan->problem, kernel.name, n, &other); n++)
            if (!fdm_plan_predict(&device, &other, 0, &way) && way.seconds > 0 && way.seconds < least &&
                way.seconds < (1 - lead_of(&rule, &way)) * rule.seconds) {
                least = way.seconds;
                best = other;
            }
    }
    if (isinf(least))
        return;
    char words[160];
    snprintf(words, sizeof words, "predicted %.1f %% less time than %s; ", 100 * (1 - least / rule.seconds),
             plan->choice);
    *plan = best;
    snprintf(plan->reason, sizeof plan->reason, "%s%.320s", words, best.reason);
}
