/* tma.cuh: stand-ins for the wrappers of src/cuda/ptx/tma.cuh. */
#ifndef FDM_PTX_TMA_CUH
#define FDM_PTX_TMA_CUH

#include "cuda/ptx/types.cuh"
#include "cuda/tensor_map.h"

inline void prefetch_tensormap(const struct cuda_tensor_map *) {}

/* Loads of one to five axes, to this block or to several; stores and additions; a store's coordinates as a load's. */
#define EMU_COORDINATES_1 int32_t x
#define EMU_COORDINATES_2 int32_t x, int32_t y
#define EMU_COORDINATES_3 int32_t x, int32_t y, int32_t z
#define EMU_COORDINATES_4 int32_t x, int32_t y, int32_t z, int32_t w
#define EMU_COORDINATES_5 int32_t x, int32_t y, int32_t z, int32_t w, int32_t v
#define EMU_AT_1 \
    { x }
#define EMU_AT_2 \
    { x, y }
#define EMU_AT_3 \
    { x, y, z }
#define EMU_AT_4 \
    { x, y, z, w }
#define EMU_AT_5 \
    { x, y, z, w, v }
#define EMU_TENSOR(RANK)                                                                                             \
    inline void cp_async_bulk_tensor_##RANK##d(uint32_t shared, const struct cuda_tensor_map *map, uint32_t barrier, \
                                               EMU_COORDINATES_##RANK, EMU_AT) {                                     \
        const int at[] = EMU_AT_##RANK;                                                                              \
        emu_tma_load(RANK, shared, map, barrier, at, 0, EMU_HERE);                                                   \
    }                                                                                                                \
    inline void cp_async_bulk_tensor_##RANK##d_multicast(uint32_t shared, const struct cuda_tensor_map *map,         \
                                                         uint32_t barrier, EMU_COORDINATES_##RANK, uint16_t blocks,  \
                                                         EMU_AT) {                                                   \
        const int at[] = EMU_AT_##RANK;                                                                              \
        emu_tma_load(RANK, shared, map, barrier, at, EMU_MULTICAST | blocks, EMU_HERE);                              \
    }                                                                                                                \
    inline void cp_async_bulk_tensor_##RANK##d_pair(uint32_t shared, const struct cuda_tensor_map *map,              \
                                                    uint32_t barrier, EMU_COORDINATES_##RANK, EMU_AT) {              \
        const int at[] = EMU_AT_##RANK;                                                                              \
        emu_tma_load(RANK, shared, map, barrier, at, EMU_PAIR, EMU_HERE);                                            \
    }                                                                                                                \
    inline void cp_async_bulk_tensor_##RANK##d_store(const struct cuda_tensor_map *map, uint32_t shared,             \
                                                     EMU_COORDINATES_##RANK, EMU_AT) {                               \
        const int at[] = EMU_AT_##RANK;                                                                              \
        emu_tma_store(EMU_STORE, RANK, map, shared, at, EMU_HERE);                                                   \
    }                                                                                                                \
    inline void cp_reduce_async_bulk_tensor_##RANK##d_add(const struct cuda_tensor_map *map, uint32_t shared,        \
                                                          EMU_COORDINATES_##RANK, EMU_AT) {                          \
        const int at[] = EMU_AT_##RANK;                                                                              \
        emu_tma_store(EMU_REDUCE_ADD, RANK, map, shared, at, EMU_HERE);                                              \
    }
EMU_TENSOR(1)
EMU_TENSOR(2)
EMU_TENSOR(3)
EMU_TENSOR(4)
EMU_TENSOR(5)

inline void cp_async_bulk(uint32_t shared, const void *global, uint32_t bytes, uint32_t barrier, EMU_AT) {
    emu_bulk_load(shared, global, bytes, barrier, 0, EMU_HERE);
}
inline void cp_async_bulk_cluster(uint32_t address, uint32_t shared, uint32_t bytes, uint32_t barrier, EMU_AT) {
    emu_bulk_send(address, shared, bytes, barrier, EMU_HERE);
}
inline void cp_async_bulk_store(void *global, uint32_t shared, uint32_t bytes, EMU_AT) {
    emu_bulk_store(EMU_STORE, global, shared, bytes, EMU_HERE);
}
inline void cp_reduce_async_bulk_add(float *global, uint32_t shared, uint32_t bytes, EMU_AT) {
    emu_bulk_store(EMU_REDUCE_ADD, global, shared, bytes, EMU_HERE);
}
inline void cp_async_bulk_commit(EMU_AT) { emu_bulk_commit(EMU_HERE); }
template <int pending> inline void cp_async_bulk_wait(EMU_AT) { emu_bulk_wait(pending, 0, EMU_HERE); }
template <int pending> inline void cp_async_bulk_wait_read(EMU_AT) { emu_bulk_wait(pending, 1, EMU_HERE); }
inline void fence_proxy_async(EMU_AT) { emu_fence(EMU_FENCE_PROXY_ASYNC, EMU_HERE); }
inline void fence_proxy_async_global(EMU_AT) { emu_fence(EMU_FENCE_MEMORY, EMU_HERE); }

#endif
