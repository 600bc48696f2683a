/* tile_product.cuh: one product by tcgen05 of 64 steps of K, its operands laid out by threads; of GROUP blocks (1 or 2)
 * and TILE_M x TILE_N sums. OPERAND_A: 0 K-major in shared memory, 1 MN-major, 2 in tensor memory. B_MN: 1 MN-major. */
#ifndef FDM_TILE_PRODUCT_CUH
#define FDM_TILE_PRODUCT_CUH

#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/ptx/tcgen05.cuh"
#include "cuda/ptx/tma.cuh"
#include "instructions/tile_product.h"

constexpr int ROWS_A = TILE_M / GROUP, ROWS_B = TILE_N / GROUP; /* of a block */
constexpr bool FOLDED = GROUP == 2 && TILE_M == 128;
constexpr int COLUMNS = FOLDED ? TILE_N / 2 : TILE_N;
constexpr uint32_t CHUNK = TILE_K * 128, A_COLUMN = 448; /* of an MN-major operand; of a in tensor memory */

/* Two neighbours along K of row `row`. */
__device__ __forceinline__ uint32_t pair_of(const uint16_t *matrix, int row, int k) {
    return matrix[row * TILE_K + k] | (uint32_t)matrix[row * TILE_K + k + 1] << 16;
}

__device__ __forceinline__ void lay_out(const uint16_t *matrix, int rows, bool mn_major, uint32_t shared) {
    if (!mn_major)
        for (int i = threadIdx.x; i < rows * TILE_K / 2; i += TILE_THREADS) {
            const int row = i / (TILE_K / 2), k = i % (TILE_K / 2) * 2;
            st_shared_4(shared + row * 128 + ((k / 8 ^ row % 8) * 16 + k % 8 * 2), pair_of(matrix, row, k));
        }
    else
        for (int i = threadIdx.x; i < rows * TILE_K / 2; i += TILE_THREADS) {
            const int k = i % TILE_K, row = i / TILE_K * 2;
            const uint32_t at = row / 64 * CHUNK + k * 128 + ((row % 64 / 8 ^ k % 8) * 16 + row % 8 * 2);
            st_shared_4(shared + at, matrix[row * TILE_K + k] | (uint32_t)matrix[(row + 1) * TILE_K + k] << 16);
        }
}

/* a: this block's ROWS_A rows; b: its ROWS_B. out: [128 lanes][COLUMNS] of this block. shared: 128 KB from a multiple
 * of 1024 on. The barriers and the tensor memory's address lie behind the operands. */
__device__ __forceinline__ void tile_product(const uint16_t *a, const uint16_t *b, float *out, uint32_t shared,
                                             bool f16) {
    const uint32_t at_b = shared + ROWS_A * 128, barrier = at_b + ROWS_B * 128, slot = barrier + 8;
    const int warp = threadIdx.x / 32, lane = threadIdx.x;
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
    }
    if (warp == 0) {
        tcgen05_alloc<GROUP>(slot, 512);
        tcgen05_relinquish_alloc_permit<GROUP>();
    }
    if (OPERAND_A != 2)
        lay_out(a, ROWS_A, OPERAND_A == 1, shared);
    lay_out(b, ROWS_B, B_MN, at_b);
    fence_proxy_async();
    __syncthreads();
    tcgen05_fence_after_thread_sync();
    const uint32_t tensor = ld_shared_4(slot), own = tensor + ((uint32_t)warp * 32 << 16);
    if (OPERAND_A == 2) {
        uint32_t words[TILE_K / 2];
#pragma unroll
        for (int i = 0; i < TILE_K / 2; i++)
            words[i] = pair_of(a, FOLDED ? lane % 64 : lane, 2 * i);
        tcgen05_st_32x32b(own + A_COLUMN, words);
        tcgen05_wait_st();
    }
    tcgen05_fence_before_thread_sync();
    __syncwarp();
    barrier_cluster_arrive();
    barrier_cluster_wait();
    tcgen05_fence_after_thread_sync();
    if (warp == 0 && (GROUP == 1 || cluster_ctarank() == 0) && elect_one()) {
        const uint32_t shape = tcgen05_shape(f16, TILE_M, TILE_N, OPERAND_A == 1, B_MN);
#pragma unroll
        for (int k = 0; k < TILE_K / 16; k++) {
            const uint64_t matrix_b = B_MN ? tcgen05_mn_major(at_b + k * 2048, CHUNK) : tcgen05_k_major(at_b + k * 32);
            if (OPERAND_A == 2)
                tcgen05_mma_ts<GROUP>(tensor, tensor + A_COLUMN + k * 8, matrix_b, shape, k > 0);
            else
                tcgen05_mma<GROUP>(
                    tensor, OPERAND_A ? tcgen05_mn_major(shared + k * 2048, CHUNK) : tcgen05_k_major(shared + k * 32),
                    matrix_b, shape, k > 0);
        }
        if (GROUP == 1)
            tcgen05_commit<GROUP>(barrier);
        else
            tcgen05_commit_multicast<GROUP>(barrier, 3);
    }
    __syncwarp();
    mbarrier_wait(barrier, 0);
    tcgen05_fence_after_thread_sync();
    for (int column = 0; column < COLUMNS; column += 8) {
        float d[8];
        tcgen05_ld_32x32b(d, own + column);
        tcgen05_wait_ld(d);
#pragma unroll
        for (int i = 0; i < 8; i++)
            out[lane * COLUMNS + column + i] = d[i];
    }
    tcgen05_fence_before_thread_sync();
    __syncwarp();
    barrier_cluster_arrive();
    barrier_cluster_wait();
    if (warp == 0)
        tcgen05_dealloc<GROUP>(tensor, 512);
}

#endif
