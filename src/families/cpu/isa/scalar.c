/* scalar.c: the table that every machine can run. */
#include "families/cpu/isa/portable_ops.h"

#include "families/cpu/decode.h"
#include "families/cpu/tile.h"
#include "families/cpu/tile_backward.h"

const struct cpu_kernels cpu_kernels_scalar = {
    .isa = "scalar", TILE_FLOAT32_ENTRIES, TILE_BACKWARD_FLOAT32_ENTRIES, .decode = &decode_kernels_scalar};
