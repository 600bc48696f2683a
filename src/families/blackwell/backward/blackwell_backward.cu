/* blackwell_backward.cu: dQ, dK and dV for compute capability 10.0, by tcgen05 and TMA, for 16-bit dtypes.
 *
 * Idea: FlashAttention-2's backward (Dao, 2023) without additions in global memory: one launch owns query rows and
 * walks keys (dQ), one or two own keys and walk query rows (dK and dV), all by this text with rows and keys in each
 * other's place. A pair of blocks multiplies together: 256 own rows, 128 of the other axis a step. Scores and dP become
 * P and dS in tensor memory, from where they are multiplied again, so that they never pass shared memory; dQ, dK and dV
 * are summed there, and written once: the same bits every time.
 *
 * A block has 128 own rows, of Q and dO or of K and V. What it walks, the other axis, are tiles of 128: of K and V, or
 * of Q and dO of the heads of a group. Products of a step:
 *   scores         S  = own Q or K times the other's transposed        [128 x 128] for each block
 *   dP             dP = own dO or V times the other's transposed       [128 x 128]
 *   sums of dS     dQ or dK += dS times the other's K or Q             [128 x HEAD_DIM]
 *   sums of P      dV += P times dO                                    [128 x HEAD_DIM]
 * Each block of the pair loads half of every other operand: of one that is transposed half of the rows, of one that is
 * not half of the columns. The even block (the leader) issues the products of both.
 *
 * Tensor memory, a lane for each own row: sums of dS [HEAD_DIM], sums of P [HEAD_DIM], S [stages of 128], dP [128].
 * P lies in the columns of S, dS in those of dP: of each 64 columns, which one warpgroup owns, in the first 32.
 *
 * Shared memory, in panels of 128 bytes a row with the 128-byte swizzle: own first operand [panels][128], own second
 * operand [panels][128]; a ring of slots of 16 KB, two boxes of 64 rows and 64 columns each; with OWN_KEYS lse and
 * delta of the rows of a step [stages][2][128]; barriers.
 *
 * Warps: 0-3 and 4-7 compute, the first on the columns 0-63 of a tile and the second on 64-127, a thread for each own
 * row; 8 multiplies, 9 loads, 10 takes items. The leader's barriers are full by both blocks: FULL and OWN_FULL (an
 * arrival of each block's loading warp and the bytes of TMA), S_EMPTY, P_FULL and DS_FULL (an arrival of each of the 16
 * computing warps). In each block, by the products of the leader: EMPTY, S_FULL, DP_FULL, SUMS_FULL; of its own:
 * ROWS_FULL, ROWS_EMPTY, and CLEARED.
 *
 * Registers of a thread that computes: P 64, dP 32, dS or P in 16 bits 16, of 168. */
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/tcgen05.cuh"
#include "cuda/ptx/tma.cuh"
#include "families/blackwell/backward/blackwell_backward.h"

BLACKWELL_BACKWARD_CONSTANTS(GPU_CONSTANT_GIVEN)

#define THREADS BLACKWELL_BACKWARD_THREADS
#include "families/blackwell/pipeline/blackwell_ring.cuh"
#include "families/blackwell/pipeline/blackwell_scheduler.cuh"
#include "gpu/numbers.h"
#include "gpu/tile.cuh"
#include "gpu/visible.cuh"

#define F16    (DTYPE == GPU_FLOAT16)
#define CLEARS (VARLEN || EMPTY_ROWS) /* a tile may hold rows that take no part, and they may be NaN */
static_assert(OWN_KEYS || (MAKES_DS && !MAKES_DV), "a block of rows makes dQ");
static_assert(OWN_KEYS || !PARTS, "groups share keys");
static_assert(HEAD_DIM == 128 || (HEAD_DIM == 256 && MAKES_DS + MAKES_DV == 1), "sums beside scores fit 512 columns");

/* ---- tensor memory and shared memory ---- */

enum {
    TILE = BLACKWELL_BACKWARD_TILE,
    PAIR_ROWS = 2 * TILE,
    S_STAGES = blackwell_backward_score_stages(MAKES_DS),
    DS_SUMS = 0,
    P_SUMS = MAKES_DS ? HEAD_DIM : 0,
    S_COLUMNS = P_SUMS + (MAKES_DV ? HEAD_DIM : 0),
    DP_COLUMNS = S_COLUMNS + S_STAGES * TILE
};
static_assert(DP_COLUMNS + (MAKES_DS ? TILE : 0) <= BLACKWELL_BACKWARD_COLUMNS, "tensor memory");

enum {
    PANELS = HEAD_DIM / 64,
    OPERAND_BYTES = TILE * HEAD_DIM * 2,
    OPERAND_SLOTS = HEAD_DIM / 128, /* of a block's half of an operand */
    BOX_BYTES = 64 * 128,
    SLOT_BYTES = BLACKWELL_BACKWARD_SLOT_BYTES,
    SLOTS = blackwell_backward_slots(HEAD_DIM, MAKES_DS),
    ROW_STAGES = blackwell_backward_row_stages(MAKES_DS),
    ROW_BYTES = blackwell_backward_row_bytes(MAKES_DS),
    RING = blackwell_backward_operand_bytes(HEAD_DIM, MAKES_DS),
    ROWS = RING + SLOTS * SLOT_BYTES,
    CONTROL = ROWS + ROW_STAGES * ROW_BYTES,
    SLOT_RING = CONTROL,
    OWN_FULL = SLOT_RING + ring<SLOTS>::BYTES,
    S_FULL = OWN_FULL + 8,
    S_EMPTY = S_FULL + 8 * S_STAGES,
    P_FULL = S_EMPTY + 8,
    DP_FULL = P_FULL + 8 * S_STAGES,
    DS_FULL = DP_FULL + 8,
    SUMS_FULL = DS_FULL + 8,
    ROW_RING = SUMS_FULL + 8,
    CLEARED = ROW_RING + ring<ROW_STAGES>::BYTES,
    TENSOR = CLEARED + 8, /* where tensor memory begins */
    ANSWER = (TENSOR + 8 + 15) / 16 * 16,
    BOARD = ANSWER + ANSWER_BYTES,
    END = BOARD + work_board<4>::BYTES
};
static_assert(END - CONTROL <= BLACKWELL_BACKWARD_CONTROL_BYTES, "barriers fit");
static_assert(CONTROL + BLACKWELL_BACKWARD_CONTROL_BYTES == blackwell_backward_shared_bytes(HEAD_DIM, MAKES_DS),
              "the plan knows the bytes");
enum { COMPUTE_WARPS = BLACKWELL_BACKWARD_COMPUTE_WARPS, MULTIPLY_WARP = COMPUTE_WARPS, LOAD_WARP, ITEM_WARP };

/* Views of the shared memory of this block or of the leader that begins at `base`. */
__device__ __forceinline__ ring<SLOTS, SLOT_BYTES> slot_ring(uint32_t base) { return {base + SLOT_RING, base + RING}; }
__device__ __forceinline__ ring<ROW_STAGES, ROW_BYTES> row_ring(uint32_t base) {
    return {base + ROW_RING, base + ROWS};
}
__device__ __forceinline__ stage_barriers<1> own_full(uint32_t base) { return {base + OWN_FULL}; }
__device__ __forceinline__ stage_barriers<S_STAGES> s_full(uint32_t base) { return {base + S_FULL}; }
__device__ __forceinline__ stage_barriers<S_STAGES> s_empty(uint32_t base) { return {base + S_EMPTY}; }
__device__ __forceinline__ stage_barriers<S_STAGES> p_full(uint32_t base) { return {base + P_FULL}; }
__device__ __forceinline__ stage_barriers<1> dp_full(uint32_t base) { return {base + DP_FULL}; }
__device__ __forceinline__ stage_barriers<1> ds_full(uint32_t base) { return {base + DS_FULL}; }
__device__ __forceinline__ stage_barriers<1> sums_full(uint32_t base) { return {base + SUMS_FULL}; }
__device__ __forceinline__ stage_barriers<1> clear_full(uint32_t base) { return {base + CLEARED}; }

__device__ __forceinline__ void init_barriers(uint32_t base) {
    constexpr int warps = 2 * COMPUTE_WARPS;
    for (int i = 0; i < SLOTS; i++)
        slot_ring(base).init(i, 2, 1);
    for (int i = 0; i < S_STAGES; i++) {
        s_full(base).init(i, 1);
        p_full(base).init(i, warps);
    }
    for (int i = 0; i < ROW_STAGES; i++)
        row_ring(base).init(i, 1, COMPUTE_WARPS);
    own_full(base).init(0, 2);
    s_empty(base).init(0, warps);
    dp_full(base).init(0, 1);
    ds_full(base).init(0, warps);
    sums_full(base).init(0, 1);
    clear_full(base).init(0, 1);
    pair_scheduler::init_barriers(base + ANSWER);
    work_board<4>::init_barriers(base + BOARD, COMPUTE_WARPS + 2);
    fence_mbarrier_init();
}

/* ---- work ---- */

/* An item: the rows or keys of a head that a pair of blocks owns, and the tiles of the other axis that see some of
 * them or that they see: first_tile .. first_tile + tiles - 1, of each query head of a group, or (PARTS) of a part
 * of one. A step is one of these tiles. */
struct item {
    struct sequence at;
    int first_own;                      /* of this block */
    int head, part, first_head;         /* of the owned rows or keys; of the query heads that are walked */
    int first_tile, tiles, steps, live; /* live: the first of the other axis that sees something or is seen */
    __device__ __forceinline__ int tile(int step) const { return first_tile + (OWN_KEYS ? step % tiles : step); }
    __device__ __forceinline__ int query_head(int step) const { return first_head + (OWN_KEYS ? step / tiles : 0); }
    __device__ __forceinline__ int own_length() const { return OWN_KEYS ? at.seqlen_k : at.seqlen_q; }
    __device__ __forceinline__ int own_begin() const { return OWN_KEYS ? at.k_begin : at.q_begin; }
};
/* The order of items of gpu/items.cuh, with pairs of tiles of a head as its row blocks. */
struct item_order {
    int row_blocks, items;
    struct {
        int heads_per_l2_group, heads;
    } in;
};
__device__ __forceinline__ struct item_order find_order(const struct blackwell_backward_params &a) {
    const int parts = PARTS ? a.in.group_parts : 1;
    return {a.pairs, a.items, {a.heads_in_turn, OWN_KEYS ? a.in.in.heads_kv * parts : a.in.in.heads}};
}
/* Under a causal mask that order has the last rows first, which see many keys. Of keys the first have the long
 * walks. */
__device__ __forceinline__ struct item find_item(const struct blackwell_backward_params &a, int place, int rank) {
    const struct work_item at = item_at(find_order(a), place);
    const int pair = OWN_KEYS && WINDOW ? a.pairs - 1 - at.row_block : at.row_block;
    const int parts = PARTS ? a.in.group_parts : 1, part_heads = PARTS ? a.in.part_heads : a.in.in.group;
    struct item w;
    w.at = find_sequence(a.in.in, at.batch);
    w.head = at.head / parts;
    w.part = at.head % parts;
    w.first_head = OWN_KEYS ? at.head * part_heads : w.head;
    const int own = pair * PAIR_ROWS, own_end = min(own + PAIR_ROWS, w.own_length());
    w.first_own = own + rank * TILE;
    const int first = OWN_KEYS ? first_row(a.in.in, w.at, own) : first_key(a.in.in, w.at, own);
    const int end = OWN_KEYS ? last_row(a.in.in, w.at, own_end - 1) : last_key(a.in.in, w.at, own_end - 1) + 1;
    w.first_tile = first / TILE;
    w.tiles = first < end && own < own_end ? (end + TILE - 1) / TILE - w.first_tile : 0;
    w.steps = w.tiles * (OWN_KEYS ? part_heads : 1);
    w.live = OWN_KEYS ? first_row(a.in.in, w.at, 0) : first_key(a.in.in, w.at, 0);
    return w;
}

/* The products of an item in the order in which they are issued, and in which their operands are loaded. Scores of a
 * step are issued before they are needed, so that they are ready when the step before is done; dP follows the product
 * that reads dS from its columns, and scores the one that reads P from theirs. */
template <class role> __device__ __forceinline__ void in_order(role &r, int steps) {
    r.scores(0);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        if (S_STAGES == 2 && step + 1 < steps)
            r.scores(step + 1);
        if (MAKES_DS) {
            if (step > 0)
                r.sum_ds(step - 1);
            r.dp(step);
        }
        if (MAKES_DV)
            r.sum_p(step);
        if (S_STAGES == 1 && step + 1 < steps)
            r.scores(step + 1);
    }
    if (MAKES_DS)
        r.sum_ds(steps - 1);
}

/* ---- the warp that loads ---- */

struct loader {
    const struct blackwell_backward_params &a;
    uint32_t base, leader; /* shared memory of this block and of the leader */
    int rank, lane;
    ring_place<SLOTS> slot;
    ring_place<ROW_STAGES> rows;
    ring_place<1> own, cleared;
    struct item w;

    /* Loads a box of 64 rows and columns of a tensor; `row` counts from the sequence's first. */
    __device__ __forceinline__ void load_box(uint32_t to, bool of_keys, const struct cuda_tensor_map *map,
                                             uint32_t barrier, int column, int row, int head) const {
        cp_async_bulk_tensor_4d_pair(to, map, barrier, column, (of_keys ? w.at.k_begin : w.at.q_begin) + row, head,
                                     VARLEN ? 0 : w.at.batch);
    }
    /* Loads the own rows of an operand, all columns. */
    __device__ __forceinline__ void load_own(uint32_t to, const struct cuda_tensor_map *map) const {
#pragma unroll 1
        for (int n = 0; n < 2 * PANELS; n++)
            load_box(to + n * BOX_BYTES, OWN_KEYS, map, own_full(leader).at, n / 2 * 64, w.first_own + n % 2 * 64,
                     w.head);
    }

    /* Takes the next slot, when it is free. All lanes wait before it is filled: one that fell behind would miss the
     * phase. */
    __device__ __forceinline__ uint32_t take_slot() const {
        slot_ring(base).wait_empty(slot);
        __syncwarp();
        return slot_ring(base).tile(slot);
    }

    /* Loads this block's half of the rows of a tile, all columns. */
    __device__ __forceinline__ void load_transposed(const struct cuda_tensor_map *map, int tile, int head) {
#pragma unroll 1
        for (int part = 0; part < OPERAND_SLOTS; part++, slot.next()) {
            const uint32_t to = take_slot(), full = slot_ring(leader).full(slot);
            if (lane == 0) {
                mbarrier_arrive_expect_tx_remote(full, SLOT_BYTES);
                for (int box = 0; box < 2; box++)
                    load_box(to + box * BOX_BYTES, !OWN_KEYS, map, full, part * 128 + box * 64, tile * TILE + rank * 64,
                             head);
            }
        }
    }
    /* Loads all rows of a tile, this block's half of the columns. A slot is 64 rows of two panels, or 128 rows of
     * one. */
    __device__ __forceinline__ void load_straight(const struct cuda_tensor_map *map, int tile, int head) {
        constexpr int slot_rows = 128 / OPERAND_SLOTS, two_panels = OPERAND_SLOTS == 2;
#pragma unroll 1
        for (int part = 0; part < OPERAND_SLOTS; part++, slot.next()) {
            const int first = tile * TILE + part * 64;
            const int length = OWN_KEYS ? w.at.seqlen_q : w.at.seqlen_k;
            const bool clear = CLEARS && (first < w.live || (VARLEN && first + slot_rows > length));
            const uint32_t to = take_slot();
            const uint32_t full =
                clear ? mapa_shared(clear_full(base).at, (uint32_t)rank) : slot_ring(leader).full(slot);
            if (lane == 0) {
                mbarrier_arrive_expect_tx_remote(full, SLOT_BYTES);
                for (int box = 0; box < 2; box++)
                    load_box(to + box * BOX_BYTES, !OWN_KEYS, map, full,
                             rank * (HEAD_DIM / 2) + (two_panels ? box * 64 : 0), first + (two_panels ? 0 : box * 64),
                             head);
            }
            if (clear)
                clear_rows(to, slot_rows, w.live - first, length - first);
        }
    }
    /* Sets rows of a slot before `live` and from `end` on to 0: they belong to another sequence, see no key, or no
     * row sees them. Their P and dS are 0, but 0 times NaN is NaN. */
    __device__ __forceinline__ void clear_rows(uint32_t to, int slot_rows, int live, int end) {
        clear_full(base).wait(cleared);
        cleared.next();
#pragma unroll 1
        for (int n = lane; n < SLOT_BYTES / 16; n += 32) {
            const int row = n / 8 % slot_rows;
            if (row < live || row >= end)
                st_shared_16(to + n * 16, 0, 0, 0, 0);
        }
        fence_proxy_async();
        __syncwarp();
        if (lane == 0)
            mbarrier_arrive_cluster(slot_ring(leader).full(slot));
    }

    /* Loads lse, and beside dS delta, of the rows of a step. */
    __device__ __forceinline__ void load_rows(int step) {
        const uint32_t to = row_ring(base).tile(rows), full = row_ring(base).full(rows);
        const int64_t head = w.query_head(step), row = w.tile(step) * TILE;
        const int64_t at = VARLEN ? backward_begin(w.at.q_begin, w.at.batch, TILE) + head * a.in.rows + row
                                  : (w.at.batch * (int64_t)a.in.in.heads + head) * a.in.rows + row;
        row_ring(base).wait_empty(rows);
        rows.next();
        __syncwarp();
        if (lane == 0) {
            mbarrier_arrive_expect_tx(full, ROW_BYTES);
            cp_async_bulk(to, a.in.lse_rows + at, TILE * 4, full);
            if (MAKES_DS)
                cp_async_bulk(to + TILE * 4, a.in.delta_rows + at, TILE * 4, full);
        }
    }

    /* The head of the other operands of a step. */
    __device__ __forceinline__ int other_head(int step) const {
        return OWN_KEYS ? w.query_head(step) : w.head / a.in.in.group;
    }
    __device__ __forceinline__ void scores(int step) {
        if (OWN_KEYS)
            load_rows(step);
        load_transposed(OWN_KEYS ? &a.q_map : &a.k_map, w.tile(step), other_head(step));
    }
    __device__ __forceinline__ void dp(int step) {
        load_transposed(OWN_KEYS ? &a.dout_map : &a.v_map, w.tile(step), other_head(step));
    }
    __device__ __forceinline__ void sum_ds(int step) {
        load_straight(OWN_KEYS ? &a.q_map : &a.k_map, w.tile(step), other_head(step));
    }
    __device__ __forceinline__ void sum_p(int step) { load_straight(&a.dout_map, w.tile(step), other_head(step)); }

    __device__ __forceinline__ void run(const struct item &work) {
        w = work;
        if (w.steps == 0)
            return;
        sums_full(base).wait_before(own); /* the products of the item before are complete */
        own.next();
        __syncwarp();
        if (lane == 0) {
            mbarrier_arrive_expect_tx_remote(own_full(leader).at, (1 + MAKES_DS) * OPERAND_BYTES);
            load_own(base, OWN_KEYS ? &a.k_map : &a.q_map);
            if (MAKES_DS)
                load_own(base + OPERAND_BYTES, OWN_KEYS ? &a.v_map : &a.dout_map);
        }
        in_order(*this, w.steps);
    }
    /* Commits that free slots arrive before the block ends. */
    __device__ __forceinline__ void drain() {
        for (int i = 0; i < SLOTS; i++, slot.next())
            slot_ring(base).wait_empty(slot);
    }
};

/* ---- the thread that multiplies, of the leader ---- */

struct multiplier {
    uint32_t base, tensor;
    ring_place<SLOTS> slot;
    ring_place<S_STAGES> s, p;
    ring_place<1> own, ds;

    __device__ __forceinline__ uint32_t take_slot() const {
        slot_ring(base).wait_full(slot);
        tcgen05_fence_after_thread_sync();
        return slot_ring(base).tile(slot);
    }
    __device__ __forceinline__ void release_slot() {
        tcgen05_commit_multicast<2>(slot_ring(base).empty(slot), BOTH_BLOCKS);
        slot.next();
    }
    /* Makes a tile of scores or dP: the own operand times a transposed one. */
    __device__ __forceinline__ void multiply_transposed(uint32_t to, uint32_t mine) {
        constexpr uint32_t shape = tcgen05_shape(F16, PAIR_ROWS, TILE, 0, 0);
#pragma unroll 1
        for (int part = 0; part < OPERAND_SLOTS; part++) {
            const uint32_t other = take_slot(), panels = mine + part * 2 * TILE * 128;
#pragma unroll
            for (int n = 0; n < 8; n++)
                tcgen05_mma<2>(to, tcgen05_k_major(panels + n / 4 * TILE * 128 + n % 4 * 32),
                               tcgen05_k_major(other + n / 4 * BOX_BYTES + n % 4 * 32), shape, part + n > 0);
            release_slot();
        }
    }
    /* Adds P or dS, at `operand` in tensor memory, times an operand that is not transposed. */
    __device__ __forceinline__ void multiply_straight(uint32_t to, uint32_t operand, bool add) {
        constexpr uint32_t shape = tcgen05_shape(F16, PAIR_ROWS, HEAD_DIM, 0, 1);
        constexpr int products = 8 / OPERAND_SLOTS; /* of 16 rows each */
#pragma unroll 1
        for (int part = 0; part < OPERAND_SLOTS; part++) {
            const uint32_t other = take_slot();
#pragma unroll
            for (int n = 0; n < products; n++) {
                const int k = part * products + n;
                tcgen05_mma_ts<2>(to, operand + k / 4 * 64 + k % 4 * 8, tcgen05_mn_major(other + n * 2048, BOX_BYTES),
                                  shape, add || k > 0);
            }
            release_slot();
        }
    }

    __device__ __forceinline__ void scores(int) {
        if (!MAKES_DV) /* else sum_p has waited for P, which overwrote the scores before */
            s_empty(base).wait_before(s);
        multiply_transposed(tensor + S_COLUMNS + s.stage() * TILE, base);
        tcgen05_commit_multicast<2>(s_full(base).barrier(s), BOTH_BLOCKS);
        s.next();
    }
    __device__ __forceinline__ void dp(int) {
        multiply_transposed(tensor + DP_COLUMNS, base + OPERAND_BYTES);
        tcgen05_commit_multicast<2>(dp_full(base).at, BOTH_BLOCKS);
    }
    __device__ __forceinline__ void sum_ds(int step) {
        ds_full(base).wait(ds);
        ds.next();
        multiply_straight(tensor + DS_SUMS, tensor + DP_COLUMNS, step > 0);
    }
    __device__ __forceinline__ void sum_p(int step) {
        p_full(base).wait(p);
        multiply_straight(tensor + P_SUMS, tensor + S_COLUMNS + p.stage() * TILE, step > 0);
        p.next();
    }

    /* The first product with P or dS waits until the sums of the item before have been read: computing warps read them
     * before they make P and dS of this item. */
    __device__ __forceinline__ void run(int steps) {
        own_full(base).wait(own);
        own.next();
        in_order(*this, steps);
        tcgen05_commit_multicast<2>(sums_full(base).at, BOTH_BLOCKS);
    }
};

/* ---- the warps that compute ---- */

struct computer {
    const struct blackwell_backward_params &a;
    uint32_t base, tensor; /* tensor: the warp's lanes */
    int row, half;         /* of the block's 128 own rows; of the columns of a tile: 0-63 or 64-127 */
    ring_place<S_STAGES> s;
    ring_place<ROW_STAGES> rows;
    ring_place<1> dp, sums;
    struct item w;
    int first, last;          /* the range of the other axis that the own row sees or is seen by */
    float own_lse, own_delta; /* of an own query row */
    float p[64];

    /* Loads lse, or delta, which follows it, of the rows of four columns of a step. */
    __device__ __forceinline__ void read_rows(float (&x)[4], uint32_t from, int column, float own) const {
        uint32_t word[4];
        if (OWN_KEYS)
            ld_shared_16(word, from + column * 4);
#pragma unroll
        for (int e = 0; e < 4; e++)
            x[e] = OWN_KEYS ? __uint_as_float(word[e]) : own;
    }

    /* Turns scores into P, in float32 in place and (MAKES_DV) in 16 bits in the first half of their columns. Columns
     * before `begin` or from `end` on are hidden. With a softcap P times the slope of the cap is kept for dS. */
    template <bool partial>
    __device__ __forceinline__ void make_p(uint32_t s_columns, uint32_t lse_rows, int begin, int end) {
        const float unit = a.in.in.scale * (SOFTCAP ? a.in.in.softcap_inverse : LOG2_E), cap = a.in.in.softcap * LOG2_E;
        uint32_t word[16];
#pragma unroll
        for (int j = 0; j < 64; j += 4) {
            float lse[4], y[4];
            read_rows(lse, lse_rows, j, own_lse);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float t = SOFTCAP ? tanh_accurate(p[j + e] * unit) : p[j + e];
                y[e] = ex2_approx(__fmaf_rn(t, SOFTCAP ? cap : unit, -lse[e]));
                if (partial && (j + e < begin || j + e >= end))
                    y[e] = 0;
                p[j + e] = SOFTCAP && MAKES_DS && y[e] != 0 ? y[e] * (1.0f - t * t) : y[e];
            }
            word[j / 2 % 16] = pack(y[0], y[1]);
            word[j / 2 % 16 + 1] = pack(y[2], y[3]);
            if (MAKES_DV && j % 32 == 28)
                tcgen05_st_32x32b(s_columns + j / 32 * 16, word);
        }
    }
    /* Turns dP into dS, 32 columns at a time, which overwrite the first half of dP. */
    __device__ __forceinline__ void make_ds(uint32_t delta_rows) {
        const uint32_t dp_columns = tensor + DP_COLUMNS + half * 64;
#pragma unroll
        for (int part = 0; part < 2; part++) {
            float x[32];
            uint32_t word[16];
            tcgen05_ld_32x32b(x, dp_columns + part * 32);
            tcgen05_wait_ld(x);
#pragma unroll
            for (int j = 0; j < 32; j += 4) {
                float delta[4];
                read_rows(delta, delta_rows, part * 32 + j, own_delta);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float weight = p[part * 32 + j + e];
                    delta[e] = CLEARS && weight == 0 ? 0 : weight * (x[j + e] - delta[e]);
                }
                word[j / 2] = pack(delta[0], delta[1]);
                word[j / 2 + 1] = pack(delta[2], delta[3]);
            }
            tcgen05_st_32x32b(dp_columns + part * 16, word);
        }
        tcgen05_wait_st();
    }

    __device__ __forceinline__ void compute_step(int step) {
        const uint32_t s_columns = tensor + S_COLUMNS + s.stage() * TILE + half * 64;
        const uint32_t step_rows = row_ring(base).tile(rows) + half * 256;
        const int column = w.tile(step) * TILE + half * 64, begin = first - column, end = last - column;
        s_full(base).wait(s);
        tcgen05_fence_after_thread_sync();
        tcgen05_ld_32x32b(p, s_columns);
        tcgen05_wait_ld(p);
        if (!MAKES_DV)
            arrive_warp_at_leader(s_empty(base).at);
        if (OWN_KEYS)
            row_ring(base).wait_full(rows);
        if (__any_sync(0xffffffff, begin > 0 || end < 64))
            make_p<true>(s_columns, step_rows, begin, end);
        else
            make_p<false>(s_columns, step_rows, begin, end);
        if (MAKES_DV) {
            tcgen05_wait_st();
            arrive_warp_at_leader(p_full(base).barrier(s));
        }
        s.next();
        if (MAKES_DS) {
            dp_full(base).wait(dp);
            dp.next();
            tcgen05_fence_after_thread_sync();
            make_ds(step_rows + TILE * 4);
            arrive_warp_at_leader(ds_full(base).at);
        }
        if (OWN_KEYS) {
            arrive_warp(row_ring(base).empty(rows));
            rows.next();
        }
    }

    /* Stores 32 columns of the own row, from `column` on, times `factor` to `at`. */
    static __device__ __forceinline__ void store_columns(char *at, const float (&x)[32], int column, int head_dim,
                                                         float factor) {
#pragma unroll
        for (int j = 0; j < 32; j += 8) {
            const int count = min(head_dim - column - j, 8);
            uint32_t word[4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                word[e] = pack(x[j + 2 * e] * factor, x[j + 2 * e + 1] * factor);
            if (count > 0)
                store_words(at + (column + j) * 2, word, count);
        }
    }
    /* Stores the own row of a sum times `factor`, the warp's half of the columns; zeros without a walk. With PARTS
     * it stores the sums as they are to the part's `sums`. */
    __device__ __forceinline__ void store_sums(const struct gpu_matrix &to, [[maybe_unused]] float *sums,
                                               uint32_t columns, int head_dim, float factor) const {
        const int own = w.first_own + row;
        const int64_t begin = VARLEN ? w.own_begin() : 0, batch = VARLEN ? 0 : w.at.batch;
#pragma unroll 1
        for (int column = half * (HEAD_DIM / 2); column < (half + 1) * (HEAD_DIM / 2); column += 32) {
            float x[32] = {};
            if (w.steps > 0) {
                tcgen05_ld_32x32b(x, columns + column);
                tcgen05_wait_ld(x);
            }
            if (own < w.own_length()) {
#if PARTS
                const int64_t head = (int64_t)w.head * a.in.group_parts + w.part;
                float4 *sum =
                    (float4 *)(sums + (head * a.in.key_rows + batch * a.in.in.seqlen_k + begin + own) * HEAD_DIM +
                               column);
#    pragma unroll
                for (int j = 0; j < 32; j += 4)
                    sum[j / 4] = make_float4(x[j], x[j + 1], x[j + 2], x[j + 3]);
#else
                char *at = to.data + (batch * to.batch + w.head * to.head + (begin + own) * to.row) * 2;
                store_columns(at, x, column, head_dim, factor);
#endif
            }
            __syncwarp();
        }
    }

    __device__ __forceinline__ void run(const struct item &work) {
        w = work;
        const int own = w.first_own + row;
        first = OWN_KEYS ? first_row(a.in.in, w.at, own) : first_key(a.in.in, w.at, own);
        last = OWN_KEYS ? last_row(a.in.in, w.at, own) : last_key(a.in.in, w.at, own) + 1;
        if (!OWN_KEYS && own < w.at.seqlen_q) {
            const int64_t begin = VARLEN ? backward_begin(w.at.q_begin, w.at.batch, TILE) + w.head * a.in.rows
                                         : (w.at.batch * (int64_t)a.in.in.heads + w.head) * a.in.rows;
            own_lse = a.in.lse_rows[begin + own];
            own_delta = a.in.delta_rows[begin + own];
        }
#pragma unroll 1
        for (int step = 0; step < w.steps; step++)
            compute_step(step);
        if (w.steps > 0) {
            sums_full(base).wait(sums);
            sums.next();
            tcgen05_fence_after_thread_sync();
        }
        if (MAKES_DS)
            store_sums(OWN_KEYS ? a.in.dk : a.in.dq, a.in.dk_parts, tensor + DS_SUMS, a.in.in.head_dim, a.in.in.scale);
        if (MAKES_DV)
            store_sums(a.in.dv, a.in.dv_parts, tensor + P_SUMS, a.in.in.head_dim_v, 1.0f);
    }
};

/* ---- the thread that takes items ---- */

__device__ __forceinline__ void hand_out(const struct blackwell_backward_params &a, uint32_t base, int rank) {
    const struct item_order order = find_order(a);
    struct pair_scheduler scheduler(base + ANSWER, (uint32_t)rank, num_places(order));
    work_board<4> board(base + BOARD);
    for (scheduler.initial(); scheduler.valid(); scheduler.advance()) {
        board.wait_slot();
        if (item_at(order, scheduler.place).batch >= 0)
            board.tell({scheduler.place, 0, 0, 0});
        scheduler.prefetch_next();
    }
    scheduler.finish();
    board.wait_slot();
    board.tell({-1, 0, 0, 0});
}

/* ---- the block ---- */

extern "C" __global__ void __launch_bounds__(BLACKWELL_BACKWARD_THREADS, 1)
    blackwell_backward(const __grid_constant__ struct blackwell_backward_params a) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t base = shared_address(shared);
    const int warp = __shfl_sync(0xffffffff, (int)threadIdx.x / 32, 0), rank = (int)cluster_ctarank();
    const uint32_t leader = mapa_shared(base, 0);
    if (threadIdx.x == 0)
        init_barriers(base);
    if (warp == MULTIPLY_WARP) {
        tcgen05_alloc<2>(base + TENSOR, BLACKWELL_BACKWARD_COLUMNS);
        tcgen05_relinquish_alloc_permit<2>();
    }
    tcgen05_fence_before_thread_sync();
    barrier_cluster_arrive();
    barrier_cluster_wait();
    tcgen05_fence_after_thread_sync();
    const uint32_t tensor = ld_shared_4(base + TENSOR);
    work_board<4> board(base + BOARD);
    int place[4];
    if (warp == ITEM_WARP) {
        if (threadIdx.x % 32 == 0)
            hand_out(a, base, rank);
    } else if (warp == LOAD_WARP) {
        struct loader loader = {a, base, leader, rank, (int)threadIdx.x % 32};
        for (board.read(place); place[0] >= 0; board.read(place))
            loader.run(find_item(a, place[0], rank));
        loader.drain();
    } else if (warp == MULTIPLY_WARP) {
        struct multiplier multiplier = {base, tensor};
        for (board.read(place); place[0] >= 0; board.read(place)) {
            const int steps = find_item(a, place[0], rank).steps;
            if (steps > 0 && rank == LEADER && threadIdx.x % 32 == 0)
                multiplier.run(steps);
            __syncwarp();
        }
    } else {
        struct computer computer = {a, base, tensor + ((uint32_t)warp % 4 << 21), warp % 4 * 32 + (int)threadIdx.x % 32,
                                    warp / 4};
        for (board.read(place); place[0] >= 0; board.read(place))
            computer.run(find_item(a, place[0], rank));
    }
    __syncwarp();
    tcgen05_fence_before_thread_sync();
    barrier_cluster_arrive();
    barrier_cluster_wait();
    if (warp == MULTIPLY_WARP)
        tcgen05_dealloc<2>(tensor, BLACKWELL_BACKWARD_COLUMNS);
}
