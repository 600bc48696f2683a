/* forward512.cu: the forward at head dim 512: a bare loop.
 *
 * A block owns 64 rows; two blocks with the same keys load halves for both. Two warpgroups own 256 columns of O each.
 * Warpgroup w makes S and P of the key tiles t with t mod 2 = w, and leaves P, the rows' maximum and the factor of O
 * for the other. A step of 64 keys of its owner: O += P V of the tile before, under the softmax | O += P V of this tile
 * | S of the next tile but one.
 *
 * K and V come by a ring of CHUNKS, 8 or 9, chunks of 64 keys by 128 columns, in the order in which they are needed:
 * K of the tiles 0 and 1; then for each tile t the owner's half of V(t - 1), that of V(t), and K(t + 2). A chunk has
 * one reader.
 *
 * Barriers: Q full; a chunk full, for either warpgroup one, as each waits for some of its phases only; a chunk empty
 * (of both blocks); P of each parity full and empty. */
#include "loops.cuh"

enum {
    CHUNK_BYTES = 16384,
    Q = 0,
    RING = 65536,
    P = RING + 9 * CHUNK_BYTES,
    MAXIMA = P + 2 * PANEL, /* of each parity: of each row its maximum and the factor of O */
    Q_FULL = MAXIMA + 2 * 512,
    FULL = Q_FULL + 8,
    EMPTY = FULL + 2 * 9 * 8,
    P_FULL = EMPTY + 9 * 8,
    P_EMPTY = P_FULL + 16
};

template <int CHUNKS> struct forward_loop {
    const loop_params &a;
    uint32_t base, other, rank;
    int w;
    uint32_t phases; /* parities of this warpgroup's full barriers */
    float low[64], high[64], s[32], l[2], m[2];
    uint32_t p[4][4]; /* of the tile before, then of this one */

    __device__ __forceinline__ uint32_t chunk(int n) const { return base + RING + n % CHUNKS * CHUNK_BYTES; }
    __device__ __forceinline__ void wait_chunk(int n) {
        wait(base + FULL + (n % CHUNKS * 2 + w) * 8, phases >> n % CHUNKS & 1);
        phases ^= 1u << n % CHUNKS;
    }
    __device__ __forceinline__ void release(int n) const {
        arrive_warp_pair(base + EMPTY + n % CHUNKS * 8, other + EMPTY + n % CHUNKS * 8);
    }

    __device__ __forceinline__ void init() const {
        mbarrier_init(base + Q_FULL, 1);
        for (int n = 0; n < CHUNKS; n++) {
            mbarrier_init(base + FULL + 2 * n * 8, 1);
            mbarrier_init(base + FULL + (2 * n + 1) * 8, 1);
            mbarrier_init(base + EMPTY + n * 8, 8);
        }
        for (int n = 0; n < 2; n++) {
            mbarrier_init(base + P_FULL + n * 8, 4);
            mbarrier_init(base + P_EMPTY + n * 8, 4);
        }
        fence_mbarrier_init();
    }

    /* Two chunks of 128 columns of K from `n` on. */
    __device__ __forceinline__ void multiply_qk(int n, int half) {
#pragma unroll
        for (int k = 0; k < 16; k++)
            wgmma_m64k16<false, 0>(s, columns(base + Q + half * 4 * PANEL, k), columns(chunk(n + k / 8), k % 8),
                                   half > 0 || k > 0);
        wgmma_commit_group();
    }
    __device__ __forceinline__ void multiply_pv(const uint32_t (&left)[4][4], int n) {
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma_m64k16<false, 1>(low, left[k], rows_of(chunk(n), k), true);
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma_m64k16<false, 1>(high, left[k], rows_of(chunk(n + 1), k), true);
        wgmma_commit_group();
    }
    __device__ __forceinline__ void rescale(float x, float y) {
        if (!__any_sync(0xffffffff, x != 1 || y != 1))
            return;
#pragma unroll
        for (int i = 0; i < 64; i++) {
            low[i] *= i % 4 < 2 ? x : y;
            high[i] *= i % 4 < 2 ? x : y;
        }
    }
    __device__ __forceinline__ uint32_t maximum_of(int tile, int i) const {
        return base + MAXIMA + (tile & 1) * 512 + (threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i) * 8;
    }
    /* P of the tile before, its rows' maxima, and O times its factor. */
    __device__ __forceinline__ void take(int tile) {
        float factor[2];
        wait(base + P_FULL + (tile & 1) * 8, tile >> 1 & 1);
#pragma unroll
        for (int n = 0; n < 4; n++)
            ld_shared_16(p[n], base + P + (tile & 1) * PANEL + (n * 128 + threadIdx.x % 128) * 16);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t x, y;
            ld_shared_8(x, y, maximum_of(tile, i));
            m[i] = __uint_as_float(x);
            factor[i] = __uint_as_float(y);
            l[i] *= factor[i];
        }
        __syncwarp();
        arrive_warp(base + P_EMPTY + (tile & 1) * 8);
        rescale(factor[0], factor[1]);
    }
    /* P from S, in its place; the maximum moves only where it grows by more than 2^8. */
    __device__ __forceinline__ void softmax(int tile, float (&factor)[2]) {
        float top[2] = {m[0], m[1]};
#pragma unroll
        for (int i = 0; i < 32; i++)
            top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i] * a.scale);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffff, top[i], 1));
            top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffff, top[i], 2));
            const float now_ = top[i] - m[i] > 8 ? top[i] : m[i];
            factor[i] = ex2_approx(m[i] - now_);
            m[i] = now_;
            l[i] *= factor[i];
        }
#pragma unroll
        for (int i = 0; i < 32; i++) {
            s[i] = ex2_approx(fmaf(s[i], a.scale, -m[i / 2 % 2]));
            l[i / 2 % 2] += s[i];
        }
    }
    __device__ __forceinline__ void give(int tile, const float (&factor)[2]) {
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                p[n][e] = cvt_bf16x2(s[8 * n + 2 * e], s[8 * n + 2 * e + 1]);
        wait(base + P_EMPTY + (tile & 1) * 8, (tile >> 1 & 1) ^ 1);
#pragma unroll
        for (int n = 0; n < 4; n++)
            st_shared_16(base + P + (tile & 1) * PANEL + (n * 128 + threadIdx.x % 128) * 16, p[n][0], p[n][1], p[n][2],
                         p[n][3]);
        if (threadIdx.x % 4 == 0)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                st_shared_4(maximum_of(tile, i), __float_as_uint(m[i]));
                st_shared_4(maximum_of(tile, i) + 4, __float_as_uint(factor[i]));
            }
        __syncwarp();
        arrive_warp(base + P_FULL + (tile & 1) * 8);
    }
    __device__ __forceinline__ void step(int tile) {
        const int n = 8 + 8 * tile;
        float factor[2];
        if (tile > 0)
            take(tile - 1);
        wait_chunk(n);
        wait_chunk(n + 1);
        wgmma_fence();
        multiply_pv(p, n);
        softmax(tile, factor);
        wgmma_wait_group<0>(low);
        pin(high);
        release(n);
        release(n + 1);
        give(tile, factor);
        rescale(factor[0], factor[1]);
        wait_chunk(n + 2);
        wait_chunk(n + 3);
        for (int i = 4; i < 8; i++)
            wait_chunk(n + i);
        wgmma_fence();
        multiply_pv(p, n + 2);
        multiply_qk(n + 4, 0);
        multiply_qk(n + 6, 1);
        wgmma_wait_group<2>(low);
        pin(high);
        release(n + 2);
        release(n + 3);
        wgmma_wait_group<1>(s);
        release(n + 4);
        release(n + 5);
        wgmma_wait_group<0>(s);
        release(n + 6);
        release(n + 7);
    }
    __device__ __forceinline__ void own() {
#pragma unroll
        for (int i = 0; i < 64; i++)
            low[i] = high[i] = 0;
#pragma unroll
        for (int i = 0; i < 16; i++)
            p[i / 4][i % 4] = 0;
        l[0] = l[1] = 0;
        phases = 0;
        m[0] = m[1] = -1e30f;
        wait(base + Q_FULL, 0);
        const uint64_t begin = now();
        for (int i = 0; i < 4; i++)
            wait_chunk(4 * w + i);
        wgmma_fence();
        multiply_qk(4 * w, 0);
        multiply_qk(4 * w + 2, 1);
        wgmma_wait_group<0>(s);
        for (int i = 0; i < 4; i++)
            release(4 * w + i);
#pragma unroll 1
        for (int tile = w; tile < a.steps; tile += 2)
            step(tile);
        if (threadIdx.x % 128 == 0 && w == 0)
            a.time[blockIdx.x] = now() - begin;
        low[0] += l[0] + l[1];
        keep(a, w * 128 + threadIdx.x % 128, low);
        keep(a, 256 + w * 128 + threadIdx.x % 128, high);
    }

    /* This block's 64 of the 128 columns of a chunk, for both. */
    __device__ __forceinline__ void load_chunk(int n) const {
        const int tile = (n - 8) / 8, part = (n - 8) % 8, half = tile & 1;
        const bool keys = n < 8 || part > 3;
        const int of = n < 8 ? n / 4 : keys ? tile + 2 : part < 2 ? max(tile - 1, 0) : tile;
        const int column = n < 8 ? n % 4 : keys ? part - 4 : half * 2 + part % 2;
        const int reader = n < 8 ? n / 4 : half;
        const uint32_t full = base + FULL + (n % CHUNKS * 2 + reader) * 8, to = chunk(n) + rank * PANEL;
        wait(base + EMPTY + n % CHUNKS * 8, (n / CHUNKS & 1) ^ 1);
        mbarrier_arrive_expect_tx(full, CHUNK_BYTES);
        for (int i = 0; i < 2; i++)
            cp_async_bulk_tensor_3d_multicast(to + i * (PANEL / 2), keys ? &a.qm : &a.om, full,
                                              column * 128 + rank * 64, tile_of(a, of) * 64 + i * 32, head_of(a), 3);
    }
    __device__ __forceinline__ void load() const {
        mbarrier_arrive_expect_tx(base + Q_FULL, 65536);
        for (int i = 0; i < 16; i++)
            cp_async_bulk_tensor_3d(base + Q + i * (PANEL / 2), &a.qm, base + Q_FULL, i / 2 * 64,
                                    (int)blockIdx.x * 64 % a.tokens + i % 2 * 32, head_of(a));
        for (int n = 0; n < 8 + 8 * a.steps; n++)
            load_chunk(n);
    }
    __device__ __forceinline__ void run() {
        if (threadIdx.x == 0)
            init();
        __syncthreads();
        cluster_sync();
        if (threadIdx.x < 256) {
            setmaxnreg_inc<240>();
            w = uniform(threadIdx.x / 128);
            own();
        } else {
            setmaxnreg_dec<24>();
            if (threadIdx.x == 256)
                load();
        }
        cluster_sync();
    }
};

extern "C" __global__ void __launch_bounds__(384, 1) forward_512_ring8(const __grid_constant__ loop_params a) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t base = shared_address(shared), rank = uniform(cluster_ctarank());
    forward_loop<8>{a, base, mapa_shared(base, rank ^ 1), rank}.run();
}
extern "C" __global__ void __launch_bounds__(384, 1) forward_512_ring9(const __grid_constant__ loop_params a) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t base = shared_address(shared), rank = uniform(cluster_ctarank());
    forward_loop<9>{a, base, mapa_shared(base, rank ^ 1), rank}.run();
}
