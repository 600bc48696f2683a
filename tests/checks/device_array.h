/* device_array.h: a strided tensor on a CUDA device with a copy on the host, for checks: guard zones before and after,
 * NaN wherever no element lies, and every byte that is no element must come back as it went. */
#ifndef FDM_DEVICE_ARRAY_H
#define FDM_DEVICE_ARRAY_H

#include "flash_dmattn.h"

enum { DEVICE_ARRAY_AXES = 4 };

struct device_array {
    fdm_tensor tensor; /* on the device */
    int64_t shape[DEVICE_ARRAY_AXES], strides[DEVICE_ARRAY_AXES];
    fdm_dtype dtype;
    size_t bytes;
    char *host, *element_bytes; /* what was or will be there; 1 where an element lies */
    void *there;
};

/* strides NULL: contiguous. offset: elements from a multiple of 256 bytes to the first one. All bytes are 0xff, NaN in
 * every dtype. Exits with a sentence where there is no memory. */
void array_make(struct device_array *a, fdm_dtype dtype, int32_t ndim, const int64_t *shape, const int64_t *strides,
                int64_t offset);
void array_release(struct device_array *a);
/* The element of number `index` in C order of the shape. */
void array_set(struct device_array *a, int64_t index, double value);
double array_get(const struct device_array *a, int64_t index);
int64_t array_elements(const struct device_array *a);
void array_upload(const struct device_array *a);
/* The device's bytes; 0 when one that is no element has changed. */
int array_download(struct device_array *a);

/* Device memory for one call, which has ended when it is given back. */
extern const fdm_allocator device_allocator;

/* As the dtype holds it. */
double array_rounded(fdm_dtype dtype, double value);

#endif
