/* processor.c: asks the processor and the operating system; isa.c draws the conclusions. */
#define _GNU_SOURCE
#include "device/processor.h"

#include <pthread.h>

#if defined(__x86_64__)
#    include <cpuid.h>
#    include <sys/syscall.h>
#    include <unistd.h>
#endif

static struct processor here;

#if defined(__x86_64__)
/* Only to be asked where OSXSAVE is set. */
static uint64_t enabled_states(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

/* Linux gives a process the 8 KiB of tile state on request only (Documentation/arch/x86/xstate.rst). */
static int request_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
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
        here.tiles_granted = request_tiles();
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
