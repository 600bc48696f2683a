/* combine_splits.cu: merges the partial results of splits along the keys.
 *
 * Idea: a split leaves for each row the maximum of its scores and, relative to it, the sum of its weights and the
 * weighted sum of V. Both are kept, not their logarithm: where every score is a huge negative bias, that would lose how
 * many keys a split saw. A split that saw no key has maximum -inf and weight 0. Bound by memory: reads num_splits *
 * rows * (Dv + 2) floats. One block a row; each warp adds every fourth split, in order, and the warps' sums are added
 * in order. A row makes many dependent reads: those of the first splits are issued before their weights are known.
 *
 * Grid: rows of all heads. */
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/math.cuh"
#include "gpu/combine_splits.h"
#include "gpu/numbers.h"

#include "gpu/scores.cuh"
#include "gpu/unused_rows.cuh"

#define THREADS (32 * COMBINE_SPLITS_WARPS)
#define AT_ONCE 16 /* splits whose parts a warp reads together */

static_assert(GPU_SPLITS_MAX <= THREADS, "a thread for each split");

/* The sum over the block, in a fixed order. */
__device__ __forceinline__ float over_block(float x, float *scratch, bool maximum) {
#pragma unroll
    for (int step = 16; step; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffff, x, step);
        x = maximum ? fmaxf(x, other) : x + other;
    }
    if (threadIdx.x % 32 == 0)
        scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = scratch[0];
#pragma unroll
    for (int n = 1; n < COMBINE_SPLITS_WARPS; n++)
        x = maximum ? fmaxf(x, scratch[n]) : x + scratch[n];
    return x;
}

__device__ __forceinline__ void store_columns(char *to, float4 x) {
#if DTYPE == GPU_FLOAT32
    *(float4 *)to = x;
#elif DTYPE == GPU_BFLOAT16
    *(uint2 *)to = make_uint2(cvt_bf16x2(x.x, x.y), cvt_bf16x2(x.z, x.w));
#else
    *(uint2 *)to = make_uint2(cvt_f16x2(x.x, x.y), cvt_f16x2(x.z, x.w));
#endif
}

__device__ __forceinline__ float4 add_weighted(float4 sum, float weight, float4 x) {
    return make_float4(sum.x + weight * x.x, sum.y + weight * x.y, sum.z + weight * x.z, sum.w + weight * x.w);
}

/* Loads four columns of the row's parts in splits `split`, `split` + COMBINE_SPLITS_WARPS and so on. */
__device__ __forceinline__ void read_parts(float4 (&part)[AT_ONCE], const struct gpu_forward_params &a,
                                           int64_t all_rows, int64_t row, int split, int column) {
    const float *at = a.partial_out + (split * all_rows + row) * a.head_dim_v + column;
    const int64_t step = COMBINE_SPLITS_WARPS * all_rows * a.head_dim_v;
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++, at += step) {
        part[n] = make_float4(0, 0, 0, 0);
        if (split + n * COMBINE_SPLITS_WARPS < a.num_splits && column < a.head_dim_v)
            part[n] = *(const float4 *)at;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    combine_splits(const __grid_constant__ struct gpu_forward_params a) {
    constexpr int bytes = DTYPE == GPU_FLOAT32 ? 4 : 2;
    __shared__ float maxima[COMBINE_SPLITS_WARPS], sums[COMBINE_SPLITS_WARPS], weights[THREADS];
    __shared__ float4 parts[COMBINE_SPLITS_WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t all_rows = VARLEN ? (int64_t)a.heads * a.total_q : (int64_t)a.batch * a.heads * a.seqlen_q;
    const int64_t row = blockIdx.x, rows = VARLEN ? a.total_q : a.seqlen_q;
    const int64_t i = row % rows, head = row / rows % a.heads, batch = row / rows / a.heads;
    griddepcontrol_wait();
    const bool rest = VARLEN ? is_unused(a.cu_seqlens_q, a.batch, (int)i, a.total_q, a.seqlen_q, a.seqused_q)
                             : SEQUSED && i >= used_of(a.seqused_q, (int)batch, a.seqlen_q);
    if (rest) { /* no split has written it */
        clear_unused_results(a, {(int)i, (int)i + 1}, (int)batch, (int)head, threadIdx.x, THREADS);
        return;
    }
    float4 part[AT_ONCE];
    read_parts(part, a, all_rows, row, warp, lane * 4);
    float2 mine = make_float2(MINUS_INF, 0);
    if (threadIdx.x < a.num_splits)
        mine = *(const float2 *)&a.partial_rows[2 * (threadIdx.x * all_rows + row)];
    const float most = over_block(mine.x, maxima, true);
    /* Where all scores are NaN no split has a maximum, and the sums are NaN. */
    const float weight = mine.x == most ? 1.0f : ex2_approx((mine.x - most) * LOG2_E);
    weights[threadIdx.x] = weight;
    const float sum = over_block(weight * mine.y, sums, false);
    const float inverse = end_softmax(
        a, threadIdx.x == 0, (int)batch, (int)head, i, sum, [&] { return most; }, [&](float x) { return logf(x); });
    char *out = a.out.data + (batch * a.out.batch + i * a.out.row + head * a.out.head) * bytes;
    for (int column = lane * 4; column - lane * 4 < a.head_dim_v; column += 128) {
        float4 x = make_float4(0, 0, 0, 0);
        if (column >= 128)
            read_parts(part, a, all_rows, row, warp, column);
        for (int split = warp; split < a.num_splits; split += AT_ONCE * COMBINE_SPLITS_WARPS) {
            if (split > warp)
                read_parts(part, a, all_rows, row, split, column);
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++)
                if (split + n * COMBINE_SPLITS_WARPS < a.num_splits)
                    x = add_weighted(x, weights[split + n * COMBINE_SPLITS_WARPS], part[n]);
        }
        parts[warp][lane] = x;
        __syncthreads();
        if (warp == 0 && column < a.head_dim_v) {
#pragma unroll
            for (int n = 1; n < COMBINE_SPLITS_WARPS; n++)
                x = add_weighted(x, 1.0f, parts[n][lane]);
            store_columns(out + column * bytes,
                          make_float4(x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse));
        }
        __syncthreads();
    }
}
