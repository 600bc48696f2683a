/* not_emulated.c: emulated.c where there is no emulated device. */
#include "cli.h"

const char *emulated_device(void) { return NULL; }
int use_emulated_device(const char *name) {
    return complain(0, "--device emulated:%s: there is no emulated device on this system", name);
}
