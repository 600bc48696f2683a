/* test_kept_plans.c: a call gets the plan that planning gives it, whatever the call before it was: each thing that a
 * kept plan depends on is changed by itself, and changed back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cuda_call.h"
#include "plan/plan.h"
#include "problem_tensors.h"
#include "scenario.h"

enum { JSON_MAX = 8192 };

static const char *text_of(const fdm_plan *plan, char text[JSON_MAX]) {
    assert_int_equal(fdm_plan_to_json(plan, text, JSON_MAX, NULL), FDM_OK);
    return text;
}

/* What plan_call() answers is what planning anew does: the same plan, or the same refusal. */
static void expect_fresh(fdm_device_id id, const fdm_problem *problem, const fdm_options *options, const char *what) {
    static char kept_text[JSON_MAX], fresh_text[JSON_MAX];
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_plan kept = {.struct_bytes = sizeof kept}, fresh = {.struct_bytes = sizeof fresh};
    assert_int_equal(fdm_device_query(id.type, id.index, &device), FDM_OK);
    int measures;
    const fdm_status of_call = plan_call(id, problem, options, &kept, &measures);
    const fdm_status of_plan = fdm_plan_attention(&device, problem, options, &fresh);
    if (of_call != of_plan || (!of_call && strcmp(text_of(&kept, kept_text), text_of(&fresh, fresh_text)) != 0))
        fail_msg("with another %s a call gets %s", what, of_call ? fdm_last_error() : kept_text);
}

static fdm_problem problem_of(fdm_pass pass) {
    fdm_problem p = fdm_problem_default();
    p.pass = pass;
    p.dtype = FDM_BFLOAT16;
    p.batch = 2, p.heads = 8, p.heads_kv = 2;
    p.seqlen_q = p.seqlen_k = 1024;
    p.head_dim = p.head_dim_v = 128;
    return p;
}

static void change_fields(fdm_device_id id, const fdm_problem *problem, const fdm_options *options) {
    for (int32_t i = 0; i < num_problem_fields; i++)
        for (int32_t element = 0; element < problem_field_elements(&problem_fields[i]); element++) {
            fdm_problem changed = *problem;
            problem_field_change(&problem_fields[i], element, &changed);
            if (fdm_problem_validate(&changed))
                continue; /* no call has it */
            expect_fresh(id, &changed, options, problem_fields[i].name);
            expect_fresh(id, problem, options, "problem, the first again");
        }
}

static void change_wishes(fdm_device_id id, const fdm_problem *problem, const fdm_options *options) {
    static const char *const kernels[] = {"cpu.forward.scalar", "cpu.backward.scalar", "mma.forward", "mma.backward",
                                          "no.such.kernel"};
    static const char *const names[] = {"reference", "cpu", "mma", "nobody"};
    fdm_options changed;
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++) {
        changed = *options;
        changed.kernel = kernels[i];
        expect_fresh(id, problem, &changed, "option kernel");
        expect_fresh(id, problem, options, "option kernel, none again");
        setenv("FLASH_DMATTN_KERNEL", kernels[i], 1);
        expect_fresh(id, problem, options, "FLASH_DMATTN_KERNEL");
        unsetenv("FLASH_DMATTN_KERNEL");
        expect_fresh(id, problem, options, "FLASH_DMATTN_KERNEL, none again");
    }
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        changed = *options;
        changed.family = names[i];
        expect_fresh(id, problem, &changed, "option family");
        expect_fresh(id, problem, options, "option family, none again");
    }
    changed = *options;
    changed.num_threads = 1;
    expect_fresh(id, problem, &changed, "option num_threads");
    expect_fresh(id, problem, options, "option num_threads, none again");
}

static void change_environment(fdm_device_id id, const fdm_problem *problem, const fdm_options *options) {
    static const char *const settings[][2] = {
        {"FLASH_DMATTN_SCHEDULER", "static"},  {"FLASH_DMATTN_SCHEDULER", "longest"},
        {"FLASH_DMATTN_SCHEDULER", "dynamic"}, {"FLASH_DMATTN_CPU_ISA", "scalar"},
        {"FLASH_DMATTN_CPU_ISA", "avx2"},      {"FLASH_DMATTN_NUM_THREADS", "1"},
    };
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        setenv(settings[i][0], settings[i][1], 1);
        expect_fresh(id, problem, options, settings[i][0]);
        unsetenv(settings[i][0]);
        expect_fresh(id, problem, options, settings[i][0]);
    }
}

static void plans_of_calls_are_fresh(void) {
    const fdm_device_id devices[] = {{FDM_CPU, 0}, {FDM_CUDA, 0}, {FDM_CUDA, 1}};
    const fdm_options options = fdm_options_default();
    use_fake_compiler();
    for (int pass = FDM_FORWARD; pass <= FDM_BACKWARD; pass++)
        for (int d = 0; d < 3; d++) {
            const fdm_problem problem = problem_of((fdm_pass)pass);
            expect_fresh(devices[d], &problem, &options, "device or pass");
            change_fields(devices[d], &problem, &options);
            change_wishes(devices[d], &problem, &options);
            change_environment(devices[d], &problem, &options);
            expect_fresh(devices[(d + 1) % 3], &problem, &options, "device");
            expect_fresh(devices[d], &problem, &options, "device, the first again");
        }
}

static const struct scenario scenarios[] = {
    {"plans_of_calls_are_fresh", plans_of_calls_are_fresh, "FAKE_CUDA_DEVICES=9.0:232448,8.0:166912", 0},
};

int main(int argc, char **argv) {
    return scenarios_main(argc, argv, scenarios, sizeof scenarios / sizeof scenarios[0]);
}
