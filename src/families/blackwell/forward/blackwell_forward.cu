/* blackwell_forward.cu: the forward for compute capabilities 10.0 and 10.3, by tcgen05 and TMA, for 16-bit dtypes.
 *
 * Idea: FlashAttention-4's plan for head dim 256 (github.com/Dao-AILab/flash-attention): a pair of blocks multiplies
 * together, scores and output live in tensor memory, P overwrites its scores there, and warps have roles. Unlike there,
 * K and V share one ring of slots, O is rescaled only where a maximum grew far (blackwell_softmax.cuh), and a product
 * with V is as wide as the head.
 *
 * Tile: a block has Q_TILES tiles of 128 query rows, tile t of the pair's blocks being 256 neighbouring rows, and walks
 * 128 keys a step, from the last visible tile of keys down. Of a step each block loads its 64 keys of K and its half of
 * the columns of V. With one query tile the scores of two steps are in flight, with two tiles those of one step of
 * each.
 *
 * Tensor memory, a lane a row: S [2][128] (P in the last 64 columns of its S), from column 256 on O [Q_TILES]
 * [HEAD_DIM_V].
 *
 * Shared memory, in panels of 128 bytes a row with the 128-byte swizzle: Q [Q_TILES][panels][128 rows]; slots of 16 KB:
 * of K two panels of 64 keys, of V HEAD_DIM_V / 128 panels of 128 or 64 keys; at the end barriers, items and factors.
 *
 * Warps: a warpgroup for each query tile makes P, a thread a row; the next one rescales O and writes it; then the first
 * warp of the last warpgroup multiplies (one thread of the leader for both blocks), the second loads, the third
 * schedules, the last clears rows of no sequence.
 *
 * Barriers, "leader" where both blocks arrive at the leader's: Q_FULL (leader) and Q_EMPTY; FULL (leader) and EMPTY of
 * each slot; S_FULL of each S, by a commit; P_FULL (leader) of each S, P is written and S was read; O_FULL of each
 * query tile, by a commit, and O_READY (leader), O may be added to, each for even and odd steps; FACTOR_FULL and
 * FACTOR_EMPTY, what O is to be multiplied by, last the sum and the maximum. That P is read before the next scores
 * overwrite it rests on the order of products issued by one thread (PTX ISA, "tcgen05 memory consistency model":
 * pipelined instructions).
 *
 * Registers of a softmax thread: 128 scores, and 16 of P at a time. */
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/ptx/setmaxnreg.cuh"
#include "cuda/ptx/tcgen05.cuh"
#include "cuda/ptx/tma.cuh"
#include "families/blackwell/forward/blackwell_forward.h"
#include "gpu/block_mask.h"

BLACKWELL_FORWARD_CONSTANTS(GPU_CONSTANT_GIVEN)

#include "families/blackwell/forward/blackwell_softmax.cuh"
#include "families/blackwell/pipeline/blackwell_ring.cuh"
#include "families/blackwell/pipeline/blackwell_scheduler.cuh"
#include "gpu/redo.cuh"
#include "gpu/unused_rows.cuh"

#define F16 (DTYPE == GPU_FLOAT16)
/* Registers for two query tiles a block do not hold all of a row's scores beside what makes P of them: the first 32 are
 * taken from tensor memory again. */
#define TAKES_TWICE (Q_TILES == 2)
#define THREADS     BLACKWELL_FORWARD_THREADS(Q_TILES)

/* ---- tensor memory and shared memory ---- */

constexpr int TILE = BLACKWELL_TILE, PANELS = HEAD_DIM / 64, PANEL_BYTES = TILE * 128, BOX_BYTES = 64 * 128;
constexpr int V_PANELS = HEAD_DIM_V / 128;                    /* of a block's half of V */
constexpr int K_SLOTS = (PANELS + 1) / 2, V_SLOTS = V_PANELS; /* of a step */
constexpr int SLOTS = blackwell_forward_slots(Q_TILES, HEAD_DIM), SLOT_BYTES = BLACKWELL_SLOT_BYTES;
constexpr int Q_BYTES = Q_TILES * PANELS * PANEL_BYTES, RING = Q_BYTES, CONTROL = RING + SLOTS * SLOT_BYTES;
constexpr int S_COLUMN = 0, P_COLUMN = TILE / 2,
              O_COLUMN = 2 * TILE;  /* S of stage n is TILE n columns on, O of tile t HEAD_DIM_V t */
constexpr int STAGES = 2 / Q_TILES; /* of the scores of one query tile */
constexpr int FACTOR_SLOTS = 2, WORDS = 12;
constexpr int CHUNK = 32 / Q_TILES; /* columns of O that a thread of the correction has in registers */
typedef work_board<WORDS> item_board;
enum {
    SLOT_RING = CONTROL,
    Q_RING = SLOT_RING + ring<SLOTS>::BYTES,
    TAIL_FULL = Q_RING + ring<1>::BYTES,
    S_FULL = TAIL_FULL + 8,
    P_FULL = S_FULL + 16,
    O_FULL = P_FULL + 16,
    O_READY = O_FULL + 16 * Q_TILES,
    FACTOR_FULL = O_READY + 16 * Q_TILES,
    FACTOR_EMPTY = FACTOR_FULL + 8 * Q_TILES * FACTOR_SLOTS,
    ANSWER = (FACTOR_EMPTY + 8 * Q_TILES * FACTOR_SLOTS + 15) / 16 * 16,
    BOARD = ANSWER + ANSWER_BYTES,
    COLUMNS = BOARD + item_board::BYTES, /* where the tensor memory begins */
    FACTORS = COLUMNS + 16,
    END = FACTORS + Q_TILES * FACTOR_SLOTS * TILE * 4
};
static_assert(END - CONTROL <= BLACKWELL_CONTROL_BYTES, "barriers, items and factors fit");
static_assert(CONTROL + BLACKWELL_CONTROL_BYTES == blackwell_forward_shared_bytes(Q_TILES, HEAD_DIM),
              "the plan knows the bytes");
static_assert(O_COLUMN + Q_TILES * HEAD_DIM_V <= BLACKWELL_COLUMNS, "sums fit beside scores");
static_assert(Q_TILES == 1 || (MAXIMA_BARE && !MASK), "registers hold rows of two query tiles");
static_assert(SLOTS >= 2 * (K_SLOTS + V_SLOTS), "two steps are in flight");

/* Views of the shared memory that begins at `base`. */
__device__ __forceinline__ ring<SLOTS, SLOT_BYTES> slot_ring(uint32_t base) { return {base + SLOT_RING, base + RING}; }
__device__ __forceinline__ ring<1> q_ring(uint32_t base) { return {base + Q_RING, base}; }
__device__ __forceinline__ stage_barriers<1> tail_full(uint32_t base) { return {base + TAIL_FULL}; }
/* Barriers of a query tile, for even and odd steps. */
__device__ __forceinline__ stage_barriers<2> o_full(uint32_t base, int tile) { return {base + O_FULL + 16 * tile}; }
__device__ __forceinline__ stage_barriers<2> o_ready(uint32_t base, int tile) { return {base + O_READY + 16 * tile}; }

__device__ __forceinline__ void init_barriers(uint32_t base, uint32_t rank) {
    for (int i = 0; i < SLOTS; i++)
        slot_ring(base).init(i, PAIR, 1);
    q_ring(base).init(0, PAIR, 1);
    tail_full(base).init(0, 1);
    for (int i = 0; i < 2; i++) {
        mbarrier_init(base + S_FULL + 8 * i, 1);
        mbarrier_init(base + P_FULL + 8 * i, 4 * PAIR);
    }
    for (int i = 0; i < 2 * Q_TILES; i++) {
        mbarrier_init(base + O_FULL + 8 * i, 1);
        mbarrier_init(base + O_READY + 8 * i, 4 * PAIR);
    }
    for (int i = 0; i < Q_TILES * FACTOR_SLOTS; i++) {
        mbarrier_init(base + FACTOR_FULL + 8 * i, 4);
        mbarrier_init(base + FACTOR_EMPTY + 8 * i, 4);
    }
    pair_scheduler::init_barriers(base + ANSWER);
    item_board::init_barriers(base + BOARD, 4 * Q_TILES + 4 + 1 + (rank == LEADER) + VARLEN);
    fence_mbarrier_init();
}

/* ---- items ---- */

/* The facts of an item that every warp has. Tiles of keys are walked from last_tile - 1 down to first_tile. */
struct item_facts {
    int first_row, head, batch, first_tile, last_tile; /* first_row -1: there are no more items */
    int seqlen_q, seqlen_k, q_begin, k_begin;
};
__device__ __forceinline__ void tell(item_board &board, const struct item_facts &f) {
    board.tell({f.first_row, f.head, f.batch, f.first_tile, f.last_tile, f.seqlen_q, f.seqlen_k, f.q_begin, f.k_begin,
                0, 0, 0});
}
__device__ __forceinline__ bool next_item(item_board &board, struct item_facts &f) {
    int word[WORDS];
    board.read(word);
    f = {word[0], word[1], word[2], word[3], word[4], word[5], word[6], word[7], word[8]};
    return f.first_row >= 0;
}
__device__ __forceinline__ struct sequence sequence_of(const struct item_facts &f) {
    return {f.batch, f.seqlen_q, f.seqlen_k, f.q_begin, f.k_begin, f.seqlen_k - f.seqlen_q};
}

/* The last tile up to `tile` in which the mask shows something to a row of the item; below first_tile where there is
 * none. Every warp finds it by itself. */
__device__ __forceinline__ int visible_tile(const struct blackwell_forward_params &a, const struct item_facts &f,
                                            int tile) {
#if MASK
    const uint8_t *block_mask = a.in.block_mask + (a.mask_batches == 1 ? 0 : f.batch) * a.in.block_mask_batch +
                                f.head / a.mask_group * a.in.block_mask_head +
                                f.first_row / (PAIR * Q_TILES * TILE) * a.in.block_mask_row;
    while (tile >= f.first_tile && block_mask[tile] == GPU_BLOCK_HIDDEN)
        tile--;
#endif
    return tile;
}
__device__ __forceinline__ int next_tile(const struct blackwell_forward_params &a, const struct item_facts &f,
                                         int tile) {
    return visible_tile(a, f, tile - 1);
}

/* ---- the scheduler: one thread of each block ---- */

__device__ __forceinline__ void schedule(const struct blackwell_forward_params &a, uint32_t base, uint32_t rank) {
    struct pair_scheduler scheduler(base + ANSWER, rank, num_places(a));
    item_board board(base + BOARD);
    scheduler.initial();
    while (scheduler.valid()) {
        const struct work_item work = item_at(a, scheduler.place);
        if (work.batch >= 0) {
            const struct sequence s = find_sequence(a.in, work.batch);
            struct item_facts f = {work.row_block * PAIR * Q_TILES * TILE,
                                   work.head,
                                   work.batch,
                                   0,
                                   0,
                                   s.seqlen_q,
                                   s.seqlen_k,
                                   s.q_begin,
                                   s.k_begin};
            if (f.first_row < s.seqlen_q) {
                const int last_row = min(f.first_row + PAIR * Q_TILES * TILE, s.seqlen_q) - 1;
                const int first = first_key(a.in, s, f.first_row), last = last_key(a.in, s, last_row) + 1;
                f.first_tile = first / TILE;
                f.last_tile = first < last ? (last + TILE - 1) / TILE : f.first_tile;
                f.last_tile = visible_tile(a, f, f.last_tile - 1) + 1;
            }
            if (f.first_row < s.seqlen_q || (VARLEN && f.first_row == 0)) { /* clear_rest() wants each sequence */
                board.wait_slot();
                tell(board, f);
                board.wait_slot();
            }
        }
        scheduler.prefetch_next();
        scheduler.advance();
    }
    board.wait_slot();
    tell(board, {-1, 0, 0, 0, 0, 0, 0, 0, 0});
    scheduler.finish();
}

/* ---- loads: one warp of each block ---- */

struct loader {
    const struct blackwell_forward_params &a;
    uint32_t base, rank;
    ring_place<SLOTS> slot;
    ring_place<1> q, tail;

    __device__ __forceinline__ loader(const struct blackwell_forward_params &params, uint32_t shared,
                                      uint32_t block_rank)
        : a(params), base(shared), rank(block_rank) {}

    static __device__ __forceinline__ bool first_lane() { return threadIdx.x % 32 == 0; }
    static __device__ __forceinline__ int batch_of(const struct item_facts &f) { return VARLEN ? 0 : f.batch; }

    __device__ __forceinline__ void load_q(const struct item_facts &f) {
        if (first_lane()) {
            const uint32_t full = mapa_shared(q_ring(base).full(0), LEADER);
            q_ring(base).wait_empty(q);
            mbarrier_arrive_expect_tx_remote(full, Q_BYTES);
#pragma unroll
            for (int tile = 0; tile < Q_TILES; tile++)
#pragma unroll
                for (int panel = 0; panel < PANELS; panel++)
                    cp_async_bulk_tensor_4d_pair(base + (tile * PANELS + panel) * PANEL_BYTES, &a.q_map, full,
                                                 panel * 64, f.q_begin + f.first_row + (tile * PAIR + (int)rank) * TILE,
                                                 f.head, batch_of(f));
        }
        q.next();
    }
    /* The block's 64 keys of a tile. */
    __device__ __forceinline__ void load_k(const struct item_facts &f, int tile) {
#pragma unroll
        for (int n = 0; n < K_SLOTS; n++) {
            constexpr int rest = PANELS % 2;
            const int panels = n == K_SLOTS - 1 && rest ? 1 : 2;
            const uint32_t to = slot_ring(base).tile(slot);
            if (first_lane()) {
                const uint32_t full = mapa_shared(slot_ring(base).full(slot), LEADER);
                slot_ring(base).wait_empty(slot);
                mbarrier_arrive_expect_tx_remote(full, panels * BOX_BYTES);
                for (int panel = 0; panel < panels; panel++)
                    cp_async_bulk_tensor_4d_pair(to + panel * BOX_BYTES, &a.k_map, full, (2 * n + panel) * 64,
                                                 f.k_begin + tile * TILE + (int)rank * 64, f.head / a.in.group,
                                                 batch_of(f));
            }
            slot.next();
        }
    }
    /* Box `box` of slot `n` of a tile of V: its first key and column in the tensor. */
    __device__ __forceinline__ int v_row(const struct item_facts &f, int tile, int n, int box) const {
        return f.k_begin + tile * TILE + (V_PANELS == 2 ? n : box) * 64;
    }
    __device__ __forceinline__ int v_column(int box) const {
        return (int)rank * (HEAD_DIM_V / 2) + (V_PANELS == 2 ? box : 0) * 64;
    }
    /* Loads the block's half of the columns of a tile. */
    __device__ __forceinline__ void load_v(const struct item_facts &f, int tile) {
        const int keys = f.seqlen_k - tile * TILE;
#pragma unroll
        for (int n = 0; n < V_SLOTS; n++) {
            const uint32_t to = slot_ring(base).tile(slot);
            const uint32_t full = mapa_shared(slot_ring(base).full(slot), LEADER);
            if (first_lane())
                slot_ring(base).wait_empty(slot);
            if (VARLEN && keys < TILE) {
                load_tail(f, tile, n, keys, to, full);
            } else if (first_lane()) {
                mbarrier_arrive_expect_tx_remote(full, SLOT_BYTES);
#pragma unroll
                for (int box = 0; box < 2; box++)
                    cp_async_bulk_tensor_4d_pair(to + box * BOX_BYTES, &a.v_map, full, v_column(box),
                                                 v_row(f, tile, n, box), f.head / a.in.group, batch_of(f));
            }
            slot.next();
        }
    }
    /* In packed tensors the keys past the end belong to the next sequence. P is 0 there, but their values may be
     * anything: they become 0 too. */
    __device__ __forceinline__ void load_tail(const struct item_facts &f, int tile, int n, int keys, uint32_t to,
                                              uint32_t full) {
        if (first_lane()) {
            mbarrier_arrive_expect_tx(tail_full(base).at, SLOT_BYTES);
#pragma unroll
            for (int box = 0; box < 2; box++)
                cp_async_bulk_tensor_4d(to + box * BOX_BYTES, &a.v_map, tail_full(base).at, v_column(box),
                                        v_row(f, tile, n, box), f.head / a.in.group, 0);
        }
        tail_full(base).wait(tail);
        tail.next();
        for (int box = 0; box < 2; box++) {
            const int rows = min(max(keys - (V_PANELS == 2 ? n : box) * 64, 0), 64);
            for (int chunk = rows * 8 + (int)threadIdx.x % 32; chunk < 64 * 8; chunk += 32)
                st_shared_16(to + box * BOX_BYTES + chunk * 16, 0, 0, 0, 0);
        }
        fence_proxy_async();
        __syncwarp();
        if (first_lane())
            mbarrier_arrive_cluster(full);
    }

    /* With one query tile V is loaded in the order of the products: behind the next K. */
    struct item_facts left;
    int left_tile;
    __device__ __forceinline__ void load_left() {
        if (left.first_row >= 0)
            load_v(left, left_tile);
        left.first_row = -1;
    }

    __device__ __forceinline__ void run() {
        item_board board(base + BOARD);
        struct item_facts f;
        left.first_row = -1;
        while (next_item(board, f)) {
            if (f.first_tile < f.last_tile)
                load_q(f);
            else
                load_left();
            for (int tile = f.last_tile - 1; tile >= f.first_tile; tile = next_tile(a, f, tile)) {
                load_k(f, tile);
                if (Q_TILES == 2) {
                    load_v(f, tile);
                } else {
                    load_left();
                    left = f;
                    left_tile = tile;
                }
            }
        }
        load_left();
        if (!first_lane())
            return;
        for (int n = 0; n < SLOTS; n++, slot.next()) /* no commit is in flight */
            slot_ring(base).wait_empty(slot);
        q_ring(base).wait_empty(q);
    }
};

/* ---- products: one thread of the leader ---- */

struct multiplier {
    const struct blackwell_forward_params &a;
    uint32_t base, tensor;
    ring_place<SLOTS> slot;
    ring_place<1> q;
    ring_place<STAGES> s, p[Q_TILES]; /* s: whose scores are made next; p: whose P is multiplied next */
    ring_place<2> o[Q_TILES];

    __device__ __forceinline__ multiplier(const struct blackwell_forward_params &params, uint32_t shared)
        : a(params), base(shared), tensor(ld_shared_4(shared + COLUMNS)) {}

    template <int n> __device__ __forceinline__ void wait_slots() {
        ring_place<SLOTS> at = slot;
#pragma unroll
        for (int i = 0; i < n; i++, at.next())
            slot_ring(base).wait_full(at);
    }
    template <int n> __device__ __forceinline__ void release_slots(ring_place<SLOTS> at) {
#pragma unroll
        for (int i = 0; i < n; i++, at.next())
            tcgen05_commit_multicast<2>(slot_ring(base).empty(at), BOTH_BLOCKS);
    }
    template <int n> __device__ __forceinline__ void skip_slots() {
#pragma unroll
        for (int i = 0; i < n; i++)
            slot.next();
    }
    __device__ __forceinline__ uint32_t stage_of(int tile, uint32_t index) const { return Q_TILES == 2 ? tile : index; }

    /* S = Q K^T of a query tile; K from slot `at` on. */
    __device__ __forceinline__ void multiply_qk(int tile, ring_place<SLOTS> at) {
        constexpr uint32_t shape = tcgen05_shape(F16, 2 * TILE, TILE, 0, 0);
        const uint32_t stage = stage_of(tile, s.stage());
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++) {
            const uint32_t q_panel = base + (tile * PANELS + panel) * PANEL_BYTES;
            const uint32_t k_panel = slot_ring(base).tile(at) + panel % 2 * BOX_BYTES;
#pragma unroll
            for (int n = 0; n < 4; n++)
                tcgen05_mma<2>(tensor + S_COLUMN + stage * TILE, tcgen05_k_major(q_panel + 32 * n),
                               tcgen05_k_major(k_panel + 32 * n), shape, panel > 0 || n > 0);
            if (panel % 2)
                at.next();
        }
        tcgen05_commit_multicast<2>(base + S_FULL + 8 * stage, BOTH_BLOCKS);
    }
    /* O = P V + (add ? O : 0) of a query tile, when P is there and O ready; V from slot `at` on. */
    __device__ __forceinline__ void multiply_pv(int tile, ring_place<SLOTS> at, bool add) {
        constexpr uint32_t shape = tcgen05_shape(F16, 2 * TILE, HEAD_DIM_V, 0, 1);
        const uint32_t stage = stage_of(tile, p[tile].stage());
        mbarrier_wait(base + P_FULL + 8 * stage, p[tile].parity());
        o_ready(base, tile).wait(o[tile]);
        tcgen05_fence_after_thread_sync();
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const uint32_t v = slot_ring(base).tile(at) + n % (8 / V_SLOTS) * 2048;
            tcgen05_mma_ts<2>(tensor + O_COLUMN + tile * HEAD_DIM_V,
                              tensor + S_COLUMN + stage * TILE + P_COLUMN + 8 * n, tcgen05_mn_major(v, BOX_BYTES),
                              shape, add || n > 0);
            if (n % (8 / V_SLOTS) == 8 / V_SLOTS - 1)
                at.next();
        }
        tcgen05_commit_multicast<2>(o_full(base, tile).barrier(o[tile]), BOTH_BLOCKS);
        p[tile].next();
        o[tile].next();
    }

    /* The product with V that was left for later: that of the step before and, with two query tiles, that of the
     * second tile. */
    struct {
        bool there, add;
        ring_place<SLOTS> v;
    } left;
    __device__ __forceinline__ void finish_left() {
        if (!left.there)
            return;
        if (Q_TILES == 1) {
            wait_slots<V_SLOTS>();
            multiply_pv(0, slot, left.add);
            release_slots<V_SLOTS>(slot);
            skip_slots<V_SLOTS>();
        } else {
            multiply_pv(Q_TILES - 1, left.v, left.add);
            release_slots<V_SLOTS>(left.v);
        }
        left.there = false;
    }

    __device__ __forceinline__ void multiply_item(const struct item_facts &f) {
        if (f.first_tile >= f.last_tile) {
            finish_left(); /* others wait for it before they take up the item after this one */
            return;
        }
        q_ring(base).wait_full(q);
        q.next();
        bool add = false;
        for (int tile = f.last_tile - 1; tile >= f.first_tile; add = true) {
            const int next = next_tile(a, f, tile);
            const ring_place<SLOTS> k = slot;
            wait_slots<K_SLOTS>();
            tcgen05_fence_after_thread_sync();
            skip_slots<K_SLOTS>();
            multiply_qk(0, k);
            if (Q_TILES == 2) {
                finish_left();
                multiply_qk(Q_TILES - 1, k);
            }
            release_slots<K_SLOTS>(k);
            if (next < f.first_tile)
                tcgen05_commit_multicast<2>(q_ring(base).empty(0), BOTH_BLOCKS);
            s.next();
            if (Q_TILES == 1)
                finish_left();
            left.v = slot;
            if (Q_TILES == 2) {
                wait_slots<V_SLOTS>();
                multiply_pv(0, slot, add);
                skip_slots<V_SLOTS>();
            }
            left.there = true;
            left.add = add;
            tile = next;
        }
    }
};

/* A whole warp calls it, of which one thread multiplies. */
__device__ __forceinline__ void multiply(const struct blackwell_forward_params &a, uint32_t base) {
    item_board board(base + BOARD);
    struct multiplier m(a, base);
    struct item_facts f;
    m.left.there = m.left.add = false;
    while (next_item(board, f)) {
        if (threadIdx.x % 32 == 0)
            m.multiply_item(f);
        __syncwarp();
    }
    if (threadIdx.x % 32 == 0)
        m.finish_left();
    __syncwarp();
}

#include "families/blackwell/forward/blackwell_epilogue.cuh"

/* ---- rows of no sequence: a warp of each block ---- */

/* The item that begins a sequence also clears the unused rows around it. The blocks of the grid cannot share this
 * work: in the dynamic order a block does not run when another has taken its item. */
__device__ __forceinline__ void clear_rest(const struct blackwell_forward_params &a, uint32_t base, uint32_t rank) {
    if (!VARLEN)
        return;
    item_board board(base + BOARD);
    struct item_facts f;
    while (next_item(board, f))
        if (f.first_row == 0)
            clear_unused_of_forward(a.in, f.batch, f.head, (int)rank * 32 + threadIdx.x % 32, PAIR * 32);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    blackwell_forward(const __grid_constant__ struct blackwell_forward_params a) {
    extern __shared__ __align__(1024) char shared[];
    const uint32_t base = shared_address(shared), rank = cluster_ctarank();
    const int warp = (int)threadIdx.x / 32;
    if (threadIdx.x == 0)
        init_barriers(base, rank);
    if (warp == 0) {
        tcgen05_alloc<2>(base + COLUMNS, BLACKWELL_COLUMNS);
        tcgen05_relinquish_alloc_permit<2>();
    }
    tcgen05_fence_before_thread_sync();
    __syncthreads();
    barrier_cluster_arrive(); /* the other block's barriers are there */
    barrier_cluster_wait();
    tcgen05_fence_after_thread_sync();
    /* Each role computes what it needs by itself: values that roles shared would be kept in the registers of all. */
    if (warp < 4 * Q_TILES) {
        setmaxnreg_inc<BLACKWELL_SOFTMAX_REGISTERS(Q_TILES)>();
        row_softmax(a, opaque(base)).run();
    } else if (warp < 4 * Q_TILES + 4) {
        setmaxnreg_dec<BLACKWELL_CORRECTION_REGISTERS(Q_TILES)>();
        corrector(a, opaque(base), opaque(rank)).run();
    } else {
        setmaxnreg_dec<BLACKWELL_OTHER_REGISTERS(Q_TILES)>();
        if (warp == 4 * Q_TILES + 4 && rank == LEADER)
            multiply(a, opaque(base));
        else if (warp == 4 * Q_TILES + 5)
            loader(a, opaque(base), opaque(rank)).run();
        else if (warp == 4 * Q_TILES + 6 && threadIdx.x % 32 == 0)
            schedule(a, opaque(base), opaque(rank));
        else if (warp == 4 * Q_TILES + 7)
            clear_rest(a, opaque(base), opaque(rank));
    }
    __syncwarp();
    tcgen05_fence_before_thread_sync();
    __syncthreads();
    barrier_cluster_arrive(); /* no product of the other block reads or writes here any more */
    barrier_cluster_wait();
    if (warp == 0) {
        tcgen05_fence_after_thread_sync();
        tcgen05_dealloc<2>(ld_shared_4(base + COLUMNS), BLACKWELL_COLUMNS);
    }
}
