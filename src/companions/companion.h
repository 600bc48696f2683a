/* companion.h: what the companions share: an operation is a list of kernels by name, in order of preference, and the
 * choice among them is a pure function with a reason. */
#ifndef FDM_COMPANION_H
#define FDM_COMPANION_H

#include "cuda/cuda.h"
#include "cuda/request_constants.h"

enum { COMPANION_REQUESTS_MAX = 2 }; /* kernels that a plan launches */

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* One kernel of an operation. `problem` is the operation's own struct. */
struct companion_kernel {
    const char *name, *description;
    int32_t chosen_freely; /* 0: runs only by name */
    /* NULL, or a clause that says why this problem or device cannot be taken. */
    const char *(*refusal)(const fdm_device *device, const void *problem);
    /* NULL, or a clause that says why another kernel suits the problem better. May be NULL itself. */
    const char *(*passed_over)(const fdm_device *device, const void *problem);
    /* What the kernel's constants, grid and workspace come from: everything of the choice but index, name and reasons.
     * The index is there already. */
    void (*fill)(const fdm_device *device, const void *problem, struct fdm_companion_choice *choice);
    /* The number-th way from 0, which is fill()'s; 0 past the last. NULL: fill()'s alone. */
    int (*variant)(const fdm_device *device, const void *problem, int32_t number, struct fdm_companion_choice *choice);
};
enum { COMPANION_PROBLEM_BYTES = 192, COMPANION_CLASS_BYTES = 256 };
struct companion_operation {
    const char *name;
    int32_t num_kernels;
    const struct companion_kernel *kernels;
    size_t problem_bytes;
    /* The words of the class that one measured choice stands for. */
    void (*name_class)(const void *problem, char text[COMPANION_CLASS_BYTES]);
};

/* kernel: a name to force, NULL = chosen. FDM_ERROR_UNSUPPORTED with every reason when none takes the problem. */
fdm_status companion_choose(const struct companion_operation *operation, const fdm_device *device, const void *problem,
                            const char *kernel, struct fdm_companion_choice *choice);

/* The number-th way of a kernel. FDM_ERROR_UNSUPPORTED: it takes no such problem; FDM_ERROR_INVALID_ARGUMENT: it has no
 * such kernel or way. */
fdm_status companion_variant(const struct companion_operation *operation, const fdm_device *device, const void *problem,
                             const char *kernel, int32_t number, struct fdm_companion_choice *choice);

/* ---- companion_kept.c ---- */

/* companion_choose(), or the choice that was kept for the problem's class, where `tune`, of a call's options, lets it;
 * *measures: 1 where the call may measure its class. Made again only where it can differ from the thread's last of the
 * operation. */
fdm_status companion_plan(const struct companion_operation *operation, const fdm_device *device, const void *problem,
                          const char *kernel, int64_t tune, struct fdm_companion_choice *choice, int *measures);
/* The key of a problem's class in the store. */
fdm_status companion_key(const struct companion_operation *operation, const fdm_device *device, const void *problem,
                         char *key);
/* Measures a class at its first call, where nothing is known of it: 1 where it did. The tuner, which stands above,
 * provides it. */
int companion_measure_first(const struct companion_operation *operation, const fdm_device *device, const void *problem,
                            void *stream);

/* Name and description of the index-th kernel; an error past the last. */
fdm_status companion_kernel_at(const struct companion_operation *operation, int32_t index, const char **name,
                               const char **description);
/* Compiles and loads what a plan launches. count 0: the plan's `part` is not its kernel's. */
fdm_status companion_prepare(const struct fdm_companion_choice *choice, const struct cuda_kernel_request *requests,
                             int32_t count, const char *part);

/* Reserved words of a problem, and of a plan's choice, which may be NULL, are 0. */
fdm_status companion_check_reserved(const int64_t problem[8], const fdm_companion_choice *choice);

/* The workspace is large enough and aligned. */
fdm_status companion_check_workspace(const struct fdm_companion_choice *choice, const void *workspace, size_t bytes);

/* Runs `execute` with a workspace from the caller's allocator, which may be NULL where none is needed. */
typedef fdm_status (*companion_execute)(const void *plan, const void *call, void *workspace, size_t bytes,
                                        void *stream);
fdm_status companion_once(const struct fdm_companion_choice *choice, const fdm_allocator *allocator,
                          companion_execute execute, const void *plan, const void *call, void *stream);

#endif
