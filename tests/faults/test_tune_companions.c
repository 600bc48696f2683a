/* test_tune_companions.c: gemm and softmax tuned on a pretended device whose kernels take planted times: the fastest is
 * found, what is wrong is dropped, the limit of time is kept, and calls take what was kept and nothing else. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "companions/gemm/gemm.h"
#include "companions/softmax/softmax.h"
#include "cuda_call.h"
#include "scenario.h"
#include "tuning/store.h"

enum { ROWS_MAX = 64 };

/* Planted: the entry of the fastest kernel and that of a wrong one, and a block's bytes of them, 0: any. */
static struct planted {
    const char *entry;
    unsigned shared_bytes;
    double seconds;
} fast, wrong;
static double other_seconds;

static int is(const struct planted *planted, const struct fake_launch *launch) {
    return planted->entry && strcmp(planted->entry, launch->entry) == 0 &&
           (!planted->shared_bytes || planted->shared_bytes == launch->shared_bytes);
}

static double seconds_of(const struct fake_launch *launch, const void *parameters) {
    if (strcmp(launch->entry, "gemm_combine") == 0 || strcmp(launch->entry, "softmax_empty") == 0)
        return 0;
    if (is(&wrong, launch)) { /* where others leave NaN */
        if (strncmp(launch->entry, "gemm", 4) == 0)
            memset(((const struct gemm_params *)parameters)->out.data, 0x41, 64);
        else
            memset(((const struct softmax_params *)parameters)->out.data, 0x41, 64);
        return wrong.seconds;
    }
    return is(&fast, launch) ? fast.seconds : other_seconds;
}

static void plant(struct planted fastest, struct planted wrong_one, double others) {
    static int ready;
    if (!ready++) {
        use_fake_compiler();
        use_fresh_cache();
    }
    fast = fastest, wrong = wrong_one, other_seconds = others;
}

static fdm_device the_device(void) {
    fdm_device device = {.struct_bytes = sizeof device};
    assert_int_equal(fdm_device_query(FDM_CUDA, 0, &device), FDM_OK);
    assert_int_equal(device.compute_major, 9);
    return device;
}

static fdm_gemm_problem product(int64_t m) {
    return (fdm_gemm_problem){.dtype = FDM_BFLOAT16,
                              .batch = 1,
                              .m = m,
                              .n = 512,
                              .k = 1024,
                              .a_rows_contiguous = 1,
                              .b_rows_contiguous = 1,
                              .mappable = 1};
}
static fdm_softmax_problem rows_problem(fdm_pass pass) {
    return (fdm_softmax_problem){.pass = pass, .dtype = FDM_BFLOAT16, .rows = 64, .columns = 40000, .aligned = 2};
}

static fdm_gemm_plan gemm_plan(int64_t m) {
    const fdm_device device = the_device();
    const fdm_gemm_problem p = product(m);
    fdm_gemm_plan plan = {.struct_bytes = sizeof plan};
    assert_int_equal(fdm_plan_gemm(&device, &p, NULL, &plan), FDM_OK);
    return plan;
}

static fdm_tune_row rows[ROWS_MAX];
static fdm_tune_result tune_gemm(int64_t m, const fdm_tune_options *options) {
    const fdm_device device = the_device();
    const fdm_gemm_problem p = product(m);
    fdm_tune_result result = {.struct_bytes = sizeof result};
    rows[0].struct_bytes = sizeof rows[0];
    fake_driver()->plant(seconds_of);
    if (fdm_tune_gemm(&device, &p, options, rows, ROWS_MAX, &result))
        fail_msg("%s", fdm_last_error());
    fake_driver()->plant(NULL);
    assert_int_equal(fake_driver()->live().allocations, 0);
    return result;
}
static fdm_tune_result tune_softmax(fdm_pass pass, const fdm_tune_options *options) {
    const fdm_device device = the_device();
    const fdm_softmax_problem p = rows_problem(pass);
    fdm_tune_result result = {.struct_bytes = sizeof result};
    rows[0].struct_bytes = sizeof rows[0];
    fake_driver()->plant(seconds_of);
    if (fdm_tune_softmax(&device, &p, options, rows, ROWS_MAX, &result))
        fail_msg("%s", fdm_last_error());
    fake_driver()->plant(NULL);
    assert_int_equal(fake_driver()->live().allocations, 0);
    return result;
}

static const fdm_tune_options all_ways = {.struct_bytes = sizeof all_ways, .max_variants = 60, .keep = 1};
static const struct planted nothing = {NULL, 0, 0};

static int count_state(const fdm_tune_result *result, fdm_tune_state state, const char *kernel) {
    int count = 0;
    for (int32_t i = 0; i < result->num_rows; i++)
        count += rows[i].state == state && strcmp(rows[i].kernel, kernel) == 0;
    return count;
}

static void the_fastest_product_is_found(void) {
    plant((struct planted){"gemm_mma_tma", 0, 0.8e-3}, (struct planted){"gemm_mma", 0, 0.1e-3}, 1e-3);
    const fdm_tune_result result = tune_gemm(512, &all_ways);
    assert_string_equal(rows[0].kernel, "gemm.hopper");
    assert_true(rows[0].is_rule && !rows[result.best].is_rule);
    assert_string_equal(rows[result.best].kernel, "gemm.mma-tma");
    assert_float_equal(rows[result.best].seconds, 0.8e-3, 1e-6);
    assert_true(count_state(&result, FDM_TUNE_WRONG, "gemm.mma") >= 2);
    assert_int_equal(count_state(&result, FDM_TUNE_TIMED, "gemm.mma"), 0);
    assert_true(count_state(&result, FDM_TUNE_TIMED, "gemm.hopper") > 5); /* its tiles and splits */
    assert_int_equal(result.kept, 1);
    for (int32_t i = 0; i < result.num_rows; i++) /* each way once */
        for (int32_t j = 0; j < i; j++)
            assert_false(strcmp(rows[i].kernel, rows[j].kernel) == 0 && strcmp(rows[i].choice, rows[j].choice) == 0);
}

/* One tile of a kernel, by the shared memory that no other way's has. */
static void the_fastest_tile_is_found(void) {
    const fdm_device device = the_device();
    const fdm_gemm_problem p = product(512);
    fdm_gemm_plan plan = {.struct_bytes = sizeof plan};
    plant(nothing, nothing, 1e-3);
    assert_int_equal(fdm_plan_gemm_variant(&device, &p, "gemm.mma-tma", 2, &plan), FDM_OK);
    plant((struct planted){"gemm_mma_tma", (unsigned)plan.choice.shared_bytes, 0.5e-3}, nothing, 1e-3);
    const fdm_tune_result result = tune_gemm(512, &all_ways);
    assert_string_equal(rows[result.best].kernel, plan.choice.kernel);
    assert_string_equal(rows[result.best].choice, plan.choice.choice);
    const fdm_gemm_plan taken = gemm_plan(512);
    assert_string_equal(taken.choice.choice, plan.choice.choice);
    assert_memory_equal(taken.choice.parameters, plan.choice.parameters, sizeof plan.choice.parameters);
    assert_non_null(strstr(taken.choice.reason, "50.0 % less time than gemm.hopper"));
}

static void few_rows_have_ways_of_their_own(void) {
    plant((struct planted){"gemm_skinny", 0, 0.9e-3}, nothing, 1e-3);
    const fdm_tune_result result = tune_gemm(4, &all_ways);
    assert_string_equal(rows[0].kernel, "gemm.skinny");
    assert_int_equal(result.best, 0);
    assert_true(count_state(&result, FDM_TUNE_TIMED, "gemm.skinny") >= 2);
}

static void the_fastest_softmax_is_found(void) {
    for (int backward = 0; backward < 2; backward++) {
        const fdm_pass pass = backward ? FDM_BACKWARD : FDM_FORWARD;
        plant((struct planted){"softmax_split_sums", 0, 0.3e-3}, (struct planted){"softmax_ring", 0, 0.1e-3}, 0.5e-3);
        const fdm_tune_result result = tune_softmax(pass, &all_ways);
        assert_string_equal(rows[0].kernel, "softmax.resident");
        assert_true(count_state(&result, FDM_TUNE_WRONG, "softmax.ring") >= 1);
        assert_true(count_state(&result, FDM_TUNE_TIMED, "softmax.split") >= 1);
        assert_int_equal(result.best, 0); /* two launches of 0.3 and 0.5 ms are no gain */
        plant((struct planted){"softmax_ring", 0, 0.2e-3}, nothing, 0.5e-3);
        assert_string_equal(rows[tune_softmax(pass, &all_ways).best].kernel, "softmax.ring");
    }
}

static void the_limit_of_time_is_kept(void) {
    static const double limits[] = {0.02, 0.1};
    for (int i = 0; i < 2; i++) {
        fdm_tune_options options = all_ways;
        options.seconds = limits[i];
        plant((struct planted){"gemm_mma_tma", 0, 4e-3}, nothing, 5e-3);
        const fdm_tune_result result = tune_gemm(512, &options);
        assert_true(result.device_seconds <= limits[i] + 0.03);
        assert_true(rows[0].num_samples > 0);
    }
    fdm_tune_options options = all_ways;
    options.max_variants = 3;
    plant(nothing, nothing, 1e-3);
    assert_int_equal(tune_gemm(512, &options).num_rows, 4);
    options.compile_only = 1;
    options.max_variants = 0;
    assert_int_equal(tune_gemm(512, &options).num_rows, 13);
    assert_int_equal(rows[0].state, FDM_TUNE_NOT_TIMED);
}

/* ---- what plans and calls make of it ---- */

static void plans_take_what_was_kept(void) {
    plant((struct planted){"gemm_mma_tma", 0, 0.5e-3}, nothing, 1e-3);
    assert_int_equal(fdm_tune_forget(NULL), FDM_OK);
    assert_string_equal(gemm_plan(512).choice.kernel, "gemm.hopper");
    assert_null(strstr(gemm_plan(512).choice.reason, "measured"));
    tune_gemm(512, &all_ways);
    assert_string_equal(gemm_plan(512).choice.kernel, "gemm.mma-tma");
    assert_string_equal(gemm_plan(500).choice.kernel, "gemm.mma-tma"); /* of the class up to 512 */
    assert_string_equal(gemm_plan(513).choice.kernel, "gemm.hopper");
    tuning_forget_memory(); /* from the file */
    assert_string_equal(gemm_plan(512).choice.kernel, "gemm.mma-tma");
    setenv("FLASH_DMATTN_TUNE", "0", 1);
    assert_string_equal(gemm_plan(512).choice.kernel, "gemm.hopper");
    unsetenv("FLASH_DMATTN_TUNE");
    const fdm_device device = the_device();
    const fdm_gemm_problem p = product(512);
    fdm_gemm_plan plan = {.struct_bytes = sizeof plan};
    assert_int_equal(fdm_plan_gemm(&device, &p, "gemm.mma", &plan), FDM_OK);
    assert_string_equal(plan.choice.kernel, "gemm.mma");
    assert_string_equal(plan.choice.reason, "asked for by name");
    fdm_kept_choice kept = {.struct_bytes = sizeof kept};
    assert_int_equal(fdm_tune_kept(0, &kept), FDM_OK);
    assert_non_null(strstr(kept.key, "gemm: bfloat16"));
    assert_string_equal(kept.ignored, "");
}

static void what_does_not_fit_is_passed_over(void) {
    struct tuning_entry entry;
    char key[TUNING_KEY_BYTES], maker[TUNING_MAKER_BYTES];
    const fdm_device device = the_device();
    plant((struct planted){"gemm_mma_tma", 0, 0.5e-3}, nothing, 1e-3);
    tune_gemm(512, &all_ways);
    fdm_kept_choice kept = {.struct_bytes = sizeof kept};
    int32_t n = 0;
    while (!fdm_tune_kept(n, &kept) && !strstr(kept.key, "m 512"))
        n++;
    snprintf(key, sizeof key, "%s", kept.key);
    assert_int_equal(tuning_maker(&device, maker), FDM_OK);
    assert_int_equal(tuning_find(key, maker, &entry), 1);
    snprintf(entry.best[0].choice, sizeof entry.best[0].choice, "9x9, 1 stages");
    tuning_keep(&entry);
    const fdm_gemm_plan plan = gemm_plan(512);
    assert_string_equal(plan.choice.kernel, "gemm.hopper");
    assert_non_null(strstr(plan.choice.reason, "rule: 9x9, 1 stages, measured"));
    assert_non_null(strstr(plan.choice.reason, "is passed over"));
}

static void *allocate(void *context, size_t bytes) {
    void *memory = NULL;
    assert_int_equal(fdm_memory_allocate(*(const fdm_device_id *)context, bytes, &memory), FDM_OK);
    return memory;
}
static void release(void *context, void *memory) {
    assert_int_equal(fdm_memory_release(*(const fdm_device_id *)context, memory), FDM_OK);
}

static int64_t launches_of_a_product(int64_t tune) {
    static _Alignas(256) uint16_t a[64 * 1024], b[1024 * 512], out[64 * 512];
    int64_t a_shape[2] = {64, 1024}, b_shape[2] = {1024, 512}, out_shape[2] = {64, 512};
    fdm_device device = the_device();
    const fdm_data_type dtype = fdm_data_type_of(FDM_BFLOAT16);
    const fdm_tensor ta = {.data = a, .device = device.id, .ndim = 2, .dtype = dtype, .shape = a_shape},
                     tb = {.data = b, .device = device.id, .ndim = 2, .dtype = dtype, .shape = b_shape};
    fdm_tensor to = {.data = out, .device = device.id, .ndim = 2, .dtype = dtype, .shape = out_shape};
    const fdm_gemm_tensors tensors = {.struct_bytes = sizeof tensors, .a = &ta, .b = &tb, .out = &to};
    fdm_gemm_options options = fdm_gemm_options_default();
    options.tune = tune;
    const int64_t before = fake_driver()->num_launches();
    const fdm_allocator allocator = {&device.id, allocate, release};
    if (fdm_gemm(&tensors, &options, &allocator))
        fail_msg("%s", fdm_last_error());
    return fake_driver()->num_launches() - before;
}

static void the_first_call_measures_where_asked(void) {
    plant((struct planted){"gemm_mma_tma", 0, 0.5e-3}, nothing, 1e-3);
    fake_driver()->plant(seconds_of);
    assert_true(launches_of_a_product(FDM_TUNE_DEFAULT) <= 2);
    assert_true(launches_of_a_product(FDM_TUNE_MEASURE) > 20);
    assert_true(launches_of_a_product(FDM_TUNE_MEASURE) <= 2);
    assert_int_equal(fdm_tune_forget(NULL), FDM_OK);
    setenv("FLASH_DMATTN_TUNE", "1", 1);
    assert_true(launches_of_a_product(FDM_TUNE_RULES) <= 2);
    assert_true(launches_of_a_product(FDM_TUNE_DEFAULT) > 20);
    unsetenv("FLASH_DMATTN_TUNE");
    fake_driver()->plant(NULL);
    const fdm_device device = the_device();
    const fdm_gemm_problem p = product(64);
    fdm_gemm_plan plan = {.struct_bytes = sizeof plan};
    setenv("FLASH_DMATTN_TUNE", "2", 1);
    assert_refused(fdm_plan_gemm(&device, &p, NULL, &plan), FDM_ERROR_INVALID_ARGUMENT, "must be 0 or 1");
    unsetenv("FLASH_DMATTN_TUNE");
}

static const struct scenario scenarios[] = {
    {"the_fastest_product_is_found", the_fastest_product_is_found, "", 0},
    {"the_fastest_tile_is_found", the_fastest_tile_is_found, "", 0},
    {"few_rows_have_ways_of_their_own", few_rows_have_ways_of_their_own, "", 0},
    {"the_fastest_softmax_is_found", the_fastest_softmax_is_found, "", 0},
    {"the_limit_of_time_is_kept", the_limit_of_time_is_kept, "", 0},
    {"plans_take_what_was_kept", plans_take_what_was_kept, "", 0},
    {"what_does_not_fit_is_passed_over", what_does_not_fit_is_passed_over, "", 0},
    {"the_first_call_measures_where_asked", the_first_call_measures_where_asked, "", 0},
};

int main(int argc, char **argv) {
    return scenarios_main(argc, argv, scenarios, sizeof scenarios / sizeof scenarios[0]);
}
