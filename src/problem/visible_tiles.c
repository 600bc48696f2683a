/* visible_tiles.c: the tiles that a mask plan has. */
#include "problem/visible_tiles.h"

#include "base/error.h"
#include "base/struct_bytes.h"
#include "problem/block_views.h"
#include "problem/interval_views.h"

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t tiles_of(int64_t length, int64_t tile) { return (length + tile - 1) / tile; }

/* Extents of masks that a problem lacks are 1. Sequences of different lengths have tiles of their own. */
struct mask_plan_extents mask_plan_extents_of(const fdm_problem *p) {
    const int64_t batches = larger(larger(p->interval_batch, p->row_interval_batch),
                                   larger(p->block_mask_batch, p->has_mask ? p->mask_shape[0] : 1));
    const int64_t heads = larger(larger(p->interval_heads, p->row_interval_heads),
                                 larger(p->block_mask_heads, p->has_mask ? p->mask_shape[1] : 1));
    return (struct mask_plan_extents){p->varlen || p->has_seqused_q || p->has_seqused_k ? p->batch : batches, heads,
                                      tiles_of(p->seqlen_q, MASK_PLAN_TILE),
                                      tiles_of(p->seqlen_k, 32 * MASK_PLAN_TILE)};
}

/* ---- whether a plan is for a call ---- */

/* What the tiles of a call depend on, besides what its masks hold. */
#define PLAN_FACTS(X)     \
    X(batch)              \
    X(heads)              \
    X(heads_kv)           \
    X(seqlen_q)           \
    X(seqlen_k)           \
    X(total_q)            \
    X(total_k)            \
    X(causal)             \
    X(window_left)        \
    X(window_right)       \
    X(varlen)             \
    X(has_seqused_q)      \
    X(has_seqused_k)      \
    X(has_intervals)      \
    X(interval_batch)     \
    X(interval_heads)     \
    X(has_row_intervals)  \
    X(row_interval_batch) \
    X(row_interval_heads) \
    X(row_ranges)         \
    X(block_mask_size)    \
    X(block_mask_batch)   \
    X(block_mask_heads)   \
    X(has_mask)           \
    X(mask_shape[0])      \
    X(mask_shape[1])      \
    X(mask_shape[2])      \
    X(mask_shape[3])

static fdm_status check_facts(const fdm_problem *made, const fdm_problem *p) {
#define CHECK_FACT(fact)                                                                                             \
    if (made->fact != p->fact)                                                                                       \
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "mask_plan was made for %s %lld, but the call has %lld", #fact, \
                         (long long)made->fact, (long long)p->fact);
    PLAN_FACTS(CHECK_FACT)
#undef CHECK_FACT
    return FDM_OK;
}

fdm_status mask_plan_resolve(const fdm_tensors *t, const fdm_problem *p, struct attention *a) {
    fdm_tile_plan room;
    const fdm_tile_plan *mask_plan = t->mask_plan;
    if (!mask_plan)
        return FDM_OK;
    if (!(mask_plan = STRUCT_READ(fdm_tile_plan, mask_plan, &room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    if (p->has_cache)
        return error_set(FDM_ERROR_UNSUPPORTED, "mask_plan is given beside a cache, for which none is made");
    if (p->has_tree)
        return error_set(FDM_ERROR_UNSUPPORTED, "mask_plan is given beside a tree, for which none is made");
    if (!mask_plan->seen || !mask_plan->memory)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "mask_plan is empty; fdm_mask_plan() fills it");
    if (mask_plan->device.type != t->q->device.type || mask_plan->device.index != t->q->device.index)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "mask_plan is on DLPack device %d:%d, but q is on %d:%d",
                         mask_plan->device.type, mask_plan->device.index, t->q->device.type, t->q->device.index);
    a->mask_plan = mask_plan->memory;
    return check_facts(&mask_plan->problem, p);
}

/* ---- bits on the CPU ---- */

/* The place of a tile: of batch b and query head h, its first row and key. */
struct tile_place {
    const struct attention *attention;
    struct sequence sequence;
    int64_t b, h, row, key;
};

static int key_interval_holds(const struct attention *a, const struct tile_place *at, int64_t i, int64_t j) {
    const struct interval_view *v = &a->intervals;
    if (!v->start)
        return 1;
    const int64_t key = at->sequence.k_begin + j, head = at->h / v->group;
    return v->start[at->b * v->start_batch + head * v->start_head + key * v->start_item] <= i &&
           i < v->end[at->b * v->end_batch + head * v->end_head + key * v->end_item];
}

static int hides_pairs(const fdm_problem *p) {
    return p->has_intervals || p->has_mask || p->has_row_intervals || p->block_mask_size;
}

/* Bit 0: some row sees some key; bit 1: every row sees every key. */
static uint32_t look_at_tile(const struct tile_place *at) {
    const struct attention *a = at->attention;
    const struct score_view *m = &a->mask;
    const int64_t rows = at->row + MASK_PLAN_TILE, keys = at->key + MASK_PLAN_TILE;
    const int64_t last_row = rows < at->sequence.seqlen_q ? rows : at->sequence.seqlen_q;
    const int64_t last_key = keys < at->sequence.seqlen_k ? keys : at->sequence.seqlen_k;
    int seen = 0, full = 1;
    if (at->row >= last_row || at->key >= last_key)
        return 0;
    /* Both ends of what rows see by causal and window rise with the row. */
    const struct key_range low = problem_key_range(a->problem, &at->sequence, at->row),
                           high = problem_key_range(a->problem, &at->sequence, last_row - 1);
    if (high.last <= at->key || low.first >= last_key)
        return 0;
    if (!hides_pairs(a->problem) && high.first <= at->key && low.last >= last_key)
        return 3;
    for (int64_t i = at->row; i < last_row && !(seen && !full); i++) {
        const struct key_range range = problem_key_range(a->problem, &at->sequence, i);
        const struct row_ranges ranges = row_ranges_of(a, &at->sequence, at->b, at->h, i);
        const char *mask = m->data ? m->data + at->b * m->batch + at->h / m->group * m->head + i * m->row : NULL;
        for (int64_t j = at->key; j < last_key; j++) {
            const int sees = j >= range.first && j < range.last && (!ranges.start || row_ranges_hold(&ranges, j)) &&
                             block_mask_holds(a, at->b, at->h, i, j) && key_interval_holds(a, at, i, j) &&
                             (!mask || mask[j * m->key]);
            seen |= sees;
            full &= sees;
        }
    }
    return (uint32_t)(seen | full << 1);
}

void mask_plan_fill(const struct attention *a, uint32_t *seen, uint32_t *full) {
    const struct mask_plan_extents e = mask_plan_extents_of(a->problem);
    for (int64_t n = 0; n < e.batches * e.heads * e.row_tiles; n++) {
        struct tile_place at = {.attention = a,
                                .b = n / e.row_tiles / e.heads,
                                .h = n / e.row_tiles % e.heads * (a->problem->heads / e.heads),
                                .row = n % e.row_tiles * MASK_PLAN_TILE};
        at.sequence = attention_sequence(a, at.b);
        for (int64_t word = 0; word < e.key_words; word++) {
            seen[n * e.key_words + word] = full[n * e.key_words + word] = 0;
            for (int bit = 0; bit < 32; bit++) {
                at.key = (word * 32 + bit) * MASK_PLAN_TILE;
                const uint32_t tile = look_at_tile(&at);
                seen[n * e.key_words + word] |= (tile & 1) << bit;
                full[n * e.key_words + word] |= (tile >> 1) << bit;
            }
        }
    }
}
