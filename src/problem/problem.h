/* problem.h: what a family executes: a validated problem with its tensors resolved to addresses and strides. */
#ifndef FDM_PROBLEM_H
#define FDM_PROBLEM_H

#include "flash_dmattn.h"

/* q, k, v, out and gradients: element (b, i, h, d) lies at data + (b*batch + i*row + h*head + d) * dtype bytes.
 * varlen: batch is 0 and i counts from the start of the packed tensor. data is NULL when the tensor is absent. */
struct matrix_view {
    char *data;
    int64_t batch, row, head; /* strides in elements */
};

/* mask, bias, dbias: element (b, h, i, j), strides in elements, 0 on axes of extent 1. Query head h reads head h /
 * group. */
struct score_view {
    char *data;
    int64_t batch, head, row, key;
    int64_t group; /* query heads that share one head of this tensor */
};

/* Intervals: start and end of (b, h, n, i): of keys i counts keys, and n is 0; of rows i counts rows, and n ranges.
 * varlen: batch is 0 and i counts from the start of the packed tensor. */
struct interval_view {
    const int32_t *start, *end; /* NULL when absent */
    int64_t start_batch, start_head, start_range, start_item;
    int64_t end_batch, end_head, end_range, end_item;
    int64_t group;
};

/* tree: word w of row (b, i); varlen: batch is 0 and i counts from the start of the packed tensor. */
struct tree_view {
    const uint32_t *data; /* NULL when absent */
    int64_t batch, row, word;
};

/* lse, dlse: element (b, h, i). varlen: batch is 0 and i counts from the start of the packed tensor. */
struct row_view {
    char *data;
    int64_t batch, head, row;
};

/* sink, dsink: element (n, h). */
struct sink_view {
    char *data;
    int64_t part, head;
};

/* Indices: element (row, column), of `bytes` 4 or 8, strides in elements. */
struct index_view {
    const char *data; /* NULL when absent */
    int64_t row, column;
    int32_t bytes;
};

/* Tables of cosines and sines: element (position, pair). */
struct rotary_view {
    const char *cosines, *sines;
    int64_t cosine_row, sine_row, num_rows;
    fdm_dtype dtype;
    int32_t dim, interleaved; /* 0: nothing turns */
    struct index_view start;
    struct index_view positions; /* of each new key and query row; absent in a call of attention */
};

/* The KV cache of a call, whose k and v views have pages as batches. */
struct cache_view {
    struct index_view table, page_start, cache_row; /* table absent: a page is a row of the cache */
    struct index_view lengths, first_key, cu_seqlens_new;
    struct matrix_view k_new, v_new; /* as q; data NULL where nothing is appended */
    int64_t page_rows, seqlen_new;   /* of a page; of each sequence's new keys, where they are not packed */
    int64_t num_lists;               /* of page_start, so that it has an end for each where there is one more */
    struct rotary_view rotary;
    int32_t *fault; /* [4], on a CUDA device; NULL: not wanted */
};
/* Of dk and dv. */
fdm_dtype problem_dkv_dtype(const fdm_problem *problem);

struct attention {
    const fdm_problem *problem;
    struct matrix_view q, k, v, out, dout, dq, dk, dv;
    struct score_view mask, bias, dbias;
    struct interval_view intervals, row_intervals;
    struct score_view block_mask; /* rows and keys are blocks of problem->block_mask_size */
    struct tree_view tree;
    struct sink_view sink, dsink;
    void *mask_plan; /* memory of the call's fdm_tile_plan; NULL: none */
    struct row_view lse, lse_low, dlse;
    const int32_t *cu_seqlens_q, *cu_seqlens_k; /* NULL when dense; cu_seqlens_k beside a cache, too */
    struct index_view seqused_q, seqused_k;
    struct cache_view cache; /* where the problem has one */
};

/* Sequence b of a call: its lengths, and where its rows start in the packed tensors (0 when dense). Beside a cache: how
 * many of its keys lie there, where its new ones start, and the first key that is visible. */
struct sequence {
    int64_t seqlen_q, seqlen_k, q_begin, k_begin;
    int64_t first_key, cached_keys, new_begin;
};
struct sequence attention_sequence(const struct attention *attention, int64_t b);

/* Key j of a sequence and those after it, `count` in all, lie at rows row, row + 1, .. of `batch` in *k and *v. */
struct key_place {
    const struct matrix_view *k, *v;
    int64_t batch, row, count;
};
struct key_place cache_key_place(const struct attention *attention, const struct sequence *sequence, int64_t b,
                                 int64_t j);
static inline struct key_place attention_key_place(const struct attention *a, const struct sequence *sequence,
                                                   int64_t b, int64_t j) {
    if (a->problem->has_cache)
        return cache_key_place(a, sequence, b, j);
    return (struct key_place){&a->k, &a->v, b, sequence->k_begin + j, sequence->seqlen_k - j};
}

/* On the CPU: rows that belong to no sequence get out 0, lse +inf and gradients of 0. */
void attention_clear_rest(const struct attention *attention);

/* Checks tensors and options (NULL: the defaults) against each other, fills problem and, unless NULL, attention (whose
 * problem points to `problem`). */
fdm_status problem_from_tensors(fdm_pass pass, const fdm_tensors *tensors, const fdm_options *options,
                                fdm_problem *problem, struct attention *attention);

/* The same of a forward's q, k, v and masks, whatever its outputs are. */
fdm_status problem_from_inputs(const fdm_tensors *tensors, const fdm_options *options, fdm_problem *problem,
                               struct attention *attention);

/* Whether the options say how a forward's keys are split, or on what its bits may depend. */
static inline int problem_fixes_splits(const fdm_problem *p) {
    return p->pass == FDM_FORWARD && (p->invariance || p->num_splits || p->split_keys);
}

/* Options that describe the same problem on the same tensors. */
fdm_options problem_options(const fdm_problem *problem);

/* Keys j that causal and window leave visible to row i of a sequence: first <= j < last; first >= last when none. */
struct key_range {
    int64_t first, last;
};
struct key_range problem_key_range(const fdm_problem *problem, const struct sequence *sequence, int64_t i);

#endif
