/* mma_family.h: what the files of the mma family share on the host. */
#ifndef FDM_MMA_FAMILY_H
#define FDM_MMA_FAMILY_H

#include "cuda/cuda.h"
#include "families/family.h"
#include "families/mma/mma_arguments.h"
#include "families/mma/mma_forward.h"
#include "families/mma/mma_summary.h"

/* One kernel of the family: a row of its list. */
struct mma_algorithm {
    struct kernel_row row;
    int chosen_freely; /* 0: runs only when it is named */
    /* NULL when the device and problem can be taken; else a clause that says why not, in `text` or constant. */
    const char *(*refusal)(const fdm_device *device, const fdm_problem *problem, char *text, size_t size);
    /* 1 when it is to be preferred to the rows after it, given that it can; NULL: always. */
    int (*suits)(const fdm_device *device, const fdm_problem *problem);
    /* The variant-th way (from 0) to run the problem: fills tile, stages, shared and workspace bytes, choice code and
     * parameters; 0 when there are no more ways. Variant 0 is the one chosen freely. */
    int (*fill)(const fdm_device *device, const fdm_problem *problem, int32_t variant, fdm_plan *plan);
    int (*has_code)(const char *code); /* 1 for a choice code of this kernel; NULL: its codes are those fill() gives */
    /* fill() for a code that has_code() knows; 0 with the reason in the plan when the problem cannot have it. */
    int (*fill_code)(const fdm_device *device, const fdm_problem *problem, const char *code, fdm_plan *plan);
    /* The kernels that the plan launches, at most MMA_REQUESTS_MAX; returns how many, 0 when the plan is not one that
     * fill() made. */
    int32_t (*requests)(const fdm_plan *plan, struct cuda_kernel_request *requests);
    fdm_status (*execute)(const fdm_plan *plan, const struct attention *attention, void *workspace, void *stream);
};

enum { MMA_REQUESTS_MAX = 7 };

extern const struct mma_algorithm mma_decode_algorithm;
extern const struct mma_algorithm mma_forward_algorithm;
extern const struct mma_algorithm mma_forward32_algorithm;
extern const struct mma_algorithm mma_wide_algorithm;
extern const struct mma_algorithm mma_backward_algorithm;
extern const struct mma_algorithm mma_backward32_algorithm;
/* mma_named.c */
extern const struct mma_algorithm mma_split_kv_algorithm, mma_split_q_algorithm, mma_share_kv_algorithm,
    mma_share_qkv_algorithm, mma_tiling_qk_algorithm, mma_tiling_qkv_algorithm;

/* For compile matrices: the kernels of a plan of this family, and whether a row is among those chosen freely. */
int32_t mma_requests(const fdm_plan *plan, struct cuda_kernel_request *requests);
int mma_chosen_freely(int32_t row);

void mma_fill_arguments(const struct attention *attention, struct mma_forward_arguments *arguments);

/* The summary of a mask with rows: one byte for each tile of block_m x block_n. mma_summarise() launches what fills
 * `summary` and tells the arguments where it is. */
int64_t mma_summary_bytes(const fdm_problem *problem, int32_t block_m, int32_t block_n);
void mma_summary_request(struct cuda_kernel_request *request);
fdm_status mma_summarise(const struct cuda_kernel *kernel, const fdm_problem *problem, int32_t block_m, int32_t block_n,
                         uint8_t *summary, void *stream, struct mma_forward_arguments *arguments);

/* What a problem asks of a kernel: causal or window; a mask or bias with a row axis; something of the key alone. */
static inline int mma_bounded(const fdm_problem *p) { return p->causal || p->window_left >= 0 || p->window_right >= 0; }
static inline int mma_mask_rows(const fdm_problem *p) { return p->has_mask && p->mask_shape[2] != 1; }
static inline int mma_bias_rows(const fdm_problem *p) { return p->has_bias && p->bias_shape[2] != 1; }
static inline int mma_lists_keys(const fdm_problem *p) {
    return p->has_intervals || (p->has_mask && !mma_mask_rows(p)) || (p->has_bias && !mma_bias_rows(p));
}
/* What is kept of each key then: the first and last row that see it, and a bias without rows. */
static inline int32_t mma_key_words(const fdm_problem *p) {
    return !mma_lists_keys(p) ? 0 : p->has_bias && !mma_bias_rows(p) ? 3 : 2;
}

/* The dtype's number in constants of kernels for 16-bit dtypes; -1 for others. */
static inline int32_t mma_dtype(fdm_dtype dtype) {
    return dtype == FDM_FLOAT16 ? MMA_FLOAT16 : dtype == FDM_BFLOAT16 ? MMA_BFLOAT16 : -1;
}
/* BIAS of kernels: MMA_BIAS_*. */
static inline int32_t mma_bias_constant(const fdm_problem *p) {
    return !p->has_bias ? MMA_BIAS_NONE : p->bias_dtype == FDM_FLOAT32 ? MMA_BIAS_FLOAT32 : MMA_BIAS_SAME;
}
static inline int64_t mma_round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

#endif
