/* plan_tiles.h: how many tiles of a problem its masks show. */
#ifndef FDM_PLAN_TILES_H
#define FDM_PLAN_TILES_H

#include "flash_dmattn.h"

/* Prints a line for a dense problem whose causal mask and window say all: of others only the masks' contents do. */
void plan_print_tiles(const fdm_problem *problem);

#endif
