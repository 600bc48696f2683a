/* mma_decode.c: the split-key forward on the host: how many splits, how they are merged, the workspace, the launches.
 */
#include "families/mma/decode/mma_decode.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "families/mma/mma_family.h"
#include "gpu/append_launch.h"
#include "gpu/splits.h"

enum { STAGES_MAX = 4, TILES_OF_A_SPLIT_MIN = 4, RESERVE = 1 << 10 };
/* One tile; and where keys are listed first, which takes as long as some tiles do. */
enum { KEYS_MIN = 64, LISTED_KEYS_MIN = 512 };
enum { ROWS_MAX = 256, SEQLEN_MAX = 8 }; /* packed rows at most; and of more rows than one tile of 16, query rows */
/* Of K and V that a multiprocessor waits for at a time: less leaves the memory idle, more is 2 % slower (H200) where
 * blocks come in waves, or of float32. In one wave nothing else begins while a block waits: up to 17 % faster with
 * more. */
enum { FLIGHT_BYTES = 64 << 10, ONE_WAVE_FLIGHT_BYTES = 96 << 10 };

/* ---- tiles ---- */

/* Rows of a KV head: query rows times the heads of a group. */
static int64_t packed_rows(const fdm_problem *p) { return p->seqlen_q * (p->heads / p->heads_kv); }

static int is_float32(const fdm_problem *p) { return p->dtype == FDM_FLOAT32; }
static int32_t element_bytes(const fdm_problem *p) { return is_float32(p) ? 4 : 2; }
static int32_t padded(const fdm_problem *p) { return (int32_t)gpu_round_up(p->head_dim, 16); }
static int32_t share_of(const fdm_problem *p) { return mma_decode_share(is_float32(p), (int32_t)p->head_dim_v); }
static int32_t padded_v(const fdm_problem *p) {
    return (int32_t)gpu_round_up(p->head_dim_v, share_of(p) > 1 ? 64 : 16);
}

/* Keys are listed before they are copied. */
static int lists_keys(const fdm_problem *p) {
    return p->has_mask || p->has_bias || p->has_intervals || gpu_row_runs(p);
}

/* Whether the query heads of a KV head share a tensor's heads. */
static int shared_heads(const fdm_problem *p, int64_t heads) { return heads == 1 || heads == p->heads_kv; }
/* A split of a single tile lists no keys: each row tests all. */
static int32_t mask_constant(const fdm_problem *p, int32_t stages) {
    if (!p->has_mask)
        return MMA_DECODE_NONE;
    return stages > 1 && !gpu_mask_rows(p) && shared_heads(p, p->mask_shape[1]) ? MMA_DECODE_ALIKE : MMA_DECODE_EACH;
}
static int32_t intervals_constant(const fdm_problem *p, int32_t stages) {
    if (!p->has_intervals)
        return MMA_DECODE_NONE;
    return stages > 1 && p->seqlen_q == 1 && shared_heads(p, p->interval_heads) ? MMA_DECODE_ALIKE : MMA_DECODE_EACH;
}

struct tile {
    int32_t block_n, warps, row_groups;
};

static int32_t shared_bytes(const fdm_problem *p, struct tile t, int32_t stages, int32_t merge) {
    return mma_decode_shared_bytes(element_bytes(p), padded(p), padded_v(p), t.block_n, t.row_groups, t.warps,
                                   t.warps / share_of(p), stages, merge, lists_keys(p) && stages > 1,
                                   gpu_cache_constant(p) == GPU_CACHE_PAGES);
}

/* Warps that work on the same keys leave at least 16 keys of a tile to each of the others. */
static int is_tile(const fdm_problem *p, struct tile t) {
    const int32_t mates = t.row_groups * share_of(p);
    const int is_power = t.row_groups > 0 && (t.row_groups & (t.row_groups - 1)) == 0;
    return (t.warps == 4 || t.warps == 8) && is_power && mates <= t.warps && (t.block_n == 64 || t.block_n == 32) &&
           t.block_n * mates >= 16 * t.warps;
}

/* Splits of a single tile: 16 keys a warp. */
static int is_single(const fdm_problem *p, struct tile t) {
    return !is_float32(p) && padded(p) <= 128 && padded_v(p) <= 128 && packed_rows(p) <= 16 && t.row_groups == 1 &&
           (t.warps == 4 || t.warps == 8) && t.block_n == 16 * t.warps;
}

static int32_t blocks_max(struct tile t, int32_t stages) { return stages == 1 ? 2 : MMA_DECODE_WARPS_MAX / t.warps; }

/* 9.0 and 10.0; 12.0 is not built for them. */
static int has_clusters(const fdm_device *device) { return device->compute_major == 9 || device->compute_major == 10; }

/* Each block's reserve is the driver's. */
static int merged_blocks_fit(const fdm_device *device, const fdm_problem *p, struct tile t, int32_t stages,
                             int32_t merge, int64_t blocks) {
    return blocks <= blocks_max(t, stages) &&
           blocks * (shared_bytes(p, t, stages, merge) + RESERVE) <= device->shared_bytes + RESERVE;
}
static int blocks_fit(const fdm_device *device, const fdm_problem *p, struct tile t, int32_t stages, int64_t blocks) {
    return merged_blocks_fit(device, p, t, stages, MMA_MERGE_WORKSPACE, blocks);
}

/* Where a row's bits may not depend on how many rows others have: 16 or 32 rows, by warps that each have the same keys
 * of a tile. */
static struct tile invariant_tile(const fdm_device *device, const fdm_problem *p) {
    const struct tile wide = {64, 8, 2}, narrow = {32, 4, 2};
    if (!is_tile(p, wide) || !blocks_fit(device, p, wide, 2, 1))
        return narrow;
    return packed_rows(p) <= 16 ? (struct tile){64, 4, 1} : wide;
}

/* As many row groups as there are rows for, fewer where Q would leave no room; 64 keys, or 32 where those do not fit;
 * eight warps where not each has keys of its own. */
static struct tile tile_of(const fdm_device *device, const fdm_problem *p) {
    struct tile t = {64, 4, 1};
    if (p->invariance)
        return invariant_tile(device, p);
    for (t.block_n = 64; t.block_n >= 32; t.block_n /= 2) {
        const int32_t least = t.block_n == 32 && share_of(p) == 1 ? 2 : 1;
        t.row_groups = least;
        while (t.row_groups * share_of(p) < 8 && t.row_groups * 16 < packed_rows(p))
            t.row_groups *= 2;
        while (t.row_groups > least && !blocks_fit(device, p, t, 2, 1))
            t.row_groups /= 2;
        if (t.block_n == 32 || blocks_fit(device, p, t, 2, 1))
            break;
    }
    if (t.row_groups * share_of(p) > 1) {
        t.warps = 8;
        if (!is_tile(p, t) || !blocks_fit(device, p, t, 2, 1)) {
            t.warps = 4;
            while (t.row_groups * share_of(p) > t.warps)
                t.row_groups /= 2;
        }
    }
    return t;
}

static int64_t row_blocks(const fdm_problem *p, struct tile t) {
    return (packed_rows(p) + 16 * t.row_groups - 1) / (16 * t.row_groups);
}
static int64_t blocks_of_keys(const fdm_problem *p, struct tile t) { return p->batch * p->heads_kv * row_blocks(p, t); }

static int64_t tile_bytes(const fdm_problem *p, struct tile t) {
    return (int64_t)t.block_n * (padded(p) + padded_v(p)) * element_bytes(p);
}

/* The fewest stages with which `blocks` of a multiprocessor have `bytes` in flight, or as many stages as there is room
 * for. */
static int32_t stages_for(const fdm_device *device, const fdm_problem *p, struct tile t, int32_t blocks,
                          int64_t bytes) {
    int32_t stages = 2;
    while (stages < STAGES_MAX && (stages - 1) * blocks * tile_bytes(p, t) < bytes &&
           blocks_fit(device, p, t, stages + 1, blocks))
        stages++;
    return stages;
}
static int32_t stages_of(const fdm_device *device, const fdm_problem *p, struct tile t, int32_t blocks) {
    return stages_for(device, p, t, blocks, FLIGHT_BYTES);
}

/* Blocks of a multiprocessor: one where it has enough under way by itself. */
static int32_t blocks_of(const fdm_device *device, const fdm_problem *p, struct tile t) {
    return (stages_of(device, p, t, 1) - 1) * tile_bytes(p, t) < FLIGHT_BYTES &&
                   blocks_fit(device, p, t, 2, blocks_max(t, 2))
               ? blocks_max(t, 2)
               : 1;
}

/* ---- choice ---- */

/* Keys that the rows of a KV head can see at most. */
static int64_t visible_keys(const fdm_problem *p) {
    const int64_t right = p->causal ? 0 : p->window_right;
    if (p->window_left < 0 || right < 0 || p->window_left >= p->seqlen_k || right >= p->seqlen_k)
        return p->seqlen_k;
    const int64_t keys = p->seqlen_q + p->window_left + right;
    return keys < p->seqlen_k ? keys : p->seqlen_k;
}

/* Splits that the options ask for, of the longest sequence; 0: as many as suit the device. */
static int64_t given_splits(const fdm_problem *p) {
    const int64_t keys = visible_keys(p);
    return p->num_splits   ? p->num_splits
           : p->split_keys ? (keys > p->split_keys ? gpu_ceil_div(keys, p->split_keys) : 1)
           : p->invariance ? mma_decode_parts(keys, 1)
                           : 0;
}
static int32_t split_rule(const fdm_problem *p) {
    return p->split_keys ? p->split_keys : p->invariance && !p->num_splits ? MMA_PARTS_BY_LENGTH : MMA_PARTS_EQUAL;
}

/* Why it cannot have what the options say of splits. */
static const char *splits_refusal(const fdm_problem *p) {
    if (p->invariance == FDM_INVARIANCE_SCHEDULE)
        return "its warps split keys, which invariance 2 does not allow";
    if ((p->invariance || p->split_keys) && lists_keys(p))
        return "splits take alternate units of the keys that a mask, a bias or intervals leave, which neither "
               "invariance nor split_keys allow";
    return given_splits(p) > GPU_SPLITS_MAX ? "keys are split into at most 128 parts" : NULL;
}

static const char *refusal(const fdm_device *device, const fdm_problem *p, char *text, size_t size) {
    const int64_t chunk = 16 / element_bytes(p);
    if (p->head_dim > 256 || p->head_dim_v > 256 || p->head_dim % chunk || p->head_dim_v % chunk)
        return is_float32(p) ? "head dims are multiples of 4 and at most 256"
                             : "head dims are multiples of 8 and at most 256";
    if (packed_rows(p) > ROWS_MAX)
        return "query rows times the heads of a group are at most 256";
    if (p->has_tree && lists_keys(p))
        return "beside a tree it takes no mask, bias or intervals";
    const char *splits = splits_refusal(p);
    if (splits)
        return splits;
    const struct tile t = tile_of(device, p);
    if (!blocks_fit(device, p, t, 2, 1)) {
        snprintf(text, size, "its ring needs %d KB of shared memory, the device has %lld KB",
                 (shared_bytes(p, t, 2, MMA_MERGE_WORKSPACE) + 1023) >> 10, (long long)device->shared_bytes >> 10);
        return text;
    }
    if ((double)splits_rows(p) >= INT32_MAX || (double)blocks_of_keys(p, t) * GPU_SPLITS_MAX >= INT32_MAX)
        return "rows of all heads are fewer than 2^31, blocks of KV heads than 2^24";
    return NULL;
}

static int64_t blocks_at_once(const fdm_device *device, const fdm_problem *p, struct tile t, int32_t stages) {
    const int32_t most = blocks_max(t, stages), least = stages == 1 ? 1 : 2;
    return (int64_t)device->num_sms * (blocks_fit(device, p, t, least, most) ? most : 1);
}

/* Splits of one tile each, whose loads all begin at once and where no key is looked for: what has few keys waits for
 * steps that follow each other, not for bytes. The smallest tile with which all blocks are on the device at once and a
 * cluster merges them; 0: none. */
static int32_t single_splits(const fdm_problem *p, struct tile t) {
    return (int32_t)((visible_keys(p) + t.block_n - 1) / t.block_n);
}
static int single_tile_of(const fdm_device *device, const fdm_problem *p, struct tile *t) {
    for (int32_t warps = 4; warps <= 8; warps *= 2) {
        *t = (struct tile){16 * warps, warps, 1};
        if (is_single(p, *t) && visible_keys(p) <= (int64_t)t->block_n * MMA_DECODE_CLUSTER_MAX(1) &&
            blocks_fit(device, p, *t, 1, 2) &&
            blocks_of_keys(p, *t) * single_splits(p, *t) <= blocks_at_once(device, p, *t, 1))
            return visible_keys(p) > 0;
    }
    return 0;
}

/* New keys that a block can write beside its other work, and rows that it can turn as it copies them. */
static int can_append(const fdm_problem *p) {
    enum { NEW_KEYS = 8, ROWS = 32 };
    return append_precedes(p) && gpu_cache_constant(p) == GPU_CACHE_PAGES && !lists_keys(p) && splits_rows(p) > 0 &&
           p->new_rows <= NEW_KEYS * p->batch && packed_rows(p) <= ROWS;
}

static int64_t keys_min(const fdm_device *device, const fdm_problem *p) {
    struct tile single;
    return lists_keys(p) && !single_tile_of(device, p, &single) ? LISTED_KEYS_MIN : KEYS_MIN;
}

static const char *passed_over(const fdm_device *device, const fdm_problem *p) {
    if (is_float32(p) && (p->has_cache || p->invariance)) /* no other kernel takes it */
        return NULL;
    if (p->has_tree || p->num_splits > 1 || p->split_keys)
        return NULL;
    if (p->invariance) /* batch and bounds do not count */
        return packed_rows(p) <= MMA_DECODE_PARTS_ROWS ? NULL
                                                       : "beside invariance at most 64 rows of a KV head suit it";
    if (p->seqlen_k < keys_min(device, p))
        return "it has too few keys to share them among blocks";
    return packed_rows(p) <= 16 || p->seqlen_q <= SEQLEN_MAX
               ? NULL
               : "of more than 16 rows of a KV head, at most 8 query rows suit it";
}

/* How much of the device is at work from begin to end: waves of as many blocks as are resident, of `tiles` / `splits`
 * tiles or one less each, which leaves some idle in the last wave or at the last tile. */
static double filling(int64_t pairs, int64_t splits, int64_t tiles, int64_t resident) {
    const int64_t waves = (pairs * splits + resident - 1) / resident, each = (tiles + splits - 1) / splits;
    return waves > 0 && each > 0 ? (double)(pairs * tiles) / ((double)(waves * resident) * (double)each) : 1;
}

/* As few as fill the device to 97.5 % of the best filling: one wave of as many blocks as are wanted on a
 * multiprocessor, or waves of as many as fit. Each split has a few times 64 keys. */
static int32_t splits_of(const fdm_device *device, const fdm_problem *p, struct tile t) {
    const int64_t wanted = (int64_t)device->num_sms * blocks_of(device, p, t);
    const int64_t fit = blocks_at_once(device, p, t, 2);
    const int64_t pairs = blocks_of_keys(p, t), tiles = (visible_keys(p) + 63) / 64;
    int64_t most = tiles / TILES_OF_A_SPLIT_MIN;
    most = most < 1 ? 1 : most > GPU_SPLITS_MAX ? GPU_SPLITS_MAX : most;
    double best = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t splits = 1; splits <= most; splits++) {
            const double filled = filling(pairs, splits, tiles, pairs * splits <= wanted ? wanted : fit);
            if (pass == 0)
                best = filled > best ? filled : best;
            else if (filled >= 0.975 * best)
                return (int32_t)splits;
        }
    return 1;
}

static int64_t workspace_bytes(const fdm_problem *p, int32_t splits, int32_t merge) {
    return merge == MMA_MERGE_WORKSPACE ? splits_workspace_bytes(p, splits) : 0;
}

/* Where blocks come in waves, a cluster would wait for room for all of it; and where two blocks of a multiprocessor
 * look for keys, eight splits in clusters took 202 us where without they take 134 (an H200). */
static int32_t merge_of(const fdm_device *device, const fdm_problem *p, struct tile t, int32_t stages, int32_t splits) {
    const int64_t blocks = blocks_of_keys(p, t) * splits, of_one = (blocks + device->num_sms - 1) / device->num_sms;
    if (splits == 1 && !p->invariance)
        return MMA_MERGE_NONE;
    if (p->invariance)
        return MMA_MERGE_WORKSPACE;
    const int64_t blocks_max = lists_keys(p) && stages > 1 ? 1 : of_one;
    return has_clusters(device) && splits <= MMA_DECODE_CLUSTER_MAX(stages) && of_one <= blocks_max &&
                   merged_blocks_fit(device, p, t, stages, MMA_MERGE_CLUSTER, of_one)
               ? MMA_MERGE_CLUSTER
               : MMA_MERGE_WORKSPACE;
}

PLAN_PARAMETER_STRUCT(MMA_DECODE_PARAMETERS);

static struct tile tile_of_plan(const fdm_plan *plan) {
    return (struct tile){
        .block_n = plan->block_n, .warps = parameters_of(plan).WARPS, .row_groups = parameters_of(plan).ROW_GROUPS};
}

/* Whether the order of sequences matters, and the kernel can find it. */
static int is_ordered(const fdm_device *device, const fdm_problem *p, struct tile t, int32_t stages, int32_t splits) {
    return p->has_mask && !p->varlen && stages > 1 && p->batch > 1 && p->batch <= MMA_DECODE_ORDERED_MAX &&
           p->mask_shape[0] > 1 && blocks_of_keys(p, t) * splits > blocks_at_once(device, p, t, stages);
}

static void explain(const fdm_device *device, const fdm_problem *p, struct tile t, fdm_plan *plan) {
    const int64_t blocks = row_blocks(p, t);
    int used =
        snprintf(plan->reason, sizeof plan->reason, "%lld query rows of a KV head fit in ", (long long)packed_rows(p));
    used += blocks == 1
                ? snprintf(plan->reason + used, sizeof plan->reason - (size_t)used, "one tile of %d", plan->block_m)
                : snprintf(plan->reason + used, sizeof plan->reason - (size_t)used, "%lld tiles of %d",
                           (long long)blocks, plan->block_m);
    used +=
        snprintf(plan->reason + used, sizeof plan->reason - (size_t)used,
                 "; %d splits of the keys %s %d multiprocessors with %lld KV heads; %d stage%s of %d keys (%lld KB)",
                 parameters_of(plan).SPLITS,
                 problem_fixes_splits(p) ? "at most, as invariance, num_splits or split_keys say, are on" : "fill",
                 device->num_sms, (long long)(p->batch * p->heads_kv), plan->stages, plan->stages == 1 ? "" : "s",
                 plan->block_n, (long long)(plan->shared_bytes + 1023) >> 10);
    if (plan->stages == 1)
        snprintf(plan->reason + used, sizeof plan->reason - (size_t)used, ": all that a split reads, at once");
    else if (lists_keys(p))
        snprintf(plan->reason + used, sizeof plan->reason - (size_t)used,
                 "; keys are listed first by %s, and what no row sees is not read%s",
                 p->has_mask && (p->has_intervals || gpu_row_runs(p)) ? "mask and intervals"
                 : p->has_mask                                        ? "the mask"
                 : p->has_intervals || gpu_row_runs(p)                ? "intervals"
                                                                      : "a bias of -inf",
                 parameters_of(plan).ORDERED ? "; sequences that seem to see most begin first" : "");
}

/* A way to run a problem, with `times` as many splits as fill the device. apart: appending is a launch of its own. */
struct way {
    struct tile tile;
    int32_t stages, splits, times, apart;
};

/* Where keys are hidden, splits have unequal work, and the tests of keys have to be spread; but each block begins with
 * reads that wait for memory. A split has at least this many keys to test, or fewer where the device has room for twice
 * as many blocks (H200, masks: half as many keys take 5 to 25 % longer where splits are alike, twice as many 0 to
 * 20 % where sequences are not; intervals, top 2048 of 131072 keys: 18 % more with half or twice as many). */
static int32_t times_of(const fdm_device *device, const fdm_problem *p, struct tile t, int32_t splits) {
    const int64_t keys = p->has_intervals ? 4096 : 2048, least = p->has_intervals ? 4096 : 1024;
    const int64_t pairs = blocks_of_keys(p, t), room = blocks_at_once(device, p, t, 2);
    int32_t times = 1;
    while (lists_keys(p) && 2 * times * splits <= GPU_SPLITS_MAX &&
           visible_keys(p) >= (2 * times * splits * pairs <= room ? least : keys) * 2 * times * splits)
        times *= 2;
    return times;
}

static int32_t splits_of_way(const struct way *way) { return way->splits * way->times; }

/* A block that lists keys has no copies under way while it tests its first keys: the other block of the multiprocessor
 * then needs enough of them by itself. */
static int32_t stages_of_way(const fdm_device *device, const fdm_problem *p, const struct way *way,
                             int64_t one_wave_bytes) {
    const int64_t blocks = blocks_of_keys(p, way->tile) * splits_of_way(way);
    const int32_t most = blocks_max(way->tile, 2), alone = stages_of(device, p, way->tile, 1);
    const int shared = blocks > device->num_sms && blocks_fit(device, p, way->tile, 2, most);
    if (lists_keys(p) && blocks_fit(device, p, way->tile, alone, most))
        return alone;
    const int one_wave = !lists_keys(p) && !is_float32(p) && blocks <= (shared ? most : 1) * (int64_t)device->num_sms;
    return stages_for(device, p, way->tile, shared ? most : 1, one_wave ? one_wave_bytes : FLIGHT_BYTES);
}

static int can_have(const fdm_device *device, const fdm_problem *p, const struct way *way) {
    struct tile single;
    if (problem_fixes_splits(p) && (way->stages == 1 || way->times != 1))
        return 0;
    if (way->stages == 1)
        return single_tile_of(device, p, &single);
    return is_tile(p, way->tile) && blocks_fit(device, p, way->tile, way->stages, 1) &&
           splits_of_way(way) <= GPU_SPLITS_MAX &&
           (way->times == 1 || visible_keys(p) / splits_of_way(way) >= 64 * TILES_OF_A_SPLIT_MIN);
}

/* A cluster lies in one graphics processing cluster, whose multiprocessors are a multiple of two, not of four or eight:
 * clusters that would leave hardly any multiprocessor over do not all find room at once, and the last begin when the
 * first have ended (H200: 128 blocks of 132, 8 to 28 % slower than twice as many that merge through memory). */
static int is_crowded(const fdm_device *device, const fdm_problem *p, const struct way *way) {
    const int64_t splits = splits_of_way(way), blocks = blocks_of_keys(p, way->tile) * splits;
    const int64_t room = (blocks + device->num_sms - 1) / device->num_sms * device->num_sms;
    return splits > 2 && 8 * blocks > 7 * room &&
           merge_of(device, p, way->tile, way->stages, (int32_t)splits) == MMA_MERGE_CLUSTER;
}

/* A way with a ring: as many splits as fill the device, in one wave where they are one; and the same for blocks in
 * waves. */
static struct way ring_of(const fdm_device *device, const fdm_problem *p) {
    struct way way = {.tile = tile_of(device, p)};
    way.splits = given_splits(p) ? (int32_t)given_splits(p) : splits_of(device, p, way.tile);
    way.times = given_splits(p) ? 1 : times_of(device, p, way.tile, way.splits);
    way.stages = stages_of_way(device, p, &way, ONE_WAVE_FLIGHT_BYTES);
    return way;
}
static struct way in_waves(const fdm_device *device, const fdm_problem *p, struct way ring) {
    ring.stages = stages_of_way(device, p, &ring, FLIGHT_BYTES);
    return ring;
}

/* The rules' of them: in waves where clusters would be crowded. */
static struct way rules_of(const fdm_device *device, const fdm_problem *p, const struct way *ring) {
    struct way more = in_waves(device, p, *ring);
    while (is_crowded(device, p, &more)) {
        more.times *= 2;
        if (!can_have(device, p, &more))
            return *ring;
    }
    return more.times > ring->times ? more : *ring;
}

static void fill_way(const fdm_device *device, const fdm_problem *p, const struct way *way, fdm_plan *plan) {
    const struct tile t = way->tile;
    const int32_t splits = splits_of_way(way);
    PLAN_SET_PARAMETERS(
        plan, .SPLITS = splits, .STAGES = way->stages, .MERGE = merge_of(device, p, t, way->stages, splits),
        .EARLY = device->compute_major >= 9, .WARPS = t.warps, .ROW_GROUPS = t.row_groups,
        .ORDERED = is_ordered(device, p, t, way->stages, splits), .APPENDS = can_append(p) && !way->apart);
    plan->block_m = 16 * t.row_groups;
    plan->block_n = t.block_n;
    plan->stages = way->stages;
    plan->shared_bytes = shared_bytes(p, t, way->stages, parameters_of(plan).MERGE);
    plan->workspace_bytes = workspace_bytes(p, splits, parameters_of(plan).MERGE);
    const char *appends = parameters_of(plan).APPENDS ? "_A" : "";
    char times[16] = "";
    if (way->times > 1)
        snprintf(times, sizeof times, "_X%d", way->times);
    snprintf(plan->choice, sizeof plan->choice, "MMA_Decode_%s%dx%d_W%d_S%d%s%s", is_float32(p) ? "TF32x3_" : "",
             plan->block_m, plan->block_n, t.warps, way->stages, times, appends);
    explain(device, p, t, plan);
}

/* The variant-th way: the rules', then those with other stages, then those with other splits; at last the rules' with
 * appending apart. */
static int fill(const fdm_device *device, const fdm_problem *p, int32_t variant, fdm_plan *plan) {
    enum { DEPTHS = STAGES_MAX, TIMES = 5 }; /* 1 to 4 stages; 1, 2, 4, 8, 16 times the splits */
    const struct way ring = ring_of(device, p), waves = in_waves(device, p, ring);
    struct way single = {.stages = 1, .times = 1}, rules;
    if (problem_fixes_splits(p)) {
        rules = ring;
    } else if (single_tile_of(device, p, &single.tile)) {
        single.splits = single_splits(p, single.tile);
        rules = single;
    } else
        rules = rules_of(device, p, &ring);
    struct way way = rules;
    int32_t count = 0;
    for (int32_t n = 0; count < variant && n < DEPTHS + TIMES; n++) {
        way = n == 0 ? single : n < DEPTHS ? ring : waves;
        if (n < DEPTHS)
            way.stages = 1 + n;
        else
            way.times = 1 << (n - DEPTHS);
        count += memcmp(&way, &rules, sizeof way) != 0 && can_have(device, p, &way) &&
                 (n < DEPTHS || way.times != ring.times);
    }
    if (count < variant) {
        if (count + 1 < variant || !can_append(p))
            return 0;
        way = rules;
        way.apart = 1;
    }
    fill_way(device, p, &way, plan);
    return 1;
}

static int valid(const fdm_plan *plan, const fdm_problem *p) {
    const struct parameters x = parameters_of(plan);
    const int32_t splits = x.SPLITS, stages = x.STAGES, merge = x.MERGE;
    const struct tile t = tile_of_plan(plan);
    const int32_t splits_max = merge == MMA_MERGE_NONE      ? 1
                               : merge == MMA_MERGE_CLUSTER ? MMA_DECODE_CLUSTER_MAX(stages)
                                                            : GPU_SPLITS_MAX;
    const int can_order = p->has_mask && !p->varlen && stages > 1 && p->batch <= MMA_DECODE_ORDERED_MAX;
    const int as_given = !given_splits(p) || splits == given_splits(p);
    const int tile_fits = stages == 1 ? is_single(p, t) && splits >= single_splits(p, t) : is_tile(p, t);
    return merge >= MMA_MERGE_NONE && merge <= MMA_MERGE_CLUSTER && splits >= 1 && splits <= splits_max && tile_fits &&
           as_given && (x.EARLY == 0 || x.EARLY == 1) && stages >= 1 && stages <= STAGES_MAX &&
           plan->stages == stages && plan->shared_bytes == shared_bytes(p, t, stages, merge) &&
           (!x.APPENDS || (x.APPENDS == 1 && can_append(p))) && (!x.ORDERED || (x.ORDERED == 1 && can_order)) &&
           plan->block_m == 16 * t.row_groups && workspace_bytes(p, splits, merge) <= plan->workspace_bytes;
}

static void decode_request(const fdm_plan *plan, const fdm_problem *p, struct cuda_kernel_request *request) {
    const struct parameters x = parameters_of(plan);
    const int32_t stages = x.STAGES, merge = x.MERGE;
    const struct tile t = tile_of_plan(plan);
    gpu_set_problem_constants(
        request, p, GPU_ALIKE_MASK_ROWS | GPU_ALIKE_BIAS_ROWS | GPU_ALIKE_SCORES_ALIGNED | GPU_ALIKE_POSITIVE_SCALE);
    GPU_ADD_CONSTANTS(request, MMA_DECODE_CONSTANTS, .HEAD_DIM = padded(p), .HEAD_DIM_V = padded_v(p),
                      .BLOCK_N = t.block_n, .WARPS = t.warps, .ROW_GROUPS = t.row_groups, .STAGES = stages,
                      .MASK_PER_ROW = mask_constant(p, stages), .INTERVALS_PER_ROW = intervals_constant(p, stages),
                      .ORDERED = x.ORDERED, .MERGE = merge, .SPLIT_RULE = split_rule(p), .APPENDS = x.APPENDS,
                      .ROTARY = x.APPENDS ? append_rotary_constant(p) : APPEND_PLAIN);
    request->file = "families/mma/decode/mma_decode.cu";
    request->entry = "mma_decode";
    request->shared_bytes = shared_bytes(p, t, stages, merge);
    request->threads = 32 * t.warps;
    /* Compiled for 12.0, a bias and intervals of packed float32 sequences together put 8 bytes aside. */
    request->spill_bytes_max = is_float32(p) && p->varlen && p->has_bias && p->has_intervals ? 8 : 0;
    /* Compiled for 9.0, intervals beside lengths on the device spill 76 bytes. */
    if (p->has_intervals && gpu_has_lengths(p))
        request->spill_bytes_max = 76;
    /* Compiled for 12.0, a mask, intervals and a block mask together spill 24 bytes. */
    else if (p->has_intervals && p->has_mask && p->block_mask_size)
        request->spill_bytes_max = 24;
    request->cluster = merge == MMA_MERGE_CLUSTER ? MMA_DECODE_CLUSTER_MAX(stages) : 0;
}

static fdm_status launch(const fdm_plan *plan, struct gpu_launches *l) {
    const fdm_problem *p = l->problem;
    const struct parameters x = parameters_of(plan);
    const int32_t splits = x.SPLITS, merge = x.MERGE;
    struct gpu_forward_params params = {0};
    if (splits_rows(p) == 0 && l->attention)
        return FDM_OK;
    if (l->attention)
        gpu_fill_forward(l->attention, &params);
    params.num_splits = splits;
    if (merge == MMA_MERGE_WORKSPACE)
        splits_fill(p, splits, l->workspace, &params);
    decode_request(plan, p, gpu_add_kernel(l));
    gpu_add_launch(l, (struct gpu_launch){.grid = {gpu_grid(blocks_of_keys(p, tile_of_plan(plan)) * splits)},
                                          .cluster = merge == MMA_MERGE_CLUSTER ? splits : 1,
                                          .early = x.EARLY,
                                          .params = &params,
                                          .params_bytes = sizeof params});
    if (merge == MMA_MERGE_WORKSPACE)
        combine_splits_add(l, x.EARLY, &params);
    return FDM_OK;
}

static int appends(const fdm_plan *plan) { return parameters_of(plan).APPENDS; }

const struct gpu_algorithm mma_decode_algorithm = {
    .info = {"mma.decode", "few query rows, keys split over blocks and merged", FDM_FORWARD},
    .parameters = PLAN_PARAMETERS(MMA_DECODE_PARAMETERS),
    .features = (GPU_EVERY_FEATURE | GPU_ROW_RUN_FEATURES | GPU_FEATURE_TREE | GPU_FEATURE_SEQUSED | GPU_FEATURE_CACHE |
                 GPU_FEATURE_SPLITS) &
                ~GPU_FEATURE_UNALIGNED,
    .chosen_freely = 1,
    .writes_lse_low = 1,
    .refusal = refusal,
    .passed_over = passed_over,
    .fill = fill,
    .valid = valid,
    .launch = launch,
    .appends = appends,
};
