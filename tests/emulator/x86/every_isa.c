/* every_isa.c: every instruction set of the build is present on a processor with AVX2: those above it are emulated.
 * Linked with --wrap in the place of the two functions of device/isa.c that other files ask. */
#include "base/settings.h"
#include "device/isa.h"

int __real_cpu_isa_present(enum cpu_isa isa);
int __wrap_cpu_isa_present(enum cpu_isa isa);
enum cpu_isa __wrap_cpu_isa_best(void);

int __wrap_cpu_isa_present(enum cpu_isa isa) {
    const int emulated = isa > CPU_ISA_AVX2 && __real_cpu_isa_present(CPU_ISA_AVX2);
    return emulated ? cpu_isa_built(isa) : __real_cpu_isa_present(isa);
}

enum cpu_isa __wrap_cpu_isa_best(void) {
    const char *setting = setting_get(SETTING_CPU_ISA);
    const int limit = setting ? cpu_isa_from_name(setting) : -1;
    int isa = limit < 0 ? CPU_ISA_COUNT - 1 : limit;
    while (isa > CPU_ISA_SCALAR && !__wrap_cpu_isa_present((enum cpu_isa)isa))
        isa--;
    return (enum cpu_isa)isa;
}
