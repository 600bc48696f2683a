/* test_settings.c: every environment variable: what it may hold, which calls refuse the rest, and how it is listed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/settings.h"
#include "contract/family.h"
#include "device/isa.h"
#include "machine.h"

enum { S = 64, H = 2, D = 16, ELEMENTS = S * H * D };
static float q_data[ELEMENTS], out_data[ELEMENTS], lse_data[H * S], dq_data[ELEMENTS];
static int64_t shape[4] = {1, S, H, D}, lse_shape[3] = {1, H, S};

static fdm_tensor tensor_of(float *data, int64_t *extents, int32_t ndim) {
    return (fdm_tensor){
        .data = data, .device = {FDM_CPU, 0}, .ndim = ndim, .dtype = fdm_data_type_of(FDM_FLOAT32), .shape = extents};
}

static fdm_status attend(fdm_pass pass) {
    fdm_tensor q = tensor_of(q_data, shape, 4), out = tensor_of(out_data, shape, 4), dq = tensor_of(dq_data, shape, 4),
               lse = tensor_of(lse_data, lse_shape, 3);
    fdm_tensors t = {
        .struct_bytes = sizeof t, .q = &q, .k = &q, .v = &q, .out = &out, .lse = &lse, .dout = &q, .dq = &dq};
    return pass == FDM_BACKWARD ? fdm_attention_backward(&t, NULL, NULL) : fdm_attention_forward(&t, NULL, NULL);
}
static fdm_status forward(void) { return attend(FDM_FORWARD); }
static fdm_status backward(void) { return attend(FDM_BACKWARD); }
static fdm_status plan(void) {
    const fdm_problem problem = fdm_problem_default();
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_plan made = {.struct_bytes = sizeof made};
    assert_int_equal(fdm_device_from_name("cpu:scalar", &device), FDM_OK);
    return fdm_plan_attention(&device, &problem, NULL, &made);
}
static fdm_status query(void) {
    fdm_device device = {.struct_bytes = sizeof device};
    return fdm_device_query(FDM_CPU, 0, &device);
}
static fdm_status cache(void) {
    fdm_cache_info info = {.struct_bytes = sizeof info};
    return fdm_cache_query(&info);
}
static fdm_status folder(void) {
    char path[2000];
    return fdm_cache_folder(path, sizeof path);
}

static char long_path[SETTING_PATH_BYTES + 1]; /* one byte more than is allowed */

static const struct {
    const char *name;
    fdm_status (*calls[4])(void); /* that read it */
    const char *good[8], *bad[16];
} cases[] = {
    {"FLASH_DMATTN_PROFILE_BACKWARD", {backward}, {"0"}, {"yes", "2", "01", "1 ", "true"}},
    {"FLASH_DMATTN_LOG", {forward, backward, cache}, {"0"}, {"yes", "2", "10", " 1"}},
    {"FLASH_DMATTN_TUNE", {forward, backward, plan}, {"0"}, {"yes", "2", "10", " 1"}},
    {"FLASH_DMATTN_CHECK_PAGES", {0}, {"0"}, {"yes", "2", "10", " 1"}}, /* the Python package reads it */
    {"FLASH_DMATTN_KERNEL",
     {forward, plan},
     {"cpu.forward.scalar", "reference.forward", "REFERENCE"},
     {"nothing", "cpu.forward", "cpu.forward.scalar ", "CPU.forward", "SM_90", "SMALL_64", "Cpu_x", "128", "_"}},
    {"FLASH_DMATTN_SCHEDULER",
     {forward, backward, plan},
     {"static", "longest", "dynamic"},
     {"xx", "or", "Static", "static,", "static, longest", "dynamically", ","}},
    {"FLASH_DMATTN_CACHE_DIR", {cache, folder}, {"/dev/null/cache", "relative"}, {long_path}},
    {"FLASH_DMATTN_KERNEL_ARCHIVE", {cache}, {"/dev/null/kernels.fdm", "relative.fdm"}, {long_path}},
    {"FLASH_DMATTN_CACHE_SIZE",
     {cache},
     {"0", "12", "3K", "512M", "5G", "9223372036854775807"},
     {"lots", "-1", "1T", "1MB", "M", "1.5G", " 7", "9000000000G", "0x10", "99999999999999999999", "1k"}},
    {"FLASH_DMATTN_NUM_THREADS",
     {forward, backward, plan},
     {"1", "3", "2147483647", "007"},
     {"abc", "0", "-1", "+1", " 1", "1 ", "1.0", "1e3", "2147483648", "99999999999999999999", "4K", "0x4"}},
    {"FLASH_DMATTN_CPU_ISA",
     {forward, backward, query},
     {"scalar", "neon", "avx2", "avx512", "avx512_bf16", "amx"},
     {"sse9", "or", "AVX2", "avx", "avx2 ", "avx512_bf16 or amx", "scalar,neon"}},
};
enum { NUM_CASES = sizeof cases / sizeof cases[0] };

static void assert_names(const char *name, const char *value) {
    char words[700];
    snprintf(words, sizeof words, "%s is '%.100s'; it must be ", name, value);
    assert_int_equal(strncmp(fdm_last_error(), words, strlen(words)), 0);
    assert_true(strlen(fdm_last_error()) > strlen(words));
}

/* The sentence names the variable, the value and what is allowed, and outputs stay as they were. */
static void garbage_is_an_error_of_the_call_that_reads_it(void **state) {
    (void)state;
    for (int i = 0; i < NUM_CASES; i++)
        for (int b = 0; b < 16 && cases[i].bad[b]; b++) {
            machine_set(cases[i].name, cases[i].bad[b]);
            out_data[0] = dq_data[0] = 7;
            for (int c = 0; c < 4 && cases[i].calls[c]; c++) {
                assert_int_equal(cases[i].calls[c](), FDM_ERROR_INVALID_ARGUMENT);
                assert_names(cases[i].name, cases[i].bad[b]);
            }
            assert_true(out_data[0] == 7 && dq_data[0] == 7);
            machine_set(cases[i].name, NULL);
        }
}

static void what_is_allowed_passes(void **state) {
    (void)state;
    assert_int_equal(forward(), FDM_OK);
    for (int i = 0; i < NUM_CASES; i++)
        for (int g = 0; g < 8; g++) {
            machine_set(cases[i].name, cases[i].good[g] ? cases[i].good[g] : "");
            for (int c = 0; c < 4 && cases[i].calls[c]; c++)
                assert_int_equal(cases[i].calls[c](), FDM_OK);
            machine_set(cases[i].name, NULL);
        }
}

/* Of the right form, but of no use for the problem: the sentence says where the wish is from. */
static void a_code_of_another_problem(void **state) {
    (void)state;
    machine_set("FLASH_DMATTN_KERNEL", "SM90_LargeBlock_128x128");
    assert_int_equal(forward(), FDM_ERROR_UNSUPPORTED);
    assert_non_null(strstr(fdm_last_error(), "under FLASH_DMATTN_KERNEL"));
    machine_set("FLASH_DMATTN_KERNEL", NULL);
}

static void the_fewest_threads_hold(void **state) {
    (void)state;
    fdm_problem problem = fdm_problem_default();
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_plan made = {.struct_bytes = sizeof made};
    fdm_options options = fdm_options_default();
    problem.heads = problem.heads_kv = 16;
    problem.seqlen_q = problem.seqlen_k = 4096;
    assert_int_equal(fdm_device_query(FDM_CPU, 0, &device), FDM_OK);
    machine_set("FLASH_DMATTN_NUM_THREADS", "1");
    assert_int_equal(fdm_plan_attention(&device, &problem, NULL, &made), FDM_OK);
    assert_int_equal(made.num_threads, 1);
    machine_set("FLASH_DMATTN_NUM_THREADS", "1000");
    options.num_threads = 1;
    assert_int_equal(fdm_plan_attention(&device, &problem, &options, &made), FDM_OK);
    assert_int_equal(made.num_threads, 1);
    machine_set("FLASH_DMATTN_NUM_THREADS", NULL);
}

/* What the sentences allow is what there is. */
static void words_are_those_of_the_library(void **state) {
    (void)state;
    for (int i = 0; i < CPU_ISA_COUNT; i++)
        assert_true(setting_allows(SETTING_CPU_ISA, cpu_isa_name((enum cpu_isa)i)));
    for (int i = 0; i < SCHEDULER_COUNT; i++)
        assert_true(setting_allows(SETTING_SCHEDULER, scheduler_names[i]));
}

/* ---- the list ---- */

static fdm_setting_info listed(const char *name) {
    fdm_setting_info info = {.struct_bytes = sizeof info};
    for (int32_t i = 0; fdm_setting_list(i, &info) == FDM_OK; i++)
        if (strcmp(info.name, name) == 0)
            return info;
    fail_msg("%s is not listed", name);
    return info;
}

static void every_setting_is_listed_and_tested(void **state) {
    (void)state;
    fdm_setting_info info = {.struct_bytes = sizeof info};
    int32_t count = 0;
    for (; fdm_setting_list(count, &info) == FDM_OK && info.description; count++) {
        int tested = 0;
        for (int i = 0; i < NUM_CASES; i++)
            tested |= strcmp(info.name, cases[i].name) == 0;
        assert_true(tested);
        assert_true(info.valid && info.allowed && !info.value);
    }
    assert_int_equal(count, NUM_CASES);
    for (int i = 0; i < NUM_CASES; i++) {
        machine_set(cases[i].name, cases[i].good[0]);
        assert_true(listed(cases[i].name).valid);
        for (int b = 0; b < 16 && cases[i].bad[b]; b++) {
            machine_set(cases[i].name, cases[i].bad[b]);
            info = listed(cases[i].name);
            assert_false(info.valid);
            assert_string_equal(info.value, cases[i].bad[b]);
        }
        machine_set(cases[i].name, NULL);
    }
}

static void misspelt_names_are_listed_as_unknown(void **state) {
    (void)state;
    static const char longest[] = "FLASH_DMATTN_A_NAME_THAT_IS_LONGER_THAN_THE_SIXTY_THREE_BYTES_OF_THE_FIELD";
    machine_set("FLASH_DMATTN_NUM_THREAD", "4");
    machine_set("FLASH_DMATTN_", "");
    const int has_empty = getenv("FLASH_DMATTN_") != NULL; /* Windows has no empty variables */
    machine_set(longest, "x=y");
    fdm_setting_info info = listed("FLASH_DMATTN_NUM_THREAD");
    assert_true(!info.description && !info.allowed && !info.valid);
    assert_string_equal(info.value, "4");
    if (has_empty)
        assert_null(listed("FLASH_DMATTN_").value);
    char cut[64];
    snprintf(cut, sizeof cut, "%.63s", longest);
    assert_string_equal(listed(cut).value, "x=y");
    assert_int_equal(fdm_setting_list(NUM_CASES + 2 + has_empty, &info), FDM_ERROR_INVALID_ARGUMENT);
    assert_string_equal(info.name, "FLASH_DMATTN_NUM_THREAD"); /* unwritten */
    machine_set("FLASH_DMATTN_NUM_THREAD", NULL);
    machine_set("FLASH_DMATTN_", NULL);
    machine_set(longest, NULL);
    assert_int_equal(fdm_setting_list(NUM_CASES, &info), FDM_ERROR_INVALID_ARGUMENT);
    assert_int_equal(fdm_setting_list(-1, &info), FDM_ERROR_INVALID_ARGUMENT);
    assert_int_equal(fdm_setting_list(0, NULL), FDM_ERROR_INVALID_ARGUMENT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(garbage_is_an_error_of_the_call_that_reads_it),
        cmocka_unit_test(what_is_allowed_passes),
        cmocka_unit_test(a_code_of_another_problem),
        cmocka_unit_test(the_fewest_threads_hold),
        cmocka_unit_test(words_are_those_of_the_library),
        cmocka_unit_test(every_setting_is_listed_and_tested),
        cmocka_unit_test(misspelt_names_are_listed_as_unknown),
    };
    for (int i = 0; i < NUM_CASES; i++)
        machine_set(cases[i].name, NULL);
    memset(long_path, 'x', sizeof long_path - 1);
    long_path[0] = '/';
    return cmocka_run_group_tests(tests, NULL, NULL);
}
