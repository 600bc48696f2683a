/* global.cuh: stand-ins for the wrappers of src/cuda/ptx/global.cuh. */
#ifndef FDM_PTX_GLOBAL_CUH
#define FDM_PTX_GLOBAL_CUH

#include "cuda/ptx/types.cuh"

inline void red_add(float *at, float x, EMU_AT) { emu_red_add(at, &x, 1, EMU_HERE); }
inline void red_add_4(float *at, float a, float b, float c, float d, EMU_AT) {
    const float x[4] = {a, b, c, d};
    if (__CUDA_ARCH__ < 900)
        emu_trap(EMU_HERE);
    emu_red_add(at, x, 4, EMU_HERE);
}
inline void ld_global_16(uint32_t (&r)[4], const void *from, int take, EMU_AT) {
    if (take && (uintptr_t)from % 16)
        emu_trap(EMU_HERE);
    for (int i = 0; i < 4; i++)
        r[i] = take ? ((const uint32_t *)from)[i] : 0;
}
inline void ld_global_16_once(uint32_t (&r)[4], const void *from, int take, EMU_AT) {
    ld_global_16(r, from, take, EMU_HERE);
}
inline uint32_t ld_global_2_early(const void *from, EMU_AT) {
    if ((uintptr_t)from % 2)
        emu_trap(EMU_HERE);
    return *(const uint16_t *)from;
}
inline uint32_t ld_global_4_early(const void *from, EMU_AT) {
    if ((uintptr_t)from % 4)
        emu_trap(EMU_HERE);
    return *(const uint32_t *)from;
}
inline int ld_acquire(const int *at, EMU_AT) { return (int)emu_load_acquire((const unsigned *)at, EMU_HERE); }
inline void st_release(int *at, int x, EMU_AT) { emu_store_release((unsigned *)at, (unsigned)x, EMU_HERE); }
inline int ld_relaxed(const int *at, EMU_AT) { return (int)emu_load_relaxed((const unsigned *)at, EMU_HERE); }
inline uint64_t ld_relaxed_8(const uint64_t *at, EMU_AT) { return emu_load_relaxed_8(at, EMU_HERE); }
inline void st_relaxed_8(uint64_t *at, uint64_t x, EMU_AT) { emu_store_relaxed_8(at, x, EMU_HERE); }

#endif
