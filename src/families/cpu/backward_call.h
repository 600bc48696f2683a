/* backward_call.h: what the files of the CPU backward share: a call, a thread, and how a bias gets its gradient. */
#ifndef FDM_CPU_BACKWARD_CALL_H
#define FDM_CPU_BACKWARD_CALL_H

#include <math.h>
#include <stdatomic.h>

#include "families/cpu/visible.h"
#include "problem/problem.h"

/* How dbias is summed. */
enum dbias_kind {
    DBIAS_NONE,
    DBIAS_TILE,  /* nothing is shared: tiles of dS are stored as they come */
    DBIAS_KEYS,  /* one row: sums per key, per batch and KV head (or query head), added in the order of dk and dv */
    DBIAS_ROWS,  /* one key: sums per query row and head, each complete inside its item */
    DBIAS_SHARED /* rows and keys, shared over batch or heads: a pass of its own in which each tile has one owner */
};

/* How many region ends of its keys an item has passed; items of one chain lie one cache line apart. */
struct progress {
    _Alignas(64) atomic_llong regions;
};

struct backward_call {
    const struct attention *attention;
    const struct cpu_kernels *kernels;
    char *threads; /* one share of thread_bytes each */
    size_t thread_bytes;
    int32_t block_m, block_n;
    int64_t lane_blocks, num_items; /* lane blocks of the longest sequence */
    int64_t region_keys;
    int ordered;               /* items add to something they share */
    struct progress *progress; /* [batch * heads_kv][lane_blocks], by place in the chain */
    float *dk, *dv;            /* [Hkv][B * Sk or total_k][D or Dv]; NULL: the caller's own, or not wanted */
    enum dbias_kind dbias_kind;
    float *dbias;        /* partial sums [B][dbias_heads][dbias_length] */
    int64_t dbias_heads; /* Hkv or H */
    int64_t dbias_length;
    float *sink_shares; /* [H][B * Sq or total_q]: what rows add to the gradient of a head's sinks; NULL: not wanted */
    /* DBIAS_SHARED: the call with every query head on its own. */
    struct attention single;
    fdm_problem single_problem;
    atomic_llong next;
};

/* Part of a panel's tile in which something is visible. */
struct strip {
    int32_t first_key, num_keys, first_lane, num_lanes;
};

/* What a thread works on. The buffers lie behind it in its share of the workspace. */
struct backward_thread {
    struct lane_block block;
    struct key_walk walk;
    struct key_block keys;
    const void *rows[CPU_BLOCK_LANES_MAX]; /* addresses for packing, of lanes or keys */
    float *acc_rows[CPU_BLOCK_KEYS_MAX];
    float bias_keys[CPU_BLOCK_KEYS_MAX];
    float lse[CPU_BLOCK_LANES_MAX], lse_low[CPU_BLOCK_LANES_MAX]; /* natural log, and what it has rounded away */
    float delta[CPU_BLOCK_LANES_MAX], dbias_rows[CPU_BLOCK_LANES_MAX];
    float sink_weight[CPU_BLOCK_LANES_MAX], dlse_factor[CPU_BLOCK_LANES_MAX]; /* beside sinks; load_sink() */
    int32_t careful[CPU_PANELS_MAX];                                          /* of the steps of each panel */
    int32_t num_strips;                                                       /* of the tile at hand */
    struct strip strips[CPU_BLOCK_KEYS_MAX / 16];
    int64_t known; /* items of the chain before this one are complete */
    /* Packed operands, one after another per panel. */
    char *q_panels, *dout_panels, *q_rows, *dout_rows;
    size_t q_panel_bytes, dout_panel_bytes, q_rows_bytes, dout_rows_bytes;
    char *k_keys, *v_keys, *k_values;                 /* k_values == k_keys where one format serves */
    char *p_weights, *ds_weights, *ds_values_weights; /* NULL: the float32 tiles serve */
    float *s, *dp, *bias, *dbias;                     /* [block_n][CPU_LANES]; the last two NULL without bias */
    float *shared;                                    /* DBIAS_SHARED: sums of one tile */
    float *dq;                                        /* [panels][D][CPU_LANES] */
};

static inline char *matrix_row(const struct matrix_view *view, int64_t bytes, int64_t batch, int64_t row,
                               int64_t head) {
    return view->data + (batch * view->batch + row * view->row + head * view->head) * bytes;
}

/* Rows of q in all sequences. */
static inline int64_t backward_query_rows(const fdm_problem *p) {
    return p->varlen ? p->total_q : p->batch * p->seqlen_q;
}

/* Rows without keys have lse +inf, and P 0. Rows whose scores hold NaN have lse NaN, and P NaN where they see a key. */
static inline int backward_counts(const struct backward_thread *thread, int32_t lane) {
    return thread->lse[lane] < INFINITY;
}

/* The next piece of a phase that nobody has taken; rises from 0 without end. */
static inline int64_t next_piece(struct backward_call *call) {
    return atomic_fetch_add_explicit(&call->next, 1, memory_order_relaxed);
}

/* ---- backward.c ---- */

/* Packs the lanes or the keys of `thread`, and computes P and dS of one panel; with wants_dbias, thread->dbias holds dS
 * before the softcap's gradient after. */
void backward_pack_lanes(const struct backward_call *call, const struct attention *attention,
                         struct backward_thread *thread);
void backward_pack_keys(const struct backward_call *call, const struct attention *attention,
                        struct backward_thread *thread, int64_t kv_head);
void backward_scores(const struct backward_call *call, const struct attention *attention,
                     struct backward_thread *thread, int32_t panel, int wants_dbias);

/* ---- backward_rows.c ---- */

/* lse of the thread's lanes and what it has rounded away; of lanes past the last it is +inf, so that P is 0. */
void backward_load_lse(const struct backward_call *call, const struct attention *attention,
                       struct backward_thread *thread);
/* delta = rowsum(dO O) - dlse, of lanes whose addresses of dO are in thread->rows, and what each adds to dsink. */
void backward_load_delta(const struct backward_call *call, const struct attention *attention,
                         struct backward_thread *thread);
/* dsink from what all lanes have added. */
void backward_store_dsink(const struct backward_call *call);

/* ---- backward_bias.c ---- */

/* Loads the bias of the thread's keys for one panel; sets *bias_keys or *bias of the step, or neither. */
void backward_load_bias(const struct attention *attention, struct backward_thread *thread, int32_t panel,
                        struct cpu_gradient_step *step);
enum dbias_kind backward_dbias_kind(const fdm_problem *problem);
int64_t backward_dbias_heads(const fdm_problem *problem);
int64_t backward_dbias_length(const fdm_problem *problem);
/* Adds or stores what one panel's tile contributes. */
void backward_add_dbias(const struct backward_call *call, struct backward_thread *thread, int32_t panel);
void backward_finish_dbias_rows(const struct backward_call *call, struct backward_thread *thread);
/* Piece `index` of: zeroing dbias [B|1][h] before, and reducing or recomputing it after. */
int64_t backward_dbias_zero_pieces(const struct backward_call *call);
void backward_dbias_zero(const struct backward_call *call, int64_t index);
int64_t backward_dbias_pieces(const struct backward_call *call);
void backward_dbias_piece(struct backward_call *call, struct backward_thread *thread, int64_t index);

#endif
