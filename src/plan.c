/* plan.c: walks the families in order and keeps the first that takes the problem, or every reason why none does. */
#include "plan.h"

#include <stdio.h>
#include <string.h>

#include "error.h"
#include "families/cpu/threads.h"
#include "settings.h"

const struct family *plan_family(const fdm_plan *plan) {
    for (int32_t i = 0; families[i]; i++)
        if (strcmp(families[i]->name, plan->family) == 0)
            return families[i];
    return NULL;
}

int plan_names_row(const fdm_plan *plan, const struct family *family) {
    return plan->kernel_index >= 0 && plan->kernel_index < family->num_kernels &&
           strcmp(family->kernel(plan->kernel_index)->name, plan->kernel) == 0;
}

static fdm_plan empty_plan(const fdm_device *device, const fdm_problem *problem) {
    return (fdm_plan){
        .problem = *problem, .device = device->id, .v_in_registers = -1, .shared_bytes = -1, .num_threads = 1};
}

/* Appends "family: why; " to the reasons collected so far. */
static void append_reason(char *reasons, size_t size, const char *family, const char *why) {
    size_t used = strlen(reasons);
    snprintf(reasons + used, size - used, "%s%s: %.160s", used ? "; " : "", family, why);
}

/* The caller's wish comes before the environment's. */
static const char *forced_kernel(const fdm_options *options) {
    if (options && (options->kernel || options->family))
        return options->kernel;
    return setting_get(SETTING_KERNEL);
}

/* A thread is worth waking for 2^20 multiply-adds, some 10 us of one core: a parallel region of OpenMP costs 1 to 2 us,
 * waking the own pool's threads 10 us and more. */
static int32_t worthwhile_threads(const fdm_problem *p, int32_t available) {
    double rows = p->varlen ? (double)p->total_q : (double)p->batch * (double)p->seqlen_q;
    double work = rows * (double)p->heads * (double)p->seqlen_k * (double)(p->head_dim + p->head_dim_v);
    double most = work / (1 << 20);
    return most >= available ? available : most < 1 ? 1 : (int32_t)most;
}

fdm_status fdm_plan_attention(const fdm_device *device, const fdm_problem *problem, const fdm_options *options,
                              fdm_plan *plan) {
    if (!device || !plan)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", device ? "plan" : "device");
    fdm_status status = fdm_problem_validate(problem);
    if (status)
        return status;
    const char *wanted_family = options ? options->family : NULL;
    struct plan_request request = {.device = device,
                                   .problem = problem,
                                   .kernel = forced_kernel(options),
                                   .family_forced = wanted_family != NULL,
                                   .num_threads = 1};
    if (device->id.type == FDM_CPU)
        request.num_threads = worthwhile_threads(
            problem, threads_for(options ? options->num_threads : 0, options ? options->executor : NULL));
    char reasons[400] = "";
    int known = 0;
    for (int32_t i = 0; families[i]; i++) {
        if (wanted_family && strcmp(families[i]->name, wanted_family) != 0)
            continue;
        known = 1;
        fdm_plan candidate = empty_plan(device, problem);
        candidate.num_threads = request.num_threads;
        snprintf(candidate.family, sizeof candidate.family, "%s", families[i]->name);
        if (families[i]->choose(&request, &candidate)) {
            *plan = candidate;
            return FDM_OK;
        }
        append_reason(reasons, sizeof reasons, families[i]->name, candidate.reason);
    }
    if (!known)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "family '%s' is unknown", wanted_family);
    return error_set(FDM_ERROR_UNSUPPORTED, "no kernel takes this problem on %s: %s", device->name, reasons);
}

fdm_status fdm_kernel_list(int32_t index, fdm_kernel_info *info) {
    if (!info)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "info is NULL");
    int32_t left = index;
    for (int32_t i = 0; left >= 0 && families[i]; left -= families[i++]->num_kernels) {
        if (left >= families[i]->num_kernels)
            continue;
        const struct kernel_row *row = families[i]->kernel(left);
        *info = (fdm_kernel_info){
            families[i]->name,       row->name, row->description, row->pass, families[i]->available(left),
            families[i]->device_type};
        return FDM_OK;
    }
    return error_set(FDM_ERROR_INVALID_ARGUMENT, "kernel index %d is past the end of the list", index);
}
