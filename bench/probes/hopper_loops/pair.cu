/* pair.cu: the backward by pairs of blocks, head dims above 128: bare loops.
 *
 * A cluster of two blocks, 64 keys each, 64 rows a step. Warpgroup 0 makes S^T, P and dV; 1 makes dP^T, dS and dK; 2
 * makes dQ and adds it; of 3 a warp loads and a warp sends dS to the other block. Q and dO come by multicast halves.
 * BY_COLUMNS: each block makes half of dQ's columns over the pair's 128 keys, and sends every dS. Otherwise tile i is
 * made by block i mod 2 alone, to which the other sends.
 *
 * Barriers: K and V full; Q full and empty, dO full and empty (of each stage: all who read, in both blocks); dS full
 * and empty; out (dS to be sent, by rows only) full and empty; in full. In is empty when the other block's dS or out
 * is. CUT leaves out the additions to dQ, or dQ and the exchange: what is left tells what they cost. Named: 1 P full, 2
 * P empty, 3 of the server. */
#include "loops.cuh"

enum { WHOLE, NO_ADDITIONS, NO_DQ };

/* PARTS: in how many parts dO is loaded and freed. */
template <int D, int DV, bool BY_COLUMNS, int PARTS, int CUT> struct pair_loop {
    enum {
        MAKER_REGISTERS = BY_COLUMNS ? 208 : 176,
        SERVER_REGISTERS = BY_COLUMNS ? 72 : 136,
        DOUT_STAGES = BY_COLUMNS ? 1 : 2,
        Q_BYTES = D * 128,
        DOUT_BYTES = DV * 128,
        PEER_BYTES = BY_COLUMNS ? Q_BYTES / 2 : Q_BYTES,
        STAGING_BYTES = BY_COLUMNS ? 16384 : D * 256,
        K = 0,
        PEER_K = K + Q_BYTES,
        V = PEER_K + PEER_BYTES,
        Q = V + DOUT_BYTES,
        DOUT = Q + 2 * Q_BYTES,
        P = DOUT + DOUT_STAGES * DOUT_BYTES,
        DS = P + PANEL,
        IN = DS + PANEL,
        OUT = BY_COLUMNS ? DS : IN + PANEL,
        STAGING = IN + PANEL + (BY_COLUMNS ? 0 : PANEL),
        ROWS = STAGING + STAGING_BYTES,
        BARRIERS = ROWS + 2 * ROWS_BYTES,
        KV_FULL = BARRIERS,
        Q_FULL = KV_FULL + 8,
        Q_EMPTY = Q_FULL + 16,
        DOUT_FULL = Q_EMPTY + 16,
        DOUT_EMPTY = DOUT_FULL + 16,
        DS_FULL = DOUT_EMPTY + 16,
        DS_EMPTY = DS_FULL + 8,
        OUT_FULL = BY_COLUMNS ? DS_FULL : DS_EMPTY + 8,
        OUT_EMPTY = BY_COLUMNS ? DS_EMPTY : DS_EMPTY + 16,
        IN_FULL = DS_EMPTY + 24,
        END = IN_FULL + 8
    };
    const loop_params &a;
    uint32_t base, other, rank; /* other: the base of the other block */

    __device__ __forceinline__ uint32_t q(int i) const { return base + Q + (i & 1) * Q_BYTES; }
    __device__ __forceinline__ uint32_t dout(int i) const { return base + DOUT + i % DOUT_STAGES * DOUT_BYTES; }
    __device__ __forceinline__ uint32_t rows(int i) const { return base + ROWS + (i & 1) * ROWS_BYTES; }
    __device__ __forceinline__ void wait_q(int i) const { wait(base + Q_FULL + (i & 1) * 8, i >> 1 & 1); }
    /* Two stages, or one stage of two parts. */
    static __device__ __forceinline__ int dout_barrier(int i, int part) {
        return (PARTS == 2 ? part : i % DOUT_STAGES) * 8;
    }
    __device__ __forceinline__ void wait_dout(int i, int part) const {
        wait(base + DOUT_FULL + dout_barrier(i, part), i / DOUT_STAGES & 1);
    }
    __device__ __forceinline__ void release_dout(int i, int part) const { release(DOUT_EMPTY + dout_barrier(i, part)); }
    __device__ __forceinline__ void release(int barrier) const { arrive_warp_pair(base + barrier, other + barrier); }

    __device__ __forceinline__ void init() const {
        mbarrier_init(base + KV_FULL, 1);
        for (int n = 0; n < 2; n++) {
            mbarrier_init(base + Q_FULL + n * 8, 1);
            mbarrier_init(base + Q_EMPTY + n * 8, 8); /* warpgroup 1 of both: S^T is made when dS is */
            mbarrier_init(base + DOUT_FULL + n * 8, 1);
            mbarrier_init(base + DOUT_EMPTY + n * 8, 16);
        }
        mbarrier_init(base + DS_FULL, 4);
        mbarrier_init(base + DS_EMPTY, BY_COLUMNS ? 8 : 4);
        if (!BY_COLUMNS) {
            mbarrier_init(base + OUT_FULL, 4);
            mbarrier_init(base + OUT_EMPTY, 4);
        }
        mbarrier_init(base + IN_FULL, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(base + IN_FULL, PANEL); /* the first; the server does the others */
    }

    /* ---- warpgroup 0 ---- */

    template <int depth> __device__ __forceinline__ void multiply(float (&s)[32], uint32_t left, uint32_t right) const {
#pragma unroll
        for (int k = 0; k < depth / 16; k++)
            wgmma_m64k16<false, 0>(s, columns(left, k), columns(right, k), k > 0);
        wgmma_commit_group();
    }
    /* Sums of 64 rows and `width` columns: with 128 registers at the start ptxas takes no product wider than 128. */
    template <int width> struct sums { float low[64], high[width > 128 ? (width - 128) / 2 : 64]; };
    template <int parts, int width>
    __device__ __forceinline__ void add_product(sums<width> &d, const uint32_t (&g)[4][4], uint32_t right) const {
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma_m64k16<false, 1>(d.low, g[k], rows_of(right, k), true);
        if (parts == 2)
            wgmma_commit_group();
        if (width > 128)
#pragma unroll
            for (int k = 0; k < 4; k++)
                wgmma_m64k16<false, 1>(d.high, g[k], rows_of(right + 2 * PANEL, k), true);
        wgmma_commit_group();
    }
    template <int pending, int width> __device__ __forceinline__ void wait_sums(sums<width> &d) const {
        wgmma_wait_group<pending>(d.low);
        if (width > 128)
            pin(d.high);
    }
    template <int width> __device__ __forceinline__ void clear(sums<width> &d) const {
#pragma unroll
        for (int i = 0; i < 64; i++)
            d.low[i] = 0;
        if (width > 128)
#pragma unroll
            for (int i = 0; i < (width - 128) / 2; i++)
                d.high[i] = 0;
    }
    template <int width> __device__ __forceinline__ void keep_sums(int place, const sums<width> &d) const {
        keep(a, place, d.low);
        if (width > 128)
            keep(a, 256 + place, d.high);
    }
    __device__ __forceinline__ void make_dv() const {
        const uint32_t exchange = base + P + threadIdx.x % 128 * 16;
        sums<DV> dv;
        float s[32];
        uint32_t p[4][4];
        clear(dv);
        wait(base + KV_FULL, 0);
        wait_q(0);
        const uint64_t begin = now();
        wgmma_fence();
        multiply<D>(s, base + K, q(0));
        wgmma_wait_group<0>(s);
#pragma unroll 1
        for (int i = 0; i < a.steps; i++) {
            make_p(s, p, a.scale, rows(i));
            if (i > 0)
                barrier_sync(2, 256);
#pragma unroll
            for (int n = 0; n < 4; n++)
                st_shared_16(exchange + n * 2048, p[n][0], p[n][1], p[n][2], p[n][3]);
            barrier_arrive(1, 256);
            wait_dout(i, 0);
            if (PARTS == 2)
                wait_dout(i, 1);
            wgmma_fence();
            add_product<PARTS>(dv, p, dout(i));
            wait_q(i + 1);
            wgmma_fence();
            multiply<D>(s, base + K, q(i + 1));
            if (PARTS == 2) {
                wgmma_wait_group<2>(dv.low);
                release_dout(i, 0);
            }
            wait_sums<1>(dv);
            release_dout(i, PARTS - 1);
            wgmma_wait_group<0>(s);
        }
        if (threadIdx.x % 128 == 0)
            a.time[blockIdx.x] = now() - begin;
        keep_sums(threadIdx.x % 128, dv);
    }

    /* ---- warpgroup 1 ---- */

    __device__ __forceinline__ void make_ds(uint32_t (&g)[4][4], const float (&dp)[32], int i) const {
        const uint32_t exchange = base + P + threadIdx.x % 128 * 16, delta = rows(i) + ROWS_BYTES / 2;
        barrier_sync(1, 256);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            ld_shared_16(g[n], exchange + n * 2048);
            const four x = row_stats(delta, n);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float low = __uint_as_float(g[n][e] << 16), high = __uint_as_float(g[n][e] & 0xffff0000u);
                const float *d = &dp[8 * n + 2 * e], *r = &x.x[e / 2 * 2];
                g[n][e] = cvt_bf16x2(low * (d[0] - r[0]), high * (d[1] - r[1]));
            }
        }
        barrier_arrive(2, 256);
    }
    __device__ __forceinline__ void multiply_vdo(float (&dp)[32], int i) const {
#pragma unroll
        for (int k = 0; k < DV / 16; k++) {
            if (k % (DV / 16 / PARTS) == 0) {
                wait_dout(i, k / (DV / 16 / PARTS));
                wgmma_fence();
            }
            wgmma_m64k16<false, 0>(dp, columns(base + V, k), columns(dout(i), k), k > 0);
        }
        wgmma_commit_group();
    }
    __device__ __forceinline__ void make_dk() const {
        sums<D> dk;
        float dp[32];
        uint32_t g[4][4];
        clear(dk);
        wait(base + KV_FULL, 0);
        multiply_vdo(dp, 0);
        wgmma_wait_group<0>(dp);
        release_dout(0, 0);
        if (PARTS == 2)
            release_dout(0, 1);
#pragma unroll 1
        for (int i = 0; i < a.steps; i++) {
            const int use = BY_COLUMNS ? i : i >> 1;
            const bool mine = BY_COLUMNS || (i & 1) == (int)rank;
            wait_q(i);
            make_ds(g, dp, i);
            wait(base + (mine ? DS_EMPTY : OUT_EMPTY), (use & 1) ^ 1);
            store_ds(base + (mine ? DS : OUT), g);
            fence_proxy_async();
            __syncwarp();
            arrive_warp(base + (mine ? DS_FULL : OUT_FULL));
            wgmma_fence();
            add_product<1>(dk, g, q(i));
            multiply_vdo(dp, i + 1);
            wait_sums<1>(dk);
            release(Q_EMPTY + (i & 1) * 8);
            wgmma_wait_group<0>(dp);
            release_dout(i + 1, 0);
            if (PARTS == 2)
                release_dout(i + 1, 1);
        }
        /* the last step's barrier 2 has no other end */
        keep_sums(128 + threadIdx.x % 128, dk);
    }

    /* ---- warpgroup 2 ---- */

    /* Leaves sums in the staging buffer, from its `place`-th column of eight on. */
    template <int count> __device__ __forceinline__ void stage(int place, const float (&x)[count]) const {
#pragma unroll
        for (int n = 0; n < count / 4; n++)
            st_shared_16(base + STAGING + ((place + n) * 128 + threadIdx.x % 128) * 16, __float_as_uint(x[4 * n]),
                         __float_as_uint(x[4 * n + 1]), __float_as_uint(x[4 * n + 2]), __float_as_uint(x[4 * n + 3]));
    }
    __device__ __forceinline__ void wait_staging() const {
        if (threadIdx.x % 128 == 0)
            cp_async_bulk_wait_read<0>();
        barrier_sync(3, 128);
    }
    __device__ __forceinline__ void add_staging(float *to) const {
        fence_proxy_async();
        barrier_sync(3, 128);
        if (threadIdx.x % 128 == 0 && (CUT == WHOLE || a.scale == 0)) {
            cp_reduce_async_bulk_add(to, base + STAGING, STAGING_BYTES);
            cp_async_bulk_commit();
        }
    }
    /* dS K over this block's keys, and over the other's; from panel `own` of K, `peer` of the other's. */
    template <int count> __device__ __forceinline__ void multiply_own(float (&x)[count], int own) const {
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma_m64k16<false, 1>(x, columns(base + DS, k), rows_of(base + K + own * PANEL, k), k > 0);
    }
    template <int count> __device__ __forceinline__ void multiply_in(float (&x)[count], int peer) const {
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma_m64k16<false, 1>(x, columns(base + IN, k), rows_of(base + PEER_K + peer * PANEL, k), true);
    }
    __device__ __forceinline__ void wait_in(int use) const {
        wait(base + IN_FULL, use & 1);
        if (threadIdx.x % 128 == 0)
            mbarrier_arrive_expect_tx(base + IN_FULL, PANEL);
        __syncwarp();
        wgmma_fence();
    }
    /* Half of the columns, in two parts: registers are short. */
    __device__ __forceinline__ void make_half(float *to, int use) const {
        float x[32];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            wgmma_fence();
            multiply_own(x, 2 * rank + h);
            if (h == 0)
                wait_in(use);
            multiply_in(x, h);
            wgmma_commit_group();
            wgmma_wait_group<0>(x);
            if (h == 1)
                release(DS_EMPTY);
            wait_staging();
            stage(0, x);
            add_staging(to + rank * 32 * D + h * 4096);
        }
    }
    __device__ __forceinline__ void make_whole(float *to, int use) const {
        float x[64], y[32];
        wgmma_fence();
        multiply_own(x, 0);
        multiply_own(y, 2);
        wait_in(use);
        multiply_in(x, 0);
        multiply_in(y, 2);
        wgmma_commit_group();
        wgmma_wait_group<0>(x);
        pin(y);
        arrive_warp(base + DS_EMPTY);
        if (threadIdx.x % 32 == 0)
            mbarrier_arrive_remote(other + OUT_EMPTY);
        wait_staging();
        stage(0, x);
        stage(16, y);
        add_staging(to);
    }
    __device__ __forceinline__ void serve() const {
        wait(base + KV_FULL, 0);
        float *dq = a.dq + (int64_t)head_of(a) * a.tokens * D;
#pragma unroll 1
        for (int i = BY_COLUMNS ? 0 : rank; i < a.steps; i += BY_COLUMNS ? 1 : 2) {
            const int use = BY_COLUMNS ? i : i >> 1;
            float *to = dq + (int64_t)tile_of(a, i) * (64 * D);
            wait(base + DS_FULL, use & 1);
            if (CUT == NO_DQ)
                release(DS_EMPTY);
            else if (BY_COLUMNS)
                make_half(to, use);
            else
                make_whole(to, use);
        }
        if (threadIdx.x % 128 == 0)
            cp_async_bulk_wait<0>();
    }

    /* ---- warpgroup 3 ---- */

    /* All columns of 64 rows for both blocks: this block's half of the rows. */
    __device__ __forceinline__ void load_half(uint32_t to, const cuda_tensor_map *map, uint32_t barrier, int first,
                                              int panels, int row) const {
        for (int n = first; n < first + panels; n++)
            cp_async_bulk_tensor_3d_multicast(to + n * PANEL + rank * (PANEL / 2), map, barrier, n * 64,
                                              row + rank * 32, head_of(a), 3);
    }
    __device__ __forceinline__ void load_keys(uint32_t to, const cuda_tensor_map *map, int first, int panels,
                                              int row) const {
        for (int n = 0; n < 2 * panels; n++)
            cp_async_bulk_tensor_3d(to + n * (PANEL / 2), map, base + KV_FULL, (first + n / 2) * 64, row + n % 2 * 32,
                                    head_of(a));
    }
    __device__ __forceinline__ void load() const {
        const int keys = (int)(blockIdx.x / 2) * 128 % a.tokens;
        mbarrier_arrive_expect_tx(base + KV_FULL, Q_BYTES + PEER_BYTES + DOUT_BYTES);
        load_keys(base + K, &a.qm, 0, D / 64, keys + rank * 64);
        load_keys(base + PEER_K, &a.qm, BY_COLUMNS ? rank * (D / 128) : 0, PEER_BYTES / PANEL, keys + (rank ^ 1) * 64);
        load_keys(base + V, &a.om, 0, DV / 64, keys + rank * 64);
        for (int i = 0; i <= a.steps; i++) {
            const int row = tile_of(a, i) * 64;
            const uint32_t q_full = base + Q_FULL + (i & 1) * 8;
            wait(base + Q_EMPTY + (i & 1) * 8, (i >> 1 & 1) ^ 1);
            mbarrier_arrive_expect_tx(q_full, Q_BYTES + ROWS_BYTES);
            load_half(q(i), &a.qm, q_full, 0, D / 64, row);
            cp_async_bulk(rows(i), a.rows + row, ROWS_BYTES / 2, q_full);
            cp_async_bulk(rows(i) + ROWS_BYTES / 2, a.rows + row, ROWS_BYTES / 2, q_full);
            for (int part = 0; part < PARTS; part++) {
                const uint32_t full = base + DOUT_FULL + dout_barrier(i, part);
                wait(base + DOUT_EMPTY + dout_barrier(i, part), (i / DOUT_STAGES & 1) ^ 1);
                mbarrier_arrive_expect_tx(full, DOUT_BYTES / PARTS);
                load_half(dout(i), &a.om, full, part * (DV / 64 / PARTS), DV / 64 / PARTS, row);
            }
        }
    }
    __device__ __forceinline__ void send_all() const {
        if (CUT == NO_DQ)
            return;
        for (int i = BY_COLUMNS ? 0 : rank ^ 1; i < a.steps; i += BY_COLUMNS ? 1 : 2) {
            wait(base + OUT_FULL, (BY_COLUMNS ? i : i >> 1) & 1);
            cp_async_bulk_cluster(other + IN, base + OUT, PANEL, other + IN_FULL);
        }
    }

    __device__ __forceinline__ void run() const {
        if (threadIdx.x == 0)
            init();
        __syncthreads();
        cluster_sync();
        const int warpgroup = uniform(threadIdx.x / 128), warp = threadIdx.x % 128 / 32;
        if (warpgroup < 2) { /* one instruction for both: ptxas ignores two */
            setmaxnreg_inc<MAKER_REGISTERS>();
            if (warpgroup == 0)
                make_dv();
            else
                make_dk();
        } else if (warpgroup == 2) {
            if (BY_COLUMNS)
                setmaxnreg_dec<SERVER_REGISTERS>();
            else
                setmaxnreg_inc<SERVER_REGISTERS>();
            serve();
        } else {
            setmaxnreg_dec<24>();
            if (warp == 0 && threadIdx.x % 32 == 0)
                load();
            else if (warp == 1 && threadIdx.x % 32 == 0)
                send_all();
        }
        cluster_sync();
    }
};

extern "C" __global__ void __launch_bounds__(512, 1) pair_256(const __grid_constant__ loop_params a) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t base = shared_address(shared), rank = uniform(cluster_ctarank());
    pair_loop<256, 256, true, 1, WHOLE>{a, base, mapa_shared(base, rank ^ 1), rank}.run();
}
extern "C" __global__ void __launch_bounds__(512, 1) pair_256_parts(const __grid_constant__ loop_params a) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t base = shared_address(shared), rank = uniform(cluster_ctarank());
    pair_loop<256, 256, true, 2, WHOLE>{a, base, mapa_shared(base, rank ^ 1), rank}.run();
}
extern "C" __global__ void __launch_bounds__(512, 1) pair_256_no_additions(const __grid_constant__ loop_params a) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t base = shared_address(shared), rank = uniform(cluster_ctarank());
    pair_loop<256, 256, true, 2, NO_ADDITIONS>{a, base, mapa_shared(base, rank ^ 1), rank}.run();
}
extern "C" __global__ void __launch_bounds__(512, 1) pair_256_no_dq(const __grid_constant__ loop_params a) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t base = shared_address(shared), rank = uniform(cluster_ctarank());
    pair_loop<256, 256, true, 2, NO_DQ>{a, base, mapa_shared(base, rank ^ 1), rank}.run();
}
extern "C" __global__ void __launch_bounds__(512, 1) pair_192_128(const __grid_constant__ loop_params a) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t base = shared_address(shared), rank = uniform(cluster_ctarank());
    pair_loop<192, 128, false, 1, WHOLE>{a, base, mapa_shared(base, rank ^ 1), rank}.run();
}
extern "C" __global__ void __launch_bounds__(512, 1) pair_192_128_no_additions(const __grid_constant__ loop_params a) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t base = shared_address(shared), rank = uniform(cluster_ctarank());
    pair_loop<192, 128, false, 1, NO_ADDITIONS>{a, base, mapa_shared(base, rank ^ 1), rank}.run();
}
