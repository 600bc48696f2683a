/* launch.cuh: stand-ins for the wrappers of src/cuda/ptx/launch.cuh. */
#ifndef FDM_PTX_LAUNCH_CUH
#define FDM_PTX_LAUNCH_CUH

#include "cuda/ptx/types.cuh"

#include "cuda/ptx/types.cuh"

inline void griddepcontrol_launch_dependents(EMU_AT) {
#if __CUDA_ARCH__ >= 900
    emu_launch_dependents(EMU_HERE);
#endif
}
inline void griddepcontrol_wait(EMU_AT) {
#if __CUDA_ARCH__ >= 900
    emu_grid_wait(EMU_HERE);
#endif
}
inline void griddepcontrol_wait_after(uint32_t, EMU_AT) { griddepcontrol_wait(EMU_HERE); }

#endif
