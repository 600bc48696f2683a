/* kept_plan.c: the mask plan that a caller keeps, on a CUDA device. */
#include "gpu/kept_plan_launch.h"

#include "gpu/tile_plan_launch.h"
#include "problem/visible_tiles.h"

/* Behind the tile plan, which has all other masks, lies the block mask of a mask with rows, while the plan is made. */
int64_t kept_plan_bytes(const fdm_problem *p) {
    const int64_t bytes = gpu_round_up(tile_plan_bytes_of_all(p), 64);
    return bytes + (gpu_mask_rows(p) ? block_mask_bytes(p, TILE_PLAN_TILE, TILE_PLAN_TILE) : 0);
}

struct tile_plan kept_plan_at(const fdm_problem *p, void *memory) {
    return tile_plan_at(p, memory);
}

static void request_of(const char *entry, struct cuda_kernel_request *request) {
    *request =
        (struct cuda_kernel_request){.file = "gpu/kept_plan.cu", .entry = entry, .threads = 32 * MASK_PLAN_WARPS};
}

static void add_join(struct gpu_launches *l, const struct tile_plan *plan, const struct gpu_forward_params *a) {
    const struct mask_plan_extents e = mask_plan_extents_of(l->problem);
    const struct join_plan_params params = {.plan = *plan,
                                            .block_mask = a->block_mask,
                                            .block_mask_batch = a->block_mask_batch,
                                            .block_mask_head = a->block_mask_head,
                                            .block_mask_row = a->block_mask_row,
                                            .num_words = e.batches * e.heads * e.row_tiles * e.key_words,
                                            .block_mask_group = a->block_mask_group,
                                            .heads = (int32_t)e.heads,
                                            .num_tiles = (int32_t)gpu_ceil_div(a->seqlen_k, TILE_PLAN_TILE)};
    request_of("join_mask_plan", gpu_add_kernel(l));
    gpu_add_launch(l, (struct gpu_launch){.grid = {gpu_grid(gpu_ceil_div(params.num_words, MASK_PLAN_WARPS))},
                                          .params = &params,
                                          .params_bytes = sizeof params});
}

fdm_status kept_plan_make(const struct attention *attention, int32_t device, void *memory, void *stream) {
    const fdm_problem *p = attention->problem;
    struct gpu_launches l;
    struct gpu_forward_params a;
    struct tile_plan plan;
    struct cuda_kernel_request reader;
    const struct cuda_kernel *kernel;
    request_of("mask_plan_blocks", &reader);
    const fdm_status status = cuda_kernels_get(device, &reader, 1, &kernel);
    if (status)
        return status;
    gpu_launches_begin(&l, device, p, attention, memory);
    gpu_fill_forward(attention, &a);
    tile_plan_add_of_all(&l, &a, memory, &plan);
    if (gpu_mask_rows(p)) {
        block_mask_add(&l, TILE_PLAN_TILE, TILE_PLAN_TILE, (char *)memory + gpu_round_up(tile_plan_bytes_of_all(p), 64),
                       &a);
        add_join(&l, &plan, &a);
    }
    return gpu_launches_run(&l, stream);
}

int kept_plan_add_blocks(struct gpu_launches *l, int32_t block_m, int32_t block_n, int64_t batches, int64_t heads,
                         uint8_t *block_mask, int64_t row_bytes) {
    const fdm_problem *p = l->problem;
    const struct mask_plan_extents e = mask_plan_extents_of(p);
    if (!l->attention || !l->attention->mask_plan || e.batches != batches || e.heads != heads)
        return 0;
    struct plan_blocks_params params = {.plan = kept_plan_at(p, l->attention->mask_plan),
                                        .block_mask = block_mask,
                                        .row_bytes = row_bytes,
                                        .row_blocks = (int32_t)gpu_ceil_div(p->seqlen_q, block_m),
                                        .num_tiles = (int32_t)gpu_ceil_div(p->seqlen_k, block_n),
                                        .block_m = block_m,
                                        .block_n = block_n,
                                        .seqlen_k = (int32_t)p->seqlen_k};
    params.words = (int32_t)gpu_ceil_div(params.num_tiles, 32);
    params.num_items = batches * heads * params.row_blocks * params.words;
    request_of("mask_plan_blocks", gpu_add_kernel(l));
    gpu_add_launch(l, (struct gpu_launch){.grid = {gpu_grid(gpu_ceil_div(params.num_items, MASK_PLAN_WARPS))},
                                          .params = &params,
                                          .params_bytes = sizeof params});
    return 1;
}
