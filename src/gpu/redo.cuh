/* redo.cuh: recomputes a query row by one warp, from the keys that the row sees and no others.
 *
 * Kernels multiply whole tiles: a key that a row does not see has weight 0 there, and 0 times NaN is NaN. Where a row's
 * sums have become NaN its warp computes them again, key by key, in float32. A key that no row sees then has no effect,
 * whatever it holds, and finite tensors pay nothing; a row that sees a NaN stays NaN. It is slow: every key is read for
 * one row, and all 32 lanes make one score.
 *
 * A kernel defines HEAD_DIM_V before including it. Lane l has columns l, l + 32, and so on of a head. */
#ifndef FDM_REDO_CUH
#define FDM_REDO_CUH

#include "cuda/ptx/math.cuh"
#include "gpu/convert.cuh"
#include "gpu/forward_params.h"
#include "gpu/numbers.h"
#include "gpu/packed.cuh"
#include "gpu/row_ranges.cuh"
#include "gpu/scores.cuh"

__device__ __forceinline__ float redo_number(const char *data, int64_t index) {
    return DTYPE == GPU_FLOAT32 ? ((const float *)data)[index] : unpack(((const uint16_t *)data)[index]);
}

/* Row j of a KV head's K or V: it begins at element `first` of `data`, which is NULL where a cache has no such page. */
struct redo_place {
    const char *data;
    int64_t first;
};
__device__ __forceinline__ struct redo_place redo_key(const struct gpu_forward_params &a, const struct sequence &s,
                                                      const struct gpu_matrix &m, const struct gpu_matrix &added,
                                                      int head_kv, int j) {
    if (CACHE)
        return {
            row_address < DTYPE == GPU_FLOAT32
                ? 4
                : 2 > (a.cache, find_page_row(a.cache, find_cached_keys(a, s.batch), j), m, added, s.batch, head_kv),
            0};
    return {m.data, s.batch * m.batch + ((int64_t)s.k_begin + j) * m.row + head_kv * m.head};
}

/* Whether row `row` of a query head sees key j of its sequence, and the pair's bias. */
__device__ __forceinline__ bool redo_sees(const struct gpu_forward_params &a, const struct sequence &s, int head,
                                          int row, int j, float &bias) {
    const int64_t apart = (int64_t)j - row - s.diagonal;
    bool seen = !WINDOW || ((a.window_left == UNBOUNDED || apart >= -(int64_t)a.window_left) &&
                            (a.window_right == UNBOUNDED || apart <= a.window_right));
    if (INTERVALS) {
        const struct gpu_intervals &i = a.intervals;
        const int64_t h = head / i.group, key = (int64_t)s.k_begin + j;
        seen = seen && row >= i.start[s.batch * i.start_batch + h * i.start_head + key * i.start_key] &&
               row < i.end[s.batch * i.end_batch + h * i.end_head + key * i.end_key];
    }
    if (ROW_RUNS)
        seen = seen && ranges_hold(a, ranges_of_row(a, s.batch, s.q_begin, head, row), j);
    const auto of_pair = [&](const struct gpu_scores &m) {
        return s.batch * m.batch + head / m.group * m.head + row * m.row + j * m.key;
    };
    if (MASK)
        seen = seen && a.mask.data[of_pair(a.mask)];
    if (BIAS) {
        const int64_t at = of_pair(a.bias);
        bias = BIAS == GPU_BIAS_FLOAT32 ? ((const float *)a.bias.data)[at] : redo_number(a.bias.data, at);
        seen = seen && bias != MINUS_INF;
    }
    return seen;
}

/* Whether some row of some head that reads it sees key j. */
__device__ __forceinline__ bool redo_is_seen(const struct gpu_forward_params &a, const struct sequence &s, int head_kv,
                                             int j) {
    float bias;
#pragma unroll 1
    for (int head = head_kv * a.group; head < (head_kv + 1) * a.group; head++)
#pragma unroll 1
        for (int begin = 0; begin < s.seqlen_q; begin += 32) {
            const int row = begin + threadIdx.x % 32;
            if (__any_sync(0xffffffff, row < s.seqlen_q && redo_sees(a, s, head, row, j, bias)))
                return true;
        }
    return false;
}

/* A shuffle tells the compiler that the warp does not diverge, which wgmma demands. */
__device__ __forceinline__ int redo_uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

__device__ __forceinline__ float redo_sum(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2)
        x += __shfl_xor_sync(0xffffffff, x, step);
    return x;
}

/* The union of the lanes' rows, in every lane. It orders the lanes' earlier writes before later ones. */
__device__ __forceinline__ uint32_t redo_or(uint32_t rows) {
#pragma unroll
    for (int step = 16; step; step /= 2)
        rows |= __shfl_xor_sync(0xffffffff, rows, step);
    __syncwarp();
    return (uint32_t)redo_uniform((int)rows);
}

/* Whether out is q itself: rows that are recomputed read q, and must not be written before. */
__device__ __forceinline__ bool out_over_q(const struct gpu_forward_params &a) { return a.out.data == a.q.data; }

/* Calls visit(n) for each bit n. */
template <class visitor> __device__ __forceinline__ void for_each_bit(uint32_t bits, visitor visit) {
#pragma unroll 1
    for (; bits; bits &= bits - 1)
        visit(__ffs(bits) - 1);
}

/* Calls visit(key, score, slope) for each key from `first` up to `last` that the row sees; slope is that of softcap. */
template <class visitor>
__device__ __forceinline__ void redo_keys(const struct gpu_forward_params &a, const struct sequence &s, int head,
                                          int head_kv, int row, int first, int last, visitor visit) {
    const int lane = threadIdx.x % 32;
    first = redo_uniform(first);
    last = redo_uniform(last);
    const int64_t q = s.batch * a.q.batch + ((int64_t)s.q_begin + row) * a.q.row + head * a.q.head;
#pragma unroll 1
    for (int begin = first; begin < last; begin += 32) {
        float bias = 0;
        const int j = begin + lane;
        const uint32_t seen = __ballot_sync(0xffffffff, j < last && redo_sees(a, s, head, row, j, bias));
        for_each_bit(seen, [&](int n) {
            const struct redo_place k = redo_key(a, s, a.k, a.cache.k_new, head_kv, begin + n);
            if (CACHE && !k.data)
                return;
            float x = 0, slope;
#pragma unroll 1
            for (int c = 0; c < a.head_dim; c += 32)
                if (c + lane < a.head_dim)
                    x += redo_number(a.q.data, q + c + lane) * redo_number(k.data, k.first + c + lane);
            x = cap_score(a, redo_sum(x) * a.scale, slope);
            visit(begin + n, x + __shfl_sync(0xffffffff, bias, n), slope);
        });
    }
}

/* The lane's columns of a row of `columns`. `most` and `sum`, the maximum of a forward's scores and the sum of P
 * relative to it, are the same in every lane. */
template <int columns> struct redone_row {
    static constexpr int count = (columns + 31) / 32;
    float most, sum, o[count];
};
/* The row's P V. */
__device__ __forceinline__ struct redone_row<HEAD_DIM_V> redo_row(const struct gpu_forward_params &a,
                                                                  const struct sequence &s, int head, int head_kv,
                                                                  int row, int first, int last) {
    struct redone_row<HEAD_DIM_V> r = {
        MINUS_INF, 0, {}
    };
    redo_keys(a, s, head, head_kv, row, first, last, [&](int key, float x, float) {
        const float most = fmaxf(r.most, x), shift = most == MINUS_INF ? 0.0f : most;
        const float factor = r.most == most ? 1.0f : ex2_approx((r.most - shift) * LOG2_E);
        const float p = ex2_approx((x - shift) * LOG2_E);
        const struct redo_place v = redo_key(a, s, a.v, a.cache.v_new, head_kv, key);
        r.most = most;
        r.sum = r.sum * factor + p;
#pragma unroll
        for (int i = 0; i < r.count; i++) {
            const int c = threadIdx.x % 32 + 32 * i;
            r.o[i] = r.o[i] * factor + (c < a.head_dim_v ? p * redo_number(v.data, v.first + c) : 0.0f);
        }
    });
    return r;
}

/* Stores the lane's columns from `first` up to `end`, times `factor`, to a row in global memory that begins at element
 * `index`. */
template <int columns>
__device__ __forceinline__ void store_redone(char *data, int64_t index, const struct redone_row<columns> &again,
                                             float factor, int first, int end) {
#pragma unroll
    for (int n = 0; n < again.count; n++) {
        const int c = threadIdx.x % 32 + 32 * n;
        if (c < first || c >= end)
            continue;
        if (DTYPE == GPU_FLOAT32)
            ((float *)data)[index + c] = again.o[n] * factor;
        else
            ((uint16_t *)data)[index + c] = (uint16_t)pack(again.o[n] * factor, 0);
    }
}

/* Four lanes hold a row, and eight rows are a half. Bit 8 half + lane / 4 says that one of the four has `bad`. */
template <int halves> __device__ __forceinline__ uint32_t redo_mask(const bool (&bad)[halves]) {
    uint32_t rows = 0;
#pragma unroll
    for (int half = 0; half < halves; half++) {
        uint32_t votes = __ballot_sync(0xffffffff, bad[half]);
        votes |= votes >> 1;
        votes |= votes >> 2;
#pragma unroll
        for (int quad = 0; quad < 8; quad++)
            rows |= (votes >> 4 * quad & 1) << (8 * half + quad);
    }
    return (uint32_t)redo_uniform((int)rows);
}

/* The same of rows whose sums, made by `sum(half)` of what a lane has of a row, are NaN. */
template <int halves, class summation> __device__ __forceinline__ uint32_t spoiled_rows(const summation &sum) {
    bool bad[halves];
#pragma unroll
    for (int half = 0; half < halves; half++) {
        const float x = sum(half);
        bad[half] = x != x;
    }
    return redo_mask(bad);
}

/* Does a row again and writes its output, of columns first .. end - 1, and its lse beside column 0. */
__device__ __forceinline__ void redo_columns(const struct gpu_forward_params &a, const struct sequence &s, int head,
                                             int head_kv, int row, int first_key, int last_key, int first, int end) {
    const struct redone_row<HEAD_DIM_V> again = redo_row(a, s, head, head_kv, row, first_key, last_key);
    const int64_t i = (int64_t)s.q_begin + row, out = s.batch * a.out.batch + i * a.out.row + head * a.out.head;
    const float inverse = end_softmax(
        a, first == 0 && threadIdx.x % 32 == 0, s.batch, head, i, again.sum, [&] { return again.most; },
        [&](float x) { return logf(x); });
    store_redone(a.out.data, out, again, inverse, first, min(end, a.head_dim_v));
}
__device__ __forceinline__ void redo_output(const struct gpu_forward_params &a, const struct sequence &s, int head,
                                            int head_kv, int row, int first_key, int last_key) {
    redo_columns(a, s, head, head_kv, row, first_key, last_key, 0, HEAD_DIM_V);
}

#endif
