/* test_kv_cache.c: calls on a KV cache: one plan for all lengths and tables, workspaces, and what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "flash_dmattn.h"

enum { B = 3, H = 4, HKV = 2, D = 16, PAGE = 5, PAGES = 24, COLUMNS = 8, NEW = 2, POSITIONS = 30, DIMS = 8 };

/* A call that appends and turns, with tensors of its own. */
struct call {
    float q[B * NEW * H * D], k[PAGES * PAGE * HKV * D], v[PAGES * PAGE * HKV * D], out[B * NEW * H * D];
    float k_new[B * NEW * HKV * D], v_new[B * NEW * HKV * D], cosines[POSITIONS * DIMS / 2],
        sines[POSITIONS * DIMS / 2];
    int32_t table[B * COLUMNS], lengths[B], first_key[B];
    int64_t shapes[12][4];
    fdm_tensor list[12];
    fdm_cache cache;
    fdm_tensors tensors;
    fdm_options options;
};

static const fdm_tensor *tensor(struct call *c, int n, void *data, fdm_dtype dtype, int32_t ndim,
                                const int64_t *shape) {
    memcpy(c->shapes[n], shape, (size_t)ndim * sizeof *shape);
    c->list[n] = (fdm_tensor){
        .data = data, .device = {FDM_CPU, 0}, .ndim = ndim, .dtype = fdm_data_type_of(dtype), .shape = c->shapes[n]};
    return &c->list[n];
}

static float number(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (float)(1 << 23) - 1;
}

static void fill(float *data, size_t count, uint32_t seed) {
    for (size_t i = 0; i < count; i++)
        data[i] = number(&seed);
}
#define FILL(array, seed) fill(array, sizeof(array) / sizeof(float), seed)

static struct call *make_call(void) {
    struct call *c = calloc(1, sizeof *c);
    const int64_t rows[4] = {B, NEW, H, D}, pages[4] = {PAGES, PAGE, HKV, D}, added[4] = {B, NEW, HKV, D};
    const int64_t table[2] = {B, COLUMNS}, batch[1] = {B}, positions[2] = {POSITIONS, DIMS / 2};
    FILL(c->q, 1), FILL(c->k, 2), FILL(c->v, 3), FILL(c->k_new, 4), FILL(c->v_new, 5);
    FILL(c->cosines, 6), FILL(c->sines, 7);
    for (int i = 0; i < B * COLUMNS; i++)
        c->table[i] = i;
    c->cache = (fdm_cache){.struct_bytes = sizeof c->cache,
                           .block_table = tensor(c, 0, c->table, FDM_INT32, 2, table),
                           .lengths = tensor(c, 1, c->lengths, FDM_INT32, 1, batch),
                           .first_key = tensor(c, 2, c->first_key, FDM_INT32, 1, batch),
                           .k_new = tensor(c, 3, c->k_new, FDM_FLOAT32, 4, added),
                           .v_new = tensor(c, 4, c->v_new, FDM_FLOAT32, 4, added),
                           .rotary_cos = tensor(c, 5, c->cosines, FDM_FLOAT32, 2, positions),
                           .rotary_sin = tensor(c, 6, c->sines, FDM_FLOAT32, 2, positions)};
    c->tensors = (fdm_tensors){.struct_bytes = sizeof c->tensors,
                               .q = tensor(c, 7, c->q, FDM_FLOAT32, 4, rows),
                               .k = tensor(c, 8, c->k, FDM_FLOAT32, 4, pages),
                               .v = tensor(c, 9, c->v, FDM_FLOAT32, 4, pages),
                               .out = (fdm_tensor *)tensor(c, 10, c->out, FDM_FLOAT32, 4, rows),
                               .cache = &c->cache};
    c->options = fdm_options_default();
    c->options.causal = 1;
    return c;
}

static void plan_of(struct call *c, const char *device_name, fdm_plan *plan, fdm_status expected) {
    fdm_problem problem;
    fdm_device device = {.struct_bytes = sizeof device};
    *plan = (fdm_plan){.struct_bytes = sizeof *plan};
    assert_int_equal(fdm_describe(FDM_FORWARD, &c->tensors, &c->options, &problem), FDM_OK);
    assert_int_equal(fdm_device_from_name(device_name, &device), FDM_OK);
    assert_int_equal(fdm_plan_attention(&device, &problem, &c->options, plan), expected);
}

/* ---- plans ---- */

/* Lengths, tables and left padding are no facts: a plan that was made beside others gives the bits of a plan of their
 * own. */
static void one_plan_serves_all_lengths(void **state) {
    (void)state;
    static const char *const families[] = {"cpu", "reference"};
    static const int32_t lengths[][B] = {{1, 1, 1}, {38, 0, 17}, {-1, 12, 5}, {40, 39, INT32_MAX}, {INT32_MIN, -1, 2}};
    for (size_t f = 0; f < 2; f++) {
        struct call *first = make_call();
        fdm_plan plan;
        first->options.family = families[f];
        plan_of(first, "cpu", &plan, FDM_OK);
        void *workspace = aligned_alloc(64, (size_t)(plan.workspace_bytes + 63) / 64 * 64);
        for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
            struct call *planned = make_call(), *whole = make_call();
            struct call *both[2] = {planned, whole};
            for (int n = 0; n < 2; n++) {
                memcpy(both[n]->lengths, lengths[i], sizeof lengths[i]);
                for (int t = 0; t < B * COLUMNS; t++)
                    both[n]->table[t] = (t * 7 + (int)i) % PAGES;
                both[n]->first_key[1] = (int32_t)i;
                both[n]->options.family = families[f];
            }
            assert_int_equal(fdm_execute(&plan, &planned->tensors, workspace, (size_t)plan.workspace_bytes, NULL),
                             FDM_OK);
            assert_int_equal(fdm_attention_forward(&whole->tensors, &whole->options, NULL), FDM_OK);
            assert_memory_equal(planned->out, whole->out, sizeof whole->out);
            assert_memory_equal(planned->k, whole->k, sizeof whole->k);
            free(planned), free(whole);
        }
        free(workspace), free(first);
    }
}

static void a_plan_is_of_its_cache(void **state) {
    (void)state;
    struct call *c = make_call();
    fdm_plan plan, read = {.struct_bytes = sizeof read};
    char json[4096];
    plan_of(c, "cpu", &plan, FDM_OK);
    assert_int_equal(fdm_plan_to_json(&plan, json, sizeof json, NULL), FDM_OK);
    assert_int_equal(fdm_plan_from_json(json, strlen(json), &read), FDM_OK);
    assert_memory_equal(&read.problem, &plan.problem, sizeof plan.problem);
    assert_int_equal(plan.problem.page_size, PAGE);
    assert_int_equal(plan.problem.num_pages, PAGES);
    assert_int_equal(plan.problem.max_pages, COLUMNS);
    assert_int_equal(plan.problem.seqlen_k, PAGE * COLUMNS);
    assert_int_equal(plan.problem.new_rows, B * NEW);
    assert_int_equal(plan.problem.rotary_dim, DIMS);
    void *workspace = aligned_alloc(64, (size_t)(plan.workspace_bytes + 63) / 64 * 64);
    const size_t bytes = (size_t)plan.workspace_bytes;
    assert_int_equal(fdm_execute(&plan, &c->tensors, workspace, bytes - 1, NULL), FDM_ERROR_WORKSPACE);
    fdm_plan shrunk = plan;
    shrunk.workspace_bytes -= 64;
    assert_int_equal(fdm_execute(&shrunk, &c->tensors, workspace, bytes, NULL), FDM_ERROR_INVALID_ARGUMENT);
    c->shapes[0][1]--; /* a column less */
    c->options.max_seqlen_k = PAGE * COLUMNS;
    assert_int_equal(fdm_execute(&plan, &c->tensors, workspace, bytes, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "another cache, table"));
    c->shapes[0][1]++;
    c->cache.rotary_interleaved = 1;
    assert_int_equal(fdm_execute(&plan, &c->tensors, workspace, bytes, NULL), FDM_ERROR_INVALID_ARGUMENT);
    c->cache.rotary_interleaved = 0;
    assert_int_equal(fdm_execute(&plan, &c->tensors, workspace, bytes, NULL), FDM_OK);
    free(workspace), free(c);
}

/* Few rows over a cache are mma.decode's on every device, which appends by itself, or apart by a code without "_A"; no
 * other family takes one. */
static void cuda_devices_decode_over_a_cache(void **state) {
    (void)state;
    static const char *const devices[] = {"sm_80", "sm_86", "sm_90", "sm_100", "sm_120"};
    for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++) {
        struct call *c = make_call();
        fdm_plan plan, plain;
        char code[sizeof plan.choice];
        plan_of(c, devices[i], &plan, FDM_OK);
        assert_string_equal(plan.kernel, "mma.decode");
        assert_non_null(strstr(plan.reason, "; it turns q and new keys, and appends those"));
        snprintf(code, sizeof code, "%s", plan.choice);
        assert_string_equal(code + strlen(code) - 2, "_A");
        code[strlen(code) - 2] = 0;
        c->options.kernel = code;
        plan_of(c, devices[i], &plan, FDM_OK);
        assert_non_null(strstr(plan.reason, "a launch before it turns q and new keys, and appends those"));
        c->cache.rotary_cos = c->cache.rotary_sin = NULL;
        plan_of(c, devices[i], &plain, FDM_OK);
        c->options.kernel = NULL;
        assert_int_equal(plan.workspace_bytes - plain.workspace_bytes, B * NEW * (H + HKV) * D * sizeof(float));
        for (int n = 0; n < 2; n++) {
            c->options.family = n ? "blackwell" : "hopper";
            plan_of(c, devices[i], &plan, FDM_ERROR_UNSUPPORTED);
        }
        free(c);
    }
}

/* Lengths on the device beside a backward are mma's; hopper and blackwell name none. */
static void backwards_take_lengths(void **state) {
    (void)state;
    static const char *const devices[] = {"sm_80", "sm_86", "sm_90", "sm_100", "sm_120"};
    for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++) {
        fdm_plan plan = {.struct_bytes = sizeof plan};
        fdm_problem p = fdm_problem_default();
        fdm_device device = {.struct_bytes = sizeof device};
        p.pass = FDM_BACKWARD;
        p.dtype = FDM_BFLOAT16;
        p.seqlen_q = p.seqlen_k = 512;
        p.has_seqused_k = 1;
        assert_int_equal(fdm_device_from_name(devices[i], &device), FDM_OK);
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        assert_string_equal(plan.kernel, "mma.backward");
        p.dtype = FDM_FLOAT32;
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        assert_string_equal(plan.kernel, "mma.backward32");
        p.dtype = FDM_BFLOAT16;
        p.head_dim = 512;
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_ERROR_UNSUPPORTED);
        assert_non_null(strstr(fdm_last_error(), "seqused_k"));
    }
}

/* ---- what is refused ---- */

static void problems_that_make_no_sense(void **state) {
    (void)state;
    fdm_problem good = fdm_problem_default();
    good.has_cache = 1;
    good.page_size = 16, good.num_pages = 4, good.max_pages = 2, good.seqlen_k = 32, good.seqlen_q = 1;
    assert_int_equal(fdm_problem_validate(&good), FDM_OK);
    fdm_problem p = good;
    p.has_cache = 0;
    assert_int_equal(fdm_problem_validate(&p), FDM_ERROR_INVALID_ARGUMENT);
    p = good, p.page_size = -1;
    assert_int_equal(fdm_problem_validate(&p), FDM_ERROR_INVALID_ARGUMENT);
    p = good, p.pass = FDM_BACKWARD;
    assert_int_equal(fdm_problem_validate(&p), FDM_ERROR_UNSUPPORTED);
    p = good, p.has_intervals = 1;
    assert_int_equal(fdm_problem_validate(&p), FDM_ERROR_UNSUPPORTED);
    p = good, p.rotary_dim = 7;
    assert_int_equal(fdm_problem_validate(&p), FDM_ERROR_INVALID_ARGUMENT);
    p = good, p.rotary_dim = 66;
    assert_int_equal(fdm_problem_validate(&p), FDM_ERROR_INVALID_ARGUMENT);
    p = good, p.rotary_dim = 64, p.new_rows = INT64_MAX;
    assert_int_equal(fdm_problem_validate(&p), FDM_ERROR_INVALID_ARGUMENT);
}

static void a_cache_of_another_header(void **state) {
    (void)state;
    struct call *c = make_call();
    c->cache.struct_bytes = 0;
    assert_int_equal(fdm_attention_forward(&c->tensors, &c->options, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "sizeof(fdm_cache)"));
    /* A header that ends before rotary embeddings: nothing turns. */
    struct call *other = make_call();
    c->cache.struct_bytes = offsetof(fdm_cache, rotary_cos);
    other->cache.rotary_cos = other->cache.rotary_sin = NULL;
    assert_int_equal(fdm_attention_forward(&c->tensors, &c->options, NULL), FDM_OK);
    assert_int_equal(fdm_attention_forward(&other->tensors, &other->options, NULL), FDM_OK);
    assert_memory_equal(c->out, other->out, sizeof c->out);
    free(c), free(other);
}

static void visible_pairs_of_a_cache(void **state) {
    (void)state;
    struct call *c = make_call();
    fdm_problem problem;
    int64_t pairs;
    const int32_t lengths[B] = {10, -1, 0}; /* rows at 10 and 11 of 12 keys, 3 of them padding; none; 0 and 1 of 2 */
    memcpy(c->lengths, lengths, sizeof lengths);
    c->first_key[0] = 3;
    assert_int_equal(fdm_describe(FDM_FORWARD, &c->tensors, &c->options, &problem), FDM_OK);
    assert_int_equal(fdm_count_visible(&problem, &c->tensors, &pairs), FDM_OK);
    assert_int_equal(pairs, H * ((8 + 9) + (1 + 2)));
    free(c);
}

/* A v that is the first columns of k is a fact of the problem: latent caches have it. */
static void values_in_keys(void **state) {
    (void)state;
    enum { D_LATENT = 576, DV_LATENT = 512, ROWS = 16, LATENT_HEADS = 8 };
    static uint16_t q[LATENT_HEADS * D_LATENT], cache[2 * ROWS * D_LATENT], out[LATENT_HEADS * DV_LATENT];
    const int64_t q_shape[4] = {1, 1, LATENT_HEADS, D_LATENT}, k_shape[4] = {2, ROWS, 1, D_LATENT},
                  v_shape[4] = {2, ROWS, 1, DV_LATENT}, out_shape[4] = {1, 1, LATENT_HEADS, DV_LATENT};
    const int64_t table_shape[2] = {1, 2}, strides[4] = {ROWS * D_LATENT, D_LATENT, D_LATENT, 1};
    struct call *c = make_call();
    c->cache = (fdm_cache){.struct_bytes = sizeof c->cache,
                           .block_table = tensor(c, 0, c->table, FDM_INT32, 2, table_shape),
                           .lengths = tensor(c, 1, c->lengths, FDM_INT32, 1, (const int64_t[]){1})};
    c->tensors = (fdm_tensors){.struct_bytes = sizeof c->tensors,
                               .q = tensor(c, 7, q, FDM_FLOAT16, 4, q_shape),
                               .k = tensor(c, 8, cache, FDM_FLOAT16, 4, k_shape),
                               .v = tensor(c, 9, cache, FDM_FLOAT16, 4, v_shape),
                               .out = (fdm_tensor *)tensor(c, 10, out, FDM_FLOAT16, 4, out_shape),
                               .cache = &c->cache};
    c->list[9].strides = (int64_t *)(uintptr_t)strides;
    fdm_plan plan;
    plan_of(c, "sm_90", &plan, FDM_OK);
    assert_int_equal(plan.problem.value_in_key, 1);
    assert_string_equal(plan.kernel, "hopper.latent");
    c->list[9].byte_offset = 2 * (D_LATENT - DV_LATENT); /* the last columns */
    plan_of(c, "sm_90", &plan, FDM_OK);
    assert_int_equal(plan.problem.value_in_key, 0);
    assert_string_not_equal(plan.kernel, "hopper.latent");
    plan.problem.value_in_key = 2;
    assert_int_equal(fdm_problem_validate(&plan.problem), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "value_in_key is 2"));
    free(c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_in_keys),
        cmocka_unit_test(one_plan_serves_all_lengths),
        cmocka_unit_test(a_plan_is_of_its_cache),
        cmocka_unit_test(cuda_devices_decode_over_a_cache),
        cmocka_unit_test(backwards_take_lengths),
        cmocka_unit_test(problems_that_make_no_sense),
        cmocka_unit_test(a_cache_of_another_header),
        cmocka_unit_test(visible_pairs_of_a_cache),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
