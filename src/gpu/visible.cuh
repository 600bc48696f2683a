/* visible.cuh: which rows see which keys. Biases with rows are float32 here. */
#ifndef FDM_VISIBLE_CUH
#define FDM_VISIBLE_CUH

#include "gpu/forward_params.h"
#include "gpu/numbers.h"
#include "gpu/packed.cuh"
#include "gpu/row_ranges.cuh"
#include "gpu/scores.cuh"

#define KEYED        (INTERVALS || (MASK && !MASK_ROWS) || (BIAS && !BIAS_ROWS)) /* something is of the key alone */
#define MASK_TILE    (MASK && MASK_ROWS)     /* a mask with rows, of which tiles are loaded */
#define BLOCK_MASKED (MASK_TILE || ROW_RUNS) /* tiles of pairs have a byte in the block mask */

/* First and last key that a row sees, by window and ends. */
__device__ __forceinline__ int first_key(const struct gpu_forward_params &a, const struct sequence &s, int row) {
    return WINDOW && a.window_left != UNBOUNDED ? (int)max((int64_t)0, (int64_t)row + s.diagonal - a.window_left) : 0;
}
__device__ __forceinline__ int last_key(const struct gpu_forward_params &a, const struct sequence &s, int row) {
    return WINDOW && a.window_right != UNBOUNDED
               ? (int)max((int64_t)-1, min((int64_t)s.seqlen_k - 1, (int64_t)row + s.diagonal + a.window_right))
               : s.seqlen_k - 1;
}

/* Rows first <= i < last see a key, by window and ends. */
__device__ __forceinline__ int first_row(const struct gpu_forward_params &a, const struct sequence &s, int64_t key) {
    return WINDOW && a.window_right != UNBOUNDED
               ? (int)min(max(key - s.diagonal - a.window_right, (int64_t)0), (int64_t)s.seqlen_q)
               : 0;
}
__device__ __forceinline__ int last_row(const struct gpu_forward_params &a, const struct sequence &s, int64_t key) {
    return WINDOW && a.window_left != UNBOUNDED
               ? (int)min(max(key - s.diagonal + a.window_left + 1, (int64_t)0), (int64_t)s.seqlen_q)
               : s.seqlen_q;
}

/* Mask and bias of one query head and batch. */
__device__ __forceinline__ const char *mask_of(const struct gpu_forward_params &a, int batch, int head) {
    return a.mask.data + batch * a.mask.batch + head / a.mask.group * a.mask.head;
}
__device__ __forceinline__ const float *bias_of(const struct gpu_forward_params &a, int batch, int head) {
    return (const float *)a.bias.data + batch * a.bias.batch + head / a.bias.group * a.bias.head;
}

/* The rows that see key j of a query head, without regard to window and ends, and the key's bias. */
struct key_bounds {
    int first, last;
    float bias;
};
__device__ __forceinline__ struct key_bounds look_at_key(const struct gpu_forward_params &a, const struct sequence &s,
                                                         int head, int j) {
    struct key_bounds key = {0, s.seqlen_q, 0};
    if (j >= s.seqlen_k)
        return {0, 0, 0};
    if (INTERVALS) {
        const struct gpu_intervals &i = a.intervals;
        const int64_t h = head / i.group, at = (int64_t)s.k_begin + j;
        key.first = max(key.first, i.start[s.batch * i.start_batch + h * i.start_head + at * i.start_key]);
        key.last = min(key.last, i.end[s.batch * i.end_batch + h * i.end_head + at * i.end_key]);
    }
    if (MASK && !MASK_ROWS && !mask_of(a, s.batch, head)[(int64_t)j * a.mask.key])
        key.last = 0;
    if (BIAS && !BIAS_ROWS) {
        const int64_t of_head = s.batch * a.bias.batch + head / a.bias.group * a.bias.head;
        key.bias = bias_value(a.bias.data + (of_head + (int64_t)j * a.bias.key) * BIAS_BYTES);
        if (key.bias == MINUS_INF)
            key.last = 0;
    }
    return key;
}

/* The same with window and ends. */
__device__ __forceinline__ struct key_bounds rows_of_key(const struct gpu_forward_params &a, const struct sequence &s,
                                                         int head, int j) {
    struct key_bounds key = look_at_key(a, s, head, j);
    key.first = max(key.first, first_row(a, s, j));
    key.last = min(key.last, last_row(a, s, j));
    return key;
}

/* Two neighbours of a row of mask or bias, columns j and j + 1 of `count` from `from` on. */
__device__ __forceinline__ void read_bias(float (&b)[2], const float *from, int64_t stride, int j, int count) {
    if (SCORES_ALIGNED && j + 1 < count) {
        const float2 both = *(const float2 *)(from + j);
        b[0] = both.x;
        b[1] = both.y;
    } else {
        b[0] = j < count ? from[j * stride] : 0.0f;
        b[1] = j + 1 < count ? from[(j + 1) * stride] : 0.0f;
    }
}
__device__ __forceinline__ void read_mask(bool (&seen)[2], const char *from, int64_t stride, int j, int count) {
    if (SCORES_ALIGNED && j + 1 < count) {
        const uint16_t both = *(const uint16_t *)(from + j);
        seen[0] = both & 0xff;
        seen[1] = both >> 8;
    } else {
        seen[0] = j < count && from[j * stride];
        seen[1] = j + 1 < count && from[(j + 1) * stride];
    }
}

#endif
