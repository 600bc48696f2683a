/* test_plan_json.c: a plan through JSON and back, and every kind of damaged JSON. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../faults/problem_tensors.h"
#include "plan/plan.h"

enum { JSON_MAX = 8192 };

/* Every field differs from its default, so that a field that is not carried is seen. */
static fdm_plan full_plan(void) {
    fdm_plan plan;
    memset(&plan, 0, sizeof plan);
    plan.struct_bytes = sizeof plan;
    fdm_problem *p = &plan.problem;
    *p = fdm_problem_default();
    p->pass = FDM_BACKWARD;
    p->dtype = FDM_BFLOAT16;
    p->batch = 2, p->heads = 12, p->heads_kv = 4;
    p->seqlen_q = 100, p->seqlen_k = 2000000000;
    p->head_dim = 48, p->head_dim_v = 80;
    p->total_q = 150, p->total_k = 2100000000, p->varlen = 1;
    p->softmax_scale = 0.1, p->softcap = 1.0 / 3;
    p->window_left = 7, p->window_right = 0;
    p->causal = 1, p->deterministic = 1;
    p->needs_dk = 0, p->needs_dbias = 1, p->has_dlse = 1;
    p->has_intervals = 1, p->interval_heads = 4;
    p->has_mask = 1, p->has_bias = 1;
    memcpy(p->mask_shape, (int64_t[]){2, 4, 1, 2000000000}, sizeof p->mask_shape);
    memcpy(p->bias_shape, (int64_t[]){1, 12, 100, 1}, sizeof p->bias_shape);
    p->bias_dtype = FDM_FLOAT32;
    p->aligned = 0, p->q_mappable = 0;
    plan.device = (fdm_device_id){FDM_CUDA, 3};
    strcpy(plan.family, "mma");
    strcpy(plan.kernel, "mma.backward.share_kv");
    strcpy(plan.choice, "SM90_LargeBlock_128x128");
    strcpy(plan.reason, "a \"quoted\" reason,\twith a \\ and \xc3\xa9");
    plan.kernel_index = 5, plan.block_m = 128, plan.block_n = 64, plan.stages = 2;
    plan.v_in_registers = 1, plan.shared_bytes = 99 << 10, plan.workspace_bytes = (int64_t)1 << 40;
    plan.num_threads = 17;
    for (int i = 0; i < FDM_PLAN_PARAMETERS; i++)
        plan.parameters[i] = -i * 1000;
    return plan;
}

static void write_plan(const fdm_plan *plan, char *text) {
    size_t needed = 0;
    assert_int_equal(fdm_plan_to_json(plan, text, JSON_MAX, &needed), FDM_OK);
    assert_int_equal(needed, strlen(text) + 1);
}

static void round_trip_keeps_every_field(void **state) {
    (void)state;
    static char first[JSON_MAX], second[JSON_MAX];
    fdm_plan plan = full_plan(), read = {.struct_bytes = sizeof read};
    memset(&read, 0xaa, sizeof read);
    read.struct_bytes = sizeof read;
    write_plan(&plan, first);
    assert_int_equal(fdm_plan_from_json(first, strlen(first), &read), FDM_OK);
    write_plan(&read, second);
    assert_string_equal(first, second);
    assert_memory_equal(plan.problem.mask_shape, read.problem.mask_shape, sizeof plan.problem.mask_shape);
    assert_memory_equal(plan.problem.bias_shape, read.problem.bias_shape, sizeof plan.problem.bias_shape);
    assert_memory_equal(plan.parameters, read.parameters, sizeof plan.parameters);
    assert_string_equal(plan.reason, read.reason);
    assert_true(plan.problem.softcap == read.problem.softcap &&
                plan.problem.softmax_scale == read.problem.softmax_scale);
    assert_true(plan.problem.total_k == read.problem.total_k && plan.workspace_bytes == read.workspace_bytes);
    /* Padding aside, all bytes: both were zeroed before their fields were set. */
    assert_memory_equal(&plan, &read, sizeof plan);
}

/* Each field of the problem by itself: its text changes, and comes back where it was. */
static void json_carries_every_field_of_the_problem(void **state) {
    (void)state;
    static char first[JSON_MAX], second[JSON_MAX];
    const fdm_plan plan = full_plan();
    write_plan(&plan, first);
    for (int32_t i = 0; i < num_problem_fields; i++)
        for (int32_t element = 0; element < problem_field_elements(&problem_fields[i]); element++) {
            const struct problem_field *field = &problem_fields[i];
            fdm_plan changed = plan, read = {.struct_bytes = sizeof read};
            problem_field_change(field, element, &changed.problem);
            if (strcmp(field->name, "reserved") == 0) {
                assert_int_equal(fdm_plan_to_json(&changed, second, JSON_MAX, NULL), FDM_ERROR_INVALID_ARGUMENT);
                continue;
            }
            write_plan(&changed, second);
            if (strcmp(first, second) == 0)
                fail_msg("JSON does not carry %s", field->name);
            if (!fdm_plan_from_json(second, strlen(second), &read)) /* a problem that there can be */
                assert_memory_equal(&read.problem, &changed.problem, sizeof read.problem);
        }
}

static void null_means_does_not_apply(void **state) {
    (void)state;
    static char text[JSON_MAX];
    fdm_plan plan = full_plan(), read = {.struct_bytes = sizeof read};
    plan.stages = 0, plan.v_in_registers = -1, plan.shared_bytes = -1;
    write_plan(&plan, text);
    assert_non_null(strstr(text, "\"stages\": null, \"v_in_registers\": null, \"shared_bytes\": null"));
    assert_int_equal(fdm_plan_from_json(text, strlen(text), &read), FDM_OK);
    assert_true(read.stages == 0 && read.v_in_registers == -1 && read.shared_bytes == -1);
}

static void a_plan_of_this_machine_executes_after_json(void **state) {
    (void)state;
    static char text[JSON_MAX];
    static float q[64], k[64], v[64], out[64], lse[4], again[64];
    int64_t shape[4] = {1, 4, 1, 16}, rows[3] = {1, 1, 4};
    for (int i = 0; i < 64; i++)
        q[i] = (float)(i % 7), k[i] = (float)(i % 5), v[i] = (float)i;
    fdm_data_type type = fdm_data_type_of(FDM_FLOAT32);
    fdm_tensor tq = {q, {FDM_CPU, 0}, 4, type, shape, NULL, 0}, tk = tq, tv = tq, to = tq, tl = tq;
    tk.data = k, tv.data = v, to.data = out, tl.data = lse, tl.ndim = 3, tl.shape = rows;
    fdm_tensors tensors = {.struct_bytes = sizeof tensors, .q = &tq, .k = &tk, .v = &tv, .out = &to, .lse = &tl};
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_problem problem;
    fdm_plan plan = {.struct_bytes = sizeof plan}, read = {.struct_bytes = sizeof read};
    assert_int_equal(fdm_device_query(FDM_CPU, 0, &device), FDM_OK);
    assert_int_equal(fdm_describe(FDM_FORWARD, &tensors, NULL, &problem), FDM_OK);
    assert_int_equal(fdm_plan_attention(&device, &problem, NULL, &plan), FDM_OK);
    write_plan(&plan, text);
    assert_int_equal(fdm_plan_from_json(text, strlen(text), &read), FDM_OK);
    size_t bytes = (size_t)(read.workspace_bytes + 64) / 64 * 64;
    void *workspace = aligned_alloc(64, bytes);
    assert_int_equal(fdm_execute(&plan, &tensors, workspace, bytes, NULL), FDM_OK);
    memcpy(again, out, sizeof out);
    memset(out, 0xff, sizeof out);
    assert_int_equal(fdm_execute(&read, &tensors, workspace, bytes, NULL), FDM_OK);
    assert_memory_equal(again, out, sizeof out);
    free(workspace);
}

static void short_buffers_are_terminated_and_told(void **state) {
    (void)state;
    char text[32];
    size_t needed = 0;
    fdm_plan plan = full_plan();
    memset(text, 'x', sizeof text);
    assert_int_equal(fdm_plan_to_json(&plan, text, 16, &needed), FDM_ERROR_INVALID_ARGUMENT);
    assert_true(needed > 16 && text[15] == 0 && text[16] == 'x');
    assert_int_equal(fdm_plan_to_json(&plan, NULL, 0, &needed), FDM_OK);
    assert_int_equal(fdm_plan_to_json(NULL, NULL, 0, &needed), FDM_ERROR_INVALID_ARGUMENT);
    assert_int_equal(fdm_plan_to_json(&plan, NULL, 8, &needed), FDM_ERROR_INVALID_ARGUMENT);
}

/* Replaces the first `from` in a good plan's JSON by `to`. */
static void replaced(char *text, const char *from, const char *to) {
    static char good[JSON_MAX];
    fdm_plan plan = full_plan();
    write_plan(&plan, good);
    const char *found = strstr(good, from);
    assert_non_null(found);
    snprintf(text, JSON_MAX, "%.*s%s%s", (int)(found - good), good, to, found + strlen(from));
}

static void damage_is_refused_with_a_sentence(void **state) {
    (void)state;
    static const struct {
        const char *from, *to, *sentence;
    } cases[] = {
        {"\"heads\": 12, ", "", "lacks the key 'heads'"},
        {"\"heads\": 12", "\"heads\": 12, \"heads\": 12", "'heads' twice"},
        {"\"heads\": 12", "\"heads\": 12, \"colour\": 1", "unknown key 'colour'"},
        {"\"heads\": 12", "\"heads\": \"12\"", "near key 'heads': a number is expected"},
        {"\"heads\": 12", "\"heads\": 12.5", "near key 'heads': an integer is expected"},
        {"\"heads\": 12", "\"heads\": null", "near key 'heads'"},
        {"\"heads\": 12", "\"heads\": 012", "a number starts with 0"},
        {"\"heads\": 12", "\"heads\": 99999999999999999999", "an integer is out of range"},
        {"\"block_m\": 128", "\"block_m\": 3000000000", "an integer is out of range"},
        {"\"dtype\": \"bfloat16\"", "\"dtype\": \"int4\"", "a dtype is unknown"},
        {"\"pass\": \"backward\"", "\"pass\": \"sideways\"", "neither forward nor backward"},
        {"\"family\": \"mma\"", "\"family\": \"a name of more than fifteen bytes\"", "a string is too long"},
        {"\"mask_shape\": [2, ", "\"mask_shape\": [", "an array is too short"},
        {"\"mask_shape\": [2, ", "\"mask_shape\": [2, 2, ", "an array is too long"},
        {"{", "[", "an object is expected"},
        {", ", " ", "a comma is expected"},
        {"\"q_mappable\": 0, ", "", "lacks the key 'q_mappable'"},
        {"\"scores_mappable\": 1}", "\"scores_mappable\": 1} x", "text follows"},
        {"\"scores_mappable\": 1}", "\"scores_mappable\": 1", "near key 'scores_mappable'"},
        {"\"heads_kv\": 4", "\"heads_kv\": 5", "not a multiple of the 5 heads"},
        {"\"workspace_bytes\": 1", "\"workspace_bytes\": -1", "workspace_bytes -"},
    };
    static char text[JSON_MAX];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fdm_plan read;
        memset(&read, 0x55, sizeof read);
        read.struct_bytes = sizeof read;
        const fdm_plan before = read;
        replaced(text, cases[i].from, cases[i].to);
        assert_int_equal(fdm_plan_from_json(text, strlen(text), &read), FDM_ERROR_INVALID_ARGUMENT);
        if (!strstr(fdm_last_error(), cases[i].sentence))
            fail_msg("case %zu: '%s' does not hold '%s'", i, fdm_last_error(), cases[i].sentence);
        assert_memory_equal(&read, &before, sizeof read);
    }
}

/* A plan whose kernel has parameters. */
static fdm_plan decode_plan(void) {
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_problem p = fdm_problem_default();
    fdm_plan plan = {.struct_bytes = sizeof plan};
    fdm_options options = fdm_options_default();
    options.kernel = "mma.decode";
    p.dtype = FDM_BFLOAT16;
    p.batch = 1, p.heads = 8, p.heads_kv = 2;
    p.seqlen_q = 1, p.seqlen_k = 65536, p.head_dim = p.head_dim_v = 128;
    assert_int_equal(fdm_device_from_name("sm_80", &device), FDM_OK);
    assert_int_equal(fdm_plan_attention(&device, &p, &options, &plan), FDM_OK);
    return plan;
}

static void parameters_have_the_names_of_the_kernels_list(void **state) {
    (void)state;
    static char text[JSON_MAX], expected[256];
    const fdm_plan plan = decode_plan();
    fdm_plan read = {.struct_bytes = sizeof read};
    const int32_t *p = plan.parameters;
    write_plan(&plan, text);
    snprintf(expected, sizeof expected,
             "\"parameters\": {\"SPLITS\": %d, \"STAGES\": %d, \"MERGE\": %d, \"EARLY\": %d, \"WARPS\": %d, "
             "\"ROW_GROUPS\": %d, \"ORDERED\": %d, \"APPENDS\": %d}, ",
             p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]);
    char *found = strstr(text, expected);
    assert_true(found && p[0] > 1);
    assert_int_equal(fdm_plan_from_json(text, strlen(text), &read), FDM_OK);
    assert_memory_equal(&plan, &read, sizeof plan);

    /* the same at the end, after the kernel and in another order, and before it */
    static char moved[JSON_MAX];
    snprintf(moved, sizeof moved,
             "{\"parameters\": {\"APPENDS\": %d, \"ORDERED\": %d, \"ROW_GROUPS\": %d, \"WARPS\": %d, \"EARLY\": %d, "
             "\"MERGE\": %d, "
             "\"STAGES\": %d, \"SPLITS\": %d}, %.*s%s",
             p[7], p[6], p[5], p[4], p[3], p[2], p[1], p[0], (int)(found - text - 1), text + 1,
             found + strlen(expected));
    assert_int_equal(fdm_plan_from_json(moved, strlen(moved), &read), FDM_OK);
    assert_memory_equal(&plan, &read, sizeof plan);

    /* eight values without names, as plans were written once */
    snprintf(moved, sizeof moved, "%.*s\"parameters\": [%d, %d, %d, %d, %d, %d, %d, %d], %s", (int)(found - text), text,
             p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], found + strlen(expected));
    assert_int_equal(fdm_plan_from_json(moved, strlen(moved), &read), FDM_OK);
    assert_memory_equal(&plan, &read, sizeof plan);
}

static void wrong_parameters_are_refused_with_a_sentence(void **state) {
    (void)state;
    static const struct {
        const char *parameters, *sentence;
    } cases[] = {
        {"{\"SPLITS\": 2}", "lacks the parameter 'STAGES'"},
        {"{\"SPLITS\": 2, \"STAGES\": 2, \"MERGE\": 1, \"EARLY\": 0, \"WARPS\": 4, \"ROW_GROUPS\": 1, "
         "\"ORDERED\": 0, \"APPENDS\": 0, \"TILE\": 1}",
         "twice, or one that 'mma.decode' does not have"},
        {"{\"SPLITS\": 2, \"STAGES\": 2, \"MERGE\": 1, \"EARLY\": 0, \"WARPS\": 4, \"ROW_GROUPS\": 1, "
         "\"ORDERED\": 0, \"APPENDS\": 0, \"SPLITS\": 2}",
         "twice, or one that"},
        {"{\"SPLITS\": 3000000000, \"STAGES\": 2, \"MERGE\": 1, \"EARLY\": 0, \"WARPS\": 4, \"ROW_GROUPS\": 1}",
         "no 32-bit integer for the parameter 'SPLITS'"},
        {"{\"a name of more than thirty-one bytes\": 2}", "too long"},
        {"{\"SPLITS\": \"2\"}", "a number is expected"},
        {"[1, 2, 3, 4, 5, 6, 7]", "an array is too short"},
        {"[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]", "an array is too long"},
        {"2", "an array is expected"},
    };
    static char text[JSON_MAX], changed[JSON_MAX];
    const fdm_plan plan = decode_plan();
    fdm_plan read = {.struct_bytes = sizeof read};
    write_plan(&plan, text);
    const char *begin = strstr(text, "{\"SPLITS\""), *end = strchr(begin, '}') + 1;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        snprintf(changed, sizeof changed, "%.*s%s%s", (int)(begin - text), text, cases[i].parameters, end);
        assert_int_equal(fdm_plan_from_json(changed, strlen(changed), &read), FDM_ERROR_INVALID_ARGUMENT);
        if (!strstr(fdm_last_error(), cases[i].sentence))
            fail_msg("case %zu: '%s' does not hold '%s'", i, fdm_last_error(), cases[i].sentence);
    }
    char *kernel = strstr(text, "mma.decode"); /* names of a kernel that is not here */
    kernel[4] = 'x';
    assert_int_equal(fdm_plan_from_json(text, strlen(text), &read), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "names parameters of 'mma.xecode', which is not kernel"));
}

/* A kernel is found by the name that it had in an older library, wherever such a name may have been stored. */
static void older_names_of_kernels_are_todays(void **state) {
    (void)state;
    static const struct {
        const char *old, *name, *device;
        fdm_pass pass;
        int64_t head_dim;
    } cases[] = {{"hopper.wide", "hopper.backward_2pass", "sm_90", FDM_BACKWARD, 256},
                 {"mma.wide", "mma.forward_d1024", "sm_80", FDM_FORWARD, 512}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        static char text[JSON_MAX], older[JSON_MAX];
        fdm_device device = {.struct_bytes = sizeof device};
        fdm_plan expected = {.struct_bytes = sizeof expected}, plan = expected;
        fdm_options options = fdm_options_default();
        fdm_problem p = fdm_problem_default();
        p.pass = cases[i].pass, p.dtype = FDM_BFLOAT16, p.batch = 2, p.heads = p.heads_kv = 8;
        p.seqlen_q = p.seqlen_k = 4096, p.head_dim = p.head_dim_v = cases[i].head_dim;
        p.needs_dq = p.needs_dk = p.needs_dv = p.pass == FDM_BACKWARD;
        assert_int_equal(fdm_device_from_name(cases[i].device, &device), FDM_OK);
        options.kernel = cases[i].name;
        assert_int_equal(fdm_plan_attention(&device, &p, &options, &expected), FDM_OK);
        assert_string_equal(expected.kernel, cases[i].name);
        options.kernel = cases[i].old;
        assert_int_equal(fdm_plan_attention(&device, &p, &options, &plan), FDM_OK);
        assert_memory_equal(&plan, &expected, sizeof plan);
        setenv("FLASH_DMATTN_KERNEL", cases[i].old, 1);
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        unsetenv("FLASH_DMATTN_KERNEL");
        assert_memory_equal(&plan, &expected, sizeof plan);
        assert_int_equal(fdm_plan_variant(&device, &p, cases[i].old, 0, &plan), FDM_OK);
        assert_string_equal(plan.choice, expected.choice);
        /* as the store of measured choices has it */
        assert_int_equal(plan_of_choice(&device, &p, cases[i].old, expected.choice, 1, &plan), FDM_OK);
        assert_string_equal(plan.kernel, cases[i].name);
        write_plan(&expected, text);
        const char *at = strstr(text, cases[i].name);
        snprintf(older, sizeof older, "%.*s%s%s", (int)(at - text), text, cases[i].old, at + strlen(cases[i].name));
        assert_int_equal(fdm_plan_from_json(older, strlen(older), &plan), FDM_OK);
        assert_memory_equal(&plan, &expected, sizeof plan);
        snprintf(plan.kernel, sizeof plan.kernel, "%s", cases[i].old); /* a struct that was stored as it is */
        assert_int_equal(plan_names_row(&plan, plan_family(&plan)), 1);
    }
}

static void every_truncation_is_refused(void **state) {
    (void)state;
    static char text[JSON_MAX];
    fdm_plan plan = full_plan(), read = {.struct_bytes = sizeof read};
    write_plan(&plan, text);
    for (size_t length = 0; length < strlen(text); length++) {
        char *copy = malloc(length ? length : 1); /* exact size: a read past the end is seen by the sanitizers */
        memcpy(copy, text, length);
        assert_int_equal(fdm_plan_from_json(copy, length, &read), FDM_ERROR_INVALID_ARGUMENT);
        free(copy);
    }
    assert_int_equal(fdm_plan_from_json(NULL, 0, &read), FDM_ERROR_INVALID_ARGUMENT);
    assert_int_equal(fdm_plan_from_json(text, strlen(text), NULL), FDM_ERROR_INVALID_ARGUMENT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip_keeps_every_field),
        cmocka_unit_test(json_carries_every_field_of_the_problem),
        cmocka_unit_test(null_means_does_not_apply),
        cmocka_unit_test(a_plan_of_this_machine_executes_after_json),
        cmocka_unit_test(short_buffers_are_terminated_and_told),
        cmocka_unit_test(damage_is_refused_with_a_sentence),
        cmocka_unit_test(parameters_have_the_names_of_the_kernels_list),
        cmocka_unit_test(wrong_parameters_are_refused_with_a_sentence),
        cmocka_unit_test(older_names_of_kernels_are_todays),
        cmocka_unit_test(every_truncation_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
