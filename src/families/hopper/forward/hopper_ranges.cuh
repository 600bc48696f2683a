/* hopper_ranges.cuh: keys that are seen by ranges of rows, for hopper_forward.cu: which tiles of keys a block walks, by
 * the tile plan, and which of its rows see the keys of a tile that the plan does not call full.
 *
 * A stage of K has a word for each key: the first row of the block that sees it, and from bit 16 on how many. The words
 * lie in four rows, one for each lane of a quad, in the order in which its columns lie in registers. */
#ifndef FDM_HOPPER_RANGES_CUH
#define FDM_HOPPER_RANGES_CUH

#include "cuda/ptx/copy.cuh"
#include "families/hopper/forward/hopper_work.cuh"
#include "gpu/visible.cuh"

enum { RANGE_BYTES = HOPPER_RANGE_BYTES(BLOCK_N), RANGE_ROW_BYTES = RANGE_BYTES / 4 };
__device__ __forceinline__ uint32_t range_offset(int key) {
    return key % 8 / 2 * RANGE_ROW_BYTES + key / 8 * 8 + key % 2 * 4;
}

/* The tiles of keys that an item's rows see. A warp holds them; each lane reads the words of 64 rows. */
struct plan_walk {
    static constexpr int KEY_TILES = BLOCK_N / TILE_PLAN_TILE; /* of the plan, in a tile of keys */
    static_assert(!RANGED || (KEY_TILES * TILE_PLAN_TILE == BLOCK_N && KEY_TILES <= 2),
                  "a tile's bits lie in one word");
    const struct tile_plan &plan;
    int row;       /* of words: the lane's */
    uint32_t seen; /* the word of the tiles that some row sees */

    /* Starts at the item's last tile. Lanes beyond the item's rows have the words of the last row. */
    __device__ __forceinline__ plan_walk(const struct tile_plan &p, const struct item_facts &f) : plan(p), seen(0) {
        const int row_tile = f.first_row / TILE_PLAN_TILE + min((int)threadIdx.x % 32, WARPGROUPS - 1);
        row = tile_plan_head(&p, f.head, f.batch) * p.row_tiles + min(row_tile, p.row_tiles - 1);
        if (f.last_tile * KEY_TILES % 32)
            read(f.last_tile * KEY_TILES / 32);
    }
    __device__ __forceinline__ void read(int word) { seen = __reduce_or_sync(0xffffffff, word_of(plan.seen, word)); }
    __device__ __forceinline__ uint32_t word_of(const uint32_t *words, int at) const {
        return __ldg(words + (int64_t)row * plan.key_words + at);
    }
    /* The last tile below `tile` that some row sees, where the tile's word is loaded; -1: there is none. */
    __device__ __forceinline__ int last_seen_below(int tile) {
        int bit = tile * KEY_TILES, word = bit / 32;
        uint32_t below = seen & ~(0xffffffffu << bit % 32);
        while (!below && word > 0) {
            read(--word);
            below = seen;
        }
        return below ? (word * 32 + 31 - __clz(below)) / KEY_TILES : -1;
    }
    /* A bit for each 64 rows of the item: the tile is not full for them. */
    __device__ __forceinline__ uint32_t parts(int tile) const {
        constexpr uint32_t all = (1u << KEY_TILES) - 1, rows = (1u << WARPGROUPS) - 1;
        const uint32_t full = word_of(plan.full, tile * KEY_TILES / 32) >> tile * KEY_TILES % 32;
        return __ballot_sync(0xffffffff, (full & all) != all) & rows;
    }
};

/* The warp that gives the steps of an item to the thread that loads K and to the consumers, and writes the words of
 * their keys. It is a tile ahead of the stages, so that its loads are in flight while it waits for a stage. It keeps
 * the facts of the item in shared memory, since registers are scarce. */
template <class params> struct range_writer {
    enum { AT_START, AT_END, AT_MASK, AT_ROWS, AT_WINDOW, TOGETHER = 2 };
    const params &a;
    uint32_t base, item, step;

    __device__ __forceinline__ range_writer(const params &parameters, uint32_t shared)
        : a(parameters), base(shared), item(0), step(0) {}

    __device__ __forceinline__ void set(int which, uint32_t low, uint32_t high) {
        if (threadIdx.x % 32 == 0) {
            st_shared_4(base + RANGE_SOURCES + which * 8, low);
            st_shared_4(base + RANGE_SOURCES + which * 8 + 4, high);
        }
    }
    __device__ __forceinline__ void set(int which, const void *at) {
        set(which, (uint32_t)(uint64_t)at, (uint32_t)((uint64_t)at >> 32));
    }
    template <class type> __device__ __forceinline__ const type *source(int which) const {
        uint32_t low, high;
        ld_shared_8(low, high, base + RANGE_SOURCES + which * 8);
        return (const type *)((uint64_t)high << 32 | low);
    }
    __device__ __forceinline__ struct item_facts facts() const { return read_facts(work_ring(base).tile(item)); }
    __device__ __forceinline__ void begin_item(const struct item_facts &f) {
        const struct sequence s = find_sequence(a.in, f.batch);
        const struct gpu_intervals &i = a.in.intervals;
        const struct row_bounds b = bounds_of_rows(a.in, s, f.first_row, BLOCK_M);
        if (INTERVALS) {
            const int64_t head = f.head / i.group;
            set(AT_START, i.start + f.batch * i.start_batch + head * i.start_head + s.k_begin * i.start_key);
            set(AT_END, i.end + f.batch * i.end_batch + head * i.end_head + s.k_begin * i.end_key);
        }
        if (MASK)
            set(AT_MASK, mask_of(a.in, f.batch, f.head));
        set(AT_ROWS, (uint32_t)b.first_row, (uint32_t)b.num_rows);
        set(AT_WINDOW, (uint32_t)b.from, (uint32_t)b.to);
        __syncwarp();
    }
    /* The rows of the item that see key j. */
    __device__ __forceinline__ uint32_t range_of_key(int j) const {
        if (MASK && !__ldg(source<char>(AT_MASK) + j * a.in.mask.key))
            return 0;
        uint32_t first_row, num_rows, from = 0, to = 0;
        ld_shared_8(first_row, num_rows, base + RANGE_SOURCES + AT_ROWS * 8);
        if (WINDOW)
            ld_shared_8(from, to, base + RANGE_SOURCES + AT_WINDOW * 8);
        return seeing_rows({(int)first_row, (int)num_rows, (int)from, (int)to}, j,
                           INTERVALS ? __ldg(source<int32_t>(AT_START) + j * a.in.intervals.start_key) : 0,
                           INTERVALS ? __ldg(source<int32_t>(AT_END) + j * a.in.intervals.end_key) : 0);
    }
    /* Loads for TOGETHER times 32 keys of a tile, from key `first` on. */
    __device__ __forceinline__ void read_ranges(uint32_t (&ranges)[TOGETHER], int tile, int first) const {
        const int seqlen_k = (int)ld_shared_4(work_ring(base).tile(item) + SEQLEN_K_PLACE);
#pragma unroll
        for (int n = 0; n < TOGETHER; n++) {
            const int j = tile * BLOCK_N + first + n * 32 + (int)threadIdx.x % 32;
            ranges[n] = j < seqlen_k ? range_of_key(j) : 0;
        }
    }
    __device__ __forceinline__ void write_ranges(const uint32_t (&ranges)[TOGETHER], int first) const {
#pragma unroll
        for (int n = 0; n < TOGETHER; n++)
            st_shared_4(ranges_of_step(base, step) + range_offset(first + n * 32 + (int)threadIdx.x % 32), ranges[n]);
    }
    /* `word` holds the tile, and a bit for each warpgroup that does not see all of it. */
    __device__ __forceinline__ void write_step(uint32_t word, bool more) {
        uint32_t ranges[TOGETHER];
        if (word & STEP_MASKED_ALL)
            read_ranges(ranges, word & STEP_TILE, 0);
        k_ring(base).wait_empty(step);
        if (word & STEP_MASKED_ALL) {
            write_ranges(ranges, 0);
#pragma unroll 1
            for (int first = 32 * TOGETHER; first < BLOCK_N; first += 32 * TOGETHER) {
                read_ranges(ranges, word & STEP_TILE, first);
                write_ranges(ranges, first);
            }
        }
        if (threadIdx.x % 32 == 0)
            st_shared_4(step_word(base, step), word | (more ? STEP_MORE : 0));
        __syncwarp();
        step_known(base).arrive_warp(step++);
    }

    /* An item whose rows see no key has one step, at its first tile. */
    __device__ __forceinline__ void run_item() {
        const struct item_facts f = facts();
        if (f.first_tile >= f.last_tile)
            return;
        struct plan_walk walk(a.plan, f);
        begin_item(f);
        const int first_tile = f.first_tile;
        int tile = max(walk.last_seen_below(f.last_tile), first_tile);
#pragma unroll 1
        while (tile >= first_tile) {
            const uint32_t word = (uint32_t)tile | walk.parts(tile) * STEP_MASKED;
            tile = walk.last_seen_below(tile);
            write_step(word, tile >= first_tile);
        }
    }
    __device__ __forceinline__ void run() {
        for (;; item++) {
            work_ring(base).wait_full(item);
            if (facts().first_row < 0)
                return;
            run_item();
            __syncwarp(); /* all have read the item */
            work_ring(base).release(item);
        }
    }
};

#endif
