/* key_bias_threads.h: the constant and the threads of key_bias.cu; for C and CUDA C. */
#ifndef FDM_KEY_BIAS_THREADS_H
#define FDM_KEY_BIAS_THREADS_H

#include "cuda/constants.h"

#define KEY_BIAS_CONSTANTS(X) X(PARTS) /* blocks that share a head's keys in the backward, a cluster where above 1 */

#define KEY_BIAS_WARPS          8 /* forward: each 32 keys of a head */
#define KEY_BIAS_PARTS          8 /* where there are clusters */
#define KEY_BIAS_BACKWARD_WARPS 16
#define KEY_BIAS_AT_ONCE        4 /* keys that a thread of the backward reads together */

#endif
