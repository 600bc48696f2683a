/* hopper_gather_launch.h: the gathering forward for kernels that leave it a part of the heads. */
#ifndef FDM_HOPPER_GATHER_LAUNCH_H
#define FDM_HOPPER_GATHER_LAUNCH_H

#include "gpu/gpu_family.h"
#include "gpu/tile_plan.h"

/* The number of the tile that the rules prefer, from 1 on; 0 where the kernel cannot have the problem. */
int32_t hopper_gather_tile(const fdm_device *device, const fdm_problem *problem);
/* Whether there is such a tile, and it is wide enough. */
int hopper_gather_takes(const fdm_problem *problem, int32_t tile);
/* Adds the kernel for the heads whose keys lie scattered. attention: NULL where kernels alone are asked. items_begun: 0
 * when the kernel begins. */
fdm_status hopper_gather_add(struct gpu_launches *launches, const struct attention *attention, int32_t tile,
                             int32_t num_sms, const struct tile_plan *heads, int32_t *items_begun);

#endif
