/* control.cuh: stand-ins for the wrappers of src/cuda/ptx/control.cuh. */
#ifndef FDM_PTX_CONTROL_CUH
#define FDM_PTX_CONTROL_CUH

inline void exit_if(bool condition, EMU_AT) {
    if (condition)
        emu_exit(EMU_HERE);
}

#endif
