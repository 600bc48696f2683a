/* block_mask.c: the block mask of a dense mask and of row intervals on the host: its bytes of workspace and its
 * launches. */
#include "gpu/gpu_family.h"

static int64_t tiles_of(int64_t length, int32_t tile) { return (length + tile - 1) / tile; }

int64_t block_mask_bytes(const fdm_problem *p, int32_t block_m, int32_t block_n) {
    const int64_t row_bytes = gpu_round_up(tiles_of(p->seqlen_k, block_n), BLOCK_MASK_ALIGNMENT);
    return gpu_round_up(p->mask_shape[0] * p->mask_shape[1] * tiles_of(p->seqlen_q, block_m) * row_bytes, 64);
}

void block_mask_request(struct cuda_kernel_request *request) {
    *request = (struct cuda_kernel_request){
        .file = "gpu/block_mask.cu", .entry = "block_mask", .threads = 32 * BLOCK_MASK_WARPS};
}

fdm_status block_mask_of(const struct cuda_kernel *kernel, const struct gpu_scores *mask, int64_t batches,
                         int64_t heads, int64_t seqlen_q, int64_t seqlen_k, int32_t block_m, int32_t block_n,
                         uint8_t *block_mask, int64_t row_bytes, void *stream) {
    const int64_t tiles_k = tiles_of(seqlen_k, block_n), blocks = tiles_of(seqlen_q, block_m);
    if (blocks * tiles_k * batches * heads == 0)
        return FDM_OK;
    const int aligned =
        mask->key == 1 &&
        ((uintptr_t)mask->data | (uintptr_t)mask->row | (uintptr_t)mask->head | (uintptr_t)mask->batch) % 16 == 0;
    struct block_mask_params arguments = {.mask = *mask,
                                          .block_mask = block_mask,
                                          .row_bytes = row_bytes,
                                          .num_groups = tiles_of(tiles_k, BLOCK_MASK_WARPS) * blocks * batches * heads,
                                          .seqlen_q = (int32_t)seqlen_q,
                                          .seqlen_k = (int32_t)seqlen_k,
                                          .num_heads = (int32_t)heads,
                                          .num_tiles = (int32_t)tiles_k,
                                          .num_row_blocks = (int32_t)blocks,
                                          .block_m = block_m,
                                          .block_n = block_n,
                                          .aligned = aligned && block_n % 16 == 0};
    struct cuda_launch launch = {.kernel = kernel,
                                 .grid = {gpu_grid(arguments.num_groups), 1, 1},
                                 .threads = 32 * BLOCK_MASK_WARPS,
                                 .stream = stream,
                                 .arguments = &arguments,
                                 .arguments_bytes = sizeof arguments};
    return cuda_launch(&launch);
}

fdm_status block_mask_launch(const struct cuda_kernel *kernel, const fdm_problem *p, int32_t block_m, int32_t block_n,
                             uint8_t *block_mask, void *stream, struct gpu_forward_params *a) {
    const int64_t blocks = tiles_of(p->seqlen_q, block_m), batches = p->mask_shape[0], heads = p->mask_shape[1];
    const int64_t row_bytes = gpu_round_up(tiles_of(p->seqlen_k, block_n), BLOCK_MASK_ALIGNMENT);
    a->block_mask = block_mask;
    a->block_mask_row = row_bytes;
    a->block_mask_head = heads == 1 ? 0 : blocks * row_bytes;
    a->block_mask_batch = batches == 1 ? 0 : heads * blocks * row_bytes;
    a->block_mask_group = (int32_t)(p->heads / heads);
    return block_mask_of(kernel, &a->mask, batches, heads, a->seqlen_q, a->seqlen_k, block_m, block_n, block_mask,
                         row_bytes, stream);
}

/* ---- with row intervals ---- */

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Batches and heads of row intervals and of the mask beside them. Sequences of different lengths have tiles of their
 * own. */
static int64_t row_batches(const fdm_problem *p) {
    const int own = p->varlen || p->has_seqused_q || p->has_seqused_k || p->has_cache;
    return own ? p->batch : larger(p->row_interval_batch, gpu_mask_rows(p) ? p->mask_shape[0] : 1);
}
static int64_t row_heads(const fdm_problem *p) {
    return larger(p->row_interval_heads, gpu_mask_rows(p) ? p->mask_shape[1] : 1);
}
static int64_t dense_bytes(const fdm_problem *p, int32_t block_m, int32_t block_n) {
    return gpu_mask_rows(p) ? block_mask_bytes(p, block_m, block_n) : 0;
}

int64_t gpu_block_mask_bytes(const fdm_problem *p, int32_t block_m, int32_t block_n) {
    const int64_t row_bytes = gpu_round_up(tiles_of(p->seqlen_k, block_n), BLOCK_MASK_ALIGNMENT);
    const int64_t rows = row_batches(p) * row_heads(p) * tiles_of(p->seqlen_q, block_m) * row_bytes;
    return dense_bytes(p, block_m, block_n) + (p->has_row_intervals ? gpu_round_up(rows, 64) : 0);
}

void row_block_mask_request(const fdm_problem *p, struct cuda_kernel_request *request) {
    gpu_set_problem_constants(request, p, GPU_ALIKE_ALL & ~(GPU_ALIKE_VARLEN | GPU_ALIKE_SEQUSED | GPU_ALIKE_CACHE));
    request->file = "gpu/row_block_mask.cu";
    request->entry = "row_block_mask";
    request->shared_bytes = 0;
    request->threads = 32 * BLOCK_MASK_WARPS;
}

int32_t gpu_block_mask_requests(const fdm_problem *p, struct cuda_kernel_request *requests) {
    int32_t count = 0;
    if (gpu_mask_rows(p))
        block_mask_request(&requests[count++]);
    if (p->has_row_intervals)
        row_block_mask_request(p, &requests[count++]);
    return count;
}

fdm_status row_block_mask_launch(const struct cuda_kernel *kernel, const fdm_problem *p, int32_t block_m,
                                 int32_t block_n, uint8_t *workspace, void *stream, struct gpu_forward_params *a) {
    uint8_t *const block_mask = workspace + dense_bytes(p, block_m, block_n);
    const int64_t batches = row_batches(p), heads = row_heads(p), blocks = tiles_of(p->seqlen_q, block_m);
    const int64_t tiles = tiles_of(p->seqlen_k, block_n), row_bytes = gpu_round_up(tiles, BLOCK_MASK_ALIGNMENT);
    const struct row_block_mask_params arguments = {.in = *a,
                                                    .block_mask = block_mask,
                                                    .row_bytes = row_bytes,
                                                    .num_blocks = blocks * batches * heads,
                                                    .num_heads = (int32_t)heads,
                                                    .num_tiles = (int32_t)tiles,
                                                    .num_row_blocks = (int32_t)blocks,
                                                    .block_m = block_m,
                                                    .block_n = block_n,
                                                    .beside_mask = gpu_mask_rows(p)};
    a->block_mask = block_mask;
    a->block_mask_row = row_bytes;
    a->block_mask_head = heads == 1 ? 0 : blocks * row_bytes;
    a->block_mask_batch = batches == 1 ? 0 : heads * blocks * row_bytes;
    a->block_mask_group = (int32_t)(p->heads / heads);
    if (arguments.num_blocks * tiles == 0)
        return FDM_OK;
    const struct cuda_launch launch = {.kernel = kernel,
                                       .grid = {gpu_grid(arguments.num_blocks), 1, 1},
                                       .threads = 32 * BLOCK_MASK_WARPS,
                                       .stream = stream,
                                       .arguments = &arguments,
                                       .arguments_bytes = sizeof arguments};
    return cuda_launch(&launch);
}

fdm_status gpu_block_mask_launch(const struct cuda_kernel *const *kernels, const fdm_problem *p, int32_t block_m,
                                 int32_t block_n, void *workspace, void *stream, struct gpu_forward_params *a) {
    fdm_status status = FDM_OK;
    if (gpu_mask_rows(p))
        status = block_mask_launch(*kernels++, p, block_m, block_n, workspace, stream, a);
    if (!status && p->has_row_intervals)
        status = row_block_mask_launch(*kernels, p, block_m, block_n, workspace, stream, a);
    return status;
}
