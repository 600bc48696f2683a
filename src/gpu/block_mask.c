/* block_mask.c: the bytes of tiles of a dense mask, of row intervals and of the caller's blocks on the host: their
 * workspace and their launches. */
#include "gpu/gpu_family.h"
#include "gpu/kept_plan_launch.h"

static int64_t tiles_of(int64_t length, int32_t tile) { return (length + tile - 1) / tile; }

int64_t block_mask_bytes(const fdm_problem *p, int32_t block_m, int32_t block_n) {
    const int64_t row_bytes = gpu_round_up(tiles_of(p->seqlen_k, block_n), BLOCK_MASK_ALIGNMENT);
    return gpu_round_up(p->mask_shape[0] * p->mask_shape[1] * tiles_of(p->seqlen_q, block_m) * row_bytes, 64);
}

void block_mask_request(struct cuda_kernel_request *request) {
    *request = (struct cuda_kernel_request){
        .file = "gpu/block_mask.cu", .entry = "block_mask", .threads = 32 * BLOCK_MASK_WARPS};
}

/* Arguments without groups: there is nothing to do. */
static struct block_mask_params arguments_of(const struct gpu_scores *mask, int64_t batches, int64_t heads,
                                             int64_t seqlen_q, int64_t seqlen_k, int32_t block_m, int32_t block_n) {
    const int64_t tiles_k = tiles_of(seqlen_k, block_n), blocks = tiles_of(seqlen_q, block_m);
    const int aligned =
        mask->key == 1 &&
        ((uintptr_t)mask->data | (uintptr_t)mask->row | (uintptr_t)mask->head | (uintptr_t)mask->batch) % 16 == 0;
    return (struct block_mask_params){.mask = *mask,
                                      .num_groups = tiles_of(tiles_k, BLOCK_MASK_WARPS) * blocks * batches * heads,
                                      .seqlen_q = (int32_t)seqlen_q,
                                      .seqlen_k = (int32_t)seqlen_k,
                                      .num_heads = (int32_t)heads,
                                      .num_tiles = (int32_t)tiles_k,
                                      .num_row_blocks = (int32_t)blocks,
                                      .block_m = block_m,
                                      .block_n = block_n,
                                      .aligned = aligned && block_n % 16 == 0};
}

fdm_status block_mask_of(const struct cuda_kernel *kernel, const struct gpu_scores *mask, int64_t batches,
                         int64_t heads, int64_t seqlen_q, int64_t seqlen_k, int32_t block_m, int32_t block_n,
                         uint8_t *block_mask, int64_t row_bytes, void *stream) {
    struct block_mask_params arguments = arguments_of(mask, batches, heads, seqlen_q, seqlen_k, block_m, block_n);
    arguments.block_mask = block_mask;
    arguments.row_bytes = row_bytes;
    struct cuda_launch launch = {.kernel = kernel,
                                 .grid = {gpu_grid(arguments.num_groups), 1, 1},
                                 .threads = 32 * BLOCK_MASK_WARPS,
                                 .stream = stream,
                                 .arguments = &arguments,
                                 .arguments_bytes = sizeof arguments};
    return arguments.num_groups ? cuda_launch(&launch) : FDM_OK;
}

/* Writes the address and strides of a block mask of `batches` batches and `heads` heads to the parameters. */
static void place(const fdm_problem *p, int32_t block_m, int32_t block_n, int64_t batches, int64_t heads,
                  void *block_mask, struct gpu_forward_params *a) {
    const int64_t blocks = tiles_of(p->seqlen_q, block_m);
    a->block_mask = block_mask;
    a->block_mask_row = gpu_round_up(tiles_of(p->seqlen_k, block_n), BLOCK_MASK_ALIGNMENT);
    a->block_mask_head = heads == 1 ? 0 : blocks * a->block_mask_row;
    a->block_mask_batch = batches == 1 ? 0 : heads * blocks * a->block_mask_row;
    a->block_mask_group = (int32_t)(p->heads / heads);
}

void block_mask_add(struct gpu_launches *l, int32_t block_m, int32_t block_n, void *block_mask,
                    struct gpu_forward_params *a) {
    const int64_t batches = l->problem->mask_shape[0], heads = l->problem->mask_shape[1];
    place(l->problem, block_m, block_n, batches, heads, block_mask, a);
    if (kept_plan_add_blocks(l, block_m, block_n, batches, heads, block_mask, a->block_mask_row))
        return;
    struct block_mask_params arguments =
        arguments_of(&a->mask, batches, heads, a->seqlen_q, a->seqlen_k, block_m, block_n);
    arguments.block_mask = block_mask;
    arguments.row_bytes = a->block_mask_row;
    block_mask_request(gpu_add_kernel(l));
    gpu_add_launch(l, (struct gpu_launch){.grid = {gpu_grid(arguments.num_groups)},
                                          .params = &arguments,
                                          .params_bytes = sizeof arguments});
}

/* ---- with row intervals and the caller's blocks ---- */

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Batches and heads of row intervals, of blocks, and of the mask beside them. Sequences of different lengths have tiles
 * of their own. */
static int64_t row_batches(const fdm_problem *p) {
    const int own = p->varlen || p->has_seqused_q || p->has_seqused_k || p->has_cache;
    return own ? p->batch
               : larger(larger(p->row_interval_batch, p->block_mask_batch), gpu_mask_rows(p) ? p->mask_shape[0] : 1);
}
static int64_t row_heads(const fdm_problem *p) {
    return larger(larger(p->row_interval_heads, p->block_mask_heads), gpu_mask_rows(p) ? p->mask_shape[1] : 1);
}
static int64_t dense_bytes(const fdm_problem *p, int32_t block_m, int32_t block_n) {
    return gpu_mask_rows(p) ? block_mask_bytes(p, block_m, block_n) : 0;
}

int64_t gpu_block_mask_bytes(const fdm_problem *p, int32_t block_m, int32_t block_n) {
    const int64_t row_bytes = gpu_round_up(tiles_of(p->seqlen_k, block_n), BLOCK_MASK_ALIGNMENT);
    const int64_t rows = row_batches(p) * row_heads(p) * tiles_of(p->seqlen_q, block_m) * row_bytes;
    return dense_bytes(p, block_m, block_n) + (gpu_row_runs(p) ? gpu_round_up(rows, 64) : 0);
}

static void row_block_mask_request(const fdm_problem *p, struct cuda_kernel_request *request) {
    const uint32_t told =
        GPU_ALIKE_ROW_INTERVALS | GPU_ALIKE_BLOCKS | GPU_ALIKE_VARLEN | GPU_ALIKE_SEQUSED | GPU_ALIKE_CACHE;
    gpu_set_problem_constants(request, p, GPU_ALIKE_ALL & ~told);
    request->file = "gpu/row_block_mask.cu";
    request->entry = "row_block_mask";
    request->shared_bytes = 0;
    request->threads = 32 * BLOCK_MASK_WARPS;
}

/* Behind that of the mask, which is made before. */
static void add_row_runs(struct gpu_launches *l, int32_t block_m, int32_t block_n, uint8_t *block_mask,
                         struct gpu_forward_params *a) {
    const fdm_problem *p = l->problem;
    const int64_t batches = row_batches(p), heads = row_heads(p), blocks = tiles_of(p->seqlen_q, block_m);
    const int64_t tiles = tiles_of(p->seqlen_k, block_n);
    struct row_block_mask_params arguments = {.in = *a,
                                              .block_mask = block_mask,
                                              .num_blocks = tiles ? (int32_t)(blocks * batches * heads) : 0,
                                              .num_heads = (int32_t)heads,
                                              .num_tiles = (int32_t)tiles,
                                              .num_row_blocks = (int32_t)blocks,
                                              .block_m = block_m,
                                              .block_n = block_n,
                                              .beside_mask = gpu_mask_rows(p)};
    place(p, block_m, block_n, batches, heads, block_mask, a);
    arguments.row_bytes = a->block_mask_row;
    row_block_mask_request(p, gpu_add_kernel(l));
    gpu_add_launch(l, (struct gpu_launch){.grid = {gpu_grid(arguments.num_blocks)},
                                          .params = &arguments,
                                          .params_bytes = sizeof arguments});
}

void gpu_block_mask_add(struct gpu_launches *l, int32_t block_m, int32_t block_n, void *workspace,
                        struct gpu_forward_params *a) {
    const fdm_problem *p = l->problem;
    uint8_t *const joined = (uint8_t *)workspace + dense_bytes(p, block_m, block_n);
    if (gpu_row_runs(p)) {
        struct gpu_forward_params of_plan = *a;
        place(p, block_m, block_n, row_batches(p), row_heads(p), joined, &of_plan);
        if (kept_plan_add_blocks(l, block_m, block_n, row_batches(p), row_heads(p), joined, of_plan.block_mask_row)) {
            *a = of_plan;
            return;
        }
    }
    if (gpu_mask_rows(p))
        block_mask_add(l, block_m, block_n, workspace, a);
    if (gpu_row_runs(p))
        add_row_runs(l, block_m, block_n, joined, a);
}
