/* gemm_mma_tma.cu: C = alpha A B + beta C for compute capability 9.0 and above, by mma.sync and TMA, for 16-bit dtypes.
 *
 * Idea: gemm_mma.cu spends a third of its instructions on copies, and a barrier of the block every 64 of k. Here a
 * producer keeps a ring of stages full by TMA, across tiles, and each warp waits for stages and frees them by itself at
 * mbarriers, so that warps drift apart and one's loads of registers hide under another's products. As many blocks as
 * multiprocessors walk tiles of C. A finished tile is staged in shared memory and written by TMA while the next tile's
 * products run.
 *
 * Tile: 128 x BLOCK_N of C, 64 of k a step. Eight warps, two down and four across, own 64 x BLOCK_N / 4 each, in groups
 * of 16: of rows every second one, of columns every fourth, so that a group's address is an immediate beside the
 * first's.
 *
 * Shared memory, in panels of 128 bytes a row with the 128-byte swizzle, as in gemm_hopper.cu:
 *   A [STAGES], k-major [128 rows][64 of k], m-major [2][64 of k][64 rows];
 *   B [STAGES], k-major [BLOCK_N][64 of k], n-major [BLOCK_N / 64][64 of k][64 columns];
 *   C [2][128 rows][64 columns]; barriers.
 *
 * Barriers: of each stage a full one (an arrival of the producer, and the bytes of all copies) and an empty one (an
 * arrival of each warp). The named barrier 1 is the consumers'.
 *
 * Registers: BLOCK_N / 2 sums; of 64 x 64 a warp 64 of A and B besides, which are loaded 16 of k ahead; of wider ones A
 * and 32 columns of B, loaded 16 columns ahead. Bound by mma.sync: of 128 x 256 and 16 of k 412 cycles, beside 352 of
 * shared memory. */
#include "companions/gemm/gemm.h"

GEMM_MMA_TMA_CONSTANTS(GPU_CONSTANT_GIVEN)

constexpr int BLOCK_M = GEMM_MMA_BLOCK_M, CLUSTER = 1, B_BOX = gemm_mma_tma_box(BLOCK_N);
constexpr int A_BYTES = BLOCK_M * 128, STAGE_BYTES = gemm_tma_stage_bytes(BLOCK_M, BLOCK_N);
constexpr int C_OFFSET = STAGES * STAGE_BYTES, C_PANEL = BLOCK_M * 128;
constexpr int RING = C_OFFSET + 2 * C_PANEL;

#include "companions/gemm/gemm_tma.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/setmaxnreg.cuh"

constexpr int WARPS_M = 2, WARPS_N = 4, CONSUMERS = 32 * WARPS_M * WARPS_N, THREADS = GEMM_MMA_TMA_THREADS;
constexpr int PARTS = BLOCK_K / 16;                              /* of a step: 16 of k each */
constexpr int GROUPS_M = 4, GROUPS_N = BLOCK_N / (16 * WARPS_N); /* of 16 rows and columns, a warp's */
constexpr bool AHEAD = GROUPS_N <= 4;                            /* registers hold the next 16 of k too */
static_assert(BLOCK_N % 64 == 0 && STAGES >= 2 && CONSUMERS + 128 == THREADS, "panels, barriers, warps");
static_assert(RING + stage_ring::BYTES + 1024 <= gemm_mma_tma_shared_bytes(BLOCK_N, STAGES), "shared");

/* ---- fragments ---- */

/* Where this lane's row of a warp's first group lies in a stage's operand. Matrices of 8 x 8: those of A with the
 * halves of the outer axis first, those of B (by_k) with the halves of k first. */
template <bool across, bool by_k> __device__ __forceinline__ uint32_t lane_offset(int warp) {
    const int lane = threadIdx.x % 32, first = lane / 8 % 2, second = lane / 16;
    const int outer = by_k ? second : first, k = by_k ? first : second, y = lane % 8;
    return across ? (k * 8 + y) * 128 + ((2 * warp + outer) ^ y) * 16
                  : warp * 2048 + (outer * 8 + y) * 128 + (k ^ y) * 16;
}
/* Group i of the warp, 16 of k from 16 part on; warps: that share the axis in turns of a group. */
template <bool across, int warps>
__device__ __forceinline__ void load_group(uint32_t (&r)[4], uint32_t first, int i, int part) {
    if (across)
        ldmatrix_x4_trans(r, (first ^ (i * warps % 4 * 32)) + i * warps / 4 * PANEL + part * 2048);
    else
        ldmatrix_x4(r, (first ^ (part * 32)) + i * warps * 2048);
}

struct sums {
    float s[GROUPS_M][2 * GROUPS_N][4]; /* of an m16n8 product each */
};
/* Rows by columns 2 j and 2 j + 1 of eight: to and fro, so that the next product has one operand of this one. */
__device__ __forceinline__ void multiply_columns(struct sums &c, const uint32_t (&a)[GROUPS_M][4],
                                                 const uint32_t (&b)[4], int j) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < GROUPS_M; i++) {
            const int row = half ? GROUPS_M - 1 - i : i;
            if (DTYPE == GEMM_FLOAT16)
                mma_m16n8k16_f16(c.s[row][2 * j + half], a[row], b[2 * half], b[2 * half + 1]);
            else
                mma_m16n8k16_bf16(c.s[row][2 * j + half], a[row], b[2 * half], b[2 * half + 1]);
        }
}

/* ---- the kernel ---- */

/* The warp has read the stage. */
__device__ __forceinline__ void release(uint32_t base, stage_place at) {
    __syncwarp();
    ring_at(base).release(at);
}

/* A warp's 16 of k of A, and of B^T as many groups as are held at one time. */
template <int groups> struct fragments { uint32_t rows[GROUPS_M][4], columns[groups][4]; };
template <int groups> __device__ __forceinline__ void load_rows(struct fragments<groups> &f, uint32_t left, int part) {
#pragma unroll
    for (int i = 0; i < GROUPS_M; i++)
        load_group<A_M_MAJOR, WARPS_M>(f.rows[i], left, i, part);
}
template <int groups>
__device__ __forceinline__ void load_fragments(struct fragments<groups> &f, uint32_t left, uint32_t right, int part) {
    load_rows(f, left, part);
#pragma unroll
    for (int j = 0; j < groups; j++)
        load_group<B_N_MAJOR, WARPS_N>(f.columns[j], right, j, part);
}

/* The sums of a tile, 16 of k at a time: those that follow, of the next stage too, are loaded under this product. */
__device__ __forceinline__ void multiply_ahead(struct sums &c, uint32_t base, uint32_t left, uint32_t right, int steps,
                                               stage_place &at) {
    struct fragments<GROUPS_N> f[2];
    ring_at(base).wait_full(at);
    load_fragments(f[0], left + at.stage() * STAGE_BYTES, right + at.stage() * STAGE_BYTES, 0);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        const stage_place before = at;
        at.next();
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            if (part + 1 < PARTS)
                load_fragments(f[1 - part % 2], left + before.stage() * STAGE_BYTES,
                               right + before.stage() * STAGE_BYTES, part + 1);
            if (part + 2 == PARTS)
                release(base, before);
            if (part + 1 == PARTS && step + 1 < steps) {
                ring_at(base).wait_full(at);
                load_fragments(f[0], left + at.stage() * STAGE_BYTES, right + at.stage() * STAGE_BYTES, 0);
            }
#pragma unroll
            for (int j = 0; j < GROUPS_N; j++)
                multiply_columns(c, f[part % 2].rows, f[part % 2].columns[j], j);
        }
    }
}
/* The same with fewer registers: 16 columns at a time, of one stage alone. */
__device__ __forceinline__ void multiply_by_columns(struct sums &c, uint32_t base, uint32_t left, uint32_t right,
                                                    int steps, stage_place &at) {
    struct fragments<2> f;
#pragma unroll 1
    for (int step = 0; step < steps; step++, at.next()) {
        const uint32_t stage = at.stage() * STAGE_BYTES;
        ring_at(base).wait_full(at);
        load_rows(f, left + stage, 0);
        load_group<B_N_MAJOR, WARPS_N>(f.columns[0], right + stage, 0, 0);
#pragma unroll
        for (int turn = 0; turn < PARTS * GROUPS_N; turn++) {
            const int next = turn + 1, part = turn / GROUPS_N;
            if (next < PARTS * GROUPS_N)
                load_group<B_N_MAJOR, WARPS_N>(f.columns[next % 2], right + stage, next % GROUPS_N, next / GROUPS_N);
            if (next + 1 == PARTS * GROUPS_N)
                release(base, at);
            multiply_columns(c, f.rows, f.columns[turn % 2], turn % GROUPS_N);
            if (next % GROUPS_N == 0 && part + 1 < PARTS)
                load_rows(f, left + stage, part + 1);
        }
    }
}

/* Panels of 64 columns by way of two buffers in turn, across tiles, each written by TMA while the next is filled. */
__device__ __forceinline__ void store_tile(const struct gemm_tma_params &a, const struct sums &c,
                                           const struct item &item, uint32_t base, int warp_m, int warp_n,
                                           uint32_t &turn) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < GROUPS_N; j++, turn ^= 1) {
        const uint32_t buffer = base + C_OFFSET + turn * C_PANEL;
        if (threadIdx.x == 0)
            cp_async_bulk_wait_read<1>();
        barrier_sync(1, CONSUMERS);
#pragma unroll
        for (int i = 0; i < GROUPS_M; i++) {
            const int group = 16 * (WARPS_M * i + warp_m), row = group + lane % 16;
            uint32_t word[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float *s = &c.s[i][2 * j + n / 2][n % 2 * 2];
                word[n] = finished_pair(a.in, s[0], s[1], item.batch, item.row + group + n % 2 * 8 + lane / 4,
                                        item.column + 64 * j + 16 * warp_n + n / 2 * 8 + lane % 4 * 2);
            }
            stmatrix_x4(buffer + row * 128 + (((2 * warp_n + lane / 16) ^ (row & 7)) << 4), word);
        }
        fence_proxy_async();
        barrier_sync(1, CONSUMERS);
        if (threadIdx.x == 0) {
            cp_async_bulk_tensor_3d_store(&a.out_map, buffer, item.column + 64 * j, item.row, item.batch);
            cp_async_bulk_commit();
        }
    }
}

__device__ __forceinline__ void consume(const struct gemm_tma_params &a, uint32_t base) {
    const int warp_m = threadIdx.x / 32 % WARPS_M, warp_n = threadIdx.x / 32 / WARPS_M;
    const uint32_t left = base + lane_offset<A_M_MAJOR, false>(warp_m);
    const uint32_t right = base + A_BYTES + lane_offset<B_N_MAJOR, true>(warp_n);
    stage_place at;
    uint32_t turn = 0;
    for (int number = blockIdx.x; number < a.items; number += gridDim.x) {
        struct sums c = {};
        if (AHEAD)
            multiply_ahead(c, base, left, right, a.steps, at);
        else
            multiply_by_columns(c, base, left, right, a.steps, at);
        store_tile(a, c, item_of(a, number), base, warp_m, warp_n, turn);
    }
    if (threadIdx.x == 0)
        cp_async_bulk_wait_read<0>(); /* shared memory is there until it has been read */
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemm_mma_tma(const __grid_constant__ struct gemm_tma_params a) {
    extern __shared__ char shared[];
    const uint32_t base = (shared_address(shared) + 1023) / 1024 * 1024;
    griddepcontrol_launch_dependents(); /* a grid behind this one waits for its end by itself */
    if (threadIdx.x == 0) {
        prefetch_tensormap(&a.a_map);
        prefetch_tensormap(&a.b_map);
        prefetch_tensormap(&a.out_map);
        init_ring(base, CONSUMERS / 32);
    }
    __syncthreads();
    griddepcontrol_wait(); /* all before this may run beside the kernel ahead; what it wrote is read from here on */
    if (threadIdx.x < CONSUMERS) {
        setmaxnreg_inc<240>();
        consume(a, base);
    } else {
        setmaxnreg_dec<24>();
        if (threadIdx.x == CONSUMERS)
            produce(a, base);
    }
}
