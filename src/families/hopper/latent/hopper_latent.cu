/* hopper_latent.cu: the forward of a latent KV cache (DeepSeek-V2, 2024) for compute capability 9.0: V is the first
 * VALUE_DIM columns of K, and many query heads share the one KV head. 16-bit dtypes.
 *
 * Idea: a tile of K is loaded once, by TMA, a box of each page at a time, and serves both products; V is never loaded.
 * The rows of a block are query rows times the query heads of a KV head. Two warpgroups hold half of the columns of O
 * each, and make S alternately as in FlashMLA (2025): warpgroup 0 makes step 0, warpgroup 1 step 1 and so on.
 * The one that makes S makes P and the maxima, multiplies its columns by P from registers and leaves P in shared
 * memory, from where the other multiplies its own. So Q K^T is made once, and the exponentials of one warpgroup run
 * beside the products of the other.
 *
 * Tile: BLOCK_M = 64 rows x BLOCK_N = 64 keys, from the last visible tile down. Grid: row blocks, splits of the keys,
 * KV heads, sequences.
 *
 * Shared memory, in panels of 128 bytes a row with the 128-byte swizzle: Q [panels][BLOCK_M] (later the output), K
 * [2][panels][BLOCK_N], P [BLOCK_M], then barriers, the item, maxima and sums: 226 KB of 227 at D 576.
 *
 * Barriers: of each stage one for each panel (full: the bytes of its boxes), and three empty ones: the columns of V of
 * each warpgroup, released after its product, and the rest, released after S. So the next tile's panels come while
 * products with the others still run. P_FULL ends a phase with each step's P. Nobody waits for P to be read: who writes
 * the next P has read the one before.
 *
 * Registers: of a consumer O 128, S 32, P 16, and some 40 besides, of 232.
 *
 * Floor for H 128, B 128, Sk 4096 (bfloat16, D 576, Dv 512): 146 GFLOP, 185 us at 790 TFLOPS; 604 MB, 137 us at 4.4
 * TB/s. A step is 1152 clocks of products for S and 1024 for O. Shared memory serves 1152 clocks for S (a product of 64
 * columns reads both operands at its full rate), 576 for V and the other's P, 64 for P and 576 for TMA: 2368. That is
 * 92 % of the peak; two items of 64 steps a multiprocessor lose 3 % in the second wave and 5 % at their ends.
 * Predicted: 600 to 660 TFLOPS. Never run on hardware. */
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/ring.cuh"
#include "families/hopper/latent/hopper_latent.h"

HOPPER_LATENT_CONSTANTS(GPU_CONSTANT_GIVEN)

#define BLOCK_M        HOPPER_LATENT_BLOCK_M
#define HEAD_DIM_V     (VALUE_DIM / 2) /* of a warpgroup */
#define EXP2_FREQUENCY 1
#define EXP2_RESIDUE   0
#define F16            (DTYPE == GPU_FLOAT16)
#include "families/hopper/forward/hopper_softmax.cuh"
#include "families/hopper/pipeline/hopper_panels.cuh"
#include "gpu/unused_rows.cuh"

static_assert(BLOCK_M == 64 && BLOCK_N == 64, "P is one panel");
static_assert(VALUE_DIM == HEAD_DIM - 64 && VALUE_DIM % 128 == 0, "each warpgroup has whole panels of V");
static_assert(BLOCK_N % PAGE_BOX == 0 && PAGE_BOX % 8 == 0, "boxes fill a tile, and begin where the swizzle does");

/* ---- shared memory ---- */

constexpr int PANELS = HEAD_DIM / 64, OWN_PANELS = HEAD_DIM_V / 64, BOXES = BLOCK_N / PAGE_BOX;
constexpr int STAGES = HOPPER_LATENT_STAGES, K_BYTES = PANELS * panels<BLOCK_N>::BYTES;
constexpr int K_OFFSET = PANELS * panels<BLOCK_M>::BYTES, P_OFFSET = K_OFFSET + STAGES * K_BYTES;
enum { OF_REST = 2, RELEASES = 3 }; /* empty barriers: of warpgroup 0, of warpgroup 1, of the rest */
enum {
    CONTROL = P_OFFSET + panels<BLOCK_M>::BYTES,
    ITEM = CONTROL,
    MAXIMA = ITEM + 32,
    SUMS = MAXIMA + 4 * BLOCK_M, /* of either warpgroup */
    FULL = SUMS + 8 * BLOCK_M,
    EMPTY = FULL + PANELS * stage_barriers<STAGES>::BYTES,
    P_FULL = EMPTY + RELEASES * stage_barriers<STAGES>::BYTES,
    THERE = P_FULL + 8, /* of each stage: a bit for each box whose page is there */
    END = THERE + 4 * STAGES
};
static_assert(END - CONTROL <= HOPPER_LATENT_CONTROL_BYTES, "what is beside the tiles fits");
static_assert(CONTROL + HOPPER_LATENT_CONTROL_BYTES + 1024 == hopper_latent_shared_bytes(HEAD_DIM, BLOCK_N),
              "the plan knows the bytes");
enum { CONSUMERS_BARRIER = 1, WARPGROUP_BARRIER = 2 };

__device__ __forceinline__ panels<BLOCK_M> q_tile(uint32_t base) { return {base}; }
__device__ __forceinline__ panels<BLOCK_M> p_tile(uint32_t base) { return {base + P_OFFSET}; }
__device__ __forceinline__ panels<BLOCK_N> k_tile(uint32_t base, uint32_t step) {
    return {base + K_OFFSET + stage_barriers<STAGES>::stage(step) * K_BYTES};
}
__device__ __forceinline__ stage_barriers<STAGES> full(uint32_t base, int panel) {
    return {base + FULL + panel * stage_barriers<STAGES>::BYTES};
}
__device__ __forceinline__ stage_barriers<STAGES> empty(uint32_t base, int release) {
    return {base + EMPTY + release * stage_barriers<STAGES>::BYTES};
}
__device__ __forceinline__ stage_barriers<1> p_full(uint32_t base) { return {base + P_FULL}; }
__device__ __forceinline__ uint32_t there(uint32_t base, uint32_t step) {
    return base + THERE + 4 * stage_barriers<STAGES>::stage(step);
}

__device__ __forceinline__ void init_barriers(uint32_t base) {
    for (int stage = 0; stage < STAGES; stage++) {
        for (int panel = 0; panel < PANELS; panel++)
            full(base, panel).init(stage, BOXES);
        for (int release = 0; release < RELEASES; release++)
            empty(base, release).init(stage, 4);
    }
    p_full(base).init(0, 4);
    fence_mbarrier_init();
}

/* ---- the block's item ---- */

/* Rows first_row .. of a KV head: row r is query row r / group of head r % group. Tiles are walked from last - 1 down
 * to first. */
struct item {
    int batch, head_kv, split, first_row;
    int first_tile, last_tile, seqlen_q, seqlen_k;

    __device__ __forceinline__ int num_rows(const struct gpu_forward_params &a) const {
        return seqlen_q * a.group - first_row;
    }
    __device__ __forceinline__ struct sequence sequence() const {
        return {batch, seqlen_q, seqlen_k, 0, 0, seqlen_k - seqlen_q};
    }
};
__device__ __forceinline__ struct item find_item(const struct hopper_latent_params &a) {
    uint32_t n = blockIdx.x / a.row_blocks;
    struct item at = {};
    at.first_row = (int)(blockIdx.x % a.row_blocks) * BLOCK_M;
    at.split = (int)(n % a.in.num_splits);
    n /= a.in.num_splits;
    at.head_kv = (int)(n % a.in.heads_kv);
    at.batch = (int)(n / a.in.heads_kv);
    const struct sequence s = find_sequence(a.in, at.batch);
    at.seqlen_q = s.seqlen_q;
    at.seqlen_k = s.seqlen_k;
    const int rows = min(at.num_rows(a.in), BLOCK_M);
    if (rows <= 0)
        return at;
    const int last = last_key(a.in, s, (at.first_row + rows - 1) / a.in.group) + 1;
    const int tiles = (max(last, 0) + BLOCK_N - 1) / BLOCK_N, each = (tiles + a.in.num_splits - 1) / a.in.num_splits;
    at.first_tile = min(at.split * each, tiles);
    at.last_tile = min(at.first_tile + each, tiles);
    return at;
}
__device__ __forceinline__ void write_item(uint32_t base, const struct item &at) {
    st_shared_16(base + ITEM, (uint32_t)at.batch, (uint32_t)at.head_kv, (uint32_t)at.split, (uint32_t)at.first_row);
    st_shared_16(base + ITEM + 16, (uint32_t)at.first_tile, (uint32_t)at.last_tile, (uint32_t)at.seqlen_q,
                 (uint32_t)at.seqlen_k);
}
__device__ __forceinline__ struct item read_item(uint32_t base) {
    uint32_t low[4], high[4];
    ld_shared_16(low, base + ITEM);
    ld_shared_16(high, base + ITEM + 16);
    return {(int)low[0], (int)low[1], (int)low[2], (int)low[3], (int)high[0], (int)high[1], (int)high[2], (int)high[3]};
}

/* ---- producer ---- */

/* A lane of the first warp for each box of a tile. */
struct producer {
    const struct hopper_latent_params &a;
    uint32_t base;
    int lane;
    struct item at;
    struct cached_keys keys;

    __device__ __forceinline__ producer(const struct hopper_latent_params &params, uint32_t shared)
        : a(params), base(shared), lane((int)threadIdx.x), at(read_item(shared)), keys() {
        if (CACHE)
            keys = find_cached_keys(a.in, at.batch);
    }

    /* Page and row of the lane's box. Below the first tile, and behind the last key, there is none. */
    __device__ __forceinline__ struct page_row look_up(int tile) const {
        const int key = tile * BLOCK_N + lane * PAGE_BOX;
        if (CACHE)
            return find_page_row(a.in.cache, keys, tile >= at.first_tile ? key : -1);
        return {(uint64_t)at.batch, key < at.seqlen_k ? key : NO_ROW};
    }
    __device__ __forceinline__ bool is_there(const struct page_row &box) const {
        return box.row != NO_ROW && (!CACHE || box.page < (uint64_t)a.in.cache.num_pages);
    }

    template <int first, int count>
    __device__ __forceinline__ void load(uint32_t step, int release, int page, int row) {
        empty(base, release).wait_before(step);
#pragma unroll
        for (int n = first; n < first + count; n++) {
            const uint32_t barrier = full(base, n).barrier(step);
            mbarrier_arrive_expect_tx(barrier, PAGE_BOX * 128);
            cp_async_bulk_tensor_4d(k_tile(base, step).panel(n).rows(lane * PAGE_BOX).at, &a.k_map, barrier, n * 64,
                                    row, at.head_kv, page);
        }
    }

    __device__ __forceinline__ void run() {
        constexpr uint32_t lanes = (1u << BOXES) - 1;
        struct page_row next = look_up(at.last_tile - 1);
#pragma unroll 1
        for (int tile = at.last_tile - 1; tile >= at.first_tile; tile--) {
            const uint32_t step = (uint32_t)(at.last_tile - 1 - tile);
            const bool is = is_there(next);
            /* Page -1 lies outside of the tensor: TMA writes zeros. */
            const int page = is ? (int)next.page : -1, row = is ? next.row : 0;
            const uint32_t all = __ballot_sync(lanes, is);
            next = look_up(tile - 1);
            empty(base, 0).wait_before(step); /* who made S has read the word of the step before */
            if (lane == 0)
                st_shared_4(there(base, step), all);
            load<0, OWN_PANELS>(step, 0, page, row);
            load<OWN_PANELS, OWN_PANELS>(step, 1, page, row);
            load<2 * OWN_PANELS, PANELS - 2 * OWN_PANELS>(step, OF_REST, page, row);
        }
    }
};

/* ---- consumers ---- */

struct consumer {
    const struct hopper_latent_params &a;
    uint32_t base;
    int own; /* the warpgroup: 0 or 1 */
    float s[BLOCK_N / 2], o[HEAD_DIM_V / 2];
    uint32_t p[BLOCK_N / 16][4];
    struct softmax_rows rows;

    __device__ __forceinline__ consumer(const struct hopper_latent_params &params, uint32_t shared)
        : a(params), base(shared), own(__shfl_sync(0xffffffff, (int)threadIdx.x / 128 - 1, 0)),
          rows({{MINUS_INF, MINUS_INF}, {0, 0}, false}) {}

    /* Of half 0. */
    static __device__ __forceinline__ int local_row() {
        return (int)threadIdx.x / 32 % 4 * 16 + (int)threadIdx.x % 32 / 4;
    }
    __device__ __forceinline__ void wait_for_warpgroup() const { barrier_sync(WARPGROUP_BARRIER + own, 128); }

    /* Row r of the item, of q or out: its offset in elements. */
    __device__ __forceinline__ int64_t offset_of(const struct item &at, const struct gpu_matrix &m, int r) const {
        const int row = (at.first_row + r) / a.in.group,
                  head = at.head_kv * a.in.group + (at.first_row + r) % a.in.group;
        const int begin = VARLEN ? find_packed_q(a.in, at.batch).begin : 0;
        return (VARLEN ? 0 : at.batch * m.batch) + (int64_t)(begin + row) * m.row + head * m.head;
    }

    /* Q, by both warpgroups; rows that the item has not are 0. */
    __device__ __forceinline__ void load_q() const {
        const struct item at = read_item(base);
        const int count = at.num_rows(a.in);
        constexpr int chunks = HEAD_DIM / 8;
#pragma unroll 1
        for (int r = (int)threadIdx.x / 32 - 4; r < BLOCK_M; r += 8) {
            const char *const from = a.in.q.data + offset_of(at, a.in.q, min(r, count - 1)) * 2;
            for (int n = threadIdx.x % 32; n < chunks; n += 32)
                cp_async_16_fill(q_tile(base).chunk(r, n), from + n * 16, r < count ? 16 : 0);
        }
        cp_async_commit();
        cp_async_wait<0>();
        fence_proxy_async();
        barrier_sync(CONSUMERS_BARRIER, 256);
    }

    /* Behind the last key lies what the cache holds there. */
    __device__ __forceinline__ void clear_tail(int tile) const {
        const int keys = read_item(base).seqlen_k - tile * BLOCK_N;
        if (keys >= BLOCK_N)
            return;
#pragma unroll 1
        for (int panel = 0; panel < PANELS; panel++)
            full(base, panel).wait(0u);
        const int chunks = (BLOCK_N - keys) * 8;
        for (int n = (int)threadIdx.x % 128; n < 2 * OWN_PANELS * chunks; n += 128)
            st_shared_16(k_tile(base, 0).panel(n / chunks).rows(keys).at + n % chunks * 16, 0, 0, 0, 0);
        fence_proxy_async();
        wait_for_warpgroup();
    }

    /* S = Q K^T, as panels come. */
    __device__ __forceinline__ void multiply_qk(uint32_t step) {
        const panels<BLOCK_M> q = q_tile(base);
        const panels<BLOCK_N> k = k_tile(base, step);
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 16; n++) {
            if (n % 4 == 0)
                full(base, n / 4).wait(step);
            wgmma_m64k16<F16, 0>(s, by_columns(q, n), by_columns(k, n), n > 0);
        }
    }
    /* O = P V + (step > 0 ? O : 0) of the warpgroup's columns: with its own P, and with the other's. */
    __device__ __forceinline__ void multiply_pv(uint32_t step) {
        const panels<BLOCK_N> v = k_tile(base, step).panel(own * OWN_PANELS);
#pragma unroll
        for (int n = 0; n < BLOCK_N / 16; n++)
            wgmma_m64k16<F16, 1>(o, p[n], by_rows(v, n), n > 0 || step > 0);
    }
    __device__ __forceinline__ void multiply_others_pv(uint32_t step) {
        const panels<BLOCK_N> v = k_tile(base, step).panel(own * OWN_PANELS);
#pragma unroll
        for (int n = 0; n < BLOCK_N / 16; n++)
            wgmma_m64k16<F16, 1>(o, by_columns(p_tile(base), n), by_rows(v, n), n > 0 || step > 0);
    }

    /* Keys of a tile that a row does not see, or whose page is not there. */
    __device__ __forceinline__ void hide(uint32_t step, int tile) {
        const struct item at = read_item(base);
        const int row = at.first_row + local_row(), key = tile * BLOCK_N, first[2] = {0, 0};
        const int last[2] = {last_key(a.in, at.sequence(), row / a.in.group) + 1 - key,
                             last_key(a.in, at.sequence(), (row + 8) / a.in.group) + 1 - key};
        hide_keys(s, first, last);
        const uint32_t boxes = ld_shared_4(there(base, step));
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; i++)
            if (!(boxes >> i / 4 * 8 / PAGE_BOX & 1))
                s[i] = MINUS_INF;
    }
    __device__ __forceinline__ void scores_to_p(uint32_t step, int tile, bool partial) {
        if (!MAXIMA_BARE)
            finish_scores<false>(s, a.in, 0, 0, 0);
        if (partial || ld_shared_4(there(base, step)) != (1u << BOXES) - 1)
            hide(step, tile);
        softmax(p, s, o, rows, exponent_unit(a.in), step > 0);
    }

    /* Leaves P and the maxima to the other warpgroup, once all of this one has read the other's. */
    __device__ __forceinline__ void publish_p(uint32_t step) const {
        const int lane = threadIdx.x % 32, row = local_row();
        wait_for_warpgroup();
#pragma unroll
        for (int n = 0; n < BLOCK_N / 16; n++)
            stmatrix_x4(p_tile(base).panel_chunk(row - lane / 4 + lane % 16, 2 * n + lane / 16), p[n]);
        if (lane % 4 == 0)
#pragma unroll
            for (int half = 0; half < 2; half++)
                st_shared_4(base + MAXIMA + 4 * (row + 8 * half), __float_as_uint(rows.max[half]));
        fence_proxy_async();
        __syncwarp();
        p_full(base).arrive_warp(step);
    }

    /* Takes over the maxima that the other warpgroup has found. */
    __device__ __forceinline__ void follow_maxima(bool has_o) {
        const float unit = exponent_unit(a.in);
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float m = __uint_as_float(ld_shared_4(base + MAXIMA + 4 * (local_row() + 8 * half)));
            factor[half] = m == rows.max[half] ? 1.0f : ex2_approx((rows.max[half] - m) * unit);
            rows.max[half] = m;
            rows.sum[half] *= factor[half];
        }
        if (!__any_sync(0xffffffff, factor[0] != 1.0f || factor[1] != 1.0f))
            return;
        wgmma_wait_group<0>(s); /* S is not touched, but no register of O changes beside a product */
        rows.settled = __all_sync(0xffffffff, rows.max[0] > MINUS_INF && rows.max[1] > MINUS_INF);
        if (has_o)
            rescale(o, factor);
    }
    __device__ __forceinline__ void take_others(uint32_t step) {
        p_full(base).wait(step);
        follow_maxima(step > 0);
        wgmma_fence();
        multiply_others_pv(step);
        wgmma_commit_group();
    }
    __device__ __forceinline__ void release(uint32_t step, int what) const { empty(base, what).arrive_warp(step); }

    /* O of the item, and its rows' maxima and sums. */
    __device__ __forceinline__ void compute(const struct item &at) {
        const int full_last = (last_key(a.in, at.sequence(), at.first_row / a.in.group) + 1) / BLOCK_N;
        const uint32_t steps = (uint32_t)(at.last_tile - at.first_tile);
        int tile = at.last_tile - 1 - own;
        if (own == 0)
            clear_tail(tile);
#pragma unroll 1
        for (uint32_t step = (uint32_t)own; step < steps; step += 2, tile -= 2) {
            wgmma_fence();
            multiply_qk(step);
            wgmma_commit_group();
            if (step > 0)
                take_others(step - 1);
            wgmma_wait_group<0>(s);
            if (step > 0) {
                wgmma_wait_group<0>(o);
                release(step - 1, own);
            }
            release(step, OF_REST);
            scores_to_p(step, tile, tile >= full_last);
            publish_p(step);
            wgmma_fence();
            multiply_pv(step);
            wgmma_commit_group();
            wgmma_wait_group<0>(o);
            release(step, own);
        }
        if ((steps - 1) % 2 != (uint32_t)own) {
            take_others(steps - 1);
            wgmma_wait_group<0>(o);
        }
    }

    /* Both warpgroups' sums of the thread's rows. Then all products are complete. */
    __device__ __forceinline__ void add_sums(float (&sum)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            sum[half] = quad_sum(rows.sum[half]);
            if (threadIdx.x % 4 == 0)
                st_shared_4(base + SUMS + 4 * (own * BLOCK_M + local_row() + 8 * half), __float_as_uint(sum[half]));
        }
        barrier_sync(CONSUMERS_BARRIER, 256);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t at = base + SUMS + 4 * (local_row() + 8 * half);
            sum[half] = __uint_as_float(ld_shared_4(at)) + __uint_as_float(ld_shared_4(at + 4 * BLOCK_M));
        }
    }

    /* The end of the rows: lse, and the output by way of Q's memory. */
    __device__ __forceinline__ void store(const struct item &at, const float (&sum)[2], bool computed) const {
        const float unit = exponent_unit(a.in);
        const int lane = threadIdx.x % 32, warp_row = local_row() - lane / 4, count = at.num_rows(a.in);
        const int begin = VARLEN ? find_packed_q(a.in, at.batch).begin : 0;
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = local_row() + 8 * half, row = (at.first_row + r) / a.in.group;
            const int head = at.head_kv * a.in.group + (at.first_row + r) % a.in.group;
            inverse[half] = end_softmax(
                a.in, own == 0 && lane % 4 == 0 && r < count, VARLEN ? 0 : at.batch, head, begin + row, sum[half],
                [&] { return MAXIMA_BARE ? rows.max[half] * unit * LN_2 : rows.max[half]; },
                [&](float x) { return lg2_approx(x) * LN_2; });
        }
        const panels<BLOCK_M> to = q_tile(base).panel(own * OWN_PANELS);
#pragma unroll
        for (int i = 0; i < HEAD_DIM_V / 8; i += 2) {
            uint32_t word[4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                word[e] = computed ? pack(o[4 * i + 2 * e] * inverse[e % 2], o[4 * i + 2 * e + 1] * inverse[e % 2]) : 0;
            stmatrix_x4(to.panel(i / 8).panel_chunk(warp_row + lane % 16, i % 8 + lane / 16), word);
        }
        __syncwarp();
#pragma unroll 4
        for (int r = warp_row; r < min(warp_row + 16, count); r++) {
            uint32_t word[4];
            ld_shared_16(word, to.chunk(r, lane));
            char *const out = a.in.out.data + (offset_of(at, a.in.out, r) + own * HEAD_DIM_V + lane * 8) * 2;
            *(uint4 *)out = make_uint4(word[0], word[1], word[2], word[3]);
        }
    }

    /* Of a split: the rows' maxima and sums, and the sums of P V that are relative to them. */
    __device__ __forceinline__ void store_part(const struct item &at, const float (&sum)[2], bool computed) const {
        const int begin = VARLEN ? find_packed_q(a.in, at.batch).begin : 0, count = at.num_rows(a.in);
        const int64_t rows_of_head = VARLEN ? a.in.total_q : a.in.seqlen_q;
        const int64_t before = VARLEN ? at.split : (int64_t)at.split * a.in.batch + at.batch;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = local_row() + 8 * half, row = (at.first_row + r) / a.in.group;
            const int head = at.head_kv * a.in.group + (at.first_row + r) % a.in.group;
            if (r >= count)
                continue;
            const int64_t slot = (before * a.in.heads + head) * rows_of_head + begin + row;
            if (own == 0 && threadIdx.x % 4 == 0)
                *(float2 *)&a.in.partial_rows[2 * slot] =
                    make_float2(MAXIMA_BARE ? rows.max[half] * a.in.scale : rows.max[half], sum[half]);
            float *const to = a.in.partial_out + slot * VALUE_DIM + own * HEAD_DIM_V + threadIdx.x % 4 * 2;
#pragma unroll
            for (int i = 0; i < HEAD_DIM_V / 8; i++)
                *(float2 *)(to + i * 8) =
                    computed ? make_float2(o[4 * i + 2 * half], o[4 * i + 2 * half + 1]) : make_float2(0, 0);
        }
    }

    __device__ __forceinline__ void run() {
        const bool computed = [&] {
            const struct item at = read_item(base);
            if (at.first_tile >= at.last_tile)
                return false;
            load_q();
            compute(at);
            return true;
        }();
        float sum[2];
        add_sums(sum);
        const struct item at = read_item(base);
        if (SPLITS)
            store_part(at, sum, computed);
        else
            store(at, sum, computed);
    }
};

extern "C" __global__ void __launch_bounds__(HOPPER_LATENT_THREADS, 1)
    hopper_latent(const __grid_constant__ struct hopper_latent_params a) {
    extern __shared__ char shared[];
    const uint32_t base = (shared_address(shared) + 1023) / 1024 * 1024;
    if (threadIdx.x == 0) {
        prefetch_tensormap(&a.k_map);
        init_barriers(base);
        write_item(base, find_item(a));
    }
    __syncthreads();
    const bool none = read_item(base).num_rows(a.in) <= 0;
    if (threadIdx.x < 128) {
        setmaxnreg_dec<HOPPER_LATENT_PRODUCER_REGISTERS>();
        if (threadIdx.x < BOXES && !none)
            producer(a, base).run();
        else if (threadIdx.x >= 32 && !SPLITS)
            clear_unused_of_grid(a.in, a.in.heads, threadIdx.x - 32, 96);
    } else {
        setmaxnreg_inc<HOPPER_LATENT_CONSUMER_REGISTERS>();
        if (!none)
            consumer(a, base).run();
    }
}
