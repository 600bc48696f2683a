/* hopper_maps.c: layouts of tensor maps, and the order of key blocks. */
#include "families/hopper/hopper_maps.h"

#include "base/error.h"

int64_t hopper_stride(int64_t extent, int64_t stride, int32_t bytes) { return extent > 1 ? stride * bytes : 16; }

struct cuda_tensor_layout hopper_rows_layout(const fdm_problem *p, const struct matrix_view *view, int64_t columns,
                                             int64_t rows, int64_t heads, int32_t box_rows) {
    return (struct cuda_tensor_layout){.type = p->dtype == FDM_FLOAT16 ? CUDA_MAP_FLOAT16 : CUDA_MAP_BFLOAT16,
                                       .rank = 4,
                                       .address = view->data,
                                       .extents = {columns, rows, heads, p->varlen ? 1 : p->batch},
                                       .stride_bytes = {2, hopper_stride(rows, view->row, 2),
                                                        hopper_stride(heads, view->head, 2),
                                                        p->varlen ? 16 : hopper_stride(p->batch, view->batch, 2)},
                                       .box = {64, box_rows, 1, 1},
                                       .swizzle_bytes = 128,
                                       .l2_bytes = 256};
}

enum { ROWS_OF_A_STEP = 64 };

fdm_status hopper_backward_maps(const fdm_plan *plan, const struct attention *attention,
                                struct hopper_backward_params *params) {
    const fdm_problem *p = attention->problem;
    const struct cuda_tensor_layout layouts[4] = {
        hopper_rows_layout(p, &attention->q, p->head_dim, p->seqlen_q, p->heads, ROWS_OF_A_STEP),
        hopper_rows_layout(p, &attention->k, p->head_dim, p->seqlen_k, p->heads_kv, plan->block_n),
        hopper_rows_layout(p, &attention->v, p->head_dim_v, p->seqlen_k, p->heads_kv, plan->block_n),
        hopper_rows_layout(p, &attention->dout, p->head_dim_v, p->seqlen_q, p->heads, ROWS_OF_A_STEP)};
    struct cuda_tensor_map maps[4];
    if (!p->aligned || !p->q_mappable || !p->keys_mappable)
        return error_set(
            FDM_ERROR_INVALID_ARGUMENT,
            "the plan is for tensors at multiples of 16 bytes that a tensor map can describe (no stride of "
            "0, none of 2^40 bytes or more), but these are not");
    const fdm_status status = cuda_tensor_maps_make(plan->device.index, layouts, 4, maps);
    if (status)
        return status;
    params->q_map = maps[0];
    params->k_map = maps[1];
    params->v_map = maps[2];
    params->dout_map = maps[3];
    return FDM_OK;
}

/* Under a causal mask or window as many heads take turns as leave their rows and sums of dQ in so much of L2. */
enum { L2_BYTES = 24 << 20 };

int64_t hopper_backward_order(const fdm_plan *plan, const fdm_problem *p, struct hopper_backward_params *params) {
    const int64_t head_bytes = p->heads / p->heads_kv * p->seqlen_q * (6 * p->head_dim + 2 * p->head_dim_v);
    const int64_t in_turn = L2_BYTES / head_bytes, heads = p->heads_kv * p->batch;
    params->key_blocks = (int32_t)((p->seqlen_k + plan->block_n - 1) / plan->block_n);
    params->heads_in_turn = (int32_t)(in_turn < 1 ? 1 : in_turn < heads ? in_turn : heads);
    return params->key_blocks * heads;
}
