/* opaque.cuh: stand-ins for the wrappers of src/cuda/ptx/opaque.cuh: values stay what they are. */
#ifndef FDM_PTX_OPAQUE_CUH
#define FDM_PTX_OPAQUE_CUH

#include "cuda/ptx/types.cuh"

inline int opaque(int x) { return x; }
inline uint32_t opaque(uint32_t x) { return x; }
inline float *opaque(float *x) { return x; }
inline const char *opaque(const char *x) { return x; }
inline void opaque_pair(int &, int &) {}
inline void opaque_pair(uint32_t &, uint32_t &) {}
inline void opaque_memory() {}

#endif
