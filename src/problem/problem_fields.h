/* problem_fields.h: every field of fdm_problem in one list: its JSON, its default, and how a call may differ from its
 * plan. */
#ifndef FDM_PROBLEM_FIELDS_H
#define FDM_PROBLEM_FIELDS_H

#include "flash_dmattn.h"

/* How a value stands in the plan's JSON. The last two are the plan's own. */
enum field_kind {
    FIELD_INT8,
    FIELD_INT32,
    FIELD_INT64,
    FIELD_DOUBLE,
    FIELD_DTYPE,
    FIELD_PASS,
    FIELD_SHAPE,
    FIELD_TEXT,
    FIELD_PARAMETERS
};

/* What the tensors of a call may say beside the plan's problem; for each rule but the last attention.c has a sentence,
 * and says the first that applies. A fact is a flag: 1 may stand where the plan has 0. On the CPU FACT_ALIGNED is the
 * only fact that counts. */
enum field_rule {
    FACT_ALIGNED,
    FACT_SCORES_ALIGNED,
    FACT_Q_MAPPABLE,
    FACT_KEYS_MAPPABLE,
    FACT_SCORES_MAPPABLE,
    FACT_VALUE_IN_KEY,
    SAME_SHAPES,
    SAME_SCORES,
    SAME_OUTPUTS,
    SAME_CACHE,
    OF_PLAN, /* an option: the tensors do not say it */
    NUM_FIELD_RULES
};

/* X(field, kind, default, rule) of each field, and O of those that fdm_options has under the same name, in the order of
 * the JSON. `reserved` is in no row. */
#define FIELD_ONES \
    { 1, 1, 1, 1 }
#define FDM_PROBLEM_FIELDS(X, O)                           \
    X(pass, FIELD_PASS, FDM_FORWARD, SAME_SHAPES)          \
    X(dtype, FIELD_DTYPE, FDM_FLOAT32, SAME_SHAPES)        \
    X(batch, FIELD_INT64, 1, SAME_SHAPES)                  \
    X(heads, FIELD_INT64, 1, SAME_SHAPES)                  \
    X(heads_kv, FIELD_INT64, 1, SAME_SHAPES)               \
    X(seqlen_q, FIELD_INT64, 0, SAME_SHAPES)               \
    X(seqlen_k, FIELD_INT64, 0, SAME_SHAPES)               \
    X(head_dim, FIELD_INT64, 64, SAME_SHAPES)              \
    X(head_dim_v, FIELD_INT64, 64, SAME_SHAPES)            \
    X(total_q, FIELD_INT64, 0, SAME_SHAPES)                \
    X(total_k, FIELD_INT64, 0, SAME_SHAPES)                \
    O(softmax_scale, FIELD_DOUBLE, 0.125, OF_PLAN)         \
    O(softcap, FIELD_DOUBLE, 0, OF_PLAN)                   \
    O(window_left, FIELD_INT64, -1, OF_PLAN)               \
    O(window_right, FIELD_INT64, -1, OF_PLAN)              \
    O(causal, FIELD_INT32, 0, OF_PLAN)                     \
    X(varlen, FIELD_INT32, 0, SAME_SHAPES)                 \
    O(deterministic, FIELD_INT32, 0, OF_PLAN)              \
    X(needs_lse, FIELD_INT32, 1, SAME_OUTPUTS)             \
    X(needs_dq, FIELD_INT32, 1, SAME_OUTPUTS)              \
    X(needs_dk, FIELD_INT32, 1, SAME_OUTPUTS)              \
    X(needs_dv, FIELD_INT32, 1, SAME_OUTPUTS)              \
    X(needs_dbias, FIELD_INT32, 0, SAME_OUTPUTS)           \
    X(has_dlse, FIELD_INT32, 0, SAME_OUTPUTS)              \
    X(has_lse_low, FIELD_INT32, 0, SAME_OUTPUTS)           \
    X(has_intervals, FIELD_INT32, 0, SAME_SCORES)          \
    X(interval_batch, FIELD_INT64, 1, SAME_SCORES)         \
    X(interval_heads, FIELD_INT64, 1, SAME_SCORES)         \
    X(has_row_intervals, FIELD_INT32, 0, SAME_SCORES)      \
    X(row_interval_batch, FIELD_INT64, 1, SAME_SCORES)     \
    X(row_interval_heads, FIELD_INT64, 1, SAME_SCORES)     \
    X(row_ranges, FIELD_INT32, 1, SAME_SCORES)             \
    X(block_mask_size, FIELD_INT32, 0, SAME_SCORES)        \
    X(block_mask_batch, FIELD_INT32, 1, SAME_SCORES)       \
    X(block_mask_heads, FIELD_INT32, 1, SAME_SCORES)       \
    X(has_tree, FIELD_INT8, 0, SAME_SCORES)                \
    X(has_mask, FIELD_INT32, 0, SAME_SCORES)               \
    X(has_bias, FIELD_INT32, 0, SAME_SCORES)               \
    X(mask_shape, FIELD_SHAPE, FIELD_ONES, SAME_SCORES)    \
    X(bias_shape, FIELD_SHAPE, FIELD_ONES, SAME_SCORES)    \
    X(bias_dtype, FIELD_DTYPE, FDM_FLOAT32, SAME_SCORES)   \
    X(has_sink, FIELD_INT32, 0, SAME_SCORES)               \
    X(num_sinks, FIELD_INT32, 1, SAME_SCORES)              \
    X(sink_dtype, FIELD_DTYPE, FDM_FLOAT32, SAME_SCORES)   \
    X(needs_dsink, FIELD_INT32, 0, SAME_OUTPUTS)           \
    O(lse_without_sink, FIELD_INT32, 0, OF_PLAN)           \
    X(has_seqused_q, FIELD_INT32, 0, SAME_SHAPES)          \
    X(has_seqused_k, FIELD_INT32, 0, SAME_SHAPES)          \
    X(has_cache, FIELD_INT32, 0, SAME_CACHE)               \
    X(page_size, FIELD_INT32, 0, SAME_CACHE)               \
    X(num_pages, FIELD_INT32, 0, SAME_CACHE)               \
    X(max_pages, FIELD_INT32, 0, SAME_CACHE)               \
    X(ragged_pages, FIELD_INT32, 0, SAME_CACHE)            \
    X(has_first_key, FIELD_INT32, 0, SAME_CACHE)           \
    X(has_cache_row, FIELD_INT32, 0, SAME_CACHE)           \
    X(new_rows, FIELD_INT64, 0, SAME_CACHE)                \
    X(rotary_dim, FIELD_INT32, 0, SAME_CACHE)              \
    X(rotary_interleaved, FIELD_INT32, 0, SAME_CACHE)      \
    X(dkv_float32, FIELD_INT32, 0, SAME_OUTPUTS)           \
    O(add_dkv, FIELD_INT32, 0, OF_PLAN)                    \
    O(invariance, FIELD_INT32, 0, OF_PLAN)                 \
    O(num_splits, FIELD_INT32, 0, OF_PLAN)                 \
    O(split_keys, FIELD_INT32, 0, OF_PLAN)                 \
    X(aligned, FIELD_INT32, 1, FACT_ALIGNED)               \
    X(scores_aligned, FIELD_INT32, 1, FACT_SCORES_ALIGNED) \
    X(q_mappable, FIELD_INT32, 1, FACT_Q_MAPPABLE)         \
    X(keys_mappable, FIELD_INT32, 1, FACT_KEYS_MAPPABLE)   \
    X(value_in_key, FIELD_INT8, 0, FACT_VALUE_IN_KEY)      \
    X(scores_mappable, FIELD_INT32, 1, FACT_SCORES_MAPPABLE)

/* fdm_problem has no padding, so that a field without a row changes the sum. */
#define FDM_FIELD_BYTES(field, kind, value, rule) +sizeof(((fdm_problem *)0)->field)
_Static_assert(0 FDM_PROBLEM_FIELDS(FDM_FIELD_BYTES, FDM_FIELD_BYTES) + sizeof(((fdm_problem *)0)->reserved) ==
                   sizeof(fdm_problem),
               "FDM_PROBLEM_FIELDS lacks a field of fdm_problem, or has one twice");

#endif
