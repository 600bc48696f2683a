/* slot_threads.h: the constants and threads of topk_append.cu and topk_fill.cu; for C and CUDA C. */
#ifndef FDM_SLOT_THREADS_H
#define FDM_SLOT_THREADS_H

#include "gpu/constants.h"

#define SLOT_CONSTANTS(X) X(DTYPE) /* of the biases: GPU_FLOAT32, GPU_FLOAT16 or GPU_BFLOAT16 */
#define SLOT_THREADS      1024     /* of a block */

#endif
