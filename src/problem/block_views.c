/* block_views.c: checks a block mask, finds the size of its blocks, and resolves it to an address and strides. */
#include "problem/block_views.h"

#include "base/error.h"
#include "problem/tensor.h"

static int64_t blocks_of(int64_t length, int32_t size) { return (length + size - 1) / size; }

fdm_status block_mask_validate(const fdm_problem *p) {
    if (!p->block_mask_size)
        return FDM_OK;
    if (p->block_mask_size != 64 && p->block_mask_size != 128)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "block_mask_size is %d; it must be 64 or 128, or 0 without a block mask", p->block_mask_size);
    if (p->block_mask_batch != 1 && p->block_mask_batch != p->batch)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "block_mask has batch %d; it must be 1 or %lld",
                         p->block_mask_batch, (long long)p->batch);
    if (p->block_mask_heads != 1 && p->block_mask_heads != p->heads && p->block_mask_heads != p->heads_kv)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "block_mask has %d heads; it must have 1, %lld or %lld",
                         p->block_mask_heads, (long long)p->heads_kv, (long long)p->heads);
    return FDM_OK;
}

/* Where both sizes give the same shape there is one block, and the size does not matter. */
static fdm_status find_size(const fdm_tensor *mask, fdm_problem *p) {
    for (int32_t size = 64; size <= 128; size *= 2)
        if (mask->shape[2] == blocks_of(p->seqlen_q, size) && mask->shape[3] == blocks_of(p->seqlen_k, size)) {
            p->block_mask_size = size;
            return FDM_OK;
        }
    char text[96];
    return error_set(FDM_ERROR_INVALID_ARGUMENT,
                     "block_mask has shape %s; beside a query length of %lld and a key length of %lld its axes 2 and 3 "
                     "must be [%lld, %lld] for blocks of 64, or [%lld, %lld] for blocks of 128",
                     tensor_shape_text(text, sizeof text, mask->shape, 4), (long long)p->seqlen_q,
                     (long long)p->seqlen_k, (long long)blocks_of(p->seqlen_q, 64),
                     (long long)blocks_of(p->seqlen_k, 64), (long long)blocks_of(p->seqlen_q, 128),
                     (long long)blocks_of(p->seqlen_k, 128));
}

static int32_t small_extent(int64_t extent) { return extent > INT32_MAX ? INT32_MAX : (int32_t)extent; }

fdm_status block_mask_resolve(const fdm_tensors *t, fdm_problem *p, struct attention *a) {
    const fdm_tensor *mask = t->block_mask;
    if (!mask)
        return FDM_OK;
    fdm_status status = tensor_check(mask, "block_mask", 4, TENSOR_INPUT, 0);
    if (!status)
        status = tensor_expect_dtype(mask, "block_mask", FDM_BOOL);
    if (status || (status = find_size(mask, p)))
        return status;
    p->block_mask_batch = small_extent(mask->shape[0]);
    p->block_mask_heads = small_extent(mask->shape[1]);
    if ((status = block_mask_validate(p)))
        return status;
    a->block_mask = (struct score_view){.data = tensor_data(mask),
                                        .batch = tensor_stride(mask, 0),
                                        .head = tensor_stride(mask, 1),
                                        .row = tensor_stride(mask, 2),
                                        .key = tensor_stride(mask, 3),
                                        .group = p->heads / p->block_mask_heads};
    return FDM_OK;
}
