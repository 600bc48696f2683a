/* setmaxnreg.cuh: stand-ins for the wrappers of src/cuda/ptx/setmaxnreg.cuh. */
#ifndef FDM_PTX_SETMAXNREG_CUH
#define FDM_PTX_SETMAXNREG_CUH

#define ARCH_SPECIFIC 1

template <int registers> inline void setmaxnreg_dec(EMU_AT) { emu_setmaxnreg(registers, 0, EMU_HERE); }
template <int registers> inline void setmaxnreg_inc(EMU_AT) { emu_setmaxnreg(registers, 1, EMU_HERE); }

#endif
