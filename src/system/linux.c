/* linux.c: Linux's own, with glibc or musl. */
#define _GNU_SOURCE /* dl_iterate_phdr, dlinfo, sched_getaffinity */
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "system/system.h"

/* ---- shared libraries ---- */

const char system_cuda_driver[] = "libcuda.so.1";
void system_nvrtc_name(int32_t major, char *name, size_t size) { snprintf(name, size, "libnvrtc.so.%d", major); }
void system_nvrtc_builtins_name(int32_t major, int32_t minor, char *name, size_t size) {
    snprintf(name, size, "libnvrtc-builtins.so.%d.%d", major, minor);
}

int system_library_path(void *library, char *path, size_t size) {
    struct link_map *map;
    if (dlinfo(library, RTLD_DI_LINKMAP, &map) != 0 || strlen(map->l_name) >= size)
        return 0;
    strcpy(path, map->l_name);
    return 1;
}

struct visitor {
    int (*visit)(const char *path, void *argument);
    void *argument;
};
static int visit_one(struct dl_phdr_info *info, size_t size, void *data) {
    const struct visitor *visitor = data;
    (void)size;
    return visitor->visit(info->dlpi_name, visitor->argument);
}
int system_visit_libraries(int (*visit)(const char *path, void *argument), void *argument) {
    struct visitor visitor = {visit, argument};
    return dl_iterate_phdr(visit_one, &visitor);
}

static int read_count(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    *(uint64_t *)data = info->dlpi_adds;
    return 1;
}
uint64_t system_libraries_loaded(void) {
    uint64_t count = 0;
    dl_iterate_phdr(read_count, &count);
    return count;
}

/* ---- processors and threads ---- */

int32_t system_usable_cpus(void) {
    /* 8192 CPUs, the most a kernel can be built for; a set that is too small is an error. */
    unsigned long set[8192 / (8 * sizeof(unsigned long))];
    if (sched_getaffinity(0, sizeof set, (cpu_set_t *)set) != 0)
        return 1;
    const int32_t count = CPU_COUNT_S(sizeof set, (cpu_set_t *)set);
    return count > 0 ? count : 1;
}

/* One line of a file of sysfs; "" where it cannot be read. */
static void read_fact(int index, const char *name, char *line, int size) {
    char path[96];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/%s", index, name);
    FILE *file = fopen(path, "re");
    if (!file || !fgets(line, size, file))
        *line = 0;
    if (file)
        fclose(file);
}

/* The kernel's list of caches, which musl's and Arm's sysconf() do not have: level, type, and a size such as "32K". */
static int64_t cache_from_kernel(int level) {
    for (int index = 0; index < 8; index++) {
        char line[32], *end;
        read_fact(index, "level", line, sizeof line);
        if (strtol(line, NULL, 10) != level)
            continue;
        read_fact(index, "type", line, sizeof line);
        if (strncmp(line, "Instruction", 11) == 0)
            continue;
        read_fact(index, "size", line, sizeof line);
        const long size = strtol(line, &end, 10);
        return (int64_t)size << (*end == 'K' ? 10 : *end == 'M' ? 20 : 0);
    }
    return 0;
}

int64_t system_cache_bytes(int level) {
#ifdef _SC_LEVEL1_DCACHE_SIZE
    static const int names[3] = {_SC_LEVEL1_DCACHE_SIZE, _SC_LEVEL2_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE};
    const long size = sysconf(names[level - 1]);
    if (size > 0)
        return size;
#endif
    return cache_from_kernel(level);
}

/* The kernel gives a process the 8 KiB of tile state on request only (Documentation/arch/x86/xstate.rst). */
int system_request_tiles(void) {
#ifdef SYS_arch_prctl
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return 0;
#endif
}

void system_name_thread(const char *name) { pthread_setname_np(pthread_self(), name); }

/* The flags of /proc/self/stat say it. */
int system_is_forked_child(void) {
    enum { FORKED_WITHOUT_EXEC = 0x40 }; /* PF_FORKNOEXEC of the kernel */
    char line[512] = "";
    unsigned flags = 0;
    FILE *file = fopen("/proc/self/stat", "re");
    if (!file)
        return 0;
    const char *name_end = fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
    fclose(file);
    return name_end && sscanf(name_end + 1, " %*c %*d %*d %*d %*d %*d %u", &flags) == 1 &&
           (flags & FORKED_WITHOUT_EXEC) != 0;
}
