/* mma_tile.cuh: tiles of 16-bit elements in shared memory and the products of one warp on them, for kernels that define
 * DTYPE, THREADS and ALIGNED before including it.
 *
 * A tile is rows of `chunks` 16-byte chunks. The chunks of a row are permuted by a number that depends on the row, so
 * that eight rows of the same column lie in different banks: ldmatrix, its transposed form, and 4-byte stores of
 * accumulators have no bank conflicts. */
#ifndef FDM_MMA_TILE_CUH
#define FDM_MMA_TILE_CUH

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"

template <int chunks> __device__ __forceinline__ int swizzle_of(int row) {
    return chunks % 8 == 0 ? row & 7 : chunks % 4 == 0 ? (row >> 1) & 3 : (row >> 2) & 1;
}
template <int chunks> __device__ __forceinline__ int chunk_offset(int row, int chunk) {
    return (row * chunks + (chunk ^ swizzle_of<chunks>(row))) * 16;
}

/* Rows 0 .. tile_rows - 1 from global memory; what is past `rows` or `columns` becomes 0. */
template <int chunks, int tile_rows>
__device__ __forceinline__ void load_tile(uint32_t tile, const char *from, int64_t row_bytes, int rows, int columns) {
    constexpr int copies = (tile_rows * chunks + THREADS - 1) / THREADS;
#pragma unroll(copies < 4 ? copies : 4)
    for (int n = 0; n < copies; n++) {
        const int index = n * THREADS + (int)threadIdx.x, row = index / chunks, chunk = index % chunks;
        if (tile_rows * chunks % THREADS && row >= tile_rows)
            break;
        const int count = row < rows ? min(max(columns - chunk * 8, 0), 8) : 0;
        const char *at = count ? from + row * row_bytes + chunk * 16 : from;
        const uint32_t to = tile + chunk_offset<chunks>(row, chunk);
#if ALIGNED
        cp_async_16_fill(to, at, count * 2);
#else
        uint32_t word[4] = {0, 0, 0, 0};
#    pragma unroll
        for (int e = 0; e < 8; e++)
            if (e < count)
                word[e / 2] |= (uint32_t)((const uint16_t *)at)[e] << (e % 2 * 16);
        st_shared_16(to, word[0], word[1], word[2], word[3]);
#endif
    }
}

/* The reverse: `rows` rows of `columns` elements to global memory, by `threads` threads of which this is `thread`. */
template <int chunks>
__device__ __forceinline__ void store_tile(char *to, int64_t row_bytes, uint32_t tile, int rows, int columns,
                                           int thread, int threads) {
    for (int index = thread; index < rows * chunks; index += threads) {
        const int row = index / chunks, chunk = index % chunks, count = min(columns - chunk * 8, 8);
        if (count <= 0)
            continue;
        uint32_t word[4];
        ld_shared_16(word, tile + chunk_offset<chunks>(row, chunk));
        char *at = to + row * row_bytes + chunk * 16;
        if (ALIGNED && count == 8)
            *(uint4 *)at = make_uint4(word[0], word[1], word[2], word[3]);
        else
#pragma unroll
            for (int e = 0; e < 8; e++)
                if (e < count)
                    ((uint16_t *)at)[e] = (uint16_t)(word[e / 2] >> (e % 2 * 16));
    }
}

__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if DTYPE == MMA_BFLOAT16
    mma_m16n8k16_bf16(c, a, b0, b1);
#else
    mma_m16n8k16_f16(c, a, b0, b1);
#endif
}
__device__ __forceinline__ uint32_t pack(float low, float high) {
#if DTYPE == MMA_BFLOAT16
    return cvt_bf16x2(low, high);
#else
    return cvt_f16x2(low, high);
#endif
}
__device__ __forceinline__ float unpack(uint16_t x) {
#if DTYPE == MMA_BFLOAT16
    return cvt_f32_bf16(x);
#else
    return cvt_f32_f16(x);
#endif
}

/* Operands of a 16x16 step. Left: rows row .. + 15, columns 16 step .. + 15 of a tile; of its transpose: what is rows
 * there are columns here. Right: the tile's rows are the product's columns; transposed: the contracted index. */
template <int chunks> __device__ __forceinline__ void load_left(uint32_t (&a)[4], uint32_t tile, int row, int step) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(a, tile + chunk_offset<chunks>(row + lane % 16, 2 * step + lane / 16));
}
template <int chunks>
__device__ __forceinline__ void load_left_trans(uint32_t (&a)[4], uint32_t tile, int column, int chunk) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4_trans(a, tile + chunk_offset<chunks>(column + lane % 8 + lane / 16 * 8, chunk + lane / 8 % 2));
}
template <int chunks> __device__ __forceinline__ void load_right(uint32_t (&b)[4], uint32_t tile, int row, int step) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(b, tile + chunk_offset<chunks>(row + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
}
template <int chunks>
__device__ __forceinline__ void load_right_trans(uint32_t (&b)[4], uint32_t tile, int row, int chunk) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4_trans(b, tile + chunk_offset<chunks>(row + lane % 16, chunk + lane / 16));
}

#endif
