/* test_not_finite.c: NaN and inf in what nobody sees have no effect on any kernel of the CPU; NaN in what is seen comes
 * out as NaN, and nowhere else. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/half.h"
#include "flash_dmattn.h"

/* Row i sees key j <= i + 16 under causal. Few enough rows for decode, more keys than a vector has elements. */
enum { BATCH = 2, HEADS = 4, HEADS_KV = 2, GROUP = 2, ROWS = 8, KEYS = 24, DIM = 8, SHIFT = KEYS - ROWS };
/* The key and the row that are spoiled, in this batch and KV head; the row's head is the first of its group. */
enum { B = 1, H_KV = 1, H = H_KV * GROUP, KEY = 20, ROW = 5 };

enum name { Q, K, V, OUT, LSE, DOUT, DQ, DK, DV, BIAS, DBIAS, MASK, START, END, NUM_NAMES };

struct array {
    fdm_tensor tensor;
    int64_t shape[4];
    float values[BATCH * HEADS * ROWS * KEYS];
    _Alignas(64) char bytes[BATCH * HEADS * ROWS * KEYS * 4];
};

struct scene {
    fdm_options options;
    fdm_dtype dtype;
    int has[NUM_NAMES];
    struct array a[NUM_NAMES];
};

/* ---- tensors ---- */

static uint32_t state;
static float drawn(void) {
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / (1 << 23) - 1;
}

static void make(struct scene *s, enum name name, fdm_dtype dtype, int32_t ndim, const int64_t *shape) {
    struct array *a = &s->a[name];
    memcpy(a->shape, shape, (size_t)ndim * sizeof *shape);
    a->tensor = (fdm_tensor){.device = {FDM_CPU, 0}, .ndim = ndim, .dtype = fdm_data_type_of(dtype)};
    s->has[name] = 1;
}

static int64_t elements_of(const struct array *a) {
    int64_t n = 1;
    for (int32_t axis = 0; axis < a->tensor.ndim; axis++)
        n *= a->shape[axis];
    return n;
}

/* From values to bytes. */
static void encode(struct array *a) {
    for (int64_t n = 0; n < elements_of(a); n++) {
        const float x = a->values[n];
        switch (fdm_dtype_of(&a->tensor)) {
        case FDM_FLOAT32: ((float *)(void *)a->bytes)[n] = x; break;
        case FDM_FLOAT16: ((uint16_t *)(void *)a->bytes)[n] = float_to_float16(x); break;
        case FDM_BFLOAT16: ((uint16_t *)(void *)a->bytes)[n] = float_to_bfloat16(x); break;
        case FDM_INT32: ((int32_t *)(void *)a->bytes)[n] = (int32_t)x; break;
        default: a->bytes[n] = x != 0; break;
        }
    }
}

static void decode(struct array *a) {
    for (int64_t n = 0; n < elements_of(a); n++)
        switch (fdm_dtype_of(&a->tensor)) {
        case FDM_FLOAT16: a->values[n] = float16_to_float(((uint16_t *)(void *)a->bytes)[n]); break;
        case FDM_BFLOAT16: a->values[n] = bfloat16_to_float(((uint16_t *)(void *)a->bytes)[n]); break;
        default: a->values[n] = ((float *)(void *)a->bytes)[n]; break;
        }
}

/* Element d of row or key i of a head; of a mask or bias, that of row i and key d. */
static float *at(struct scene *s, enum name name, int64_t b, int64_t i, int64_t h, int64_t d) {
    struct array *a = &s->a[name];
    if (name == LSE)
        return &a->values[(b * HEADS + h) * ROWS + i];
    if (name == BIAS || name == DBIAS || name == MASK)
        return &a->values[((b * HEADS + h) * ROWS + i) * KEYS + d];
    return &a->values[((b * a->shape[1] + i) * a->shape[2] + h) * DIM + d];
}

static void fill_row(struct scene *s, enum name name, int64_t i, int64_t h, float x) {
    for (int64_t d = 0; d < DIM; d++)
        *at(s, name, B, i, h, d) = x;
}

/* Everything but masks, biases and intervals. */
static void draw_scene(struct scene *s, fdm_dtype dtype) {
    static const enum name of_rows[] = {Q, OUT, DOUT, DQ}, of_keys[] = {K, V, DK, DV};
    *s = (struct scene){.options = fdm_options_default(), .dtype = dtype};
    for (int i = 0; i < 4; i++) {
        make(s, of_rows[i], dtype, 4, (int64_t[]){BATCH, ROWS, HEADS, DIM});
        make(s, of_keys[i], dtype, 4, (int64_t[]){BATCH, KEYS, HEADS_KV, DIM});
    }
    make(s, LSE, FDM_FLOAT32, 3, (int64_t[]){BATCH, HEADS, ROWS});
    for (int name = 0; name < NUM_NAMES; name++)
        for (int64_t n = 0; n < elements_of(&s->a[name]) && s->has[name]; n++)
            s->a[name].values[n] = drawn();
}

static void add_bias(struct scene *s) {
    make(s, BIAS, s->dtype, 4, (int64_t[]){BATCH, HEADS, ROWS, KEYS});
    make(s, DBIAS, s->dtype, 4, (int64_t[]){BATCH, HEADS, ROWS, KEYS});
    for (int64_t n = 0; n < BATCH * HEADS * ROWS * KEYS; n++)
        s->a[BIAS].values[n] = drawn();
}

static void add_mask(struct scene *s) {
    make(s, MASK, FDM_BOOL, 4, (int64_t[]){BATCH, HEADS, ROWS, KEYS});
    for (int64_t n = 0; n < BATCH * HEADS * ROWS * KEYS; n++)
        s->a[MASK].values[n] = 1;
}

/* Intervals of all keys hold all rows but for the key's, in its head. */
static void add_intervals(struct scene *s, float start, float end) {
    make(s, START, FDM_INT32, 3, (int64_t[]){BATCH, HEADS_KV, KEYS});
    make(s, END, FDM_INT32, 3, (int64_t[]){BATCH, HEADS_KV, KEYS});
    for (int64_t n = 0; n < BATCH * HEADS_KV * KEYS; n++)
        s->a[END].values[n] = ROWS;
    s->a[START].values[(B * HEADS_KV + H_KV) * KEYS + KEY] = start;
    s->a[END].values[(B * HEADS_KV + H_KV) * KEYS + KEY] = end;
}

/* What row i of head h sees. */
static int sees(struct scene *s, int64_t b, int64_t h, int64_t i, int64_t j) {
    const int64_t at_key = (b * HEADS_KV + h / GROUP) * KEYS + j, left = s->options.window_left;
    return (!s->options.causal || j <= i + SHIFT) && (left < 0 || j >= i + SHIFT - left) &&
           (!s->has[MASK] || *at(s, MASK, b, i, h, j) != 0) &&
           (!s->has[BIAS] || *at(s, BIAS, b, i, h, j) != -INFINITY) &&
           (!s->has[START] || (s->a[START].values[at_key] <= (float)i && (float)i < s->a[END].values[at_key]));
}

/* ---- running ---- */

/* A scene may be a copy of another. */
static fdm_tensor *tensor(struct scene *s, enum name name) {
    struct array *a = &s->a[name];
    a->tensor.data = a->bytes;
    a->tensor.shape = a->shape;
    return s->has[name] ? &a->tensor : NULL;
}

/* 0: the kernel does not take the problem. NULL: the reference. */
static int run(struct scene *s, fdm_pass pass, const char *kernel) {
    fdm_options options = s->options;
    options.kernel = kernel;
    options.family = kernel ? "cpu" : "reference";
    options.num_threads = 1;
    fdm_tensors t = {
        .struct_bytes = sizeof t, .q = tensor(s, Q), .k = tensor(s, K), .v = tensor(s, V), .mask = tensor(s, MASK)};
    t.bias = tensor(s, BIAS), t.interval_start = tensor(s, START), t.interval_end = tensor(s, END);
    t.out = tensor(s, OUT), t.lse = tensor(s, LSE);
    if (pass == FDM_BACKWARD) {
        t.dout = tensor(s, DOUT), t.dq = tensor(s, DQ), t.dk = tensor(s, DK), t.dv = tensor(s, DV);
        t.dbias = tensor(s, DBIAS);
    }
    for (int name = 0; name < NUM_NAMES; name++)
        if (s->has[name])
            encode(&s->a[name]);
    const fdm_status status =
        pass == FDM_FORWARD ? fdm_attention_forward(&t, &options, NULL) : fdm_attention_backward(&t, &options, NULL);
    for (int name = OUT; name < NUM_NAMES && !status; name++)
        if (s->has[name] && name != MASK && name != START && name != END)
            decode(&s->a[name]);
    return status == FDM_OK;
}

/* A kernel of the CPU that this machine has, the reference last; the backward reads what the reference makes of the
 * same inputs. Returns 0 past the last. */
static int next_kernel(int32_t *index, fdm_kernel_info *info) {
    while (fdm_kernel_list((*index)++, info) == FDM_OK)
        if (info->device_type == FDM_CPU && info->available)
            return 1;
    return 0;
}

static int run_kernel(struct scene *s, const fdm_kernel_info *info) {
    const char *kernel = strcmp(info->family, "reference") == 0 ? NULL : info->name;
    return (info->pass == FDM_FORWARD || run(s, FDM_FORWARD, NULL)) && run(s, info->pass, kernel);
}

static int same(float a, float b) { return a == b || (isnan(a) && isnan(b)); }

static int is_output(const struct scene *s, fdm_pass pass, int name) {
    const int of_pass =
        pass == FDM_FORWARD ? name == OUT || name == LSE : name == DQ || name == DK || name == DV || name == DBIAS;
    return of_pass && s->has[name];
}

static void assert_same_outputs(const struct scene *a, const struct scene *b, const fdm_kernel_info *info) {
    for (int name = 0; name < NUM_NAMES; name++)
        for (int64_t n = 0; is_output(a, info->pass, name) && n < elements_of(&a->a[name]); n++)
            if (!same(a->a[name].values[n], b->a[name].values[n]))
                fail_msg("%s: element %d of output %d is %g, not %g", info->name, (int)n, name,
                         (double)b->a[name].values[n], (double)a->a[name].values[n]);
}

/* ---- keys that no row sees ---- */

static void by_intervals(struct scene *s) { add_intervals(s, 3, 3); }
static void by_intervals_and_causal(struct scene *s) {
    add_intervals(s, 0, KEY - SHIFT);
    s->options.causal = 1;
}
static void by_intervals_and_window(struct scene *s) {
    add_intervals(s, KEY - SHIFT + 2, ROWS);
    s->options.window_left = 1;
}
static void by_mask(struct scene *s) {
    add_mask(s);
    for (int64_t i = 0; i < GROUP * ROWS; i++)
        *at(s, MASK, B, i / GROUP, H + i % GROUP, KEY) = 0;
}
static void by_mask_and_causal(struct scene *s) {
    add_mask(s);
    for (int64_t i = 0; i < GROUP * ROWS; i++)
        *at(s, MASK, B, i / GROUP, H + i % GROUP, KEY) = i / GROUP < KEY - SHIFT;
    s->options.causal = 1;
}
static void by_bias(struct scene *s) {
    add_bias(s);
    for (int64_t i = 0; i < GROUP * ROWS; i++)
        *at(s, BIAS, B, i / GROUP, H + i % GROUP, KEY) = -INFINITY;
}
static void by_bias_and_causal(struct scene *s) {
    add_bias(s);
    for (int64_t i = 0; i < GROUP * ROWS; i++)
        if (i / GROUP >= KEY - SHIFT)
            *at(s, BIAS, B, i / GROUP, H + i % GROUP, KEY) = -INFINITY;
    s->options.causal = 1;
}
static void by_bias_and_mask(struct scene *s) {
    add_bias(s);
    add_mask(s);
    for (int64_t i = 0; i < GROUP * ROWS; i++)
        *at(s, i % 3 ? BIAS : MASK, B, i / GROUP, H + i % GROUP, KEY) = i % 3 ? -INFINITY : 0;
}
static void by_bias_and_intervals(struct scene *s) {
    add_bias(s);
    add_intervals(s, 0, 4);
    for (int64_t i = 0; i < GROUP * 4; i++)
        *at(s, BIAS, B, i / GROUP, H + i % GROUP, KEY) = -INFINITY;
}
/* One number for each key and head, which all rows share. */
static void by_bias_of_heads(struct scene *s) {
    add_bias(s);
    s->a[BIAS].shape[2] = s->a[DBIAS].shape[2] = 1;
    for (int64_t h = H; h < H + GROUP; h++)
        s->a[BIAS].values[(B * HEADS + h) * KEYS + KEY] = -INFINITY;
}
static void by_bias_of_keys(struct scene *s) {
    add_bias(s);
    s->a[BIAS].shape[2] = s->a[DBIAS].shape[2] = 1;
    s->a[BIAS].shape[1] = s->a[DBIAS].shape[1] = HEADS_KV;
    s->a[BIAS].values[(B * HEADS_KV + H_KV) * KEYS + KEY] = -INFINITY;
}

typedef void way(struct scene *s);
static way *const hiding[] = {
    by_intervals,       by_intervals_and_causal, by_intervals_and_window, by_mask,          by_mask_and_causal, by_bias,
    by_bias_and_causal, by_bias_and_mask,        by_bias_and_intervals,   by_bias_of_heads, by_bias_of_keys};
static const fdm_dtype dtypes[] = {FDM_FLOAT32, FDM_FLOAT16, FDM_BFLOAT16};

/* The key's row of K and of V: all of it, or one element. */
static void spoil_key(struct scene *s, int number) {
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    if (number < 3) {
        fill_row(s, K, KEY, H_KV, bad[number]);
        fill_row(s, V, KEY, H_KV, bad[number]);
    } else {
        *at(s, number % 2 ? K : V, B, KEY, H_KV, 3) = bad[number % 3];
    }
}

static void check_hidden(const struct scene *ordinary, const fdm_kernel_info *info) {
    static struct scene want, have;
    want = *ordinary;
    if (!run_kernel(&want, info))
        return;
    for (int number = 0; number < 9; number++) {
        have = *ordinary;
        spoil_key(&have, number);
        assert_true(run_kernel(&have, info));
        assert_same_outputs(&want, &have, info);
        for (int64_t d = 0; d < DIM && info->pass == FDM_BACKWARD; d++)
            assert_true(*at(&have, DK, B, KEY, H_KV, d) == 0 && *at(&have, DV, B, KEY, H_KV, d) == 0);
    }
}

static void hidden_keys_have_no_effect(void **unused) {
    static struct scene s;
    fdm_kernel_info info = {.struct_bytes = sizeof info};
    (void)unused;
    for (size_t w = 0; w < sizeof hiding / sizeof hiding[0]; w++)
        for (int n = 0; n < 3; n++) {
            state = (uint32_t)w;
            draw_scene(&s, dtypes[n]);
            hiding[w](&s);
            for (int32_t index = 0; next_kernel(&index, &info);)
                check_hidden(&s, &info);
        }
}

/* ---- NaN that is seen ---- */

static void nothing(struct scene *s) { (void)s; }
static void causal(struct scene *s) { s->options.causal = 1; }
static void half_masked(struct scene *s) {
    add_mask(s);
    for (int64_t n = 0; n < BATCH * HEADS * ROWS * KEYS; n++)
        s->a[MASK].values[n] = n % 2 || n % KEYS == KEY;
}
static void half_biased(struct scene *s) {
    add_bias(s);
    for (int64_t n = 0; n < BATCH * HEADS * ROWS * KEYS; n++)
        if (n % 2 && n % KEYS != KEY)
            s->a[BIAS].values[n] = -INFINITY;
}
static way *const showing[] = {nothing, causal, half_masked, half_biased};

/* want: without the NaN. Whether element n of an output is to be NaN since a row that holds one sees, or is, its own.
 */
static int is_touched(struct scene *s, int name, int64_t n) {
    const int64_t batch = n / (elements_of(&s->a[name]) / BATCH);
    if (batch != B)
        return 0;
    if (name == LSE)
        return n / ROWS % HEADS == H && n % ROWS == ROW;
    if (name == OUT || name == DQ)
        return n / DIM % HEADS == H && n / DIM / HEADS % ROWS == ROW;
    if (name == DBIAS)
        return n / KEYS % ROWS == ROW && n / KEYS / ROWS % HEADS == H && sees(s, B, H, ROW, n % KEYS);
    return n / DIM % HEADS_KV == H_KV && sees(s, B, H, ROW, n / DIM / HEADS_KV % KEYS);
}

/* A row whose q holds NaN: it is NaN, and so are the gradients of the keys that it sees; nothing else is. */
static void check_row(const struct scene *ordinary, const fdm_kernel_info *info) {
    static struct scene want, have;
    want = *ordinary;
    if (!run_kernel(&want, info))
        return;
    for (int name = 0; name < NUM_NAMES; name++)
        for (int64_t n = 0; is_output(&want, info->pass, name) && n < elements_of(&want.a[name]); n++)
            if (is_touched(&want, name, n))
                want.a[name].values[n] = NAN;
    have = *ordinary;
    *at(&have, Q, B, ROW, H, 2) = NAN;
    assert_true(run_kernel(&have, info));
    assert_same_outputs(&want, &have, info);
}

/* It sees no key: then what it holds has no effect either. */
static void check_empty_row(const struct scene *ordinary, enum name hides, const fdm_kernel_info *info) {
    static struct scene want, have;
    want = *ordinary;
    for (int64_t j = 0; j < KEYS; j++)
        *at(&want, hides, B, ROW, H, j) = hides == MASK ? 0 : -INFINITY;
    have = want;
    fill_row(&have, Q, ROW, H, NAN);
    fill_row(&have, DOUT, ROW, H, INFINITY);
    if (!run_kernel(&want, info))
        return;
    assert_true(run_kernel(&have, info));
    assert_same_outputs(&want, &have, info);
    assert_true(*at(&have, LSE, B, ROW, H, 0) == INFINITY);
    for (int64_t d = 0; d < DIM; d++)
        assert_true(*at(&have, info->pass == FDM_FORWARD ? OUT : DQ, B, ROW, H, d) == 0);
}

static void rows_that_hold_nan_spoil_themselves_alone(void **unused) {
    static struct scene s;
    fdm_kernel_info info = {.struct_bytes = sizeof info};
    (void)unused;
    for (size_t w = 0; w < sizeof showing / sizeof showing[0]; w++)
        for (int n = 0; n < 3; n++) {
            state = (uint32_t)w;
            draw_scene(&s, dtypes[n]);
            showing[w](&s);
            for (int32_t index = 0; next_kernel(&index, &info);) {
                check_row(&s, &info);
                if (s.has[MASK] || s.has[BIAS])
                    check_empty_row(&s, s.has[MASK] ? MASK : BIAS, &info);
            }
        }
}

/* In rows that see the key; other rows of its batch and KV head may be NaN, too. */
static void check_key(const struct scene *ordinary, enum name spoiled, const fdm_kernel_info *info) {
    static struct scene want, have;
    want = have = *ordinary;
    *at(&have, spoiled, B, KEY, H_KV, 2) = NAN;
    if (!run_kernel(&want, info))
        return;
    assert_true(run_kernel(&have, info));
    for (int64_t b = 0; b < BATCH; b++)
        for (int64_t h = 0; h < HEADS; h++)
            for (int64_t i = 0; i < ROWS; i++) {
                const int beside = b == B && h / GROUP == H_KV, seen = beside && sees(&have, b, h, i, KEY);
                const enum name result = info->pass == FDM_FORWARD ? OUT : DQ;
                assert_true(seen ? isnan(*at(&have, result, b, i, h, 2))
                                 : beside || same(*at(&have, result, b, i, h, 2), *at(&want, result, b, i, h, 2)));
                assert_true(seen && spoiled == K ? isnan(*at(&have, LSE, b, i, h, 0))
                                                 : same(*at(&have, LSE, b, i, h, 0), *at(&want, LSE, b, i, h, 0)));
            }
    for (int64_t d = 0; d < DIM && info->pass == FDM_BACKWARD; d++)
        assert_true(isnan(*at(&have, DK, B, KEY, H_KV, d)));
}

static void keys_that_hold_nan_spoil_the_rows_that_see_them(void **unused) {
    static struct scene s;
    fdm_kernel_info info = {.struct_bytes = sizeof info};
    (void)unused;
    for (size_t w = 0; w < sizeof showing / sizeof showing[0]; w++)
        for (int n = 0; n < 3; n++) {
            state = (uint32_t)w;
            draw_scene(&s, dtypes[n]);
            showing[w](&s);
            for (int32_t index = 0; next_kernel(&index, &info);) {
                check_key(&s, K, &info);
                check_key(&s, V, &info);
            }
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(hidden_keys_have_no_effect),
                                       cmocka_unit_test(rows_that_hold_nan_spoil_themselves_alone),
                                       cmocka_unit_test(keys_that_hold_nan_spoil_the_rows_that_see_them)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
