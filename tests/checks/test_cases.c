/* test_cases.c: named problems on which implementations of this kind of attention are known or suspected to go wrong,
 * on every kernel of this machine: against the reference, and against what the case itself says. */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "flash_dmattn.h"

enum { H = 2, HKV = 1, D = 64, TENSORS = 13 };
enum { Q, K, V, OUT, LSE, DOUT, DQ, DK, DV, BIAS, DBIAS, MASK, LSE_LOW };

struct scene {
    int64_t sq, sk;
    fdm_options options;
    fdm_tensor tensor[TENSORS];
    int64_t shape[TENSORS][4];
    int32_t *start, *end; /* [sk]; NULL = none */
};

static void *make(struct scene *s, int n, fdm_dtype dtype, int32_t ndim, const int64_t *shape) {
    size_t elements = 1, bytes = (size_t)fdm_dtype_bytes(dtype);
    for (int32_t i = 0; i < ndim; i++)
        elements *= (size_t)(s->shape[n][i] = shape[i]);
    s->tensor[n] = (fdm_tensor){
        test_calloc(elements + 1, bytes), {FDM_CPU, 0}, ndim, fdm_data_type_of(dtype), s->shape[n], NULL, 0};
    return s->tensor[n].data;
}

static void fill(float *data, int64_t count, uint32_t seed) {
    for (int64_t i = 0; i < count; i++) {
        seed = seed * 1664525 + 1013904223;
        data[i] = (float)(int32_t)seed * 0x1p-31f * 1.7f;
    }
}

/* One batch of float32 tensors; bias_rows 0 = no bias, else 1 or sq. */
static struct scene *open_scene(int64_t sq, int64_t sk, int64_t bias_rows, int mask) {
    struct scene *s = test_calloc(1, sizeof *s);
    s->sq = sq, s->sk = sk, s->options = fdm_options_default();
    const int64_t q[] = {1, sq, H, D}, k[] = {1, sk, HKV, D}, lse[] = {1, H, sq}, bias[] = {1, 1, bias_rows, sk};
    const int64_t pairs[] = {1, 1, sq, sk};
    for (int n = Q; n <= DV; n++)
        if (n != LSE)
            fill(make(s, n, FDM_FLOAT32, 4, n == K || n == V || n >= DK ? k : q),
                 n == K || n == V || n >= DK ? sk * HKV * D : sq * H * D, (uint32_t)n + 1);
    make(s, LSE, FDM_FLOAT32, 3, lse);
    if (bias_rows) {
        make(s, LSE_LOW, FDM_FLOAT32, 3, lse);
        fill(make(s, BIAS, FDM_FLOAT32, 4, bias), bias_rows * sk, 99);
        make(s, DBIAS, FDM_FLOAT32, 4, bias);
    }
    if (mask)
        make(s, MASK, FDM_BOOL, 4, pairs);
    return s;
}

static void close_scene(struct scene *s) {
    for (int n = 0; n < TENSORS; n++)
        if (s->tensor[n].data)
            test_free(s->tensor[n].data);
    test_free(s);
}

/* 0 when a named kernel does not take float32 problems of this kind. */
static int run(struct scene *s, fdm_pass pass, const char *family, const char *kernel) {
    fdm_tensor *t = s->tensor;
    const int64_t keys = s->sk;
    fdm_tensor start = {s->start, {FDM_CPU, 0}, 3, fdm_data_type_of(FDM_INT32), (int64_t[]){1, 1, keys}, NULL, 0};
    fdm_tensor end = start;
    end.data = s->end;
    fdm_tensors all = {.struct_bytes = sizeof all, .q = &t[Q], .k = &t[K], .v = &t[V], .out = &t[OUT], .lse = &t[LSE]};
    all.bias = t[BIAS].data ? &t[BIAS] : NULL;
    all.lse_low = t[LSE_LOW].data ? &t[LSE_LOW] : NULL;
    all.mask = t[MASK].data ? &t[MASK] : NULL;
    all.interval_start = s->start ? &start : NULL;
    all.interval_end = s->start ? &end : NULL;
    fdm_options options = s->options;
    options.family = family;
    options.kernel = kernel;
    if (pass == FDM_BACKWARD) {
        all.dout = &t[DOUT], all.dq = &t[DQ], all.dk = &t[DK], all.dv = &t[DV];
        all.dbias = t[BIAS].data ? &t[DBIAS] : NULL;
    }
    fdm_status status = pass == FDM_FORWARD ? fdm_attention_forward(&all, &options, NULL)
                                            : fdm_attention_backward(&all, &options, NULL);
    if (status == FDM_ERROR_UNSUPPORTED && kernel)
        return 0;
    if (status)
        fail_msg("%s: %s", kernel ? kernel : family, fdm_last_error());
    return 1;
}

static int64_t elements_of(const fdm_tensor *t) {
    int64_t n = 1;
    for (int32_t i = 0; i < t->ndim; i++)
        n *= t->shape[i];
    return n;
}

static void poison(struct scene *s, int first, int last) {
    for (int n = first; n <= last; n++)
        for (int64_t i = 0; s->tensor[n].data && i < elements_of(&s->tensor[n]); i++)
            ((float *)s->tensor[n].data)[i] = NAN;
}

/* Float32 sums over all rows may cancel, so the measure is the largest element, at least 1. */
static void expect_near(const fdm_tensor *t, const float *want, const char *kernel, int n) {
    static const char *const names[TENSORS] = {"q",  "k",  "v",    "out",   "lse",  "dout",   "dq",
                                               "dk", "dv", "bias", "dbias", "mask", "lse_low"};
    const float *have = t->data;
    float size = 1;
    for (int64_t i = 0; i < elements_of(t); i++)
        size = isfinite(want[i]) && fabsf(want[i]) > size ? fabsf(want[i]) : size;
    for (int64_t i = 0; i < elements_of(t); i++)
        if (have[i] != want[i] && !(fabsf(have[i] - want[i]) <= 1e-4f * size))
            fail_msg("%s: %s[%lld] is %g, not %g", kernel, names[n], (long long)i, (double)have[i], (double)want[i]);
}

/* Every kernel's outputs against the reference's. */
static void check_against_reference(struct scene *s) {
    static const int outputs[2][4] = {{OUT, LSE, LSE_LOW, -1}, {DQ, DK, DV, DBIAS}};
    float *want[TENSORS] = {NULL};
    for (int pass = 0; pass < 2; pass++)
        run(s, (fdm_pass)pass, "reference", NULL);
    for (int n = 0; n < TENSORS; n++)
        if (s->tensor[n].data && n != MASK) {
            size_t bytes = (size_t)elements_of(&s->tensor[n]) * sizeof(float);
            want[n] = test_malloc(bytes + 1);
            memcpy(want[n], s->tensor[n].data, bytes);
        }
    fdm_kernel_info info = {.struct_bytes = sizeof info};
    int ran[2] = {0, 0};
    for (int32_t i = 0; fdm_kernel_list(i, &info) == FDM_OK; i++) {
        if (strcmp(info.family, "reference") == 0 || !info.available)
            continue;
        for (int j = 0; j < 4 && outputs[info.pass][j] >= 0; j++)
            poison(s, outputs[info.pass][j], outputs[info.pass][j]);
        const int taken = run(s, info.pass, info.family, info.name);
        ran[info.pass] += taken;
        for (int j = 0; taken && j < 4 && outputs[info.pass][j] >= 0; j++)
            if (want[outputs[info.pass][j]])
                expect_near(&s->tensor[outputs[info.pass][j]], want[outputs[info.pass][j]], info.name,
                            outputs[info.pass][j]);
        memcpy(s->tensor[OUT].data, want[OUT], (size_t)elements_of(&s->tensor[OUT]) * sizeof(float));
        memcpy(s->tensor[LSE].data, want[LSE], (size_t)elements_of(&s->tensor[LSE]) * sizeof(float));
        if (want[LSE_LOW])
            memcpy(s->tensor[LSE_LOW].data, want[LSE_LOW], (size_t)elements_of(&s->tensor[LSE]) * sizeof(float));
    }
    assert_true(ran[FDM_FORWARD] >= 1 && ran[FDM_BACKWARD] >= 1);
    for (int n = 0; n < TENSORS; n++)
        if (want[n])
            test_free(want[n]);
}

/* Rows below a tile's first visible row must not reuse the tile of queries loaded before it. */
static void tile_inactive_then_active_in_backward(void **state) {
    (void)state;
    struct scene *s = open_scene(320, 256, 0, 1);
    for (int64_t i = 0; i < 320; i++)
        for (int64_t j = 0; j < 256; j++)
            ((uint8_t *)s->tensor[MASK].data)[i * 256 + j] = j < 128 ? i < 64 || (i >= 192 && i < 256) : i >= 128;
    check_against_reference(s);
    close_scene(s);
}

/* The cap is multiplied back, and the bias stands outside the tanh. */
static void softcap_keeps_its_scale_and_bias_outside(void **state) {
    (void)state;
    struct scene *s = open_scene(70, 130, 1, 0);
    s->options.softcap = 2;
    for (int64_t j = 0; j < 130; j++)
        ((float *)s->tensor[BIAS].data)[j] = j == 77 ? 40 : 0;
    check_against_reference(s);
    run(s, FDM_FORWARD, "cpu", NULL);
    const float *lse = s->tensor[LSE].data; /* |capped| < 2 and the bias is 40 */
    for (int64_t i = 0; i < H * 70; i++)
        assert_true(lse[i] > 38 && lse[i] < 42.1f);
    close_scene(s);
}

/* Sk % 64 in 1 .. 48: the block before the last keeps its own mask and bias columns. */
static void key_tail_does_not_reach_the_block_before(void **state) {
    (void)state;
    for (int64_t sk = 129; sk < 192; sk += 21) {
        struct scene *s = open_scene(40, sk, 40, 1);
        for (int64_t n = 0; n < 40 * sk; n++)
            ((uint8_t *)s->tensor[MASK].data)[n] = n % 3 != 0;
        check_against_reference(s);
        close_scene(s);
    }
}

/* Sq % 64 != 0 with a mask per row: rows past the last are not read. The memory ends with the last row. */
static void row_tail_is_not_read(void **state) {
    (void)state;
    for (int64_t sq = 65; sq < 128; sq += 31) {
        struct scene *s = open_scene(sq, 64, sq, 1);
        memset(s->tensor[MASK].data, 1, (size_t)(sq * 64));
        check_against_reference(s);
        close_scene(s);
    }
}

/* A block of rows without any key: out 0, lse +inf, no gradient, whatever came before. */
static void rows_without_any_key(void **state) {
    (void)state;
    struct scene *s = open_scene(192, 128, 1, 1);
    for (int64_t i = 0; i < 192; i++)
        memset((char *)s->tensor[MASK].data + i * 128, i < 64 || i >= 128, 128);
    check_against_reference(s);
    fdm_kernel_info info = {.struct_bytes = sizeof info};
    for (int32_t n = 0; fdm_kernel_list(n, &info) == FDM_OK; n++) {
        if (!info.available || info.pass != FDM_FORWARD)
            continue;
        poison(s, OUT, LSE);
        const int taken = run(s, FDM_FORWARD, info.family, info.name);
        for (int64_t i = 64; taken && i < 128; i++)
            for (int64_t h = 0; h < H; h++) {
                assert_true(((float *)s->tensor[LSE].data)[h * 192 + i] == INFINITY);
                for (int64_t d = 0; d < D; d++)
                    assert_true(((float *)s->tensor[OUT].data)[(i * H + h) * D + d] == 0);
            }
    }
    close_scene(s);
}

/* Rows all of whose biases are so low that lse has lost the logarithm of the number of keys: the mean of v, and the
 * gradients of a mean. */
static void lowest_bias_gives_a_mean(void **state) {
    (void)state;
    for (int64_t rows = 1; rows <= 65; rows += 64) {
        struct scene *s = open_scene(65, 257, rows, 0);
        for (int64_t n = 0; n < rows * 257; n++)
            ((float *)s->tensor[BIAS].data)[n] = -FLT_MAX;
        check_against_reference(s);
        run(s, FDM_FORWARD, "cpu", NULL);
        for (int64_t i = 0; i < H * 65; i++) {
            assert_true(((float *)s->tensor[LSE].data)[i] == -FLT_MAX);
            assert_true(fabsf(((float *)s->tensor[LSE_LOW].data)[i] - logf(257)) < 1e-5f);
        }
        run(s, FDM_BACKWARD, "cpu", NULL); /* the gradient of a mean: the same for each key */
        const float *dv = s->tensor[DV].data;
        for (int64_t n = HKV * D; n < 257 * HKV * D; n++)
            assert_true(fabsf(dv[n] - dv[n % (HKV * D)]) < 1e-5f);
        close_scene(s);
    }
}

/* The scale that the caller names is the scale that is used, 0 included. */
static void given_scale_is_not_dropped(void **state) {
    (void)state;
    struct scene *s = open_scene(33, 70, 0, 0);
    s->options.has_softmax_scale = 1;
    check_against_reference(s);
    run(s, FDM_FORWARD, "cpu", NULL);
    for (int64_t i = 0; i < H * 33; i++) /* all scores are 0 */
        assert_true(fabsf(((float *)s->tensor[LSE].data)[i] - logf(70)) < 1e-5f);
    s->options.softmax_scale = -0.7;
    check_against_reference(s);
    close_scene(s);
}

/* Causal top-W of a bias, as intervals; what each row must see is known in closed form. */
static void top_window_scene(int rising) {
    enum { S = 150, W = 40 };
    struct scene *s = open_scene(S, S, 1, 0);
    static int32_t start[S], end[S];
    int64_t shape[3] = {1, 1, S};
    fdm_tensor bias = {s->tensor[BIAS].data, {FDM_CPU, 0}, 3, fdm_data_type_of(FDM_FLOAT32), shape, NULL, 0};
    fdm_tensor starts = {start, {FDM_CPU, 0}, 3, fdm_data_type_of(FDM_INT32), shape, NULL, 0}, ends = starts;
    ends.data = end;
    for (int64_t j = 0; j < S; j++)
        ((float *)s->tensor[BIAS].data)[j] = (float)(rising ? j : -j) / 64;
    assert_int_equal(fdm_topk_intervals(&bias, NULL, W, S, &starts, &ends, NULL, 0, NULL), FDM_OK);
    for (int64_t i = 0; i < S; i++)
        for (int64_t j = 0; j < S; j++) {
            int seen = start[j] <= i && i < end[j];
            assert_int_equal(seen, rising ? j <= i && j > i - W : j <= i && j < W);
        }
    s->start = start, s->end = end;
    check_against_reference(s);
    if (rising) { /* the same bits' worth as causal with a window of W keys */
        float *want = test_malloc(sizeof(float) * S * H * D);
        run(s, FDM_FORWARD, "reference", NULL);
        memcpy(want, s->tensor[OUT].data, sizeof(float) * S * H * D);
        s->start = s->end = NULL;
        s->options.causal = 1;
        s->options.window_left = W - 1;
        run(s, FDM_FORWARD, "cpu", NULL);
        expect_near(&s->tensor[OUT], want, "window", OUT);
        test_free(want);
    }
    close_scene(s);
}

static void rising_bias_is_a_sliding_window(void **state) {
    (void)state;
    top_window_scene(1);
}

static void falling_bias_keeps_the_first_keys(void **state) {
    (void)state;
    top_window_scene(0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tile_inactive_then_active_in_backward),
        cmocka_unit_test(softcap_keeps_its_scale_and_bias_outside),
        cmocka_unit_test(key_tail_does_not_reach_the_block_before),
        cmocka_unit_test(row_tail_is_not_read),
        cmocka_unit_test(rows_without_any_key),
        cmocka_unit_test(lowest_bias_gives_a_mean),
        cmocka_unit_test(given_scale_is_not_dropped),
        cmocka_unit_test(rising_bias_is_a_sliding_window),
        cmocka_unit_test(falling_bias_keeps_the_first_keys),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
