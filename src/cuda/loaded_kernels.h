/* loaded_kernels.h: a loaded kernel, inside src/cuda. */
#ifndef FDM_CUDA_LOADED_KERNELS_H
#define FDM_CUDA_LOADED_KERNELS_H

#include "cuda/cuda.h"
#include "cuda/driver.h"

enum { CUDA_KERNELS_MAX = 8 }; /* of one call */

struct cuda_kernel {
    struct cuda_kernel *next;
    cu_module module;
    cu_function function;
    int32_t device, shared_bytes, num_constants;
    const char *file, *entry;
    char arch[16]; /* what it is compiled for */
    void *image;   /* machine code that could not be written to disk: other devices of the architecture load it too */
    struct cuda_resources resources;
    int64_t values[CUDA_CONSTANTS_MAX];
};

#endif
