/* native_fields.h: the tensors and settings of attention in Python, a row each. Their positions in every call, the
 * operators' schemas, what autograd saves and which gradients it returns follow from these rows. */
#ifndef FLASH_DMATTN_NATIVE_FIELDS_H
#define FLASH_DMATTN_NATIVE_FIELDS_H

/* TOKENS: [B, S, H, D], packed [total, H, D]. SCORES: [B|1, h, Sq|1, Sk|1], or blocks of both. KEYS: [B|1, h, Sk].
 * ROWS: [B, H, Sq]. OFFSETS: [B + 1]. HEADS: [H] or [n, H]. RANGES: [B|1, h, n, Sq]. */
enum native_axes { AXES_TOKENS, AXES_SCORES, AXES_KEYS, AXES_ROWS, AXES_OFFSETS, AXES_HEADS, AXES_RANGES };
enum { OPTIONAL, NEEDED };

/* The tensors that both passes read, in the order of every call: (position, member of fdm_tensors, argument of the
 * public functions, axes, OPTIONAL or NEEDED), and of those with a gradient its position and member. */
#define NATIVE_INPUTS(DIFFERENTIABLE, PLAIN)                                              \
    DIFFERENTIABLE(ARG_Q, q, "query", AXES_TOKENS, NEEDED, ARG_DQ, dq)                    \
    DIFFERENTIABLE(ARG_K, k, "key", AXES_TOKENS, NEEDED, ARG_DK, dk)                      \
    DIFFERENTIABLE(ARG_V, v, "value", AXES_TOKENS, NEEDED, ARG_DV, dv)                    \
    PLAIN(ARG_MASK, mask, "attn_mask", AXES_SCORES, OPTIONAL)                             \
    DIFFERENTIABLE(ARG_BIAS, bias, "attn_bias", AXES_SCORES, OPTIONAL, ARG_DBIAS, dbias)  \
    PLAIN(ARG_INTERVAL_START, interval_start, "key_intervals start", AXES_KEYS, OPTIONAL) \
    PLAIN(ARG_INTERVAL_END, interval_end, "key_intervals end", AXES_KEYS, OPTIONAL)       \
    PLAIN(ARG_CU_SEQLENS_Q, cu_seqlens_q, "cu_seqlens_q", AXES_OFFSETS, OPTIONAL)         \
    PLAIN(ARG_CU_SEQLENS_K, cu_seqlens_k, "cu_seqlens_k", AXES_OFFSETS, OPTIONAL)         \
    DIFFERENTIABLE(ARG_SINK, sink, "sink", AXES_HEADS, OPTIONAL, ARG_DSINK, dsink)        \
    PLAIN(ARG_ROW_START, row_start, "row_intervals start", AXES_RANGES, OPTIONAL)         \
    PLAIN(ARG_ROW_END, row_end, "row_intervals end", AXES_RANGES, OPTIONAL)               \
    PLAIN(ARG_BLOCK_MASK, block_mask, "block_mask", AXES_SCORES, OPTIONAL)

/* What the forward writes and the backward reads: the same columns; NEEDED by the backward. */
#define NATIVE_RESULTS(DIFFERENTIABLE, PLAIN)                                \
    DIFFERENTIABLE(ARG_OUT, out, "out", AXES_TOKENS, NEEDED, ARG_DOUT, dout) \
    DIFFERENTIABLE(ARG_LSE, lse, "lse", AXES_ROWS, NEEDED, ARG_DLSE, dlse)   \
    PLAIN(ARG_LSE_LOW, lse_low, "lse_low", AXES_ROWS, OPTIONAL)

/* The settings, in the order of every call: (position, member of fdm_options, type in the operators' schemas, function
 * that reads it). */
#define NATIVE_SETTINGS(X)                                             \
    X(SETTING_MAX_SEQLEN_Q, max_seqlen_q, "SymInt", PyLong_AsLongLong) \
    X(SETTING_MAX_SEQLEN_K, max_seqlen_k, "SymInt", PyLong_AsLongLong) \
    X(SETTING_SOFTMAX_SCALE, softmax_scale, "float?", number_or_zero)  \
    X(SETTING_CAUSAL, causal, "bool", truth)                           \
    X(SETTING_SOFTCAP, softcap, "float", PyFloat_AsDouble)             \
    X(SETTING_WINDOW_LEFT, window_left, "SymInt", PyLong_AsLongLong)   \
    X(SETTING_WINDOW_RIGHT, window_right, "SymInt", PyLong_AsLongLong) \
    X(SETTING_DETERMINISTIC, deterministic, "bool", truth)             \
    X(SETTING_LSE_WITHOUT_SINK, lse_without_sink, "bool", truth)

/* Positions of tensors: what the forward takes, then what the backward reads besides, then what it writes. */
#define NATIVE_POSITION(position, ...)                                           position,
#define NATIVE_GRADIENT(position, member, argument, axes, needed, gradient, ...) gradient,
#define NATIVE_NOTHING(...)
enum {
    NATIVE_INPUTS(NATIVE_POSITION, NATIVE_POSITION) NUM_INPUTS,
    BEFORE_RESULTS = NUM_INPUTS - 1,
    NATIVE_RESULTS(NATIVE_POSITION, NATIVE_POSITION) NUM_FORWARD,
    BEFORE_FLOWING = NUM_FORWARD - 1,
    NATIVE_RESULTS(NATIVE_GRADIENT, NATIVE_NOTHING) NUM_READ,
    BEFORE_GRADIENTS = NUM_READ - 1,
    NATIVE_INPUTS(NATIVE_GRADIENT, NATIVE_NOTHING) NUM_TENSORS,
    NUM_RESULTS = NUM_FORWARD - NUM_INPUTS,
    NUM_GRADIENTS = NUM_TENSORS - NUM_READ
};
/* Behind the settings of fdm_options: the number of a mask plan that native_plan.c keeps, 0: none. */
enum { NATIVE_SETTINGS(NATIVE_POSITION) SETTING_MASK_PLAN, NUM_SETTINGS };

/* A row of NATIVE_INPUTS or NATIVE_RESULTS. gradient: its position, 0 where there is none. */
struct native_field {
    const char *name, *argument, *gradient_name;
    enum native_axes axes;
    int needed, gradient;
};
extern const struct native_field native_fields[NUM_FORWARD]; /* by position */

#endif
