/* every_isa.c: a processor with AVX2 pretends to have every instruction set above it: those are emulated. Linked with
 * --wrap in the place of device/processor.c. EMULATED_PROCESSOR=intel_without_amx pretends one of Intel's that hides
 * its tiles: a kernel that is passed over for speed alone is checked all the same. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "device/isa.h"

const struct processor *__real_processor_here(void);
const struct processor *__wrap_processor_here(void);

static struct processor pretended;

static void pretend(void) {
    const char *wanted = getenv("EMULATED_PROCESSOR");
    const int without_tiles = wanted && strcmp(wanted, "intel_without_amx") == 0;
    pretended = *__real_processor_here();
    if (cpu_isa_use_on(&pretended, -1, CPU_ISA_AVX2) != CPU_ISA_FREE)
        return;
    pretended.intel = without_tiles;
    pretended.leaf7_ebx = pretended.leaf7_edx = pretended.leaf7_1_eax = ~0u;
    pretended.enabled_states = ~0u;
    pretended.tiles_granted = !without_tiles;
}

const struct processor *__wrap_processor_here(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, pretend);
    return &pretended;
}
