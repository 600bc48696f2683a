/* decode_scalar.c: decode over portable_ops.h. */
#include "families/cpu/isa/portable_ops.h"

enum { ACCUMULATORS = 8 };

static inline vec vec_sum_each(const vec a[VECTOR_WIDTH]) {
    return (vec){vec_sum(a[0]), vec_sum(a[1]), vec_sum(a[2]), vec_sum(a[3])};
}

#include "families/cpu/tile_decode.h"

const struct decode_kernels decode_kernels_scalar = {VECTOR_WIDTH, MAX_ROWS, step, load_row};
