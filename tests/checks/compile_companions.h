/* compile_companions.h: what the companions' plans launch, for the compile matrix. */
#ifndef FDM_COMPILE_COMPANIONS_H
#define FDM_COMPILE_COMPANIONS_H

#include "cuda/cuda.h"

/* Of all kernels, or of one by name. Features meet each shape in turn; every: each with all. */
void list_companions(const char *arch, const char *kernel, int every,
                     void (*add)(const char *arch, const struct cuda_kernel_request *request));

#endif
