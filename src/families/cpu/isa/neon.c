/* neon.c: the table of the neon instruction set. */
#include "families/cpu/isa/neon_ops.h"

#include "families/cpu/decode.h"
#include "families/cpu/tile.h"
#include "families/cpu/tile_backward.h"

const struct cpu_kernels cpu_kernels_neon = {
    .isa = "neon", TILE_FLOAT32_ENTRIES, TILE_BACKWARD_FLOAT32_ENTRIES, .decode = &decode_kernels_neon};
