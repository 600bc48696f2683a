/* topk.c: exact causal top-W of a per-key bias as key intervals, one heap of W keys per head. */
#include <math.h>

#include "base/elements.h"
#include "masks/intervals/key_intervals.h"
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
    const float bias = (float)element_load(t->bias, j * t->bias_stride, t->dtype);
    return isnan(bias) ? -INFINITY : bias;
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

size_t topk_workspace_on_cpu(int64_t num_keys) { return (size_t)num_keys * sizeof(struct kept_key); }

void topk_on_cpu(const fdm_tensor *bias, const fdm_tensor *padding, int64_t window, int64_t seqlen_q,
                 const fdm_tensor *start, const fdm_tensor *end, void *workspace) {
    const int64_t num_keys = start->shape[2], bytes = fdm_dtype_bytes(fdm_dtype_of(bias));
    for (int64_t b = 0; b < start->shape[0] && num_keys > 0; b++)
        for (int64_t h = 0; h < start->shape[1]; h++) {
            struct topk_head head = {
                .bias = tensor_data(bias) + (b * tensor_stride(bias, 0) + h * tensor_stride(bias, 1)) * bytes,
                .dtype = fdm_dtype_of(bias),
                .bias_stride = tensor_stride(bias, bias->ndim - 1),
                .num_keys = num_keys,
                .window = window,
                .shift = num_keys - seqlen_q,
                .padding = padding ? (const uint8_t *)tensor_data(padding) + b * tensor_stride(padding, 0) : NULL,
                .padding_stride = padding ? tensor_stride(padding, 1) : 0,
                .start = (int32_t *)tensor_data(start) + b * tensor_stride(start, 0) + h * tensor_stride(start, 1),
                .end = (int32_t *)tensor_data(end) + b * tensor_stride(end, 0) + h * tensor_stride(end, 1),
                .start_stride = tensor_stride(start, 2),
                .end_stride = tensor_stride(end, 2)};
            topk_one_head(&head, workspace);
        }
}
