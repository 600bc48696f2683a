/* hopper_forward.c: the wgmma forward on the host: which tile and scheduler for which problem, tensor maps, launch. */
#include "families/hopper/forward/hopper_forward.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "families/hopper/forward/hopper_gather_launch.h"
#include "families/hopper/forward/hopper_maps.h"
#include "families/hopper/forward/hopper_packing.h"
#include "families/hopper/hopper_family.h"
#include "families/hopper/pipeline/hopper_copies.h"
#include "families/hopper/pipeline/hopper_items.h"
#include "gpu/splits.h"
#include "gpu/tile_plan_launch.h"

/* ---- tiles ---- */

/* A row suits when head dims, scores, window and length fit it; of those the one whose items take the least time in all
 * is chosen, the first of equals. Registers of S, P and O are block_n / 2 + block_n / 4 + head_dim_v / 2 of 240 (two
 * warpgroups) or 160 (three). Times are of one H200, bfloat16, 16384 tokens (bench/results/nvidia-h200). */
struct tile {
    struct {
        int32_t head_dim_max;
        int32_t scored; /* 1: with a mask or bias; those tiles take problems without, too; 2: chosen for a mask alone */
        int32_t bounded; /* 1: chosen under causal or window alone; 0: without; -1: both */
        int32_t seqlen_k_min;
    } takes;
    struct shape {
        int32_t warpgroups, block_n;
        int32_t stages, q_stages; /* of K, and of V; of Q */
        int32_t score_stages, ping_pong;
    } shape;
    int32_t scheduler;
    double item; /* time of an item, of one with 128 rows 1 */
    const char *reason;
};
static const struct tile tiles[] = {
    {.takes = {.head_dim_max = 64, .bounded = 0},
     .shape = {.warpgroups = 3, .block_n = 128, .stages = 2, .q_stages = 2, .ping_pong = 1},
     .scheduler = ITEMS_STATIC,
     .item = 1.25,
     .reason = "192 rows a load; 20 % faster than 128 where they are full"},
    {.takes = {.head_dim_max = 64, .bounded = 1},
     .shape = {.warpgroups = 3, .block_n = 128, .stages = 4, .q_stages = 2, .ping_pong = 1},
     .scheduler = ITEMS_DYNAMIC,
     .item = 1.25,
     .reason =
         "192 rows a load; 14 to 22 % faster than 128. Four stages: up to 9 % faster than two where the last item has "
         "fewer rows"},
    {.takes = {.head_dim_max = 96, .bounded = 1, .seqlen_k_min = 1536},
     .shape = {.warpgroups = 3, .block_n = 96, .stages = 2, .q_stages = 1, .ping_pong = 1},
     .scheduler = ITEMS_STATIC,
     .item = 1.33,
     .reason = "192 rows a load; 8 to 15 % faster than 128x128"},
    {.takes = {.head_dim_max = 96, .bounded = -1, .seqlen_k_min = 1536},
     .shape = {.warpgroups = 3, .block_n = 96, .stages = 2, .q_stages = 1, .ping_pong = 1},
     .scheduler = ITEMS_STATIC,
     .item = 1.44,
     .reason = "192 rows a load; 2 to 5 % faster than 128x128"},
    {.takes = {.head_dim_max = 96, .bounded = -1},
     .shape = {.warpgroups = 3, .block_n = 96, .stages = 2, .q_stages = 1, .ping_pong = 1},
     .scheduler = ITEMS_STATIC,
     .item = 1.6,
     .reason = "192 rows save a wave; each waits for its Q"},
    {.takes = {.head_dim_max = 128, .bounded = 0},
     .shape = {.warpgroups = 2, .block_n = 128, .stages = 2, .q_stages = 2, .ping_pong = 1},
     .scheduler = ITEMS_STATIC,
     .item = 1,
     .reason = "the next item's Q is there; 176 keys with one Q are slower at every length"},
    {.takes = {.head_dim_max = 128, .bounded = 1, .seqlen_k_min = 513},
     .shape = {.warpgroups = 2, .block_n = 128, .stages = 2, .q_stages = 2, .ping_pong = 1},
     .scheduler = ITEMS_DYNAMIC,
     .item = 1,
     .reason = "1 to 4 % faster than in a static order"},
    {.takes = {.head_dim_max = 128, .bounded = 1},
     .shape = {.warpgroups = 2, .block_n = 128, .stages = 2, .q_stages = 2, .ping_pong = 1},
     .scheduler = ITEMS_STATIC,
     .item = 1,
     .reason = "short items: pairs of equal work need no count"},
    {.takes = {.head_dim_max = 192, .bounded = -1},
     .shape = {.warpgroups = 2, .block_n = 96, .stages = 2, .q_stages = 1, .ping_pong = 1},
     .scheduler = ITEMS_STATIC,
     .item = 1,
     .reason = "two stages of K and V fit; 4 % faster than 112 keys"},
    {.takes = {.head_dim_max = 256, .bounded = 0, .seqlen_k_min = 4096},
     .shape = {.warpgroups = 2, .block_n = 80, .stages = 2, .q_stages = 1},
     .scheduler = ITEMS_STATIC,
     .item = 1,
     .reason = "the widest step whose shared memory fits; level with 64 keys"},
    {.takes = {.head_dim_max = 256, .bounded = 1, .seqlen_k_min = 4096},
     .shape = {.warpgroups = 2, .block_n = 64, .stages = 2, .q_stages = 1},
     .scheduler = ITEMS_LONGEST,
     .item = 1,
     .reason = "1 to 5 % faster than any other order and step"},
    {.takes = {.head_dim_max = 256, .bounded = -1},
     .shape = {.warpgroups = 2, .block_n = 64, .stages = 2, .q_stages = 1},
     .scheduler = ITEMS_STATIC,
     .item = 1,
     .reason = "short rows waste less of the last step; 2 to 6 % faster than 80 keys"},
    {.takes = {.head_dim_max = 64, .scored = 1, .bounded = -1},
     .shape = {.warpgroups = 2, .block_n = 128, .stages = 2, .q_stages = 2, .score_stages = 2, .ping_pong = 1},
     .scheduler = ITEMS_DYNAMIC,
     .item = 1,
     .reason = "two stages of scores fit"},
    {.takes = {.head_dim_max = 128, .scored = 2, .bounded = -1},
     .shape = {.warpgroups = 2, .block_n = 64, .stages = 2, .q_stages = 2, .score_stages = 2, .ping_pong = 1},
     .scheduler = ITEMS_DYNAMIC,
     .item = 1,
     .reason = "two stages of the mask hide its loads; up to 30 % faster than one beside 128 keys"},
    {.takes = {.head_dim_max = 128, .scored = 1, .bounded = -1},
     .shape = {.warpgroups = 2, .block_n = 128, .stages = 2, .q_stages = 1, .score_stages = 1, .ping_pong = 1},
     .scheduler = ITEMS_DYNAMIC,
     .item = 1,
     .reason = "one stage of scores fits"},
    {.takes = {.head_dim_max = 128, .scored = 1, .bounded = -1},
     .shape = {.warpgroups = 2, .block_n = 64, .stages = 2, .q_stages = 2, .score_stages = 2, .ping_pong = 1},
     .scheduler = ITEMS_DYNAMIC,
     .item = 1,
     .reason = "two stages of scores fit"},
    {.takes = {.head_dim_max = 256, .scored = 1, .bounded = -1},
     .shape = {.warpgroups = 2, .block_n = 64, .stages = 2, .q_stages = 1, .score_stages = 1},
     .scheduler = ITEMS_DYNAMIC,
     .item = 1,
     .reason = "one stage of scores fits"},
};
enum {
    NUM_TILES = sizeof tiles / sizeof tiles[0],
    NUM_SCHEDULERS = 3,
    FEW_WAVES = 4,
    FEW_ROWS = 16,
    FEW_RANGED_ROWS = 64, /* the plan and another kernel cost more than empty rows */
    FEW_PACKED_ROWS = 32,
    FEW_CACHED_ROWS = 8
};

/* A way to run a problem: a tile, a scheduler, and how many of exp2's results are made on the FMA pipe. */
struct variant {
    const struct tile *tile;
    int32_t scheduler, exp2_frequency, exp2_residue, copies;
    struct hopper_packing packing;
};
/* What variants of the first tile emulate: 1 of 8, 1 of 4, 1 of 2. */
static const int32_t exp2_frequencies[] = {8, 4, 2};
enum { NUM_EXP2 = 3 };

PLAN_PARAMETER_STRUCT(HOPPER_FORWARD_PARAMETERS);

static int32_t padded(int64_t head_dim) { return (int32_t)gpu_round_up(head_dim, 16); }
static int32_t bias_bytes(const fdm_problem *p) { return p->has_bias ? (int32_t)fdm_dtype_bytes(p->bias_dtype) : 0; }
/* A mask or bias with rows, of which tiles are loaded; ranges of rows that see a key, by which tiles are walked; these
 * or ranges of keys that a row sees. */
static int scored(const fdm_problem *p) { return gpu_mask_rows(p) || p->has_bias; }
static int ranges_of_keys(const fdm_problem *p) { return p->has_intervals || (p->has_mask && !gpu_mask_rows(p)); }
static int ranged(const fdm_problem *p) { return ranges_of_keys(p) || (gpu_row_runs(p) && !scored(p)); }

/* Keys may lie scattered, and heads be left to hopper_gather.cu, which reads no row intervals and blocks. */
static int gathers(const fdm_problem *p) { return ranges_of_keys(p) && !gpu_row_runs(p); }

static int32_t shared_bytes(const struct tile *t, const fdm_problem *p) {
    return hopper_forward_shared_bytes(t->shape.warpgroups, t->shape.block_n, t->shape.stages, t->shape.q_stages,
                                       scored(p) ? t->shape.score_stages : 0, padded(p->head_dim),
                                       padded(p->head_dim_v), gpu_mask_rows(p), bias_bytes(p), ranged(p));
}

/* Whether the kernel can run the problem by this tile, shared memory aside. */
static int takes(const struct tile *t, const fdm_problem *p) {
    return padded(p->head_dim) <= t->takes.head_dim_max && padded(p->head_dim_v) <= t->takes.head_dim_max &&
           (t->takes.scored || !scored(p)) && (t->shape.block_n % TILE_PLAN_TILE == 0 || !ranged(p));
}
static int fits(const struct tile *t, const fdm_device *device, const fdm_problem *p) {
    return takes(t, p) && shared_bytes(t, p) <= device->shared_bytes;
}

/* Workspace: the count of items that were begun and the block mask, or the tile plan, which has the counts; copies,
 * parts of splits. */
static int64_t copies_offset(const struct tile *t, int32_t scheduler, const fdm_problem *p) {
    if (ranged(p))
        return tile_plan_bytes(p);
    if (gpu_masks_blocks(p))
        return HOPPER_COUNT_BYTES + gpu_block_mask_bytes(p, 64 * t->shape.warpgroups, t->shape.block_n);
    return hopper_count_bytes(scheduler);
}
static int64_t parts_offset(const struct tile *t, int32_t scheduler, int32_t copies, const fdm_problem *p) {
    return copies_offset(t, scheduler, p) + hopper_copies_bytes(p, copies);
}
static int64_t workspace_bytes(const struct tile *t, int32_t scheduler, int32_t copies, int32_t splits,
                               const fdm_problem *p) {
    return parts_offset(t, scheduler, copies, p) + (splits > 1 ? splits_workspace_bytes(p, splits) : 0);
}

/* Items may differ in what they see. */
static int bounded(const fdm_problem *p) { return gpu_bounded(p) || ranged(p) || gpu_row_runs(p); }

/* Whether the rules prefer a tile that fits. */
static int suits(const struct tile *t, const fdm_problem *p) {
    return !t->takes.scored == !scored(p) && (t->takes.scored < 2 || !p->has_bias) &&
           (t->takes.bounded < 0 || t->takes.bounded == bounded(p)) && p->seqlen_k >= t->takes.seqlen_k_min;
}

/* Items over multiprocessors. */
static double waves_of(const struct tile *t, const fdm_device *device, const fdm_problem *p) {
    return (double)hopper_all_blocks(p, 1, 64 * t->shape.warpgroups) / (device->num_sms > 0 ? device->num_sms : 1);
}

/* Steps of the longest item over four: what a dynamic order of packed sequences loses at its end, since a block that
 * begins that item has asked for another. An item of its own block has no next one, whose loads it would hide: about a
 * step each. */
static int longest_pays(const struct tile *t, const fdm_device *device, const fdm_problem *p) {
    const double items = ceil((double)p->total_q / (64 * t->shape.warpgroups)) * (double)p->heads;
    const double steps = (double)hopper_visible_keys(p) / t->shape.block_n;
    return items / device->num_sms < steps / 4;
}

/* Under a causal mask or window a static order pairs a head's first block of rows with its last, so that pairs see as
 * many keys. One pair of each multiprocessor is 2 to 10 % faster than any other order. Of an odd number of blocks one
 * is left over, and a last wave of few pairs leaves multiprocessors idle: 13 to 29 % slower than a dynamic order. */
static int32_t order_of_pairs(const struct tile *t, const fdm_device *device, const fdm_problem *p) {
    enum { FULL_PERCENT = 90 };
    const int64_t blocks = hopper_row_blocks(p, 1, 64 * t->shape.warpgroups), num_sms = device->num_sms;
    const int64_t pairs = blocks / 2 * p->heads * p->batch, room = (pairs + num_sms - 1) / num_sms * num_sms;
    if (blocks > 1 && (blocks % 2 || 100 * pairs < FULL_PERCENT * room))
        return t->scheduler == ITEMS_STATIC ? ITEMS_DYNAMIC : t->scheduler;
    return blocks > 1 && pairs <= num_sms && !scored(p) ? ITEMS_STATIC : t->scheduler;
}

/* Where each item has a multiprocessor, none needs an order. Pairs by ranges are not equal, and blocks that leave all
 * items to another kernel are few in a dynamic order. */
static int32_t scheduler_of(const struct tile *t, const fdm_device *device, const fdm_problem *p, int32_t splits) {
    if (ranged(p) || gpu_row_runs(p))
        return ITEMS_DYNAMIC;
    if (splits == 1 && waves_of(t, device, p) <= 1)
        return ITEMS_LONGEST;
    if (gpu_has_lengths(p)) /* no two sequences need be alike */
        return ITEMS_DYNAMIC;
    if (!gpu_bounded(p))
        return t->scheduler;
    return splits > 1  ? ITEMS_DYNAMIC
           : p->varlen ? longest_pays(t, device, p) ? ITEMS_LONGEST : ITEMS_DYNAMIC
                       : order_of_pairs(t, device, p);
}

/* Time of all items on the device. Few waves are counted whole; a last item of at most 128 rows has warpgroups without
 * any, and takes hardly longer than a tile of 128 rows would. */
static double time_of_items(const struct tile *t, const fdm_device *device, const fdm_problem *p) {
    const int64_t block_m = 64 * t->shape.warpgroups, whole = p->seqlen_q / block_m, rest = p->seqlen_q % block_m;
    const double waves = waves_of(t, device, p);
    const double last = rest == 0 ? 0 : rest <= 128 ? fmin(t->item, 1.05) : t->item;
    if (waves <= FEW_WAVES)
        return ceil(waves) * t->item;
    return waves * ((double)whole * t->item + last) / (double)(whole + (rest > 0));
}

static const struct tile *preferred(const fdm_device *device, const fdm_problem *p) {
    const struct tile *best = NULL;
    double least = INFINITY;
    for (int32_t i = 0; i < NUM_TILES; i++) {
        const double time = time_of_items(&tiles[i], device, p);
        if (suits(&tiles[i], p) && fits(&tiles[i], device, p) && time < least) {
            best = &tiles[i];
            least = time;
        }
    }
    return best;
}

/* ---- choice ---- */

static const char *refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    const char *clause = gpu_shape_refusal(p, 0, 256, text, size);
    if (clause)
        return clause;
    if ((ranges_of_keys(p) && (scored(p) || (p->has_intervals && p->has_mask))) ||
        (ranged(p) && !tile_plan_possible(p)))
        return "it takes key intervals, or masks that query rows share, without other masks or biases";
    if (scored(p) && (!p->scores_mappable || p->varlen || (p->has_mask && p->mask_shape[3] != p->seqlen_k) ||
                      (p->has_bias && p->bias_shape[3] != p->seqlen_k)))
        return "rows of mask and bias must be contiguous and begin at multiples of 16 bytes, for TMA";
    if (gpu_has_lengths(p) && (scored(p) || ranged(p) || gpu_row_runs(p)))
        return "it takes lengths on the device and caches without masks, biases and intervals";
    if (p->has_cache && (p->has_first_key || (p->has_cache_row && p->new_rows && !p->page_size)))
        return "it takes caches without first_key, and appends to the sequence's own row alone";
    if (p->page_size % HOPPER_PART_ROWS)
        return "TMA reads pages of a multiple of 16 rows";
    if (p->has_cache && hopper_copies_needed(p))
        return "TMA reads caches whose strides are multiples of 16 bytes";
    if (p->has_cache && p->varlen && (double)(p->total_q / 64 + p->batch) * (double)p->heads >= INT32_MAX)
        return "packed rows of all heads are fewer than 2^37";
    if (gpu_loads_nothing(p) || (p->has_cache && p->num_pages < 1))
        return "there is nothing to load";
    if (hopper_copies_needed(p) && p->varlen)
        return "TMA reads packed sequences whose strides are multiples of 16 bytes";
    return preferred(device, p) ? NULL : gpu_no_tile_fits(device, text, size);
}

/* At 600 TFLOPS. */
static double seconds_of(const fdm_problem *p) {
    return 2 * hopper_pairs(p) * (double)(p->head_dim + p->head_dim_v) / 600e12;
}

/* Copies of all matrices take longer than they gain: 4 us and 3.5 TB/s for what is done at 300 TFLOPS more. */
static int copies_cost_more(const fdm_problem *p) {
    return hopper_copies_needed(p) &&
           seconds_of(p) < 4e-6 + 2 * (double)hopper_copies_bytes(p, HOPPER_COPY_ALL) / 3.5e12;
}

/* The tile plan and a kernel without work take 7 to 9 us. Tiles that lie whole save a sixth of the gather's time, or
 * more. Padding hides little, intervals most of the pairs (docs/lab/hopper_tile_plan.md). */
static int plan_costs_more(const fdm_problem *p) {
    return ranges_of_keys(p) && (p->seqlen_q <= FEW_RANGED_ROWS || seconds_of(p) < (p->has_intervals ? 200e-6 : 20e-6));
}

/* Rows of a tile at most, where heads are packed as the rules do it. */
static int64_t rows_of_a_tile(const fdm_device *device, const fdm_problem *p) {
    const struct tile *t = preferred(device, p);
    struct hopper_packing packings[HOPPER_PACKINGS];
    hopper_packings(device, p, 64 * t->shape.warpgroups, t->shape.block_n, packings);
    return p->seqlen_q * packings[0].packed;
}

static const char *passed_over(const fdm_device *device, const fdm_problem *p) {
    return p->seqlen_q <= FEW_ROWS && rows_of_a_tile(device, p) <= FEW_PACKED_ROWS
               ? "few query rows leave most of a block tile of 128 rows empty"
           : gpu_has_lengths(p) && p->seqlen_q <= FEW_CACHED_ROWS
               ? "few query rows ask for splits of the keys, which it has not beside lengths on the device"
           : copies_cost_more(p) ? "copies that TMA can read take longer than they gain"
           : plan_costs_more(p)  ? "the plan of tiles takes longer than it gains"
                                 : NULL;
}

static int32_t copies_of(const struct tile *t, const fdm_problem *p) {
    const int32_t needed = hopper_copies_needed(p);
    return needed ? needed : hopper_copies_that_pay(p, 64 * t->shape.warpgroups);
}

/* Rows that differ in what they are preferred for alone give the same kernel. */
static int same_kernel(const struct tile *a, const struct tile *b, const fdm_problem *p) {
    struct shape own = a->shape, other = b->shape;
    if (!scored(p))
        own.score_stages = other.score_stages = 0;
    return memcmp(&own, &other, sizeof own) == 0;
}
static int is_repeated(const fdm_device *device, const fdm_problem *p, int32_t i) {
    for (int32_t j = 0; j < i; j++)
        if (fits(&tiles[j], device, p) && same_kernel(&tiles[j], &tiles[i], p))
            return 1;
    return 0;
}

/* Variant 0 is the rules'; then the same with other packings and splits; then with or without copies, where both can
 * be; then every tile that fits with every scheduler, each kernel once; then the first with exp2 on the FMA pipe. */
static int find_variant(const fdm_device *device, const fdm_problem *p, int32_t number, struct variant *v) {
    const struct tile *first = preferred(device, p);
    struct hopper_packing packings[HOPPER_PACKINGS];
    if (!first)
        return 0;
    const int32_t num_packings =
        hopper_packings(device, p, 64 * first->shape.warpgroups, first->shape.block_n, packings);
    const int32_t whole = scheduler_of(first, device, p, 1); /* of the packing without splits, which is among them */
    *v = (struct variant){first,      scheduler_of(first, device, p, packings[0].splits), 1, 0, copies_of(first, p),
                          packings[0]};
    if (number < num_packings) {
        v->packing = packings[number];
        v->scheduler = scheduler_of(first, device, p, v->packing.splits);
        return 1;
    }
    number -= num_packings - 1;
    if (!hopper_copies_needed(p) && hopper_copies_possible(p) && --number == 0) {
        v->copies ^= hopper_copies_possible(p);
        return 1;
    }
    for (int32_t i = 0; i < NUM_TILES; i++) {
        const int other = fits(&tiles[i], device, p) && !is_repeated(device, p, i);
        for (int32_t scheduler = 0; other && scheduler < NUM_SCHEDULERS; scheduler++)
            if ((!same_kernel(&tiles[i], first, p) || scheduler != whole) && --number == 0) {
                *v = (struct variant){&tiles[i], scheduler, 1, 0, copies_of(&tiles[i], p), {1, 1}};
                return 1;
            }
    }
    /* a cubic beside masks or biases leaves the widest heads short of registers */
    if (number > NUM_EXP2 || (scored(p) && padded(p->head_dim_v) > 192))
        return 0;
    v->exp2_frequency = exp2_frequencies[number - 1];
    v->exp2_residue = 1;
    return 1;
}

static void name_choice(const struct variant *v, const fdm_problem *p, char *code, size_t size) {
    char stages[8] = "", scores[8] = "", emulated[24] = "", packed[24] = "";
    const char *split = v->packing.splits > 1 ? "_Split" : "";
    const char *copies = v->copies == HOPPER_COPY_ALL ? "_Copied" : v->copies ? "_CopiedKV" : "";
    if (v->tile->shape.stages != 2)
        snprintf(stages, sizeof stages, "_K%d", v->tile->shape.stages);
    if (scored(p))
        snprintf(scores, sizeof scores, "_S%d", v->tile->shape.score_stages);
    if (v->exp2_residue)
        snprintf(emulated, sizeof emulated, "_Exp%dof%d", v->exp2_residue, v->exp2_frequency);
    if (v->packing.packed > 1)
        snprintf(packed, sizeof packed, "_Packed%d", v->packing.packed);
    snprintf(code, size, "SM90_Wgmma_%dx%d%s_Q%d%s%s%s%s%s%s_%s", 64 * v->tile->shape.warpgroups,
             v->tile->shape.block_n, stages, v->tile->shape.q_stages, scores, v->tile->shape.ping_pong ? "_Turns" : "",
             emulated, packed, split, copies, items_order_names[v->scheduler]);
}

static int fill(const fdm_device *device, const fdm_problem *p, int32_t number, fdm_plan *plan) {
    struct variant v;
    if (!find_variant(device, p, number, &v))
        return 0;
    const int32_t gather = gathers(p) ? hopper_gather_tile(device, p) : 0;
    PLAN_SET_PARAMETERS(plan, .TILE = (int32_t)(v.tile - tiles), .SCHEDULER = v.scheduler,
                        .EXP2_FREQUENCY = v.exp2_frequency, .EXP2_RESIDUE = v.exp2_residue, .NUM_SMS = device->num_sms,
                        .PACKED_HEADS = v.packing.packed, .NUM_SPLITS = v.packing.splits, .COPIES = v.copies,
                        .GATHER = gather);
    plan->block_m = 64 * v.tile->shape.warpgroups;
    plan->block_n = v.tile->shape.block_n;
    plan->stages = v.tile->shape.stages;
    plan->shared_bytes = shared_bytes(v.tile, p);
    plan->workspace_bytes = workspace_bytes(v.tile, v.scheduler, v.copies, v.packing.splits, p);
    name_choice(&v, p, plan->choice, sizeof plan->choice);
    char packed[64] = "", split[64] = "", pages[64] = "";
    if (p->page_size)
        snprintf(pages, sizeof pages, "; TMA reads %d rows of a page at a time",
                 1 << hopper_part_shift(p, plan->block_n));
    const char *const walk = !ranged(p) ? ""
                             : gather   ? "; tiles that no row sees are left out, and heads whose "
                                          "keys lie scattered are left to hopper.gather"
                                        : "; tiles that no row sees are left out";
    if (v.packing.packed > 1)
        snprintf(packed, sizeof packed, "; rows of %d query heads in a tile", v.packing.packed);
    if (v.packing.splits > 1)
        snprintf(split, sizeof split, "; %d splits of the keys", v.packing.splits);
    snprintf(
        plan->reason, sizeof plan->reason,
        "head dim %lld on compute capability 9.0: a producer and %d warpgroups of 64 query rows (%d and %d registers "
        "a thread), %d keys a step, %d stages of K and V, %d of Q (%lld KB): %s; %s order%s%s%s%s%s",
        (long long)(p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v), v.tile->shape.warpgroups,
        HOPPER_PRODUCER_REGISTERS(v.tile->shape.warpgroups, scored(p) || gpu_has_lengths(p), ranged(p)),
        HOPPER_CONSUMER_REGISTERS(v.tile->shape.warpgroups, scored(p) || gpu_has_lengths(p), ranged(p)), plan->block_n,
        v.tile->shape.stages, v.tile->shape.q_stages, (long long)(plan->shared_bytes + 1023) >> 10, v.tile->reason,
        scheduler_names[v.scheduler],
        v.copies == HOPPER_COPY_ALL ? "; TMA reads copies of q, k and v"
        : v.copies                  ? "; TMA reads copies whose rows begin at memory sectors"
                                    : "",
        packed, split, pages, walk);
    return 1;
}

/* ---- launch ---- */

static void make_request(const fdm_plan *plan, const fdm_problem *p, struct cuda_kernel_request *request) {
    const struct parameters x = parameters_of(plan);
    const struct tile *t = &tiles[x.TILE];
    const uint32_t addresses = GPU_ALIKE_SCORES_ALIGNED | (p->varlen ? 0 : GPU_ALIKE_ALIGNED); /* TMA, or copies */
    gpu_set_problem_constants(request, p, GPU_ALIKE_BIAS_ROWS | (p->has_mask ? 0 : GPU_ALIKE_MASK_ROWS) | addresses);
    GPU_ADD_CONSTANTS(request, HOPPER_FORWARD_CONSTANTS, .HEAD_DIM = padded(p->head_dim),
                      .HEAD_DIM_V = padded(p->head_dim_v), .WARPGROUPS = t->shape.warpgroups,
                      .BLOCK_N = t->shape.block_n, .STAGES = t->shape.stages, .Q_STAGES = t->shape.q_stages,
                      .SCORE_STAGES = scored(p) ? t->shape.score_stages : 0, .PING_PONG = t->shape.ping_pong,
                      .SCHEDULER = x.SCHEDULER, .EXP2_FREQUENCY = x.EXP2_FREQUENCY, .EXP2_RESIDUE = x.EXP2_RESIDUE,
                      .PACKED_HEADS = x.PACKED_HEADS, .SPLITS = x.NUM_SPLITS > 1, .REDO = gpu_hides_keys(p));
    request->file = "families/hopper/forward/hopper_forward.cu";
    request->entry = "hopper_forward";
    request->shared_bytes = shared_bytes(t, p);
    request->threads = 128 * (t->shape.warpgroups + 1);
    /* Warps beside the producer's clear rows of no sequence with its few registers, once a block. */
    if (p->varlen && !scored(p))
        request->spill_bytes_max = 96;
    /* So does the one that names steps: a few numbers of its item. */
    if (ranged(p) && t->shape.warpgroups == 3)
        request->spill_bytes_max += 48;
    /* So do splits with exponentials on the FMA pipe, which no rule makes there. */
    if (x.EXP2_RESIDUE && x.NUM_SPLITS > 1)
        request->spill_bytes_max += 64;
    /* Compiled for head dim 256, a bias with softcap spills 48 bytes. */
    if (p->has_bias && p->softcap > 0 && padded(p->head_dim_v) > 192)
        request->spill_bytes_max += 48;
}

static int valid(const fdm_plan *plan, const fdm_problem *p) {
    const struct parameters x = parameters_of(plan);
    if (x.TILE < 0 || x.TILE >= NUM_TILES || x.SCHEDULER < 0 || x.SCHEDULER >= NUM_SCHEDULERS || x.NUM_SMS < 1 ||
        x.EXP2_FREQUENCY < 1 || x.EXP2_FREQUENCY > 8 || x.EXP2_RESIDUE < 0 || x.EXP2_RESIDUE > x.EXP2_FREQUENCY ||
        !hopper_packing_possible(p, (struct hopper_packing){x.PACKED_HEADS, x.NUM_SPLITS}) || x.COPIES < 0 ||
        x.COPIES > HOPPER_COPY_ALL || (hopper_copies_needed(p) && x.COPIES != HOPPER_COPY_ALL) ||
        (p->has_cache && x.COPIES) || (x.GATHER && (!gathers(p) || !hopper_gather_takes(p, x.GATHER))))
        return 0;
    const struct tile *t = &tiles[x.TILE];
    return takes(t, p) && plan->block_m == 64 * t->shape.warpgroups && plan->block_n == t->shape.block_n &&
           plan->shared_bytes == shared_bytes(t, p) &&
           plan->workspace_bytes >= workspace_bytes(t, x.SCHEDULER, x.COPIES, x.NUM_SPLITS, p);
}

/* The parameters on these tensors; `whole`: the same of heads that are not packed, for what combines splits. */
static fdm_status fill_params(const fdm_plan *plan, const struct attention *attention, char *workspace,
                              struct hopper_forward_params *params, struct gpu_forward_params *whole) {
    const fdm_problem *p = attention->problem;
    const struct parameters x = parameters_of(plan);
    params->mask_group = (int32_t)attention->mask.group;
    params->bias_group = (int32_t)attention->bias.group;
    gpu_fill_forward(attention, &params->in);
    if (x.NUM_SPLITS > 1)
        splits_fill(p, x.NUM_SPLITS, workspace + parts_offset(&tiles[x.TILE], x.SCHEDULER, x.COPIES, p), &params->in);
    *whole = params->in;
    params->in.heads /= x.PACKED_HEADS;
    params->in.group /= x.PACKED_HEADS;
    return hopper_maps_make(plan, attention, x.PACKED_HEADS, params);
}

/* Of packed sequences on a cache, whose blocks are numbered through (hopper_pages.cuh), there is at most one block more
 * for each. */
static int64_t items_of(const fdm_problem *p, int32_t packed, int32_t splits, int32_t block_m) {
    if (p->has_cache && p->varlen)
        return (p->total_q * packed / block_m + p->batch) * (p->heads / packed);
    return hopper_all_blocks(p, packed, block_m) * splits;
}

static fdm_status launch(const fdm_plan *plan, struct gpu_launches *l) {
    const fdm_problem *p = l->problem;
    const struct parameters x = parameters_of(plan);
    const int32_t copies = x.COPIES;
    struct attention own;
    struct gpu_forward_params whole = {0};
    struct hopper_forward_params params = {.items_begun = (int32_t *)(void *)l->workspace,
                                           .row_blocks = (int32_t)hopper_row_blocks(p, x.PACKED_HEADS, plan->block_m),
                                           .items = (int32_t)items_of(p, x.PACKED_HEADS, x.NUM_SPLITS, plan->block_m),
                                           .gathers = x.GATHER != 0,
                                           .part_shift = hopper_part_shift(p, plan->block_n),
                                           .mask_batches = (int32_t)p->mask_shape[0],
                                           .bias_batches = (int32_t)p->bias_shape[0]};
    const int32_t copy_kernel =
        hopper_copies_before(l, copies, l->workspace + copies_offset(&tiles[x.TILE], x.SCHEDULER, p), &own);
    fdm_status status = l->attention ? fill_params(plan, &own, l->workspace, &params, &whole) : FDM_OK;
    if (ranged(p))
        tile_plan_add(l, &params.in, (struct tile_plan_order){.counts = x.GATHER != 0}, l->workspace, &params.plan);
    else if (gpu_masks_blocks(p))
        gpu_block_mask_add(l, plan->block_m, plan->block_n, l->workspace + HOPPER_COUNT_BYTES, &params.in);
    make_request(plan, p, gpu_add_kernel(l));
    hopper_add_items(l, x.SCHEDULER, x.NUM_SMS, params.items, ranged(p) ? NULL : l->workspace, &params, sizeof params);
    if (!status && x.GATHER)
        status =
            hopper_gather_add(l, l->attention ? &own : NULL, x.GATHER, x.NUM_SMS, &params.plan, params.items_begun + 1);
    if (x.NUM_SPLITS > 1)
        combine_splits_add(l, 0, &whole);
    hopper_copies_after(l, copy_kernel, copies, &own);
    return status;
}

static int32_t scheduler(const fdm_plan *plan) { return parameters_of(plan).SCHEDULER; }

const struct gpu_algorithm hopper_forward_algorithm = {
    .info = {"hopper.forward", "FlashAttention-3's plan on wgmma and TMA, with stale maxima", FDM_FORWARD},
    .parameters = PLAN_PARAMETERS(HOPPER_FORWARD_PARAMETERS),
    .features = GPU_FEATURE_CAUSAL | GPU_FEATURE_WINDOW | GPU_FEATURE_MASK_ROWS | GPU_FEATURE_MASK_KEYS |
                GPU_FEATURE_BIAS_ROWS | GPU_FEATURE_INTERVALS | GPU_FEATURE_VARLEN | GPU_SCORE_FEATURES |
                GPU_ROW_RUN_FEATURES | GPU_FEATURE_UNALIGNED | GPU_FEATURE_SEQUSED | GPU_FEATURE_CACHE,
    .chosen_freely = 1,
    .writes_lse_low = 1,
    .refusal = refusal,
    .passed_over = passed_over,
    .fill = fill,
    .scheduler = scheduler,
    .valid = valid,
    .launch = launch,
};
