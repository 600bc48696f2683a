/* tile.cuh: tiles in shared memory, from and to global memory, for kernels that define THREADS before
 * including it.
 *
 * A tile is rows of `chunks` 16-byte chunks. The chunks of a row are permuted by a number that depends on the row, so
 * that eight rows of the same column lie in different banks: matrix loads, also transposed, and 4-byte stores of
 * accumulators have no bank conflicts. */
#ifndef FDM_TILE_CUH
#define FDM_TILE_CUH

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/opaque.cuh"
#include "gpu/convert.cuh"
#include "gpu/numbers.h"
#include "gpu/problem_constants.h"

#define ELEMENT_BYTES  (DTYPE == GPU_FLOAT32 ? 4 : 2)
#define CHUNK_ELEMENTS (16 / ELEMENT_BYTES)

template <int chunks> __device__ __forceinline__ int swizzle_of(int row) {
    return chunks % 8 == 0 ? row & 7 : chunks % 4 == 0 ? (row >> 1) & 3 : (row >> 2) & 1;
}
template <int chunks> __device__ __forceinline__ int chunk_offset(int row, int chunk) {
    return (row * chunks + (chunk ^ swizzle_of<chunks>(row))) * 16;
}
/* A tile in panels is a sequence of tiles of 8 or 4 columns of chunks and `panel_rows` rows each, as TMA writes them
 * with its swizzle of 128 or 64 bytes. With panel_rows 0 a tile has no panels. */
template <int chunks> constexpr int panel_chunks = chunks % 8 ? 4 : 8;
template <int chunks, int panel_rows> constexpr int row_chunks = panel_rows ? panel_chunks<chunks> : chunks;
template <int chunks, int panel_rows> __device__ __forceinline__ int chunk_offset_in(int row, int chunk) {
    constexpr int wide = row_chunks<chunks, panel_rows>;
    return chunk / wide * (panel_rows * wide * 16) + chunk_offset<wide>(row, chunk % wide);
}

/* Sets rows of a tile to 0 whose lse, a word each from address `lse` on, is that of a row without keys. */
template <int chunks, int tile_rows, int panel_rows = 0>
__device__ __forceinline__ void clear_empty_rows(uint32_t tile, uint32_t lse) {
#pragma unroll 1
    for (int n = threadIdx.x; n < tile_rows * chunks; n += THREADS)
        if (__uint_as_float(ld_shared_4(lse + n / chunks * 4)) == -MINUS_INF)
            st_shared_16(tile + chunk_offset_in<chunks, panel_rows>(n / chunks, n % chunks), 0, 0, 0, 0);
}

/* Copies a chunk from global memory: `count` elements, then zeros. */
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
/* Copies rows 0 .. tile_rows - 1 from global memory. Elements past `rows` or `columns` become 0. */
template <int chunks, int tile_rows, int panel_rows = 0>
__device__ __forceinline__ void load_tile(uint32_t tile, const char *from, int64_t row_bytes, int rows, int columns) {
    constexpr int copies = (tile_rows * chunks + THREADS - 1) / THREADS, step = THREADS / chunks;
    int thread = threadIdx.x;
    thread = opaque(thread); /* offsets are computed here, not kept in registers between calls */
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
/* Stores the first `count` of eight elements to global memory; with `aligned` the address is a multiple of 16 bytes. */
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
/* Stores a chunk to global memory. */
__device__ __forceinline__ void store_chunk(char *at, uint32_t from, int count) {
    uint32_t word[4];
    ld_shared_16(word, from);
    store_words(at, word, count);
}

/* Stores `rows` rows of `columns` elements to global memory, by `threads` threads, of which this is `thread`. */
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
#else
/* Stores two neighbours of a row of `columns` elements in global memory; `column` is even. */
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

#endif
