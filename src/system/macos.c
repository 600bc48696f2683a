/* macos.c: macOS's own. It has no CUDA: the names of its libraries are those that nobody installs. */
#include <mach-o/dyld.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/sysctl.h>
#include <unistd.h>

#include "system/system.h"

/* ---- shared libraries ---- */

const char system_cuda_driver[] = "libcuda.dylib";
void system_nvrtc_name(int32_t major, char *name, size_t size) { snprintf(name, size, "libnvrtc.%d.dylib", major); }
void system_nvrtc_builtins_name(int32_t major, int32_t minor, char *name, size_t size) {
    snprintf(name, size, "libnvrtc-builtins.%d.%d.dylib", major, minor);
}

int system_library_path(void *library, char *path, size_t size) {
    (void)library, (void)path, (void)size; /* only who is to compile for a CUDA device wants it */
    return 0;
}

int system_visit_libraries(int (*visit)(const char *path, void *argument), void *argument) {
    int result = 0;
    for (uint32_t n = 0; n < _dyld_image_count() && !result; n++) {
        const char *path = _dyld_get_image_name(n); /* NULL: unloaded meanwhile */
        result = path ? visit(path, argument) : 0;
    }
    return result;
}
uint64_t system_libraries_loaded(void) { return _dyld_image_count(); }

/* ---- processors and threads ---- */

int32_t system_usable_cpus(void) {
    const long count = sysconf(_SC_NPROCESSORS_ONLN);
    return count > 0 ? (int32_t)count : 1;
}

int64_t system_cache_bytes(int level) {
    static const char *const names[3] = {"hw.l1dcachesize", "hw.l2cachesize", "hw.l3cachesize"};
    int64_t bytes = 0;
    size_t size = sizeof bytes;
    return sysctlbyname(names[level - 1], &bytes, &size, NULL, 0) == 0 ? bytes : 0;
}

int system_request_tiles(void) { return 0; }

void system_name_thread(const char *name) { pthread_setname_np(name); }

int system_is_forked_child(void) { return 0; }
