/* test_merge.c: combining partial results: every dtype, strides, rows without keys, what lse rounds away, NaN, in
 * place, and bad arguments. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/half.h"
#include "flash_dmattn.h"

enum { B = 2, S = 3, H = 2, DV = 5, GAP = 2, ROWS = B * S * H, OUT_SIZE = B * S * H * (DV + GAP) };

/* A pair as values, and as tensors whose rows of out are apart by GAP and whose lse is transposed, [S][H][B]. */
struct pair {
    double out[ROWS][DV], lse[ROWS]; /* row (b, i, h) in this order */
    double out_bytes[OUT_SIZE], lse_bytes[ROWS], low_bytes[ROWS];
    int64_t out_shape[4], out_strides[4], lse_shape[3], lse_strides[3];
    fdm_tensor out_tensor, lse_tensor, low_tensor;
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
    memset(p->low_bytes, 0xff, sizeof p->low_bytes);
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
    p->low_tensor = p->lse_tensor;
    p->low_tensor.data = p->low_bytes;
}

/* One row for all: out is `out` everywhere, and the logarithm lse + low. */
static void make_rows(struct pair *p, fdm_dtype dtype, double out, double lse, double low) {
    make_pair(p, dtype, 0);
    for (int row = 0; row < ROWS; row++) {
        set(p->lse_bytes, lse_index(row), lse, lse_dtype(dtype));
        set(p->low_bytes, lse_index(row), low, lse_dtype(dtype));
        for (int d = 0; d < DV; d++)
            set(p->out_bytes, out_index(row, d), out, dtype);
    }
}

/* The tensors of two parts and a result, without and with low parts. */
static fdm_merge_tensors tensors_of(struct pair *a, struct pair *b, struct pair *result) {
    return (fdm_merge_tensors){.struct_bytes = sizeof(fdm_merge_tensors),
                               .out1 = &a->out_tensor,
                               .lse1 = &a->lse_tensor,
                               .out2 = &b->out_tensor,
                               .lse2 = &b->lse_tensor,
                               .out = &result->out_tensor,
                               .lse = &result->lse_tensor};
}
static fdm_merge_tensors with_low(struct pair *a, struct pair *b, struct pair *result) {
    fdm_merge_tensors t = tensors_of(a, b, result);
    t.lse_low1 = &a->low_tensor, t.lse_low2 = &b->low_tensor, t.lse_low = &result->low_tensor;
    return t;
}

static void merge_pairs(struct pair *a, struct pair *b, struct pair *result) {
    const fdm_merge_tensors t = tensors_of(a, b, result);
    assert_int_equal(fdm_merge(&t, NULL), FDM_OK);
}
static void merge_with_low(struct pair *a, struct pair *b, struct pair *result) {
    const fdm_merge_tensors t = with_low(a, b, result);
    assert_int_equal(fdm_merge(&t, NULL), FDM_OK);
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
        merge_pairs(&a, &b, &result);
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
        merge_pairs(&a, &b, result);
        assert_merged(&a, &b, result, dtypes[i / 2]);
    }
}

/* Far apart, the larger one is the result, without overflow. */
static void extreme_lse(void **state) {
    (void)state;
    struct pair a, b;
    make_rows(&a, FDM_FLOAT32, 2, 3e38, 0);
    make_rows(&b, FDM_FLOAT32, 5, -3e38, 0);
    merge_pairs(&a, &b, &b);
    for (int row = 0; row < ROWS; row++) {
        assert_true(get(b.lse_bytes, lse_index(row), FDM_FLOAT32) == (double)3e38f);
        for (int d = 0; d < DV; d++)
            assert_true(get(b.out_bytes, out_index(row, d), FDM_FLOAT32) == 2);
    }
}

/* ---- what lse rounds away ---- */

/* n keys of one bias: lse and lse_low as a forward gives them. */
static void make_keys(struct pair *p, fdm_dtype dtype, double out, double bias, double n) {
    const double lse = lse_dtype(dtype) == FDM_FLOAT32 ? (double)(float)(bias + log(n)) : bias + log(n);
    make_rows(p, dtype, out, lse, bias - lse + log(n));
}

static void assert_rows(const struct pair *p, fdm_dtype dtype, double out, double bias, double n) {
    for (int row = 0; row < ROWS; row++) {
        const double lse = get(p->lse_bytes, lse_index(row), lse_dtype(dtype)),
                     low = get(p->low_bytes, lse_index(row), lse_dtype(dtype));
        assert_close(lse - bias + low, log(n), 1e-6);
        assert_close(get(p->out_bytes, out_index(row, DV - 1), dtype), out, 4e-3); /* of bfloat16 */
    }
}

/* Beside a low bias the number of keys is in lse_low alone. */
static void counts_keys_beside_low_biases(void **state) {
    (void)state;
    static const double biases[] = {0, -1e4, -1e6, -1e9, -3e38, 1e9};
    for (int i = 0; i < 24; i++) {
        struct pair a, b, c, result, again;
        const fdm_dtype dtype = dtypes[i / 6];
        const double bias = (double)(float)biases[i % 6];
        make_keys(&a, dtype, 0, bias, 1000);
        make_keys(&b, dtype, 1, bias, 3000);
        make_keys(&c, dtype, 0, bias, 4000);
        make_pair(&result, dtype, 1);
        merge_with_low(&a, &b, &result);
        assert_rows(&result, dtype, 0.75, bias, 4000);
        make_pair(&again, dtype, 2);
        merge_with_low(&b, &a, &again);
        assert_memory_equal(result.lse_bytes, again.lse_bytes, sizeof again.lse_bytes);
        assert_memory_equal(result.low_bytes, again.low_bytes, sizeof again.low_bytes);
        assert_memory_equal(result.out_bytes, again.out_bytes, sizeof again.out_bytes);
        merge_with_low(&result, &c, &result); /* in place, of a result */
        assert_rows(&result, dtype, 0.375, bias, 8000);
        merge_with_low(&c, &again, &again);
        assert_rows(&again, dtype, 0.375, bias, 8000);
    }
}

/* A low part that is not given is 0; the result's may be wanted all the same. */
static void low_parts_may_be_absent(void **state) {
    (void)state;
    struct pair a, b, result;
    make_keys(&a, FDM_FLOAT32, 0, -1e9, 1000);
    make_rows(&b, FDM_FLOAT32, 1, -1e9, NAN);
    make_pair(&result, FDM_FLOAT32, 1);
    fdm_merge_tensors t = with_low(&a, &b, &result);
    t.lse_low2 = NULL; /* one key, then */
    assert_int_equal(fdm_merge(&t, NULL), FDM_OK);
    assert_rows(&result, FDM_FLOAT32, 1 / 1001.0, -1e9, 1001);
    t = with_low(&b, &a, &result);
    t.lse_low1 = NULL;
    assert_int_equal(fdm_merge(&t, NULL), FDM_OK);
    assert_rows(&result, FDM_FLOAT32, 1 / 1001.0, -1e9, 1001);
    make_rows(&a, FDM_FLOAT32, 0, -1e9, NAN);
    t = with_low(&a, &b, &result);
    t.lse_low1 = t.lse_low2 = NULL;
    assert_int_equal(fdm_merge(&t, NULL), FDM_OK);
    assert_rows(&result, FDM_FLOAT32, 0.5, -1e9, 2);
    t.lse_low1 = &a.low_tensor, t.lse_low = NULL;
    make_keys(&a, FDM_FLOAT32, 0, -1e9, 3);
    assert_int_equal(fdm_merge(&t, NULL), FDM_OK);
    assert_close(get(result.out_bytes, out_index(3, 2), FDM_FLOAT32), 0.25, 1e-6);
}

/* Without keys a part's low number is nothing, and the result's is 0. */
static void low_parts_of_rows_without_keys(void **state) {
    (void)state;
    struct pair none, some, result;
    for (int minus = 0; minus < 2; minus++) {
        make_rows(&none, FDM_FLOAT32, NAN, minus ? -INFINITY : INFINITY, NAN);
        make_keys(&some, FDM_FLOAT32, 7, -1e6, 100);
        make_pair(&result, FDM_FLOAT32, 1);
        merge_with_low(&none, &some, &result);
        assert_rows(&result, FDM_FLOAT32, 7, -1e6, 100);
        merge_with_low(&some, &none, &result);
        assert_rows(&result, FDM_FLOAT32, 7, -1e6, 100);
        merge_with_low(&none, &none, &result);
        for (int row = 0; row < ROWS; row++) {
            assert_true(get(result.lse_bytes, lse_index(row), FDM_FLOAT32) == (double)INFINITY);
            assert_true(get(result.low_bytes, lse_index(row), FDM_FLOAT32) == 0);
            assert_true(get(result.out_bytes, out_index(row, 1), FDM_FLOAT32) == 0);
        }
    }
}

/* ---- NaN ---- */

/* Whether all of the result's out and of its lse are NaN. */
static void assert_nan(const struct pair *p, fdm_dtype dtype, int out, int lse) {
    for (int row = 0; row < ROWS; row++) {
        assert_int_equal(isnan(get(p->lse_bytes, lse_index(row), lse_dtype(dtype))) != 0, lse);
        for (int d = 0; d < DV; d++)
            assert_int_equal(isnan(get(p->out_bytes, out_index(row, d), dtype)) != 0, out);
    }
}

static void nan_stays_nan(void **state) {
    (void)state;
    static const double others[] = {0, 5, -1000, 1000, -3e38, 3e38, INFINITY, -INFINITY, NAN};
    for (int i = 0; i < 36; i++) {
        const fdm_dtype dtype = dtypes[i / 9];
        const double other = others[i % 9];
        const int alone = isinf(other) != 0, any = isnan(other) != 0;
        for (int second = 0; second < 2; second++) {
            struct pair part, beside, result, *one = second ? &beside : &part, *two = second ? &part : &beside;
            make_rows(&beside, dtype, 2, other, 0);
            make_pair(&result, dtype, 1);
            make_rows(&part, dtype, 1, NAN, 0); /* the number of its keys is NaN, its row is not */
            merge_pairs(one, two, &result);
            assert_nan(&result, dtype, 1, 1);
            make_rows(&part, dtype, 1, 0, NAN);
            merge_with_low(one, two, &result);
            assert_nan(&result, dtype, 1, 1);
            make_rows(&part, dtype, NAN, 0, 0); /* its row is, however small its share */
            merge_with_low(one, two, &result);
            assert_nan(&result, dtype, 1, any);
            make_rows(&part, dtype, NAN, INFINITY, NAN); /* it has no keys */
            merge_with_low(one, two, &result);
            assert_nan(&result, dtype, any && !alone, any && !alone);
        }
    }
}

/* ---- bad arguments ---- */

static void assert_refused(const fdm_merge_tensors *t, fdm_status status, const char *words) {
    assert_int_equal(fdm_merge(t, NULL), status);
    if (!strstr(fdm_last_error(), words))
        fail_msg("\"%s\" does not say %s", fdm_last_error(), words);
}

static void refuses(void **state) {
    (void)state;
    struct pair p, q;
    make_pair(&p, FDM_FLOAT32, 1);
    make_pair(&q, FDM_FLOAT32, 2);
    fdm_merge_tensors t = tensors_of(&p, &q, &p);
    const fdm_tensor **const given[4] = {&t.out1, &t.lse1, &t.out2, &t.lse2};
    const char *const missing[4] = {"out1 is NULL", "lse1 is NULL", "out2 is NULL", "lse2 is NULL"};
    for (int i = 0; i < 4; i++) {
        const fdm_tensor *before = *given[i];
        *given[i] = NULL;
        assert_refused(&t, FDM_ERROR_INVALID_ARGUMENT, missing[i]);
        *given[i] = before;
    }
    t.out = NULL;
    assert_refused(&t, FDM_ERROR_INVALID_ARGUMENT, "out is NULL");
    t = tensors_of(&p, &q, &p);
    t.lse = NULL;
    assert_refused(&t, FDM_ERROR_INVALID_ARGUMENT, "lse is NULL");
    assert_refused(NULL, FDM_ERROR_INVALID_ARGUMENT, "tensors is NULL");
    t = with_low(&p, &q, &p);
    q.out_shape[3] = DV - 1;
    assert_refused(&t, FDM_ERROR_INVALID_ARGUMENT, "out2 has shape [2, 3, 2, 4]; it must be [2, 3, 2, 5]");
    make_pair(&q, FDM_FLOAT32, 2);
    p.lse_tensor.dtype = fdm_data_type_of(FDM_FLOAT64);
    assert_refused(&t, FDM_ERROR_INVALID_ARGUMENT, "lse1 is float64; it must be float32");
    make_pair(&p, FDM_FLOAT32, 1);
    q.low_tensor.dtype = fdm_data_type_of(FDM_FLOAT64);
    assert_refused(&t, FDM_ERROR_INVALID_ARGUMENT, "lse_low2 is float64; it must be float32");
    make_pair(&q, FDM_FLOAT32, 2);
    q.low_tensor.ndim = 2;
    assert_refused(&t, FDM_ERROR_INVALID_ARGUMENT, "lse_low2 has 2 axes; it needs 3");
    make_pair(&q, FDM_FLOAT32, 2);
    p.out_tensor.dtype = fdm_data_type_of(FDM_INT32);
    assert_refused(&t, FDM_ERROR_INVALID_ARGUMENT, "out1 is int32");
    make_pair(&p, FDM_FLOAT32, 1);
    p.out_strides[1] = 0;
    assert_refused(&t, FDM_ERROR_INVALID_ARGUMENT, "out is written");
    make_pair(&p, FDM_FLOAT32, 1);
    p.lse_tensor.device.type = FDM_CUDA;
    assert_refused(&t, FDM_ERROR_INVALID_ARGUMENT, "lse1 is on DLPack device 2:0, but out1 is on 1:0");
    make_pair(&p, FDM_FLOAT32, 1);
    p.out_tensor.device.type = 8;
    assert_refused(&t, FDM_ERROR_UNSUPPORTED, "out1 is on DLPack device type 8");
}

/* What is written lies apart, but for the places that it may take. */
static void refuses_overlaps(void **state) {
    (void)state;
    static const char *const names[9] = {"out1",     "lse1", "lse_low1", "out2",   "lse2",
                                         "lse_low2", "out",  "lse",      "lse_low"};
    char words[64];
    for (int written = 6; written < 9; written++)
        for (int other = 0; other < 9; other++)
            for (int shift = 0; shift < 2; shift++) {
                struct pair a, b, result;
                if (other == written || (!shift && other < 6 && other % 3 == written % 3))
                    continue; /* the place that it may take */
                make_pair(&a, FDM_FLOAT64, 1);
                make_pair(&b, FDM_FLOAT64, 2);
                make_pair(&result, FDM_FLOAT64, 3);
                fdm_merge_tensors t = with_low(&a, &b, &result);
                const fdm_tensor *all[9];
                memcpy(all, &t.out1, sizeof all);
                double *const memory = all[other]->data, before[2] = {memory[0], memory[1]};
                fdm_tensor moved = *all[written];
                moved.data = memory + shift;
                all[written] = &moved;
                memcpy(&t.out1, all, sizeof all);
                const int first = written < other || other < 6 ? written : other; /* whoever is written first */
                snprintf(words, sizeof words, "%s overlaps %s in memory; it is written", names[first],
                         names[written + other - first]);
                assert_refused(&t, FDM_ERROR_INVALID_ARGUMENT, words);
                assert_memory_equal(memory, before, sizeof before);
            }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merges_every_dtype),
        cmocka_unit_test(merges_in_place),
        cmocka_unit_test(extreme_lse),
        cmocka_unit_test(counts_keys_beside_low_biases),
        cmocka_unit_test(low_parts_may_be_absent),
        cmocka_unit_test(low_parts_of_rows_without_keys),
        cmocka_unit_test(nan_stays_nan),
        cmocka_unit_test(refuses),
        cmocka_unit_test(refuses_overlaps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
