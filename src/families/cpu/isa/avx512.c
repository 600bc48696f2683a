/* avx512.c: the table of the avx512 instruction set. */
#include "families/cpu/isa/avx512_ops.h"

#include "families/cpu/decode.h"
#include "families/cpu/tile.h"
#include "families/cpu/tile_backward.h"

const struct cpu_kernels cpu_kernels_avx512 = {
    .isa = "avx512", TILE_FLOAT32_ENTRIES, TILE_BACKWARD_FLOAT32_ENTRIES, .decode = &decode_kernels_avx512};
