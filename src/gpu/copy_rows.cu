/* copy_rows.cu: copies matrices of 16-bit elements to other strides, for kernels that need rows at multiples of 32
 * bytes.
 *
 * Idea: TMA brings a row that begins in the middle of a memory sector (32 bytes) at half the rate, and takes none that
 * begins in the middle of 16 bytes. Keys and values are read once for each block of query rows, so that one copy of
 * them costs less than the slow reads where these are many. Bound by memory: each element is read and written once.
 *
 * A block copies COPY_ROWS_ROWS rows of one head. A row belongs to 8, 16 or 32 neighbouring threads, 16 bytes each, so
 * that no index is divided, which would take longer than the copy; a thread has chunks of two or four rows in
 * flight. Blocks of all heads of the same rows follow each other, since they lie side by side; sectors are written
 * whole. */
#include "cuda/ptx/types.cuh"
#include "gpu/copy_rows.h"

/* Loads eight elements of a row from `at` on, by reads of `bytes`. The row has `left` elements there; the others become
 * 0. There is no branch, so that the reads of several chunks are in flight together. */
template <int bytes> __device__ __forceinline__ uint4 load_chunk(const uint16_t *at, int left) {
    uint32_t word[4];
    if constexpr (bytes == 16) {
        const uint4 x = *(const uint4 *)(at + min(0, left - 8));
        return left > 0 ? x : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
        if constexpr (bytes == 4) {
            const uint32_t x = *(const uint32_t *)(at + min(n, left - 2));
            word[n / 2] = n < left ? x : 0;
        } else {
            const uint32_t low = at[min(n, left - 1)], high = at[min(n + 1, left - 1)];
            word[n / 2] = (n < left ? low : 0) | (n + 1 < left ? high << 16 : 0);
        }
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

template <int bytes> __device__ __forceinline__ void store_chunk(uint16_t *at, int left, uint4 x) {
    if constexpr (bytes == 16) {
        *(uint4 *)at = x;
        return;
    }
    const uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
        if (bytes == 4 && n < left)
            *(uint32_t *)(at + n) = word[n / 2];
        if (bytes == 2 && n < left)
            at[n] = (uint16_t)word[n / 2];
        if (bytes == 2 && n + 1 < left)
            at[n + 1] = (uint16_t)(word[n / 2] >> 16);
    }
}

template <int from_bytes, int to_bytes>
__device__ __forceinline__ void copy_block(const struct copy_rows_matrix &m, uint32_t block) {
    constexpr int IN_FLIGHT = from_bytes == 16 ? 4 : from_bytes == 4 ? 2 : 1;
    const uint32_t heads = (uint32_t)m.heads, row_blocks = (uint32_t)m.row_blocks;
    const uint32_t head = block % heads, batch = block / heads / row_blocks;
    const int first_row = (int)(block / heads % row_blocks) * COPY_ROWS_ROWS;
    const int last = min(COPY_ROWS_ROWS, m.rows - first_row) - 1;
    const int lanes = m.to_columns <= 64 ? 8 : m.to_columns <= 128 ? 16 : 32, step = COPY_ROWS_THREADS / lanes;
    const uint16_t *from = (const uint16_t *)m.from.data + batch * m.from.batch + head * m.from.head;
    uint16_t *to = (uint16_t *)m.to.data + batch * m.to.batch + head * m.to.head;
    from += first_row * m.from.row;
    to += first_row * m.to.row;
    for (int column = threadIdx.x % lanes * 8; column < m.to_columns; column += lanes * 8)
        for (int row = threadIdx.x / lanes; row <= last; row += IN_FLIGHT * step) {
            uint4 held[IN_FLIGHT];
#pragma unroll
            for (int n = 0; n < IN_FLIGHT; n++)
                held[n] =
                    load_chunk<from_bytes>(from + min(row + n * step, last) * m.from.row + column, m.columns - column);
#pragma unroll
            for (int n = 0; n < IN_FLIGHT; n++)
                if (row + n * step <= last)
                    store_chunk<to_bytes>(to + (row + n * step) * m.to.row + column, m.to_columns - column, held[n]);
        }
}

__device__ __forceinline__ void copy_matrix(const struct copy_rows_matrix &m, uint32_t block) {
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
            copy_matrix(a.matrices[n], (uint32_t)(block - a.matrices[n].first_block));
}
