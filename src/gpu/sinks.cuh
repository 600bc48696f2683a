/* sinks.cuh: learnable sinks of a head: logits that join the sum of each of its rows and have no value. Their dtype is
 * known when a kernel runs. */
#ifndef FDM_GPU_SINKS_CUH
#define FDM_GPU_SINKS_CUH

#include "cuda/ptx/global.cuh"
#include "cuda/ptx/math.cuh"
#include "gpu/forward_params.h"
#include "gpu/numbers.h"

__device__ __forceinline__ uint32_t sink_bits(const struct gpu_sink &sink, int n, int head) {
    const int64_t at = n * sink.part + head * sink.head;
    return sink.dtype == GPU_FLOAT32 ? ld_global_4_early(sink.data + at * 4) : ld_global_2_early(sink.data + at * 2);
}
__device__ __forceinline__ float sink_value(const struct gpu_sink &sink, uint32_t bits) {
    return sink.dtype == GPU_FLOAT32    ? __uint_as_float(bits)
           : sink.dtype == GPU_BFLOAT16 ? cvt_f32_bf16((uint16_t)bits)
                                        : cvt_f32_f16((uint16_t)bits);
}
__device__ __forceinline__ float sink_value(const struct gpu_sink &sink, int n, int head) {
    return sink_value(sink, sink_bits(sink, n, head));
}

/* The logarithm of the sum of the exponentials of a head's sinks: the sink itself where it has one. The first function
 * reads, the second makes a number of that: what is read long before it is needed is not waited for. */
__device__ __forceinline__ uint32_t read_sink(const struct gpu_sink &sink, int head) {
    if (__builtin_expect(sink.count == 1, 1))
        return sink_bits(sink, 0, head);
    float most = sink_value(sink, 0, head), sum = 0.0f;
#pragma unroll 1
    for (int n = 1; n < sink.count; n++)
        most = fmaxf(most, sink_value(sink, n, head));
#pragma unroll 1
    for (int n = 0; n < sink.count; n++) {
        const float x = sink_value(sink, n, head);
        sum += x == most ? 1.0f : ex2_approx((x - most) * LOG2_E); /* equal infinities are no NaN */
    }
    return __float_as_uint(sum == 1.0f ? most : most + lg2_approx(sum) * LN_2);
}
__device__ __forceinline__ float sink_logit(const struct gpu_sink &sink, uint32_t read) {
    return sink.count == 1 ? sink_value(sink, read) : __uint_as_float(read);
}

#endif
