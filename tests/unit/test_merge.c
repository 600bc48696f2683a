/* test_merge.c: combining partial results: every dtype, strides, rows without keys, in place, and bad arguments. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/half.h"
#include "flash_dmattn.h"

enum { B = 2, S = 3, H = 2, DV = 5, GAP = 2, ROWS = B * S * H, OUT_SIZE = B * S * H * (DV + GAP) };

/* A pair as values, and as tensors whose rows of out are apart by GAP and whose lse is transposed, [S][H][B]. */
struct pair {
    double out[ROWS][DV], lse[ROWS]; /* row (b, i, h) in this order */
    double out_bytes[OUT_SIZE], lse_bytes[ROWS];
    int64_t out_shape[4], out_strides[4], lse_shape[3], lse_strides[3];
    fdm_tensor out_tensor, lse_tensor;
};

static void set(void *data, int64_t index, double value, fdm_dtype dtype) {
    switch (dtype) {
    case FDM_FLOAT32: ((float *)data)[index] = (float)value; break;
    case FDM_FLOAT16: ((uint16_t *)data)[index] = float_to_float16((float)value); break;
    case FDM_BFLOAT16: ((uint16_t *)data)[index] = float_to_bfloat16((float)value); break;
    default: ((double *)data)[index] = value; break;
    }
}

static double get(const void *data, int64_t index, fdm_dtype dtype) {
    switch (dtype) {
    case FDM_FLOAT32: return ((const float *)data)[index];
    case FDM_FLOAT16: return float16_to_float(((const uint16_t *)data)[index]);
    case FDM_BFLOAT16: return bfloat16_to_float(((const uint16_t *)data)[index]);
    default: return ((const double *)data)[index];
    }
}

static int64_t out_index(int row, int d) { return (int64_t)row * (DV + GAP) + d; }
static int64_t lse_index(int row) {
    int b = row / (S * H), i = row / H % S, h = row % H;
    return (i * H + h) * B + b;
}
static fdm_dtype lse_dtype(fdm_dtype dtype) { return dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32; }

static void make_pair(struct pair *p, fdm_dtype dtype, int seed) {
    *p = (struct pair){.out_shape = {B, S, H, DV},
                       .out_strides = {S * H * (DV + GAP), H * (DV + GAP), DV + GAP, 1},
                       .lse_shape = {B, H, S},
                       .lse_strides = {1, B, H * B}};
    memset(p->out_bytes, 0xff, sizeof p->out_bytes); /* NaN in every dtype */
    memset(p->lse_bytes, 0xff, sizeof p->lse_bytes);
    for (int row = 0; row < ROWS; row++) {
        p->lse[row] = (row * 7 + seed * 5) % 11 - 5.25 + seed;
        if ((row + seed) % 4 == 0)
            p->lse[row] = INFINITY; /* no keys: whatever out holds must not count */
        if (row % 8 == 7)
            p->lse[row] = INFINITY; /* in both */
        set(p->lse_bytes, lse_index(row), p->lse[row], lse_dtype(dtype));
        for (int d = 0; d < DV; d++) {
            p->out[row][d] = isinf(p->lse[row]) ? NAN : (row * 3 + d * 5 + seed * 13) % 17 / 8.0 - 1;
            set(p->out_bytes, out_index(row, d), p->out[row][d], dtype);
        }
    }
    p->out_tensor =
        (fdm_tensor){p->out_bytes, {FDM_CPU, 0}, 4, fdm_data_type_of(dtype), p->out_shape, p->out_strides, 0};
    p->lse_tensor = (fdm_tensor){p->lse_bytes, {FDM_CPU, 0},   3, fdm_data_type_of(lse_dtype(dtype)),
                                 p->lse_shape, p->lse_strides, 0};
}

static void assert_close(double have, double want, double tolerance) {
    if (!(have == want || fabs(have - want) <= tolerance))
        fail_msg("%.17g, expected %.17g", have, want);
}

static void assert_merged(const struct pair *a, const struct pair *b, const struct pair *result, fdm_dtype dtype) {
    const double tolerance = dtype == FDM_FLOAT64    ? 1e-15
                             : dtype == FDM_FLOAT32  ? 1.2e-7
                             : dtype == FDM_BFLOAT16 ? 0x1p-8
                                                     : 0x1p-11;
    for (int row = 0; row < ROWS; row++) {
        double w1 = isinf(a->lse[row]) ? 0 : exp(a->lse[row]), w2 = isinf(b->lse[row]) ? 0 : exp(b->lse[row]);
        double lse = w1 + w2 > 0 ? log(w1 + w2) : (double)INFINITY;
        assert_close(get(result->lse_bytes, lse_index(row), lse_dtype(dtype)), lse,
                     dtype == FDM_FLOAT64 ? 1e-14 : 1e-6);
        for (int d = 0; d < DV; d++) {
            double sum = (w1 > 0 ? w1 * a->out[row][d] : 0) + (w2 > 0 ? w2 * b->out[row][d] : 0);
            assert_close(get(result->out_bytes, out_index(row, d), dtype), w1 + w2 > 0 ? sum / (w1 + w2) : 0,
                         tolerance);
        }
        for (int d = DV; d < DV + GAP; d++)
            assert_true(isnan(get(result->out_bytes, out_index(row, d), dtype)));
    }
}

static const fdm_dtype dtypes[] = {FDM_FLOAT32, FDM_FLOAT16, FDM_BFLOAT16, FDM_FLOAT64};

static void merges_every_dtype(void **state) {
    (void)state;
    for (int i = 0; i < 4; i++) {
        struct pair a, b, result;
        make_pair(&a, dtypes[i], 1);
        make_pair(&b, dtypes[i], 2);
        make_pair(&result, dtypes[i], 3);
        assert_int_equal(fdm_merge(&a.out_tensor, &a.lse_tensor, &b.out_tensor, &b.lse_tensor, &result.out_tensor,
                                   &result.lse_tensor, NULL),
                         FDM_OK);
        assert_merged(&a, &b, &result, dtypes[i]);
    }
}

/* The result takes the place of either input. */
static void merges_in_place(void **state) {
    (void)state;
    for (int i = 0; i < 8; i++) {
        struct pair a, b, *result = i & 1 ? &b : &a;
        make_pair(&a, dtypes[i / 2], 1);
        make_pair(&b, dtypes[i / 2], 2);
        assert_int_equal(fdm_merge(&a.out_tensor, &a.lse_tensor, &b.out_tensor, &b.lse_tensor, &result->out_tensor,
                                   &result->lse_tensor, NULL),
                         FDM_OK);
        assert_merged(&a, &b, result, dtypes[i / 2]);
    }
}

/* Far apart, the larger one is the result, without overflow. */
static void extreme_lse(void **state) {
    (void)state;
    struct pair a, b;
    make_pair(&a, FDM_FLOAT32, 1);
    make_pair(&b, FDM_FLOAT32, 2);
    for (int row = 0; row < ROWS; row++) {
        set(a.lse_bytes, lse_index(row), 3e38, FDM_FLOAT32);
        set(b.lse_bytes, lse_index(row), -3e38, FDM_FLOAT32);
        for (int d = 0; d < DV; d++)
            set(a.out_bytes, out_index(row, d), row + d, FDM_FLOAT32);
    }
    assert_int_equal(
        fdm_merge(&a.out_tensor, &a.lse_tensor, &b.out_tensor, &b.lse_tensor, &b.out_tensor, &b.lse_tensor, NULL),
        FDM_OK);
    for (int row = 0; row < ROWS; row++) {
        assert_true(get(b.lse_bytes, lse_index(row), FDM_FLOAT32) == (double)3e38f);
        for (int d = 0; d < DV; d++)
            assert_true(get(b.out_bytes, out_index(row, d), FDM_FLOAT32) == row + d);
    }
}

static void assert_refused(struct pair *p, fdm_status status, const char *word) {
    assert_int_equal(
        fdm_merge(&p->out_tensor, &p->lse_tensor, &p->out_tensor, &p->lse_tensor, &p->out_tensor, &p->lse_tensor, NULL),
        status);
    if (!strstr(fdm_last_error(), word))
        fail_msg("\"%s\" does not say %s", fdm_last_error(), word);
}

static void refuses(void **state) {
    (void)state;
    struct pair p, q;
    make_pair(&p, FDM_FLOAT32, 1);
    make_pair(&q, FDM_FLOAT32, 2);
    const fdm_tensor *all[6] = {&p.out_tensor, &p.lse_tensor, &q.out_tensor,
                                &q.lse_tensor, &p.out_tensor, &p.lse_tensor};
    const char *names[6] = {"out1 is NULL", "lse1 is NULL", "out2 is NULL",
                            "lse2 is NULL", "out is NULL",  "lse is NULL"};
    for (int i = 0; i < 6; i++) {
        const fdm_tensor *t[6];
        memcpy(t, all, sizeof t);
        t[i] = NULL;
        assert_int_equal(fdm_merge(t[0], t[1], t[2], t[3], (fdm_tensor *)t[4], (fdm_tensor *)t[5], NULL),
                         FDM_ERROR_INVALID_ARGUMENT);
        assert_string_equal(fdm_last_error(), names[i]);
    }
    q.out_shape[3] = DV - 1;
    assert_int_equal(
        fdm_merge(&p.out_tensor, &p.lse_tensor, &q.out_tensor, &q.lse_tensor, &p.out_tensor, &p.lse_tensor, NULL),
        FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "out2 has shape [2, 3, 2, 4]; it must be [2, 3, 2, 5]"));
    p.lse_tensor.dtype = fdm_data_type_of(FDM_FLOAT64);
    assert_refused(&p, FDM_ERROR_INVALID_ARGUMENT, "lse1 is float64; it must be float32");
    make_pair(&p, FDM_FLOAT32, 1);
    p.out_tensor.dtype = fdm_data_type_of(FDM_INT32);
    assert_refused(&p, FDM_ERROR_INVALID_ARGUMENT, "out1 is int32");
    make_pair(&p, FDM_FLOAT32, 1);
    p.out_strides[1] = 0;
    assert_refused(&p, FDM_ERROR_INVALID_ARGUMENT, "out is written");
    make_pair(&p, FDM_FLOAT32, 1);
    p.lse_tensor.device.type = FDM_CUDA;
    assert_refused(&p, FDM_ERROR_INVALID_ARGUMENT, "lse1 is on DLPack device 2:0, but out1 is on 1:0");
    make_pair(&p, FDM_FLOAT32, 1);
    p.out_tensor.device.type = 8;
    assert_refused(&p, FDM_ERROR_UNSUPPORTED, "out1 is on DLPack device type 8");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merges_every_dtype),
        cmocka_unit_test(merges_in_place),
        cmocka_unit_test(extreme_lse),
        cmocka_unit_test(refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
