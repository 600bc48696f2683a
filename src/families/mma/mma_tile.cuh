/* mma_tile.cuh: tiles in shared memory and, of 16-bit elements, the products of one warp on them, for kernels that
 * define DTYPE, THREADS and ALIGNED before including it. Those of 32-bit elements are in mma_tf32.cuh.
 *
 * A tile is rows of `chunks` 16-byte chunks. The chunks of a row are permuted by a number that depends on the row, so
 * that eight rows of the same column lie in different banks: ldmatrix, its transposed form, and 4-byte stores of
 * accumulators have no bank conflicts. */
#ifndef FDM_MMA_TILE_CUH
#define FDM_MMA_TILE_CUH

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/opaque.cuh"
#include "gpu/convert.cuh"

#define ELEMENT_BYTES  (DTYPE == GPU_FLOAT32 ? 4 : 2)
#define CHUNK_ELEMENTS (16 / ELEMENT_BYTES)

template <int chunks> __device__ __forceinline__ int swizzle_of(int row) {
    return chunks % 8 == 0 ? row & 7 : chunks % 4 == 0 ? (row >> 1) & 3 : (row >> 2) & 1;
}
template <int chunks> __device__ __forceinline__ int chunk_offset(int row, int chunk) {
    return (row * chunks + (chunk ^ swizzle_of<chunks>(row))) * 16;
}
/* In panels a tile is one after the other tiles of 8 or 4 columns of chunks, each of `panel_rows` rows: as TMA
 * leaves them with its swizzle of 128 or 64 bytes. panel_rows 0: not in panels. */
template <int chunks> constexpr int panel_chunks = chunks % 8 ? 4 : 8;
template <int chunks, int panel_rows> constexpr int row_chunks = panel_rows ? panel_chunks<chunks> : chunks;
template <int chunks, int panel_rows> __device__ __forceinline__ int chunk_offset_in(int row, int chunk) {
    constexpr int wide = row_chunks<chunks, panel_rows>;
    return chunk / wide * (panel_rows * wide * 16) + chunk_offset<wide>(row, chunk % wide);
}

/* A chunk from global memory: `count` elements, then zeros. */
__device__ __forceinline__ void load_chunk(uint32_t to, const char *at, int count) {
#if ALIGNED
    cp_async_16_fill(to, at, count * ELEMENT_BYTES);
#elif DTYPE == GPU_FLOAT32
#    pragma unroll
    for (int e = 0; e < 4; e++)
        cp_async_4_fill(to + e * 4, e < count ? at + e * 4 : at, e < count ? 4 : 0);
#else
    uint32_t word[4] = {0, 0, 0, 0};
#    pragma unroll
    for (int e = 0; e < 8; e++)
        if (e < count)
            word[e / 2] |= (uint32_t)((const uint16_t *)at)[e] << (e % 2 * 16);
    st_shared_16(to, word[0], word[1], word[2], word[3]);
#endif
}
/* Rows 0 .. tile_rows - 1 from global memory; what is past `rows` or `columns` becomes 0. */
template <int chunks, int tile_rows, int panel_rows = 0>
__device__ __forceinline__ void load_tile(uint32_t tile, const char *from, int64_t row_bytes, int rows, int columns) {
    constexpr int copies = (tile_rows * chunks + THREADS - 1) / THREADS, step = THREADS / chunks;
    int thread = threadIdx.x;
    thread = opaque(thread); /* places are computed here, not kept from call to call */
    if constexpr (ALIGNED && DTYPE != GPU_FLOAT32 && THREADS % chunks == 0 && step % 8 == 0 && tile_rows % step == 0) {
        /* A thread's copies lie in one column, `step` rows apart: only the row's address changes. */
        const int row = thread / chunks, chunk = thread % chunks;
        const int bytes = min(max(columns - chunk * 8, 0), 8) * 2;
        const char *at = from + row * row_bytes + chunk * 16;
        const uint32_t to = tile + chunk_offset_in<chunks, panel_rows>(row, chunk);
#pragma unroll
        for (int n = 0; n < copies; n++, at += step * row_bytes)
            cp_async_16_fill(to + n * step * row_chunks<chunks, panel_rows> * 16, at,
                             row + n * step < rows ? bytes : 0);
    } else {
#pragma unroll(copies < 4 ? copies : copies % 4 ? 2 : 4)
        for (int n = 0; n < copies; n++) {
            const int index = n * THREADS + thread, row = index / chunks, chunk = index % chunks;
            if (tile_rows * chunks % THREADS && row >= tile_rows)
                break;
            const int count = row < rows ? min(max(columns - chunk * CHUNK_ELEMENTS, 0), CHUNK_ELEMENTS) : 0;
            const char *at = count ? from + row * row_bytes + chunk * 16 : from;
            load_chunk(tile + chunk_offset_in<chunks, panel_rows>(row, chunk), at, count);
        }
    }
}

#if DTYPE != GPU_FLOAT32
/* The first `count` of eight elements to global memory; `aligned`: at a multiple of 16 bytes. */
template <bool aligned = ALIGNED>
__device__ __forceinline__ void store_words(char *at, const uint32_t (&word)[4], int count) {
    if (aligned && count == 8)
        *(uint4 *)at = make_uint4(word[0], word[1], word[2], word[3]);
    else
#    pragma unroll
        for (int e = 0; e < 8; e++)
            if (e < count)
                ((uint16_t *)at)[e] = (uint16_t)(word[e / 2] >> (e % 2 * 16));
}
/* A chunk to global memory. */
__device__ __forceinline__ void store_chunk(char *at, uint32_t from, int count) {
    uint32_t word[4];
    ld_shared_16(word, from);
    store_words(at, word, count);
}

/* The reverse: `rows` rows of `columns` elements to global memory, by `threads` threads of which this is `thread`. */
template <int chunks>
__device__ __forceinline__ void store_tile(char *to, int64_t row_bytes, uint32_t tile, int rows, int columns,
                                           int thread, int threads) {
    for (int index = thread; index < rows * chunks; index += threads) {
        const int row = index / chunks, chunk = index % chunks, count = min(columns - chunk * 8, 8);
        if (count <= 0)
            continue;
        store_chunk(to + row * row_bytes + chunk * 16, tile + chunk_offset<chunks>(row, chunk), count);
    }
}

__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#    if DTYPE == GPU_BFLOAT16
    mma_m16n8k16_bf16(c, a, b0, b1);
#    else
    mma_m16n8k16_f16(c, a, b0, b1);
#    endif
}
#else
/* Two neighbours of a row in global memory, of `columns`; `column` is even. */
__device__ __forceinline__ void store_pair(float *row, int column, int columns, float x, float y) {
    if (ALIGNED && column + 1 < columns) {
        *(float2 *)(row + column) = make_float2(x, y);
    } else {
        if (column < columns)
            row[column] = x;
        if (column + 1 < columns)
            row[column + 1] = y;
    }
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
    /* Of a first row that is a multiple of 8, from the lane's place in a step at row 0. */
    __device__ __forceinline__ lane_address(uint32_t tile_and_place, int row) {
        at = tile_and_place + row * (wide * 16);
        at = opaque(at);
    }
    __device__ __forceinline__ uint32_t at_step(int rows, int chunk) const {
        return (at ^ (uint32_t)(chunk % group << 4)) + chunk / group * group_bytes + rows * (wide * 16);
    }
    /* The same lane `chunk` chunks on, even, where later steps do not touch the bits of it. */
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
