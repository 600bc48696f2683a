/* special.cuh: stand-ins for the wrappers of src/cuda/ptx/special.cuh. */
#ifndef FDM_PTX_SPECIAL_CUH
#define FDM_PTX_SPECIAL_CUH

#include "cuda/ptx/types.cuh"

inline uint32_t tid_x_reread() { return emu_thread_index().x; }
inline uint32_t ctaid_x_reread() { return emu_block_index().x; }
inline bool elect_one(EMU_AT) { return emu_elect(0xffffffffu, EMU_HERE); }

#endif
