/* hopper_ways.c: packing of heads and splits of keys, by an estimate in steps of a block's tile of keys. */
#include "families/hopper/hopper_ways.h"

#include "gpu/features.h"
#include "gpu/splits.h"

/* An item's first and last products, which nothing overlaps, take about a step; the launch that combines splits about
 * three (4 us), and one for each 5 MB of parts. */
enum { ITEM_STEPS = 1, COMBINE_STEPS = 3, STEP_BYTES = 5 << 20 };
enum { SPLITS_MAX = 64, TILES_OF_A_SPLIT_MIN = 2, FEW_BLOCKS = 4 };

static int64_t divided(int64_t x, int64_t by) { return (x + by - 1) / by; }
static int scored(const fdm_problem *p) { return p->has_mask || p->has_bias; }
static int64_t group(const fdm_problem *p) { return p->heads / p->heads_kv; }

int hopper_way_possible(const fdm_problem *p, struct hopper_way way) {
    if (way.packed < 1 || way.packed > HOPPER_PACKED_MAX || (way.packed & (way.packed - 1)) || group(p) % way.packed ||
        way.splits < 1 || way.splits > GPU_SPLITS_MAX)
        return 0;
    return (way.packed == 1 || !scored(p)) && (way.splits == 1 || (!scored(p) && !p->varlen && p->head_dim_v % 8 == 0));
}

/* Blocks of rows of all heads. */
static int64_t blocks_of(const fdm_problem *p, int32_t packed, int32_t block_m) {
    return divided(p->seqlen_q * packed, block_m) * (p->heads / packed) * p->batch;
}

/* The fewest heads that leave the fewest blocks. */
static int32_t packed_of(const fdm_problem *p, int32_t block_m) {
    int32_t best = 1;
    for (struct hopper_way way = {2, 1}; hopper_way_possible(p, way); way.packed *= 2)
        if (blocks_of(p, way.packed, block_m) < blocks_of(p, best, block_m))
            best = way.packed;
    return best;
}

/* Keys that a block's rows see at most. */
static int64_t visible_keys(const fdm_problem *p) {
    const int64_t right = p->causal ? 0 : p->window_right;
    const int64_t keys = p->window_left < 0 || right < 0 ? p->seqlen_k : p->seqlen_q + p->window_left + right;
    return keys < p->seqlen_k ? keys : p->seqlen_k;
}

static double steps_of(const fdm_device *device, const fdm_problem *p, int32_t block_m, int32_t block_n,
                       struct hopper_way way) {
    const int64_t items = blocks_of(p, way.packed, block_m) * way.splits;
    const int64_t tiles = divided(divided(visible_keys(p), block_n), way.splits);
    const double steps = (double)divided(items, device->num_sms) * (double)(tiles + ITEM_STEPS);
    const double bytes = 8.0 * (double)(p->batch * p->heads * p->seqlen_q * p->head_dim_v) * way.splits;
    return way.splits == 1 ? steps : steps + COMBINE_STEPS + bytes / STEP_BYTES;
}

static int32_t splits_of(const fdm_device *device, const fdm_problem *p, int32_t block_m, int32_t block_n,
                         int32_t packed) {
    const int64_t tiles = divided(visible_keys(p), block_n);
    struct hopper_way best = {packed, 1}, way = {packed, 2};
    for (; way.splits <= SPLITS_MAX && way.splits * TILES_OF_A_SPLIT_MIN <= tiles && hopper_way_possible(p, way);
         way.splits++)
        if (steps_of(device, p, block_m, block_n, way) < 0.97 * steps_of(device, p, block_m, block_n, best))
            best = way;
    return best.splits;
}

int32_t hopper_ways(const fdm_device *device, const fdm_problem *p, int32_t block_m, int32_t block_n,
                    struct hopper_way ways[HOPPER_WAYS]) {
    const int32_t packed = packed_of(p, block_m);
    int32_t count = 0, fastest = 0;
    for (int n = 0; n < HOPPER_WAYS; n++) {
        struct hopper_way way = {n & 1 ? packed : 1, 1};
        way.splits = n & 2 ? splits_of(device, p, block_m, block_n, way.packed) : 1;
        if ((n & 1 && packed == 1) || (n & 2 && way.splits == 1))
            continue;
        ways[count++] = way;
    }
    /* many blocks have unequal work that an order evens out: the estimate is of few */
    if (divided(p->seqlen_q, block_m) > FEW_BLOCKS)
        return count;
    double least = 0.9 * steps_of(device, p, block_m, block_n, ways[0]);
    for (int32_t n = 1; n < count; n++)
        if (steps_of(device, p, block_m, block_n, ways[n]) < least) {
            fastest = n;
            least = steps_of(device, p, block_m, block_n, ways[n]);
        }
    const struct hopper_way first = ways[fastest];
    for (int32_t n = fastest; n > 0; n--)
        ways[n] = ways[n - 1];
    ways[0] = first;
    return count;
}
