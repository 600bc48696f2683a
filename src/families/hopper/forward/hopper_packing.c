/* hopper_packing.c: packing of heads and splits of keys, by an estimate in steps of a block's tile of keys. */
#include "families/hopper/forward/hopper_packing.h"

#include <math.h>

#include "families/hopper/pipeline/hopper_items.h"
#include "gpu/features.h"
#include "gpu/splits.h"

/* An item's first and last products, which nothing overlaps, take about a step; the launch that combines splits about
 * three (4 us), and one for each 5 MB of parts. */
enum { ITEM_STEPS = 1, COMBINE_STEPS = 3, STEP_BYTES = 5 << 20 };
enum { SPLITS_MAX = 64, TILES_OF_A_SPLIT_MIN = 2, FEW_BLOCKS = 4, FEW_WAVES = 4 };

static int64_t divided(int64_t x, int64_t by) { return (x + by - 1) / by; }
static int scored(const fdm_problem *p) { return p->has_mask || p->has_bias || p->has_intervals || gpu_row_runs(p); }
static int64_t group(const fdm_problem *p) { return p->heads / p->heads_kv; }

int hopper_packing_possible(const fdm_problem *p, struct hopper_packing packing) {
    if (packing.packed < 1 || packing.packed > HOPPER_PACKED_MAX || (packing.packed & (packing.packed - 1)) ||
        group(p) % packing.packed || packing.splits < 1 || packing.splits > GPU_SPLITS_MAX)
        return 0;
    return (packing.packed == 1 || !scored(p)) &&
           (packing.splits == 1 || (!scored(p) && !p->varlen && !gpu_has_lengths(p) && p->head_dim_v % 8 == 0));
}

/* Prompts and single rows in one call: a row of each head of a group in one tile reads the keys once. */
static int is_mixture(const fdm_problem *p) { return p->has_cache && p->varlen; }

/* The fewest heads that leave the fewest blocks. */
static int32_t packed_of(const fdm_problem *p, int32_t block_m) {
    int32_t best = 1;
    for (struct hopper_packing packing = {2, 1}; hopper_packing_possible(p, packing); packing.packed *= 2)
        if (is_mixture(p) || hopper_all_blocks(p, packing.packed, block_m) < hopper_all_blocks(p, best, block_m))
            best = packing.packed;
    return best;
}

int64_t hopper_visible_keys(const fdm_problem *p) {
    const int64_t right = p->causal ? 0 : p->window_right;
    const int64_t keys = p->window_left < 0 || right < 0 ? p->seqlen_k : p->seqlen_q + p->window_left + right;
    return keys < p->seqlen_k ? keys : p->seqlen_k;
}

/* What does not depend on the number of splits. */
struct load {
    int64_t blocks, tiles, num_sms;
    double steps_of_parts; /* of one split */
};
static struct load load_of(const fdm_device *device, const fdm_problem *p, int32_t block_m, int32_t block_n,
                           int32_t packed) {
    return (struct load){hopper_all_blocks(p, packed, block_m), divided(hopper_visible_keys(p), block_n),
                         device->num_sms,
                         8.0 * (double)(p->batch * p->heads * p->seqlen_q * p->head_dim_v) / STEP_BYTES};
}

static double steps_of(const struct load *l, int32_t splits) {
    const double steps =
        (double)divided(l->blocks * splits, l->num_sms) * (double)(divided(l->tiles, splits) + ITEM_STEPS);
    return splits == 1 ? steps : steps + COMBINE_STEPS + l->steps_of_parts * splits;
}

/* More splits than fill the multiprocessors once with a few blocks each do not pay. */
static int32_t splits_of(const fdm_problem *p, const struct load *l, int32_t packed) {
    int32_t best = 1;
    double least = steps_of(l, 1);
    if (l->blocks > FEW_WAVES * l->num_sms || !hopper_packing_possible(p, (struct hopper_packing){packed, 2}))
        return 1;
    for (int32_t splits = 2; splits <= SPLITS_MAX && splits * TILES_OF_A_SPLIT_MIN <= l->tiles; splits++) {
        const double steps = steps_of(l, splits);
        if (steps < 0.97 * least) {
            best = splits;
            least = steps;
        }
    }
    return best;
}

/* Steps of a head's blocks under a causal mask, where `packed` heads share them. */
static double causal_steps(const fdm_problem *p, int32_t block_m, int32_t block_n, int32_t packed) {
    double steps = 0;
    for (int64_t end = block_m / packed; end < p->seqlen_q + block_m / packed; end += block_m / packed)
        steps += (double)divided((end < p->seqlen_q ? end : p->seqlen_q) + p->seqlen_k - p->seqlen_q, block_n);
    return steps / packed;
}

/* Of many blocks: rows of several heads in a tile are fewer positions, whose last keys lie closer together: fewer steps
 * along the diagonal (an H200: 5 to 6 % less time where it counts 3 to 6 % fewer). */
static int packing_pays(const fdm_problem *p, int32_t block_m, int32_t block_n, int32_t packed) {
    return p->causal && !p->varlen && p->window_left < 0 && p->seqlen_k >= p->seqlen_q &&
           causal_steps(p, block_m, block_n, packed) < 0.98 * causal_steps(p, block_m, block_n, 1);
}

/* Of many blocks of a head that leave two fifths of the multiprocessors idle: what the estimate counts is more than
 * what splits gain (an H200: 1.2 times as fast where it says 1.6 to 2.2 times). */
static int splitting_pays(const struct load *l, int is_causal, int32_t splits) {
    const double longest = (double)(divided(l->tiles, splits) + ITEM_STEPS);
    const double mean = is_causal ? longest / 2 : longest;
    const double waves = (double)(l->blocks * splits) / (double)l->num_sms;
    const double steps = fmax(longest, waves * mean) + COMBINE_STEPS + l->steps_of_parts * splits;
    return 5 * l->blocks <= 3 * l->num_sms && steps < 0.7 * (double)(l->tiles + ITEM_STEPS);
}

int32_t hopper_packings(const fdm_device *device, const fdm_problem *p, int32_t block_m, int32_t block_n,
                        struct hopper_packing packings[HOPPER_PACKINGS]) {
    const int32_t packed = packed_of(p, block_m);
    const struct load loads[2] = {load_of(device, p, block_m, block_n, 1),
                                  load_of(device, p, block_m, block_n, packed)};
    double steps[HOPPER_PACKINGS];
    int32_t count = 0, fastest = 0;
    for (int n = 0; n < HOPPER_PACKINGS; n++) {
        const struct load *l = &loads[n & 1];
        struct hopper_packing packing = {n & 1 ? packed : 1, 1};
        if (n & 2)
            packing.splits = splits_of(p, l, packing.packed);
        if ((n & 1 && packed == 1) || (n & 2 && packing.splits == 1))
            continue;
        steps[count] = steps_of(l, packing.splits);
        packings[count++] = packing;
    }
    const int few = hopper_row_blocks(p, 1, block_m) <= FEW_BLOCKS; /* the estimate is of few */
    double least = 0.9 * steps[0];
    for (int32_t n = 1; n < count && few; n++)
        if (steps[n] < least) {
            fastest = n;
            least = steps[n];
        }
    for (int32_t n = 1; n < count && !few && !fastest; n++)
        if (packings[n].splits == 1
                ? packing_pays(p, block_m, block_n, packed)
                : packings[n].packed == 1 && splitting_pays(&loads[0], p->causal, packings[n].splits))
            fastest = n;
    if (is_mixture(p))
        fastest = count - 1;
    const struct hopper_packing first = packings[fastest];
    for (int32_t n = fastest; n > 0; n--)
        packings[n] = packings[n - 1];
    packings[0] = first;
    return count;
}
