/* slot_threads.h: the constants and threads of topk_append.cu and topk_fill.cu; for C and CUDA C. */
#ifndef FDM_SLOT_THREADS_H
#define FDM_SLOT_THREADS_H

#include "cuda/constants.h"

#define SLOT_CONSTANTS(X)                                                    \
    X(DTYPE)   /* of the biases: GPU_FLOAT32, GPU_FLOAT16 or GPU_BFLOAT16 */ \
    X(THREADS) /* of a block: a multiple of 32, at most 1024 */

#define FILL_THREADS       1024
#define APPEND_SLOTS       4 /* that a thread reads together */
#define APPEND_THREADS_MIN 256
#define APPEND_THREADS_MAX 1024

#endif
