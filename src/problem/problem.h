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

/* Key intervals: start and end of (b, h, j). varlen: batch is 0 and j counts from the start of the packed tensor. */
struct interval_view {
    const int32_t *start, *end; /* NULL when absent */
    int64_t start_batch, start_head, start_key;
    int64_t end_batch, end_head, end_key;
    int64_t group;
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

struct attention {
    const fdm_problem *problem;
    struct matrix_view q, k, v, out, dout, dq, dk, dv;
    struct score_view mask, bias, dbias;
    struct interval_view intervals;
    struct sink_view sink, dsink;
    struct row_view lse, lse_low, dlse;
    const int32_t *cu_seqlens_q, *cu_seqlens_k; /* NULL when dense */
};

/* Sequence b of a call: its lengths, and where its rows start in the packed tensors (0 when dense). */
struct sequence {
    int64_t seqlen_q, seqlen_k, q_begin, k_begin;
};
struct sequence attention_sequence(const struct attention *attention, int64_t b);

/* On the CPU: rows of packed tensors that belong to no sequence get out 0, lse +inf and gradients of 0. */
void attention_clear_rest(const struct attention *attention);

/* Checks tensors and options (NULL: the defaults) against each other, fills problem and, unless NULL, attention (whose
 * problem points to `problem`). */
fdm_status problem_from_tensors(fdm_pass pass, const fdm_tensors *tensors, const fdm_options *options,
                                fdm_problem *problem, struct attention *attention);

/* Options that describe the same problem on the same tensors. */
fdm_options problem_options(const fdm_problem *problem);

/* Keys j that causal and window leave visible to row i of a sequence: first <= j < last; first >= last when none. */
struct key_range {
    int64_t first, last;
};
struct key_range problem_key_range(const fdm_problem *problem, const struct sequence *sequence, int64_t i);

#endif
