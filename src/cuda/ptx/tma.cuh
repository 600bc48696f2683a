/* tma.cuh: copies of tiles by TMA, the tensor memory accelerator (PTX ISA, "cp.async.bulk.tensor",
 * "cp.reduce.async.bulk", "prefetch.tensormap"); compute capability 9.0 and above.
 *
 * A tile's bytes count at an mbarrier: what lies outside of the tensor too. Coordinates are elements, innermost first,
 * and may be negative where a tile is loaded; the innermost is a multiple of 16 bytes (an H200 reports an illegal
 * instruction otherwise, for both). */
#ifndef FDM_PTX_TMA_CUH
#define FDM_PTX_TMA_CUH

#include "cuda/ptx/types.cuh"
#include "cuda/tensor_map.h"

/* Brings the map itself near; a hint. */
__device__ __forceinline__ void prefetch_tensormap(const struct cuda_tensor_map *map) {
    asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}
/* One tile to `shared` of this block; its bytes count at this block's `barrier`. */
__device__ __forceinline__ void cp_async_bulk_tensor_3d(uint32_t shared, const struct cuda_tensor_map *map,
                                                        uint32_t barrier, int32_t x, int32_t y, int32_t z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];"
        :
        : "r"(shared), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}
/* The same tile to the same place of each block of the cluster whose bit is set in `blocks`, and its bytes at the same
 * barrier of each. */
__device__ __forceinline__ void cp_async_bulk_tensor_3d_multicast(uint32_t shared, const struct cuda_tensor_map *map,
                                                                  uint32_t barrier, int32_t x, int32_t y, int32_t z,
                                                                  uint16_t blocks) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5}], [%2], %6;"
                 :
                 : "r"(shared), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(blocks)
                 : "memory");
}
/* One tile of four axes. */
__device__ __forceinline__ void cp_async_bulk_tensor_4d(uint32_t shared, const struct cuda_tensor_map *map,
                                                        uint32_t barrier, int32_t x, int32_t y, int32_t z, int32_t w) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%3, %4, %5, %6}], [%2];"
                 :
                 : "r"(shared), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}
#if __CUDA_ARCH__ >= 1000
/* One tile to `shared` of this block; its bytes count at `barrier`, which may lie in the other block of its pair
 * (mapa_shared). */
__device__ __forceinline__ void cp_async_bulk_tensor_3d_pair(uint32_t shared, const struct cuda_tensor_map *map,
                                                             uint32_t barrier, int32_t x, int32_t y, int32_t z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::2 "
                 "[%0], [%1, {%3, %4, %5}], [%2];"
                 :
                 : "r"(shared), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
                 : "memory");
}
__device__ __forceinline__ void cp_async_bulk_tensor_4d_pair(uint32_t shared, const struct cuda_tensor_map *map,
                                                             uint32_t barrier, int32_t x, int32_t y, int32_t z,
                                                             int32_t w) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::2 "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];"
                 :
                 : "r"(shared), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}
#endif
/* One tile from `shared` to the tensor; what lies outside of it is not written. Belongs to the thread's next group. */
__device__ __forceinline__ void cp_async_bulk_tensor_3d_store(const struct cuda_tensor_map *map, uint32_t shared,
                                                              int32_t x, int32_t y, int32_t z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
                 :
                 : "l"(map), "r"(shared), "r"(x), "r"(y), "r"(z)
                 : "memory");
}
/* `bytes`, a multiple of 16, from an address that is one to `shared`; they count at `barrier`. */
__device__ __forceinline__ void cp_async_bulk(uint32_t shared, const void *global, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :
                 : "r"(shared), "l"(global), "r"(bytes), "r"(barrier)
                 : "memory");
}
/* `bytes`, a multiple of 16, of this block's `shared` to an address in any block of the cluster (mapa_shared); both
 * addresses are multiples of 16. They count at `barrier`, which lies in that block; when it has them, they have been
 * read here too. */
__device__ __forceinline__ void cp_async_bulk_cluster(uint32_t address, uint32_t shared, uint32_t bytes,
                                                      uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :
                 : "r"(address), "r"(shared), "r"(bytes), "r"(barrier)
                 : "memory");
}
/* `bytes`, a multiple of 16, from `shared` to an address that is one; belongs to the thread's next group. */
__device__ __forceinline__ void cp_async_bulk_store(void *global, uint32_t shared, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :
                 : "l"(global), "r"(shared), "r"(bytes)
                 : "memory");
}
/* Adds `bytes`, a multiple of 16, of floats in `shared` to those at an address that is one; belongs to the thread's
 * next group. */
__device__ __forceinline__ void cp_reduce_async_bulk_add(float *global, uint32_t shared, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 :
                 : "l"(global), "r"(shared), "r"(bytes)
                 : "memory");
}
/* Ends a group of copies from shared memory. */
__device__ __forceinline__ void cp_async_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" : : : "memory"); }
/* Waits until all but `pending` of this thread's groups have read their shared memory; and are complete. */
template <int pending> __device__ __forceinline__ void cp_async_bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(pending) : "memory");
}
template <int pending> __device__ __forceinline__ void cp_async_bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" : : "n"(pending) : "memory");
}
/* Orders this thread's accesses to shared memory before later ones of TMA. */
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }
/* Its accesses to global memory. */
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" : : : "memory"); }

#endif
