/* emulated.c: --device emulated:NAME: the emulated device of a build with tests, in the driver's place. */
#include "cli.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char used[16]; /* "sm_90" */
const char *emulated_device(void) { return *used ? used : NULL; }

/* It lies below the tool's own folder, as Meson builds both; what it compiles is kept beside it. */
int use_emulated_device(const char *name) {
    static const char *const known[] = {"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"};
    char path[4096], place[4200];
    size_t row = 0;
    while (row < sizeof known / sizeof known[0] && strcmp(known[row], name) != 0)
        row++;
    if (row == sizeof known / sizeof known[0])
        return complain(0, "--device emulated:%s: it must be sm_80, sm_86, sm_89, sm_90, sm_100 or sm_120", name);
    const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    path[length > 0 ? length : 0] = 0;
    char *slash = strrchr(path, '/');
    if (slash)
        *slash = 0;
    setenv("EMULATED_DEVICES", name, 1);
    snprintf(place, sizeof place, "%s/tests/emulator/cache", path);
    setenv("FLASH_DMATTN_CACHE_DIR", place, 0);
    snprintf(place, sizeof place, "%s/tests/emulator/libcuda.so.1", path);
    if (!dlopen(place, RTLD_NOW | RTLD_GLOBAL))
        return complain(0, "--device emulated:%s: %s; it is part of a build with tests, not of an installation", name,
                        dlerror());
    snprintf(used, sizeof used, "%s", name);
    return 1;
}
