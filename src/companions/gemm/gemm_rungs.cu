/* gemm_rungs.cu: the two steps between gemm_naive.cu and gemm_mma.cu, for readers and for the table of kernels: shared
 * memory without tensor cores, tensor cores without shared memory.
 *
 * Both take any strides and any extents; elements outside of a matrix count as 0. */
#include "companions/gemm/gemm_elements.cuh"
#include "cuda/ptx/mma.cuh"

GEMM_RUNG_CONSTANTS(GPU_CONSTANT_GIVEN)

/* Element (row, column) of an operand of `rows` x `columns`, or 0. */
__device__ __forceinline__ uint16_t element_or_0(const struct gemm_matrix &x, int batch, int row, int column, int rows,
                                                 int columns) {
    return row < rows && column < columns ? *element_of(x, batch, row, column) : (uint16_t)0;
}

/* The tile of C that a block owns: row by row, then the next batch. */
struct tile {
    int batch, row, column;
};
__device__ __forceinline__ struct tile tile_of_block(const struct gemm_params &a, int rows, int columns) {
    const int row_tiles = (a.m + rows - 1) / rows, column_tiles = (a.n + columns - 1) / columns;
    const int number = blockIdx.x % (row_tiles * column_tiles);
    return {(int)blockIdx.x / (row_tiles * column_tiles), number / column_tiles * rows,
            number % column_tiles * columns};
}

__device__ __forceinline__ void store(const struct gemm_params &a, float sum, int batch, int row, int column) {
    if (row < a.m && column < a.n)
        *element_of(a.out, batch, row, column) = (uint16_t)narrowed(finished(a, sum, batch, row, column), 0.0f);
}

/* ---- gemm.sliced-k ----
 *
 * Idea: a block reads slices of GEMM_SLICED_K of k of its rows of A and columns of B once into shared memory, as
 * float32, and each of 256 threads makes 4 x 4 sums of them: an element of A is read n / 64 times instead of n times,
 * and an fma costs half a load from shared memory. */
extern "C" __global__ void __launch_bounds__(GEMM_ELEMENT_THREADS)
    gemm_sliced_k(const __grid_constant__ struct gemm_params a) {
    constexpr int BLOCK = GEMM_SLICED_BLOCK, SLICE = GEMM_SLICED_K, EACH = BLOCK * SLICE / GEMM_ELEMENT_THREADS;
    __shared__ float left[SLICE][BLOCK + 4], right[SLICE][BLOCK + 4];
    const struct tile at = tile_of_block(a, BLOCK, BLOCK);
    const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
    float sum[4][4] = {};
    for (int k = 0; k < a.k; k += SLICE) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int n = threadIdx.x + i * GEMM_ELEMENT_THREADS;
            left[n % SLICE][n / SLICE] =
                widened(element_or_0(a.a, at.batch, at.row + n / SLICE, k + n % SLICE, a.m, a.k));
            right[n / BLOCK][n % BLOCK] =
                widened(element_or_0(a.b, at.batch, k + n / BLOCK, at.column + n % BLOCK, a.k, a.n));
        }
        __syncthreads();
#pragma unroll
        for (int slice = 0; slice < SLICE; slice++)
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    sum[i][j] = fmaf(left[slice][row + i], right[slice][column + j], sum[i][j]);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            store(a, sum[i][j], at.batch, at.row + row + i, at.column + column + j);
}

/* ---- gemm.mma-warp ----
 *
 * Idea: the tensor core alone. A warp owns 16 x 8 of C and loads what each lane hands to mma.m16n8k16 straight from
 * global memory; four warps of a block lie beside each other and meet the same rows of A in L1. */
extern "C" __global__ void __launch_bounds__(32 * GEMM_WARPS)
    gemm_mma_warp(const __grid_constant__ struct gemm_params a) {
    const struct tile at = tile_of_block(a, GEMM_WARP_ROWS, GEMM_WARPS * GEMM_WARP_COLUMNS);
    const int lane = threadIdx.x % 32, row = at.row + lane / 4;
    const int first_column = at.column + threadIdx.x / 32 * GEMM_WARP_COLUMNS, of_b = first_column + lane / 4;
    const auto pair_of_a = [&](int i, int k) {
        return (uint32_t)element_or_0(a.a, at.batch, i, k, a.m, a.k) |
               (uint32_t)element_or_0(a.a, at.batch, i, k + 1, a.m, a.k) << 16;
    };
    const auto pair_of_b = [&](int k) {
        return (uint32_t)element_or_0(a.b, at.batch, k, of_b, a.k, a.n) |
               (uint32_t)element_or_0(a.b, at.batch, k + 1, of_b, a.k, a.n) << 16;
    };
    float sum[4] = {};
    for (int step = 0; step < a.k; step += 16) {
        const int k = step + lane % 4 * 2;
        const uint32_t x[4] = {pair_of_a(row, k), pair_of_a(row + 8, k), pair_of_a(row, k + 8),
                               pair_of_a(row + 8, k + 8)};
        if (DTYPE == GEMM_FLOAT16)
            mma_m16n8k16_f16(sum, x, pair_of_b(k), pair_of_b(k + 8));
        else
            mma_m16n8k16_bf16(sum, x, pair_of_b(k), pair_of_b(k + 8));
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        store(a, sum[i], at.batch, row + i / 2 * 8, first_column + lane % 4 * 2 + i % 2);
}
