/* test_tune.c: the tuner on a pretended device whose kernels take planted times: it finds the fastest, drops what is
 * wrong, keeps the limit of time, and plans take what it kept and nothing else. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "cuda_call.h"
#include "gpu/forward_params.h"
#include "scenario.h"
#include "tuning/store.h"

enum { ROWS_MAX = 64 };

/* Which launches of a kernel are the planted ones, by the shared memory that no other way's have. */
static int fast_bytes, wrong_bytes;
static double fast_seconds, wrong_seconds, other_seconds;
static const char *planted_kernel = "mma.forward", *planted_entry = "mma_forward";

static double planted(const struct fake_launch *launch, const void *parameters) {
    const struct gpu_forward_params *params = parameters;
    if (strcmp(launch->entry, planted_entry) != 0)
        return other_seconds;
    if (launch->shared_bytes == (unsigned)wrong_bytes) {
        memset(params->out.data, 0x41, 64); /* where others leave NaN */
        return wrong_seconds;
    }
    return launch->shared_bytes == (unsigned)fast_bytes ? fast_seconds : other_seconds;
}

/* What a scenario's problem has besides. */
static void (*more_of)(fdm_problem *p);

static fdm_problem problem_of(void) {
    fdm_problem p = fdm_problem_default();
    p.dtype = FDM_FLOAT16;
    p.heads = p.heads_kv = 2;
    p.seqlen_q = p.seqlen_k = 300;
    p.head_dim = p.head_dim_v = 192;
    if (more_of)
        more_of(&p);
    return p;
}

static fdm_device the_device(void) {
    fdm_device device = {.struct_bytes = sizeof device};
    assert_int_equal(fdm_device_query(FDM_CUDA, 0, &device), FDM_OK);
    return device;
}

/* The number-th way of the kernel whose shared memory no other way of it has, and that is not the rules' choice. */
static fdm_plan unlike_plan(int number) {
    enum { WAYS_MAX = 32 };
    static fdm_plan all[WAYS_MAX];
    const fdm_device device = the_device();
    const fdm_problem p = problem_of();
    const fdm_options rules = {
        .struct_bytes = sizeof rules, .tune = FDM_TUNE_RULES, .window_left = -1, .window_right = -1};
    fdm_plan rule = {.struct_bytes = sizeof rule};
    int count = 0;
    if (fdm_plan_attention(&device, &p, &rules, &rule))
        fail_msg("%s", fdm_last_error());
    for (; count < WAYS_MAX; count++) {
        all[count].struct_bytes = sizeof all[count];
        if (fdm_plan_variant(&device, &p, planted_kernel, count, &all[count]))
            break;
    }
    for (int i = 0; i < count; i++) {
        int same = 0;
        for (int j = 0; j < count; j++)
            same += all[j].shared_bytes == all[i].shared_bytes;
        if (same == 1 && strcmp(all[i].choice, rule.choice) != 0 && number-- == 0)
            return all[i];
    }
    fail_msg("too few ways have shared memory of their own");
    return all[0];
}

static const fdm_tune_row *row_of(const fdm_tune_row *rows, const fdm_tune_result *result, const char *choice) {
    for (int i = 0; i < result->num_rows; i++)
        if (strcmp(rows[i].choice, choice) == 0)
            return &rows[i];
    fail_msg("%s is no row", choice);
    return NULL;
}

static fdm_tune_row rows[ROWS_MAX];
static fdm_tune_result tune(const fdm_tune_options *options) {
    const fdm_device device = the_device();
    const fdm_problem p = problem_of();
    fdm_tune_result result = {.struct_bytes = sizeof result};
    rows[0].struct_bytes = sizeof rows[0];
    fake_driver()->plant(planted);
    if (fdm_tune(&device, &p, options, rows, ROWS_MAX, &result))
        fail_msg("%s", fdm_last_error());
    fake_driver()->plant(NULL);
    assert_int_equal(fake_driver()->live().allocations, 0);
    return result;
}

static void plant_times(double fast, double wrong, double other) {
    static int ready;
    if (!ready++) {
        use_fake_compiler();
        use_fresh_cache();
    }
    fast_bytes = (int)unlike_plan(0).shared_bytes;
    wrong_bytes = (int)unlike_plan(1).shared_bytes;
    fast_seconds = fast, wrong_seconds = wrong, other_seconds = other;
}

static const fdm_tune_options all_ways = {.struct_bytes = sizeof all_ways, .max_variants = 60, .keep = 1};

static void the_fastest_is_found_and_the_wrong_one_dropped(void) {
    plant_times(0.9e-3, 0.1e-3, 1e-3);
    const fdm_tune_result result = tune(&all_ways);
    const fdm_tune_row *wrong = row_of(rows, &result, unlike_plan(1).choice);
    assert_string_equal(rows[result.best].choice, unlike_plan(0).choice);
    assert_true(rows[0].is_rule && !rows[result.best].is_rule);
    assert_float_equal(rows[result.best].seconds, 0.9e-3, 1e-6);
    assert_int_equal(wrong->state, FDM_TUNE_WRONG);
    assert_int_equal(wrong->num_samples, 0);
    assert_non_null(strstr(wrong->why, "differ"));
    assert_int_equal(result.kept, 1);
}

/* Half a percent is not worth another kernel, nor is any gain where nothing is faster. */
static void the_rules_stay_where_little_is_gained(void) {
    plant_times(0.995e-3, 2e-3, 1e-3);
    assert_int_equal(tune(&all_ways).best, 0);
    plant_times(1.5e-3, 2e-3, 1e-3);
    assert_int_equal(tune(&all_ways).best, 0);
}

/* No sample begins after the limit; the rules' choice has one in any case. */
static void the_limit_of_time_is_kept(void) {
    static const double limits[] = {0.02, 0.1, 1e-6};
    for (int i = 0; i < 3; i++) {
        fdm_tune_options options = all_ways;
        options.seconds = limits[i];
        plant_times(4e-3, 1e-3, 5e-3);
        const fdm_tune_result result = tune(&options);
        assert_true(result.device_seconds <= limits[i] + 0.03); /* one that has begun, and the clocks' warming */
        assert_true(rows[0].num_samples > 0);
    }
    fdm_tune_options options = all_ways;
    plant_times(40e-3, 1e-3, 50e-3);
    const fdm_tune_result result = tune(&options);
    assert_true(result.device_seconds <= 2.2);
}

/* Ahead by more than the spread after five rounds: planted times have no spread. */
static void it_ends_early(void) {
    plant_times(0.5e-3, 2e-3, 1e-3);
    const fdm_tune_result result = tune(&all_ways);
    assert_int_equal(rows[result.best].num_samples, 5);
    fast_seconds = 1e-3; /* nothing is ahead: fifteen */
    tune(&all_ways);
    assert_int_equal(rows[0].num_samples, FDM_TUNE_SAMPLES);
}

static void few_ways_are_those_of_the_model(void) {
    fdm_tune_options options = all_ways;
    options.max_variants = 3;
    plant_times(0.5e-3, 2e-3, 1e-3);
    assert_int_equal(tune(&options).num_rows, 4);
    options.compile_only = 1;
    options.max_variants = 0;
    const fdm_tune_result result = tune(&options);
    assert_int_equal(result.num_rows, 13);
    assert_true(result.device_seconds == 0);
    assert_int_equal(rows[0].state, FDM_TUNE_NOT_TIMED);
}

/* ---- what plans make of it ---- */

static fdm_plan plan_of(const fdm_problem *p, const fdm_options *options) {
    const fdm_device device = the_device();
    fdm_plan plan = {.struct_bytes = sizeof plan};
    if (fdm_plan_attention(&device, p, options, &plan))
        fail_msg("%s", fdm_last_error());
    return plan;
}

static void assert_takes(const fdm_problem *p, const fdm_options *options, const char *choice, const char *words) {
    const fdm_plan plan = plan_of(p, options);
    assert_string_equal(plan.choice, choice);
    if (!words == !strstr(plan.reason, "measured"))
        return;
    fail_msg("reason: %s", plan.reason);
}

static void plans_take_what_was_kept(void) {
    plant_times(0.5e-3, 2e-3, 1e-3);
    fdm_problem p = problem_of();
    fdm_options options = fdm_options_default();
    const fdm_plan rule = plan_of(&p, NULL);
    const char *best = unlike_plan(0).choice;
    tune(&all_ways);
    assert_takes(&p, NULL, best, "measured");
    assert_non_null(strstr(plan_of(&p, NULL).reason, "50.0 % less time than"));
    tuning_forget_memory(); /* from the file */
    assert_takes(&p, NULL, best, "measured");
    options.tune = FDM_TUNE_RULES;
    assert_takes(&p, &options, rule.choice, NULL);
    setenv("FLASH_DMATTN_TUNE", "0", 1);
    assert_takes(&p, NULL, rule.choice, NULL);
    options.tune = FDM_TUNE_MEASURE; /* the option comes first */
    assert_takes(&p, &options, best, "measured");
    unsetenv("FLASH_DMATTN_TUNE");
    options = fdm_options_default();
    options.family = "mma";
    assert_takes(&p, &options, plan_of(&p, &options).choice, NULL);
    p.deterministic = 1;
    assert_takes(&p, NULL, rule.choice, NULL);
    p = problem_of();
    p.seqlen_q = 304; /* of the class up to 320 still; above it none is known */
    assert_takes(&p, NULL, best, "measured");
    p.seqlen_q = 321;
    assert_takes(&p, NULL, plan_of(&p, NULL).choice, NULL);
}

/* A wish that no kernel grants costs nothing but a clause. */
static void what_does_not_fit_is_passed_over(void) {
    struct tuning_entry entry;
    char key[TUNING_KEY_BYTES], maker[TUNING_MAKER_BYTES];
    const fdm_device device = the_device();
    const fdm_problem p = problem_of();
    plant_times(0.5e-3, 2e-3, 1e-3);
    const fdm_plan rule = plan_of(&p, NULL);
    tune(&all_ways);
    assert_int_equal(tuning_key(&device, &p, 1, key), FDM_OK);
    assert_int_equal(tuning_maker(&device, maker), FDM_OK);
    assert_int_equal(tuning_find(key, maker, &entry), 1);
    snprintf(entry.best[0].choice, sizeof entry.best[0].choice, "MMA_Forward_9999x9999");
    tuning_keep(&entry);
    fdm_plan plan = plan_of(&p, NULL);
    assert_string_equal(plan.choice, rule.choice);
    assert_non_null(strstr(plan.reason, "rule: MMA_Forward_9999x9999"));
    assert_non_null(strstr(plan.reason, "is passed over"));
    snprintf(entry.best[0].kernel, sizeof entry.best[0].kernel, "mma.backward");
    tuning_keep(&entry);
    plan = plan_of(&p, NULL);
    assert_string_equal(plan.choice, rule.choice);
}

static void with_row_intervals(fdm_problem *p) { p->has_row_intervals = 1; }
static void with_block_mask(fdm_problem *p) { p->block_mask_size = 64; }
static void with_tree(fdm_problem *p) {
    p->seqlen_q = 8;
    p->has_tree = 1;
}
static void with_few_rows(fdm_problem *p) { p->seqlen_q = 8; }
static void with_lengths(fdm_problem *p) { p->has_seqused_q = p->has_seqused_k = 1; }
static void with_rows_of_a_cache(fdm_problem *p) {
    p->has_cache = p->has_cache_row = 1;
    p->num_pages = 5;
}
static void with_pages(fdm_problem *p) {
    p->has_cache = 1;
    p->page_size = 64;
    p->max_pages = p->num_pages = 5;
}
static void with_padding(fdm_problem *p) {
    with_pages(p);
    p->has_first_key = 1;
}
static void with_new_keys(fdm_problem *p) {
    with_pages(p);
    p->new_rows = p->seqlen_q;
}

/* A winner of each kind of problem is found, a wrong way of it dropped, and no other kind takes what was kept. */
static void each_kind_of_problem_has_its_own_choice(void) {
    static void (*const kinds[])(fdm_problem *) = {NULL,         with_few_rows, with_row_intervals,   with_block_mask,
                                                   with_tree,    with_lengths,  with_rows_of_a_cache, with_pages,
                                                   with_padding, with_new_keys};
    enum { KINDS = sizeof kinds / sizeof kinds[0] };
    for (int kind = KINDS - 1; kind >= 0; kind--) {
        more_of = kinds[kind];
        const int decodes = problem_of().seqlen_q < 300;
        planted_kernel = decodes ? "mma.decode" : "mma.forward";
        planted_entry = decodes ? "mma_decode" : "mma_forward";
        plant_times(0.5e-3, 0.1e-3, 1e-3);
        const fdm_tune_result result = tune(&all_ways);
        const char *best = unlike_plan(0).choice;
        assert_string_equal(rows[result.best].choice, best);
        assert_int_equal(row_of(rows, &result, unlike_plan(1).choice)->state, FDM_TUNE_WRONG);
        assert_int_equal(result.kept, 1);
        for (int other = 0; other < KINDS; other++) {
            more_of = kinds[other];
            const fdm_problem p = problem_of();
            if (!strstr(plan_of(&p, NULL).reason, "measured") != (other < kind))
                fail_msg("kind %d after %d: %s", other, kind, plan_of(&p, NULL).reason);
        }
    }
}

/* Of a pool that many calls share a part is enough. */
static void a_large_cache_is_not_made_whole(void) {
    more_of = with_pages;
    plant_times(0.5e-3, 0.1e-3, 1e-3);
    fdm_problem p = problem_of();
    const fdm_device device = the_device();
    fdm_tune_result result = {.struct_bytes = sizeof result};
    p.num_pages = INT32_MAX;
    p.max_pages = 1000;
    if (fdm_tune(&device, &p, &all_ways, NULL, 0, &result))
        fail_msg("%s", fdm_last_error());
    assert_non_null(strstr(plan_of(&p, NULL).reason, "measured"));
}

/* Its class is that of problems with more ways. */
static void what_takes_no_choice_keeps_none(void) {
    const fdm_device device = the_device();
    fdm_tune_result result = {.struct_bytes = sizeof result};
    plant_times(0.5e-3, 2e-3, 1e-3);
    for (int kind = 0; kind < 2; kind++) {
        fdm_problem p = problem_of();
        *(kind ? &p.invariance : &p.deterministic) = 1;
        assert_int_equal(fdm_tune(&device, &p, &all_ways, NULL, 0, &result), FDM_OK);
        assert_int_equal(result.kept, 0);
        p = problem_of();
        assert_null(strstr(plan_of(&p, NULL).reason, "measured"));
    }
}

/* The model speaks where it is asked and nothing was kept; deterministic calls do not hear it. */
static void plans_take_what_is_predicted(void) {
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_problem p = problem_of();
    fdm_options options = fdm_options_default();
    fdm_plan plan = {.struct_bytes = sizeof plan}, rule = {.struct_bytes = sizeof rule};
    int predicted = 0;
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    for (int64_t length = 300; length < 40000; length = length * 5 / 4) {
        fdm_prediction of_rule = {.struct_bytes = sizeof of_rule}, of_plan = {.struct_bytes = sizeof of_plan};
        p.seqlen_q = p.seqlen_k = length;
        p.head_dim = p.head_dim_v = 64;
        p.dtype = FDM_BFLOAT16;
        p.pass = FDM_BACKWARD;
        p.needs_dq = p.needs_dk = p.needs_dv = p.has_intervals = p.causal = 1;
        options.tune = FDM_TUNE_RULES;
        assert_int_equal(fdm_plan_attention(&device, &p, &options, &rule), FDM_OK);
        options.tune = FDM_TUNE_PREDICT;
        assert_int_equal(fdm_plan_attention(&device, &p, &options, &plan), FDM_OK);
        if (strcmp(plan.choice, rule.choice) == 0) {
            assert_null(strstr(plan.reason, "predicted"));
            continue;
        }
        predicted++;
        assert_memory_equal(plan.reason, "predicted ", 10);
        assert_non_null(strstr(plan.reason, rule.choice));
        assert_int_equal(fdm_plan_predict(&device, &plan, 0, &of_plan), FDM_OK);
        assert_int_equal(fdm_plan_predict(&device, &rule, 0, &of_rule), FDM_OK);
        assert_true(of_plan.seconds > 0 && of_plan.seconds < 0.98 * of_rule.seconds);
        p.deterministic = 1;
        assert_int_equal(fdm_plan_attention(&device, &p, &options, &plan), FDM_OK);
        assert_null(strstr(plan.reason, "predicted"));
        p.deterministic = 0;
    }
    assert_true(predicted > 0);
}

static void settings_are_checked(void) {
    const fdm_device device = the_device();
    const fdm_problem p = problem_of();
    fdm_plan plan = {.struct_bytes = sizeof plan};
    fdm_options options = fdm_options_default();
    setenv("FLASH_DMATTN_TUNE", "2", 1);
    assert_refused(fdm_plan_attention(&device, &p, NULL, &plan), FDM_ERROR_INVALID_ARGUMENT, "must be 0 or 1");
    unsetenv("FLASH_DMATTN_TUNE");
    setenv("FLASH_DMATTN_AUTOTUNE", "1", 1);
    assert_refused(fdm_plan_attention(&device, &p, NULL, &plan), FDM_ERROR_INVALID_ARGUMENT, "FLASH_DMATTN_TUNE");
    unsetenv("FLASH_DMATTN_AUTOTUNE");
    options.tune = 4;
    assert_refused(fdm_plan_attention(&device, &p, &options, &plan), FDM_ERROR_INVALID_ARGUMENT, "tune is 4");
}

/* ---- a disk that is full ---- */

static enum { DISK_FINE, DISK_FULL, DISK_FILLS_UP, DISK_KEEPS_NAMES } disk;

ssize_t __real_write(int file, const void *data, size_t bytes);
ssize_t __wrap_write(int file, const void *data, size_t bytes);
ssize_t __wrap_write(int file, const void *data, size_t bytes) {
    if (disk == DISK_FILLS_UP && bytes > 8) { /* half of it finds room */
        disk = DISK_FULL;
        return __real_write(file, data, bytes / 2);
    }
    if (disk != DISK_FULL)
        return __real_write(file, data, bytes);
    errno = ENOSPC;
    return -1;
}
int __real_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to) {
    if (disk != DISK_KEEPS_NAMES)
        return __real_rename(from, to);
    errno = ENOSPC;
    return -1;
}

/* What is measured is taken by this process alone, and the file from before stays whole. */
static void a_full_disk_loses_nothing(void) {
    const fdm_problem p = problem_of();
    plant_times(0.5e-3, 2e-3, 1e-3);
    const char *best = unlike_plan(0).choice;
    assert_int_equal(tune(&all_ways).kept, 1);
    for (int kind = DISK_FULL; kind <= DISK_KEEPS_NAMES; kind++) {
        plant_times(2e-3, 3e-3, 1e-3); /* now the rules' choice is the fastest */
        disk = kind;
        const fdm_tune_result result = tune(&all_ways);
        disk = DISK_FINE;
        assert_int_equal(result.kept, 2);
        assert_non_null(strstr(plan_of(&p, NULL).reason, "no other way is faster"));
        tuning_forget_memory();
        assert_takes(&p, NULL, best, "measured");
    }
}

/* ---- the first use ---- */

static int64_t launches_of_a_call(const fdm_options *options, int captured) {
    struct cuda_call call;
    assert_int_equal(cuda_call_make(&call, CALL_FORWARD, 0), FDM_OK);
    if (options)
        call.options = *options;
    call.options.family = NULL;
    const int64_t before = fake_driver()->num_launches();
    if (captured)
        fake_driver()->begin_capture(0);
    assert_int_equal(cuda_call_run(&call, NULL), FDM_OK);
    if (captured)
        assert_int_equal(fake_driver()->end_capture(), 1);
    cuda_call_release(&call);
    return fake_driver()->num_launches() - before;
}

static void the_first_call_measures_where_asked(void) {
    fdm_options options = fdm_options_default();
    plant_times(0.5e-3, 2e-3, 1e-3);
    fake_driver()->plant(planted);
    const int64_t plain = launches_of_a_call(NULL, 0);
    assert_true(plain < 4);
    options.tune = FDM_TUNE_MEASURE;
    assert_int_equal(launches_of_a_call(&options, 1), plain); /* a capture is not the place */
    assert_true(launches_of_a_call(&options, 0) > 20);
    assert_true(launches_of_a_call(&options, 0) < 4); /* it is known now */
    fdm_kept_choice kept = {.struct_bytes = sizeof kept};
    assert_int_equal(fdm_tune_kept(0, &kept), FDM_OK);
    assert_string_equal(kept.ignored, "");
    assert_int_equal(fdm_tune_forget(NULL), FDM_OK);
    assert_int_equal(fdm_tune_kept(0, &kept), FDM_ERROR_INVALID_ARGUMENT);
    setenv("FLASH_DMATTN_TUNE", "1", 1);
    assert_true(launches_of_a_call(NULL, 0) > 20);
    fake_driver()->plant(NULL);
}

/* A tuner that fails is no error of the call, and is not tried again. */
static void a_failed_measurement_is_no_error(void) {
    fdm_options options = fdm_options_default();
    options.tune = FDM_TUNE_MEASURE;
    plant_times(0.5e-3, 2e-3, 1e-3);
    fake_driver()->inject("cuEventCreate", 2, 1);
    (void)launches_of_a_call(&options, 0);
    assert_string_equal(fake_driver()->injected(), "cuEventCreate");
    assert_true(launches_of_a_call(&options, 0) < 4);
    assert_int_equal(fake_driver()->live().allocations, 0);
    assert_int_equal(fake_driver()->live().events, 0);
}

static const struct scenario scenarios[] = {
    {"the_fastest_is_found_and_the_wrong_one_dropped", the_fastest_is_found_and_the_wrong_one_dropped, "", 0},
    {"the_rules_stay_where_little_is_gained", the_rules_stay_where_little_is_gained, "", 0},
    {"the_limit_of_time_is_kept", the_limit_of_time_is_kept, "", 0},
    {"it_ends_early", it_ends_early, "", 0},
    {"few_ways_are_those_of_the_model", few_ways_are_those_of_the_model, "", 0},
    {"plans_take_what_was_kept", plans_take_what_was_kept, "", 0},
    {"what_does_not_fit_is_passed_over", what_does_not_fit_is_passed_over, "", 0},
    {"each_kind_of_problem_has_its_own_choice", each_kind_of_problem_has_its_own_choice, "", 0},
    {"a_large_cache_is_not_made_whole", a_large_cache_is_not_made_whole, "", 0},
    {"what_takes_no_choice_keeps_none", what_takes_no_choice_keeps_none, "", 0},
    {"a_full_disk_loses_nothing", a_full_disk_loses_nothing, "", 0},
    {"plans_take_what_is_predicted", plans_take_what_is_predicted, "", 0},
    {"settings_are_checked", settings_are_checked, "", 0},
    {"the_first_call_measures_where_asked", the_first_call_measures_where_asked, "", 0},
    {"a_failed_measurement_is_no_error", a_failed_measurement_is_no_error, "", 0},
};

int main(int argc, char **argv) {
    return scenarios_main(argc, argv, scenarios, sizeof scenarios / sizeof scenarios[0]);
}
