/* decode_avx2.c: decode over avx2_ops.h. */
#include "families/cpu/isa/avx2_ops.h"

enum { ACCUMULATORS = 8 };

static inline vec vec_sum_each(const vec a[VECTOR_WIDTH]) {
    vec low = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    vec high = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

#include "families/cpu/tile_decode.h"

const struct decode_kernels decode_kernels_avx2 = {VECTOR_WIDTH, DECODE_ROWS, step, load_row};
