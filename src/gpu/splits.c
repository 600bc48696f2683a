/* splits.c: the workspace of splits along the keys, and the launch that combines their results. */
#include "gpu/splits.h"

/* Of each row and split a maximum and a sum, and a row of O. */
static int64_t rows_bytes(const fdm_problem *p, int32_t splits) {
    return gpu_round_up(splits_rows(p) * splits * 8, 64);
}

int64_t splits_workspace_bytes(const fdm_problem *p, int32_t splits) {
    return rows_bytes(p, splits) + gpu_round_up(splits_rows(p) * splits * p->head_dim_v * 4, 64);
}

void splits_fill(const fdm_problem *p, int32_t splits, char *workspace, struct gpu_forward_params *a) {
    a->num_splits = splits;
    a->partial_rows = (float *)(void *)workspace;
    a->partial_out = (float *)(void *)(workspace + rows_bytes(p, splits));
}

void combine_splits_request(const fdm_problem *p, struct cuda_kernel_request *request) {
    request->file = "gpu/combine_splits.cu";
    request->entry = "combine_splits";
    gpu_set_problem_constants(
        request, p,
        GPU_ALIKE_ALL & ~(GPU_ALIKE_DTYPE | GPU_ALIKE_VARLEN | GPU_ALIKE_SEQUSED | GPU_ALIKE_BIAS | GPU_ALIKE_SINK));
    request->shared_bytes = 0;
    request->threads = 32 * COMBINE_SPLITS_WARPS;
}

void combine_splits_add(struct gpu_launches *l, int early, const struct gpu_forward_params *a) {
    combine_splits_request(l->problem, gpu_add_kernel(l));
    gpu_add_launch(
        l, (struct gpu_launch){
               .grid = {gpu_grid(splits_rows(l->problem))}, .early = early, .params = a, .params_bytes = sizeof *a});
}
