/* setmaxnreg.cuh: a warpgroup gives registers back or takes more (PTX ISA, "setmaxnreg"); compute capabilities 9.0 and
 * 10.0, each by its own target. */
#ifndef FDM_PTX_SETMAXNREG_CUH
#define FDM_PTX_SETMAXNREG_CUH

#define ARCH_SPECIFIC 1 /* compiled for sm_90a, sm_100a: scripts/embed_sources.py looks for this line */

/* Of all threads of a warpgroup: gives registers back, or waits for more; counts are multiples of 8 from 24 to 256. */
template <int registers> __device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(registers));
}
template <int registers> __device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(registers));
}

#endif
