/* run.h: one attention call of the tool: tensors, plan, timed runs, comparison with float64. */
#ifndef FDM_RUN_H
#define FDM_RUN_H

#include "cli.h"
#include "tensor_file.h"

enum run_tensor {
    RUN_Q,
    RUN_K,
    RUN_V,
    RUN_MASK,
    RUN_BIAS,
    RUN_START,
    RUN_END,
    RUN_OUT,
    RUN_LSE,
    RUN_DOUT,
    RUN_DLSE,
    RUN_DQ,
    RUN_DK,
    RUN_DV,
    RUN_DBIAS,
    RUN_TENSORS
};
extern const char *const run_tensor_names[RUN_TENSORS];

/* Contiguous tensors by role; data NULL = absent. */
struct run {
    struct file_tensor tensors[RUN_TENSORS];
    fdm_tensor views[RUN_TENSORS];
    fdm_options options;
};

/* The public struct over the run's tensors for one pass. The views point into the run. */
fdm_tensors run_view(struct run *run, fdm_pass pass);
/* Allocates out and lse, and for the backward the gradients that fit the inputs, filled with NaN bytes. */
void run_allocate_outputs(struct run *run, int backward);
/* Fills a float tensor with numbers of a fixed generator, about normal, and sets its shape. */
void run_make_normal(struct file_tensor *tensor, const char *name, fdm_dtype dtype, int32_t ndim, const int64_t *shape,
                     uint64_t seed);
/* start and end from the bias by fdm_topk_intervals. FDM_OK or the library's status. */
fdm_status run_make_topk(struct run *run, int64_t window);

/* Plans once, then executes `iters` times after one warm-up; seconds receives the samples. */
fdm_status run_timed(struct run *run, fdm_pass pass, int32_t iters, fdm_plan *plan, double *seconds);

/* Error of every output of the passes that ran against the float64 reference on the same inputs. */
struct run_error {
    const char *name;
    double max_abs, rms,
        worst_row; /* worst_row: largest error of a row over max(row's own magnitude, the tensor's root mean square) */
    int failed;
};
/* Number of rows of `errors` (at most RUN_TENSORS), -1 after a complaint. */
int32_t run_check(struct run *run, int backward, struct run_error *errors);
double run_tolerance(fdm_dtype dtype);

#endif
