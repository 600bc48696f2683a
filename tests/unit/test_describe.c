/* test_describe.c: problems, devices and plans, without any kernel running. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "problem/problem.h"

static float storage[4096], storage_of_out[4096];

static fdm_tensor tensor_of(int64_t *shape, int32_t ndim, fdm_dtype dtype) {
    return (fdm_tensor){
        .data = storage, .device = {FDM_CPU, 0}, .ndim = ndim, .dtype = fdm_data_type_of(dtype), .shape = shape};
}

/* What the key range must be: the definition, pair by pair. */
static int visible(const fdm_problem *p, int64_t sq, int64_t sk, int64_t i, int64_t j) {
    int64_t row = i + sk - sq;
    return (!p->causal || j <= row) && (p->window_left < 0 || row - j <= p->window_left) &&
           (p->window_right < 0 || j - row <= p->window_right);
}

static void key_range_matches_definition(void **state) {
    (void)state;
    const int64_t sides[] = {-1, 0, 1, 3, 100, INT64_MAX};
    for (int64_t sq = 0; sq < 6; sq++)
        for (int64_t sk = 0; sk < 6; sk++)
            for (size_t l = 0; l < 6; l++)
                for (size_t r = 0; r < 6; r++)
                    for (int causal = 0; causal < 2; causal++) {
                        fdm_problem p = {.causal = causal, .window_left = sides[l], .window_right = sides[r]};
                        struct sequence s = {.seqlen_q = sq, .seqlen_k = sk};
                        for (int64_t i = 0; i < sq; i++) {
                            struct key_range range = problem_key_range(&p, &s, i);
                            for (int64_t j = 0; j < sk; j++)
                                assert_int_equal(j >= range.first && j < range.last, visible(&p, sq, sk, i, j));
                        }
                    }
}

static void describe_fills_the_problem(void **state) {
    (void)state;
    int64_t qs[] = {2, 5, 4, 16}, ks[] = {2, 7, 2, 16}, vs[] = {2, 7, 2, 8}, os[] = {2, 5, 4, 8}, bs[] = {1, 4, 1, 7};
    fdm_tensor q = tensor_of(qs, 4, FDM_BFLOAT16), k = tensor_of(ks, 4, FDM_BFLOAT16),
               v = tensor_of(vs, 4, FDM_BFLOAT16);
    fdm_tensor out = tensor_of(os, 4, FDM_BFLOAT16), bias = tensor_of(bs, 4, FDM_FLOAT32);
    out.data = storage_of_out;
    fdm_tensors t = {.struct_bytes = sizeof t, .q = &q, .k = &k, .v = &v, .out = &out, .bias = &bias};
    fdm_problem p;
    assert_int_equal(fdm_describe(FDM_FORWARD, &t, NULL, &p), FDM_OK);
    assert_int_equal(p.batch, 2);
    assert_int_equal(p.heads, 4);
    assert_int_equal(p.heads_kv, 2);
    assert_int_equal(p.seqlen_q, 5);
    assert_int_equal(p.seqlen_k, 7);
    assert_int_equal(p.head_dim, 16);
    assert_int_equal(p.head_dim_v, 8);
    assert_true(p.softmax_scale == 0.25);
    assert_int_equal(p.bias_dtype, FDM_FLOAT32);
    assert_int_equal(p.needs_lse, 0);
}

/* Nothing follows the strides of an empty tensor: numbers that overflow in bytes are as good as any. */
static void strides_of_empty_tensors_may_be_anything(void **state) {
    (void)state;
    int64_t qs[] = {2, 5, 4, 16}, ks[] = {2, 0, 2, 16}, ms[] = {1, 4, 5, 0};
    int64_t far[] = {INT64_MAX, INT64_MAX / 3, INT64_MAX / 5, 1};
    fdm_tensor q = tensor_of(qs, 4, FDM_FLOAT64), k = tensor_of(ks, 4, FDM_FLOAT64),
               bias = tensor_of(ms, 4, FDM_FLOAT64);
    fdm_tensor mask = tensor_of(ms, 4, FDM_BOOL), out = tensor_of(qs, 4, FDM_FLOAT64);
    k.strides = mask.strides = bias.strides = far;
    fdm_tensors t = {.struct_bytes = sizeof t, .q = &q, .k = &k, .v = &k, .out = &out, .mask = &mask, .bias = &bias};
    fdm_problem p;
    assert_int_equal(fdm_describe(FDM_FORWARD, &t, NULL, &p), FDM_OK);
    assert_true(p.aligned);
}

static void a_refused_problem_is_not_written(void **state) {
    (void)state;
    int64_t qs[] = {1, 5, 3, 16}, ks[] = {1, 7, 2, 16};
    fdm_tensor q = tensor_of(qs, 4, FDM_FLOAT32), k = tensor_of(ks, 4, FDM_FLOAT32), out = q;
    fdm_tensors t = {.struct_bytes = sizeof t, .q = &q, .k = &k, .v = &k, .out = &out};
    fdm_problem p, before;
    memset(&p, 0x5a, sizeof p);
    before = p;
    assert_int_equal(fdm_describe(FDM_FORWARD, &t, NULL, &p), FDM_ERROR_INVALID_ARGUMENT);
    assert_memory_equal(&p, &before, sizeof p);
    assert_non_null(strstr(fdm_last_error(), "3 heads"));
}

static void devices_by_name(void **state) {
    (void)state;
    fdm_device device = {.struct_bytes = sizeof device};
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    assert_int_equal(device.shared_bytes, 227 << 10);
    assert_int_equal(fdm_device_from_name("sm_90:smem=160K", &device), FDM_OK);
    assert_int_equal(device.shared_bytes, 160 << 10);
    assert_int_equal(device.present, 0);
    assert_int_equal(fdm_device_from_name("cpu:scalar", &device), FDM_OK);
    assert_string_equal(device.isa, "scalar");
    const char *wrong[] = {"sm_9", "sm_90:", "sm_90:smem=", "sm_90:smem=0K", "sm_90:smem=16", "cpu:", "cpu:avx",
                           "gpu",  ""};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        assert_int_equal(fdm_device_from_name(wrong[i], &device), FDM_ERROR_INVALID_ARGUMENT);
}

/* A plan for a CUDA device needs none: float16 goes to the hopper or mma family, float64 to nobody. */
static void cuda_devices_are_planned_for(void **state) {
    (void)state;
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_problem p = fdm_problem_default();
    fdm_plan plan = {.struct_bytes = sizeof plan};
    p.seqlen_q = p.seqlen_k = 128;
    p.dtype = FDM_FLOAT16;
    for (int hopper = 0; hopper < 2; hopper++) {
        assert_int_equal(fdm_device_from_name(hopper ? "sm_90" : "sm_80", &device), FDM_OK);
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        assert_string_equal(plan.family, hopper ? "hopper" : "mma");
    }
    p.dtype = FDM_FLOAT64;
    assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_ERROR_UNSUPPORTED);
    assert_non_null(strstr(fdm_last_error(), "sm_90"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(key_range_matches_definition),
        cmocka_unit_test(describe_fills_the_problem),
        cmocka_unit_test(a_refused_problem_is_not_written),
        cmocka_unit_test(devices_by_name),
        cmocka_unit_test(strides_of_empty_tensors_may_be_anything),
        cmocka_unit_test(cuda_devices_are_planned_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
