/* memory.h: the only allocator of the library, with the hook that lets tests make the n-th allocation fail. */
#ifndef FDM_MEMORY_H
#define FDM_MEMORY_H

#include <stddef.h>
#include <stdint.h>

/* 64-byte aligned, uninitialised; NULL when there is none. bytes 0 is legal. */
void *memory_allocate(size_t bytes);
void memory_release(void *memory);

/* Tests: the n-th allocation from now (1 = the next) fails, once; 0 = none. Process-wide. */
void memory_fail_at(int64_t n);
/* Allocations made and not yet released, process-wide. */
int64_t memory_live(void);

#endif
