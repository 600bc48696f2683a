/* mma_family.c: the portable CUDA family: its rows in order of preference, the choice among them, the way to each. */
#include "families/mma/mma_family.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"

static const struct mma_algorithm *const algorithms[] = {
    &mma_decode_algorithm,   &mma_wide_algorithm,       &mma_forward_algorithm,   &mma_forward32_algorithm,
    &mma_backward_algorithm, &mma_backward32_algorithm, &mma_split_kv_algorithm,  &mma_split_q_algorithm,
    &mma_share_kv_algorithm, &mma_share_qkv_algorithm,  &mma_tiling_qk_algorithm, &mma_tiling_qkv_algorithm};
enum { NUM_ALGORITHMS = sizeof algorithms / sizeof algorithms[0] };

static const struct kernel_row *kernel(int32_t row) { return &algorithms[row]->row; }

static int available(int32_t row) { return row >= 0 && row < NUM_ALGORITHMS && cuda_device_count() > 0; }

/* What no kernel of the family takes. */
static const char *family_refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    if (device->id.type != FDM_CUDA)
        return "it runs on CUDA devices only";
    if (device->compute_major < 8) {
        snprintf(text, size, "compute capability %d.%d is below 8.0", device->compute_major, device->compute_minor);
        return text;
    }
    if (p->dtype == FDM_FLOAT64)
        return "float64 is computed by the reference family only, on the CPU";
    if (p->seqlen_q >= INT32_MAX || p->seqlen_k >= INT32_MAX || p->total_q >= INT32_MAX || p->total_k >= INT32_MAX)
        return "sequences are shorter than 2^31";
    if (p->batch * p->heads * (p->seqlen_q / 16 + 1) >= INT32_MAX)
        return "rows of all heads are fewer than 2^35";
    return NULL;
}

static void name_plan(int32_t index, fdm_plan *plan) {
    plan->kernel_index = index;
    snprintf(plan->kernel, sizeof plan->kernel, "%s", algorithms[index]->row.name);
}

/* A kernel asked for by name, or one of its variants by choice code; 0 with a clause in `why`. */
static int fill_forced(const struct mma_algorithm *a, const struct plan_request *request, fdm_plan *plan, char *why,
                       size_t size) {
    char text[160];
    const int by_name = strcmp(a->row.name, request->kernel) == 0;
    const int by_code = a->has_code && a->has_code(request->kernel);
    if (a->row.pass != request->problem->pass) {
        if (by_name || by_code)
            snprintf(why, size, "is for the other pass");
        return 0;
    }
    const char *refused = a->refusal(request->device, request->problem, text, sizeof text);
    *plan->reason = 0;
    if (!refused && by_code && a->fill_code(request->device, request->problem, request->kernel, plan))
        return 1;
    for (int32_t variant = 0; !refused && !by_code && a->fill(request->device, request->problem, variant, plan);
         variant++)
        if (by_name || strcmp(plan->choice, request->kernel) == 0)
            return 1;
    if (by_name || by_code)
        snprintf(why, size, "cannot run it: %.*s", (int)size - 16, refused ? refused : plan->reason);
    return 0;
}

static int choose_forced(const struct plan_request *request, fdm_plan *plan) {
    char why[200] = "is not a kernel of this family for this pass";
    for (int32_t i = 0; i < NUM_ALGORITHMS; i++)
        if (fill_forced(algorithms[i], request, plan, why, sizeof why)) {
            name_plan(i, plan);
            return 1;
        }
    snprintf(plan->reason, sizeof plan->reason, "kernel '%s' %s", request->kernel, why);
    return 0;
}

/* Reasons of several kernels in one sentence: "a, b: why; c: why". */
struct reasons {
    char text[400], last[160];
    size_t names_end; /* of those that share the last reason */
};
static void add_reason(struct reasons *r, const char *name, const char *why) {
    char tail[200];
    size_t used = strlen(r->text);
    if (used && strcmp(r->last, why) == 0) {
        snprintf(tail, sizeof tail, ", %s: %s", name, why);
        used = r->names_end;
    } else {
        snprintf(tail, sizeof tail, "%s%s: %s", used ? "; " : "", name, why);
    }
    snprintf(r->text + used, sizeof r->text - used, "%s", tail);
    r->names_end = used + strlen(tail) - strlen(why) - 2;
    snprintf(r->last, sizeof r->last, "%s", why);
}

static int choose(const struct plan_request *request, fdm_plan *plan) {
    char text[160];
    const char *why = family_refusal(request->device, request->problem, text, sizeof text);
    if (why) {
        snprintf(plan->reason, sizeof plan->reason, "%s", why);
        return 0;
    }
    if (request->kernel)
        return choose_forced(request, plan);
    struct reasons reasons = {0};
    for (int32_t i = 0; i < NUM_ALGORITHMS; i++) {
        const struct mma_algorithm *a = algorithms[i];
        if (!a->chosen_freely || a->row.pass != request->problem->pass)
            continue;
        const char *refused = a->refusal(request->device, request->problem, text, sizeof text);
        if (!refused && (!a->suits || a->suits(request->device, request->problem))) {
            name_plan(i, plan);
            return a->fill(request->device, request->problem, 0, plan);
        }
        add_reason(&reasons, a->row.name, refused ? refused : "other kernels suit it better");
    }
    snprintf(plan->reason, sizeof plan->reason, "%s",
             *reasons.text ? reasons.text : "it has no kernel for this pass yet");
    return 0;
}

static fdm_status execute(const fdm_plan *plan, const struct attention *attention, void *workspace,
                          const fdm_launch *launch) {
    return algorithms[plan->kernel_index]->execute(plan, attention, workspace, launch ? launch->stream : NULL);
}

_Static_assert((int)MMA_REQUESTS_MAX <= (int)FAMILY_LAUNCHES_MAX, "there is room for them");
int32_t mma_requests(const fdm_plan *plan, struct cuda_kernel_request *requests) {
    return algorithms[plan->kernel_index]->requests(plan, requests);
}

int mma_chosen_freely(int32_t row) { return algorithms[row]->chosen_freely; }

static fdm_status prepare(const fdm_plan *plan) {
    struct cuda_kernel_request requests[MMA_REQUESTS_MAX];
    const struct cuda_kernel *kernels[MMA_REQUESTS_MAX];
    int32_t count = mma_requests(plan, requests);
    return count ? cuda_kernels_get(plan->device.index, requests, count, kernels)
                 : error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan's tile or workspace is not its kernel's");
}

const struct family family_mma = {.name = "mma",
                                  .device_type = FDM_CUDA,
                                  .num_kernels = NUM_ALGORITHMS,
                                  .kernel = kernel,
                                  .available = available,
                                  .choose = choose,
                                  .prepare = prepare,
                                  .launches = mma_requests,
                                  .execute = execute};
