/* hopper_softmax.cuh: from the scores of a warpgroup's tile to P, for hopper_forward.cu.
 *
 * A thread holds two rows of its warp, lane / 4 and lane / 4 + 8 ("halves"), and of each group of eight keys the
 * columns 2 (lane % 4) and its right neighbour: s[4 group + 2 half + column].
 *
 * P is made with the maxima of the tiles before: no row waits for its maximum. Only where a thread's sum over a tile
 * exceeds SUM_MAX does its warp raise the maxima and make P again. The result is the same, because sum and output use
 * the same stale maximum. */
#ifndef FDM_HOPPER_SOFTMAX_CUH
#define FDM_HOPPER_SOFTMAX_CUH

#include "cuda/exp2.cuh"
#include "cuda/panels.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/math.cuh"
#include "gpu/convert.cuh"
#include "gpu/numbers.h"
#include "gpu/quad.cuh"
#include "gpu/scores.cuh"
#include "gpu/visible.cuh"

#define SCORED  (MASK_TILE || BIAS)
#define GROUPS  (BLOCK_N / 8)
#define SUM_MAX 64.0f

struct softmax_rows {
    float max[2], sum[2]; /* sum: of this thread's columns alone */
    bool settled;         /* every row of the warp has seen a key */
};

/* The factor of scores in the exponent of exp2. */
__device__ __forceinline__ float exponent_unit(const struct gpu_forward_params &a) {
    return MAXIMA_BARE ? a.scale * LOG2_E : LOG2_E;
}

/* 2^x; EXP2_RESIDUE of every EXP2_FREQUENCY run on the FMA pipe. */
template <int element> __device__ __forceinline__ float exp2_of(float x) {
    return EXP2_RESIDUE && element % EXP2_FREQUENCY < EXP2_RESIDUE ? ex2_polynomial(x) : ex2_approx(x);
}

/* ---- scores ---- */

/* Address of two neighbours of a staged row: columns 8 group + 2 (lane % 4), + 1, of elements of `bytes`. Rows of 128
 * bytes with the swizzle of TMA; a panel is BLOCK_M rows. */
template <int bytes> __device__ __forceinline__ uint32_t staged_address(uint32_t tile, int row, int group) {
    constexpr int columns = 128 / bytes; /* of a panel */
    const int column = group * 8 % columns + threadIdx.x % 4 * 2, at = column * bytes;
    return panels<BLOCK_M>{tile}.panel(group * 8 / columns).panel_chunk(row, at >> 4) + (at & 15);
}

/* Applies scale, softcap and bias; with `masked` also the mask. `row` is that of the block tile for half 0. */
template <bool masked>
__device__ __forceinline__ void finish_scores(float (&s)[BLOCK_N / 2], const struct gpu_forward_params &a,
                                              [[maybe_unused]] uint32_t bias_tile, [[maybe_unused]] uint32_t mask_tile,
                                              [[maybe_unused]] int row) {
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float &x = s[4 * group + 2 * half], &y = s[4 * group + 2 * half + 1];
            if (!MAXIMA_BARE) {
                x = cap_score(a, x * a.scale);
                y = cap_score(a, y * a.scale);
            }
#if BIAS == GPU_BIAS_FLOAT32
            uint32_t low, high;
            ld_shared_8(low, high, staged_address<4>(bias_tile, row + 8 * half, group));
            x += __uint_as_float(low);
            y += __uint_as_float(high);
#elif BIAS
            const uint32_t both = ld_shared_4(staged_address<2>(bias_tile, row + 8 * half, group));
            x += DTYPE == GPU_BFLOAT16 ? __uint_as_float(both << 16) : cvt_f32_f16((uint16_t)both);
            y += DTYPE == GPU_BFLOAT16 ? __uint_as_float(both & 0xffff0000u) : cvt_f32_f16((uint16_t)(both >> 16));
#endif
            if constexpr (masked) {
                const uint32_t seen = ld_shared_2(staged_address<1>(mask_tile, row + 8 * half, group));
                x = seen & 0xff ? x : MINUS_INF;
                y = seen >> 8 ? y : MINUS_INF;
            }
        }
}

/* A bit for each group whose column 8 group + offset is below `end`. */
__device__ __forceinline__ uint32_t groups_below(int end, int offset) {
    const int count = min(max((end - offset + 7) >> 3, 0), GROUPS);
    return count == 32 ? 0xffffffffu : (1u << count) - 1;
}

/* Sets scores outside of first[half] <= column < last[half] to -inf. */
__device__ __forceinline__ void hide_keys(float (&s)[BLOCK_N / 2], const int (&first)[2], const int (&last)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int offset = threadIdx.x % 4 * 2 + c;
            const uint32_t seen = groups_below(last[half], offset) & ~groups_below(first[half], offset);
#pragma unroll
            for (int group = 0; group < GROUPS; group++)
                if (!(seen >> group & 1))
                    s[4 * group + 2 * half + c] = MINUS_INF;
        }
}

/* Adds the keys first .. last - 1 to those of either neighbour. */
__device__ __forceinline__ void add_run(uint32_t (&seen)[2], int first, int last) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
        const int offset = threadIdx.x % 4 * 2 + c;
        seen[c] |= groups_below(min(last, BLOCK_N), offset) & ~groups_below(min(first, BLOCK_N), offset);
    }
}

/* Keys that no run of a half's row holds become -inf. key: that of column 0. */
__device__ __forceinline__ void hide_others(float (&s)[BLOCK_N / 2], int half, const struct gpu_forward_params &a,
                                            const struct row_ranges &row, int key) {
    const struct gpu_row_intervals &r = a.row_intervals;
    const struct gpu_blocks &b = a.blocks;
    uint32_t seen[2] = {0, 0}, shown[2] = {0, 0}; /* by ranges, by blocks */
#pragma unroll 1
    for (int n = 0; ROW_INTERVALS && n < r.ranges; n++)
        add_run(seen, max(row.start[n * r.start_range], key) - key, max(row.end[n * r.end_range], key) - key);
#pragma unroll 1
    for (int from = key; BLOCKS && from < key + BLOCK_N; from = next_block(b, from))
        if (block_holds(b, row, from))
            add_run(shown, from - key, next_block(b, from) - key);
#pragma unroll
    for (int c = 0; c < 2 && BLOCKS; c++)
        seen[c] = ROW_INTERVALS ? seen[c] & shown[c] : shown[c];
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            if (!(seen[c] >> group & 1))
                s[4 * group + 2 * half + c] = MINUS_INF;
}

/* ---- online softmax ---- */

/* Makes P of the tile as left operands, with the present maxima, and adds to the sums. Returns whether these stay in
 * bounds. */
template <int group = 0>
__device__ __forceinline__ void make_group(uint32_t (&p)[BLOCK_N / 16][4], float (&sum)[2],
                                           const float (&s)[BLOCK_N / 2], const float (&shift)[2], float unit) {
    if constexpr (group < GROUPS) {
        float e[4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            /* a large bias must not be rounded before its maximum is subtracted */
            const float x = s[4 * group + 2 * half], y = s[4 * group + 2 * half + 1];
            e[2 * half] = exp2_of<2 * group>(MAXIMA_BARE ? __fmaf_rn(x, unit, -shift[half]) : (x - shift[half]) * unit);
            e[2 * half + 1] =
                exp2_of<2 * group + 1>(MAXIMA_BARE ? __fmaf_rn(y, unit, -shift[half]) : (y - shift[half]) * unit);
            sum[half] += e[2 * half] + e[2 * half + 1];
            p[group / 2][group % 2 * 2 + half] = pack(e[2 * half], e[2 * half + 1]);
        }
        make_group<group + 1>(p, sum, s, shift, unit);
    }
}
__device__ __forceinline__ bool make_p(uint32_t (&p)[BLOCK_N / 16][4], struct softmax_rows &rows,
                                       const float (&s)[BLOCK_N / 2], float unit, bool always) {
    float shift[2], sum[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < 2; half++)
        shift[half] = rows.max[half] == MINUS_INF ? 0.0f : MAXIMA_BARE ? rows.max[half] * unit : rows.max[half];
    make_group(p, sum, s, shift, unit);
    if (!always && __any_sync(0xffffffff, !(sum[0] <= SUM_MAX && sum[1] <= SUM_MAX)))
        return false;
    rows.sum[0] += sum[0];
    rows.sum[1] += sum[1];
    return true;
}

/* Multiplies the thread's two rows of O. */
__device__ __forceinline__ void rescale(float (&o)[HEAD_DIM_V / 2], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 8; i++) {
        o[4 * i] *= factor[0];
        o[4 * i + 1] *= factor[0];
        o[4 * i + 2] *= factor[1];
        o[4 * i + 3] *= factor[1];
    }
}

/* Raises the maxima to those of the tile, and rescales what depends on them. has_o: O holds sums already. */
__device__ __forceinline__ void raise_maxima(const float (&s)[BLOCK_N / 2], float (&o)[HEAD_DIM_V / 2],
                                             struct softmax_rows &rows, float unit, bool has_o) {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float m = s[2 * half];
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
            m = fmaxf(m, fmaxf(s[4 * group + 2 * half], s[4 * group + 2 * half + 1]));
        m = quad_max(m);
        m = fmaxf(m, rows.max[half]);
        factor[half] = m == rows.max[half] ? 1.0f : ex2_approx((rows.max[half] - m) * unit);
        rows.max[half] = m;
        rows.sum[half] *= factor[half];
    }
    rows.settled = __all_sync(0xffffffff, rows.max[0] > MINUS_INF && rows.max[1] > MINUS_INF);
    if (has_o)
        rescale(o, factor);
}

__device__ __forceinline__ void softmax(uint32_t (&p)[BLOCK_N / 16][4], const float (&s)[BLOCK_N / 2],
                                        float (&o)[HEAD_DIM_V / 2], struct softmax_rows &rows, float unit, bool has_o) {
    if (rows.settled && make_p(p, rows, s, unit, false))
        return;
    raise_maxima(s, o, rows, unit, has_o);
    make_p(p, rows, s, unit, true);
}

#endif
