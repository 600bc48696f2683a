/* block_order.c: the order of blocks of keys on the host: its bytes of workspace, its kernel and its launch. */
#include "gpu/block_order.h"
#include "gpu/gpu_family.h"

int64_t block_order_stride(const fdm_problem *p, int32_t block_n) { return 1 + gpu_ceil_div(p->seqlen_k, block_n); }

static void block_order_request(const fdm_problem *p, struct cuda_kernel_request *request) {
    gpu_set_problem_constants(request, p, GPU_ALIKE_ALL & ~(GPU_ALIKE_WINDOW | GPU_ALIKE_INTERVALS));
    request->file = "gpu/block_order.cu";
    request->entry = "block_order";
    request->threads = BLOCK_ORDER_THREADS;
    request->shared_bytes = 0;
}

void block_order_add(struct gpu_launches *l, const struct gpu_forward_params *a, int32_t block_n, int32_t *order) {
    const fdm_problem *p = l->problem;
    const struct block_order_params params = {.in = *a,
                                              .order = order,
                                              .num_heads = (int32_t)p->interval_heads,
                                              .blocks = (int32_t)gpu_ceil_div(p->seqlen_k, block_n),
                                              .block_n = block_n,
                                              .group = (int32_t)(p->heads / p->interval_heads)};
    block_order_request(p, gpu_add_kernel(l));
    gpu_add_launch(l, (struct gpu_launch){.grid = {gpu_grid(p->interval_batch * p->interval_heads)},
                                          .params = &params,
                                          .params_bytes = sizeof params});
}
