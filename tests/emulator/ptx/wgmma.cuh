/* wgmma.cuh: stand-ins for the wrappers of src/cuda/ptx/wgmma.cuh. */
#ifndef FDM_PTX_WGMMA_CUH
#define FDM_PTX_WGMMA_CUH

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

/* m64nNk16 of bfloat16 and float16, with a in shared memory or in registers. */
#define EMU_WGMMA(N, NAME, TYPE)                                                                                       \
    template <int transposed>                                                                                          \
    inline void wgmma_m64n##N##k16_##NAME(float (&d)[N / 2], uint64_t a, uint64_t b, bool add, EMU_AT) {               \
        emu_wgmma(N, TYPE, d, nullptr, a, b, add, 0, transposed, EMU_HERE);                                            \
    }                                                                                                                  \
    template <int transposed>                                                                                          \
    inline void wgmma_m64n##N##k16_##NAME(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool add, EMU_AT) {   \
        emu_wgmma(N, TYPE, d, a, 0, b, add, 0, transposed, EMU_HERE);                                                  \
    }
#define EMU_WGMMA_BOTH(N) EMU_WGMMA(N, bf16, EMU_BF16) EMU_WGMMA(N, f16, EMU_F16)
#define EMU_WGMMA_FOUR(A, B, C, D) EMU_WGMMA_BOTH(A) EMU_WGMMA_BOTH(B) EMU_WGMMA_BOTH(C) EMU_WGMMA_BOTH(D)
EMU_WGMMA_FOUR(8, 16, 24, 32)
EMU_WGMMA_FOUR(40, 48, 56, 64)
EMU_WGMMA_FOUR(72, 80, 88, 96)
EMU_WGMMA_FOUR(104, 112, 120, 128)
EMU_WGMMA_FOUR(136, 144, 152, 160)
EMU_WGMMA_FOUR(168, 176, 184, 192)
EMU_WGMMA_FOUR(200, 208, 216, 224)
EMU_WGMMA_FOUR(232, 240, 248, 256)

template <int registers> inline void setmaxnreg_dec(EMU_AT) { emu_setmaxnreg(registers, 0, EMU_HERE); }
template <int registers> inline void setmaxnreg_inc(EMU_AT) { emu_setmaxnreg(registers, 1, EMU_HERE); }

#endif
