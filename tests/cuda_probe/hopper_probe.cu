/* hopper_probe.cu: c = a * b on the instructions of 9.0: clusters, TMA with multicast, mbarriers that count
 * bytes, wgmma, setmaxnreg and programmatic launches. It proves the wrappers and the runtime.
 *
 * Tile: a cluster of two blocks computes 256 x 128 of c, each block 128 rows; K goes by in steps of 64 through a ring
 * of seven stages. Warpgroup 0: one thread gives orders to TMA. Warpgroups 1 and 2: 64 rows each, one group
 * of four wgmma in flight while the next is issued (with a in registers: waited for). Each block copies its own rows of
 * a, and half of the tile of b to both blocks.
 *
 * Shared memory: [stage] { a: 128 rows of 128 bytes; b: 128 rows of 128 bytes, or (transposed) two runs of 64 columns,
 * each 64 rows of 128 bytes }, swizzled by TMA; then full[stage], empty[stage].
 * Barriers: full counts one arrival and the bytes of both tiles; empty, in both blocks, the eight consumer warps of
 * each block. Registers: 384 threads enter with 168; the producer keeps 24, the consumers get 240 (64 sums). */
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda_probe/hopper_probe.h"

#if !defined(B_TRANSPOSED) || !defined(A_IN_REGISTERS) || !defined(WAITS)
#    error "hopper_probe.cu needs every constant of hopper_probe.h"
#endif

constexpr int BLOCK_M = HOPPER_PROBE_BLOCK_M, BLOCK_N = HOPPER_PROBE_BLOCK_N, BLOCK_K = HOPPER_PROBE_BLOCK_K;
constexpr int STAGES = HOPPER_PROBE_STAGES, CLUSTER = HOPPER_PROBE_CLUSTER, TILE_BYTES = HOPPER_PROBE_TILE_BYTES;
constexpr int CONSUMER_WARPS = 8;
constexpr int FULL_OFFSET = STAGES * 2 * TILE_BYTES, EMPTY_OFFSET = FULL_OFFSET + 8 * STAGES;
static_assert(EMPTY_OFFSET + 8 * STAGES <= HOPPER_PROBE_SHARED_BYTES, "shared memory");
static_assert(BLOCK_M == BLOCK_N, "one size of tile");

/* One stage of the ring, in this block's shared memory. */
struct stage {
    uint32_t a, b, full, empty, parity;
};
__device__ __forceinline__ struct stage stage_of(uint32_t shared, int32_t step) {
    const uint32_t s = (uint32_t)step % STAGES;
    return {shared + s * 2 * TILE_BYTES, shared + s * 2 * TILE_BYTES + TILE_BYTES, shared + FULL_OFFSET + 8 * s,
            shared + EMPTY_OFFSET + 8 * s, (uint32_t)step / STAGES % 2};
}

__device__ __forceinline__ void produce(const struct hopper_probe_arguments &arguments, uint32_t shared,
                                        int32_t steps) {
    const uint32_t rank = cluster_ctarank();
    const int32_t row = (int32_t)blockIdx.x * BLOCK_M, batch = (int32_t)blockIdx.y;
    for (int32_t step = 0; step < steps; step++) {
        const struct stage s = stage_of(shared, step);
        if (step >= STAGES) /* both blocks have read what is overwritten in both */
            mbarrier_wait_cluster(s.empty, s.parity ^ 1);
        mbarrier_arrive_expect_tx(s.full, 2 * TILE_BYTES);
        cp_async_bulk_tensor_3d(s.a, &arguments.a, s.full, step * BLOCK_K, row, batch);
        const int32_t half = (int32_t)rank * (BLOCK_N / CLUSTER);
        const uint32_t to = s.b + rank * (TILE_BYTES / CLUSTER);
        if (B_TRANSPOSED)
            cp_async_bulk_tensor_3d_multicast(to, &arguments.b, s.full, half, step * BLOCK_K, batch,
                                              (1 << CLUSTER) - 1);
        else
            cp_async_bulk_tensor_3d_multicast(to, &arguments.b, s.full, step * BLOCK_K, half, batch,
                                              (1 << CLUSTER) - 1);
    }
}

/* One warp has read the stage: says so in both blocks. */
__device__ __forceinline__ void release(const struct stage &s) {
    if (threadIdx.x % 32 < CLUSTER)
        mbarrier_arrive_cluster(mapa_shared(s.empty, threadIdx.x % 32));
}

/* A warp's 16 x 16 of a, its 16 bytes (a row's chunk) where the swizzle has put them: chunk c of row r at c ^ r % 8. */
__device__ __forceinline__ void load_a(uint32_t (&r)[4], uint32_t rows, int k) {
    const uint32_t lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16, chunk = 2 * k + lane / 16;
    ldmatrix_x4(r, rows + row * 128 + (chunk ^ row % 8) * 16);
}

__device__ __forceinline__ void consume(float (&d)[64], uint32_t shared, int32_t group, int32_t steps) {
    for (int32_t step = 0; step < steps; step++) {
        const struct stage s = stage_of(shared, step);
        mbarrier_wait(s.full, s.parity);
        const uint32_t rows = s.a + (uint32_t)group * (TILE_BYTES / 2);
        uint32_t fragments[BLOCK_K / 16][4];
#pragma unroll
        for (int k = 0; A_IN_REGISTERS && k < BLOCK_K / 16; k++)
            load_a(fragments[k], rows, k);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BLOCK_K / 16; k++) {
            const uint64_t b = wgmma_descriptor(s.b + (B_TRANSPOSED ? 2048 : 32) * k, TILE_BYTES / 2);
            if (A_IN_REGISTERS)
                wgmma_m64k16<false, B_TRANSPOSED>(d, fragments[k], b, step > 0 || k > 0);
            else
                wgmma_m64k16<false, B_TRANSPOSED>(d, wgmma_descriptor(rows + 32 * k, 0), b, step > 0 || k > 0);
        }
        wgmma_commit_group();
        if (A_IN_REGISTERS) { /* the fragments are written again in the next step */
            wgmma_wait_group<0>(d);
            release(s);
        } else { /* the products of the step before are done */
            wgmma_wait_group<1>(d);
            if (step > 0)
                release(stage_of(shared, step - 1));
        }
    }
    wgmma_wait_group<0>(d);
}

__device__ __forceinline__ void store(const struct hopper_probe_arguments &arguments, const float (&d)[64],
                                      int32_t group) {
    const int32_t lane = (int32_t)threadIdx.x % 32, warp = (int32_t)threadIdx.x / 32 % 4;
    const int32_t row = (int32_t)blockIdx.x * BLOCK_M + 64 * group + 16 * warp + lane / 4;
    float *c = arguments.c + ((int64_t)blockIdx.y * arguments.m + row) * arguments.n;
#pragma unroll
    for (int i = 0; i < 64; i++) {
        const int32_t below = i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (row + below < arguments.m && column < arguments.n)
            c[(int64_t)below * arguments.n + column] = d[i];
    }
}

extern "C" __global__ void __launch_bounds__(HOPPER_PROBE_THREADS, 1) __cluster_dims__(HOPPER_PROBE_CLUSTER, 1, 1)
    hopper_probe(const __grid_constant__ struct hopper_probe_arguments arguments) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t shared = shared_address(memory);
    const int32_t warpgroup = (int32_t)threadIdx.x / 128, steps = (arguments.k + BLOCK_K - 1) / BLOCK_K;
    if (shared % 1024)
        __trap();
    if (threadIdx.x == 0) {
        if (steps > 0) {
            prefetch_tensormap(&arguments.a);
            prefetch_tensormap(&arguments.b);
        }
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(shared + FULL_OFFSET + 8 * s, 1);
            mbarrier_init(shared + EMPTY_OFFSET + 8 * s, CLUSTER * CONSUMER_WARPS);
        }
        fence_mbarrier_init();
    }
    __syncwarp();
    barrier_cluster_arrive();
    barrier_cluster_wait();
    if (warpgroup == 0) {
        setmaxnreg_dec<24>();
        if (threadIdx.x == 0) {
            if (WAITS)
                griddepcontrol_wait();
            produce(arguments, shared, steps);
        }
        __syncwarp();
    } else {
        setmaxnreg_inc<240>();
        float d[64];
#pragma unroll
        for (int i = 0; i < 64; i++)
            d[i] = 0;
        consume(d, shared, warpgroup - 1, steps);
        store(arguments, d, warpgroup - 1);
        __syncwarp();
    }
    barrier_cluster_arrive(); /* the other block may still copy and arrive here */
    barrier_cluster_wait();
}
