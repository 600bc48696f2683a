/* test_variants.c: the library lists every way in which a CUDA kernel can run a problem, and the tool names them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "../../cli/kernel_names.h"
#include "base/kernel_name.h"
#include "families/mma/backward/mma_rules.h"

enum { CODES_MAX = 64, KERNELS_MAX = 64 };

static int has(char (*codes)[KERNEL_CODE_MAX], int32_t count, const char *code) {
    for (int32_t i = 0; i < count; i++)
        if (strcmp(codes[i], code) == 0)
            return 1;
    return 0;
}

/* What the code alone gives is this variant: the same kernel, tile and parameters. */
static void check_code(const fdm_device *device, const fdm_plan *variant) {
    fdm_options options = fdm_options_default();
    fdm_plan plan = {.struct_bytes = sizeof plan};
    options.kernel = variant->choice;
    options.family = variant->family;
    assert_int_equal(fdm_plan_attention(device, &variant->problem, &options, &plan), FDM_OK);
    assert_string_equal(plan.kernel, variant->kernel);
    assert_string_equal(plan.choice, variant->choice);
    assert_int_equal(plan.block_m, variant->block_m);
    assert_int_equal(plan.block_n, variant->block_n);
    assert_true(plan.shared_bytes == variant->shared_bytes);
    assert_true(plan.workspace_bytes == variant->workspace_bytes);
    assert_memory_equal(plan.parameters, variant->parameters, sizeof plan.parameters);
}

/* The tool's codes are those of the variants, each once; the first is what the name alone gets. Returns how many. */
static int32_t compare(const fdm_kernel_info *kernel, const fdm_device *device, const fdm_problem *p) {
    static char found[CODES_MAX][KERNEL_CODE_MAX];
    const int32_t count = kernel_variants(device, p, kernel, CODES_MAX, found);
    fdm_options options = fdm_options_default();
    fdm_plan plan = {.struct_bytes = sizeof plan};
    int32_t number = 0;
    assert_in_range(count, 0, CODES_MAX - 1);
    for (; !fdm_plan_variant(device, p, kernel->name, number, &plan); number++) {
        assert_string_equal(plan.kernel, kernel->name);
        assert_true(has(found, count, plan.choice));
        check_code(device, &plan);
    }
    assert_int_equal(number, count);
    for (int32_t i = 0; i < count; i++)
        assert_false(has(found, i, found[i]));
    options.kernel = kernel->name;
    options.family = kernel->family;
    assert_int_equal(fdm_plan_attention(device, p, &options, &plan) == FDM_OK, count > 0);
    if (count > 0) {
        fdm_plan first = {.struct_bytes = sizeof first};
        assert_string_equal(found[0], plan.choice);
        assert_int_equal(fdm_plan_variant(device, p, kernel->name, 0, &first), FDM_OK);
        assert_memory_equal(first.parameters, plan.parameters, sizeof plan.parameters); /* nothing of other kernels */
    }
    assert_int_equal(kernel_variants(device, p, kernel, 1, found), count > 0);
    return count;
}

static fdm_problem problem_of(fdm_pass pass, int64_t head_dim, int32_t form) {
    fdm_problem p = fdm_problem_default();
    p.pass = pass;
    p.dtype = form == 6 ? FDM_FLOAT32 : form % 2 ? FDM_BFLOAT16 : FDM_FLOAT16;
    p.heads = p.heads_kv = 4;
    p.seqlen_q = form == 5 ? 1 : 700;
    p.seqlen_k = 3000;
    p.head_dim = p.head_dim_v = head_dim;
    p.causal = form == 1 || form == 2;
    p.has_mask = p.has_bias = form == 3;
    p.has_intervals = form == 4;
    p.mask_shape[3] = p.bias_shape[2] = p.bias_shape[3] = 1;
    if (form == 7) { /* latent keys */
        p.heads_kv = p.value_in_key = 1;
        p.head_dim = 576;
        p.head_dim_v = 512;
    }
    if (p.has_mask) {
        p.mask_shape[3] = p.bias_shape[3] = 3000;
        p.bias_shape[2] = 700;
        p.bias_dtype = p.dtype;
    }
    return p;
}

static void lists_every_variant(void **state) {
    (void)state;
    static const char *const names[] = {"sm_89", "sm_90", "sm_100"};
    static const int64_t dims[] = {64, 128, 256, 384, 1024};
    int32_t most[KERNELS_MAX] = {0}, num_kernels = 0;
    fdm_kernel_info kernel = {.struct_bytes = sizeof kernel};
    for (; fdm_kernel_list(num_kernels, &kernel) == FDM_OK; num_kernels++)
        for (int n = 0; kernel.device_type == FDM_CUDA && n < 3 * 5 * 8; n++) {
            fdm_device device = {.struct_bytes = sizeof device};
            const fdm_problem p = problem_of(kernel.pass, dims[n / 3 % 5], n / 15);
            assert_in_range(num_kernels, 0, KERNELS_MAX - 1);
            assert_int_equal(fdm_device_from_name(names[n % 3], &device), FDM_OK);
            const int32_t count = compare(&kernel, &device, &p);
            most[num_kernels] = count > most[num_kernels] ? count : most[num_kernels];
        }
    for (int32_t i = 0; i < num_kernels; i++) {
        assert_int_equal(fdm_kernel_list(i, &kernel), FDM_OK);
        if (kernel.device_type == FDM_CUDA && most[i] == 0)
            fail_msg("%s ran no problem", kernel.name);
        if (strcmp(kernel.name, "mma.decode") == 0) /* 2, 3 or 4 stages; of 3000 keys no more splits */
            assert_int_equal(most[i], 3);
        if (strcmp(kernel.name, "mma.split-q") == 0) /* 1 or 2 stages, two layouts, two accumulators */
            assert_int_equal(most[i], 8);
    }
}

/* Every tile that some choice code of the backward gets is that of one variant and of no other. */
static void check_backward(const fdm_device *device, const fdm_problem *p) {
    fdm_options options = fdm_options_default();
    fdm_plan plan = {.struct_bytes = sizeof plan}, variant = {.struct_bytes = sizeof variant};
    for (int32_t i = 0; i < mma_backward_code_count; i++) {
        int32_t found = 0;
        options.kernel = mma_backward_codes[i].code;
        const int takes = fdm_plan_attention(device, p, &options, &plan) == FDM_OK;
        for (int32_t n = 0; takes && !fdm_plan_variant(device, p, "mma.backward", n, &variant); n++)
            found += variant.block_m == plan.block_m && variant.block_n == plan.block_n &&
                     variant.v_in_registers == plan.v_in_registers;
        assert_int_equal(found, takes);
    }
}

static void lists_every_tile_of_the_backward(void **state) {
    (void)state;
    static const char *const names[] = {"sm_80", "sm_86", "sm_89", "sm_90", "sm_120"};
    for (int n = 0; n < 5; n++)
        for (int64_t d = 16; d <= 256; d += 16)
            for (int32_t form = 0; form < 5; form++) {
                fdm_device device = {.struct_bytes = sizeof device};
                const fdm_problem p = problem_of(FDM_BACKWARD, d, form);
                assert_int_equal(fdm_device_from_name(names[n], &device), FDM_OK);
                check_backward(&device, &p);
            }
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_plan plan = {.struct_bytes = sizeof plan};
    const fdm_problem wide = problem_of(FDM_BACKWARD, 512, 0);
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    for (int32_t n = 0; n < 2; n++) {
        assert_int_equal(fdm_plan_variant(&device, &wide, "mma.backward", n, &plan), FDM_ERROR_UNSUPPORTED);
        assert_non_null(strstr(fdm_last_error(), "head dim"));
    }
}

static void refuses_with_a_clause(void **state) {
    (void)state;
    char codes[2][KERNEL_CODE_MAX];
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_problem p = fdm_problem_default();
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    const fdm_kernel_info decode = {
        .struct_bytes = sizeof decode, .family = "mma", .name = "mma.decode", .device_type = FDM_CUDA};
    const fdm_kernel_info cpu = {
        .struct_bytes = sizeof cpu, .family = "cpu", .name = "cpu.decode.scalar", .device_type = FDM_CPU};
    p.seqlen_q = 257;
    p.dtype = FDM_FLOAT16;
    assert_int_equal(kernel_variants(&device, &p, &decode, 2, codes), 0);
    assert_string_equal(kernel_refusal(&device, &decode), "query rows times the heads of a group are at most 256");
    p.dtype = FDM_FLOAT64;
    assert_int_equal(kernel_variants(&device, &p, &decode, 2, codes), 0);
    assert_string_equal(kernel_refusal(&device, &decode),
                        "float64 is computed by the reference family only, on the CPU");
    p.dtype = FDM_FLOAT32;
    assert_int_equal(fdm_device_query(FDM_CPU, 0, &device), FDM_OK);
    assert_int_equal(kernel_variants(&device, &p, &cpu, 2, codes), 0);
    assert_string_equal(kernel_refusal(&device, &cpu), "it has too many query rows per KV head for it");
}

/* A kernel that does not write what the problem asks for has no variant either. */
static void variants_obey_every_refusal(void **state) {
    (void)state;
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_kernel_info kernel = {.struct_bytes = sizeof kernel};
    fdm_problem p = problem_of(FDM_FORWARD, 64, 5); /* one query row: for mma.decode, which writes no lse_low */
    p.needs_lse = p.has_bias = p.has_lse_low = 1;
    p.bias_dtype = p.dtype;
    p.bias_shape[3] = p.seqlen_k;
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    for (int32_t i = 0; fdm_kernel_list(i, &kernel) == FDM_OK; i++) {
        fdm_options options = fdm_options_default();
        fdm_plan plan = {.struct_bytes = sizeof plan};
        options.kernel = kernel.name;
        if (kernel.device_type == FDM_CUDA && kernel.pass == FDM_FORWARD)
            assert_int_equal(fdm_plan_variant(&device, &p, kernel.name, 0, &plan),
                             fdm_plan_attention(&device, &p, &options, &plan));
    }
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
        {"mma.forward_d1024", "MMA_Wide_64x256_K64_V16_S4_Cluster2",
         "mma(forward_d1024+MMA_Wide_64x256_K64_V16_S4_Cluster2)"},
        {"mma.backward", "SM90_LargeBlock_128x128", "mma(backward+SM90_LargeBlock_128x128)"},
        {"mma.split-q", "MMA_SplitQX_S2", "mma(split-q+MMA_SplitQX_S2)"},
        {"mma.decode", "", "mma(decode)"},
    };
    char label[KERNEL_LABEL_MAX];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const fdm_kernel_info info = {
            .struct_bytes = sizeof info, .family = "mma", .name = cases[i].name, .device_type = FDM_CUDA};
        kernel_label(&info, cases[i].code, label);
        assert_string_equal(label, cases[i].label);
    }
    const fdm_kernel_info cpu = {
        .struct_bytes = sizeof cpu, .family = "cpu", .name = "cpu.forward.avx2", .device_type = FDM_CPU};
    kernel_label(&cpu, "CPU_AVX2_512x64", label);
    assert_string_equal(label, "cpu(forward.avx2)");
}

/* Names of the kernels that a text of a command line chooses. */
static void assert_chooses(const char *text, const char *names) {
    char chosen[1024] = "";
    fdm_kernel_info kernel = {.struct_bytes = sizeof kernel};
    for (int32_t i = 0; !fdm_kernel_list(i, &kernel); i++)
        if (strcmp(kernel.family, "cpu") != 0 && kernel_is_chosen(text, kernel.name)) {
            const size_t used = strlen(chosen);
            snprintf(chosen + used, sizeof chosen - used, "%s%s", used ? " " : "", kernel.name);
        }
    assert_string_equal(chosen, names);
}

static void a_name_chooses_its_kernel_alone(void **state) {
    (void)state;
    assert_chooses("mma.forward", "mma.forward");
    assert_chooses("mma.backward", "mma.backward");
    assert_chooses("hopper.backward", "hopper.backward");
    assert_chooses("mma.split-q", "mma.split-q");
    assert_chooses("mma.split-q+share-kv", "mma.split-q+share-kv");
    assert_chooses("mma.wide", "mma.forward_d1024"); /* its older name */
    assert_chooses("hopper.wide", "hopper.backward_2pass");
    assert_chooses("hopper.", "hopper.latent hopper.forward hopper.gather hopper.backward hopper.backward_2pass");
    assert_chooses("mma.forward_", "mma.forward_d1024");
    assert_chooses("mma.forward*", "mma.forward_d1024 mma.forward mma.forward32");
    assert_chooses("mma.*32", "mma.forward32 mma.backward32");
    assert_chooses("*.backward", "blackwell.backward hopper.backward mma.backward reference.backward");
    assert_chooses("m*.f*w*d", "mma.forward");
    assert_chooses("mma.forward3", "mma.forward32");
    assert_chooses("forward32", "mma.forward32");
    assert_chooses("mma.none", "");
    assert_chooses("mma.forward*z", "");
    assert_chooses("mma", "mma.decode mma.forward_d1024 mma.forward mma.forward32 mma.backward mma.backward_d1024 "
                          "mma.backward32 mma.split-kv mma.split-q mma.split-q+share-kv mma.split-q+share-qkv "
                          "mma.split-q+tiling-qk mma.split-q+tiling-qkv");
    assert_true(kernel_is_chosen("cpu.forward.amx", "cpu.forward.amx"));
    assert_false(kernel_is_chosen("cpu.forward.amx", "cpu.forward.amx_overlap"));
    assert_true(kernel_is_chosen("cpu.forward", "cpu.forward.amx_overlap"));
    assert_true(kernel_is_chosen(NULL, "mma.forward"));
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(lists_every_variant),
                                       cmocka_unit_test(lists_every_tile_of_the_backward),
                                       cmocka_unit_test(refuses_with_a_clause),
                                       cmocka_unit_test(variants_obey_every_refusal),
                                       cmocka_unit_test(labels),
                                       cmocka_unit_test(a_name_chooses_its_kernel_alone)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
