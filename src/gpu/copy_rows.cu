/* copy_rows.cu: matrices of 16-bit elements to other strides, for kernels that want rows at multiples of 32 bytes.
 *
 * Idea: TMA brings a row that begins in the middle of a memory sector (32 bytes) at half the rate, and takes none that
 * begins in the middle of 16 bytes. Keys and values are read once for each block of query rows, so that one copy of
 * them costs less than the slow reads where these are many. Bound by memory: each element is read and written once.
 *
 * A block copies COPY_ROWS_ROWS rows of one head, a thread 16 bytes at a time, two or four of them in flight. Blocks of
 * all heads of the same rows follow each other, since they lie side by side; sectors are written whole. */
#include "cuda/ptx/types.cuh"
#include "gpu/copy_rows.h"

/* Elements column .. + 7 of a row, by reads of `bytes`; 0 past its end. Nothing branches, so that the reads of several
 * chunks are under way together. */
template <int bytes>
__device__ __forceinline__ uint4 load_chunk(const struct copy_rows_matrix &m, const uint16_t *row, int column) {
    uint32_t word[4];
    if constexpr (bytes == 16) {
        const uint4 x = *(const uint4 *)(row + min(column, m.columns - 8));
        return column < m.columns ? x : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int at = column + 2 * n;
        if constexpr (bytes == 4) {
            const uint32_t x = *(const uint32_t *)(row + min(at, m.columns - 2));
            word[n] = at < m.columns ? x : 0;
        } else {
            const uint32_t low = row[min(at, m.columns - 1)], high = row[min(at + 1, m.columns - 1)];
            word[n] = (at < m.columns ? low : 0) | (at + 1 < m.columns ? high << 16 : 0);
        }
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

template <int bytes>
__device__ __forceinline__ void store_chunk(const struct copy_rows_matrix &m, uint16_t *row, int column, uint4 x) {
    if constexpr (bytes == 16) {
        *(uint4 *)(row + column) = x;
        return;
    }
    const uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int at = column + 2 * n;
        if (bytes == 4 && at < m.to_columns)
            *(uint32_t *)(row + at) = word[n];
        if (bytes == 2 && at < m.to_columns)
            row[at] = (uint16_t)word[n];
        if (bytes == 2 && at + 1 < m.to_columns)
            row[at + 1] = (uint16_t)(word[n] >> 16);
    }
}

template <int from_bytes, int to_bytes>
__device__ __forceinline__ void copy_block(const struct copy_rows_matrix &m, int64_t block) {
    const int64_t head = block % m.heads, batch = block / m.heads / m.row_blocks;
    const int64_t first_row = block / m.heads % m.row_blocks * COPY_ROWS_ROWS;
    const uint16_t *from = (const uint16_t *)m.from.data + batch * m.from.batch + head * m.from.head;
    uint16_t *to = (uint16_t *)m.to.data + batch * m.to.batch + head * m.to.head;
    const int rows = (int)min((int64_t)COPY_ROWS_ROWS, m.rows - first_row), chunks = (m.to_columns + 7) / 8;
    constexpr int IN_FLIGHT = from_bytes == 16 ? 4 : 2;
    const int last = rows * chunks - 1;
    for (int begin = threadIdx.x; begin <= last; begin += IN_FLIGHT * COPY_ROWS_THREADS) {
        uint4 held[IN_FLIGHT];
#pragma unroll
        for (int n = 0; n < IN_FLIGHT; n++) {
            const int at = min(begin + n * COPY_ROWS_THREADS, last);
            held[n] = load_chunk<from_bytes>(m, from + (first_row + at / chunks) * m.from.row, at % chunks * 8);
        }
#pragma unroll
        for (int n = 0; n < IN_FLIGHT; n++) {
            const int at = begin + n * COPY_ROWS_THREADS;
            if (at <= last)
                store_chunk<to_bytes>(m, to + (first_row + at / chunks) * m.to.row, at % chunks * 8, held[n]);
        }
    }
}

__device__ __forceinline__ void copy_matrix(const struct copy_rows_matrix &m, int64_t block) {
    if (m.to_bytes == 16 && m.from_bytes == 16)
        copy_block<16, 16>(m, block);
    else if (m.to_bytes == 16 && m.from_bytes == 4)
        copy_block<4, 16>(m, block);
    else if (m.to_bytes == 16)
        copy_block<2, 16>(m, block);
    else if (m.from_bytes == 16 && m.to_bytes == 4)
        copy_block<16, 4>(m, block);
    else
        copy_block<2, 2>(m, block);
}

extern "C" __global__ void __launch_bounds__(COPY_ROWS_THREADS, 4)
    copy_rows(const __grid_constant__ struct copy_rows_params a) {
    const int64_t block = blockIdx.x;
#pragma unroll
    for (int n = 0; n < COPY_ROWS_MATRICES; n++)
        if (block >= a.matrices[n].first_block && block < a.matrices[n].past_block)
            copy_matrix(a.matrices[n], block - a.matrices[n].first_block);
}
