/* prefetch.cuh: stand-ins for the wrappers of src/cuda/ptx/prefetch.cuh: hints that change no result. */
#ifndef FDM_PTX_PREFETCH_CUH
#define FDM_PTX_PREFETCH_CUH

#include "cuda/ptx/types.cuh"

inline void cp_async_bulk_prefetch(const void *, uint32_t) {}

#endif
