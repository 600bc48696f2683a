/* tensor.h: questions about one tensor of the public API, answered with a sentence that names it. */
#ifndef FDM_TENSOR_H
#define FDM_TENSOR_H

#include "flash_dmattn.h"

enum tensor_role { TENSOR_INPUT, TENSOR_OUTPUT };

/* Checks that the tensor is well formed: address, rank, extents, strides, overflow; outputs must not overlap
 * themselves. `name` is the argument's name in sentences. contiguous_last: the last axis must have stride 1. */
fdm_status tensor_check(const fdm_tensor *tensor, const char *name, int32_t ndim, enum tensor_role role,
                        int contiguous_last);
/* The tensor lies where the call's first one does; `first_name` names that in the sentence. */
fdm_status tensor_check_device(const fdm_tensor *tensor, const char *name, const fdm_tensor *first,
                               const char *first_name);
/* That device is the CPU or a CUDA device. */
fdm_status tensor_check_device_type(const fdm_tensor *tensor, const char *name);
/* Of a tensor that tensor_check() has taken: its dtype, its whole shape. */
fdm_status tensor_expect_dtype(const fdm_tensor *tensor, const char *name, fdm_dtype dtype);
fdm_status tensor_expect_shape(const fdm_tensor *tensor, const char *name, const int64_t *shape);
/* tensor_check(), then device, dtype and shape; a tensor that is NULL is an error. first NULL: any device. */
fdm_status tensor_check_as(const fdm_tensor *tensor, const char *name, int32_t ndim, enum tensor_role role,
                           fdm_dtype dtype, const int64_t *shape, const fdm_tensor *first, const char *first_name);
/* Stride of an axis in elements; 0 where the extent is 1. The caller's strides of an empty tensor are not looked at:
 * they are taken for those of a contiguous one. */
int64_t tensor_stride(const fdm_tensor *tensor, int32_t axis);
char *tensor_data(const fdm_tensor *tensor);
/* Axes that are not vectors (all but the last) and the address are multiples of 16 bytes. */
int tensor_aligned(const fdm_tensor *tensor);
/* A tensor map of TMA can say where it lies: as above, with strides from 16 to below 2^40 bytes on axes
 * longer than 1. Not every driver takes a stride of 0. */
int tensor_mappable(const fdm_tensor *tensor);
/* Whether two well-formed tensors of one device have a byte in common. Strides are looked at, not spans alone: views of
 * one tensor that lie between each other's rows have none. */
int tensors_overlap(const fdm_tensor *a, const fdm_tensor *b);
/* Whether they are the same elements in the same order, whatever axes of extent 1 lie between. */
int tensors_same(const fdm_tensor *a, const fdm_tensor *b);
/* Whether `part` is the first columns of `whole`, which has as many axes: the same but for their last extents. */
int tensor_begins(const fdm_tensor *part, const fdm_tensor *whole);
/* A tensor of a call, which has at most 40; NULL where it is absent. */
struct named_tensor {
    const char *name;
    const fdm_tensor *tensor;
    int32_t written;   /* 1: by the call */
    uint64_t replaces; /* bit n: it may be the n-th tensor itself */
};
/* An error that names both where a written one overlaps another, in another way than by being what it may replace. */
fdm_status tensors_check_apart(const struct named_tensor *all, int32_t count);
/* "[2, 3]" in a caller's buffer, which is returned. */
const char *tensor_shape_text(char *buffer, size_t size, const int64_t *shape, int32_t ndim);

#endif
