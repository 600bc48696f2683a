/* test_variants.c: the tool finds every choice code that a CUDA kernel can run a problem under, and names it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "../../cli/kernel_names.h"
#include "families/mma/mma_family.h"

static const struct gpu_algorithm *const algorithms[] = {
    &mma_decode_algorithm,    &mma_wide_algorithm,      &mma_forward_algorithm,
    &mma_split_kv_algorithm,  &mma_split_q_algorithm,   &mma_share_kv_algorithm,
    &mma_share_qkv_algorithm, &mma_tiling_qk_algorithm, &mma_tiling_qkv_algorithm};
enum { NUM_ALGORITHMS = sizeof algorithms / sizeof algorithms[0], CODES_MAX = 64 };

static int has(char (*codes)[KERNEL_CODE_MAX], int32_t count, const char *code) {
    for (int32_t i = 0; i < count; i++)
        if (strcmp(codes[i], code) == 0)
            return 1;
    return 0;
}

static fdm_kernel_info info_of(const struct gpu_algorithm *a) {
    return (fdm_kernel_info){.family = "mma", .name = a->row.name, .pass = FDM_FORWARD, .device_type = FDM_CUDA};
}

/* As many codes as the algorithm itself gives, and the same ones; returns how many. */
static int32_t compare(const struct gpu_algorithm *a, const fdm_device *device, const fdm_problem *p) {
    static char found[CODES_MAX][KERNEL_CODE_MAX], own[CODES_MAX][KERNEL_CODE_MAX];
    char text[160];
    int32_t num_own = 0;
    fdm_plan plan = {.problem = *p};
    const fdm_kernel_info info = info_of(a);
    for (int32_t i = 0; !a->refusal(device, p, text, sizeof text) && a->fill(device, p, i, &plan); i++)
        if (!has(own, num_own, plan.choice))
            memcpy(own[num_own++], plan.choice, KERNEL_CODE_MAX);
    const int32_t count = kernel_variants(device, p, &info, CODES_MAX, found);
    assert_int_equal(count, num_own);
    for (int32_t i = 0; i < count; i++)
        if (!has(own, num_own, found[i]))
            fail_msg("%s has no variant %s", a->row.name, found[i]);
    if (count > 0)
        assert_string_equal(found[0], own[0]);
    assert_int_equal(kernel_variants(device, p, &info, 1, found), count > 0);
    return count;
}

static void finds_every_variant(void **state) {
    (void)state;
    static const char *const names[] = {"sm_89", "sm_90"};
    static const int64_t dims[] = {64, 128, 256, 384, 1024};
    int32_t most[NUM_ALGORITHMS] = {0};
    for (int n = 0; n < 2; n++)
        for (int d = 0; d < 5; d++)
            for (int form = 0; form < 6; form++) {
                fdm_device device;
                fdm_problem p = fdm_problem_default();
                assert_int_equal(fdm_device_from_name(names[n], &device), FDM_OK);
                p.dtype = form % 2 ? FDM_BFLOAT16 : FDM_FLOAT16;
                p.heads = p.heads_kv = 4;
                p.seqlen_q = form == 5 ? 1 : 700;
                p.seqlen_k = 3000;
                p.head_dim = p.head_dim_v = dims[d];
                p.causal = form == 1 || form == 2;
                p.has_mask = p.has_bias = form == 3;
                p.has_intervals = form == 4;
                p.mask_shape[3] = p.bias_shape[2] = p.bias_shape[3] = 1;
                if (p.has_mask) {
                    p.mask_shape[3] = p.bias_shape[3] = 3000;
                    p.bias_shape[2] = 700;
                    p.bias_dtype = p.dtype;
                }
                for (int i = 0; i < NUM_ALGORITHMS; i++) {
                    const int32_t count = compare(algorithms[i], &device, &p);
                    most[i] = count > most[i] ? count : most[i];
                }
            }
    for (int i = 0; i < NUM_ALGORITHMS; i++) /* decode has one way, a named kernel eight */
        assert_in_range(most[i], i == 0 ? 1 : i < 3 ? 4 : 8, i == 0 ? 1 : i < 3 ? 20 : 8);
}

static void refuses_with_a_clause(void **state) {
    (void)state;
    char codes[2][KERNEL_CODE_MAX];
    fdm_device device;
    fdm_problem p = fdm_problem_default();
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    const fdm_kernel_info info = info_of(&mma_decode_algorithm);
    p.seqlen_q = 257;
    p.dtype = FDM_FLOAT16;
    assert_int_equal(kernel_variants(&device, &p, &info, 2, codes), 0);
    assert_string_equal(kernel_refusal(&info), "cannot run it: query rows times the heads of a group are at most 256");
    p.dtype = FDM_FLOAT64;
    assert_int_equal(kernel_variants(&device, &p, &info, 2, codes), 0);
    assert_string_equal(kernel_refusal(&info), "float64 is computed by the reference family only, on the CPU");
}

static void labels(void **state) {
    (void)state;
    static const struct {
        const char *name, *code, *label;
    } cases[] = {
        {"mma.split-q+share-qkv", "MMA_SplitQ_ShareQKV_S2_Pad", "mma(split-q+share-qkv+stage2)"},
        {"mma.split-q+share-qkv", "MMA_SplitQ_ShareQKV_S1_Swizzle_F16Acc",
         "mma(split-q+share-qkv+stage1+swizzle+f16acc)"},
        {"mma.forward", "MMA_Forward_128x64_S2_QRegs", "mma(forward+128x64+stage2+qregs)"},
        {"mma.wide", "MMA_Wide_64x256_K64_V16_S4_Cluster2", "mma(wide+64x256+k64+v16+stage4+cluster2)"},
        {"mma.backward", "SM90_LargeBlock_128x128", "mma(backward+SM90_LargeBlock_128x128)"},
        {"mma.split-q", "MMA_SplitQX_S2", "mma(split-q+MMA_SplitQX_S2)"},
        {"mma.decode", "", "mma(decode)"},
    };
    char label[KERNEL_LABEL_MAX];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fdm_kernel_info info = {.family = "mma", .name = cases[i].name, .device_type = FDM_CUDA};
        kernel_label(&info, cases[i].code, label);
        assert_string_equal(label, cases[i].label);
    }
    const fdm_kernel_info cpu = {.family = "cpu", .name = "cpu.forward.avx2", .device_type = FDM_CPU};
    kernel_label(&cpu, "CPU_AVX2_512x64", label);
    assert_string_equal(label, "cpu(forward.avx2)");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(finds_every_variant), cmocka_unit_test(refuses_with_a_clause),
                                       cmocka_unit_test(labels)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
