/* mma_backward_d1024.cu: gradients of attention for head dims to 1024 on mma.sync.
 *
 * Idea. dK and dV of 64 keys at head dim 512 are 256 KB of float32, all registers of a multiprocessor. So each launch
 * makes one gradient, which fills half of the registers of 8 warps: blocks that own query rows walk the keys for dQ,
 * blocks that own keys walk the rows of all query heads of their KV head, once for dK and once for dV. Each makes the
 * scores it needs anew, eight products in place of five. Every sum is made in registers in a fixed order, so all of it
 * is deterministic (but for the gradient of a bias that heads or batches share: DETERMINISTIC in turns).
 *
 *             own 1   own 2   other 1   other 2   S = own 1 other 1^T, dP = own 2 other 2^T (or their transposes)
 *   dQ        Q       dO      K         V         dQ += dS K
 *   dK        K       V       Q         dO        dK += dS^T Q
 *   dV        K               Q                   dV += P^T dO
 *
 * Tile: OWN x OTHERS, 64 x 64 or 32 x 128. Head dims go through the block in slices of SLICE columns: slices of other 1
 * for S, of other 2 for dP, then of what is summed again. What is owned stays in shared memory, where there is room
 * (KEPT); else its slices come with those of the others.
 *
 * Who computes what. A warp sums 32 own x 16 columns of every 16 SHARES. Two warps make the scores of the same 32 x 32,
 * each from half of the columns of every slice: a tile of 32 x 32 reads a quarter less of shared memory than one of
 * 32 x 16. Then each gives the other the scores of 16 others, adds what it gets, and goes on with 32 x 16. Lane l holds
 * own l / 4 of each eight and others 2 (l % 4), +1 of each eight.
 *
 * Shared memory: mma_backward_d1024.h.
 *
 * Barriers: one of all threads a slice: the slice is there, and the one before it may be overwritten. It also orders P
 * or dS, which warps leave for each other after the last slice of scores. Two warps meet for each exchange of halves.
 *
 * Registers of a thread: sums 128, halves of scores 32, P 16, operands 16, or 32 of dS or P while sums are made.
 * Bound by shared memory: docs/lab/mma_backward_d1024.md. */
#include "cuda/ptx/barrier.cuh"
#include "families/mma/backward_d1024/mma_backward_d1024_shape.cuh"
#include "gpu/quad.cuh"
#include "gpu/redo_dq.cuh"

/* The words of a row or key in shared memory, three arrays: for rows lse, delta, and the part that lse has rounded
 * away; for keys the rows first <= i < last that see them, and their bias. */
struct row_words {
    float lse, low;
};
struct key_words {
    int first, last;
    float bias;
};
__device__ __forceinline__ float shared_float(uint32_t at) { return __uint_as_float(ld_shared_4(at)); }

/* Numbers of a warp's scores after the exchange, and of its sums. */
typedef float warp_scores[2][2][4];
struct sums {
    float of[2][SUM_TILES][4], dbias[4];
};

/* The state of a thread. Arrays are not members: the compiler takes a structure apart before it unrolls loops only
 * where it has none. */
struct owner {
    const struct gpu_backward_params &a;
    const struct tiles t;
    struct place at;
    const int group, share; /* the warp's 32 own rows or keys, and its number among the warps that share them */
    struct sums &sums;
    int parity;             /* of the words of others in use */
    int stage;              /* of the next slice that is read */
    int step, next;         /* the current step, and the next; -1: none */
    int load_step, load_at; /* the step whose slices are being loaded, and their number so far */
    bool has_empty;         /* some row of the step sees no key */

    __device__ __forceinline__ owner(const struct gpu_backward_params &params, const struct place &place,
                                     uint32_t shared, struct sums &to)
        : a(params), t(lay_out(shared)), at(place), group(threadIdx.x / 32 % GROUPS), share(threadIdx.x / 32 / GROUPS),
          sums(to), parity(0), stage(0), step(-1), next(-1), load_step(-1), load_at(0), has_empty(false) {}

    __device__ __forceinline__ uint32_t bounds_of(int which) const { return t.bounds + which * OTHERS * 12; }
    /* The lane's first own row or key of its warp's 32, before those 8, 16 and 24 on; and its first other. */
    __device__ __forceinline__ int lane_own() const { return group * 32 + threadIdx.x % 32 / 4; }
    __device__ __forceinline__ int lane_other() const { return share * 16 + threadIdx.x % 4 * 2; }

    /* ---- words of rows and keys ---- */

    /* The words of the own rows, or of the own keys for the current query head. */
    __device__ __forceinline__ void store_own_words() const {
        if (threadIdx.x < OWN && OWNS_KEYS) {
            store_key(t.words + threadIdx.x * 4, OWN, rows_of_key(a.in, at.s, at.head, at.first + (int)threadIdx.x));
        } else if (threadIdx.x < OWN) {
            const int64_t row = rows_begin(a, at) + at.first + threadIdx.x;
            st_shared_4(t.words + threadIdx.x * 4, __float_as_uint(a.lse_rows[row]));
            st_shared_4(t.words + (OWN + threadIdx.x) * 4, __float_as_uint(a.delta_rows[row]));
            if (BIAS)
                st_shared_4(t.words + (2 * OWN + threadIdx.x) * 4, __float_as_uint(a.low_rows[row]));
        }
        __syncthreads();
    }
    __device__ __forceinline__ struct row_words read_row(uint32_t from, int stride) const {
        return {shared_float(from), BIAS ? shared_float(from + 2 * stride * 4) : 0.0f};
    }
    /* bounded: its rows are wanted. */
    __device__ __forceinline__ struct key_words read_key(uint32_t from, int stride, bool bounded) const {
        struct key_words key = {};
        if (bounded) {
            key.first = (int)ld_shared_4(from);
            key.last = (int)ld_shared_4(from + stride * 4);
        }
        if (BIAS && !BIAS_ROWS)
            key.bias = shared_float(from + 2 * stride * 4);
        return key;
    }

    /* ---- the walk ---- */

    /* Whether keys alone let the thread's own see some of a step's others. A block that owns rows writes what
     * depends on keys alone to `bounds`. */
    __device__ __forceinline__ bool sees_some(int from, uint32_t bounds) const {
        if (OWNS_KEYS) {
            if (threadIdx.x >= OWN)
                return false;
            const struct key_words key = read_key(t.words + threadIdx.x * 4, OWN, true);
            return max(key.first, from * OTHERS) < min(key.last, from * OTHERS + OTHERS);
        }
        return look_at_step(a, at, from, bounds);
    }
    __device__ __forceinline__ int next_step(int from, uint32_t bounds) const {
        return next_active(a, at, from, [&](int candidate) { return sees_some(candidate, bounds); });
    }

    /* ---- slices ---- */

    __device__ __forceinline__ const struct gpu_matrix &own_matrix(bool second) const {
        return OWNS_KEYS ? second ? a.in.v : a.in.k : second ? a.dout : a.in.q;
    }
    __device__ __forceinline__ const struct gpu_matrix &other_matrix(bool second) const {
        return OWNS_KEYS ? second ? a.dout : a.in.q : second ? a.in.v : a.in.k;
    }
    __device__ __forceinline__ void load_own_slice(uint32_t to, bool second, int slice) const {
        const struct gpu_matrix &m = own_matrix(second);
        load_tile<SLICE / 8, OWN>(to, row_of(m, at.s.batch, own_begin(at) + at.first, own_head(at)) + slice * SLICE * 2,
                                  m.row * 2, at.own_length - at.first,
                                  (second ? a.in.head_dim_v : a.in.head_dim) - slice * SLICE);
    }
    __device__ __forceinline__ void load_kept() const {
#pragma unroll 1
        for (int n = 0; n < SLICES1 && KEPT > 0; n++)
            load_own_slice(t.own1 + n * OWN_SLICE_BYTES, false, n);
#pragma unroll 1
        for (int n = 0; n < SLICES2 && KEPT > 1; n++)
            load_own_slice(t.own2 + n * OWN_SLICE_BYTES, true, n);
    }
    template <int rows, int columns>
    __device__ __forceinline__ void load_others(uint32_t to, bool second, int first, int column) const {
        const struct gpu_matrix &m = other_matrix(second);
        load_tile<columns / 8, rows>(to, row_of(m, at.s.batch, other_begin(at) + first, other_head(at)) + column * 2,
                                     m.row * 2, at.other_length - first,
                                     (second ? a.in.head_dim_v : a.in.head_dim) - column);
    }
    /* Loads the words of a step's rows; past the end, those of a row that sees no key. */
    __device__ __forceinline__ void load_row_words() const {
        const int n = threadIdx.x * 4;
        if (n < ROW_WORDS * OTHERS) {
            const float *from = n < OTHERS ? a.lse_rows : n < 2 * OTHERS ? a.delta_rows : a.low_rows;
            cp_async_16(bounds_of(load_step == step ? parity : parity ^ 1) + n * 4,
                        from + rows_begin(a, at) + load_step * OTHERS + n % OTHERS);
        }
    }
    /* Starts the load of the next slice to a stage; there is none after the last step. */
    __device__ __forceinline__ void load_slice(int to_stage) {
        if (load_at == SLICES) {
            load_at = 0;
            load_step = next;
        }
        if (load_step >= 0) {
            const uint32_t to = t.ring + to_stage * STAGE_BYTES;
            if (OWNS_KEYS && load_at == 0)
                load_row_words();
            if (load_at < SLICES1 + SLICES2) {
                const bool second = load_at >= SLICES1;
                const int slice = second ? load_at - SLICES1 : load_at;
                load_others<OTHERS, SLICE>(to, second, load_step * OTHERS, slice * SLICE);
                if (KEPT == 0 || (KEPT == 1 && second))
                    load_own_slice(to + OTHER_BYTES, second, slice);
            } else {
                constexpr int across = SUMMED / SUM_COLUMNS;
                const int slice = load_at - SLICES1 - SLICES2;
                load_others<SUM_OTHERS, SUM_COLUMNS>(to, MAKES == MMA_D1024_DV,
                                                     load_step * OTHERS + slice / across * SUM_OTHERS,
                                                     slice % across * SUM_COLUMNS);
            }
            load_at++;
        }
        cp_async_commit();
    }
    /* Waits until all threads have the next slice and have left the one before, whose stage is loaded again. Returns
     * its address. */
    __device__ __forceinline__ uint32_t next_slice() {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        load_slice(stage == 0 ? STAGES - 1 : stage - 1);
        const uint32_t at_stage = t.ring + stage * STAGE_BYTES;
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        return at_stage;
    }

    /* ---- the gradient of a bias ---- */

    /* One element of it, or of its sums. */
    __device__ __forceinline__ void add_dbias(int64_t row, int64_t key, float x) const {
        const int64_t b = at.s.batch, h = at.head / a.in.bias.group;
        if (DBIAS == GPU_DBIAS_SUMS)
            return red_add(a.dbias_sums + b * a.dbias_batch + h * a.dbias_head + row * a.dbias_row + key * a.dbias_key,
                           x);
        const int64_t to = b * a.dbias.batch + h * a.dbias.head + row * a.dbias.row + key * a.dbias.key;
        if (BIAS == GPU_BIAS_FLOAT32)
            ((float *)a.dbias.data)[to] = x;
        else
            ((uint16_t *)a.dbias.data)[to] = (uint16_t)pack(x, 0);
    }
    /* For own keys and one query head: warps that share keys store their parts side by side. */
    __device__ __forceinline__ void store_dbias() const {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float x = quad_sum(sums.dbias[n]);
            const int key = at.first + lane_own() + n * 8;
            if (threadIdx.x % 4 == 0 && key < at.own_length)
                a.dbias_sums[(((int64_t)share * a.in.batch + at.s.batch) * a.in.heads + at.head) * a.in.seqlen_k +
                             key] = x;
            sums.dbias[n] = 0;
        }
    }

    /* ---- scores ---- */

    /* Adds one slice to the warp's 32 x 32 scores, from its half of the columns. */
    __device__ __forceinline__ void multiply_slice(float (&part)[2][4][4], uint32_t left, uint32_t right) const {
        lane_address<SLICE / 8> own = left_of<SLICE / 8>(left, group * 32);
        lane_address<SLICE / 8> others = right_of<SLICE / 8>(right, share / 2 * 32);
        own.move(share % 2 * (SLICE / 16));
        others.move(share % 2 * (SLICE / 16));
#pragma unroll
        for (int k = 0; k < SLICE / 32; k++) {
            uint32_t x[2][4], b[2][4];
#pragma unroll
            for (int m = 0; m < 2; m++) {
                ldmatrix_x4(x[m], own.at_step(m * 16, 2 * k));
                ldmatrix_x4(b[m], others.at_step(m * 16, 2 * k));
            }
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    mma_16x8x16(part[m][2 * n], x[m], b[n][0], b[n][1]);
                    mma_16x8x16(part[m][2 * n + 1], x[m], b[n][2], b[n][3]);
                }
        }
    }
    /* Adds both halves of the columns: each of two warps gets the scores of 16 of the 32 others. */
    __device__ __forceinline__ void exchange(warp_scores &c, const float (&part)[2][4][4]) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const bool upper = share % 2;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t word[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                c[i / 2][i % 2][e] = upper ? part[i / 2][2 + i % 2][e] : part[i / 2][i % 2][e];
                word[e] = __float_as_uint(upper ? part[i / 2][i % 2][e] : part[i / 2][2 + i % 2][e]);
            }
            st_shared_16(t.exchange + ((warp * 4 + i) * 32 + lane) * 16, word[0], word[1], word[2], word[3]);
        }
        barrier_sync(1 + group + GROUPS * (share / 2), 64);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t word[4];
            ld_shared_16(word, t.exchange + (((warp ^ GROUPS) * 4 + i) * 32 + lane) * 16);
#pragma unroll
            for (int e = 0; e < 4; e++)
                c[i / 2][i % 2][e] += __uint_as_float(word[e]);
        }
    }
    template <bool second> __device__ __forceinline__ void multiply_scores(warp_scores &c) {
        float part[2][4][4] = {};
#pragma unroll 1
        for (int slice = 0; slice < (second ? SLICES2 : SLICES1); slice++) {
            const uint32_t right = next_slice();
            const uint32_t kept = (second ? t.own2 : t.own1) + slice * OWN_SLICE_BYTES;
            multiply_slice(part, KEPT > (second ? 1 : 0) ? kept : right + OTHER_BYTES, right);
        }
        exchange(c, part);
    }

    /* Bias and mask of an own and two others; past the end, those of the last. */
    __device__ __forceinline__ void find_bias(float (&b)[2], int own, int other) const {
        const struct gpu_scores &m = a.in.bias;
        const int64_t inside = min(own, at.own_length - 1);
        const char *from = a.in.bias.data + (at.s.batch * m.batch + at.head / m.group * m.head) * BIAS_BYTES;
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int64_t j = min(other + c, at.other_length - 1);
            b[c] =
                bias_value(from + (OWNS_KEYS ? j * m.row + inside * m.key : inside * m.row + j * m.key) * BIAS_BYTES);
        }
    }
    __device__ __forceinline__ void find_mask(bool (&seen)[2], int own, int other) const {
        const struct gpu_scores &m = a.in.mask;
        const int64_t inside = min(own, at.own_length - 1);
        const char *from = mask_of(a.in, at.s.batch, at.head);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int64_t j = min(other + c, at.other_length - 1);
            seen[c] = from[OWNS_KEYS ? j * m.row + inside * m.key : inside * m.row + j * m.key];
        }
    }
    /* Which of the lane's pairs row intervals and block masks show: bit 4 part + 2 n + c, in the order of make_p(). */
    __device__ __forceinline__ uint32_t pairs_held() const {
        const int own = at.first + lane_own(), other = step * OTHERS + lane_other();
        uint32_t held = 0;
#pragma unroll 1
        for (int i = 0; i < 4; i++) { /* a row of the lane: an own, or an other of two groups of eight */
            const int row = OWNS_KEYS ? other + i / 2 * 8 + i % 2 : own + i * 8;
            const int last = (OWNS_KEYS ? at.other_length : at.own_length) - 1;
            const uint32_t of_row =
                keys_held<4>(a.in, ranges_of_row(a.in, at.s.batch, at.s.q_begin, at.head, min(row, last)),
                             [&](int n) { return OWNS_KEYS ? own + n * 8 : other + n / 2 * 8 + n % 2; });
            if (!OWNS_KEYS)
                held |= of_row << 4 * i;
#pragma unroll
            for (int n = 0; n < 4 && OWNS_KEYS; n++)
                held |= (of_row >> n & 1) << (4 * n + i);
        }
        return held;
    }
    /* Whether a pair is visible, without regard to masks of pairs. */
    __device__ __forceinline__ bool is_visible(bool partial, int own, int other, const struct row_words &row,
                                               const struct key_words &key) const {
        if (OWNS_KEYS) /* a row that sees no key may hold NaN */
            return row.lse != -MINUS_INF && ((!KEYED && !partial) || (other >= key.first && other < key.last));
        const bool seen = !partial || (other >= first_key(a.in, at.s, own) && other <= last_key(a.in, at.s, own));
        return seen && (!KEYED || (own >= key.first && own < key.last));
    }
    /* P of an own and two others, whose words are given. */
    __device__ __forceinline__ void make_pair(float (&p)[2], float (&slope)[2], bool partial, int own_word, int other,
                                              const struct row_words (&rows)[2],
                                              const struct key_words (&keys)[2]) const {
        const int own = at.first + own_word;
        const uint32_t own_at = t.words + own_word * 4;
        struct row_words own_row = {};
        struct key_words own_key = {};
        if (OWNS_KEYS)
            own_key = read_key(own_at, OWN, KEYED || partial);
        else
            own_row = read_row(own_at, OWN);
        float b[2] = {0, 0};
        bool seen[2] = {true, true};
        if (BIAS && BIAS_ROWS)
            find_bias(b, own, other);
        if (MASK_TILE && partial)
            find_mask(seen, own, other);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const struct row_words &row = OWNS_KEYS ? rows[c] : own_row;
            const struct key_words &key = OWNS_KEYS ? own_key : keys[c];
            float x = cap_score(a.in, p[c] * a.in.scale, slope[c]);
            if (BIAS)
                x += BIAS_ROWS ? b[c] : key.bias;
            x = (x - row.lse) * LOG2_E;
            if (BIAS)
                x += row.low;
            bool visible = is_visible(partial, own, other + c, row, key) && seen[c];
            if (BIAS && BIAS_ROWS && DBIAS)
                visible = visible && b[c] != MINUS_INF; /* also where K is NaN; else REDO sees to that at the end */
            p[c] = visible ? ex2_approx(x) : 0.0f;
        }
    }
    /* Turns products into P in place. `slope` is that of the cap; without a gradient of the bias, P is multiplied by
     * it. */
    __device__ __forceinline__ void make_p(warp_scores &p, warp_scores &slope, bool partial) const {
        const uint32_t held = ROW_RUNS && partial ? pairs_held() : 0xffff;
        /* Opaque: addresses of masks and biases are found here, not kept through the loop. */
        const int first_own = opaque(lane_own()), first_other = OWNS_KEYS ? lane_other() : opaque(lane_other());
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int other = first_other + n * 8;
            struct row_words rows[2] = {};
            struct key_words keys[2] = {};
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const uint32_t words = bounds_of(parity) + (other + c) * 4;
                if (OWNS_KEYS)
                    rows[c] = read_row(words, OTHERS);
                else if (KEYED)
                    keys[c] = read_key(words, OTHERS, true);
            }
#pragma unroll
            for (int part = 0; part < 4; part++) {
                const int m = part / 2, half = part % 2 * 2;
                float two[2] = {p[m][n][half], p[m][n][half + 1]}, slopes[2];
                make_pair(two, slopes, partial, first_own + part * 8, step * OTHERS + other, rows, keys);
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    if (ROW_RUNS && !(held >> (4 * part + 2 * n + c) & 1))
                        two[c] = 0;
                    const bool takes_in = SOFTCAP && OF_SCORES && !DBIAS && two[c] != 0.0f;
                    p[m][n][half + c] = takes_in ? two[c] * slopes[c] : two[c];
                    slope[m][n][half + c] = slopes[c];
                }
            }
        }
    }
    /* Turns dP into dS in place, and adds to the sums of the own keys' bias. */
    __device__ __forceinline__ void make_ds(warp_scores &ds, const warp_scores &p, const warp_scores &slope) {
        if (DETERMINISTIC)
            wait_semaphore(semaphore_of(a, at, turn_of(a, step)), my_turn(a, at));
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int own = lane_own() + m * 16 + e / 2 * 8, other = lane_other() + n * 8 + e % 2;
                    const float weight = p[m][n][e];
                    const float delta = OWNS_KEYS ? shared_float(bounds_of(parity) + (OTHERS + other) * 4)
                                                  : shared_float(t.words + (OWN + own) * 4);
                    float x = weight * (ds[m][n][e] - delta);
                    x = weight == 0.0f ? 0.0f : x; /* also where dO is not finite */
                    const int row = at.first + own, key = step * OTHERS + other;
                    if (DBIAS == GPU_DBIAS_KEYS)
                        sums.dbias[2 * m + e / 2] += x;
                    else if (DBIAS && row < at.own_length && key < at.other_length)
                        add_dbias(row, key, x);
                    if (SOFTCAP && DBIAS)
                        x = weight == 0.0f ? 0.0f : x * slope[m][n][e];
                    ds[m][n][e] = x;
                }
    }
    /* Stores P or dS for all warps that share the own rows or keys. */
    __device__ __forceinline__ void store_scores(const warp_scores &x) const {
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    st_shared_4(t.scores + chunk_offset<OTHERS / 8>(lane_own() + m * 16 + half * 8, share * 2 + n) +
                                    threadIdx.x % 4 * 4,
                                pack(x[m][n][2 * half], x[m][n][2 * half + 1]));
    }

    /* ---- sums ---- */

    /* A row that sees no key has no gradient, whatever dO is and whatever the row holds. Its P and dS are 0, but 0
     * times NaN is NaN. */
    __device__ __forceinline__ void look_for_empty() {
        bool empty = false;
#pragma unroll
        for (int n = 0; n < OTHERS; n += 32)
            empty = empty || shared_float(bounds_of(parity) + (n + threadIdx.x % 32) * 4) == -MINUS_INF;
        has_empty = __any_sync(0xffffffff, empty);
    }
    __device__ __forceinline__ void clear_empty(uint32_t slice, int first) const {
        if (!OWNS_KEYS || !has_empty)
            return;
        clear_empty_rows<SUM_COLUMNS / 8, SUM_OTHERS>(slice, bounds_of(parity) + first * 4);
        __syncthreads();
    }
    __device__ __forceinline__ void add_slice(int slice, const uint32_t (&left)[2][SUM_OTHERS / 16][4],
                                              uint32_t right) {
        lane_address<SUM_COLUMNS / 8> others = left_of<SUM_COLUMNS / 8>(right, 0);
        others.move(share * UNITS * 2);
#pragma unroll
        for (int k = 0; k < SUM_OTHERS / 16; k++)
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, others.at_step(k * 16, 2 * u));
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    mma_16x8x16(sums.of[m][(slice * UNITS + u) * 2], left[m][k], b[0], b[1]);
                    mma_16x8x16(sums.of[m][(slice * UNITS + u) * 2 + 1], left[m][k], b[2], b[3]);
                }
            }
    }
    __device__ __forceinline__ void add_sums() {
#pragma unroll 1
        for (int first = 0; first < OTHERS; first += SUM_OTHERS) {
            uint32_t left[2][SUM_OTHERS / 16][4];
#pragma unroll
            for (int slice = 0; slice < SUMMED / SUM_COLUMNS; slice++) {
                const uint32_t right = next_slice();
                if (slice == 0) { /* scores are there since its barrier */
                    lane_address<OTHERS / 8> own = left_of<OTHERS / 8>(t.scores, group * 32);
                    own.move(first / 8);
#pragma unroll
                    for (int k = 0; k < SUM_OTHERS / 16; k++)
#pragma unroll
                        for (int m = 0; m < 2; m++)
                            ldmatrix_x4(left[m][k], own.at_step(m * 16, 2 * k));
                }
                clear_empty(right, first);
                add_slice(slice, left, right);
            }
        }
    }

    __device__ __forceinline__ void add_step() {
        const bool partial = is_partial(a, at, step);
        warp_scores p, slope, ds;
        multiply_scores<false>(p);
        if (OWNS_KEYS)
            look_for_empty();
        make_p(p, slope, partial);
        if (OF_SCORES) {
            multiply_scores<true>(ds);
            make_ds(ds, p, slope);
        }
        store_scores(OF_SCORES ? ds : p);
        if (DETERMINISTIC) {
            __syncthreads();
            release_up_to(a, at, turn_of(a, step), turn_of(a, next));
        }
        add_sums();
    }

    /* The own with all others of a head. */
    __device__ __forceinline__ void walk() {
        store_own_words();
        step = next_step(at.begin / OTHERS, bounds_of(parity));
        release_up_to(a, at, 0, turn_of(a, step));
        load_step = step;
        load_at = 0;
#pragma unroll 1
        for (int n = 0; n < STAGES - 1; n++)
            load_slice(stage + n < STAGES ? stage + n : stage + n - STAGES);
#pragma unroll 1
        for (; step >= 0; parity ^= 1) {
            next = next_step(step + 1, bounds_of(parity ^ 1));
            add_step();
            step = next;
        }
        if (DBIAS == GPU_DBIAS_KEYS)
            store_dbias();
    }

    /* ---- results ---- */

    /* A bit for each of the warp's rows or keys whose sums hold NaN. */
    __device__ __forceinline__ uint32_t find_spoiled() const {
        return spoiled_rows<4>([&](int part) {
            float all = 0;
#pragma unroll
            for (int n = 0; n < SUM_TILES; n++)
                all += sums.of[part / 2][n][part % 2 * 2] + sums.of[part / 2][n][part % 2 * 2 + 1];
            return all;
        });
    }
    /* The union of the bits of the warps that share the rows. */
    __device__ __forceinline__ uint32_t marked_by_any(uint32_t rows) const {
        __syncthreads();
        st_shared_4(t.scores + threadIdx.x / 32 * 4, rows);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < SHARES; n++)
            rows |= ld_shared_4(t.scores + (n * GROUPS + group) * 4);
        return rows;
    }
    /* Stores the warp's rows or keys. Rows whose bit is set in `marked` are not written; such keys become 0. */
    __device__ __forceinline__ void store_sums(float factor, const struct gpu_matrix &to, int num_columns,
                                               uint32_t marked) const {
        if (!to.data)
            return;
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const int i = lane_own() + part * 8;
            const bool is_marked = marked >> (part * 8 + threadIdx.x % 32 / 4) & 1;
            if (at.first + i >= at.own_length || (is_marked && !OWNS_KEYS))
                continue;
            char *row = row_of(to, at.s.batch, own_begin(at) + at.first + i, own_head(at));
#pragma unroll
            for (int n = 0; n < SUM_TILES; n++) {
                const int unit = n / 2, column = unit / UNITS * SUM_COLUMNS + (share * UNITS + unit % UNITS) * 16 +
                                                 n % 2 * 8 + threadIdx.x % 4 * 2;
                const float *two = &sums.of[part / 2][n][part % 2 * 2];
                const uint32_t word = is_marked ? 0 : pack(two[0] * factor, two[1] * factor);
                if (ALIGNED && column + 1 < num_columns) {
                    *(uint32_t *)(row + column * 2) = word;
                    continue;
                }
                if (column < num_columns)
                    *(uint16_t *)(row + column * 2) = (uint16_t)word;
                if (column + 1 < num_columns)
                    *(uint16_t *)(row + column * 2 + 2) = (uint16_t)(word >> 16);
            }
        }
    }
    /* Those keys with NaN gradients that no row sees: their K is NaN, and a bias of -inf hides them. */
    __device__ __forceinline__ uint32_t hidden_keys(uint32_t spoiled) const {
        uint32_t hidden = 0;
        for_each_bit(spoiled, [&](int n) {
            const int key = at.first + group * 32 + n;
            if (key < at.own_length && !redo_is_seen(a.in, at.s, at.head_kv, key))
                hidden |= 1u << n;
        });
        return hidden;
    }
    __device__ __forceinline__ void finish() {
        cp_async_wait<0>();
        uint32_t marked = 0;
        if (REDO && OWNS_KEYS)
            marked = hidden_keys(find_spoiled());
        else if (REDO)
            marked = marked_by_any(find_spoiled());
        if (MAKES == MMA_D1024_DV)
            store_sums(1.0f, a.dv, a.in.head_dim_v, marked);
        else
            store_sums(a.in.scale, OWNS_KEYS ? a.dk : a.dq, a.in.head_dim, marked);
        if (!REDO || OWNS_KEYS || share != 0 || !a.dq.data)
            return;
        for_each_bit(marked, [&](int n) { /* rows of dQ that have become NaN by a key which they do not see */
                                          const int row = at.first + group * 32 + n;
                                          if (row < at.own_length)
                                              redo_dq(a, at.s, at.head, at.head_kv, row, rows_begin(a, at) + row);
        });
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mma_backward_d1024(const __grid_constant__ struct gpu_backward_params a) {
    extern __shared__ __align__(128) char shared[];
    struct sums sums = {};
    struct owner owner(a, find_block(a, (int *)shared), shared_address(shared), sums);
    if (owner.at.first >= owner.at.own_length) {
        release_up_to(a, owner.at, 0, num_turns(a)); /* blocks of other sequences may wait for this one */
        return;
    }
    owner.load_kept();
#pragma unroll 1
    for (int g = 0; g < (OWNS_KEYS ? a.in.group : 1); g++) {
        if (OWNS_KEYS)
            owner.at.head = owner.at.head_kv * a.in.group + g;
        owner.walk();
    }
    owner.finish();
}
