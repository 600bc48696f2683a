/* combine_splits.cu: merges the partial results of splits along the keys.
 *
 * Idea: a split leaves for each row the maximum of its scores and, relative to it, the sum of its weights and the
 * weighted sum of V. Both are kept, not their logarithm: where every score is a huge negative bias, that would lose how
 * many keys a split saw. A split that saw no key has maximum -inf and weight 0. Bound by memory: reads num_splits *
 * rows * (Dv + 2) floats. One block a row; each warp adds every fourth split, in order, and the warps' sums are added
 * in order.
 *
 * Grid: rows of all heads. */
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/math.cuh"
#include "gpu/combine_splits.h"

#define THREADS   (32 * COMBINE_SPLITS_WARPS)
#define LOG2_E    1.4426950408889634f
#define MINUS_INF (-__int_as_float(0x7f800000))

static_assert(GPU_SPLITS_MAX <= THREADS, "a thread for each split");

/* Over the block, in an order that does not change. */
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

__device__ __forceinline__ void store_columns(char *to, float x, float y) {
#if DTYPE == GPU_FLOAT32
    *(float2 *)to = make_float2(x, y);
#elif DTYPE == GPU_BFLOAT16
    *(uint32_t *)to = cvt_bf16x2(x, y);
#else
    *(uint32_t *)to = cvt_f16x2(x, y);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
    combine_splits(const __grid_constant__ struct gpu_forward_params a) {
    constexpr int bytes = DTYPE == GPU_FLOAT32 ? 4 : 2;
    __shared__ float maxima[COMBINE_SPLITS_WARPS], sums[COMBINE_SPLITS_WARPS], weights[THREADS];
    __shared__ float2 parts[COMBINE_SPLITS_WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t all_rows = VARLEN ? (int64_t)a.heads * a.total_q : (int64_t)a.batch * a.heads * a.seqlen_q;
    const int64_t row = blockIdx.x, rows = VARLEN ? a.total_q : a.seqlen_q;
    const int64_t i = row % rows, head = row / rows % a.heads, batch = row / rows / a.heads;
#if VARLEN
    if (i < a.cu_seqlens_q[0] || i >= a.cu_seqlens_q[a.batch])
        return; /* of no sequence: no split has written it */
#endif
    griddepcontrol_wait();
    float2 mine = make_float2(MINUS_INF, 0);
    if (threadIdx.x < a.num_splits)
        mine = *(const float2 *)&a.partial_rows[2 * (threadIdx.x * all_rows + row)];
    const float most = over_block(mine.x, maxima, true);
    const bool empty = most == MINUS_INF;
    const float weight = empty ? 0.0f : ex2_approx((mine.x - most) * LOG2_E);
    weights[threadIdx.x] = weight;
    const float sum = over_block(weight * mine.y, sums, false);
    const float inverse = empty ? 0.0f : 1.0f / sum;
    char *out = a.out.data + (batch * a.out.batch + i * a.out.row + head * a.out.head) * bytes;
    for (int first = 0; first < a.head_dim_v; first += 64) {
        const int column = first + lane * 2;
        float x = 0, y = 0;
        if (column < a.head_dim_v)
#pragma unroll 8
            for (int split = warp; split < a.num_splits; split += COMBINE_SPLITS_WARPS) {
                const float2 o = *(const float2 *)&a.partial_out[(split * all_rows + row) * a.head_dim_v + column];
                x += weights[split] * o.x;
                y += weights[split] * o.y;
            }
        parts[warp][lane] = make_float2(x, y);
        __syncthreads();
        if (warp == 0 && column < a.head_dim_v) {
#pragma unroll
            for (int n = 1; n < COMBINE_SPLITS_WARPS; n++) {
                x += parts[n][lane].x;
                y += parts[n][lane].y;
            }
            store_columns(out + column * bytes, x * inverse, y * inverse);
        }
        __syncthreads();
    }
    if (threadIdx.x == 0 && a.lse.data)
        a.lse.data[batch * a.lse.batch + head * a.lse.head + i * a.lse.row] = empty ? -MINUS_INF : most + logf(sum);
}
