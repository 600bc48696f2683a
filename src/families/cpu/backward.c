/* backward.c: attention backward by blocks of query lanes: five products per tile, dq complete inside an item.
 *
 * An item is (batch, KV head, block of up to 512 lanes). Its rows of q and dout are packed once, as panels and as rows;
 * the walk over visible keys is the forward's. Per panel of a key block: S = K Q^T, dP = V dO^T, then P and dS from the
 * known lse, then dV += P dO, dK += dS Q and dQ^T += K^T dS. The query heads of a group are lanes, so dk and dv sum
 * over them for free.
 *
 * dk and dv are added to in float32 by all items of one (batch, KV head), its chain: in the caller's tensors when these
 * are float32, else in workspace. Keys are cut into regions; an item adds to a region when every earlier item of its
 * chain has passed it. The order of a chain, last rows first, and the regions depend on the problem alone: the same
 * bits whatever the number of threads. Items are handed out so that an item's predecessors were handed out before it,
 * so a single thread never waits and some thread can always go on. */
#define _GNU_SOURCE
#include <math.h>
#include <sched.h>
#include <string.h>

#include "device/isa.h"
#include "device/threads.h"
#include "families/cpu/backward_call.h"
#include "families/cpu/cpu_family.h"

_Static_assert((int)CPU_BLOCK_LANES_MAX >= (int)CPU_BLOCK_KEYS_MAX, "rows[] holds lanes or keys");

static const int64_t ALL_REGIONS = INT64_MAX;

/* ---- workspace ---- */

/* Lays out a thread's share at base and returns its bytes; with base NULL, the bytes alone. */
static size_t thread_layout(char *base, const struct cpu_kernels *k, const fdm_problem *p, int32_t block_m,
                            int32_t block_n) {
    struct backward_thread unused, *t = base ? (struct backward_thread *)(void *)base : &unused;
    const int32_t d = (int32_t)p->head_dim, dv = (int32_t)p->head_dim_v;
    const size_t panels = (size_t)(block_m + CPU_LANES - 1) / CPU_LANES;
    const int32_t packed = (block_n + k->key_multiple - 1) / k->key_multiple * k->key_multiple;
    const size_t tile = (size_t)packed * CPU_LANES * sizeof(float), weights = k->weights_bytes(block_n);
    size_t used = 0;
    cpu_take(base, &used, sizeof *t);
    t->q_panel_bytes = k->panel_bytes(d);
    t->dout_panel_bytes = k->panel_bytes(dv);
    t->q_rows_bytes = p->needs_dk ? k->rows_bytes(d) : 0;
    t->dout_rows_bytes = p->needs_dv ? k->rows_bytes(dv) : 0;
    t->q_panels = cpu_take(base, &used, panels * t->q_panel_bytes);
    t->dout_panels = cpu_take(base, &used, panels * t->dout_panel_bytes);
    t->q_rows = cpu_take(base, &used, panels * t->q_rows_bytes);
    t->dout_rows = cpu_take(base, &used, panels * t->dout_rows_bytes);
    t->k_keys = cpu_take(base, &used, k->keys_bytes(block_n, d));
    t->v_keys = cpu_take(base, &used, k->keys_bytes(block_n, dv));
    t->k_values = k->pack_values == k->pack_keys ? t->k_keys : cpu_take(base, &used, k->values_bytes(block_n, d));
    t->s = cpu_take(base, &used, tile);
    t->dp = cpu_take(base, &used, tile);
    t->p_weights = weights ? cpu_take(base, &used, weights) : NULL;
    t->ds_weights = weights ? cpu_take(base, &used, weights) : NULL;
    t->ds_values_weights = weights ? cpu_take(base, &used, weights) : NULL;
    t->bias = p->has_bias ? cpu_take(base, &used, tile) : NULL;
    t->dbias = p->needs_dbias ? cpu_take(base, &used, tile) : NULL;
    t->shared = backward_dbias_kind(p) == DBIAS_SHARED ? cpu_take(base, &used, tile) : NULL;
    t->dq = cpu_take(base, &used, panels * (size_t)d * CPU_LANES * sizeof(float));
    return used;
}

static int64_t key_rows(const fdm_problem *p) {
    return (p->varlen ? p->total_k : p->batch * p->seqlen_k) * p->heads_kv;
}

/* Lays out the whole workspace and sets what the call holds of it; workspace NULL: the bytes alone. */
static size_t call_layout(struct backward_call *call, const fdm_problem *p, char *base, int32_t num_threads) {
    const int own_sums = problem_dkv_dtype(p) != FDM_FLOAT32;
    const size_t rows = (size_t)key_rows(p);
    size_t used = 0;
    call->thread_bytes = thread_layout(NULL, call->kernels, p, call->block_m, call->block_n);
    call->lane_blocks = (p->seqlen_q * (p->heads / p->heads_kv) + call->block_m - 1) / call->block_m;
    call->num_items = call->lane_blocks * p->batch * p->heads_kv;
    call->dbias_kind = backward_dbias_kind(p);
    call->dbias_heads = backward_dbias_heads(p);
    call->dbias_length = backward_dbias_length(p);
    call->ordered = p->needs_dk || p->needs_dv || call->dbias_kind == DBIAS_KEYS;
    call->threads = cpu_take(base, &used, call->thread_bytes * (size_t)num_threads);
    call->progress = call->ordered ? cpu_take(base, &used, (size_t)call->num_items * sizeof *call->progress) : NULL;
    call->dk = own_sums && p->needs_dk ? cpu_take(base, &used, rows * (size_t)p->head_dim * sizeof(float)) : NULL;
    call->dv = own_sums && p->needs_dv ? cpu_take(base, &used, rows * (size_t)p->head_dim_v * sizeof(float)) : NULL;
    call->dbias = cpu_take(base, &used, (size_t)(p->batch * call->dbias_heads * call->dbias_length) * sizeof(float));
    call->sink_shares =
        p->needs_dsink ? cpu_take(base, &used, (size_t)(p->heads * backward_query_rows(p)) * sizeof(float)) : NULL;
    return used;
}

int64_t cpu_backward_workspace(const fdm_problem *problem, const fdm_plan *plan) {
    struct backward_call call = {.kernels = cpu_isa_kernels(cpu_plan_isa(plan), problem->dtype),
                                 .block_m = plan->block_m,
                                 .block_n = plan->block_n};
    return (int64_t)call_layout(&call, problem, NULL, plan->num_threads);
}

/* Lanes: 512 share each packed block of keys and each row of dk and dv (128: 10 % slower in float32, 25 % on AMX,
 * measured); fewer where that leaves too few items to spread over cores. Keys: the tiles of S and dP lie in the
 * first-level cache together. */
void cpu_backward_blocks(const fdm_problem *p, const struct cpu_kernels *kernels, int32_t *block_m, int32_t *block_n) {
    enum { ITEMS_WANTED = 16 };
    const int64_t lanes = p->seqlen_q * (p->heads / p->heads_kv), columns = p->batch * p->heads_kv;
    (void)kernels;
    *block_m = CPU_BLOCK_LANES_MAX;
    while (*block_m > CPU_LANES && (lanes + *block_m - 1) / *block_m * columns < ITEMS_WANTED)
        *block_m /= 2;
    *block_n = 64;
}

/* Where keys are dropped, a region must hold many, so that blocks stay full; without, a block is a region. */
static int64_t region_size(const fdm_problem *p, int32_t block_n) {
    enum { MANY_CHAINS = 64, REGIONS = 8, KEYS_LEAST = 1024 };
    if (!p->has_mask && !p->has_intervals && !p->has_row_intervals && !p->block_mask_size)
        return block_n;
    if (p->batch * p->heads_kv >= MANY_CHAINS)
        return p->seqlen_k + 1;
    int64_t share = (p->seqlen_k + REGIONS - 1) / REGIONS;
    return share > KEYS_LEAST ? share : KEYS_LEAST;
}

/* ---- operands ---- */

static void lane_rows(struct backward_thread *thread, const struct matrix_view *view, int64_t bytes) {
    const struct lane_block *block = &thread->block;
    for (int32_t lane = 0; lane < block->num_lanes; lane++)
        thread->rows[lane] =
            matrix_row(view, bytes, block->batch, block->sequence.q_begin + block->row[lane], block->head[lane]);
}

/* Addresses of the lanes' q or dO. The others read zeros: P times the NaN that they may hold would be NaN in keys that
 * they do not see. */
static void input_rows(struct backward_thread *thread, const struct matrix_view *view, int64_t bytes) {
    lane_rows(thread, view, bytes);
    for (int32_t lane = 0; lane < thread->block.num_lanes; lane++)
        if (!backward_counts(thread, lane))
            thread->rows[lane] = cpu_zero_row;
}

void backward_pack_lanes(const struct backward_call *call, const struct attention *a, struct backward_thread *thread) {
    const struct cpu_kernels *k = call->kernels;
    const fdm_problem *p = call->attention->problem;
    const int64_t bytes = fdm_dtype_bytes(p->dtype);
    const int32_t d = (int32_t)p->head_dim, dv = (int32_t)p->head_dim_v;
    backward_load_lse(call, a, thread);
    input_rows(thread, &a->q, bytes);
    for (int32_t panel = 0; panel < thread->block.num_panels; panel++) {
        const void *const *rows = thread->rows + panel * CPU_LANES;
        int32_t lanes = lane_block_panel_lanes(&thread->block, panel);
        k->pack_panel(thread->q_panels + (size_t)panel * thread->q_panel_bytes, rows, lanes, d, p->dtype);
        if (thread->q_rows_bytes)
            k->pack_rows(thread->q_rows + (size_t)panel * thread->q_rows_bytes, rows, lanes, d, p->dtype);
    }
    input_rows(thread, &a->dout, bytes);
    backward_load_delta(call, a, thread);
    for (int32_t panel = 0; panel < thread->block.num_panels; panel++) {
        const void *const *rows = thread->rows + panel * CPU_LANES;
        int32_t lanes = lane_block_panel_lanes(&thread->block, panel);
        k->pack_panel(thread->dout_panels + (size_t)panel * thread->dout_panel_bytes, rows, lanes, dv, p->dtype);
        if (thread->dout_rows_bytes)
            k->pack_rows(thread->dout_rows + (size_t)panel * thread->dout_rows_bytes, rows, lanes, dv, p->dtype);
    }
}

/* K or V as the keys operand of scores; leaves the addresses of what was packed in rows. */
static void pack_keys(const struct backward_call *call, struct backward_thread *thread, const struct matrix_view *view,
                      int64_t kv_head, int32_t depth, char *keys) {
    const struct lane_block *block = &thread->block;
    const fdm_dtype dtype = call->attention->problem->dtype;
    const int64_t bytes = fdm_dtype_bytes(dtype);
    const char *base = matrix_row(view, bytes, block->batch, block->sequence.k_begin, kv_head);
    for (int32_t k = 0; k < thread->keys.num_keys; k++)
        thread->rows[k] = base + thread->keys.key[k] * view->row * bytes;
    do
        call->kernels->pack_keys(keys, thread->rows, thread->keys.num_keys, depth, dtype);
    while (key_block_hide(&thread->keys, block, thread->rows, depth));
}

void backward_pack_keys(const struct backward_call *call, const struct attention *a, struct backward_thread *thread,
                        int64_t kv_head) {
    const fdm_problem *p = call->attention->problem;
    const int32_t d = (int32_t)p->head_dim, dv = (int32_t)p->head_dim_v;
    if (bias_has_rows(a))
        key_block_doubt(&thread->keys, &thread->block);
    pack_keys(call, thread, &a->k, kv_head, d, thread->k_keys);
    if (p->needs_dq && thread->k_values != thread->k_keys)
        call->kernels->pack_values(thread->k_values, thread->rows, thread->keys.num_keys, d, p->dtype);
    pack_keys(call, thread, &a->v, kv_head, dv, thread->v_keys);
}

/* Groups of keys of a panel's tile, each with the groups of lanes that see any of them; none where nobody does: half of
 * a causal diagonal's tile. Only float32 operands can be entered in the middle; others, and tiles that are seen whole,
 * are one strip. */
static void cut_strips(struct backward_thread *thread, int32_t panel) {
    enum { KEYS = 16, LANES = 16 };
    const int32_t keys = thread->keys.num_keys, lanes = lane_block_panel_lanes(&thread->block, panel);
    thread->num_strips = 1;
    thread->strips[0] = (struct strip){0, keys, 0, lanes};
    if (thread->keys.state[panel] == PANEL_FULL || thread->p_weights)
        return;
    thread->num_strips = 0;
    for (int32_t first = 0; first < keys; first += KEYS) {
        int32_t last = first + KEYS < keys ? first + KEYS : keys;
        uint64_t seen = 0;
        for (int32_t k = first; k < last; k++)
            seen |= thread->keys.visible[panel][k];
        if (!seen)
            continue;
        int32_t low = __builtin_ctzll(seen) / LANES * LANES;
        int32_t high = ((CPU_LANES - 1 - __builtin_clzll(seen)) / LANES + 1) * LANES;
        struct strip *before = thread->num_strips ? &thread->strips[thread->num_strips - 1] : NULL;
        if (before && before->first_key + before->num_keys == first && before->first_lane == low &&
            before->num_lanes == high - low)
            before->num_keys = last - before->first_key;
        else
            thread->strips[thread->num_strips++] = (struct strip){first, last - first, low, high - low};
    }
}

/* Floats from the start of a float32 operand of keys, or of a tile, to a strip. */
static size_t key_floats(const struct strip *strip, int32_t depth) { return (size_t)strip->first_key * (size_t)depth; }
static size_t tile_floats(const struct strip *strip) {
    return (size_t)strip->first_key * CPU_LANES + (size_t)strip->first_lane;
}

static void score_strips(const struct cpu_kernels *k, const struct backward_thread *thread, float *s, const char *keys,
                         const char *panel, int32_t depth) {
    for (int32_t i = 0; i < thread->num_strips; i++) {
        const struct strip *t = &thread->strips[i];
        k->score(s + tile_floats(t), keys + key_floats(t, depth) * sizeof(float),
                 panel + (size_t)t->first_lane * sizeof(float), t->num_keys, t->num_lanes, depth);
    }
}

/* rows: the packed rows of one panel, row_bytes apart. */
static void outer_strips(const struct cpu_kernels *k, const struct backward_thread *thread, const char *weights,
                         const char *rows, int32_t depth, float factor) {
    const size_t row_bytes = k->rows_bytes(depth) / CPU_LANES;
    for (int32_t i = 0; i < thread->num_strips; i++) {
        const struct strip *t = &thread->strips[i];
        k->outer(thread->acc_rows + t->first_key, weights + tile_floats(t) * sizeof(float),
                 rows + (size_t)t->first_lane * row_bytes, t->num_keys, t->num_lanes, depth, factor);
    }
}

static void accumulate_strips(const struct cpu_kernels *k, const struct backward_thread *thread, float *acc,
                              const char *weights, int32_t depth) {
    for (int32_t i = 0; i < thread->num_strips; i++) {
        const struct strip *t = &thread->strips[i];
        k->accumulate(acc + t->first_lane, thread->k_values + key_floats(t, depth) * sizeof(float),
                      weights + tile_floats(t) * sizeof(float), t->num_keys, t->num_lanes, depth);
    }
}

static void *weights_or(char *weights, float *tile) { return weights ? (void *)weights : (void *)tile; }

/* dk is the sum of dS Q times softmax_scale: packed weights hold it already, so that `outer` need not multiply. */
static float ds_factor(const struct backward_call *call, const struct backward_thread *thread) {
    return thread->ds_weights ? (float)call->attention->problem->softmax_scale : 1.0f;
}

void backward_scores(const struct backward_call *call, const struct attention *a, struct backward_thread *thread,
                     int32_t panel, int wants_dbias) {
    const fdm_problem *p = call->attention->problem;
    const struct cpu_kernels *k = call->kernels;
    const int32_t keys = thread->keys.num_keys, lanes = lane_block_panel_lanes(&thread->block, panel);
    cut_strips(thread, panel);
    score_strips(k, thread, thread->s, thread->k_keys, thread->q_panels + (size_t)panel * thread->q_panel_bytes,
                 (int32_t)p->head_dim);
    score_strips(k, thread, thread->dp, thread->v_keys, thread->dout_panels + (size_t)panel * thread->dout_panel_bytes,
                 (int32_t)p->head_dim_v);
    struct cpu_gradient_step step = {.s = thread->s,
                                     .dp = thread->dp,
                                     .p_weights = weights_or(thread->p_weights, thread->s),
                                     .ds_weights = weights_or(thread->ds_weights, thread->dp),
                                     .ds_values_weights = weights_or(thread->ds_values_weights, thread->dp),
                                     .dbias = wants_dbias ? thread->dbias : NULL,
                                     .visible = thread->keys.state[panel] == PANEL_PARTIAL ? thread->keys.visible[panel]
                                                                                           : NULL,
                                     .lse = thread->lse + panel * CPU_LANES,
                                     .lse_low = thread->lse_low + panel * CPU_LANES,
                                     .delta = thread->delta + panel * CPU_LANES,
                                     .careful = thread->careful[panel],
                                     .num_keys = keys,
                                     .num_lanes = lanes,
                                     .scale = (float)p->softmax_scale,
                                     .softcap = (float)p->softcap,
                                     .ds_factor = ds_factor(call, thread)};
    if (p->has_bias)
        backward_load_bias(a, thread, panel, &step);
    k->gradient(&step);
}

/* ---- taking turns ---- */

static struct progress *chain_of(const struct backward_call *call, const struct lane_block *block) {
    return call->progress + (block->batch * call->attention->problem->heads_kv + block->kv_head) * call->lane_blocks;
}

static void pause_briefly(int32_t tries) {
    enum { SPINS = 256 };
    if (tries >= SPINS)
        sched_yield();
#if defined(__x86_64__)
    else
        __builtin_ia32_pause();
#endif
}

/* Waits until every earlier item of the chain has passed the region. */
static void wait_for_turn(const struct progress *chain, struct backward_thread *thread, int64_t place, int64_t region) {
    for (int64_t earlier = thread->known; earlier < place; earlier++) {
        int64_t passed;
        for (int32_t tries = 0;
             (passed = atomic_load_explicit(&chain[earlier].regions, memory_order_acquire)) <= region;
             tries += tries < INT32_MAX)
            pause_briefly(tries);
        thread->known += passed == ALL_REGIONS && thread->known == earlier;
    }
}

/* ---- the loop ---- */

/* Addresses of the float32 rows that the keys of the block are added to. */
static void gradient_rows(const struct backward_call *call, struct backward_thread *thread, float *sums,
                          const struct matrix_view *view, int64_t depth) {
    const struct lane_block *block = &thread->block;
    const fdm_problem *p = call->attention->problem;
    const int64_t first = p->varlen ? block->sequence.k_begin : block->batch * p->seqlen_k;
    float *own =
        sums ? sums + (block->kv_head * (key_rows(p) / p->heads_kv) + first) * depth
             : (float *)(void *)matrix_row(view, sizeof(float), block->batch, block->sequence.k_begin, block->kv_head);
    const int64_t step = sums ? depth : view->row;
    for (int32_t k = 0; k < thread->keys.num_keys; k++)
        thread->acc_rows[k] = own + thread->keys.key[k] * step;
}

static void run_panel(const struct backward_call *call, struct backward_thread *thread, int32_t panel) {
    const struct attention *a = call->attention;
    const fdm_problem *p = a->problem;
    const struct cpu_kernels *k = call->kernels;
    const int32_t d = (int32_t)p->head_dim, dv = (int32_t)p->head_dim_v;
    if (p->needs_dv) {
        gradient_rows(call, thread, call->dv, &a->dv, dv);
        outer_strips(k, thread, weights_or(thread->p_weights, thread->s),
                     thread->dout_rows + (size_t)panel * thread->dout_rows_bytes, dv, 1.0f);
    }
    if (p->needs_dk) {
        gradient_rows(call, thread, call->dk, &a->dk, d);
        outer_strips(k, thread, weights_or(thread->ds_weights, thread->dp),
                     thread->q_rows + (size_t)panel * thread->q_rows_bytes, d,
                     thread->ds_weights ? 1.0f : (float)p->softmax_scale);
    }
    if (p->needs_dq)
        accumulate_strips(k, thread, thread->dq + (size_t)panel * (size_t)d * CPU_LANES,
                          weights_or(thread->ds_values_weights, thread->dp), d);
}

/* The walk's keys up to its last. The first tile is computed before the item waits for its turn. */
static void run_region(const struct backward_call *call, struct backward_thread *thread, int64_t place,
                       int64_t region) {
    const int wants_dbias = call->dbias_kind != DBIAS_NONE && call->dbias_kind != DBIAS_SHARED;
    int waited = !call->ordered;
    while (key_walk_next(&thread->walk, &thread->keys)) {
        backward_pack_keys(call, call->attention, thread, thread->block.kv_head);
        for (int32_t panel = 0; panel < thread->block.num_panels; panel++) {
            key_walk_ahead(&thread->walk);
            if (thread->keys.state[panel] == PANEL_SKIP)
                continue;
            backward_scores(call, call->attention, thread, panel, wants_dbias);
            if (!waited)
                wait_for_turn(chain_of(call, &thread->block), thread, place, region);
            waited = 1;
            if (wants_dbias)
                backward_add_dbias(call, thread, panel);
            run_panel(call, thread, panel);
        }
    }
}

static void pass(const struct backward_call *call, struct backward_thread *thread, int64_t place, int64_t regions) {
    if (call->ordered)
        atomic_store_explicit(&chain_of(call, &thread->block)[place].regions, regions, memory_order_release);
}

static void store_dq(const struct backward_call *call, struct backward_thread *thread) {
    const struct attention *a = call->attention;
    const fdm_problem *p = a->problem;
    float factor[CPU_LANES];
    for (int32_t lane = 0; lane < CPU_LANES; lane++)
        factor[lane] = (float)p->softmax_scale;
    lane_rows(thread, &a->dq, fdm_dtype_bytes(p->dtype));
    for (int32_t panel = 0; panel < thread->block.num_panels; panel++)
        call->kernels->store_panel((void *const *)(thread->rows + panel * CPU_LANES),
                                   thread->dq + (size_t)panel * (size_t)p->head_dim * CPU_LANES, factor,
                                   lane_block_panel_lanes(&thread->block, panel), (int32_t)p->head_dim, p->dtype);
}

static void run_block(const struct backward_call *call, struct backward_thread *thread, int64_t place) {
    const fdm_problem *p = call->attention->problem;
    thread->known = 0;
    memset(thread->dq, 0, (size_t)thread->block.num_panels * (size_t)p->head_dim * CPU_LANES * sizeof *thread->dq);
    backward_pack_lanes(call, call->attention, thread);
    key_walk_init(&thread->walk, &thread->block, call->block_n);
    const int64_t last = thread->walk.last;
    while (thread->walk.next < last) {
        int64_t region = thread->walk.next / call->region_keys, end = (region + 1) * call->region_keys;
        pass(call, thread, place, region);
        thread->walk.last = end < last ? end : last;
        run_region(call, thread, place, region);
        thread->walk.next = thread->walk.last;
    }
    pass(call, thread, place, ALL_REGIONS);
    if (p->needs_dq)
        store_dq(call, thread);
    if (call->dbias_kind == DBIAS_ROWS)
        backward_finish_dbias_rows(call, thread);
}

/* Items by lane block, the last first, then by batch and KV head: an item's place in its chain is its lane block,
 * counted from the end of the longest sequence. */
static void run_item(const struct backward_call *call, struct backward_thread *thread, int64_t item) {
    const fdm_problem *p = call->attention->problem;
    const int64_t columns = p->batch * p->heads_kv, group = p->heads / p->heads_kv, place = item / columns;
    const int64_t batch = item % columns / p->heads_kv, kv_head = item % p->heads_kv;
    const int64_t first = (call->lane_blocks - 1 - place) * call->block_m;
    const int64_t left = attention_sequence(call->attention, batch).seqlen_q * group - first;
    if (left <= 0) {
        thread->block.batch = batch;
        thread->block.kv_head = kv_head;
        pass(call, thread, place, ALL_REGIONS);
        return;
    }
    lane_block_init(&thread->block, call->attention, call->kernels, batch, kv_head, first,
                    left < call->block_m ? (int32_t)left : call->block_m);
    run_block(call, thread, place);
}

/* ---- before and after ---- */

enum { PIECE_ROWS = 256 };

static int64_t key_pieces(const fdm_problem *p) { return (key_rows(p) + PIECE_ROWS - 1) / PIECE_ROWS; }

/* Row `index` of [B * Sk or total_k][Hkv] in a caller's tensor. */
static char *key_row(const fdm_problem *p, const struct matrix_view *view, int64_t bytes, int64_t index) {
    int64_t row = index / p->heads_kv, batch = p->varlen ? 0 : row / p->seqlen_k;
    return matrix_row(view, bytes, batch, p->varlen ? row : row % p->seqlen_k, index % p->heads_kv);
}

static void zero_rows(const fdm_problem *p, const struct matrix_view *view, float *sums, int64_t depth, int64_t first,
                      int64_t last) {
    if (sums)
        memset(sums + first * depth, 0, (size_t)((last - first) * depth) * sizeof *sums);
    else if (!p->add_dkv)
        for (int64_t row = first; row < last; row++)
            memset(key_row(p, view, sizeof(float), row), 0, (size_t)depth * sizeof(float));
}

static void round_rows(const struct backward_call *call, const struct matrix_view *view, const float *sums,
                       int64_t depth, int64_t first, int64_t last) {
    const fdm_problem *p = call->attention->problem;
    const int64_t heads = p->heads_kv, rows = key_rows(p) / heads;
    for (int64_t row = first; row < last; row++)
        call->kernels->round_row(key_row(p, view, fdm_dtype_bytes(p->dtype), row),
                                 sums + (row % heads * rows + row / heads) * depth, (int32_t)depth, p->dtype);
}

static int64_t piece_end(const fdm_problem *p, int64_t piece) {
    int64_t end = (piece + 1) * PIECE_ROWS;
    return end < key_rows(p) ? end : key_rows(p);
}

static void run_zero(void *argument, int32_t index) {
    struct backward_call *call = argument;
    const struct attention *a = call->attention;
    const fdm_problem *p = a->problem;
    const int64_t pieces = key_pieces(p), all = pieces + backward_dbias_zero_pieces(call);
    (void)index;
    for (int64_t piece; (piece = next_piece(call)) < all;) {
        if (piece >= pieces) {
            backward_dbias_zero(call, piece - pieces);
            continue;
        }
        if (p->needs_dk)
            zero_rows(p, &a->dk, call->dk, p->head_dim, piece * PIECE_ROWS, piece_end(p, piece));
        if (p->needs_dv)
            zero_rows(p, &a->dv, call->dv, p->head_dim_v, piece * PIECE_ROWS, piece_end(p, piece));
    }
}

static struct backward_thread *own_thread(const struct backward_call *call, int32_t index) {
    char *base = call->threads + (size_t)index * call->thread_bytes;
    thread_layout(base, call->kernels, call->attention->problem, call->block_m, call->block_n);
    return (struct backward_thread *)(void *)base;
}

static void run_items(void *argument, int32_t index) {
    struct backward_call *call = argument;
    struct backward_thread *thread = own_thread(call, index);
    cpu_kernels_begin(call->kernels);
    for (int64_t item; (item = next_piece(call)) < call->num_items;)
        run_item(call, thread, item);
    cpu_kernels_end(call->kernels);
}

static void run_finish(void *argument, int32_t index) {
    struct backward_call *call = argument;
    const struct attention *a = call->attention;
    const fdm_problem *p = a->problem;
    const int64_t pieces = call->dk || call->dv ? key_pieces(p) : 0, all = pieces + backward_dbias_pieces(call);
    struct backward_thread *thread = own_thread(call, index);
    cpu_kernels_begin(call->kernels);
    for (int64_t piece; (piece = next_piece(call)) < all;) {
        if (piece >= pieces) {
            backward_dbias_piece(call, thread, piece - pieces);
            continue;
        }
        if (call->dk)
            round_rows(call, &a->dk, call->dk, p->head_dim, piece * PIECE_ROWS, piece_end(p, piece));
        if (call->dv)
            round_rows(call, &a->dv, call->dv, p->head_dim_v, piece * PIECE_ROWS, piece_end(p, piece));
    }
    cpu_kernels_end(call->kernels);
}

/* The same call with every query head as its own KV head; k and v are still read at h / group. */
static void single_heads(struct backward_call *call) {
    call->single = *call->attention;
    call->single_problem = *call->attention->problem;
    call->single_problem.heads_kv = call->single_problem.heads;
    call->single.problem = &call->single_problem;
}

static void run_phase(struct backward_call *call, const fdm_plan *plan, const fdm_launch *launch,
                      void (*body)(void *argument, int32_t index)) {
    atomic_store(&call->next, 0);
    threads_run(launch ? launch->executor : NULL, plan->num_threads, body, call);
}

fdm_status cpu_backward(const fdm_plan *plan, const struct attention *attention, void *workspace,
                        const fdm_launch *launch) {
    const fdm_problem *p = attention->problem;
    struct backward_call call = {.attention = attention,
                                 .kernels = cpu_isa_kernels(cpu_plan_isa(plan), p->dtype),
                                 .block_m = plan->block_m,
                                 .block_n = plan->block_n,
                                 .region_keys = region_size(p, plan->block_n)};
    call_layout(&call, p, workspace, plan->num_threads);
    for (int64_t i = 0; i < call.num_items && call.ordered; i++)
        atomic_init(&call.progress[i].regions, 0);
    if (call.dbias)
        memset(call.dbias, 0, (size_t)(p->batch * call.dbias_heads * call.dbias_length) * sizeof *call.dbias);
    single_heads(&call);
    if (p->needs_dk || p->needs_dv || p->needs_dbias)
        run_phase(&call, plan, launch, run_zero);
    if (call.sink_shares)
        memset(call.sink_shares, 0, (size_t)(p->heads * backward_query_rows(p)) * sizeof *call.sink_shares);
    if (p->needs_dq || call.ordered || call.dbias_kind == DBIAS_TILE || call.dbias_kind == DBIAS_ROWS || p->needs_dsink)
        run_phase(&call, plan, launch, run_items);
    if (call.dk || call.dv || backward_dbias_pieces(&call) > 0)
        run_phase(&call, plan, launch, run_finish);
    if (call.sink_shares)
        backward_store_dsink(&call);
    return FDM_OK;
}
