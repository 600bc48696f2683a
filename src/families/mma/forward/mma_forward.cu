/* mma_forward.cu: the family's production forward, with every feature of the library, for 16-bit dtypes.
 *
 * Idea: FlashAttention-2 (Dao, 2023): a block owns BLOCK_M query rows and walks the keys once with an online softmax;
 * scores and P never leave registers, since the accumulator of S = Q K^T has the layout of the left operand of
 * P V. Each warp owns 16 * ROW_TILES rows, so that every fragment of K and V loaded from shared memory feeds ROW_TILES
 * matrix instructions: with one, ldmatrix is the bound (32 FLOPs a byte are needed, 16 rows give 16). Where nothing
 * is masked or added, P is made with the maxima of the tiles before (an idea of FlashAttention-4, taken
 * further): no row waits for its maximum, and only a tile whose P sums up to more than SUM_MAX is done again with
 * the maxima raised. The result is the same, because sum and output use the same stale maximum.
 *
 * Tile: BLOCK_M = 16 * ROW_TILES * WARPS rows x BLOCK_N keys. Lane l of a warp holds rows l / 4 and l / 4 + 8 of each
 * row tile and columns 2 (l % 4), +1 of each group of eight.
 *
 * Shared memory: Q [BLOCK_M][HEAD_DIM] (later the output [BLOCK_M][HEAD_DIM_V]), K [STAGES][BLOCK_N][HEAD_DIM],
 * V [STAGES][BLOCK_N][HEAD_DIM_V], then the list of visible keys or active tiles where there is one. Rows are chunks of
 * 16 bytes, permuted by an exclusive or with bits of the row (swizzle) so that the eight rows of an ldmatrix fall into
 * different banks.
 *
 * Barriers: one per tile. After it, tile t is there for all, and the buffer of tile t - 1 may be filled again.
 *
 * Registers: O HEAD_DIM_V / 2 * ROW_TILES, S BLOCK_N / 2 * ROW_TILES; the plan keeps the sum below 200. */
#include "cuda/ptx/special.cuh"
#include "families/mma/forward/mma_forward.h"
#include "gpu/finite.cuh"
#include "gpu/quad.cuh"
#include "gpu/redo.cuh"
#include "gpu/unused_rows.cuh"
#include "gpu/visible.cuh"

MMA_FORWARD_CONSTANTS(GPU_CONSTANT_GIVEN)

constexpr int THREADS = 32 * WARPS;
constexpr int BLOCK_M = 16 * ROW_TILES * WARPS;
constexpr int KEY_TILES = BLOCK_N / 8;    /* groups of eight keys: one accumulator of S each */
constexpr int OUT_TILES = HEAD_DIM_V / 8; /* groups of eight columns of O */
/* Intervals, and a mask or bias without a row axis, are read once for all rows of the block: the keys that some row
 * sees are listed, and only they are loaded. */
constexpr bool KEY_LIST = KEYED;
constexpr bool TILE_LIST = BLOCK_MASKED && !KEY_LIST; /* tiles in which some row sees some key are listed */
/* Mask or bias with rows whose keys are contiguous: each warp copies those of its own rows, a tile ahead. */
constexpr bool STAGED = SCORES_ALIGNED && !KEY_LIST && ((MASK && MASK_ROWS) || (BIAS && BIAS_ROWS));
/* Nothing is added to the scores, and tiles may be full: those have a path of their own. */
constexpr bool FAST_PATH = OPTIMISTIC && MAXIMA_BARE && !STAGED && !KEY_LIST;
constexpr bool AGAIN = VARLEN || SEQUSED || CACHE; /* where the block is is read, and read again in the end */
/* A larger sum of a thread's P of one row and tile raises the maximum. */
constexpr float SUM_MAX = 64.0f;

#include "families/mma/forward/mma_forward_list.cuh"
#include "families/mma/forward/mma_forward_load.cuh"

static_assert(BLOCK_N % 16 == 0 && HEAD_DIM % 16 == 0 && HEAD_DIM_V % 16 == 0, "tiles are multiples of 16");

__device__ __forceinline__ struct place find_place(const struct gpu_forward_params &a, int place) {
    /* L2 groups are heads whose K and V fit in the second-level cache. In a group the longest rows come first. */
    int blocks = (a.seqlen_q + BLOCK_M - 1) / BLOCK_M, heads = a.heads * a.batch;
    int l2_group = place / (blocks * a.heads_per_l2_group), index = place % (blocks * a.heads_per_l2_group);
    int size = min(a.heads_per_l2_group, heads - l2_group * a.heads_per_l2_group);
    int block = index / size, head = l2_group * a.heads_per_l2_group + index % size;
    const struct sequence s = find_sequence(a, head / a.heads);
    struct place at = {s, head % a.heads, (WINDOW ? blocks - 1 - block : block) * BLOCK_M, 0, s.seqlen_k, 0, s.seqlen_k,
                       0, s.batch};
    if (WINDOW) {
        const int last_row = min(at.first_row + BLOCK_M, at.seqlen_q) - 1;
        at.first_key = first_key(a, at, at.first_row);
        at.first_full = first_key(a, at, last_row);
        at.last_key = last_key(a, at, last_row) + 1;
        at.last_full = last_key(a, at, at.first_row) + 1;
    }
    if (CACHE) {
        const struct cached_keys in_cache = find_cached_keys(a, s.batch);
        at.padding = in_cache.first_key;
        at.list = in_cache.list;
        at.first_key = max(at.first_key, at.padding);
        at.first_full = max(at.first_full, at.padding);
    }
    return at;
}

/* A row of one head of a batch. */
__device__ __forceinline__ const char *rows_of(const struct gpu_matrix &m, int batch, int row, int head) {
    return m.data + (batch * m.batch + (int64_t)row * m.row + head * m.head) * 2;
}

/* P of one tile, packed as left operands, and the sums of the thread's part of it. */
struct tile_p {
    uint32_t p[BLOCK_N / 16][ROW_TILES][4];
    float sum[ROW_TILES][2] = {};

    __device__ __forceinline__ bool outgrows() const {
        float most = 0;
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
            most = fmaxf(most, fmaxf(sum[r][0], sum[r][1]));
        return __any_sync(0xffffffff, !(most <= SUM_MAX));
    }
};

/* The rows of one warp: S, O and the running softmax. */
struct warp_rows {
    const struct gpu_forward_params &a;
    const struct place at;
    const struct score_source scores;
    const uint32_t q_tile;
    const int warp_row;  /* the warp's first, of the block's */
    const float unit;    /* of what an exponent is multiplied by */
    const uint32_t sink; /* beside sinks: read_sink(), before the keys, so that nothing waits for it */
    float s[ROW_TILES][KEY_TILES][4];
    float o[ROW_TILES][OUT_TILES][4];
    float row_max[ROW_TILES][2], row_sum[ROW_TILES][2];
    uint32_t q[HEAD_DIM / 16][ROW_TILES][4]; /* Q_IN_REGISTERS */
    bool settled;                            /* every row of the warp has seen a key */

    __device__ __forceinline__ warp_rows(const struct gpu_forward_params &params, const struct place &own,
                                         uint32_t shared)
        : a(params), at(own), scores(params, own, shared), q_tile(shared), warp_row(threadIdx.x / 32 * ROW_TILES * 16),
          unit(MAXIMA_BARE ? a.scale * LOG2_E : LOG2_E), sink(SINK ? read_sink(a.sink, own.head) : 0), settled(false) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                row_max[r][half] = MINUS_INF;
                row_sum[r][half] = 0;
            }
#pragma unroll
            for (int n = 0; n < OUT_TILES; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    o[r][n][e] = 0;
        }
    }
    /* The number of the lane's row in a row tile's half, among the block's rows. */
    __device__ __forceinline__ int local_row(int r, int half) const {
        const int lane = threadIdx.x % 32;
        return warp_row + r * 16 + half * 8 + lane / 4;
    }

    /* ---- products ---- */

    /* Q of a row tile at step k of the head dim. */
    __device__ __forceinline__ void load_q(uint32_t (&to)[4], int r, int k) const {
        const int lane = threadIdx.x % 32;
        ldmatrix_x4(to, q_tile + chunk_offset<HEAD_DIM / 8>(warp_row + r * 16 + lane % 16, 2 * k + lane / 16));
    }
    __device__ __forceinline__ void keep_q() {
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++)
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++)
                load_q(q[k][r], r, k);
    }
    /* K of keys 16 group .. 16 group + 15 at step k. */
    static __device__ __forceinline__ void load_k(uint32_t (&to)[4], uint32_t k_tile, int group, int k) {
        const int lane = threadIdx.x % 32, key = lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
        ldmatrix_x4(to, k_tile + chunk_offset<HEAD_DIM / 8>(key, 2 * k + half) + group * 16 * HEAD_DIM * 2);
    }
    /* S of 16 keys += Q K^T of one step. */
    __device__ __forceinline__ void add_qk(const uint32_t (&left)[ROW_TILES][4], uint32_t k_tile, int group, int k) {
        uint32_t b[4];
        load_k(b, k_tile, group, k);
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            mma_16x8x16(s[r][2 * group], left[r], b[0], b[1]);
            mma_16x8x16(s[r][2 * group + 1], left[r], b[2], b[3]);
        }
    }
    /* S = Q K^T. */
    __device__ __forceinline__ void multiply_qk(uint32_t k_tile) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    s[r][n][e] = 0;
        /* unrolled, but where registers are scarce: fewer addresses are held at a time */
        constexpr int steps = HEAD_DIM > 192 && BLOCK_N == 16 ? 2 : HEAD_DIM / 16;
#pragma unroll steps
        for (int k = 0; k < HEAD_DIM / 16; k++) {
            uint32_t left[ROW_TILES][4];
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                if (Q_IN_REGISTERS)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        left[r][e] = q[k][r][e];
                else
                    load_q(left[r], r, k);
            }
#pragma unroll
            for (int group = 0; group < BLOCK_N / 16; group++)
                add_qk(left, k_tile, group, k);
        }
    }
    /* The same of 16 keys alone, where Q is in registers. */
    __device__ __forceinline__ void multiply_qk_group(uint32_t k_tile, int group) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int e = 0; e < 8; e++)
                s[r][2 * group + e / 4][e % 4] = 0;
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; k++)
            add_qk(q[k], k_tile, group, k);
    }
    /* O += P V for keys 16 step .. 16 step + 15. */
    __device__ __forceinline__ void multiply_pv(const uint32_t (&p)[ROW_TILES][4], uint32_t v_tile, int step) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < OUT_TILES; n += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, v_tile + chunk_offset<HEAD_DIM_V / 8>(lane % 16, n + lane / 16) +
                                     step * 16 * HEAD_DIM_V * 2);
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                mma_16x8x16(o[r][n], p[r], b[0], b[1]);
                mma_16x8x16(o[r][n + 1], p[r], b[2], b[3]);
            }
        }
    }

    /* ---- scores ---- */

    /* Applies scale, softcap and bias: scores are then in natural units (where MAXIMA_BARE, they stay as the
     * products are). */
    __device__ __forceinline__ void finish_scores(const struct tile_keys &keys) {
        const int column = threadIdx.x % 4 * 2;
        if (MAXIMA_BARE)
            return;
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int local = local_row(r, half), row = min(at.first_row + local, at.seqlen_q - 1);
                const char *bias = scores.bias + (int64_t)row * a.bias.row * BIAS_BYTES;
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++) {
                    float b[2];
                    if (STAGED && BIAS)
                        scores.staged_bias(b, local, n);
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        const int j = n * 8 + column + c;
                        float x = cap_score(a, s[r][n][half * 2 + c] * a.scale);
                        if (BIAS && !BIAS_ROWS) {
                            x += keys.bias[j];
                        } else if (BIAS && STAGED) {
                            x += b[c];
                        } else if (BIAS) {
                            /* no branch, so that few registers wait for reads; keys past the last are hidden */
                            const int key = KEY_LIST ? keys.index[j] : min(keys.first + j, at.seqlen_k - 1);
                            x += bias_value(bias + (int64_t)key * a.bias.key * BIAS_BYTES);
                        }
                        s[r][n][half * 2 + c] = x;
                    }
                }
            }
    }

    /* Those of a lane's keys of a tile that the runs of a row hold: bit 2 n + c is of column 8 n + `column` + c. */
    __device__ __forceinline__ uint32_t keys_of_row(const struct tile_keys &keys, int row, int column) const {
        const struct row_ranges ranges = ranges_of_row(a, at.batch, at.q_begin, at.head, row);
        return keys_held<2 * KEY_TILES>(a, ranges, [&](int i) {
            const int j = i / 2 * 8 + column + i % 2;
            return KEY_LIST ? keys.index[j] : keys.first + j;
        });
    }

    /* Keys that are not visible become -inf. */
    __device__ __forceinline__ void hide_keys(const struct tile_keys &keys) {
        const int column = threadIdx.x % 4 * 2;
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t local = local_row(r, half);
                const int row = at.first_row + (int)local;
                const int from = CACHE ? max(first_key(a, at, row), at.padding) : first_key(a, at, row);
                const int first = from - keys.first, last = last_key(a, at, row) - keys.first;
                const int inside = min(row, at.seqlen_q - 1);
                const char *mask = scores.mask + (int64_t)inside * a.mask.row;
                const uint32_t held = ROW_RUNS ? keys_of_row(keys, inside, column) : 0;
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++) {
                    const uint32_t seen = MASK && STAGED ? scores.staged_mask(local, n) : 0;
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        const int j = n * 8 + column + c;
                        const uint32_t rows = KEY_LIST ? keys.rows[j] : 0; /* of the block: the first, and how many */
                        bool visible = KEY_LIST ? local - (rows & 0xffff) < rows >> 16 : j >= first && j <= last;
                        if (MASK && STAGED)
                            visible = visible && (seen >> c * 8 & 0xff);
                        else if (MASK && MASK_ROWS)
                            visible =
                                visible && mask[(int64_t)(KEY_LIST ? keys.index[j] : keys.first + j) * a.mask.key];
                        if (ROW_RUNS)
                            visible = visible && (held >> (2 * n + c) & 1);
                        if (PAGED && keys.missing)
                            visible = visible && !tile_pages(q_tile).is_missing(a.cache, keys.turn, j);
                        if (!visible)
                            s[r][n][half * 2 + c] = MINUS_INF;
                    }
                }
            }
    }

    /* ---- online softmax ---- */

    /* Raises the running maxima where a row exceeds them, and rescales what depends on them. */
    __device__ __forceinline__ void raise_maxima() {
        bool outgrown = false;
        float next[ROW_TILES][2];
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float m = s[r][0][half * 2];
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
                    for (int c = 0; c < 2; c++)
                        m = fmaxf(m, s[r][n][half * 2 + c]);
                m = quad_max(m);
                next[r][half] = fmaxf(m, row_max[r][half]);
                outgrown = outgrown || next[r][half] > row_max[r][half];
            }
        if (!__any_sync(0xffffffff, outgrown))
            return;
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float m = row_max[r][half],
                            factor = next[r][half] == m ? 1.0f : ex2_approx((m - next[r][half]) * unit);
                row_max[r][half] = next[r][half];
                row_sum[r][half] *= factor;
#pragma unroll
                for (int n = 0; n < OUT_TILES; n++) {
                    o[r][n][half * 2] *= factor;
                    o[r][n][half * 2 + 1] *= factor;
                }
            }
    }

    /* Makes P of keys 16 step .. 16 step + 15 from their scores, and adds to the sums. `shift` is subtracted: max *
     * unit where MAXIMA_BARE, else max. */
    __device__ __forceinline__ void make_p(struct tile_p &t, const float (&shift)[ROW_TILES][2], int step) const {
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                float w[4];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float x = s[r][2 * step + n][e], subtracted = shift[r][e / 2];
                    w[e] = ex2_approx(MAXIMA_BARE ? __fmaf_rn(x, unit, -subtracted) : (x - subtracted) * unit);
                    t.sum[r][e / 2] += w[e];
                }
                t.p[step][r][2 * n] = pack(w[0], w[1]);
                t.p[step][r][2 * n + 1] = pack(w[2], w[3]);
            }
    }

    /* Makes P of a full tile with the present maxima: no row waits for its maximum, and most tiles raise none.
     * Returns false where one must be raised: P is then made again. */
    __device__ __forceinline__ bool make_p_fast(struct tile_p &t, uint32_t k_tile) {
        float shift[ROW_TILES][2];
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                shift[r][half] = row_max[r][half] * unit;
        if (!Q_IN_REGISTERS)
            multiply_qk(k_tile);
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; step++) {
            if (Q_IN_REGISTERS)
                multiply_qk_group(k_tile, step);
            make_p(t, shift, step);
        }
        return !t.outgrows();
    }
    /* Makes P of any tile. With `partial`, pairs are tested one by one. */
    __device__ __forceinline__ void make_p_of_tile(struct tile_p &t, uint32_t k_tile, const struct tile_keys &keys,
                                                   bool partial) {
        bool done = FAST_PATH && settled && !partial && make_p_fast(t, k_tile);
        bool careful = !OPTIMISTIC || !settled || FAST_PATH;
        while (!done) {
            multiply_qk(k_tile);
            finish_scores(keys);
            if (partial)
                hide_keys(keys);
            if (careful)
                raise_maxima();
            float shift[ROW_TILES][2];
            bool seen = true;
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float m = row_max[r][half];
                    seen = seen && m != MINUS_INF;
                    shift[r][half] = m == MINUS_INF ? 0.0f : MAXIMA_BARE ? m * unit : m;
                    t.sum[r][half] = 0;
                }
            settled = __all_sync(0xffffffff, seen);
#pragma unroll
            for (int step = 0; step < BLOCK_N / 16; step++)
                make_p(t, shift, step);
            done = careful || !t.outgrows();
            careful = true;
        }
    }
    __device__ __forceinline__ void add_pv(const struct tile_p &t, uint32_t v_tile) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                row_sum[r][half] += t.sum[r][half];
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; step++)
            multiply_pv(t.p[step], v_tile, step);
    }

    /* ---- results ---- */

    /* Ends the warp's rows: lse, and O to the warp's own part of Q's shared memory. */
    __device__ __forceinline__ void end_rows(const struct place &then) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = local_row(r, half);
                const float sum = quad_sum(row_sum[r][half]);
                const float inverse = end_softmax(
                    a, lane % 4 == 0 && then.first_row + row < then.seqlen_q, then.batch, then.head,
                    (int64_t)(then.q_begin + then.first_row + row), sum,
                    [&] { return row_max[r][half] * (unit * LN_2); }, [&](float x) { return __logf(x); }, sink);
#pragma unroll
                for (int n = 0; n < OUT_TILES; n++)
                    st_shared_4(q_tile + chunk_offset<HEAD_DIM_V / 8>(row, n) + lane % 4 * 4,
                                pack(o[r][n][half * 2] * inverse, o[r][n][half * 2 + 1] * inverse));
            }
        __syncwarp();
    }
    __device__ __forceinline__ void load_out(uint32_t (&word)[4], int index) const {
        const int row = warp_row + index / (HEAD_DIM_V / 8);
        ld_shared_16(word, q_tile + chunk_offset<HEAD_DIM_V / 8>(row, index % (HEAD_DIM_V / 8)));
    }
    /* Stores O to global memory. With REDO it returns a bit for each row that holds NaN. */
    __device__ __forceinline__ uint32_t store_rows(const struct place &then) const {
        constexpr int chunks = HEAD_DIM_V / 8;
        uint32_t spoiled = 0, word[4];
        if (REDO && out_over_q(a)) {
#pragma unroll 1
            for (int index = threadIdx.x % 32; index < ROW_TILES * 16 * chunks; index += 32) {
                load_out(word, index);
                spoiled |= nan_bit(word, index / chunks);
            }
            spoiled = redo_or(spoiled);
        }
        char *out = a.out.data + (then.batch * a.out.batch + (int64_t)(then.q_begin + then.first_row) * a.out.row +
                                  then.head * a.out.head) *
                                     2;
        for (int index = threadIdx.x % 32; index < ROW_TILES * 16 * chunks; index += 32) {
            const int n = index / chunks, row = warp_row + n, chunk = index % chunks;
            const int count = min(a.head_dim_v - chunk * 8, 8);
            if (then.first_row + row >= then.seqlen_q || count <= 0)
                continue;
            load_out(word, index);
            if (REDO)
                spoiled |= nan_bit(word, n);
            if (REDO && spoiled >> n & 1)
                continue;
            store_words(out + row * a.out.row * 2 + chunk * 16, word, count);
        }
        return REDO ? redo_or(spoiled) : 0;
    }
    /* A bit for each row of the warp that has become NaN by a key which it does not see. */
    __device__ __forceinline__ void redo_rows(const struct place &then, uint32_t spoiled) const {
        for_each_bit(spoiled, [&](int n) {
            const int row = then.first_row + warp_row + n;
            if (row < then.seqlen_q)
                redo_output(a, find_sequence(a, then.batch), then.head, then.head / a.group, row, then.first_key,
                            then.last_key);
        });
    }
};

/* The block's way through its keys. */
struct key_walk : warp_rows {
    const tile_source<HEAD_DIM / 8, BLOCK_N> k_source;
    const tile_source<HEAD_DIM_V / 8, BLOCK_N> v_source;
    const int first_tile, last_tile;
    struct key_list keys;   /* KEY_LIST */
    struct tile_list tiles; /* TILE_LIST */
    const struct tile_pages pages;
    bool q_kept;

    __device__ __forceinline__ key_walk(const struct gpu_forward_params &params, const struct place &own, char *shared)
        : warp_rows(params, own, shared_address(shared)),
          k_source(rows_of(a.k, CACHE ? at.list : at.batch, at.k_begin, at.head / a.group), a.k.row, a.head_dim),
          v_source(rows_of(a.v, CACHE ? at.list : at.batch, at.k_begin, at.head / a.group), a.v.row, a.head_dim_v),
          first_tile(at.first_key / BLOCK_N), last_tile((at.last_key + BLOCK_N - 1) / BLOCK_N),
          keys(shared, at.first_key), tiles{(uint16_t *)(shared + MMA_FORWARD_LIST_OFFSET), 0}, pages(shared),
          q_kept(false) {
        if (PAGED)
            pages.find_sequence(a, at.batch);
    }

    __device__ __forceinline__ uint32_t k_tile(int t) const {
        return q_tile + MMA_FORWARD_Q_BYTES + t % STAGES * BLOCK_N * HEAD_DIM * 2;
    }
    __device__ __forceinline__ uint32_t v_tile(int t) const {
        return q_tile + MMA_FORWARD_Q_BYTES + STAGES * BLOCK_N * HEAD_DIM * 2 + t % STAGES * BLOCK_N * HEAD_DIM_V * 2;
    }
    /* The keys of the t-th tile. Without a list tiles descend: partial tiles come first, while the pipeline fills. */
    __device__ __forceinline__ struct tile_keys keys_of(int t) const {
        if (KEY_LIST)
            return keys.tile(t);
        const int first = (TILE_LIST ? tiles.tile(t) : last_tile - 1 - t) * BLOCK_N;
        const bool cut = first < at.first_full || first + BLOCK_N > at.last_full;
        return {first, min(at.seqlen_k - first, BLOCK_N), cut || (TILE_LIST && !tiles.is_full(t)), 0, 0, 0, t, false};
    }
    /* PAGED: finds the entries of the t-th tile's keys. */
    __device__ __forceinline__ void look_up(int t, int count) const {
        if (!PAGED || t >= count || (int)threadIdx.x >= BLOCK_N)
            return;
        const int n = threadIdx.x;
        const struct tile_keys of = keys_of(t);
        const int key = KEY_LIST ? of.index[n] : of.first + n;
        pages.look_up(a.cache, t, n, n < of.count && key >= at.first_key ? key : -1);
    }
    __device__ __forceinline__ void fetch(int t, int count) const {
        if (t < count) {
            const struct tile_keys next = keys_of(t);
            if (PAGED) {
                const int head = at.head / a.group;
                k_source.load_paged(k_tile(t), pages, t, a.cache, a.k, a.cache.k_new, at.batch, head);
                v_source.load_paged(v_tile(t), pages, t, a.cache, a.v, a.cache.v_new, at.batch, head);
            } else if (KEY_LIST) {
                k_source.load_listed(k_tile(t), next.index, next.count);
                v_source.load_listed(v_tile(t), next.index, next.count);
            } else {
                k_source.load(k_tile(t), next.first, at.seqlen_k - next.first);
                v_source.load(v_tile(t), next.first, at.seqlen_k - next.first);
            }
        }
        look_up(t + 1, count);
        cp_async_commit();
    }

    __device__ __forceinline__ void add_tiles(int count) {
        if (STAGED && count)
            scores.stage(a, at, warp_row, keys_of(0));
        if (PAGED) {
            look_up(0, count);
            cp_async_commit();
            cp_async_wait<0>();
            __syncthreads();
        }
#pragma unroll
        for (int t = 0; t < STAGES - 1; t++)
            fetch(t, count);
#pragma unroll 1
        for (int t = 0; t < count; t++) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();
            fetch(t + STAGES - 1, count);
            if (Q_IN_REGISTERS && !q_kept)
                keep_q();
            q_kept = true;
            struct tile_keys now = keys_of(t);
            if (PAGED)
                now.missing = pages.any_missing(a.cache, t);
            struct tile_p p;
            make_p_of_tile(p, k_tile(t), now, (KEY_LIST ? keys.is_partial(at, now) : now.partial) || now.missing);
            if (STAGED) {
                __syncwarp();
                if (t + 1 < count)
                    scores.stage(a, at, warp_row, keys_of(t + 1));
                cp_async_commit();
            }
            add_pv(p, v_tile(t));
        }
    }

    /* Walks the keys that some row sees, as many at a time as the list holds. */
    __device__ __forceinline__ void add_listed_keys() {
        keys.find_intervals(a, at);
        for (;;) {
            keys.extend(a, at, scores);
            const bool last_round = keys.next_key >= at.last_key;
            const int count = last_round ? (keys.count + BLOCK_N - 1) / BLOCK_N : keys.count / BLOCK_N;
            if (last_round)
                keys.pad();
            add_tiles(count);
            if (last_round)
                break;
            keys.drop(count * BLOCK_N);
        }
    }
    /* The tiles that the mask does not hide. */
    __device__ __forceinline__ void add_listed_tiles() {
        const uint8_t *block_mask = block_mask_of(a, at);
        for (tiles.segment = first_tile; tiles.segment < last_tile; tiles.segment += MMA_FORWARD_TILES) {
            __syncthreads(); /* the list and the buffers of the segment before are free */
            add_tiles(tiles.fill(block_mask, min(tiles.segment + MMA_FORWARD_TILES, last_tile)));
        }
    }
    __device__ __forceinline__ void run() {
        if (KEY_LIST)
            add_listed_keys();
        else if (TILE_LIST)
            add_listed_tiles();
        else
            add_tiles(last_tile - first_tile);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    mma_forward(const __grid_constant__ struct gpu_forward_params a) {
    extern __shared__ __align__(128) char shared[];
    const struct place at = find_place(a, (int)blockIdx.x);
    if (at.first_row == 0)
        clear_unused_of_forward(a, at.batch, at.head, threadIdx.x, THREADS);
    if (at.first_row >= at.seqlen_q)
        return;
    struct key_walk walk(a, at, shared);
    const tile_source<HEAD_DIM / 8, BLOCK_M> q_source(rows_of(a.q, at.batch, at.q_begin + at.first_row, at.head),
                                                      a.q.row, a.head_dim);
    q_source.load(shared_address(shared), 0, at.seqlen_q - at.first_row);
    cp_async_commit(); /* blocks without a tile wait for it too, before the output takes its place */
    walk.run();
    cp_async_wait<0>();
    __syncthreads(); /* Q's place becomes the output's */
    /* What is read anew is not kept: registers are short in the loop. */
    const struct place then = AGAIN ? find_place(a, (int)ctaid_x_reread()) : at;
    walk.end_rows(then);
    const uint32_t spoiled = walk.store_rows(then);
    if (REDO)
        walk.redo_rows(AGAIN ? then : find_place(a, (int)ctaid_x_reread()), spoiled);
}
