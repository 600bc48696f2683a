/* cache_fault.h: the contract of cache_fault.cu: what of a cache's lists names what is not there; for C and CUDA C. */
#ifndef FDM_GPU_CACHE_FAULT_H
#define FDM_GPU_CACHE_FAULT_H

#include "gpu/forward_params.h"

#define CACHE_FAULT_THREADS 128

/* The first word: what the public header calls 1 to 4. */
#define CACHE_FAULT_NONE       0
#define CACHE_FAULT_LENGTH     1
#define CACHE_FAULT_PAGE       2
#define CACHE_FAULT_ROW        3
#define CACHE_FAULT_PAGE_START 4

struct cache_fault_params {
    struct gpu_forward_params in;
    int32_t *fault; /* [4] */
};

#endif
