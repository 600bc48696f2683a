/* doubtful_keys.c: keys that a bias of every row hides from all lanes of a block, and what they must not bring in. */
#include "families/cpu/visible.h"

/* Where the bias of the lane begins. */
static int64_t lane_bias(const struct lane_block *block, int32_t lane) {
    const struct score_view *view = &block->attention->bias;
    return block->batch * view->batch + block->head[lane] / view->group * view->head + block->row[lane] * view->row;
}

/* Whether the walk lists key k for the lane and the bias lets it see the key. */
static inline int sees(const struct lane_block *block, const struct key_block *keys, int32_t lane, int64_t bias,
                       int32_t k) {
    const struct attention *a = block->attention;
    const int32_t panel = lane / CPU_LANES;
    const int listed = keys->state[panel] == PANEL_FULL ||
                       (keys->state[panel] == PANEL_PARTIAL && keys->visible[panel][k] >> lane % CPU_LANES & 1);
    return listed & !bias_bars(a->bias.data, a->problem->bias_dtype, bias + keys->key[k] * a->bias.key);
}

void key_block_doubt(struct key_block *keys, const struct lane_block *block) {
    const int32_t last = block->num_lanes - 1;
    const int64_t bias = lane_bias(block, last);
    int32_t n = 0;
    for (int32_t k = 0; k < keys->num_keys; k++) {
        keys->doubtful[n] = k;
        n += !sees(block, keys, last, bias, k);
    }
    keys->num_doubtful = n;
}

static int any_sees(const struct lane_block *block, const struct key_block *keys, int32_t k) {
    int any = 0;
    for (int32_t lane = 0; lane < block->num_lanes && !any; lane++)
        any = sees(block, keys, lane, lane_bias(block, lane), k);
    return any;
}

int key_block_hide(const struct key_block *keys, const struct lane_block *block, const void **rows, int32_t depth) {
    const struct cpu_kernels *kernels = block->kernels;
    const fdm_dtype dtype = block->attention->problem->dtype;
    const void *doubtful[CPU_BLOCK_KEYS_MAX];
    int hidden = 0;
    for (int32_t n = 0; n < keys->num_doubtful; n++)
        doubtful[n] = rows[keys->doubtful[n]];
    if (keys->num_doubtful == 0 || kernels->all_finite(doubtful, keys->num_doubtful, depth, dtype))
        return 0;
    for (int32_t n = 0; n < keys->num_doubtful; n++)
        if (!kernels->all_finite(doubtful + n, 1, depth, dtype) && !any_sees(block, keys, keys->doubtful[n])) {
            rows[keys->doubtful[n]] = cpu_zero_row;
            hidden = 1;
        }
    return hidden;
}
