/* hopper_backward.cu: the backward for compute capability 9.0, by wgmma and TMA, for 16-bit dtypes and head dims up to
 * 128.
 *
 * Idea: FlashAttention-2's backward (Dao, 2023): a block owns BLOCK_N = 64 WARPGROUPS keys of a KV head, keeps their dK
 * and dV in registers, and walks the query rows of its group's heads, BLOCK_M a step. Each consumer warpgroup owns 64
 * keys: it makes S^T = K Q^T, from that P^T, the operand of dV += P^T dO, then dP^T = V dO^T in place of S^T, and dS^T,
 * which it leaves in shared memory, and takes from there or from registers for dK += dS^T Q. The dQ warpgroup
 * (hopper_dq_warpgroup.cuh) produces: it loads Q, dO, lse and delta by TMA, multiplies dS by K, and adds the sums to dQ
 * in global memory by bulk reductions. With DQ_ADDER it leaves the sums in shared memory, and one more warpgroup adds
 * them (hopper_dq_adder.cuh).
 *
 * Shared memory, each matrix in panels of 128 bytes a row with the 128-byte swizzle:
 *   K [panels][BLOCK_N], V [panels][BLOCK_N] (at the end dV, then dK), Q [STAGES][panels][BLOCK_M],
 *   dO [DOUT_STAGES][panels][BLOCK_M], dS [DS_STAGES][WARPGROUPS][BLOCK_M]: 64 keys a panel,
 *   sums of dQ [4 warps][HEAD_DIM / 8 tiles] in the order of the accumulators, lse and delta [STAGES][2][BLOCK_M],
 *   what lse has rounded away [STAGES][BLOCK_M], lists of keys and tiles (hopper_key_list.cuh), barriers. With SCORED
 *   a tile of bias, laid out like dS, and one of mask, [BLOCK_M] rows of BLOCK_N bytes, lie before lse.
 *
 * Barriers: K full and V full; of each stage Q full (with lse) and dO full (with delta); of each tile of dS full (an
 * arrival of each consumer warp) and empty (of each dQ warp). Stages of Q and dO have no empty barrier: a warpgroup
 * that leaves dS of a step has completed its products of the step before. With DQ_ADDER dQ's sums have a full one (of
 * each dQ warp) and an empty one (of the adder's). With SCORED the tile of bias and mask has a full one and an empty
 * one (of each consumer warp). The named barrier 1 + w belongs to warpgroup w.
 *
 * Registers of a consumer thread: dK takes HEAD_DIM / 2, dV HEAD_DIM_V / 2, S and then dP BLOCK_M / 2, P
 * BLOCK_M / 4, of 208, 192 or 144. */
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/ring.cuh"
#include "families/hopper/backward/hopper_backward.h"
#include "families/hopper/pipeline/hopper_panels.cuh"
#include "gpu/quad.cuh"
#include "gpu/semaphores.cuh"

HOPPER_BACKWARD_CONSTANTS(GPU_CONSTANT_GIVEN)

#define BLOCK_M 64
#define BLOCK_N (64 * WARPGROUPS)
#define THREADS (128 * (WARPGROUPS + 1 + DQ_ADDER))
/* Groups of eight rows whose lse and delta are prefetched under products: the most that did not spill. */
#define EARLY_GROUPS                                                                 \
    (MASK || BIAS || INTERVALS || ROW_RUNS || VARLEN || SOFTCAP || DS_FROM_F32_P ? 0 \
     : WARPGROUPS == 3                                                           ? 4 \
     : WINDOW                                                                    ? 2 \
                                                                                 : 0)
#include "families/hopper/backward/hopper_key_list.cuh"
#include "families/hopper/backward/hopper_p_residual.cuh"
#include "families/hopper/backward/hopper_scrub.cuh"

#define F16      (DTYPE == GPU_FLOAT16)
#define DOUT_LAG (STAGES - DOUT_STAGES) /* steps by which the load of dO follows that of Q */
#define SCORED   (MASK_TILE || BIAS_TILE)
/* The dQ warpgroup writes the gradient of a bias from dS in shared memory; or the consumers that make dS add it. */
#define DBIAS_TILE (DBIAS == GPU_DBIAS_DIRECT)
#define DBIAS_ADDS (DBIAS == GPU_DBIAS_KEYS || DBIAS == GPU_DBIAS_SUMS)
/* In a fixed order: rows of dQ, by the keys of blocks, unless another warpgroup than the serving one adds them; the
 * gradient of a bias that heads or batches share, by these. */
#define ORDERED_DQ    (DETERMINISTIC && NEEDS_DQ && !DQ_ADDER)
#define ORDERED_DBIAS (DETERMINISTIC && DBIAS == GPU_DBIAS_SUMS)
/* A warpgroup skips steps whose rows see none of its keys. It may, where no step needs all warpgroups. */
#define SKIP_MASKED_STEPS (!LISTED && !SCORED && !DBIAS_ADDS && !EMPTY_ROWS && !VARLEN)

/* ---- shared memory ---- */

/* Rows that see no key and hold NaN have a P that is not 0. Registers are short beside DS_FROM_F32_P. */
constexpr bool DROPS_EMPTY = EMPTY_ROWS && (BIAS || VARLEN), KEEPS_EMPTY = DROPS_EMPTY && !DS_FROM_F32_P;
/* backward_prepare has noted which rows see no key. Where a block's heads have no such row, its steps do not test for
 * them. Registers are short beside the other features. */
constexpr bool NOTED = EMPTY_ROWS && !(VARLEN || MASK_TILE || BIAS || DS_FROM_F32_P || DETERMINISTIC);
constexpr int HALVES = HEAD_DIM == 128 ? 2 : 1; /* parts of dQ's columns, which are made one after the other */
constexpr int ADDER_STEPS = 4 / HALVES; /* DQ_ADDER: a warp adds one half of the columns of every ADDER_STEPS-th step */
constexpr int PANELS = (HEAD_DIM + 63) / 64, PANELS_V = (HEAD_DIM_V + 63) / 64;
constexpr int K_BYTES = BLOCK_N * 128 * PANELS;
constexpr int V_BYTES = BLOCK_N * 128 * (PANELS > PANELS_V ? PANELS : PANELS_V);
constexpr int Q_BYTES = BLOCK_M * 128 * PANELS, DOUT_BYTES = BLOCK_M * 128 * PANELS_V;
constexpr int DS_BYTES = BLOCK_M * BLOCK_N * 2;
constexpr int V_OFFSET = K_BYTES, Q_OFFSET = V_OFFSET + V_BYTES, DOUT_OFFSET = Q_OFFSET + STAGES * Q_BYTES;
constexpr int DS_OFFSET = DOUT_OFFSET + DOUT_STAGES * DOUT_BYTES, DQ_OFFSET = DS_OFFSET + DS_STAGES * DS_BYTES;
constexpr int BIAS_OFFSET = DQ_OFFSET + BLOCK_M * HEAD_DIM * 4, BIAS_TILE_BYTES = BIAS_TILE ? BLOCK_M * BLOCK_N * 2 : 0;
constexpr int MASK_OFFSET = BIAS_OFFSET + BIAS_TILE_BYTES, MASK_TILE_BYTES = MASK_TILE ? BLOCK_M * BLOCK_N : 0;
constexpr int ROWS_OFFSET = MASK_OFFSET + MASK_TILE_BYTES, LOW_OFFSET = ROWS_OFFSET + STAGES * BLOCK_M * 8;
constexpr int KEYS_OFFSET = LOW_OFFSET + (BIAS ? STAGES * BLOCK_M * 4 : 0);
constexpr int SEEN_OFFSET = KEYS_OFFSET + 4 * HOPPER_BACKWARD_KEY_WORDS(KEYED, BIAS) * BLOCK_N;
constexpr int CONTROL = SEEN_OFFSET + SEEN_WORDS * 4 * (LISTED + MASK_TILE + ROW_RUNS * WARPGROUPS);
constexpr struct hopper_score_inputs INPUTS = {KEYED, MASK_TILE, BIAS != 0, BIAS_TILE, ROW_RUNS};
enum {
    K_FULL = CONTROL,
    V_FULL = K_FULL + 8,
    Q_FULL = V_FULL + 8,
    DOUT_FULL = Q_FULL + stage_barriers<STAGES>::BYTES,
    DS_RING = DOUT_FULL + stage_barriers<DOUT_STAGES>::BYTES,
    SCORE_RING = DS_RING + ring<DS_STAGES>::BYTES,
    PLACE = SCORE_RING +
            (SCORED ? ring<1>::BYTES : 0), /* DETERMINISTIC: of the block, by its ticket; RUNS: its head and number */
    TURN_FULL = PLACE + (DETERMINISTIC || RUNS ? 8 : 0), /* ORDERED_DBIAS: the step's turn has come */
    DQ_FULL = TURN_FULL + (ORDERED_DBIAS ? 8 : 0), /* DQ_ADDER: of each half, of ADDER_STEPS steps: each has its warp */
    DQ_EMPTY = DQ_FULL + (DQ_ADDER ? HALVES * ADDER_STEPS * 8 : 0), /* of each half */
    SPOILED = DQ_EMPTY +
              (DQ_ADDER ? HALVES * 8 : 0), /* DS_FROM_F32_P: what scrub_rows() says to a warp; registers are short */
    COVERED =
        SPOILED + (DS_FROM_F32_P && SCRUB == HOPPER_SCRUB_NUMBERS ? 16 * WARPGROUPS : 0), /* KEYED: note_covered() */
    END = COVERED + (KEYED ? 32 * WARPGROUPS : 0)
};
static_assert(DOUT_LAG == 0 || DOUT_LAG == 1, "dO of a step is loaded when Q of the next is");
static_assert(DS_REGISTERS || DS_STAGES > 1, "dS needs two stages unless dK reads it from registers");
static_assert(END - CONTROL <= HOPPER_BACKWARD_CONTROL_BYTES, "barriers fit");
static_assert(CONTROL + HOPPER_BACKWARD_CONTROL_BYTES + hopper_backward_spare_bytes(INPUTS) ==
                  hopper_backward_shared_bytes(WARPGROUPS, STAGES, DOUT_STAGES, DS_STAGES, HEAD_DIM, HEAD_DIM_V,
                                               INPUTS),
              "the plan knows the bytes");
static_assert(!DS_FROM_F32_P || DS_STAGES > 1, "the tile of dS is empty when P is made");
static_assert(!SOFTCAP || (DS_FROM_F32_P && !BIAS), "its slope is found from P");
static_assert(!MASK_TILE || BLOCK_N == 128, "a row of mask is one of TMA's");
static_assert(!DQ_ADDER || (NEEDS_DQ && WARPGROUPS == 2), "there are registers for one warpgroup more");
enum { OWN_BARRIER = 1, KV_BARRIER = OWN_BARRIER + WARPGROUPS };

/* Views of the shared memory that begins at `base`. */
typedef ring<DS_STAGES, DS_BYTES> ds_stages;
__device__ __forceinline__ stage_barriers<1> k_full(uint32_t base) { return {base + K_FULL}; }
__device__ __forceinline__ stage_barriers<1> v_full(uint32_t base) { return {base + V_FULL}; }
__device__ __forceinline__ stage_barriers<STAGES> q_full(uint32_t base) { return {base + Q_FULL}; }
__device__ __forceinline__ stage_barriers<DOUT_STAGES> dout_full(uint32_t base) { return {base + DOUT_FULL}; }
__device__ __forceinline__ ds_stages ds_ring(uint32_t base) { return {base + DS_RING, base + DS_OFFSET}; }
__device__ __forceinline__ ring<1> score_ring(uint32_t base) { return {base + SCORE_RING, base + BIAS_OFFSET}; }
__device__ __forceinline__ stage_barriers<1> turn_full(uint32_t base) { return {base + TURN_FULL}; }
__device__ __forceinline__ stage_barriers<ADDER_STEPS> dq_full(uint32_t base, int half) {
    return {base + DQ_FULL + half * stage_barriers<ADDER_STEPS>::BYTES};
}
__device__ __forceinline__ stage_barriers<1> dq_empty(uint32_t base, int half) { return {base + DQ_EMPTY + half * 8}; }

typedef panels<BLOCK_M> row_panels;
typedef panels<BLOCK_N> key_panels;
__device__ __forceinline__ row_panels q_of(uint32_t base, int step) {
    return {base + Q_OFFSET + stage_barriers<STAGES>::stage(step) * Q_BYTES};
}
__device__ __forceinline__ row_panels dout_of(uint32_t base, int step) {
    return {base + DOUT_OFFSET + stage_barriers<DOUT_STAGES>::stage(step) * DOUT_BYTES};
}
__device__ __forceinline__ row_panels ds_of(uint32_t base, int step) { return {ds_ring(base).tile(step)}; }
/* lse of a step's rows comes with Q; delta follows it in memory and comes with dO. */
__device__ __forceinline__ uint32_t lse_of(uint32_t base, int step) {
    return base + ROWS_OFFSET + stage_barriers<STAGES>::stage(step) * BLOCK_M * 8;
}
__device__ __forceinline__ uint32_t delta_of(uint32_t base, int step) {
    return base + ROWS_OFFSET + stage_barriers<DOUT_STAGES>::stage(step) * BLOCK_M * 8 + BLOCK_M * 4;
}
/* The part of a step's lse that float32 has rounded away. */
__device__ __forceinline__ uint32_t low_of(uint32_t base, int step) {
    return base + LOW_OFFSET + stage_barriers<STAGES>::stage(step) * BLOCK_M * 4;
}

__device__ __forceinline__ void init_barriers(uint32_t base) {
    k_full(base).init(0, GATHER ? 128 : 1);
    v_full(base).init(0, GATHER ? 128 : 1);
    for (int i = 0; i < STAGES; i++) {
        q_full(base).init(i, 1);
        if (i < DOUT_STAGES)
            dout_full(base).init(i, 1);
    }
    for (int i = 0; i < DS_STAGES; i++)
        ds_ring(base).init(i, 4 * WARPGROUPS, 4);
    if (SCORED)
        score_ring(base).init(0, 1, 4 * WARPGROUPS);
    if (ORDERED_DBIAS)
        turn_full(base).init(0, 1);
    if (DQ_ADDER)
        for (int i = 0; i < HALVES; i++) {
            for (int n = 0; n < ADDER_STEPS; n++)
                dq_full(base, i).init(n, 4);
            dq_empty(base, i).init(0, 1);
        }
    fence_mbarrier_init();
}

#include "families/hopper/backward/hopper_dq_adder.cuh"
#include "families/hopper/backward/hopper_dq_warpgroup.cuh"

/* ---- the warpgroups that own keys ---- */

/* SOME_EMPTY: some row of the block's heads may see no key. */
template <bool SOME_EMPTY> struct kv_consumer {
    const struct hopper_backward_params &a;
    const struct key_block k;
    uint32_t base;
    int warpgroup, tile;                                        /* of the next step's rows */
    uint32_t scores;                                            /* SCORED: tiles that were read */
    int head, ds_row;                                           /* DBIAS_ADDS: of dS */
    float dbias[2];                                             /* DBIAS KEYS: sums of a head's dS */
    float s[BLOCK_M / 2], dk[HEAD_DIM / 2], dv[HEAD_DIM_V / 2]; /* s: S^T, then dP^T */
    uint32_t p[BLOCK_M / 16][4];
    float early[EARLY_ROWS]; /* of a tile's lse, then of its delta */
    uint32_t spoiled;        /* SCRUB: keys of the warp that held NaN or inf, as scrub_rows() says it */
    bool empty;              /* KEEPS_EMPTY: some row of the tile sees no key */

    /* S^T = K Q^T */
    __device__ __forceinline__ void multiply_kq(int step) {
        const key_panels keys = key_panels{base}.rows(warpgroup * 64);
        const row_panels q = q_of(base, step);
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 16; n++)
            wgmma_m64k16<F16, 0>(s, by_columns(keys, n), by_columns(q, n), n > 0);
    }
    /* dP^T = V dO^T */
    __device__ __forceinline__ void multiply_vdo(int step) {
        const key_panels values = key_panels{base + V_OFFSET}.rows(warpgroup * 64);
        const row_panels dout = dout_of(base, step);
#pragma unroll
        for (int n = 0; n < HEAD_DIM_V / 16; n++)
            wgmma_m64k16<F16, 0>(s, by_columns(values, n), by_columns(dout, n), n > 0);
    }
    /* dV += P^T dO */
    __device__ __forceinline__ void multiply_pdo(int step) {
        const row_panels dout = dout_of(base, step);
#pragma unroll
        for (int n = 0; n < BLOCK_M / 16; n++)
            wgmma_m64k16<F16, 1>(dv, p[n], by_rows(dout, n), true);
    }
    /* dK += dS^T Q, dS as it was left in shared memory, or from registers, where it takes the place of P */
    __device__ __forceinline__ void multiply_dsq(int step) {
        const row_panels q = q_of(base, step), ds = ds_of(base, step).panel(warpgroup);
#pragma unroll
        for (int n = 0; n < BLOCK_M / 16; n++) {
            const uint64_t rows = by_rows(q, n);
            if constexpr (DS_REGISTERS)
                wgmma_m64k16<F16, 1>(dk, p[n], rows, true);
            else
                wgmma_m64k16<F16, 1, 1>(dk, wgmma_descriptor(ds.rows_16(n), 0), rows, true);
        }
    }

    __device__ __forceinline__ void make_p(int step) {
        const int first = (int)tid_x_reread() / 128 * 64;
        const bool masked = MASK_TILE && hides_part(base + SEEN_OFFSET, tile), scored = BIAS_TILE || masked;
        if (scored)
            score_ring(base).wait_full(scores);
        scores_to_p(s, early, a, k.batch, k.first_key + first, tile * BLOCK_M,
                    {lse_of(base, step), low_of(base, step), base + KEYS_OFFSET + first * 4,
                     base + BIAS_OFFSET + first * BLOCK_M * 2, base + MASK_OFFSET, masked, 0,
                     base + COVERED + (int)tid_x_reread() / 32 * 8,
                     ranges_hide_part(base + SEEN_OFFSET, tile, warpgroup), k.first_head});
        if (DROPS_EMPTY && is_empty(step))
            drop_empty(step);
        if (SCRUB == HOPPER_SCRUB_NUMBERS)
            spoil_p(s, DS_FROM_F32_P ? ld_shared_4(base + SPOILED + tid_x_reread() / 32 * 4) : spoiled);
        if (scored) {
            __syncwarp();
            score_ring(base).release(scores++);
        }
        ds_row = tile * BLOCK_M;
        tile = k.tile_after(tile);
        if (DS_FROM_F32_P)
            ds_ring(base).wait_empty(step);
#pragma unroll
        for (int n = 0; n < BLOCK_M / 16; n++) {
            uint32_t rest[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (DS_FROM_F32_P)
                    split_pair(p[n][i], rest[i], s[8 * n + 2 * i], s[8 * n + 2 * i + 1]);
                else
                    p[n][i] = pack(s[8 * n + 2 * i], s[8 * n + 2 * i + 1]);
            if (DS_FROM_F32_P) { /* leave_ds() will put dS of the same rows there */
                const int thread = (int)tid_x_reread(), lane = thread % 32, row = lane / 16 * 8 + lane % 8;
                const uint32_t to = ds_of(base, step).panel(thread / 128).rows(n * 16 + row).at;
                st_shared_16(to + (((thread / 32 % 4 * 2 + lane / 8 % 2) ^ (row & 7)) << 4), rest[0], rest[1], rest[2],
                             rest[3]);
            }
        }
    }

    /* A row that sees no key has no gradient, whatever dO is and whatever the row holds. In packed tensors the rows
     * after a sequence's last belong to another sequence. Their P and dS are 0, but 0 times NaN is NaN, and beside a
     * bias P of a NaN is NaN. Therefore a tile with such rows has their P set to 0, and then the rows of Q and dO.
     * All warps test for them. */
    __device__ __forceinline__ bool has_empty(int step) const {
        const uint32_t lse = lse_of(base, step) + tid_x_reread() % 32 * 4;
        bool any = false;
#pragma unroll
        for (int n = 0; n < BLOCK_M * 4; n += 128)
            any |= ld_shared_4(lse + n) == 0x7f800000;
        return __any_sync(0xffffffff, any);
    }
    /* With KEEPS_EMPTY the test comes before P of the step is made; else it comes where rows are cleared. */
    __device__ __forceinline__ void find_empty(int step) { empty = SOME_EMPTY && KEEPS_EMPTY && has_empty(step); }
    __device__ __forceinline__ bool is_empty(int step) const {
        return SOME_EMPTY && (KEEPS_EMPTY ? empty : has_empty(step));
    }
    __device__ __forceinline__ void drop_empty(int step) {
        const uint32_t lse = lse_of(base, step) + tid_x_reread() % 4 * 8;
#pragma unroll
        for (int n = 0; n < BLOCK_M / 8; n++) {
            uint32_t rows[2];
            ld_shared_8(rows[0], rows[1], lse + n * 32);
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[4 * n + e] = rows[e % 2] == 0x7f800000 ? 0.0f : s[4 * n + e];
        }
    }
    __device__ __forceinline__ void clear_empty(int step) const {
        barrier_sync(KV_BARRIER, 128 * WARPGROUPS); /* all have made P of it */
        const int thread = (int)tid_x_reread();
        clear_empty_rows<PANELS, 128 * WARPGROUPS>(q_of(base, step).at, thread, lse_of(base, step));
        clear_empty_rows<PANELS_V, 128 * WARPGROUPS>(dout_of(base, step).at, thread, lse_of(base, step));
        barrier_sync(KV_BARRIER, 128 * WARPGROUPS);
    }
    /* Whether the list has keys of the warpgroup that no row sees. */
    __device__ __forceinline__ bool has_hidden() const {
        const uint32_t last = base + KEYS_OFFSET + (BLOCK_N + warpgroup * 64 + (int)tid_x_reread() % 32) * 4;
        return __any_sync(0xffffffff, ld_shared_4(last) == 0 || ld_shared_4(last + 128) == 0);
    }
    /* Before the first product that reads K or V. */
    __device__ __forceinline__ void scrub_keys() {
        constexpr bool numbers = SCRUB == HOPPER_SCRUB_NUMBERS;
        const int first = warpgroup * 64;
        if (!numbers && !has_hidden())
            return;
        const uint32_t last = base + KEYS_OFFSET + (BLOCK_N + first + (int)tid_x_reread() % 128 / 2) * 4;
        const bool hidden = !numbers && ld_shared_4(last) == 0;
        v_full(base).wait(0);
        if (GATHER)
            fence_proxy_async();
        spoiled = scrub_rows<HEAD_DIM, BLOCK_N, numbers>(base, first, hidden);
        scrub_rows<HEAD_DIM_V, BLOCK_N, numbers>(base + V_OFFSET, first, hidden);
        if (DS_FROM_F32_P && numbers)
            st_shared_4(base + SPOILED + tid_x_reread() / 32 * 4, spoiled);
        fence_proxy_async();
        barrier_sync(OWN_BARRIER + warpgroup, 128);
    }
    /* VARLEN: what follows the sequence's last key is another's, and may be NaN. */
    __device__ __forceinline__ void clear_keys() const {
        const int count = find_sequence(a.in.in, k.batch).seqlen_k - k.first_key - warpgroup * 64;
        if (count >= 64)
            return;
#pragma unroll 1
        for (int n = threadIdx.x % 128; n < 64 * 8 * (PANELS + PANELS_V); n += 128) {
            const int panel = n / 512, row = n / 8 % 64;
            const key_panels to =
                panel < PANELS ? key_panels{base}.panel(panel) : key_panels{base + V_OFFSET}.panel(panel - PANELS);
            if (row >= count)
                st_shared_16(to.rows(warpgroup * 64 + row).at + n % 8 * 16, 0, 0, 0, 0);
        }
        fence_proxy_async();
        barrier_sync(OWN_BARRIER + warpgroup, 128);
    }

    /* From P^T and dP^T dS of the warp's 16 keys, to shared memory, a row for each query row. */
    __device__ __forceinline__ void leave_ds(int step) {
        const int thread = (int)tid_x_reread(), lane = thread % 32, warp = thread / 32 % 4;
        const uint32_t delta = own_rows(delta_of(base, step), thread);
        const row_panels own = ds_of(base, step).panel(thread / 128);
        /* a lane's row of matrices: keys 0-7, rows 0-7; keys 8-15, rows 0-7; keys 0-7, rows 8-15; keys 8-15, rows 8-15
         */
        const int row = lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
        if (!DS_FROM_F32_P)
            ds_ring(base).wait_empty(step);
        const uint32_t lse_of_step = lse_of(base, step) + thread % 4 * 8;
        if (ORDERED_DBIAS && !MASK_TILE)
            turn_full(base).wait(step);
#pragma unroll
        for (int n = 0; n < BLOCK_M / 16; n++) {
            uint32_t ds[4], rest[4];
            if (DS_FROM_F32_P)
                ld_shared_16(rest, own.rows(n * 16 + row).at + ((chunk ^ (row & 7)) << 4));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t lse[2];
                float rows[2];
                find_group(rows, early, delta, 2 * n + i);
                if (SOFTCAP)
                    ld_shared_8(lse[0], lse[1], lse_of_step + (2 * n + i) * 32);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    uint32_t &x = p[n][2 * i + half];
                    const int at = 8 * n + 4 * i + 2 * half;
                    float whole[2];
                    if (DS_FROM_F32_P)
                        join_pair(whole, x, rest[2 * i + half]);
                    float low = (DS_FROM_F32_P ? whole[0] : unpack((uint16_t)x)) * (s[at] - rows[0]);
                    float high = (DS_FROM_F32_P ? whole[1] : unpack((uint16_t)(x >> 16))) * (s[at + 1] - rows[1]);
                    if (DBIAS == GPU_DBIAS_KEYS)
                        dbias[half] += low + high;
                    if (DBIAS == GPU_DBIAS_SUMS)
                        add_dbias({low, high}, 16 * n + 8 * i, half);
                    if (SOFTCAP) {
                        low *= slope_of_cap(whole[0], __uint_as_float(lse[0]), a.in.in.softcap_inverse);
                        high *= slope_of_cap(whole[1], __uint_as_float(lse[1]), a.in.in.softcap_inverse);
                    }
                    ds[2 * i + half] = pack(low, high);
                    if (DS_REGISTERS)
                        x = ds[2 * i + half];
                }
            }
            stmatrix_x4_trans(own.rows(n * 16 + row).at + ((chunk ^ (row & 7)) << 4), ds);
        }
        fence_proxy_async();
        __syncwarp();
        ds_ring(base).full().arrive_warp(step);
        if (!DS_REGISTERS)
            barrier_sync(OWN_BARRIER + thread / 128, 128);
    }

    /* DBIAS SUMS: dS of two rows from ds_row + `local` on and a key of `half`. */
    __device__ __forceinline__ void add_dbias(const float (&ds)[2], int local, int half) const {
        const int thread = (int)tid_x_reread(), key = k.first_key + thread / 32 * 16 + thread % 32 / 4 + 8 * half;
        const int first = ds_row + local + thread % 4 * 2;
        float *at = a.in.dbias_sums + k.batch * a.in.dbias_batch + head / a.in.in.bias.group * a.in.dbias_head +
                    first * a.in.dbias_row + key;
#pragma unroll
        for (int c = 0; c < 2; c++)
            if (first + c < a.in.in.seqlen_q && key < a.in.in.seqlen_k)
                red_add(at + c * a.in.dbias_row, ds[c]);
    }

    /* DBIAS_ADDS: after the last step of a head the sums of its keys go to the workspace. */
    __device__ __forceinline__ void end_step() {
        if (ROWS_DESCENDING ? tile * BLOCK_M < ds_row : tile * BLOCK_M > ds_row)
            return;
        const int thread = (int)tid_x_reread();
#pragma unroll
        for (int half = 0; DBIAS == GPU_DBIAS_KEYS && half < 2; half++) {
            const float sum = quad_sum(dbias[half]);
            const int n = thread / 32 * 16 + thread % 32 / 4 + 8 * half;
            const int key = key_number(a, k, n);
            if (thread % 4 == 0 && key < a.in.in.seqlen_k)
                a.in.dbias_sums[((int64_t)k.batch * a.in.in.heads + head) * a.in.in.seqlen_k + key] = sum;
            dbias[half] = 0;
        }
        head++;
    }

    /* SKIP_MASKED_STEPS: steps in which no key of the warpgroup is seen. A walk up begins with them, a walk down ends
     * with them; of a group of heads they are the first's or the last's. */
    __device__ __forceinline__ int skipped_steps() const {
        const struct sequence at = find_sequence(a.in.in, k.batch);
        const int key = k.first_key + warpgroup * 64, tiles = first_row(a.in.in, at, key) / BLOCK_M - k.first_tile;
        return key >= at.seqlen_k || tiles >= k.tiles ? k.steps : tiles;
    }
    /* dS of such a step is 0: a quarter of the warpgroup's part is a warp's. */
    __device__ __forceinline__ void leave_nothing(int step) const {
        const int thread = (int)tid_x_reread();
        ds_ring(base).wait_empty(step);
        const uint32_t to = ds_of(base, step).at + thread / 32 * (BLOCK_M * 32) + thread % 32 * 16;
#pragma unroll
        for (int i = 0; i < BLOCK_M * 32; i += 512)
            st_shared_16(to + i, 0, 0, 0, 0);
        fence_proxy_async();
        __syncwarp();
        ds_ring(base).full().arrive_warp(step);
    }

    /* P of the walk's first step. */
    __device__ __forceinline__ void begin(int step) {
        if (VARLEN)
            v_full(base).wait(0);
        if (GATHER)
            fence_proxy_async();
        if (VARLEN)
            clear_keys();
        q_full(base).wait(step);
        wgmma_fence();
        multiply_kq(step);
        wgmma_commit_group();
        find_empty(step);
        load_rows(early, lse_of(base, step)); /* under products that end before lse is needed */
        wgmma_wait_group<0>(s);
        make_p(step);
        if (!VARLEN)
            v_full(base).wait(0);
        if (GATHER && !VARLEN)
            fence_proxy_async();
    }

    /* From P of a step to its part of dV and dK, and with `more` to P of the next. */
    __device__ __forceinline__ void take_step(int step, bool more) {
        dout_full(base).wait(step);
        if (ORDERED_DBIAS && MASK_TILE) /* later, in leave_ds(), registers are short */
            turn_full(base).wait(step);
        if (is_empty(step))
            clear_empty(step);
        wgmma_fence();
        multiply_vdo(step);
        wgmma_commit_group();
        multiply_pdo(step);
        wgmma_commit_group();
        load_rows(early, delta_of(base, step));
        wgmma_wait_group<DS_REGISTERS ? 0 : 1>(s);  /* P is read until then, */
        wgmma_wait_group<DS_REGISTERS ? 0 : 1>(dk); /* and Q and dS of the step before */
        leave_ds(step);
        if (DBIAS_ADDS)
            end_step();
        if (more)
            q_full(base).wait(step + 1);
        wgmma_fence();
        if (more)
            multiply_kq(step + 1);
        wgmma_commit_group();
        multiply_dsq(step);
        wgmma_commit_group();
        if (more) {
            find_empty(step + 1);
            load_rows(early, lse_of(base, step + 1));
        }
        wgmma_wait_group<DS_REGISTERS ? 0 : 1>(s);
        wgmma_wait_group<DS_REGISTERS ? 0 : 1>(dv);
        if (more)
            make_p(step + 1);
    }

    __device__ __forceinline__ void run() {
        set_zero(dk);
        set_zero(dv);
        if (!LISTED || k.steps > 0)
            k_full(base).wait(0);
        if (SCRUB && k.steps > 0)
            scrub_keys();
        const int skipped = SKIP_MASKED_STEPS ? skipped_steps() : 0,
                  end = ROWS_DESCENDING ? k.steps - skipped : k.steps;
        int step = 0;
        if (SKIP_MASKED_STEPS && !ROWS_DESCENDING)
#pragma unroll 1
            for (; step < skipped; step++) {
                leave_nothing(step);
                tile = k.tile_after(tile);
            }
        if (step >= end && (!LISTED || k.steps > 0))
            v_full(base).wait(0); /* where dV and dK will lie */
        if (step < end) {
            begin(step);
#pragma unroll 1
            do
                take_step(step, step + 1 < end);
            while (++step < end);
            wgmma_wait_group<0>(dk);
        }
        barrier_sync(OWN_BARRIER + warpgroup, 128); /* all warps' products with V and dS are complete */
        if (SKIP_MASKED_STEPS && ROWS_DESCENDING)
#pragma unroll 1
            for (; step < k.steps; step++)
                leave_nothing(step);
        const int warp_key = (int)threadIdx.x / 32 * 16;
        store_keys<HEAD_DIM_V>(a, k, a.in.dv, a.in.dv_parts, a.in.in.head_dim_v, base + V_OFFSET, warp_key, dv, 1.0f);
        store_keys<HEAD_DIM>(a, k, a.in.dk, a.in.dk_parts, a.in.in.head_dim, base + V_OFFSET, warp_key, dk,
                             a.in.in.scale);
    }
};

__device__ __forceinline__ struct key_block find_own_block(const struct hopper_backward_params &a,
                                                           [[maybe_unused]] uint32_t base) {
    struct block_place at = {};
    if (RUNS)
        at = {(int)ld_shared_4(base + PLACE), 0, (int)ld_shared_4(base + PLACE + 4)}; /* no turns are kept */
    else
        at = find_place(a, DETERMINISTIC ? (int)ld_shared_4(base + PLACE) : (int)blockIdx.x);
    return find_block(a, at);
}
__device__ __forceinline__ struct key_block find_steps(const struct hopper_backward_params &a, uint32_t base) {
#if LISTED
    return count_tiles(find_own_block(a, base), PARTS ? a.in.part_heads : a.in.in.group, base + SEEN_OFFSET);
#else
    return find_own_block(a, base);
#endif
}

/* NOTED: whether some row of a thread's share of the block's heads sees no key. */
__device__ __forceinline__ bool finds_empty(const struct hopper_backward_params &a, const struct key_block &k) {
    const int tiles = (int)(a.in.rows / BLOCK_M), heads = PARTS ? a.in.part_heads : a.in.in.group;
    const uint32_t *of_heads = (const uint32_t *)(a.in.empty + step_rows{k.first_head, 0}.place(a, k.batch) / 16);
    uint32_t some = 0;
    for (int n = threadIdx.x; n < tiles * heads; n += THREADS)
        some |= of_heads[n];
    return some;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_backward(const __grid_constant__ struct hopper_backward_params a) {
#if KEYED || BIAS_TILE || ROW_RUNS
    extern __shared__ __align__(1024) char shared[];
#else
    extern __shared__ char shared[];
#endif
    const uint32_t base = (shared_address(shared) + 1023) / 1024 * 1024;
    if (threadIdx.x == 0)
        init_barriers(base);
    griddepcontrol_launch_dependents();
    griddepcontrol_wait(); /* what kernels before have made */
    const int scattered = KEYS == HOPPER_KEYS_SCATTERED || RUNS ? a.in.block_order[0] : GATHER;
    if (threadIdx.x == 0 && DETERMINISTIC) /* a block waits for those that began before it, which run or have ended */
        st_shared_4(base + PLACE, (uint32_t)atomicAdd(a.in.ticket, 1));
    if (threadIdx.x == 0 && RUNS) {
        const struct block_place at = find_place(a, (int)blockIdx.x);
        st_shared_4(base + PLACE, (uint32_t)at.head);
        st_shared_4(base + PLACE + 4, (uint32_t)at.block);
    }
    if (scattered != GATHER) /* the other launch takes the keys */
        return;
    if (RUNS || (DETERMINISTIC && LISTED))
        __syncthreads();
    const bool finds = NOTED && finds_empty(a, find_own_block(a, base));
    if (KEYED) {
        list_keys(a, find_own_block(a, base), base + KEYS_OFFSET);
        __syncthreads();
        note_covered(base + KEYS_OFFSET, base + COVERED);
    }
    if (LISTED)
        list_tiles(a, find_own_block(a, base), base + KEYS_OFFSET, base + SEEN_OFFSET);
    bool some_empty = false;
    if (NOTED)
        some_empty = __syncthreads_or(finds);
    else
        __syncthreads();
    const int warpgroup = __shfl_sync(0xffffffff, (int)threadIdx.x / 128, 0);
    if (warpgroup == WARPGROUPS) {
        setmaxnreg_dec<HOPPER_BACKWARD_DQ_REGISTERS(WARPGROUPS, DQ_ADDER, HALVES == 2)>();
        const struct key_block k = find_steps(a, base);
        const struct step_rows first = {k.first_head, k.begin_tile()};
        dq_warpgroup{a, k, base, first, first, first, first, 0, nullptr, 0, 0}.run();
#if DQ_ADDER
    } else if (warpgroup == WARPGROUPS + 1) {
        setmaxnreg_dec<HOPPER_BACKWARD_DQ_ADDER_REGISTERS(HALVES == 2)>();
        const struct key_block k = find_steps(a, base);
        dq_adder{a, k, base, {k.first_head, k.begin_tile()}}.run();
#endif
    } else {
        setmaxnreg_inc<HOPPER_BACKWARD_KEY_REGISTERS(WARPGROUPS, DQ_ADDER, HALVES == 2)>();
        const struct key_block k = find_steps(a, base);
        if (!NOTED || some_empty)
            kv_consumer<EMPTY_ROWS>{a, k, base, warpgroup, k.begin_tile(), 0, k.first_head, 0, {0, 0}}.run();
        else
            kv_consumer<false>{a, k, base, warpgroup, k.begin_tile(), 0, k.first_head, 0, {0, 0}}.run();
    }
}
