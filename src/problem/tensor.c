/* tensor.c: checks of one tensor, and the table of dtypes. */
#include "problem/tensor.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"

static const struct {
    const char *name, *alias;
    fdm_data_type type;
} dtypes[] = {
    [FDM_FLOAT32] = {"float32", "fp32", {2, 32, 1}},   [FDM_FLOAT16] = {"float16", "fp16", {2, 16, 1}},
    [FDM_BFLOAT16] = {"bfloat16", "bf16", {4, 16, 1}}, [FDM_FLOAT64] = {"float64", "fp64", {2, 64, 1}},
    [FDM_BOOL] = {"bool", "uint8", {6, 8, 1}},         [FDM_INT32] = {"int32", "i32", {0, 32, 1}},
    [FDM_INT64] = {"int64", "i64", {0, 64, 1}},        [FDM_UINT32] = {"uint32", "u32", {1, 32, 1}},
};
enum { NUM_DTYPES = sizeof dtypes / sizeof dtypes[0] };

static int dtype_known(fdm_dtype dtype) { return (int)dtype >= 0 && (int)dtype < NUM_DTYPES; }

const char *fdm_dtype_name(fdm_dtype dtype) { return dtype_known(dtype) ? dtypes[dtype].name : "unknown"; }

fdm_dtype fdm_dtype_from_name(const char *name) {
    for (int i = 0; name && i < NUM_DTYPES; i++)
        if (strcmp(name, dtypes[i].name) == 0 || strcmp(name, dtypes[i].alias) == 0)
            return (fdm_dtype)i;
    return FDM_NO_DTYPE;
}

fdm_dtype fdm_dtype_of(const fdm_tensor *tensor) {
    fdm_data_type type = tensor->dtype;
    if (type.code == 1 && type.bits == 8 && type.lanes == 1)
        return FDM_BOOL;
    for (int i = 0; i < NUM_DTYPES; i++)
        if (type.code == dtypes[i].type.code && type.bits == dtypes[i].type.bits && type.lanes == 1)
            return (fdm_dtype)i;
    return FDM_NO_DTYPE;
}

int64_t fdm_dtype_bytes(fdm_dtype dtype) { return dtype_known(dtype) ? dtypes[dtype].type.bits / 8 : 0; }

fdm_data_type fdm_data_type_of(fdm_dtype dtype) {
    return dtype_known(dtype) ? dtypes[dtype].type : (fdm_data_type){0, 0, 0};
}

const char *tensor_shape_text(char *buffer, size_t size, const int64_t *shape, int32_t ndim) {
    size_t used = (size_t)snprintf(buffer, size, "[");
    for (int32_t i = 0; i < ndim && used < size; i++)
        used += (size_t)snprintf(buffer + used, size - used, i ? ", %lld" : "%lld", (long long)shape[i]);
    if (used < size)
        snprintf(buffer + used, size - used, "]");
    return buffer;
}

static int is_empty(const fdm_tensor *tensor) {
    for (int32_t i = 0; i < tensor->ndim; i++)
        if (tensor->shape[i] == 0)
            return 1;
    return 0;
}

/* The caller's, but of an empty tensor, where they may be anything: then as if it were contiguous, extents of 0 counted
 * as 1. */
static int64_t raw_stride(const fdm_tensor *tensor, int32_t axis) {
    if (tensor->strides && !is_empty(tensor))
        return tensor->strides[axis];
    int64_t stride = 1;
    for (int32_t i = tensor->ndim - 1; i > axis; i--)
        stride *= tensor->shape[i] ? tensor->shape[i] : 1;
    return stride;
}

int64_t tensor_stride(const fdm_tensor *tensor, int32_t axis) {
    return tensor->shape[axis] == 1 ? 0 : raw_stride(tensor, axis);
}

char *tensor_data(const fdm_tensor *tensor) { return tensor->data ? (char *)tensor->data + tensor->byte_offset : NULL; }

int tensor_aligned(const fdm_tensor *tensor) {
    int64_t bytes = fdm_dtype_bytes(fdm_dtype_of(tensor));
    if ((uintptr_t)tensor_data(tensor) % 16)
        return 0;
    for (int32_t i = 0; i + 1 < tensor->ndim; i++)
        if (tensor_stride(tensor, i) * bytes % 16)
            return 0;
    return 1;
}

int tensor_mappable(const fdm_tensor *tensor) {
    const int64_t bytes = fdm_dtype_bytes(fdm_dtype_of(tensor));
    if (is_empty(tensor))
        return 1;
    for (int32_t i = 0; i + 1 < tensor->ndim; i++)
        if (tensor->shape[i] > 1 && (raw_stride(tensor, i) < 1 || raw_stride(tensor, i) > ((1ll << 40) - 1) / bytes))
            return 0;
    return tensor_aligned(tensor);
}

/* Elements from the first to one past the last, or -1 when that passes 2^62. */
static int64_t extent_product(const fdm_tensor *tensor) {
    int64_t product = 1;
    for (int32_t i = 0; i < tensor->ndim; i++)
        if (__builtin_mul_overflow(product, tensor->shape[i] ? tensor->shape[i] : 1, &product) || product >> 59)
            return -1;
    return product;
}

static int span_overflows(const fdm_tensor *tensor) {
    int64_t span = 0, step;
    for (int32_t i = 0; i < tensor->ndim; i++)
        if (tensor->shape[i] > 1 && (__builtin_mul_overflow(tensor->shape[i] - 1, raw_stride(tensor, i), &step) ||
                                     __builtin_add_overflow(span, step, &span) || span >> 59))
            return 1;
    return 0;
}

/* Whether two index tuples of an output may name one element: sorted by stride, each axis must step over all smaller
 * ones. */
static int overlaps_itself(const fdm_tensor *tensor) {
    int64_t reach = 1;
    int32_t done = 0;
    for (int32_t pass = 0; pass < tensor->ndim; pass++) {
        int32_t smallest = -1;
        for (int32_t i = 0; i < tensor->ndim; i++)
            if (!(done >> i & 1) && (smallest < 0 || raw_stride(tensor, i) < raw_stride(tensor, smallest)))
                smallest = i;
        done |= 1 << smallest;
        if (tensor->shape[smallest] <= 1)
            continue;
        if (raw_stride(tensor, smallest) < reach)
            return 1;
        reach = (tensor->shape[smallest] - 1) * raw_stride(tensor, smallest) + reach;
    }
    return 0;
}

static fdm_status check_axes(const fdm_tensor *tensor, const char *name) {
    for (int32_t i = 0; i < tensor->ndim; i++)
        if (tensor->shape[i] < 0)
            return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s has extent %lld on axis %d; extents are >= 0", name,
                             (long long)tensor->shape[i], i);
    if (extent_product(tensor) < 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s has more elements than an address space holds", name);
    for (int32_t i = 0; i < tensor->ndim; i++)
        if (tensor->shape[i] > 1 && raw_stride(tensor, i) < 0)
            return error_set(FDM_ERROR_INVALID_ARGUMENT,
                             "%s has stride %lld on axis %d; negative strides are not supported", name,
                             (long long)raw_stride(tensor, i), i);
    if (span_overflows(tensor))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s has strides that leave the address space", name);
    return FDM_OK;
}

/* "int8" for the triple of a dtype that is none of ours, in DLPack's words. */
static const char *foreign_dtype_text(char *buffer, size_t size, fdm_data_type type) {
    static const char *const kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
    static const char *const float8[] = {"e3m4",     "e4m3", "e4m3b11fnuz", "e4m3fn",
                                         "e4m3fnuz", "e5m2", "e5m2fnuz",    "e8m0fnu"};
    enum { NUM_KINDS = sizeof kinds / sizeof kinds[0], NUM_FLOAT8 = sizeof float8 / sizeof float8[0] };
    if (type.code < NUM_KINDS && type.lanes == 1)
        snprintf(buffer, size, "%s%d", kinds[type.code], type.bits);
    else if (type.code >= NUM_KINDS && type.code < NUM_KINDS + NUM_FLOAT8 && type.lanes == 1)
        snprintf(buffer, size, "float8_%s", float8[type.code - NUM_KINDS]);
    else
        snprintf(buffer, size, "of DLPack dtype (code %d, %d bits, %d lanes)", type.code, type.bits, type.lanes);
    return buffer;
}

fdm_status tensor_check(const fdm_tensor *tensor, const char *name, int32_t ndim, enum tensor_role role,
                        int contiguous_last) {
    if (tensor->ndim != ndim)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s has %d axes; it needs %d", name, tensor->ndim, ndim);
    if (!tensor->shape)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s has no shape (shape is NULL)", name);
    fdm_dtype dtype = fdm_dtype_of(tensor);
    if (dtype == FDM_NO_DTYPE) {
        char text[64];
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "%s is %s; the library takes float32, float16, bfloat16, float64, bool, int32 and int64", name,
                         foreign_dtype_text(text, sizeof text, tensor->dtype));
    }
    fdm_status status = check_axes(tensor, name);
    if (status || is_empty(tensor))
        return status;
    if (!tensor->data)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s has no data (data is NULL)", name);
    if ((uintptr_t)tensor_data(tensor) % (uintptr_t)fdm_dtype_bytes(dtype))
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "%s starts at an address that is not a multiple of its %d-byte element", name,
                         (int)fdm_dtype_bytes(dtype));
    int32_t last = ndim - 1;
    if (contiguous_last && tensor->shape[last] > 1 && raw_stride(tensor, last) != 1)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s has stride %lld on its last axis; it must be contiguous (1)",
                         name, (long long)raw_stride(tensor, last));
    if (role == TENSOR_OUTPUT && overlaps_itself(tensor))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is written, but its strides make elements overlap", name);
    return FDM_OK;
}

fdm_status tensor_check_device(const fdm_tensor *tensor, const char *name, const fdm_tensor *first,
                               const char *first_name) {
    if (tensor->device.type != first->device.type || tensor->device.index != first->device.index)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is on DLPack device %d:%d, but %s is on %d:%d", name,
                         tensor->device.type, tensor->device.index, first_name, first->device.type,
                         first->device.index);
    return FDM_OK;
}

fdm_status tensor_check_device_type(const fdm_tensor *tensor, const char *name) {
    if (tensor->device.type != FDM_CPU && tensor->device.type != FDM_CUDA)
        return error_set(FDM_ERROR_UNSUPPORTED, "%s is on DLPack device type %d; it must be the CPU (1) or CUDA (2)",
                         name, tensor->device.type);
    return FDM_OK;
}

fdm_status tensor_expect_dtype(const fdm_tensor *tensor, const char *name, fdm_dtype dtype) {
    if (fdm_dtype_of(tensor) == dtype)
        return FDM_OK;
    return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is %s; it must be %s", name, fdm_dtype_name(fdm_dtype_of(tensor)),
                     fdm_dtype_name(dtype));
}

fdm_status tensor_expect_shape(const fdm_tensor *tensor, const char *name, const int64_t *shape) {
    char have[96], want[96];
    if (memcmp(tensor->shape, shape, (size_t)tensor->ndim * sizeof *shape) == 0)
        return FDM_OK;
    return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s has shape %s; it must be %s", name,
                     tensor_shape_text(have, sizeof have, tensor->shape, tensor->ndim),
                     tensor_shape_text(want, sizeof want, shape, tensor->ndim));
}

fdm_status tensor_check_as(const fdm_tensor *tensor, const char *name, int32_t ndim, enum tensor_role role,
                           fdm_dtype dtype, const int64_t *shape, const fdm_tensor *first, const char *first_name) {
    if (!tensor)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", name);
    fdm_status status = tensor_check(tensor, name, ndim, role, 0);
    if (status || (first && (status = tensor_check_device(tensor, name, first, first_name))))
        return status;
    status = tensor_expect_dtype(tensor, name, dtype);
    return status ? status : tensor_expect_shape(tensor, name, shape);
}
