/* mma.cuh: stand-ins for the wrappers of src/cuda/ptx/mma.cuh. */
#ifndef FDM_PTX_MMA_CUH
#define FDM_PTX_MMA_CUH

#include "cuda/ptx/copy.cuh"

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address, EMU_AT) { emu_ldmatrix(r, 4, 0, address, EMU_HERE); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address, EMU_AT) { emu_ldmatrix(r, 4, 1, address, EMU_HERE); }
inline void ldmatrix_x2(uint32_t (&r)[2], uint32_t address, EMU_AT) { emu_ldmatrix(r, 2, 0, address, EMU_HERE); }
inline void ldmatrix_x2_trans(uint32_t (&r)[2], uint32_t address, EMU_AT) { emu_ldmatrix(r, 2, 1, address, EMU_HERE); }
inline void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d, EMU_AT) {
    const uint32_t r[4] = {a, b, c, d};
    emu_stmatrix(address, r, 4, 0, EMU_HERE);
}
inline void stmatrix_x4(uint32_t address, const uint32_t (&r)[4], EMU_AT) { emu_stmatrix(address, r, 4, 0, EMU_HERE); }
inline void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4], EMU_AT) {
    emu_stmatrix(address, r, 4, 1, EMU_HERE);
}

inline void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMU_AT) {
    emu_mma(EMU_BF16, c, a, b0, b1, EMU_HERE);
}
inline void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMU_AT) {
    emu_mma(EMU_F16, c, a, b0, b1, EMU_HERE);
}
inline void mma_m16n8k16_f16_f16(uint32_t (&c)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMU_AT) {
    emu_mma(EMU_F16_SUM_F16, c, a, b0, b1, EMU_HERE);
}
inline void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMU_AT) {
    emu_mma(EMU_TF32, c, a, b0, b1, EMU_HERE);
}

#endif
