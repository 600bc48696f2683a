/* hopper_copies.h: copies of q, k, v and out at alignments that TMA reads well, where the caller's are not so
 * aligned. */
#ifndef FDM_HOPPER_COPIES_H
#define FDM_HOPPER_COPIES_H

#include "gpu/gpu_family.h"

/* What a plan copies: bits. */
enum { HOPPER_COPY_K = 1, HOPPER_COPY_V = 2, HOPPER_COPY_Q = 4, HOPPER_COPY_ALL = 7 };

/* All matrices, out too, where TMA cannot read the tensors; else none. */
int32_t hopper_copies_needed(const fdm_problem *problem);
/* K and V whose rows begin in the middle of a memory sector, if blocks of block_m rows read each often enough that a
 * copy takes less time. */
int32_t hopper_copies_that_pay(const fdm_problem *problem, int32_t block_m);
/* K and V whose rows begin so, if their heads and rows follow each other. */
int32_t hopper_copies_possible(const fdm_problem *problem);

int64_t hopper_copies_bytes(const fdm_problem *problem, int32_t copies);
/* The call's tensors with the matrices that `copies` names replaced by those in `workspace`, behind a launch that fills
 * them; matrices that already begin at memory sectors stay, but where all are copied. Returns the index of the copies'
 * kernel. */
int32_t hopper_copies_before(struct gpu_launches *launches, int32_t copies, void *workspace,
                             struct attention *replaced);
/* Copies the output to the caller's, where it was made in the workspace. */
void hopper_copies_after(struct gpu_launches *launches, int32_t kernel, int32_t copies,
                         const struct attention *replaced);

#endif
