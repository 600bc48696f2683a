/* hopper_backward_2pass_dkv.cu: dK and dV for head dims above 128, on compute capability 9.0, by wgmma and TMA, for
 * 16-bit dtypes.
 *
 * Idea: a block owns 64 keys of a KV head and walks the query rows of its group's heads, 64 a step. dK and dV of 64
 * keys do not fit one warpgroup beside scores, so two warpgroups divide the work by products: the first makes S^T = K
 * Q^T, P^T, and dV += P^T dO; the second dP^T = V dO^T, dS^T, and dK += dS^T Q. P^T passes from one to the other in
 * float32 through shared memory, each thread's part to the thread of the same number. A third warpgroup loads by TMA.
 * The next step's scores are issued before this step's sums, and are made under them.
 *
 * Shared memory, in panels of 128 bytes a row with the 128-byte swizzle: K [panels][64] (at the end dK), V [panels][64]
 * (at the end dV), Q [2][panels][64], dO [2][panels][64]; P^T [P_STAGES][8][128 threads] of 16 bytes; SCORED: a tile of
 * bias [64] and one of mask, [64] rows of 128 bytes, of which the block's keys are one half; lse and delta [2][2][64],
 * what lse has rounded away [2][64], lists of keys and tiles (hopper_key_list.cuh); barriers.
 *
 * Barriers: K and V full; K and V read (an arrival of each consumer warp); of each stage of Q (with lse) and dO (with
 * delta) full, and empty (of each consumer warp); of each P^T full and empty (of each warp of a warpgroup). EMPTY_ROWS:
 * of each stage of dO cleared, by each warp of the warpgroup that reads it first. SCORED: the tiles of bias and mask
 * full, and empty (of each warp that makes P).
 *
 * Registers of a consumer: dV or dK HEAD_DIM / 2, scores 32, an operand 16, of 240. */
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/ring.cuh"
#include "families/hopper/backward_2pass/hopper_backward_2pass.h"
#include "families/hopper/pipeline/hopper_panels.cuh"

HOPPER_BACKWARD_2PASS_CONSTANTS(GPU_CONSTANT_GIVEN)

#define KEYS            (INTERVALS && !VARLEN && !ROW_RUNS ? HOPPER_KEYS_EITHER : HOPPER_KEYS_PLACED)
#define ROWS_DESCENDING 0
#define DETERMINISTIC   0
#define BLOCK_M         64
#define BLOCK_N         HOPPER_BACKWARD_2PASS_KEYS
#define STAGES          HOPPER_BACKWARD_2PASS_STAGES
#define ROW_STEP        HOPPER_BACKWARD_2PASS_DQ_ROWS
#define THREADS         HOPPER_BACKWARD_2PASS_THREADS
#define BIAS_HIDES      (SCRUB && BIAS)
#include "families/hopper/backward/hopper_key_list.cuh"
#include "families/hopper/backward/hopper_p_residual.cuh"
#include "families/hopper/backward/hopper_scrub.cuh"

#define F16    (DTYPE == GPU_FLOAT16)
#define SCORED (MASK_TILE || BIAS)

constexpr int PANELS = (HEAD_DIM + 63) / 64, PANELS_V = (HEAD_DIM_V + 63) / 64;
constexpr int K_BYTES = BLOCK_N * 128 * PANELS, V_BYTES = BLOCK_N * 128 * PANELS_V;
constexpr int Q_BYTES = BLOCK_M * 128 * PANELS, DOUT_BYTES = BLOCK_M * 128 * PANELS_V;
constexpr int P_BYTES = BLOCK_M * BLOCK_N * 4;
constexpr int V_OFFSET = K_BYTES, Q_OFFSET = V_OFFSET + V_BYTES, DOUT_OFFSET = Q_OFFSET + STAGES * Q_BYTES;
constexpr int P_OFFSET = DOUT_OFFSET + STAGES * DOUT_BYTES, BIAS_OFFSET = P_OFFSET + P_STAGES * P_BYTES;
constexpr int BIAS_BYTES_LOADED = BIAS ? BLOCK_M * BLOCK_N * 2 : 0, MASK_BYTES_LOADED = MASK_TILE ? BLOCK_M * 128 : 0;
constexpr int MASK_OFFSET = BIAS_OFFSET + BIAS_BYTES_LOADED, ROWS_OFFSET = MASK_OFFSET + MASK_BYTES_LOADED;
constexpr int LOW_OFFSET = ROWS_OFFSET + STAGES * BLOCK_M * 8;
constexpr int KEYS_OFFSET = LOW_OFFSET + (BIAS ? STAGES * BLOCK_M * 4 : 0);
constexpr int SEEN_OFFSET = KEYS_OFFSET + 4 * HOPPER_BACKWARD_KEY_WORDS(KEYED, BIAS) * BLOCK_N;
constexpr int CONTROL = SEEN_OFFSET + SEEN_WORDS * 4 * (LISTED + MASK_TILE + ROW_RUNS);
constexpr struct hopper_score_inputs INPUTS = {KEYED, MASK_TILE, BIAS != 0, BIAS != 0, ROW_RUNS};
enum {
    KV_FULL = CONTROL,
    KV_READ = KV_FULL + 8,
    Q_RING = KV_READ + 8,
    DOUT_RING = Q_RING + ring<STAGES>::BYTES,
    P_RING = DOUT_RING + ring<STAGES>::BYTES,
    DOUT_CLEAR = P_RING + ring<P_STAGES>::BYTES,
    SCORE_RING = DOUT_CLEAR + stage_barriers<STAGES>::BYTES,
    COVERED = SCORE_RING + ring<1>::BYTES, /* KEYED: note_covered() */
    END = COVERED + (KEYED ? 32 : 0)
};
static_assert(END - CONTROL <= HOPPER_BACKWARD_2PASS_CONTROL_BYTES, "barriers fit");
static_assert(CONTROL + HOPPER_BACKWARD_2PASS_CONTROL_BYTES + hopper_backward_spare_bytes(INPUTS) ==
                  hopper_backward_2pass_dkv_bytes(HEAD_DIM, HEAD_DIM_V, P_STAGES, INPUTS),
              "the plan knows the bytes");
enum { CONSUMER_WARPS = 8, DV_BARRIER = 1, DK_BARRIER };

/* Views of the shared memory that begins at `base`. */
typedef ring<STAGES, Q_BYTES> q_stages;
typedef ring<STAGES, DOUT_BYTES> dout_stages;
typedef ring<P_STAGES, P_BYTES> p_stages;
typedef panels<64> tile_panels; /* of rows or keys */
__device__ __forceinline__ stage_barriers<1> kv_full(uint32_t base) { return {base + KV_FULL}; }
__device__ __forceinline__ stage_barriers<1> kv_read(uint32_t base) { return {base + KV_READ}; }
__device__ __forceinline__ q_stages q_ring(uint32_t base) { return {base + Q_RING, base + Q_OFFSET}; }
__device__ __forceinline__ dout_stages dout_ring(uint32_t base) { return {base + DOUT_RING, base + DOUT_OFFSET}; }
__device__ __forceinline__ p_stages p_ring(uint32_t base) { return {base + P_RING, base + P_OFFSET}; }
__device__ __forceinline__ stage_barriers<STAGES> dout_clear(uint32_t base) { return {base + DOUT_CLEAR}; }
__device__ __forceinline__ ring<1> score_ring(uint32_t base) { return {base + SCORE_RING, base + BIAS_OFFSET}; }
/* lse of the rows of a step; delta follows it. */
__device__ __forceinline__ uint32_t lse_of(uint32_t base, int step) {
    return base + ROWS_OFFSET + q_stages::stage(step) * BLOCK_M * 8;
}
__device__ __forceinline__ uint32_t low_of(uint32_t base, int step) {
    return base + LOW_OFFSET + q_stages::stage(step) * BLOCK_M * 4;
}

/* ---- producer ---- */

struct producer {
    const struct hopper_backward_params &a;
    const struct key_block k;
    uint32_t base, scores; /* SCORED: tiles that were loaded */

    /* Loads the bias of a step, and its mask where that hides something. */
    __device__ __forceinline__ void load_scores(const struct step_rows &rows) {
        const struct gpu_forward_params &in = a.in.in;
        const bool masked = MASK_TILE && hides_part(base + SEEN_OFFSET, rows.tile);
        const uint32_t full = score_ring(base).full(0); /* there is one stage */
        if (BIAS || masked) {
            score_ring(base).wait_empty(scores++);
            mbarrier_arrive_expect_tx(full, BIAS_BYTES_LOADED + (masked ? MASK_BYTES_LOADED : 0));
        }
        if (BIAS)
            cp_async_bulk_tensor_4d(base + BIAS_OFFSET, &a.bias_map, full, k.first_key, rows.tile * BLOCK_M,
                                    rows.head / in.bias.group, in.bias.batch ? k.batch : 0);
        if (masked)
            cp_async_bulk_tensor_4d(base + MASK_OFFSET, &a.mask_map, full, k.first_key / 128 * 128, rows.tile * BLOCK_M,
                                    rows.head / in.mask.group, in.mask.batch ? k.batch : 0);
    }

    __device__ __forceinline__ void load_keys() {
        const uint32_t full = kv_full(base).at;
        if (are_sorted(a)) { /* gather_keys() */
            mbarrier_arrive(full);
            return;
        }
        mbarrier_arrive_expect_tx(full, K_BYTES + V_BYTES);
        const int key = k.k_begin + k.first_key, batch = VARLEN ? 0 : k.batch;
        load_panels<PANELS, 64>(base, &a.k_map, full, key, k.kv_head, batch);
        load_panels<PANELS_V, 64>(base + V_OFFSET, &a.v_map, full, key, k.kv_head, batch);
    }

    __device__ __forceinline__ void run() {
        load_keys();
        const int batch = VARLEN ? 0 : k.batch;
        struct step_rows rows = {k.first_head, k.first_tile};
#pragma unroll 1
        for (int step = 0; step < k.steps; step++) {
            const q_stages q = q_ring(base);
            const dout_stages dout = dout_ring(base);
            const uint32_t lse = lse_of(base, step), q_full = q.full(step), dout_full = dout.full(step);
            const int64_t place = rows.place(a, k.batch);
            const int row = k.q_begin + rows.tile * BLOCK_M;
            q.wait_empty(step);
            mbarrier_arrive_expect_tx(q_full, Q_BYTES + BLOCK_M * (BIAS ? 8 : 4));
            load_panels<PANELS, 64>(q.tile(step), &a.q_map, q_full, row, rows.head, batch);
            cp_async_bulk(lse, a.in.lse_rows + place, BLOCK_M * 4, q_full);
            if (BIAS)
                cp_async_bulk(low_of(base, step), a.in.low_rows + place, BLOCK_M * 4, q_full);
            if (SCORED)
                load_scores(rows);
            dout.wait_empty(step);
            mbarrier_arrive_expect_tx(dout_full, DOUT_BYTES + BLOCK_M * 4);
            load_panels<PANELS_V, 64>(dout.tile(step), &a.dout_map, dout_full, row, rows.head, batch);
            cp_async_bulk(lse + BLOCK_M * 4, a.in.delta_rows + place, BLOCK_M * 4, dout_full);
            rows.advance(k);
        }
    }
};

/* ---- consumers ---- */

template <int count> __device__ __forceinline__ void clear_rows(uint32_t tile, uint32_t lse, int barrier) {
    clear_empty_rows<count, 128>(tile, (int)tid_x_reread() % 128, lse);
    barrier_sync(barrier, 128);
}

/* VARLEN: rows after the sequence's last belong to another sequence, and may be NaN: they become 0 in Q before P is
 * made of them. A tile holds such rows if its last row is one. */
__device__ __forceinline__ void clear_ends(uint32_t base, int step) {
    const uint32_t lse = lse_of(base, step);
    if (VARLEN && is_empty_row(lse, BLOCK_M - 1))
        clear_rows<PANELS>(q_ring(base).tile(step), lse, DV_BARRIER);
}
/* A row that sees no key has no gradient, whatever dO is and whatever the row holds: its P and dS are 0, but 0 times
 * NaN is NaN. Where a tile has such rows, the warpgroup that reads dO first sets them to 0 there, and tells the
 * other one; in Q they become 0 when P has been made of it. Returns whether the tile has such rows. */
__device__ __forceinline__ bool clear_dout(uint32_t base, int step) {
    if (!EMPTY_ROWS)
        return false;
    q_ring(base).wait_full(step); /* lse is there */
    const uint32_t lse = lse_of(base, step);
    const int lane = (int)tid_x_reread() % 32;
    const bool empty = __any_sync(0xffffffff, is_empty_row(lse, lane) | is_empty_row(lse, lane + 32));
    if (empty)
        clear_rows<PANELS_V>(dout_ring(base).tile(step), lse, DK_BARRIER);
    __syncwarp();
    dout_clear(base).arrive_warp(step);
    return empty;
}

/* scores = x y^T: 64 keys of x, 64 rows of y. */
template <int columns> __device__ __forceinline__ void multiply_keys(float (&scores)[32], uint32_t x, uint32_t y) {
#pragma unroll
    for (int n = 0; n < columns / 16; n++)
        wgmma_m64k16<F16, 0>(scores, by_columns(tile_panels{x}, n), by_columns(tile_panels{y}, n), n > 0);
}
/* Rows of V that hold NaN or inf become 0: where they are seen delta is NaN, and makes dS NaN. Rows of K stay: they
 * enter scores alone, and scores of hidden pairs are replaced. */
__device__ __forceinline__ void scrub_values(uint32_t base) {
    scrub_rows<HEAD_DIM_V, BLOCK_N, true>(base + V_OFFSET, 0, false);
    fence_proxy_async();
    barrier_sync(DK_BARRIER, 128);
}
/* No warp reads K or V after this: dV and dK may overwrite them. */
__device__ __forceinline__ void wait_read(uint32_t base) {
    __syncwarp();
    kv_read(base).arrive_warp(0);
    kv_read(base).wait(0);
}
/* sum += operand y: 64 rows of y. */
template <int columns>
__device__ __forceinline__ void add_product(float (&sum)[columns / 2], const uint32_t (&operand)[4][4], uint32_t y) {
#pragma unroll
    for (int n = 0; n < 4; n++)
        wgmma_m64k16<F16, 1>(sum, operand[n], by_rows(tile_panels{y}, n), true);
}
__device__ __forceinline__ void make_operand(uint32_t (&operand)[4][4], const float (&x)[32]) {
#pragma unroll
    for (int i = 0; i < 16; i++)
        operand[i / 4][i % 4] = pack(x[2 * i], x[2 * i + 1]);
}

/* The warpgroup of P and dV. */
struct dv_maker {
    const struct hopper_backward_params &a;
    const struct key_block k;
    uint32_t base, scores; /* SCORED: tiles that were read */
    float s[32], dv[HEAD_DIM_V / 2];
    uint32_t p[4][4];

    __device__ __forceinline__ void make_p(int step, int tile) {
        const bool masked = MASK_TILE && hides_part(base + SEEN_OFFSET, tile), scored = BIAS || masked;
        if (scored)
            score_ring(base).wait_full(scores);
        const float early[EARLY_ROWS] = {};
        scores_to_p(s, early, a, k.batch, k.first_key, tile * BLOCK_M,
                    {lse_of(base, step), low_of(base, step), base + KEYS_OFFSET, base + BIAS_OFFSET, base + MASK_OFFSET,
                     masked, k.first_key % 128 - 64, base + COVERED + tid_x_reread() / 32 % 4 * 8,
                     ranges_hide_part(base + SEEN_OFFSET, tile, 0), k.first_head});
        if (scored) {
            __syncwarp();
            score_ring(base).release(scores++);
        }
    }

    __device__ __forceinline__ void pass_p(int step) {
        const uint32_t to = p_ring(base).tile(step) + tid_x_reread() % 128 * 16;
        p_ring(base).wait_empty(step);
#pragma unroll
        for (int i = 0; i < 8; i++)
            st_shared_16(to + i * 2048, __float_as_uint(s[4 * i]), __float_as_uint(s[4 * i + 1]),
                         __float_as_uint(s[4 * i + 2]), __float_as_uint(s[4 * i + 3]));
        __syncwarp();
        p_ring(base).full().arrive_warp(step);
    }

    __device__ __forceinline__ void run() {
        set_zero(dv);
        kv_full(base).wait(0);
        if (k.steps > 0) {
            int step = 0, tile = k.first_tile;
            q_ring(base).wait_full(0);
            clear_ends(base, 0);
            wgmma_fence();
            multiply_keys<HEAD_DIM>(s, base, q_ring(base).tile(0));
            wgmma_commit_group();
            wgmma_wait_group<0>(s);
#pragma unroll 1
            do {
                const bool more = step + 1 < k.steps;
                make_p(step, tile);
                tile = LISTED                              ? k.tile_after(tile)
                       : tile + 1 < k.first_tile + k.tiles ? tile + 1
                                                           : k.first_tile; /* the code that was measured */
                __syncwarp();
                q_ring(base).release(step);
                pass_p(step);
                wgmma_wait_group<0>(dv);
                if (step > 0)
                    dout_ring(base).release(step - 1);
                make_operand(p, s);
                if (more)
                    q_ring(base).wait_full(step + 1);
                if (more)
                    clear_ends(base, step + 1);
                wgmma_fence();
                if (more)
                    multiply_keys<HEAD_DIM>(s, base, q_ring(base).tile(step + 1));
                wgmma_commit_group();
                dout_ring(base).wait_full(step);
                if (EMPTY_ROWS)
                    dout_clear(base).wait(step);
                add_product<HEAD_DIM_V>(dv, p, dout_ring(base).tile(step));
                wgmma_commit_group();
                wgmma_wait_group<1>(s);
            } while (++step < k.steps);
            wgmma_wait_group<0>(dv);
        }
        wait_read(base);
        store_keys<HEAD_DIM_V>(a, k, a.in.dv, a.in.dv_parts, a.in.in.head_dim_v, base + V_OFFSET,
                               (int)threadIdx.x / 32 % 4 * 16, dv, 1.0f);
    }
};

/* The warpgroup of dS and dK. */
struct dk_maker {
    const struct hopper_backward_params &a;
    const struct key_block k;
    uint32_t base;
    float dp[32], dk[HEAD_DIM / 2];
    uint32_t ds[4][4];

    /* dP to dS, in place. */
    __device__ __forceinline__ void make_ds(int step) {
        const uint32_t thread = tid_x_reread();
        const uint32_t p = p_ring(base).tile(step) + thread % 128 * 16;
        const uint32_t lse = lse_of(base, step) + thread % 4 * 8;
        const uint32_t delta = lse + BLOCK_M * 4;
        p_ring(base).wait_full(step);
        if (SOFTCAP) /* lse, with which P was made, is loaded */
            q_ring(base).wait_full(step);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint32_t weights[4], words[2], lse_words[2];
            ld_shared_16(weights, p + i * 2048);
            ld_shared_8(words[0], words[1], delta + i * 32);
            if (SOFTCAP)
                ld_shared_8(lse_words[0], lse_words[1], lse + i * 32);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float &x = dp[4 * i + e];
                x = __uint_as_float(weights[e]) * (x - __uint_as_float(words[e % 2]));
                if (SOFTCAP)
                    x *= slope_of_cap(__uint_as_float(weights[e]), __uint_as_float(lse_words[e % 2]),
                                      a.in.in.softcap_inverse);
            }
        }
        __syncwarp();
        p_ring(base).release(step);
        dout_ring(base).release(step);
    }

    __device__ __forceinline__ void run() {
        set_zero(dk);
        kv_full(base).wait(0);
        if (SCRUB)
            scrub_values(base);
        if (k.steps > 0) {
            int step = 0;
            dout_ring(base).wait_full(0);
            bool empty = clear_dout(base, 0);
            wgmma_fence();
            multiply_keys<HEAD_DIM_V>(dp, base + V_OFFSET, dout_ring(base).tile(0));
            wgmma_commit_group();
            wgmma_wait_group<0>(dp);
#pragma unroll 1
            do {
                const bool more = step + 1 < k.steps;
                make_ds(step);
                wgmma_wait_group<0>(dk);
                if (step > 0) {
                    __syncwarp();
                    q_ring(base).release(step - 1);
                }
                make_operand(ds, dp);
                if (empty)
                    clear_rows<PANELS>(q_ring(base).tile(step), lse_of(base, step), DK_BARRIER);
                if (more)
                    dout_ring(base).wait_full(step + 1);
                if (more)
                    empty = clear_dout(base, step + 1);
                wgmma_fence();
                if (more)
                    multiply_keys<HEAD_DIM_V>(dp, base + V_OFFSET, dout_ring(base).tile(step + 1));
                wgmma_commit_group();
                q_ring(base).wait_full(step);
                add_product<HEAD_DIM>(dk, ds, q_ring(base).tile(step));
                wgmma_commit_group();
                wgmma_wait_group<1>(dp);
            } while (++step < k.steps);
            wgmma_wait_group<0>(dk);
        }
        wait_read(base);
        store_keys<HEAD_DIM>(a, k, a.in.dk, a.in.dk_parts, a.in.in.head_dim, base, (int)threadIdx.x / 32 % 4 * 16, dk,
                             a.in.in.scale);
    }
};

/* KEYED, with sorted keys: the whole block loads K and V. */
__device__ __forceinline__ void gather_keys(const struct hopper_backward_params &a, const struct key_block &k,
                                            uint32_t base) {
    gather_rows<HEAD_DIM / 8, THREADS>(base, a.in.in.k, a.in.in.head_dim, a, k);
    gather_rows<HEAD_DIM_V / 8, THREADS>(base + V_OFFSET, a.in.in.v, a.in.in.head_dim_v, a, k);
    cp_async_commit();
    cp_async_wait<0>();
    fence_proxy_async();
}

/* The keys of this block. With LISTED whole warps call it, when its tiles are listed. */
__device__ __forceinline__ struct key_block find_steps(const struct hopper_backward_params &a,
                                                       [[maybe_unused]] uint32_t base) {
    const struct key_block k = find_block(a, find_place(a, (int)blockIdx.x));
#if LISTED
    return count_tiles(k, PARTS ? a.in.part_heads : a.in.in.group, base + SEEN_OFFSET);
#else
    return k;
#endif
}

extern "C" __global__ void __launch_bounds__(HOPPER_BACKWARD_2PASS_THREADS, 1)
    hopper_backward_2pass_dkv(const __grid_constant__ struct hopper_backward_params a) {
#if BIAS || KEYED || ROW_RUNS
    extern __shared__ __align__(1024) char shared[];
#else
    extern __shared__ char shared[];
#endif
    const uint32_t base = (shared_address(shared) + 1023) / 1024 * 1024;
    if (threadIdx.x == 0) {
        kv_full(base).init(0, 1);
        kv_read(base).init(0, CONSUMER_WARPS);
        for (int i = 0; i < STAGES; i++) {
            q_ring(base).init(i, 1, CONSUMER_WARPS);
            dout_ring(base).init(i, 1, CONSUMER_WARPS);
            if (EMPTY_ROWS)
                dout_clear(base).init(i, 4);
        }
        for (int i = 0; i < P_STAGES; i++)
            p_ring(base).init(i, 4, 4);
        if (SCORED)
            score_ring(base).init(0, 1, 4);
        fence_mbarrier_init();
    }
    if (LISTED) {
        const struct key_block own = find_block(a, find_place(a, (int)blockIdx.x));
        if (KEYED) {
            list_keys(a, own, base + KEYS_OFFSET);
            __syncthreads();
            note_covered(base + KEYS_OFFSET, base + COVERED);
            if (are_sorted(a))
                gather_keys(a, own, base);
        }
        list_tiles(a, own, base + KEYS_OFFSET, base + SEEN_OFFSET);
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(0xffffffff, (int)threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        setmaxnreg_dec<HOPPER_BACKWARD_2PASS_PRODUCER_REGISTERS>();
        if (LISTED || threadIdx.x == 0) {
            const struct key_block k = find_steps(a, base);
            if (threadIdx.x == 0)
                producer{a, k, base, 0}.run();
        }
    } else {
        setmaxnreg_inc<HOPPER_BACKWARD_2PASS_CONSUMER_REGISTERS>();
        if (warpgroup == 1)
            dv_maker{a, find_steps(a, base), base, 0}.run();
        else
            dk_maker{a, find_steps(a, base), base}.run();
    }
}
