/* attention.c: the public entries: describe, plan, execute. */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/settings.h"
#include "base/struct_bytes.h"
#include "device/device.h"
#include "device/threads.h"
#include "plan/plan.h"
#include "problem/problem.h"
#include "problem/problem_fields.h"
#include "tuner/first_use.h"

/* The line of spec 6.2. */
static void print_profile(const fdm_plan *plan) {
    const fdm_problem *p = &plan->problem;
    char arch[16] = "CPU";
    fdm_device device;
    if (plan->device.type == FDM_CUDA && !device_facts(FDM_CUDA, plan->device.index, &device))
        snprintf(arch, sizeof arch, "SM%d.%d", device.compute_major, device.compute_minor);
    fprintf(stderr, "FLASH_DMATTN_PROFILE: HeadDim=%lld, Arch=%s, SeqQ=%lld, SeqK=%lld, Batch=%lld, Choice=%s\n",
            (long long)p->head_dim, arch, (long long)p->seqlen_q, (long long)p->seqlen_k, (long long)p->batch,
            plan->choice);
}

/* To stderr, what the settings ask for. */
static fdm_status report_plan(const fdm_plan *plan) {
    int profile = 0, log;
    fdm_status status =
        plan->problem.pass == FDM_BACKWARD ? setting_read_flag(SETTING_PROFILE_BACKWARD, &profile) : FDM_OK;
    if (status || (status = setting_read_flag(SETTING_LOG, &log)))
        return status;
    if (profile)
        print_profile(plan);
    if (log)
        fprintf(stderr, "flash_dmattn: %s, choice %s, %d threads: %s\n", plan->kernel, plan->choice, plan->num_threads,
                plan->reason);
    return FDM_OK;
}

/* What a call that breaks a rule is told. */
static const char *const broken[OF_PLAN] = {
#define FOR_OTHERS(what) "the plan is for " what ", but these are not"
#define MAPPABLE         " that a tensor map can describe (no stride of 0, none of 2^40 bytes or more)"
    [FACT_ALIGNED] = FOR_OTHERS("16-byte aligned tensors"),
    [FACT_SCORES_ALIGNED] = FOR_OTHERS("a mask and bias of contiguous, 16-byte aligned rows"),
    [FACT_Q_MAPPABLE] = FOR_OTHERS("q and dout" MAPPABLE),
    [FACT_KEYS_MAPPABLE] = FOR_OTHERS("k and v" MAPPABLE),
    [FACT_SCORES_MAPPABLE] = FOR_OTHERS("a mask and bias" MAPPABLE),
    [FACT_VALUE_IN_KEY] = "the plan is for a v that is the first columns of k, but this v lies elsewhere",
    [SAME_SHAPES] = "the tensors have other shapes or another dtype than the plan",
    [SAME_SCORES] = "the tensors have another mask, bias, sink, key or row intervals than the plan",
    [SAME_CACHE] = "the tensors have another cache, table, new keys or rotary tables than the plan",
    [SAME_OUTPUTS] = "the call has other outputs or gradients than the plan",
};

static inline int is_broken(enum field_rule rule, const void *planned, const void *now, size_t bytes) {
    if (rule > FACT_VALUE_IN_KEY)
        return memcmp(planned, now, bytes) != 0;
    return !struct_is_zero(planned, bytes) && struct_is_zero(now, bytes);
}

/* Everything a kernel's choice and workspace depend on must be as planned; alignment may exceed the plan's,
 * never fall below it. What exceeds stays unused: fdm_prepare() has made the plan's kernels ready, and no others. */
static fdm_status check_same_problem(const fdm_plan *plan, fdm_problem *now) {
    const fdm_problem *p = &plan->problem;
    if (memcmp(p, now, sizeof *p) == 0) /* it has no padding; most calls are just the plan's */
        return FDM_OK;
    int breaks[NUM_FIELD_RULES] = {0};
#define COMPARE(field, kind, value, rule)                                        \
    breaks[rule] |= is_broken(rule, &p->field, &now->field, sizeof p->field);    \
    if (rule <= FACT_VALUE_IN_KEY && struct_is_zero(&p->field, sizeof p->field)) \
        memset(&now->field, 0, sizeof now->field);
    FDM_PROBLEM_FIELDS(COMPARE, COMPARE)
    for (int rule = FACT_ALIGNED; rule < OF_PLAN; rule++) {
        const int of_cuda = rule > FACT_ALIGNED && rule <= FACT_VALUE_IN_KEY;
        if (breaks[rule] && (!of_cuda || plan->device.type == FDM_CUDA))
            return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s", broken[rule]);
    }
    return FDM_OK;
}

/* The family that made the plan and has the kernel it names here; NULL with a sentence. */
static const struct family *family_of(const fdm_plan *plan, fdm_status *status) {
    const struct family *family = plan_family(plan);
    *status = FDM_OK;
    if (!family || !plan_names_row(plan, family))
        *status = error_set(FDM_ERROR_INVALID_ARGUMENT,
                            "the plan names kernel '%s' of family '%s', which this library does not have", plan->kernel,
                            plan->family);
    else if (family->kernel(family, plan->kernel_index)->pass != plan->problem.pass)
        *status = error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan's kernel '%s' is for the other pass", plan->kernel);
    else if (!family->available(family, plan->kernel_index) &&
             !(*status = family->prepare ? family->prepare(family, plan) : FDM_OK)) /* which says why, where it can */
        *status = error_set(FDM_ERROR_UNSUPPORTED, "this machine cannot run kernel '%s'", plan->kernel);
    return *status ? NULL : family;
}

static fdm_status run_plan(const struct family *family, const fdm_plan *plan, const struct attention *attention,
                           void *workspace, size_t workspace_bytes, const fdm_launch *launch) {
    if (plan->workspace_bytes > 0 && (!workspace || workspace_bytes < (size_t)plan->workspace_bytes))
        return error_set(FDM_ERROR_WORKSPACE, "workspace has %zu bytes; the plan needs %lld",
                         workspace ? workspace_bytes : 0, (long long)plan->workspace_bytes);
    if ((uintptr_t)workspace % 64)
        return error_set(FDM_ERROR_WORKSPACE, "workspace starts at an address that is not a multiple of 64");
    const fdm_status status = report_plan(plan);
    if (status)
        return status;
    if (plan->device.type == FDM_CPU)
        attention_clear_rest(attention);
    return family->execute(family, plan, attention, workspace, launch);
}

fdm_status fdm_execute(const fdm_plan *plan, const fdm_tensors *tensors, void *workspace, size_t workspace_bytes,
                       const fdm_launch *launch) {
    fdm_plan plan_room;
    fdm_tensors tensors_room;
    fdm_launch launch_room;
    if (!(plan = plan_read(plan, &plan_room)) || !(tensors = STRUCT_READ(fdm_tensors, tensors, &tensors_room)) ||
        (launch && !(launch = STRUCT_READ(fdm_launch, launch, &launch_room))))
        return FDM_ERROR_INVALID_ARGUMENT;
    fdm_problem problem;
    struct attention attention;
    fdm_options options = problem_options(&plan->problem);
    fdm_status status = problem_from_tensors(plan->problem.pass, tensors, &options, &problem, &attention);
    if (!status && (tensors->q->device.type != plan->device.type || tensors->q->device.index != plan->device.index))
        status = error_set(FDM_ERROR_INVALID_ARGUMENT, "q is on DLPack device %d:%d, but the plan is for %d:%d",
                           tensors->q->device.type, tensors->q->device.index, plan->device.type, plan->device.index);
    if (status || (status = check_same_problem(plan, &problem)))
        return status;
    const struct family *family = family_of(plan, &status);
    if (family && family->check)
        status = family->check(family, plan, &problem);
    return status ? status : run_plan(family, plan, &attention, workspace, workspace_bytes, launch);
}

fdm_status fdm_prepare(const fdm_plan *plan) {
    fdm_plan room;
    if (!(plan = plan_read(plan, &room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    fdm_status status;
    const struct family *family = family_of(plan, &status);
    if (family && family->check)
        status = family->check(family, plan, &plan->problem);
    return !status && family->prepare ? family->prepare(family, plan) : status;
}

static void *allocate_default(void *context, size_t bytes) {
    (void)context;
    return memory_allocate(bytes);
}

static void release_default(void *context, void *memory) {
    (void)context;
    memory_release(memory);
}

static fdm_status attention_once(fdm_pass pass, const fdm_tensors *tensors, const fdm_options *options,
                                 const fdm_allocator *allocator) {
    static const fdm_allocator standard = {NULL, allocate_default, release_default};
    fdm_tensors tensors_room;
    fdm_options options_room;
    if (!(tensors = STRUCT_READ(fdm_tensors, tensors, &tensors_room)) ||
        (options && !(options = STRUCT_READ(fdm_options, options, &options_room))))
        return FDM_ERROR_INVALID_ARGUMENT;
    fdm_problem problem;
    struct attention attention;
    fdm_plan plan;
    fdm_status status = problem_from_tensors(pass, tensors, options, &problem, &attention);
    int measures = 0;
    if (!status)
        status = plan_call(tensors->q->device, &problem, options, &plan, &measures);
    if (!status && measures && tune_first_use(tensors->q->device, &problem, options))
        status = plan_call(tensors->q->device, &problem, options, &plan, &measures);
    if (status)
        return status;
    const struct family *family = family_of(&plan, &status);
    if (!family)
        return status;
    if (!allocator && plan.workspace_bytes > 0 && plan.device.type == FDM_CUDA)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "allocator is NULL, but this call needs %lld bytes of workspace on the CUDA device",
                         (long long)plan.workspace_bytes);
    if (!allocator)
        allocator = &standard;
    void *workspace = NULL;
    if (plan.workspace_bytes > 0 &&
        !(workspace = allocator->allocate(allocator->context, (size_t)plan.workspace_bytes)))
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for a workspace of %lld bytes",
                         (long long)plan.workspace_bytes);
    const fdm_launch launch = {.stream = options ? options->stream : NULL,
                               .executor = options ? options->executor : NULL};
    status = run_plan(family, &plan, &attention, workspace, (size_t)plan.workspace_bytes, &launch);
    if (workspace)
        allocator->release(allocator->context, workspace);
    return status;
}

fdm_status fdm_attention_forward(const fdm_tensors *tensors, const fdm_options *options,
                                 const fdm_allocator *allocator) {
    return attention_once(FDM_FORWARD, tensors, options, allocator);
}

fdm_status fdm_attention_backward(const fdm_tensors *tensors, const fdm_options *options,
                                  const fdm_allocator *allocator) {
    return attention_once(FDM_BACKWARD, tensors, options, allocator);
}

void fdm_shutdown(void) { threads_shutdown(); }
