/* tcgen05.cuh: stand-ins for the wrappers of src/cuda/ptx/tcgen05.cuh. */
#ifndef FDM_PTX_TCGEN05_CUH
#define FDM_PTX_TCGEN05_CUH

#include "cuda/ptx/types.cuh"
#include "cuda/tcgen05_descriptors.h"

#define ARCH_SPECIFIC 1

template <int group> inline void tcgen05_alloc(uint32_t shared, uint32_t columns, EMU_AT) {
    emu_tensor_alloc(group, shared, columns, EMU_HERE);
}
template <int group> inline void tcgen05_dealloc(uint32_t tensor, uint32_t columns, EMU_AT) {
    emu_tensor_dealloc(group, tensor, columns, EMU_HERE);
}
template <int group> inline void tcgen05_relinquish_alloc_permit(EMU_AT) { emu_tensor_relinquish(group, EMU_HERE); }

template <int group> inline void tcgen05_mma(uint32_t d, uint64_t a, uint64_t b, uint32_t shape, bool add, EMU_AT) {
    emu_tensor_mma(group, d, a, 0, b, shape, add, EMU_HERE);
}
template <int group> inline void tcgen05_mma_ts(uint32_t d, uint32_t a, uint64_t b, uint32_t shape, bool add, EMU_AT) {
    emu_tensor_mma(group, d, a, 1, b, shape, add, EMU_HERE);
}
template <int group> inline void tcgen05_commit(uint32_t barrier, EMU_AT) {
    emu_tensor_commit(group, barrier, 0, EMU_HERE);
}
template <int group> inline void tcgen05_commit_multicast(uint32_t barrier, uint16_t blocks, EMU_AT) {
    emu_tensor_commit(group, barrier, EMU_MULTICAST | blocks, EMU_HERE);
}
inline void tcgen05_fence_before_thread_sync(EMU_AT) { emu_tensor_fence(0, EMU_HERE); }
inline void tcgen05_fence_after_thread_sync(EMU_AT) { emu_tensor_fence(1, EMU_HERE); }

template <typename number, int count> inline void tcgen05_ld_32x32b(number (&r)[count], uint32_t tensor, EMU_AT) {
    static_assert(sizeof(number) == 4 && count <= 128 && (count & (count - 1)) == 0, "1 to 128 registers");
    emu_tensor_load(r, count, tensor, EMU_HERE);
}
template <typename number, int count> inline void tcgen05_st_32x32b(uint32_t tensor, const number (&r)[count], EMU_AT) {
    static_assert(sizeof(number) == 4 && count <= 128 && (count & (count - 1)) == 0, "1 to 128 registers");
    emu_tensor_store(tensor, r, count, EMU_HERE);
}
inline void tcgen05_wait_ld(EMU_AT) { emu_tensor_wait(0, EMU_HERE); }
inline void tcgen05_wait_st(EMU_AT) { emu_tensor_wait(1, EMU_HERE); }
template <typename number, int count> inline void tcgen05_wait_ld(number (&)[count], EMU_AT) {
    emu_tensor_wait(0, EMU_HERE);
}

#endif
