/* topk.c: exact causal top-W of a per-key bias as key intervals, one heap of W keys per head. */
#include <math.h>

#include "base/error.h"
#include "base/half.h"
#include "base/memory.h"
#include "problem/tensor.h"

/* Row i of the prefix sees the W largest of the keys 0..i. The bias does not depend on the row, so a key that has
 * fallen out stays out: pushing keys in order through a heap of the W best, the key that leaves at step i ends at row
 * i. Of two equal biases the smaller index is the larger. */
struct kept_key {
    float bias;
    int32_t index;
};

static int worse(struct kept_key a, struct kept_key b) {
    return a.bias < b.bias || (a.bias == b.bias && a.index > b.index);
}

/* Restores the heap (worst key at the top) after its top was replaced. */
static void sift_down(struct kept_key *heap, int64_t count) {
    struct kept_key moving = heap[0];
    int64_t at = 0;
    for (int64_t child = 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && worse(heap[child + 1], heap[child]))
            child++;
        if (!worse(heap[child], moving))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moving;
}

static void sift_up(struct kept_key *heap, int64_t at) {
    struct kept_key moving = heap[at];
    while (at > 0 && worse(moving, heap[(at - 1) / 2])) {
        heap[at] = heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap[at] = moving;
}

/* One head: biases and outputs by element strides. */
struct topk_head {
    const char *bias;
    fdm_dtype dtype;
    int64_t bias_stride, num_keys, window, shift;
    const uint8_t *padding; /* NULL = every key is real */
    int64_t padding_stride;
    int32_t *start, *end;
    int64_t start_stride, end_stride;
};

/* NaN ranks lowest, with the -infs. */
static float bias_at(const struct topk_head *t, int64_t j) {
    float bias;
    if (t->dtype == FDM_FLOAT32)
        bias = ((const float *)t->bias)[j * t->bias_stride];
    else if (t->dtype == FDM_FLOAT16)
        bias = float16_to_float(((const uint16_t *)t->bias)[j * t->bias_stride]);
    else
        bias = bfloat16_to_float(((const uint16_t *)t->bias)[j * t->bias_stride]);
    return isnan(bias) ? -INFINITY : bias;
}

static int32_t clamp_row(int64_t row) {
    return row > INT32_MAX ? INT32_MAX : row < INT32_MIN ? INT32_MIN : (int32_t)row;
}

static void topk_one_head(const struct topk_head *t, struct kept_key *heap) {
    int64_t kept = 0;
    for (int64_t j = 0; j < t->num_keys; j++) {
        int32_t row = clamp_row(j - t->shift), *end = t->end + j * t->end_stride;
        t->start[j * t->start_stride] = row;
        if (t->padding && !t->padding[j * t->padding_stride]) {
            *end = row; /* start == end: never visible */
            continue;
        }
        struct kept_key key = {bias_at(t, j), (int32_t)j};
        *end = INT32_MAX;
        if (kept < t->window) {
            heap[kept] = key;
            sift_up(heap, kept++);
        } else if (worse(key, heap[0])) {
            *end = row;
        } else {
            t->end[heap[0].index * t->end_stride] = row;
            heap[0] = key;
            sift_down(heap, kept);
        }
    }
}

size_t fdm_topk_intervals_workspace(int64_t seqlen_k) {
    return seqlen_k > 0 ? (size_t)seqlen_k * sizeof(struct kept_key) : 0;
}

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
    if (bias->ndim == 4 && bias->shape[2] != 1)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "bias has extent %lld on axis 2; top-W needs one bias per key, so 1",
                         (long long)bias->shape[2]);
    if (bias->shape[bias->ndim - 1] > INT32_MAX)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "bias has %lld keys; at most 2^31 - 1 are supported",
                         (long long)bias->shape[bias->ndim - 1]);
    return FDM_OK;
}

static fdm_status check_padding(const fdm_tensor *padding, int64_t batch, int64_t num_keys) {
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
    return FDM_OK;
}

static fdm_status check_output(const fdm_tensor *tensor, const char *name, const int64_t shape[3]) {
    char have[96], want[96];
    if (!tensor)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", name);
    fdm_status status = tensor_check(tensor, name, 3, TENSOR_OUTPUT, 0);
    if (status)
        return status;
    if (fdm_dtype_of(tensor) != FDM_INT32)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is %s; it must be int32", name,
                         fdm_dtype_name(fdm_dtype_of(tensor)));
    for (int i = 0; i < 3; i++)
        if (tensor->shape[i] != shape[i])
            return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s has shape %s; it must be %s", name,
                             tensor_shape_text(have, sizeof have, tensor->shape, 3),
                             tensor_shape_text(want, sizeof want, shape, 3));
    return FDM_OK;
}

static void topk_all_heads(const fdm_tensor *bias, const fdm_tensor *padding, fdm_tensor *start, fdm_tensor *end,
                           int64_t window, int64_t shift, struct kept_key *heap) {
    const int64_t num_keys = start->shape[2], bytes = fdm_dtype_bytes(fdm_dtype_of(bias));
    for (int64_t b = 0; b < start->shape[0] && num_keys > 0; b++)
        for (int64_t h = 0; h < start->shape[1]; h++) {
            struct topk_head head = {
                .bias = tensor_data(bias) + (b * tensor_stride(bias, 0) + h * tensor_stride(bias, 1)) * bytes,
                .dtype = fdm_dtype_of(bias),
                .bias_stride = tensor_stride(bias, bias->ndim - 1),
                .num_keys = num_keys,
                .window = window,
                .shift = shift,
                .padding = padding ? (const uint8_t *)tensor_data(padding) + b * tensor_stride(padding, 0) : NULL,
                .padding_stride = padding ? tensor_stride(padding, 1) : 0,
                .start = (int32_t *)tensor_data(start) + b * tensor_stride(start, 0) + h * tensor_stride(start, 1),
                .end = (int32_t *)tensor_data(end) + b * tensor_stride(end, 0) + h * tensor_stride(end, 1),
                .start_stride = tensor_stride(start, 2),
                .end_stride = tensor_stride(end, 2)};
            topk_one_head(&head, heap);
        }
}

fdm_status fdm_topk_intervals(const fdm_tensor *bias, const fdm_tensor *padding, int64_t window, int64_t seqlen_q,
                              fdm_tensor *start, fdm_tensor *end, void *workspace, size_t workspace_bytes) {
    fdm_status status = check_bias(bias);
    if (status)
        return status;
    if (window < 1)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "window is %lld; it must be at least 1", (long long)window);
    if (seqlen_q < 0 || seqlen_q > INT32_MAX)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "seqlen_q is %lld; it must be in 0..%d", (long long)seqlen_q,
                         INT32_MAX);
    int64_t num_keys = bias->shape[bias->ndim - 1], batch = bias->shape[0];
    if (padding) {
        if ((status = check_padding(padding, batch, num_keys)))
            return status;
        batch = padding->shape[0] > batch ? padding->shape[0] : batch;
    }
    const int64_t shape[3] = {batch, bias->shape[1], num_keys};
    if ((status = check_output(start, "start", shape)) || (status = check_output(end, "end", shape)))
        return status;
    size_t needed = fdm_topk_intervals_workspace(num_keys);
    if (workspace && workspace_bytes < needed)
        return error_set(FDM_ERROR_WORKSPACE, "workspace has %zu bytes; %zu are needed", workspace_bytes, needed);
    void *heap = workspace ? workspace : memory_allocate(needed);
    if (!heap)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for a workspace of %zu bytes", needed);
    topk_all_heads(bias, padding, start, end, window, num_keys - seqlen_q, heap);
    if (!workspace)
        memory_release(heap);
    return FDM_OK;
}
