/* ranks_call.h: one execution of a rank's plan: its workspace, its messages, and its calls of attention. */
#ifndef FDM_PARALLEL_RANKS_CALL_H
#define FDM_PARALLEL_RANKS_CALL_H

#include "parallel/ranks_plan.h"
#include "parallel/rows_on_device.h"

struct ranks_call {
    const fdm_ranks_plan *plan;
    const fdm_tensors *tensors; /* the rank's own */
    fdm_communicator *communicator;
    const fdm_launch *launch;
    void *stream;                  /* CUDA: where moves and exchanges go now, the launch's or the plan's own */
    fdm_message *sends, *receives; /* room for plan->messages_max each */
    fdm_status status;             /* of the first move that failed; nothing moves after it */
    int counting;                  /* 1: nothing is read or written, and the workspace is measured */
    char *base, *at;               /* of the workspace */
    size_t call_bytes;             /* that the largest call of attention needs */
    char *call_memory;
    int64_t num_messages; /* of the exchange with most, when counting */
    int64_t bytes_sent, bytes_received;
    int32_t num_calls;
};

/* 64-byte aligned bytes of the workspace. */
char *call_take(struct ranks_call *call, int64_t bytes);

/* ---- ranks_move.c ---- */

/* On the plan's device; nothing when counting. A failure stays in the call. */
void call_move(struct ranks_call *call, const struct move *move);
void call_clear(struct ranks_call *call, char *memory, int64_t bytes);

/* A tensor of this rank's rows or keys: element (b, i, h) is `width` bytes. */
struct part {
    char *data;
    int64_t batch, row, head; /* strides in bytes */
    int64_t batches, heads, width;
};
struct part part_of_matrix(const fdm_tensor *tensor); /* [B, rows, heads, D] */
struct part part_of_rows(const fdm_tensor *tensor);   /* [B, heads, rows] */
struct part part_of_keys(const fdm_tensor *tensor);   /* [B|1, h|1, 1, keys] */

/* Query or KV heads that travel together: KV heads first .. first + count - 1. by_peer above 0: each of by_peer ranks
 * in a row has `share` KV heads; these heads are the first rank's, and each next rank's lie `share` further. */
struct heads {
    int64_t first, count;
    int32_t by_peer;
    int64_t share;
};
/* Those of a part. */
fdm_range part_heads(const fdm_ranks_plan *plan, const struct part *part, struct heads heads, int32_t peer);
/* Bytes of a row of a part's buffer [rows][batches][heads of this rank][width]. */
int64_t part_row_bytes(const fdm_ranks_plan *plan, const struct part *part, struct heads heads);

/* `rows` rows of a part of as many KV heads as the sets of a slot have; heads: how ranks share them, if they do. */
char *call_take_slot(struct ranks_call *call, const struct part *part, struct heads heads, int64_t rows, int32_t slot);

/* Where parts' rows travel: parts[n] to buffers[n], by tables of a plan. */
struct travel {
    const struct routes *sends, *receives;
    const struct part *parts;
    char *const *buffers;
    int32_t count;
    struct heads heads;
};
/* Rows of all ranks into the buffers. `staging` has room for what is sent. */
fdm_status travel_there(struct ranks_call *call, const struct travel *travel, char *staging);
/* Rows of the buffers to their owners' `staging`, where peers lie one behind the other, each with its parts. */
fdm_status travel_back(struct ranks_call *call, const struct travel *travel, char *staging);
/* What the staging area of either has to hold. */
int64_t travel_bytes(const struct ranks_call *call, const struct travel *travel);
/* From staging, or the own buffers, into the parts: each peer's heads. */
void travel_place(struct ranks_call *call, const struct travel *travel, const char *staging);
/* The same of parts of gradients, float32 or float64, which are added in the order of ranks: sums[n] is [rows of the
 * shard][batches][heads][width], with all heads of the part where ranks have shares of them. */
void travel_add(struct ranks_call *call, const struct travel *travel, const char *staging, char *const *sums);
/* Sums into a part of the given dtype. */
void part_store(struct ranks_call *call, const struct part *to, fdm_dtype dtype, fdm_range heads, int64_t rows,
                char *sums, fdm_dtype sums_dtype);
/* Adds the first `rows` rows of a part to sums of the same dtype. */
void part_add(struct ranks_call *call, const struct part *from, fdm_range heads, int64_t rows, char *sums,
              fdm_dtype dtype);

/* Rows of a 16-bit part, all heads, as float32 [rows][batches][heads][width]. */
void part_widen(struct ranks_call *call, const struct part *from, fdm_dtype dtype, int64_t rows, char *to);
/* Those rows of two buffers of row_bytes bytes a row: sums += parts. */
void packed_add(struct ranks_call *call, char *sums, const char *parts, fdm_range rows, int64_t row_bytes,
                fdm_dtype dtype);

/* ---- ranks_stages.c ---- */

/* What is computed in turns: sets of heads, or steps of the ring. Functions enqueue, or do, one stage; NULL: nothing
 * comes back. Stages n and n + slots share buffers. */
typedef fdm_status run_stage(void *context, int32_t stage);
struct stages {
    void *context;
    int32_t count;
    run_stage *there, *compute, *back;
};
/* In order, where there is one slot. With two the next stage's bytes travel on the side stream while one is computed,
 * and those that come back while the next one is. */
fdm_status stages_run(struct ranks_call *call, const struct stages *stages);

/* ---- ranks_views.c ---- */

struct view {
    fdm_tensor tensor;
    int64_t shape[4], strides[4];
};
/* Rows and heads of [B, rows, heads, D], and of [B, heads, rows]; NULL of NULL. */
fdm_tensor *view_matrix(struct view *view, const fdm_tensor *tensor, fdm_range rows, fdm_range heads);
fdm_tensor *view_rows(struct view *view, const fdm_tensor *tensor, fdm_range rows, fdm_range heads);
/* Of a mask or bias [B|1, h, rows, keys]: axes of extent 1 stay. */
fdm_tensor *view_scores(struct view *view, const fdm_tensor *tensor, fdm_range heads, fdm_range rows, fdm_range keys);
/* A tensor of a buffer's rows: [B, rows, heads, D], [B, heads, rows] and [B|1, heads, 1, rows]. */
fdm_tensor *view_buffer(struct view *view, char *buffer, fdm_dtype dtype, const struct ranks_call *call,
                        int64_t batches, fdm_range rows, int64_t heads, int64_t width);
fdm_tensor *view_buffer_rows(struct view *view, char *buffer, fdm_dtype dtype, const struct ranks_call *call,
                             int64_t batches, fdm_range rows, int64_t heads);
fdm_tensor *view_buffer_keys(struct view *view, char *buffer, fdm_dtype dtype, const struct ranks_call *call,
                             int64_t batches, fdm_range rows, int64_t heads);
/* Heads of the plan's intervals of a piece. */
void view_intervals(struct view views[2], const struct ranks_call *call, const struct piece *piece, fdm_range heads_kv,
                    fdm_tensors *tensors);
/* The heads of [H] or [n, H]. */
fdm_tensor *view_sink(struct view *view, const fdm_tensor *tensor, fdm_range heads);
/* Those of a tensor's `heads` heads that belong to KV heads. */
fdm_range heads_of(int64_t heads, fdm_range heads_kv, int64_t all_kv);
/* One call of attention. When counting: how much workspace it takes. */
fdm_status call_attention(struct ranks_call *call, const fdm_tensors *tensors, const struct piece *piece,
                          int32_t add_dkv);

#endif
