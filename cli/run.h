/* run.h: one attention call of the tool: tensors, device, plan, timed runs, comparison with float64. */
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
    RUN_SINK,
    RUN_ROW_START,
    RUN_ROW_END,
    RUN_BLOCKS,
    RUN_TREE,
    RUN_OUT,
    RUN_LSE,
    RUN_DOUT,
    RUN_DLSE,
    RUN_DQ,
    RUN_DK,
    RUN_DV,
    RUN_DBIAS,
    RUN_DSINK,
    RUN_TENSORS
};
extern const char *const run_tensor_names[RUN_TENSORS];

/* Contiguous tensors by role; data NULL = absent. Everything is made on the host; where the device is a CUDA device,
 * inputs are copied there before the runs and outputs back after them. */
struct run {
    struct file_tensor tensors[RUN_TENSORS];
    void *on_device[RUN_TENSORS]; /* CUDA: the tensors' copies */
    fdm_tensor views[RUN_TENSORS];
    fdm_options options;
    fdm_device device; /* all 0: not chosen yet */
    int64_t topk;      /* W of the intervals that run_make_topk() has made; 0 = none */
};

/* The public struct over the run's tensors for one pass: the host's, or those of the run's device (whose addresses are
 * the host's until run_upload(), which planning does not mind). The views point into the run. */
fdm_tensors run_view(struct run *run, fdm_pass pass);
fdm_tensors run_device_view(struct run *run, fdm_pass pass);
/* Allocates out and lse, and for the backward the gradients that fit the inputs, filled with NaN bytes. */
void run_allocate_outputs(struct run *run, int backward);
/* Fills a float tensor with numbers of a fixed generator, about normal, and sets its shape. */
void run_make_normal(struct file_tensor *tensor, const char *name, fdm_dtype dtype, int32_t ndim, const int64_t *shape,
                     uint64_t seed);
/* A tensor of NaN bytes. */
void run_make_tensor(struct file_tensor *tensor, const char *name, fdm_dtype dtype, int32_t ndim, const int64_t *shape);
/* start and end from the bias by fdm_topk_intervals. FDM_OK or the library's status. */
fdm_status run_make_topk(struct run *run, int64_t window);

/* Copies every tensor to the run's device, and makes intervals of top-W there anew; nothing to do on the CPU.
 * run_release() gives the copies back. */
fdm_status run_upload(struct run *run);
void run_release(struct run *run);
/* Plans one pass for the run's device and makes its kernels ready; runs nothing. */
fdm_status run_plan(struct run *run, fdm_pass pass, fdm_plan *plan);
/* Executes a plan `iters` times after a warm-up, from outputs of NaN bytes, and copies the outputs to the host; seconds
 * receives the samples. A sample on a CUDA device is the mean of as many calls as take a millisecond: below that, the
 * time between two events is that of a launch. */
fdm_status run_timed(struct run *run, const fdm_plan *plan, int32_t iters, double *seconds);

/* ---- comparison with float64 (run_check.c) ---- */

/* Error of an output. */
struct run_error {
    const char *name;
    double max_abs, rms,
        worst_row; /* worst_row: largest error of a row over max(row's own magnitude, the tensor's root mean square) */
    int failed;
};

/* What the reference family makes of the run's inputs in float64. */
struct run_truth {
    struct run run;
    int backward;
    int64_t num_rows, *rows; /* query rows it was made for; NULL = all */
};

/* Of the forward, all query rows, or as many as keep the work near `products_max` multiply-adds, evenly spread from the
 * first to the last, where no mask, window or bias row stands against it. 1, or 0 after a complaint. */
int run_make_truth(struct run *run, int backward, double products_max, struct run_truth *truth);
/* Number of rows of `errors` (at most RUN_TENSORS): the outputs of the passes that ran. */
int32_t run_compare(struct run *run, const struct run_truth *truth, double tolerance, struct run_error *errors);
void run_release_truth(struct run *run, struct run_truth *truth);
/* Largest worst_row that is fine for a plan's kernel, by its dtype; four times that where it sums in float16. */
double run_tolerance(const fdm_plan *plan);

#endif
