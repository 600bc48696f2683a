/* unused_rows.cuh: the results of rows that belong to no sequence. In packed tensors these are the rows before the
 * first sequence, after the last, and beyond max_seqlen; with seqused_q also the rows that it leaves out. */
#ifndef FDM_UNUSED_ROWS_CUH
#define FDM_UNUSED_ROWS_CUH

#include "gpu/forward_params.h"
#include "gpu/packed.cuh"

/* The rows first <= row < last. */
struct row_range {
    int first, last;
};
/* The rows from the end of a sequence to the beginning of the next. */
__device__ __forceinline__ struct row_range unused_after(const int32_t *cu_seqlens, int batch, int batches, int total,
                                                         int longest) {
    const struct packed own = find_packed(cu_seqlens, batch, total, longest);
    return {own.begin + own.length, batch + 1 < batches ? min(max(cu_seqlens[batch + 1], 0), total) : total};
}
__device__ __forceinline__ struct row_range unused_before_all(const int32_t *cu_seqlens, int total) {
    return {0, min(max(cu_seqlens[0], 0), total)};
}

/* Whether a row belongs to no sequence. `used` holds the number of rows of each sequence that count. */
__device__ __forceinline__ bool is_unused(const int32_t *cu_seqlens, int batches, int row, int total, int longest,
                                          const struct gpu_indices &used = {}) {
    const int batch = sequence_behind(cu_seqlens, batches, row);
    if (batch == batches)
        return true;
    struct packed own = find_packed(cu_seqlens, batch, total, longest);
    if (SEQUSED)
        own.length = used_of(used, batch, own.length);
    return row < own.begin || row >= own.begin + own.length;
}

/* Sets columns of rows of one head to 0, by `threads` threads, of which this is `thread`. */
__device__ __forceinline__ void clear_unused_rows(const struct gpu_matrix &m, struct row_range rows, int head,
                                                  int columns, int thread, int threads) {
    constexpr int element_bytes = DTYPE == GPU_FLOAT32 ? 4 : 2;
    const bool wide = ALIGNED && columns * element_bytes % 16 == 0;
    const int step = wide ? 16 : element_bytes, pieces = columns * element_bytes / step;
    char *const data = m.data + head * m.head * element_bytes;
#pragma unroll 1
    for (int64_t n = thread; n < (int64_t)(rows.last - rows.first) * pieces; n += threads) {
        char *to = data + (rows.first + n / pieces) * m.row * element_bytes + n % pieces * step;
        if (wide)
            *(uint4 *)to = make_uint4(0, 0, 0, 0);
        else if (element_bytes == 4)
            *(uint32_t *)to = 0;
        else
            *(uint16_t *)to = 0;
    }
}

/* Writes the results of unused rows of a forward. batch is 0 for packed tensors. */
__device__ __forceinline__ void clear_unused_results(const struct gpu_forward_params &a, struct row_range rows,
                                                     int batch, int head, int thread, int threads) {
    struct gpu_matrix out = a.out;
    if (!VARLEN)
        out.data += batch * out.batch * (DTYPE == GPU_FLOAT32 ? 4 : 2);
    clear_unused_rows(out, rows, head, a.head_dim_v, thread, threads);
    const int64_t lse = head * a.lse.head + (VARLEN ? 0 : batch * a.lse.batch);
    const int64_t lse_low = head * a.lse_low.head + (VARLEN ? 0 : batch * a.lse_low.batch);
#pragma unroll 1
    for (int64_t row = rows.first + thread; row < rows.last; row += threads) {
        if (a.lse.data)
            a.lse.data[lse + row * a.lse.row] = __int_as_float(0x7f800000);
        if (a.lse_low.data)
            a.lse_low.data[lse_low + row * a.lse_low.row] = 0;
    }
}
/* The same around a sequence, for a query head. Some threads of one block call it for each head and sequence. */
__device__ __forceinline__ void clear_unused_of_forward(const struct gpu_forward_params &a, int batch, int head,
                                                        int thread, int threads) {
    if (!VARLEN && !SEQUSED)
        return;
    struct row_range rows = {a.seqlen_q, a.seqlen_q};
    if (VARLEN)
        rows = unused_after(a.cu_seqlens_q, batch, a.batch, a.total_q, a.seqlen_q);
    if (VARLEN && batch == 0)
        clear_unused_results(a, unused_before_all(a.cu_seqlens_q, a.total_q), 0, head, thread, threads);
    if (SEQUSED) { /* also the sequence's rows that do not count */
        const struct sequence own = find_sequence_q(a, batch);
        rows.first = own.q_begin + own.seqlen_q;
    }
    clear_unused_results(a, rows, batch, head, thread, threads);
}

/* The same for all heads and sequences, distributed over the blocks of a grid all of which run it. */
__device__ __forceinline__ void clear_unused_of_grid(const struct gpu_forward_params &a, int heads, int thread,
                                                     int threads) {
#pragma unroll 1
    for (int n = blockIdx.x; (VARLEN || SEQUSED) && n < a.batch * heads; n += gridDim.x)
        clear_unused_of_forward(a, n / heads, n % heads, thread, threads);
}

#endif
