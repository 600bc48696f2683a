/* test_textbook.c: plans of the six textbook kernels: what runs by name and by choice code, what is refused, and that
 * shared memory is what each idea promises. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "families/families.h"
#include "families/mma/mma_family.h"
#include "flash_dmattn.h"

static const struct {
    const char *name, *code;
    int64_t head_dim_max;
} kernels[] = {
    {"mma.split-kv", "SplitKV", 256},
    {"mma.split-q", "SplitQ", 256},
    {"mma.split-q+share-kv", "SplitQ_ShareKV", 256},
    {"mma.split-q+share-qkv", "SplitQ_ShareQKV", 256},
    {"mma.split-q+tiling-qk", "SplitQ_TilingQK", 1024},
    {"mma.split-q+tiling-qkv", "SplitQ_TilingQKV", 1024},
};
enum { SPLIT_KV, SPLIT_Q, SHARE_KV, SHARE_QKV, TILING_QK, TILING_QKV, NUM_KERNELS };
static const char *const archs[] = {"sm_80", "sm_86", "sm_89", "sm_90", "sm_120"};
enum { NUM_ARCHS = sizeof archs / sizeof archs[0] };

static fdm_problem problem_of(int64_t head_dim, int64_t head_dim_v) {
    fdm_problem p = fdm_problem_default();
    p.dtype = FDM_FLOAT16;
    p.batch = 2;
    p.heads = 8;
    p.heads_kv = 2;
    p.head_dim = head_dim;
    p.head_dim_v = head_dim_v;
    p.seqlen_q = p.seqlen_k = 1000;
    p.softmax_scale = 0.1;
    p.aligned = 1;
    return p;
}

static fdm_status plan_of(const char *arch, const fdm_problem *p, const char *kernel, fdm_plan *plan) {
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_options options = fdm_options_default();
    options.kernel = kernel;
    assert_int_equal(fdm_device_from_name(arch, &device), FDM_OK);
    return fdm_plan_attention(&device, p, &options, plan);
}

static int64_t shared_of(const char *code, int64_t head_dim) {
    fdm_plan plan = {.struct_bytes = sizeof plan};
    const fdm_problem p = problem_of(head_dim, head_dim);
    assert_int_equal(plan_of("sm_90", &p, code, &plan), FDM_OK);
    return plan.shared_bytes;
}

/* ---- tests ---- */

static void names_run_on_every_architecture_to_their_head_dim(void **state) {
    (void)state;
    for (int32_t a = 0; a < NUM_ARCHS; a++)
        for (int32_t k = 0; k < NUM_KERNELS; k++)
            for (int64_t d = 1; d <= 1040; d += 13)
                for (int64_t dv = d; dv > 0; dv -= 217) {
                    fdm_device device = {.struct_bytes = sizeof device};
                    fdm_plan plan = {.struct_bytes = sizeof plan};
                    const fdm_problem p = problem_of(d, dv);
                    const int taken = plan_of(archs[a], &p, kernels[k].name, &plan) == FDM_OK;
                    assert_int_equal(taken, d <= kernels[k].head_dim_max);
                    if (!taken)
                        continue;
                    assert_int_equal(fdm_device_from_name(archs[a], &device), FDM_OK);
                    assert_string_equal(plan.kernel, kernels[k].name);
                    assert_true(plan.shared_bytes <= device.shared_bytes && plan.stages == 2);
                    struct cuda_kernel_request request;
                    assert_int_equal(family_mma.launches(&family_mma, &plan, &request), 1);
                    assert_int_equal(request.shared_bytes, plan.shared_bytes);
                }
}

static void codes_name_what_is_launched(void **state) {
    (void)state;
    for (int32_t k = 0; k < NUM_KERNELS; k++)
        for (int32_t v = 0; v < 8; v++) {
            char code[64];
            fdm_plan plan = {.struct_bytes = sizeof plan};
            fdm_problem p = problem_of(64, 64);
            snprintf(code, sizeof code, "MMA_%s_S%d_%s%s", kernels[k].code, v & 1 ? 2 : 1, v & 2 ? "Swizzle" : "Pad",
                     v & 4 ? "_F16Acc" : "");
            assert_int_equal(plan_of("sm_90", &p, code, &plan), FDM_OK);
            assert_string_equal(plan.choice, code);
            assert_string_equal(plan.kernel, kernels[k].name);
            assert_int_equal(plan.stages, v & 1 ? 2 : 1);
            p.dtype = FDM_BFLOAT16;
            assert_int_equal(plan_of("sm_90", &p, code, &plan) == FDM_OK, !(v & 4));
        }
}

/* Of what split-q holds with two stages: three quarters, and a quarter with one; tiling's does not depend on D. */
static void ideas_save_what_they_promise(void **state) {
    (void)state;
    for (int64_t d = 64; d <= 128; d += 64) {
        const int64_t whole = shared_of("MMA_SplitQ_S2_Swizzle", d);
        assert_int_equal(whole, 4 * 64 * d * 2);
        assert_true(shared_of("MMA_SplitKV_S2_Swizzle", d) > whole);
        assert_int_equal(4 * shared_of("MMA_SplitQ_ShareKV_S2_Swizzle", d), 3 * whole);
        assert_int_equal(4 * shared_of("MMA_SplitQ_ShareQKV_S1_Swizzle", d), whole);
        assert_true(shared_of("MMA_SplitQ_S2_Pad", d) > whole);
    }
    for (int64_t d = 64; d <= 1024; d += 64) {
        assert_int_equal(shared_of("mma.split-q+tiling-qkv", d), shared_of("mma.split-q+tiling-qkv", 64));
        assert_true(shared_of("MMA_SplitQ_TilingQK_S1_Swizzle", d) <= 16 * 16 * (d > 64 ? d : 64));
    }
}

static void what_they_lack_is_refused_in_a_sentence(void **state) {
    (void)state;
    for (int32_t k = 0; k < NUM_KERNELS; k++)
        for (int32_t i = 0; i < 9; i++) {
            fdm_plan plan = {.struct_bytes = sizeof plan};
            fdm_problem p = problem_of(64, 64);
            p.has_mask = i == 0;
            p.has_bias = i == 1;
            p.has_intervals = i == 2;
            p.softcap = i == 3 ? 30 : 0;
            p.window_left = i == 4 ? 7 : -1;
            p.window_right = i == 5 ? 7 : -1;
            p.aligned = i != 6;
            p.dtype = i == 7 ? FDM_FLOAT32 : FDM_FLOAT16;
            p.causal = i == 8; /* this alone they take */
            const fdm_status status = plan_of("sm_90", &p, kernels[k].name, &plan);
            assert_int_equal(status == FDM_OK, i == 8);
            if (status)
                assert_non_null(strstr(fdm_last_error(), "cannot run it"));
        }
}

static void nobody_gets_them_unasked(void **state) {
    (void)state;
    for (int64_t d = 8; d <= 1024; d += 8) {
        fdm_plan plan = {.struct_bytes = sizeof plan};
        const fdm_problem p = problem_of(d, d);
        assert_int_equal(plan_of("sm_90", &p, NULL, &plan), FDM_OK);
        assert_null(strstr(plan.kernel, "split"));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_run_on_every_architecture_to_their_head_dim),
        cmocka_unit_test(codes_name_what_is_launched),
        cmocka_unit_test(ideas_save_what_they_promise),
        cmocka_unit_test(what_they_lack_is_refused_in_a_sentence),
        cmocka_unit_test(nobody_gets_them_unasked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
