/* test_softmax_plans.c: which softmax kernel takes which rows, in which shape, and what is refused with which words. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "companions/softmax/softmax_plan.h"

static fdm_device device_of(const char *name) {
    fdm_device device = {.struct_bytes = sizeof device};
    assert_int_equal(fdm_device_from_name(name, &device), FDM_OK);
    return device;
}

static fdm_softmax_problem problem_of(fdm_pass pass, fdm_dtype dtype, int64_t rows, int64_t columns, int32_t aligned) {
    return (fdm_softmax_problem){.pass = pass, .dtype = dtype, .rows = rows, .columns = columns, .aligned = aligned};
}

static void shapes(void **state) {
    (void)state;
    static const struct {
        const char *device;
        fdm_pass pass;
        fdm_dtype dtype;
        int64_t rows, columns;
        int32_t aligned;
        const char *kernel, *choice;
    } cases[] = {
        {"sm_90", FDM_FORWARD, FDM_BFLOAT16, 4096, 8, 2, "softmax.resident", "1-lanes x 1-chunks, 1-block"},
        {"sm_90", FDM_FORWARD, FDM_BFLOAT16, 4096, 256, 2, "softmax.resident", "16-lanes x 2-chunks, 1-block"},
        {"sm_90", FDM_FORWARD, FDM_BFLOAT16, 4096, 256, 1, "softmax.resident", "16-lanes x 3-chunks, 1-block"},
        {"sm_90", FDM_BACKWARD, FDM_BFLOAT16, 4096, 256, 2, "softmax.resident", "16-lanes x 2-chunks, 1-block"},
        {"sm_90", FDM_FORWARD, FDM_FLOAT32, 4096, 16384, 2, "softmax.resident", "512-lanes x 8-chunks, 1-block"},
        {"sm_90", FDM_FORWARD, FDM_FLOAT32, 4096, 16385, 2, "softmax.resident", "320-lanes x 8-chunks, 2-blocks"},
        {"sm_90", FDM_FORWARD, FDM_BFLOAT16, 4096, 1536, 2, "softmax.resident", "64-lanes x 3-chunks, 1-block"},
        {"sm_90", FDM_BACKWARD, FDM_BFLOAT16, 4096, 1536, 2, "softmax.resident", "64-lanes x 4-chunks, 1-block"},
        {"sm_90", FDM_FORWARD, FDM_BFLOAT16, 4096, 6144, 2, "softmax.resident", "192-lanes x 4-chunks, 1-block"},
        {"sm_90", FDM_FORWARD, FDM_BFLOAT16, 4096, 20480, 2, "softmax.resident", "320-lanes x 8-chunks, 1-block"},
        {"sm_80", FDM_BACKWARD, FDM_BFLOAT16, 4096, 10240, 2, "softmax.resident", "320-lanes x 4-chunks, 1-block"},
        {"sm_90", FDM_FORWARD, FDM_BFLOAT16, 4096, 32768, 2, "softmax.resident", "512-lanes x 8-chunks, 1-block"},
        {"sm_90", FDM_FORWARD, FDM_FLOAT32, 4096, 40960, 2, "softmax.resident", "256-lanes x 8-chunks, 5-blocks"},
        {"sm_90", FDM_FORWARD, FDM_FLOAT32, 512, 131072, 2, "softmax.resident", "256-lanes x 8-chunks, 16-blocks"},
        {"sm_90", FDM_BACKWARD, FDM_BFLOAT16, 512, 135168, 2, "softmax.resident", "512-lanes x 4-chunks, 9-blocks"},
        {"sm_90", FDM_FORWARD, FDM_FLOAT32, 64, 1 << 20, 2, "softmax.ring",
         "132-pieces of 4-chunks, 1-groups, ring of 7"},
        {"sm_90", FDM_FORWARD, FDM_BFLOAT16, 64, 1 << 20, 0, "softmax.ring",
         "64-pieces of 4-chunks, 2-groups, ring of 7"},
        {"sm_90", FDM_BACKWARD, FDM_FLOAT32, 512, 131072, 2, "softmax.resident", "512-lanes x 4-chunks, 16-blocks"},
        {"sm_90", FDM_BACKWARD, FDM_FLOAT32, 64, 1 << 20, 2, "softmax.ring",
         "132-pieces of 4-chunks, 1-groups, ring of 3"},
        {"sm_90", FDM_FORWARD, FDM_FLOAT32, 1, 1 << 20, 2, "softmax.ring",
         "132-pieces of 4-chunks, 1-groups, ring of 7"},
        {"sm_90", FDM_FORWARD, FDM_FLOAT32, 1, 1 << 23, 2, "softmax.split", "1024-pieces"},
        {"sm_80", FDM_FORWARD, FDM_FLOAT32, 4096, 16385, 2, "softmax.ring",
         "5-pieces of 2-chunks, 21-groups, ring of 7"},
        {"sm_80", FDM_BACKWARD, FDM_FLOAT32, 4096, 1 << 22, 2, "softmax.split", "1-pieces"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fdm_device device = device_of(cases[i].device);
        const fdm_softmax_problem p =
            problem_of(cases[i].pass, cases[i].dtype, cases[i].rows, cases[i].columns, cases[i].aligned);
        fdm_softmax_plan plan = {.struct_bytes = sizeof plan};
        assert_int_equal(fdm_plan_softmax(&device, &p, NULL, &plan), FDM_OK);
        assert_string_equal(plan.choice.kernel, cases[i].kernel);
        assert_string_equal(plan.choice.choice, cases[i].choice);
    }
}

/* Whatever the columns, the shape holds the row and fits the device, and its launch is what softmax_requests() says. */
static void every_length_fits(void **state) {
    (void)state;
    const fdm_device device = device_of("sm_90");
    for (int64_t columns = 1; columns < 1 << 24; columns += 1 + columns / 7)
        for (int32_t i = 0; i < 12; i++) {
            const fdm_softmax_problem p =
                problem_of((fdm_pass)(i % 2), i / 2 % 2 ? FDM_FLOAT32 : FDM_FLOAT16, 1000, columns, i / 4);
            fdm_softmax_plan plan = {.struct_bytes = sizeof plan};
            struct cuda_kernel_request requests[COMPANION_REQUESTS_MAX];
            assert_int_equal(fdm_plan_softmax(&device, &p, NULL, &plan), FDM_OK);
            const int32_t count = softmax_requests(&plan, requests);
            assert_int_equal(count, strcmp(plan.choice.kernel, "softmax.resident") == 0 ? 1 : 2);
            assert_true(plan.choice.shared_bytes + 2048 <= device.shared_bytes);
            const int32_t *at = plan.choice.parameters; /* vector, threads, lanes, chunks, ring, pieces or cluster,
                                                         * groups, lag */
            const int64_t needed = softmax_chunks(columns, fdm_dtype_bytes(p.dtype), p.aligned != 1);
            if (strcmp(plan.choice.kernel, "softmax.resident") == 0)
                assert_true((int64_t)at[2] * at[3] * at[5] >= needed);
            if (strcmp(plan.choice.kernel, "softmax.ring") == 0) { /* pieces that cover the row, and fit */
                const int64_t share = softmax_share((int32_t)needed, at[5], at[0]);
                assert_true(share * at[5] >= needed && share <= (int64_t)at[2] * at[3]);
                assert_true(at[4] >= at[7] && at[7] > 0 && at[5] * at[6] <= device.num_sms);
            }
        }
}

static void assert_says(fdm_status status, fdm_status wanted, const char *words) {
    assert_int_equal(status, wanted);
    if (!strstr(fdm_last_error(), words))
        fail_msg("'%s' is not in '%s'", words, fdm_last_error());
}

static void refusals_of_plans(void **state) {
    (void)state;
    const fdm_device device = device_of("sm_90"), cpu = device_of("cpu");
    fdm_softmax_problem p = problem_of(FDM_BACKWARD, FDM_FLOAT32, 3, 4, 0);
    fdm_softmax_plan plan = {.struct_bytes = sizeof plan};
    assert_says(fdm_plan_softmax(&cpu, &p, NULL, &plan), FDM_ERROR_UNSUPPORTED, "softmax runs on CUDA devices only");
    assert_says(fdm_plan_softmax(&device, &p, "softmax.naive", &plan), FDM_ERROR_UNSUPPORTED,
                "kernel 'softmax.naive' cannot run it: it is for the forward");
    assert_says(fdm_plan_softmax(&device, &p, "softmax.vector", &plan), FDM_ERROR_UNSUPPORTED,
                "rows of the tensors begin differently far");
    assert_says(fdm_plan_softmax(&device, &p, "softmax", &plan), FDM_ERROR_INVALID_ARGUMENT,
                "kernel is 'softmax', which is no kernel of softmax");
    p.dtype = FDM_FLOAT64;
    assert_says(fdm_plan_softmax(&device, &p, NULL, &plan), FDM_ERROR_UNSUPPORTED, "dtype is float64");
    p = problem_of(FDM_FORWARD, FDM_FLOAT32, 3, (int64_t)1 << 30, 0);
    assert_says(fdm_plan_softmax(&device, &p, NULL, &plan), FDM_ERROR_INVALID_ARGUMENT, "must be 0 to 2^30 - 1");
}

/* Addresses are never followed: nothing is read. */
static void descriptions(void **state) {
    (void)state;
    int64_t shape[3] = {2, 5, 32}, mask_shape[3] = {1, 5, 1}, steps[3] = {320, 64, 2}, odd[3] = {165, 33, 1};
    fdm_tensor x = {(void *)(uintptr_t)4096, {FDM_CUDA, 0}, 3, fdm_data_type_of(FDM_FLOAT16), shape, NULL, 0};
    fdm_tensor out = x, mask = x;
    out.data = (void *)(uintptr_t)(1 << 20), mask.data = (void *)(uintptr_t)(2 << 20);
    mask.shape = mask_shape;
    mask.dtype = fdm_data_type_of(FDM_BOOL);
    fdm_softmax_tensors t = {.struct_bytes = sizeof t, .x = &x, .mask = &mask, .out = &out};
    fdm_softmax_options options = fdm_softmax_options_default();
    fdm_softmax_problem p;
    options.scale = -2;
    assert_int_equal(fdm_describe_softmax(FDM_FORWARD, &t, &options, &p), FDM_OK);
    assert_int_equal(p.rows, 10);
    assert_int_equal(p.columns, 32);
    assert_true(p.has_mask && p.negative_scale && p.aligned == 2 && p.dtype == FDM_FLOAT16);
    x.strides = out.strides = odd;
    assert_int_equal(fdm_describe_softmax(FDM_FORWARD, &t, &options, &p), FDM_OK);
    assert_int_equal(p.aligned, 1);
    out.byte_offset = 2;
    assert_int_equal(fdm_describe_softmax(FDM_FORWARD, &t, &options, &p), FDM_OK);
    assert_int_equal(p.aligned, 0);
    x.strides = steps;
    assert_says(fdm_describe_softmax(FDM_FORWARD, &t, &options, &p), FDM_ERROR_INVALID_ARGUMENT, "x has stride 2");
    x.strides = NULL;
    mask_shape[2] = 31;
    assert_says(fdm_describe_softmax(FDM_FORWARD, &t, &options, &p), FDM_ERROR_INVALID_ARGUMENT,
                "mask has extent 31 on axis 2; beside x it must be 32 or 1");
    t.mask = NULL;
    out.device.index = 1;
    assert_says(fdm_describe_softmax(FDM_FORWARD, &t, &options, &p), FDM_ERROR_INVALID_ARGUMENT,
                "out is on DLPack device 2:1, but x is on 2:0");
    x.device.type = FDM_CPU;
    assert_says(fdm_describe_softmax(FDM_FORWARD, &t, &options, &p), FDM_ERROR_UNSUPPORTED, "x is on the CPU");
    assert_says(fdm_describe_softmax(FDM_BACKWARD, &t, &options, &p), FDM_ERROR_INVALID_ARGUMENT, "dout is NULL");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(shapes), cmocka_unit_test(every_length_fits),
                                       cmocka_unit_test(refusals_of_plans), cmocka_unit_test(descriptions)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
