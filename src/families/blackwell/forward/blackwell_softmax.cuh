/* blackwell_softmax.cuh: turns the scores of a query row into P, for blackwell_forward.cu. A thread owns a row, and
 * has all scores of a tile in registers. P is made with a stale maximum: the row's maximum over earlier tiles,
 * raised only where the tile's is RAISE_BITS or more above it in units of log2 (FlashAttention-4's rule). The result
 * is the same, because sum and output use the same stale maximum; P stays below 2^RAISE_BITS, and O is rescaled
 * seldom. */
#ifndef FDM_BLACKWELL_SOFTMAX_CUH
#define FDM_BLACKWELL_SOFTMAX_CUH

#include "cuda/exp2.cuh"
#include "cuda/ptx/math.cuh"
#include "gpu/convert.cuh"
#include "gpu/numbers.h"
#include "gpu/scores.cuh"
#include "gpu/visible.cuh"

#define RAISE_BITS 8.0f
#define PARTS      4 /* of 32 columns: what one load from tensor memory brings */

typedef float score_row[PARTS][32];

struct softmax_row {
    float max, sum;
};

/* The factor of scores in the exponent of exp2. */
__device__ __forceinline__ float exponent_unit(const struct gpu_forward_params &a) {
    return MAXIMA_BARE ? a.scale * LOG2_E : LOG2_E;
}

/* ---- scores ---- */

/* Sets columns outside of first <= column < last to -inf. Columns of a part count from its column 0. */
__device__ __forceinline__ void hide_columns(float (&s)[32], int first, int last) {
    const int from = min(max(first, 0), 32), to = min(max(last, 0), 32);
    const uint32_t below_to = to == 32 ? 0xffffffffu : (1u << to) - 1;
    const uint32_t below_from = from == 32 ? 0xffffffffu : (1u << from) - 1;
    const uint32_t seen = below_to & ~below_from;
#pragma unroll
    for (int i = 0; i < 32; i++)
        if (!(seen >> i & 1))
            s[i] = MINUS_INF;
}

/* Loads sixteen bytes of the thread's row from byte `at` on; those past `bytes` are 0. */
__device__ __forceinline__ uint4 read_own(const char *row, int64_t at, int64_t bytes) {
    if (at + 16 <= bytes)
        return *(const uint4 *)(row + at);
    uint32_t word[4] = {0, 0, 0, 0};
    for (int i = 0; at + i < bytes && i < 16; i++)
        word[i / 4] |= (uint32_t)(uint8_t)row[at + i] << (i % 4 * 8);
    return make_uint4(word[0], word[1], word[2], word[3]);
}

/* Scale and softcap. */
__device__ __forceinline__ void scale_scores(score_row &s, const struct gpu_forward_params &a) {
    if (MAXIMA_BARE)
        return;
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int i = 0; i < 32; i++)
            s[part][i] = cap_score(a, s[part][i] * a.scale);
}

#if BIAS
/* bias: the row's; key: of column 0; keys: of the row. */
__device__ __forceinline__ void add_bias(score_row &s, const char *bias, int key, int keys) {
    constexpr int BYTES = BIAS == GPU_BIAS_FLOAT32 ? 4 : 2, EACH = 16 / BYTES;
#    pragma unroll
    for (int part = 0; part < PARTS; part++)
#    pragma unroll
        for (int i = 0; i < 32; i += EACH) {
            const uint4 x = read_own(bias, (int64_t)(key + 32 * part + i) * BYTES, (int64_t)keys * BYTES);
            const uint32_t word[4] = {x.x, x.y, x.z, x.w};
#    pragma unroll
            for (int n = 0; n < EACH; n++)
                s[part][i + n] += BYTES == 4 ? __uint_as_float(word[n * BYTES / 4])
                                             : unpack((uint16_t)(word[n * BYTES / 4] >> (n % 2 * 16)));
        }
}
#endif

#if MASK
__device__ __forceinline__ void apply_mask(score_row &s, const char *mask, int key, int keys) {
#    pragma unroll
    for (int part = 0; part < PARTS; part++)
#    pragma unroll
        for (int i = 0; i < 32; i += 16) {
            const uint4 x = read_own(mask, key + 32 * part + i, keys);
            const uint32_t word[4] = {x.x, x.y, x.z, x.w};
#    pragma unroll
            for (int n = 0; n < 16; n++)
                if (!(word[n / 4] >> (n % 4 * 8) & 0xff))
                    s[part][i + n] = MINUS_INF;
        }
}
#endif

/* ---- online softmax ---- */

__device__ __forceinline__ float max_of(const score_row &s) {
    float most[4] = {s[0][0], s[1][0], s[2][0], s[3][0]};
#pragma unroll
    for (int i = 1; i < 31; i += 2)
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            most[part] = max_3(most[part], s[part][i], s[part][i + 1]);
#pragma unroll
    for (int part = 0; part < PARTS; part++)
        most[part] = fmaxf(most[part], s[part][31]);
    return fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
}

/* Raises the maximum where the tile's is far above it, and returns the factor of the sums so far. */
__device__ __forceinline__ float raise_max(struct softmax_row &row, const score_row &s, float unit) {
    const float most = fmaxf(row.max, max_of(s));
    if (!((most - row.max) * unit > RAISE_BITS))
        return 1.0f;
    const float factor = ex2_approx((row.max - most) * unit);
    row.max = most;
    row.sum *= factor;
    return factor;
}

/* 2^x of two neighbours on the FMA pipe, by the cubic or the quartic of exp2.cuh. */
__device__ __forceinline__ float2 ex2_pair(float2 x) {
    const float2 bounded = make_float2(fmaxf(x.x, -126.0f), fmaxf(x.y, -126.0f)); /* x is at most RAISE_BITS */
    const float2 shift = make_float2(EX2_SHIFT, EX2_SHIFT), minus = make_float2(-1.0f, -1.0f);
    const float2 shifted = add_f32x2(bounded, shift);
    const float2 f = fma_f32x2(add_f32x2(shifted, make_float2(-EX2_SHIFT, -EX2_SHIFT)), minus, bounded);
#if EXP2_DEGREE == 4
    float2 p = fma_f32x2(make_float2(EX2_QUARTIC_4, EX2_QUARTIC_4), f, make_float2(EX2_QUARTIC_3, EX2_QUARTIC_3));
    p = fma_f32x2(p, f, make_float2(EX2_QUARTIC_2, EX2_QUARTIC_2));
    p = fma_f32x2(p, f, make_float2(EX2_QUARTIC_1, EX2_QUARTIC_1));
#else
    float2 p = fma_f32x2(make_float2(EX2_CUBIC_3, EX2_CUBIC_3), f, make_float2(EX2_CUBIC_2, EX2_CUBIC_2));
    p = fma_f32x2(p, f, make_float2(EX2_CUBIC_1, EX2_CUBIC_1));
#endif
    p = fma_f32x2(p, f, make_float2(1.0f, 1.0f));
    return make_float2(ex2_assemble(x.x, p.x, shifted.x), ex2_assemble(x.y, p.y, shifted.y));
}

/* Makes P of the columns of a part as registers of pairs, and adds to the sum. */
template <int part>
__device__ __forceinline__ void make_p(uint32_t (&p)[16], float2 &sum, const float (&s)[32], float shift, float unit) {
    const float2 units = make_float2(unit, unit), minus = make_float2(-shift, -shift);
#pragma unroll
    for (int pair = 0; pair < 16; pair++) {
        float2 x = make_float2(s[2 * pair], s[2 * pair + 1]);
        /* a large bias must not be rounded before its maximum is subtracted */
        x = MAXIMA_BARE ? fma_f32x2(x, units, minus) : mul_f32x2(add_f32x2(x, minus), units);
        if (EXP2_RESIDUE && (16 * part + pair) % EXP2_FREQUENCY < EXP2_RESIDUE)
            x = ex2_pair(x);
        else
            x = make_float2(ex2_approx(x.x), ex2_approx(x.y));
        sum = add_f32x2(sum, x);
        p[pair] = pack(x.x, x.y);
    }
}

#endif
