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

#include "families/mma/float32/mma_backward32.h"
#include "families/mma/float32/mma_tf32.cuh"

MMA_BACKWARD32_CONSTANTS(GPU_CONSTANT_GIVEN)

#define GROUPS     (WARPS / SHARE) /* of warps: each has its own */
#define OWN        (16 * GROUPS)
#define OTHERS     BLOCK
#define MASK_BLOCK BLOCK
#define TILES      (BLOCK / 8) /* groups of eight others */
#define OF_SCORES  (GRADIENTS & MMA_GRADIENT_OF_SCORES)
#define OF_VALUES  (GRADIENTS & MMA_GRADIENT_OF_VALUES)
#define ROW_WORDS  (BIAS ? 3 : 2) /* of a row: lse, delta, and beside a bias what lse has rounded away */
/* Steps of add_product() between fences: fewer where registers are short. */
#define FENCED (OF_SCORES && OF_VALUES && (VARLEN || SOFTCAP || BLOCK_MASKED || !ALIGNED) ? 8 : 16)

#include "families/mma/backward/mma_owner.cuh"
#include "gpu/quad.cuh"
#include "gpu/redo_dq.cuh"

static_assert(!DETERMINISTIC || (DBIAS == GPU_DBIAS_SUMS && OWN % 32 == 0), "turns are of whole steps");
static_assert(OWNER_ROW_STEP == MMA_BACKWARD_ROW_STEP && OWNER_TURN_KEYS == MMA_BACKWARD32_TURN_KEYS, "the host's");
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

/* The words of a thread's two own rows or keys: of rows lse, the part that lse has rounded away, and delta; of keys
 * the rows first <= i < last that see them, and their bias. */
struct own_words {
    float lse[2], low[2], delta[2];
    int first[2], last[2];
    float bias[2];
};
/* And what it sums. */
struct sums {
    static constexpr int columns1 = OF_SCORES ? HEAD_DIM / 8 / SHARE : 1;
    static constexpr int columns2 = OF_VALUES ? HEAD_DIM_V / 8 / SHARE : 1;
    float one[1][columns1][4], two[1][columns2][4], dbias[2];
};

/* The words of two others of a step in shared memory, of rows or of keys. */
struct two_others {
    uint32_t lse[2], low[2];
    uint32_t first[2], last[2], bias[2];
};
__device__ __forceinline__ struct two_others read_others(uint32_t bounds, int column) {
    struct two_others o = {};
    const uint32_t at = bounds + column * 4;
    if (OWNS_KEYS) {
        ld_shared_8(o.lse[0], o.lse[1], at);
        if (BIAS)
            ld_shared_8(o.low[0], o.low[1], at + 2 * BLOCK * 4);
    } else if (KEYED) {
        ld_shared_8(o.first[0], o.first[1], at);
        ld_shared_8(o.last[0], o.last[1], at + BLOCK * 4);
        ld_shared_8(o.bias[0], o.bias[1], at + 2 * BLOCK * 4);
    }
    return o;
}

/* A bit for each of the warp's rows or keys whose sums hold NaN. */
template <int columns> __device__ __forceinline__ uint32_t find_spoiled(const float (&sum)[1][columns][4]) {
    return spoiled_rows<2>([&](int half) {
        float all = 0;
#pragma unroll
        for (int n = 0; n < columns; n++)
            all += sum[0][n][2 * half] + sum[0][n][2 * half + 1];
        return all;
    });
}

/* The state of a thread, whose warp owns 16 rows or keys. Arrays are not members: the compiler takes a structure
 * apart before it unrolls loops only where it has none. */
struct owner {
    const struct gpu_backward_params &a;
    const struct tiles t;
    struct place at;
    const int share, warp_own, own; /* own: the first of the thread's two */
    struct own_words &mine;
    struct sums &sums;
    int parity; /* of the bounds in use */

    __device__ __forceinline__ owner(const struct gpu_backward_params &params, const struct place &place,
                                     uint32_t shared, struct own_words &words, struct sums &to)
        : a(params), t(lay_out(shared)), at(place), share(threadIdx.x / 32 / GROUPS),
          warp_own(threadIdx.x / 32 % GROUPS * 16), own(at.first + warp_own + threadIdx.x % 32 / 4), mine(words),
          sums(to), parity(0) {}

    __device__ __forceinline__ uint32_t bounds_of(int which) const {
        return t.bounds + which * BLOCK * MMA_KEY_BOUNDS_BYTES;
    }

    /* ---- the walk ---- */

    __device__ __forceinline__ void look_at_own() {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int j = own + half * 8;
            const struct key_bounds key = rows_of_key(a.in, at.s, at.head, j);
            mine.first[half] = key.first;
            mine.last[half] = key.last;
            mine.bias[half] = key.bias;
        }
    }
    /* Whether keys alone let this thread's own see some of a step's others. A block that owns rows writes what
     * depends on keys alone to `bounds`. */
    __device__ __forceinline__ bool sees_some(int step, uint32_t bounds) const {
        if (OWNS_KEYS) {
            bool some = false;
#pragma unroll
            for (int half = 0; half < 2; half++)
                some = some || max(mine.first[half], step * BLOCK) < min(mine.last[half], step * BLOCK + BLOCK);
            return some;
        }
        return look_at_step(a, at, step, bounds);
    }
    __device__ __forceinline__ int next_step(int from, uint32_t bounds) const {
        return next_active(a, at, from, [&](int step) { return sees_some(step, bounds); });
    }

    /* ---- loads ---- */

    __device__ __forceinline__ void load_own() {
        const int64_t from = own_begin(at) + at.first;
        const struct gpu_matrix &one = OWNS_KEYS ? a.in.k : a.in.q, &two = OWNS_KEYS ? a.in.v : a.dout;
        const int rows = at.own_length - at.first;
        load_tile<HEAD_DIM / 4, OWN>(t.own1, row_of(one, at.s.batch, from, own_head(at)), one.row * 4, rows,
                                     a.in.head_dim);
        if (OF_SCORES)
            load_tile<HEAD_DIM_V / 4, OWN>(t.own2, row_of(two, at.s.batch, from, own_head(at)), two.row * 4, rows,
                                           a.in.head_dim_v);
        cp_async_commit();
        if (OWNS_KEYS)
            return;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            mine.lse[half] = a.lse_rows[rows_begin(a, at) + own + half * 8];
            mine.delta[half] = a.delta_rows[rows_begin(a, at) + own + half * 8];
            if (BIAS)
                mine.low[half] = a.low_rows[rows_begin(a, at) + own + half * 8];
        }
    }
    template <int columns>
    __device__ __forceinline__ void load_others(uint32_t tile, const struct gpu_matrix &m, int step, int num_columns) {
        const int64_t from = other_begin(at) + (int64_t)step * BLOCK;
        load_tile<columns / 4, BLOCK>(tile, row_of(m, at.s.batch, from, other_head(at)), m.row * 4,
                                      at.other_length - step * BLOCK, num_columns);
    }
    __device__ __forceinline__ void load_other1(int step) {
        if (step >= 0)
            load_others<HEAD_DIM>(t.other1, OWNS_KEYS ? a.in.q : a.in.k, step, a.in.head_dim);
        cp_async_commit();
    }
    /* Loads the words of rows into the key bounds of the step that they belong to. */
    __device__ __forceinline__ void load_other2(int step, uint32_t bounds) {
        const int n = threadIdx.x * 4;
        if (step >= 0)
            load_others<HEAD_DIM_V>(t.other2, OWNS_KEYS ? a.dout : a.in.v, step, a.in.head_dim_v);
        if (step >= 0 && OWNS_KEYS && n < ROW_WORDS * BLOCK) {
            const float *words = n < BLOCK ? a.lse_rows : BIAS && n >= 2 * BLOCK ? a.low_rows : a.delta_rows;
            cp_async_16(bounds + n * 4, words + rows_begin(a, at) + step * BLOCK + n % BLOCK);
        }
        cp_async_commit();
    }
    /* For owned keys: a row that sees no key has no gradient, whatever dO is and whatever the row holds. Its P and
     * dS are 0, but 0 times NaN is NaN. */
    __device__ __forceinline__ void clear_empty(uint32_t bounds) {
        const float other_lse = __uint_as_float(ld_shared_4(bounds + threadIdx.x % BLOCK * 4));
        if (!__any_sync(0xffffffff, other_lse == -MINUS_INF))
            return;
        clear_empty_rows<HEAD_DIM / 4, BLOCK>(t.other1, bounds);
        clear_empty_rows<HEAD_DIM_V / 4, BLOCK>(t.other2, bounds);
        __syncthreads();
    }

    /* ---- the gradient of a bias ---- */

    /* One element of it, or of its sums. */
    __device__ __forceinline__ void add_dbias(int64_t row, int64_t key, float x) const {
        const int64_t b = at.s.batch, h = at.head / a.in.bias.group;
        if (DBIAS == GPU_DBIAS_SUMS)
            red_add(a.dbias_sums + b * a.dbias_batch + h * a.dbias_head + row * a.dbias_row + key * a.dbias_key, x);
        else
            ((float *)a.dbias.data)[b * a.dbias.batch + h * a.dbias.head + row * a.dbias.row + key * a.dbias.key] = x;
    }
    /* Of own keys. */
    __device__ __forceinline__ void store_dbias() const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float x = quad_sum(sums.dbias[half]);
            if (share == 0 && threadIdx.x % 4 == 0 && own + half * 8 < at.own_length)
                a.dbias_sums[((int64_t)at.s.batch * a.in.heads + at.head) * a.in.seqlen_k + own + half * 8] = x;
        }
    }

    /* ---- scores ---- */

    /* Bias and mask of an own and two others, from `column` of a step on; past the end, those of the last. */
    __device__ __forceinline__ void find_bias(float (&b)[2], const struct two_others &o, int half, int step,
                                              int column) const {
        const struct gpu_scores &m = a.in.bias;
        const int64_t inside = min(own + half * 8, at.own_length - 1);
        const float *from = bias_of(a.in, at.s.batch, at.head) + inside * (OWNS_KEYS ? m.key : m.row);
        if (BIAS_ROWS && !OWNS_KEYS)
            return read_bias(b, from + step * BLOCK * m.key, m.key, column, at.other_length - step * BLOCK);
#pragma unroll
        for (int c = 0; c < 2; c++)
            b[c] = BIAS_ROWS   ? from[min(step * BLOCK + column + c, at.other_length - 1) * m.row]
                   : OWNS_KEYS ? mine.bias[half]
                               : __uint_as_float(o.bias[c]);
    }
    __device__ __forceinline__ void find_mask(bool (&seen)[2], int half, int step, int column) const {
        const struct gpu_scores &m = a.in.mask;
        const int64_t inside = min(own + half * 8, at.own_length - 1);
        const char *from = mask_of(a.in, at.s.batch, at.head) + inside * (OWNS_KEYS ? m.key : m.row);
        if (!OWNS_KEYS)
            return read_mask(seen, from + step * BLOCK * m.key, m.key, column, at.other_length - step * BLOCK);
#pragma unroll
        for (int c = 0; c < 2; c++)
            seen[c] = from[min(step * BLOCK + column + c, at.other_length - 1) * m.row];
    }
    /* Which pairs of a step row intervals and block masks show: bit 4 n + 2 half + c. */
    __device__ __forceinline__ uint32_t pairs_held(int step) const {
        const int other = step * BLOCK + threadIdx.x % 4 * 2;
        uint32_t held = 0;
#pragma unroll
        for (int half = 0; half < 2 && !OWNS_KEYS; half++) {
            const int row = min(own + half * 8, at.own_length - 1);
            const uint32_t of_row =
                keys_held<2 * TILES>(a.in, ranges_of_row(a.in, at.s.batch, at.s.q_begin, at.head, row),
                                     [&](int n) { return other + n / 2 * 8 + n % 2; });
#pragma unroll
            for (int n = 0; n < TILES; n++)
                held |= (of_row >> 2 * n & 3) << (4 * n + 2 * half);
        }
#pragma unroll
        for (int n = 0; n < 2 * TILES && OWNS_KEYS; n++) {
            const int row = min(other + n / 2 * 8 + n % 2, at.other_length - 1);
            const uint32_t of_keys = keys_held<2>(a.in, ranges_of_row(a.in, at.s.batch, at.s.q_begin, at.head, row),
                                                  [&](int half) { return own + half * 8; });
            held |= (of_keys & 1) << (n / 2 * 4 + n % 2) | (of_keys >> 1) << (n / 2 * 4 + 2 + n % 2);
        }
        return held;
    }
    /* Turns products in p into P. `slope` is that of the cap. `partial`: some own row or key may not see some other
     * of the step. */
    __device__ __forceinline__ void make_p(float (&p)[1][TILES][4], float (&slope)[TILES][4], int step, uint32_t bounds,
                                           bool partial) const {
        const uint32_t held = ROW_RUNS && partial ? pairs_held(step) : 0;
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            const int column = n * 8 + threadIdx.x % 4 * 2;
            const struct two_others o = read_others(bounds, column);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float b[2] = {0, 0};
                bool seen[2] = {true, true};
                if (BIAS)
                    find_bias(b, o, half, step, column);
                if (MASK_TILE && partial)
                    find_mask(seen, half, step, column);
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float x = cap_score(a.in, p[0][n][half * 2 + c] * a.in.scale, slope[n][half * 2 + c]);
                    if (BIAS)
                        x += b[c];
                    x = (x - (OWNS_KEYS ? __uint_as_float(o.lse[c]) : mine.lse[half])) * LOG2_E;
                    if (BIAS)
                        x += OWNS_KEYS ? __uint_as_float(o.low[c]) : mine.low[half];
                    x = ex2_approx(x);
                    const int i = own + half * 8, j = step * BLOCK + column + c;
                    bool visible;
                    if (OWNS_KEYS)
                        visible = (!KEYED && !partial) || (j >= mine.first[half] && j < mine.last[half] && seen[c]);
                    else
                        visible =
                            !partial || (j >= first_key(a.in, at.s, i) && j <= last_key(a.in, at.s, i) && seen[c]);
                    if (ROW_RUNS && partial)
                        visible = visible && (held >> (4 * n + 2 * half + c) & 1);
                    if (KEYED && !OWNS_KEYS)
                        visible = visible && i >= (int)o.first[c] && i < (int)o.last[c];
                    if (BIAS && DBIAS && b[c] == MINUS_INF)
                        x = 0; /* also where K is NaN; without DBIAS, REDO and hidden_keys() see to that at the end */
                    p[0][n][half * 2 + c] = visible ? x : 0.0f;
                }
            }
        }
    }

    /* Turns dP into dS in place, and adds to the sums of the own keys' bias. */
    __device__ __forceinline__ void make_ds(float (&ds)[1][TILES][4], const float (&p)[1][TILES][4],
                                            const float (&slope)[TILES][4], int step, uint32_t bounds) {
        if (DETERMINISTIC)
            wait_semaphore(semaphore_of(a, at, turn_of(a, step)), my_turn(a, at));
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            const int column = n * 8 + threadIdx.x % 4 * 2;
            uint32_t other_delta[2] = {0, 0};
            if (OWNS_KEYS)
                ld_shared_8(other_delta[0], other_delta[1], bounds + (BLOCK + column) * 4);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float weight = p[0][n][e];
                float x =
                    weight * (ds[0][n][e] - (OWNS_KEYS ? __uint_as_float(other_delta[e % 2]) : mine.delta[e / 2]));
                x = weight == 0.0f ? 0.0f : x; /* also where dO is not finite */
                const int row = own + e / 2 * 8, key = step * BLOCK + column + e % 2;
                if (DBIAS == GPU_DBIAS_KEYS)
                    sums.dbias[e / 2] += x;
                else if (DBIAS && share == 0 && row < at.own_length && key < at.other_length)
                    add_dbias(row, key, x);
                if (SOFTCAP)
                    x = weight == 0.0f ? 0.0f : x * slope[n][e];
                ds[0][n][e] = x;
            }
        }
    }

    /* Adds a step to the sums, and loads the next one. */
    __device__ __forceinline__ void add_step(int step, bool partial, int next) {
        const uint32_t bounds = bounds_of(parity), next_bounds = bounds_of(parity ^ 1);
        float p[1][TILES][4], slope[TILES][4], ds[1][TILES][4];
        cp_async_wait<0>();
        __syncthreads();
        if (OWNS_KEYS)
            clear_empty(bounds);
        multiply_scores<HEAD_DIM>(p, left_of<HEAD_DIM / 4>(t.own1, warp_own), right_of<HEAD_DIM / 4>(t.other1, 0));
        make_p(p, slope, step, bounds, partial);
        if (OF_VALUES)
            add_product<HEAD_DIM_V / 4, FENCED>(sums.two, p, t.other2, share * sums.columns2 * 8);
        if (OF_SCORES) {
            multiply_scores<HEAD_DIM_V>(ds, left_of<HEAD_DIM_V / 4>(t.own2, warp_own),
                                        right_of<HEAD_DIM_V / 4>(t.other2, 0));
            make_ds(ds, p, slope, step, bounds);
        }
        __syncthreads();
        release_up_to(a, at, turn_of(a, step), turn_of(a, next));
        load_other2(next, next_bounds);
        if (OF_SCORES) {
            add_product<HEAD_DIM / 4, FENCED>(sums.one, ds, t.other1, share * sums.columns1 * 8);
            __syncthreads();
        }
        load_other1(next);
    }

    /* The own with all others of a head. */
    __device__ __forceinline__ void walk() {
        sums.dbias[0] = sums.dbias[1] = 0;
        if (OWNS_KEYS)
            look_at_own();
        int step = next_step(at.begin / BLOCK, bounds_of(parity));
        release_up_to(a, at, 0, turn_of(a, step));
        load_other2(step, bounds_of(parity));
        load_other1(step);
#pragma unroll 1
        for (; step >= 0; parity ^= 1) {
            const int next = next_step(step + 1, bounds_of(parity ^ 1));
            add_step(step, is_partial(a, at, step), next);
            step = next;
        }
        if (DBIAS == GPU_DBIAS_KEYS)
            store_dbias();
    }

    /* ---- results ---- */

    /* Stores one gradient of the own rows or keys. The warp's rows whose bit is set in `marked` are not written;
     * such keys become 0. */
    template <int columns>
    __device__ __forceinline__ void store_sums(const float (&sum)[1][columns][4], float factor,
                                               const struct gpu_matrix &to, int num_columns, uint32_t marked) const {
        if (!to.data)
            return;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = own + half * 8;
            const bool is_marked = marked >> (half * 8 + threadIdx.x % 32 / 4) & 1;
            if (i >= at.own_length || (is_marked && !OWNS_KEYS))
                continue;
            float *out = (float *)row_of(to, at.s.batch, own_begin(at) + i, own_head(at));
#pragma unroll
            for (int n = 0; n < columns; n++)
                store_pair(out, (share * columns + n) * 8 + threadIdx.x % 4 * 2, num_columns,
                           is_marked ? 0.0f : sum[0][n][half * 2] * factor,
                           is_marked ? 0.0f : sum[0][n][half * 2 + 1] * factor);
        }
    }
    /* Those keys with NaN gradients that no row sees: their K is NaN, and a bias of -inf hides them. */
    __device__ __forceinline__ uint32_t hidden_keys(uint32_t spoiled) const {
        uint32_t hidden = 0;
        for_each_bit(spoiled, [&](int n) {
            const int key = at.first + warp_own + n;
            if (key < at.own_length && !redo_is_seen(a.in, at.s, at.head_kv, key))
                hidden |= 1u << n;
        });
        return hidden;
    }
    /* Recomputes rows of dQ that have become NaN by a key which they do not see. */
    __device__ __forceinline__ void redo_rows(uint32_t spoiled) const {
        for_each_bit(spoiled, [&](int n) {
            const int row = at.first + warp_own + n;
            if (row < at.own_length)
                redo_dq(a, at.s, at.head, at.head_kv, row, rows_begin(a, at) + row);
        });
    }
    __device__ __forceinline__ void finish() {
        cp_async_wait<0>();
        uint32_t marked = 0;
        if (REDO && OWNS_KEYS)
            marked = hidden_keys(find_spoiled(sums.one) | find_spoiled(sums.two));
        else if (REDO)
            marked = marked_by_any<SHARE, GROUPS>(find_spoiled(sums.one), t.other1);
        if (OF_SCORES)
            store_sums(sums.one, a.in.scale, OWNS_KEYS ? a.dk : a.dq, a.in.head_dim, marked);
        if (OF_VALUES)
            store_sums(sums.two, 1.0f, a.dv, a.in.head_dim_v, marked);
        if (REDO && !OWNS_KEYS && share == 0 && a.dq.data)
            redo_rows(marked);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mma_backward32(const __grid_constant__ struct gpu_backward_params a) {
    extern __shared__ __align__(128) char shared[];
    struct own_words words = {};
    struct sums sums = {};
    struct owner owner(a, find_block(a, (int *)shared), shared_address(shared), words, sums);
    if (owner.at.first >= owner.at.own_length) {
        release_up_to(a, owner.at, 0, num_turns(a)); /* blocks of other sequences may wait for this one */
        return;
    }
    owner.load_own();
#pragma unroll 1
    for (int g = 0; g < (OWNS_KEYS ? a.in.group : 1); g++) {
        if (OWNS_KEYS)
            owner.at.head = owner.at.head_kv * a.in.group + g;
        owner.walk();
    }
    owner.finish();
}
