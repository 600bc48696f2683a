/* hopper_maps.c: the tensor maps of the wgmma forward. */
#include "families/hopper/forward/hopper_maps.h"

#include "gpu/features.h"
#include "gpu/tile_maps.h"

int32_t hopper_part_shift(const fdm_problem *p, int32_t block_n) {
    int32_t shift = 0;
    while (!((p->page_size | block_n) >> shift & 1))
        shift++;
    return shift;
}

/* Heads before rows: a tile has the rows of `packed` heads in turn. */
static void pack_heads(struct cuda_tensor_layout *l, int32_t packed) {
    const int64_t rows = l->extents[1], row_bytes = l->stride_bytes[1];
    l->extents[1] = l->extents[2];
    l->extents[2] = rows;
    l->stride_bytes[1] = l->stride_bytes[2];
    l->stride_bytes[2] = row_bytes;
    l->box[2] = l->box[1] / packed;
    l->box[1] = packed;
}

/* Columns, rows of a page, heads, pages. No kernel reads the map of a cache without rows. */
static void read_pages(const struct attention *attention, const struct matrix_view *view, int32_t part_rows,
                       struct cuda_tensor_layout *l) {
    const fdm_problem *p = attention->problem;
    const int64_t rows = attention->cache.page_rows;
    l->address = rows > 0 ? view->data : attention->q.data;
    l->extents[1] = rows > 0 ? rows : 1;
    l->stride_bytes[1] = tile_map_stride(rows, view->row, 2);
    l->extents[3] = p->num_pages;
    l->stride_bytes[3] = tile_map_stride(p->num_pages, view->batch, 2);
    l->box[1] = part_rows;
}

fdm_status hopper_maps_make(const fdm_plan *plan, const struct attention *attention, int32_t packed,
                            struct hopper_forward_params *params) {
    const fdm_problem *p = attention->problem;
    struct cuda_tensor_layout layouts[5];
    struct cuda_tensor_map maps[5];
    const int64_t rows_q = p->varlen ? p->total_q : p->seqlen_q, rows_k = p->varlen ? p->total_k : p->seqlen_k;
    int32_t count = 3;
    layouts[0] = tile_rows_layout(p, &attention->q, p->head_dim, rows_q, p->heads, plan->block_m);
    if (packed > 1)
        pack_heads(&layouts[0], packed);
    layouts[1] = tile_rows_layout(p, &attention->k, p->head_dim, rows_k, p->heads_kv, plan->block_n);
    layouts[2] = tile_rows_layout(p, &attention->v, p->head_dim_v, rows_k, p->heads_kv, plan->block_n);
    if (p->has_cache) {
        read_pages(attention, &attention->k, 1 << params->part_shift, &layouts[1]);
        read_pages(attention, &attention->v, 1 << params->part_shift, &layouts[2]);
    }
    if (gpu_mask_rows(p))
        layouts[count++] = tile_scores_layout(&attention->mask, p->mask_shape, FDM_BOOL, plan->block_m);
    if (p->has_bias)
        layouts[count++] = tile_scores_layout(&attention->bias, p->bias_shape, p->bias_dtype, plan->block_m);
    fdm_status status = cuda_tensor_maps_make(plan->device.index, layouts, count, maps);
    if (status)
        return status;
    params->q_map = maps[0];
    params->k_map = maps[1];
    params->v_map = maps[2];
    params->mask_map = maps[gpu_mask_rows(p) ? 3 : 0];
    params->bias_map = maps[count - 1];
    return FDM_OK;
}
