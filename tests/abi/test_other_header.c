/* test_other_header.c: a program that was compiled with another version of the header, which lacks the last member of
 * every struct that grows (-DOLDER), or has three more (-DNEWER). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#ifdef OLDER
#    include "older.h"
#else
#    include "newer.h"
#endif

enum { S = 2, D = 4, BEHIND = 256 };

/* A struct for the library to write, between bytes that it must not. */
#define WRITTEN(type)                 \
    struct {                          \
        type is;                      \
        unsigned char behind[BEHIND]; \
    }
#define PREPARE(written)                                  \
    do {                                                  \
        memset(&(written), 0xa5, sizeof(written));        \
        (written).is.struct_bytes = sizeof((written).is); \
    } while (0)

static void expect_bytes(const void *bytes, int value, size_t size) {
    for (size_t i = 0; i < size; i++)
        assert_int_equal(((const unsigned char *)bytes)[i], value);
}

/* Nothing behind the struct is written, struct_bytes stays, and members that the library does not know are 0. */
#ifdef NEWER
#    define EXPECT_LATER(written) expect_bytes((written).is.later, 0, sizeof((written).is.later))
#else
#    define EXPECT_LATER(written)
#endif
#define EXPECT_WRITTEN(written)                                            \
    do {                                                                   \
        assert_int_equal((written).is.struct_bytes, sizeof((written).is)); \
        expect_bytes((written).behind, 0xa5, BEHIND);                      \
        EXPECT_LATER(written);                                             \
    } while (0)

/* Two causal rows: the first sees the first key alone, so that its result is that key's v. */
static float q_data[S * D], k_data[S * D], v_data[S * D] = {1, 2, 3, 4, 5, 6, 7, 8}, out_data[S * D];
static int64_t shape[4] = {1, S, 1, D};
static fdm_tensor q, k, v, out;

static fdm_tensors make_tensors(void) {
    fdm_tensors t = {.struct_bytes = sizeof t, .q = &q, .k = &k, .v = &v, .out = &out};
    q = (fdm_tensor){q_data, {FDM_CPU, 0}, 4, fdm_data_type_of(FDM_FLOAT32), shape, NULL, 0};
    k = v = out = q;
    k.data = k_data, v.data = v_data, out.data = out_data;
    memset(out_data, 0, sizeof out_data);
    return t;
}

static fdm_options causal_options(void) {
    fdm_options options = fdm_options_default();
    options.causal = 1;
    return options;
}

static void expect_result(void) {
    static const float expected[S * D] = {1, 2, 3, 4, 3, 4, 5, 6}; /* all scores are 0 */
    for (int i = 0; i < S * D; i++)
        assert_float_equal(out_data[i], expected[i], 1e-6);
}

static void one_call(void **state) {
    (void)state;
    const fdm_tensors t = make_tensors();
    const fdm_options options = causal_options();
    assert_int_equal(fdm_attention_forward(&t, &options, NULL), FDM_OK);
    expect_result();
}

static void describe_plan_execute(void **state) {
    (void)state;
    const fdm_tensors t = make_tensors();
    const fdm_options options = causal_options();
    const fdm_launch launch = {.struct_bytes = sizeof launch};
    char json[8192];
    int64_t pairs;
    fdm_problem problem;
    WRITTEN(fdm_device) device;
    WRITTEN(fdm_plan) plan, read, variant;
    PREPARE(device);
    PREPARE(plan);
    PREPARE(read);
    PREPARE(variant);
    assert_int_equal(fdm_describe(FDM_FORWARD, &t, &options, &problem), FDM_OK);
    assert_int_equal(fdm_count_visible(&problem, &t, &pairs), FDM_OK);
    assert_int_equal(pairs, 3);
    assert_int_equal(fdm_device_query(FDM_CPU, 0, &device.is), FDM_OK);
    EXPECT_WRITTEN(device);
    assert_int_equal(fdm_plan_attention(&device.is, &problem, &options, &plan.is), FDM_OK);
    EXPECT_WRITTEN(plan);
    assert_int_equal(plan.is.problem.head_dim, D);
    assert_int_equal(fdm_plan_variant(&device.is, &problem, plan.is.kernel, 0, &variant.is), FDM_OK);
    EXPECT_WRITTEN(variant);
    assert_string_equal(variant.is.choice, plan.is.choice);
    assert_int_equal(fdm_plan_to_json(&plan.is, json, sizeof json, NULL), FDM_OK);
    assert_int_equal(fdm_plan_from_json(json, strlen(json), &read.is), FDM_OK);
    EXPECT_WRITTEN(read);
    assert_int_equal(fdm_prepare(&read.is), FDM_OK);
    void *workspace = aligned_alloc(64, (size_t)(read.is.workspace_bytes + 127) / 64 * 64);
    assert_int_equal(fdm_execute(&read.is, &t, workspace, (size_t)read.is.workspace_bytes, &launch), FDM_OK);
    free(workspace);
    expect_result();
}

static void facts(void **state) {
    (void)state;
    WRITTEN(fdm_device) device;
    WRITTEN(fdm_arch_config) config;
    WRITTEN(fdm_kernel_info) kernel;
    WRITTEN(fdm_setting_info) setting;
    WRITTEN(fdm_cache_info) cache;
    PREPARE(device);
    PREPARE(config);
    PREPARE(kernel);
    PREPARE(setting);
    PREPARE(cache);
    assert_int_equal(fdm_device_from_name("sm_90", &device.is), FDM_OK);
    EXPECT_WRITTEN(device);
    assert_int_equal(device.is.num_sms, 132);
    assert_int_equal(fdm_supports_sm90_features(&device.is), 1);
    assert_int_equal(fdm_arch_optimization_config(&device.is, &config.is), FDM_OK);
    EXPECT_WRITTEN(config);
    assert_int_equal(config.is.warpgroup_mma, 1);
    assert_int_equal(fdm_kernel_list(0, &kernel.is), FDM_OK);
    EXPECT_WRITTEN(kernel);
    assert_int_equal(fdm_setting_list(0, &setting.is), FDM_OK);
    EXPECT_WRITTEN(setting);
    setenv("FLASH_DMATTN_CACHE_DIR", "/tmp/fdm-there-is-no-such-folder", 1);
    assert_int_equal(fdm_cache_query(&cache.is), FDM_OK);
    EXPECT_WRITTEN(cache);
    assert_string_equal(cache.is.folder, "/tmp/fdm-there-is-no-such-folder");
}

static void companion_plans(void **state) {
    (void)state;
    const fdm_gemm_problem product = {.dtype = FDM_FLOAT16, .batch = 1, .m = 64, .n = 64, .k = 64, .mappable = 1};
    const fdm_softmax_problem rows = {.dtype = FDM_FLOAT16, .rows = 64, .columns = 64, .aligned = 2};
    WRITTEN(fdm_device) device;
    WRITTEN(fdm_gemm_plan) gemm;
    WRITTEN(fdm_softmax_plan) softmax;
    PREPARE(device);
    PREPARE(gemm);
    PREPARE(softmax);
    assert_int_equal(fdm_device_from_name("sm_90", &device.is), FDM_OK);
    assert_int_equal(fdm_plan_gemm(&device.is, &product, NULL, &gemm.is), FDM_OK);
    EXPECT_WRITTEN(gemm);
    assert_int_equal(gemm.is.problem.m, 64);
    assert_int_equal(fdm_plan_softmax(&device.is, &rows, NULL, &softmax.is), FDM_OK);
    EXPECT_WRITTEN(softmax);
    assert_int_equal(softmax.is.problem.columns, 64);
}

/* Elements of an array lie as far apart as the program's structs are large. */
static void arrays(void **state) {
    (void)state;
    enum { SIZE = 8 };
    fdm_problem problem = fdm_problem_default();
    WRITTEN(fdm_device) device;
    WRITTEN(fdm_plan) plan;
    fdm_kernel_resources kernels[SIZE];
    int32_t count;
    PREPARE(device);
    PREPARE(plan);
    memset(kernels, 0xa5, sizeof kernels);
    kernels[0].struct_bytes = sizeof kernels[0];
    problem.pass = FDM_BACKWARD;
    problem.dtype = FDM_BFLOAT16;
    problem.heads = problem.heads_kv = 16;
    problem.seqlen_q = problem.seqlen_k = 4096;
    setenv("FLASH_DMATTN_CACHE_SIZE", "0", 1); /* nothing is written */
    assert_int_equal(fdm_device_from_name("sm_80", &device.is), FDM_OK);
    assert_int_equal(fdm_plan_attention(&device.is, &problem, NULL, &plan.is), FDM_OK);
    if (fdm_plan_resources(&plan.is, &device.is, kernels, SIZE, &count)) { /* there is no NVRTC */
        print_message("not covered: %s\n", fdm_last_error());
        return;
    }
    assert_int_equal(count, 3);
    assert_string_equal(kernels[0].entry, "backward_prepare");
    assert_string_equal(kernels[1].entry, "mma_backward");
    assert_string_equal(kernels[2].entry, "backward_finish");
    for (int32_t i = 0; i < count; i++) {
        assert_int_equal(kernels[i].struct_bytes, sizeof kernels[i]);
        assert_in_range(kernels[i].registers, 8, 255);
#ifdef NEWER
        expect_bytes(kernels[i].later, 0, sizeof kernels[i].later);
#endif
    }
    expect_bytes(&kernels[count], 0xa5, (size_t)(SIZE - count) * sizeof kernels[0]);
}

static void refuses(fdm_status status, const char *words) {
    assert_int_equal(status, FDM_ERROR_INVALID_ARGUMENT);
    if (!strstr(fdm_last_error(), words))
        fail_msg("the sentence is '%s'", fdm_last_error());
}

/* A library that does not know a member refuses a value in it. */
static void members_that_are_not_known(void **state) {
    (void)state;
#ifdef NEWER
    fdm_tensors t = make_tensors();
    fdm_options options = causal_options();
    fdm_plan plan = {.struct_bytes = sizeof plan};
    options.later[2] = 1;
    refuses(fdm_attention_forward(&t, &options, NULL), "options has ");
    options.later[2] = 0, t.later[0] = 1;
    refuses(fdm_attention_forward(&t, &options, NULL), "tensors has ");
    plan.later[1] = 1;
    refuses(fdm_prepare(&plan), "a newer version than " FDM_VERSION " has the field");
#else
    skip();
#endif
}

static void sizes_that_are_none(void **state) {
    (void)state;
    fdm_tensors t = make_tensors();
    fdm_options options = causal_options();
    fdm_device device = {.struct_bytes = 0};
    options.struct_bytes = 0;
    refuses(fdm_attention_forward(&t, &options, NULL),
            "options->struct_bytes is 0; it must be sizeof(fdm_options), as fdm_options_default() sets it");
    t.struct_bytes = 0;
    refuses(fdm_attention_forward(&t, NULL, NULL), "tensors->struct_bytes is 0; it must be sizeof(fdm_tensors)");
    refuses(fdm_device_query(FDM_CPU, 0, &device), "device->struct_bytes is 0; it must be sizeof(fdm_device)");
    device.struct_bytes = 0xa5a5a5a4;
    refuses(fdm_device_query(FDM_CPU, 0, &device), "device->struct_bytes is 2779096484");
    device.struct_bytes = sizeof device - 2;
    refuses(fdm_device_query(FDM_CPU, 0, &device), "it must be sizeof(fdm_device)");
    expect_bytes(device.name, 0, sizeof device.name);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(one_call),
                                       cmocka_unit_test(describe_plan_execute),
                                       cmocka_unit_test(facts),
                                       cmocka_unit_test(companion_plans),
                                       cmocka_unit_test(arrays),
                                       cmocka_unit_test(members_that_are_not_known),
                                       cmocka_unit_test(sizes_that_are_none)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
