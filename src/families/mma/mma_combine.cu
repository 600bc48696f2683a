/* mma_combine.cu: merges the partial results of splits along the keys.
 *
 * Idea: a row's output is the mean of its partial outputs, weighted by the exponentials of their lse; a split that saw
 * no key has lse -inf and weight 0. Bound by memory: reads num_splits * rows * (Dv + 1) floats. One warp a row.
 *
 * Grid: x rows of all heads in groups of four warps. */
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/math.cuh"
#include "families/mma/mma_decode.h"

#define MINUS_INF (-__int_as_float(0x7f800000))

extern "C" __global__ void __launch_bounds__(32 * MMA_DECODE_WARPS)
    mma_combine(const __grid_constant__ struct gpu_forward_params a) {
    const int lane = threadIdx.x % 32;
    const int64_t all_rows = VARLEN ? (int64_t)a.heads * a.total_q : (int64_t)a.batch * a.heads * a.seqlen_q;
    const int64_t row = blockIdx.x * (int64_t)MMA_DECODE_WARPS + threadIdx.x / 32;
    if (row >= all_rows)
        return;
    const int64_t rows = VARLEN ? a.total_q : a.seqlen_q;
    const int64_t i = row % rows, head = row / rows % a.heads, batch = row / rows / a.heads;
#if VARLEN
    if (i < a.cu_seqlens_q[0] || i >= a.cu_seqlens_q[a.batch])
        return; /* of no sequence: no split has written it */
#endif
    float most = MINUS_INF, sum = 0;
    griddepcontrol_wait();
    for (int split = lane; split < a.num_splits; split += 32)
        most = fmaxf(most, a.partial_lse[split * all_rows + row]);
#pragma unroll
    for (int step = 16; step; step /= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, step));
    const bool empty = most == MINUS_INF;
    for (int split = lane; split < a.num_splits && !empty; split += 32)
        sum += __expf(a.partial_lse[split * all_rows + row] - most);
#pragma unroll
    for (int step = 16; step; step /= 2)
        sum += __shfl_xor_sync(0xffffffff, sum, step);
    const float inverse = empty ? 0.0f : 1.0f / sum;
    for (int column = lane * 2; column < a.head_dim_v; column += 64) {
        float x = 0, y = 0;
        for (int split = 0; split < a.num_splits && !empty; split++) {
            const int64_t slot = split * all_rows + row;
            const float weight = __expf(a.partial_lse[slot] - most);
            const float2 o = *(const float2 *)&a.partial_out[slot * a.head_dim_v + column];
            x += weight * o.x;
            y += weight * o.y;
        }
#if DTYPE == GPU_BFLOAT16
        const uint32_t both = cvt_bf16x2(x * inverse, y * inverse);
#else
        const uint32_t both = cvt_f16x2(x * inverse, y * inverse);
#endif
        *(uint32_t *)(a.out.data + (batch * a.out.batch + i * a.out.row + head * a.out.head + column) * 2) = both;
    }
    if (lane == 0 && a.lse.data)
        a.lse.data[batch * a.lse.batch + head * a.lse.head + i * a.lse.row] = empty ? -MINUS_INF : most + __logf(sum);
}
