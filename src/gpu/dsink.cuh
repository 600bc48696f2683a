/* dsink.cuh: the gradient of a head's sinks. One block of `threads` threads adds the shares of rows, which
 * backward_prepare has left, in a fixed order, and rounds once. A kernel has VARLEN and ROW_STEP. */
#ifndef FDM_DSINK_CUH
#define FDM_DSINK_CUH

#include "gpu/backward_params.h"
#include "gpu/packed.cuh"
#include "gpu/sinks.cuh"

/* The thread's sum over every `threads`-th group of four rows. Shares behind the last row are 0. */
template <int threads> __device__ __forceinline__ float sum_shares(const struct gpu_backward_params &a, int head) {
    float sum = 0;
#pragma unroll 1
    for (int batch = 0; batch < a.in.batch; batch++) {
        int64_t begin = (int64_t)batch * a.in.heads * a.rows;
        int rows = a.in.seqlen_q;
        if (VARLEN) {
            const struct packed q = find_packed_q(a.in, batch);
            rows = q.length;
            begin = backward_begin(q.begin, batch, ROW_STEP);
        }
        if (SEQUSED)
            rows = used_of(a.in.seqused_q, batch, rows);
        const float4 *shares = (const float4 *)(a.sink_shares + begin + head * a.rows);
#pragma unroll 4
        for (int n = threadIdx.x; n < (rows + 3) / 4; n += threads) {
            const float4 x = shares[n];
            sum += (x.x + x.y) + (x.z + x.w);
        }
    }
    return sum;
}

/* `sums` is shared memory with a float for each warp. */
template <int threads>
__device__ __forceinline__ void store_dsink(const struct gpu_backward_params &a, int head, float *sums) {
    float sum = sum_shares<threads>(a, head);
#pragma unroll
    for (int step = 16; step; step /= 2)
        sum += __shfl_xor_sync(0xffffffff, sum, step);
    if (threadIdx.x % 32 == 0)
        sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int n = 0; n < threads / 32; n++)
        sum += sums[n];
    const float logit = sink_logit(a.in.sink, read_sink(a.in.sink, head));
    for (int n = threadIdx.x; n < a.dsink.count; n += threads) {
        const float sink = sink_value(a.in.sink, n, head), x = sum == 0 ? 0 : sum * ex2_approx((sink - logit) * LOG2_E);
        char *to = a.dsink.data + (n * a.dsink.part + head * a.dsink.head) * (a.dsink.dtype == GPU_FLOAT32 ? 4 : 2);
        if (a.dsink.dtype == GPU_FLOAT32)
            *(float *)to = x;
        else
            *(uint16_t *)to = (uint16_t)(a.dsink.dtype == GPU_BFLOAT16 ? cvt_bf16x2(x, 0) : cvt_f16x2(x, 0));
    }
}

#endif
