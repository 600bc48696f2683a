/* loops.cuh: what the bare loops of this folder share: bounded waits, addresses, operands of wgmma, the clock.
 *
 * By nvcc a wait that lasts too long is a trap, so a fault in a hand-shake ends as an error. On the emulated device
 * (__CUDACC_RTC__) waits are the plain ones, whose deadlocks it reports; there is no clock there. */
#ifndef HOPPER_LOOPS_CUH
#define HOPPER_LOOPS_CUH

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"

enum { PANEL = 8192, ROWS_BYTES = 512 }; /* 64 rows of 64 columns; lse and delta of 64 rows */

struct loop_params {
    struct cuda_tensor_map qm, om; /* [heads][tokens][D] and [Dv], in boxes of 32 rows of 64 columns */
    uint64_t *time;                /* clocks of each block */
    uint32_t *out;                 /* what the accumulators hold at the end */
    float *dq;                     /* [heads][tokens][D], in the order of the accumulators */
    const float *rows;             /* lse or delta, in lane order */
    float scale;                   /* of the scores, to base 2 */
    int steps, heads, tokens, stagger;
};

/* A number that is the same in a warp's lanes, as the assembler knows then: descriptors of products want uniform
 * registers. */
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

/* ---- waits ---- */

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
#ifdef __CUDACC_RTC__
    mbarrier_wait(barrier, parity);
#else
#    pragma unroll 1
    for (int i = 0; i < 400000; i++) {
        uint32_t done;
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
        if (done)
            return;
    }
    __trap();
#endif
}
/* One arrival of a warp, here and at the same barrier of the other block. */
__device__ __forceinline__ void arrive_warp(uint32_t barrier) {
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive(barrier);
}
__device__ __forceinline__ void arrive_warp_pair(uint32_t barrier, uint32_t other) {
    if (threadIdx.x % 32 == 0) {
        mbarrier_arrive(barrier);
        mbarrier_arrive_remote(other);
    }
}
__device__ __forceinline__ void cluster_sync() {
    __syncwarp();
    barrier_cluster_arrive();
    barrier_cluster_wait();
}
/* ---- the clock ---- */

__device__ __forceinline__ uint64_t now() {
#ifdef __CUDACC_RTC__
    return 0;
#else
    return clock64();
#endif
}

/* ---- operands ---- */

/* The k-th 16 columns of a matrix in panels of `rows` rows; the k-th 16 rows of one in panels of 64. */
template <int rows = 64> __device__ __forceinline__ uint64_t columns(uint32_t matrix, int k) {
    return wgmma_descriptor(matrix + k / 4 * (rows * 128) + k % 4 * 32, 0);
}
template <int rows = 64> __device__ __forceinline__ uint64_t rows_of(uint32_t matrix, int k) {
    return wgmma_descriptor(matrix + k * 2048, rows * 128);
}
/* Sums that a product has made are not read before. */
template <int count> __device__ __forceinline__ void pin(float (&d)[count]) {
#ifndef __CUDACC_RTC__
#    pragma unroll
    for (int i = 0; i < count; i++)
        asm volatile("" : "+f"(d[i]) : : "memory");
#endif
}

/* ---- statistics of rows, in lane order: a thread's 16 rows of S^T are four words of 16 bytes ---- */

struct four {
    float x[4];
};
__device__ __forceinline__ four row_stats(uint32_t rows, int n) { /* of columns 16n + 2q, +1, +8, +9 */
    uint32_t r[4];
    ld_shared_16(r, rows + n * 64 + threadIdx.x % 4 * 16);
    return {{__uint_as_float(r[0]), __uint_as_float(r[1]), __uint_as_float(r[2]), __uint_as_float(r[3])}};
}
/* P^T = exp2(scale S^T - lse), in float32 and as an operand. */
__device__ __forceinline__ void make_p(float (&s)[32], uint32_t (&p)[4][4], float scale, uint32_t rows) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const four l = row_stats(rows, n);
#pragma unroll
        for (int e = 0; e < 8; e++)
            s[8 * n + e] = ex2_approx(fmaf(s[8 * n + e], scale, -l.x[e / 4 * 2 + e % 2]));
#pragma unroll
        for (int e = 0; e < 4; e++)
            p[n][e] = cvt_bf16x2(s[8 * n + 2 * e], s[8 * n + 2 * e + 1]);
    }
}
/* dS^T = P^T (dP^T - delta), as an operand. */
__device__ __forceinline__ void make_ds(uint32_t (&g)[4][4], const float (&s)[32], const float (&dp)[32],
                                        uint32_t delta) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const four x = row_stats(delta, n);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int at = 8 * n + 2 * e;
            g[n][e] = cvt_bf16x2(s[at] * (dp[at] - x.x[e / 2 * 2]), s[at + 1] * (dp[at + 1] - x.x[e / 2 * 2 + 1]));
        }
    }
}
/* dS^T into [rows][64 keys] at `ds`, as the left operand of dQ. */
__device__ __forceinline__ void store_ds(uint32_t ds, const uint32_t (&g)[4][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int row = n * 16 + lane % 16, c = warp * 2 + lane / 16;
        const uint32_t r[4] = {g[n][0], g[n][2], g[n][1], g[n][3]};
        stmatrix_x4_trans(ds + row * 128 + ((c ^ (row & 7)) * 16), r);
    }
}

/* ---- head dim 128: 64 of a block's 128 keys and 64 rows ---- */

/* S^T or dP^T, of keys and rows. */
__device__ __forceinline__ void multiply_keys(float (&s)[32], uint32_t keys, uint32_t rows) {
#pragma unroll
    for (int k = 0; k < 8; k++)
        wgmma_m64k16<false, 0>(s, columns<128>(keys, k), columns(rows, k), k > 0);
    wgmma_commit_group();
}
/* dK or dV += the operand times rows. */
__device__ __forceinline__ void add_rows(float (&d)[64], const uint32_t (&g)[4][4], uint32_t rows) {
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_m64k16<false, 1>(d, g[k], rows_of(rows, k), true);
    wgmma_commit_group();
}

/* ---- work ---- */

/* A head is that of a cluster; rows begin `stagger` tiles after those of the cluster before. */
__device__ __forceinline__ int head_of(const loop_params &a) {
    return (int)((int64_t)(blockIdx.x / 2) * a.heads / ((gridDim.x + 1) / 2));
}
__device__ __forceinline__ int tile_of(const loop_params &a, int i) {
    return (i + (int)(blockIdx.x / 2) * a.stagger) % (a.tokens / 64);
}
template <int count> __device__ __forceinline__ void keep(const loop_params &a, int place, const float (&d)[count]) {
    uint32_t *to = a.out + ((int64_t)blockIdx.x * 512 + place) * 64;
#pragma unroll
    for (int i = 0; i < count / 2; i++)
        to[i] = cvt_bf16x2(d[2 * i], d[2 * i + 1]);
}

#endif
