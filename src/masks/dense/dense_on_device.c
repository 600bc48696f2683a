/* dense_on_device.c: the parameters and launches of intervals_to_mask.cu, create_mask.cu, blocks_from_lists.cu, and
 * block_mask.cu for a mask of its own. */
#include "masks/dense/dense_on_device.h"

#include "base/error.h"
#include "base/half.h"
#include "base/integers.h"
#include "gpu/gpu_family.h"
#include "masks/dense/dense_params.h"
#include "masks/topk/topk_on_device.h"
#include "problem/tensor.h"

void intervals_to_mask_request(struct cuda_kernel_request *request) {
    *request = (struct cuda_kernel_request){
        .file = "masks/dense/intervals_to_mask.cu", .entry = "intervals_to_mask", .threads = TO_MASK_THREADS};
}

void blocks_from_lists_request(struct cuda_kernel_request *request) {
    *request = (struct cuda_kernel_request){
        .file = "masks/dense/blocks_from_lists.cu", .entry = "blocks_from_lists", .threads = LISTS_THREADS};
}

int32_t create_mask_threads(int64_t num_keys) { return num_keys <= 2048 ? 128 : 1024; }

void create_mask_request(fdm_dtype dtype, int32_t threads, struct cuda_kernel_request *request) {
    *request =
        (struct cuda_kernel_request){.file = "masks/dense/create_mask.cu", .entry = "create_mask", .threads = threads};
    GPU_SET_CONSTANTS(request, TOPK_CONSTANTS, .DTYPE = gpu_dtype(dtype), .CHUNK = threads);
}

static struct dense_mask dense_of(const fdm_tensor *t) {
    return (struct dense_mask){(uint8_t *)tensor_data(t), tensor_stride(t, 0), tensor_stride(t, 1), tensor_stride(t, 2),
                               tensor_stride(t, 3)};
}

static int is_empty(const fdm_tensor *mask) {
    return mask->shape[0] == 0 || mask->shape[1] == 0 || mask->shape[2] == 0 || mask->shape[3] == 0;
}

static struct topk_tensor pair_of(const fdm_tensor *t) {
    return (struct topk_tensor){(int32_t *)(void *)tensor_data(t), tensor_stride(t, 0), tensor_stride(t, 1),
                                tensor_stride(t, 2)};
}

fdm_status intervals_to_mask_on_device(const fdm_tensor *start, const fdm_tensor *end, const fdm_tensor *mask,
                                       void *stream) {
    struct cuda_kernel_request request;
    if (is_empty(mask))
        return FDM_OK;
    const struct dense_mask m = dense_of(mask);
    const uintptr_t steps = (uintptr_t)m.data | (uintptr_t)m.batch | (uintptr_t)m.head | (uintptr_t)m.row;
    struct to_mask_params params = {.start = pair_of(start),
                                    .end = pair_of(end),
                                    .mask = m,
                                    .seqlen_q = (int32_t)mask->shape[2],
                                    .num_keys = (int32_t)mask->shape[3],
                                    .num_heads = (int32_t)mask->shape[1],
                                    .row_groups = (int32_t)gpu_ceil_div(mask->shape[2], TO_MASK_ROWS),
                                    .key_groups = (int32_t)gpu_ceil_div(mask->shape[3], TO_MASK_THREADS * TO_MASK_KEYS),
                                    .words =
                                        m.key == 1 && steps % TO_MASK_KEYS == 0 && mask->shape[3] % TO_MASK_KEYS == 0};
    params.num_items = mask->shape[0] * mask->shape[1] * params.row_groups * params.key_groups;
    intervals_to_mask_request(&request);
    return cuda_run(mask->device.index, &request, gpu_grid(params.num_items), &params, sizeof params, stream);
}

fdm_status blocks_on_device(const fdm_tensor *mask, int64_t block_q, int64_t block_k, const fdm_tensor *blocks,
                            void *stream) {
    struct cuda_kernel_request request;
    const struct cuda_kernel *kernel;
    const struct dense_mask m = dense_of(mask);
    const struct gpu_scores scores = {
        .data = (const char *)m.data, .batch = m.batch, .head = m.head, .row = m.row, .key = m.key};
    const int64_t rows = smaller(block_q, mask->shape[2]), keys = smaller(block_k, mask->shape[3]);
    if (is_empty(mask))
        return FDM_OK;
    if (rows * keys > INT32_MAX)
        return error_set(FDM_ERROR_UNSUPPORTED,
                         "blocks are %lld x %lld; on CUDA devices they have fewer than 2^31 pairs", (long long)rows,
                         (long long)keys);
    block_mask_request(&request);
    fdm_status status = cuda_kernels_get(mask->device.index, &request, 1, &kernel);
    if (status)
        return status;
    return block_mask_of(kernel, &scores, mask->shape[0], mask->shape[1], mask->shape[2], mask->shape[3], (int32_t)rows,
                         (int32_t)keys, (uint8_t *)tensor_data(blocks), blocks->shape[3], stream);
}

fdm_status blocks_from_lists_on_device(const fdm_tensor *counts, const fdm_tensor *indices, const fdm_tensor *blocks,
                                       void *stream) {
    struct cuda_kernel_request request;
    if (is_empty(blocks))
        return FDM_OK;
    struct list_params params = {.blocks = dense_of(blocks),
                                 .counts = pair_of(counts),
                                 .indices = (const int32_t *)(const void *)tensor_data(indices),
                                 .index_batch = tensor_stride(indices, 0),
                                 .index_head = tensor_stride(indices, 1),
                                 .index_row = tensor_stride(indices, 2),
                                 .index_entry = tensor_stride(indices, 3),
                                 .num_lists = blocks->shape[0] * blocks->shape[1] * blocks->shape[2],
                                 .num_heads = (int32_t)blocks->shape[1],
                                 .num_rows = (int32_t)blocks->shape[2],
                                 .num_keys = (int32_t)blocks->shape[3],
                                 .room = (int32_t)smaller(indices->shape[3], INT32_MAX)};
    params.num_groups = gpu_ceil_div(params.num_lists, LISTS_THREADS / 32);
    blocks_from_lists_request(&request);
    return cuda_run(blocks->device.index, &request, gpu_grid(params.num_groups), &params, sizeof params, stream);
}

/* As ordered() of topk_order.cuh; of a value of the dtype. */
static uint32_t order_of(double value, fdm_dtype dtype) {
    const float x = (float)value;
    const uint32_t sign = dtype == FDM_FLOAT32 ? 0x80000000u : 0x8000u;
    const uint32_t bits = x == 0                 ? 0
                          : dtype == FDM_FLOAT32 ? float_to_bits(x)
                          : dtype == FDM_FLOAT16 ? float_to_float16(x)
                                                 : float_to_bfloat16(x);
    return bits ^ (bits & sign ? sign | (sign - 1) : sign);
}

fdm_status create_mask_on_device(const struct mask_source *source, const struct mask_choice *choice,
                                 const fdm_tensor *mask, void *stream) {
    struct cuda_kernel_request request;
    const fdm_dtype dtype = fdm_dtype_of(source->bias);
    const int64_t *t = source->bias_strides, *s = source->shown_strides, keys = mask->shape[3];
    if (is_empty(mask))
        return FDM_OK;
    const struct create_mask_params params = {.bias = tensor_data(source->bias),
                                              .bias_batch = t[0],
                                              .bias_head = t[1],
                                              .bias_row = t[2],
                                              .bias_key = t[3],
                                              .shown =
                                                  source->shown ? (const uint8_t *)tensor_data(source->shown) : NULL,
                                              .shown_batch = s[0],
                                              .shown_head = s[1],
                                              .shown_row = s[2],
                                              .shown_key = s[3],
                                              .mask = dense_of(mask),
                                              .num_rows = mask->shape[0] * mask->shape[1] * mask->shape[2],
                                              .hidden = order_of(choice->hidden_bias, dtype),
                                              .window = (int32_t)smaller(choice->window, INT32_MAX),
                                              .block_size = (int32_t)smaller(choice->block_size, INT32_MAX),
                                              .seqlen_q = (int32_t)mask->shape[2],
                                              .num_keys = (int32_t)keys,
                                              .num_heads = (int32_t)mask->shape[1],
                                              .first_shown = (int32_t)source->first_shown,
                                              .index_bits = topk_index_bits(keys)};
    create_mask_request(dtype, create_mask_threads(keys), &request);
    return cuda_run(mask->device.index, &request, gpu_grid(params.num_rows), &params, sizeof params, stream);
}
