/* hopper_dq_order.h: the contract of hopper_dq_order.cu, which takes the parameters of hopper_backward.cu. It is for C
 * and CUDA C. */
#ifndef FDM_HOPPER_DQ_ORDER_H
#define FDM_HOPPER_DQ_ORDER_H

#include "families/hopper/backward/hopper_backward.h"
#include "gpu/problem_constants.h"

/* The constants that specialise the kernel: those of hopper_backward.cu that say which keys a row sees. */
#define HOPPER_DQ_ORDER_CONSTANTS(X) X(KEYS)

/* Key blocks of a word, and warps of a block. */
#define HOPPER_DQ_ORDER_BLOCKS 32

#endif
