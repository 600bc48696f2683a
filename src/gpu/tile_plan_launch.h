/* tile_plan_launch.h: the tile plan on the host: its bytes of workspace, its kernel, its launch. */
#ifndef FDM_TILE_PLAN_LAUNCH_H
#define FDM_TILE_PLAN_LAUNCH_H

#include "gpu/gpu_family.h"
#include "gpu/tile_plan.h"

/* Whether there is something that a plan is made of: key intervals, a mask that all rows share, row intervals, or a
 * block mask. Masks and biases with rows beside these hide more than it says. */
int tile_plan_possible(const fdm_problem *problem);
int64_t tile_plan_bytes(const fdm_problem *problem);
/* What is wanted beside the bits. Rows of the blocks that are put in order, 0: none; whether tiles are counted, for
 * TILES_ARE_SCATTERED; in which order the plan has the keys: key_sort.h's where `sorted` points at 1 on the device,
 * else as they lie, and so where both are NULL. */
struct tile_plan_order {
    int32_t block_m, counts;
    const int32_t *keys, *sorted;
};
/* The plan of all masks that a caller keeps: whether there is room for its words, its bytes, where it lies in memory,
 * and the launch that makes it there, of what tile_plan_possible() names. */
int tile_plan_of_all_possible(const fdm_problem *problem);
int64_t tile_plan_bytes_of_all(const fdm_problem *problem);
struct tile_plan tile_plan_at(const fdm_problem *problem, void *memory);
void tile_plan_add_of_all(struct gpu_launches *launches, const struct gpu_forward_params *params, void *memory,
                          struct tile_plan *plan);

/* Makes the plan at `workspace`, a multiple of 16; or takes the one that the call brings, of keys as they lie and
 * without an order: it may then see less than this one, where other masks hide something. */
void tile_plan_add(struct gpu_launches *launches, const struct gpu_forward_params *params, struct tile_plan_order order,
                   void *workspace, struct tile_plan *plan);

/* For kernels that look at each key (seen_tiles.cuh): bytes of the plan that a call makes, 0 where it makes none; and
 * the launch that makes it at `workspace`. The parameters then have its words in the place of a block mask, or those of
 * the plan that the call brings, or NULL. */
int64_t tile_plan_bytes_of_keys(const fdm_problem *problem);
void tile_plan_add_of_keys(struct gpu_launches *launches, void *workspace, struct gpu_forward_params *params);

#endif
