/* planted_tensor.cu: out = bfloat16(q k^T) v of 256 rows by a pair of blocks, tile after tile of 128 keys; each FAULT
 * spoils one thing that tcgen05 asks for.
 *
 * Warps 0-3 turn scores into an operand in their place in tensor memory, warp 4 multiplies (one thread of the leader,
 * block 0), warp 5 copies. A block has 128 rows of q, half of the keys of k and half of the columns of v. */
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/ptx/tcgen05.cuh"
#include "cuda/ptx/tma.cuh"
#include "planted/planted.h"

constexpr int TILES = PLANTED_TENSOR_TILES, STAGES = 3;
constexpr uint32_t Q_BYTES = 128 * 128, K_BYTES = 64 * 128, V_BYTES = 128 * 128, STAGE = K_BYTES + V_BYTES;
constexpr uint32_t RING = Q_BYTES, BARRIERS = RING + STAGES * STAGE;
constexpr uint32_t FULL = BARRIERS, EMPTY = FULL + 8 * STAGES, S_FULL = EMPTY + 8 * STAGES, P_FULL = S_FULL + 16,
                   O_FULL = P_FULL + 16;
constexpr uint32_t SLOT = O_FULL + 8, SUMS = FAULT == 2 ? 192 : 256;

struct task {
    uint32_t shared, leader, tensor, rank;
};

/* Row threadIdx.x of q to where a K-major tile has it. */
__device__ __forceinline__ void store_q(const struct planted_arguments &a, const struct task &t) {
    const uint32_t *row = (const uint32_t *)a.in + (t.rank * 128 + threadIdx.x) * 32;
    for (uint32_t chunk = 0; chunk < 8; chunk++)
        st_shared_16(t.shared + threadIdx.x * 128 + (chunk ^ threadIdx.x % 8) * 16, row[chunk * 4], row[chunk * 4 + 1],
                     row[chunk * 4 + 2], row[chunk * 4 + 3]);
}

__device__ __forceinline__ void copy(const struct planted_arguments &a, const struct task &t) {
    for (int tile = 0; tile < TILES; tile++) {
        const uint32_t stage = tile % STAGES, k = t.shared + RING + stage * STAGE, full = t.leader + FULL + stage * 8;
        if (tile >= STAGES && FAULT != 14)
            mbarrier_wait_cluster(t.shared + EMPTY + stage * 8, (tile / STAGES + 1) % 2);
        mbarrier_arrive_expect_tx_remote(full, STAGE);
        cp_async_bulk_tensor_3d_pair(k, &a.a, full, 0, tile * 128 + (FAULT == 11 ? 0 : t.rank * 64), 0);
        cp_async_bulk_tensor_3d_pair(k + K_BYTES, &a.b, full, t.rank * 64, tile * 128, 0);
    }
    for (int tile = TILES; tile < TILES + STAGES; tile++) /* no commit comes to a block that has ended */
        mbarrier_wait_cluster(t.shared + EMPTY + tile % STAGES * 8, (tile / STAGES + 1) % 2);
}

__device__ __forceinline__ void multiply_scores(const struct task &t, int tile) {
    constexpr uint32_t SHAPE = tcgen05_shape(0, 256, 128, 0, 0);
    const uint32_t stage = tile % 2, slot = tile % STAGES, k = t.shared + RING + slot * STAGE;
    mbarrier_wait_cluster(t.shared + FULL + slot * 8, tile / STAGES % 2);
    tcgen05_fence_after_thread_sync();
    for (int n = 0; n < 4; n++)
        tcgen05_mma<2>(t.tensor + stage * 128, tcgen05_k_major(t.shared + n * 32) ^ (FAULT == 17 ? 1ull << 46 : 0),
                       tcgen05_k_major(k + n * 32), SHAPE, n > 0);
    tcgen05_commit_multicast<2>(t.shared + S_FULL + stage * 8, FAULT == 9 ? 1 : 3);
}

__device__ __forceinline__ void multiply_sums(const struct task &t, int tile) {
    constexpr uint32_t SHAPE = tcgen05_shape(0, 256, 128, 0, 1);
    const uint32_t stage = tile % 2, slot = tile % STAGES, v = t.shared + RING + slot * STAGE + K_BYTES;
    mbarrier_wait_cluster(t.shared + P_FULL + stage * 8, tile / 2 % 2);
    tcgen05_fence_after_thread_sync();
    for (int n = 0; n < 8; n++)
        tcgen05_mma_ts<2>(t.tensor + SUMS, t.tensor + stage * 128 + n * 8, tcgen05_mn_major(v + n * 2048, 0), SHAPE,
                          tile + n > 0);
    if (FAULT == 16)
        tcgen05_commit_multicast<1>(t.shared + EMPTY + slot * 8, 3);
    else
        tcgen05_commit_multicast<2>(t.shared + EMPTY + slot * 8, 3);
}

__device__ __forceinline__ void multiply(const struct task &t) {
    multiply_scores(t, 0);
    for (int tile = 0; tile < TILES; tile++) {
        if (tile + 1 < TILES)
            multiply_scores(t, tile + 1);
        multiply_sums(t, tile);
    }
    tcgen05_commit_multicast<2>(t.shared + O_FULL, 3);
}

__device__ __forceinline__ void convert(const struct task &t) {
    const uint32_t warp = threadIdx.x / 32, lanes = (FAULT == 13 ? warp ^ 1 : warp) * 32 << 16;
    for (int tile = 0; tile < TILES; tile++) {
        const uint32_t stage = tile % 2, columns = t.tensor + lanes + stage * 128;
        mbarrier_wait_cluster(t.shared + S_FULL + stage * 8, (tile / 2 + (FAULT == 1)) % 2);
        if (FAULT != 3)
            tcgen05_fence_after_thread_sync();
        float s[128];
        uint32_t p[64];
        tcgen05_ld_32x32b(s, columns);
        if (FAULT != 4)
            tcgen05_wait_ld(s);
        for (int i = 0; i < 64; i++)
            p[i] = cvt_bf16x2(s[2 * i], s[2 * i + 1]);
        tcgen05_st_32x32b(columns, p);
        if (FAULT != 6)
            tcgen05_wait_st();
        if (FAULT != 5)
            tcgen05_fence_before_thread_sync();
        __syncwarp();
        if (FAULT == 10 || elect_one())
            mbarrier_arrive_cluster(t.leader + P_FULL + stage * 8);
    }
}

__device__ __forceinline__ void write_sums(const struct planted_arguments &a, const struct task &t) {
    float o[128];
    mbarrier_wait_cluster(t.shared + O_FULL, 0);
    tcgen05_fence_after_thread_sync();
    tcgen05_ld_32x32b(o, t.tensor + (threadIdx.x / 32 * 32 << 16) + SUMS);
    tcgen05_wait_ld(o);
    for (int i = 0; i < 128; i++)
        a.out[(t.rank * 128 + threadIdx.x) * 128 + i] = o[i];
}

extern "C" __global__ void __launch_bounds__(PLANTED_TENSOR_THREADS) __cluster_dims__(2, 1, 1)
    planted_tensor(const __grid_constant__ struct planted_arguments a) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t shared = shared_address(memory), warp = threadIdx.x / 32;
    struct task t = {shared, mapa_shared(shared, 0), 0, cluster_ctarank()};
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < STAGES; i++) {
            mbarrier_init(shared + FULL + i * 8, 2);
            mbarrier_init(shared + EMPTY + i * 8, 1);
        }
        for (uint32_t i = 0; i < 2; i++) {
            mbarrier_init(shared + S_FULL + i * 8, 1);
            mbarrier_init(shared + P_FULL + i * 8, 8);
        }
        mbarrier_init(shared + O_FULL, 1);
        fence_mbarrier_init();
    }
    __syncwarp();
    if (warp == 4) {
        tcgen05_alloc<2>(shared + SLOT, 512);
        tcgen05_relinquish_alloc_permit<2>();
    }
    if (warp < 4) {
        store_q(a, t);
        if (FAULT != 12)
            fence_proxy_async();
    }
    __syncwarp();
    tcgen05_fence_before_thread_sync();
    if (FAULT == 18)
        __syncthreads();
    else {
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }
    tcgen05_fence_after_thread_sync();
    t.tensor = ld_shared_4(shared + SLOT);
    if (FAULT == 15 && t.rank == 1)
        return;
    if (warp == 5 && elect_one())
        copy(a, t);
    if (warp == 4 && t.rank == 0 && elect_one())
        multiply(t);
    if (warp < 4) {
        convert(t);
        write_sums(a, t);
    }
    __syncwarp();
    tcgen05_fence_before_thread_sync();
    if (FAULT != 7) {
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }
    if (warp == 4 && FAULT != 8)
        tcgen05_dealloc<2>(t.tensor, 512);
}
