/* roles512.cu: dK and dV at head dim 512 by a cluster of two blocks with a role each: a bare loop.
 *
 * Both blocks have the same 64 keys and take 64 rows a step. Block 0 keeps K and makes S^T, P and dV; block 1 keeps V
 * and makes dP^T, dS and dK. Of each the two warpgroups own 256 columns of the sums; warpgroup i mod 2 makes the scores
 * of step i, and leaves P or dS for the other. P goes to block 1 by a copy, where dS takes its place.
 *
 * Q and dO come by multicast halves through a ring of nine chunks of 64 rows by 128 columns, Q of a step before its
 * dO. In each block a chunk has one reader.
 *
 * Barriers: K or V full; a chunk full, two that take turns, as a warpgroup waits for some of a slot's phases only; a
 * chunk empty (of both blocks); of each buffer of P: come (block 1), full (P or dS is there), empty (block 0). */
#include "loops.cuh"

enum {
    CHUNKS = 9,
    CHUNK_BYTES = 16384,
    KEPT = 0,
    RING = 65536,
    X = RING + CHUNKS * CHUNK_BYTES,
    ROWS = X + 2 * PANEL,
    KEPT_FULL = ROWS + 4 * 256,
    FULL = KEPT_FULL + 8,
    EMPTY = FULL + 2 * CHUNKS * 8,
    X_COME = EMPTY + CHUNKS * 8,
    X_FULL = X_COME + 16,
    X_EMPTY = X_FULL + 16
};

template <int role> struct roles_loop {
    const loop_params &a;
    uint32_t base, other;
    int w;
    float low[64], high[64], s[32];
    uint32_t p[4][4];

    __device__ __forceinline__ uint32_t chunk(int n) const { return base + RING + n % CHUNKS * CHUNK_BYTES; }
    __device__ __forceinline__ uint32_t full(int n) const {
        return base + FULL + (n % CHUNKS * 2 + (n / CHUNKS & 1)) * 8;
    }
    __device__ __forceinline__ void wait_chunk(int n) const { wait(full(n), n / (2 * CHUNKS) & 1); }
    __device__ __forceinline__ void release(int n) const {
        arrive_warp_pair(base + EMPTY + n % CHUNKS * 8, other + EMPTY + n % CHUNKS * 8);
    }
    /* The chunks of a step that the scores are made of; and those that are added to the sums. */
    static __device__ __forceinline__ int first_scored(int i) { return 8 * i + 4 * role; }
    __device__ __forceinline__ int first_added(int i) const { return 8 * i + 4 * (1 - role) + 2 * w; }

    __device__ __forceinline__ void multiply_scores(int i) {
        const int n = first_scored(i);
#pragma unroll
        for (int k = 0; k < 32; k++) {
            if (k % 16 == 0) {
                wait_chunk(n + k / 8);
                wait_chunk(n + k / 8 + 1);
                wgmma_fence();
            }
            wgmma_m64k16<false, 0>(s, columns(base + KEPT, k), columns(chunk(n + k / 8), k % 8), k > 0);
            if (k % 16 == 15)
                wgmma_commit_group();
        }
    }
    __device__ __forceinline__ void release_scored(int i, int half) const {
        release(first_scored(i) + 2 * half);
        release(first_scored(i) + 2 * half + 1);
    }
    __device__ __forceinline__ void add_product(int i) {
        const int n = first_added(i);
        wait_chunk(n);
        wait_chunk(n + 1);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma_m64k16<false, 1>(low, p[k], rows_of(chunk(n), k), true);
        wgmma_commit_group();
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma_m64k16<false, 1>(high, p[k], rows_of(chunk(n + 1), k), true);
        wgmma_commit_group();
    }
    __device__ __forceinline__ void wait_added(int i) {
        wgmma_wait_group<1>(low);
        release(first_added(i));
        wgmma_wait_group<0>(high);
        release(first_added(i) + 1);
    }
    __device__ __forceinline__ uint32_t buffer(int i) const {
        return base + X + (i & 1) * PANEL + threadIdx.x % 128 * 16;
    }
    __device__ __forceinline__ void load_p(int i) {
#pragma unroll
        for (int n = 0; n < 4; n++)
            ld_shared_16(p[n], buffer(i) + n * 2048);
    }
    /* P, or dS in the place of P, from the scores, and to the buffer. */
    __device__ __forceinline__ void make(int i) {
        const uint32_t rows = base + ROWS + (i & 3) * 256;
        if (role == 0) {
            make_p(s, p, a.scale, rows);
            wait(base + X_EMPTY + (i & 1) * 8, (i >> 1 & 1) ^ 1);
        } else {
            wait(base + X_COME + (i & 1) * 8, i >> 1 & 1);
            if (threadIdx.x % 128 == 0)
                mbarrier_arrive_expect_tx(base + X_COME + (i & 1) * 8, PANEL);
            load_p(i);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const four x = row_stats(rows, n);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float u = __uint_as_float(p[n][e] << 16), v = __uint_as_float(p[n][e] & 0xffff0000u);
                    const float *d = &s[8 * n + 2 * e], *r = &x.x[e / 2 * 2];
                    p[n][e] = cvt_bf16x2(u * (d[0] - r[0]), v * (d[1] - r[1]));
                }
            }
        }
#pragma unroll
        for (int n = 0; n < 4; n++)
            st_shared_16(buffer(i) + n * 2048, p[n][0], p[n][1], p[n][2], p[n][3]);
        fence_proxy_async(); /* the copy reads it, and writes over it */
        __syncwarp();
        arrive_warp(base + X_FULL + (i & 1) * 8);
    }
    /* A step whose scores this warpgroup has made. */
    __device__ __forceinline__ void own_step(int i) {
        make(i);
        add_product(i);
        wait_added(i);
    }
    /* One whose scores the other has made; then the scores of the next. */
    __device__ __forceinline__ void other_step(int i) {
        wait(base + X_FULL + (i & 1) * 8, i >> 1 & 1);
        load_p(i);
        fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            if (role == 0)
                mbarrier_arrive(base + X_EMPTY + (i & 1) * 8);
            else
                mbarrier_arrive_remote(other + X_EMPTY + (i & 1) * 8);
        }
        add_product(i);
        wait_added(i); /* the next chunks come where these lie */
        multiply_scores(i + 1);
        wgmma_wait_group<1>(s);
        release_scored(i + 1, 0);
        wgmma_wait_group<0>(s);
        release_scored(i + 1, 1);
    }
    __device__ __forceinline__ void own() {
#pragma unroll
        for (int i = 0; i < 64; i++)
            low[i] = high[i] = 0;
        wait(base + KEPT_FULL, 0);
        const uint64_t begin = now();
        if (w == 0) {
            multiply_scores(0);
            wgmma_wait_group<0>(s);
            release_scored(0, 0);
            release_scored(0, 1);
        } else
            other_step(0);
#pragma unroll 1
        for (int i = w; i + 1 < a.steps; i += 2) {
            own_step(i);
            other_step(i + 1);
        }
        if (w == 1)
            own_step(a.steps - 1);
        if (threadIdx.x % 128 == 0 && w == 0)
            a.time[blockIdx.x] = now() - begin;
        keep(a, w * 128 + threadIdx.x % 128, low);
        keep(a, 256 + w * 128 + threadIdx.x % 128, high);
    }

    __device__ __forceinline__ void load_chunk(int n) const {
        const int i = n / 8, c = n % 8, row = tile_of(a, i) * 64;
        const uint32_t to = chunk(n) + role * PANEL;
        wait(base + EMPTY + n % CHUNKS * 8, (n / CHUNKS & 1) ^ 1);
        mbarrier_arrive_expect_tx(full(n), CHUNK_BYTES + (c == 4 * role ? 256 : 0));
        for (int part = 0; part < 2; part++)
            cp_async_bulk_tensor_3d_multicast(to + part * (PANEL / 2), c < 4 ? &a.qm : &a.om, full(n),
                                              c % 4 * 128 + role * 64, row + part * 32, head_of(a), 3);
        if (c == 4 * role)
            cp_async_bulk(base + ROWS + (i & 3) * 256, a.rows + row, 256, full(n));
    }
    __device__ __forceinline__ void load() const {
        mbarrier_arrive_expect_tx(base + KEPT_FULL, 65536);
        for (int i = 0; i < 16; i++)
            cp_async_bulk_tensor_3d(base + KEPT + i * (PANEL / 2), role ? &a.om : &a.qm, base + KEPT_FULL, i / 2 * 64,
                                    (int)blockIdx.x / 2 * 64 % a.tokens + i % 2 * 32, head_of(a));
        for (int n = 0; n < 8 * (a.steps + 1); n++)
            load_chunk(n);
        for (int n = 8 * a.steps; n < 8 * (a.steps + 1); n++)
            wait_chunk(n); /* nobody else waits for some of them */
    }
    __device__ __forceinline__ void send_all() const {
        for (int i = 0; i < a.steps; i++) {
            wait(base + X_FULL + (i & 1) * 8, i >> 1 & 1);
            cp_async_bulk_cluster(other + X + (i & 1) * PANEL, base + X + (i & 1) * PANEL, PANEL,
                                  other + X_COME + (i & 1) * 8);
        }
    }
    __device__ __forceinline__ void move() const {
        if (threadIdx.x == 256)
            load();
        else if (role == 0 && threadIdx.x == 288)
            send_all();
    }
};

extern "C" __global__ void __launch_bounds__(384, 1) roles_512(const __grid_constant__ loop_params a) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t base = shared_address(shared), rank = uniform(cluster_ctarank()),
                   other = mapa_shared(base, rank ^ 1);
    if (threadIdx.x == 0) {
        mbarrier_init(base + KEPT_FULL, 1);
        for (int n = 0; n < CHUNKS; n++) {
            mbarrier_init(base + FULL + 2 * n * 8, 1);
            mbarrier_init(base + FULL + (2 * n + 1) * 8, 1);
            mbarrier_init(base + EMPTY + n * 8, 8);
        }
        for (int n = 0; n < 2; n++) {
            mbarrier_init(base + X_COME + n * 8, 1);
            mbarrier_init(base + X_FULL + n * 8, 4);
            mbarrier_init(base + X_EMPTY + n * 8, 8);
        }
        fence_mbarrier_init();
        for (int n = 0; n < 2; n++)
            mbarrier_arrive_expect_tx(base + X_COME + n * 8, PANEL);
    }
    __syncthreads();
    cluster_sync();
    const int w = uniform(threadIdx.x / 128);
    if (threadIdx.x < 256) {
        setmaxnreg_inc<240>();
        if (rank == 0)
            roles_loop<0>{a, base, other, w}.own();
        else
            roles_loop<1>{a, base, other, w}.own();
    } else {
        setmaxnreg_dec<24>();
        if (rank == 0)
            roles_loop<0>{a, base, other, w}.move();
        else
            roles_loop<1>{a, base, other, w}.move();
    }
    cluster_sync();
}
