/* hopper_gather.cu: the forward for compute capability 9.0 where something says key by key which rows see it: key
 * intervals, and masks and biases without query rows. By wgmma, for 16-bit dtypes.
 *
 * Idea: a block of rows sees few keys of such a mask, and they lie scattered. A producer warpgroup tests every key
 * for a row block once and lists those that some row sees; it gathers their rows of K and V by cp.async into
 * dense tiles, so that products are made of visible keys alone. Keys that all rows of the block see are listed apart
 * from the others: their tiles need no mask. The consumers are those of hopper_forward.cu: each of their warpgroups
 * owns 64 query rows, and P is made with the maxima of the tiles before.
 *
 * Tile: BLOCK_M = 64 WARPGROUPS query rows x BLOCK_N gathered keys. A gathered byte costs more than one by TMA
 * (measured in a bare loop, H200: 22.6 bytes a clock beside products), and therefore three warpgroups share each.
 *
 * Shared memory, each matrix in panels of 128 bytes a row with the 128-byte swizzle:
 *   Q [Q_STAGES][panels][BLOCK_M] (later the output of the same rows), K [STAGES][panels][BLOCK_N],
 *   V [STAGES][panels][BLOCK_N], the two lists, the keys of the tile that is gathered, of each stage the rows that see
 *   its keys and their biases, barriers, work items.
 *
 * Barriers: for each ring a full and an empty one for each stage. K and V become full when each producer thread's
 * copies have landed; K counts one arrival more, for what is written beside it. The copies are writes of the generic
 * proxy, so that each consumer thread fences them between its wait and wgmma. The named barrier 1 + w belongs to
 * the ping-pong of warpgroup w, 5 + w to that warpgroup alone, and 4 to the producers.
 *
 * Registers: a consumer has S BLOCK_N / 2, P BLOCK_N / 4, O HEAD_DIM_V / 2, and some 30 besides, of 216 with two
 * consumer warpgroups or 144 with three. A producer has 72 or 80: the next keys are loaded under the copies. */
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/ring.cuh"
#include "families/hopper/forward/hopper_gather.h"

HOPPER_GATHER_CONSTANTS(GPU_CONSTANT_GIVEN)

#define EXP2_FREQUENCY 1
#define EXP2_RESIDUE   0
#define BLOCK_M        (64 * WARPGROUPS)
#define THREADS        (128 * (WARPGROUPS + 1))
#include "families/hopper/forward/hopper_rows.cuh"
#include "families/hopper/forward/hopper_softmax.cuh"
#include "families/hopper/forward/hopper_work.cuh"
#include "families/hopper/pipeline/hopper_panels.cuh"
#include "gpu/unused_rows.cuh"

#define F16                (DTYPE == GPU_FLOAT16)
#define LIST               HOPPER_GATHER_LIST(LOOK)
#define PRODUCER_REGISTERS HOPPER_GATHER_PRODUCER_REGISTERS(WARPGROUPS, CONSUMER_REGISTERS)

/* ---- shared memory ---- */

constexpr int Q_PANELS = HOPPER_PANELS(HEAD_DIM, 2), V_PANELS = HOPPER_PANELS(HEAD_DIM_V, 2);
constexpr int Q_BYTES = BLOCK_M * 128 * (Q_PANELS > V_PANELS ? Q_PANELS : V_PANELS);
constexpr int K_BYTES = BLOCK_N * 128 * Q_PANELS, V_BYTES = BLOCK_N * 128 * V_PANELS;
constexpr int K_OFFSET = Q_STAGES * Q_BYTES, V_OFFSET = K_OFFSET + STAGES * K_BYTES;
/* The producers' facts of an item besides its work_item (whose first_tile and last_tile are keys here). They lie in
 * shared memory, since registers are scarce: where the rows of its head and sequence begin in intervals, mask, bias,
 * K and V; and the block's rows. */
enum { AT_START, AT_END, AT_MASK, AT_BIAS, AT_K, AT_V, NUM_SOURCES };
enum { BOUNDS = ITEM_BYTES + 8 * NUM_SOURCES, NEXT_BYTES = BOUNDS + 16 };

enum {
    WHOLE_KEYS = V_OFFSET + STAGES * V_BYTES, /* [LIST]: keys that all rows see */
    PART_KEYS = WHOLE_KEYS + 4 * LIST,        /* [LIST]: keys that some rows see, */
    PART_ROWS = PART_KEYS + 4 * LIST,         /* and the rows that do: the first, and from bit 16 on their number */
    WHOLE_BIAS = PART_ROWS + 4 * LIST,
    PART_BIAS = WHOLE_BIAS + (BIAS ? 4 * LIST : 0),
    TILE_KEYS = PART_BIAS + (BIAS ? 4 * LIST : 0), /* [BLOCK_N]: keys of the tile that is gathered; -1: none */
    STAGE_ROWS = TILE_KEYS + 4 * BLOCK_N,          /* [STAGES][BLOCK_N] */
    STAGE_BIAS = STAGE_ROWS + 4 * BLOCK_N * STAGES,
    CONTROL = STAGE_BIAS + (BIAS ? 4 * BLOCK_N * STAGES : 0),
    Q_RING = CONTROL, /* barriers of each ring */
    K_RING = Q_RING + ring<Q_STAGES>::BYTES,
    V_RING = K_RING + ring<STAGES>::BYTES,
    WORK_RING = V_RING + ring<STAGES>::BYTES,
    WORK = (WORK_RING + ring<2>::BYTES + 15) / 16 * 16,
    NEXT = WORK + 2 * ITEM_BYTES, /* the producers' facts of an item */
    TOTALS =
        NEXT +
        2 * NEXT_BYTES, /* [2][4]: the keys that each warp has found: seen by all rows, and (from bit 16 on) by some */
    STEP_WORDS = TOTALS + 32, /* what a stage of K holds */
    END = STEP_WORDS + 4 * STAGES
};
static_assert(END - CONTROL <= HOPPER_GATHER_CONTROL_BYTES, "barriers and work items fit");
static_assert(CONTROL + HOPPER_GATHER_CONTROL_BYTES + 1024 == hopper_gather_shared_bytes(WARPGROUPS, BLOCK_N, STAGES,
                                                                                         Q_STAGES, LOOK, HEAD_DIM,
                                                                                         HEAD_DIM_V, BIAS != 0),
              "the plan knows the bytes");
static_assert(2 * BLOCK_N + LOOK <= LIST && BLOCK_N <= 128 && BLOCK_N % 16 == 0, "a step's keys fit the lists");
enum { STEP_MASKED = 1, STEP_MORE = 2 };
enum { PING_PONG_BARRIER = 1, PRODUCERS_BARRIER = 4, WARPGROUP_BARRIER = 5 };

/* Views of the shared memory that begins at `base`. */
typedef ring<Q_STAGES, Q_BYTES> q_stages;
typedef ring<STAGES, K_BYTES> k_stages;
typedef ring<STAGES, V_BYTES> v_stages;
typedef ring<2, ITEM_BYTES> work_stages;
__device__ __forceinline__ q_stages q_ring(uint32_t base) { return {base + Q_RING, base}; }
__device__ __forceinline__ k_stages k_ring(uint32_t base) { return {base + K_RING, base + K_OFFSET}; }
__device__ __forceinline__ v_stages v_ring(uint32_t base) { return {base + V_RING, base + V_OFFSET}; }
__device__ __forceinline__ work_stages work_ring(uint32_t base) { return {base + WORK_RING, base + WORK}; }
__device__ __forceinline__ uint32_t step_word(uint32_t base, uint32_t step) {
    return base + STEP_WORDS + 4 * k_stages::stage(step);
}

__device__ __forceinline__ void init_barriers(uint32_t base) {
    constexpr int warps = 4 * WARPGROUPS;
    for (int i = 0; i < Q_STAGES; i++)
        q_ring(base).init(i, 1, warps);
    for (int i = 0; i < STAGES; i++) {
        k_ring(base).init(i, 129, warps);
        v_ring(base).init(i, 128, warps);
    }
    for (int i = 0; i < 2; i++)
        work_ring(base).init(i, 1, warps);
    fence_mbarrier_init();
}

/* ---- producer ---- */

struct producer {
    static constexpr int EACH = LOOK / 128; /* keys that a thread tests in a step */
    const struct hopper_gather_params &a;
    uint32_t base, item, step;
    int thread;
    int whole, whole_taken, part, part_taken; /* the item's keys in each list so far, and those in tiles */
    int next_key, last_key;                   /* the next key to test, and the one past the last */
    /* facts of the keys to test, loaded a step before */
    int start[EACH], end[EACH];
    uint32_t mask[EACH], bias[EACH];

    __device__ __forceinline__ producer(const struct hopper_gather_params &params, uint32_t shared)
        : a(params), base(shared), item(0), step(0), thread((int)threadIdx.x) {}

    __device__ __forceinline__ static void meet() { barrier_sync(PRODUCERS_BARRIER, 128); }
    __device__ __forceinline__ uint32_t next_slot() const {
        return base + NEXT + work_stages::stage(item) * NEXT_BYTES;
    }
    __device__ __forceinline__ struct item_facts facts() const { return read_facts(next_slot()); }
    template <class type> __device__ __forceinline__ const type *source(int which) const {
        uint32_t low, high;
        ld_shared_8(low, high, next_slot() + ITEM_BYTES + which * 8);
        return (const type *)((uint64_t)high << 32 | low);
    }
    __device__ __forceinline__ struct row_bounds bounds() const {
        uint32_t word[4];
        ld_shared_16(word, next_slot() + BOUNDS);
        return {(int)word[0], (int)word[1], (int)word[2], (int)word[3]};
    }
    __device__ __forceinline__ int key_of(int n) const {
        return next_key + (thread / 32 * EACH + n) * 32 + thread % 32;
    }

    /* Loads the facts of the keys to test. */
    __device__ __forceinline__ void load_keys() {
        const int32_t *const starts = INTERVALS ? source<int32_t>(AT_START) : nullptr;
        const int32_t *const ends = INTERVALS ? source<int32_t>(AT_END) : nullptr;
        const uint8_t *const masks = MASK ? source<uint8_t>(AT_MASK) : nullptr;
        const char *const biases = BIAS ? source<char>(AT_BIAS) : nullptr;
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            const int j = key_of(n);
            if (j >= last_key)
                continue;
            if (INTERVALS) {
                start[n] = __ldg(starts + j * a.in.intervals.start_key);
                end[n] = __ldg(ends + j * a.in.intervals.end_key);
            }
            if (MASK)
                mask[n] = __ldg(masks + j * a.in.mask.key);
            if (BIAS == GPU_BIAS_FLOAT32)
                bias[n] = __ldg((const uint32_t *)biases + j * a.in.bias.key);
            else if (BIAS)
                bias[n] = __ldg((const uint16_t *)biases + j * a.in.bias.key);
        }
    }
    __device__ __forceinline__ float bias_of_key(int n) const {
        return BIAS == GPU_BIAS_FLOAT32 ? __uint_as_float(bias[n]) : unpack((uint16_t)bias[n]);
    }

    /* The rows of the block that see a key: the first, and from bit 16 on their number; 0: no row. */
    __device__ __forceinline__ uint32_t rows_of(int n, const struct row_bounds &b) const {
        const int j = key_of(n);
        const uint32_t rows = seeing_rows(b, j, INTERVALS ? start[n] : 0, INTERVALS ? end[n] : 0);
        return j < last_key && !(MASK && !mask[n]) && !(BIAS && bias_of_key(n) == MINUS_INF) ? rows : 0;
    }

    /* Tests the next LOOK keys, and appends those that some row sees to the lists, in order. */
    __device__ __forceinline__ void look() {
        const struct row_bounds b = bounds();
        const uint32_t all = (uint32_t)b.num_rows << 16, before = (1u << thread % 32) - 1;
        const uint32_t totals = base + TOTALS + next_key / LOOK % 2 * 16; /* another each time */
        uint32_t rows[EACH];
        int found = 0;
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            rows[n] = rows_of(n, b);
            found += __popc(__ballot_sync(0xffffffff, rows[n] == all)) +
                     (__popc(__ballot_sync(0xffffffff, rows[n] && rows[n] != all)) << 16);
        }
        if (thread % 32 == 0)
            st_shared_4(totals + thread / 32 * 4, found);
        meet();
        uint32_t of_warp[4];
        ld_shared_16(of_warp, totals);
        uint32_t place = 0, sum = 0;
#pragma unroll
        for (int w = 0; w < 4; w++) {
            place += w < thread / 32 ? of_warp[w] : 0;
            sum += of_warp[w];
        }
        int whole_place = whole + (int)(place & 0xffff), part_place = part + (int)(place >> 16);
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            const uint32_t wholes = __ballot_sync(0xffffffff, rows[n] == all);
            const uint32_t parts = __ballot_sync(0xffffffff, rows[n] && rows[n] != all);
            if (rows[n] == all) {
                const uint32_t to = base + (whole_place + __popc(wholes & before)) % LIST * 4;
                st_shared_4(to + WHOLE_KEYS, key_of(n));
                if (BIAS)
                    st_shared_4(to + WHOLE_BIAS, __float_as_uint(bias_of_key(n)));
            } else if (rows[n]) {
                const uint32_t to = base + (part_place + __popc(parts & before)) % LIST * 4;
                st_shared_4(to + PART_KEYS, key_of(n));
                st_shared_4(to + PART_ROWS, rows[n]);
                if (BIAS)
                    st_shared_4(to + PART_BIAS, __float_as_uint(bias_of_key(n)));
            }
            whole_place += __popc(wholes);
            part_place += __popc(parts);
        }
        whole += (int)(sum & 0xffff);
        part += (int)(sum >> 16);
        next_key += LOOK;
        load_keys();
    }

    /* Writes the numbers of the next tile's keys: `wholes` keys of one list, then `parts` of the other. The stage is
     * empty. */
    __device__ __forceinline__ void set_tile(int wholes, int parts, bool more) {
        const uint32_t slot = k_stages::stage(step) * BLOCK_N * 4 + thread * 4;
        const bool masked = wholes < BLOCK_N;
        if (thread < BLOCK_N) {
            uint32_t key = 0xffffffff, rows = 0;
            [[maybe_unused]] uint32_t its_bias = 0;
            if (thread < wholes) {
                const uint32_t at = base + (whole_taken + thread) % LIST * 4;
                key = ld_shared_4(at + WHOLE_KEYS);
                rows = ld_shared_4(next_slot() + BOUNDS + 4) << 16;
                if (BIAS)
                    its_bias = ld_shared_4(at + WHOLE_BIAS);
            } else if (thread < wholes + parts) {
                const uint32_t at = base + (part_taken + thread - wholes) % LIST * 4;
                key = ld_shared_4(at + PART_KEYS);
                rows = ld_shared_4(at + PART_ROWS);
                if (BIAS)
                    its_bias = ld_shared_4(at + PART_BIAS);
            }
            st_shared_4(base + TILE_KEYS + thread * 4, key);
            if (masked)
                st_shared_4(base + STAGE_ROWS + slot, rows);
            if (BIAS)
                st_shared_4(base + STAGE_BIAS + slot, its_bias);
        }
        if (thread == 0)
            st_shared_4(step_word(base, step), (masked ? STEP_MASKED : 0) | (more ? STEP_MORE : 0));
        whole_taken += wholes;
        part_taken += parts;
    }

    /* A divisor of `steps`. */
    static __device__ __forceinline__ constexpr int copies_together(int steps) {
        int n = PRODUCER_REGISTERS < 80 ? 4 : 8;
        while (steps % n)
            n--;
        return n;
    }
    /* Copies the rows of one matrix that TILE_KEYS names to a tile. A thread copies one chunk of 16 bytes of each of
     * its rows. */
    template <int head_dim>
    __device__ __forceinline__ void gather(uint32_t tile, const char *from, int row_bytes, int columns, bool complete) {
        constexpr int chunks = head_dim / 8, across = chunks <= 8 ? 8 : chunks <= 16 ? 16 : 32, rows = 128 / across;
        constexpr int steps = BLOCK_N / rows;
        const int chunk = thread % across, row = thread / across;
        uint32_t to = panels<BLOCK_N>{tile}.chunk(row, chunk);
        uint32_t keys = base + TILE_KEYS + row * 4;
        if (chunk >= chunks)
            return;
        if (complete && columns == head_dim) {
            /* several addresses at a time, each in its own registers: a copy holds them until it is issued */
            constexpr int together = copies_together(steps);
            from += chunk * 16;
#pragma unroll
            for (int first = 0; first < steps; first += together) {
                const char *at[together];
#pragma unroll
                for (int n = 0; n < together; n++)
                    at[n] = from + (int64_t)(int)ld_shared_4(keys + (first + n) * rows * 4) * row_bytes;
#pragma unroll
                for (int n = 0; n < together; n++)
                    at[n] = opaque(at[n]);
#pragma unroll
                for (int n = 0; n < together; n++)
                    cp_async_16((rows == 4 && (first + n) % 2 ? to ^ 64 : to) + (first + n) * rows * 128, at[n]);
            }
        } else {
            const int bytes = min(max(columns - chunk * 8, 0), 8) * 2;
            from += bytes ? chunk * 16 : 0;
#pragma unroll 1
            for (int n = 0; n < steps; n++) {
                const int key = (int)ld_shared_4(keys + n * rows * 4);
                cp_async_16_fill((rows == 4 && n % 2 ? to ^ 64 : to) + n * rows * 128,
                                 from + (int64_t)max(key, 0) * row_bytes, key < 0 ? 0 : bytes);
            }
        }
    }

    /* Gathers a tile of K and V. */
    __device__ __forceinline__ void emit(int wholes, int parts, bool more) {
        const k_stages k = k_ring(base);
        const v_stages v = v_ring(base);
        const bool complete = wholes + parts == BLOCK_N;
        k.wait_empty(step);
        meet(); /* the lists are written, and the last tile's numbers read */
        set_tile(wholes, parts, more);
        meet();
        if (thread == 0)
            k.full().arrive(step); /* the arrival for what is written beside K */
        const char *const keys = source<char>(AT_K);
        const int key_bytes = (int)a.in.k.row * 2;
        gather<HEAD_DIM>(k.tile(step), keys, key_bytes, a.in.head_dim, complete);
        cp_async_mbarrier_arrive_noinc(k.full(step));
        v.wait_empty(step);
        const char *const values = source<char>(AT_V);
        const int value_bytes = (int)a.in.v.row * 2;
        gather<HEAD_DIM_V>(v.tile(step), values, value_bytes, a.in.head_dim_v, complete);
        cp_async_mbarrier_arrive_noinc(v.full(step));
        step++;
    }

    /* One thread does the rest: items, and their Q. */
    __device__ __forceinline__ void publish(struct item_facts f, bool any) {
        work_ring(base).wait_empty(item);
        f.first_tile = 0;
        f.last_tile = any;
        write_facts(work_ring(base).tile(item), f);
        work_ring(base).full().arrive(item);
    }
    __device__ __forceinline__ void load_q(const struct item_facts &f) {
        const q_stages to = q_ring(base);
        const uint32_t full = to.full(item);
        to.wait_empty(item);
        mbarrier_arrive_expect_tx(full, Q_PANELS * panels<BLOCK_M>::BYTES);
        load_panels<Q_PANELS, BLOCK_M>(to.tile(item), &a.q_map, full, f.q_begin + f.first_row, f.head,
                                       VARLEN ? 0 : f.batch);
    }
    __device__ __forceinline__ void set_source(int which, const void *at) {
        const uint32_t to = next_slot() + ITEM_BYTES + which * 8;
        st_shared_4(to, (uint32_t)(uint64_t)at);
        st_shared_4(to + 4, (uint32_t)((uint64_t)at >> 32));
    }
    __device__ __forceinline__ void set_sources(const struct item_facts &f, int k_begin) {
        const struct gpu_forward_params &in = a.in;
        const struct gpu_intervals &i = in.intervals;
        const int64_t head = f.head / in.group, batch = VARLEN ? 0 : f.batch, listed = f.head / i.group;
        if (INTERVALS) {
            set_source(AT_START, i.start + f.batch * i.start_batch + listed * i.start_head + k_begin * i.start_key);
            set_source(AT_END, i.end + f.batch * i.end_batch + listed * i.end_head + k_begin * i.end_key);
        }
        if (MASK)
            set_source(AT_MASK, mask_of(in, f.batch, f.head));
        if (BIAS)
            set_source(AT_BIAS,
                       in.bias.data + (f.batch * in.bias.batch + f.head / in.bias.group * in.bias.head) * BIAS_BYTES);
        set_source(AT_K, in.k.data + (batch * in.k.batch + head * in.k.head + k_begin * in.k.row) * 2);
        set_source(AT_V, in.v.data + (batch * in.v.batch + head * in.v.head + k_begin * in.v.row) * 2);
    }
    /* The keys that rows of the block may see by window and ends. */
    __device__ __forceinline__ void set_bounds(struct item_facts &f, const struct sequence &s) {
        const struct row_bounds b = bounds_of_rows(a.in, s, f.first_row, BLOCK_M);
        f.first_tile = first_key(a.in, s, f.first_row);
        f.last_tile = ::last_key(a.in, s, f.first_row + b.num_rows - 1) + 1;
        st_shared_16(next_slot() + BOUNDS, (uint32_t)b.first_row, (uint32_t)b.num_rows, (uint32_t)b.from,
                     (uint32_t)b.to);
    }
    /* Whether hopper_forward.cu computes the item. */
    __device__ __forceinline__ bool passes_over(const struct work_item &work) const {
        return a.picks && !is_scattered(a.plan, tile_plan_head(&a.plan, work.head, work.batch));
    }
    /* The next item that has rows, for all producers. */
    __device__ __forceinline__ void next_item(struct tile_scheduler &scheduler) {
        struct item_facts f = {-1, 0, 0, 0, 0, 0, 0, 0};
        while (f.first_row < 0 && scheduler.valid(a)) {
            const struct work_item work = item_at(a, scheduler.place);
            scheduler.request_at_begin(a);
            if (work.batch >= 0 && !passes_over(work)) {
                const struct sequence s = find_sequence(a.in, work.batch);
                if (work.row_block * BLOCK_M < s.seqlen_q) {
                    f = {work.row_block * BLOCK_M, work.head, work.batch, 0, 0, s.seqlen_q, s.seqlen_k, s.q_begin};
                    set_sources(f, s.k_begin);
                    set_bounds(f, s);
                }
            }
            scheduler.advance();
        }
        write_facts(next_slot(), f);
    }

    /* Gathers all tiles of an item: of keys that all rows see while there are enough, then of the others, and at the
     * end of the rest. */
    __device__ __forceinline__ void run_item() {
        whole = whole_taken = part = part_taken = 0;
        load_keys();
        bool more = true;
#pragma unroll 1
        for (int tile = 0; more; tile++) {
            int wholes = whole - whole_taken, parts = part - part_taken;
#pragma unroll 1
            while (next_key < last_key && (wholes + parts <= BLOCK_N || max(wholes, parts) < BLOCK_N)) {
                look();
                wholes = whole - whole_taken;
                parts = part - part_taken;
            }
            const int there = wholes + parts;
            if (tile == 0 && thread == 0)
                publish(facts(), there > 0);
            if (wholes >= BLOCK_N) {
                wholes = BLOCK_N;
                parts = 0;
            } else if (parts >= BLOCK_N) {
                wholes = 0;
                parts = BLOCK_N;
            } else {
                parts = min(parts, BLOCK_N - wholes);
            }
            more = there > wholes + parts;
            if (there)
                emit(wholes, parts, more);
            /* with one stage, Q's is free when the item's own tiles are in flight */
            if (thread == 0 && (Q_STAGES > 1 ? tile == 0 : tile == STAGES - 1 || (tile < STAGES - 1 && !more)))
                load_q(facts());
        }
    }

    __device__ __forceinline__ void run() {
        struct tile_scheduler scheduler;
        scheduler.initial();
        if (a.picks && thread < 32 && !any_scattered(a.plan, true))
            scheduler.place = num_places(a);
        if (!a.picks)
            clear_unused_of_grid(a.in, a.in.heads, thread, 128);
        for (;; item++) {
            if (thread == 0)
                next_item(scheduler);
            meet();
            const struct item_facts f = facts();
            if (f.first_row < 0)
                break;
            next_key = f.first_tile;
            last_key = f.last_tile;
            run_item();
        }
        if (thread == 0)
            publish({-1, 0, 0, 0, 0, 0, 0, 0}, false);
        if (a.picks)
            griddepcontrol_wait();                 /* the stream goes on when both kernels have ended */
        for (int n = 0; n < STAGES; n++, step++) { /* no thread ends before its copies have landed */
            k_ring(base).wait_empty(step);
            v_ring(base).wait_empty(step);
        }
    }
};

/* ---- consumers ---- */

#include "families/hopper/forward/hopper_consumer.cuh"

struct consumer : q_consumer {
    const struct hopper_gather_params &a;

    __device__ __forceinline__ consumer(const struct hopper_gather_params &params, uint32_t shared)
        : q_consumer(shared), a(params) {}

    /* The words of the columns 8 group + 2 (lane % 4), + 1 of the stage. */
    __device__ __forceinline__ void read_pair(uint32_t (&word)[2], uint32_t of_stages, int group) const {
        ld_shared_8(word[0], word[1],
                    base + of_stages + k_stages::stage(step) * BLOCK_N * 4 + group * 32 + threadIdx.x % 4 * 8);
    }
    /* Applies scale, softcap, and the keys' biases. */
    __device__ __forceinline__ void finish_keyed() {
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            [[maybe_unused]] uint32_t added[2];
            if (BIAS)
                read_pair(added, STAGE_BIAS, group);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float &x = s[4 * group + e];
                x = cap_score(a.in, x * a.in.scale);
                if (BIAS)
                    x += __uint_as_float(added[e % 2]);
            }
        }
    }
    /* Hides keys that a row does not see. */
    __device__ __forceinline__ void hide_unseen() {
        const uint32_t row = local_row();
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            uint32_t seen_by[2];
            read_pair(seen_by, STAGE_ROWS, group);
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const uint32_t first = seen_by[c] & 0xffff, count = seen_by[c] >> 16;
                if (row - first >= count)
                    s[4 * group + c] = MINUS_INF;
                if (row + 8 - first >= count)
                    s[4 * group + 2 + c] = MINUS_INF;
            }
        }
    }

    /* Turns scores of a tile into P, and releases K's stage. */
    __device__ __forceinline__ void scores_to_p(int word, bool has_o) {
        if (!MAXIMA_BARE)
            finish_keyed();
        if (word & STEP_MASKED)
            hide_unseen();
        __syncwarp(); /* the stage's words have been read */
        k_ring(base).release(step);
        softmax(p, s, o, rows, exponent_unit(a.in), has_o);
        step++;
    }

    /* Waits for K of a step, and returns its word. */
    __device__ __forceinline__ int next_step() {
        k_ring(base).wait_full(step);
        return uniform((int)ld_shared_4(step_word(base, step)));
    }

    /* Computes O of the item; returns false when none of its rows sees a key. */
    __device__ __forceinline__ bool compute() {
        if (!uniform(facts().last_tile))
            return false;
        int word = next_step();
        fence_proxy_async();
        wgmma_fence();
        multiply_qk();
        wgmma_commit_group();
        sinks.read(a.in, facts(), local_row());
        wgmma_wait_group<0>(s);
        sinks.join(a.in, rows);
        scores_to_p(word, false);
        bool add = false;
#pragma unroll 1
        while (word & STEP_MORE) {
            word = next_step();
            v_ring(base).wait_full(step - 1);
            fence_proxy_async();
            begin_products();
            wgmma_fence();
            multiply_qk();
            multiply_pv(add);
            wgmma_commit_group();
            end_products();
            add = true;
            wgmma_wait_group<0>(s);
            wgmma_wait_group<0>(o);
            v_ring(base).release(step - 1);
            scores_to_p(word, true);
        }
        v_ring(base).wait_full(step - 1);
        fence_proxy_async();
        wgmma_fence();
        multiply_pv(add);
        wgmma_commit_group();
        wgmma_wait_group<0>(o);
        v_ring(base).release(step - 1);
        return true;
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
            if (!computed)
                sinks.read(a.in, facts(), local_row());
            const struct item_facts f = take_facts();
            store_item(a.in, f, computed);
            release_q();
        }
        end_ping_pong();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_gather(const __grid_constant__ struct hopper_gather_params a) {
    extern __shared__ char shared[];
    const uint32_t base = (shared_address(shared) + 1023) / 1024 * 1024;
    if (threadIdx.x == 0)
        init_barriers(base);
    __syncthreads();
    if (threadIdx.x < 128) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0)
            prefetch_tensormap(&a.q_map);
        producer(a, base).run();
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consumer(a, base).run();
    }
}
