/* barrier.cuh: stand-ins for the wrappers of src/cuda/ptx/barrier.cuh. */
#ifndef FDM_PTX_BARRIER_CUH
#define FDM_PTX_BARRIER_CUH

#include "cuda/ptx/types.cuh"

inline void barrier_sync(uint32_t barrier, uint32_t threads, EMU_AT) {
    emu_barrier_sync(barrier, threads, EMU_OR, 0, EMU_HERE);
}
inline void barrier_arrive(uint32_t barrier, uint32_t threads, EMU_AT) {
    emu_barrier_arrive(barrier, threads, EMU_HERE);
}
inline bool barrier_red_or(uint32_t barrier, uint32_t threads, bool condition, EMU_AT) {
    return emu_barrier_sync(barrier, threads, EMU_OR, condition, EMU_HERE);
}

#endif
