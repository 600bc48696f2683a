/* tensor_file.h: tensors in .safetensors and .npy files. Parsers read memory and allocate nothing; what they return
 * points into it. */
#ifndef FDM_TENSOR_FILE_H
#define FDM_TENSOR_FILE_H

#include <stddef.h>

#include "flash_dmattn.h"

enum { TENSOR_AXES_MAX = 8, TENSOR_NAME_MAX = 64, TENSORS_MAX = 64 };

struct file_tensor {
    char name[TENSOR_NAME_MAX];
    fdm_dtype dtype;
    int32_t ndim;
    int64_t shape[TENSOR_AXES_MAX];
    void *data; /* C-contiguous; may be unaligned when it points into a file */
    size_t bytes;
};

struct tensor_file {
    int32_t count;
    struct file_tensor tensors[TENSORS_MAX];
};

/* Both fill `fault` (what is wrong with the bytes, one clause) and return 0, or return 1. */
int safetensors_parse(const uint8_t *bytes, size_t size, struct tensor_file *file, char *fault, size_t fault_size);
int npy_parse(const uint8_t *bytes, size_t size, struct file_tensor *tensor, char *fault, size_t fault_size);

/* Product of the extents, or -1 when it does not fit. */
int64_t file_tensor_elements(const struct file_tensor *tensor);

/* Reads a whole file by its extension; data is copied to aligned memory of the tool. 1, or 0 after a complaint that
 * names the file. .npy: one tensor, named `name`. Tensors are added to those already in `file`. */
int tensor_file_read(const char *path, const char *name, struct tensor_file *file);
/* Writes all tensors as .safetensors. 1, or 0 after a complaint. */
int safetensors_write(const char *path, const struct tensor_file *file);

struct file_tensor *tensor_file_find(struct tensor_file *file, const char *name);

#endif
