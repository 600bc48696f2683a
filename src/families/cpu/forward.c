/* forward.c: attention forward by blocks of lanes: each walks the keys it sees once, with online softmax.
 *
 * An item is (batch, KV head, block of up to 512 lanes). Its Q panels are packed once; each block of visible keys is
 * packed once and serves every panel: scores, softmax step, accumulators shrunk where a maximum rose, V added. Items
 * come from one counter, the last rows first, since causal gives those the most keys. Block sizes depend on the problem
 * alone, so the result does not depend on the number of threads. */
#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/half.h"
#include "device/isa.h"
#include "device/threads.h"
#include "families/cpu/cpu_family.h"
#include "families/cpu/forward_call.h"
#include "families/cpu/key_rows.h"
#include "problem/sinks.h"

_Static_assert((int)CPU_BLOCK_LANES_MAX >= (int)CPU_BLOCK_KEYS_MAX, "rows[] holds lanes or keys");

/* Lays out a thread's share at base and returns its bytes; with base NULL, the bytes alone. */
static size_t thread_layout(char *base, const struct cpu_kernels *k, const fdm_problem *p, int32_t block_m,
                            int32_t block_n, int overlapped) {
    struct forward_thread unused, *thread = base ? (struct forward_thread *)(void *)base : &unused;
    const int32_t d = (int32_t)p->head_dim, dv = (int32_t)p->head_dim_v, panels = block_m / CPU_LANES;
    const int32_t packed = (block_n + k->key_multiple - 1) / k->key_multiple * k->key_multiple;
    const size_t tile = (size_t)packed * CPU_LANES * sizeof(float);
    size_t used = 0;
    cpu_take(base, &used, sizeof *thread);
    thread->panel_bytes = k->panel_bytes(d);
    thread->panels = cpu_take(base, &used, (size_t)panels * thread->panel_bytes);
    thread->packed_keys = cpu_take(base, &used, k->keys_bytes(block_n, d));
    thread->packed_values =
        cpu_take(base, &used, k->values_bytes(block_n, dv) ? k->values_bytes(block_n, dv) : k->keys_bytes(block_n, dv));
    thread->s = cpu_take(base, &used, tile);
    thread->weights = k->weights_bytes(block_n) ? cpu_take(base, &used, k->weights_bytes(block_n)) : NULL;
    thread->acc = cpu_take(base, &used, (size_t)panels * (size_t)dv * CPU_LANES * sizeof(float));
    thread->pipeline = NULL;
    if (overlapped)
        used += forward_pipeline_layout(base ? base + used : NULL, thread, k, p, block_n);
    return used;
}

static int64_t workspace_bytes(const fdm_problem *problem, const fdm_plan *plan, int overlapped) {
    const struct cpu_kernels *kernels = cpu_isa_kernels(cpu_plan_isa(plan), problem->dtype);
    return (int64_t)thread_layout(NULL, kernels, problem, plan->block_m, plan->block_n, overlapped) * plan->num_threads;
}

int64_t cpu_forward_workspace(const fdm_problem *problem, const fdm_plan *plan) {
    return workspace_bytes(problem, plan, 0);
}

int64_t cpu_forward_overlap_workspace(const fdm_problem *problem, const fdm_plan *plan) {
    return workspace_bytes(problem, plan, 1);
}

/* ---- operands ---- */

static const void *matrix_row(const struct matrix_view *view, int64_t bytes, int64_t batch, int64_t row, int64_t head) {
    return view->data + (batch * view->batch + row * view->row + head * view->head) * bytes;
}

static void pack_panels(const struct forward_call *call, struct forward_thread *thread) {
    const struct attention *a = call->attention;
    const struct lane_block *block = &thread->block;
    const int64_t bytes = fdm_dtype_bytes(a->problem->dtype);
    for (int32_t lane = 0; lane < block->num_lanes; lane++)
        thread->rows[lane] =
            matrix_row(&a->q, bytes, block->batch, block->sequence.q_begin + block->row[lane], block->head[lane]);
    for (int32_t panel = 0; panel < block->num_panels; panel++)
        call->kernels->pack_panel(thread->panels + (size_t)panel * thread->panel_bytes,
                                  thread->rows + panel * CPU_LANES, lane_block_panel_lanes(block, panel),
                                  (int32_t)a->problem->head_dim, a->problem->dtype);
}

static struct key_run key_run_of(const struct attention *a, const struct lane_block *block, int of_values) {
    return (struct key_run){.attention = a,
                            .sequence = &block->sequence,
                            .batch = block->batch,
                            .kv_head = block->kv_head,
                            .of_values = of_values};
}

static void key_rows(const struct attention *a, struct forward_thread *thread, int of_values) {
    struct key_run run = key_run_of(a, &thread->block, of_values);
    for (int32_t k = 0; k < thread->keys.num_keys; k++)
        thread->rows[k] = key_address(&run, thread->keys.key[k]);
}

void forward_pack_keys(const struct forward_call *call, struct forward_thread *thread) {
    const struct cpu_kernels *k = call->kernels;
    const fdm_problem *p = call->attention->problem;
    const int32_t num_keys = thread->keys.num_keys, d = (int32_t)p->head_dim, dv = (int32_t)p->head_dim_v;
    if (thread->careful)
        key_block_doubt(&thread->keys, &thread->block);
    key_rows(call->attention, thread, 0);
    do
        k->pack_keys(thread->packed_keys, thread->rows, num_keys, d, p->dtype);
    while (key_block_hide(&thread->keys, &thread->block, thread->rows, d));
    key_rows(call->attention, thread, 1);
    do
        (k->values_bytes(1, 1) ? k->pack_values : k->pack_keys)(thread->packed_values, thread->rows, num_keys, dv,
                                                                p->dtype);
    while (key_block_hide(&thread->keys, &thread->block, thread->rows, dv));
}

/* Asks for a share of the rows that the next block will pack. */
static inline __attribute__((always_inline)) void
prefetch_next(const struct forward_call *call, const struct forward_thread *thread, int32_t panel, int32_t share) {
    const int64_t depths[2] = {call->attention->problem->head_dim, call->attention->problem->head_dim_v};
    const int64_t bytes = fdm_dtype_bytes(call->attention->problem->dtype);
    const struct key_walk *walk = &thread->walk;
    const struct lane_block *block = &thread->block;
    const int64_t count = walk->last - walk->next < walk->block_keys ? walk->last - walk->next : walk->block_keys;
    const int64_t place = panel * FORWARD_SHARES + share, places = block->num_panels * FORWARD_SHARES;
    const int64_t first = walk->next + count * place / places, last = walk->next + count * (place + 1) / places;
    for (int i = 0; thread->keys.contiguous && i < 2; i++) {
        struct key_run run = key_run_of(call->attention, block, i);
        for (int64_t key = first; key < last; key++) {
            const char *row = key_address(&run, key);
            for (int64_t at = 0; at < depths[i] * bytes; at += 64)
                __builtin_prefetch(row + at, 0, 2);
        }
    }
}

/* ---- bias ---- */

static enum bias_kind bias_kind(const struct attention *a) {
    if (!a->bias.data)
        return BIAS_NONE;
    return bias_has_rows(a) ? BIAS_ROWS : BIAS_KEYS;
}

/* The bias that lane 0 of the block sees, key by key. */
static void load_bias_keys(const struct forward_call *call, struct forward_thread *thread) {
    const struct score_view *view = &call->attention->bias;
    const fdm_dtype dtype = call->attention->problem->bias_dtype;
    int64_t base = thread->block.batch * view->batch + thread->block.head[0] / view->group * view->head;
    for (int32_t k = 0; k < thread->keys.num_keys; k++) {
        int64_t at = base + thread->keys.key[k] * view->key;
        thread->bias_keys[k] = dtype == FDM_FLOAT32 ? ((const float *)(const void *)view->data)[at]
                               : dtype == FDM_BFLOAT16
                                   ? bfloat16_to_float(((const uint16_t *)(const void *)view->data)[at])
                                   : float16_to_float(((const uint16_t *)(const void *)view->data)[at]);
    }
}

static int64_t bias_bytes(const struct forward_call *call) {
    return fdm_dtype_bytes(call->attention->problem->bias_dtype);
}

/* Where the bias of each lane begins. */
static void find_bias_rows(const struct forward_call *call, struct forward_thread *thread) {
    const struct score_view *view = &call->attention->bias;
    const struct lane_block *block = &thread->block;
    for (int32_t lane = 0; lane < block->num_lanes; lane++)
        thread->bias_rows[lane] =
            view->data +
            (block->batch * view->batch + block->head[lane] / view->group * view->head + block->row[lane] * view->row) *
                bias_bytes(call);
}

/* Asks for the bias of the panel that comes after this one, as far as can be foreseen, in the same shares. */
static inline __attribute__((always_inline)) void
prefetch_bias(const struct forward_call *call, const struct forward_thread *thread, int32_t panel, int32_t share) {
    const struct lane_block *block = &thread->block;
    const struct key_block *keys = &thread->keys;
    const struct key_walk *walk = &thread->walk;
    const int32_t next = panel + 1 < block->num_panels ? panel + 1 : 0;
    const int64_t first = next ? keys->key[0] : walk->next;
    const int64_t last = next ? keys->key[keys->num_keys - 1] + 1 : first + keys->num_keys;
    if (call->bias_kind != BIAS_ROWS || call->attention->bias.key != 1 || !keys->contiguous || last > walk->last ||
        (next && keys->state[next] == PANEL_SKIP))
        return;
    const int32_t lanes = lane_block_panel_lanes(block, next);
    const int64_t bytes = bias_bytes(call);
    for (int32_t l = lanes * share / FORWARD_SHARES; l < lanes * (share + 1) / FORWARD_SHARES; l++) {
        const char *row = thread->bias_rows[next * CPU_LANES + l];
        for (int64_t at = first * bytes; at < last * bytes; at += 64)
            __builtin_prefetch(row + at, 0, 2);
    }
}

static inline __attribute__((always_inline)) void
prefetch_share(const struct forward_call *call, const struct forward_thread *thread, int32_t panel, int32_t share) {
    prefetch_next(call, thread, panel, share);
    prefetch_bias(call, thread, panel, share);
}

void forward_prefetch(const struct forward_call *call, const struct forward_thread *thread, int32_t panel,
                      int32_t share) {
    prefetch_next(call, thread, panel, share);
}

/* ---- the loop ---- */

/* Part of a panel's tile in which something is visible: whole groups of keys by whole groups of lanes. */
struct strip {
    int32_t first_key, num_keys, first_lane, num_lanes;
};
enum { STRIP_KEYS = 16, STRIP_LANES = 16, STRIPS_MAX = CPU_BLOCK_KEYS_MAX / STRIP_KEYS };

/* Cuts the tile of a panel into strips, dropping groups that nobody sees: half of a causal diagonal's tile. Only
 * float32 operands can be entered in the middle; others, tiles that are seen whole, and those whose bits may not depend
 * on what other lanes see, are one strip. */
static int32_t cut_strips(const struct forward_call *call, const struct forward_thread *thread, int32_t panel,
                          struct strip strips[STRIPS_MAX]) {
    const int32_t keys = thread->keys.num_keys, lanes = lane_block_panel_lanes(&thread->block, panel);
    const int whole = call->attention->problem->invariance == FDM_INVARIANCE_SCHEDULE;
    if (thread->keys.state[panel] == PANEL_FULL || thread->weights || whole) {
        strips[0] = (struct strip){0, keys, 0, lanes};
        return 1;
    }
    int32_t count = 0;
    for (int32_t first = 0; first < keys; first += STRIP_KEYS) {
        int32_t last = first + STRIP_KEYS < keys ? first + STRIP_KEYS : keys;
        uint64_t seen = 0;
        for (int32_t k = first; k < last; k++)
            seen |= thread->keys.visible[panel][k];
        if (!seen)
            continue;
        int32_t low = __builtin_ctzll(seen) / STRIP_LANES * STRIP_LANES;
        int32_t high = ((CPU_LANES - 1 - __builtin_clzll(seen)) / STRIP_LANES + 1) * STRIP_LANES;
        struct strip *before = &strips[count - 1];
        if (count > 0 && before->first_key + before->num_keys == first && before->first_lane == low &&
            before->num_lanes == high - low)
            before->num_keys = last - before->first_key;
        else
            strips[count++] = (struct strip){first, last - first, low, high - low};
    }
    return count;
}

static void score_strips(const struct forward_call *call, const struct forward_thread *thread, int32_t panel,
                         const struct strip *strips, int32_t count) {
    const int32_t depth = (int32_t)call->attention->problem->head_dim;
    for (int32_t i = 0; i < count; i++) {
        const struct strip *t = &strips[i];
        call->kernels->score(thread->s + (size_t)t->first_key * CPU_LANES + t->first_lane,
                             thread->packed_keys + (size_t)t->first_key * (size_t)depth * sizeof(float),
                             thread->panels + (size_t)panel * thread->panel_bytes +
                                 (size_t)t->first_lane * sizeof(float),
                             t->num_keys, t->num_lanes, depth);
    }
}

static void accumulate_strips(const struct forward_call *call, const struct forward_thread *thread, float *acc,
                              const char *weights, const struct strip *strips, int32_t count) {
    const int32_t depth = (int32_t)call->attention->problem->head_dim_v;
    for (int32_t i = 0; i < count; i++) {
        const struct strip *t = &strips[i];
        call->kernels->accumulate(acc + t->first_lane,
                                  thread->packed_values + (size_t)t->first_key * (size_t)depth * sizeof(float),
                                  weights + ((size_t)t->first_key * CPU_LANES + (size_t)t->first_lane) * sizeof(float),
                                  t->num_keys, t->num_lanes, depth);
    }
}

struct cpu_softmax_step forward_softmax_step(const struct forward_call *call, struct forward_thread *thread,
                                             int32_t panel) {
    const fdm_problem *p = call->attention->problem;
    return (struct cpu_softmax_step){.s = thread->s,
                                     .weights = thread->weights ? (void *)thread->weights : (void *)thread->s,
                                     .visible = thread->keys.state[panel] == PANEL_PARTIAL ? thread->keys.visible[panel]
                                                                                           : NULL,
                                     .careful = thread->careful,
                                     .num_keys = thread->keys.num_keys,
                                     .num_lanes = lane_block_panel_lanes(&thread->block, panel),
                                     .scale = (float)p->softmax_scale,
                                     .softcap = (float)p->softcap,
                                     .max = thread->max + panel * CPU_LANES,
                                     .sum = thread->sum + panel * CPU_LANES,
                                     .shrink = thread->shrink};
}

static void run_panel(const struct forward_call *call, struct forward_thread *thread, int32_t panel) {
    const fdm_problem *p = call->attention->problem;
    float *acc = thread->acc + (size_t)panel * (size_t)p->head_dim_v * CPU_LANES;
    struct strip strips[STRIPS_MAX];
    const int32_t count = cut_strips(call, thread, panel, strips);
    prefetch_share(call, thread, panel, 0);
    score_strips(call, thread, panel, strips, count);
    prefetch_share(call, thread, panel, 1);
    struct cpu_softmax_step step = forward_softmax_step(call, thread, panel);
    step.bias_keys = call->bias_kind == BIAS_KEYS ? thread->bias_keys : NULL;
    step.bias_rows = call->bias_kind == BIAS_ROWS ? thread->bias_rows + panel * CPU_LANES : NULL;
    step.keys = thread->keys.key;
    step.bias_key_stride = call->attention->bias.key;
    step.bias_dtype = p->bias_dtype;
    call->kernels->softmax(&step);
    prefetch_share(call, thread, panel, 2);
    call->kernels->shrink(acc, thread->shrink, step.num_lanes, (int32_t)p->head_dim_v);
    accumulate_strips(call, thread, acc, step.weights, strips, count);
    prefetch_share(call, thread, panel, 3);
}

float cpu_end_row(const struct attention *a, int64_t batch, int64_t head, int64_t i, float max, float sum) {
    const float sink = (float)sinks_logit(a, head);
    int empty = sum == 0;
    float rest = logf(sum), factor = empty ? 0 : 1 / sum;
    if (sink != -INFINITY) {
        const float top = empty || sink > max ? sink : max, kept = empty ? 0 : expf(max - top);
        const float total = sum * kept + (sink == top ? 1 : expf(sink - top));
        factor = empty ? 0 : kept / total;
        if (!a->problem->lse_without_sink) {
            max = top;
            rest = logf(total);
            empty = sink == INFINITY;
        }
    }
    const float lse = empty ? INFINITY : max + rest;
    const struct row_view *view = &a->lse, *low = &a->lse_low;
    if (view->data)
        ((float *)(void *)view->data)[batch * view->batch + head * view->head + i * view->row] = lse;
    if (low->data) /* the difference is exact where it matters */
        ((float *)(void *)low->data)[batch * low->batch + head * low->head + i * low->row] =
            isinf(lse) ? 0 : max - lse + rest;
    return factor;
}

static void finish(const struct forward_call *call, struct forward_thread *thread) {
    const struct attention *a = call->attention;
    const struct lane_block *block = &thread->block;
    const int64_t bytes = fdm_dtype_bytes(a->problem->dtype);
    const int32_t dv = (int32_t)a->problem->head_dim_v;
    for (int32_t lane = 0; lane < block->num_lanes; lane++) {
        int64_t row = block->sequence.q_begin + block->row[lane], head = block->head[lane];
        thread->sum[lane] = cpu_end_row(a, block->batch, head, row, thread->max[lane], thread->sum[lane]);
        thread->rows[lane] = matrix_row(&a->out, bytes, block->batch, row, head);
    }
    for (int32_t panel = 0; panel < block->num_panels; panel++)
        call->kernels->store_panel(
            (void *const *)(thread->rows + panel * CPU_LANES), thread->acc + (size_t)panel * (size_t)dv * CPU_LANES,
            thread->sum + panel * CPU_LANES, lane_block_panel_lanes(block, panel), dv, a->problem->dtype);
}

static void walk_keys(const struct forward_call *call, struct forward_thread *thread) {
    const struct lane_block *block = &thread->block;
    if (call->bias_kind == BIAS_ROWS)
        find_bias_rows(call, thread);
    while (key_walk_next(&thread->walk, &thread->keys)) {
        forward_pack_keys(call, thread);
        if (call->bias_kind == BIAS_KEYS)
            load_bias_keys(call, thread);
        for (int32_t panel = 0; panel < block->num_panels; panel++) {
            key_walk_ahead(&thread->walk);
            if (thread->keys.state[panel] != PANEL_SKIP)
                run_panel(call, thread, panel);
            else
                for (int32_t share = 0; share < FORWARD_SHARES; share++)
                    prefetch_next(call, thread, panel, share);
        }
    }
}

static void walk_block(const struct forward_call *call, struct forward_thread *thread) {
    const struct lane_block *block = &thread->block;
    for (int32_t lane = 0; lane < block->num_panels * CPU_LANES; lane++) {
        thread->max[lane] = -INFINITY;
        thread->sum[lane] = 0;
    }
    memset(thread->acc, 0,
           (size_t)block->num_panels * (size_t)call->attention->problem->head_dim_v * CPU_LANES * sizeof(float));
    key_walk_init(&thread->walk, block, call->block_n);
    if (call->overlapped)
        forward_walk_overlapped(call, thread);
    else
        walk_keys(call, thread);
}

static int is_finite(const struct forward_call *call, struct forward_thread *thread) {
    const int32_t rows = (int32_t)call->attention->problem->head_dim_v;
    const void *lanes[1] = {thread->sum};
    int finite = call->kernels->all_finite(lanes, 1, thread->block.num_lanes, FDM_FLOAT32);
    for (int32_t panel = 0; panel < thread->block.num_panels && finite; panel++) {
        for (int32_t d = 0; d < rows; d++)
            thread->rows[d] = thread->acc + ((size_t)panel * (size_t)rows + (size_t)d) * CPU_LANES;
        finite = call->kernels->all_finite(thread->rows, rows, CPU_LANES, FDM_FLOAT32);
    }
    return finite;
}

/* Under a bias of every row, NaN and inf come into a result from keys that the row does not see, too: such an item is
 * done again, with care for what the bias hides. */
static void run_block(const struct forward_call *call, struct forward_thread *thread) {
    pack_panels(call, thread);
    thread->careful = 0;
    walk_block(call, thread);
    if (call->bias_kind == BIAS_ROWS && !is_finite(call, thread)) {
        thread->careful = 1;
        walk_block(call, thread);
    }
    finish(call, thread);
}

/* Items by lane block, the last first, then by batch and KV head. */
static void run_item(const struct forward_call *call, struct forward_thread *thread, int64_t item) {
    const fdm_problem *p = call->attention->problem;
    const int64_t columns = p->batch * p->heads_kv, group = p->heads / p->heads_kv;
    const int64_t batch = item % columns / p->heads_kv, kv_head = item % p->heads_kv;
    const int64_t first = (call->lane_blocks - 1 - item / columns) * call->block_m;
    const int64_t left = attention_sequence(call->attention, batch).seqlen_q * group - first;
    if (left <= 0)
        return;
    lane_block_init(&thread->block, call->attention, call->kernels, batch, kv_head, first,
                    left < call->block_m ? (int32_t)left : call->block_m);
    run_block(call, thread);
}

static void run_thread(void *argument, int32_t index) {
    struct forward_call *call = argument;
    char *base = call->workspace + (size_t)index * call->thread_bytes;
    struct forward_thread *thread = (struct forward_thread *)(void *)base;
    thread_layout(base, call->kernels, call->attention->problem, call->block_m, call->block_n, call->overlapped);
    cpu_kernels_begin(call->kernels);
    for (;;) {
        int64_t item = atomic_fetch_add_explicit(&call->next_item, 1, memory_order_relaxed);
        if (item >= call->num_items)
            break;
        run_item(call, thread, item);
    }
    cpu_kernels_end(call->kernels);
}

static fdm_status run_forward(const fdm_plan *plan, const struct attention *attention, void *workspace,
                              const fdm_launch *launch, int overlapped) {
    const fdm_problem *p = attention->problem;
    const int64_t lanes = p->seqlen_q * (p->heads / p->heads_kv);
    if (plan->block_m % CPU_LANES)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan's block_m is %d; it must be a multiple of %d",
                         plan->block_m, (int)CPU_LANES);
    struct forward_call call = {.attention = attention,
                                .kernels = cpu_isa_kernels(cpu_plan_isa(plan), p->dtype),
                                .workspace = workspace,
                                .block_m = plan->block_m,
                                .block_n = plan->block_n,
                                .lane_blocks = (lanes + plan->block_m - 1) / plan->block_m,
                                .bias_kind = bias_kind(attention),
                                .overlapped = overlapped};
    call.thread_bytes = thread_layout(NULL, call.kernels, p, call.block_m, call.block_n, call.overlapped);
    call.num_items = call.lane_blocks * p->batch * p->heads_kv;
    atomic_init(&call.next_item, 0);
    threads_run(launch ? launch->executor : NULL, plan->num_threads, run_thread, &call);
    return FDM_OK;
}

fdm_status cpu_forward(const fdm_plan *plan, const struct attention *attention, void *workspace,
                       const fdm_launch *launch) {
    return run_forward(plan, attention, workspace, launch, 0);
}

/* A bias, a softcap or a negative scale changes scores before their maximum is taken: those run one after another. */
fdm_status cpu_forward_overlap(const fdm_plan *plan, const struct attention *attention, void *workspace,
                               const fdm_launch *launch) {
    const fdm_problem *p = attention->problem;
    return run_forward(plan, attention, workspace, launch,
                       !attention->bias.data && p->softcap == 0 && p->softmax_scale >= 0);
}
