/* family.h: the interface between plan and the kernel families. */
#ifndef FDM_FAMILY_H
#define FDM_FAMILY_H

#include <string.h>

#include "base/count_arguments.h"
#include "problem/problem.h"

struct kernel_info {
    const char *name; /* "cpu.forward.avx512": family.pass.variant */
    const char *description;
    fdm_pass pass;
};

/* The parameters of a kernel's plans, from one list: X(NAME) for each, in the order of fdm_plan.parameters. A parameter
 * that becomes a constant of the kernel has the constant's name. PLAN_PARAMETERS(LIST) are the names under which a
 * plan's JSON has them; PLAN_PARAMETER_STRUCT(LIST) declares struct parameters, and the functions that read it from a
 * plan and write it there. */
#define PLAN_PARAMETER_NAME(name)  #name,
#define PLAN_PARAMETER_FIELD(name) int32_t name;
#define PLAN_PARAMETERS(LIST) \
    (const char *const[FDM_PLAN_PARAMETERS + 1]) { LIST(PLAN_PARAMETER_NAME) NULL }
#define PLAN_PARAMETER_STRUCT(LIST)                                                                             \
    struct parameters {                                                                                         \
        LIST(PLAN_PARAMETER_FIELD)                                                                              \
    };                                                                                                          \
    _Static_assert(sizeof(struct parameters) <= sizeof((fdm_plan *)0)->parameters, "a plan has room for them"); \
    static inline __attribute__((unused)) struct parameters parameters_of(const fdm_plan *plan) {               \
        struct parameters parameters;                                                                           \
        memcpy(&parameters, plan->parameters, sizeof parameters);                                               \
        return parameters;                                                                                      \
    }                                                                                                           \
    static inline __attribute__((unused)) void write_parameters(fdm_plan *plan, struct parameters parameters) { \
        memcpy(plan->parameters, &parameters, sizeof parameters);                                               \
    }                                                                                                           \
    struct parameters
/* PLAN_SET_PARAMETERS(plan, .NAME = value, ...): all of them; one that is left out does not compile. */
#define PLAN_SET_PARAMETERS(plan, ...)                                                              \
    do {                                                                                            \
        _Static_assert(sizeof(struct parameters) == sizeof(int32_t) * COUNT_ARGUMENTS(__VA_ARGS__), \
                       "a value for each parameter");                                               \
        write_parameters(plan, (struct parameters){__VA_ARGS__});                                   \
    } while (0)

/* In which order blocks take the tiles of a problem, where a kernel leaves the choice; SCHEDULER_ANY: as the rules have
 * it. */
enum scheduler { SCHEDULER_ANY = -1, SCHEDULER_STATIC, SCHEDULER_LONGEST, SCHEDULER_DYNAMIC, SCHEDULER_COUNT };
extern const char *const scheduler_names[SCHEDULER_COUNT]; /* "static", "longest", "dynamic" */

/* What a family may look at when it chooses; everything else is in the problem. */
struct plan_request {
    const fdm_device *device;
    const fdm_problem *problem;
    const char *kernel; /* forced name or choice code, NULL = free choice */
    int names_kernel;   /* `kernel` is the name of one, in this family or another, and no choice code */
    int family_forced;  /* the caller named this family */
    int32_t num_threads;
    enum scheduler scheduler;
};

/* Why a family does not take a problem: clauses of the family as a whole (kernel NULL), or of its kernels. */
struct refusal {
    const char *kernel;
    char clause[200];
};
enum { FAMILY_REFUSALS_MAX = 16 };
struct refusals {
    int32_t count;
    struct refusal list[FAMILY_REFUSALS_MAX];
};
/* Adds a clause, where there is room; 0, as choose() returns then. */
int family_refuse(struct refusals *refusals, const char *kernel, const char *clause);

struct cuda_kernel_request;
enum { FAMILY_LAUNCHES_MAX = 8 };

struct family {
    const char *name;
    int32_t device_type; /* FDM_CPU or FDM_CUDA: where its tensors live */
    int32_t num_kernels;
    const void *list; /* opaque to plan; the family alone reads it */
    const struct kernel_info *(*kernel)(const struct family *family, int32_t index);
    /* The names of what a kernel's plans hold in fdm_plan.parameters: PLAN_PARAMETERS(LIST). NULL: they hold nothing.
     */
    const char *const *(*parameters)(const struct family *family, int32_t index);
    /* 1 when this machine can run the kernel. */
    int (*available)(const struct family *family, int32_t index);
    /* 0 when the kernel runs only by name. NULL: every kernel is chosen freely. */
    int (*chosen_freely)(const struct family *family, int32_t index);
    /* Fills kernel_index, kernel, choice, tile, workspace and reason of plan, and returns 1; or returns 0 with what
     * refuses the problem. Of a kernel that the request names, the refusal has the request's name. Pure: looks at
     * nothing but the request. */
    int (*choose)(const struct family *family, const struct plan_request *request, fdm_plan *plan,
                  struct refusals *refusals);
    /* The number-th way in which a kernel runs the problem, as choose() fills a plan; 0 with a refusal, or without one
     * where there are no more ways. NULL: a kernel runs a problem in one way. */
    int (*variant)(const struct family *family, const struct plan_request *request, int32_t index, int32_t number,
                   fdm_plan *plan, struct refusals *refusals);
    /* Of a plan that may come from a file, so that choose() may not have made it: whether its kernel can run the
     * problem on the device. NULL: execute() finds out. */
    fdm_status (*check)(const struct family *family, const fdm_plan *plan, const fdm_problem *problem);
    /* Makes what the plan launches ready; NULL when there is nothing to make. */
    fdm_status (*prepare)(const struct family *family, const fdm_plan *plan);
    /* CUDA: the kernels that the plan launches, at most FAMILY_LAUNCHES_MAX; returns how many, 0 when the plan is not
     * one that choose() made. NULL on the CPU. */
    int32_t (*launches)(const struct family *family, const fdm_plan *plan, struct cuda_kernel_request *requests);
    /* Runs the plan; decides nothing. */
    fdm_status (*execute)(const struct family *family, const fdm_plan *plan, const struct attention *attention,
                          void *workspace, const fdm_launch *launch);
};

/* The index of the kernel with this name, today's or an older one; -1 if none. */
int32_t family_find_kernel(const struct family *family, const char *name);

#endif
