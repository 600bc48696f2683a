/* hopper_gradients.c: what hopper_backward.c and hopper_wide.c share. */
#include "families/hopper/hopper_gradients.h"

#include <stdio.h>

#include "base/error.h"
#include "families/hopper/hopper_maps.h"
#include "gpu/key_sort.h"

int32_t hopper_backward_padded(int64_t head_dim) { return (int32_t)gpu_round_up(head_dim, 32); }

const char *hopper_backward_refusal(const fdm_problem *p, int32_t head_dim_max, char *text, size_t size) {
    if (gpu_dtype(p->dtype) < 0)
        return "it takes float16 and bfloat16";
    if (p->head_dim > head_dim_max || p->head_dim_v > head_dim_max) {
        snprintf(text, size, "head dims are at most %d", head_dim_max);
        return text;
    }
    if (!p->q_mappable || !p->keys_mappable)
        return "TMA needs strides above 0 and below 2^40 bytes";
    if (p->batch < 1 || p->heads < 1 || p->seqlen_q < 1 || p->seqlen_k < 1)
        return "there is nothing to load";
    return gpu_backward_refusal(p);
}

const char *hopper_backward_passed_over(const fdm_device *device, const fdm_problem *p, int32_t block_n) {
    const int64_t blocks = (p->seqlen_k + block_n - 1) / block_n * p->heads_kv * p->batch;
    return p->heads > p->heads_kv && 2 * blocks < device->num_sms
               ? "blocks of keys are few, and it does not divide the query heads that share them"
               : NULL;
}

struct gpu_backward_needs hopper_backward_needs(const fdm_problem *p, int32_t row_step, int32_t sums_dq) {
    return (struct gpu_backward_needs){.row_step = row_step,
                                       .head_dim = hopper_backward_padded(p->head_dim),
                                       .head_dim_v = hopper_backward_padded(p->head_dim_v),
                                       .sums_dq = sums_dq,
                                       .group_parts = 1,
                                       .lse_factor = 1.4426950408889634f};
}

enum { ROWS_OF_A_STEP = 64 };

fdm_status hopper_backward_maps(const fdm_plan *plan, const struct attention *attention,
                                struct hopper_backward_params *params) {
    const fdm_problem *p = attention->problem;
    int32_t count = 4;
    struct cuda_tensor_layout layouts[6] = {
        hopper_rows_layout(p, &attention->q, p->head_dim, p->seqlen_q, p->heads, ROWS_OF_A_STEP),
        hopper_rows_layout(p, &attention->k, p->head_dim, p->seqlen_k, p->heads_kv, plan->block_n),
        hopper_rows_layout(p, &attention->v, p->head_dim_v, p->seqlen_k, p->heads_kv, plan->block_n),
        hopper_rows_layout(p, &attention->dout, p->head_dim_v, p->seqlen_q, p->heads, ROWS_OF_A_STEP)};
    struct cuda_tensor_map maps[6];
    if (gpu_mask_rows(p))
        layouts[count++] = hopper_scores_layout(&attention->mask, p->mask_shape, FDM_BOOL, ROWS_OF_A_STEP);
    if (gpu_bias_rows(p))
        layouts[count++] = hopper_scores_layout(&attention->bias, p->bias_shape, p->bias_dtype, ROWS_OF_A_STEP);
    if (!p->aligned || !p->q_mappable || !p->keys_mappable || (count > 4 && !p->scores_mappable))
        return error_set(
            FDM_ERROR_INVALID_ARGUMENT,
            "the plan is for tensors at multiples of 16 bytes that a tensor map can describe (no stride of "
            "0, none of 2^40 bytes or more), but these are not");
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

/* Under a causal mask or window, or where keys are sorted, as many heads take turns as leave their rows and sums of dQ
 * in so much of L2. Sorted keys: all of them up to so much, as the longest walks begin first and the last then end
 * sooner (measured, beside turns by L2_BYTES: 0.50 and 0.62 ms at 134 MB, 5.6 and 5.4 ms at 537). */
enum { L2_BYTES = 24 << 20, SORTED_BYTES = 192 << 20 };

int64_t hopper_backward_order(const fdm_plan *plan, const fdm_problem *p, int sorted,
                              struct hopper_backward_params *params) {
    const int64_t head_bytes = p->heads / p->heads_kv * p->seqlen_q * (6 * p->head_dim + 2 * p->head_dim_v);
    const int64_t heads = p->heads_kv * p->batch, fit = L2_BYTES / head_bytes;
    const int64_t in_turn = sorted && heads * head_bytes <= SORTED_BYTES ? heads : fit;
    params->key_blocks = (int32_t)((p->seqlen_k + plan->block_n - 1) / plan->block_n);
    params->heads_in_turn = (int32_t)(in_turn < 1 ? 1 : in_turn < heads ? in_turn : heads);
    return (sorted ? gpu_round_up(p->seqlen_k, KEY_SORT_KEYS) / plan->block_n : params->key_blocks) * heads;
}
