/* decode_avx2.c: decode over avx2_ops.h. */
#include "families/cpu/isa/avx2_ops.h"

enum { ACCUMULATORS = 8 };

static inline vec vec_sum_each(const vec a[VECTOR_WIDTH]) {
    vec fours[4], twos[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) /* the low half sums a[i] to four lanes, the high half a[i + 4] */
        fours[i] = _mm256_add_ps(_mm256_blend_ps(a[i], a[i + 4], 0xf0), _mm256_permute2f128_ps(a[i], a[i + 4], 0x21));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        twos[i] = _mm256_add_ps(_mm256_shuffle_ps(fours[2 * i], fours[2 * i + 1], 0x44),
                                _mm256_shuffle_ps(fours[2 * i], fours[2 * i + 1], 0xee));
    return _mm256_add_ps(_mm256_shuffle_ps(twos[0], twos[1], 0x88), _mm256_shuffle_ps(twos[0], twos[1], 0xdd));
}

/* Else GCC reads a query again for each of its multiply-adds, where loads are the next thing to run out. */
static inline vec vec_keep(vec a) {
    __asm__("" : "+x"(a));
    return a;
}
#define vec_keep vec_keep

#include "families/cpu/tile_decode.h"

const struct decode_kernels decode_kernels_avx2 = {VECTOR_WIDTH, MAX_ROWS, step, load_row};
