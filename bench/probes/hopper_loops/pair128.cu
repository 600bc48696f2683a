/* pair128.cu: the backward at head dim 128 in order 4 by pairs of blocks: a bare loop.
 *
 * Both blocks of a cluster own 128 keys and take the same 64 rows a step; two warpgroups of a block own 64 keys each.
 * dQ of tile i is made by block i mod 2 over the pair's 256 keys, a step late; the other has sent its dS. A warpgroup
 * makes 64 columns of it, every second step. Q and dO come by multicast halves.
 *
 * Barriers: K and V full; Q with dO full, and empty (of both blocks); out (dS to be sent) full and empty; in full;
 * sums of dQ full and empty, of each warpgroup. Named: from 1 on dS full of each warpgroup, from 3 on empty. */
#include "loops.cuh"

struct pair128 {
    enum {
        K = 0,
        PEER_K = 32768,
        V = 65536,
        Q = 98304,
        DOUT = 131072,
        DS = 163840,
        IN = 180224,
        OUT = 196608,
        STAGING = 212992,
        ROWS = 229376,
        KV_FULL = ROWS + 2 * ROWS_BYTES,
        FULL = KV_FULL + 8,
        EMPTY = FULL + 16,
        OUT_FULL = EMPTY + 16,
        OUT_EMPTY = OUT_FULL + 8,
        IN_FULL = OUT_EMPTY + 8,
        DQ_FULL = IN_FULL + 8,
        DQ_EMPTY = DQ_FULL + 16,
        DS_BYTES = 16384,
        DS_FULL = 1, /* named barriers */
        DS_EMPTY = 3
    };
    const loop_params &a;
    uint32_t base, other, rank;

    __device__ __forceinline__ void init() const {
        mbarrier_init(base + KV_FULL, 1);
        for (int n = 0; n < 2; n++) {
            mbarrier_init(base + FULL + n * 8, 1);
            mbarrier_init(base + EMPTY + n * 8, 16);
            mbarrier_init(base + DQ_FULL + n * 8, 4);
            mbarrier_init(base + DQ_EMPTY + n * 8, 1);
        }
        mbarrier_init(base + OUT_FULL, 8);
        mbarrier_init(base + OUT_EMPTY, 8);
        mbarrier_init(base + IN_FULL, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(base + IN_FULL, DS_BYTES);
    }

    /* ---- the warpgroups that own keys ---- */

    __device__ __forceinline__ void multiply_ds(float (&x)[32], int w) const {
#pragma unroll
        for (int k = 0; k < 16; k++)
            wgmma_m64k16<false, 1>(x, columns(base + (k < 8 ? DS : IN), k % 8),
                                   rows_of<128>(base + (k < 8 ? K : PEER_K) + w * 16384, k % 8), k > 0);
        wgmma_commit_group();
    }
    __device__ __forceinline__ uint32_t lse_of(int i) const { return base + ROWS + (i & 1) * ROWS_BYTES; }
    __device__ __forceinline__ uint32_t delta_of(int i) const { return lse_of(i) + ROWS_BYTES / 2; }
    /* 32 columns of the sums; `use`: how often this was done before. */
    template <int half> __device__ __forceinline__ void stage(const float (&x)[32], int use, int w) const {
        wait(base + DQ_EMPTY + w * 8, (use & 1) ^ 1);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float *at = x + 16 * half + 4 * n;
            st_shared_16(base + STAGING + w * 8192 + (n * 128 + threadIdx.x % 128) * 16, __float_as_uint(at[0]),
                         __float_as_uint(at[1]), __float_as_uint(at[2]), __float_as_uint(at[3]));
        }
        fence_proxy_async();
        __syncwarp();
        arrive_warp(base + DQ_FULL + w * 8);
    }
    /* MINE: dQ of the step's rows is made here, in the next step. */
    template <bool MINE> __device__ __forceinline__ void step(int i, int w, float (&dk)[64], float (&dv)[64]) const {
        const uint32_t q = base + Q + (i & 1) * 16384, dout = base + DOUT + (i & 1) * 16384;
        float s[32], d[32];
        uint32_t p[4][4], g[4][4];
        wait(base + FULL + (i & 1) * 8, i >> 1 & 1);
        wgmma_fence();
        multiply_keys(s, base + K + w * 8192, q);
        multiply_keys(d, base + V + w * 8192, dout);
        wgmma_wait_group<1>(s);
        make_p(s, p, a.scale, lse_of(i));
        wgmma_fence();
        add_rows(dv, p, dout);
        wgmma_wait_group<1>(d);
        make_ds(g, s, d, delta_of(i));
        if (MINE) {
            barrier_sync(DS_EMPTY + w, 256);
            store_ds(base + DS + w * 8192, g);
            fence_proxy_async();
            barrier_arrive(DS_FULL + w, 256);
            wgmma_fence();
        } else {
            wait(base + OUT_EMPTY, (i >> 1 & 1) ^ rank); /* block 1 has had one tile, of zeros, before */
            store_ds(base + OUT + w * 8192, g);
            fence_proxy_async();
            __syncwarp();
            arrive_warp(base + OUT_FULL);
            barrier_sync(DS_FULL + (w ^ 1), 256);
            wait(base + IN_FULL, i >> 1 & 1);
            wgmma_fence();
            multiply_ds(d, w);
        }
        add_rows(dk, g, q);
        if (!MINE) {
            wgmma_wait_group<1>(d);
            pin(dv);
            if (threadIdx.x == 128) /* the next phase ends when all warps have read this tile */
                mbarrier_arrive_expect_tx(base + IN_FULL, DS_BYTES);
            __syncwarp();
            barrier_arrive(DS_EMPTY + (w ^ 1), 256);
            if (threadIdx.x % 32 == 0)
                mbarrier_arrive_remote(other + OUT_EMPTY);
            stage<0>(d, i & ~1, w);
            stage<1>(d, i | 1, w);
        }
        wgmma_wait_group<0>(dk);
        pin(dv);
        arrive_warp_pair(base + EMPTY + (i & 1) * 8, other + EMPTY + (i & 1) * 8);
    }
    __device__ __forceinline__ void own(int w) const {
        float dk[64], dv[64];
#pragma unroll
        for (int i = 0; i < 64; i++)
            dk[i] = dv[i] = 0;
        wait(base + KV_FULL, 0);
        if (rank == 0)
            barrier_arrive(DS_EMPTY + (w ^ 1), 256);
        else
            barrier_arrive(DS_FULL + w, 256); /* of the step before the first */
        const uint64_t begin = now();
#pragma unroll 1
        for (int i = 0; i < a.steps; i++)
            if ((i & 1) == (int)rank)
                step<true>(i, w, dk, dv);
            else
                step<false>(i, w, dk, dv);
        if (threadIdx.x % 128 == 0 && w == 0)
            a.time[blockIdx.x] = now() - begin;
        if (rank == 0)
            barrier_sync(DS_EMPTY + w, 256);
        else {
            barrier_sync(DS_FULL + (w ^ 1), 256);
            wait(base + IN_FULL, a.steps >> 1 & 1); /* the last tile, of which no dQ is made */
        }
        keep(a, w * 128 + threadIdx.x % 128, dk);
        keep(a, 256 + w * 128 + threadIdx.x % 128, dv);
    }

    /* ---- the warpgroup that moves ---- */

    __device__ __forceinline__ void load_keys(uint32_t to, const cuda_tensor_map *map, int row) const {
        for (int n = 0; n < 8; n++)
            cp_async_bulk_tensor_3d(to + n * 4096, map, base + KV_FULL, n / 4 * 64, row + n % 4 * 32, head_of(a));
    }
    __device__ __forceinline__ void load_half(uint32_t to, const cuda_tensor_map *map, uint32_t full, int row) const {
        for (int n = 0; n < 2; n++)
            cp_async_bulk_tensor_3d_multicast(to + n * PANEL + rank * (PANEL / 2), map, full, n * 64, row + rank * 32,
                                              head_of(a), 3);
    }
    __device__ __forceinline__ void load() const {
        const int keys = (int)(blockIdx.x / 2) * 256 % a.tokens;
        mbarrier_arrive_expect_tx(base + KV_FULL, 98304);
        load_keys(base + K, &a.qm, keys + rank * 128);
        load_keys(base + PEER_K, &a.qm, keys + (rank ^ 1) * 128);
        load_keys(base + V, &a.om, keys + rank * 128);
        for (int i = 0; i < a.steps; i++) {
            const int stage = i & 1, row = tile_of(a, i) * 64;
            const uint32_t full = base + FULL + stage * 8, rows = base + ROWS + stage * ROWS_BYTES;
            wait(base + EMPTY + stage * 8, (i >> 1 & 1) ^ 1);
            mbarrier_arrive_expect_tx(full, 32768 + ROWS_BYTES);
            load_half(base + Q + stage * 16384, &a.qm, full, row);
            cp_async_bulk(rows, a.rows + row, ROWS_BYTES / 2, full);
            load_half(base + DOUT + stage * 16384, &a.om, full, row);
            cp_async_bulk(rows + ROWS_BYTES / 2, a.rows + row, ROWS_BYTES / 2, full);
        }
    }
    __device__ __forceinline__ void send_all() const {
        if (rank == 0)
            cp_async_bulk_cluster(other + IN, base + OUT, DS_BYTES, other + IN_FULL); /* zeros */
        for (int i = rank ^ 1; i < a.steps; i += 2) {
            wait(base + OUT_FULL, i >> 1 & 1);
            cp_async_bulk_cluster(other + IN, base + OUT, DS_BYTES, other + IN_FULL);
        }
    }
    __device__ __forceinline__ void add(int w) const {
        float *dq = a.dq + (int64_t)head_of(a) * a.tokens * 128 + w * 4096;
        for (int i = rank ^ 1, use = 0; i < a.steps; i += 2)
            for (int half = 0; half < 2; half++, use++) {
                const int tile = (tile_of(a, i) + a.tokens / 64 - 1) % (a.tokens / 64);
                wait(base + DQ_FULL + w * 8, use & 1);
                cp_reduce_async_bulk_add(dq + (int64_t)tile * 8192 + half * 2048, base + STAGING + w * 8192, 8192);
                cp_async_bulk_commit();
                cp_async_bulk_wait_read<0>();
                mbarrier_arrive(base + DQ_EMPTY + w * 8);
            }
        cp_async_bulk_wait<0>();
    }

    __device__ __forceinline__ void run() const {
        if (threadIdx.x == 0)
            init();
        for (int i = threadIdx.x * 16; i < 3 * DS_BYTES; i += 384 * 16)
            st_shared_16(base + DS + i, 0, 0, 0, 0); /* of the step before the first */
        fence_proxy_async();
        __syncthreads();
        cluster_sync();
        const int warpgroup = uniform(threadIdx.x / 128), warp = threadIdx.x / 32;
        if (warpgroup == 0) {
            setmaxnreg_dec<24>();
            if (threadIdx.x == 0)
                load();
            else if (threadIdx.x % 32 == 0 && warp == 3)
                send_all();
            else if (threadIdx.x % 32 == 0 && warp > 0)
                add(warp - 1);
        } else {
            setmaxnreg_inc<240>();
            own(warpgroup - 1);
        }
        cluster_sync();
    }
};

extern "C" __global__ void __launch_bounds__(384, 1) pair_128(const __grid_constant__ loop_params a) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t base = shared_address(shared), rank = uniform(cluster_ctarank());
    pair128{a, base, mapa_shared(base, rank ^ 1), rank}.run();
}
