/* test_isa.c: which kernels run on pretended processors of every maker, and which is chosen there. Linked with --wrap
 * in the place of device/processor.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "device/isa.h"
#include "flash_dmattn.h"

static const struct processor *here;
const struct processor *__wrap_processor_here(void);
const struct processor *__wrap_processor_here(void) { return here; }

enum { SCALAR = 1, NEON = 2, AVX2 = 4, AVX512 = 8, BF16 = 16, AMX = 32 }; /* sets of instruction sets */

/* Words of CPUID as such parts give them, XCR0 as Linux sets it: the bits that decide count. */
static const struct machine {
    const char *name;
    struct processor processor;
    enum cpu_isa best; /* what is chosen for bfloat16 where nothing is set */
    int runs;          /* what runs, chosen or by name */
} machines[] = {
    {"Intel Core 2, no AVX", {0, 1, 0x0000e3bd, 0, 0, 0, 0, 0}, CPU_ISA_SCALAR, SCALAR},
    {"Intel Sandy Bridge, AVX without AVX2", {0, 1, 0x1fbae3ff, 0, 0, 0, 0x7, 0}, CPU_ISA_SCALAR, SCALAR},
    {"Intel Haswell", {0, 1, 0x7ffafbff, 0x000037ab, 0, 0, 0x7, 0}, CPU_ISA_AVX2, SCALAR | AVX2},
    {"Haswell, AVX not saved by the system", {0, 1, 0x7ffafbff, 0x000037ab, 0, 0, 0x3, 0}, CPU_ISA_SCALAR, SCALAR},
    {"Intel Knights Landing, AVX-512 without BW and VL",
     {0, 1, 0x7ff8f3bf, 0x1c0d23ab, 0, 0, 0xe7, 0},
     CPU_ISA_AVX2,
     SCALAR | AVX2},
    {"Intel Skylake server, AVX-512 without BF16",
     {0, 1, 0x7ffefbff, 0xd39ffffb, 0x9c000400, 0, 0x2e7, 0},
     CPU_ISA_AVX512,
     SCALAR | AVX2 | AVX512},
    {"Skylake server, AVX-512 not saved by the system",
     {0, 1, 0x7ffefbff, 0xd39ffffb, 0x9c000400, 0, 0x7, 0},
     CPU_ISA_AVX2,
     SCALAR | AVX2},
    {"Intel Cooper Lake, BF16 and no AMX",
     {0, 1, 0x7ffefbff, 0xd39ffffb, 0xbc000400, 0x20, 0x2e7, 0},
     CPU_ISA_AVX512,
     SCALAR | AVX2 | AVX512 | BF16},
    {"Intel Sapphire Rapids",
     {0, 1, 0x7ffefbff, 0xf3bfbfff, 0xffdd4432, 0x1c30, 0x602e7, 1},
     CPU_ISA_AMX,
     SCALAR | AVX2 | AVX512 | BF16 | AMX},
    {"Sapphire Rapids, AMX hidden by a hypervisor",
     {0, 1, 0xfffefbff, 0xf3bfbfff, 0xfc1d4432, 0x1c30, 0x2e7, 0},
     CPU_ISA_AVX512,
     SCALAR | AVX2 | AVX512 | BF16},
    {"Sapphire Rapids, tiles not saved by the system",
     {0, 1, 0x7ffefbff, 0xf3bfbfff, 0xffdd4432, 0x1c30, 0x2e7, 0},
     CPU_ISA_AVX512,
     SCALAR | AVX2 | AVX512 | BF16},
    {"Sapphire Rapids, tiles not granted to the process",
     {0, 1, 0x7ffefbff, 0xf3bfbfff, 0xffdd4432, 0x1c30, 0x602e7, 0},
     CPU_ISA_AVX512,
     SCALAR | AVX2 | AVX512 | BF16},
    {"AMX without its bfloat16 products",
     {0, 1, 0x7ffefbff, 0xf3bfbfff, 0xff9d4432, 0x1c30, 0x602e7, 1},
     CPU_ISA_AVX512,
     SCALAR | AVX2 | AVX512 | BF16},
    {"AMD Zen 1 to 3", {0, 0, 0x7ef8320b, 0x219c97a9, 0x10, 0, 0x207, 0}, CPU_ISA_AVX2, SCALAR | AVX2},
    {"AMD Zen 4 and 5",
     {0, 0, 0x7efa320b, 0xf1bf97a9, 0x10000010, 0x30, 0x2e7, 0},
     CPU_ISA_AVX512_BF16,
     SCALAR | AVX2 | AVX512 | BF16},
    {"AMD Jaguar, AVX without FMA", {0, 0, 0x3ed8220b, 0x8, 0, 0, 0x7, 0}, CPU_ISA_SCALAR, SCALAR},
    {"AArch64", {.arm64 = 1}, CPU_ISA_NEON, SCALAR | NEON},
    {"another architecture", {0}, CPU_ISA_SCALAR, SCALAR},
};
enum { NUM_MACHINES = sizeof machines / sizeof machines[0] };

static int built(void) {
    int set = 0;
    for (int isa = 0; isa < CPU_ISA_COUNT; isa++)
        set |= cpu_isa_built((enum cpu_isa)isa) << isa;
    return set;
}

static void set_limit(int isa) {
    isa < 0 ? unsetenv("FLASH_DMATTN_CPU_ISA") : setenv("FLASH_DMATTN_CPU_ISA", cpu_isa_name((enum cpu_isa)isa), 1);
}

/* The instruction set that a kernel's name ends with, and whether there is such a kernel: decode has none for the two
 * highest. */
static int isa_of(const char *kernel, int *exists) {
    char name[16];
    snprintf(name, sizeof name, "%s", strrchr(kernel, '.') + 1);
    if (strcmp(name, "amx_overlap") == 0)
        name[3] = 0;
    const int isa = cpu_isa_from_name(name);
    *exists = !(strncmp(kernel, "cpu.decode.", 11) == 0 && isa >= CPU_ISA_AVX512_BF16);
    return isa;
}

/* One query row in bfloat16: every kernel of a forward takes it, every one of a backward too. */
static fdm_status plan_by_name(const fdm_device *device, const fdm_kernel_info *kernel, fdm_plan *plan) {
    fdm_problem problem = fdm_problem_default();
    fdm_options options = fdm_options_default();
    problem.pass = kernel->pass;
    problem.needs_lse = problem.pass == FDM_FORWARD;
    problem.dtype = FDM_BFLOAT16;
    problem.seqlen_q = 1;
    problem.seqlen_k = 4096;
    options.kernel = kernel->name;
    return fdm_plan_attention(device, &problem, &options, plan);
}

/* The list says available exactly where the kernel runs, and its name is enough there; elsewhere a plan made for such a
 * processor is refused by a sentence. */
static void expect_kernels(const struct machine *m, int runs) {
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_kernel_info kernel = {.struct_bytes = sizeof kernel};
    fdm_plan plan = {.struct_bytes = sizeof plan};
    assert_int_equal(fdm_device_query(FDM_CPU, 0, &device), FDM_OK);
    for (int32_t i = 0; !fdm_kernel_list(i, &kernel); i++) {
        int exists;
        if (strcmp(kernel.family, "cpu") != 0)
            continue;
        const int isa = isa_of(kernel.name, &exists), wanted = exists && (runs >> isa & 1);
        if (kernel.available != wanted || (plan_by_name(&device, &kernel, &plan) == FDM_OK) != wanted)
            fail_msg("%s: %s is %savailable, and its name gives: %s", m->name, kernel.name,
                     kernel.available ? "" : "not ",
                     plan_by_name(&device, &kernel, &plan) ? fdm_last_error() : "a plan");
        if (wanted) {
            assert_string_equal(plan.kernel, kernel.name);
            assert_int_equal(fdm_prepare(&plan), FDM_OK);
        }
    }
}

static void kernels_that_run_on_each_machine(void **state) {
    (void)state;
    for (int n = 0; n < NUM_MACHINES; n++) {
        here = &machines[n].processor;
        for (int limit = -1; limit < CPU_ISA_COUNT; limit++) {
            set_limit(limit);
            expect_kernels(&machines[n], machines[n].runs & built() & (limit < 0 ? ~0 : (2 << limit) - 1));
        }
    }
}

static enum cpu_isa best_of(const char *device_name, fdm_device *device) {
    assert_int_equal(fdm_device_from_name(device_name, device), FDM_OK);
    return (enum cpu_isa)cpu_isa_from_name(device->isa);
}

/* The family chooses from the device's best, which on Intel's is not the highest that runs. */
static void best_of_each_machine(void **state) {
    (void)state;
    fdm_problem problem = fdm_problem_default();
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_plan plan = {.struct_bytes = sizeof plan};
    problem.dtype = FDM_BFLOAT16;
    problem.needs_lse = 1;
    problem.seqlen_q = problem.seqlen_k = 1024;
    set_limit(-1);
    for (int n = 0; n < NUM_MACHINES; n++) {
        const struct machine *m = &machines[n];
        here = &m->processor;
        if ((built() & m->runs) != m->runs)
            continue;
        const int passed_over = m->runs >= 2 << m->best;
        if (best_of("cpu", &device) != m->best)
            fail_msg("%s: best is %s", m->name, device.isa);
        assert_string_equal(device.isa_by_name, passed_over ? "avx512_bf16" : "");
        assert_int_equal(fdm_plan_attention(&device, &problem, NULL, &plan), FDM_OK);
        assert_string_equal(strrchr(plan.kernel, '.') + 1, device.isa);
        assert_int_equal(strstr(plan.reason, "avx512_bf16 is slower here") != NULL, passed_over);
    }
}

/* What is passed over for speed runs where the setting or the device names it. */
static void a_name_is_enough(void **state) {
    (void)state;
    fdm_problem problem = fdm_problem_default();
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_plan plan = {.struct_bytes = sizeof plan};
    problem.dtype = FDM_BFLOAT16;
    problem.needs_lse = 1;
    problem.seqlen_q = problem.seqlen_k = 1024;
    for (int n = 0; n < NUM_MACHINES; n++) {
        here = &machines[n].processor;
        for (int isa = 0; isa < CPU_ISA_COUNT; isa++) {
            char name[32];
            const int runs = machines[n].runs & built() & 1 << isa;
            snprintf(name, sizeof name, "cpu:%s", cpu_isa_name((enum cpu_isa)isa));
            set_limit(runs ? isa : -1);
            if (runs)
                assert_int_equal(best_of("cpu", &device), isa);
            assert_int_equal(best_of(name, &device), isa);
            assert_int_equal(device.present, runs != 0);
            if (!(built() & 1 << isa))
                continue;
            assert_int_equal(fdm_plan_attention(&device, &problem, NULL, &plan), FDM_OK);
            assert_string_equal(strrchr(plan.kernel, '.') + 1, cpu_isa_name((enum cpu_isa)isa));
            assert_int_equal(fdm_prepare(&plan), runs ? FDM_OK : FDM_ERROR_UNSUPPORTED);
        }
    }
}

/* Above the setting nothing runs, and the sentence names the setting. */
static void the_setting_holds(void **state) {
    (void)state;
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_plan plan = {.struct_bytes = sizeof plan};
    const fdm_problem problem = fdm_problem_default();
    here = &machines[NUM_MACHINES - 1].processor;
    for (int n = 0; n < NUM_MACHINES; n++)
        if (machines[n].runs & built() & ~SCALAR)
            here = &machines[n].processor;
    set_limit(CPU_ISA_SCALAR);
    for (int isa = 1; isa < CPU_ISA_COUNT; isa++) {
        char name[32];
        snprintf(name, sizeof name, "cpu:%s", cpu_isa_name((enum cpu_isa)isa));
        assert_int_equal(fdm_device_from_name(name, &device), FDM_OK);
        assert_int_equal(device.present, 0);
        if (cpu_isa_use_on(here, -1, (enum cpu_isa)isa) < CPU_ISA_BY_NAME)
            continue;
        assert_int_equal(fdm_plan_attention(&device, &problem, NULL, &plan), FDM_OK);
        assert_int_equal(fdm_prepare(&plan), FDM_ERROR_UNSUPPORTED);
        assert_non_null(strstr(fdm_last_error(), "FLASH_DMATTN_CPU_ISA"));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kernels_that_run_on_each_machine),
        cmocka_unit_test(best_of_each_machine),
        cmocka_unit_test(a_name_is_enough),
        cmocka_unit_test(the_setting_holds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
