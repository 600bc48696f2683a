/* processor.c: asks the processor and the operating system; isa.c draws the conclusions. */
#include "device/processor.h"

#include <pthread.h>

#if defined(__x86_64__)
#    include <cpuid.h>
#endif

#include "system/system.h"

static struct processor here;

#if defined(__x86_64__)
/* Only to be asked where OSXSAVE is set. */
static uint64_t enabled_states(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static void look(void) {
    uint32_t a, b, c, d;
    here.intel = __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx;
    if (__get_cpuid(1, &a, &b, &c, &d))
        here.leaf1_ecx = c;
    if (here.leaf1_ecx & bit_OSXSAVE)
        here.enabled_states = enabled_states();
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        here.leaf7_ebx = b;
        here.leaf7_edx = d;
        if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d))
            here.leaf7_1_eax = a;
    }
    if (here.enabled_states >> 18 & 1)
        here.tiles_granted = system_request_tiles();
}
#elif defined(__aarch64__)
static void look(void) { here.arm64 = 1; }
#else
static void look(void) {}
#endif

const struct processor *processor_here(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, look);
    return &here;
}
