/* opaque.cuh: stand-ins for the wrappers of src/cuda/ptx/opaque.cuh: values stay what they are. */
#ifndef FDM_PTX_OPAQUE_CUH
#define FDM_PTX_OPAQUE_CUH

#include "cuda/ptx/types.cuh"

inline void opaque(int &) {}
inline void opaque(uint32_t &) {}
inline void opaque(float *&) {}
inline void opaque_pair(int &, int &) {}
inline void opaque_pair(uint32_t &, uint32_t &) {}
inline void opaque_memory() {}

#endif
