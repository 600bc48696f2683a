/* test_gpu_launches.c: the list of a plan's launches: which remain, whose parameters they have, what is too much. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "gpu/gpu_launches.h"
#include "problem/problem.h"

static struct gpu_launches list;
static const fdm_problem problem;
static const struct attention attention;

static void begin(const struct attention *of) {
    static char workspace[64];
    gpu_launches_begin(&list, 0, &problem, of, of ? workspace : NULL);
}
static void add(const char *entry, int64_t blocks, const void *params, size_t bytes) {
    *gpu_add_kernel(&list) = (struct cuda_kernel_request){.file = "a.cu", .entry = entry, .threads = 32};
    gpu_add_launch(&list, (struct gpu_launch){.grid = {blocks}, .params = params, .params_bytes = bytes});
}

static void launches_have_their_own_parameters(void **state) {
    (void)state;
    int32_t params[2] = {1, 2};
    begin(&attention);
    add("first", 3, params, sizeof params);
    params[0] = 5;
    add("second", 4, params, sizeof params);
    gpu_add_launch_of(&list, 0, (struct gpu_launch){.grid = {7}, .params = &params[1], .params_bytes = 4});
    assert_true(list.num_kernels == 2 && list.count == 3);
    assert_int_equal(*(const int32_t *)list.list[0].params, 1);
    assert_int_equal(*(const int32_t *)list.list[1].params, 5);
    assert_int_equal(*(const int32_t *)list.list[2].params, 2);
    assert_true(list.list[0].kernel == 0 && list.list[1].kernel == 1 && list.list[2].kernel == 0);
    for (int i = 0; i < 3; i++)
        assert_int_equal((uintptr_t)list.list[i].params % 64, 0); /* as tensor maps want it */
}

static void what_has_no_blocks_is_left_out(void **state) {
    (void)state;
    const int32_t params = 1;
    begin(&attention);
    add("none", 0, &params, sizeof params);
    assert_true(list.num_kernels == 0 && list.count == 0);
    add("one", 1, &params, sizeof params);
    gpu_add_launch_of(&list, 0, (struct gpu_launch){.params = &params, .params_bytes = sizeof params});
    assert_true(list.num_kernels == 1 && list.count == 1);
    assert_string_equal(list.requests[0].entry, "one");
}

static void without_tensors_there_are_kernels_alone(void **state) {
    (void)state;
    begin(NULL);
    add("none", 0, NULL, 1 << 20);
    add("one", 1, NULL, 1 << 20);
    assert_true(list.num_kernels == 2 && list.count == 0 && list.workspace);
}

static void too_many_parameters_are_an_error(void **state) {
    (void)state;
    static char params[GPU_PARAMS_BYTES];
    begin(&attention);
    add("first", 1, params, sizeof params);
    add("second", 1, params, 1);
    assert_int_equal(gpu_launches_run(&list, NULL), FDM_ERROR_INTERNAL);
    assert_non_null(strstr(fdm_last_error(), "the parameters of 2 launches take"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(launches_have_their_own_parameters), cmocka_unit_test(what_has_no_blocks_is_left_out),
        cmocka_unit_test(without_tensors_there_are_kernels_alone), cmocka_unit_test(too_many_parameters_are_an_error)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
