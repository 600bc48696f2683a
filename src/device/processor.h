/* processor.h: what the processor and the operating system say of themselves that decides which instruction sets run.
 */
#ifndef FDM_PROCESSOR_H
#define FDM_PROCESSOR_H

#include <stdint.h>

/* A value, so that tests pretend any machine. Of another architecture its fields are 0; so are registers of CPUID
 * leaves that the processor does not have. */
struct processor {
    int32_t arm64;           /* an AArch64 processor, each of which has Advanced SIMD */
    int32_t intel;           /* an x86 processor whose maker is Intel */
    uint32_t leaf1_ecx;      /* CPUID leaf 1 */
    uint32_t leaf7_ebx;      /* leaf 7, subleaf 0 */
    uint32_t leaf7_edx;      /* leaf 7, subleaf 0 */
    uint32_t leaf7_1_eax;    /* leaf 7, subleaf 1 */
    uint64_t enabled_states; /* XCR0: registers that the operating system saves; 0 without OSXSAVE */
    int32_t tiles_granted;   /* the operating system gives this process the state of AMX tiles */
};

/* Of this machine; asked once. */
const struct processor *processor_here(void);

#endif
