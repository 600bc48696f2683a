/* copy.cuh: stand-ins for the wrappers of src/cuda/ptx/copy.cuh. */
#ifndef FDM_PTX_COPY_CUH
#define FDM_PTX_COPY_CUH

#include "cuda/ptx/types.cuh"

inline uint32_t shared_address(const void *pointer) { return (uint32_t)__cvta_generic_to_shared(pointer); }

inline void cp_async_16(uint32_t shared, const void *global, EMU_AT) { emu_cp_async(shared, global, 16, 16, EMU_HERE); }
inline void cp_async_16_fill(uint32_t shared, const void *global, uint32_t bytes, EMU_AT) {
    emu_cp_async(shared, global, bytes, 16, EMU_HERE);
}
inline void cp_async_4_fill(uint32_t shared, const void *global, uint32_t bytes, EMU_AT) {
    emu_cp_async(shared, global, bytes, 4, EMU_HERE);
}
inline void cp_async_commit(EMU_AT) { emu_cp_async_commit(EMU_HERE); }
template <int pending> inline void cp_async_wait(EMU_AT) { emu_cp_async_wait(pending, EMU_HERE); }

inline void st_shared_16(uint32_t shared, uint32_t a, uint32_t b, uint32_t c, uint32_t d, EMU_AT) {
    const uint32_t r[4] = {a, b, c, d};
    emu_shared_store(shared, r, 16, EMU_HERE);
}
inline void st_shared_8(uint32_t shared, uint32_t a, uint32_t b, EMU_AT) {
    const uint32_t r[2] = {a, b};
    emu_shared_store(shared, r, 8, EMU_HERE);
}
inline void st_shared_4(uint32_t shared, uint32_t a, EMU_AT) { emu_shared_store(shared, &a, 4, EMU_HERE); }
inline void st_shared_2(uint32_t shared, uint32_t a, EMU_AT) { emu_shared_store(shared, &a, 2, EMU_HERE); }
inline uint32_t ld_shared_4(uint32_t shared, EMU_AT) {
    uint32_t a;
    emu_shared_load(&a, shared, 4, EMU_HERE);
    return a;
}
inline void ld_shared_16(uint32_t (&r)[4], uint32_t shared, EMU_AT) { emu_shared_load(r, shared, 16, EMU_HERE); }
inline void ld_shared_8(uint32_t &a, uint32_t &b, uint32_t shared, EMU_AT) {
    uint32_t r[2];
    emu_shared_load(r, shared, 8, EMU_HERE);
    a = r[0], b = r[1];
}
inline uint32_t ld_shared_2(uint32_t shared, EMU_AT) {
    uint16_t a;
    emu_shared_load(&a, shared, 2, EMU_HERE);
    return a;
}

#endif
