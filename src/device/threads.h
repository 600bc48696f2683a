/* threads.h: runs a body on several threads: the host's executor, libgomp where it is loaded, or an own pool. */
#ifndef FDM_CPU_THREADS_H
#define FDM_CPU_THREADS_H

#include "flash_dmattn.h"

/* Threads this process may use: affinity and cgroup quota (v1, v2, own and parent groups), at least 1. */
int32_t threads_available(void);
/* Threads for a call that asks for `wanted` (0 = no wish): min of it, the executor's, and what is available. */
int32_t threads_for(int32_t wanted, const fdm_executor *executor);
/* Calls body(argument, index) for index 0 .. num_threads-1 and returns when all have returned. Index 0 may be the
 * caller. A nested or concurrent call runs serially on the caller when the pool is busy. Falls back to a serial loop
 * when threads cannot be had. */
void threads_run(const fdm_executor *executor, int32_t num_threads, void (*body)(void *argument, int32_t index),
                 void *argument);
void threads_shutdown(void);

#endif
