/* hopper_backward.cu: the backward for compute capability 9.0, by wgmma and TMA, for 16-bit dtypes and head dims up to
 * 128.
 *
 * Idea: FlashAttention-2's backward (Dao, 2023): a block owns BLOCK_N = 64 WARPGROUPS keys of a KV head, keeps their dK
 * and dV in registers, and walks the query rows of its group's heads, BLOCK_M a step. Each of the first warpgroups
 * owns 64 keys: it makes S^T = K Q^T, from that P^T, the operand of dV += P^T dO, then dP^T = V dO^T in place of S^T,
 * and dS^T, which it leaves in shared memory, and takes from there or from registers for dK += dS^T Q. The last
 * warpgroup serves: it brings Q, dO, lse and delta by TMA, multiplies dS by K, and adds the sums to dQ in global memory
 * by bulk reductions.
 *
 * Shared memory, each matrix in panels of 128 bytes a row with the 128-byte swizzle:
 *   K [panels][BLOCK_N], V [panels][BLOCK_N] (at the end dV, then dK), Q [STAGES][panels][BLOCK_M],
 *   dO [DOUT_STAGES][panels][BLOCK_M], dS [DS_STAGES][WARPGROUPS][BLOCK_M]: 64 keys a panel,
 *   sums of dQ [4 warps][HEAD_DIM / 8 tiles] in the order of the accumulators, lse and delta [STAGES][2][BLOCK_M],
 *   what lse has rounded away [STAGES][BLOCK_M], lists of keys and tiles (hopper_keys.cuh), barriers. SCORED: before
 * the rows a tile of bias, laid out like dS, and one of mask, [BLOCK_M] rows of BLOCK_N bytes.
 *
 * Barriers: KV full; of each stage Q full (with lse) and dO full (with delta); of each tile of dS full (an arrival of
 * each key warp) and empty (of each serving warp). There is none for empty stages of Q and dO: a warpgroup that leaves
 * dS of a step has completed its products of the step before. SCORED: the tile of bias and mask full, and empty (of
 * each key warp). The named barrier 1 + w is warpgroup w's own.
 *
 * Registers of a key thread: dK HEAD_DIM / 2, dV HEAD_DIM_V / 2, S and then dP BLOCK_M / 2, P BLOCK_M / 4, of 208 or
 * 144. */
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "families/hopper/hopper_backward.h"
#include "families/hopper/hopper_load.cuh"
#include "families/hopper/hopper_ring.cuh"
#include "gpu/quad.cuh"
#include "gpu/turns.cuh"

HOPPER_BACKWARD_CONSTANTS(GPU_CONSTANT_GIVEN)

#define SCORES_ALIGNED 0
#define BLOCK_M        64
#define BLOCK_N        (64 * WARPGROUPS)
#define THREADS        (128 * (WARPGROUPS + 1))
#include "families/hopper/hopper_exact.cuh"
#include "families/hopper/hopper_keys.cuh"

#define F16      (DTYPE == GPU_FLOAT16)
#define DOUT_LAG (STAGES - DOUT_STAGES) /* steps that dO is loaded after Q */
#define SCORED   (MASK_TILE || BIAS_TILE)
/* The gradient of a bias is written from dS in shared memory; or added by those that make dS. */
#define DBIAS_TILE (DBIAS == GPU_DBIAS_DIRECT)
#define DBIAS_ADDS (DBIAS == GPU_DBIAS_KEYS || DBIAS == GPU_DBIAS_SUMS)
/* A warpgroup leaves out steps at which none of its keys is seen: where no step needs all warpgroups. */
#define SKIPS (!LISTED && !SCORED && !DBIAS_ADDS && !EMPTY_ROWS && !VARLEN)

/* ---- shared memory ---- */

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
constexpr int CONTROL = SEEN_OFFSET + (LISTED ? SEEN_WORDS * 4 : 0) + (MASK_TILE ? SEEN_WORDS * 4 : 0);
constexpr struct hopper_backward_asks ASKS = {KEYED, MASK_TILE, BIAS != 0, BIAS_TILE};
enum {
    KV_FULL = CONTROL,
    Q_FULL = KV_FULL + 8,
    DOUT_FULL = Q_FULL + 8 * STAGES,
    DS_FULL = DOUT_FULL + 8 * DOUT_STAGES,
    DS_EMPTY = DS_FULL + 8 * DS_STAGES,
    SCORE_FULL = DS_EMPTY + 8 * DS_STAGES,
    SCORE_EMPTY = SCORE_FULL + (SCORED ? 8 : 0),
    PLACE = SCORE_EMPTY + (SCORED ? 8 : 0), /* ORDERED: of the block, in the order of tickets */
    END = PLACE + (ORDERED ? 8 : 0)
};
static_assert(DOUT_LAG == 0 || DOUT_LAG == 1, "dO of a step is loaded when Q of the next is");
static_assert(DS_REGISTERS || DS_STAGES > 1, "who leaves dS knows that the product two steps before is complete");
static_assert(END - CONTROL <= HOPPER_BACKWARD_CONTROL_BYTES, "barriers fit");
static_assert(CONTROL + HOPPER_BACKWARD_CONTROL_BYTES + hopper_backward_spare_bytes(ASKS) ==
                  hopper_backward_shared_bytes(WARPGROUPS, STAGES, DOUT_STAGES, DS_STAGES, HEAD_DIM, HEAD_DIM_V, ASKS),
              "the plan knows the bytes");
static_assert(!EXACT || DS_STAGES > 1, "the tile of dS is empty when P is made");
static_assert(!SOFTCAP || (EXACT && !BIAS), "its slope is found from P");
static_assert(!MASK_TILE || BLOCK_N == 128, "a row of mask is one of TMA's");
static_assert(!ORDERED || !LISTED, "who comes to a tile of rows follows from the tile");
enum { OWN_BARRIER = 1, OWNERS_BARRIER = OWN_BARRIER + WARPGROUPS };

__device__ __forceinline__ void init_barriers(uint32_t base) {
    mbarrier_init(base + KV_FULL, GATHER ? 128 : 1);
    for (int i = 0; i < STAGES; i++) {
        mbarrier_init(base + Q_FULL + 8 * i, 1);
        if (i < DOUT_STAGES)
            mbarrier_init(base + DOUT_FULL + 8 * i, 1);
    }
    for (int i = 0; i < DS_STAGES; i++) {
        mbarrier_init(base + DS_FULL + 8 * i, 4 * WARPGROUPS);
        mbarrier_init(base + DS_EMPTY + 8 * i, 4);
    }
    if (SCORED) {
        mbarrier_init(base + SCORE_FULL, 1);
        mbarrier_init(base + SCORE_EMPTY, 4 * WARPGROUPS);
    }
    fence_mbarrier_init();
}

/* ---- the warpgroup that serves ---- */

/* The first `count` of eight elements to global memory; at a multiple of 16 bytes. */
__device__ __forceinline__ void store_words(char *at, const uint32_t (&word)[4], int count) {
    if (count == 8)
        *(uint4 *)at = make_uint4(word[0], word[1], word[2], word[3]);
    else
#pragma unroll
        for (int e = 0; e < 8; e++)
            if (e < count)
                ((uint16_t *)at)[e] = (uint16_t)(word[e / 2] >> (e % 2 * 16));
}
struct server {
    const struct hopper_backward_params &a;
    const struct key_block k;
    uint32_t base;
    struct step_rows loaded, added; /* of the next step to load, and to add to dQ */
    struct step_rows dout_loaded;   /* of dO, where that comes later */
    struct step_rows scored;        /* SCORED: of the next tile of bias and mask */
    uint32_t scores;                /* tiles that were loaded */
    int *turns, turn;               /* ORDERED: of the warp's rows of the step before, to be handed on */
    int seen;                       /* what its turn was when the warp last looked: one that is coming */

    __device__ __forceinline__ void load_keys() {
        mbarrier_arrive_expect_tx(base + KV_FULL, BLOCK_N * 128 * (PANELS + PANELS_V));
        const int row = k.k_begin + k.first_key, batch = VARLEN ? 0 : k.batch;
        load_panels<PANELS, BLOCK_N>(base, &a.k_map, base + KV_FULL, row, k.kv_head, batch);
        load_panels<PANELS_V, BLOCK_N>(base + V_OFFSET, &a.v_map, base + KV_FULL, row, k.kv_head, batch);
    }
    /* The keys lie scattered: by all threads, each of which arrives. */
    __device__ __forceinline__ void gather_keys() {
        const struct gpu_forward_params &in = a.in.in;
        gather_rows<HEAD_DIM / 8>(base, in.k, in.head_dim, a, k);
        gather_rows<HEAD_DIM_V / 8>(base + V_OFFSET, in.v, in.head_dim_v, a, k);
        cp_async_mbarrier_arrive_noinc(base + KV_FULL);
    }
    /* Q of a step, and dO of the same or, where that has a stage less, of the step before. */
    __device__ __forceinline__ void load_step(int step) {
        const uint32_t stage = stage_of<STAGES>(step), rows = base + ROWS_OFFSET + stage * BLOCK_M * 8;
        const uint32_t dout_stage = stage_of<DOUT_STAGES>(step - DOUT_LAG);
        const uint32_t dout_rows = base + ROWS_OFFSET + dout_stage * BLOCK_M * 8;
        const uint32_t q_full = base + Q_FULL + 8 * stage, dout_full = base + DOUT_FULL + 8 * dout_stage;
        const struct step_rows of_dout = DOUT_LAG ? dout_loaded : loaded;
        const int64_t place = loaded.place(a, k.batch), dout_place = of_dout.place(a, k.batch);
        if (DOUT_LAG == 0 || step < k.steps) {
            mbarrier_arrive_expect_tx(q_full, Q_BYTES + BLOCK_M * (BIAS ? 8 : 4));
            load_panels<PANELS, BLOCK_M>(base + Q_OFFSET + stage * Q_BYTES, &a.q_map, q_full,
                                         k.q_begin + loaded.tile * BLOCK_M, loaded.head, VARLEN ? 0 : k.batch);
            cp_async_bulk(rows, a.in.lse_rows + place, BLOCK_M * 4, q_full);
            if (BIAS)
                cp_async_bulk(base + LOW_OFFSET + stage * BLOCK_M * 4, a.in.low_rows + place, BLOCK_M * 4, q_full);
        }
        if (step >= DOUT_LAG) {
            mbarrier_arrive_expect_tx(dout_full, DOUT_BYTES + BLOCK_M * 4);
            load_panels<PANELS_V, BLOCK_M>(base + DOUT_OFFSET + dout_stage * DOUT_BYTES, &a.dout_map, dout_full,
                                           k.q_begin + of_dout.tile * BLOCK_M, of_dout.head, VARLEN ? 0 : k.batch);
            cp_async_bulk(dout_rows + BLOCK_M * 4, a.in.delta_rows + dout_place, BLOCK_M * 4, dout_full);
            if (DOUT_LAG)
                dout_loaded.advance(k);
        }
        loaded.advance(k);
    }

    /* The bias of a step, and its mask where that hides something. */
    __device__ __forceinline__ void load_scores() {
        const struct gpu_forward_params &in = a.in.in;
        const bool masked = MASK_TILE && hides_part(base + SEEN_OFFSET, scored.tile);
        if (BIAS_TILE || masked) {
            wait_empty<1>(base + SCORE_EMPTY, scores++);
            mbarrier_arrive_expect_tx(base + SCORE_FULL, BIAS_TILE_BYTES + (masked ? MASK_TILE_BYTES : 0));
        }
        if (BIAS_TILE)
#pragma unroll
            for (int panel = 0; panel < WARPGROUPS; panel++)
                cp_async_bulk_tensor_4d(base + BIAS_OFFSET + panel * BLOCK_M * 128, &a.bias_map, base + SCORE_FULL,
                                        k.first_key + panel * 64, scored.tile * BLOCK_M, scored.head / in.bias.group,
                                        in.bias.batch ? k.batch : 0);
        if (masked)
            cp_async_bulk_tensor_4d(base + MASK_OFFSET, &a.mask_map, base + SCORE_FULL, k.first_key,
                                    scored.tile * BLOCK_M, scored.head / in.mask.group, in.mask.batch ? k.batch : 0);
        scored.advance(k);
    }

    /* The gradient of the bias from dS of a step: eight keys of a row at a time. */
    __device__ __forceinline__ void add_dbias(int step) {
        const struct gpu_forward_params &in = a.in.in;
        const uint32_t ds = base + DS_OFFSET + stage_of<DS_STAGES>(step) * DS_BYTES;
        const int chunk = threadIdx.x % (BLOCK_N / 8), key = k.first_key + chunk * 8, count = min(in.seqlen_k - key, 8);
        const int64_t head = added.head / in.bias.group;
        const int first = added.tile * BLOCK_M;
        const uint32_t from = ds + chunk / 8 * BLOCK_M * 128;
        char *direct = (char *)a.in.dbias.data + (k.batch * a.in.dbias.batch + head * a.in.dbias.head + key) * 2;
#pragma unroll 2
        for (int row = threadIdx.x % 128 / (BLOCK_N / 8); row < BLOCK_M; row += 128 / (BLOCK_N / 8)) {
            uint32_t word[4];
            if (first + row >= in.seqlen_q || count <= 0)
                break;
            ld_shared_16(word, from + row * 128 + ((chunk % 8 ^ (row & 7)) << 4));
            store_words(direct + (first + row) * a.in.dbias.row * 2, word, count);
        }
        __syncwarp(); /* all lanes have read */
    }

    /* Adds dS K of a step to its rows of dQ, COLUMNS columns at a time. A warp's part lies together, in shared memory
     * and in the sums: 16 rows, in tiles of 16 x 8 in the order of the accumulators. */
    template <int columns, int first> __device__ __forceinline__ void add_columns(int step) {
        const uint32_t ds = base + DS_OFFSET + stage_of<DS_STAGES>(step) * DS_BYTES;
        constexpr bool under_product = DBIAS_TILE && columns <= 64; /* else registers are short */
        if (DBIAS_TILE && !under_product && first == 0)
            add_dbias(step);
        float dq[columns / 2];
        wgmma_fence();
#pragma unroll
        for (int n = 0; n < BLOCK_N / 16; n++)
            wgmma_m64k16<F16, 1>(dq, wgmma_descriptor(ds + n / 4 * BLOCK_M * 128 + n % 4 * 32, 0),
                                 wgmma_descriptor(base + first / 64 * BLOCK_N * 128 + n * 2048, BLOCK_N * 128), n > 0);
        wgmma_commit_group();
        if (under_product && first + columns == HEAD_DIM)
            add_dbias(step);
        const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        const int64_t rows = added.place(a, k.batch) + warp * 16;
        int *const own_turns = a.in.semaphores + rows / 16;
        const int own_turn = ORDERED ? blocks_before(a, k, added.tile) : 0;
        if (ORDERED && first == 0 && lane == 0 && seen != own_turn)
            seen = ld_relaxed(own_turns);
        if (ORDERED && first == 0)
            hand_on(step);
        wgmma_wait_group<0>(dq);
        if (first + columns == HEAD_DIM)
            release<DS_STAGES>(base + DS_EMPTY, step);
        const uint32_t part = base + DQ_OFFSET + warp * 16 * HEAD_DIM * 4 + first * 64;
        if (lane == 0) /* the step before has added what lies there */
            cp_async_bulk_wait_read<HEAD_DIM == columns ? 0 : HEAD_DIM / columns - 1>();
        __syncwarp();
#pragma unroll
        for (int n = 0; n < columns / 8; n++)
            st_shared_16(part + n * 512 + lane * 16, __float_as_uint(dq[4 * n]), __float_as_uint(dq[4 * n + 1]),
                         __float_as_uint(dq[4 * n + 2]), __float_as_uint(dq[4 * n + 3]));
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) {
            if (ORDERED && first == 0) {
                while (seen != own_turn)
                    seen = ld_relaxed(own_turns);
                fence_proxy_async_global();
            }
            cp_reduce_async_bulk_add(a.in.dq_sums + rows * HEAD_DIM + first * 16, part, columns * 64);
            cp_async_bulk_commit();
        }
        if (ORDERED && first + columns == HEAD_DIM) {
            turns = own_turns;
            turn = own_turn;
        }
    }
    /* ORDERED: when the warp's additions of the step before `step` are complete, the next block may add to the same
     * rows. None is under way at the fence: it would wait for that too. */
    __device__ __forceinline__ void hand_on(int step) {
        if (threadIdx.x % 32 == 0 && step > 0) {
            cp_async_bulk_wait<0>();
            hand_on_turn(turns, turn);
        }
    }

    __device__ __forceinline__ void run() {
        if (LISTED && k.steps == 0)
            return;
        if (threadIdx.x % 128 == 0) {
            if (!GATHER)
                load_keys();
            for (int step = 0; step < STAGES && step < k.steps + DOUT_LAG; step++)
                load_step(step);
            if (SCORED && k.steps > 0)
                load_scores();
        }
        __syncwarp();
        if (GATHER)
            gather_keys();
        wait_full<1>(base + KV_FULL, 0);
        if (GATHER)
            fence_proxy_async();
#pragma unroll 1
        for (int step = 0; step < k.steps; step++) {
            if (SCORED) {
                if (threadIdx.x % 128 == 0 && step + 1 < k.steps)
                    load_scores(); /* when those of this step are read */
                __syncwarp();
            }
            if (ORDERED && threadIdx.x % 32 == 0) /* on its way while the warp waits */
                seen = ld_relaxed(a.in.semaphores + added.place(a, k.batch) / 16 + threadIdx.x / 32 % 4);
            wait_full<DS_STAGES>(base + DS_FULL, step);
            if (threadIdx.x % 128 == 0 && step > 0 && step - 1 + STAGES < k.steps + DOUT_LAG)
                load_step(step - 1 + STAGES);
            __syncwarp();
            if (!NEEDS_DQ) {
                if (DBIAS_TILE)
                    add_dbias(step);
                release<DS_STAGES>(base + DS_EMPTY, step);
            } else if (HEAD_DIM == 128) {
                add_columns<64, 0>(step);
                add_columns<64, 64>(step);
            } else {
                add_columns<HEAD_DIM, 0>(step);
            }
            added.advance(k);
        }
        if (ORDERED)
            hand_on(k.steps);
        else if (NEEDS_DQ && threadIdx.x % 32 == 0)
            cp_async_bulk_wait_read<0>();
    }
};

/* ---- the warpgroups that own keys ---- */

struct owner {
    const struct hopper_backward_params &a;
    const struct key_block k;
    uint32_t base;
    int warpgroup, tile;                                        /* of the next step's rows */
    uint32_t scores;                                            /* SCORED: tiles that were read */
    int head, ds_row;                                           /* DBIAS_ADDS: of dS */
    float dbias[2];                                             /* DBIAS KEYS: sums of a head's dS */
    float s[BLOCK_M / 2], dk[HEAD_DIM / 2], dv[HEAD_DIM_V / 2]; /* s: S^T, then dP^T */
    uint32_t p[BLOCK_M / 16][4];

    /* S^T = K Q^T */
    __device__ __forceinline__ void multiply_kq(int step) {
        const uint32_t q = base + Q_OFFSET + stage_of<STAGES>(step) * Q_BYTES;
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 16; n++)
            wgmma_m64k16<F16, 0>(s,
                                 wgmma_descriptor(base + warpgroup * 64 * 128 + n / 4 * BLOCK_N * 128 + n % 4 * 32, 0),
                                 wgmma_descriptor(q + n / 4 * BLOCK_M * 128 + n % 4 * 32, 0), n > 0);
    }
    /* dP^T = V dO^T */
    __device__ __forceinline__ void multiply_vdo(int step) {
        const uint32_t dout = base + DOUT_OFFSET + stage_of<DOUT_STAGES>(step) * DOUT_BYTES;
#pragma unroll
        for (int n = 0; n < HEAD_DIM_V / 16; n++)
            wgmma_m64k16<F16, 0>(
                s, wgmma_descriptor(base + V_OFFSET + warpgroup * 64 * 128 + n / 4 * BLOCK_N * 128 + n % 4 * 32, 0),
                wgmma_descriptor(dout + n / 4 * BLOCK_M * 128 + n % 4 * 32, 0), n > 0);
    }
    /* dV += P^T dO */
    __device__ __forceinline__ void multiply_pdo(int step) {
        const uint32_t dout = base + DOUT_OFFSET + stage_of<DOUT_STAGES>(step) * DOUT_BYTES;
#pragma unroll
        for (int n = 0; n < BLOCK_M / 16; n++)
            wgmma_m64k16<F16, 1>(dv, p[n], wgmma_descriptor(dout + n * 2048, BLOCK_M * 128), true);
    }
    /* dK += dS^T Q, dS as it was left in shared memory, or from registers, where it takes the place of P */
    __device__ __forceinline__ void multiply_dsq(int step) {
        const uint32_t q = base + Q_OFFSET + stage_of<STAGES>(step) * Q_BYTES;
        const uint32_t ds = base + DS_OFFSET + stage_of<DS_STAGES>(step) * DS_BYTES + warpgroup * BLOCK_M * 128;
#pragma unroll
        for (int n = 0; n < BLOCK_M / 16; n++) {
            const uint64_t rows = wgmma_descriptor(q + n * 2048, BLOCK_M * 128);
            if constexpr (DS_REGISTERS)
                wgmma_m64k16<F16, 1>(dk, p[n], rows, true);
            else
                wgmma_m64k16<F16, 1, 1>(dk, wgmma_descriptor(ds + n * 2048, 0), rows, true);
        }
    }

    __device__ __forceinline__ void make_p(int step) {
        const uint32_t lse = base + ROWS_OFFSET + stage_of<STAGES>(step) * BLOCK_M * 8;
        const int first = (int)tid_x_reread() / 128 * 64;
        const bool masked = MASK_TILE && hides_part(base + SEEN_OFFSET, tile), scored = BIAS_TILE || masked;
        if (scored)
            wait_full<1>(base + SCORE_FULL, scores);
        scores_to_p(s, a, k.batch, k.first_key + first, tile * BLOCK_M,
                    {lse, base + LOW_OFFSET + stage_of<STAGES>(step) * BLOCK_M * 4, base + KEYS_OFFSET + first * 4,
                     base + BIAS_OFFSET + first * BLOCK_M * 2, base + MASK_OFFSET, masked});
        if (scored) {
            __syncwarp();
            release<1>(base + SCORE_EMPTY, scores++);
        }
        ds_row = tile * BLOCK_M;
        tile = k.tile_after(tile);
        if (EXACT)
            wait_empty<DS_STAGES>(base + DS_EMPTY, step);
#pragma unroll
        for (int n = 0; n < BLOCK_M / 16; n++) {
            uint32_t rest[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (EXACT)
                    split_pair(p[n][i], rest[i], s[8 * n + 2 * i], s[8 * n + 2 * i + 1]);
                else
                    p[n][i] = pack(s[8 * n + 2 * i], s[8 * n + 2 * i + 1]);
            if (EXACT) { /* where leave_ds() will put dS of the same rows */
                const int thread = (int)tid_x_reread(), lane = thread % 32, row = lane / 16 * 8 + lane % 8;
                const uint32_t to = base + DS_OFFSET + stage_of<DS_STAGES>(step) * DS_BYTES +
                                    thread / 128 * BLOCK_M * 128 + (n * 16 + row) * 128;
                st_shared_16(to + (((thread / 32 % 4 * 2 + lane / 8 % 2) ^ (row & 7)) << 4), rest[0], rest[1], rest[2],
                             rest[3]);
            }
        }
    }

    /* Rows that see no key, and in packed tensors those after the sequence's last, become 0 in a tile of Q or dO. */
    template <int panels> __device__ __forceinline__ void clear_rows(uint32_t tile, uint32_t lse) const {
#pragma unroll 1
        for (int n = (int)tid_x_reread(); n < BLOCK_M * 8 * panels; n += 128 * WARPGROUPS)
            if (ld_shared_4(lse + n / 8 % BLOCK_M * 4) == 0x7f800000)
                st_shared_16(tile + n * 16, 0, 0, 0, 0);
        fence_proxy_async();
        barrier_sync(OWNERS_BARRIER, 128 * WARPGROUPS);
    }
    /* VARLEN: what follows the sequence's last row or key is another's, and may be NaN. A tile of rows holds such rows
     * if its last is one. */
    __device__ __forceinline__ void clear_q(int step) const {
        const uint32_t lse = base + ROWS_OFFSET + stage_of<STAGES>(step) * BLOCK_M * 8;
        if (ld_shared_4(lse + (BLOCK_M - 1) * 4) == 0x7f800000)
            clear_rows<PANELS>(base + Q_OFFSET + stage_of<STAGES>(step) * Q_BYTES, lse);
    }
    __device__ __forceinline__ void clear_keys() const {
        const int count = find_sequence(a.in.in, k.batch).seqlen_k - k.first_key - warpgroup * 64;
        if (count >= 64)
            return;
#pragma unroll 1
        for (int n = threadIdx.x % 128; n < 64 * 8 * (PANELS + PANELS_V); n += 128) {
            const int panel = n / 512, row = n / 8 % 64;
            const uint32_t to =
                panel < PANELS ? base + panel * BLOCK_N * 128 : base + V_OFFSET + (panel - PANELS) * BLOCK_N * 128;
            if (row >= count)
                st_shared_16(to + (warpgroup * 64 + row) * 128 + n % 8 * 16, 0, 0, 0, 0);
        }
        fence_proxy_async();
        barrier_sync(OWN_BARRIER + warpgroup, 128);
    }

    /* A row that sees no key has no gradient, whatever comes in: its P is 0, but 0 times NaN is not. Where a row's
     * delta says that NaN or inf comes in, dO of rows without keys becomes 0 before anybody reads it. All warps look.
     */
    __device__ __forceinline__ void clear_spoiled(int step) {
        const int lane = (int)tid_x_reread() % 32;
        const uint32_t lse = base + ROWS_OFFSET + stage_of<STAGES>(step) * BLOCK_M * 8;
        const uint32_t delta = base + ROWS_OFFSET + stage_of<DOUT_STAGES>(step) * BLOCK_M * 8 + BLOCK_M * 4;
        const uint32_t dout = base + DOUT_OFFSET + stage_of<DOUT_STAGES>(step) * DOUT_BYTES;
        const bool spoiled = ld_shared_4(delta + lane * 4) == BACKWARD_SPOILED_ROW ||
                             ld_shared_4(delta + 128 + lane * 4) == BACKWARD_SPOILED_ROW;
        const bool packed = VARLEN && ld_shared_4(lse + (BLOCK_M - 1) * 4) == 0x7f800000;
        if (__any_sync(0xffffffff, spoiled || packed))
            clear_rows<PANELS_V>(dout, lse);
    }

    /* From P^T and dP^T dS of the warp's 16 keys, to shared memory, a row for each query row. */
    __device__ __forceinline__ void leave_ds(int step) {
        const int thread = (int)tid_x_reread(), lane = thread % 32, warp = thread / 32 % 4;
        const uint32_t delta =
            base + ROWS_OFFSET + stage_of<DOUT_STAGES>(step) * BLOCK_M * 8 + BLOCK_M * 4 + thread % 4 * 8;
        const uint32_t panel = base + DS_OFFSET + stage_of<DS_STAGES>(step) * DS_BYTES + thread / 128 * BLOCK_M * 128;
        /* a lane's row of matrices: keys 0-7, rows 0-7; keys 8-15, rows 0-7; keys 0-7, rows 8-15; keys 8-15, rows 8-15
         */
        const int row = lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
        if (!EXACT)
            wait_empty<DS_STAGES>(base + DS_EMPTY, step);
        const uint32_t lse_of_step = base + ROWS_OFFSET + stage_of<STAGES>(step) * BLOCK_M * 8 + thread % 4 * 8;
#pragma unroll
        for (int n = 0; n < BLOCK_M / 16; n++) {
            uint32_t ds[4], rest[4];
            if (EXACT)
                ld_shared_16(rest, panel + (n * 16 + row) * 128 + ((chunk ^ (row & 7)) << 4));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t words[2], lse[2];
                ld_shared_8(words[0], words[1], delta + (2 * n + i) * 32);
                if (SOFTCAP)
                    ld_shared_8(lse[0], lse[1], lse_of_step + (2 * n + i) * 32);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    uint32_t &x = p[n][2 * i + half];
                    const int at = 8 * n + 4 * i + 2 * half;
                    float whole[2];
                    if (EXACT)
                        join_pair(whole, x, rest[2 * i + half]);
                    float low = (EXACT ? whole[0] : unpack((uint16_t)x)) * (s[at] - __uint_as_float(words[0]));
                    float high =
                        (EXACT ? whole[1] : unpack((uint16_t)(x >> 16))) * (s[at + 1] - __uint_as_float(words[1]));
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
            stmatrix_x4_trans(panel + (n * 16 + row) * 128 + ((chunk ^ (row & 7)) << 4), ds);
        }
        fence_proxy_async();
        __syncwarp();
        release<DS_STAGES>(base + DS_FULL, step);
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
        if (DESCENDS ? tile * BLOCK_M < ds_row : tile * BLOCK_M > ds_row)
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

    /* SKIPS: steps in which no key of the warpgroup is seen: of a walk up those at its beginning, of a walk down those
     * at its end; of a group of heads the first's or the last's. */
    __device__ __forceinline__ int skipped_steps() const {
        const struct sequence at = find_sequence(a.in.in, k.batch);
        const int key = k.first_key + warpgroup * 64, tiles = first_row(a.in.in, at, key) / BLOCK_M - k.first_tile;
        return key >= at.seqlen_k || tiles >= k.tiles ? k.steps : tiles;
    }
    /* dS of such a step is 0: a quarter of the warpgroup's part is a warp's. */
    __device__ __forceinline__ void leave_nothing(int step) const {
        const int thread = (int)tid_x_reread();
        wait_empty<DS_STAGES>(base + DS_EMPTY, step);
        const uint32_t to =
            base + DS_OFFSET + stage_of<DS_STAGES>(step) * DS_BYTES + thread / 32 * (BLOCK_M * 32) + thread % 32 * 16;
#pragma unroll
        for (int i = 0; i < BLOCK_M * 32; i += 512)
            st_shared_16(to + i, 0, 0, 0, 0);
        fence_proxy_async();
        __syncwarp();
        release<DS_STAGES>(base + DS_FULL, step);
    }

    __device__ __forceinline__ void run() {
        set_zero(dk);
        set_zero(dv);
        if (!LISTED || k.steps > 0)
            wait_full<1>(base + KV_FULL, 0);
        const int skipped = SKIPS ? skipped_steps() : 0, end = DESCENDS ? k.steps - skipped : k.steps;
        int step = 0;
        if (SKIPS && !DESCENDS)
#pragma unroll 1
            for (; step < skipped; step++) {
                leave_nothing(step);
                tile = k.tile_after(tile);
            }
        if (step < end) {
            if (GATHER)
                fence_proxy_async();
            if (VARLEN)
                clear_keys();
            wait_full<STAGES>(base + Q_FULL, step);
            if (VARLEN)
                clear_q(0);
            wgmma_fence();
            multiply_kq(step);
            wgmma_commit_group();
            wgmma_wait_group<0>(s);
            make_p(step);
#pragma unroll 1
            do {
                const bool more = step + 1 < end;
                wait_full<DOUT_STAGES>(base + DOUT_FULL, step);
                if (EMPTY_ROWS)
                    clear_spoiled(step);
                wgmma_fence();
                multiply_vdo(step);
                wgmma_commit_group();
                multiply_pdo(step);
                wgmma_commit_group();
                wgmma_wait_group<DS_REGISTERS ? 0 : 1>(s);  /* P is read until then, */
                wgmma_wait_group<DS_REGISTERS ? 0 : 1>(dk); /* and Q and dS of the step before */
                leave_ds(step);
                if (DBIAS_ADDS)
                    end_step();
                if (more)
                    wait_full<STAGES>(base + Q_FULL, step + 1);
                if (VARLEN && more)
                    clear_q(step + 1);
                wgmma_fence();
                if (more)
                    multiply_kq(step + 1);
                wgmma_commit_group();
                multiply_dsq(step);
                wgmma_commit_group();
                wgmma_wait_group<DS_REGISTERS ? 0 : 1>(s);
                wgmma_wait_group<DS_REGISTERS ? 0 : 1>(dv);
                if (more)
                    make_p(step + 1);
            } while (++step < end);
            wgmma_wait_group<0>(dk);
        }
        if (SKIPS && DESCENDS)
#pragma unroll 1
            for (; step < k.steps; step++)
                leave_nothing(step);
        barrier_sync(OWN_BARRIER + warpgroup, 128); /* all products with V are complete */
        const int warp_key = (int)threadIdx.x / 32 * 16;
        store_keys<HEAD_DIM_V>(a, k, a.in.dv, a.in.dv_parts, a.in.in.head_dim_v, base + V_OFFSET, warp_key, dv, 1.0f);
        store_keys<HEAD_DIM>(a, k, a.in.dk, a.in.dk_parts, a.in.in.head_dim, base + V_OFFSET, warp_key, dk,
                             a.in.in.scale);
    }
};

__device__ __forceinline__ struct key_block find_own_block(const struct hopper_backward_params &a,
                                                           [[maybe_unused]] uint32_t base) {
    return find_block(a, ORDERED ? (int)ld_shared_4(base + PLACE) : (int)blockIdx.x);
}
__device__ __forceinline__ struct key_block find_steps(const struct hopper_backward_params &a, uint32_t base) {
#if LISTED
    return count_tiles(find_own_block(a, base), PARTS ? a.in.part_heads : a.in.in.group, base + SEEN_OFFSET);
#else
    return find_own_block(a, base);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_backward(const __grid_constant__ struct hopper_backward_params a) {
#if KEYED || BIAS_TILE
    extern __shared__ __align__(1024) char shared[];
#else
    extern __shared__ char shared[];
#endif
    const uint32_t base = (shared_address(shared) + 1023) / 1024 * 1024;
    if (threadIdx.x == 0)
        init_barriers(base);
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();           /* what kernels before have made */
    if (ORDERED && threadIdx.x == 0) /* a block waits for those that began before it, which run or have ended */
        st_shared_4(base + PLACE, (uint32_t)atomicAdd(a.in.ticket, 1));
#if KEYED
    list_keys(a, find_own_block(a, base), base + KEYS_OFFSET);
    __syncthreads();
#endif
#if LISTED
    list_tiles(a, find_own_block(a, base), base + KEYS_OFFSET, base + SEEN_OFFSET);
#endif
    __syncthreads();
    const int warpgroup = __shfl_sync(0xffffffff, (int)threadIdx.x / 128, 0);
    if (warpgroup == WARPGROUPS) {
        setmaxnreg_dec<HOPPER_BACKWARD_SERVICE_REGISTERS(WARPGROUPS)>();
        const struct key_block k = find_steps(a, base);
        const struct step_rows first = {k.first_head, k.begin_tile()};
        server{a, k, base, first, first, first, first, 0, nullptr, 0, 0}.run();
    } else {
        setmaxnreg_inc<HOPPER_BACKWARD_KEY_REGISTERS(WARPGROUPS)>();
        const struct key_block k = find_steps(a, base);
        owner{a, k, base, warpgroup, k.begin_tile(), 0, k.first_head, 0, {0, 0}}.run();
    }
}
