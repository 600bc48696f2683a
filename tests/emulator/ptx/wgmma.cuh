/* wgmma.cuh: stand-ins for the wrappers of src/cuda/ptx/wgmma.cuh. */
#ifndef FDM_PTX_WGMMA_CUH
#define FDM_PTX_WGMMA_CUH

#include "cuda/ptx/setmaxnreg.cuh"
#include "cuda/ptx/types.cuh"

#define ARCH_SPECIFIC 1

inline uint64_t wgmma_descriptor(uint32_t address, uint32_t chunk_bytes) {
    constexpr uint64_t SWIZZLE_128 = 1ull << 62, GROUP = (uint64_t)(1024 >> 4) << 32;
    return SWIZZLE_128 | GROUP | (uint64_t)(chunk_bytes >> 4) << 16 | (address & 0x3ffff) >> 4;
}
inline void wgmma_fence(EMU_AT) { emu_wgmma_fence(EMU_HERE); }
inline void wgmma_commit_group(EMU_AT) { emu_wgmma_commit(EMU_HERE); }
template <int pending> inline void wgmma_wait_group(EMU_AT) { emu_wgmma_wait(pending, EMU_HERE); }
template <int pending, int count> inline void wgmma_wait_group(float (&)[count], EMU_AT) {
    emu_wgmma_wait(pending, EMU_HERE);
}

/* m64nNk16, N = 2 count, of float16 (f16) or bfloat16, with a in shared memory or in registers. */
template <bool f16, int transposed, int transposed_a = 0, int count>
inline void wgmma_m64k16(float (&d)[count], uint64_t a, uint64_t b, bool add, EMU_AT) {
    emu_wgmma(2 * count, f16 ? EMU_F16 : EMU_BF16, d, nullptr, a, b, add, transposed_a, transposed, EMU_HERE);
}
template <bool f16, int transposed, int count>
inline void wgmma_m64k16(float (&d)[count], const uint32_t (&a)[4], uint64_t b, bool add, EMU_AT) {
    emu_wgmma(2 * count, f16 ? EMU_F16 : EMU_BF16, d, a, 0, b, add, 0, transposed, EMU_HERE);
}

#endif
