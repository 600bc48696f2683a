/* checks_emulated.c: the emulated device (tests/emulator) in the driver's place; each trial runs with what is
 * asynchronous at random, early and late, and at random every second one in the strict mode, and of four two where
 * warps switch at each access. */
#define _GNU_SOURCE /* memrchr */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../emulator/emulated_settings.h"
#include "checks.h"

static struct emulated *emulated;
static int one_mode, own_seed, own_strict, own_switches; /* named by the environment */

int emulate_device(const char *name) {
    char path[4096];
    const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 64);
    char *slash = length > 0 ? memrchr(path, '/', (size_t)length) : NULL;
    if (!slash)
        return 0;
    one_mode = getenv("EMULATED_MODE") != NULL;
    own_seed = getenv("EMULATED_SEED") != NULL;
    setenv("EMULATED_DEVICES", name, 1);
    own_strict = getenv("EMULATED_STRICT") != NULL;
    own_switches = getenv("EMULATED_SWITCH") != NULL;
    if (!getenv("FLASH_DMATTN_CACHE_DIR")) { /* the host's shared objects are not mixed with a device's kernels */
        strcpy(slash, "/emulator/cache");
        setenv("FLASH_DMATTN_CACHE_DIR", path, 1);
    }
    strcpy(slash, "/emulator/libcuda.so.1");
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    emulated = library ? dlsym(library, "emulated") : NULL;
    if (!emulated)
        printf("no emulated device: %s\n", dlerror());
    return emulated != NULL;
}

int is_emulated(void) { return emulated != NULL; }

int emulated_round(const struct trial *t, int round) {
    static const enum emulated_mode modes[] = {EMULATED_RANDOM, EMULATED_EARLY, EMULATED_LATEST};
    enum { ROUNDS = sizeof modes / sizeof modes[0] };
    if (!emulated)
        return round == 0;
    if (round >= (one_mode ? 1 : ROUNDS))
        return 0;
    if (!one_mode)
        emulated->mode = modes[round];
    if (!own_seed)
        emulated->seed = t->seed + 1;
    if (!own_strict)
        emulated->strict = round == 0 && t->seed % 2;
    if (!own_switches)
        emulated->switches = round == 0 && t->seed / 2 % 2;
    emulated->begin();
    return 1;
}
