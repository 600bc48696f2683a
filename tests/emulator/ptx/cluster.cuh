/* cluster.cuh: stand-ins for the wrappers of src/cuda/ptx/cluster.cuh. */
#ifndef FDM_PTX_CLUSTER_CUH
#define FDM_PTX_CLUSTER_CUH

#include "cuda/ptx/types.cuh"

inline uint32_t cluster_ctarank() { return emu_cluster_rank(); }
inline uint32_t cluster_nctarank() { return emu_cluster_size(); }
inline uint32_t mapa_shared(uint32_t shared, uint32_t rank, EMU_AT) { return emu_mapa(shared, rank, EMU_HERE); }
inline void st_cluster_4(uint32_t address, uint32_t a, EMU_AT) { emu_shared_store(address, &a, 4, EMU_HERE); }
inline void st_async_8(uint32_t address, uint32_t a, uint32_t b, uint32_t barrier, EMU_AT) {
    const uint32_t r[2] = {a, b};
    emu_store_async(address, r, 8, barrier, EMU_HERE);
}
inline void st_async_16(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t barrier, EMU_AT) {
    const uint32_t r[4] = {a, b, c, d};
    emu_store_async(address, r, 16, barrier, EMU_HERE);
}
inline uint32_t ld_cluster_4(uint32_t address, EMU_AT) {
    uint32_t a;
    emu_shared_load(&a, address, 4, EMU_HERE);
    return a;
}
inline void barrier_cluster_arrive(EMU_AT) { emu_cluster_arrive(EMU_HERE); }
inline void barrier_cluster_arrive_relaxed(EMU_AT) { emu_cluster_arrive(EMU_HERE); }
inline void barrier_cluster_wait(EMU_AT) { emu_cluster_wait(EMU_HERE); }

#endif
