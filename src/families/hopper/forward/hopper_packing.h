/* hopper_packing.h: how few query rows fill the multiprocessors: heads that share keys are packed into tiles of
 * rows, and keys are split over items. */
#ifndef FDM_HOPPER_PACKING_H
#define FDM_HOPPER_PACKING_H

#include "flash_dmattn.h"

struct hopper_packing {
    int32_t packed; /* query heads that share a tile of rows; 1: a tile has one head */
    int32_t splits; /* of the keys; 1: none */
};
enum { HOPPER_PACKINGS = 4, HOPPER_PACKED_MAX = 64 };

/* The packings of a problem for a tile: none, packed heads, split keys, both; the fastest by estimate first, the
 * others in that order, each once. Returns how many. */
int32_t hopper_packings(const fdm_device *device, const fdm_problem *problem, int32_t block_m, int32_t block_n,
                        struct hopper_packing packings[HOPPER_PACKINGS]);
/* The most keys that a block's rows see. */
int64_t hopper_visible_keys(const fdm_problem *problem);
/* Whether the kernel can run the problem so. */
int hopper_packing_possible(const fdm_problem *problem, struct hopper_packing packing);

#endif
