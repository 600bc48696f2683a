/* test_exp2.c: the exponential on the FMA pipe (cuda/exp2.cuh) against exp2() over the whole range of float. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/half.h"

/* The kernels' language, as far as the file needs it. */
#define __device__
#define __forceinline__ static inline
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline int32_t __float_as_int(float x) { return (int32_t)float_to_bits(x); }
static inline float __int_as_float(int32_t bits) { return bits_to_float((uint32_t)bits); }
#include "cuda/exp2.cuh"

typedef float (*exponential)(float x);

/* Every 97th number of the 2^32, of both signs: 44 million, all exponents. */
static double worst_of(exponential f) {
    double worst = 0;
    for (uint64_t bits = 0; bits < 1ull << 32; bits += 97) {
        const float x = __int_as_float((int32_t)(uint32_t)bits);
        if (!(x > -126 && x < 127))
            continue;
        const double want = exp2((double)x), error = fabs((double)f(x) - want) / want;
        worst = error > worst ? error : worst;
    }
    return worst;
}
static void keeps_its_bound(void **state) { /* and the bounds that are written down are not idle */
    (void)state;
    const double cubic = worst_of(ex2_polynomial), quartic = worst_of(ex2_quartic);
    assert_true(cubic < 1.1e-4 && cubic > 0.9e-4);
    assert_true(quartic < 3.2e-6 && quartic > 2.6e-6);
}

static void keeps_the_ends(void **state) {
    (void)state;
    static const exponential both[] = {ex2_polynomial, ex2_quartic};
    for (int i = 0; i < 2; i++) {
        const exponential f = both[i];
        assert_true(f(0.0f) == 1.0f);
        assert_true(f(-0.0f) == 1.0f);
        assert_true(f(-INFINITY) == 0.0f);
        assert_true(f(-1e30f) == 0.0f);
        assert_true(f(-127.0f) == 0.0f);
        assert_true(isinf(f(INFINITY)) && f(INFINITY) > 0);
        assert_true(isinf(f(128.0f)) && isinf(f(1e30f)));
        assert_true(isnan(f(NAN)));
        for (int n = -125; n < 128; n++)
            assert_true(f((float)n) == ldexpf(1.0f, n));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(keeps_its_bound), cmocka_unit_test(keeps_the_ends)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
