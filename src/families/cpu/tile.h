/* tile.h: the float32 kernels of every instruction set, written once over vector_ops.h. An instruction set's file
 * includes its own vector operations, then this, and exports one table. */
#ifndef FDM_CPU_TILE_H
#define FDM_CPU_TILE_H

#include "families/cpu/tile_contract.h"
#include "families/cpu/tile_pack.h"
#include "families/cpu/tile_softmax.h"

/* The entries of a table whose operands are float32. */
#define TILE_FLOAT32_ENTRIES                                                                                        \
    .dtypes = 1u << FDM_FLOAT32 | 1u << FDM_FLOAT16 | 1u << FDM_BFLOAT16, .key_multiple = 1,                        \
    .lane_multiple = VECTOR_WIDTH, .panel_bytes = tile_panel_bytes, .keys_bytes = tile_keys_bytes,                  \
    .values_bytes = tile_keys_bytes, .weights_bytes = tile_weights_bytes, .pack_panel = tile_pack_panel,            \
    .pack_keys = tile_pack_keys, .pack_values = tile_pack_keys, .all_finite = tile_all_finite, .score = tile_score, \
    .accumulate = tile_accumulate, .softmax = tile_softmax, .shrink = tile_shrink, .store_panel = tile_store_panel, \
    .mask_bits = tile_mask_bits, .load_bias = tile_load_bias

#endif
