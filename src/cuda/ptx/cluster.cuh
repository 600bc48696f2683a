/* cluster.cuh: blocks of a cluster and their shared memory (PTX ISA, "mapa", "st.shared::cluster",
 * "ld.shared::cluster", "barrier.cluster");
 * compute capability 9.0 and above. */
#ifndef FDM_PTX_CLUSTER_CUH
#define FDM_PTX_CLUSTER_CUH

#include "cuda/ptx/types.cuh"

/* Number of this block in its cluster. */
__device__ __forceinline__ uint32_t cluster_ctarank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
/* Number of blocks in the cluster. */
__device__ __forceinline__ uint32_t cluster_nctarank() {
    uint32_t count;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
    return count;
}
/* The address, in block `rank` of the cluster, of what lies at `shared` in this block. */
__device__ __forceinline__ uint32_t mapa_shared(uint32_t shared, uint32_t rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
    return address;
}
__device__ __forceinline__ void st_cluster_4(uint32_t address, uint32_t a) {
    asm volatile("st.shared::cluster.b32 [%0], %1;" : : "r"(address), "r"(a) : "memory");
}
__device__ __forceinline__ uint32_t ld_cluster_4(uint32_t address) {
    uint32_t a;
    asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(a) : "r"(address) : "memory");
    return a;
}
/* Writes that come later, as bytes of the phase of an mbarrier of the same block; who waits for that sees them. No
 * fence is needed, which would wait for everything else that was written. */
__device__ __forceinline__ void st_async_8(uint32_t address, uint32_t a, uint32_t b, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];"
                 :
                 : "r"(address), "r"(a), "r"(b), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void st_async_16(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                            uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
                 :
                 : "r"(address), "r"(a), "r"(b), "r"(c), "r"(d), "r"(barrier)
                 : "memory");
}
/* All threads of all blocks of the cluster; what was written before arrive is seen after wait. */
__device__ __forceinline__ void barrier_cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory");
}
/* The same without releasing writes, which waits for all of them in global memory too: for who has read only. */
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" : : : "memory");
}
__device__ __forceinline__ void barrier_cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

#endif
