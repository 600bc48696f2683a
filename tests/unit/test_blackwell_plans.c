/* test_blackwell_plans.c: which problems blackwell.forward takes on 10.0, in which tiles, orders and shares of
 * exponentials, and what it leaves to others. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "families/families.h"
#include "plan_cases.h"

#include "cuda/compiler.h"
#include "families/blackwell/forward/blackwell_forward.h"
#include "gpu/gpu_family.h"

static void takes_what_it_names(void **state) {
    (void)state;
    static const struct plan_case cases[] = {
        {0, 8192, 256, 256, "SM100_Pair_256x128_Exp1of4_Static", "512 of 512 columns"},
        {0, 8192, 128, 128, "SM100_Pair_512x128_Exp1of4_Static", "10 slots of 16 KB for K and V"},
        {0, 256, 128, 128, "SM100_Pair_256x128_Exp1of4_Static", "384 of 512 columns"},
        {0, 8192, 64, 64, "SM100_Pair_512x128_Exp1of4_Static", "12 slots"},
        {0, 8192, 192, 128, "SM100_Pair_512x128_Exp1of4_Static", "8 slots"},
        {0, 8192, 256, 128, "SM100_Pair_256x128_Exp1of4_Static", "10 slots"},
        {0, 8192, 128, 256, "SM100_Pair_256x128_Exp1of4_Static", "12 slots"},
        {CAUSAL, 8192, 256, 256, "SM100_Pair_256x128_Exp1of4_Dynamic", "dynamic order"},
        {CAUSAL | PACKED, 8192, 128, 128, "SM100_Pair_512x128_Exp1of4_Dynamic", "registers 176 softmax"},
        {SOFTCAP, 8192, 128, 128, "SM100_Pair_256x128_Static", "0 of 1 exponentials"},
        {NEGATIVE, 8192, 128, 128, "SM100_Pair_256x128_Static", "256 query rows"},
        {MASK | ROWS | CAUSAL, 8192, 256, 256, "SM100_Pair_256x128_Dynamic", ""},
        {BIAS | ROWS, 8192, 128, 128, "SM100_Pair_256x128_Static", ""},
        {0, 8192, 264, 264, NULL, "head dims are at most 256"},
        {MASK, 8192, 128, 128, "SM100_Pair_256x128_Static", ""},
        {BIAS | CAUSAL, 8192, 256, 256, "SM100_Pair_256x128_Dynamic", ""},
        {INTERVALS, 8192, 128, 128, NULL, "key intervals"},
        {FAR, 8192, 128, 128, NULL, "no multiples of 16 bytes"},
        {MASK | ROWS | PACKED, 8192, 128, 128, NULL, "rows of mask and bias"},
    };
    const fdm_device device = device_of("sm_100");
    const size_t count = sizeof cases / sizeof cases[0];
    check_plans("blackwell.forward", FDM_FORWARD, &device, cases, count);
    for (size_t i = 0; i < count; i++) {
        const struct plan_case *c = &cases[i];
        const fdm_problem p = problem_of(FDM_FORWARD, c->features, c->rows, c->head_dim, c->head_dim_v);
        fdm_plan plan = {.struct_bytes = sizeof plan};
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        assert_string_equal(plan.family, c->choice ? "blackwell" : "mma");
    }
}

/* Few rows go to kernels for them; another capability to its own family. */
static void leaves_to_others(void **state) {
    (void)state;
    static const struct {
        const char *device, *family;
        int64_t rows;
    } cases[] = {{"sm_100", "blackwell", 17},
                 {"sm_100", "mma", 16},
                 {"sm_100", "mma", 1},
                 {"sm_90", "hopper", 8192},
                 {"sm_120", "mma", 8192}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fdm_device device = device_of(cases[i].device);
        const fdm_problem p = problem_of(FDM_FORWARD, 0, cases[i].rows, 128, 128);
        fdm_plan plan = {.struct_bytes = sizeof plan};
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        assert_string_equal(plan.family, cases[i].family);
    }
}

/* 10.1 has other machine code; an NVRTC that does not know the target leaves the problem to the portable family. */
static void wants_its_target(void **state) {
    (void)state;
    static const struct {
        int32_t minor, nvrtc_version;
        const char *family, *words; /* words: of why not */
    } cases[] = {{0, 0, "blackwell", ""},
                 {0, 12080, "blackwell", ""},
                 {3, 12090, "blackwell", ""},
                 {0, 13000, "blackwell", ""},
                 {0, 12060, "mma", "older than 12.8, the first that knows sm_100a"},
                 {3, 12080, "mma", "older than 12.9, the first that knows sm_103a"},
                 {1, 0, "mma", "compute capabilities 10.0 and 10.3"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fdm_device device = device_of("sm_100");
        const fdm_problem p = problem_of(FDM_FORWARD, 0, 4096, 256, 256);
        fdm_plan plan = {.struct_bytes = sizeof plan};
        fdm_options options = fdm_options_default();
        device.compute_minor = cases[i].minor;
        device.nvrtc_version = cases[i].nvrtc_version;
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        assert_string_equal(plan.family, cases[i].family);
        options.kernel = "blackwell.forward";
        if (!*cases[i].words) /* 10.3 makes exponentials twice as fast */
            assert_true((strstr(plan.choice, "_Exp") == NULL) == (cases[i].minor == 3));
        if (*cases[i].words) {
            assert_int_not_equal(fdm_plan_attention(&device, &p, &options, &plan), FDM_OK);
            assert_non_null(strstr(fdm_last_error(), cases[i].words));
        }
    }
}

static void touch(const char *folder, const char *name) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fclose(file);
}

static void knows_the_version_of_nvrtc(void **state) {
    (void)state;
    char root[] = "/tmp/fdm-nvrtc-XXXXXX", folder[128];
    assert_non_null(mkdtemp(root));
    snprintf(folder, sizeof folder, "%s/nvidia", root);
    assert_int_equal(mkdir(folder, 0700), 0);
    snprintf(folder, sizeof folder, "%s/nvidia/cuda_nvrtc", root);
    assert_int_equal(mkdir(folder, 0700), 0);
    snprintf(folder, sizeof folder, "%s/nvidia/cuda_nvrtc/lib", root);
    assert_int_equal(mkdir(folder, 0700), 0);
    unsetenv("VIRTUAL_ENV");
    setenv("PYTHONPATH", root, 1);
    touch(folder, "libnvrtc.so.12");
    assert_int_equal(cuda_compiler_version(12), 0);
    touch(folder, "libnvrtc-builtins.so.12.6");
    assert_int_equal(cuda_compiler_version(12), 12060);
    char command[160];
    snprintf(command, sizeof command, "rm -r %s", root);
    assert_int_equal(system(command), 0);
}

/* Degree of the polynomial, and 512 rows only where a row's scores stay as the products are. */
static void shares_of_exponentials(void **state) {
    (void)state;
    const fdm_device device = device_of("sm_100");
    static const struct {
        int features;
        fdm_dtype dtype;
        int32_t variants, degree;
    } cases[] = {{0, FDM_BFLOAT16, 12, 4},
                 {NO_LSE, FDM_BFLOAT16, 12, 3},
                 {NO_LSE, FDM_FLOAT16, 12, 4},
                 {SOFTCAP, FDM_BFLOAT16, 3, 4},
                 {MASK | ROWS, FDM_BFLOAT16, 3, 4}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fdm_problem p = problem_of(FDM_FORWARD, cases[i].features, 4096, 128, 128);
        fdm_plan plan = {.struct_bytes = sizeof plan};
        char codes[16][64];
        int32_t count = 0;
        p.dtype = p.bias_dtype = cases[i].dtype;
        while (!fdm_plan_variant(&device, &p, "blackwell.forward", count, &plan)) {
            struct cuda_kernel_request request[FAMILY_LAUNCHES_MAX];
            assert_true(family_blackwell.launches(&family_blackwell, &plan, request) > 0);
            for (int32_t c = 0; c < request->num_constants; c++)
                if (strcmp(request->constants[c].name, "EXP2_DEGREE") == 0)
                    assert_int_equal(request->constants[c].value, cases[i].degree);
            for (int32_t n = 0; n < count; n++)
                assert_string_not_equal(codes[n], plan.choice);
            strcpy(codes[count++], plan.choice);
        }
        assert_int_equal(count, cases[i].variants);
    }
}

static void the_environment_chooses_the_order(void **state) {
    (void)state;
    static const char *const orders[][2] = {{"static", "Static"}, {"longest", "Longest"}, {"dynamic", "Dynamic"}};
    const fdm_device device = device_of("sm_100");
    const fdm_problem p = problem_of(FDM_FORWARD, CAUSAL, 4096, 256, 256);
    for (size_t i = 0; i < 3; i++) {
        fdm_plan plan = {.struct_bytes = sizeof plan};
        setenv("FLASH_DMATTN_SCHEDULER", orders[i][0], 1);
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        assert_non_null(strstr(plan.choice, orders[i][1]));
    }
    unsetenv("FLASH_DMATTN_SCHEDULER");
}

/* Of all threads together not more than a block has at launch: more would wait for ever, at setmaxnreg. */
static void registers_fit(void **state) {
    (void)state;
    for (int32_t q_tiles = 1; q_tiles < 3; q_tiles++) {
        const int32_t warpgroups = BLACKWELL_FORWARD_THREADS(q_tiles) / 128, at_launch = 512 / warpgroups / 8 * 8;
        assert_true(q_tiles * BLACKWELL_SOFTMAX_REGISTERS(q_tiles) + BLACKWELL_CORRECTION_REGISTERS(q_tiles) +
                        BLACKWELL_OTHER_REGISTERS(q_tiles) <=
                    warpgroups * at_launch);
        assert_true(BLACKWELL_SOFTMAX_REGISTERS(q_tiles) > at_launch &&
                    BLACKWELL_CORRECTION_REGISTERS(q_tiles) <= at_launch &&
                    BLACKWELL_OTHER_REGISTERS(q_tiles) <= at_launch);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(takes_what_it_names),    cmocka_unit_test(leaves_to_others),
        cmocka_unit_test(wants_its_target),       cmocka_unit_test(knows_the_version_of_nvrtc),
        cmocka_unit_test(shares_of_exponentials), cmocka_unit_test(the_environment_chooses_the_order),
        cmocka_unit_test(registers_fit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
