/* planted_clusters.cu: each pair of blocks counts, for its own place in the grid and for those of pairs that have not
 * begun, which it takes; each FAULT spoils one thing of that. */
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/cluster_launch.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "planted/planted.h"

extern "C" __global__ void __launch_bounds__(32) __cluster_dims__(2, 1, 1)
    planted_clusters(const __grid_constant__ struct planted_arguments a) {
    extern __shared__ __align__(16) uint8_t memory[];
    const uint32_t answer = shared_address(memory), full = answer + 16, empty = answer + 24, rank = cluster_ctarank();
    uint32_t x = blockIdx.x - rank, y = blockIdx.y, z = blockIdx.z;
    int failures = 0;
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        mbarrier_init(empty, 2);
        fence_mbarrier_init();
    }
    __syncwarp();
    barrier_cluster_arrive();
    barrier_cluster_wait();
    for (int round = 0; threadIdx.x == 0 && round < 100; round++) {
        red_add(a.out + (z * gridDim.y + y) * gridDim.x + x + rank, 1);
        if (rank == 0) {
            if (round)
                mbarrier_wait_cluster(empty, (round - 1) % 2);
            mbarrier_arrive_expect_tx(full, 16);
            if (FAULT != 2)
                mbarrier_arrive_expect_tx_remote(mapa_shared(full, 1), 16);
            clusterlaunchcontrol_try_cancel_multicast(answer, full);
        }
        if (FAULT != 3)
            mbarrier_wait_cluster(full, round % 2);
        const bool more = clusterlaunchcontrol_query_cancel(answer, x, y, z);
        if (FAULT != 4)
            fence_proxy_async(); /* the next answer comes by the asynchronous proxy */
        mbarrier_arrive_cluster(mapa_shared(empty, 0));
        if (!more && (FAULT != 1 || failures++))
            break;
        if (!more)
            x = blockIdx.x - rank, y = blockIdx.y, z = blockIdx.z;
    }
    __syncwarp();
    barrier_cluster_arrive();
    barrier_cluster_wait();
}
