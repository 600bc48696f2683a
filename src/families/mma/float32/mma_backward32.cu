/* mma_backward32.cu: gradients of attention on float32 tensors by 3xTF32 products (mma_tf32.cuh).
 *
 * Idea: two passes of one text, and no sums in memory: blocks that own query rows walk the keys for dQ; blocks that own
 * keys walk the rows of all query heads of their KV head for dK and dV. Each makes the scores it needs anew, seven
 * products in place of five, and every result is summed in registers in a fixed order, so all of it is deterministic
 * (but for the gradient of a bias that heads or batches share, which is added in memory: DETERMINISTIC in turns). "Own"
 * is what the block keeps, "other" what it walks:
 *
 *               own 1   own 2   other 1   other 2   S = own 1 other 1^T, dP = own 2 other 2^T (or their transposes)
 *   rows        Q       dO      K         V         dQ += dS other 1
 *   keys        K       V       Q         dO        dK += dS other 1, dV += P other 2
 *
 * Tile: 16 WARPS / SHARE own x BLOCK other. Above head dim 128 the sums of 16 own would fill the registers: two warps
 * make the same scores, and each sums half of the columns. Lane l of a warp holds own l / 4 and l / 4 + 8 of its 16 and
 * others 2 (l % 4), +1 of each group of eight: accumulators of scores are the left operands of the sums.
 *
 * Shared memory: own 1, own 2, other 1, other 2, then key bounds of two steps' others: of keys, or lse and delta of
 * rows.
 *
 * Barriers: three a step: the others are there; scores and dV are made, so other 2 may be loaded again; dQ or dK too,
 * so other 1 may.
 *
 * Registers: sums HEAD_DIM / 2 / SHARE and HEAD_DIM_V / 2 / SHARE, P and dS BLOCK / 2 each, and twice that for split
 * operands; beyond 64 sums dK and dV are made by launches of their own. */
#define THREADS (32 * WARPS)

#include "cuda/ptx/global.cuh"
#include "families/mma/float32/mma_backward32.h"
#include "families/mma/float32/mma_tf32.cuh"
#include "gpu/numbers.h"
#include "gpu/quad.cuh"
#include "gpu/redo_dq.cuh"
#include "gpu/scores.cuh"
#include "gpu/turns.cuh"
#include "gpu/visible.cuh"

MMA_BACKWARD32_CONSTANTS(GPU_CONSTANT_GIVEN)

#define GROUPS       (WARPS / SHARE) /* of warps: each has its own */
#define OWN          (16 * GROUPS)
#define TILES        (BLOCK / 8) /* groups of eight others */
#define OF_SCORES    (GRADIENTS & MMA_GRADIENT_OF_SCORES)
#define OF_VALUES    (GRADIENTS & MMA_GRADIENT_OF_VALUES)
#define BLOCK_MASKED (MASK && MASK_ROWS)
#define ROW_WORDS    (BIAS ? 3 : 2) /* of a row: lse, delta, and beside a bias what lse has rounded away */
#define FENCED       (OF_SCORES && OF_VALUES && (VARLEN || SOFTCAP || !ALIGNED) ? 8 : 16) /* of add_product */
#define TURN_KEYS    MMA_BACKWARD32_TURN_KEYS
static_assert(TURN_KEYS % BLOCK == 0 && (!DETERMINISTIC || (DBIAS == GPU_DBIAS_SUMS && OWN % 32 == 0)),
              "turns are of whole steps");
static_assert(4 * ROW_WORDS <= MMA_KEY_BOUNDS_BYTES, "words of rows lie where bounds of keys would");

static_assert(BLOCK % 16 == 0 && HEAD_DIM % 32 == 0 && HEAD_DIM_V % 32 == 0, "tiles are multiples of 16 and 32");
static_assert(HEAD_DIM % (16 * SHARE) == 0 && HEAD_DIM_V % (16 * SHARE) == 0 && WARPS % SHARE == 0, "equal shares");
static_assert(SHARE == 1 || ((HEAD_DIM / SHARE % 32 == 0 || HEAD_DIM == 32) &&
                             (HEAD_DIM_V / SHARE % 32 == 0 || HEAD_DIM_V == 32)),
              "addresses of a share's columns");
static_assert(BLOCK <= 32, "a lane for each row of a step");
static_assert(OWN % BLOCK == 0 && THREADS >= BLOCK, "a mask is blocked by BLOCK x BLOCK");

/* Shared memory. */
struct tiles {
    uint32_t own1, own2, other1, other2, bounds;
};
__device__ __forceinline__ struct tiles lay_out(uint32_t shared) {
    struct tiles t;
    t.own1 = shared;
    t.own2 = t.own1 + OWN * HEAD_DIM * 4;
    t.other1 = t.own2 + OWN * HEAD_DIM_V * 4;
    t.other2 = t.other1 + BLOCK * HEAD_DIM * 4;
    t.bounds = t.other2 + BLOCK * HEAD_DIM_V * 4;
    return t;
}
__device__ __forceinline__ uint32_t bounds_of(uint32_t bounds, int step) {
    return bounds + step % 2 * BLOCK * MMA_KEY_BOUNDS_BYTES;
}

/* The block's own rows or keys, and the others that window and ends leave them. */
struct place {
    struct sequence s;
    int head, head_kv; /* the query head; where keys are owned, of those of the group in turn */
    int first, own_length, other_length;
    int begin, end;           /* some own sees others begin <= j < end */
    int full_begin, full_end; /* and every own these */
};
__device__ __forceinline__ struct place find_place(const struct gpu_backward_params &a, uint32_t x, uint32_t y,
                                                   uint32_t z) {
    struct place at;
    /* causal: the longest first */
    const int block = WINDOW && !OWNS_KEYS ? a.grid_x - 1 - x : x;
    at.s = find_sequence(a.in, z);
    at.head_kv = OWNS_KEYS ? y : y / a.in.group;
    at.head = y;
    at.first = block * OWN;
    at.own_length = OWNS_KEYS ? at.s.seqlen_k : at.s.seqlen_q;
    at.other_length = OWNS_KEYS ? at.s.seqlen_q : at.s.seqlen_k;
    const int last = min(at.first + OWN, at.own_length) - 1;
#if OWNS_KEYS
    at.begin = first_row(a.in, at.s, at.first);
    at.end = last_row(a.in, at.s, last);
    at.full_begin = first_row(a.in, at.s, last);
    at.full_end = at.first + OWN <= at.own_length ? last_row(a.in, at.s, at.first) : 0;
    if (at.full_end == at.other_length)
        at.full_end = UNBOUNDED; /* rows past the end have weight 0 */
#else
    at.begin = first_key(a.in, at.s, at.first);
    at.end = last_key(a.in, at.s, last) + 1;
    at.full_begin = first_key(a.in, at.s, last);
    at.full_end = last_key(a.in, at.s, at.first) + 1;
#endif
    return at;
}

/* The element before row `row` of a head: matrices are q, k, v, out and their gradients. */
__device__ __forceinline__ char *row_of(const struct gpu_matrix &m, int batch, int64_t row, int head) {
    return m.data + (batch * m.batch + row * m.row + head * m.head) * 4;
}

/* Where the head's rows begin in the workspace's arrays. */
__device__ __forceinline__ int64_t rows_begin(const struct gpu_backward_params &a, const struct place &at) {
    return VARLEN ? backward_begin(at.s.q_begin, at.s.batch, MMA_BACKWARD_ROW_STEP) + at.head * a.rows
                  : ((int64_t)at.s.batch * a.in.heads + at.head) * a.rows;
}

/* What the mask does to the own and a step's others. */
__device__ __forceinline__ int mask_kind(const struct gpu_backward_params &a, const struct place &at, int step) {
    const uint8_t *block_mask =
        a.in.block_mask + at.s.batch * a.in.block_mask_batch + at.head / a.in.mask.group * a.in.block_mask_head;
    bool hidden = true, full = true;
#pragma unroll
    for (int n = 0; n < OWN / BLOCK; n++) {
        const int64_t own = at.first / BLOCK + n;
        if (own * BLOCK >= at.own_length)
            break;
        const int kind =
            OWNS_KEYS ? block_mask[step * a.in.block_mask_row + own] : block_mask[own * a.in.block_mask_row + step];
        hidden = hidden && kind == GPU_BLOCK_HIDDEN;
        full = full && kind == GPU_BLOCK_FULL;
    }
    return hidden ? GPU_BLOCK_HIDDEN : full ? GPU_BLOCK_FULL : GPU_BLOCK_PARTIAL;
}

/* The thread's two own keys: the rows that see them, and their bias. */
struct own_keys {
    int first[2], last[2];
    float bias[2];
};
__device__ __forceinline__ struct own_keys look_at_own(const struct gpu_backward_params &a, const struct place &at,
                                                       int own) {
    struct own_keys keys;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int j = own + half * 8;
        const struct key_bounds key = look_at_key(a.in, at.s, at.head, j);
        keys.first[half] = max(key.first, first_row(a.in, at.s, j));
        keys.last[half] = min(key.last, last_row(a.in, at.s, j));
        keys.bias[half] = key.bias;
    }
    return keys;
}

/* The next step from `step` on in which some own sees some other, -1 when there is none; what depends on its keys alone
 * is then in `bounds`. */
__device__ __forceinline__ int next_active(const struct gpu_backward_params &a, const struct place &at,
                                           [[maybe_unused]] const struct own_keys &keys, int step,
                                           [[maybe_unused]] uint32_t bounds) {
    for (; step * BLOCK < at.end; step++) {
        bool any = true;
#if BLOCK_MASKED
        any = mask_kind(a, at, step) != GPU_BLOCK_HIDDEN;
#endif
#if KEYED && OWNS_KEYS
        bool mine = false;
#    pragma unroll
        for (int half = 0; half < 2; half++)
            mine = mine || max(keys.first[half], step * BLOCK) < min(keys.last[half], step * BLOCK + BLOCK);
        any = __syncthreads_or(any && mine);
#elif KEYED
        bool mine = false;
        if (any && threadIdx.x < BLOCK) {
            const struct key_bounds key = look_at_key(a.in, at.s, at.head, step * BLOCK + (int)threadIdx.x);
            st_shared_4(bounds + threadIdx.x * 4, (uint32_t)key.first);
            st_shared_4(bounds + (BLOCK + threadIdx.x) * 4, (uint32_t)key.last);
            st_shared_4(bounds + (2 * BLOCK + threadIdx.x) * 4, __float_as_uint(key.bias));
            mine = max(key.first, at.first) < min(key.last, at.first + OWN);
        }
        any = __syncthreads_or(mine);
#endif
        if (any)
            return step;
    }
    return -1;
}

/* ---- loads ---- */

__device__ __forceinline__ void load_own(const struct gpu_backward_params &a, const struct place &at,
                                         const struct tiles &t) {
    const int64_t from = (OWNS_KEYS ? at.s.k_begin : at.s.q_begin) + (int64_t)at.first;
    const struct gpu_matrix &one = OWNS_KEYS ? a.in.k : a.in.q, &two = OWNS_KEYS ? a.in.v : a.dout;
    const int head = OWNS_KEYS ? at.head_kv : at.head, rows = at.own_length - at.first;
    load_tile<HEAD_DIM / 4, OWN>(t.own1, row_of(one, at.s.batch, from, head), one.row * 4, rows, a.in.head_dim);
    if (OF_SCORES)
        load_tile<HEAD_DIM_V / 4, OWN>(t.own2, row_of(two, at.s.batch, from, head), two.row * 4, rows, a.in.head_dim_v);
}
__device__ __forceinline__ void load_other1(const struct gpu_backward_params &a, const struct place &at,
                                            const struct tiles &t, int step) {
    const int64_t from = (OWNS_KEYS ? at.s.q_begin : at.s.k_begin) + (int64_t)step * BLOCK;
    const struct gpu_matrix &one = OWNS_KEYS ? a.in.q : a.in.k;
    if (step >= 0)
        load_tile<HEAD_DIM / 4, BLOCK>(t.other1, row_of(one, at.s.batch, from, OWNS_KEYS ? at.head : at.head_kv),
                                       one.row * 4, at.other_length - step * BLOCK, a.in.head_dim);
    cp_async_commit();
}
/* And the words of rows, into the key bounds of the step they belong to. */
__device__ __forceinline__ void load_other2(const struct gpu_backward_params &a, const struct place &at,
                                            const struct tiles &t, int step, [[maybe_unused]] uint32_t bounds) {
    const int64_t from = (OWNS_KEYS ? at.s.q_begin : at.s.k_begin) + (int64_t)step * BLOCK;
    const struct gpu_matrix &two = OWNS_KEYS ? a.dout : a.in.v;
    if (step >= 0) {
        load_tile<HEAD_DIM_V / 4, BLOCK>(t.other2, row_of(two, at.s.batch, from, OWNS_KEYS ? at.head : at.head_kv),
                                         two.row * 4, at.other_length - step * BLOCK, a.in.head_dim_v);
#if OWNS_KEYS
        const int n = threadIdx.x * 4 % BLOCK;
        const float *rows = threadIdx.x * 4 < BLOCK ? a.lse_rows : a.delta_rows;
        if (BIAS && threadIdx.x * 4 >= 2 * BLOCK)
            rows = a.low_rows;
        if (threadIdx.x * 4 < ROW_WORDS * BLOCK)
            cp_async_16(bounds + threadIdx.x * 16, rows + rows_begin(a, at) + step * BLOCK + n);
#endif
    }
    cp_async_commit();
}

/* ---- scores ---- */

#if DBIAS == GPU_DBIAS_DIRECT || DBIAS == GPU_DBIAS_SUMS
/* One element of the bias' gradient, or of its sums. */
__device__ __forceinline__ void add_dbias(const struct gpu_backward_params &a, const struct place &at, int64_t row,
                                          int64_t key, float x) {
    const int64_t batch = at.s.batch, head = at.head / a.in.bias.group;
#    if DBIAS == GPU_DBIAS_SUMS
    red_add(a.dbias_sums + batch * a.dbias_batch + head * a.dbias_head + row * a.dbias_row + key * a.dbias_key, x);
#    else
    ((float *)a.dbias.data)[batch * a.dbias.batch + head * a.dbias.head + row * a.dbias.row + key * a.dbias.key] = x;
#    endif
}
#endif

#if DETERMINISTIC
/* Blocks of the same rows add to the gradient of a bias that their heads or batches share in the order of their
 * tickets, TURN_KEYS keys at a time: a semaphore counts those that have added. */
__device__ __forceinline__ int *semaphore_of(const struct gpu_backward_params &a, const struct place &at, int index) {
    const int batch = a.dbias_batches == 1 ? 0 : at.s.batch, count = (a.in.seqlen_k + TURN_KEYS - 1) / TURN_KEYS;
    return a.dbias_semaphores +
           (((int64_t)batch * a.dbias_heads + at.head / a.in.bias.group) * count + index) *
               backward_semaphores(a.in.seqlen_q) +
           at.first / 32;
}
__device__ __forceinline__ int my_turn(const struct gpu_backward_params &a, const struct place &at) {
    return (a.dbias_batches == 1 ? at.s.batch * a.in.bias.group : 0) + at.head % a.in.bias.group;
}
/* Hands on the turns from `turn` until `end`, when all warps have added; a block awaits those at which it adds nothing.
 */
__device__ __forceinline__ void hand_on(const struct gpu_backward_params &a, const struct place &at, int turn,
                                        int end) {
    if (threadIdx.x == 0)
        for (; turn < end; turn++) {
            await_turn(semaphore_of(a, at, turn), my_turn(a, at));
            hand_on_turn(semaphore_of(a, at, turn), my_turn(a, at));
        }
}
#endif

/* P and what depends on the scores: p holds the products on entry, P on return; slope that of the cap. */
__device__ __forceinline__ void make_p(float (&p)[1][TILES][4], [[maybe_unused]] float (&slope)[TILES][4],
                                       const struct gpu_backward_params &a, const struct place &at,
                                       [[maybe_unused]] const struct own_keys &keys, int own,
                                       [[maybe_unused]] const float (&own_lse)[2],
                                       [[maybe_unused]] const float (&own_low)[2], uint32_t bounds, int step,
                                       bool partial) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        const int column = n * 8 + lane % 4 * 2, other = step * BLOCK + column;
        [[maybe_unused]] uint32_t lse[2], low[2], rows_first[2], rows_last[2], key_bias[2];
#if OWNS_KEYS
        ld_shared_8(lse[0], lse[1], bounds + column * 4);
        if (BIAS)
            ld_shared_8(low[0], low[1], bounds + (2 * BLOCK + column) * 4);
#elif KEYED
        ld_shared_8(rows_first[0], rows_first[1], bounds + column * 4);
        ld_shared_8(rows_last[0], rows_last[1], bounds + (BLOCK + column) * 4);
        ld_shared_8(key_bias[0], key_bias[1], bounds + (2 * BLOCK + column) * 4);
#endif
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int mine = own + half * 8;
            [[maybe_unused]] float b[2] = {0, 0};
            [[maybe_unused]] bool seen[2] = {true, true};
#if BIAS && BIAS_ROWS && OWNS_KEYS
            const float *bias = bias_of(a.in, at.s.batch, at.head) + min(mine, at.own_length - 1) * a.in.bias.key;
            b[0] = bias[min(other, at.other_length - 1) * a.in.bias.row];
            b[1] = bias[min(other + 1, at.other_length - 1) * a.in.bias.row];
#elif BIAS && BIAS_ROWS
            read_bias(b,
                      bias_of(a.in, at.s.batch, at.head) + min(mine, at.own_length - 1) * a.in.bias.row +
                          step * BLOCK * a.in.bias.key,
                      a.in.bias.key, column, at.other_length - step * BLOCK);
#elif BIAS && OWNS_KEYS
            b[0] = b[1] = keys.bias[half];
#elif BIAS
            b[0] = __uint_as_float(key_bias[0]);
            b[1] = __uint_as_float(key_bias[1]);
#endif
#if MASK && MASK_ROWS && OWNS_KEYS
            if (partial) {
                const char *mask = mask_of(a.in, at.s.batch, at.head) + min(mine, at.own_length - 1) * a.in.mask.key;
                seen[0] = mask[min(other, at.other_length - 1) * a.in.mask.row];
                seen[1] = mask[min(other + 1, at.other_length - 1) * a.in.mask.row];
            }
#elif MASK && MASK_ROWS
            if (partial)
                read_mask(seen,
                          mask_of(a.in, at.s.batch, at.head) + min(mine, at.own_length - 1) * a.in.mask.row +
                              step * BLOCK * a.in.mask.key,
                          a.in.mask.key, column, at.other_length - step * BLOCK);
#endif
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float x = p[0][n][half * 2 + c] * a.in.scale;
                if (SOFTCAP)
                    x = cap_score(a.in, x, slope[n][half * 2 + c]);
                if (BIAS)
                    x += b[c];
                x = (x - (OWNS_KEYS ? __uint_as_float(lse[c]) : own_lse[half])) * LOG2_E;
#if BIAS
                x += OWNS_KEYS ? __uint_as_float(low[c]) : own_low[half];
#endif
                x = ex2_approx(x);
#if OWNS_KEYS
                const bool visible =
                    (!KEYED && !partial) || (other + c >= keys.first[half] && other + c < keys.last[half] && seen[c]);
#else
                bool visible = !partial || (other + c >= first_key(a.in, at.s, mine) &&
                                            other + c <= last_key(a.in, at.s, mine) && seen[c]);
#    if KEYED
                visible = visible && mine >= (int)rows_first[c] && mine < (int)rows_last[c];
#    endif
#endif
                if (BIAS && DBIAS && b[c] == MINUS_INF)
                    x = 0; /* also where K is NaN; without DBIAS, REDO and hidden_keys() see to that at the end */
                p[0][n][half * 2 + c] = visible ? x : 0.0f;
            }
        }
    }
}

/* dS from dP in place; sums of the own keys' bias. */
__device__ __forceinline__ void make_ds(float (&ds)[1][TILES][4], const float (&p)[1][TILES][4],
                                        [[maybe_unused]] const float (&slope)[TILES][4],
                                        [[maybe_unused]] float (&dbias)[2], const struct gpu_backward_params &a,
                                        [[maybe_unused]] const struct place &at, [[maybe_unused]] int own,
                                        [[maybe_unused]] int share, const float (&own_delta)[2], uint32_t bounds,
                                        [[maybe_unused]] int step) {
    const int lane = threadIdx.x % 32;
#if DETERMINISTIC
    await_turn(semaphore_of(a, at, step * BLOCK / TURN_KEYS), my_turn(a, at));
#endif
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        const int column = n * 8 + lane % 4 * 2;
        [[maybe_unused]] uint32_t delta[2];
#if OWNS_KEYS
        ld_shared_8(delta[0], delta[1], bounds + (BLOCK + column) * 4);
#endif
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float weight = p[0][n][e];
            float x = weight * (ds[0][n][e] - (OWNS_KEYS ? __uint_as_float(delta[e % 2]) : own_delta[e / 2]));
            x = weight == 0.0f ? 0.0f : x; /* also where dO is not finite */
#if DBIAS == GPU_DBIAS_KEYS
            dbias[e / 2] += x;
#elif DBIAS
            const int row = own + e / 2 * 8, key = step * BLOCK + column + e % 2;
            if (share == 0 && row < at.own_length && key < at.other_length)
                add_dbias(a, at, row, key, x);
#endif
#if SOFTCAP
            x = weight == 0.0f ? 0.0f : x * slope[n][e];
#endif
            ds[0][n][e] = x;
        }
    }
}

/* One gradient of the own rows or keys. The warp's rows whose bit is set in `marked` are not written; keys become 0. */
template <int columns>
__device__ __forceinline__ void store_sums(const float (&sum)[1][columns][4], float factor, const struct gpu_matrix &to,
                                           const struct place &at, int own, int share, int num_columns,
                                           uint32_t marked) {
    if (!to.data)
        return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int mine = own + half * 8;
        const bool is_marked = marked >> (half * 8 + threadIdx.x % 32 / 4) & 1;
        if (mine >= at.own_length || (is_marked && !OWNS_KEYS))
            continue;
        float *out = (float *)row_of(to, at.s.batch, (OWNS_KEYS ? at.s.k_begin : at.s.q_begin) + (int64_t)mine,
                                     OWNS_KEYS ? at.head_kv : at.head);
#pragma unroll
        for (int n = 0; n < columns; n++)
            store_pair(out, (share * columns + n) * 8 + threadIdx.x % 4 * 2, num_columns,
                       is_marked ? 0.0f : sum[0][n][half * 2] * factor,
                       is_marked ? 0.0f : sum[0][n][half * 2 + 1] * factor);
    }
}

/* Which of the warp's rows or keys have NaN among their sums: a bit each. */
template <int columns> __device__ __forceinline__ uint32_t find_spoiled(const float (&sum)[1][columns][4]) {
    return spoiled_rows<2>([&](int half) {
        float all = 0;
#pragma unroll
        for (int n = 0; n < columns; n++)
            all += sum[0][n][2 * half] + sum[0][n][2 * half + 1];
        return all;
    });
}

/* Of keys whose gradients are NaN those that no row sees: their K is NaN, and a bias of -inf hides them. */
__device__ __forceinline__ uint32_t hidden_keys(const struct gpu_backward_params &a, const struct place &at,
                                                int warp_own, uint32_t spoiled) {
    uint32_t hidden = 0;
    for_each_bit(spoiled, [&](int n) {
        const int key = at.first + warp_own + n;
        if (key < at.own_length && !redo_is_seen(a.in, at.s, at.head_kv, key))
            hidden |= 1u << n;
    });
    return hidden;
}
/* Rows of dQ that a key which they do not see has spoiled. */
__device__ __forceinline__ void redo_rows(const struct gpu_backward_params &a, const struct place &at,
                                          const float (&own_delta)[2], int warp_own, uint32_t spoiled) {
    for_each_bit(spoiled, [&](int n) {
        const int row = at.first + warp_own + n;
        const float delta = __shfl_sync(0xffffffff, n < 8 ? own_delta[0] : own_delta[1], n % 8 * 4);
        if (row < at.own_length)
            redo_dq(a, at.s, at.head, at.head_kv, row, delta);
    });
}

/* Of owned keys: a row that sees no key has no gradient, whatever comes in and whatever it holds: its P and dS are 0,
 * but 0 times NaN is not. */
__device__ __forceinline__ void clear_empty(const struct tiles &t, uint32_t bounds) {
    const float lse = __uint_as_float(ld_shared_4(bounds + threadIdx.x % BLOCK * 4));
    if (!__any_sync(0xffffffff, lse == -MINUS_INF))
        return;
    clear_empty_rows<HEAD_DIM / 4, BLOCK>(t.other1, bounds);
    clear_empty_rows<HEAD_DIM_V / 4, BLOCK>(t.other2, bounds);
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mma_backward32(const __grid_constant__ struct gpu_backward_params a) {
    extern __shared__ __align__(128) char shared[];
    const struct tiles t = lay_out(shared_address(shared));
#if FOLDED
    uint32_t x = blockIdx.x % a.grid_x, y = blockIdx.x / a.grid_x % a.grid_y, z = blockIdx.x / a.grid_x / a.grid_y;
#else
    uint32_t x = blockIdx.x, y = blockIdx.y, z = blockIdx.z;
#endif
#if DETERMINISTIC
    /* Places in the order in which blocks begin: a block waits only for blocks that run or have ended. */
    if (threadIdx.x == 0)
        *(int *)shared = atomicAdd(a.ticket, 1);
    __syncthreads();
    const uint32_t ticket = *(const int *)shared;
    __syncthreads();
    x = ticket % a.grid_x;
    y = ticket / a.grid_x % a.grid_y;
    z = ticket / a.grid_x / a.grid_y;
    const int all_turns = (a.in.seqlen_k + TURN_KEYS - 1) / TURN_KEYS;
#endif
    struct place at = find_place(a, x, y, z);
    if (at.first >= at.own_length) {
#if DETERMINISTIC
        hand_on(a, at, 0, all_turns); /* blocks of other sequences may wait for this one */
#endif
        return;
    }
    const int share = threadIdx.x / 32 / GROUPS, warp_own = threadIdx.x / 32 % GROUPS * 16,
              own = at.first + warp_own + threadIdx.x % 32 / 4;
    load_own(a, at, t);
    cp_async_commit();
    float own_lse[2] = {0, 0}, own_low[2] = {0, 0}, own_delta[2] = {0, 0};
#if !OWNS_KEYS
#    pragma unroll
    for (int half = 0; half < 2; half++) {
        own_lse[half] = a.lse_rows[rows_begin(a, at) + own + half * 8];
        own_delta[half] = a.delta_rows[rows_begin(a, at) + own + half * 8];
        if (BIAS)
            own_low[half] = a.low_rows[rows_begin(a, at) + own + half * 8];
    }
#endif
    constexpr int columns1 = OF_SCORES ? HEAD_DIM / 8 / SHARE : 1, columns2 = OF_VALUES ? HEAD_DIM_V / 8 / SHARE : 1;
    float sum1[1][columns1][4] = {}, sum2[1][columns2][4] = {};
    int parity = 0; /* of the bounds in use */
#pragma unroll 1
    for (int g = 0; g < (OWNS_KEYS ? a.in.group : 1); g++) {
        struct own_keys keys = {};
        float dbias[2] = {0, 0};
#if OWNS_KEYS
        at.head = at.head_kv * a.in.group + g;
        keys = look_at_own(a, at, own);
#endif
        int step = next_active(a, at, keys, at.begin / BLOCK, bounds_of(t.bounds, parity));
#if DETERMINISTIC
        hand_on(a, at, 0, step < 0 ? all_turns : step * BLOCK / TURN_KEYS);
#endif
        load_other2(a, at, t, step, bounds_of(t.bounds, parity));
        load_other1(a, at, t, step);
#pragma unroll 1
        for (; step >= 0; parity ^= 1) {
            const uint32_t bounds = bounds_of(t.bounds, parity), next_bounds = bounds_of(t.bounds, parity ^ 1);
            const int next = next_active(a, at, keys, step + 1, next_bounds);
            bool partial = step * BLOCK < at.full_begin || step * BLOCK + BLOCK > at.full_end;
#if BLOCK_MASKED
            partial = partial || mask_kind(a, at, step) != GPU_BLOCK_FULL;
#endif
            float p[1][TILES][4], slope[TILES][4];
            cp_async_wait<0>();
            __syncthreads();
            if (OWNS_KEYS)
                clear_empty(t, bounds);
            multiply_scores<HEAD_DIM>(p, left_of<HEAD_DIM / 4>(t.own1, warp_own), right_of<HEAD_DIM / 4>(t.other1, 0));
            make_p(p, slope, a, at, keys, own, own_lse, own_low, bounds, step, partial);
#if OF_VALUES
            add_product<HEAD_DIM_V / 4, FENCED>(sum2, p, t.other2, share * columns2 * 8);
#endif
#if OF_SCORES
            float ds[1][TILES][4];
            multiply_scores<HEAD_DIM_V>(ds, left_of<HEAD_DIM_V / 4>(t.own2, warp_own),
                                        right_of<HEAD_DIM_V / 4>(t.other2, 0));
            make_ds(ds, p, slope, dbias, a, at, own, share, own_delta, bounds, step);
#endif
            __syncthreads();
#if DETERMINISTIC
            hand_on(a, at, step * BLOCK / TURN_KEYS, next < 0 ? all_turns : next * BLOCK / TURN_KEYS);
#endif
            load_other2(a, at, t, next, next_bounds);
#if OF_SCORES
            add_product<HEAD_DIM / 4, FENCED>(sum1, ds, t.other1, share * columns1 * 8);
            __syncthreads();
#endif
            load_other1(a, at, t, next);
            step = next;
        }
#if DBIAS == GPU_DBIAS_KEYS
#    pragma unroll
        for (int half = 0; half < 2; half++) {
            float x = dbias[half];
            x = quad_sum(x);
            if (share == 0 && threadIdx.x % 4 == 0 && own + half * 8 < at.own_length)
                a.dbias_sums[((int64_t)at.s.batch * a.in.heads + at.head) * a.in.seqlen_k + own + half * 8] = x;
        }
#endif
    }
    cp_async_wait<0>();
    uint32_t marked = 0;
    if (REDO && OWNS_KEYS)
        marked = hidden_keys(a, at, warp_own, find_spoiled(sum1) | find_spoiled(sum2));
    else if (REDO)
        marked = marked_by_any<SHARE, GROUPS>(find_spoiled(sum1), t.other1);
    if (OF_SCORES)
        store_sums(sum1, a.in.scale, OWNS_KEYS ? a.dk : a.dq, at, own, share, a.in.head_dim, marked);
    if (OF_VALUES)
        store_sums(sum2, 1.0f, a.dv, at, own, share, a.in.head_dim_v, marked);
    if (REDO && !OWNS_KEYS && share == 0 && a.dq.data)
        redo_rows(a, at, own_delta, warp_own, marked);
}
