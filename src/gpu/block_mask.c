/* block_mask.c: the block mask of a dense mask on the host: its bytes of workspace and its launch. */
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
    return block_mask_of(kernel, &a->mask, batches, heads, a->seqlen_q, a->seqlen_k, block_m, block_n, block_mask,
                         row_bytes, stream);
}
