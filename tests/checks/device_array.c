/* device_array.c: strided tensors with guards, on the host and on the device. */
#include "device_array.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "device_check.h"

enum { GUARD = 512 };

static void *allocate(void *context, size_t bytes) {
    void *memory = NULL;
    return fdm_memory_allocate(cuda, bytes, &memory) ? NULL : memory;
}
static void release(void *context, void *memory) {
    fdm_synchronize(cuda);
    fdm_memory_release(cuda, memory);
}
const fdm_allocator device_allocator = {NULL, allocate, release};

int64_t array_elements(const struct device_array *a) {
    int64_t elements = 1;
    for (int32_t i = 0; i < a->tensor.ndim; i++)
        elements *= a->shape[i];
    return elements;
}

static char *element(const struct device_array *a, char *bytes, int64_t index) {
    int64_t offset = 0;
    for (int32_t i = a->tensor.ndim - 1; i >= 0; i--) {
        offset += index % a->shape[i] * a->strides[i];
        index /= a->shape[i];
    }
    return bytes + a->tensor.byte_offset + offset * fdm_dtype_bytes(a->dtype);
}

void array_make(struct device_array *a, fdm_dtype dtype, int32_t ndim, const int64_t *shape, const int64_t *strides,
                int64_t offset) {
    int64_t span = 1, step = 1;
    *a = (struct device_array){.dtype = dtype, .tensor = {.ndim = ndim}};
    for (int32_t i = ndim - 1; i >= 0; i--) {
        a->shape[i] = shape[i];
        a->strides[i] = strides ? strides[i] : step;
        step *= shape[i];
        span += shape[i] > 0 ? (shape[i] - 1) * a->strides[i] : 0;
    }
    a->bytes = (size_t)((span + offset) * fdm_dtype_bytes(dtype)) + 2 * GUARD;
    a->host = malloc(a->bytes);
    a->element_bytes = calloc(a->bytes, 1);
    if (!a->host || !a->element_bytes || fdm_memory_allocate(cuda, a->bytes, &a->there))
        fail("allocating");
    memset(a->host, 0xff, a->bytes);
    a->tensor = (fdm_tensor){.data = a->there,
                             .device = cuda,
                             .ndim = ndim,
                             .dtype = fdm_data_type_of(dtype),
                             .shape = a->shape,
                             .strides = a->strides,
                             .byte_offset = (uint64_t)(GUARD + offset * fdm_dtype_bytes(dtype))};
    const int64_t elements = array_elements(a);
    for (int64_t i = 0; i < elements; i++)
        memset(element(a, a->element_bytes, i), 1, (size_t)fdm_dtype_bytes(dtype));
}

void array_release(struct device_array *a) {
    fdm_memory_release(cuda, a->there);
    free(a->host);
    free(a->element_bytes);
}

void array_set(struct device_array *a, int64_t index, double value) {
    char *p = element(a, a->host, index);
    switch (a->dtype) {
    case FDM_INT32: *(int32_t *)(void *)p = (int32_t)value; break;
    case FDM_FLOAT32: *(float *)(void *)p = (float)value; break;
    case FDM_FLOAT16: *(uint16_t *)(void *)p = float_to_float16((float)value); break;
    case FDM_BFLOAT16: *(uint16_t *)(void *)p = float_to_bfloat16((float)value); break;
    default: *p = value != 0;
    }
}

double array_get(const struct device_array *a, int64_t index) {
    const char *p = element(a, a->host, index);
    switch (a->dtype) {
    case FDM_INT32: return *(const int32_t *)(const void *)p;
    case FDM_FLOAT32: return *(const float *)(const void *)p;
    case FDM_FLOAT16: return float16_to_float(*(const uint16_t *)(const void *)p);
    case FDM_BFLOAT16: return bfloat16_to_float(*(const uint16_t *)(const void *)p);
    default: return *p;
    }
}

double array_rounded(fdm_dtype dtype, double value) {
    return dtype == FDM_FLOAT16    ? float16_to_float(float_to_float16((float)value))
           : dtype == FDM_BFLOAT16 ? bfloat16_to_float(float_to_bfloat16((float)value))
                                   : (float)value;
}

void array_upload(const struct device_array *a) {
    if (fdm_memory_copy(a->there, cuda, a->host, host, a->bytes))
        fail("copying");
}

int array_download(struct device_array *a) {
    char *before = malloc(a->bytes);
    if (!before)
        fail("allocating");
    memcpy(before, a->host, a->bytes);
    if (fdm_memory_copy(a->host, host, a->there, cuda, a->bytes))
        fail("copying");
    int intact = 1;
    for (size_t i = 0; i < a->bytes; i++)
        intact &= a->element_bytes[i] || a->host[i] == before[i];
    free(before);
    return intact;
}
