/* gpu_family.c: a family of CUDA kernels: the choice among its algorithms, every reason against one, the way to each.
 */
#include "gpu/gpu_family.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "gpu/append_launch.h"
#include "gpu/splits.h"

static const struct gpu_list *list_of(const struct family *family) { return family->list; }
static const struct gpu_algorithm *algorithm_of(const struct family *family, int32_t index) {
    return list_of(family)->algorithms[index];
}

const struct kernel_info *gpu_family_kernel(const struct family *family, int32_t index) {
    return &algorithm_of(family, index)->info;
}

const char *const *gpu_family_parameters(const struct family *family, int32_t index) {
    return algorithm_of(family, index)->parameters;
}

int gpu_family_chosen_freely(const struct family *family, int32_t index) {
    return algorithm_of(family, index)->chosen_freely;
}

/* The bound that a device's compute capability is below or above; 0 when the family runs on it. */
static int32_t bound_left(const struct gpu_list *list, const fdm_device *device) {
    const int32_t arch = device->compute_major * 10 + device->compute_minor;
    return arch < list->arch_min ? list->arch_min : list->arch_max && arch > list->arch_max ? list->arch_max : 0;
}

/* 1 when a device that the family runs on is present. */
int gpu_family_available(const struct family *family, int32_t index) {
    if (index < 0 || index >= family->num_kernels)
        return 0;
    const int32_t count = cuda_device_count();
    for (int32_t i = 0; i < count; i++) {
        fdm_device device;
        if (cuda_device_facts(i, &device) == FDM_OK && !bound_left(list_of(family), &device))
            return 1;
    }
    return 0;
}

/* What no kernel of the family takes. */
static const char *family_refusal(const struct gpu_list *list, const fdm_device *device, const fdm_problem *p,
                                  char *text, size_t size) {
    if (device->id.type != FDM_CUDA)
        return "it runs on CUDA devices only";
    const int32_t bound = bound_left(list, device);
    if (bound) {
        snprintf(text, size, "compute capability %d.%d is %s %d.%d", device->compute_major, device->compute_minor,
                 device->compute_major * 10 + device->compute_minor < bound ? "below" : "above", bound / 10,
                 bound % 10);
        return text;
    }
    if (p->dtype == FDM_FLOAT64)
        return "float64 is computed by the reference family only, on the CPU";
    if (p->seqlen_q >= INT32_MAX || p->seqlen_k >= INT32_MAX || p->total_q >= INT32_MAX || p->total_k >= INT32_MAX)
        return "sequences are shorter than 2^31";
    if ((double)p->batch * (double)p->heads * (double)(p->seqlen_q / 16 + 1) >= INT32_MAX)
        return "rows of all heads are fewer than 2^35";
    return NULL;
}

/* GPU_FEATURE_*: what the problem asks. */
static uint32_t features_of(const fdm_problem *p) {
    uint32_t features = 0;
#define ADD_FEATURE(name, words, asked) features |= (asked) ? (uint32_t)GPU_FEATURE_##name : 0;
    GPU_FEATURES(ADD_FEATURE)
    return features;
}

/* "it does not take ...", as many as there is room for. */
static const char *name_features(uint32_t features, char *text, size_t size) {
    static const char *const words[GPU_NUM_FEATURES] = {
#define FEATURE_WORDS(name, words, asked) words,
        GPU_FEATURES(FEATURE_WORDS)};
    size_t used = 0;
    for (int32_t i = 0; i < GPU_NUM_FEATURES && used < size; i++)
        if (features >> i & 1)
            used += (size_t)snprintf(text + used, size - used, "%s%s", used ? ", " : "it does not take ", words[i]);
    return text;
}

/* What this kernel does not take. */
static const char *refusal_of(const struct gpu_algorithm *a, const fdm_device *device, const fdm_problem *p, char *text,
                              size_t size) {
    if (p->pass == FDM_FORWARD && p->has_lse_low && !a->writes_lse_low)
        return "it does not write lse_low";
    const uint32_t left = features_of(p) & ~a->features;
    return left ? name_features(left, text, size) : a->refusal(device, p, text, size);
}

static void name_plan(const struct family *family, int32_t index, fdm_plan *plan) {
    plan->kernel_index = index;
    snprintf(plan->kernel, sizeof plan->kernel, "%s", algorithm_of(family, index)->info.name);
}

/* Whether a launch precedes the kernel's own, which is the same for each: new keys are appended, and what turns is
 * turned into the end of the workspace. */
static int is_preceded(const struct gpu_algorithm *a, const fdm_plan *plan, const fdm_problem *p) {
    return append_precedes(p) && !(a->appends && a->appends(plan));
}
static int precede(const struct gpu_algorithm *a, const fdm_problem *p, int filled, fdm_plan *plan) {
    const size_t used = strlen(plan->reason);
    if (!filled || !append_precedes(p))
        return filled;
    const int apart = is_preceded(a, plan, p);
    if (apart)
        plan->workspace_bytes = gpu_round_up(plan->workspace_bytes, 64) + append_workspace_bytes(p);
    snprintf(plan->reason + used, sizeof plan->reason - used, "; %s %s", apart ? "a launch before it" : "it",
             !p->new_rows    ? "turns q"
             : p->rotary_dim ? "turns q and new keys, and appends those"
                             : "appends new keys");
    return filled;
}
static int fill(const struct gpu_algorithm *a, const fdm_device *device, const fdm_problem *p, int32_t variant,
                fdm_plan *plan) {
    return precede(a, p, a->fill(device, p, variant, plan), plan);
}

/* A kernel asked for by name, or one of its variants by choice code; 0 with a clause in `why`. */
static int fill_forced(const struct gpu_algorithm *a, const struct plan_request *request, fdm_plan *plan, char *why,
                       size_t size) {
    char text[160];
    const int by_name = strcmp(a->info.name, request->kernel) == 0;
    const int by_code = a->has_code && a->has_code(request->kernel);
    if (a->info.pass != request->problem->pass) {
        if (by_name || by_code)
            snprintf(why, size, "is for the other pass");
        return 0;
    }
    if (a->has_code && !by_name && !by_code)
        return 0;
    const char *refused = refusal_of(a, request->device, request->problem, text, sizeof text);
    *plan->reason = 0;
    if (!refused && by_code &&
        precede(a, request->problem, a->fill_code(request->device, request->problem, request->kernel, plan), plan))
        return 1;
    for (int32_t variant = 0; !refused && !by_code && fill(a, request->device, request->problem, variant, plan);
         variant++)
        if (by_name || strcmp(plan->choice, request->kernel) == 0)
            return 1;
    if (by_name || by_code)
        snprintf(why, size, "cannot run it: %.*s", (int)size - 16, refused ? refused : plan->reason);
    return 0;
}

/* Codes are not compared with what names a kernel: that takes every way of every kernel. */
static int choose_forced(const struct family *family, const struct plan_request *request, fdm_plan *plan,
                         struct refusals *refusals) {
    char why[200] = "is not a kernel of this family for this pass";
    const fdm_plan empty = *plan; /* a kernel's parameters are not another's */
    const int32_t named = family_find_kernel(family, request->kernel);
    for (int32_t i = 0; i < family->num_kernels; i++) {
        if (request->names_kernel && i != named)
            continue;
        *plan = empty;
        if (fill_forced(algorithm_of(family, i), request, plan, why, sizeof why)) {
            name_plan(family, i, plan);
            return 1;
        }
    }
    return family_refuse(refusals, request->kernel, why);
}

/* The rules' variant, or the same tile with the scheduler that was asked for, where there is one. */
static int fill_freely(const struct family *family, int32_t index, const struct plan_request *request, fdm_plan *plan,
                       struct refusals *refusals) {
    const struct gpu_algorithm *a = algorithm_of(family, index);
    name_plan(family, index, plan);
    fdm_plan other = *plan;
    if (!fill(a, request->device, request->problem, 0, plan)) {
        refusals->count = 0; /* this kernel alone is the family's */
        return family_refuse(refusals, NULL, plan->reason);
    }
    if (request->scheduler == SCHEDULER_ANY || !a->scheduler || a->scheduler(plan) == (int32_t)request->scheduler)
        return 1;
    for (int32_t n = 1; fill(a, request->device, request->problem, n, &other); n++)
        if (a->scheduler(&other) == (int32_t)request->scheduler && other.block_m == plan->block_m &&
            other.block_n == plan->block_n && other.shared_bytes == plan->shared_bytes) {
            *plan = other;
            break;
        }
    return 1;
}

int gpu_family_choose(const struct family *family, const struct plan_request *request, fdm_plan *plan,
                      struct refusals *refusals) {
    char text[160];
    const char *why = family_refusal(list_of(family), request->device, request->problem, text, sizeof text);
    if (why)
        return family_refuse(refusals, NULL, why);
    if (request->kernel)
        return choose_forced(family, request, plan, refusals);
    int32_t first = -1; /* that can, though another suits it better */
    for (int32_t i = 0; i < family->num_kernels; i++) {
        const struct gpu_algorithm *a = algorithm_of(family, i);
        if (!a->chosen_freely || a->info.pass != request->problem->pass)
            continue;
        why = refusal_of(a, request->device, request->problem, text, sizeof text);
        if (!why && first < 0)
            first = i;
        if (!why && a->passed_over)
            why = a->passed_over(request->device, request->problem);
        if (!why)
            return fill_freely(family, i, request, plan, refusals);
        family_refuse(refusals, a->info.name, why);
    }
    if (first >= 0 && request->family_forced)
        return fill_freely(family, first, request, plan, refusals);
    return refusals->count ? 0 : family_refuse(refusals, NULL, "it has no kernel for this pass yet");
}

int gpu_family_variant(const struct family *family, const struct plan_request *request, int32_t index, int32_t number,
                       fdm_plan *plan, struct refusals *refusals) {
    char text[160];
    const struct gpu_algorithm *a = algorithm_of(family, index);
    const char *why = family_refusal(list_of(family), request->device, request->problem, text, sizeof text);
    if (!why)
        why = a->info.pass != request->problem->pass
                  ? "it is for the other pass"
                  : refusal_of(a, request->device, request->problem, text, sizeof text);
    if (why)
        return family_refuse(refusals, NULL, why);
    name_plan(family, index, plan);
    if (fill(a, request->device, request->problem, number, plan))
        return 1;
    if (number > 0 && fill(a, request->device, request->problem, 0, plan)) /* there are variants, but fewer */
        return 0;
    return *plan->reason ? family_refuse(refusals, NULL, plan->reason) : 0;
}

fdm_status gpu_family_check(const struct family *family, const fdm_plan *plan, const fdm_problem *p) {
    char text[160];
    fdm_device device;
    fdm_status status = cuda_device_facts(plan->device.index, &device);
    if (status)
        return status;
    const char *why = family_refusal(list_of(family), &device, p, text, sizeof text);
    if (why)
        return error_set(FDM_ERROR_UNSUPPORTED, "kernel '%s' does not run on this device: %s", plan->kernel, why);
    why = refusal_of(algorithm_of(family, plan->kernel_index), &device, p, text, sizeof text);
    return why ? error_set(FDM_ERROR_INVALID_ARGUMENT, "kernel '%s' cannot run the plan's problem: %s", plan->kernel,
                           why)
               : FDM_OK;
}

/* Packed tensors without a sequence: no kernel has a block for their rows. Those of a backward have, before its own. */
static int has_no_sequence(const fdm_problem *p) {
    return p->pass == FDM_FORWARD && p->varlen && p->batch == 0 && p->total_q > 0;
}

/* The launches of a valid plan. The kernel that combines splits finds rows of no sequence by itself, and clears them.
 */
static fdm_status add_launches(const struct gpu_algorithm *a, const fdm_plan *plan, struct gpu_launches *l) {
    struct gpu_forward_params params = {0};
    if (!has_no_sequence(l->problem))
        return a->launch(plan, l);
    if (l->attention)
        gpu_fill_forward(l->attention, &params);
    combine_splits_add(l, 0, &params);
    return FDM_OK;
}

static fdm_status refuse_plan(void) {
    return error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan's tile or workspace is not its kernel's");
}

fdm_status gpu_family_execute(const struct family *family, const fdm_plan *plan, const struct attention *attention,
                              void *workspace, const fdm_launch *launch) {
    const struct gpu_algorithm *a = algorithm_of(family, plan->kernel_index);
    const fdm_problem *p = attention->problem;
    const int appends = is_preceded(a, plan, p) && !has_no_sequence(p);
    void *stream = launch ? launch->stream : NULL;
    struct gpu_launches launches;
    struct attention turned;
    fdm_plan own; /* what the kernel itself has */
    fdm_status status = FDM_OK;
    if (appends) {
        own = *plan;
        own.workspace_bytes -= append_workspace_bytes(p);
        plan = &own;
    }
    if (plan->workspace_bytes < 0 || !a->valid(plan, p))
        return refuse_plan();
    status = cache_fault_look(plan->device.index, attention, stream);
    if (!status && appends)
        status = append_before(plan->device.index, attention, (char *)workspace + own.workspace_bytes, stream, &turned);
    gpu_launches_begin(&launches, plan->device.index, p, appends ? &turned : attention, workspace);
    if (!status)
        status = add_launches(a, plan, &launches);
    return status ? status : gpu_launches_run(&launches, stream);
}

int32_t gpu_family_launches(const struct family *family, const fdm_plan *plan, struct cuda_kernel_request *requests) {
    const struct gpu_algorithm *a = algorithm_of(family, plan->kernel_index);
    struct gpu_launches l;
    gpu_launches_begin(&l, plan->device.index, &plan->problem, NULL, NULL);
    if (!a->valid(plan, &plan->problem) || add_launches(a, plan, &l))
        return 0;
    if (is_preceded(a, plan, &plan->problem) && !has_no_sequence(&plan->problem))
        append_request(&plan->problem, gpu_add_kernel(&l));
    memcpy(requests, l.requests, (size_t)l.num_kernels * sizeof *requests);
    return l.num_kernels;
}

fdm_status gpu_family_prepare(const struct family *family, const fdm_plan *plan) {
    struct cuda_kernel_request requests[FAMILY_LAUNCHES_MAX];
    const struct cuda_kernel *kernels[FAMILY_LAUNCHES_MAX];
    const int32_t count = gpu_family_launches(family, plan, requests);
    return count ? cuda_kernels_get(plan->device.index, requests, count, kernels) : refuse_plan();
}
