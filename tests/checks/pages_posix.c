/* pages_posix.c: pages.h on Linux and macOS. */
#include "pages.h"

#include <sys/mman.h>
#include <unistd.h>

#ifndef MAP_NORESERVE /* macOS reserves nothing as it is */
#    define MAP_NORESERVE 0
#endif

size_t page_bytes(void) { return (size_t)sysconf(_SC_PAGESIZE); }
void *pages_reserve(size_t bytes) {
    void *first = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return first == MAP_FAILED ? NULL : first;
}
int pages_open(void *first, size_t bytes) { return mprotect(first, bytes, PROT_READ | PROT_WRITE) == 0; }
void pages_release(void *first, size_t bytes) { munmap(first, bytes); }
