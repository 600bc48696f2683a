/* gemm_hopper.cu: C = alpha A B + beta C for compute capability 9.0, by wgmma and TMA, for 16-bit dtypes.
 *
 * Idea: as many blocks as multiprocessors, each walks tiles of C. One thread of a producer warpgroup keeps a ring of
 * stages full by TMA, across tiles, each consumer warpgroup owns 64 rows of the tile and adds a stage's products by
 * wgmma while the stages behind it arrive (the persistent, warp-specialised design of CUTLASS 3, Thakkar et al., 2023).
 * Blocks of a cluster have tiles below each other, so their B is the same: each loads half of it for both. A finished
 * tile is staged in shared memory and written by TMA while the next tile's products run.
 *
 * Tile: 64 WARPGROUPS x BLOCK_N of C, 64 of k a step. Items are tiles (times parts of k, times batches), in groups of
 * rows of tiles, so that the blocks at work at one time share A and B in L2.
 *
 * Shared memory, in panels of 128 bytes a row with the 128-byte swizzle:
 *   A [STAGES], k-major [64 WARPGROUPS rows][64 of k], m-major [WARPGROUPS][64 of k][64 rows];
 *   B [STAGES], k-major [BLOCK_N][64 of k], n-major [BLOCK_N / 64, rounded up][64 of k][64 columns];
 *   C [WARPGROUPS][2][64 rows][64 columns], or 32 with the 64-byte swizzle; barriers.
 *
 * Barriers: of each stage a full one (an arrival of the block's own producer, and the bytes of both) and an empty one
 * (an arrival of each consumer warp of the cluster, as the producer writes into both blocks). The named barrier 1 + w
 * is warpgroup w's own.
 *
 * Registers: of a consumer BLOCK_N / 2 sums and some 40 besides; of 232 with two consumer warpgroups. Bound by the
 * tensor cores: of wgmma with 128x256 tiles, 1024 cycles a step for 48 KB, of which 32 KB come from L2. */
#include "companions/gemm/gemm.h"

GEMM_HOPPER_CONSTANTS(GPU_CONSTANT_GIVEN)

constexpr int BLOCK_M = 64 * WARPGROUPS, THREADS = 128 * (WARPGROUPS + 1), B_BOX = BLOCK_N / CLUSTER;
constexpr int A_BYTES = BLOCK_M * 128, STAGE_BYTES = gemm_tma_stage_bytes(BLOCK_M, BLOCK_N);
constexpr int C_COLUMNS = gemm_hopper_panel_columns(BLOCK_N), C_OFFSET = STAGES * STAGE_BYTES;
constexpr int C_PANEL = 64 * 128, RING = C_OFFSET + (PARTIAL ? 0 : WARPGROUPS * 2 * C_PANEL);

#include "companions/gemm/gemm_tma.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/wgmma.cuh"

constexpr bool F16 = DTYPE == GEMM_FLOAT16;
static_assert(STAGES <= 16 && (BLOCK_N % 32 == 0) && CLUSTER <= 2, "barriers, panels");
static_assert(RING + stage_ring::BYTES + 1024 <= gemm_hopper_shared_bytes(WARPGROUPS, BLOCK_N, STAGES, PARTIAL),
              "shared");

/* ---- consumers ---- */

/* The stage may be written again, by the producers of all blocks. */
__device__ __forceinline__ void release(uint32_t base, stage_place at) {
    const uint32_t lane = threadIdx.x % 32;
    if (CLUSTER == 1)
        ring_at(base).release(at);
    if (CLUSTER > 1 && lane < CLUSTER)
        mbarrier_arrive_remote(mapa_shared(ring_at(base).empty(at), lane));
}

/* The sums of a tile: the products of one stage are added while those of the stage before end. */
__device__ __forceinline__ void multiply(float (&sums)[BLOCK_N / 2], uint32_t base, int warpgroup, int steps,
                                         stage_place &at) {
    float nothing[1] = {0};
    stage_place before;
    for (int step = 0; step < steps; step++) {
        const uint32_t a = ring_at(base).tile(at) + warpgroup * PANEL;
        const uint32_t b = ring_at(base).tile(at) + A_BYTES;
        ring_at(base).wait_full(at);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BLOCK_K / 16; k++)
            wgmma_m64k16<F16, B_N_MAJOR, A_M_MAJOR>(sums, wgmma_descriptor(a + k * (A_M_MAJOR ? 2048 : 32), PANEL),
                                                    wgmma_descriptor(b + k * (B_N_MAJOR ? 2048 : 32), PANEL),
                                                    step > 0 || k > 0);
        wgmma_commit_group();
        wgmma_wait_group<1>(nothing);
        if (step > 0)
            release(base, before);
        before = at;
        at.next();
    }
    wgmma_wait_group<0>(sums);
    release(base, before);
}

/* Panels of C_COLUMNS by way of two buffers in turn, across tiles, each written by TMA while the next is filled. */
__device__ __forceinline__ void store_tile(const struct gemm_tma_params &a, const struct item &item,
                                           const float (&sums)[BLOCK_N / 2], uint32_t buffers, int warpgroup,
                                           uint32_t &turn) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, own = warp * 16 + lane % 16;
    const uint32_t mix = C_COLUMNS == 64 ? own & 7 : own >> 1 & 3; /* the 128-byte and the 64-byte swizzle */
    const int first = item.row + 64 * warpgroup, row = first + (int)(warp * 16 + lane / 4);
#pragma unroll
    for (int panel = 0; panel < BLOCK_N / C_COLUMNS; panel++, turn ^= 1) {
        const uint32_t buffer = buffers + turn * C_PANEL;
        if (threadIdx.x % 128 == 0)
            cp_async_bulk_wait_read<1>();
        barrier_sync(1 + warpgroup, 128);
#pragma unroll
        for (int i = 0; i < C_COLUMNS / 8; i += 2) { /* of eight columns */
            uint32_t word[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int at = panel * C_COLUMNS / 2 + (i + n / 2) * 4 + n % 2 * 2;
                const int column = item.column + panel * C_COLUMNS + (i + n / 2) * 8 + (int)(lane % 4) * 2;
                word[n] = finished_pair(a.in, sums[at], sums[at + 1], item.batch, row + n % 2 * 8, column);
            }
            stmatrix_x4(buffer + own * (2 * C_COLUMNS) + (((i + lane / 16) ^ mix) << 4), word);
        }
        fence_proxy_async();
        barrier_sync(1 + warpgroup, 128);
        if (threadIdx.x % 128 == 0) {
            cp_async_bulk_tensor_3d_store(&a.out_map, buffer, item.column + panel * C_COLUMNS, first, item.batch);
            cp_async_bulk_commit();
        }
    }
}

/* Of a part of k. */
__device__ __forceinline__ void store_partial(const struct gemm_tma_params &a, const struct item &item,
                                              const float (&sums)[BLOCK_N / 2], int warpgroup) {
    const int lane = threadIdx.x % 32, row = item.row + 64 * warpgroup + (int)(threadIdx.x / 32 % 4) * 16 + lane / 4;
    float *part = a.in.partials + ((int64_t)item.split * a.in.batch + item.batch) * a.in.m * a.in.n;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; i++) {
        const int column = item.column + i / 4 * 8 + lane % 4 * 2 + i % 2, own = row + i / 2 % 2 * 8;
        if (own < a.in.m && column < a.in.n)
            part[(int64_t)own * a.in.n + column] = sums[i];
    }
}

__device__ __forceinline__ void consume(const struct gemm_tma_params &a, uint32_t base, int warpgroup) {
    stage_place at;
    const uint32_t buffers = base + C_OFFSET + warpgroup * 2 * C_PANEL;
    uint32_t turn = 0;
    float sums[BLOCK_N / 2];
    for (int number = blockIdx.x / CLUSTER; number < a.items; number += gridDim.x / CLUSTER) {
        const struct item item = item_of(a, number);
        multiply(sums, base, warpgroup, item.last_step - item.first_step, at);
        if (PARTIAL)
            store_partial(a, item, sums, warpgroup);
        else
            store_tile(a, item, sums, buffers, warpgroup, turn);
    }
    if (threadIdx.x % 128 == 0)
        cp_async_bulk_wait_read<0>(); /* shared memory is there until it has been read */
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gemm_hopper(const __grid_constant__ struct gemm_tma_params a) {
    extern __shared__ char shared[];
    const uint32_t base = (shared_address(shared) + 1023) / 1024 * 1024;
    griddepcontrol_launch_dependents(); /* a grid behind this one waits for its end by itself */
    if (threadIdx.x == 32) {
        prefetch_tensormap(&a.a_map);
        prefetch_tensormap(&a.b_map);
        prefetch_tensormap(&a.out_map);
    }
    if (threadIdx.x == 0)
        init_ring(base, 4 * WARPGROUPS * CLUSTER);
    if (a.a_rows < BLOCK_M) { /* rows of A that never arrive */
        for (int stage = 0; stage < STAGES; stage++)
            for (int at = a.a_rows * 128 + threadIdx.x * 16; at < A_BYTES; at += THREADS * 16)
                st_shared_16(base + stage * STAGE_BYTES + at, 0, 0, 0, 0);
        fence_proxy_async();
    }
    __syncthreads();
    if (CLUSTER > 1) { /* no block writes into another before the other's barriers exist */
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }
    griddepcontrol_wait(); /* all before this may run beside the kernel ahead; what it wrote is read from here on */
    if (threadIdx.x < 128) {
        if (WARPGROUPS > 1)
            setmaxnreg_dec<40>();
        if (threadIdx.x == 0)
            produce(a, base);
        __syncwarp();
    } else {
        if (WARPGROUPS > 1)
            setmaxnreg_inc<232>();
        consume(a, base, threadIdx.x / 128 - 1);
    }
    if (CLUSTER > 1) { /* nor into one that has ended */
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }
}
