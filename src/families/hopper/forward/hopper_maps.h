/* hopper_maps.h: what TMA knows of the tensors of hopper_forward.cu. */
#ifndef FDM_HOPPER_MAPS_H
#define FDM_HOPPER_MAPS_H

#include "families/hopper/forward/hopper_forward.h"
#include "problem/problem.h"

/* The rows of a page are a multiple of this. */
enum { HOPPER_PART_ROWS = 16 };
/* The logarithm of the rows of a page that TMA copies at a time: the largest power of two that divides the page and a
 * tile of keys. */
int32_t hopper_part_shift(const fdm_problem *problem, int32_t block_n);

/* Sets the maps of `params` for the plan's tile and these tensors; packed: heads that share a tile of rows. part_shift
 * is set before. */
fdm_status hopper_maps_make(const fdm_plan *plan, const struct attention *attention, int32_t packed,
                            struct hopper_forward_params *params);

#endif
