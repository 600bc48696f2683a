/* tile_plan.c: the tile plan on the host. */
#include "gpu/tile_plan_launch.h"

#include "gpu/key_sort.h"
#include "problem/visible_tiles.h"

/* A mask that all rows share. */
static int masks_keys(const fdm_problem *p) { return p->has_mask && !gpu_mask_rows(p); }

/* Extents of a plan: heads and batches of what hides keys; packed sequences have a plan each. */
struct extents {
    int64_t batches, heads, row_tiles, key_words;
};
static void widen(struct extents *e, int has, int64_t batches, int64_t heads) {
    e->batches = has && batches > e->batches ? batches : e->batches;
    e->heads = has && heads > e->heads ? heads : e->heads;
}
static struct extents extents_of(const fdm_problem *p) {
    struct extents e = {p->varlen || gpu_used_constant(p) ? p->batch : 1, 1, gpu_ceil_div(p->seqlen_q, TILE_PLAN_TILE),
                        gpu_ceil_div(p->seqlen_k, 32 * TILE_PLAN_TILE)};
    widen(&e, p->has_intervals, p->interval_batch, p->interval_heads);
    widen(&e, p->has_row_intervals, p->row_interval_batch, p->row_interval_heads);
    widen(&e, p->block_mask_size, p->block_mask_batch, p->block_mask_heads);
    widen(&e, masks_keys(p), p->mask_shape[0], p->mask_shape[1]);
    return e;
}
static int64_t all_row_tiles(const struct extents *e) { return e->batches * e->heads * e->row_tiles; }

int tile_plan_possible(const fdm_problem *p) {
    const struct extents e = extents_of(p);
    return (p->has_intervals || gpu_row_runs(p) || masks_keys(p)) &&
           gpu_ceil_div(e.row_tiles, 32) * e.key_words * e.batches * e.heads < INT32_MAX;
}

/* What is 0 when the kernels begin: the counts of items that were begun, and those of heads. */
enum { ITEM_COUNTS_BYTES = TILE_PLAN_ITEM_COUNTS * 4 };
static int64_t zero_bytes(const struct extents *e) {
    return gpu_round_up(ITEM_COUNTS_BYTES + e->batches * e->heads * (int64_t)sizeof(struct tile_counts), 64);
}
static int64_t array_bytes(const struct extents *e) { return gpu_round_up(all_row_tiles(e) * e->key_words * 4, 64); }
static int64_t bytes_of(const struct extents *e) {
    return zero_bytes(e) + 2 * array_bytes(e) + gpu_round_up(all_row_tiles(e) * 4, 64);
}
int64_t tile_plan_bytes(const fdm_problem *p) {
    const struct extents e = extents_of(p);
    return bytes_of(&e);
}

/* The plan at an address. */
static struct tile_plan place(const fdm_problem *p, const struct extents *e, void *memory) {
    char *const arrays = (char *)memory + zero_bytes(e);
    return (struct tile_plan){.seen = (uint32_t *)(void *)arrays,
                              .full = (uint32_t *)(void *)(arrays + array_bytes(e)),
                              .counts = (struct tile_counts *)(void *)((char *)memory + ITEM_COUNTS_BYTES),
                              .order = (int32_t *)(void *)(arrays + 2 * array_bytes(e)),
                              .batch = e->batches == 1 ? 0 : e->heads,
                              .head = e->heads == 1 ? 0 : 1,
                              .key_words = (int32_t)e->key_words,
                              .row_tiles = (int32_t)e->row_tiles,
                              .group = (int32_t)(p->heads / e->heads),
                              .num_heads = (int32_t)(e->batches * e->heads)};
}

static void tile_plan_request(const fdm_problem *p, struct cuda_kernel_request *request) {
    const uint32_t told = GPU_ALIKE_WINDOW | GPU_ALIKE_MASK | GPU_ALIKE_MASK_ROWS | GPU_ALIKE_INTERVALS |
                          GPU_ALIKE_ROW_INTERVALS | GPU_ALIKE_BLOCKS | GPU_ALIKE_VARLEN | GPU_ALIKE_SEQUSED;
    gpu_set_problem_constants(request, p, GPU_ALIKE_ALL & ~told);
    request->file = "gpu/tile_plan.cu";
    request->entry = "tile_plan";
    request->threads = 32 * TILE_PLAN_WARPS;
    request->shared_bytes = 0;
}

static void add(struct gpu_launches *l, const struct gpu_forward_params *a, struct tile_plan_order order,
                const struct extents *e, void *memory, struct tile_plan *plan) {
    const fdm_problem *p = l->problem;
    const int64_t row_words = gpu_ceil_div(e->row_tiles, 32);
    const int counted = order.counts || order.block_m;
    *plan = place(p, e, memory);
    const struct tile_plan_params params = {.in = *a,
                                            .plan = *plan,
                                            .heads = (int32_t)e->heads,
                                            .row_words = (int32_t)row_words,
                                            .blocks = (int32_t)(row_words * e->key_words * e->batches * e->heads),
                                            .block_tiles = order.block_m / TILE_PLAN_TILE,
                                            .counted = counted,
                                            .keys = order.keys,
                                            .sorted = order.sorted,
                                            .keys_head = (int32_t)gpu_round_up(p->seqlen_k, KEY_SORT_KEYS),
                                            .item_counts = counted ? NULL : memory};
    tile_plan_request(p, gpu_add_kernel(l));
    gpu_add_launch(l, (struct gpu_launch){.grid = {gpu_grid(params.blocks)},
                                          .params = &params,
                                          .params_bytes = sizeof params,
                                          .zeros = memory,
                                          .zero_bytes = counted ? (size_t)zero_bytes(e) : 0});
}

/* ---- the plan that a caller keeps ---- */

static struct extents extents_of_all(const fdm_problem *p) {
    const struct mask_plan_extents e = mask_plan_extents_of(p);
    return (struct extents){e.batches, e.heads, e.row_tiles, e.key_words};
}
int tile_plan_of_all_possible(const fdm_problem *p) {
    const struct extents e = extents_of_all(p);
    return gpu_ceil_div(e.row_tiles, 32) * e.key_words * e.batches * e.heads < INT32_MAX;
}
int64_t tile_plan_bytes_of_all(const fdm_problem *p) {
    const struct extents e = extents_of_all(p);
    return bytes_of(&e);
}
struct tile_plan tile_plan_at(const fdm_problem *p, void *memory) {
    const struct extents e = extents_of_all(p);
    return place(p, &e, memory);
}
void tile_plan_add_of_all(struct gpu_launches *l, const struct gpu_forward_params *a, void *memory,
                          struct tile_plan *plan) {
    const struct extents e = extents_of_all(l->problem);
    const struct tile_plan_order order = {.counts = l->problem->has_intervals || masks_keys(l->problem)};
    add(l, a, order, &e, memory, plan);
}

/* ---- that of a call ---- */

void tile_plan_add(struct gpu_launches *l, const struct gpu_forward_params *a, struct tile_plan_order order,
                   void *workspace, struct tile_plan *plan) {
    const struct extents e = extents_of(l->problem);
    if (l->attention && l->attention->mask_plan && !order.block_m && !order.keys) {
        *plan = tile_plan_at(l->problem, l->attention->mask_plan);
        gpu_add_zeros(l, workspace, ITEM_COUNTS_BYTES);
    } else {
        add(l, a, order, &e, workspace, plan);
    }
}

/* ---- for kernels that look at each key ---- */

/* From this number of keys on, to test each (2 clocks in `hopper.gather`) takes a block longer than a plan (5 us). */
enum { MANY_KEYS = 8192 };

static int hides_keys(const fdm_problem *p) {
    return (p->has_intervals || masks_keys(p)) && !gpu_masks_blocks(p) && !p->has_cache;
}
int64_t tile_plan_bytes_of_keys(const fdm_problem *p) {
    return hides_keys(p) && p->has_intervals && p->seqlen_k >= MANY_KEYS && tile_plan_possible(p) ? tile_plan_bytes(p)
                                                                                                  : 0;
}

void tile_plan_add_of_keys(struct gpu_launches *l, void *workspace, struct gpu_forward_params *a) {
    const fdm_problem *p = l->problem;
    struct tile_plan plan;
    a->block_mask = NULL;
    if (l->attention && l->attention->mask_plan && hides_keys(p))
        plan = tile_plan_at(p, l->attention->mask_plan);
    else if (tile_plan_bytes_of_keys(p))
        tile_plan_add(l, a, (struct tile_plan_order){0}, workspace, &plan);
    else
        return;
    const int64_t row = plan.key_words * (int64_t)sizeof *plan.seen;
    a->block_mask = (const uint8_t *)plan.seen;
    a->block_mask_row = row;
    a->block_mask_head = plan.head * plan.row_tiles * row;
    a->block_mask_batch = plan.batch * plan.row_tiles * row;
    a->block_mask_group = plan.group;
}
