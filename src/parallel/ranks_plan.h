/* ranks_plan.h: what one rank does in one call over several ranks. */
#ifndef FDM_PARALLEL_RANKS_PLAN_H
#define FDM_PARALLEL_RANKS_PLAN_H

#include "parallel/head_sets.h"
#include "parallel/layout.h"

/* Rows of an owner's shard, and where they lie in a reader's buffer. */
struct route_pair {
    fdm_range owned, read;
};
/* Pairs by peer, in the order of positions. */
struct routes {
    struct route_pair *pairs;
    int64_t *begin; /* [ranks + 1] */
};

/* A call on rows of the shard and keys of the buffer. */
struct piece {
    fdm_range rows, keys;
    fdm_range columns; /* those keys in the whole problem, where masks and biases have a row axis */
    int32_t causal;
    int64_t left, right;
    int32_t *start, *end; /* NULL, or [lists][keys] */
    int32_t sinks_alone;  /* 1: no keys but sinks, which lse counts */
};

/* What a mask or bias [B|1, h, rows, keys] has. */
enum scores_kind { SCORES_NONE, SCORES_CONSTANT, SCORES_OF_KEYS, SCORES_OF_ROWS };

enum { MOST_CALLS = 8, RANKS_SLOTS_MAX = 2 };
struct pieces {
    struct piece *data;
    int64_t count;
    int32_t on_device, device; /* 1: intervals lie on a CUDA device, which one */
};

/* Keys of one owner, in the ring. Each fold is the calls on some of them, which together have every row once. */
struct ring_step {
    struct routes sends, receives;
    int64_t buffer_rows;
    struct pieces *folds;
    int64_t num_folds;
};

struct fdm_ranks_plan {
    fdm_device device;
    fdm_problem problem; /* whole */
    fdm_rank_mask mask;  /* without lists */
    int32_t ranks, rank, num_threads;
    fdm_rank_algorithm algorithm;
    enum scores_kind mask_kind, bias_kind;
    int64_t rows, keys;                    /* of the rank */
    int32_t head_ranks;                    /* ranks that exchange heads; gather and ring: 1 */
    int64_t buffer_rows;                   /* needed keys; ulysses: all keys; ring: those of the largest step */
    int64_t query_rows;                    /* ulysses and both: rows that this rank computes */
    struct routes sends, receives;         /* of keys; its own are among receives */
    struct routes row_sends, row_receives; /* ulysses and both: of rows */
    struct pieces pieces;                  /* ring: none */
    struct ring_step *steps;               /* ring: [ranks] */
    struct head_sets sets;
    int32_t slots;                 /* buffers of a kind, in which sets of heads, or steps of the ring, take turns */
    struct cuda_side_stream *side; /* CUDA with two slots: where bytes travel while others are computed */
    int64_t interval_batch, interval_heads;
    int64_t keys_fetched, bytes_received, bytes_sent;
    size_t call_bytes; /* of the workspace of one call of attention */
    size_t workspace_bytes;
    int64_t messages_max;  /* of an exchange, one way */
    fdm_message *messages; /* CUDA: room for those of an exchange, both ways; else they are in the workspace */
    int32_t sm_margin;
    int32_t num_calls;
    fdm_plan *call_plans; /* CUDA: [num_calls], of aligned tensors; tensors of other facts are planned when they come */
    char choice[64];
    char reason[200];
    uint64_t layout_hash, mask_hash, table_hash;
};

enum scores_kind scores_kind_of(int present, const int64_t *shape, const fdm_problem *whole);
uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t count);

/* ---- routes.c ---- */
fdm_status routes_make(const fdm_layout *owners, const struct range_list *needed, int32_t rank, struct routes *sends,
                       struct routes *receives);
void routes_release(struct routes *routes);
int64_t routes_rows(const struct routes *routes, int32_t peer);

/* ---- pieces.c ---- */
/* mask with its lists. The caller releases pieces, in a failure too. */
fdm_status pieces_make(struct pieces *pieces, const fdm_rank_mask *mask, const fdm_range *ranges, int64_t count,
                       const struct range_list *needed);
/* One call on all rows and keys. */
fdm_status pieces_whole(struct pieces *pieces, const fdm_rank_mask *mask);
/* Copies their intervals, of `lists` lists, to the memory of a CUDA device. */
fdm_status pieces_to_device(struct pieces *pieces, int64_t lists, int32_t device);
void pieces_release(struct pieces *pieces);

/* ---- ring_steps.c ---- */
/* needed: of each rank. has_columns: a mask or bias has a column for every key, so that a fold's keys are one range. */
fdm_status ring_steps_make(fdm_ranks_plan *plan, const fdm_layout *rows, const fdm_layout *keys,
                           const fdm_rank_mask *mask, const struct range_list *needed, int has_columns);
void ring_steps_release(fdm_ranks_plan *plan);

/* ---- ranks_gather.c, ranks_ulysses.c, ranks_ring.c ---- */
struct ranks_call;
/* Where call->counting is 1 nothing is done but counting the workspace. */
fdm_status gather_run(struct ranks_call *call);
fdm_status ulysses_run(struct ranks_call *call);
fdm_status ring_run(struct ranks_call *call);
/* By the plan's algorithm. */
static inline fdm_status ranks_run(struct ranks_call *call, fdm_rank_algorithm algorithm) {
    return algorithm == FDM_RANKS_GATHER ? gather_run(call)
           : algorithm == FDM_RANKS_RING ? ring_run(call)
                                         : ulysses_run(call);
}

#endif
