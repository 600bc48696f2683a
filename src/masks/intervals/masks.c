/* masks.c: builders of key intervals: their arguments are checked here; intervals.c and topk.c make
 * them on the CPU, *_on_device.c on CUDA devices. */
#include "base/error.h"
#include "base/memory.h"
#include "base/struct_bytes.h"
#include "masks/intervals/intervals_on_device.h"
#include "masks/intervals/key_intervals.h"
#include "masks/intervals/key_rules.h"
#include "masks/topk/topk_on_device.h"
#include "problem/tensor.h"

/* ---- checks ---- */

/* The last and the first axes of bias [B|1, h, Sk] or [B|1, h, 1, Sk]. */
static fdm_status check_bias(const fdm_tensor *bias) {
    if (!bias)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "bias is NULL");
    fdm_status status = tensor_check(bias, "bias", bias->ndim == 4 ? 4 : 3, TENSOR_INPUT, 0);
    if (status)
        return status;
    fdm_dtype dtype = fdm_dtype_of(bias);
    if (dtype != FDM_FLOAT32 && dtype != FDM_FLOAT16 && dtype != FDM_BFLOAT16)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "bias is %s; it must be float32, float16 or bfloat16",
                         fdm_dtype_name(dtype));
    if ((status = tensor_check_device_type(bias, "bias")))
        return status;
    if (bias->ndim == 4 && bias->shape[2] != 1)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "bias has extent %lld on axis 2; top-W needs one bias per key, so 1",
                         (long long)bias->shape[2]);
    if (bias->shape[bias->ndim - 1] > INT32_MAX)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "bias has %lld keys; at most 2^31 - 1 are supported",
                         (long long)bias->shape[bias->ndim - 1]);
    return FDM_OK;
}

static fdm_status check_padding(const fdm_tensor *padding, const fdm_tensor *bias) {
    const int64_t batch = bias->shape[0], num_keys = bias->shape[bias->ndim - 1];
    fdm_status status = tensor_check(padding, "padding", 2, TENSOR_INPUT, 0);
    if (status)
        return status;
    if (fdm_dtype_of(padding) != FDM_BOOL)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "padding is %s; it must be bool",
                         fdm_dtype_name(fdm_dtype_of(padding)));
    if ((padding->shape[0] != batch && batch != 1 && padding->shape[0] != 1) || padding->shape[1] != num_keys)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "padding has shape [%lld, %lld]; it must be [%lld, %lld]",
                         (long long)padding->shape[0], (long long)padding->shape[1], (long long)batch,
                         (long long)num_keys);
    return tensor_check_device(padding, "padding", bias, "bias");
}

static fdm_status check_output(const fdm_tensor *tensor, const char *name, const int64_t shape[3]) {
    return tensor_check_as(tensor, name, 3, TENSOR_OUTPUT, FDM_INT32, shape, NULL, NULL);
}

static fdm_status check_seqlen_q(int64_t seqlen_q) {
    if (seqlen_q < 0 || seqlen_q > INT32_MAX)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "seqlen_q is %lld; it must be in 0..%d", (long long)seqlen_q,
                         INT32_MAX);
    return FDM_OK;
}

/* start and end of one shape, [B, h, Sk], on one device. */
static fdm_status check_pair(const fdm_tensor *start, const fdm_tensor *end) {
    if (!start)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "start is NULL");
    if (start->ndim != 3 || !start->shape)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "start has %d axes; it needs 3", start->ndim);
    fdm_status status = check_output(start, "start", start->shape);
    if (status || (status = check_output(end, "end", start->shape)) ||
        (status = tensor_check_device(end, "end", start, "start")) ||
        (status = tensor_check_device_type(start, "start")))
        return status;
    if (start->shape[2] > INT32_MAX)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "start has %lld keys; at most 2^31 - 1 are supported",
                         (long long)start->shape[2]);
    return FDM_OK;
}

/* start and end are written: they lie apart from each other and from what is read, NULL where there is none. */
static fdm_status check_apart(const fdm_tensor *start, const fdm_tensor *end, const fdm_tensor *read,
                              const char *read_name, const fdm_tensor *padding) {
    const struct named_tensor all[] = {
        {read_name, read, 0, 0}, {"padding", padding, 0, 0}, {"start", start, 1, 0}, {"end", end, 1, 0}};
    return tensors_check_apart(all, 4);
}

/* ---- windows, prefixes ---- */

static fdm_status make_by_rule(const struct interval_rule *rule, const fdm_tensor *start, const fdm_tensor *end,
                               void *stream) {
    const fdm_status status = check_apart(start, end, NULL, NULL, NULL);
    if (status)
        return status;
    if (start->device.type == FDM_CUDA)
        return rule_on_device(rule, start, end, stream);
    intervals_by_rule(rule, start, end);
    return FDM_OK;
}

fdm_status fdm_window_intervals(int64_t seqlen_q, int32_t causal, int64_t window_left, int64_t window_right,
                                fdm_tensor *start, fdm_tensor *end, void *stream) {
    fdm_status status = check_pair(start, end);
    if (status || (status = check_seqlen_q(seqlen_q)))
        return status;
    if (window_left < -1 || window_right < -1)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "window is (%lld, %lld); each side must be >= 0, or -1 for unbounded", (long long)window_left,
                         (long long)window_right);
    /* Past either length a window is unbounded, and sums fit below it. */
    const int64_t num_keys = start->shape[2], unbounded = seqlen_q + num_keys, right = causal ? 0 : window_right;
    const int no_right = right < 0 || right > unbounded;
    const struct interval_rule rule = {.row_shift = num_keys - seqlen_q,
                                       .prefix = no_right ? INT64_MAX : 0,
                                       .right = no_right ? 0 : right,
                                       .left = window_left < unbounded ? window_left : -1};
    return make_by_rule(&rule, start, end, stream);
}

fdm_status fdm_prefix_intervals(int64_t seqlen_q, int64_t prefix, fdm_tensor *start, fdm_tensor *end, void *stream) {
    fdm_status status = check_pair(start, end);
    if (status || (status = check_seqlen_q(seqlen_q)))
        return status;
    if (prefix < 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "prefix is %lld; it must be >= 0", (long long)prefix);
    const struct interval_rule rule = {.row_shift = start->shape[2] - seqlen_q, .prefix = prefix, .left = -1};
    return make_by_rule(&rule, start, end, stream);
}

/* ---- documents ---- */

static fdm_status check_offsets(const int32_t *cu_seqlens, int64_t stride, int64_t num_documents, int64_t num_keys) {
    if (cu_seqlens[0] != 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "cu_seqlens starts with %d; it must start with 0", cu_seqlens[0]);
    for (int64_t n = 0; n < num_documents; n++)
        if (cu_seqlens[(n + 1) * stride] < cu_seqlens[n * stride])
            return error_set(FDM_ERROR_INVALID_ARGUMENT,
                             "cu_seqlens falls from %d to %d at index %lld; it must not fall", cu_seqlens[n * stride],
                             cu_seqlens[(n + 1) * stride], (long long)n + 1);
    if (cu_seqlens[num_documents * stride] != num_keys)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "cu_seqlens ends with %d, but start has %lld keys",
                         cu_seqlens[num_documents * stride], (long long)num_keys);
    return FDM_OK;
}

fdm_status fdm_document_intervals(const fdm_tensor *cu_seqlens, int32_t causal, fdm_tensor *start, fdm_tensor *end,
                                  void *stream) {
    if (!cu_seqlens)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "cu_seqlens is NULL");
    fdm_status status = tensor_check(cu_seqlens, "cu_seqlens", 1, TENSOR_INPUT, 0);
    if (status)
        return status;
    if (fdm_dtype_of(cu_seqlens) != FDM_INT32 || cu_seqlens->shape[0] < 1)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "cu_seqlens is %s with %lld elements; it must be int32 with one at "
                         "least",
                         fdm_dtype_name(fdm_dtype_of(cu_seqlens)), (long long)cu_seqlens->shape[0]);
    if ((status = check_pair(start, end)) || (status = tensor_check_device(cu_seqlens, "cu_seqlens", start, "start")) ||
        (status = check_apart(start, end, cu_seqlens, "cu_seqlens", NULL)))
        return status;
    if (start->device.type == FDM_CUDA)
        return documents_on_device(cu_seqlens, causal, start, end, stream);
    const int32_t *offsets = (const int32_t *)(void *)tensor_data(cu_seqlens);
    const int64_t stride = tensor_stride(cu_seqlens, 0), num_documents = cu_seqlens->shape[0] - 1;
    if ((status = check_offsets(offsets, stride, num_documents, start->shape[2])))
        return status;
    intervals_of_documents(offsets, stride, num_documents, causal, start, end);
    return FDM_OK;
}

/* ---- several rules at once ---- */

fdm_status fdm_rule_intervals(const fdm_key_rules *rules, int64_t seqlen_q, fdm_tensor *start, fdm_tensor *end,
                              void *stream) {
    fdm_key_rules room;
    struct key_rules resolved;
    if (!(rules = STRUCT_READ(fdm_key_rules, rules, &room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    const fdm_status status = key_rules_resolve(rules, seqlen_q, start, end, &resolved);
    if (status)
        return status;
    if (start->device.type == FDM_CUDA)
        return key_rules_on_device(&resolved, start, end, stream);
    key_rules_on_cpu(&resolved, start, end);
    return FDM_OK;
}

/* ---- dense masks ---- */

fdm_status fdm_intervals_from_mask(const fdm_tensor *mask, fdm_tensor *start, fdm_tensor *end, int32_t *exact,
                                   void *stream) {
    if (!mask || !exact)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", mask ? "exact" : "mask");
    fdm_status status = tensor_check(mask, "mask", 4, TENSOR_INPUT, 0);
    if (status)
        return status;
    if (fdm_dtype_of(mask) != FDM_BOOL)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "mask is %s; it must be bool", fdm_dtype_name(fdm_dtype_of(mask)));
    const int64_t shape[3] = {mask->shape[0], mask->shape[1], mask->shape[3]};
    if ((status = check_output(start, "start", shape)) || (status = check_pair(start, end)) ||
        (status = tensor_check_device(mask, "mask", start, "start")) || (status = check_seqlen_q(mask->shape[2])) ||
        (status = check_apart(start, end, mask, "mask", NULL)))
        return status;
    const fdm_tensor number = {.data = exact, .dtype = fdm_data_type_of(FDM_INT32)}; /* of no axes */
    const struct named_tensor beside[] = {
        {"mask", mask, 0, 0}, {"start", start, 0, 0}, {"end", end, 0, 0}, {"exact", &number, 1, 0}};
    if ((status = tensors_check_apart(beside, 4)))
        return status;
    if (start->device.type == FDM_CUDA)
        return runs_on_device(mask, start, end, exact, stream);
    *exact = intervals_from_mask(mask, start, end);
    return FDM_OK;
}

/* ---- top-W ---- */

/* B, h and Sk of the intervals; bias and padding are checked. */
static void interval_shape(const fdm_tensor *bias, const fdm_tensor *padding, int64_t shape[3]) {
    shape[0] = padding && bias->shape[0] == 1 ? padding->shape[0] : bias->shape[0];
    shape[1] = bias->shape[1];
    shape[2] = bias->shape[bias->ndim - 1];
}

static size_t workspace_bytes_of(const fdm_tensor *bias, const int64_t shape[3]) {
    if (bias->device.type == FDM_CUDA)
        return topk_workspace_on_device(shape[0] * shape[1], shape[2], topk_cut_of(shape[2]));
    return topk_workspace_on_cpu(shape[2]);
}

size_t fdm_topk_intervals_workspace(const fdm_tensor *bias, const fdm_tensor *padding) {
    int64_t shape[3];
    if (check_bias(bias) || (padding && check_padding(padding, bias)))
        return 0;
    interval_shape(bias, padding, shape);
    return workspace_bytes_of(bias, shape);
}

static fdm_status check_workspace(const fdm_tensor *bias, const void *workspace, size_t bytes, size_t needed) {
    if (workspace && bytes < needed)
        return error_set(FDM_ERROR_WORKSPACE, "workspace has %zu bytes; %zu are needed", bytes, needed);
    if (!workspace && needed > 0 && bias->device.type == FDM_CUDA)
        return error_set(FDM_ERROR_WORKSPACE, "workspace is NULL; on CUDA devices %zu bytes are needed", needed);
    if ((uintptr_t)workspace % 16)
        return error_set(FDM_ERROR_WORKSPACE, "workspace is at %p; it must be a multiple of 16", workspace);
    return FDM_OK;
}

fdm_status fdm_topk_intervals(const fdm_tensor *bias, const fdm_tensor *padding, int64_t window, int64_t seqlen_q,
                              fdm_tensor *start, fdm_tensor *end, void *workspace, size_t workspace_bytes,
                              void *stream) {
    int64_t shape[3];
    fdm_status status = check_bias(bias);
    if (status || (padding && (status = check_padding(padding, bias))))
        return status;
    if (window < 1)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "window is %lld; it must be at least 1", (long long)window);
    if ((status = check_seqlen_q(seqlen_q)))
        return status;
    interval_shape(bias, padding, shape);
    const size_t needed = workspace_bytes_of(bias, shape);
    if ((status = check_output(start, "start", shape)) || (status = check_output(end, "end", shape)) ||
        (status = tensor_check_device(start, "start", bias, "bias")) ||
        (status = tensor_check_device(end, "end", bias, "bias")) ||
        (status = check_apart(start, end, bias, "bias", padding)) ||
        (status = check_workspace(bias, workspace, workspace_bytes, needed)))
        return status;
    if (bias->device.type == FDM_CUDA)
        return topk_on_device(bias, padding, window, seqlen_q, start, end, topk_cut_of(shape[2]), workspace, stream);
    void *memory = workspace ? workspace : memory_allocate(needed);
    if (!memory)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for a workspace of %zu bytes", needed);
    topk_on_cpu(bias, padding, window, seqlen_q, start, end, memory);
    if (!workspace)
        memory_release(memory);
    return FDM_OK;
}
