/* test_float32.c: plans of float32 problems on CUDA devices: which kernel, which tile and launches, what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "families/families.h"
#include "families/mma/float32/mma_backward32.h"
#include "families/mma/mma_family.h"
#include "flash_dmattn.h"

static const char *const archs[] = {"sm_80", "sm_86", "sm_89", "sm_90", "sm_120"};
enum { NUM_ARCHS = sizeof archs / sizeof archs[0] };

static fdm_problem problem_of(fdm_pass pass, int64_t head_dim, int64_t head_dim_v) {
    fdm_problem p = fdm_problem_default();
    p.pass = pass;
    p.dtype = p.bias_dtype = FDM_FLOAT32;
    p.batch = 2;
    p.heads = 8;
    p.heads_kv = 2;
    p.head_dim = head_dim;
    p.head_dim_v = head_dim_v;
    p.seqlen_q = p.seqlen_k = 1000;
    p.softmax_scale = 0.1;
    p.aligned = 1;
    p.needs_dq = p.needs_dk = p.needs_dv = 1;
    return p;
}

static fdm_status plan_of(const char *arch, const fdm_problem *p, const char *kernel, fdm_plan *plan) {
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_options options = fdm_options_default();
    options.kernel = kernel;
    assert_int_equal(fdm_device_from_name(arch, &device), FDM_OK);
    return fdm_plan_attention(&device, p, &options, plan);
}

static int64_t constant(const struct cuda_kernel_request *r, const char *name) {
    for (int32_t i = 0; i < r->num_constants; i++)
        if (strcmp(r->constants[i].name, name) == 0)
            return r->constants[i].value;
    return -1;
}

/* The gradients that the launches of one side make together; 0 where there are none. */
static int64_t gradients_of(const fdm_problem *p, int owns_keys, int32_t *launches) {
    struct cuda_kernel_request requests[FAMILY_LAUNCHES_MAX];
    fdm_plan plan = {.struct_bytes = sizeof plan};
    int64_t gradients = 0;
    assert_int_equal(plan_of("sm_90", p, NULL, &plan), FDM_OK);
    const int32_t count = family_mma.launches(&family_mma, &plan, requests);
    assert_true(count > 0);
    *launches = 0;
    for (int32_t i = 0; i < count; i++)
        if (strcmp(requests[i].entry, "mma_backward32") == 0 && constant(&requests[i], "OWNS_KEYS") == owns_keys) {
            assert_int_equal(gradients & constant(&requests[i], "GRADIENTS"), 0); /* none is made twice */
            gradients |= constant(&requests[i], "GRADIENTS");
            ++*launches;
        }
    return gradients;
}

/* ---- tests ---- */

static void every_head_dim_has_a_tile_on_every_architecture(void **state) {
    (void)state;
    for (int pass = FDM_FORWARD; pass <= FDM_BACKWARD; pass++)
        for (int32_t a = 0; a < NUM_ARCHS; a++)
            for (int64_t d = 1; d <= 280; d += 9)
                for (int64_t dv = d; dv > 0; dv -= 61) {
                    fdm_device device = {.struct_bytes = sizeof device};
                    fdm_plan plan = {.struct_bytes = sizeof plan};
                    char tile[32];
                    const fdm_problem p = problem_of((fdm_pass)pass, d, dv);
                    const fdm_status status = plan_of(archs[a], &p, NULL, &plan);
                    assert_int_equal(status == FDM_OK, d <= 256);
                    if (status) {
                        assert_non_null(strstr(fdm_last_error(), "head dims are at most 256"));
                        continue;
                    }
                    assert_int_equal(fdm_device_from_name(archs[a], &device), FDM_OK);
                    assert_string_equal(plan.kernel, pass == FDM_FORWARD ? "mma.forward32" : "mma.backward32");
                    snprintf(tile, sizeof tile, "_TF32x3_%dx%d", plan.block_m, plan.block_n);
                    assert_non_null(strstr(plan.choice, tile));
                    assert_non_null(strstr(plan.reason, "float32"));
                    assert_true(plan.shared_bytes > 0 && plan.shared_bytes <= device.shared_bytes);
                    struct cuda_kernel_request requests[FAMILY_LAUNCHES_MAX];
                    for (int32_t n = family_mma.launches(&family_mma, &plan, requests) - 1; n >= 0; n--)
                        if (strstr(requests[n].entry, "ward32"))
                            assert_int_equal(requests[n].shared_bytes, plan.shared_bytes);
                }
}

static void sixteen_bits_never_get_them(void **state) {
    (void)state;
    for (int pass = FDM_FORWARD; pass <= FDM_BACKWARD; pass++)
        for (int64_t d = 16; d <= 256; d += 48) {
            fdm_plan plan = {.struct_bytes = sizeof plan};
            fdm_problem p = problem_of((fdm_pass)pass, d, d);
            p.dtype = FDM_BFLOAT16;
            assert_int_equal(plan_of("sm_90", &p, NULL, &plan), FDM_OK);
            assert_null(strstr(plan.kernel, "32"));
            assert_int_not_equal(plan_of("sm_90", &p, pass ? "mma.backward32" : "mma.forward32", &plan), FDM_OK);
            assert_non_null(strstr(fdm_last_error(), "it takes float32"));
        }
}

static void codes_force_tiles(void **state) {
    (void)state;
    fdm_plan plan = {.struct_bytes = sizeof plan};
    fdm_problem p = problem_of(FDM_FORWARD, 64, 64);
    assert_int_equal(plan_of("sm_90", &p, NULL, &plan), FDM_OK);
    assert_string_equal(plan.choice, "MMA_Forward_TF32x3_128x32");
    assert_int_equal(plan_of("sm_90", &p, "MMA_Forward_TF32x3_64x32", &plan), FDM_OK);
    assert_string_equal(plan.choice, "MMA_Forward_TF32x3_64x32");
    p.head_dim = 256;
    assert_int_equal(plan_of("sm_90", &p, NULL, &plan), FDM_OK);
    assert_string_equal(plan.choice, "MMA_Forward_TF32x3_64x16");
    assert_int_equal(plan_of("sm_80", &p, NULL, &plan), FDM_OK);
    assert_string_equal(plan.choice, "MMA_Forward_TF32x3_64x16_Shared");
    p.head_dim = 64;
    p.varlen = 1; /* the longest tile is for dense problems alone */
    p.total_q = p.total_k = 1500;
    assert_int_equal(plan_of("sm_90", &p, NULL, &plan), FDM_OK);
    assert_string_equal(plan.choice, "MMA_Forward_TF32x3_64x32");
    assert_int_not_equal(plan_of("sm_90", &p, "MMA_Forward_TF32x3_128x32", &plan), FDM_OK);
}

static void launches_make_what_is_asked_for(void **state) {
    (void)state;
    for (int64_t d = 64; d <= 256; d += 64)
        for (int wanted = 0; wanted < 8; wanted++) {
            fdm_problem p = problem_of(FDM_BACKWARD, d, d);
            int32_t launches;
            p.needs_dq = wanted & 1;
            p.needs_dk = wanted >> 1 & 1;
            p.needs_dv = wanted >> 2 & 1;
            assert_int_equal(gradients_of(&p, 0, &launches), p.needs_dq ? MMA_GRADIENT_OF_SCORES : 0);
            const int64_t of_keys =
                (p.needs_dk ? MMA_GRADIENT_OF_SCORES : 0) | (p.needs_dv ? MMA_GRADIENT_OF_VALUES : 0);
            assert_int_equal(gradients_of(&p, 1, &launches), of_keys);
            assert_int_equal(launches, d > 64 ? p.needs_dk + p.needs_dv : p.needs_dk || p.needs_dv);
        }
    /* the gradient of a bias alone: of keys where it has no rows, else of rows */
    fdm_problem p = problem_of(FDM_BACKWARD, 64, 64);
    int32_t launches;
    p.needs_dq = p.needs_dk = p.needs_dv = 0;
    p.has_bias = p.needs_dbias = 1;
    p.bias_shape[3] = p.seqlen_k;
    assert_int_equal(gradients_of(&p, 1, &launches), MMA_GRADIENT_OF_SCORES);
    assert_int_equal(gradients_of(&p, 0, &launches), 0);
    p.bias_shape[2] = p.seqlen_q;
    assert_int_equal(gradients_of(&p, 1, &launches), 0);
    assert_int_equal(gradients_of(&p, 0, &launches), MMA_GRADIENT_OF_SCORES);
    fdm_plan plan = {.struct_bytes = sizeof plan};
    p.deterministic = 1;
    assert_int_equal(plan_of("sm_90", &p, NULL, &plan), FDM_OK);
    const int64_t in_turns = plan.workspace_bytes;
    p.deterministic = 0;
    assert_int_equal(plan_of("sm_90", &p, NULL, &plan), FDM_OK);
    assert_true(in_turns > plan.workspace_bytes);
    p.bias_shape[3] = 1; /* that of lse: no scores are made for it */
    assert_int_equal(gradients_of(&p, 0, &launches), 0);
    assert_int_equal(gradients_of(&p, 1, &launches), 0);
}

/* A plan may come from a file: what its kernel does not take is not launched. */
static void foreign_plans_launch_nothing(void **state) {
    (void)state;
    for (int pass = FDM_FORWARD; pass <= FDM_BACKWARD; pass++) {
        struct cuda_kernel_request requests[FAMILY_LAUNCHES_MAX];
        fdm_problem p = problem_of((fdm_pass)pass, 128, 128);
        fdm_plan plan = {.struct_bytes = sizeof plan}, changed = {.struct_bytes = sizeof changed};
        p.has_mask = 1;
        p.mask_shape[2] = p.seqlen_q;
        p.mask_shape[3] = p.seqlen_k;
        assert_int_equal(plan_of("sm_90", &p, NULL, &plan), FDM_OK);
        assert_true(family_mma.launches(&family_mma, &plan, requests) > 0);
        for (int n = 0; n < 4; n++) {
            changed = plan;
            changed.parameters[0] = n == 0 ? -1 : n == 1 ? 99 : changed.parameters[0];
            changed.block_m += n == 2;
            changed.workspace_bytes = n == 3 ? 1 : changed.workspace_bytes;
            assert_int_equal(family_mma.launches(&family_mma, &changed, requests), 0);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_head_dim_has_a_tile_on_every_architecture),
        cmocka_unit_test(sixteen_bits_never_get_them),
        cmocka_unit_test(codes_force_tiles),
        cmocka_unit_test(launches_make_what_is_asked_for),
        cmocka_unit_test(foreign_plans_launch_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
