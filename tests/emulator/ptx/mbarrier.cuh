/* mbarrier.cuh: stand-ins for the wrappers of src/cuda/ptx/mbarrier.cuh. */
#ifndef FDM_PTX_MBARRIER_CUH
#define FDM_PTX_MBARRIER_CUH

#include "cuda/ptx/types.cuh"

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals, EMU_AT) {
    emu_mbarrier_init(barrier, arrivals, EMU_HERE);
}
inline void mbarrier_arrive(uint32_t barrier, EMU_AT) { emu_mbarrier_arrive(barrier, 1, 0, EMU_HERE); }
inline void cp_async_mbarrier_arrive_noinc(uint32_t barrier, EMU_AT) { emu_cp_async_arrive(barrier, EMU_HERE); }
inline void mbarrier_wait(uint32_t barrier, uint32_t parity, EMU_AT) { emu_mbarrier_wait(barrier, parity, EMU_HERE); }

/* Instructions of 9.0: below they are read, and never reached. */
inline void from_9_0(EMU_AT) {
    if (__CUDA_ARCH__ < 900)
        emu_trap(EMU_HERE);
}
inline void fence_mbarrier_init(EMU_AT) {
    from_9_0(EMU_HERE);
    emu_fence(EMU_FENCE_MBARRIER_INIT, EMU_HERE);
}
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes, EMU_AT) {
    from_9_0(EMU_HERE);
    emu_mbarrier_arrive(barrier, 1, bytes, EMU_HERE);
}
inline void mbarrier_expect_tx(uint32_t barrier, uint32_t bytes, EMU_AT) {
    from_9_0(EMU_HERE);
    emu_mbarrier_expect(barrier, bytes, EMU_HERE);
}
inline void mbarrier_arrive_remote(uint32_t address, EMU_AT) {
    from_9_0(EMU_HERE);
    emu_mbarrier_arrive(address, 1, 0, EMU_HERE);
}
inline void mbarrier_arrive_cluster(uint32_t address, EMU_AT) {
    from_9_0(EMU_HERE);
    emu_mbarrier_arrive(address, 1, 0, EMU_HERE);
}
inline void mbarrier_arrive_expect_tx_remote(uint32_t address, uint32_t bytes, EMU_AT) {
    from_9_0(EMU_HERE);
    emu_mbarrier_arrive_cluster(address, bytes, EMU_HERE);
}
inline void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity, EMU_AT) {
    from_9_0(EMU_HERE);
    emu_mbarrier_wait(barrier, parity, EMU_HERE);
}

#endif
