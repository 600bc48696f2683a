/* instructions_blackwell.cu: each wrapper of src/cuda/ptx that needs compute capability 10.0, on given operands, in
 * clusters of two blocks. */
#include "cuda/ptx/cluster_launch.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/math.cuh"
#include "instructions/instructions.h"
#include "instructions/tile_product.cuh"

#define BARRIER_OFFSET (INSTRUCTION_SHARED - 64)

__device__ __forceinline__ void try_packed(const struct instruction_arguments &a, uint32_t *out) {
    for (int n = 0; n < 8; n++) {
        float2 x[3];
        for (int i = 0; i < 3; i++)
            x[i] = make_float2(__uint_as_float(a.in[(n * 6 + i) * INSTRUCTION_THREADS + threadIdx.x]),
                               __uint_as_float(a.in[(n * 6 + i + 3) * INSTRUCTION_THREADS + threadIdx.x]));
        const float2 results[4] = {add_f32x2(x[0], x[1]), mul_f32x2(x[0], x[1]), fma_f32x2(x[0], x[1], x[2]),
                                   add_rm_f32x2(x[0], x[1])};
        for (int i = 0; i < 4; i++) {
            out[n * 10 + 2 * i] = __float_as_uint(results[i].x);
            out[n * 10 + 2 * i + 1] = __float_as_uint(results[i].y);
        }
        out[n * 10 + 8] = __float_as_uint(max_3(x[0].x, x[1].x, x[2].x));
        out[n * 10 + 9] = __popc(__ballot_sync(0xffffffffu, elect_one())) * cluster_nctarank();
    }
}

/* Each block copies a tile; the bytes of both count in block 0. */
__device__ __forceinline__ void try_pair(const struct instruction_arguments &a, uint32_t *out, uint32_t shared) {
    const uint32_t full = mapa_shared(shared + BARRIER_OFFSET, 0);
    const int32_t y = a.at[1] + cluster_ctarank();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx_remote(full, a.tile_bytes);
        if (INSTRUCTION == TRY_PAIR)
            cp_async_bulk_tensor_3d_pair(shared, &a.map, full, a.at[0], y, a.at[2]);
        else
            cp_async_bulk_tensor_4d_pair(shared, &a.map, full, a.at[0], y, a.at[2], a.at[3]);
    }
    if (cluster_ctarank() == 0)
        mbarrier_wait_cluster(shared + BARRIER_OFFSET, 0);
    __syncwarp();
    barrier_cluster_arrive();
    barrier_cluster_wait();
    for (uint32_t i = 0; i < INSTRUCTION_OUT; i++)
        out[i] = ld_shared_4(shared + (i * INSTRUCTION_THREADS + threadIdx.x) % (a.tile_bytes / 4) * 4);
}

/* One for each place of the grid, whoever has it; all by one block, then by both. */
__device__ __forceinline__ void try_clusters(const struct instruction_arguments &a, uint32_t shared) {
    const uint32_t full = shared + BARRIER_OFFSET + 8, empty = full + 8, rank = cluster_ctarank();
    constexpr bool multicast = INSTRUCTION == TRY_CLUSTERS_MULTICAST;
    uint32_t x = blockIdx.x, y = blockIdx.y, z = 0;
    if (threadIdx.x != 0 || (rank && !multicast))
        return;
    for (int round = 0;; round++) {
        red_add(a.sums + (y + x) % 64, 1);
        if (round && rank == 0)
            mbarrier_wait_cluster(empty, (round - 1) % 2);
        if (rank == 0) {
            mbarrier_arrive_expect_tx(full, 16);
            if (multicast) {
                mbarrier_arrive_expect_tx_remote(mapa_shared(full, 1), 16);
                clusterlaunchcontrol_try_cancel_multicast(shared, full);
            } else {
                clusterlaunchcontrol_try_cancel(shared, full);
            }
        }
        mbarrier_wait_cluster(full, round % 2);
        const bool more = clusterlaunchcontrol_query_cancel(shared, x, y, z);
        fence_proxy_async(); /* the next answer comes by the asynchronous proxy */
        mbarrier_arrive_cluster(mapa_shared(empty, 0));
        x += rank;
        if (!more)
            break;
    }
}

extern "C" __global__ void __launch_bounds__(INSTRUCTION_THREADS) __cluster_dims__(2, 1, 1)
    instructions_blackwell(const __grid_constant__ struct instruction_arguments a) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t shared = shared_address(memory);
    if constexpr (INSTRUCTION == TRY_PRODUCT) {
        const uint16_t *in = (const uint16_t *)a.in;
        constexpr int ROWS = GROUP == 1 ? 2 * TILE_M : TILE_M; /* of the operands a */
        tile_product(in + blockIdx.x * ROWS_A * TILE_K, in + (ROWS + (GROUP == 2 ? blockIdx.x * ROWS_B : 0)) * TILE_K,
                     (float *)a.out + blockIdx.x * INSTRUCTION_THREADS * INSTRUCTION_OUT, shared, PRODUCT_F16);
        return;
    }
    uint32_t *out = a.out + ((int64_t)blockIdx.x * INSTRUCTION_THREADS + threadIdx.x) * INSTRUCTION_OUT;
    if (threadIdx.x == 0) {
        mbarrier_init(shared + BARRIER_OFFSET, 2);
        mbarrier_init(shared + BARRIER_OFFSET + 8, 1);
        mbarrier_init(shared + BARRIER_OFFSET + 16, INSTRUCTION == TRY_CLUSTERS_MULTICAST ? 2 : 1);
        fence_mbarrier_init();
    }
    __syncwarp();
    barrier_cluster_arrive();
    barrier_cluster_wait();
    if (INSTRUCTION == TRY_PACKED)
        try_packed(a, out);
    else if (INSTRUCTION == TRY_PAIR || INSTRUCTION == TRY_PAIR_4D)
        try_pair(a, out, shared);
    else
        try_clusters(a, shared);
    __syncwarp();
    barrier_cluster_arrive();
    barrier_cluster_wait();
}
