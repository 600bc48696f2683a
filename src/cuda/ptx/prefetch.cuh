/* prefetch.cuh: fetching to the second-level cache (PTX ISA, "cp.async.bulk.prefetch"); compute capability 9.0 and
 * above. */
#ifndef FDM_PTX_PREFETCH_CUH
#define FDM_PTX_PREFETCH_CUH

#include "cuda/ptx/types.cuh"

/* Brings `bytes`, a multiple of 16, at an address that is one, into the second-level cache; a hint. */
__device__ __forceinline__ void cp_async_bulk_prefetch(const void *global, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(global), "r"(bytes) : "memory");
}

#endif
