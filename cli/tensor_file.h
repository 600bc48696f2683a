/* tensor_file.h: tensors in .safetensors and .npy files. Parsers look at the header in memory and allocate nothing. */
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
    void *data; /* C-contiguous */
    size_t bytes;
    uint64_t offset; /* of the data in a file */
    int swapped;     /* the file has the other order of bytes */
};

struct tensor_file {
    int32_t count;
    struct file_tensor tensors[TENSORS_MAX];
};

enum { FAULT_BYTES = 256 };
static const uint64_t FILE_BYTES_UNKNOWN = UINT64_MAX;

/* How many of a file's first bytes are needed to know more than the first `size` say: at most `size` where that is the
 * whole header, or where no more would help. */
size_t safetensors_needs(const uint8_t *bytes, size_t size);
size_t npy_needs(const uint8_t *bytes, size_t size);
/* From the header, which the first `size` of a file's file_bytes bytes hold; a pipe's number is unknown. 1 with
 * everything but data, or 0 with what is wrong in `fault`, one clause. */
int safetensors_parse(const uint8_t *bytes, size_t size, uint64_t file_bytes, struct tensor_file *file,
                      char fault[FAULT_BYTES]);
int npy_parse(const uint8_t *bytes, size_t size, uint64_t file_bytes, struct file_tensor *tensor,
              char fault[FAULT_BYTES]);

/* Product of the extents, or -1 when it does not fit. */
int64_t file_tensor_elements(const struct file_tensor *tensor);

/* Reads a file by its extension, a pipe by its first bytes, into aligned memory of the tool. 1, or 0 after a complaint
 * that names the file. .npy: one tensor, named `name`. Tensors are added to those already in `file`. */
int tensor_file_read(const char *path, const char *name, struct tensor_file *file);
/* Whether --out names a file that may hold .safetensors: 1, or 0 after a complaint. */
int safetensors_may_be(const char *path);
/* Writes all tensors as .safetensors. 1, or 0 after a complaint. */
int safetensors_write(const char *path, const struct tensor_file *file);

struct file_tensor *tensor_file_find(struct tensor_file *file, const char *name);

#endif
