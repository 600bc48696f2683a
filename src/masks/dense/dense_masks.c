/* dense_masks.c: builders of dense masks, and of what they show of tiles: their arguments are checked here;
 * dense_on_cpu.c and dense_on_device.c make them. */
#include "masks/dense/dense_on_cpu.h"

#include <math.h>

#include "base/error.h"
#include "base/half.h"
#include "base/memory.h"
#include "masks/dense/dense_on_device.h"
#include "problem/tensor.h"

/* ---- checks ---- */

/* mask [B, h, Sq, Sk] bool, on the CPU or a CUDA device. */
static fdm_status check_mask(const fdm_tensor *mask, enum tensor_role role) {
    if (!mask)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "mask is NULL");
    fdm_status status = tensor_check(mask, "mask", 4, role, 0);
    if (status || (status = tensor_check_device_type(mask, "mask")))
        return status;
    if (fdm_dtype_of(mask) != FDM_BOOL)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "mask is %s; it must be bool", fdm_dtype_name(fdm_dtype_of(mask)));
    for (int axis = 2; axis < 4; axis++)
        if (mask->shape[axis] > INT32_MAX)
            return error_set(FDM_ERROR_INVALID_ARGUMENT,
                             "mask has extent %lld on axis %d; at most 2^31 - 1 is "
                             "supported",
                             (long long)mask->shape[axis], axis);
    return FDM_OK;
}

/* Each axis but the last is as long as mask's, or 1. */
static fdm_status check_broadcast(const fdm_tensor *t, const char *name, const fdm_tensor *mask) {
    for (int axis = 0; axis < t->ndim - 1; axis++)
        if (t->shape[axis] != 1 && t->shape[axis] != mask->shape[axis])
            return error_set(FDM_ERROR_INVALID_ARGUMENT,
                             "%s has extent %lld on axis %d; it must be 1 or %lld, as of "
                             "mask",
                             name, (long long)t->shape[axis], axis, (long long)mask->shape[axis]);
    return tensor_check_device(t, name, mask, "mask");
}

static fdm_status check_bias(const fdm_tensor *bias, const fdm_tensor *mask) {
    if (!bias)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "bias is NULL");
    fdm_status status = tensor_check(bias, "bias", 4, TENSOR_INPUT, 0);
    if (status || (status = check_broadcast(bias, "bias", mask)))
        return status;
    const fdm_dtype dtype = fdm_dtype_of(bias);
    if (dtype != FDM_FLOAT32 && dtype != FDM_FLOAT16 && dtype != FDM_BFLOAT16 && dtype != FDM_FLOAT64)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "bias is %s; it must be floating", fdm_dtype_name(dtype));
    if (dtype == FDM_FLOAT64 && bias->device.type == FDM_CUDA)
        return error_set(FDM_ERROR_UNSUPPORTED, "bias is float64; CUDA devices take float32, float16 and bfloat16");
    if (bias->shape[3] != mask->shape[3])
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "bias has %lld keys, but mask has %lld", (long long)bias->shape[3],
                         (long long)mask->shape[3]);
    return FDM_OK;
}

static fdm_status check_shown(const fdm_tensor *shown, const fdm_tensor *mask) {
    const int64_t keys = mask->shape[3];
    fdm_status status = tensor_check(shown, "attention_mask", shown->ndim == 2 ? 2 : 4, TENSOR_INPUT, 0);
    if (status || (status = check_broadcast(shown, "attention_mask", mask)))
        return status;
    if (fdm_dtype_of(shown) != FDM_BOOL)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "attention_mask is %s; it must be bool",
                         fdm_dtype_name(fdm_dtype_of(shown)));
    const int64_t have = shown->shape[shown->ndim - 1];
    if (shown->ndim == 4 && have != keys && have != 1)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "attention_mask has %lld keys, but mask has %lld", (long long)have,
                         (long long)keys);
    return FDM_OK;
}

/* What is written lies apart from what is read; the second may be NULL. */
static fdm_status check_apart(const fdm_tensor *written, const char *name, const fdm_tensor *first,
                              const char *first_name, const fdm_tensor *second, const char *second_name) {
    const struct named_tensor all[] = {{first_name, first, 0, 0}, {second_name, second, 0, 0}, {name, written, 1, 0}};
    return tensors_check_apart(all, 3);
}

static int is_contiguous(const fdm_tensor *t) {
    int64_t stride = 1;
    int is = 1, is_empty = 0;
    for (int32_t axis = t->ndim - 1; axis >= 0; stride *= t->shape[axis--]) {
        is &= t->shape[axis] == 1 || tensor_stride(t, axis) == stride;
        is_empty |= t->shape[axis] == 0;
    }
    return is || is_empty;
}

/* ---- entries ---- */

fdm_status fdm_intervals_to_mask(const fdm_tensor *start, const fdm_tensor *end, fdm_tensor *mask, void *stream) {
    fdm_status status = check_mask(mask, TENSOR_OUTPUT);
    if (status)
        return status;
    const int64_t shape[3] = {mask->shape[0], mask->shape[1], mask->shape[3]};
    if ((status = tensor_check_as(start, "start", 3, TENSOR_INPUT, FDM_INT32, shape, mask, "mask")) ||
        (status = tensor_check_as(end, "end", 3, TENSOR_INPUT, FDM_INT32, shape, mask, "mask")) ||
        (status = check_apart(mask, "mask", start, "start", end, "end")))
        return status;
    if (mask->device.type == FDM_CUDA)
        return intervals_to_mask_on_device(start, end, mask, stream);
    intervals_to_mask(start, end, mask);
    return FDM_OK;
}

fdm_status fdm_mask_blocks(const fdm_tensor *mask, int64_t block_q, int64_t block_k, fdm_tensor *blocks, void *stream) {
    fdm_status status = check_mask(mask, TENSOR_INPUT);
    if (status)
        return status;
    if (block_q < 1 || block_k < 1 || block_q > INT32_MAX || block_k > INT32_MAX)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "blocks are %lld x %lld; each side must be in 1..2^31 - 1",
                         (long long)block_q, (long long)block_k);
    const int64_t shape[4] = {mask->shape[0], mask->shape[1], (mask->shape[2] + block_q - 1) / block_q,
                              (mask->shape[3] + block_k - 1) / block_k};
    if ((status = tensor_check_as(blocks, "blocks", 4, TENSOR_OUTPUT, FDM_BOOL, shape, mask, "mask")) ||
        (status = check_apart(blocks, "blocks", mask, "mask", NULL, NULL)))
        return status;
    if (!is_contiguous(blocks))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "blocks is not contiguous; it must be");
    if (mask->device.type == FDM_CUDA)
        return blocks_on_device(mask, block_q, block_k, blocks, stream);
    blocks_of_mask(mask, block_q, block_k, blocks);
    return FDM_OK;
}

/* ---- lists of blocks ---- */

static int64_t offset_of(const fdm_tensor *t, const int64_t at[4]) {
    int64_t offset = 0;
    for (int32_t axis = 0; axis < t->ndim; axis++)
        offset += at[axis] * tensor_stride(t, axis);
    return offset;
}

static int32_t number_at(const fdm_tensor *t, const int64_t at[4]) {
    return ((const int32_t *)(const void *)tensor_data(t))[offset_of(t, at)];
}

/* One list, of batch at[0], head at[1] and row at[2]; checks it without `write`. */
static fdm_status read_list(const fdm_tensor *counts, const fdm_tensor *indices, const fdm_tensor *blocks,
                            int64_t at[4], int write) {
    const int32_t count = number_at(counts, at);
    if (count < 0 || count > indices->shape[3])
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "counts holds %d at [%lld, %lld, %lld]; it must be in 0..%lld",
                         count, (long long)at[0], (long long)at[1], (long long)at[2], (long long)indices->shape[3]);
    for (int64_t key = 0; write && key < blocks->shape[3]; key++) {
        at[3] = key;
        tensor_data(blocks)[offset_of(blocks, at)] = 0;
    }
    for (int64_t n = 0; n < count; n++) {
        at[3] = n;
        const int64_t index = number_at(indices, at);
        if (index < 0 || index >= blocks->shape[3])
            return error_set(FDM_ERROR_INVALID_ARGUMENT,
                             "indices holds %lld at [%lld, %lld, %lld, %lld]; blocks has %lld blocks of keys",
                             (long long)index, (long long)at[0], (long long)at[1], (long long)at[2], (long long)n,
                             (long long)blocks->shape[3]);
        at[3] = index;
        if (write)
            tensor_data(blocks)[offset_of(blocks, at)] = 1;
    }
    return FDM_OK;
}

fdm_status fdm_blocks_from_lists(const fdm_tensor *counts, const fdm_tensor *indices, fdm_tensor *blocks,
                                 void *stream) {
    if (!blocks || !indices)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", blocks ? "indices" : "blocks");
    fdm_status status = tensor_check(blocks, "blocks", 4, TENSOR_OUTPUT, 0);
    if (status || (status = tensor_check(indices, "indices", 4, TENSOR_INPUT, 0)))
        return status;
    const int64_t *s = blocks->shape, lists[4] = {s[0], s[1], s[2], indices->shape[3]};
    if ((status = tensor_expect_dtype(blocks, "blocks", FDM_BOOL)) ||
        (status = tensor_check_as(counts, "counts", 3, TENSOR_INPUT, FDM_INT32, lists, blocks, "blocks")) ||
        (status = tensor_check_as(indices, "indices", 4, TENSOR_INPUT, FDM_INT32, lists, blocks, "blocks")) ||
        (status = check_apart(blocks, "blocks", counts, "counts", indices, "indices")))
        return status;
    if (blocks->device.type == FDM_CUDA)
        return blocks_from_lists_on_device(counts, indices, blocks, stream);
    for (int write = 0; write <= 1; write++)
        for (int64_t n = 0; n < s[0] * s[1] * s[2]; n++) {
            int64_t at[4] = {n / s[2] / s[1], n / s[2] % s[1], n % s[2], 0};
            if ((status = read_list(counts, indices, blocks, at, write)))
                return status;
        }
    return FDM_OK;
}

/* ---- dense masks ---- */

/* Rounded to a value of the dtype. */
static double rounded(double x, fdm_dtype dtype) {
    const float f = (float)x;
    return dtype == FDM_FLOAT64   ? x
           : dtype == FDM_FLOAT32 ? f
           : dtype == FDM_FLOAT16 ? float16_to_float(float_to_float16(f))
                                  : bfloat16_to_float(float_to_bfloat16(f));
}

static void fill_strides(const fdm_tensor *t, int64_t strides[4]) {
    for (int axis = 0; axis < 4; axis++)
        strides[axis] = tensor_stride(t, axis);
}

static struct mask_source source_of(const fdm_tensor *bias, const fdm_tensor *shown, int64_t keys) {
    struct mask_source source = {.bias = bias, .shown = shown};
    fill_strides(bias, source.bias_strides);
    if (shown && shown->ndim == 4)
        fill_strides(shown, source.shown_strides);
    else if (shown) {
        source.shown_strides[0] = tensor_stride(shown, 0);
        source.shown_strides[3] = tensor_stride(shown, 1);
        source.first_shown = keys - shown->shape[1];
    }
    return source;
}

fdm_status fdm_create_mask(const fdm_tensor *bias, const fdm_tensor *attention_mask, int64_t window, double min_value,
                           int64_t block_size, fdm_tensor *mask, void *stream) {
    fdm_status status = check_mask(mask, TENSOR_OUTPUT);
    if (status || (status = check_bias(bias, mask)) ||
        (attention_mask && (status = check_shown(attention_mask, mask))) ||
        (status = check_apart(mask, "mask", bias, "bias", attention_mask, "attention_mask")))
        return status;
    if (window < 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "window is %lld; it must be at least 1, or 0 for every key with a "
                         "bias above 0",
                         (long long)window);
    if (block_size < 1)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "block_size is %lld; it must be at least 1",
                         (long long)block_size);
    if (isnan(min_value))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "min_value is NaN; it must be a number");
    const int64_t keys = mask->shape[3];
    const struct mask_choice choice = {window, rounded(min_value, fdm_dtype_of(bias)), block_size};
    const struct mask_source source = source_of(bias, attention_mask, keys);
    if (mask->device.type == FDM_CUDA)
        return create_mask_on_device(&source, &choice, mask, stream);
    uint64_t *orders = memory_allocate((size_t)keys * sizeof *orders);
    if (!orders)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for %lld biases of a row", (long long)keys);
    create_mask(&source, &choice, mask, orders);
    memory_release(orders);
    return FDM_OK;
}
