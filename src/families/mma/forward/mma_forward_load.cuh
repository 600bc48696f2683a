/* mma_forward_load.cuh: tiles of Q, K, V, masks and biases from global to shared memory, for mma_forward.cu, which
 * defines its constants before including this. */
#ifndef FDM_MMA_FORWARD_LOAD_CUH
#define FDM_MMA_FORWARD_LOAD_CUH

#include "families/mma/forward/mma_forward_pages.cuh"
#include "families/mma/mma_tile.cuh"

/* Bytes from row to row of K and V. Those of an aligned problem are less than 2^31, which saves registers. */
#if ALIGNED
typedef int row_distance;
#else
typedef int64_t row_distance;
#endif

/* Tiles of `tile_rows` rows of one matrix. Where the block's threads cover whole rows, a thread's chunks lie a constant
 * stride apart in both memories, and what it needs is made once. */
template <int chunks, int tile_rows> struct tile_source {
    static constexpr bool regular =
        THREADS % chunks == 0 && THREADS / chunks % 8 == 0 && tile_rows * chunks % THREADS == 0 && ALIGNED;
    static constexpr int row_step = THREADS / chunks;
    const char *data; /* of the matrix; where regular, of the thread's first chunk */
    row_distance row_bytes;
    int columns;
    int row, bytes;  /* the thread's first row, and how much of its chunk is inside the row */
    uint32_t offset; /* of the thread's first chunk in a tile */

    __device__ __forceinline__ tile_source(const char *first, int64_t row_stride, int num_columns) {
        data = first;
        row_bytes = (row_distance)(row_stride * 2);
        columns = num_columns;
        if constexpr (regular) {
            const int chunk = threadIdx.x % chunks;
            row = threadIdx.x / chunks;
            bytes = min(max(columns - chunk * 8, 0), 8) * 2;
            data += row_offset(row) + (bytes ? chunk * 16 : 0);
            offset = chunk_offset<chunks>(row, chunk);
        }
    }
    __device__ __forceinline__ int64_t row_offset(int rows) const { return (int64_t)rows * row_bytes; }
    __device__ __forceinline__ int count_in(int chunk) const { return min(max(columns - chunk * 8, 0), 8); }

    /* Copies rows index[0] .. index[rows - 1]; the rest of the tile becomes 0. */
    __device__ __forceinline__ void load_listed(uint32_t tile, const int *index, int rows) const {
        if constexpr (regular) {
#pragma unroll
            for (int n = 0; n < tile_rows / row_step; n++) {
                const bool inside = row + n * row_step < rows;
                const int from = inside ? index[row + n * row_step] - row : 0;
                cp_async_16_fill(tile + offset + n * THREADS * 16, data + row_offset(from), inside ? bytes : 0);
            }
        } else {
#pragma unroll 1
            for (int n = threadIdx.x; n < tile_rows * chunks; n += THREADS) {
                const int r = n / chunks, chunk = n % chunks, count = r < rows ? count_in(chunk) : 0;
                const char *at = count ? data + row_offset(index[r]) + chunk * 16 : data;
                load_chunk(tile + chunk_offset<chunks>(r, chunk), at, count);
            }
        }
    }
    /* Copies the rows of tile t of a KV head from a cache, or from the new rows; keys without a place become 0. */
    __device__ __forceinline__ void load_paged(uint32_t tile, const struct tile_pages &at, int t,
                                               const struct gpu_cache &c, const struct gpu_matrix &pages,
                                               const struct gpu_matrix &added, int batch, int head) const {
        if constexpr (regular) {
            const int chunk = threadIdx.x % chunks;
#pragma unroll 2
            for (int n = 0; n < tile_rows / row_step; n++) {
                const char *from = row_address<2>(c, at.find(t, row + n * row_step), pages, added, batch, head);
                cp_async_16_fill(tile + offset + n * THREADS * 16, from && bytes ? from + chunk * 16 : pages.data,
                                 from ? bytes : 0);
            }
        } else {
#pragma unroll 1
            for (int n = threadIdx.x; n < tile_rows * chunks; n += THREADS) {
                const int r = n / chunks, chunk = n % chunks;
                const char *from = row_address<2>(c, at.find(t, r), pages, added, batch, head);
                const int count = from ? count_in(chunk) : 0;
                load_chunk(tile + chunk_offset<chunks>(r, chunk), count ? from + chunk * 16 : pages.data, count);
            }
        }
    }
    /* Copies rows from first_row on, of which `rows` exist. Elements past the end of a row or column become 0. */
    __device__ __forceinline__ void load(uint32_t tile, int first_row, int rows) const {
        const char *from = data + row_offset(first_row);
        if constexpr (regular) {
            const uint32_t to = tile + offset;
            if (rows >= tile_rows && columns == chunks * 8) {
#pragma unroll
                for (int n = 0; n < tile_rows / row_step; n++)
                    cp_async_16(to + n * THREADS * 16, from + row_offset(n * row_step));
            } else {
#pragma unroll 1
                for (int n = 0; n < tile_rows / row_step; n++) {
                    const bool inside = row + n * row_step < rows;
                    cp_async_16_fill(to + n * THREADS * 16, inside ? from + row_offset(n * row_step) : from,
                                     inside ? bytes : 0);
                }
            }
        } else {
#pragma unroll 1
            for (int n = threadIdx.x; n < tile_rows * chunks; n += THREADS) {
                const int r = n / chunks, chunk = n % chunks, count = r < rows ? count_in(chunk) : 0;
                const char *at = count ? from + row_offset(r) + chunk * 16 : from;
                load_chunk(tile + chunk_offset<chunks>(r, chunk), at, count);
            }
        }
    }
};

/* One block's place in the problem. */
struct place : sequence {
    int head, first_row;
    int first_key, last_key;   /* keys that some row sees, before mask and intervals */
    int first_full, last_full; /* keys that every row sees */
    int padding, list;         /* CACHE: keys before the first; the row of the cache */
};

/* The keys of one tile: with KEY_LIST entries of the list, else consecutive keys. */
struct tile_keys {
    int first;        /* key of column 0 where there is no list */
    int count;        /* columns that are keys */
    bool partial;     /* some row does not see some column; KEY_LIST: see is_partial() */
    const int *index; /* KEY_LIST: of column 0 */
    const uint32_t *rows;
    const float *bias;
    int turn;     /* PAGED: the tile's number, */
    bool missing; /* and whether some page is none */
};

/* Mask and bias of the block's head. STAGED: each warp copies its own rows of a tile to shared memory. */
struct score_source {
    const char *mask, *bias;
    uint32_t mask_tile, bias_tile;

    __device__ __forceinline__ score_source(const struct gpu_forward_params &a, const struct place &at, uint32_t shared)
        : mask(0), bias(0) {
        mask_tile = shared + MMA_FORWARD_LIST_OFFSET + (TILE_LIST ? MMA_FORWARD_TILE_BYTES : 0);
        bias_tile = mask_tile + (MASK ? BLOCK_M * BLOCK_N : 0);
        if (MASK)
            mask = mask_of(a, at.batch, at.head);
        if (BIAS)
            bias = a.bias.data + (at.batch * a.bias.batch + at.head / a.bias.group * a.bias.head) * BIAS_BYTES;
    }

    /* Copies the warp's rows of a tile; elements past the ends become 0. */
    template <int element_bytes>
    static __device__ __forceinline__ void copy(uint32_t tile, const char *data, int64_t row_bytes,
                                                const struct place &at, int warp_row, const struct tile_keys &keys) {
        constexpr int chunks = BLOCK_N * element_bytes / 16;
        static_assert(!STAGED || chunks % 2 == 0, "the swizzle pairs chunks");
        const int rows = at.seqlen_q - at.first_row;
        if (32 % chunks == 0 && warp_row + ROW_TILES * 16 <= rows && keys.count >= BLOCK_N) {
            constexpr int step = 32 / chunks; /* a lane's chunks lie in one column */
            const int row = warp_row + threadIdx.x % 32 / chunks, chunk = threadIdx.x % chunks;
            const char *from =
                data + (at.first_row + row) * row_bytes + (int64_t)keys.first * element_bytes + chunk * 16;
#pragma unroll
            for (int n = 0; n < ROW_TILES * 16 / step; n++, from += step * row_bytes)
                cp_async_16(tile + chunk_offset<chunks>(row + n * step, chunk), from);
            return;
        }
#pragma unroll 1
        for (int n = threadIdx.x % 32; n < ROW_TILES * 16 * chunks; n += 32) {
            const int row = warp_row + n / chunks, chunk = n % chunks;
            const int bytes = row < rows ? min(max(keys.count * element_bytes - chunk * 16, 0), 16) : 0;
            const char *from =
                data + (int64_t)(at.first_row + row) * row_bytes + (int64_t)keys.first * element_bytes + chunk * 16;
            cp_async_16_fill(tile + chunk_offset<chunks>(row, chunk), bytes ? from : data, bytes);
        }
    }
    __device__ __forceinline__ void stage(const struct gpu_forward_params &a, const struct place &at, int warp_row,
                                          const struct tile_keys &keys) const {
        if (MASK)
            copy<1>(mask_tile, mask, a.mask.row, at, warp_row, keys);
        if (BIAS)
            copy<BIAS_BYTES>(bias_tile, bias, a.bias.row * BIAS_BYTES, at, warp_row, keys);
    }

    /* Two neighbours of a staged row: columns 8 n + 2 (lane % 4), + 1. */
    __device__ __forceinline__ void staged_bias(float (&b)[2], int row, int n) const {
        const int pair = threadIdx.x % 4;
        if (BIAS == GPU_BIAS_FLOAT32) {
            uint32_t low, high;
            ld_shared_8(low, high, bias_tile + chunk_offset<BLOCK_N / 4>(row, n * 2 + pair / 2) + pair % 2 * 8);
            b[0] = __uint_as_float(low);
            b[1] = __uint_as_float(high);
        } else {
            const uint32_t both = ld_shared_4(bias_tile + chunk_offset<BLOCK_N / 8>(row, n) + pair * 4);
            b[0] = unpack((uint16_t)both);
            b[1] = unpack((uint16_t)(both >> 16));
        }
    }
    __device__ __forceinline__ uint32_t staged_mask(int row, int n) const {
        return ld_shared_2(mask_tile + chunk_offset<BLOCK_N / 16>(row, n / 2) + n % 2 * 8 + threadIdx.x % 4 * 2);
    }
};

#endif
