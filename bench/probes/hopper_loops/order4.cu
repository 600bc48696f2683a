/* order4.cu: the backward at head dim 128 in order 4, with dQ's way out by warps of their own: bare loops.
 *
 * A block owns 128 keys, 64 rows a step; two warpgroups own 64 keys each and make 64 columns of dQ each. A step: S^T
 * and dP^T | P under dP^T | dV | dS under dV | dQ, dK | dQ to a staging buffer, of which each has two, under dK. LATE:
 * dQ is that of the step before, so nobody waits for the other's dS. SKEW 1: warpgroup 1 begins half a step later; 2:
 * it also stays there, as each issues its first products of a step after the other's last.
 *
 * Barriers: K and V full; Q with dO full, and empty; sums of dQ full and empty of each warpgroup and buffer. Named: 1
 * dS of both, 2 and 3 turns of the warpgroups; LATE: from 4 on dS full of each warpgroup and buffer, from 8 on empty.
 * While a product is under way nobody polls an mbarrier: ptxas (13.0) then runs out of registers. */
#include "loops.cuh"

/* ADDS: dQ is added; without it, what is left tells what that costs. */
template <bool LATE, int SKEW, bool ADDS = true, bool EARLY = false> struct order4 {
    enum {
        K = 0,
        V = 32768,
        Q = 65536,
        DOUT = 98304,
        DS = 131072,
        STAGING = 163840,
        ROWS = 229376,
        KV_FULL = ROWS + 2 * ROWS_BYTES,
        FULL = KV_FULL + 8,
        EMPTY = FULL + 16,
        DQ_FULL = EMPTY + 16,
        DQ_EMPTY = DQ_FULL + 32,
        END = DQ_EMPTY + 32,
        DS_FULL = 4, /* named barriers */
        DS_EMPTY = 8
    };
    const loop_params &a;
    uint32_t base;

    __device__ __forceinline__ void init() const {
        mbarrier_init(base + KV_FULL, 1);
        for (int n = 0; n < 2; n++) {
            mbarrier_init(base + FULL + n * 8, 1);
            mbarrier_init(base + EMPTY + n * 8, 8);
        }
        for (int n = 0; n < 4; n++) {
            mbarrier_init(base + DQ_FULL + n * 8, 4);
            mbarrier_init(base + DQ_EMPTY + n * 8, 1);
        }
        fence_mbarrier_init();
    }
    __device__ __forceinline__ int head() const { return (int)((int64_t)blockIdx.x * a.heads / gridDim.x); }
    __device__ __forceinline__ int tile(int i) const {
        return (i + (int)blockIdx.x * a.stagger + a.tokens / 64) % (a.tokens / 64);
    }

    /* ---- the warpgroups that own keys ---- */

    /* Columns 64w.. of dS K, over both warpgroups' keys. */
    __device__ __forceinline__ void multiply_ds(float (&x)[32], int i, int w) const {
#pragma unroll
        for (int k = 0; k < 8; k++)
            wgmma_m64k16<false, 1>(x, columns(base + DS + (i & 1) * 16384, k), rows_of<128>(base + K + w * 16384, k),
                                   k > 0);
        wgmma_commit_group();
    }
    __device__ __forceinline__ uint32_t lse_of(int i) const { return base + ROWS + (i & 1) * ROWS_BYTES; }
    __device__ __forceinline__ uint32_t delta_of(int i) const { return lse_of(i) + ROWS_BYTES / 2; }
    __device__ __forceinline__ void stage(const float (&x)[32], int i, int w) const {
        const int buffer = w * 2 + (i & 1);
#pragma unroll
        for (int n = 0; n < 8; n++)
            st_shared_16(base + STAGING + buffer * 16384 + (n * 128 + threadIdx.x % 128) * 16,
                         __float_as_uint(x[4 * n]), __float_as_uint(x[4 * n + 1]), __float_as_uint(x[4 * n + 2]),
                         __float_as_uint(x[4 * n + 3]));
        fence_proxy_async();
        __syncwarp();
        arrive_warp(base + DQ_FULL + buffer * 8);
    }
    __device__ __forceinline__ void step(int i, int w, float (&dk)[64], float (&dv)[64]) const {
        const uint32_t q = base + Q + (i & 1) * 16384, dout = base + DOUT + (i & 1) * 16384;
        float s[32], d[32];
        uint32_t p[4][4], g[4][4];
        wait(base + FULL + (i & 1) * 8, i >> 1 & 1);
        wait(base + DQ_EMPTY + (w * 2 + (i & 1)) * 8, (i >> 1 & 1) ^ 1);
        if (SKEW == 2)
            barrier_sync(2 + w, 256);
        wgmma_fence();
        multiply_keys(s, base + K + w * 8192, q);
        multiply_keys(d, base + V + w * 8192, dout);
        wgmma_wait_group<1>(s);
        make_p(s, p, a.scale, lse_of(i));
        wgmma_fence();
        add_rows(dv, p, dout);
        wgmma_wait_group<1>(d);
        make_ds(g, s, d, delta_of(i));
        if (LATE)
            barrier_sync(DS_EMPTY + w * 2 + (i & 1), 256);
        store_ds(base + DS + (i & 1) * 16384 + w * 8192, g);
        fence_proxy_async();
        if (LATE) {
            barrier_arrive(DS_FULL + w * 2 + (i & 1), 256);
            barrier_sync(DS_FULL + (w ^ 1) * 2 + (i & 1 ^ 1), 256); /* of step i - 1 */
        } else
            barrier_sync(1, 256);
        wgmma_fence();
        multiply_ds(d, LATE ? i + 1 : i, w);
        add_rows(dk, g, q);
        if (SKEW == 2)
            barrier_arrive(3 - w, 256);
        wgmma_wait_group<1>(d);
        pin(dv);
        if (LATE)
            barrier_arrive(DS_EMPTY + (w ^ 1) * 2 + (i & 1 ^ 1), 256);
        stage(d, i, w);
        wgmma_wait_group<0>(dk);
        arrive_warp(base + EMPTY + (i & 1) * 8);
    }
    /* dQ of the step before first: S^T, dQ | P under dQ | dV | dQ to the staging buffer under dV | dP^T | dS | dK. */
    __device__ __forceinline__ void early_step(int i, int w, float (&dk)[64], float (&dv)[64]) const {
        const uint32_t q = base + Q + (i & 1) * 16384, dout = base + DOUT + (i & 1) * 16384;
        float s[32], d[32];
        uint32_t p[4][4], g[4][4];
        wait(base + FULL + (i & 1) * 8, i >> 1 & 1);
        wait(base + DQ_EMPTY + (w * 2 + (i & 1)) * 8, (i >> 1 & 1) ^ 1);
        wgmma_fence();
        multiply_keys(s, base + K + w * 8192, q);
        barrier_sync(DS_FULL + (w ^ 1) * 2 + (i & 1 ^ 1), 256);
        wgmma_fence();
        multiply_ds(d, i + 1, w);
        wgmma_wait_group<1>(s);
        make_p(s, p, a.scale, lse_of(i));
        wgmma_fence();
        add_rows(dv, p, dout);
        wgmma_wait_group<1>(d);
        barrier_arrive(DS_EMPTY + (w ^ 1) * 2 + (i & 1 ^ 1), 256);
        stage(d, i, w);
        wgmma_fence();
        multiply_keys(d, base + V + w * 8192, dout);
        wgmma_wait_group<0>(d);
        pin(dv);
        make_ds(g, s, d, delta_of(i));
        barrier_sync(DS_EMPTY + w * 2 + (i & 1), 256);
        store_ds(base + DS + (i & 1) * 16384 + w * 8192, g);
        fence_proxy_async();
        barrier_arrive(DS_FULL + w * 2 + (i & 1), 256);
        wgmma_fence();
        add_rows(dk, g, q);
        wgmma_wait_group<0>(dk);
        arrive_warp(base + EMPTY + (i & 1) * 8);
    }
    __device__ __forceinline__ void own(int w) const {
        float dk[64], dv[64];
#pragma unroll
        for (int i = 0; i < 64; i++)
            dk[i] = dv[i] = 0;
        wait(base + KV_FULL, 0);
        if (SKEW == 2 && w == 1)
            barrier_arrive(2, 256); /* warpgroup 0 begins */
        if (LATE) {                 /* of the step before the first: its dS is there, the other buffer is empty */
            barrier_arrive(DS_FULL + w * 2 + 1, 256);
            barrier_arrive(DS_EMPTY + (w ^ 1) * 2, 256);
        }
        const uint64_t begin = now();
#pragma unroll 1
        for (int i = 0; i < a.steps; i++) {
            if (SKEW == 1 && i == 0 && w == 1)
                barrier_sync(2, 256);
            if (EARLY)
                early_step(i, w, dk, dv);
            else
                step(i, w, dk, dv);
            if (SKEW == 1 && i == 0 && w == 0)
                barrier_arrive(2, 256);
        }
        if (SKEW == 2 && w == 0)
            barrier_sync(2, 256); /* its last turn */
        if (LATE) {               /* after an even number of steps */
            barrier_sync(DS_FULL + (w ^ 1) * 2 + 1, 256);
            barrier_sync(DS_EMPTY + w * 2, 256);
        }
        if (threadIdx.x % 128 == 0 && w == 0)
            a.time[blockIdx.x] = now() - begin;
        keep(a, w * 128 + threadIdx.x % 128, dk);
        keep(a, 256 + w * 128 + threadIdx.x % 128, dv);
    }

    /* ---- the warpgroup that moves ---- */

    __device__ __forceinline__ void load_panels(uint32_t to, const cuda_tensor_map *map, uint32_t barrier, int rows,
                                                int row) const {
        for (int n = 0; n < 2; n++)
            for (int part = 0; part < rows; part += 32)
                cp_async_bulk_tensor_3d(to + n * rows * 128 + part * 128, map, barrier, n * 64, row + part, head());
    }
    __device__ __forceinline__ void load() const {
        const int keys = (int)blockIdx.x * 128 % a.tokens;
        mbarrier_arrive_expect_tx(base + KV_FULL, 65536);
        load_panels(base + K, &a.qm, base + KV_FULL, 128, keys);
        load_panels(base + V, &a.om, base + KV_FULL, 128, keys);
        for (int i = 0; i < a.steps; i++) {
            const int stage = i & 1, row = tile(i) * 64;
            const uint32_t full = base + FULL + stage * 8, rows = base + ROWS + stage * ROWS_BYTES;
            wait(base + EMPTY + stage * 8, (i >> 1 & 1) ^ 1);
            mbarrier_arrive_expect_tx(full, 32768 + ROWS_BYTES);
            load_panels(base + Q + stage * 16384, &a.qm, full, 64, row);
            cp_async_bulk(rows, a.rows + row, ROWS_BYTES / 2, full);
            load_panels(base + DOUT + stage * 16384, &a.om, full, 64, row);
            cp_async_bulk(rows + ROWS_BYTES / 2, a.rows + row, ROWS_BYTES / 2, full);
        }
    }
    __device__ __forceinline__ void add(int w) const {
        float *dq = a.dq + (int64_t)head() * a.tokens * 128 + w * 4096;
        for (int i = 0; i < a.steps; i++) {
            const int buffer = w * 2 + (i & 1);
            wait(base + DQ_FULL + buffer * 8, i >> 1 & 1);
            if (ADDS || a.scale == 0)
                cp_reduce_async_bulk_add(dq + (int64_t)tile(LATE ? i - 1 : i) * 8192, base + STAGING + buffer * 16384,
                                         16384);
            cp_async_bulk_commit();
            cp_async_bulk_wait_read<0>();
            mbarrier_arrive(base + DQ_EMPTY + buffer * 8);
        }
        cp_async_bulk_wait<0>();
    }

    __device__ __forceinline__ void run() const {
        if (threadIdx.x == 0)
            init();
        for (int i = threadIdx.x * 16; i < 32768; i += 384 * 16)
            st_shared_16(base + DS + i, 0, 0, 0, 0); /* LATE: of the step before the first */
        fence_proxy_async();
        __syncthreads();
        const int warpgroup = uniform(threadIdx.x / 128), warp = threadIdx.x / 32;
        if (warpgroup == 0) {
            setmaxnreg_dec<24>();
            if (threadIdx.x % 32 == 0 && warp == 0)
                load();
            else if (threadIdx.x % 32 == 0 && warp < 3)
                add(warp - 1);
        } else {
            setmaxnreg_inc<240>();
            own(warpgroup - 1);
        }
    }
};

extern "C" __global__ void __launch_bounds__(384, 1) order4_plain(const __grid_constant__ loop_params a) {
    extern __shared__ __align__(1024) char shared[];
    order4<false, 0>{a, shared_address(shared)}.run();
}
extern "C" __global__ void __launch_bounds__(384, 1) order4_late(const __grid_constant__ loop_params a) {
    extern __shared__ __align__(1024) char shared[];
    order4<true, 0>{a, shared_address(shared)}.run();
}
extern "C" __global__ void __launch_bounds__(384, 1) order4_late_skewed(const __grid_constant__ loop_params a) {
    extern __shared__ __align__(1024) char shared[];
    order4<true, 1>{a, shared_address(shared)}.run();
}
extern "C" __global__ void __launch_bounds__(384, 1) order4_late_turns(const __grid_constant__ loop_params a) {
    extern __shared__ __align__(1024) char shared[];
    order4<true, 2>{a, shared_address(shared)}.run();
}
extern "C" __global__ void __launch_bounds__(384, 1)
    order4_late_skewed_no_additions(const __grid_constant__ loop_params a) {
    extern __shared__ __align__(1024) char shared[];
    order4<true, 1, false>{a, shared_address(shared)}.run();
}
extern "C" __global__ void __launch_bounds__(384, 1) order4_early(const __grid_constant__ loop_params a) {
    extern __shared__ __align__(1024) char shared[];
    order4<true, 0, true, true>{a, shared_address(shared)}.run();
}
extern "C" __global__ void __launch_bounds__(384, 1) order4_early_skewed(const __grid_constant__ loop_params a) {
    extern __shared__ __align__(1024) char shared[];
    order4<true, 1, true, true>{a, shared_address(shared)}.run();
}
