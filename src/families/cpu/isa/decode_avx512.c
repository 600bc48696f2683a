/* decode_avx512.c: decode over avx512_ops.h. */
#include "families/cpu/isa/avx512_ops.h"

enum { ACCUMULATORS = 16 };

/* Transposing additions: each halves the vectors, 30 shuffles where a transposition needs 64. */
static inline vec vec_sum_each(const vec a[VECTOR_WIDTH]) {
    vec pairs[8], fours[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        pairs[i] =
            _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
        /* Each quarter of pairs[i] now holds parts of a[2i], a[2i+1], a[2i], a[2i+1]. */
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512d low = _mm512_castps_pd(pairs[2 * i]), high = _mm512_castps_pd(pairs[2 * i + 1]);
        fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                                 _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
    }
    /* Each quarter of fours[i]: parts of a[4i] .. a[4i+3]. */
    vec low =
        _mm512_add_ps(_mm512_shuffle_f32x4(fours[0], fours[1], 0x88), _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd));
    vec high =
        _mm512_add_ps(_mm512_shuffle_f32x4(fours[2], fours[3], 0x88), _mm512_shuffle_f32x4(fours[2], fours[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

#include "families/cpu/tile_decode.h"

const struct decode_kernels decode_kernels_avx512 = {VECTOR_WIDTH, MAX_ROWS, step, load_row};
