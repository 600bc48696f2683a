/* intervals_on_device.c: the parameters and launches of interval_rules.cu, key_rules.cu and intervals_from_mask.cu. */
#include "masks/intervals/intervals_on_device.h"

#include "base/error.h"
#include "masks/intervals/interval_params.h"
#include "masks/intervals/key_rules_params.h"
#include "masks/topk/topk_on_device.h"
#include "problem/tensor.h"

void interval_rules_request(struct cuda_kernel_request *request) {
    *request = (struct cuda_kernel_request){
        .file = "masks/intervals/interval_rules.cu", .entry = "interval_rules", .threads = INTERVAL_THREADS};
}

void key_rules_request(struct cuda_kernel_request *request) {
    *request = (struct cuda_kernel_request){
        .file = "masks/intervals/key_rules.cu", .entry = "key_rules", .threads = KEY_RULES_THREADS};
}

void intervals_from_mask_request(struct cuda_kernel_request *request) {
    *request = (struct cuda_kernel_request){.file = "masks/intervals/intervals_from_mask.cu",
                                            .entry = "intervals_from_mask",
                                            .threads = RUN_KEYS * RUN_SLICES};
}

static fdm_status launch(const struct cuda_kernel_request *request, int32_t device, int64_t blocks, const void *params,
                         size_t bytes, void *stream) {
    if (blocks > INT32_MAX)
        return error_set(FDM_ERROR_UNSUPPORTED,
                         "start has too many heads and keys: %lld blocks of threads would be launched, at most 2^31 - "
                         "1 are",
                         (long long)blocks);
    return cuda_run(device, request, (uint32_t)blocks, params, bytes, stream);
}

static fdm_status launch_rules(struct interval_params *params, const fdm_tensor *start, const fdm_tensor *end,
                               void *stream) {
    struct cuda_kernel_request request;
    const int64_t rows = start->shape[0] * start->shape[1], num_keys = start->shape[2];
    if (rows == 0 || num_keys == 0)
        return FDM_OK;
    if (rows > INT32_MAX)
        return error_set(FDM_ERROR_UNSUPPORTED, "start has %lld heads; fewer than 2^31 are taken", (long long)rows);
    params->start = topk_tensor_of(start);
    params->end = topk_tensor_of(end);
    params->num_keys = (int32_t)num_keys;
    params->num_heads = (int32_t)start->shape[1];
    params->num_rows = (int32_t)rows;
    interval_rules_request(&request);
    return launch(&request, start->device.index, (num_keys + INTERVAL_THREADS - 1) / INTERVAL_THREADS, params,
                  sizeof *params, stream);
}

fdm_status rule_on_device(const struct interval_rule *rule, const fdm_tensor *start, const fdm_tensor *end,
                          void *stream) {
    struct interval_params params = {
        .row_shift = rule->row_shift, .prefix = rule->prefix, .left = rule->left, .right = rule->right};
    return launch_rules(&params, start, end, stream);
}

fdm_status documents_on_device(const fdm_tensor *cu_seqlens, int32_t causal, const fdm_tensor *start,
                               const fdm_tensor *end, void *stream) {
    struct interval_params params = {.cu_seqlens = (const int32_t *)(void *)tensor_data(cu_seqlens),
                                     .cu_stride = tensor_stride(cu_seqlens, 0),
                                     .num_documents = cu_seqlens->shape[0] - 1,
                                     .causal = causal != 0};
    return launch_rules(&params, start, end, stream);
}

static struct key_rule rule_of(struct key_rule_view view) {
    return (struct key_rule){view.data, view.batch, view.head, view.key, (int32_t)view.group};
}

/* start or end: [B, h, Sk], packed [h, total_k]. */
static struct topk_tensor written(const fdm_tensor *t) {
    const int32_t packed = t->ndim == 2;
    return (struct topk_tensor){(int32_t *)(void *)tensor_data(t), packed ? 0 : tensor_stride(t, 0),
                                tensor_stride(t, 1 - packed), tensor_stride(t, 2 - packed)};
}

fdm_status key_rules_on_device(const struct key_rules *r, const fdm_tensor *start, const fdm_tensor *end,
                               void *stream) {
    const int64_t rows = r->cu_seqlens_k ? r->heads : r->batch * r->heads;
    if (rows == 0 || r->keys == 0)
        return FDM_OK;
    if (rows > INT32_MAX)
        return error_set(FDM_ERROR_UNSUPPORTED, "start has %lld heads; fewer than 2^31 are taken", (long long)rows);
    const struct key_rules_params params = {.ids = rule_of(r->ids),
                                            .prefixes = rule_of(r->prefixes),
                                            .windows = rule_of(r->windows),
                                            .given_start = rule_of(r->start),
                                            .given_end = rule_of(r->end),
                                            .cu_seqlens_q = r->cu_seqlens_q,
                                            .cu_seqlens_k = r->cu_seqlens_k,
                                            .start = written(start),
                                            .end = written(end),
                                            .seqlen_q = (int32_t)r->seqlen_q,
                                            .batch = (int32_t)r->batch,
                                            .heads = (int32_t)r->heads,
                                            .keys = (int32_t)r->keys,
                                            .rows = (int32_t)rows};
    struct cuda_kernel_request request;
    key_rules_request(&request);
    return launch(&request, start->device.index, (rows * r->keys + KEY_RULES_THREADS - 1) / KEY_RULES_THREADS, &params,
                  sizeof params, stream);
}

fdm_status runs_on_device(const fdm_tensor *mask, const fdm_tensor *start, const fdm_tensor *end, int32_t *exact,
                          void *stream) {
    struct cuda_kernel_request request;
    const int64_t rows = start->shape[0] * start->shape[1], num_keys = start->shape[2];
    const int64_t groups = (num_keys + RUN_KEYS - 1) / RUN_KEYS;
    const struct run_params params = {.mask = (const uint8_t *)tensor_data(mask),
                                      .mask_batch = tensor_stride(mask, 0),
                                      .mask_head = tensor_stride(mask, 1),
                                      .mask_row = tensor_stride(mask, 2),
                                      .mask_key = tensor_stride(mask, 3),
                                      .start = topk_tensor_of(start),
                                      .end = topk_tensor_of(end),
                                      .exact = exact,
                                      .seqlen_q = (int32_t)mask->shape[2],
                                      .num_keys = (int32_t)num_keys,
                                      .num_heads = (int32_t)start->shape[1],
                                      .groups = (int32_t)groups};
    fdm_status status = cuda_memory_fill_async(start->device.index, exact, 1, sizeof *exact, stream);
    if (status || rows == 0 || num_keys == 0)
        return status;
    intervals_from_mask_request(&request);
    return launch(&request, start->device.index, rows * groups, &params, sizeof params, stream);
}
