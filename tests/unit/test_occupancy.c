/* test_occupancy.c: resident blocks of a multiprocessor, against cases worked out by hand, and the kernels of a plan.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "device/occupancy.h"
#include "families/families.h"
#include "families/mma/mma_family.h"

/* One line a case, with the arithmetic beside it. Registers of a warp: 32 a thread, in steps of 256; a quarter of 65536
 * is 16384. Shared memory of a block: in steps of 128, and 1024 for the system. */
static const struct {
    const char *device;
    int32_t threads, registers;
    int64_t shared_bytes;
    int32_t blocks, warps;
    const char *bound;
} cases[] = {
    /* 5376 a warp, 3 in a quarter: 12 warps, 1 block of 8; all 65536 undivided would have held 12 as well */
    {"sm_90", 256, 168, 0, 1, 8, "registers"},
    /* the same 12 warps, 3 blocks of 4 */
    {"sm_90", 128, 168, 0, 3, 12, "registers"},
    /* 12 warps again: one block; 228 KB hold one of 227 KB and 1 KB */
    {"sm_90", 384, 168, 227 << 10, 1, 12, "registers and shared memory"},
    /* 16 warps in a quarter; 233472 / (49152 + 1024) = 4.65 */
    {"sm_90", 128, 32, 48 << 10, 4, 16, "shared memory"},
    /* 512 a warp: 128 warps; there is room for 64 warps, but for 32 blocks */
    {"sm_90", 32, 16, 0, 32, 32, "blocks"},
    /* 1024 a warp: 64 warps, and room for 64: two blocks of 32 */
    {"sm_90", 1024, 32, 0, 2, 64, "registers and warps"},
    /* 65 registers are 2080, so 2304 a warp: 7 in a quarter, 28 warps: not one block of 32 */
    {"sm_90", 1024, 65, 0, 0, 0, "registers"},
    /* 255 registers are 8160, so 8192: 2 in a quarter, 8 warps */
    {"sm_90", 256, 255, 100 << 10, 1, 8, "registers"},
    /* 116224 a block with the system's share: 233472 / 116224 = 2.009 */
    {"sm_90", 128, 96, 115200, 2, 8, "shared memory"},
    /* 128 bytes more: 116352, 2.0066; and 116736 + 1024 = 117760, 1.98 */
    {"sm_90", 128, 96, 115201, 2, 8, "shared memory"},
    {"sm_90", 128, 96, 116736, 1, 4, "shared memory"},
    /* 33 threads are two warps; 10 registers are 320, so 512 */
    {"sm_90", 33, 10, 0, 32, 64, "warps and blocks"},
    /* 4096 a warp: 4 in a quarter, 16 warps, 2 blocks; 167936 / (81920 + 1024) = 2.02 */
    {"sm_80", 256, 128, 80 << 10, 2, 16, "registers and shared memory"},
    /* 163 KB and 1 KB fill 164 */
    {"sm_80", 128, 64, 163 << 10, 1, 4, "shared memory"},
    {"sm_80", 64, 24, 0, 32, 64, "warps and blocks"},
    /* 1280 a warp: 12 in a quarter, 48 warps, 24 blocks; 102400 / 5120 = 20; 16 blocks */
    {"sm_86", 64, 40, 4096, 16, 32, "blocks"},
    /* the same with 24 blocks: shared memory is first */
    {"sm_89", 64, 40, 4096, 20, 40, "shared memory"},
    {"sm_120", 64, 40, 4096, 20, 40, "shared memory"},
    /* 8192 a warp: 8 warps, 2 blocks of 4; 102400 / (98304 + 1024) = 1.03 */
    {"sm_86", 128, 255, 96 << 10, 1, 4, "shared memory"},
    {"sm_89", 128, 255, 0, 2, 8, "registers"},
    /* 99 KB and 1 KB fill 100; 48 warps hold one block of 32 */
    {"sm_120", 1024, 40, 99 << 10, 1, 32, "registers and shared memory"},
    /* 40 registers: 48 warps by registers, 6 blocks of 8, as many as there is room for */
    {"sm_120", 256, 40, 0, 6, 48, "registers and warps"},
    {"sm_100", 256, 32, 0, 8, 64, "registers and warps"},
    /* more than a block may have */
    {"sm_90", 1056, 16, 0, 0, 0, "what one block may have"},
    {"sm_90", 128, 256, 0, 0, 0, "what one block may have"},
    {"sm_86", 128, 32, 100 << 10, 0, 0, "shared memory"},
};

static void hand_worked_cases(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fdm_device device = {.struct_bytes = sizeof device};
        assert_int_equal(fdm_device_from_name(cases[i].device, &device), FDM_OK);
        const struct block_needs needs = {cases[i].threads, cases[i].registers, cases[i].shared_bytes};
        const struct occupancy have = occupancy_of(&device, &needs);
        if (have.blocks != cases[i].blocks || strcmp(have.bound, cases[i].bound) != 0)
            print_error("case %zu: %d blocks, '%s'\n", i, have.blocks, have.bound);
        assert_int_equal(have.blocks, cases[i].blocks);
        assert_int_equal(have.warps, cases[i].warps);
        assert_int_equal(have.warps_most, strcmp(cases[i].device, "sm_80") == 0    ? 64
                                          : strcmp(cases[i].device, "sm_90") == 0  ? 64
                                          : strcmp(cases[i].device, "sm_100") == 0 ? 64
                                                                                   : 48);
        assert_string_equal(have.bound, cases[i].bound);
    }
}

/* An architecture between two of the table has the blocks of the one before it. */
static void unknown_architectures(void **state) {
    (void)state;
    fdm_device device = {.struct_bytes = sizeof device};
    const struct block_needs small = {32, 16, 0};
    assert_int_equal(fdm_device_from_name("sm_86", &device), FDM_OK);
    device.compute_minor = 7;
    assert_int_equal(occupancy_of(&device, &small).blocks, 16);
    assert_int_equal(fdm_device_from_name("sm_120", &device), FDM_OK);
    device.compute_minor = 1;
    assert_int_equal(occupancy_of(&device, &small).blocks, 24);
    device.compute_major = 10, device.compute_minor = 3;
    assert_int_equal(occupancy_of(&device, &small).blocks, 32);
    /* a limit that was given by name is the multiprocessor's too */
    assert_int_equal(fdm_device_from_name("sm_90:smem=160K", &device), FDM_OK);
    const struct block_needs half = {128, 32, 80 << 10};
    assert_int_equal(occupancy_of(&device, &half).blocks, 1);
}

static fdm_problem problem_of(fdm_pass pass, int64_t rows) {
    fdm_problem p = fdm_problem_default();
    p.pass = pass;
    p.dtype = FDM_BFLOAT16;
    p.heads = p.heads_kv = 8;
    p.head_dim = p.head_dim_v = 128;
    p.seqlen_q = rows;
    p.seqlen_k = 4096;
    return p;
}

static void refused(fdm_status status, const char *words) {
    assert_int_equal(status, FDM_ERROR_INVALID_ARGUMENT);
    if (!strstr(fdm_last_error(), words))
        print_error("%s\n", fdm_last_error());
    assert_non_null(strstr(fdm_last_error(), words));
}

static void bad_arguments(void **state) {
    (void)state;
    fdm_device device = {.struct_bytes = sizeof device}, cpu = {.struct_bytes = sizeof cpu};
    fdm_plan plan = {.struct_bytes = sizeof plan}, foreign = {.struct_bytes = sizeof foreign};
    fdm_kernel_resources kernels[8] = {{.struct_bytes = sizeof kernels[0]}};
    int32_t count = -1;
    const fdm_problem problem = problem_of(FDM_BACKWARD, 4096);
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    assert_int_equal(fdm_device_from_name("cpu", &cpu), FDM_OK);
    assert_int_equal(fdm_plan_attention(&device, &problem, NULL, &plan), FDM_OK);
    refused(fdm_plan_resources(NULL, &device, kernels, 8, &count), "plan is NULL");
    refused(fdm_plan_resources(&plan, NULL, kernels, 8, &count), "device is NULL");
    refused(fdm_plan_resources(&plan, &device, NULL, 8, &count), "kernels is NULL");
    refused(fdm_plan_resources(&plan, &device, kernels, 8, NULL), "count is NULL");
    refused(fdm_plan_resources(&plan, &device, kernels, 2, &count), "launches 3 kernels; there is room for 2");
    refused(fdm_plan_resources(&plan, &cpu, kernels, 8, &count), "device type 2, but device has type 1");
    foreign = plan;
    foreign.kernel_index = 1000;
    refused(fdm_plan_resources(&foreign, &device, kernels, 8, &count), "names kernel 'hopper.backward'");
    foreign = plan;
    strcpy(foreign.family, "mxa");
    refused(fdm_plan_resources(&foreign, &device, kernels, 8, &count), "of family 'mxa'");
    foreign = plan;
    foreign.shared_bytes++;
    refused(fdm_plan_resources(&foreign, &device, kernels, 8, &count), "is not its kernel's");
    assert_int_equal(count, -1);
    assert_int_equal(fdm_plan_attention(&cpu, &problem, NULL, &plan), FDM_OK);
    assert_int_equal(fdm_plan_resources(&plan, &cpu, kernels, 8, &count), FDM_OK);
    assert_int_equal(count, 0);
}

/* Keys are put in order by kernels of their own, which have threads like the others; those in runs have a launch. */
static void every_launch_has_threads(void **state) {
    (void)state;
    fdm_problem problem = problem_of(FDM_BACKWARD, 4096);
    problem.has_intervals = problem.causal = 1;
    struct cuda_kernel_request requests[FAMILY_LAUNCHES_MAX];
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_plan plan = {.struct_bytes = sizeof plan};
    int32_t ordered = 0, ranked = 0, launches = 0;
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    assert_int_equal(fdm_plan_attention(&device, &problem, NULL, &plan), FDM_OK);
    const int32_t count = family_hopper.launches(&family_hopper, &plan, requests);
    assert_int_equal(count, 6);
    for (int32_t i = 0; i < count; i++) {
        assert_in_range(requests[i].threads, 32, 1024);
        ordered += strcmp(requests[i].entry, "key_sort") == 0 && requests[i].threads == 512;
        ranked += strcmp(requests[i].entry, "block_order") == 0 && requests[i].threads == 1024;
        launches += strcmp(requests[i].entry, "hopper_backward") == 0;
    }
    assert_int_equal(ordered, 1);
    assert_int_equal(ranked, 1);
    assert_int_equal(launches, 2);
}

/* Where there is an NVRTC: what is reported is what the plan and the architecture say. */
static void kernels_of_plans(void **state) {
    (void)state;
    char path[1024], folder[] = "/tmp/fdm-resources-XXXXXX";
    if (fdm_compiler_path(path, sizeof path) || !mkdtemp(folder)) {
        print_message("not covered: %s\n", fdm_last_error());
        return;
    }
    setenv("FLASH_DMATTN_CACHE_DIR", folder, 1);
    static const struct {
        const char *device, *entries[3];
        fdm_pass pass;
        int64_t rows;
        int32_t threads[3];
    } plans[] = {
        {"sm_86", {"mma_forward"}, FDM_FORWARD, 4096, {128}},
        {"sm_90", {"mma_decode", "combine_splits"}, FDM_FORWARD, 1, {128, 128}},
        {"sm_80", {"backward_prepare", "mma_backward", "backward_finish"}, FDM_BACKWARD, 4096, {128, 256, 128}},
        {"sm_90", {"backward_prepare", "hopper_backward", "backward_finish"}, FDM_BACKWARD, 4096, {128, 512, 128}}};
    for (size_t i = 0; i < sizeof plans / sizeof plans[0]; i++) {
        const fdm_problem problem = problem_of(plans[i].pass, plans[i].rows);
        fdm_device device = {.struct_bytes = sizeof device};
        fdm_plan plan = {.struct_bytes = sizeof plan};
        fdm_kernel_resources kernels[8] = {{.struct_bytes = sizeof kernels[0]}};
        int32_t count = 0, largest = 0;
        assert_int_equal(fdm_device_from_name(plans[i].device, &device), FDM_OK);
        assert_int_equal(fdm_plan_attention(&device, &problem, NULL, &plan), FDM_OK);
        const fdm_status status = fdm_plan_resources(&plan, &device, kernels, 8, &count);
        if (status && strstr(fdm_last_error(), "libnvrtc-builtins")) { /* under sanitizers */
            print_message("not covered: %s\n", fdm_last_error());
            break;
        }
        assert_int_equal(status, FDM_OK);
        for (int32_t k = 0; k < count; k++) {
            assert_string_equal(kernels[k].entry, plans[i].entries[k]);
            assert_int_equal(kernels[k].threads, plans[i].threads[k]);
            assert_in_range(kernels[k].registers, 16, 255);
            assert_int_equal(kernels[k].spill_bytes, 0);
            assert_true(kernels[k].blocks_per_sm >= 1);
            assert_int_equal(kernels[k].warps_per_sm, kernels[k].blocks_per_sm * kernels[k].threads / 32);
            assert_true(kernels[k].warps_per_sm <= kernels[k].max_warps && *kernels[k].bound);
            largest = kernels[k].shared_bytes > largest ? (int32_t)kernels[k].shared_bytes : largest;
        }
        assert_true(count == 3 || !plans[i].entries[count]);
        assert_int_equal(largest, plan.shared_bytes);
        if (plans[i].pass == FDM_BACKWARD) { /* two entries of one source: each has its own */
            assert_true(kernels[2].shared_bytes > 0 && kernels[0].shared_bytes == 0);
        }
    }
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    assert_int_equal(system(command), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hand_worked_cases), cmocka_unit_test(unknown_architectures),
        cmocka_unit_test(bad_arguments),     cmocka_unit_test(every_launch_has_threads),
        cmocka_unit_test(kernels_of_plans),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
