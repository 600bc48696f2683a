/* quad.cuh: reductions over the four lanes of a warp that hold one row of a product's accumulators, and the
 * transpose of their words. */
#ifndef FDM_QUAD_CUH
#define FDM_QUAD_CUH

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}
/* Word j of lane i becomes word i of lane j. It turns the same element of four accumulator tiles into four
 * neighbours of a row, and the reverse. */
__device__ __forceinline__ void quad_transpose(uint32_t (&x)[4]) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool upper = threadIdx.x & step;
            if (i & step)
                continue;
            const uint32_t other = __shfl_xor_sync(0xffffffff, upper ? x[i] : x[i + step], step);
            (upper ? x[i] : x[i + step]) = other;
        }
}

#endif
