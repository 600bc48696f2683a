/* needs_avx2.c: main() of a test that is compiled for AVX2: without it the test is skipped, not stopped by SIGILL. */
#include "device/isa.h"

int test_x86_instructions(void);

int main(void) {
    enum { SKIPPED = 77 }; /* to Meson */
    return cpu_isa_refusal(CPU_ISA_AVX2) ? SKIPPED : test_x86_instructions();
}
