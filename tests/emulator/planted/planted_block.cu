/* planted_block.cu: out = what a sound block makes of in; each FAULT spoils one thing that a block must do. */
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/mma.cuh"
#include "planted/planted.h"

/* Each thread's element goes through shared memory to a thread of another warp, by cp.async and a barrier. */
__device__ __forceinline__ float exchange(const struct planted_arguments &a, float *tile) {
    const int t = threadIdx.x, other = (t + 40) % PLANTED_THREADS;
    if (t % 4 == 0)
        cp_async_16(shared_address(tile + t) + (FAULT == 7 && t == 8 ? 4 : 0), a.in + t);
    cp_async_commit();
    cp_async_wait<FAULT == 2 ? 1 : 0>();
    if (FAULT != 1)
        __syncthreads();
    return tile[FAULT == 5 ? t + 160 : other];
}

/* The sum of a warp's lanes, by the first lane through shared memory. */
__device__ __forceinline__ float warp_sum(float x, float *sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int step = 16; step > 0; step /= 2)
        x += __shfl_xor_sync(FAULT == 3 ? 0x0000ffffu << (lane & 16) : 0xffffffffu, x, step);
    if (lane == 0)
        sums[warp] = x;
    if (FAULT != 9)
        __syncwarp();
    return sums[warp];
}

/* The last warps wait at a named barrier for what the first has written. */
__device__ __forceinline__ float hand_over(float x, float *place) {
    const int warp = threadIdx.x / 32;
    if (warp == 0)
        place[threadIdx.x] = x;
    if (warp < 2)
        barrier_sync(1, FAULT == 12 && warp == 1 ? 96 : 64);
    return warp == 1 ? place[threadIdx.x - 32] : x;
}

/* A ring of two places with full and empty barriers: warp 0 writes, warp 1 reads. */
__device__ __forceinline__ float ring(float x, float *places, uint32_t barriers) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum = x;
    for (int n = 0; n < 6; n++) {
        float *place = places + n % 2 * 32;
        const uint32_t full = barriers + n % 2 * 8, empty = full + 16, parity = n / 2 % 2;
        if (warp == 0) {
            if (n >= 2)
                mbarrier_wait(empty, FAULT == 13 ? parity : parity ^ 1);
            place[lane] = x + n;
            __syncwarp();
            if (lane == 0)
                mbarrier_arrive(full);
        } else if (warp == 1) {
            mbarrier_wait(full, parity);
            if (FAULT == 11) {
                if (lane == 0)
                    mbarrier_arrive(empty);
                sum += place[lane];
            } else {
                sum += place[lane];
                __syncwarp();
                if (lane == 0 && !(FAULT == 14 && n == 1))
                    mbarrier_arrive(empty);
                if (lane == 0 && FAULT == 15)
                    mbarrier_arrive(empty);
            }
        }
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(PLANTED_THREADS)
    planted_block(const __grid_constant__ struct planted_arguments a) {
    __shared__ __align__(128) float tile[PLANTED_THREADS], sums[4], places[96];
    __shared__ uint64_t barriers[4];
    const uint32_t ring_barriers = shared_address(barriers);
    if (threadIdx.x == 0)
        for (int i = 0; i < 4; i++)
            mbarrier_init(ring_barriers + 8 * i, 1);
    __syncthreads();
    float x = exchange(a, tile);
    if (FAULT == 6)
        x += places[95];
    if (FAULT == 8 && threadIdx.x % 2 == 0)
        __syncthreads();
    if (FAULT == 17 && threadIdx.x == 3)
        return;
    x += warp_sum(x, sums);
    x += hand_over(x, places);
    __syncthreads();
    x = ring(x, places, ring_barriers);
    if (FAULT == 10 && threadIdx.x == 127)
        x += a.in[a.count];
    if (FAULT == 16) {
        float c[4];
        const uint32_t zero[4] = {0, 0, 0, 0};
        if (x < -1e30f)
            c[0] = c[1] = c[2] = c[3] = 0;
        mma_m16n8k16_bf16(c, zero, 0, 0);
        x += c[0] * 0;
    }
    a.out[(int64_t)blockIdx.x * PLANTED_THREADS + threadIdx.x] = x;
    if (FAULT == 4)
        a.out[(int64_t)gridDim.x * PLANTED_THREADS + threadIdx.x] += x;
    else
        atomicAdd(a.out + (int64_t)gridDim.x * PLANTED_THREADS + threadIdx.x, x);
    if (FAULT == 18) { /* an order of blocks without release and acquire */
        volatile int32_t *flag = a.flags;
        if (threadIdx.x == 0) {
            if (blockIdx.x == 0)
                a.out[0] = 7, *flag = 1;
            else if (*flag == 1)
                a.out[1] = a.out[0];
        }
    }
}
