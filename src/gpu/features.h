/* features.h: what a problem asks of a CUDA kernel, and how constants of kernels code it. */
#ifndef FDM_FEATURES_H
#define FDM_FEATURES_H

#include "cuda/request_constants.h"
#include "flash_dmattn.h"
#include "gpu/forward_params.h"
#include "gpu/problem_constants.h"
#include "problem/problem.h"

/* Causal or window; a mask or bias with a row axis; something of the key alone. */
static inline int gpu_bounded(const fdm_problem *p) { return p->causal || p->window_left >= 0 || p->window_right >= 0; }
static inline int gpu_mask_rows(const fdm_problem *p) { return p->has_mask && p->mask_shape[2] != 1; }
static inline int gpu_bias_rows(const fdm_problem *p) { return p->has_bias && p->bias_shape[2] != 1; }
static inline int gpu_lists_keys(const fdm_problem *p) {
    return p->has_intervals || (p->has_mask && !gpu_mask_rows(p)) || (p->has_bias && !gpu_bias_rows(p));
}
/* Rows of mask and bias are contiguous and begin at multiples of 16 bytes. */
static inline int gpu_scores_aligned(const fdm_problem *p) {
    return p->scores_aligned && (gpu_mask_rows(p) || gpu_bias_rows(p));
}
/* Rows that see no key whatever masks say: more rows than keys, bounded to the right. What flows into their gradients
 * may be NaN. */
static inline int gpu_empty_rows(const fdm_problem *p) {
    return (p->causal && p->seqlen_q > p->seqlen_k) ||
           (p->window_right >= 0 && p->seqlen_q - p->seqlen_k > p->window_right);
}

/* What gives each row runs of keys: row intervals and block masks. */
static inline int gpu_row_runs(const fdm_problem *p) { return p->has_row_intervals || p->block_mask_size; }

/* Tiles of pairs are looked at before the kernel, by block_mask.h: a mask with rows, row intervals or a block mask hide
 * some. */
static inline int gpu_masks_blocks(const fdm_problem *p) { return gpu_mask_rows(p) || gpu_row_runs(p); }

/* Some key may be hidden from every row and yet be multiplied with its tile: by a mask or bias with rows, by row
 * intervals or a block mask, or left of a window. What it holds must not count. */
static inline int gpu_hides_pairs(const fdm_problem *p) {
    return gpu_masks_blocks(p) || gpu_bias_rows(p) ||
           (p->window_left >= 0 && (p->varlen || p->has_seqused_q || p->seqlen_k - p->seqlen_q > p->window_left));
}

/* The same of kernels that load keys which something hides by itself. */
static inline int gpu_hides_keys(const fdm_problem *p) { return gpu_hides_pairs(p) || gpu_lists_keys(p); }

/* q or k has no element. */
static inline int gpu_loads_nothing(const fdm_problem *p) {
    return p->batch < 1 || p->heads < 1 || p->seqlen_q < 1 || p->seqlen_k < 1 ||
           (p->varlen && (p->total_q < 1 || (p->total_k < 1 && !p->has_cache)));
}

/* What a problem may ask beyond rows, keys and head dims: name, words, and whether `p` asks it. An algorithm names the
 * features that it takes (struct gpu_algorithm); what it does not name is refused. */
#define GPU_FEATURES(X)                                                                                           \
    X(CAUSAL, "causal masks", p->causal)                                                                          \
    X(WINDOW, "windows", p->window_left >= 0 || p->window_right >= 0)                                             \
    X(MASK_ROWS, "masks with query rows", gpu_mask_rows(p))                                                       \
    X(MASK_KEYS, "masks that query rows share", p->has_mask && !gpu_mask_rows(p))                                 \
    X(BIAS_ROWS, "biases with query rows", gpu_bias_rows(p))                                                      \
    X(BIAS_KEYS, "biases that query rows share", p->has_bias && !gpu_bias_rows(p))                                \
    X(INTERVALS, "key intervals", p->has_intervals)                                                               \
    X(ROW_INTERVALS, "row intervals", p->has_row_intervals)                                                       \
    X(BLOCK_MASK, "block masks", p->block_mask_size)                                                              \
    X(TREE, "trees of drafts", p->has_tree)                                                                       \
    X(VARLEN, "packed sequences", p->varlen)                                                                      \
    X(SOFTCAP, "softcap", p->softcap > 0)                                                                         \
    X(SINK, "learnable sinks", p->has_sink)                                                                       \
    X(SEQUSED, "lengths of seqused_q and seqused_k", p->has_seqused_q || p->has_seqused_k)                        \
    X(CACHE, "a KV cache", p->has_cache)                                                                          \
    X(SPLITS, "invariance, num_splits and split_keys", problem_fixes_splits(p))                                   \
    X(UNALIGNED, "addresses or strides that are no multiples of 16 bytes, or rows 2^31 bytes apart", !p->aligned) \
    X(DETERMINISTIC, "a fixed order of additions", p->deterministic && p->pass == FDM_BACKWARD)                   \
    X(DBIAS, "the gradient of a bias", p->needs_dbias && p->pass == FDM_BACKWARD)                                 \
    X(DLSE, "a gradient of lse", p->has_dlse && p->pass == FDM_BACKWARD)                                          \
    X(EMPTY_ROWS, "gradients of rows that see no key", gpu_empty_rows(p) && p->pass == FDM_BACKWARD)

enum {
#define GPU_FEATURE_NUMBER(name, words, asked) GPU_NUMBER_OF_##name,
    GPU_FEATURES(GPU_FEATURE_NUMBER)
#undef GPU_FEATURE_NUMBER
        GPU_NUM_FEATURES
};
enum gpu_feature {
#define GPU_FEATURE_BIT(name, words, asked) GPU_FEATURE_##name = 1 << GPU_NUMBER_OF_##name,
    GPU_FEATURES(GPU_FEATURE_BIT)
#undef GPU_FEATURE_BIT
    /* What a kernel takes as it takes rows and keys. Row intervals, block masks, trees, lengths on the device, caches
     * and rules for splits are not in it. */
    GPU_EVERY_FEATURE =
        ((1 << GPU_NUM_FEATURES) - 1) & ~(GPU_FEATURE_ROW_INTERVALS | GPU_FEATURE_BLOCK_MASK | GPU_FEATURE_TREE |
                                          GPU_FEATURE_SEQUSED | GPU_FEATURE_CACHE | GPU_FEATURE_SPLITS)
};

/* What row_ranges.cuh and row_block_mask.cu do for a kernel. */
enum { GPU_ROW_RUN_FEATURES = GPU_FEATURE_ROW_INTERVALS | GPU_FEATURE_BLOCK_MASK };

/* What scores.cuh and backward_rows.cu do for every kernel that leaves the end of its rows and lse to them. */
enum { GPU_SCORE_FEATURES = GPU_FEATURE_SOFTCAP | GPU_FEATURE_SINK };

/* What is kept of each key then: the first and last row that see it, and a bias without rows. */
static inline int32_t gpu_key_words(const fdm_problem *p) {
    return !gpu_lists_keys(p) ? 0 : p->has_bias && !gpu_bias_rows(p) ? 3 : 2;
}

/* The dtype's number in constants of kernels; -1 for one that CUDA kernels do not take. */
static inline int32_t gpu_dtype(fdm_dtype dtype) {
    return dtype == FDM_FLOAT32    ? GPU_FLOAT32
           : dtype == FDM_FLOAT16  ? GPU_FLOAT16
           : dtype == FDM_BFLOAT16 ? GPU_BFLOAT16
                                   : -1;
}
static inline int gpu_16_bits(fdm_dtype dtype) { return dtype == FDM_FLOAT16 || dtype == FDM_BFLOAT16; }
/* BIAS of kernels: GPU_BIAS_*. */
static inline int32_t gpu_bias_constant(const fdm_problem *p) {
    return !p->has_bias ? GPU_BIAS_NONE : p->bias_dtype == FDM_FLOAT32 ? GPU_BIAS_FLOAT32 : GPU_BIAS_SAME;
}
/* CACHE of kernels: GPU_CACHE_*. */
static inline int32_t gpu_cache_constant(const fdm_problem *p) {
    return !p->has_cache                                     ? GPU_CACHE_NONE
           : p->page_size || p->new_rows || p->has_first_key ? GPU_CACHE_PAGES
                                                             : GPU_CACHE_ROWS;
}
static inline int32_t gpu_used_constant(const fdm_problem *p) {
    return p->has_seqused_q || (p->has_seqused_k && !p->has_cache);
}
/* Lists on the device say how long sequences are, beside cu_seqlens or without. */
static inline int gpu_has_lengths(const fdm_problem *p) { return p->has_cache || gpu_used_constant(p); }
/* A request for a kernel of problem `p`, with the constants of the problem and no other. alike: GPU_ALIKE_* of those
 * whose values the kernel does not tell apart. */
void gpu_set_problem_constants(struct cuda_kernel_request *request, const fdm_problem *p, uint32_t alike);

static inline int64_t gpu_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t gpu_round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
/* The larger of D and Dv. */
static inline int64_t gpu_widest(const fdm_problem *p) {
    return p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v;
}

#endif
