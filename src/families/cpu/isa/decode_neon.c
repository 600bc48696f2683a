/* decode_neon.c: decode over neon_ops.h. */
#include "families/cpu/isa/neon_ops.h"

enum { ACCUMULATORS = 16 };

static inline vec vec_sum_each(const vec a[VECTOR_WIDTH]) {
    return vpaddq_f32(vpaddq_f32(a[0], a[1]), vpaddq_f32(a[2], a[3]));
}

#include "families/cpu/tile_decode.h"

const struct decode_kernels decode_kernels_neon = {VECTOR_WIDTH, MAX_ROWS, step, load_row};
