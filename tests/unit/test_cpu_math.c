/* test_cpu_math.c: the operands and contractions of every instruction set's table against plain loops in float64.
 *
 * Rows lie one behind the other with NaN between them, and every buffer a table writes lies between guard bytes: what a
 * pack reads past a row shows as NaN, what it writes past an operand as a changed guard. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/half.h"
#include "families/cpu/kernels.h"

enum { KEYS_MAX = 140, DEPTH_MAX = 256, ROWS_MAX = KEYS_MAX, GUARD = 256, DRAWS = 60 };

static uint32_t state;
static uint32_t draw(uint32_t below) {
    state = state * 1664525u + 1013904223u;
    return (state >> 8) % below;
}
static float draw_real(void) { return ((float)draw(1u << 23) - 4194304.0f) / 2097152.0f; }

/* ---- guarded memory ---- */

struct guarded {
    unsigned char *memory; /* GUARD, bytes, GUARD */
    size_t bytes;
};

/* Every float and half of it is NaN. As a float it signals: what is read, computed with and written back is quiet. */
static unsigned char pattern(size_t at) { return at % 4 == 2 ? 0xbf : 0xff; }

static void *guarded_at(const struct guarded *g) { return g->memory + GUARD; }
static struct guarded guarded_new(size_t bytes) {
    struct guarded g = {aligned_alloc(64, (bytes + 2 * GUARD + 63) / 64 * 64), bytes};
    assert_non_null(g.memory);
    for (size_t i = 0; i < bytes + 2 * GUARD; i++)
        g.memory[i] = pattern(i);
    return g;
}
static void guarded_check_and_free(struct guarded *g) {
    for (size_t i = 0; i < GUARD; i++) {
        assert_int_equal(g->memory[i], pattern(i));
        assert_int_equal(g->memory[GUARD + g->bytes + i], pattern(GUARD + g->bytes + i));
    }
    free(g->memory);
}

/* ---- rows ---- */

/* x rounded to dtype as a float: 11 and 8 significant bits. */
static float rounded(float x, fdm_dtype dtype) {
    int exponent;
    float fraction = frexpf(x, &exponent);
    int bits = dtype == FDM_FLOAT16 ? 11 : dtype == FDM_BFLOAT16 ? 8 : 24;
    return ldexpf(rintf(ldexpf(fraction, bits)), exponent - bits);
}

static void store_element(char *to, float x, fdm_dtype dtype) {
    uint32_t word;
    memcpy(&word, &x, 4);
    uint16_t half = (uint16_t)(word >> 16);
    if (dtype == FDM_FLOAT16) /* draws are 0, or normal in float16 */
        half =
            x == 0 ? 0 : (uint16_t)((word >> 16 & 0x8000) | ((word >> 23 & 0xff) - 112) << 10 | (word >> 13 & 0x3ff));
    memcpy(to, dtype == FDM_FLOAT32 ? (void *)&word : (void *)&half, dtype == FDM_FLOAT32 ? 4 : 2);
}

struct matrix {
    float value[ROWS_MAX][DEPTH_MAX];
    const void *rows[ROWS_MAX]; /* the same in dtype, with NaN behind each row */
    char *memory;
};

static void matrix_draw(struct matrix *m, int32_t num_rows, int32_t depth, fdm_dtype dtype) {
    const size_t bytes = dtype == FDM_FLOAT32 ? 4 : 2, stride = ((size_t)depth + 3) * bytes;
    m->memory = malloc((size_t)num_rows * stride);
    assert_non_null(m->memory);
    memset(m->memory, 0xff, (size_t)num_rows * stride);
    for (int32_t row = 0; row < num_rows; row++) {
        m->rows[row] = m->memory + (size_t)row * stride;
        for (int32_t d = 0; d < depth; d++) {
            float x = rounded(draw_real(), dtype);
            m->value[row][d] = fabsf(x) < 0.001f ? 0 : x;
            store_element(m->memory + (size_t)row * stride + (size_t)d * bytes, m->value[row][d], dtype);
        }
    }
}

/* ---- one draw ---- */

struct scene {
    const struct cpu_kernels *kernels;
    fdm_dtype dtype;
    int32_t num_keys, num_lanes, depth;
    double weight_error; /* relative error of one weight as an operand */
    double dot_error;    /* relative error of one product with weights, and of the sum */
    struct matrix keys, lanes;
};

static const char *where(const struct scene *c, const char *what) {
    static char text[160];
    snprintf(text, sizeof text, "%s %s %s: %d keys, %d lanes, depth %d", c->kernels->isa, fdm_dtype_name(c->dtype),
             what, c->num_keys, c->num_lanes, c->depth);
    return text;
}

/* |got - wanted| <= tolerance * magnitude, false for NaN. */
static void check(const struct scene *c, const char *what, double got, double wanted, double magnitude,
                  double tolerance) {
    if (!(fabs(got - wanted) <= tolerance * magnitude + 1e-30))
        fail_msg("%s: %.9g instead of %.9g (allowed %.3g)", where(c, what), got, wanted, tolerance * magnitude);
}

static size_t tile_bytes(const struct scene *c) {
    int32_t multiple = c->kernels->key_multiple;
    return (size_t)((c->num_keys + multiple - 1) / multiple * multiple) * CPU_LANES * sizeof(float);
}

static void check_score(const struct scene *c) {
    const struct cpu_kernels *k = c->kernels;
    struct guarded keys = guarded_new(k->keys_bytes(c->num_keys, c->depth));
    struct guarded panel = guarded_new(k->panel_bytes(c->depth)), s = guarded_new(tile_bytes(c));
    k->pack_keys(guarded_at(&keys), c->keys.rows, c->num_keys, c->depth, c->dtype);
    k->pack_panel(guarded_at(&panel), c->lanes.rows, c->num_lanes, c->depth, c->dtype);
    cpu_kernels_begin(k);
    k->score(guarded_at(&s), guarded_at(&keys), guarded_at(&panel), c->num_keys, c->num_lanes, c->depth);
    cpu_kernels_end(k);
    const float *got = guarded_at(&s);
    for (int32_t key = 0; key < c->num_keys; key++)
        for (int32_t lane = 0; lane < c->num_lanes; lane++) {
            double sum = 0, magnitude = 0;
            for (int32_t d = 0; d < c->depth; d++) {
                double product = (double)c->keys.value[key][d] * c->lanes.value[lane][d];
                sum += product;
                magnitude += fabs(product);
            }
            check(c, "score", got[key * CPU_LANES + lane], sum, magnitude, 4e-6);
        }
    guarded_check_and_free(&keys);
    guarded_check_and_free(&panel);
    guarded_check_and_free(&s);
}

/* acc += V^T weights, the weights being `expected` [num_keys][CPU_LANES]. */
static void check_accumulate(const struct scene *c, const char *what, const void *weights, const double *expected) {
    const struct cpu_kernels *k = c->kernels;
    size_t bytes = k->values_bytes(c->num_keys, c->depth);
    struct guarded values = guarded_new(bytes ? bytes : k->keys_bytes(c->num_keys, c->depth));
    struct guarded acc = guarded_new((size_t)c->depth * CPU_LANES * sizeof(float));
    float *got = guarded_at(&acc);
    float before[DEPTH_MAX];
    for (int32_t d = 0; d < c->depth; d++) {
        before[d] = draw_real();
        for (int32_t lane = 0; lane < CPU_LANES; lane++)
            got[d * CPU_LANES + lane] = before[d];
    }
    (bytes ? k->pack_values : k->pack_keys)(guarded_at(&values), c->keys.rows, c->num_keys, c->depth, c->dtype);
    cpu_kernels_begin(k);
    k->accumulate(got, guarded_at(&values), weights, c->num_keys, c->num_lanes, c->depth);
    cpu_kernels_end(k);
    for (int32_t d = 0; d < c->depth; d++)
        for (int32_t lane = 0; lane < c->num_lanes; lane++) {
            double sum = before[d], magnitude = fabs(sum);
            for (int32_t key = 0; key < c->num_keys; key++) {
                double product = expected[key * CPU_LANES + lane] * c->keys.value[key][d];
                sum += product;
                magnitude += fabs(product);
            }
            check(c, what, got[d * CPU_LANES + lane], sum, magnitude, c->weight_error + c->dot_error);
        }
    guarded_check_and_free(&values);
    guarded_check_and_free(&acc);
}

/* acc_rows[key] += factor weights rows. */
static void check_outer(const struct scene *c, const char *what, const void *weights, const double *expected,
                        float factor) {
    const struct cpu_kernels *k = c->kernels;
    struct guarded rows = guarded_new(k->rows_bytes(c->depth));
    struct guarded acc = guarded_new((size_t)c->num_keys * (size_t)c->depth * sizeof(float));
    float *acc_rows[KEYS_MAX], *got = guarded_at(&acc);
    for (int32_t key = 0; key < c->num_keys; key++) {
        acc_rows[key] = got + (size_t)key * (size_t)c->depth;
        for (int32_t d = 0; d < c->depth; d++)
            acc_rows[key][d] = 1;
    }
    k->pack_rows(guarded_at(&rows), c->lanes.rows, c->num_lanes, c->depth, c->dtype);
    cpu_kernels_begin(k);
    k->outer(acc_rows, weights, guarded_at(&rows), c->num_keys, c->num_lanes, c->depth, factor);
    cpu_kernels_end(k);
    for (int32_t key = 0; key < c->num_keys; key++)
        for (int32_t d = 0; d < c->depth; d++) {
            double sum = 1, magnitude = 1;
            for (int32_t lane = 0; lane < c->num_lanes; lane++) {
                double product = factor * expected[key * CPU_LANES + lane] * c->lanes.value[lane][d];
                sum += product;
                magnitude += fabs(product);
            }
            check(c, what, acc_rows[key][d], sum, magnitude, c->weight_error + c->dot_error);
        }
    guarded_check_and_free(&rows);
    guarded_check_and_free(&acc);
}

/* Random raw scores; 0 in the lanes that rounding up adds, as zero rows of a panel give; NaN in the others. */
static void draw_tile(const struct scene *c, float *tile) {
    const int32_t multiple = c->kernels->lane_multiple;
    const int32_t rounded_lanes = (c->num_lanes + multiple - 1) / multiple * multiple;
    for (int32_t key = 0; key < c->num_keys; key++)
        for (int32_t lane = 0; lane < CPU_LANES; lane++)
            tile[key * CPU_LANES + lane] = lane < c->num_lanes ? 4 * draw_real() : lane < rounded_lanes ? 0 : NAN;
}

static uint64_t visible[KEYS_MAX];
static void draw_visible(int32_t num_keys) {
    for (int32_t key = 0; key < num_keys; key++)
        visible[key] = draw(8) ? (uint64_t)draw(1u << 22) << 42 | (uint64_t)draw(1u << 22) << 21 | draw(1u << 22) : 0;
}

/* The weights operand of a step: memory of its own, or the tile. */
static struct guarded weights_new(const struct scene *c) { return guarded_new(c->kernels->weights_bytes(c->num_keys)); }
static void *weights_at(const struct scene *c, const struct guarded *weights, float *tile) {
    return c->kernels->weights_bytes(c->num_keys) ? guarded_at(weights) : (void *)tile;
}

static double expected[KEYS_MAX * CPU_LANES], expected_ds[KEYS_MAX * CPU_LANES];

static void check_softmax(const struct scene *c) {
    struct guarded s = guarded_new(tile_bytes(c)), weights = weights_new(c);
    static float raw[KEYS_MAX * CPU_LANES];
    float max[CPU_LANES], sum[CPU_LANES], shrink[CPU_LANES], scale = 0.75f;
    const int masked = (int)draw(2);
    draw_tile(c, guarded_at(&s));
    memcpy(raw, guarded_at(&s), (size_t)c->num_keys * CPU_LANES * sizeof(float));
    draw_visible(c->num_keys);
    for (int32_t lane = 0; lane < CPU_LANES; lane++) {
        max[lane] = -INFINITY;
        sum[lane] = 0;
    }
    struct cpu_softmax_step step = {.s = guarded_at(&s),
                                    .weights = weights_at(c, &weights, guarded_at(&s)),
                                    .visible = masked ? visible : NULL,
                                    .num_keys = c->num_keys,
                                    .num_lanes = c->num_lanes,
                                    .scale = scale,
                                    .max = max,
                                    .sum = sum,
                                    .shrink = shrink};
    c->kernels->softmax(&step);
    for (int32_t lane = 0; lane < c->num_lanes; lane++) {
        double total = 0;
        for (int32_t key = 0; key < c->num_keys; key++) {
            int seen = !masked || (visible[key] >> lane & 1);
            double p = seen ? exp((double)raw[key * CPU_LANES + lane] * scale - max[lane]) : 0;
            expected[key * CPU_LANES + lane] = p;
            total += p;
        }
        check(c, "softmax's sum", sum[lane], total, total, 4e-6);
    }
    check_accumulate(c, "accumulate", step.weights, expected);
    guarded_check_and_free(&s);
    guarded_check_and_free(&weights);
}

/* Three panels through the overlapped turns and one after another: the same bits. They differ in what is visible. */
enum { STAGES = 3 };
struct softmax_state {
    float max[CPU_LANES], sum[CPU_LANES], shrink[CPU_LANES];
};

static struct cpu_softmax_step stage_step(const struct scene *c, const uint64_t *bits, void *s, void *weights,
                                          struct softmax_state *rows) {
    for (int32_t lane = 0; lane < CPU_LANES; lane++) {
        rows->max[lane] = lane % 3 ? -INFINITY : 1;
        rows->sum[lane] = lane % 3 ? 0 : 2;
        rows->shrink[lane] = 0;
    }
    return (struct cpu_softmax_step){.s = s,
                                     .weights = weights,
                                     .visible = bits,
                                     .num_keys = c->num_keys,
                                     .num_lanes = c->num_lanes,
                                     .scale = 0.75f,
                                     .max = rows->max,
                                     .sum = rows->sum,
                                     .shrink = rows->shrink};
}

static void run_turns(const struct scene *c, const void *keys, const void *panel, const void *values,
                      const struct cpu_softmax_step *steps, float *const *acc) {
    static struct cpu_overlap turn;
    for (int n = 0; n < STAGES + 2; n++) {
        const int now = n - 1, before = n - 2;
        turn.next = n < STAGES ? &steps[n] : NULL;
        turn.now = now >= 0 && now < STAGES ? &steps[now] : NULL;
        turn.acc = before >= 0 ? acc[before] : NULL;
        turn.keys = keys;
        turn.panel = panel;
        turn.values = values;
        turn.weights = before >= 0 ? steps[before].weights : NULL;
        turn.depth = turn.acc_depth = c->depth;
        turn.acc_keys = c->num_keys;
        turn.acc_lanes = c->num_lanes;
        for (int32_t share = 0; share < CPU_OVERLAP_SHARES; share++)
            c->kernels->overlap(&turn, share);
    }
}

static void check_overlap(const struct scene *c) {
    const struct cpu_kernels *k = c->kernels;
    if (!k->overlap)
        return;
    static uint64_t bits[STAGES][KEYS_MAX];
    static struct softmax_state states[2][STAGES];
    const size_t acc_bytes = (size_t)c->depth * CPU_LANES * sizeof(float);
    struct guarded keys = guarded_new(k->keys_bytes(c->num_keys, c->depth));
    struct guarded panel = guarded_new(k->panel_bytes(c->depth)), s = guarded_new(tile_bytes(c));
    struct guarded values = guarded_new(k->values_bytes(c->num_keys, c->depth)), acc[2][STAGES];
    struct guarded weights[2] = {weights_new(c), weights_new(c)};
    struct cpu_softmax_step steps[STAGES];
    float *sums[STAGES];
    k->pack_keys(guarded_at(&keys), c->keys.rows, c->num_keys, c->depth, c->dtype);
    k->pack_panel(guarded_at(&panel), c->lanes.rows, c->num_lanes, c->depth, c->dtype);
    k->pack_values(guarded_at(&values), c->keys.rows, c->num_keys, c->depth, c->dtype);
    cpu_kernels_begin(k);
    for (int i = 0; i < STAGES; i++) {
        for (int way = 0; way < 2; way++) {
            acc[way][i] = guarded_new(acc_bytes);
            for (size_t at = 0; at < acc_bytes / sizeof(float); at++)
                ((float *)guarded_at(&acc[way][i]))[at] = (float)at;
        }
        draw_visible(c->num_keys);
        memcpy(bits[i], visible, sizeof visible);
        const uint64_t *seen = draw(3) ? bits[i] : NULL;
        steps[i] = stage_step(c, seen, guarded_at(&s), guarded_at(&weights[0]), &states[0][i]);
        k->score(guarded_at(&s), guarded_at(&keys), guarded_at(&panel), c->num_keys, c->num_lanes, c->depth);
        k->softmax(&steps[i]);
        k->accumulate(guarded_at(&acc[0][i]), guarded_at(&values), steps[i].weights, c->num_keys, c->num_lanes,
                      c->depth);
        steps[i] = stage_step(c, seen, guarded_at(&s), guarded_at(&weights[i % 2]), &states[1][i]);
        sums[i] = guarded_at(&acc[1][i]);
    }
    run_turns(c, guarded_at(&keys), guarded_at(&panel), guarded_at(&values), steps, sums);
    cpu_kernels_end(k);
    for (int i = 0; i < STAGES; i++) {
        if (memcmp(&states[0][i], &states[1][i], sizeof states[0][i]) ||
            memcmp(guarded_at(&acc[0][i]), sums[i], acc_bytes))
            fail_msg("%s: panel %d has other bits than one after another", where(c, "overlap"), i);
        guarded_check_and_free(&acc[0][i]);
        guarded_check_and_free(&acc[1][i]);
    }
    guarded_check_and_free(&keys);
    guarded_check_and_free(&panel);
    guarded_check_and_free(&s);
    guarded_check_and_free(&values);
    guarded_check_and_free(&weights[0]);
    guarded_check_and_free(&weights[1]);
}

static int is_nan_in(uint16_t half, fdm_dtype dtype) {
    return (half & 0x7fff) > (dtype == FDM_FLOAT16 ? 0x7c00 : 0x7f80);
}

/* Any bits, many of them halfway between two numbers of the dtype, as gradients are stored: to nearest even. */
static void check_round_row(const struct scene *c) {
    float in[DEPTH_MAX];
    struct guarded out = guarded_new((size_t)c->depth * 2);
    if (c->dtype == FDM_FLOAT32)
        return guarded_check_and_free(&out);
    for (int32_t d = 0; d < c->depth; d++) {
        const uint32_t bits = draw(1u << 16) << 16 | draw(1u << 16), tie = c->dtype == FDM_FLOAT16 ? 0x1000 : 0x8000;
        in[d] = bits_to_float(draw(2) ? bits : (bits & ~(tie - 1)) | tie);
        if (draw(2)) /* float16 has few exponents */
            in[d] = bits_to_float((float_to_bits(in[d]) & 0x807fffff) | (96 + draw(50)) << 23);
    }
    in[draw((uint32_t)c->depth)] = bits_to_float(0x7fffffff); /* NaN from which a carry would make -0 */
    c->kernels->round_row(guarded_at(&out), in, c->depth, c->dtype);
    for (int32_t d = 0; d < c->depth; d++) {
        const uint16_t got = ((uint16_t *)guarded_at(&out))[d];
        const uint16_t wanted = c->dtype == FDM_FLOAT16 ? float_to_float16(in[d]) : float_to_bfloat16(in[d]);
        if (got != wanted && !(is_nan_in(got, c->dtype) && is_nan_in(wanted, c->dtype)))
            fail_msg("%s: %a becomes %04x instead of %04x", where(c, "round_row"), (double)in[d], got, wanted);
    }
    guarded_check_and_free(&out);
}

static void check_gradient(const struct scene *c) {
    struct guarded s = guarded_new(tile_bytes(c)), dp = guarded_new(tile_bytes(c));
    struct guarded p = weights_new(c), ds = weights_new(c), ds_values = weights_new(c);
    float lse[CPU_LANES], delta[CPU_LANES], scale = 0.5f;
    const int masked = (int)draw(2);
    float *raw = guarded_at(&s), *raw_dp = guarded_at(&dp);
    draw_tile(c, raw);
    draw_tile(c, raw_dp);
    draw_visible(c->num_keys);
    for (int32_t lane = 0; lane < CPU_LANES; lane++) {
        lse[lane] = lane >= c->num_lanes || draw(10) == 0 ? INFINITY : 3 + draw_real();
        delta[lane] = lane < c->num_lanes ? draw_real() : 0;
        for (int32_t key = 0; key < c->num_keys; key++) {
            int at = key * CPU_LANES + lane, seen = !masked || (visible[key] >> lane & 1);
            expected[at] = seen && lane < c->num_lanes ? exp((double)raw[at] * scale - lse[lane]) : 0;
            expected_ds[at] = expected[at] ? expected[at] * ((double)raw_dp[at] - delta[lane]) : 0;
        }
    }
    struct cpu_gradient_step step = {.s = raw,
                                     .dp = raw_dp,
                                     .p_weights = weights_at(c, &p, raw),
                                     .ds_weights = weights_at(c, &ds, raw_dp),
                                     .ds_values_weights = weights_at(c, &ds_values, raw_dp),
                                     .visible = masked ? visible : NULL,
                                     .lse = lse,
                                     .delta = delta,
                                     .num_keys = c->num_keys,
                                     .num_lanes = c->num_lanes,
                                     .scale = scale,
                                     .ds_factor = c->kernels->weights_bytes(1) ? 0.25f : 1.0f};
    c->kernels->gradient(&step);
    check_outer(c, "outer of P", step.p_weights, expected, 0.5f);
    check_outer(c, "outer of P, as it is", step.p_weights, expected, 1.0f);
    check_accumulate(c, "accumulate of dS", step.ds_values_weights, expected_ds);
    for (int32_t at = 0; at < c->num_keys * CPU_LANES; at++)
        expected_ds[at] *= step.ds_factor;
    check_outer(c, "outer of dS", step.ds_weights, expected_ds, 1.0f);
    guarded_check_and_free(&s);
    guarded_check_and_free(&dp);
    guarded_check_and_free(&p);
    guarded_check_and_free(&ds);
    guarded_check_and_free(&ds_values);
}

/* NaN lies behind each row; in a row it is found wherever it is, and so is inf. */
static void check_all_finite(const struct scene *c) {
    const int32_t bytes = c->dtype == FDM_FLOAT32 ? 4 : 2, d = (int32_t)draw((uint32_t)c->depth);
    const void *const *rows = c->keys.rows;
    char *element = (char *)rows[draw((uint32_t)c->num_keys)] + d * bytes, kept[4];
    const uint32_t inf = c->dtype == FDM_FLOAT32 ? 0x7f800000 : c->dtype == FDM_FLOAT16 ? 0x7c00 : 0x7f80;
    const uint32_t bad = draw(2) ? UINT32_MAX : inf;
    memcpy(kept, element, (size_t)bytes);
    int finite = c->kernels->all_finite(rows, c->num_keys, c->depth, c->dtype);
    memcpy(element, &bad, (size_t)bytes); /* little-endian */
    finite += 2 * c->kernels->all_finite(rows, c->num_keys, c->depth, c->dtype);
    memcpy(element, kept, (size_t)bytes);
    if (finite != 1)
        fail_msg("%s: %d instead of 1", where(c, "all_finite"), finite);
}

static void check_table(const struct cpu_kernels *kernels, fdm_dtype dtype) {
    static const int32_t sizes[] = {1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, KEYS_MAX};
    static const int32_t depths[] = {1, 2, 15, 16, 17, 32, 33, 64, 80, 96, 127, 128, 192, 255, 256};
    static struct scene c;
    c.kernels = kernels;
    c.dtype = dtype;
    /* Tables with operands of their own round weights to the dtype. */
    int own = kernels->weights_bytes(1) > 0;
    c.weight_error = !own || dtype == FDM_FLOAT32 ? 4e-6 : dtype == FDM_FLOAT16 ? 1.0 / 2048 : 1.0 / 256;
    c.dot_error = own && dtype == FDM_FLOAT16 ? 1.0 / 16384 : 4e-6;
    state = 1;
    for (int i = 0; i < DRAWS; i++) {
        c.num_keys = sizes[draw(sizeof sizes / sizeof sizes[0])];
        c.depth = depths[draw(sizeof depths / sizeof depths[0])];
        c.num_lanes = draw(3) ? 1 + (int32_t)draw(CPU_LANES) : CPU_LANES;
        matrix_draw(&c.keys, c.num_keys, c.depth, dtype);
        matrix_draw(&c.lanes, c.num_lanes, c.depth, dtype);
        check_score(&c);
        check_softmax(&c);
        check_overlap(&c);
        check_gradient(&c);
        check_round_row(&c);
        check_all_finite(&c);
        free(c.keys.memory);
        free(c.lanes.memory);
    }
}

static void test_tables(void **unused) {
    (void)unused;
    for (int isa = 0; isa < CPU_ISA_COUNT; isa++)
        for (int dtype = FDM_FLOAT32; dtype <= FDM_BFLOAT16; dtype++) {
            const struct cpu_kernels *kernels = cpu_isa_kernels((enum cpu_isa)isa, (fdm_dtype)dtype);
            if (kernels && !cpu_isa_refusal((enum cpu_isa)isa) && (kernels->dtypes >> dtype & 1))
                check_table(kernels, (fdm_dtype)dtype);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_tables)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
