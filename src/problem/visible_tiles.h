/* visible_tiles.h: the tiles that a mask plan has: whether it is one for a call, its extents, its bits on the CPU. */
#ifndef FDM_VISIBLE_TILES_H
#define FDM_VISIBLE_TILES_H

#include "problem/problem.h"

enum { MASK_PLAN_TILE = 64 }; /* rows, and keys, of a tile */

/* Heads and batches that see different tiles; tiles of rows; words of 32 tiles of keys. */
struct mask_plan_extents {
    int64_t batches, heads, row_tiles, key_words;
};
struct mask_plan_extents mask_plan_extents_of(const fdm_problem *problem);

/* Checks the plan of tensors, where they hold one, against the problem: fills attention->mask_plan. */
fdm_status mask_plan_resolve(const fdm_tensors *tensors, const fdm_problem *problem, struct attention *attention);

/* Fills the bits of a plan of a call on the CPU, of the problem's extents. */
void mask_plan_fill(const struct attention *attention, uint32_t *seen, uint32_t *full);

#endif
