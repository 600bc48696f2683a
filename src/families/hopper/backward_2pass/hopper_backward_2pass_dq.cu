/* hopper_backward_2pass_dq.cu: dQ for head dims above 128, on compute capability 9.0, by wgmma and TMA, for 16-bit
 * dtypes.
 *
 * Idea: a block owns 128 query rows of a head and walks the keys that they see, 64 a step, so that dQ is summed in
 * registers and written once: no additions in global memory, the same bits every time. Each of two warpgroups owns 64
 * rows: S = Q K^T, dP = dO V^T, dS in registers, dQ += dS K. A third loads K and V by TMA. The products of a step are
 * issued behind dQ's of the step before.
 *
 * Shared memory, in panels of 128 bytes a row with the 128-byte swizzle: Q [panels][128] (at the end dQ),
 * dO [panels][128], K [2][panels][64], V [V_STAGES][panels][64], LISTED: bits of the walk, barriers.
 *
 * Barriers: Q and dO full; of each stage of K and V full, and empty (an arrival of each consumer warp).
 *
 * PLANNED: rows see keys by intervals of keys or of rows, by blocks, or by a mask that all rows share. The tile plan
 * (gpu/tile_plan.cu) says which tiles of keys are walked, and which of them hide nothing. Scattered keys of dense calls
 * are walked in the order of key_sort.cu, and copied by the whole third warpgroup (EITHER).
 *
 * Beside the widest heads there is no room for tiles of masks and biases: a quad of lanes reads the 64 keys of a row
 * from global memory, 16 bytes a lane, to the registers where dS of the step before was, and transposes them. Tiles of
 * keys that the block mask hides from all rows have no step. The gradient of a bias leaves in the same way.
 *
 * Registers of a consumer: dQ HEAD_DIM / 2, S and dP 32 each, dS 16, of 240. */
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/ring.cuh"
#include "families/hopper/backward_2pass/hopper_backward_2pass.h"
#include "families/hopper/pipeline/hopper_panels.cuh"
#include "gpu/quad.cuh"

HOPPER_BACKWARD_2PASS_CONSTANTS(GPU_CONSTANT_GIVEN)

#define KEYS            (INTERVALS && !VARLEN && !ROW_RUNS ? HOPPER_KEYS_EITHER : HOPPER_KEYS_PLACED)
#define ROWS_DESCENDING 0
#define DETERMINISTIC   0
#define BLOCK_M         HOPPER_BACKWARD_2PASS_DQ_ROWS
#define BLOCK_N         HOPPER_BACKWARD_2PASS_KEYS
#define STAGES          HOPPER_BACKWARD_2PASS_STAGES
#define ROW_STEP        HOPPER_BACKWARD_2PASS_DQ_ROWS
#define THREADS         HOPPER_BACKWARD_2PASS_THREADS
#define BIAS_HIDES      (SCRUB && BIAS)
#include "families/hopper/backward/hopper_key_list.cuh"
#include "families/hopper/backward/hopper_p_residual.cuh"
#include "gpu/redo_dq.cuh"

#define F16     (DTYPE == GPU_FLOAT16)
#define PLANNED (KEYED || ROW_RUNS)
/* Ranges of a partial tile are read when S is there, else while it is made: then registers are short. */
#define LATE_RANGES VARLEN

constexpr int PANELS = (HEAD_DIM + 63) / 64, PANELS_V = (HEAD_DIM_V + 63) / 64;
constexpr int Q_BYTES = BLOCK_M * 128 * PANELS, DOUT_BYTES = BLOCK_M * 128 * PANELS_V;
constexpr int K_BYTES = BLOCK_N * 128 * PANELS, V_BYTES = BLOCK_N * 128 * PANELS_V;
constexpr int K_OFFSET = Q_BYTES + DOUT_BYTES, V_OFFSET = K_OFFSET + STAGES * K_BYTES;
constexpr int SEEN_OFFSET = V_OFFSET + V_STAGES * V_BYTES, CONTROL = SEEN_OFFSET + (LISTED ? 3 * SEEN_WORDS * 4 : 0);
enum {
    ROWS_FULL = CONTROL,
    K_RING = ROWS_FULL + 8,
    V_RING = K_RING + ring<STAGES>::BYTES,
    END = V_RING + ring<V_STAGES>::BYTES
};
static_assert(END - CONTROL <= HOPPER_BACKWARD_2PASS_CONTROL_BYTES, "barriers fit");
static_assert(CONTROL + HOPPER_BACKWARD_2PASS_CONTROL_BYTES + 1024 ==
                  hopper_backward_2pass_dq_bytes(HEAD_DIM, HEAD_DIM_V, V_STAGES,
                                                 {KEYED, MASK_TILE, BIAS != 0, BIAS != 0, ROW_RUNS}),
              "the plan knows the bytes");
enum { CONSUMER_WARPS = 8, OWN_BARRIER = 1, CONSUMERS_BARRIER = 3 };

/* Views of the shared memory that begins at `base`. */
typedef ring<STAGES, K_BYTES> k_stages;
typedef ring<V_STAGES, V_BYTES> v_stages;
typedef panels<BLOCK_M> row_panels;
typedef panels<BLOCK_N> key_panels;
__device__ __forceinline__ stage_barriers<1> rows_full(uint32_t base) { return {base + ROWS_FULL}; }
__device__ __forceinline__ k_stages k_ring(uint32_t base) { return {base + K_RING, base + K_OFFSET}; }
__device__ __forceinline__ v_stages v_ring(uint32_t base) { return {base + V_RING, base + V_OFFSET}; }

/* The rows of a block, and the tiles of keys that some of them see: first_tile .. last_tile - 1. */
struct row_block {
    int first_row, head, batch, first_tile, last_tile;
    int q_begin, k_begin; /* of the sequence, in packed tensors */
    int steps;
};
/* Row blocks of a head are neighbours. Under a causal mask or window those of several heads are interleaved, and the
 * last rows, which see many keys, come first; with PLANNED they follow the order of the tile plan. */
__device__ __forceinline__ struct row_block find_rows(const struct hopper_backward_params &a, int block_index) {
    struct row_block r;
    const int row_blocks = (a.in.in.seqlen_q + BLOCK_M - 1) / BLOCK_M;
    int head = block_index / row_blocks, block = block_index % row_blocks;
    if (WINDOW || PLANNED) {
        const int in_turn = a.in.in.heads_per_l2_group, first = head / in_turn * in_turn;
        const int rest = block_index - first * row_blocks;
        const int heads = min(in_turn, a.in.in.heads * a.in.in.batch - first);
        head = first + rest % heads;
        block = row_blocks - 1 - rest / heads;
    }
    r.head = head % a.in.in.heads;
    r.batch = head / a.in.in.heads;
    if (PLANNED)
        block =
            a.plan.order[(int64_t)tile_plan_head(&a.plan, r.head, r.batch) * a.plan.row_tiles + row_blocks - 1 - block];
    r.first_row = block * BLOCK_M;
    const struct sequence s = find_sequence(a.in.in, r.batch);
    const int first = first_key(a.in.in, s, r.first_row);
    const int last = last_key(a.in.in, s, min(r.first_row + BLOCK_M, s.seqlen_q) - 1) + 1;
    r.q_begin = s.q_begin;
    r.k_begin = s.k_begin;
    r.first_tile = first / BLOCK_N;
    r.last_tile = first < last ? (last + BLOCK_N - 1) / BLOCK_N : r.first_tile;
    r.steps = r.last_tile - r.first_tile;
    return r;
}

/* The block lies beyond the end of a packed sequence. */
__device__ __forceinline__ bool is_past_end(const struct hopper_backward_params &a, const struct row_block &r) {
    return r.first_row >= find_sequence(a.in.in, r.batch).seqlen_q;
}

/* Writes bits of tiles of keys at `seen`: first, some row of the block sees the tile; then, for each warpgroup,
 * something of it is hidden from some of its rows. They come from the tile plan, or from the mask, where a warp has
 * a word. */
__device__ __forceinline__ void list_planned_tiles(const struct hopper_backward_params &a, const struct row_block &r,
                                                   uint32_t seen) {
    static_assert(TILE_PLAN_TILE == BLOCK_N && 2 * TILE_PLAN_TILE == BLOCK_M, "a warpgroup's rows are those of a tile");
    const struct tile_plan &plan = a.plan;
    const int row_tile = r.first_row / TILE_PLAN_TILE;
    const int64_t row = (int64_t)tile_plan_head(&plan, r.head, r.batch) * plan.row_tiles + row_tile;
    for (int word = threadIdx.x; word < SEEN_WORDS; word += THREADS) {
        uint32_t bits = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const bool is_there = word < plan.key_words && row_tile + half < plan.row_tiles;
            const int64_t at = (row + half) * plan.key_words + word;
            bits |= is_there ? plan.seen[at] : 0;
            st_shared_4(seen + ((1 + half) * SEEN_WORDS + word) * 4, is_there ? ~plan.full[at] : 0);
        }
        st_shared_4(seen + word * 4, bits);
    }
}
__device__ __forceinline__ void list_masked_tiles(const struct hopper_backward_params &a, const struct row_block &r,
                                                  uint32_t seen) {
    const struct gpu_forward_params &in = a.in.in;
    const int lane = threadIdx.x % 32;
    const uint8_t *kinds = in.block_mask + r.batch * in.block_mask_batch + r.head / in.mask.group * in.block_mask_head +
                           r.first_row / HOPPER_BACKWARD_2PASS_MASK * in.block_mask_row;
#pragma unroll 1
    for (int word = threadIdx.x / 32; word < SEEN_WORDS; word += THREADS / 32) {
        const int tile = word * 32 + lane;
        uint32_t bits = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const bool walked = tile >= r.first_tile && tile < r.last_tile &&
                                r.first_row + half * HOPPER_BACKWARD_2PASS_MASK < in.seqlen_q;
            const int kind = walked ? (int)kinds[half * in.block_mask_row + tile] : GPU_BLOCK_HIDDEN;
            const uint32_t parts = __ballot_sync(0xffffffff, kind != GPU_BLOCK_FULL);
            bits |= __ballot_sync(0xffffffff, kind != GPU_BLOCK_HIDDEN);
            if (lane == 0)
                st_shared_4(seen + ((1 + half) * SEEN_WORDS + word) * 4, parts);
        }
        if (lane == 0)
            st_shared_4(seen + word * 4, bits);
    }
}

/* The rows of this block. With LISTED whole warps call it, when its tiles are listed. */
__device__ __forceinline__ struct row_block find_steps(const struct hopper_backward_params &a,
                                                       [[maybe_unused]] uint32_t base) {
    struct row_block r = find_rows(a, (int)blockIdx.x);
    if (LISTED) {
        const struct listed_tiles listed = count_listed(base + SEEN_OFFSET);
        r.first_tile = listed.first;
        r.steps = listed.count;
    }
    return r;
}

/* ---- producer ---- */

__device__ __forceinline__ void produce_rows(const struct hopper_backward_params &a, const struct row_block &r,
                                             uint32_t base) {
    const int row = r.q_begin + r.first_row, batch = VARLEN ? 0 : r.batch;
    const uint32_t full = rows_full(base).at;
    mbarrier_arrive_expect_tx(full, Q_BYTES + DOUT_BYTES);
    load_panels<PANELS, BLOCK_M, 64>(base, &a.q_map, full, row, r.head, batch);
    load_panels<PANELS_V, BLOCK_M, 64>(base + Q_BYTES, &a.dout_map, full, row, r.head, batch);
}

/* Copies the rows of K or V whose numbers lanes 0-15 of a warp have, to the warp's 16 rows of a tile; a lane copies
 * a chunk. */
template <int chunks>
__device__ __forceinline__ void gather_keys(uint32_t tile, const struct gpu_matrix &from, int columns, int batch,
                                            int head, int seqlen_k, int key) {
    const int lane = (int)tid_x_reread() % 32, warp = (int)tid_x_reread() / 32;
    const char *of_head = row_address(from, batch, head, 0) + lane * 16;
    const key_panels to = key_panels{tile}.panel(lane / 8).rows(warp * 16);
#pragma unroll 1
    for (int n = 0; n < 16; n++) {
        const int number = __shfl_sync(0xffffffff, key, n);
        const int bytes = number < seqlen_k ? min(max(columns - lane * 8, 0), 8) * 2 : 0;
        if (lane < chunks)
            cp_async_16_fill(to.panel_chunk(n, lane % 8), bytes ? of_head + number * from.row * 2 : from.data,
                             (uint32_t)bytes);
    }
}
/* With sorted keys all threads of the warpgroup call it. */
__device__ __forceinline__ void produce_sorted(const struct hopper_backward_params &a, const struct row_block &r,
                                               uint32_t base) {
    const int thread = (int)threadIdx.x, kv_head = r.head / a.in.in.group;
    if (thread == 0)
        produce_rows(a, r, base);
    int tile = r.first_tile;
#pragma unroll 1
    for (int step = 0; step < r.steps; step++) {
        const int key = *sorted_keys(a, r.batch, kv_head, tile * BLOCK_N + thread / 32 * 16 + thread % 16);
        k_ring(base).wait_empty(step);
        gather_keys<HEAD_DIM / 8>(k_ring(base).tile(step), a.in.in.k, a.in.in.head_dim, r.batch, kv_head,
                                  a.in.in.seqlen_k, key);
        cp_async_mbarrier_arrive_noinc(k_ring(base).full(step));
        v_ring(base).wait_empty(step);
        gather_keys<HEAD_DIM_V / 8>(v_ring(base).tile(step), a.in.in.v, a.in.in.head_dim_v, r.batch, kv_head,
                                    a.in.in.seqlen_k, key);
        cp_async_mbarrier_arrive_noinc(v_ring(base).full(step));
        if (step + 1 < r.steps)
            tile = listed_after(base + SEEN_OFFSET, tile);
    }
    cp_async_wait<0>();
}

__device__ __forceinline__ void produce(const struct hopper_backward_params &a, const struct row_block &r,
                                        uint32_t base) {
    const int kv_head = r.head / a.in.in.group, batch = VARLEN ? 0 : r.batch;
    produce_rows(a, r, base);
#pragma unroll 1
    for (int tile = r.first_tile, n = 0; LISTED ? n < r.steps : tile < r.last_tile; tile++, n++) {
        if (LISTED && n > 0)
            tile = listed_after(base + SEEN_OFFSET, tile - 1);
        const uint32_t step = LISTED ? n : tile - r.first_tile;
        const k_stages k = k_ring(base);
        const v_stages v = v_ring(base);
        k_ring(base).wait_empty(step);
        mbarrier_arrive_expect_tx(k.full(step), K_BYTES);
        load_panels<PANELS, BLOCK_N>(k.tile(step), &a.k_map, k.full(step), r.k_begin + tile * BLOCK_N, kv_head, batch);
        v_ring(base).wait_empty(step);
        mbarrier_arrive_expect_tx(v.full(step), V_BYTES);
        load_panels<PANELS_V, BLOCK_N>(v.tile(step), &a.v_map, v.full(step), r.k_begin + tile * BLOCK_N, kv_head,
                                       batch);
    }
}

/* ---- consumers ---- */

struct consumer {
    const struct hopper_backward_params &a;
    const struct row_block r;
    uint32_t base;
    const bool sorted;
    int warpgroup, tile; /* LISTED: of the step's keys */
    float s[BLOCK_N / 2], dp[BLOCK_N / 2], dq[HEAD_DIM / 2], lse[2], delta[2], low[2];
    uint32_t ds[BLOCK_N / 16][4];
    uint32_t ranges[2]; /* KEYED: the rows of the warpgroup that see two keys of a partial tile */

    __device__ __forceinline__ int local_row() const {
        const int thread = (int)tid_x_reread() - 128;
        return thread / 32 * 16 + thread % 32 / 4;
    }
    __device__ __forceinline__ int first_key_of(int step) const {
        return (LISTED ? tile : r.first_tile + step) * BLOCK_N;
    }
    /* The number of the thread's row in a half; and that row's number, limited to the sequence. */
    __device__ __forceinline__ int64_t row_of(int half) const {
        return min(r.first_row + local_row() + 8 * half, a.in.in.seqlen_q - 1);
    }
    /* S = Q K^T, dP = dO V^T */
    __device__ __forceinline__ void multiply_qk(int step) {
        const row_panels q = row_panels{base}.rows(warpgroup * 64);
        const key_panels k = {k_ring(base).tile(step)};
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 16; n++)
            wgmma_m64k16<F16, 0>(s, by_columns(q, n), by_columns(k, n), n > 0);
    }
    __device__ __forceinline__ void multiply_dov(int step) {
        const row_panels dout = row_panels{base + Q_BYTES}.rows(warpgroup * 64);
        const key_panels v = {v_ring(base).tile(step)};
#pragma unroll
        for (int n = 0; n < HEAD_DIM_V / 16; n++)
            wgmma_m64k16<F16, 0>(dp, by_columns(dout, n), by_columns(v, n), n > 0);
    }
    /* dQ += dS K */
    __device__ __forceinline__ void multiply_dsk(int step) {
        const key_panels k = {k_ring(base).tile(step)};
#pragma unroll
        for (int n = 0; n < BLOCK_N / 16; n++)
            wgmma_m64k16<F16, 1>(dq, ds[n], by_rows(k, n), true);
    }

    /* VARLEN: keys after the sequence's last belong to another sequence, and may be NaN. Both warpgroups set them to
     * 0. */
    __device__ __forceinline__ void clear_keys(int step) const {
        const int count = find_sequence(a.in.in, r.batch).seqlen_k - first_key_of(step);
        const int thread = (int)tid_x_reread() - 128;
        const auto gone = [count](int key) { return key >= count; };
        if (count >= BLOCK_N)
            return;
        v_ring(base).wait_full(step);
        clear_tile<PANELS, BLOCK_N, 256>(k_ring(base).tile(step), thread, gone);
        clear_tile<PANELS_V, BLOCK_N, 256>(v_ring(base).tile(step), thread, gone);
        barrier_sync(CONSUMERS_BARRIER, 256);
    }

    /* Loads the bias of the thread's two rows from key `key` on: word j of bias[half][m] holds the pair of the
     * accumulators' group 4 m + j. */
    __device__ __forceinline__ void load_bias(uint32_t (&bias)[2][2][4], int key) const {
        const struct gpu_scores &b = a.in.in.bias;
        const char *from = b.data + (r.batch * b.batch + r.head / b.group * b.head) * 2;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int first = key + (n % 2 * 4 + (int)tid_x_reread() % 4) * 8;
            ld_global_16(bias[n / 2][n % 2], from + (row_of(n / 2) * b.row + first) * 2, first < a.in.in.seqlen_k);
        }
#pragma unroll
        for (int n = 0; n < 4; n++)
            quad_transpose(bias[n / 2][n % 2]);
    }
    /* Sets scores to -inf that the mask hides, of the keys from `key` on. A lane reads 16 bytes of each row, and
     * sends a bit for each to its quad. */
    __device__ __forceinline__ void hide_masked_keys(int key) {
        const struct gpu_scores &m = a.in.in.mask;
        const char *from = m.data + r.batch * m.batch + r.head / m.group * m.head;
        const int lane = (int)tid_x_reread() % 32, first = key + lane % 4 * 16;
        uint32_t bits = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t bytes[4];
            ld_global_16(bytes, from + row_of(half) * m.row + first, first < a.in.in.seqlen_k);
#pragma unroll
            for (int i = 0; i < 4; i++) { /* 1 in each byte that is not 0, then together */
                const uint32_t ones = (((bytes[i] & 0x7f7f7f7f) + 0x7f7f7f7f) | bytes[i]) >> 7 & 0x01010101;
                bits |= ones * 0x10204080 >> 28 << (half * 16 + i * 4);
            }
        }
#pragma unroll
        for (int chunk = 0; chunk < 4; chunk++) {
            const uint32_t of_keys = __shfl_sync(0xffffffff, bits, lane / 4 * 4 + chunk) >> lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 8; i++) /* of two groups of the accumulators */
                if (!(of_keys >> (i / 2 % 2 * 16 + i / 4 * 8 + i % 2) & 1))
                    s[8 * chunk + i] = MINUS_INF;
        }
    }

    /* Something hides a part of the step's tile from the warpgroup's rows. */
    __device__ __forceinline__ bool is_partial() const {
        return hides_part(base + SEEN_OFFSET + warpgroup * SEEN_WORDS * 4, tile);
    }
    /* KEYED: the rows that see the lane-th key of the tile and the one 32 after it: the first row, and from bit 8 on
     * their number. */
    __device__ __forceinline__ void find_ranges() {
        const struct sequence at = find_sequence(a.in.in, r.batch);
        const int kv_head = r.head / a.in.in.group, row = r.first_row + warpgroup * 64;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            int key = tile * BLOCK_N + n * 32 + (int)tid_x_reread() % 32;
            key = sorted ? *sorted_keys(a, r.batch, kv_head, key) : key;
            const struct key_bounds rows = rows_of_key(a.in.in, at, r.head, key);
            const int first = max(rows.first - row, 0), last = min(rows.last - row, 64);
            ranges[n] = first < last ? (uint32_t)(first | (last - first) << 8) : 0;
        }
    }
    __device__ __forceinline__ void hide_ranges() {
        const int lane = (int)tid_x_reread() % 32, row = local_row() % 64;
#pragma unroll
        for (int n = 0; n < BLOCK_N / 4; n++) {
            const uint32_t range = __shfl_sync(0xffffffff, ranges[n / 8], n / 2 % 4 * 8 + lane % 4 * 2 + n % 2);
            const int first = (int)(range & 0xff), count = (int)(range >> 8);
#pragma unroll
            for (int half = 0; half < 2; half++)
                if ((uint32_t)(row + 8 * half - first) >= (uint32_t)count)
                    s[n / 2 * 4 + half * 2 + n % 2] = MINUS_INF;
        }
    }

    /* Sets scores to -inf whose key lies in no run of the thread's two rows, of the keys from `key` on, which lie in
     * one block of the block mask. */
    __device__ __forceinline__ void hide_others(const struct sequence &at, int key) {
        const struct gpu_forward_params &in = a.in.in;
        const int column = key + (int)tid_x_reread() % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = min(r.first_row + local_row() + 8 * half, at.seqlen_q - 1);
            const struct row_ranges ranges = ranges_of_row(in, at.batch, at.q_begin, r.head, row);
            uint32_t held =
                keys_in_ranges<BLOCK_N / 4>(in, ranges, [column](int i) { return column + i / 2 * 8 + i % 2; });
            if (BLOCKS && !block_holds(in.blocks, ranges, key))
                held = 0;
#pragma unroll
            for (int i = 0; i < BLOCK_N / 4; i++)
                if (!(held >> i & 1))
                    s[i / 2 * 4 + half * 2 + i % 2] = MINUS_INF;
        }
    }

    /* Turns S into P. Keys beyond the sequence's last are zeros in shared memory, which would have weight: they are
     * hidden. */
    __device__ __forceinline__ void make_p(int step) {
        const struct sequence at = find_sequence(a.in.in, r.batch);
        const int key = first_key_of(step), row = r.first_row + warpgroup * 64;
        const float unit = score_unit(a.in.in);
        [[maybe_unused]] uint32_t bias[2][2][4];
        if (BIAS)
            load_bias(bias, key);
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; i++) {
            const int half = i / 2 % 2;
            const float of_pair = BIAS ? unpack((uint16_t)(bias[half][i / 16][i / 4 % 4] >> i % 2 * 16)) : 0;
            s[i] = exponent_of(s[i], a.in.in, unit, of_pair, lse[half], BIAS ? low[half] : 0);
        }
        if (KEYED && LATE_RANGES && is_partial())
            find_ranges();
        if (KEYED && is_partial())
            hide_ranges();
        if (!KEYED && (key + BLOCK_N > last_key(a.in.in, at, row) + 1 || key < first_key(a.in.in, at, row + 63))) {
            const int own = r.first_row + local_row(), column = (int)tid_x_reread() % 4 * 2 + key;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int first = first_key(a.in.in, at, own + 8 * half) - column;
                const int last = last_key(a.in.in, at, own + 8 * half) - column;
#pragma unroll
                for (int i = 0; i < BLOCK_N / 4; i++) {
                    const int n = i / 2 * 8 + i % 2;
                    if (n < first || n > last)
                        s[i / 2 * 4 + half * 2 + i % 2] = MINUS_INF;
                }
            }
        }
        if (MASK_TILE && is_partial())
            hide_masked_keys(key);
        if (ROW_RUNS && is_partial())
            hide_others(at, key);
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; i++)
            s[i] = ex2_approx(s[i]);
    }
    __device__ __forceinline__ void make_ds() {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 4; i++) {
            float pair[2] = {s[2 * i] * (dp[2 * i] - delta[i % 2]), s[2 * i + 1] * (dp[2 * i + 1] - delta[i % 2])};
            for (int c = 0; SCRUB && c < 2; c++) /* also where V is NaN */
                pair[c] = s[2 * i + c] == 0.0f ? 0.0f : pair[c];
            for (int c = 0; SOFTCAP && c < 2; c++)
                pair[c] *= slope_of_cap(s[2 * i + c], lse[i % 2], a.in.in.softcap_inverse);
            ds[i / 4][i % 4] = pack(pair[0], pair[1]);
        }
    }

    /* With BIAS it is loaded at each step, as registers are short when P is made. */
    __device__ __forceinline__ void read_delta() {
        const int64_t row = step_rows{r.head, r.first_row / BLOCK_M}.place(a, r.batch) + local_row();
#pragma unroll
        for (int half = 0; half < 2; half++)
            delta[half] = a.in.delta_rows[row + 8 * half];
    }

    /* Stores the gradient of the bias, dS of the thread's two rows. A row that sees no key has none. */
    __device__ __forceinline__ void store_dbias(int key) const {
        const struct gpu_scores &to = a.in.dbias;
        char *head = (char *)to.data + (r.batch * to.batch + r.head / to.group * to.head) * 2;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int half = n / 2, first = key + (n % 2 * 4 + (int)tid_x_reread() % 4) * 8;
            uint32_t x[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int i = 2 * (n % 2 * 4 + j) + half;
                x[j] = lse[half] == __int_as_float(0x7f800000) ? 0 : ds[i / 4][i % 4];
            }
            quad_transpose(x);
            if (r.first_row + local_row() + 8 * half < a.in.in.seqlen_q && first < a.in.in.seqlen_k)
                *(uint4 *)(head + (row_of(half) * to.row + first) * 2) = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }

    /* A bit for each of the warp's rows of dQ that have become NaN by a key which they do not see. */
    __device__ __forceinline__ uint32_t find_spoiled() const {
        return spoiled_rows<2>([&](int half) {
            float sum = 0;
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++)
                sum += dq[4 * n + 2 * half] + dq[4 * n + 2 * half + 1];
            return sum;
        });
    }
    __device__ __forceinline__ void redo_rows(uint32_t spoiled) {
        const struct row_block then = find_rows(a, (int)ctaid_x_reread()); /* registers are short in the loop */
        const struct sequence at = find_sequence(a.in.in, then.batch);
        const int64_t place = step_rows{then.head, then.first_row / BLOCK_M}.place(a, then.batch);
        for_each_bit(spoiled, [&](int n) {
            const int row = redo_uniform(local_row() + n); /* of the first lane's row on */
            if (then.first_row + row < at.seqlen_q)
                redo_dq(a.in, at, then.head, then.head / a.in.in.group, then.first_row + row, place + row);
        });
    }

    /* Of the thread's two rows. */
    __device__ __forceinline__ void read_rows() {
        const int64_t row = step_rows{r.head, r.first_row / BLOCK_M}.place(a, r.batch) + local_row();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            lse[half] = a.in.lse_rows[row + 8 * half];
            if (BIAS)
                low[half] = a.in.low_rows[row + 8 * half];
            else
                delta[half] = a.in.delta_rows[row + 8 * half];
        }
    }

    __device__ __forceinline__ void run() {
        const int steps = r.steps;
        read_rows();
        set_zero(dq);
        rows_full(base).wait(0);
        if (steps > 0) {
            int step = 0;
#pragma unroll 1
            do {
                k_ring(base).wait_full(step);
                if (VARLEN)
                    clear_keys(step);
                if (EITHER) /* copies of produce_sorted() */
                    fence_proxy_async();
                wgmma_fence();
                multiply_qk(step);
                wgmma_commit_group();
                v_ring(base).wait_full(step);
                if (EITHER)
                    fence_proxy_async();
                multiply_dov(step);
                wgmma_commit_group();
                if (KEYED && !LATE_RANGES && is_partial())
                    find_ranges();
                wgmma_wait_group<1>(s);
                wgmma_wait_group<1>(dq);
                if (step > 0) { /* its product with dS is complete */
                    __syncwarp();
                    k_ring(base).release(step - 1);
                }
                make_p(step);
                if (BIAS)
                    read_delta();
                wgmma_wait_group<0>(dp);
                __syncwarp();
                v_ring(base).release(step);
                make_ds();
                if (DBIAS)
                    store_dbias(first_key_of(step));
                wgmma_fence();
                multiply_dsk(step);
                wgmma_commit_group();
                if (LISTED && step + 1 < steps)
                    tile = listed_after(base + SEEN_OFFSET, tile);
            } while (++step < steps);
            wgmma_wait_group<0>(dq);
        }
        /* A row that sees no key has no gradient, whatever dO is: its P is 0, but 0 times NaN is NaN. */
#pragma unroll
        for (int i = 0; EMPTY_ROWS && i < HEAD_DIM / 2; i++)
            dq[i] = lse[i / 2 % 2] == __int_as_float(0x7f800000) ? 0 : dq[i];
        if (DBIAS && !a.in.dq.data) /* the bias' gradient alone is wanted */
            return;
        const uint32_t spoiled = SCRUB && steps > 0 ? find_spoiled() : 0;
        barrier_sync(OWN_BARRIER + warpgroup, 128); /* all products with Q are complete */
        const int warp_row = warpgroup * 64 + (int)threadIdx.x / 32 % 4 * 16, first = r.first_row + warp_row;
        store_accumulator<HEAD_DIM, BLOCK_M>(row_address(a.in.dq, r.batch, r.head, r.q_begin + first), a.in.dq.row * 2,
                                             find_sequence(a.in.in, r.batch).seqlen_q - first, a.in.in.head_dim, base,
                                             warp_row, dq, a.in.in.scale, steps > 0, nullptr, spoiled);
        if (SCRUB)
            redo_rows(spoiled);
    }
};

extern "C" __global__ void __launch_bounds__(HOPPER_BACKWARD_2PASS_THREADS, 1)
    hopper_backward_2pass_dq(const __grid_constant__ struct hopper_backward_params a) {
    extern __shared__ char shared[];
    const uint32_t base = (shared_address(shared) + 1023) / 1024 * 1024;
    if (VARLEN && is_past_end(a, find_rows(a, (int)blockIdx.x)))
        return;
    if (PLANNED)
        list_planned_tiles(a, find_rows(a, (int)blockIdx.x), base + SEEN_OFFSET);
    else if (MASK_TILE)
        list_masked_tiles(a, find_rows(a, (int)blockIdx.x), base + SEEN_OFFSET);
    if (threadIdx.x == 0) {
        rows_full(base).init(0, 1);
        const int loaders = are_sorted(a) ? 128 : 1;
        for (int i = 0; i < STAGES; i++)
            k_ring(base).init(i, loaders, CONSUMER_WARPS);
        for (int i = 0; i < V_STAGES; i++)
            v_ring(base).init(i, loaders, CONSUMER_WARPS);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        setmaxnreg_dec<HOPPER_BACKWARD_2PASS_PRODUCER_REGISTERS>();
        if (LISTED || threadIdx.x == 0) {
            const struct row_block r = find_steps(a, base);
            if (EITHER && are_sorted(a))
                produce_sorted(a, r, base);
            else if (threadIdx.x == 0)
                produce(a, r, base);
        }
    } else {
        setmaxnreg_inc<HOPPER_BACKWARD_2PASS_CONSUMER_REGISTERS>();
        const struct row_block r = find_steps(a, base);
        const int warpgroup = __shfl_sync(0xffffffff, (int)threadIdx.x / 128 - 1, 0);
        consumer{a, r, base, are_sorted(a), warpgroup, r.first_tile}.run();
    }
}
