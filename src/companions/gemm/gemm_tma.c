/* gemm_tma.c: the maps and the launch of kernels whose tiles come by TMA. */
#include "companions/gemm/gemm_plan.h"

const char *gemm_tma_refusal(const fdm_gemm_problem *p) {
    if (p->k == 0)
        return "there is nothing to multiply";
    if (p->accumulate_float16)
        return "it sums in float32";
    if (!p->mappable)
        return "addresses and strides of A, B and C must be multiples of 16 bytes for TMA";
    if (p->n % 8) /* on an H200 TMA wrote beside a row of one element */
        return "rows of C must be multiples of 16 bytes, as TMA writes whole ones";
    return NULL;
}

/* Of a cluster's height. */
static int64_t row_tiles_of(const fdm_gemm_problem *p, const struct gemm_tma_tile *t) {
    return ceil_div(p->m, (int64_t)t->block_m * t->cluster);
}
int64_t gemm_tma_steps(const fdm_gemm_problem *p) { return ceil_div(p->k, GEMM_TMA_BLOCK_K); }
int64_t gemm_tma_items(const fdm_gemm_problem *p, const struct gemm_tma_tile *t) {
    return row_tiles_of(p, t) * ceil_div(p->n, t->block_n) * t->splits * p->batch;
}

/* A matrix whose contiguous axis is the inner one, in boxes of `width` of it by `box`. */
static struct cuda_tensor_layout layout_of(const fdm_gemm_problem *p, const struct gemm_matrix *x, int64_t inner,
                                           int64_t outer, int64_t outer_stride, int32_t width, int32_t box,
                                           int batched) {
    return (struct cuda_tensor_layout){
        .type = p->dtype == FDM_FLOAT16 ? CUDA_MAP_FLOAT16 : CUDA_MAP_BFLOAT16,
        .rank = 3,
        .address = x->data,
        .extents = {inner, outer, batched ? p->batch : 1},
        .stride_bytes = {2, outer > 1 ? outer_stride * 2 : 16, batched ? x->batch * 2 : 16},
        .box = {width, box, 1},
        .swizzle_bytes = 2 * width,
        .l2_bytes = 256};
}

fdm_status gemm_tma_launch(const fdm_gemm_plan *plan, const struct cuda_kernel *kernel, const struct gemm_tma_tile *t,
                           const struct gemm_tma_grid *grid, const struct gemm_params *params, void *stream) {
    const fdm_gemm_problem *p = &plan->problem;
    struct cuda_tensor_map maps[3];
    struct gemm_tma_params a = {.in = *params,
                                .a_rows = t->a_rows,
                                .a_batched = p->batch > 1 && params->a.batch != 0,
                                .b_batched = p->batch > 1 && params->b.batch != 0,
                                .row_tiles = (int32_t)row_tiles_of(p, t),
                                .column_tiles = (int32_t)ceil_div(p->n, t->block_n),
                                .items = (int32_t)gemm_tma_items(p, t),
                                .steps = (int32_t)gemm_tma_steps(p)};
    a.steps_per_split = (int32_t)ceil_div(a.steps, t->splits);
    const int32_t k = GEMM_TMA_BLOCK_K;
    const struct cuda_tensor_layout layouts[3] = {
        p->a_rows_contiguous ? layout_of(p, &params->a, p->k, p->m, params->a.row, 64, a.a_rows, a.a_batched)
                             : layout_of(p, &params->a, p->m, p->k, params->a.column, 64, k, a.a_batched),
        p->b_rows_contiguous ? layout_of(p, &params->b, p->n, p->k, params->b.row, 64, k / t->cluster, a.b_batched)
                             : layout_of(p, &params->b, p->k, p->n, params->b.column, 64, t->b_columns, a.b_batched),
        layout_of(p, &params->out, p->n, p->m, params->out.row, t->out_columns, t->out_rows, p->batch > 1)};
    const fdm_status status = cuda_tensor_maps_make(plan->choice.device.index, layouts, 3, maps);
    if (status)
        return status;
    a.a_map = maps[0], a.b_map = maps[1], a.out_map = maps[2];
    const struct cuda_launch launch = {.kernel = kernel,
                                       .grid = {(uint32_t)grid->blocks, 1, 1},
                                       .threads = (uint32_t)grid->threads,
                                       .cluster = (uint32_t)t->cluster,
                                       .programmatic_launch = grid->early,
                                       .stream = stream,
                                       .arguments = &a,
                                       .arguments_bytes = sizeof a};
    return cuda_launch(&launch);
}
