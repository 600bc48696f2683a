/* memory.c: aligned allocation and its fault injection. */
#include "base/memory.h"

#include <stdatomic.h>

#include "system/system.h"

static _Atomic int64_t fail_countdown;
static _Atomic int64_t live;

void *memory_allocate(size_t bytes) {
    if (atomic_load_explicit(&fail_countdown, memory_order_relaxed) > 0 && atomic_fetch_sub(&fail_countdown, 1) == 1)
        return NULL;
    if (bytes > SIZE_MAX - 64)
        return NULL;
    void *memory = system_allocate((bytes + 64) / 64 * 64);
    if (memory)
        atomic_fetch_add_explicit(&live, 1, memory_order_relaxed);
    return memory;
}

void memory_release(void *memory) {
    if (!memory)
        return;
    atomic_fetch_sub_explicit(&live, 1, memory_order_relaxed);
    system_release(memory);
}

void memory_fail_at(int64_t n) { atomic_store(&fail_countdown, n); }

int64_t memory_live(void) { return atomic_load(&live); }
