/* backward_bias.c: the bias of a tile, and the gradient of the bias under every pattern of broadcasting. */
#include <string.h>

#include "base/half.h"
#include "families/cpu/backward_call.h"

static int64_t lower(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t higher(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---- loading ---- */

static float load_value(const struct score_view *view, fdm_dtype dtype, int64_t at) {
    if (dtype == FDM_FLOAT32)
        return ((const float *)(const void *)view->data)[at];
    uint16_t half = ((const uint16_t *)(const void *)view->data)[at];
    return dtype == FDM_BFLOAT16 ? bfloat16_to_float(half) : float16_to_float(half);
}

static int64_t lane_offset(const struct score_view *view, const struct lane_block *block, int32_t lane) {
    return block->batch * view->batch + block->head[lane] / view->group * view->head + block->row[lane] * view->row;
}

/* One past the last key of the run of neighbours that starts at key `first` of the block. */
static int32_t run_end(const struct key_block *keys, int32_t first) {
    int32_t last = first + 1;
    while (last < keys->num_keys && keys->key[last] == keys->key[last - 1] + 1)
        last++;
    return last;
}

void backward_load_bias(const struct attention *a, struct backward_thread *thread, int32_t panel,
                        struct cpu_gradient_step *step) {
    const struct score_view *view = &a->bias;
    const struct lane_block *block = &thread->block;
    const struct key_block *keys = &thread->keys;
    const fdm_dtype dtype = a->problem->bias_dtype;
    if (!bias_has_rows(a)) {
        for (int32_t k = 0; k < keys->num_keys; k++)
            thread->bias_keys[k] = load_value(view, dtype, lane_offset(view, block, 0) + keys->key[k] * view->key);
        step->bias_keys = thread->bias_keys;
        return;
    }
    const int64_t bytes = fdm_dtype_bytes(dtype);
    const int32_t lanes = lane_block_panel_lanes(block, panel);
    for (int32_t first = 0, last; first < keys->num_keys; first = last) {
        last = view->key == 0 ? keys->num_keys : run_end(keys, first);
        for (int32_t l = 0; l < lanes; l++)
            thread->rows[l] =
                view->data + (lane_offset(view, block, panel * CPU_LANES + l) + keys->key[first] * view->key) * bytes;
        block->kernels->load_bias(thread->bias + (size_t)first * CPU_LANES, thread->rows, view->key, last - first,
                                  lanes, dtype);
    }
    step->bias = thread->bias;
}

/* ---- kinds ---- */

enum dbias_kind backward_dbias_kind(const fdm_problem *p) {
    const int64_t *shape = p->bias_shape;
    if (!p->needs_dbias)
        return DBIAS_NONE;
    if (shape[3] == 1)
        return DBIAS_ROWS;
    if (shape[2] == 1)
        return DBIAS_KEYS;
    return shape[0] == p->batch && shape[1] == p->heads ? DBIAS_TILE : DBIAS_SHARED;
}

int64_t backward_dbias_heads(const fdm_problem *p) {
    enum dbias_kind kind = backward_dbias_kind(p);
    if (kind == DBIAS_KEYS)
        return p->bias_shape[1] == p->heads ? p->heads : p->heads_kv;
    return kind == DBIAS_ROWS ? p->heads : 0;
}

int64_t backward_dbias_length(const fdm_problem *p) {
    return backward_dbias_kind(p) == DBIAS_KEYS ? p->seqlen_k : p->seqlen_q;
}

/* ---- storing ---- */

static void store_value(const struct score_view *view, fdm_dtype dtype, int64_t at, float value) {
    if (dtype == FDM_FLOAT32)
        ((float *)(void *)view->data)[at] = value;
    else
        ((uint16_t *)(void *)view->data)[at] =
            dtype == FDM_BFLOAT16 ? float_to_bfloat16(value) : float_to_float16(value);
}

/* dbias[lane][key .. key + num_keys - 1] = tile [num_keys][CPU_LANES] transposed; at[lane] is the lane's key 0. */
static void store_tile(const struct backward_call *call, const float *tile, const int64_t *at, int64_t key,
                       int32_t num_keys, int32_t num_lanes) {
    static const float ones[CPU_LANES] = {[0 ... CPU_LANES - 1] = 1.0f};
    const struct score_view *view = &call->attention->dbias;
    const fdm_dtype dtype = call->attention->problem->bias_dtype;
    if (view->key != 1) {
        for (int32_t lane = 0; lane < num_lanes; lane++)
            for (int32_t k = 0; k < num_keys; k++)
                store_value(view, dtype, at[lane] + (key + k) * view->key, tile[(size_t)k * CPU_LANES + lane]);
        return;
    }
    void *rows[CPU_LANES];
    for (int32_t lane = 0; lane < num_lanes; lane++)
        rows[lane] = view->data + (at[lane] + key) * fdm_dtype_bytes(dtype);
    call->kernels->store_panel(rows, tile, ones, num_lanes, num_keys, dtype);
}

static void store_visible(const struct backward_call *call, struct backward_thread *thread, int32_t panel) {
    const int32_t lanes = lane_block_panel_lanes(&thread->block, panel);
    int64_t at[CPU_LANES];
    for (int32_t lane = 0; lane < lanes; lane++)
        at[lane] = lane_offset(&call->attention->dbias, &thread->block, panel * CPU_LANES + lane);
    for (int32_t first = 0, last; first < thread->keys.num_keys; first = last) {
        last = run_end(&thread->keys, first);
        store_tile(call, thread->dbias + (size_t)first * CPU_LANES, at, thread->keys.key[first], last - first, lanes);
    }
}

/* ---- sums over rows, and over keys ---- */

/* In four groups of four, which a compiler may keep in vectors. */
static float sum_lanes(const float *row, int32_t num_lanes) {
    enum { SUMS = 16 };
    float sum[SUMS] = {0}, total = 0;
    int32_t lane = 0;
    for (; lane + SUMS <= num_lanes; lane += SUMS)
        for (int32_t i = 0; i < SUMS; i++)
            sum[i] += row[lane + i];
    for (; lane < num_lanes; lane++)
        total += row[lane];
    for (int32_t i = 0; i < SUMS; i++)
        total += sum[i];
    return total;
}

static float *partial(const struct backward_call *call, int64_t batch, int64_t head) {
    return call->dbias + (batch * call->dbias_heads + head) * call->dbias_length;
}

static void add_keys(const struct backward_call *call, struct backward_thread *thread, int32_t panel) {
    const struct lane_block *block = &thread->block;
    const int32_t lanes = lane_block_panel_lanes(block, panel);
    const int each = call->dbias_heads != call->attention->problem->heads_kv; /* query heads have sums of their own */
    float *sums = partial(call, block->batch, each ? 0 : block->kv_head);
    for (int32_t k = 0; k < thread->keys.num_keys; k++) {
        const float *row = thread->dbias + (size_t)k * CPU_LANES;
        if (!each) {
            sums[thread->keys.key[k]] += sum_lanes(row, lanes);
            continue;
        }
        for (int32_t lane = 0; lane < lanes; lane++)
            sums[block->head[panel * CPU_LANES + lane] * call->dbias_length + thread->keys.key[k]] += row[lane];
    }
}

void backward_add_dbias(const struct backward_call *call, struct backward_thread *thread, int32_t panel) {
    if (call->dbias_kind == DBIAS_TILE)
        store_visible(call, thread, panel);
    else if (call->dbias_kind == DBIAS_KEYS)
        add_keys(call, thread, panel);
    else
        for (int32_t k = 0; k < thread->keys.num_keys; k++)
            for (int32_t lane = 0; lane < lane_block_panel_lanes(&thread->block, panel); lane++)
                thread->dbias_rows[panel * CPU_LANES + lane] += thread->dbias[(size_t)k * CPU_LANES + lane];
}

void backward_finish_dbias_rows(const struct backward_call *call, struct backward_thread *thread) {
    const struct lane_block *block = &thread->block;
    for (int32_t lane = 0; lane < block->num_lanes; lane++)
        partial(call, block->batch, block->head[lane])[block->row[lane]] = thread->dbias_rows[lane];
}

/* Output head (batch, head): sums partial vectors over the batches and heads that share it, in order, and over their
 * elements where the output has but one. */
static void reduce(const struct backward_call *call, int64_t batch, int64_t head) {
    const fdm_problem *p = call->attention->problem;
    const struct score_view *view = &call->attention->dbias;
    const int64_t *shape = p->bias_shape;
    const int rows = call->dbias_kind == DBIAS_ROWS;
    const int64_t extent = rows ? shape[2] : shape[3], inner = extent == call->dbias_length ? 1 : call->dbias_length;
    const int64_t share = call->dbias_heads / shape[1], base = batch * view->batch + head * view->head;
    const int64_t first = shape[0] == 1 ? 0 : batch, last = shape[0] == 1 ? p->batch : batch + 1;
    for (int64_t n = 0; n < extent; n++) {
        double sum = 0;
        for (int64_t b = first; b < last; b++)
            for (int64_t h = head * share; h < (head + 1) * share; h++)
                for (int64_t i = n; i < n + inner; i++)
                    sum += (double)partial(call, b, h)[i];
        store_value(view, p->bias_dtype, base + n * (rows ? view->row : view->key), (float)sum);
    }
}

/* ---- rows and keys, shared over batch or heads ---- */

/* Adds dS of query head (batch, head), rows and keys as given, to thread->shared. */
static void add_shared_head(struct backward_call *call, struct backward_thread *thread, int64_t batch, int64_t head,
                            int64_t row, int64_t key) {
    const struct attention *a = &call->single;
    const int64_t rows = lower(CPU_LANES, attention_sequence(a, batch).seqlen_q - row);
    const int64_t group = call->attention->problem->heads / call->attention->problem->heads_kv;
    if (rows <= 0)
        return;
    lane_block_init(&thread->block, a, call->kernels, batch, head, row, (int32_t)rows);
    key_walk_init(&thread->walk, &thread->block, call->block_n);
    thread->walk.next = higher(thread->walk.next, key);
    thread->walk.last = lower(thread->walk.last, key + call->block_n);
    if (thread->walk.next >= thread->walk.last)
        return;
    backward_pack_lanes(call, a, thread);
    while (key_walk_next(&thread->walk, &thread->keys)) {
        if (thread->keys.state[0] == PANEL_SKIP)
            continue;
        backward_pack_keys(call, a, thread, head / group);
        backward_scores(call, a, thread, 0, 1);
        for (int32_t k = 0; k < thread->keys.num_keys; k++)
            for (int32_t lane = 0; lane < rows; lane++)
                thread->shared[(size_t)(thread->keys.key[k] - key) * CPU_LANES + (size_t)lane] +=
                    thread->dbias[(size_t)k * CPU_LANES + lane];
    }
}

static int64_t row_blocks(const fdm_problem *p) { return (p->seqlen_q + CPU_LANES - 1) / CPU_LANES; }

/* 64 rows of one output head, block of keys by block of keys; all that share a tile are added in order. */
static void sum_shared_rows(struct backward_call *call, struct backward_thread *thread, int64_t batch, int64_t head,
                            int64_t row) {
    const fdm_problem *p = call->attention->problem;
    const struct score_view *view = &call->attention->dbias;
    const int64_t share = p->heads / p->bias_shape[1];
    const int64_t first = p->bias_shape[0] == 1 ? 0 : batch, last = p->bias_shape[0] == 1 ? p->batch : batch + 1;
    const int32_t rows = (int32_t)lower(CPU_LANES, p->seqlen_q - row);
    int64_t at[CPU_LANES];
    for (int32_t lane = 0; lane < rows; lane++)
        at[lane] = batch * view->batch + head * view->head + (row + lane) * view->row;
    for (int64_t key = 0; key < p->seqlen_k; key += call->block_n) {
        memset(thread->shared, 0, (size_t)call->block_n * CPU_LANES * sizeof *thread->shared);
        for (int64_t b = first; b < last; b++)
            for (int64_t h = head * share; h < (head + 1) * share; h++)
                add_shared_head(call, thread, b, h, row, key);
        store_tile(call, thread->shared, at, key, (int32_t)lower(call->block_n, p->seqlen_k - key), rows);
    }
}

/* ---- pieces ---- */

/* Tiles without work are never visited, nor are keys that a bias hides from all rows, one of a tensor that is expanded
 * along them too. Where every pair is visible there are none, and each element is written once. */
int64_t backward_dbias_zero_pieces(const struct backward_call *call) {
    const fdm_problem *p = call->attention->problem;
    const int hides = p->causal || p->window_left >= 0 || p->window_right >= 0 || p->has_mask || p->has_intervals ||
                      p->has_row_intervals || p->block_mask_size || p->varlen || p->has_seqused_q || p->has_seqused_k ||
                      p->seqlen_k == 0 || !bias_has_rows(call->attention);
    return call->dbias_kind == DBIAS_TILE && hides ? p->bias_shape[0] * p->bias_shape[1] : 0;
}

void backward_dbias_zero(const struct backward_call *call, int64_t index) {
    const fdm_problem *p = call->attention->problem;
    const struct score_view *view = &call->attention->dbias;
    const int64_t *shape = p->bias_shape, base = index / shape[1] * view->batch + index % shape[1] * view->head;
    const int64_t bytes = fdm_dtype_bytes(p->bias_dtype);
    for (int64_t i = 0; i < shape[2]; i++)
        if (view->key == 1)
            memset(view->data + (base + i * view->row) * bytes, 0, (size_t)(shape[3] * bytes));
        else
            for (int64_t j = 0; j < shape[3]; j++)
                store_value(view, p->bias_dtype, base + i * view->row + j * view->key, 0.0f);
}

int64_t backward_dbias_pieces(const struct backward_call *call) {
    const fdm_problem *p = call->attention->problem;
    const int64_t heads = p->bias_shape[0] * p->bias_shape[1];
    if (call->dbias_kind == DBIAS_KEYS || call->dbias_kind == DBIAS_ROWS)
        return heads;
    return call->dbias_kind == DBIAS_SHARED ? heads * row_blocks(p) : 0;
}

void backward_dbias_piece(struct backward_call *call, struct backward_thread *thread, int64_t index) {
    const fdm_problem *p = call->attention->problem;
    if (call->dbias_kind != DBIAS_SHARED) {
        reduce(call, index / p->bias_shape[1], index % p->bias_shape[1]);
        return;
    }
    const int64_t head = index / row_blocks(p), row = index % row_blocks(p) * CPU_LANES;
    thread->q_rows_bytes = thread->dout_rows_bytes = 0; /* the products over lanes are done */
    sum_shared_rows(call, thread, head / p->bias_shape[1], head % p->bias_shape[1], row);
}
