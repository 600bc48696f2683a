/* plan.c: walks the families in order and keeps the first that takes the problem, or every reason why none does. */
#include "plan/plan.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/kernel_name.h"
#include "base/settings.h"
#include "base/struct_bytes.h"
#include "device/device.h"
#include "device/isa.h"
#include "device/threads.h"
#include "families/families.h"
#include "tuning/store.h"
#include "tuning/wish.h"

const fdm_plan *plan_read(const fdm_plan *plan, fdm_plan *room) {
    plan = STRUCT_READ(fdm_plan, plan, room);
    if (!plan || struct_is_zero(plan->problem.reserved, sizeof plan->problem.reserved))
        return plan;
    error_set(FDM_ERROR_INVALID_ARGUMENT, "reserved words of the plan's problem are not 0; " FDM_NEWER_FIELD);
    return NULL;
}

const struct family *plan_family(const fdm_plan *plan) {
    for (int32_t i = 0; families[i]; i++)
        if (strcmp(families[i]->name, plan->family) == 0)
            return families[i];
    return NULL;
}

int plan_names_row(const fdm_plan *plan, const struct family *family) {
    return plan->kernel_index >= 0 && family_find_kernel(family, plan->kernel) == plan->kernel_index;
}

static fdm_plan empty_plan(const fdm_device *device, const fdm_problem *problem) {
    return (fdm_plan){.struct_bytes = sizeof(fdm_plan),
                      .problem = *problem,
                      .device = device->id,
                      .v_in_registers = -1,
                      .shared_bytes = -1,
                      .num_threads = 1};
}

/* Appends "a, b: why" for the kernels of each clause, with `before` ahead of it; of the first with `lead`. */
static void append_kernels(char *text, size_t size, const struct refusals *refused, const char *lead,
                           const char *before) {
    for (int32_t i = 0; i < refused->count; i++) {
        const struct refusal *r = &refused->list[i];
        const int joined = i > 0 && strcmp(r[-1].clause, r->clause) == 0;
        const int last = i + 1 == refused->count || strcmp(r[1].clause, r->clause) != 0;
        const size_t used = strlen(text);
        snprintf(text + used, size - used, "%s%s%s%s",
                 joined ? ", "
                 : i    ? before
                        : lead,
                 r->kernel, last ? ": " : "", last ? r->clause : "");
    }
}

/* Appends "family: why; " to the reasons collected so far; under a forced kernel "family: kernel 'name' why". */
static void append_reason(char *reasons, size_t size, const char *family, const struct plan_request *request,
                          const struct refusals *refused) {
    const size_t used = strlen(reasons);
    const struct refusal *first = refused->list;
    char why[400] = "";
    if (!first->kernel)
        snprintf(why, sizeof why, "%s", first->clause);
    else if (request->kernel)
        snprintf(why, sizeof why, "kernel '%s' %s", first->kernel, first->clause);
    else
        append_kernels(why, sizeof why, refused, "", "; ");
    snprintf(reasons + used, size - used, "%s%s: %.200s", used ? "; " : "", family, why);
}

/* What the caller and the environment fix; the caller comes first. */
struct forced {
    const char *kernel, *family; /* NULL = free choice */
    int kernel_is_set;           /* by FLASH_DMATTN_KERNEL */
    int32_t num_threads;
    enum scheduler scheduler;
    int tune; /* of tuning_wish() */
};

static fdm_status forced_scheduler(enum scheduler *scheduler) {
    const char *name;
    const fdm_status status = setting_read(SETTING_SCHEDULER, &name);
    *scheduler = SCHEDULER_ANY;
    for (int32_t i = 0; name && i < SCHEDULER_COUNT; i++)
        if (strcmp(name, scheduler_names[i]) == 0)
            *scheduler = (enum scheduler)i;
    return status;
}

/* The fewer of what the caller and FLASH_DMATTN_NUM_THREADS allow; 0: neither says. */
static fdm_status most_threads(const fdm_options *options, int32_t *most) {
    int64_t set;
    const fdm_status status = setting_read_number(SETTING_NUM_THREADS, &set);
    *most = options ? options->num_threads : 0;
    if (set > 0 && (*most <= 0 || set < *most))
        *most = (int32_t)set;
    return status;
}

/* A thread is worth waking for 2^20 multiply-adds, some 10 us of one core: a parallel region of OpenMP costs 1 to 2 us,
 * waking the own pool's threads 10 us and more. */
static int32_t worthwhile_threads(const fdm_problem *p, int32_t wanted, const fdm_executor *executor) {
    double rows = p->varlen ? (double)p->total_q : (double)p->batch * (double)p->seqlen_q;
    double work = rows * (double)p->heads * (double)p->seqlen_k * (double)(p->head_dim + p->head_dim_v);
    double most = work / (1 << 20);
    if (most < 2) /* one: the system need not be asked how many there are */
        return 1;
    int32_t available = threads_for(wanted, executor);
    return most >= available ? available : (int32_t)most;
}

static fdm_status forced_of(const fdm_problem *problem, int32_t device_type, const fdm_options *options,
                            struct forced *out) {
    struct forced forced = {options ? options->kernel : NULL, options ? options->family : NULL, 0, 1, SCHEDULER_ANY, 0};
    fdm_status status = forced_scheduler(&forced.scheduler);
    if (!forced.kernel && !forced.family)
        forced.kernel_is_set = (forced.kernel = setting_get(SETTING_KERNEL)) != NULL;
    if (forced.kernel)
        forced.kernel = kernel_current_name(forced.kernel);
    if (!status)
        status = tuning_wish(options ? options->tune : FDM_TUNE_DEFAULT,
                             forced.kernel || forced.family || forced.scheduler != SCHEDULER_ANY ||
                                 problem->deterministic || problem_fixes_splits(problem),
                             &forced.tune);
    if (!status && device_type == FDM_CPU) {
        int32_t most;
        status = most_threads(options, &most);
        forced.num_threads = worthwhile_threads(problem, most, options ? options->executor : NULL);
    }
    *out = forced;
    return status;
}

/* The family that has the kernel of this name, NULL if none. */
static const struct family *family_of_kernel(const char *name) {
    int32_t i = 0;
    while (families[i] && family_find_kernel(families[i], name) < 0)
        i++;
    return families[i];
}

/* Codes begin with a family's name in capitals, or with an architecture's; which there are is the problem's matter. */
static int may_be_code(const char *name) {
    char word[16];
    const size_t length = strcspn(name, "_");
    for (int32_t i = 0; families[i]; i++) {
        size_t same = 0;
        while (same < length && name[same] == toupper((unsigned char)families[i]->name[same]))
            same++;
        if (same == length && !families[i]->name[same])
            return 1;
    }
    snprintf(word, sizeof word, "%.*s", (int)(length < sizeof word ? length : 0), name);
    return strncmp(word, "SM", 2) == 0 && word[2] && word[2 + strspn(word + 2, "0123456789")] == 0;
}

int plan_knows_kernel(const char *name) { return family_of_kernel(name) || may_be_code(name); }

int plan_may_tune(const fdm_device *device, const char *kernel) {
    const struct family *family = family_of_kernel(kernel);
    const int wide = strncmp(device->isa, "avx512", 6) == 0 || strcmp(device->isa, "amx") == 0;
    if (!family || strcmp(family->name, "reference") == 0)
        return 0;
    if (family->device_type == FDM_CPU)
        return (!strstr(kernel, ".scalar") || strcmp(device->isa, "scalar") == 0) && !(wide && strstr(kernel, ".avx2"));
    return !family->chosen_freely || family->chosen_freely(family, family_find_kernel(family, kernel));
}

/* The device as it is for a call that leaves some multiprocessors to others. */
static fdm_status leave_margin(const fdm_options *options, fdm_device *device) {
    const int64_t margin = options ? options->sm_margin : 0;
    if (margin < 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "sm_margin is %lld; it must be at least 0", (long long)margin);
    if (device->id.type == FDM_CUDA)
        device->num_sms = margin < device->num_sms ? device->num_sms - (int32_t)margin : device->num_sms > 0;
    return FDM_OK;
}

static fdm_status choose(const fdm_device *device, const fdm_problem *problem, const struct forced *forced,
                         fdm_plan *plan) {
    const char *wanted_family = forced->family;
    const struct plan_request request = {.device = device,
                                         .problem = problem,
                                         .kernel = forced->kernel,
                                         .names_kernel = forced->kernel && family_of_kernel(forced->kernel),
                                         .family_forced = wanted_family != NULL,
                                         .num_threads = forced->num_threads,
                                         .scheduler = forced->scheduler};
    char reasons[800] = "", passed[400] = "";
    int known = 0;
    for (int32_t i = 0; families[i]; i++) {
        if (wanted_family && strcmp(families[i]->name, wanted_family) != 0)
            continue;
        known = 1;
        struct refusals refused;
        fdm_plan candidate = empty_plan(device, problem);
        refused.count = 0;
        candidate.num_threads = request.num_threads;
        snprintf(candidate.family, sizeof candidate.family, "%s", families[i]->name);
        if (families[i]->choose(families[i], &request, &candidate, &refused)) {
            const size_t used = strlen(candidate.reason);
            snprintf(candidate.reason + used, sizeof candidate.reason - used, "%s", passed);
            *plan = candidate;
            return FDM_OK;
        }
        append_reason(reasons, sizeof reasons, families[i]->name, &request, &refused);
        if (!request.kernel && refused.list->kernel)
            append_kernels(passed, sizeof passed, &refused, "; not ", "; not ");
    }
    if (!known)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "family '%s' is unknown", wanted_family);
    if (forced->kernel_is_set && !plan_knows_kernel(forced->kernel))
        return setting_refuse(SETTING_KERNEL, forced->kernel);
    return error_set(FDM_ERROR_UNSUPPORTED, "no kernel takes this problem on %s%s: %s", device->name,
                     forced->kernel_is_set ? " under FLASH_DMATTN_KERNEL" : "", reasons);
}

static fdm_status variant_of(const struct family *family, const struct plan_request *request, int32_t index,
                             int32_t number, fdm_plan *plan) {
    fdm_plan candidate = empty_plan(request->device, request->problem);
    candidate.num_threads = request->num_threads;
    snprintf(candidate.family, sizeof candidate.family, "%s", family->name);
    struct refusals refused;
    refused.count = 0;
    const int made = family->variant ? family->variant(family, request, index, number, &candidate, &refused)
                                     : number == 0 && family->choose(family, request, &candidate, &refused);
    if (!made && refused.count)
        return error_set(FDM_ERROR_UNSUPPORTED, "%s cannot run this problem on %s: %s", request->kernel,
                         request->device->name, refused.list->clause);
    if (!made)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s has no variant %d for this problem", request->kernel, number);
    *plan = candidate;
    return FDM_OK;
}

/* The rules' plan, or that of a kept choice, or of the model's. */
static fdm_status choose_or_keep(const fdm_device *device, const fdm_problem *problem, const struct forced *forced,
                                 fdm_plan *plan) {
    fdm_status status = tuning_check_older_names();
    if (!status)
        status = choose(device, problem, forced, plan);
    const int is_kept = !status && forced->tune && device->present && plan_apply_kept(device, plan);
    if (!status && !is_kept && forced->tune == TUNING_PREDICTS)
        plan_apply_predicted(device, plan);
    return status;
}

fdm_status fdm_plan_attention(const fdm_device *device, const fdm_problem *problem, const fdm_options *options,
                              fdm_plan *plan) {
    fdm_device device_room;
    fdm_options options_room;
    if (!(device = STRUCT_READ(fdm_device, device, &device_room)) ||
        (options && !(options = STRUCT_READ(fdm_options, options, &options_room))))
        return FDM_ERROR_INVALID_ARGUMENT;
    fdm_status status = STRUCT_CHECK(fdm_plan, plan);
    if (status || (status = fdm_problem_validate(problem)))
        return status;
    struct forced forced;
    fdm_plan made;
    fdm_device left = *device;
    if ((status = leave_margin(options, &left)) || (status = forced_of(problem, device->id.type, options, &forced)) ||
        (status = choose_or_keep(&left, problem, &forced, &made)))
        return status;
    return STRUCT_WRITE(fdm_plan, plan, &made);
}

fdm_status plan_by_rules(const fdm_device *device, const fdm_problem *problem, const fdm_options *options,
                         fdm_plan *plan) {
    struct forced forced;
    fdm_device left = *device;
    fdm_status status = leave_margin(options, &left);
    if (!status)
        status = forced_of(problem, device->id.type, options, &forced);
    return status ? status : choose(&left, problem, &forced, plan);
}

fdm_status plan_of_choice(const fdm_device *device, const fdm_problem *problem, const char *kernel, const char *choice,
                          int32_t num_threads, fdm_plan *plan) {
    const struct family *family = family_of_kernel(kernel);
    if (!family)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "there is no kernel '%.60s'", kernel);
    const struct plan_request request = {.device = device,
                                         .problem = problem,
                                         .kernel = kernel,
                                         .names_kernel = 1,
                                         .family_forced = 1,
                                         .num_threads = num_threads,
                                         .scheduler = SCHEDULER_ANY};
    fdm_status status = FDM_OK;
    for (int32_t n = 0; !status; n++)
        if (!(status = variant_of(family, &request, family_find_kernel(family, kernel), n, plan)) &&
            strcmp(plan->choice, choice) == 0)
            return FDM_OK;
    return status == FDM_ERROR_UNSUPPORTED
               ? status
               : error_set(FDM_ERROR_UNSUPPORTED, "%s has no way %s for this problem", kernel, choice);
}

fdm_status fdm_plan_variant(const fdm_device *device, const fdm_problem *problem, const char *kernel, int32_t variant,
                            fdm_plan *plan) {
    fdm_device room;
    fdm_plan made;
    if (!kernel || variant < 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s", kernel ? "variant is below 0" : "kernel is NULL");
    if (!(device = STRUCT_READ(fdm_device, device, &room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    fdm_status status = STRUCT_CHECK(fdm_plan, plan);
    if (status || (status = fdm_problem_validate(problem)))
        return status;
    struct forced forced;
    if ((status = forced_of(problem, device->id.type, NULL, &forced)))
        return status;
    const struct plan_request request = {.device = device,
                                         .problem = problem,
                                         .kernel = kernel,
                                         .names_kernel = 1,
                                         .family_forced = 1,
                                         .num_threads = forced.num_threads,
                                         .scheduler = SCHEDULER_ANY};
    const struct family *family = family_of_kernel(kernel);
    if (!family)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "there is no kernel '%.60s'", kernel);
    status = variant_of(family, &request, family_find_kernel(family, kernel), variant, &made);
    return status ? status : STRUCT_WRITE(fdm_plan, plan, &made);
}

/* A thread's last plan of a pass, and what it was made from. Planning looks at every kernel and words its reasons,
 * which costs the host a microsecond that the same call again need not spend. Families are pure, so that the same
 * request gives the same plan; of the facts of a device only the CPU's instruction sets can change. */
static _Thread_local struct kept_plan {
    int made;
    struct cpu_isas isas;
    int32_t num_threads;
    enum scheduler scheduler;
    int tune;
    int64_t sm_margin;
    uint32_t generation;         /* of what was kept */
    char kernel[64], family[16]; /* "" = free choice */
    fdm_plan plan;
} kept_plans[2];

static int same_name(const char *name, const char *kept) { return name ? *name && !strcmp(name, kept) : !*kept; }

/* Names that are cut here are those of no kernel and no family: they get no plan. */
static void keep_name(const char *name, char *kept, size_t size) { snprintf(kept, size, "%s", name ? name : ""); }

fdm_status plan_call(fdm_device_id id, const fdm_problem *problem, const fdm_options *options, fdm_plan *plan,
                     int *measures) {
    fdm_device device;
    struct kept_plan *kept = &kept_plans[problem->pass == FDM_BACKWARD];
    struct forced forced;
    const int64_t margin = options ? options->sm_margin : 0;
    fdm_status status = id.type == FDM_CPU ? setting_check(SETTING_CPU_ISA) : FDM_OK;
    const struct cpu_isas isas = id.type == FDM_CPU ? cpu_isas() : (struct cpu_isas){CPU_ISA_SCALAR, CPU_ISA_SCALAR};
    if (!status)
        status = forced_of(problem, id.type, options, &forced);
    if (status || (id.type != FDM_CPU && (status = device_facts(id.type, id.index, &device))))
        return status;
    if (!kept->made || kept->plan.device.type != id.type || kept->plan.device.index != id.index ||
        kept->isas.best != isas.best || kept->isas.highest != isas.highest || kept->num_threads != forced.num_threads ||
        kept->scheduler != forced.scheduler || kept->tune != forced.tune || kept->sm_margin != margin ||
        (forced.tune && kept->generation != tuning_generation()) || !same_name(forced.kernel, kept->kernel) ||
        !same_name(forced.family, kept->family) || memcmp(&kept->plan.problem, problem, sizeof *problem)) {
        kept->made = 0;
        kept->generation = tuning_generation();
        if ((id.type == FDM_CPU && (status = device_facts(id.type, id.index, &device))) ||
            (status = leave_margin(options, &device)) ||
            (status = choose_or_keep(&device, problem, &forced, &kept->plan)))
            return status;
        keep_name(forced.kernel, kept->kernel, sizeof kept->kernel);
        keep_name(forced.family, kept->family, sizeof kept->family);
        kept->isas = isas;
        kept->num_threads = forced.num_threads;
        kept->scheduler = forced.scheduler;
        kept->tune = forced.tune;
        kept->sm_margin = margin;
        kept->made = 1;
    }
    *measures = forced.tune == TUNING_MEASURES;
    *plan = kept->plan;
    return FDM_OK;
}

fdm_status fdm_kernel_list(int32_t index, fdm_kernel_info *info) {
    int32_t left = index;
    for (int32_t i = 0; left >= 0 && families[i]; left -= families[i++]->num_kernels) {
        if (left >= families[i]->num_kernels)
            continue;
        const struct kernel_info *known = families[i]->kernel(families[i], left);
        const fdm_kernel_info found = {.pass = known->pass,
                                       .family = families[i]->name,
                                       .name = known->name,
                                       .description = known->description,
                                       .available = families[i]->available(families[i], left),
                                       .device_type = families[i]->device_type};
        return STRUCT_WRITE(fdm_kernel_info, info, &found);
    }
    return error_set(FDM_ERROR_INVALID_ARGUMENT, "kernel index %d is past the end of the list", index);
}
