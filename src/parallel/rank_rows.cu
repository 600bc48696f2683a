/* rank_rows.cu: rows of a tensor packed for another rank, rows that came put in their places, added or rounded.
 *
 * Bound by memory: each element is read and written once, and read once more where it is added to. A row of a head is
 * cut into units, a thread each; neighbouring threads have neighbouring units. */
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/types.cuh"
#include "parallel/rank_rows.h"

RANK_ROWS_CONSTANTS(GPU_CONSTANT_GIVEN)

#define WIDENS  (ACTION == RANK_ROWS_WIDEN_FLOAT16 || ACTION == RANK_ROWS_WIDEN_BFLOAT16)
#define TO_UNIT (ACTION == RANK_ROWS_FLOAT16 || ACTION == RANK_ROWS_BFLOAT16 ? UNIT / 2 : WIDENS ? 2 * UNIT : UNIT)

__device__ __forceinline__ uint32_t rounded_pair(float low, float high) {
    return ACTION == RANK_ROWS_FLOAT16 ? cvt_f16x2(low, high) : cvt_bf16x2(low, high);
}

__device__ __forceinline__ float sum_of(uint32_t x, uint32_t y) { return __uint_as_float(x) + __uint_as_float(y); }

__device__ __forceinline__ void copy_unit(const char *from, char *to) {
    if (UNIT == 16)
        *(uint4 *)to = *(const uint4 *)from;
    else if (UNIT == 4)
        *(uint32_t *)to = *(const uint32_t *)from;
    else if (UNIT == 2)
        *(uint16_t *)to = *(const uint16_t *)from;
    else
        *to = *from;
}

__device__ __forceinline__ void add_unit(const char *from, char *to) {
    if (UNIT == 16) {
        const uint4 x = *(const uint4 *)from, y = *(const uint4 *)to;
        *(uint4 *)to = make_uint4(__float_as_uint(sum_of(x.x, y.x)), __float_as_uint(sum_of(x.y, y.y)),
                                  __float_as_uint(sum_of(x.z, y.z)), __float_as_uint(sum_of(x.w, y.w)));
    } else {
        *(float *)to += *(const float *)from;
    }
}

__device__ __forceinline__ void round_unit(const char *from, char *to) {
    if (UNIT == 16) {
        const uint4 x = *(const uint4 *)from;
        *(uint2 *)to = make_uint2(rounded_pair(__uint_as_float(x.x), __uint_as_float(x.y)),
                                  rounded_pair(__uint_as_float(x.z), __uint_as_float(x.w)));
    } else {
        *(uint16_t *)to = (uint16_t)rounded_pair(*(const float *)from, 0.0f);
    }
}

__device__ __forceinline__ float widened(uint32_t x) {
    return ACTION == RANK_ROWS_WIDEN_FLOAT16 ? cvt_f32_f16((uint16_t)x) : cvt_f32_bf16((uint16_t)x);
}

__device__ __forceinline__ void widen_unit(const char *from, char *to) {
    if (UNIT == 16) {
        const uint4 x = *(const uint4 *)from;
        ((float4 *)to)[0] = make_float4(widened(x.x), widened(x.x >> 16), widened(x.y), widened(x.y >> 16));
        ((float4 *)to)[1] = make_float4(widened(x.z), widened(x.z >> 16), widened(x.w), widened(x.w >> 16));
    } else {
        *(float *)to = widened(*(const uint16_t *)from);
    }
}

extern "C" __global__ void __launch_bounds__(RANK_ROWS_THREADS)
    rank_rows(const __grid_constant__ struct rank_rows_params a) {
    const uint32_t n = blockIdx.x * (RANK_ROWS_THREADS / a.lanes) + threadIdx.x / a.lanes;
    if (n >= a.count)
        return;
    const int64_t h = n % a.heads, b = n / a.heads % a.batches, i = n / a.heads / a.batches;
    const char *from = a.from.data + i * a.from.row + b * a.from.batch + h * a.from.head;
    char *to = a.to.data + i * a.to.row + b * a.to.batch + h * a.to.head;
    for (uint32_t unit = threadIdx.x % a.lanes; unit < a.units; unit += a.lanes)
        if (ACTION == RANK_ROWS_COPY)
            copy_unit(from + (int64_t)unit * UNIT, to + (int64_t)unit * TO_UNIT);
        else if (ACTION == RANK_ROWS_ADD)
            add_unit(from + (int64_t)unit * UNIT, to + (int64_t)unit * TO_UNIT);
        else if (WIDENS)
            widen_unit(from + (int64_t)unit * UNIT, to + (int64_t)unit * TO_UNIT);
        else
            round_unit(from + (int64_t)unit * UNIT, to + (int64_t)unit * TO_UNIT);
}
