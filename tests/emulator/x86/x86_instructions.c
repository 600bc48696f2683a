/* x86_instructions.c: compiled twice, with the folder's immintrin.h and with the compiler's; TABLE is the name of the
 * table that is made. */
#include "x86_instructions.h"

#include <immintrin.h>
#include <stdatomic.h>
#include <string.h>

static struct x86_result *put(struct x86_result *out, const char *name, int floats, const void *bits, size_t bytes) {
    *out = (struct x86_result){.name = name, .floats = floats};
    memcpy(&out->bits, bits, bytes);
    return out + 1;
}
static struct x86_result *put_ps(struct x86_result *out, const char *name, __m512 a) {
    return put(out, name, 1, &a, sizeof a);
}
static struct x86_result *put_si512(struct x86_result *out, const char *name, __m512i a) {
    return put(out, name, 0, &a, sizeof a);
}
static struct x86_result *put_mask(struct x86_result *out, const char *name, uint64_t mask) {
    return put(out, name, 0, &mask, sizeof mask);
}

static struct x86_result *floats(const struct x86_operands *in, struct x86_result *out) {
    const __m512 a = _mm512_loadu_ps(&in->a), b = _mm512_loadu_ps(&in->b), c = _mm512_loadu_ps(&in->c);
    out = put_ps(out, "add_ps", _mm512_add_ps(a, b));
    out = put_ps(out, "sub_ps", _mm512_sub_ps(a, b));
    out = put_ps(out, "mul_ps", _mm512_mul_ps(a, b));
    out = put_ps(out, "div_ps", _mm512_div_ps(a, b));
    out = put_ps(out, "fmadd_ps", _mm512_fmadd_ps(a, b, c));
    out = put_ps(out, "max_ps", _mm512_max_ps(a, b));
    out = put_ps(out, "min_ps", _mm512_min_ps(a, b));
    out = put_ps(out, "scalef_ps", _mm512_scalef_ps(a, b));
    out = put_ps(out, "scalef_ps by little", _mm512_scalef_ps(a, _mm512_mul_ps(b, _mm512_set1_ps(0x1p-20f))));
    out = put_ps(out, "reduce_ps", _mm512_reduce_ps(a, _MM_FROUND_TO_NEG_INF));
    out = put_ps(out, "roundscale_ps", _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    out = put_mask(out, "cmp_ps_mask less", _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ));
    out = put_mask(out, "cmp_ps_mask unordered", _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q));
    const __m512 sum = _mm512_set1_ps(_mm512_reduce_add_ps(a));
    return put_ps(out, "reduce_add_ps", sum);
}

static struct x86_result *elements(const struct x86_operands *in, struct x86_result *out) {
    const __m512 a = _mm512_loadu_ps(&in->a), b = _mm512_loadu_ps(&in->b);
    const __m512i x = _mm512_load_si512(&in->a), y = _mm512_loadu_si512(&in->b);
    const __m512d p = _mm512_castps_pd(a), q = _mm512_castps_pd(b);
    const __mmask16 mask = (__mmask16)in->mask;
    out = put_ps(out, "unpacklo_ps", _mm512_unpacklo_ps(a, b));
    out = put_ps(out, "unpackhi_ps", _mm512_unpackhi_ps(a, b));
    out = put_ps(out, "unpacklo_pd", _mm512_castpd_ps(_mm512_unpacklo_pd(p, q)));
    out = put_ps(out, "unpackhi_pd", _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
    out = put_ps(out, "shuffle_f32x4 44", _mm512_shuffle_f32x4(a, b, 0x44));
    out = put_ps(out, "shuffle_f32x4 8d", _mm512_shuffle_f32x4(a, b, 0x8d));
    out = put_si512(out, "permutexvar_epi16", _mm512_permutexvar_epi16(y, x));
    out = put_ps(out, "mask_blend_ps", _mm512_mask_blend_ps(mask, a, b));
    out = put_si512(out, "mask_mov_epi32", _mm512_mask_mov_epi32(x, mask, y));
    out = put_si512(out, "mask_blend_epi16", _mm512_mask_blend_epi16((__mmask32)in->mask, x, y));
    out = put_ps(out, "maskz_loadu_ps", _mm512_maskz_loadu_ps(mask, &in->b));
    union x86_vector to = in->a;
    _mm512_mask_storeu_ps(&to, mask, b);
    out = put(out, "mask_storeu_ps", 0, &to, sizeof to);
    return out;
}

static struct x86_result *integers(const struct x86_operands *in, struct x86_result *out) {
    const __m512i x = _mm512_loadu_si512(&in->a), y = _mm512_loadu_si512(&in->b);
    out = put_si512(out, "add_epi32", _mm512_add_epi32(x, y));
    out = put_si512(out, "and_si512", _mm512_and_si512(x, y));
    out = put_si512(out, "slli_epi32", _mm512_slli_epi32(x, 16));
    out = put_si512(out, "srli_epi32", _mm512_srli_epi32(x, 16));
    out = put_mask(out, "test_epi8_mask", _mm512_test_epi8_mask(x, y));
    out = put_si512(out, "set1_epi32", _mm512_set1_epi32((int)in->a.u32[0]));
    out = put_si512(out, "set_epi16",
                    _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11,
                                     10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
    const __m256i narrow = _mm512_cvtepi32_epi16(x), half = _mm256_loadu_si256((const __m256i *)(const void *)&in->a);
    out = put(out, "cvtepi32_epi16", 0, &narrow, sizeof narrow);
    out = put_si512(out, "cvtepu16_epi32", _mm512_cvtepu16_epi32(half));
    out = put_ps(out, "cvtph_ps", _mm512_cvtph_ps(half));
    const __m256i halves = _mm512_cvtps_ph(_mm512_castsi512_ps(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return put(out, "cvtps_ph", 0, &halves, sizeof halves);
}

static struct x86_result *avx512(const struct x86_operands *in, struct x86_result *out) {
    return integers(in, elements(in, floats(in, out)));
}

static struct x86_result *avx512_bf16(const struct x86_operands *in, struct x86_result *out) {
    const __m512 a = _mm512_loadu_ps(&in->a), b = _mm512_loadu_ps(&in->b), c = _mm512_loadu_ps(&in->c);
    const __m256i one = (__m256i)_mm512_cvtneps_pbh(a);
    out = put(out, "cvtneps_pbh", 0, &one, sizeof one);
    out = put_si512(out, "cvtne2ps_pbh", (__m512i)_mm512_cvtne2ps_pbh(a, b));
    return put_ps(out, "dpbf16_ps", _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b));
}

/* Shapes of a product of full tiles, and of smaller ones. */
static const uint8_t config[2][64] = {
    {[0] = 1, [16] = 64, [18] = 64, [20] = 64, [48] = 16, [49] = 16, [50] = 16},
    {[0] = 1, [16] = 20, [18] = 28, [20] = 20, [48] = 3, [49] = 3, [50] = 7},
};

static struct x86_result *amx(const struct x86_operands *in, struct x86_result *out) {
    for (int shape = 0; shape < 2; shape++) {
        union x86_vector to[16];
        memset(to, 0xff, sizeof to);
        atomic_signal_fence(memory_order_seq_cst); /* gcc's intrinsics do not say that they read memory */
        _tile_loadconfig(config[shape]);
        _tile_loadd(0, in->tiles[0], 64);
        _tile_loadd(1, in->tiles[1], 64);
        _tile_loadd(2, in->tiles[2], 64);
        _tile_dpbf16ps(0, 1, 2);
        _tile_stored(0, to, 64);
        _tile_release();
        atomic_signal_fence(memory_order_seq_cst);
        for (int row = 0; row < 16; row++)
            out = put(out, shape ? "tile_dpbf16ps 3 x 5 x 7" : "tile_dpbf16ps", 1, &to[row], sizeof to[row]);
    }
    return out;
}

const struct x86_instructions TABLE = {avx512, avx512_bf16, amx};
