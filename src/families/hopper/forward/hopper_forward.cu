/* hopper_forward.cu: the forward for compute capability 9.0, by wgmma and TMA, for 16-bit dtypes.
 *
 * Idea: FlashAttention-2 (Dao, 2023) with specialised warpgroups as in FlashAttention-3 (Shah et al., 2024): one thread
 * of a producer warpgroup fills rings of K and V by TMA, and each other warpgroup owns 64 query rows. A warpgroup
 * issues Q K^T of a step and P V of the step before together. With PING_PONG one warpgroup at a time issues products
 * while the others compute P, so that products and exponentials overlap between warpgroups. Where no score raises its
 * row's maximum, P is computed with the maxima of the tiles before (hopper_softmax.cuh).
 *
 * Tile: BLOCK_M = 64 WARPGROUPS query rows x BLOCK_N keys; tiles of keys are walked from the last visible one down, so
 * that those under the diagonal, which hide keys, come first. Tiles that no row sees are never loaded.
 *
 * Shared memory, each matrix in panels of 128 bytes a row with the 128-byte swizzle:
 *   Q [Q_STAGES][panels][BLOCK_M] (later the output of the same rows), K [STAGES][panels][BLOCK_N],
 *   V [STAGES][panels][BLOCK_N], bias and mask [SCORE_STAGES][panels][BLOCK_M], with RANGED the rows that see each key
 *   of each stage of K, barriers, two work items.
 *
 * RANGED: ranges of rows or of keys say which rows see a key, and the tile plan names the tiles of keys that some row
 * sees and those that all rows see whole (hopper_ranges.cuh). For tiles that not all rows see whole, a second warp of
 * the producer warpgroup writes the ranges of rows to shared memory, and consumers read the ranges of keys from global
 * memory. hopper_gather.cu computes the heads whose visible keys lie scattered.
 *
 * Barriers: each stage of a ring has a full barrier (one arrival of the producer and the bytes of TMA) and an empty one
 * (one arrival of each consumer warp). With RANGED a stage of K has a third, at which the second warp arrives when it
 * has named the step's tile; K's stage is empty then. The named barrier 1 + w belongs to the ping-pong of warpgroup w,
 * 5 + w to that warpgroup alone, and 4 to all consumers.
 *
 * Registers: a consumer has S BLOCK_N / 2, P BLOCK_N / 4, O HEAD_DIM_V / 2, and some 40 besides, of 224 to 240 with two
 * consumer warpgroups or 160 with three. */
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/ring.cuh"
#include "families/hopper/forward/hopper_forward.h"
#include "gpu/block_mask.h"

HOPPER_FORWARD_CONSTANTS(GPU_CONSTANT_GIVEN)

#define NEXT_AT_END (SCHEDULER == ITEMS_DYNAMIC && !VARLEN && (WINDOW || MASK || INTERVALS || ROW_RUNS))
#define BLOCK_M     (64 * WARPGROUPS)
#define THREADS     (128 * (WARPGROUPS + 1))
#include "families/hopper/forward/hopper_rows.cuh"
#include "families/hopper/forward/hopper_softmax.cuh"
#include "families/hopper/forward/hopper_work.cuh"
#include "families/hopper/pipeline/hopper_panels.cuh"
#include "gpu/redo.cuh"
#include "gpu/unused_rows.cuh"

#define F16         (DTYPE == GPU_FLOAT16)
#define RANGED      (INTERVALS || (MASK && !MASK_ROWS) || (ROW_RUNS && !MASK_TILE && !BIAS))
#define WALKED      (BLOCK_MASKED || RANGED) /* the producer names the tile of each step */
#define SKIPS_TILES (WINDOW && !WALKED)      /* a warpgroup skips tiles that only the others see */
#define CACHED      (CACHE != GPU_CACHE_NONE)
#define READS_WORDS (RANGED || CACHED) /* a stage of K is released after its word is read */
static_assert(!RANGED || (!MASK_TILE && !BIAS && !SPLITS && PACKED_HEADS == 1),
              "ranges exclude tiles of mask and bias, splits and packed heads");
static_assert(!ROW_RUNS || (!SPLITS && PACKED_HEADS == 1), "runs of rows exclude splits and packed heads");
static_assert(!(CACHED || SEQUSED) || (!MASK && !BIAS && !INTERVALS && !ROW_RUNS && !SPLITS),
              "caches and lengths on the device exclude masks, biases and splits");

/* Stores a recomputed row of a split, as store_part() does. */
__device__ __forceinline__ void store_redone_part(const struct gpu_forward_params &a, const struct item_facts &f,
                                                  const struct redone_row<HEAD_DIM_V> &again, int head, int row) {
    const int64_t slot = part_slot(a, f, head, row);
    const int lane = threadIdx.x % 32;
    if (lane == 0)
        *(float2 *)&a.partial_rows[2 * slot] = make_float2(again.most, again.sum);
#pragma unroll
    for (int n = 0; n < again.count; n++)
        if (lane + 32 * n < a.head_dim_v)
            a.partial_out[slot * a.head_dim_v + lane + 32 * n] = again.o[n];
}

/* ---- shared memory ---- */

constexpr int Q_PANELS = HOPPER_PANELS(HEAD_DIM, 2), V_PANELS = HOPPER_PANELS(HEAD_DIM_V, 2);
constexpr int Q_BYTES = BLOCK_M * 128 * (Q_PANELS > V_PANELS ? Q_PANELS : V_PANELS);
constexpr int K_BYTES = BLOCK_N * 128 * Q_PANELS, V_BYTES = BLOCK_N * 128 * V_PANELS;
constexpr int BIAS_PANELS = BIAS ? HOPPER_PANELS(BLOCK_N, BIAS_BYTES) : 0;
constexpr int MASK_PANELS = MASK_TILE ? HOPPER_PANELS(BLOCK_N, 1) : 0;
constexpr int SCORE_BYTES = BLOCK_M * 128 * (BIAS_PANELS + MASK_PANELS);
constexpr int K_OFFSET = Q_STAGES * Q_BYTES, V_OFFSET = K_OFFSET + STAGES * K_BYTES;
constexpr int SCORE_OFFSET = V_OFFSET + STAGES * V_BYTES, RANGE_OFFSET = SCORE_OFFSET + SCORE_STAGES * SCORE_BYTES;
constexpr int CONTROL = RANGE_OFFSET + (RANGED ? STAGES * HOPPER_RANGE_BYTES(BLOCK_N) : 0);
constexpr int SCORE_PLACES = SCORE_STAGES ? SCORE_STAGES : 1;
enum {
    Q_RING = CONTROL, /* barriers of each ring */
    K_RING = Q_RING + ring<Q_STAGES>::BYTES,
    V_RING = K_RING + ring<STAGES>::BYTES,
    SCORE_RING = V_RING + ring<STAGES>::BYTES,
    WORK_RING = SCORE_RING + ring<SCORE_PLACES>::BYTES,
    WORK = (WORK_RING + ring<2>::BYTES + 15) / 16 * 16,
    STEP_KNOWN = WORK + 2 * ITEM_BYTES,
    RANGE_SOURCES = STEP_KNOWN + (RANGED ? stage_barriers<STAGES>::BYTES : 0),
    STEP_WORDS = RANGE_SOURCES + (RANGED ? 40 : 0), /* WALKED, CACHED: a word for each stage of K */
    END = STEP_WORDS + 4 * STAGES
};
static_assert(END - CONTROL <= HOPPER_CONTROL_BYTES, "barriers and work items fit");
static_assert(CONTROL + HOPPER_CONTROL_BYTES + 1024 ==
                  hopper_forward_shared_bytes(WARPGROUPS, BLOCK_N, STAGES, Q_STAGES, SCORE_STAGES, HEAD_DIM, HEAD_DIM_V,
                                              MASK_TILE, BIAS ? BIAS_BYTES : 0, RANGED),
              "the plan knows the bytes");
/* The word of a step: its tile of keys; STEP_MORE where another step follows; and STEP_MASKED << warpgroup where some
 * row of that warpgroup does not see the whole tile. */
enum { STEP_TILE = (1 << 26) - 1, STEP_MORE = 1 << 26, STEP_MASKED = 1 << 27, STEP_MASKED_ALL = STEP_MASKED * 7 };
enum { PING_PONG_BARRIER = 1, CONSUMERS_BARRIER = 4, WARPGROUP_BARRIER = 5 };

/* Views of the shared memory that begins at `base`. */
typedef ring<Q_STAGES, Q_BYTES> q_stages;
typedef ring<STAGES, K_BYTES> k_stages;
typedef ring<STAGES, V_BYTES> v_stages;
typedef ring<SCORE_PLACES, SCORE_BYTES> score_stages;
typedef ring<2, ITEM_BYTES> work_stages;
__device__ __forceinline__ q_stages q_ring(uint32_t base) { return {base + Q_RING, base}; }
__device__ __forceinline__ k_stages k_ring(uint32_t base) { return {base + K_RING, base + K_OFFSET}; }
__device__ __forceinline__ v_stages v_ring(uint32_t base) { return {base + V_RING, base + V_OFFSET}; }
__device__ __forceinline__ score_stages score_ring(uint32_t base) { return {base + SCORE_RING, base + SCORE_OFFSET}; }
__device__ __forceinline__ work_stages work_ring(uint32_t base) { return {base + WORK_RING, base + WORK}; }
__device__ __forceinline__ stage_barriers<STAGES> step_known(uint32_t base) { return {base + STEP_KNOWN}; }
__device__ __forceinline__ uint32_t step_word(uint32_t base, uint32_t step) {
    return base + STEP_WORDS + 4 * k_stages::stage(step);
}
__device__ __forceinline__ uint32_t ranges_of_step(uint32_t base, uint32_t step) {
    return base + RANGE_OFFSET + k_stages::stage(step) * HOPPER_RANGE_BYTES(BLOCK_N);
}

__device__ __forceinline__ void init_barriers(uint32_t base) {
    constexpr int warps = 4 * WARPGROUPS;
    for (int i = 0; i < Q_STAGES; i++)
        q_ring(base).init(i, 1, warps);
    for (int i = 0; i < STAGES; i++) {
        k_ring(base).init(i, 1, warps);
        if (RANGED)
            step_known(base).init(i, 1);
        v_ring(base).init(i, 1, warps);
    }
    for (int i = 0; i < SCORE_PLACES; i++)
        score_ring(base).init(i, 1, warps);
    for (int i = 0; i < 2; i++)
        work_ring(base).init(i, 1, RANGED ? warps + 1 : warps);
    fence_mbarrier_init();
}

/* ---- producer ---- */

#include "families/hopper/forward/hopper_ranges.cuh"

struct producer {
    const struct hopper_forward_params &a;
    uint32_t base, item, step, score_step;
    struct tile_scheduler scheduler;

    __device__ __forceinline__ producer(const struct hopper_forward_params &params, uint32_t shared)
        : a(params), base(shared), item(0), step(0), score_step(0) {}

    __device__ __forceinline__ int batch_of(const struct item_facts &f) const {
        return VARLEN ? 0 : SPLITS ? f.batch / a.in.num_splits : f.batch;
    }

    /* Loads `count` panels of `rows` rows, from row `row` of a head on, to `to`. */
    template <int count, int rows>
    __device__ __forceinline__ void load(uint32_t to, const struct cuda_tensor_map *map, uint32_t barrier, int row,
                                         int head, int batch) {
        mbarrier_arrive_expect_tx(barrier, count * panels<rows>::BYTES);
        load_panels<count, rows>(to, map, barrier, row, head, batch);
    }
    __device__ __forceinline__ void publish(const struct item_facts &f) {
        work_ring(base).wait_empty(item);
        write_facts(work_ring(base).tile(item), f);
        work_ring(base).full().arrive(item);
    }
    /* Loads Q of packed heads, whose map has heads before rows. */
    __device__ __forceinline__ void load_packed(uint32_t to, uint32_t full, const struct item_facts &f) {
        mbarrier_arrive_expect_tx(full, Q_PANELS * panels<BLOCK_M>::BYTES);
#pragma unroll
        for (int n = 0; n < Q_PANELS; n++)
            cp_async_bulk_tensor_4d(panels<BLOCK_M>{to}.panel(n).at, &a.q_map, full, n * 64, f.head * PACKED_HEADS,
                                    f.q_begin + f.first_row / PACKED_HEADS, batch_of(f));
    }
    __device__ __forceinline__ void load_q(const struct item_facts &f) {
        const q_stages to = q_ring(base);
        to.wait_empty(item);
        if constexpr (PACKED_HEADS == 1)
            load<Q_PANELS, BLOCK_M>(to.tile(item), &a.q_map, to.full(item), f.q_begin + f.first_row, f.head,
                                    batch_of(f));
        else
            load_packed(to.tile(item), to.full(item), f);
    }
    __device__ __forceinline__ void load_k(int row, int head, int batch) {
        const k_stages to = k_ring(base);
        to.wait_empty(step);
        load<Q_PANELS, BLOCK_N>(to.tile(step), &a.k_map, to.full(step), row, head, batch);
    }
    __device__ __forceinline__ void load_v(uint32_t count, int row, int head, int batch) {
        const v_stages to = v_ring(base);
        to.wait_empty(count);
        load<V_PANELS, BLOCK_N>(to.tile(count), &a.v_map, to.full(count), row, head, batch);
    }
    __device__ __forceinline__ void load_scores(const struct item_facts &f, int key) {
        const uint32_t full = score_ring(base).full(score_step);
        const panels<BLOCK_M> to = {score_ring(base).tile(score_step)};
        score_ring(base).wait_empty(score_step++);
        mbarrier_arrive_expect_tx(full, SCORE_BYTES);
#pragma unroll
        for (int n = 0; n < BIAS_PANELS; n++)
            cp_async_bulk_tensor_4d(to.panel(n).at, &a.bias_map, full, key + n * 128 / BIAS_BYTES, f.first_row,
                                    f.head / a.bias_group, a.bias_batches == 1 ? 0 : f.batch);
#pragma unroll
        for (int n = 0; n < MASK_PANELS; n++)
            cp_async_bulk_tensor_4d(to.panel(BIAS_PANELS + n).at, &a.mask_map, full, key + n * 128, f.first_row,
                                    f.head / a.mask_group, a.mask_batches == 1 ? 0 : f.batch);
    }

    /* The block mask of the item's rows: GPU_BLOCK_* for each tile of keys. */
    __device__ __forceinline__ const uint8_t *block_mask_of(const struct item_facts &f) const {
        return a.in.block_mask + f.batch * a.in.block_mask_batch +
               f.head / a.in.block_mask_group * a.in.block_mask_head + f.first_row / BLOCK_M * a.in.block_mask_row;
    }
    /* The last tile up to `tile` with a key that the mask shows, or first_tile - 1 where there is none. */
    static __device__ __forceinline__ int visible_tile(const uint8_t *block_mask, int tile, int first_tile) {
        while (tile >= first_tile && block_mask[tile] == GPU_BLOCK_HIDDEN) {
            if (tile % 16 == 15) { /* rows begin at multiples of 16 bytes */
                const uint4 x = *(const uint4 *)(block_mask + tile - 15);
                tile -= (x.x | x.y | x.z | x.w) == 0 ? 15 : 0;
            }
            tile--;
        }
        return max(tile, first_tile - 1);
    }

    /* Loads the tiles of an item that a mask or runs of rows show, and writes the word of each step. */
    __device__ __forceinline__ void load_shown(const struct item_facts &f, int k_begin) {
        const int head = f.head / a.in.group, batch = batch_of(f);
        const uint8_t *block_mask = block_mask_of(f);
        load_q(f);
        int before = -1;
#pragma unroll 1
        for (int tile = f.last_tile - 1; tile >= f.first_tile; step++) {
            const bool masked = BIAS || block_mask[tile] != GPU_BLOCK_FULL;
            const int next = visible_tile(block_mask, tile - 1, f.first_tile);
            if (next < f.first_tile)
                scheduler.request_at_end(a);
            k_ring(base).wait_empty(step);
            st_shared_4(step_word(base, step),
                        (uint32_t)tile | (next >= f.first_tile ? STEP_MORE : 0) | (masked ? STEP_MASKED_ALL : 0));
            load_k(k_begin + tile * BLOCK_N, head, batch);
            if (SCORED && masked)
                load_scores(f, tile * BLOCK_N);
            if (before >= 0)
                load_v(step - 1, k_begin + before * BLOCK_N, head, batch);
            before = tile;
            tile = next;
        }
        if (before >= 0)
            load_v(step - 1, k_begin + before * BLOCK_N, head, batch);
    }

    /* RANGED: loads the tiles that the second warp names, at least one. It names a tile when K's stage is empty. */
    __device__ __forceinline__ void load_named(const struct item_facts &f, int k_begin) {
        const int head = f.head / a.in.group, batch = batch_of(f);
        load_q(f);
        int before = -1;
#pragma unroll 1
        for (bool more = true; more; step++) {
            step_known(base).wait(step);
            const int word = (int)ld_shared_4(step_word(base, step));
            const int row = k_begin + (word & STEP_TILE) * BLOCK_N;
            more = word & STEP_MORE;
            if (!more)
                scheduler.request_at_end(a);
            load_k(row, head, batch);
            if (before >= 0)
                load_v(step - 1, before, head, batch);
            before = row;
        }
        load_v(step - 1, before, head, batch);
    }

    /* Loads all tiles of an item. K of a step is needed before V of the step before, and is loaded first. */
    __device__ __forceinline__ void load_item(const struct item_facts &f, int k_begin) {
        const int head = f.head / a.in.group, batch = batch_of(f);
        load_q(f);
#pragma unroll 1
        for (int tile = f.last_tile - 1; tile >= f.first_tile; tile--, step++) {
            if (tile == f.first_tile)
                scheduler.request_at_end(a);
            load_k(k_begin + tile * BLOCK_N, head, batch);
            if (SCORED)
                load_scores(f, tile * BLOCK_N);
            if (tile < f.last_tile - 1)
                load_v(step - 1, k_begin + (tile + 1) * BLOCK_N, head, batch);
        }
        if (f.first_tile < f.last_tile)
            load_v(step - 1, k_begin + f.first_tile * BLOCK_N, head, batch);
    }

    /* Keeps of the item's tiles those of its split. An item's batch counts batches and splits. */
    static __device__ __forceinline__ void keep_part(struct item_facts &f, int splits) {
        const int each = (f.last_tile - f.first_tile + splits - 1) / splits;
        f.first_tile = min(f.first_tile + f.batch % splits * each, f.last_tile);
        f.last_tile = min(f.first_tile + each, f.last_tile);
    }

    /* Publishes an item, and loads it. */
    __device__ __forceinline__ void run_item(struct item_facts &f, const struct sequence &s) {
        find_tiles(a.in, s, BLOCK_M, f);
        if (SPLITS)
            keep_part(f, a.in.num_splits);
        if (BLOCK_MASKED && !RANGED)
            f.last_tile = visible_tile(block_mask_of(f), f.last_tile - 1, f.first_tile) + 1;
        publish(f);
        if (f.first_tile >= f.last_tile)
            scheduler.request_at_end(a);
        if (RANGED && f.first_tile < f.last_tile)
            load_named(f, s.k_begin);
        else if (RANGED)
            load_q(f);
        else if (BLOCK_MASKED)
            load_shown(f, s.k_begin);
        else
            load_item(f, s.k_begin);
        item++;
    }

    /* RANGED: whether hopper_gather.cu computes the item. */
    __device__ __forceinline__ bool leaves(const struct work_item &work) const {
        return RANGED && a.gathers && is_scattered(a.plan, tile_plan_head(&a.plan, work.head, work.batch));
    }

    /* none: hopper_gather.cu computes all items. */
    __device__ __forceinline__ void run(bool none) {
        scheduler.initial();
        for (; !none && scheduler.valid(a); scheduler.advance()) {
            const struct work_item work = item_at(a, scheduler.place);
            scheduler.request_at_begin(a);
            if (work.batch >= 0 && !leaves(work)) {
                const struct sequence s = find_sequence(a.in, work.batch); /* splits: of equal lengths */
                struct item_facts f = {
                    work.row_block * BLOCK_M, work.head, work.batch, 0, 0, s.seqlen_q, s.seqlen_k, s.q_begin};
                if (f.first_row < s.seqlen_q * PACKED_HEADS) {
                    run_item(f, s);
                    continue;
                }
            }
            scheduler.request_at_end(a); /* the item is skipped */
        }
        publish({-1, 0, 0, 0, 0, 0, 0, 0});
    }
};

#include "families/hopper/forward/hopper_pages.cuh"

/* ---- consumers ---- */

#include "families/hopper/forward/hopper_consumer.cuh"

struct consumer : q_consumer {
    const struct hopper_forward_params &a;
    uint32_t score_step;

    __device__ __forceinline__ consumer(const struct hopper_forward_params &params, uint32_t shared)
        : q_consumer(shared), a(params), score_step(0) {}

    static __device__ __forceinline__ struct sequence sequence_of(const struct item_facts &f) {
        return {f.batch, f.seqlen_q, f.seqlen_k, f.q_begin, 0, f.seqlen_k - f.seqlen_q};
    }

    /* Hides, by windows and ends, what rows do not see of a tile that some row of the warpgroup does not see whole. */
    __device__ __forceinline__ void hide(int tile) {
        const struct item_facts f = facts();
        const struct sequence at = sequence_of(f);
        const int row = f.first_row + local_row(), key = tile * BLOCK_N;
        const int first[2] = {first_key(a.in, at, row / PACKED_HEADS) - key,
                              first_key(a.in, at, (row + 8) / PACKED_HEADS) - key};
        const int last[2] = {last_key(a.in, at, row / PACKED_HEADS) + 1 - key,
                             last_key(a.in, at, (row + 8) / PACKED_HEADS) + 1 - key};
        hide_keys(s, first, last);
    }

    /* Hides keys of parts of a cache that have no page. */
    __device__ __forceinline__ void hide_missing() {
        const uint32_t missing = ld_shared_4(step_word(base, step));
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
            if (missing >> (group * 8 >> a.part_shift) & 1)
#pragma unroll
                for (int n = 0; n < 4; n++)
                    s[4 * group + n] = MINUS_INF;
    }

    /* Hides keys by runs of rows, in a tile that the block mask does not call full. */
    __device__ __forceinline__ void hide_by_rows(int tile) {
        const struct item_facts f = facts();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = min(f.first_row + (int)local_row() + 8 * half, f.seqlen_q - 1);
            const struct row_ranges ranges = ranges_of_row(a.in, f.batch, f.q_begin, f.head, row);
            hide_others(s, half, a.in, ranges, tile * BLOCK_N);
        }
    }

    /* The same by ranges of rows, in a tile that the plan does not call full for the warpgroup's rows. */
    __device__ __forceinline__ void hide_by_ranges() {
        const uint32_t ranges = ranges_of_step(base, step) + threadIdx.x % 4 * RANGE_ROW_BYTES;
        const uint32_t row = local_row();
#pragma unroll
        for (int group = 0; group < GROUPS; group += 2) {
            uint32_t seen_by[4];
            ld_shared_16(seen_by, ranges + group * 8);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                float *const x = s + 4 * (group + n / 2) + n % 2;
                const uint32_t first = seen_by[n] & 0xffff, count = seen_by[n] >> 16;
                x[0] = row - first < count ? x[0] : MINUS_INF;
                x[2] = row + 8 - first < count ? x[2] : MINUS_INF;
            }
        }
    }

    /* Computes P from the products of a tile. masked: masks, bias or ranges of the tile are read; partial: windows or
     * ends hide some of its keys; has_o: O holds sums of earlier tiles. */
    __device__ __forceinline__ void scores_to_p(int tile, bool masked, bool partial, bool has_o) {
        if (SCORED && masked) {
            const panels<BLOCK_M> bias = {score_ring(base).tile(score_step)};
            score_ring(base).wait_full(score_step);
            finish_scores<MASK_TILE>(s, a.in, bias.at, bias.panel(BIAS_PANELS).at, local_row());
            __syncwarp();
            score_ring(base).release(score_step++);
        } else if (!MAXIMA_BARE && !BIAS) {
            finish_scores<false>(s, a.in, 0, 0, 0);
        }
        if (ROW_RUNS && masked) /* after the ranges of rows it spills hundreds of bytes */
            hide_by_rows(tile);
        if (RANGED && masked) {
            hide_by_ranges();
            __syncwarp(); /* the stage's ranges are read */
            k_ring(base).release(step);
        } else if (!RANGED && partial) {
            hide(tile);
        }
        if (CACHED && masked) {
            hide_missing();
            __syncwarp(); /* the stage's word is read */
            k_ring(base).release(step);
        }
        softmax(p, s, o, rows, exponent_unit(a.in), has_o);
    }

    /* Clears V past the end of the sequence, where rows that do not count or keys of another one hold any bits. */
    __device__ __forceinline__ void clear_tail(int last_tile) {
        if (!VARLEN && !SEQUSED && !CACHED)
            return;
        const int keys = facts().seqlen_k - last_tile * BLOCK_N;
        if (keys >= BLOCK_N)
            return;
        v_ring(base).wait_full(step);
        const panels<BLOCK_N> v = {v_ring(base).tile(step)};
        const int chunks = (BLOCK_N - keys) * 8;
        for (int n = (int)threadIdx.x - 128; n < V_PANELS * chunks; n += 128 * WARPGROUPS)
            st_shared_16(v.panel(n / chunks).rows(keys).at + n % chunks * 16, 0, 0, 0, 0);
        fence_proxy_async();
        barrier_sync(CONSUMERS_BARRIER, 128 * WARPGROUPS);
    }

    /* Waits for K of a step. WALKED: sets `tile`, and `masked` where mask, bias or ranges of the tile are to be read.
     * `more`: another step follows. */
    __device__ __forceinline__ void next_step(int &tile, bool &masked, bool &more, int first_tile) {
        k_ring(base).wait_full(step);
        if (WALKED) {
            const int word = uniform((int)ld_shared_4(step_word(base, step)));
            __syncwarp(); /* one lane releases what all have read */
            tile = word & STEP_TILE;
            masked = word & STEP_MASKED << warpgroup;
            more = word & STEP_MORE;
        } else {
            more = tile > first_tile;
        }
        if (CACHED) {
            masked = uniform((int)ld_shared_4(step_word(base, step)));
            __syncwarp();
        }
    }

    __device__ __forceinline__ void skip_products() {
        begin_products();
        end_products();
    }

    /* Releases the stages of a tile that no row of the warpgroup sees. Mask and bias are released before the
     * warpgroup's place in the ping-pong comes: where they have one stage, the producer loads the next ones and then
     * this step's V after that, and the warpgroup that issues products waits for that V. */
    __device__ __forceinline__ void skip_tile(bool in_ping_pong) {
        if (in_ping_pong && !SCORED)
            skip_products();
        k_ring(base).wait_full(step);
        if (SCORED)
            score_ring(base).wait_full(score_step);
        __syncwarp(); /* a lane that still waits would miss the phase */
        k_ring(base).release(step);
        if (SCORED)
            score_ring(base).release(score_step++);
        if (in_ping_pong && SCORED)
            skip_products();
        v_ring(base).wait_full(step);
        __syncwarp();
        v_ring(base).release(step);
        step++;
    }

    /* The tiles of keys that rows of the warpgroup see: it walks from `tile` down to `first`, and only the other
     * warpgroups see the `rest` tiles below. All rows see the tiles full_first .. full_last - 1 whole. */
    struct tile_walk {
        int tile, first, rest, full_first, full_last;
        __device__ __forceinline__ bool is_full() const { return tile >= full_first && tile < full_last; }
    };
    /* Skips the tiles above the walk. When no row of the warpgroup sees a key, it skips all tiles and returns false. */
    __device__ __forceinline__ bool begin_walk(struct tile_walk &w) {
        const struct item_facts f = facts();
        const struct sequence at = sequence_of(f);
        struct item_facts own = f;
        own.first_row += warpgroup * 64;
        if (SKIPS_TILES) {
            if (own.first_row < f.seqlen_q * PACKED_HEADS)
                find_tiles(a.in, at, 64, own);
            else
                own.last_tile = own.first_tile;
            if (SPLITS) {
                own.first_tile = min(max(own.first_tile, f.first_tile), f.last_tile);
                own.last_tile = min(max(own.last_tile, own.first_tile), f.last_tile);
            }
            own.first_tile = uniform(own.first_tile);
            own.last_tile = uniform(own.last_tile);
        }
        w.full_first = (first_key(a.in, at, (own.first_row + 63) / PACKED_HEADS) + BLOCK_N - 1) / BLOCK_N;
        w.full_last = (last_key(a.in, at, own.first_row / PACKED_HEADS) + 1) / BLOCK_N;
        if (f.first_tile >= f.last_tile)
            return false;
        if (!RANGED)
            clear_tail(f.last_tile - 1);
        if (SKIPS_TILES && own.first_tile >= own.last_tile) {
            for (w.tile = f.last_tile - 1; w.tile >= f.first_tile; w.tile--)
                skip_tile(w.tile > f.first_tile);
            return false;
        }
        for (w.tile = f.last_tile - 1; SKIPS_TILES && w.tile >= own.last_tile; w.tile--)
            skip_tile(true);
        w.first = own.first_tile;
        w.rest = own.first_tile - f.first_tile;
        return true;
    }

    /* Computes O of the item; returns false when no row of the warpgroup sees a key. All warpgroups issue products
     * equally often, skipped tiles included, so that their ping-pong stays balanced. */
    __device__ __forceinline__ bool compute() {
        struct tile_walk w;
        if (!begin_walk(w))
            return false;
        bool masked = true, more;
        next_step(w.tile, masked, more, w.first);
        if (RANGED)
            clear_tail(w.tile);
        wgmma_fence();
        multiply_qk();
        wgmma_commit_group();
        if (!SPLITS)
            sinks.read(a.in, facts(), local_row());
        wgmma_wait_group<0>(s);
        if (!SPLITS)
            sinks.join(a.in, rows);
        if (!READS_WORDS || !masked)
            k_ring(base).release(step);
        scores_to_p(w.tile, masked, !w.is_full(), false);
        step++;
        bool add = false;
#pragma unroll 1
        while (more) {
            w.tile--;
            next_step(w.tile, masked, more, w.first);
            begin_products();
            wgmma_fence();
            multiply_qk();
            v_ring(base).wait_full(step - 1);
            multiply_pv(add);
            wgmma_commit_group();
            end_products();
            add = true;
            wgmma_wait_group<0>(s);
            wgmma_wait_group<0>(o);
            if (!READS_WORDS || !masked)
                k_ring(base).release(step);
            v_ring(base).release(step - 1);
            scores_to_p(w.tile, masked, !w.is_full(), true);
            step++;
        }
        v_ring(base).wait_full(step - 1);
        wgmma_fence();
        multiply_pv(add);
        wgmma_commit_group();
        wgmma_wait_group<0>(o);
        v_ring(base).release(step - 1);
        while (SKIPS_TILES && w.rest-- > 0)
            skip_tile(true);
        return true;
    }

    /* Computes again the rows of the warp, a bit each in `spoiled`, that a key which they do not see made NaN. */
    __device__ __forceinline__ void redo_rows(const struct item_facts &f, uint32_t spoiled) {
        const struct sequence at = find_sequence(a.in, SPLITS ? f.batch / a.in.num_splits : f.batch);
        const int first = f.first_tile * BLOCK_N, last = min(f.last_tile * BLOCK_N, at.seqlen_k);
        for_each_bit(spoiled, [&](int n) {
            const int i = uniform(f.first_row + local_row() + n); /* counted from the first lane's row */
            const int row = i / PACKED_HEADS, head = f.head * PACKED_HEADS + i % PACKED_HEADS;
            if (row >= f.seqlen_q)
                return;
            if (SPLITS)
                store_redone_part(a.in, f, redo_row(a.in, at, head, f.head / a.in.group, row, first, last), head, row);
            else
                redo_output(a.in, at, head, f.head / a.in.group, row, first, last);
        });
    }

    __device__ __forceinline__ void run() {
        begin_ping_pong();
        for (;; item++) {
            work_ring(base).wait_full(item);
            if (facts().first_row < 0)
                break;
            rows = {{MINUS_INF, MINUS_INF}, {0, 0}, false};
            q_ring(base).wait_full(item);
            const bool computed = compute();
            if (!SPLITS && !computed)
                sinks.read(a.in, facts(), local_row());
            const struct item_facts f = take_facts();
            if constexpr (SPLITS) {
                const uint32_t spoiled = store_part<REDO>(a.in, f, rows, o, computed, local_row());
                __syncwarp();
                if (REDO)
                    redo_rows(f, spoiled);
                q_ring(base).release(item);
                continue;
            }
            const uint32_t spoiled = store_item<REDO>(a.in, f, computed);
            if (REDO)
                redo_rows(f, spoiled);
            release_q();
        }
        end_ping_pong();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_forward(const __grid_constant__ struct hopper_forward_params a) {
    extern __shared__ char shared[];
    const uint32_t base = (shared_address(shared) + 1023) / 1024 * 1024;
    if (threadIdx.x == 0)
        init_barriers(base);
    __syncthreads();
    if (threadIdx.x < 128) {
        setmaxnreg_dec<HOPPER_PRODUCER_REGISTERS(WARPGROUPS, SCORED || CACHED || SEQUSED, RANGED)>();
        bool none = false;
        if (RANGED && threadIdx.x < 64) {
            griddepcontrol_wait();              /* for the tile plan */
            griddepcontrol_launch_dependents(); /* hopper_gather.cu's blocks follow as soon as there is room */
        }
        if (RANGED && threadIdx.x < 32)
            none = a.gathers && !any_scattered(a.plan, false);
        if (threadIdx.x < (CACHED ? 32 : 1)) {
            prefetch_tensormap(&a.q_map);
            prefetch_tensormap(&a.k_map);
            prefetch_tensormap(&a.v_map);
            if constexpr (CACHED)
                cache_producer(a, base).run_cache();
            else
                producer(a, base).run(none);
        } else if (threadIdx.x >= 32) {
            if constexpr (RANGED)
                if (threadIdx.x < 64)
                    range_writer(a, base).run();
            clear_unused_of_grid(a.in, a.in.heads * PACKED_HEADS, threadIdx.x - 32, 96);
        }
    } else {
        setmaxnreg_inc<HOPPER_CONSUMER_REGISTERS(WARPGROUPS, SCORED || CACHED || SEQUSED, RANGED)>();
        consumer(a, base).run();
    }
}
