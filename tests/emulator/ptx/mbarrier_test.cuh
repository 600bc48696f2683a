/* mbarrier_test.cuh: a stand-in for the wrapper of src/cuda/ptx/mbarrier_test.cuh. */
#ifndef FDM_PTX_MBARRIER_TEST_CUH
#define FDM_PTX_MBARRIER_TEST_CUH

#include "cuda/ptx/types.cuh"

inline bool mbarrier_test(uint32_t barrier, uint32_t parity, EMU_AT) {
    return emu_mbarrier_test(barrier, parity, EMU_HERE);
}

#endif
