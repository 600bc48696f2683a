/* test_x86_instructions.c: what the emulated intrinsics give, against numbers worked out by hand after Intel's manual,
 * and where this machine has the instructions against those, bit by bit. */
#define _GNU_SOURCE
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <immintrin.h>

#include "base/half.h"
#include "device/isa.h"
#include "x86_instructions.h"

static const float QUIET = NAN;
static float first(__m512 a) {
    float x[16];
    _mm512_storeu_ps(x, a);
    return x[0];
}
/* The same bits, or both NaN. */
static void expect(const char *what, float got, float wanted) {
    if (float_to_bits(got) != float_to_bits(wanted) && !(isnan(got) && isnan(wanted)))
        fail_msg("%s: %a instead of %a", what, (double)got, (double)wanted);
}

static void test_scalef(void **unused) {
    (void)unused;
    const float inf = INFINITY, least = 0x1p-149f, signals = bits_to_float(0x7f800001);
    const float cases[][3] = {
        /* a, b, a 2^floor(b) */
        {1.5f, 3.0f, 12.0f},
        {1.5f, 3.99f, 12.0f},
        {1.5f, -0.5f, 0.75f},
        {-1.0f, -least, -0.5f},
        {1.0f, 127.0f, 0x1p127f},
        {1.0f, 128.0f, inf},
        {-1.0f, 1e30f, -inf},
        {least, 276.0f, 0x1p127f},
        {0x1.fffffep127f, -276.0f, 0x1p-148f},
        {1.0f, -149.0f, least},
        {1.0f, -150.0f, 0.0f}, /* half of the least number: to even */
        {1.5f, -150.0f, least},
        {3.0f, -150.0f, 0x1p-148f}, /* one and a half of it: to even */
        {0x1.000002p0f, -150.0f, least},
        {-1.0f, -1e30f, -0.0f},
        {0.0f, 5.0f, 0.0f},
        {-0.0f, -5.0f, -0.0f},
        {inf, -5.0f, inf},
        {2.0f, inf, inf},
        {-2.0f, inf, -inf},
        {inf, inf, inf},
        {0.0f, inf, QUIET},
        {2.0f, -inf, 0.0f},
        {-2.0f, -inf, -0.0f},
        {-0.0f, -inf, -0.0f},
        {inf, -inf, QUIET},
        {QUIET, inf, inf},
        {QUIET, -inf, 0.0f}, /* on which vec_exp2 relies */
        {QUIET, 1.0f, QUIET},
        {QUIET, QUIET, QUIET},
        {1.0f, QUIET, QUIET},
        {inf, QUIET, QUIET},
        {signals, -inf, QUIET},
        {signals, inf, QUIET},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        expect("scalef", first(_mm512_scalef_ps(_mm512_set1_ps(cases[i][0]), _mm512_set1_ps(cases[i][1]))),
               cases[i][2]);
}

static void test_reduce_and_round(void **unused) {
    (void)unused;
    const float cases[][3] = {
        /* x, x - floor(x), x rounded */
        {2.25f, 0.25f, 2.0f},
        {-2.25f, 0.75f, -2.0f},
        {2.5f, 0.5f, 2.0f},
        {3.5f, 0.5f, 4.0f},
        {-0.5f, 0.5f, -0.0f},
        {7.0f, -0.0f, 7.0f},
        {-0.0f, -0.0f, -0.0f},
        {0x1p30f, -0.0f, 0x1p30f},
        {0x1p-140f, 0x1p-140f, 0.0f},
        {-0x1p-140f, 0x1.fffffep-1f, -0.0f}, /* rounded down, and not to 1 */
        {-0x1p-25f, 0x1.fffffep-1f, -0.0f},
        {-0x1p-24f, 0x1.fffffep-1f, -0.0f}, /* exact */
        {INFINITY, 0.0f, INFINITY},
        {-INFINITY, 0.0f, -INFINITY},
        {QUIET, QUIET, QUIET},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const __m512 x = _mm512_set1_ps(cases[i][0]);
        expect("reduce", first(_mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF)), cases[i][1]);
        expect("roundscale", first(_mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)),
               cases[i][2]);
    }
}

static void test_compare(void **unused) {
    (void)unused;
    const __m512 nan = _mm512_set1_ps(QUIET), one = _mm512_set1_ps(1), two = _mm512_set1_ps(2);
    const __m512 zero = _mm512_set1_ps(0), minus = _mm512_set1_ps(-0.0f);
    expect("max(NaN, 1)", first(_mm512_max_ps(nan, one)), 1);
    expect("max(1, NaN)", first(_mm512_max_ps(one, nan)), QUIET);
    expect("max(0, -0)", first(_mm512_max_ps(zero, minus)), -0.0f);
    expect("max(1, 2)", first(_mm512_max_ps(one, two)), 2);
    expect("min(NaN, 1)", first(_mm512_min_ps(nan, one)), 1);
    expect("min(1, NaN)", first(_mm512_min_ps(one, nan)), QUIET);
    expect("min(1, 2)", first(_mm512_min_ps(one, two)), 1);
    const union emu_wide mixed = {.f32 = {1, 2, 3, QUIET, [8] = 1, [15] = QUIET}};
    assert_int_equal(_mm512_cmp_ps_mask(mixed.f, two, _CMP_LT_OQ), 0x7ff1);
    assert_int_equal(_mm512_cmp_ps_mask(mixed.f, mixed.f, _CMP_UNORD_Q), 0x8008);
}

static void test_elements(void **unused) {
    (void)unused;
    union emu_wide a, b,
        order = {.i = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                       5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0)};
    for (uint32_t i = 0; i < 16; i++) {
        a.u32[i] = i;
        b.u32[i] = 100 + i;
    }
    const union emu_wide shuffled = {.f = _mm512_shuffle_f32x4(a.f, b.f, 0x8d)}; /* 1 3 | 0 2 */
    const union emu_wide low = {.f = _mm512_unpacklo_ps(a.f, b.f)};
    const union emu_wide high = {
        .f = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a.f), _mm512_castps_pd(b.f)))};
    const union emu_wide blend = {.f = _mm512_mask_blend_ps(0x8001, a.f, b.f)};
    const union emu_wide words = {.i = _mm512_mask_blend_epi16(0xaaaaaaaa, a.i, b.i)};
    const union emu_wide pairs = {.i = _mm512_permutexvar_epi16(order.i, a.i)};
    for (uint32_t i = 0; i < 16; i++) {
        static const uint32_t quarter[] = {1, 3, 100 / 4, 100 / 4 + 2};
        const uint32_t lane = i % 4, base = i - lane;
        assert_int_equal(shuffled.u32[i], quarter[i / 4] * 4 + lane);
        assert_int_equal(low.u32[i], base + lane / 2 + (lane % 2 ? 100 : 0));
        assert_int_equal(high.u32[i], lane < 2 ? base + 2 + lane : 100 + base + lane);
        assert_int_equal(blend.u32[i], i == 0 || i == 15 ? 100 + i : i);
        assert_int_equal(words.u32[i], i);
        assert_int_equal(pairs.u16[2 * i], a.u16[i]);
        assert_int_equal(pairs.u16[2 * i + 1], a.u16[16 + i]);
    }
    uint8_t bytes[64] = {[0] = 1, [31] = 0x80, [32] = 2, [63] = 0x40};
    const __m512i x = _mm512_loadu_si512(bytes);
    assert_true(_mm512_test_epi8_mask(x, x) == 0x8000000180000001u);
}

/* Through the end of a page after which nothing may be touched. */
static void test_masked_memory(void **unused) {
    (void)unused;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *map = mmap(NULL, 3 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(map, MAP_FAILED);
    assert_int_equal(mprotect(map + page, page, PROT_READ | PROT_WRITE), 0);
    float *first_five = (float *)(void *)(map + 2 * page) - 5, *last_three = (float *)(void *)(map + page) - 13;
    for (int i = 0; i < 5; i++)
        first_five[i] = (float)(i + 1);
    union emu_wide a = {.f = _mm512_maskz_loadu_ps(0x1f, first_five)};
    for (int i = 0; i < 16; i++)
        expect("maskz_loadu", a.f32[i], i < 5 ? (float)(i + 1) : 0);
    _mm512_mask_storeu_ps(first_five, 0x0a, _mm512_set1_ps(9)); /* the second and the fourth */
    _mm512_mask_storeu_ps(last_three, 0xe000, _mm512_set1_ps(7));
    a.f = _mm512_maskz_loadu_ps(0xc000, last_three);
    expect("maskz_loadu", a.f32[13], 0);
    for (int i = 0; i < 5; i++)
        expect("mask_storeu", first_five[i], i % 2 ? 9 : (float)(i + 1));
    for (int i = 13; i < 16; i++)
        expect("mask_storeu", last_three[i], 7);
    munmap(map, 3 * page);
}

static void test_bfloat16(void **unused) {
    (void)unused;
    static const uint32_t cases[][2] = {
        {0x3f800000, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f808001, 0x3f81}, {0x3f818000, 0x3f82}, /* ties to even */
        {0xbf818000, 0xbf82}, {0x3f807fff, 0x3f80}, {0x7f7fffff, 0x7f80},                       /* overflows */
        {0x7f800000, 0x7f80}, {0xff800000, 0xff80}, {0x7f800001, 0x7fc0}, {0xffc12345, 0xffc1}, /* NaN is quiet */
        {0x00000000, 0x0000}, {0x80000000, 0x8000}, {0x007fffff, 0x0000}, {0x80400000, 0x8000}, /* subnormal */
        {0x00800000, 0x0080}, {0x007f8000, 0x0000},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const union emu_wide x = {.u32 = {[3] = cases[i][0]}};
        union emu_wide y = {.half_i = {(__m256i)_mm512_cvtneps_pbh(x.f)}};
        assert_int_equal(y.u16[3], cases[i][1]);
        y.i = (__m512i)_mm512_cvtne2ps_pbh(x.f, _mm512_set1_ps(1));
        assert_int_equal(y.u16[3], 0x3f80);
        assert_int_equal(y.u16[16 + 3], cases[i][1]);
    }
}

/* A pair of bfloat16, of numbers that are. */
static uint32_t pair_of(float even, float odd) {
    return float_to_bits(even) >> 16 | (float_to_bits(odd) & 0xffff0000u);
}

static void test_dot(void **unused) {
    (void)unused;
    const float tiny = 0x1p-126f, subnormal = 0x1p-130f;
    const float cases[][6] = {
        /* sum, even and odd of a, even and odd of b, result */
        {1, 2, 3, 4, 5, 24},
        {0x1p24f, 1, 1, 1, 1, 0x1p24f},       /* each product is rounded away */
        {-0x1p24f, 1, 1, 1, 1, -0x1p24f + 2}, /* and has room */
        {0, -0x1p24f, 0x1p24f, 1, 1, 0},
        {1, -0x1p24f, 0x1p24f, 1, 1, 0},  /* odd first: 1 + 2^24 is 2^24, to even */
        {0, 1, 0x1p-64f, 1, 0x1p-64f, 1}, /* a product below all subnormal numbers */
        {tiny, subnormal, 0, 1, 0, tiny}, /* a subnormal operand is 0 */
        {subnormal, 0, 0, 1, 1, 0},       /* and a subnormal sum */
        {0, 0x1p-63f, 0, 0x1p-64f, 0, 0}, /* a subnormal result */
        {1.5f * tiny, 0, -0x1p-63f, 0, 0x1p-63f, 0},
        {tiny, 0x1p-63f, 0, 0x1p-65f, 0, 1.25f * tiny}, /* but no product: it is not rounded */
        {INFINITY, 1, 1, 1, 1, INFINITY},
        {INFINITY, -INFINITY, 1, 1, 1, QUIET},
        {0, INFINITY, 1, 0, 1, QUIET},
        {QUIET, 1, 1, 1, 1, QUIET},
        {0x1.fffffep127f, 0x1p127f, 0x1p127f, -2, 2, INFINITY}, /* by the odd product; the even one alone is finite */
    };
    const unsigned csr = _mm_getcsr();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const float *c = cases[i];
        const __m512i a = _mm512_set1_epi32((int)pair_of(c[1], c[2])), b = _mm512_set1_epi32((int)pair_of(c[3], c[4]));
        expect("dpbf16", first(_mm512_dpbf16_ps(_mm512_set1_ps(c[0]), (__m512bh)a, (__m512bh)b)), c[5]);
    }
    assert_int_equal(_mm_getcsr(), csr);
}

/* ---- tiles ---- */

static uint32_t state = 1;
static uint32_t draw(void) {
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}
static float draw_bfloat16(void) { return ((float)(draw() % 255) - 127) * ldexpf(1, (int)(draw() % 12) - 6); }

struct shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* 0 += 1 x 2: m x n of sums, k pairs. */
static struct shapes shapes_of(int m, int n, int k) {
    return (struct shapes){.palette = 1,
                           .row_bytes = {(uint16_t)(4 * n), (uint16_t)(4 * k), (uint16_t)(4 * n)},
                           .rows = {(uint8_t)m, (uint8_t)m, (uint8_t)k}};
}

static void check_product(int m, int n, int k) {
    enum { STRIDE = 20 };
    uint32_t a[16][STRIDE], b[16][STRIDE];
    float c[16][STRIDE], wanted[16][STRIDE];
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < STRIDE; j++) {
            a[i][j] = i < m && j < k ? pair_of(draw_bfloat16(), draw_bfloat16()) : 0xffffffff; /* NaN around */
            b[i][j] = i < k && j < n ? pair_of(draw_bfloat16(), draw_bfloat16()) : 0xffffffff;
            wanted[i][j] = c[i][j] = i < m && j < n ? draw_bfloat16() : -1;
        }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            float even = 0, odd = 0;
            for (int p = 0; p < k; p++) {
                even = fmaf(bits_to_float(a[i][p] << 16), bits_to_float(b[p][j] << 16), even);
                odd = fmaf(bits_to_float(a[i][p] & 0xffff0000), bits_to_float(b[p][j] & 0xffff0000), odd);
            }
            wanted[i][j] += even + odd;
        }
    const struct shapes shapes = shapes_of(m, n, k);
    _tile_loadconfig(&shapes);
    _tile_loadd(0, c, sizeof c[0]);
    _tile_loadd(1, a, sizeof a[0]);
    _tile_loadd(2, b, sizeof b[0]);
    _tile_dpbf16ps(0, 1, 2);
    _tile_stored(0, c, sizeof c[0]);
    assert_memory_equal(c, wanted, sizeof c);
    _tile_loadd(1, a[m - 1], 0 - sizeof a[0]); /* rows in reverse, by a negative stride */
    _tile_stored(1, a, sizeof a[0]);
    _tile_zero(0);
    _tile_stored(0, c, sizeof c[0]);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < STRIDE; j++)
            expect("zero", c[i][j], i < m && j < n ? 0 : -1);
    _tile_release();
}

static void test_tile_product(void **unused) {
    (void)unused;
    check_product(16, 16, 16);
    for (int i = 0; i < 60; i++)
        check_product(1 + (int)(draw() % 16), 1 + (int)(draw() % 16), 1 + (int)(draw() % 16));
}

/* Subnormal numbers count as 0, in sums and operands, and results are flushed. */
static void test_tile_flushes(void **unused) {
    (void)unused;
    const struct shapes shapes = shapes_of(1, 4, 1);
    const float tiny = 0x1p-126f, sums[4] = {tiny, 0x1p-130f, 0, tiny}, wanted[4] = {tiny, 0, 0, tiny};
    const uint32_t a = pair_of(1, 0x1p-64f);
    const uint32_t b[4] = {pair_of(0x1p-130f, 0), 0, pair_of(0, 0x1p-63f), pair_of(0x1p-128f, 0x1p-64f)};
    float got[4];
    const unsigned csr = _mm_getcsr();
    _tile_loadconfig(&shapes);
    _tile_loadd(0, sums, 16);
    _tile_loadd(1, &a, 4);
    _tile_loadd(2, b, 16);
    _tile_dpbf16ps(0, 1, 2);
    _tile_stored(0, got, 16);
    _tile_release();
    for (int i = 0; i < 4; i++)
        expect("tile product", got[i], wanted[i]);
    assert_int_equal(_mm_getcsr(), csr);
}

static void use_before_configuration(void) { _tile_zero(0); }
static void use_after_release(void) {
    const struct shapes shapes = shapes_of(1, 1, 1);
    _tile_loadconfig(&shapes);
    _tile_release();
    _tile_zero(0);
}
static void no_release(void) {
    const struct shapes shapes = shapes_of(1, 1, 1);
    _tile_loadconfig(&shapes);
    _tile_loadconfig(&shapes);
}
static void use_of_another(void) {
    const struct shapes shapes = shapes_of(1, 1, 1);
    float memory[16] = {0};
    _tile_loadconfig(&shapes);
    _tile_loadd(3, memory, 64);
}
static void wrong_palette(void) {
    struct shapes shapes = shapes_of(1, 1, 1);
    shapes.palette = 2;
    _tile_loadconfig(&shapes);
}
static void too_many_rows(void) {
    const struct shapes shapes = shapes_of(17, 1, 1);
    _tile_loadconfig(&shapes);
}
static void reserved_byte(void) {
    struct shapes shapes = shapes_of(1, 1, 1);
    shapes.reserved[3] = 1;
    _tile_loadconfig(&shapes);
}
static void multiply(struct shapes shapes) {
    _tile_loadconfig(&shapes);
    _tile_dpbf16ps(0, 1, 2);
}
static void wrong_rows(void) {
    struct shapes shapes = shapes_of(4, 4, 4);
    shapes.rows[1] = 5;
    multiply(shapes);
}
static void wrong_columns(void) {
    struct shapes shapes = shapes_of(4, 4, 4);
    shapes.row_bytes[2] = 20;
    multiply(shapes);
}
static void wrong_depth(void) {
    struct shapes shapes = shapes_of(4, 4, 4);
    shapes.rows[2] = 3;
    multiply(shapes);
}
static void same_tile_twice(void) {
    const struct shapes shapes = shapes_of(4, 4, 4);
    _tile_loadconfig(&shapes);
    _tile_dpbf16ps(0, 1, 1);
}
static void odd_address(void) {
    static const char memory[129] __attribute__((aligned(64)));
    _mm512_load_si512(memory + 1);
}

static void test_stops(void **unused) {
    (void)unused;
    static const struct {
        void (*run)(void);
        const char *line;
    } cases[] = {
        {use_before_configuration, "emulated AMX: zero of tile 0 while none is configured\n"},
        {use_after_release, "emulated AMX: zero of tile 0 while none is configured\n"},
        {no_release, "emulated AMX: configured again without a release\n"},
        {use_of_another, "emulated AMX: load of tile 3, which is not configured\n"},
        {wrong_palette, "emulated AMX: palette 2\n"},
        {too_many_rows, "emulated AMX: tile 0 of 17 rows of 4 bytes\n"},
        {reserved_byte, "emulated AMX: byte 5 of the configuration is 1\n"},
        {wrong_rows, "emulated AMX: product of tiles 0 += 1 2: 4 x 4 += (5 x 4) (4 x 4) pairs\n"},
        {wrong_columns, "emulated AMX: product of tiles 0 += 1 2: 4 x 4 += (4 x 4) (4 x 5) pairs\n"},
        {wrong_depth, "emulated AMX: product of tiles 0 += 1 2: 4 x 4 += (4 x 4) (3 x 4) pairs\n"},
        {same_tile_twice, "emulated AMX: product of tiles 0 += 1 1, which are not three\n"},
        {odd_address, "emulated AVX-512: aligned load at "},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int ends[2], status;
        char line[256] = "";
        assert_int_equal(pipe(ends), 0);
        const pid_t child = fork();
        if (child == 0) {
            dup2(ends[1], STDERR_FILENO);
            signal(SIGABRT, SIG_DFL); /* cmocka's */
            cases[i].run();
            _exit(0);
        }
        close(ends[1]);
        assert_true(read(ends[0], line, sizeof line - 1) >= 0);
        close(ends[0]);
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
        if (strncmp(line, cases[i].line, strlen(cases[i].line)) != 0)
            fail_msg("\"%s\" instead of \"%s\"", line, cases[i].line);
    }
}

/* ---- the processor's ---- */

/* Any bits, numbers near whole ones, and the ends of what there is. */
static uint32_t draw_float(void) {
    static const uint32_t special[] = {0,          0x80000000, 1,          0x80000001, 0x007fffff,
                                       0x00800000, 0x7f7fffff, 0x7f800000, 0xff800000, 0x7fc00000,
                                       0x7f800001, 0x3f800000, 0xbf800000, 0x3f000000, 0xbf000000,
                                       0xc3160000, 0x43000000, 0x3f808000, 0x3f818000, 0xb3800000};
    switch (draw() % 4) {
    case 0: return draw() << 16 ^ draw();
    case 1: return float_to_bits(ldexpf((float)(draw() % 4001) - 2000, (int)(draw() % 12) - 8));
    case 2: return special[draw() % (sizeof special / sizeof special[0])];
    default: return float_to_bits(((float)draw() - 8388608.0f) / 2097152.0f);
    }
}

/* tame: no bits that are infinite or NaN, as products of bfloat16 are mostly asked for. */
static void draw_vector(union x86_vector *v, int tame) {
    for (int i = 0; i < 16; i++)
        v->u32[i] = tame ? pair_of(draw_bfloat16(), draw_bfloat16()) : draw_float();
}

static int same(const struct x86_result *x, const struct x86_result *y) {
    for (int i = 0; i < 16; i++)
        if (x->bits.u32[i] != y->bits.u32[i] &&
            !(x->floats && isnan(bits_to_float(x->bits.u32[i])) && isnan(bits_to_float(y->bits.u32[i]))))
            return 0;
    return 1;
}

static int64_t differ(const struct x86_result *x, const struct x86_result *x_end, const struct x86_result *y) {
    int64_t count = 0;
    for (; x < x_end; x++, y++) {
        if (same(x, y))
            continue;
        count++;
        for (int i = 0; i < 16; i++)
            if (x->bits.u32[i] != y->bits.u32[i])
                printf("%s, element %d: %08x emulated, %08x on this processor\n", x->name, i, x->bits.u32[i],
                       y->bits.u32[i]);
    }
    return count;
}

static void test_processor(void **unused) {
    (void)unused;
    enum { ROUNDS = 20000 };
    static struct x86_operands in;
    static struct x86_result emulated[X86_RESULTS_MAX], native[X86_RESULTS_MAX];
    int64_t wrong = 0;
    if (cpu_isa_refusal(CPU_ISA_AVX512))
        skip();
    for (int round = 0; round < ROUNDS && wrong < 10; round++) {
        const int tame = round % 2;
        draw_vector(&in.a, tame);
        draw_vector(&in.b, tame);
        draw_vector(&in.c, 0);
        for (int row = 0; row < 48; row++)
            draw_vector(&in.tiles[row / 16][row % 16], tame || draw() % 16);
        in.mask = (uint64_t)draw() << 40 ^ (uint64_t)draw() << 20 ^ draw();
        wrong += differ(emulated, x86_emulated.avx512(&in, emulated), (x86_native.avx512(&in, native), native));
        if (!cpu_isa_refusal(CPU_ISA_AVX512_BF16))
            wrong += differ(emulated, x86_emulated.avx512_bf16(&in, emulated),
                            (x86_native.avx512_bf16(&in, native), native));
        if (!cpu_isa_refusal(CPU_ISA_AMX))
            wrong += differ(emulated, x86_emulated.amx(&in, emulated), (x86_native.amx(&in, native), native));
    }
    assert_int_equal(wrong, 0);
}

int test_x86_instructions(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scalef),   cmocka_unit_test(test_reduce_and_round), cmocka_unit_test(test_compare),
        cmocka_unit_test(test_elements), cmocka_unit_test(test_masked_memory),    cmocka_unit_test(test_bfloat16),
        cmocka_unit_test(test_dot),      cmocka_unit_test(test_tile_product),     cmocka_unit_test(test_tile_flushes),
        cmocka_unit_test(test_stops),    cmocka_unit_test(test_processor),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
