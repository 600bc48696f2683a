/* hopper_visits.h: the contract of hopper_visits.cu, which takes the parameters of hopper_backward.cu; for C and CUDA
 * C. */
#ifndef FDM_HOPPER_VISITS_H
#define FDM_HOPPER_VISITS_H

#include "families/hopper/backward/hopper_backward.h"
#include "gpu/problem_constants.h"

/* The constants that specialise the kernel: those of hopper_backward.cu that say which keys a row sees. */
#define HOPPER_VISITS_CONSTANTS(X) X(KEYS)

/* Blocks of keys that a word is about, and warps of a block. */
#define HOPPER_VISITS_BLOCKS 32

#endif
