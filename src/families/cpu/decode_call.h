/* decode_call.h: what the threads of a decode pass share, and the rows of a KV head with the keys that they see. */
#ifndef FDM_CPU_DECODE_CALL_H
#define FDM_CPU_DECODE_CALL_H

#include <stdatomic.h>

#include "families/cpu/decode.h"
#include "problem/interval_views.h"

enum { DECODE_HEAD_ROWS = 16 }; /* query rows per KV head that this pass takes; above, packing pays */

/* How the workspace is divided; a function of problem, table and threads. */
struct decode_layout {
    int64_t num_chunks;     /* of a sequence at most */
    int64_t rows;           /* query rows per KV head, as padded for the steps */
    int64_t acc_row;        /* floats */
    int64_t partial_floats; /* max [rows], sum [rows], acc [rows][acc_row] */
    int64_t partials;       /* byte offsets into the workspace */
    int64_t pending, queries;
    int64_t queries_floats; /* of one thread: q of all KV heads as floats */
    int64_t bytes;
};

/* Everything the threads share. */
struct decode_job {
    const struct attention *attention;
    const fdm_problem *problem;
    const struct decode_kernels *kernels;
    const struct cpu_kernels *store;
    struct decode_layout layout;
    char *workspace;
    int64_t group;          /* query heads per KV head */
    int64_t heads_per_item; /* KV heads */
    int64_t block_keys;     /* of one head before the next head's turn, where all rows see the same keys */
    int64_t num_items;
    atomic_llong next_item;
};

/* One query row of a KV head, with what decides its visible keys. */
struct decode_row {
    int64_t i, head;
    struct key_range range;
    const uint8_t *mask; /* of key 0; NULL = none */
    const char *bias;
    const uint8_t *blocks; /* of the block mask, of key 0; NULL = none */
    const int32_t *start, *end;
    const uint32_t *tree;     /* NULL = none */
    struct row_ranges ranges; /* where a row has several; one alone has cut `range` */
    int same_as_previous;     /* sees the same keys with the same biases as the row before */
};

/* One KV head of one sequence. */
struct decode_head {
    const struct decode_job *job;
    struct sequence sequence;
    int64_t batch, kv_head;
    int32_t num_rows;
    struct decode_row rows[DECODE_HEAD_ROWS];
};

/* Keys of one step, and their biases as the steps of DECODE_ROWS or fewer rows want them. */
struct decode_keys {
    int32_t num_keys;
    int32_t key[DECODE_KEYS];
    float bias[DECODE_HEAD_ROWS * DECODE_KEYS]; /* step by step: [key][rows of the step] */
};

/* Rows of the next step when `left` are to be done: a power of two, so that it divides the lanes. */
static inline int32_t decode_step_rows(int64_t left, int32_t most) {
    int32_t rows = 1;
    while (rows < left && rows < most)
        rows *= 2;
    return rows;
}

/* ---- decode_rows.c: rows and what they see ---- */

void decode_head_init(struct decode_head *head, const struct decode_job *job, int64_t batch, int64_t kv_head);
/* Takes key j if any row sees it. */
void decode_take_key(struct decode_keys *keys, const struct decode_head *head, int64_t j);
/* Whether every row sees all of first .. last-1, without bias; whether none sees any, as far as ranges of keys say. */
int decode_sees_all(const struct decode_head *head, int64_t first, int64_t last);
int decode_sees_none(const struct decode_head *head, int64_t first, int64_t last);
/* Key j, or where it is the first of blocks that no row sees, the first key behind them. */
int64_t decode_seen_from(const struct decode_head *head, int64_t j, int64_t last);

#endif
