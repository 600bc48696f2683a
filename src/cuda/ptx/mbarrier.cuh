/* mbarrier.cuh: barriers in shared memory that count arrivals (PTX ISA, "mbarrier"); arriving does not wait.
 *
 * A phase ends with the last of its arrivals; waits name the parity of the phase they wait for, 0 for the first. From
 * fence_mbarrier_init() on the instructions are those of 9.0; ptxas refuses them on other targets. */
#ifndef FDM_PTX_MBARRIER_CUH
#define FDM_PTX_MBARRIER_CUH

#include "cuda/ptx/types.cuh"

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" : : "r"(barrier), "r"(arrivals) : "memory");
}
/* One arrival; releases this thread's writes to the block. */
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" : : "r"(barrier) : "memory");
}
/* One arrival, later: when this thread's cp.async so far are complete. Counts as one of the expected arrivals. */
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" : : "r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
#if __CUDA_ARCH__ >= 900
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
#else
        asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
#endif
    } while (!done);
}

/* Makes this thread's mbarrier_init seen by the cluster and by TMA, once a cluster barrier follows. */
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}
/* One arrival; the phase ends no sooner than `bytes` more have been copied. */
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(barrier), "r"(bytes) : "memory");
}
/* One arrival at a barrier of another block of the cluster; releases this thread's writes to the cluster. */
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t address) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" : : "r"(address) : "memory");
}
/* The same without releasing writes to the cluster, which waits for all of them in global memory too: for one who has
 * read only. */
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t address) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" : : "r"(address) : "memory");
}
/* The same; its phase ends no sooner than `bytes` more have been copied. */
__device__ __forceinline__ void mbarrier_arrive_expect_tx_remote(uint32_t address, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" : : "r"(address), "r"(bytes) : "memory");
}
/* As mbarrier_wait; sees what the cluster's blocks released. */
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                     "selp.b32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (!done);
}

#endif
