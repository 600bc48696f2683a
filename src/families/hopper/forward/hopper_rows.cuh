/* hopper_rows.cuh: the end of a row in the Hopper forwards: its log-sum-exp, and its output, which passes through the
 * shared memory that held its Q. The kernel that includes it defines BLOCK_M, HEAD_DIM_V, BIAS and VARLEN.
 *
 * A warp has 16 rows, and a thread two of them, 8 apart: half 0 and half 1. local_row is the thread's row of half 0,
 * counted in the block tile. */
#ifndef FDM_HOPPER_ROWS_CUH
#define FDM_HOPPER_ROWS_CUH

#include "cuda/ptx/mma.cuh"
#include "families/hopper/forward/hopper_softmax.cuh"
#include "families/hopper/forward/hopper_work.cuh"
#include "gpu/finite.cuh"
#include "gpu/quad.cuh"
#include "gpu/redo.cuh"

/* The sinks of the thread's rows. They are read while the first products are computed, so that nothing waits for them.
 * A sink that joins is the row's first maximum, with a sum of 1, and the row then ends as a row without sinks. In
 * float16 no sink joins: P relative to a large sink would have few digits. */
struct row_sinks {
    static constexpr bool may_join = SINK && DTYPE == GPU_BFLOAT16;
    static constexpr uint32_t joined = 0xffffffff;
    uint32_t of[2]; /* what read_sink() gave, or `joined` */

    __device__ __forceinline__ void read(const struct gpu_forward_params &a, const struct item_facts &f,
                                         int local_row) {
        if (!SINK)
            return;
        of[0] = read_sink(a.sink, f.head * PACKED_HEADS + (f.first_row + local_row) % PACKED_HEADS);
        of[1] = of[0];
        if constexpr (PACKED_HEADS > 1 && 8 % PACKED_HEADS)
            of[1] = read_sink(a.sink, f.head * PACKED_HEADS + (f.first_row + local_row + 8) % PACKED_HEADS);
    }
    /* Makes sinks the first maxima of their rows. It is called before the first scores. */
    __device__ __forceinline__ void join(const struct gpu_forward_params &a, struct softmax_rows &rows) {
        if (!may_join || a.lse_without_sink || a.scale > 1e37f) /* a larger scale is beyond __fdividef() */
            return;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float sink = sink_logit(a.sink, of[half]), max = MAXIMA_BARE ? __fdividef(sink, a.scale) : sink;
            if (fabsf(max) < __int_as_float(0x7f800000)) {
                of[half] = joined;
                rows.max[half] = max;
                rows.sum[half] = threadIdx.x % 4 == 0 ? 1.0f : 0.0f;
            } else if (of[half] == joined) {
                of[half] = joined >> 1; /* a NaN stays one without its top bit */
            }
        }
    }
};

/* Writes the log-sum-exp of the thread's rows, and gives the reciprocals of their sums in `inverse`. */
__device__ __forceinline__ void finish_rows(const struct gpu_forward_params &a, const struct item_facts &f,
                                            const struct softmax_rows &rows, const struct row_sinks &sinks,
                                            int local_row, float (&inverse)[2]) {
    const float unit = exponent_unit(a);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = rows.sum[half];
        sum = quad_sum(sum);
        const int row = f.first_row + local_row + 8 * half, batch = VARLEN ? 0 : f.batch;
        const int head = f.head * PACKED_HEADS + row % PACKED_HEADS, i = f.q_begin + row / PACKED_HEADS;
        const bool writes = threadIdx.x % 4 == 0 && row < f.seqlen_q * PACKED_HEADS;
        const auto most = [&] { return MAXIMA_BARE ? rows.max[half] * unit * LN_2 : rows.max[half]; };
        const auto log_of = [&](float x) { return lg2_approx(x) * LN_2; };
        if (row_sinks::may_join && sinks.of[half] == row_sinks::joined)
            inverse[half] = end_plain_softmax(a, writes, batch, head, i, sum, most, log_of);
        else
            inverse[half] = end_softmax(a, writes, batch, head, i, sum, most, log_of, sinks.of[half]);
    }
}

/* Stores the output of the warp's 16 rows through `tile`, which held their Q. Where `computed` is false no row sees a
 * key, and all become 0. redo: returns a bit for each row that holds NaN. */
template <bool redo = false>
__device__ __forceinline__ uint32_t store_rows(const struct gpu_forward_params &a, const struct item_facts &f,
                                               const float (&o)[HEAD_DIM_V / 2], const float (&inverse)[2],
                                               bool computed, uint32_t tile, int local_row) {
    const int lane = threadIdx.x % 32, warp_row = local_row - lane / 4;
    const int row = warp_row + lane % 16; /* whose chunks the lane addresses: a half warp has one of each two chunks */
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 8; i += 2) {
        uint32_t word[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int at = 4 * i + 2 * e;
            word[e] = computed ? pack(o[at] * inverse[e % 2], o[at + 1] * inverse[e % 2]) : 0;
        }
        stmatrix_x4(panels<BLOCK_M>{tile}.panel(i / 8).panel_chunk(row, i % 8 + lane / 16), word);
    }
    __syncwarp();
    constexpr int chunks = HEAD_DIM_V / 8;
    const auto load = [&](uint32_t(&word)[4], int r, int chunk) {
        ld_shared_16(word, panels<BLOCK_M>{tile}.panel(chunk / 8).rows(warp_row + r).at + ((chunk % 8 ^ (r & 7)) << 4));
    };
    uint32_t spoiled = 0;
    if (redo && out_over_q(a)) {
#pragma unroll 1
        for (int n = lane; n < 16 * chunks; n += 32) {
            uint32_t word[4];
            load(word, n / chunks, n % chunks);
            spoiled |= nan_bit(word, n / chunks);
        }
        spoiled = redo_or(spoiled);
    }
    constexpr bool packed = PACKED_HEADS > 1; /* then `to` is the first row of the sequence */
    char *to = a.out.data + ((VARLEN ? 0 : f.batch) * a.out.batch + f.head * PACKED_HEADS * a.out.head +
                             (int64_t)(packed ? f.q_begin : f.q_begin + f.first_row + warp_row) * a.out.row) *
                                2;
    const int count = min(f.seqlen_q * PACKED_HEADS - f.first_row - warp_row, 16);
#pragma unroll 4
    for (int n = lane; n < 16 * chunks; n += 32) {
        const int r = n / chunks, chunk = n % chunks, columns = a.head_dim_v - chunk * 8;
        uint32_t word[4];
        load(word, r, chunk);
        const int at_row = f.first_row + warp_row + r;
        const int64_t offset =
            packed ? at_row / PACKED_HEADS * a.out.row + at_row % PACKED_HEADS * a.out.head : r * a.out.row;
        char *at = to + offset * 2 + chunk * 16;
        if (redo)
            spoiled |= nan_bit(word, r);
        const bool stored = r < count && !(redo && spoiled >> r & 1);
        if (stored && columns >= 8)
            *(uint4 *)at = make_uint4(word[0], word[1], word[2], word[3]);
        else if (stored)
#pragma unroll
            for (int e = 0; e < 8; e++)
                if (e < columns)
                    ((uint16_t *)at)[e] = (uint16_t)(word[e / 2] >> (e % 2 * 16));
    }
    return redo ? redo_or(spoiled) : 0;
}

/* The index of a row's partial result. The item is of one split, and f.batch counts batches and splits. */
__device__ __forceinline__ int64_t part_slot(const struct gpu_forward_params &a, const struct item_facts &f, int head,
                                             int row) {
    const int splits = a.num_splits;
    return (((int64_t)(f.batch % splits) * a.batch + f.batch / splits) * (a.heads * PACKED_HEADS) + head) * f.seqlen_q +
           row;
}
/* Stores the partial results of an item of one split: the rows' maxima and sums, and the sums of P V relative to them.
 * redo: returns a bit for each row whose sums are NaN. */
template <bool redo = false>
__device__ __forceinline__ uint32_t store_part(const struct gpu_forward_params &a, const struct item_facts &f,
                                               const struct softmax_rows &rows, const float (&o)[HEAD_DIM_V / 2],
                                               bool computed, int local_row) {
    bool bad[2] = {false, false};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float sum = quad_sum(rows.sum[half]);
        const int packed = f.first_row + local_row + 8 * half, row = packed / PACKED_HEADS;
        const int head = f.head * PACKED_HEADS + packed % PACKED_HEADS;
        if (row >= f.seqlen_q)
            continue;
        const int64_t slot = part_slot(a, f, head, row);
        if (threadIdx.x % 4 == 0)
            *(float2 *)&a.partial_rows[2 * slot] =
                make_float2(MAXIMA_BARE ? rows.max[half] * a.scale : rows.max[half], computed ? sum : 0.0f);
        float *to = a.partial_out + slot * a.head_dim_v + threadIdx.x % 4 * 2, all = 0;
#pragma unroll
        for (int i = 0; i < HEAD_DIM_V / 8; i++) {
            all += o[4 * i + 2 * half] + o[4 * i + 2 * half + 1];
            if (i * 8 + (int)threadIdx.x % 4 * 2 < a.head_dim_v)
                *(float2 *)(to + i * 8) =
                    computed ? make_float2(o[4 * i + 2 * half], o[4 * i + 2 * half + 1]) : make_float2(0, 0);
        }
        bad[half] = computed && all != all;
    }
    return redo ? redo_mask(bad) : 0;
}

#endif
