/* test_blackwell_backward.c: which problems blackwell.backward takes on 10.0, in which launches and orders, and what it
 * leaves to others. */
#include "families/families.h"
#include "plan_cases.h"

#include "families/blackwell/backward/blackwell_backward.h"
#include "gpu/gpu_family.h"

static void takes_what_it_names(void **state) {
    (void)state;
    static const struct plan_case cases[] = {
        {0, 8192, 256, 256, "SM100_Pair_256x128_D256_Static", "a kernel each for dQ, dK and dV"},
        {0, 8192, 128, 128, "SM100_Pair_256x128_D128_Static", "a kernel for dQ, one for dK and dV"},
        {0, 8192, 192, 128, "SM100_Pair_256x128_D256_Static", "6 slots"},
        {0, 8192, 40, 72, "SM100_Pair_256x128_D128_Static", "10 slots"},
        {CAUSAL | DLSE, 4096, 256, 256, "SM100_Pair_256x128_D256_Dynamic", "dynamic order"},
        {CAUSAL, 9000, 128, 128, "SM100_Pair_256x128_D128_Dynamic", "512 columns"},
        {WINDOW | SOFTCAP, 8192, 256, 64, "SM100_Pair_256x128_D256_Dynamic", ""},
        {PACKED, 8192, 128, 128, "SM100_Pair_256x128_D128_Dynamic", "the same bits every time"},
        {0, 8192, 264, 264, NULL, "head dims are at most 256"},
        {MASK, 8192, 128, 128, NULL, "masks that query rows share"},
        {BIAS, 8192, 128, 128, NULL, "biases that query rows share"},
        {INTERVALS | CAUSAL, 8192, 128, 128, NULL, "key intervals"},
        {FAR, 8192, 128, 128, NULL, "no multiples of 16 bytes"},
    };
    const fdm_device device = device_of("sm_100");
    check_plans("blackwell.backward", FDM_BACKWARD, &device, cases, sizeof cases / sizeof cases[0]);
}

/* Head dims that leave its tiles empty: only where it is asked for. */
static void is_passed_over_for_narrow_heads(void **state) {
    (void)state;
    const fdm_device device = device_of("sm_100");
    const fdm_problem p = problem_of(FDM_BACKWARD, CAUSAL, 8192, 64, 64);
    fdm_options options = fdm_options_default();
    fdm_plan plan = {.struct_bytes = sizeof plan};
    assert_int_equal(fdm_plan_attention(&device, &p, &options, &plan), FDM_OK);
    assert_string_equal(plan.kernel, "mma.backward");
    options.kernel = "blackwell.backward";
    assert_int_equal(fdm_plan_attention(&device, &p, &options, &plan), FDM_OK);
    assert_string_equal(plan.kernel, "blackwell.backward");
}

static void leaves_other_devices_and_dtypes(void **state) {
    (void)state;
    static const char *const names[] = {"sm_90", "sm_120", "sm_100:smem=160K"};
    fdm_options options = fdm_options_default();
    fdm_problem p = problem_of(FDM_BACKWARD, 0, 8192, 128, 128);
    fdm_plan plan = {.struct_bytes = sizeof plan};
    options.kernel = "blackwell.backward";
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const fdm_device device = device_of(names[i]);
        assert_int_not_equal(fdm_plan_attention(&device, &p, &options, &plan), FDM_OK);
    }
    const fdm_device device = device_of("sm_100");
    p.dtype = FDM_FLOAT32;
    assert_int_not_equal(fdm_plan_attention(&device, &p, &options, &plan), FDM_OK);
    assert_non_null(strstr(fdm_last_error(), "float16 and bfloat16"));
}

/* As few parts as give every pair of multiprocessors an item of 256 keys; of packed sequences none. */
static void divides_groups_where_keys_are_few(void **state) {
    (void)state;
    static const struct {
        int64_t seqlen_k;
        int32_t heads_kv, features;
        const char *words;
    } cases[] = {{8192, 4, 0, ""},
                 {2048, 4, 0, "; groups of 4 heads in 4 parts"},
                 {6144, 1, CAUSAL, "; groups of 16 heads in 4 parts"},
                 {2048, 1, 0, "; groups of 16 heads in 16 parts"},
                 {2048, 1, PACKED, ""},
                 {256, 16, 0, ""}};
    const fdm_device device = device_of("sm_100");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fdm_problem p = problem_of(FDM_BACKWARD, cases[i].features, 2048, 128, 128);
        struct cuda_kernel_request request[FAMILY_LAUNCHES_MAX];
        fdm_plan plan = {.struct_bytes = sizeof plan};
        const int divided = *cases[i].words != 0;
        p.seqlen_k = cases[i].seqlen_k;
        p.total_k = p.varlen ? p.seqlen_k : 0;
        p.heads_kv = cases[i].heads_kv;
        assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
        assert_string_equal(plan.kernel, "blackwell.backward");
        assert_non_null(strstr(plan.reason, cases[i].words));
        assert_int_equal(strstr(plan.reason, "parts") != NULL, divided);
        const int32_t count = family_blackwell.launches(&family_blackwell, &plan, request);
        assert_int_equal(count, 3 + divided); /* rows, dQ, dK and dV, and what adds the parts' sums */
        assert_int_equal(strcmp(request[count - 1].entry, "backward_combine") == 0, divided);
    }
}

static int64_t constant_of(const struct cuda_kernel_request *request, const char *name) {
    for (int32_t i = 0; i < request->num_constants; i++)
        if (strcmp(request->constants[i].name, name) == 0)
            return request->constants[i].value;
    fail_msg("no constant %s", name);
    return -1;
}

/* Bits: dQ 1, dK 2, dV 4. Each gradient that is wanted is made by one launch, no other, and all fit. */
static void makes_each_gradient_once(void **state) {
    (void)state;
    static const int64_t head_dims[] = {128, 256};
    const fdm_device device = device_of("sm_100");
    for (int wanted = 1; wanted < 8; wanted++)
        for (int d = 0; d < 2; d++) {
            fdm_problem p = problem_of(FDM_BACKWARD, CAUSAL, 8192, head_dims[d], head_dims[d]);
            struct cuda_kernel_request request[FAMILY_LAUNCHES_MAX];
            fdm_plan plan = {.struct_bytes = sizeof plan};
            int made = 0, launches = 0;
            p.needs_dq = wanted & 1;
            p.needs_dk = (wanted & 2) != 0;
            p.needs_dv = (wanted & 4) != 0;
            assert_int_equal(fdm_plan_attention(&device, &p, NULL, &plan), FDM_OK);
            assert_string_equal(plan.kernel, "blackwell.backward");
            const int32_t count = family_blackwell.launches(&family_blackwell, &plan, request);
            for (int32_t i = 0; i < count; i++) {
                if (strcmp(request[i].entry, "blackwell_backward") != 0)
                    continue;
                const int own_keys = (int)constant_of(&request[i], "OWN_KEYS");
                const int ds = (int)constant_of(&request[i], "MAKES_DS"),
                          dv = (int)constant_of(&request[i], "MAKES_DV");
                const int makes = (ds ? own_keys ? 2 : 1 : 0) | (dv ? 4 : 0);
                assert_int_equal(made & makes, 0);
                assert_int_equal(constant_of(&request[i], "HEAD_DIM"), head_dims[d]);
                assert_in_range(request[i].shared_bytes, 1, plan.shared_bytes);
                assert_in_range(request[i].threads, 32, 1024);
                made |= makes;
                launches++;
            }
            assert_int_equal(made, wanted);
            const int of_keys = d == 0 ? p.needs_dk || p.needs_dv : p.needs_dk + p.needs_dv;
            assert_int_equal(launches, p.needs_dq + of_keys);
            assert_in_range(plan.shared_bytes, 1, device.shared_bytes);
        }
}

static void has_three_orders(void **state) {
    (void)state;
    static const char *const choices[2][3] = {
        {"SM100_Pair_256x128_D256_Static", "SM100_Pair_256x128_D256_Longest", "SM100_Pair_256x128_D256_Dynamic"},
        {"SM100_Pair_256x128_D256_Dynamic", "SM100_Pair_256x128_D256_Static", "SM100_Pair_256x128_D256_Longest"}};
    const fdm_device device = device_of("sm_100");
    for (int causal = 0; causal < 2; causal++) {
        const fdm_problem p = problem_of(FDM_BACKWARD, causal ? CAUSAL : 0, 8192, 256, 256);
        fdm_plan plan = {.struct_bytes = sizeof plan};
        for (int32_t n = 0; n < 3; n++) {
            assert_int_equal(fdm_plan_variant(&device, &p, "blackwell.backward", n, &plan), FDM_OK);
            assert_string_equal(plan.choice, choices[causal][n]);
        }
        assert_int_not_equal(fdm_plan_variant(&device, &p, "blackwell.backward", 3, &plan), FDM_OK);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(takes_what_it_names),
                                       cmocka_unit_test(is_passed_over_for_narrow_heads),
                                       cmocka_unit_test(leaves_other_devices_and_dtypes),
                                       cmocka_unit_test(divides_groups_where_keys_are_few),
                                       cmocka_unit_test(makes_each_gradient_once),
                                       cmocka_unit_test(has_three_orders)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
