/* slot_threads.h: of a block of topk_append.cu and topk_fill.cu; for C and CUDA C. */
#ifndef FDM_SLOT_THREADS_H
#define FDM_SLOT_THREADS_H

#define SLOT_THREADS 1024

#endif
