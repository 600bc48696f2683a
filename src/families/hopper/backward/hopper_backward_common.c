/* hopper_backward_common.c: what hopper_backward.c and hopper_backward_2pass.c share. */
#include "families/hopper/backward/hopper_backward_common.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "gpu/key_sort.h"
#include "gpu/numbers.h"
#include "gpu/tile_maps.h"

int32_t hopper_backward_padded(int64_t head_dim) { return (int32_t)gpu_round_up(head_dim, 32); }

const char *hopper_backward_refusal(const fdm_problem *p, int32_t head_dim_max, char *text, size_t size) {
    const char *clause = gpu_shape_refusal(p, 0, head_dim_max, text, size);
    if (clause)
        return clause;
    if (!p->q_mappable || !p->keys_mappable)
        return "TMA needs strides above 0 and below 2^40 bytes";
    if (gpu_loads_nothing(p))
        return "there is nothing to load";
    return gpu_backward_refusal(p, 1);
}

/* ---- division of heads ---- */

static int64_t tiles_of(int64_t length, int32_t tile) { return (length + tile - 1) / tile; }

/* Rows, out of `rows`, that see a key: of the key that most see, and in the mean. */
struct seen {
    double most, mean;
};
static struct seen seen_rows(const fdm_problem *p, double rows) {
    const double left = p->window_left < 0 ? rows : fmin((double)p->window_left, rows);
    const double right = p->causal ? 0 : p->window_right < 0 ? rows : fmin((double)p->window_right, rows);
    if (p->has_intervals || gpu_row_runs(p)) /* a guess: the host does not see them */
        return (struct seen){rows, rows / 4};
    if (!gpu_bounded(p))
        return (struct seen){rows, rows};
    return (struct seen){fmin(rows, left + right), left + right - (left * left + right * right) / (2 * rows)};
}

/* Bytes of the rows that a block of a part walks, and of their sums of dQ. */
static int64_t bytes_of_part(const fdm_problem *p, int64_t parts) {
    return p->heads / p->heads_kv / parts * p->seqlen_q * (6 * p->head_dim + 2 * p->head_dim_v);
}

/* Under causal or a window blocks that began together are soon apart, and read rows that L2 no longer holds: measured
 * on an H100, 3 % of the time for each time that the rows of a part are doubled (docs/lab/hopper_backward.md). */
static double misses_of(const fdm_problem *p, int64_t parts) {
    const double l2 = (double)((int64_t)HOPPER_BACKWARD_L2_MB << 20), bytes = (double)bytes_of_part(p, parts);
    return (gpu_bounded(p) || p->has_intervals || gpu_row_runs(p)) && bytes > l2 ? 1 + 0.03 * log2(bytes / l2) : 1;
}

/* An estimate. Blocks alike in length run in waves; of those unlike, the longest first, the last end about half of a
 * wave's share of the longest apart. The sums of parts are written and read once. */
static double seconds_with(const fdm_device *device, const fdm_problem *p, int32_t block_n, double flops,
                           int64_t parts) {
    enum { OVERHEAD_ROWS = 128 }; /* of a block: as long as these take */
    const double speed = 4.5e12;  /* FLOP/s of a multiprocessor, measured on an H200 */
    const double bandwidth = device->bandwidth > 0 ? (double)device->bandwidth : 1e12, launch = 6e-6;
    const double group = (double)p->heads / (double)p->heads_kv;
    const double blocks = (double)(tiles_of(p->seqlen_k, block_n) * p->heads_kv * p->batch * parts);
    const double waves = blocks / (device->num_sms > 0 ? device->num_sms : 1);
    const struct seen seen = seen_rows(p, (double)p->seqlen_q);
    const double most = fmin(seen.most + block_n, (double)p->seqlen_q) * group / (double)parts + OVERHEAD_ROWS;
    const double mean = seen.mean * group / (double)parts + OVERHEAD_ROWS;
    const double rows = waves <= 1               ? most
                        : seen.mean == seen.most ? ceil(waves) * most
                                                 : fmax(most, waves * mean + most / (2 * waves));
    const double bytes = blocks * block_n * (double)(p->head_dim + p->head_dim_v) * 8;
    return misses_of(p, parts) * rows * block_n * flops / speed + (parts > 1 ? launch + bytes / bandwidth : 0);
}

/* Parts are interleaved in rounds, so that the rows and sums of dQ of a round stay in L2. A round has enough parts
 * that blocks of the last one, the longest first, end together. Rounds are of equal size. */
static int32_t parts_in_turn(const fdm_device *device, const fdm_problem *p, int32_t block_n, int64_t parts) {
    enum { WAVES_OF_A_ROUND = 2 };
    const int64_t bytes = bytes_of_part(p, parts);
    const int64_t all = p->heads_kv * p->batch * parts, blocks = tiles_of(p->seqlen_k, block_n);
    const int64_t near = ((int64_t)HOPPER_BACKWARD_L2_MB << 20) / bytes;
    const int64_t full = (WAVES_OF_A_ROUND * device->num_sms + blocks - 1) / blocks;
    const int64_t least = near > full ? near : full, rounds = least > all ? 1 : all / (least > 1 ? least : 1);
    return (int32_t)((all + rounds - 1) / rounds);
}

/* Query heads that are divided: of a group, where gradients of keys are wanted. */
static int64_t divisible(const fdm_problem *p) {
    return (p->needs_dk || p->needs_dv) && !gpu_mask_rows(p) && !p->varlen ? p->heads / p->heads_kv : 1;
}

int hopper_backward_divide(const fdm_device *device, const fdm_problem *p, int32_t block_n, double flops,
                           int32_t number, struct hopper_division *division) {
    const int64_t group = divisible(p);
    int64_t best = 1, parts;
    double least = 0.97 * seconds_with(device, p, block_n, flops, 1); /* less is not worth another launch */
    for (parts = 2; parts <= group; parts++) {
        const double seconds = group % parts ? least : seconds_with(device, p, block_n, flops, parts);
        if (seconds < least)
            least = seconds, best = parts;
    }
    for (parts = number ? 1 : best; number && parts <= group; parts++)
        if (group % parts == 0 && parts != best && --number == 0)
            break;
    if (parts > group)
        return 0;
    *division = (struct hopper_division){(int32_t)parts, parts_in_turn(device, p, block_n, parts)};
    return 1;
}

int hopper_backward_divides(const fdm_problem *p, struct hopper_division division) {
    return division.parts >= 1 && divisible(p) % division.parts == 0 && division.in_turn >= 1 &&
           division.in_turn <= p->batch * p->heads;
}

void hopper_backward_name_parts(const fdm_problem *p, struct hopper_division division, fdm_plan *plan) {
    const size_t code = strlen(plan->choice), reason = strlen(plan->reason);
    if (division.parts == 1)
        return;
    snprintf(plan->choice + code, sizeof plan->choice - code, "_Parts%d", division.parts);
    snprintf(plan->reason + reason, sizeof plan->reason - reason,
             "; groups of %lld heads in %d parts, whose sums are added: more blocks, which end together",
             (long long)(p->heads / p->heads_kv), division.parts);
}

struct gpu_backward_needs hopper_backward_needs(const fdm_problem *p, int32_t row_step, int32_t sums_dq,
                                                int32_t parts) {
    return (struct gpu_backward_needs){.row_step = row_step,
                                       .head_dim = hopper_backward_padded(p->head_dim),
                                       .head_dim_v = hopper_backward_padded(p->head_dim_v),
                                       .sums_dq = sums_dq,
                                       .group_parts = parts,
                                       .lse_factor = LOG2_E};
}

enum { ROWS_OF_A_STEP = 64 };

fdm_status hopper_backward_maps(const fdm_plan *plan, const struct attention *attention, int32_t block_n,
                                struct hopper_backward_params *params) {
    const fdm_problem *p = attention->problem;
    const int64_t rows_q = p->varlen ? p->total_q : p->seqlen_q, rows_k = p->varlen ? p->total_k : p->seqlen_k;
    int32_t count = 4;
    struct cuda_tensor_layout layouts[6] = {
        tile_rows_layout(p, &attention->q, p->head_dim, rows_q, p->heads, ROWS_OF_A_STEP),
        tile_rows_layout(p, &attention->k, p->head_dim, rows_k, p->heads_kv, block_n),
        tile_rows_layout(p, &attention->v, p->head_dim_v, rows_k, p->heads_kv, block_n),
        tile_rows_layout(p, &attention->dout, p->head_dim_v, rows_q, p->heads, ROWS_OF_A_STEP)};
    struct cuda_tensor_map maps[6];
    if (gpu_mask_rows(p))
        layouts[count++] = tile_scores_layout(&attention->mask, p->mask_shape, FDM_BOOL, ROWS_OF_A_STEP);
    if (gpu_bias_rows(p))
        layouts[count++] = tile_scores_layout(&attention->bias, p->bias_shape, p->bias_dtype, ROWS_OF_A_STEP);
    const fdm_status status = cuda_tensor_maps_make(plan->device.index, layouts, count, maps);
    if (status)
        return status;
    params->q_map = maps[0];
    params->k_map = maps[1];
    params->v_map = maps[2];
    params->dout_map = maps[3];
    params->mask_map = maps[gpu_mask_rows(p) ? 4 : 0];
    params->bias_map = maps[count - 1];
    return FDM_OK;
}

int64_t hopper_backward_order(const fdm_problem *p, int32_t block_n, struct hopper_division division, int sorted,
                              struct hopper_backward_params *params) {
    params->key_blocks = (int32_t)tiles_of(p->seqlen_k, block_n);
    params->heads_in_turn = division.in_turn;
    return (sorted ? gpu_round_up(p->seqlen_k, KEY_SORT_KEYS) / block_n : params->key_blocks) * p->heads_kv * p->batch *
           division.parts;
}
