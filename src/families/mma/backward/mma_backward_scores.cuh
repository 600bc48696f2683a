/* mma_backward_scores.cuh: P and dS of mma_backward.cu, in registers and staged for the other warps. */
#ifndef FDM_MMA_BACKWARD_SCORES_CUH
#define FDM_MMA_BACKWARD_SCORES_CUH

#include "families/mma/backward/mma_backward_load.cuh"
#include "families/mma/backward/mma_backward_semaphores.cuh"

struct sums {
    float dk[KEY_TILES][SUM_COLUMNS_K / 8][4], dv[KEY_TILES][SUM_COLUMNS_V / 8][4];
    float dbias[KEY_TILES][2];
};

/* c = A B^T for the warp's keys and PART_ROWS rows from `row` on of a tile of rows. */
template <int depth, bool kept_left>
__device__ __forceinline__ void multiply_scores(float (&c)[KEY_TILES][ROW_TILES][4], const struct self &self,
                                                uint32_t left, int warp_key, const uint32_t (*kept)[4], uint32_t right,
                                                int row) {
    const auto keys = by_rows<depth / 8, PANEL_KEYS>(self, left, warp_key);
    const auto rows = by_chunks<depth / 8, PANEL_ROWS>(self, right, row);
#pragma unroll
    for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                c[t][n][e] = 0;
#pragma unroll
    for (int k = 0; k < depth / 16; k++) {
        uint32_t x[KEY_TILES][4];
#pragma unroll
        for (int t = 0; t < KEY_TILES; t++) {
            if constexpr (kept_left) {
#pragma unroll
                for (int e = 0; e < 4; e++)
                    x[t][e] = kept[k][e];
            } else {
                ldmatrix_x4(x[t], keys.at_step(t * 16, 2 * k));
            }
        }
#pragma unroll
        for (int n = 0; n < ROW_TILES; n += 2) {
            uint32_t b[4];
            ldmatrix_x4(b, rows.at_step(n * 8, 2 * k));
#pragma unroll
            for (int t = 0; t < KEY_TILES; t++) {
                mma_16x8x16(c[t][n], x[t], b[0], b[1]);
                mma_16x8x16(c[t][n + 1], x[t], b[2], b[3]);
            }
        }
    }
}

/* sum += A B, A 16 x 16 of each of `lefts` tiles, B `rows` rows on in a tile; of its columns every `share`-th 16. */
template <int share, int chunks, int panel_rows, int lefts, int tiles>
__device__ __forceinline__ void add_product(float (&sum)[lefts][tiles][4], const uint32_t (&left)[lefts][4],
                                            const lane_address<chunks, panel_rows> &right, int rows) {
#pragma unroll
    for (int n = 0; n < tiles; n += 2 * READS) {
        uint32_t b[READS][4];
#pragma unroll
        for (int i = 0; i < READS && n + 2 * i < tiles; i++)
            ldmatrix_x4_trans(b[i], right.at_step(rows, (n + 2 * i) * share));
#pragma unroll
        for (int i = 0; i < READS && n + 2 * i < tiles; i++)
#pragma unroll
            for (int t = 0; t < lefts; t++) {
                mma_16x8x16(sum[t][n + 2 * i], left[t], b[i][0], b[i][1]);
                mma_16x8x16(sum[t][n + 2 * i + 1], left[t], b[i][2], b[i][3]);
            }
    }
}

/* Half blocks without a ring wait for the semaphore of the bias' gradient when dS is made, not before, which takes
 * fewer registers. */
#define LATE_TURN (HALF_BLOCK && !RING)
__device__ __forceinline__ void await_dbias_turn(bool here, const struct gpu_backward_params &a, const struct place &at,
                                                 int h, int row) {
    if (ORDERED_DBIAS && here)
        wait_semaphore(dbias_semaphore_of(a, at, h, row), my_dbias_turn(a, at, h));
}

/* DBIAS SUMS or DIRECT: row 0 of one key of the bias' gradient, or of its sums; and bytes from row to row. */
#define DBIAS_BYTES (DBIAS == GPU_DBIAS_SUMS ? 4 : BIAS_BYTES)
__device__ __forceinline__ char *dbias_of_key(const struct gpu_backward_params &a, const struct place &at, int64_t h,
                                              int key) {
    h /= a.in.bias.group;
    if (DBIAS == GPU_DBIAS_SUMS)
        return (char *)(a.dbias_sums + at.batch * a.dbias_batch + h * a.dbias_head + key * a.dbias_key);
    return (char *)a.dbias.data + (at.batch * a.dbias.batch + h * a.dbias.head + key * a.dbias.key) * BIAS_BYTES;
}
__device__ __forceinline__ void add_dbias(char *to, float x) {
    if (DBIAS == GPU_DBIAS_SUMS)
        red_add((float *)to, x);
    else if (BIAS == GPU_BIAS_FLOAT32)
        *(float *)to = x;
    else
        *(uint16_t *)to = (uint16_t)pack(x, 0);
}

/* MASK_COPIED: whether the mask shows the warp's keys to row `lane` of a part: bit k % 4 * 8 + k / 4 says it of key k.
 */
__device__ __forceinline__ uint32_t copied_mask(uint32_t staged, int warp_key, int part) {
    const int lane = threadIdx.x % 32;
    uint32_t seen = 0;
#pragma unroll
    for (int n = 0; n < PART_ROWS * WARP_KEYS / 16; n += 32) {
        const int chunk = (n + lane) % (PART_ROWS * WARP_KEYS / 16);
        uint32_t bytes[4];
        ld_shared_16(bytes, mask_place(staged, warp_key, part, chunk));
#pragma unroll
        for (int i = 0; i < 4; i++) /* the highest bit of each byte that is not 0 */
            seen = seen >> 1 | ((((bytes[i] & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes[i]) & 0x80808080u);
    }
    if (WARP_KEYS == 16)
        return seen >> 4;
    if (PART_ROWS == 16) { /* each lane has read half of a row's keys */
        seen = lane < 16 ? seen >> 4 : seen;
        seen |= __shfl_xor_sync(0xffffffff, seen, 16);
    }
    return seen;
}

/* Otherwise the result has one bit for each score of the thread: the mask shows the pair. It is read ahead of the
 * products, which hide the wait. */
__device__ __forceinline__ uint32_t mask_bits(const struct gpu_backward_params &a, const struct place &at, int h,
                                              int warp_key, int first_row) {
    const int lane = threadIdx.x % 32;
    static_assert(ROW_TILES * KEY_TILES <= 8, "a bit each");
    uint32_t seen = 0;
#pragma unroll
    for (int j = 0; j < 2 * KEY_TILES; j++) {
        const char *mask =
            find_head(a, at, h).mask + min(at.first_key + warp_key + lane / 4 + j * 8, at.seqlen_k - 1) * a.in.mask.key;
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int row = min(first_row + n * 8 + lane % 4 * 2 + c, at.seqlen_q - 1);
                seen |= (mask[mask_rows(a, row)] != 0) << ((n * 2 + c) * 2 * KEY_TILES + j);
            }
    }
    return seen;
}

/* The same of row intervals and block masks. */
__device__ __forceinline__ uint32_t range_bits(const struct gpu_backward_params &a, const struct place &at, int h,
                                               int warp_key, int first_row) {
    const int lane = threadIdx.x % 32, key = at.first_key + warp_key + lane / 4;
    uint32_t held = 0;
#pragma unroll
    for (int n = 0; n < 2 * ROW_TILES; n++) {
        const int row = min(first_row + n / 2 * 8 + lane % 4 * 2 + n % 2, at.seqlen_q - 1);
        held |= keys_held<2 * KEY_TILES>(a.in, ranges_of_row(a.in, at.batch, at.q_begin, h, row),
                                         [&](int j) { return key + j * 8; })
                << n * 2 * KEY_TILES;
    }
    return held;
}

/* P of PART_ROWS rows, and with SOFTCAP the slope of the cap, rounded as dS will be. */
struct p_fragments {
    float p[KEY_TILES][ROW_TILES][4];
    uint32_t slope[ROW_TILES][2 * KEY_TILES];
};
/* P or dS as left operands. */
typedef uint32_t score_fragments[ROW_TILES / 2][KEY_TILES][4];

__device__ __forceinline__ void pack_scores(score_fragments &left, const float (&x)[KEY_TILES][ROW_TILES][4]) {
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
        for (int j = 0; j < 2 * KEY_TILES; j++)
            left[n / 2][j / 2][n % 2 * 2 + j % 2] = pack(x[j / 2][n][j % 2 * 2], x[j / 2][n][j % 2 * 2 + 1]);
}

/* A sub-tile of rows. */
struct sub_tile {
    struct stage stage; /* address of its rows */
    uint32_t staged;    /* address of its dS, and of P after it */
    int row, sub;       /* the stage's first row, and the sub-tile's from there */
    bool partial;       /* some row may not see some key */
    bool copying;       /* RING 0: the warp waits for copies of its masks or biases here */
};

/* The part of it from row `row` of the stage on, PART_ROWS rows, and the warp's keys. */
struct part {
    int warp_key, row;
};

/* P becomes NaN where a row sees a key that scrub_keys() has set to 0. */
__device__ __forceinline__ void spoil_p(struct p_fragments &w, uint32_t spoiled) {
    if (!SCRUB || !spoiled)
        return;
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
        for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if ((spoiled >> (2 * t + e / 2) & 1) && w.p[t][n][e] != 0.0f)
                    w.p[t][n][e] = NOT_A_NUMBER;
}

/* lse of two rows of a stage, and beside a bias the part that it has rounded away. */
struct two_rows {
    uint32_t lse[2], low[2];
};
__device__ __forceinline__ struct two_rows read_rows(const struct stage &stage, const float *low_rows, int local) {
    struct two_rows r = {};
    ld_shared_8(r.lse[0], r.lse[1], stage.rows + local * 4);
    if (BIAS && LOW_STAGED) {
        ld_shared_8(r.low[0], r.low[1], stage.rows + (2 * STAGE_ROWS + local) * 4);
    } else if (BIAS) {
        const float2 pair = *(const float2 *)(low_rows + local);
        r.low[0] = __float_as_uint(pair.x);
        r.low[1] = __float_as_uint(pair.y);
    }
    return r;
}

/* P from the products of a part, before keys are hidden. */
__device__ __forceinline__ void make_weights(struct p_fragments &w, const struct work &on, const struct sub_tile &rows,
                                             const struct part &part, const struct keys &keys, int lane) {
    const struct gpu_backward_params &a = on.params.shared;
    const struct place &at = on.at;
    const float factor = SCORES_BARE ? a.in.scale * LOG2_E : a.in.scale;
    const int own = lane % 8, eight = lane / 8 % (2 * KEY_TILES);
    uint32_t copied = 0;
    const char *bias[2 * KEY_TILES]; /* row 0 of the keys */
    if (BIAS_COPIED)
        copied = lane_address<SUB_ROWS / 8>(rows.staged, part.warp_key + line_of(own, eight),
                                            part.row % SUB_ROWS / 8 + column_of(own, eight))
                     .at;
#pragma unroll
    for (int n = 0; n < 2 * KEY_TILES && BIAS && BIAS_ROWS && !BIAS_COPIED; n++)
        bias[n] = find_head(a, at, on.h).bias +
                  min(at.first_key + part.warp_key + lane / 4 + n * 8, at.seqlen_k - 1) * a.in.bias.key * BIAS_BYTES;
    const float *low_rows = BIAS ? find_head(a, at, on.h).low + rows.row : nullptr;
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
        const int local = part.row + n * 8 + lane % 4 * 2;
        const struct two_rows r = read_rows(rows.stage, low_rows, local);
        uint32_t pairs[2 * KEY_TILES]; /* two rows of a key */
        if (BIAS_COPIED) {
            const lane_address<SUB_ROWS / 8> from(copied);
            read_pairs(pairs, WARP_KEYS >= PART_ROWS ? from.at_step(n * 8, 0) : from.at_step(n % 2 * 8, n / 2 * 2));
        }
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int inside = min(rows.row + local + c, at.seqlen_q - 1);
#pragma unroll
            for (int j = 0; j < 2 * KEY_TILES; j++) {
                float &p = w.p[j / 2][n][j % 2 * 2 + c], x = p, slope;
                if (SOFTCAP) {
                    x = cap_score(a.in, x * a.in.scale, slope);
                    w.slope[n][j] = c ? w.slope[n][j] | pack(0, slope) : pack(slope, 0);
                } else {
                    x *= factor;
                }
                if (BIAS_COPIED)
                    x += unpack((uint16_t)(pairs[j] >> c * 16));
                else if (BIAS && BIAS_ROWS)
                    x += bias_value(bias[j] + bias_rows(a, inside));
                else if (BIAS)
                    x += keys.bias[j / 2][j % 2];
                x -= __uint_as_float(r.lse[c]);
                if (BIAS)
                    x = x * LOG2_E + __uint_as_float(r.low[c]);
                else if (!SCORES_BARE)
                    x *= LOG2_E;
                p = ex2_approx(x);
            }
        }
    }
}

/* Sets P to 0 where a row does not see a key. `seen` is the result of mask_bits() and range_bits(). */
__device__ __forceinline__ void hide_keys(struct p_fragments &w, const struct work &on, const struct sub_tile &rows,
                                          const struct part &part, const struct keys &keys, uint32_t seen, int lane) {
    uint32_t rows_seen = 0;
    if (MASK_COPIED)
        rows_seen = copied_mask(rows.staged, part.warp_key, part.row % SUB_ROWS);
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int row = rows.row + part.row + n * 8 + lane % 4 * 2 + c;
            uint32_t copied = 0;
            if (MASK_COPIED)
                copied = __shfl_sync(0xffffffff, rows_seen, n * 8 + lane % 4 * 2 + c) >> (lane / 4 % 4 * 8 + lane / 16);
#pragma unroll
            for (int j = 0; j < 2 * KEY_TILES; j++) {
                bool visible = (!(WINDOW || KEYED) || row >= keys.first[j / 2][j % 2]) && row < keys.last[j / 2][j % 2];
                if (MASK_COPIED)
                    visible = visible && (copied >> 2 * j & 1);
                if (ROW_RUNS || (MASK_TILE && !MASK_COPIED))
                    visible = visible && (seen >> ((n * 2 + c) * 2 * KEY_TILES + j) & 1);
                w.p[j / 2][n][j % 2 * 2 + c] = visible ? w.p[j / 2][n][j % 2 * 2 + c] : 0.0f;
            }
        }
}

/* Makes P of a part. */
__device__ __forceinline__ void make_p(struct p_fragments &w, const struct work &on, const struct sub_tile &rows,
                                       const struct part &part) {
    const struct gpu_backward_params &a = on.params.shared;
    const int lane = fresh_lane();
    uint32_t seen = 0xffffffffu;
    if (MASK_TILE && !MASK_COPIED && rows.partial)
        seen = mask_bits(a, on.at, on.h, part.warp_key, rows.row + part.row);
    if (ROW_RUNS && rows.partial)
        seen &= range_bits(a, on.at, on.h, part.warp_key, rows.row + part.row);
    multiply_scores<HEAD_DIM, false>(w.p, on.tiles.self, on.tiles.k, part.warp_key, nullptr, rows.stage.q, part.row);
    if (COPIED && (RING || rows.copying))
        cp_async_wait<0>();
    if (COPIED)
        __syncwarp();
    struct keys keys = {};
    if (KEYED)
        keys = stored_keys(on.tiles.keys, part.warp_key);
    make_weights(w, on, rows, part, keys, lane);
    if (KEYED)
        hide_keys(w, on, rows, part, keys, seen, lane);
    else if (rows.partial)
        hide_keys(w, on, rows, part, bound_keys(a, on.at, part.warp_key), seen, lane);
    spoil_p(w, on.spoiled);
}

/* dS = P (dP - delta) of the same part, as left operands. */
__device__ __forceinline__ void make_ds(score_fragments &left, struct sums &sums, const struct p_fragments &w,
                                        const struct work &on, const struct sub_tile &rows, const struct part &part) {
    const struct gpu_backward_params &a = on.params.shared;
    const struct place &at = on.at;
    const struct tiles &tiles = on.tiles;
    const int h = on.h, block_row = rows.row, warp_key = part.warp_key, sub_row = part.row;
    const struct stage &stage = rows.stage;
    const int lane =
        (RING && !NO_FEATURES) || UNEVEN || (V_IN_REGISTERS && DETERMINISTIC) ? fresh_lane() : threadIdx.x % 32;
    await_dbias_turn(!LATE_TURN, a, at, h, block_row + sub_row);
    float dp[KEY_TILES][ROW_TILES][4];
    const int num_keys = at.seqlen_k - at.first_key - warp_key - lane / 4;
    char *dbias[WIDE_SCORES ? 1 : 2 * KEY_TILES]; /* aligned: the other keys' lie at known distances */
#pragma unroll
    for (int n = 0; n < (WIDE_SCORES ? 1 : 2 * KEY_TILES) && DBIAS_OF_PAIRS; n++)
        dbias[n] = dbias_of_key(a, at, h, at.first_key + warp_key + lane / 4 + n * 8);
    multiply_scores<HEAD_DIM_V, V_IN_REGISTERS>(dp, tiles.self, tiles.v, warp_key, on.values, stage.dout, sub_row);
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++) {
        const int local = sub_row + n * 8 + lane % 4 * 2;
        uint32_t delta[2];
        ld_shared_8(delta[0], delta[1], stage.rows + (STAGE_ROWS + local) * 4);
#pragma unroll
        for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                dp[t][n][e] = w.p[t][n][e] * (dp[t][n][e] - __uint_as_float(delta[e % 2]));
    }
    if (KEYED || (BIAS && BIAS_ROWS) || rows.partial) /* nothing of hidden pairs, also where dO or V is not finite */
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
            for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    dp[t][n][e] = w.p[t][n][e] == 0.0f ? 0.0f : dp[t][n][e];
    await_dbias_turn(LATE_TURN, a, at, h, block_row + sub_row);
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
        for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int j = 2 * t + e / 2;
                if (DBIAS == GPU_DBIAS_KEYS)
                    sums.dbias[t][e / 2] += dp[t][n][e];
                if (DBIAS_OF_PAIRS) {
                    const int row = block_row + sub_row + n * 8 + lane % 4 * 2 + e % 2;
                    char *to = dbias[WIDE_SCORES ? 0 : j] + dbias_rows(a, row);
                    /* One condition in two forms, each where the assembler spills less with it. */
                    const bool inside = WIDE_SCORES || V_IN_REGISTERS
                                            ? j * 8 < num_keys
                                            : at.first_key + warp_key + lane / 4 + j * 8 < at.seqlen_k;
                    if (row < at.seqlen_q && inside)
                        add_dbias(to + (WIDE_SCORES ? j * 8 * DBIAS_BYTES : 0), dp[t][n][e]);
                }
                if (SOFTCAP) { /* of a hidden NaN, NaN */
                    const float slope = unpack((uint16_t)(w.slope[n][j] >> e % 2 * 16));
                    dp[t][n][e] = dp[t][n][e] == 0.0f ? 0.0f : dp[t][n][e] * slope;
                }
            }
    pack_scores(left, dp);
}

/* Stores scores to shared memory as [key][row of the sub-tile]. */
__device__ __forceinline__ void store_scores(uint32_t tile, const uint32_t (&left)[ROW_TILES / 2][KEY_TILES][4],
                                             int warp_key, int warp_row) {
    const int lane = NO_FEATURES ? threadIdx.x % 32 : fresh_lane();
    if (COPIED)
        __syncwarp(); /* other lanes have read the mask or bias that lay here */
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
        for (int j = 0; j < 2 * KEY_TILES; j++)
            st_shared_4(tile + chunk_offset<SUB_ROWS / 8>(warp_key + lane / 4 + j * 8, warp_row / 8 + n) + lane % 4 * 4,
                        left[n / 2][j / 2][n % 2 * 2 + j % 2]);
}

/* DBIAS_FROM_DS: the gradient of the bias from the dS that the warp has staged, eight keys of a row a lane. `row`: the
 * part's first. Of lane % 4 = p, matrix m has the keys 8 p + 2 (m ^ p) and the next: the eight lines of a matrix lie in
 * different banks. */
__device__ __forceinline__ void store_dbias(const struct gpu_backward_params &a, const struct place &at, int h,
                                            uint32_t staged, int warp_key, int part, int row) {
    const int lane = threadIdx.x % 32, own = lane % 4, line = lane % 8 / 2;
    const lane_address<SUB_ROWS / 8> from(staged, warp_key + 8 * line + 2 * (lane / 8 ^ line) + lane % 2, part / 8);
    const int key = at.first_key + warp_key + 8 * own, num_keys = min(at.seqlen_k - key, 8);
    char *to = dbias_of_key(a, at, h, key) + dbias_rows(a, row + lane / 4);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++, to += dbias_rows(a, 8)) {
        uint32_t x[4];
        ldmatrix_x4_trans(x, from.at_step(0, n));
        const uint4 odd = own & 1 ? make_uint4(x[1], x[0], x[3], x[2]) : make_uint4(x[0], x[1], x[2], x[3]);
        const uint4 pairs = own & 2 ? make_uint4(odd.z, odd.w, odd.x, odd.y) : odd;
        if (row + n * 8 + lane / 4 < at.seqlen_q)
            store_words<true>(to, {pairs.x, pairs.y, pairs.z, pairs.w}, num_keys);
    }
}

#endif
