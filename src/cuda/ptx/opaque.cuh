/* opaque.cuh: numbers that the compiler takes as new: it forgets how they were made. No instruction.
 *
 * What follows from an opaque number is made where it is written, and is not kept in registers from before a loop; what
 * is known of its bounds is forgotten too. */
#ifndef FDM_PTX_OPAQUE_CUH
#define FDM_PTX_OPAQUE_CUH

#include "cuda/ptx/types.cuh"

__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}
__device__ __forceinline__ float *opaque(float *x) {
    asm volatile("" : "+l"(x));
    return x;
}
__device__ __forceinline__ const char *opaque(const char *x) {
    asm volatile("" : "+l"(x));
    return x;
}
/* Two at once: neither is made before the other is needed. */
__device__ __forceinline__ void opaque_pair(int &x, int &y) { asm volatile("" : "+r"(x), "+r"(y)); }
__device__ __forceinline__ void opaque_pair(uint32_t &x, uint32_t &y) { asm volatile("" : "+r"(x), "+r"(y)); }
/* All memory: later loads and stores are not moved before this, earlier ones not behind it. */
__device__ __forceinline__ void opaque_memory() { asm volatile("" : : : "memory"); }

#endif
