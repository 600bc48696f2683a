/* pool.h: the library's own threads: a few that sleep until a call has work for them. */
#ifndef FDM_CPU_POOL_H
#define FDM_CPU_POOL_H

#include <stdint.h>

/* Calls body(argument, index) once for each index 0 .. num_threads-1 on the caller and up to num_threads-1 own threads,
 * which are started when first needed; returns 1 when all calls have returned. Returns 0, having called nothing, when
 * the pool is busy (a nested call, or another thread's) or no thread could be started. `spin`: idle threads look for
 * work for some 30 us before they sleep; to be 0 where there are more threads than CPUs. */
int pool_run(int32_t num_threads, int spin, void (*body)(void *argument, int32_t index), void *argument);
/* Joins the threads; a later call starts them again. */
void pool_shutdown(void);
/* In a forked child, where the parent's threads do not exist: forgets them. */
void pool_forget(void);

#endif
