/* planted_ring.cu: c = a * b^T, 64 x 64 on compute capability 9.0: TMA, a ring of two stages, wgmma, a store by
 * TMA; a cluster of two blocks that ask each other for nothing but a number. Each FAULT spoils one thing.
 */
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "planted/planted.h"

#define TILE_BYTES   (64 * 128)
#define STAGE_BYTES  (2 * TILE_BYTES)
#define OUT_OFFSET   (2 * STAGE_BYTES)
#define FULL_OFFSET  (OUT_OFFSET + 64 * 64 * 4)
#define EMPTY_OFFSET (FULL_OFFSET + 16)
#define WORD_OFFSET  (EMPTY_OFFSET + 16)

__device__ __forceinline__ void produce(const struct planted_arguments &a, uint32_t shared) {
    for (int step = 0; step < PLANTED_STEPS; step++) {
        const uint32_t stage = shared + step % 2 * STAGE_BYTES, full = shared + FULL_OFFSET + step % 2 * 8;
        if (step >= 2 && FAULT != 3)
            mbarrier_wait(shared + EMPTY_OFFSET + step % 2 * 8, FAULT == 1 ? step / 2 % 2 : step / 2 % 2 ^ 1);
        mbarrier_arrive_expect_tx(full, FAULT == 2 && step == 3 ? STAGE_BYTES + 16 : STAGE_BYTES);
        cp_async_bulk_tensor_3d(stage, &a.a, full, step * 64 + (FAULT == 19 ? 4 : 0), 0, 0);
        cp_async_bulk_tensor_3d(stage + TILE_BYTES, &a.b, full, step * 64, 0, 0);
    }
}

/* a through registers, past the swizzle by hand. */
__device__ __forceinline__ void load_a(uint32_t (&r)[4], uint32_t rows, int k) {
    const uint32_t lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16, chunk = 2 * k + lane / 16;
    ldmatrix_x4(r, rows + row * 128 + (chunk ^ row % (FAULT == 4 ? 4 : 8)) * 16);
}

__device__ __forceinline__ void consume(float (&d)[32], uint32_t shared) {
    for (int step = 0; step < PLANTED_STEPS; step++) {
        const uint32_t stage = shared + step % 2 * STAGE_BYTES, empty = shared + EMPTY_OFFSET + step % 2 * 8;
        uint32_t fragments[4][4];
        if (FAULT != 5)
            mbarrier_wait(shared + FULL_OFFSET + step % 2 * 8, step / 2 % 2);
        for (int k = 0; k < 4; k++)
            load_a(fragments[k], stage, k);
        if (FAULT != 6)
            wgmma_fence();
        for (int k = 0; k < 4; k++)
            if (step % 2 == 0)
                wgmma_m64k16<false, 0>(d, fragments[k], wgmma_descriptor(stage + TILE_BYTES + 32 * k, 0), true);
            else
                wgmma_m64k16<false, 0>(d, wgmma_descriptor(stage + 32 * k, 0),
                                       wgmma_descriptor(stage + TILE_BYTES + 32 * k, 0), true);
        wgmma_commit_group();
        if (FAULT == 7 && threadIdx.x % 32 == 0)
            mbarrier_arrive(empty);
        if (FAULT == 8)
            d[3] += 1;
        if (FAULT != 9 || step + 1 < PLANTED_STEPS)
            wgmma_wait_group<0>(d);
        if (FAULT != 7 && threadIdx.x % 32 == 0 && !(FAULT == 10 && threadIdx.x == 160 && step == 1))
            mbarrier_arrive(empty);
    }
}

/* The sums to shared memory, and from there by TMA. */
__device__ __forceinline__ void store(const struct planted_arguments &a, const float (&d)[32], uint32_t out) {
    const uint32_t thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
    for (int i = 0; i < 32; i++)
        st_shared_4(out + ((row + i % 4 / 2 * 8) * 64 + i / 4 * 8 + thread % 4 * 2 + i % 2) * 4, __float_as_uint(d[i]));
    if (FAULT != 11)
        fence_proxy_async();
    if (FAULT != 12)
        barrier_sync(1, 128);
    if (thread == 0) {
        cp_async_bulk_tensor_3d_store(&a.c, out, 0, FAULT == 20 ? -4 : 0, blockIdx.x);
        cp_async_bulk_commit();
        if (FAULT != 13)
            cp_async_bulk_wait_read<0>();
    }
    if (FAULT == 14 && thread == 0)
        mbarrier_arrive(out + 8);
}

extern "C" __global__ void __launch_bounds__(PLANTED_RING_THREADS, 2) __cluster_dims__(2, 1, 1)
    planted_ring(const __grid_constant__ struct planted_arguments a) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t shared = shared_address(memory), rank = cluster_ctarank();
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; s++) {
            mbarrier_init(shared + FULL_OFFSET + 8 * s, 1);
            mbarrier_init(shared + EMPTY_OFFSET + 8 * s, 4);
        }
        if (FAULT != 15)
            fence_mbarrier_init();
        st_shared_4(shared + WORD_OFFSET, 40 + rank);
    }
    __syncwarp();
    if (FAULT != 16) {
        barrier_cluster_arrive();
        barrier_cluster_wait();
    } else {
        __syncthreads();
    }
    float number = 0;
    if (threadIdx.x < 128) {
        setmaxnreg_dec<FAULT == 17 ? 128 : 24>();
        if (threadIdx.x == 0)
            produce(a, shared);
        __syncwarp();
        if (FAULT != 18 && threadIdx.x == 1)
            number = (float)ld_cluster_4(mapa_shared(shared + WORD_OFFSET, rank ^ 1));
    } else {
        setmaxnreg_inc<232>();
        float d[32];
        for (int i = 0; i < 32; i++)
            d[i] = 0;
        consume(d, shared);
        store(a, d, shared + OUT_OFFSET);
        __syncwarp();
    }
    if (FAULT != 18) {
        barrier_cluster_arrive();
        barrier_cluster_wait();
    } else if (rank == 0 && threadIdx.x == 1) {
        st_release(a.flags, 1);
    } else if (rank == 1 && threadIdx.x == 1) {
        while (!ld_acquire(a.flags))
            ;
        for (int i = 0; i < 4000; i++)
            number += clock64() == 0;
        number = (float)ld_cluster_4(mapa_shared(shared + WORD_OFFSET, 0));
    }
    if (threadIdx.x == 1)
        a.out[blockIdx.x] = number;
}
