/* key_bias_threads.h: the threads of a block of key_bias.cu; for C and CUDA C. */
#ifndef FDM_KEY_BIAS_THREADS_H
#define FDM_KEY_BIAS_THREADS_H

#define KEY_BIAS_WARPS            8 /* each 32 keys of a head */
#define KEY_BIAS_BACKWARD_THREADS 1024
#define KEY_BIAS_AT_ONCE          4 /* keys that a thread of the backward reads together */

#endif
