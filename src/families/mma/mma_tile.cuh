/* mma_tile.cuh: products of one warp on tiles of 16-bit elements in shared memory (gpu/tile.cuh). A kernel defines
 * THREADS before including it. Those of 32-bit elements are in mma_tf32.cuh. */
#ifndef FDM_MMA_TILE_CUH
#define FDM_MMA_TILE_CUH

#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/opaque.cuh"
#include "gpu/tile.cuh"

#if DTYPE != GPU_FLOAT32
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#    if DTYPE == GPU_BFLOAT16
    mma_m16n8k16_bf16(c, a, b0, b1);
#    else
    mma_m16n8k16_f16(c, a, b0, b1);
#    endif
}
#endif

/* Addresses of a lane in a tile. lane_address() gives that of a row and a first chunk of 0 or 1; at_step() moves it by
 * whole groups of 8 rows and by an even number of chunks, both known when compiling: one exclusive or, since tiles
 * begin at multiples of 128 bytes. The result of lane_address() is opaque to the compiler, which would else keep the
 * address of every step in a register of its own for the whole loop. */
template <int chunks, int panel_rows = 0> struct lane_address {
    static constexpr int wide = row_chunks<chunks, panel_rows>;
    static constexpr int group = wide % 8 == 0 ? 8 : 4, group_bytes = (panel_rows ? panel_rows : 1) * group * 16;
    static_assert(chunks % 4 == 0, "rows are multiples of 64 bytes");
    uint32_t at;
    __device__ __forceinline__ lane_address(uint32_t tile, int row, int chunk) {
        at = tile + row * (wide * 16) + ((swizzle_of<wide>(row) ^ chunk) << 4);
        at = opaque(at);
    }
    /* The address for a first row that is a multiple of 8, from the lane's offset in a step at row 0. */
    __device__ __forceinline__ lane_address(uint32_t tile_and_place, int row) {
        at = tile_and_place + row * (wide * 16);
        at = opaque(at);
    }
    /* Of the `at` of another. */
    __device__ __forceinline__ explicit lane_address(uint32_t known) : at(known) {}
    __device__ __forceinline__ uint32_t at_step(int rows, int chunk) const {
        return (at ^ (uint32_t)(chunk % group << 4)) + chunk / group * group_bytes + rows * (wide * 16);
    }
    /* The same lane's address `chunk` chunks on. chunk is even, and later steps do not touch its bits. */
    __device__ __forceinline__ void move(int chunk) {
        at = (at ^ (uint32_t)(chunk % group << 4)) + chunk / group * group_bytes;
    }
};

/* Operands of 16x16 steps. Left: 16 rows from `row` on; left of the transpose: 16 columns of the product are rows from
 * `row` on here. Right: the tile's rows are the product's columns; right of the transpose: the contracted index. */
template <int chunks> __device__ __forceinline__ struct lane_address<chunks> left_of(uint32_t tile, int row) {
    const int lane = threadIdx.x % 32;
    return {tile, row + lane % 16, lane / 16};
} template <int chunks> __device__ __forceinline__ struct lane_address<chunks> right_of(uint32_t tile, int row) {
    const int lane = threadIdx.x % 32;
    return {tile, row + lane % 8 + lane / 16 * 8, lane / 8 % 2};
}
/* The lane's place in a step at row 0, of operands that take 16 rows and then the second chunk (left, and right of the
 * transpose), and of those that take both chunks of 8 rows (right, and left of the transpose). */
template <int wide>
__device__ __forceinline__ uint32_t place_by_rows() {
    const int lane = threadIdx.x % 32;
    return (uint32_t)chunk_offset<wide>(lane % 16, lane / 16);
}
template <int wide> __device__ __forceinline__ uint32_t place_by_chunks() {
    const int lane = threadIdx.x % 32;
    return (uint32_t)chunk_offset<wide>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

#endif
