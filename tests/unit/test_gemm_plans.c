/* test_gemm_plans.c: which gemm kernel takes which product, by which tile, and what is refused with which words. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "companions/gemm/gemm_plan.h"

static fdm_device device_of(const char *name) {
    fdm_device device = {.struct_bytes = sizeof device};
    assert_int_equal(fdm_device_from_name(name, &device), FDM_OK);
    return device;
}

static fdm_gemm_problem problem_of(int64_t batch, int64_t m, int64_t n, int64_t k) {
    return (fdm_gemm_problem){.dtype = FDM_BFLOAT16,
                              .batch = batch,
                              .m = m,
                              .n = n,
                              .k = k,
                              .a_rows_contiguous = 1,
                              .b_rows_contiguous = 1,
                              .mappable = 1};
}

static void tiles(void **state) {
    (void)state;
    static const struct {
        int64_t batch, m, n, k;
        const char *choice;
    } cases[] = {
        {1, 8192, 8192, 8192, "128x256, 4 stages, cluster 2, 1 split"},
        {1, 3072, 3072, 3072, "128x192, 4 stages, cluster 2, 1 split"},
        {1, 2048, 2048, 2048, "128x256, 4 stages, cluster 1, 1 split"},
        {1, 5120, 5120, 5120, "128x224, 4 stages, cluster 2, 1 split"},
        {1, 1024, 1024, 1024, "128x64, 8 stages, cluster 1, 1 split"},
        {1, 64, 8192, 8192, "64x64, 12 stages, cluster 1, 1 split"},
        {1, 128, 65536, 8192, "128x256, 4 stages, cluster 1, 1 split"},
        {64, 512, 512, 512, "128x256, 4 stages, cluster 2, 1 split"},
    };
    const fdm_device device = device_of("sm_90");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fdm_gemm_problem p = problem_of(cases[i].batch, cases[i].m, cases[i].n, cases[i].k);
        fdm_gemm_plan plan = {.struct_bytes = sizeof plan};
        assert_int_equal(fdm_plan_gemm(&device, &p, NULL, &plan), FDM_OK);
        assert_string_equal(plan.choice.kernel, "gemm.hopper");
        assert_string_equal(plan.choice.choice, cases[i].choice);
        assert_int_equal(plan.choice.workspace_bytes, 0);
    }
}

/* Few rows: a kernel that reads B once, while it is laid out in whole loads. */
static void few_rows(void **state) {
    (void)state;
    static const struct {
        int64_t m, n, k;
        int of_a, of_b;
        const char *device, *kernel, *choice;
    } cases[] = {
        {1, 8192, 8192, 1, 0, "sm_90", "gemm.skinny", "8x64, 16 loads of B a thread in flight, 1 split"},
        {16, 8192, 8192, 1, 1, "sm_80", "gemm.skinny", "16x64, 16 loads of B a thread in flight, 1 split"},
        {32, 1000, 65536, 1, 0, "sm_80", "gemm.skinny", "32x64, 16 loads of B a thread in flight, 4 splits"},
        {9, 8192, 8192, 1, 0, "sm_90", "gemm.hopper", NULL},
        {32, 8196, 8192, 1, 0, "sm_90", "gemm.skinny", NULL},
        {33, 8192, 8192, 1, 0, "sm_90", "gemm.hopper", NULL},
        {16, 8192, 8192, 0, 1, "sm_90", "gemm.hopper", NULL},
        {16, 8192, 8196, 1, 0, "sm_90", "gemm.hopper", NULL},
        {16, 8196, 8192, 1, 1, "sm_80", "gemm.mma", NULL},
        {33, 8192, 8192, 1, 0, "sm_100", "gemm.mma-tma", NULL},
        {33, 8196, 8192, 1, 0, "sm_100", "gemm.mma", NULL},
        {33, 8192, 8192, 1, 0, "sm_120", "gemm.mma", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fdm_device device = device_of(cases[i].device);
        fdm_gemm_problem p = problem_of(1, cases[i].m, cases[i].n, cases[i].k);
        struct cuda_kernel_request requests[COMPANION_REQUESTS_MAX];
        fdm_gemm_plan plan = {.struct_bytes = sizeof plan};
        p.a_rows_contiguous = cases[i].of_a, p.b_rows_contiguous = cases[i].of_b;
        assert_int_equal(fdm_plan_gemm(&device, &p, NULL, &plan), FDM_OK);
        assert_string_equal(plan.choice.kernel, cases[i].kernel);
        assert_true(gemm_requests(&plan, requests) == 1 + (plan.choice.workspace_bytes > 0));
        if (cases[i].choice)
            assert_string_equal(plan.choice.choice, cases[i].choice);
    }
}

/* Which tile the portable kernel takes: what fits in a block's shared memory, and smaller ones for few tiles. */
static void portable_tiles(void **state) {
    (void)state;
    static const struct {
        const char *device, *kernel;
        int64_t size;
        int32_t mappable;
        const char *choice;
    } cases[] = {
        {"sm_90", "gemm.mma", 4096, 1, "128x256, 64 of k, 4 stages, 16-byte copies"},
        {"sm_80", "gemm.mma", 4096, 1, "128x256, 64 of k, 3 stages, 16-byte copies"},
        {"sm_86", "gemm.mma", 4096, 1, "128x256, 32 of k, 4 stages, 16-byte copies"},
        {"sm_120", "gemm.mma", 4096, 1, "128x256, 32 of k, 4 stages, 16-byte copies"},
        {"sm_90", "gemm.mma", 1024, 1, "128x128, 32 of k, 4 stages, 16-byte copies"},
        {"sm_90", "gemm.mma", 4096, 0, "128x128, 32 of k, 4 stages, copies of elements"},
        {"sm_90", "gemm.mma-tma", 1024, 1, "128x64, 8 stages"},
        {"sm_90", "gemm.mma-tma", 3072, 1, "128x192, 4 stages"},
        {"sm_90", "gemm.mma-tma", 4096, 1, "128x256, 4 stages"},
        {"sm_90", "gemm.mma-tma", 5120, 1, "128x320, 3 stages"},
        {"sm_90", "gemm.mma-tma", 8192, 1, "128x256, 4 stages"},
        {"sm_90", "gemm.mma+wide", 1024, 1, "128x256, 32 of k, 4 stages, 16-byte copies"},
        {"sm_90", "gemm.mma+stage2", 4096, 1, "128x128, 32 of k, 2 stages, 16-byte copies"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fdm_device device = device_of(cases[i].device);
        fdm_gemm_problem p = problem_of(1, cases[i].size, cases[i].size, cases[i].size);
        struct cuda_kernel_request request[COMPANION_REQUESTS_MAX];
        fdm_gemm_plan plan = {.struct_bytes = sizeof plan};
        p.mappable = cases[i].mappable;
        assert_int_equal(fdm_plan_gemm(&device, &p, cases[i].kernel, &plan), FDM_OK);
        assert_string_equal(plan.choice.choice, cases[i].choice);
        assert_true(plan.choice.shared_bytes <= device.shared_bytes);
        assert_int_equal(gemm_requests(&plan, request), 1);
    }
}

/* Few tiles and a long k: parts of it, in a workspace, added by a second kernel. */
static void splits(void **state) {
    (void)state;
    const fdm_device device = device_of("sm_90");
    const fdm_gemm_problem p = problem_of(1, 256, 256, 65536);
    struct cuda_kernel_request requests[COMPANION_REQUESTS_MAX];
    fdm_gemm_plan plan = {.struct_bytes = sizeof plan};
    assert_int_equal(fdm_plan_gemm(&device, &p, NULL, &plan), FDM_OK);
    union gemm_parameters parameters = gemm_parameters_of(&plan.choice);
    const int32_t count = parameters.hopper.splits;
    assert_true(count > 1 && plan.choice.workspace_bytes == (int64_t)256 * 256 * 4 * count);
    assert_int_equal(gemm_requests(&plan, requests), 2);
    assert_string_equal(requests[1].entry, "gemm_combine");
    parameters.hopper.stages++; /* a plan that nobody made */
    gemm_set_parameters(&plan.choice, parameters);
    assert_int_equal(gemm_requests(&plan, requests), 0);
}

/* Every product has a kernel whose launch fits the device. */
static void every_size_fits(void **state) {
    (void)state;
    static const int64_t extents[] = {0, 1, 8, 64, 200, 1024, 5000, 16384};
    enum { COUNT = sizeof extents / sizeof extents[0] };
    const fdm_device device = device_of("sm_90");
    for (int32_t i = 0; i < COUNT * COUNT * COUNT; i++) {
        const fdm_gemm_problem p =
            problem_of(1 + i % 3, extents[i % COUNT], extents[i / COUNT % COUNT], extents[i / COUNT / COUNT]);
        struct cuda_kernel_request requests[COMPANION_REQUESTS_MAX];
        fdm_gemm_plan plan = {.struct_bytes = sizeof plan};
        assert_int_equal(fdm_plan_gemm(&device, &p, NULL, &plan), FDM_OK);
        assert_true(plan.choice.shared_bytes <= device.shared_bytes);
        assert_true(p.m == 0 || p.n == 0 || gemm_requests(&plan, requests) >= 1);
    }
}

static void assert_says(fdm_status status, fdm_status wanted, const char *words) {
    assert_int_equal(status, wanted);
    if (!strstr(fdm_last_error(), words))
        fail_msg("'%s' is not in '%s'", words, fdm_last_error());
}

static void refusals_of_plans(void **state) {
    (void)state;
    const fdm_device device = device_of("sm_90"), older = device_of("sm_80"), cpu = device_of("cpu");
    fdm_gemm_problem p = problem_of(1, 64, 64, 64);
    fdm_gemm_plan plan = {.struct_bytes = sizeof plan};
    assert_says(fdm_plan_gemm(&cpu, &p, NULL, &plan), FDM_ERROR_UNSUPPORTED, "gemm runs on CUDA devices only");
    assert_says(fdm_plan_gemm(&older, &p, "gemm.hopper", &plan), FDM_ERROR_UNSUPPORTED,
                "kernel 'gemm.hopper' cannot run it: it is for compute capability 9.0");
    p.n = 65;
    assert_says(fdm_plan_gemm(&device, &p, "gemm.hopper", &plan), FDM_ERROR_UNSUPPORTED, "TMA writes whole ones");
    p.mappable = 0;
    assert_says(fdm_plan_gemm(&device, &p, "gemm.hopper", &plan), FDM_ERROR_UNSUPPORTED, "multiples of 16 bytes");
    p.accumulate_float16 = 1;
    assert_says(fdm_plan_gemm(&device, &p, NULL, &plan), FDM_ERROR_UNSUPPORTED, "are for float16 operands");
    p.dtype = FDM_FLOAT32;
    assert_says(fdm_plan_gemm(&device, &p, NULL, &plan), FDM_ERROR_UNSUPPORTED, "dtype is float32");
}

/* Addresses are never followed: nothing is read. */
static void descriptions(void **state) {
    (void)state;
    int64_t a_shape[2] = {24, 40}, b_shape[3] = {3, 40, 16}, out_shape[3] = {3, 24, 16}, columns[2] = {1, 24};
    int64_t out_columns[3] = {384, 1, 24}, neither[2] = {80, 2};
    const fdm_device_id cuda = {FDM_CUDA, 0};
    void *memory = (void *)(uintptr_t)4096;
    fdm_tensor a = {memory, cuda, 2, fdm_data_type_of(FDM_FLOAT16), a_shape, NULL, 0}, b = a, out = a;
    b.ndim = out.ndim = 3;
    out.data = (void *)(uintptr_t)(1 << 20);
    b.shape = b_shape;
    out.shape = out_shape;
    fdm_gemm_tensors t = {.struct_bytes = sizeof t, .a = &a, .b = &b, .out = &out};
    fdm_gemm_options options = fdm_gemm_options_default();
    fdm_gemm_problem p;
    assert_int_equal(fdm_describe_gemm(&t, &options, &p), FDM_OK);
    assert_true(p.batch == 3 && p.m == 24 && p.n == 16 && p.k == 40 && p.a_rows_contiguous && p.b_rows_contiguous);
    assert_true(p.mappable && !p.has_c);
    a.strides = columns;
    assert_int_equal(fdm_describe_gemm(&t, &options, &p), FDM_OK);
    assert_true(!p.a_rows_contiguous && p.mappable);
    out.strides = out_columns; /* the transposed product */
    assert_int_equal(fdm_describe_gemm(&t, &options, &p), FDM_OK);
    assert_true(p.m == 16 && p.n == 24 && !p.a_rows_contiguous && p.b_rows_contiguous && p.mappable);
    a.byte_offset = 2;
    assert_int_equal(fdm_describe_gemm(&t, &options, &p), FDM_OK);
    assert_false(p.mappable);
    a.strides = neither;
    assert_says(fdm_describe_gemm(&t, &options, &p), FDM_ERROR_INVALID_ARGUMENT, "rows or columns must be contiguous");
    a.strides = NULL;
    options.beta = 1;
    assert_says(fdm_describe_gemm(&t, &options, &p), FDM_ERROR_INVALID_ARGUMENT, "c is NULL");
    options.beta = 0;
    b_shape[1] = 39;
    assert_says(fdm_describe_gemm(&t, &options, &p), FDM_ERROR_INVALID_ARGUMENT,
                "b is [3, 39, 16]; it must be [3, 40, 16]");
    b_shape[1] = 40;
    a.device.type = b.device.type = out.device.type = FDM_CPU;
    assert_says(fdm_describe_gemm(&t, &options, &p), FDM_ERROR_UNSUPPORTED, "a is on the CPU");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(tiles),           cmocka_unit_test(splits),
                                       cmocka_unit_test(few_rows),        cmocka_unit_test(portable_tiles),
                                       cmocka_unit_test(every_size_fits), cmocka_unit_test(refusals_of_plans),
                                       cmocka_unit_test(descriptions)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
