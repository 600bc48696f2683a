/* copy_rows.cu: matrices of 16-bit elements to other strides, for kernels that want rows at multiples of 32 bytes.
 *
 * Idea: TMA brings a row that begins in the middle of a memory sector (32 bytes) at half the rate, and takes none that
 * begins in the middle of 16 bytes. Keys and values are read once for each block of query rows, so that one copy of
 * them costs less than the slow reads where these are many. Bound by memory: each element is read and written once.
 *
 * A block copies COPY_ROWS_ROWS rows of one head, a thread 16 bytes at a time, four of them in flight. Blocks of all
 * heads of the same rows follow each other, since they lie side by side; sectors are written whole. */
#include "cuda/ptx/types.cuh"
#include "gpu/copy_rows.h"

enum { IN_FLIGHT = 4 };

/* Elements column .. + 7 of a row; 0 past its end. */
__device__ __forceinline__ uint4 load_chunk(const struct copy_rows_matrix &m, const uint16_t *row, int column) {
    if (m.from_aligned && column + 8 <= m.columns)
        return *(const uint4 *)(row + column);
    uint32_t word[4];
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int at = column + 2 * n;
        const uint32_t low = at < m.columns ? row[at] : 0, high = at + 1 < m.columns ? row[at + 1] : 0;
        word[n] = low | high << 16;
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

__device__ __forceinline__ void store_chunk(const struct copy_rows_matrix &m, uint16_t *row, int column, uint4 x) {
    if (m.to_aligned && column + 8 <= m.to_columns) {
        *(uint4 *)(row + column) = x;
        return;
    }
    const uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int n = 0; n < 8; n++)
        if (column + n < m.to_columns)
            row[column + n] = (uint16_t)(word[n / 2] >> (n % 2 * 16));
}

__device__ __forceinline__ void copy_block(const struct copy_rows_matrix &m, int64_t block) {
    const int64_t head = block % m.heads, batch = block / m.heads / m.row_blocks;
    const int64_t first_row = block / m.heads % m.row_blocks * COPY_ROWS_ROWS;
    const uint16_t *from = (const uint16_t *)m.from.data + batch * m.from.batch + head * m.from.head;
    uint16_t *to = (uint16_t *)m.to.data + batch * m.to.batch + head * m.to.head;
    const int rows = (int)min((int64_t)COPY_ROWS_ROWS, m.rows - first_row), chunks = (m.to_columns + 7) / 8;
    for (int begin = threadIdx.x; begin < rows * chunks; begin += IN_FLIGHT * COPY_ROWS_THREADS) {
        uint4 held[IN_FLIGHT];
#pragma unroll
        for (int n = 0; n < IN_FLIGHT; n++) {
            const int at = begin + n * COPY_ROWS_THREADS;
            if (at < rows * chunks)
                held[n] = load_chunk(m, from + (first_row + at / chunks) * m.from.row, at % chunks * 8);
        }
#pragma unroll
        for (int n = 0; n < IN_FLIGHT; n++) {
            const int at = begin + n * COPY_ROWS_THREADS;
            if (at < rows * chunks)
                store_chunk(m, to + (first_row + at / chunks) * m.to.row, at % chunks * 8, held[n]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(COPY_ROWS_THREADS)
    copy_rows(const __grid_constant__ struct copy_rows_params a) {
    const int64_t block = blockIdx.x;
#pragma unroll
    for (int n = 0; n < COPY_ROWS_MATRICES; n++)
        if (block >= a.matrices[n].first_block && block < a.matrices[n].past_block)
            copy_block(a.matrices[n], block - a.matrices[n].first_block);
}
