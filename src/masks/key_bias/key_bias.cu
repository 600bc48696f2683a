/* key_bias.cu: the bias of a dynamic mask, a softplus(dt) or its exponential, and the gradients of dt and a.
 *
 * Idea: forward, a warp takes 32 keys of a head, and neighbouring warps neighbouring heads of the same keys: what is
 * read of dt [B, S, h] is in the first-level cache for the next head, and what is written of the bias [B, h, S] lies in
 * a line. Backward, a cluster of blocks a head, each a part of its keys, so that the gradient of a is a sum in one
 * order and needs no memory. Both are bound by latency, and the backward by its reads and writes of dt, which lie
 * apart. Dtypes are parameters: a branch that all threads take costs less than 27 specialisations. Constant: PARTS. */
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/math.cuh"
#include "gpu/forward_params.h"
#include "gpu/numbers.h"
#include "masks/key_bias/key_bias.h"
#include "masks/key_bias/key_bias_threads.h"

KEY_BIAS_CONSTANTS(GPU_CONSTANT_GIVEN)

#define THREADS (32 * KEY_BIAS_BACKWARD_WARPS) /* of the backward */

__device__ __forceinline__ int64_t element_of(const struct key_bias_tensor &t, int32_t b, int32_t s, int32_t h) {
    return b * t.batch + s * t.key + h * t.head;
}

__device__ __forceinline__ float value_at(const struct key_bias_tensor &t, int32_t b, int32_t s, int32_t h) {
    const int64_t n = element_of(t, b, s, h);
    if (t.dtype == GPU_FLOAT32)
        return ((const float *)t.data)[n];
    const uint16_t bits = ((const uint16_t *)t.data)[n];
    return t.dtype == GPU_FLOAT16 ? cvt_f32_f16(bits) : cvt_f32_bf16(bits);
}

__device__ __forceinline__ void set_value(const struct key_bias_tensor &t, int32_t b, int32_t s, int32_t h, float x) {
    const int64_t n = element_of(t, b, s, h);
    if (t.dtype == GPU_FLOAT32)
        ((float *)t.data)[n] = x;
    else
        ((uint16_t *)t.data)[n] = (uint16_t)(t.dtype == GPU_FLOAT16 ? cvt_f16x2(x, x) : cvt_bf16x2(x, x));
}

__device__ __forceinline__ bool is_real(const struct key_bias_call &c, int32_t b, int32_t s) {
    return !c.padding || c.padding[b * c.padding_batch + s * c.padding_key] != 0;
}

/* Of x and exp(-|x|). */
__device__ __forceinline__ float softplus(float x, float e) { return (x < 0 ? 0 : x) + log1pf(e); }
__device__ __forceinline__ float sigmoid(float x, float e) { return (x < 0 ? e : 1) / (1 + e); }

extern "C" __global__ void __launch_bounds__(32 * KEY_BIAS_WARPS)
    key_bias(const __grid_constant__ struct key_bias_call c) {
    const uint32_t item = blockIdx.x * KEY_BIAS_WARPS + threadIdx.x / 32;
    const uint32_t groups = ((uint32_t)c.num_keys + 31) / 32, group = item / (uint32_t)c.heads;
    const int32_t h = (int32_t)(item % (uint32_t)c.heads), b = (int32_t)(group / groups);
    const int32_t s = (int32_t)(group % groups * 32 + threadIdx.x % 32);
    if (b >= c.batch || s >= c.num_keys)
        return;
    const float x = value_at(c.dt, b, s, h), z = value_at(c.a, 0, 0, h) * softplus(x, expf(-fabsf(x)));
    set_value(c.bias, b, s, h, !is_real(c, b, s) ? MINUS_INF : c.exponential ? expf(z) : z);
}

/* A key of all batches; past the last one the first, which does not count. */
struct place {
    int32_t b, s;
    bool is_there, counts;
};
__device__ __forceinline__ struct place place_of(const struct key_bias_call &c, uint32_t n, uint32_t count) {
    const bool is_there = n < count;
    const uint32_t key = is_there ? n : 0;
    const int32_t b = (int32_t)(key / (uint32_t)c.num_keys), s = (int32_t)(key % (uint32_t)c.num_keys);
    return {b, s, is_there, is_there && is_real(c, b, s)};
}

__device__ __forceinline__ float sum_of_warp(float x) {
    for (int lanes = 16; lanes > 0; lanes /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    key_bias_backward(const __grid_constant__ struct key_bias_call c) {
    __shared__ float sums[KEY_BIAS_BACKWARD_WARPS], parts[PARTS];
    const int32_t h = (int32_t)(blockIdx.x / PARTS), part = (int32_t)(blockIdx.x % PARTS);
    const uint32_t count = (uint32_t)c.batch * (uint32_t)c.num_keys;
    const float a = value_at(c.a, 0, 0, h);
    float sum = 0;
    if (PARTS > 1)
        barrier_cluster_arrive(); /* this block has begun */
    for (uint32_t begin = part * THREADS + threadIdx.x; begin < count; begin += PARTS * THREADS * KEY_BIAS_AT_ONCE) {
        float x[KEY_BIAS_AT_ONCE], dz[KEY_BIAS_AT_ONCE];
#pragma unroll
        for (int i = 0; i < KEY_BIAS_AT_ONCE; i++) {
            const struct place at = place_of(c, begin + i * PARTS * THREADS, count);
            x[i] = value_at(c.dt, at.b, at.s, h);
            dz[i] = value_at(c.bias, at.b, at.s, h);
            dz[i] = at.counts ? dz[i] : 0;
        }
#pragma unroll
        for (int i = 0; i < KEY_BIAS_AT_ONCE; i++) {
            const struct place at = place_of(c, begin + i * PARTS * THREADS, count);
            const float e = expf(-fabsf(x[i])), plus = softplus(x[i], e);
            if (c.exponential && dz[i] != 0)
                dz[i] *= expf(a * plus);
            sum += dz[i] == 0 ? 0 : dz[i] * plus; /* what no row sees has no part in it, whatever dt is */
            if (c.ddt.data && at.is_there)
                set_value(c.ddt, at.b, at.s, h, dz[i] == 0 ? 0 : dz[i] * a * sigmoid(x[i], e));
        }
    }
    sum = sum_of_warp(sum);
    if (threadIdx.x % 32 == 0)
        sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = sum_of_warp(threadIdx.x % 32 < KEY_BIAS_BACKWARD_WARPS ? sums[threadIdx.x % 32] : 0);
    if (PARTS > 1) {
        barrier_cluster_wait();
        if (threadIdx.x == 0)
            st_cluster_4(mapa_shared(shared_address(&parts[part]), 0), __float_as_uint(sum));
        barrier_cluster_arrive();
        barrier_cluster_wait();
        sum = 0;
        for (int n = 0; n < PARTS && part == 0; n++)
            sum += parts[n];
    }
    if (threadIdx.x == 0 && part == 0 && c.da.data)
        set_value(c.da, 0, 0, h, sum);
}
