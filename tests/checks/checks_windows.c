/* checks_windows.c: pages.h on Windows, and a sentence for each subject that needs fork() or the emulated device. */
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
/* words of 16-bit times, and names of ours */
#undef far
#undef OUT
#undef IN

#include <stdio.h>

#include "checks.h"
#include "pages.h"
#include "subjects.h"

size_t page_bytes(void) {
    SYSTEM_INFO told;
    GetSystemInfo(&told);
    return told.dwPageSize;
}
void *pages_reserve(size_t bytes) { return VirtualAlloc(NULL, bytes, MEM_RESERVE, PAGE_NOACCESS); }
int pages_open(void *first, size_t bytes) { return VirtualAlloc(first, bytes, MEM_COMMIT, PAGE_READWRITE) != NULL; }
void pages_release(void *first, size_t bytes) {
    (void)bytes;
    VirtualFree(first, 0, MEM_RELEASE);
}

static int missing(const char *what) {
    printf("fdm-checks: %s on Windows\n", what);
    return 2;
}
int broken_checks(const struct options *o) {
    (void)o;
    return missing("there is no fork(), which planting faults needs,");
}
int compile_checks(const struct options *o) {
    (void)o;
    return missing("kernels are not compiled for checks");
}
int emulate_device(const char *name) {
    (void)name;
    missing("there is no emulated device");
    return 0;
}
int is_emulated(void) { return 0; }
int emulated_round(const struct trial *t, int round) {
    (void)t;
    return round == 0;
}
