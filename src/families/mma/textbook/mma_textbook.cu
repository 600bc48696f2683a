/* mma_textbook.cu: the six textbook kernels as one text; they differ in what each keeps in shared memory.
 *
 * Idea: exact attention by blocks with an online softmax (Milakov and Gimelshein, arXiv 1805.02867; Dao et al.,
 * FlashAttention, arXiv 2205.14135). A block owns 64 query rows and walks the keys, BLOCK_N at a time:
 *     S = Q K^T, m' = max(m, rows of S), P = exp(S - m'), O = O exp(m - m') + P V, l = l exp(m - m') + rows of P
 * and in the end O / l is the output and m + log l the lse. The kernels differ in who computes what, and in how much
 * of Q, K and V lies in shared memory at a time:
 *
 *     split-kv            2 x 2 warps split rows and keys, as FlashAttention 1 did: no warp sees all keys of a row,
 *                         so maxima, P and sums meet in shared memory, at two more barriers a step
 *     split-q             each warp has 16 rows and all keys (FlashAttention 2): maxima and sums stay in four lanes,
 *                         and the accumulator of S has the layout of the left operand of P V: nothing is exchanged
 *     split-q+share-kv    K is not needed once S is there: V takes its place
 *     split-q+share-qkv   Q does not change: its fragments go to registers once, K and V take its place
 *     split-q+tiling-qk   S is a sum over the head dim: Q and K come in slices of at most 64 columns, and V comes 16
 *                         keys at a time
 *     split-q+tiling-qkv  each column of O is a sum of its own: V comes in slices of at most 64 columns as well, and
 *                         shared memory does not depend on the head dim
 *
 * What arrives in shared memory at a time is called a part: K whole or a slice of Q and K, V whole or a slice. All
 * parts go through a ring of places in the order in which they are used, so that one pipeline serves all six. The ring
 * has STAGES places, and one more with split-kv and split-q, so that K and V of a step are there together. With one
 * place nothing is fetched while a part is used; with two or three, one or two parts are on their way.
 *
 * Registers bound the columns of O: O takes OUT_COLUMNS / 2 of a thread's 255, S BLOCK_N / 2, and the fragments of Q
 * that share-qkv keeps HEAD_DIM / 4. For more columns than fit, OUT_BLOCKS blocks share the rows, each with its own
 * columns of V, and each makes S anew: nothing spills, and D = 1024 costs 2.5 times the products. What is found from
 * the thread's index is found anew where it is needed, instead of keeping addresses in registers.
 *
 * Shared memory: mma_textbook.h, which also says how tiles are swizzled or padded and which lane touches what. */
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/special.cuh"
#include "families/mma/textbook/mma_textbook.h"
#include "gpu/convert.cuh"
#include "gpu/numbers.h"
#include "gpu/quad.cuh"

MMA_TEXTBOOK_CONSTANTS(GPU_CONSTANT_GIVEN)

#define THREADS  (32 * MMA_TEXTBOOK_WARPS)
#define BLOCK_M  MMA_TEXTBOOK_BLOCK_M
#define SPLIT_KV (ALGORITHM == MMA_SPLIT_KV)
#define TILED    MMA_TEXTBOOK_IS_TILED(ALGORITHM)
#define KEEPS_Q  (ALGORITHM == MMA_SHARE_QKV) /* in registers */

/* The warps as a grid over rows x keys while S is made, and over rows x columns while O is. */
#define ROW_TILES (SPLIT_KV ? 2 : 1)            /* 16-row tiles of a warp */
#define WARPS_N   (SPLIT_KV ? 2 : 1)            /* warps side by side */
#define KEY_TILES (BLOCK_N / WARPS_N / 8)       /* accumulators of S side by side: 8 keys each */
#define OUT_TILES (OUT_COLUMNS / WARPS_N / 8)   /* accumulators of O side by side: 8 columns each */
#define KEY_STEPS (BLOCK_N / 16)                /* left operands of P V, 16 keys each */
#define Q_STEPS   (KEEPS_Q ? HEAD_DIM / 16 : 1) /* left operands of Q K^T that are kept */

/* Parts of a step, and the ring they go through. */
#define K_PARTS (HEAD_DIM / SLICE)
#define V_ROWS  MMA_TEXTBOOK_V_ROWS(ALGORITHM, BLOCK_N) /* keys of a part of V */
#define V_PARTS (BLOCK_N / V_ROWS * (OUT_COLUMNS / OUT_SLICE))
#define PARTS   (K_PARTS + V_PARTS)
#define PLACES  MMA_TEXTBOOK_PLACES(ALGORITHM, STAGES)

static constexpr int RING_OFFSET = MMA_TEXTBOOK_RING_OFFSET(ALGORITHM, HEAD_DIM, SWIZZLED);
static constexpr int PLACE_BYTES = MMA_TEXTBOOK_PLACE_BYTES(ALGORITHM, SLICE, OUT_SLICE, BLOCK_N, SWIZZLED);
static constexpr int Q_SLICE_BYTES = TILED ? MMA_TEXTBOOK_TILE_BYTES(BLOCK_M, SLICE, SWIZZLED) : 0;
static constexpr int P_OFFSET = MMA_TEXTBOOK_P_OFFSET(ALGORITHM, HEAD_DIM, SLICE, OUT_SLICE, BLOCK_N, STAGES, SWIZZLED);
static constexpr int STATISTICS_OFFSET = P_OFFSET + MMA_TEXTBOOK_TILE_BYTES(BLOCK_M, BLOCK_N, SWIZZLED);
static constexpr int PANEL_TILES = MMA_TEXTBOOK_PANEL_COLUMNS / 8;

static_assert(BLOCK_N % (16 * WARPS_N) == 0 && SLICE % 16 == 0 && OUT_COLUMNS % (16 * WARPS_N) == 0 &&
                  OUT_SLICE % 16 == 0,
              "operands are 16 x 16");
static_assert(K_PARTS * SLICE == HEAD_DIM && OUT_COLUMNS % OUT_SLICE == 0, "slices are whole");
static_assert(TILED || (SLICE == HEAD_DIM && OUT_SLICE == OUT_COLUMNS), "only tiling kernels slice");
static_assert(!F16_ACCUMULATION || DTYPE == GPU_FLOAT16, "there is no sum in bfloat16");
static_assert(!SPLIT_KV || STATISTICS_OFFSET >= MMA_TEXTBOOK_WARPS * MMA_TEXTBOOK_PANEL_BYTES(SWIZZLED),
              "panels of the output do not reach the statistics");

/* ---- tiles in shared memory ---- */

template <int chunks> __device__ __forceinline__ uint32_t offset_of(int row, int chunk) {
    return (uint32_t)MMA_TEXTBOOK_OFFSET(row, chunk, chunks, SWIZZLED);
}

/* rows x chunks of a matrix in global memory, asynchronously, 16 bytes a thread at a time. Rows from rows_left on and
 * columns from columns_left on are not read: zeros take their places. */
template <int rows, int chunks>
__device__ __forceinline__ void copy_tile(uint32_t tile, const char *from, int64_t row_bytes, int rows_left,
                                          int columns_left) {
#pragma unroll 4
    for (int index = (int)tid_x_reread(); index < rows * chunks; index += THREADS) {
        const int row = index / chunks, chunk = index % chunks;
        const int count = row < rows_left ? min(max(columns_left - chunk * 8, 0), 8) : 0;
        cp_async_16_fill(tile + offset_of<chunks>(row, chunk), count ? from + row * row_bytes + chunk * 16 : from,
                         count * 2);
    }
}

/* ---- the ring ---- */

/* One block's place in the problem. */
struct place {
    int batch, head;
    int first_row, rows;       /* of the sequence; rows that exist from there on */
    int first_column, columns; /* of V and O; columns that exist from there on */
    int steps;                 /* of BLOCK_N keys: those that some row of the block sees */
    int full_key;              /* keys 0 .. full_key - 1 are seen by all of its rows */
    const char *q, *k, *v;     /* first row of the block, first key; V from the block's first column on */
};

/* Where part `part` of a step goes to and is read from: parts take the places in turn. */
__device__ __forceinline__ uint32_t place_of(int step, int part, uint32_t ring) {
    return ring + (uint32_t)(step * PARTS + part) % PLACES * PLACE_BYTES;
}

/* Issues the copies of a part: `part` counts from that of `step` on and may reach into later steps. Past the end there
 * is only an empty group, so that groups can be counted. */
__device__ __forceinline__ void fetch_part(int step, int part, uint32_t ring, const struct place &at,
                                           const struct gpu_forward_params &a) {
    const uint32_t to = place_of(step, part, ring);
    step += part / PARTS;
    part %= PARTS;
    const int key = step * BLOCK_N, keys = a.seqlen_k - key;
    if (step < at.steps && part < K_PARTS) {
        const int column = part * SLICE;
        if (TILED)
            copy_tile<BLOCK_M, SLICE / 8>(to, at.q + column * 2, a.q.row * 2, at.rows, a.head_dim - column);
        copy_tile<BLOCK_N, SLICE / 8>(to + Q_SLICE_BYTES, at.k + (key * a.k.row + column) * 2, a.k.row * 2, keys,
                                      a.head_dim - column);
    } else if (step < at.steps) {
        const int first = V_ROWS < BLOCK_N ? (part - K_PARTS) * V_ROWS : 0;
        const int column = V_ROWS < BLOCK_N ? 0 : (part - K_PARTS) * OUT_SLICE;
        copy_tile<V_ROWS, OUT_SLICE / 8>(to, at.v + ((key + first) * a.v.row + column) * 2, a.v.row * 2, keys - first,
                                         at.columns - column);
    }
    cp_async_commit();
}

/* Waits for a part and returns its address. With one place, the part is fetched here, once all warps have read the one
 * before. With more, PLACES - 1 parts are under way when this is called: the oldest is waited for, and the barrier that
 * shows it to all threads also says that all have read the part before it, whose place is filled again. */
__device__ __forceinline__ uint32_t next_part(int step, int part, uint32_t ring, const struct place &at,
                                              const struct gpu_forward_params &a) {
    if (PLACES == 1) {
        __syncthreads();
        fetch_part(step, part, ring, at, a);
        cp_async_wait<0>();
        __syncthreads();
    } else {
        cp_async_wait<PLACES == 1 ? 0 : PLACES - 2>();
        __syncthreads();
        fetch_part(step, part + PLACES - 1, ring, at, a);
    }
    return place_of(step, part, ring);
}

/* ---- products ---- */

/* An accumulator of 16 x 8: the sum of products in float32, or in float16 (two elements a register). */
template <bool in_float16> struct accumulator { typedef float type[4]; };
template <> struct accumulator<true> { typedef uint32_t type[2]; };
typedef accumulator<F16_ACCUMULATION>::type products;

/* c += a b, 16 x 8 x 16. */
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if (DTYPE == GPU_BFLOAT16)
        mma_m16n8k16_bf16(c, a, b0, b1);
    else
        mma_m16n8k16_f16(c, a, b0, b1);
}
__device__ __forceinline__ void multiply(uint32_t (&c)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_m16n8k16_f16_f16(c, a, b0, b1);
}
__device__ __forceinline__ float product(const float (&c)[4], int e) { return c[e]; }
__device__ __forceinline__ float product(const uint32_t (&c)[2], int e) {
    return cvt_f32_f16((uint16_t)(c[e / 2] >> (e % 2 * 16)));
}

/* The warp's part of the block. */
struct warp_place {
    int row;    /* first of its ROW_TILES * 16 rows */
    int key;    /* first of its KEY_TILES * 8 keys */
    int column; /* first of its OUT_TILES * 8 columns of O */
    int lane;
};
/* Found anew where it is needed, so that no registers hold it, and what depends on it, in the meantime. */
__device__ __forceinline__ struct warp_place find_warp() {
    const int thread = (int)tid_x_reread(), side = thread / 32 % WARPS_N;
    return {thread / 32 / WARPS_N * ROW_TILES * 16, side * KEY_TILES * 8, side * OUT_TILES * 8, thread % 32};
}

/* Where two warps share the keys of a row; the others exchange nothing. */
__device__ __forceinline__ struct warp_place find_sharing_warp() { return SPLIT_KV ? find_warp() : warp_place{}; }

typedef uint32_t query_fragments[Q_STEPS][4];

/* All of the warp's rows of Q. */
__device__ __forceinline__ void load_queries(query_fragments &kept, uint32_t q_tile) {
    const struct warp_place w = find_warp();
#pragma unroll
    for (int k = 0; k < Q_STEPS; k++)
        ldmatrix_x4(kept[k], q_tile + offset_of<HEAD_DIM / 8>(w.row + MMA_TEXTBOOK_LEFT_ROW(w.lane),
                                                              2 * k + MMA_TEXTBOOK_LEFT_CHUNK(w.lane)));
}

/* S += Q K^T over one slice of the head dim. */
__device__ __forceinline__ void multiply_qk(products (&s)[ROW_TILES][KEY_TILES], const query_fragments &kept,
                                            uint32_t q_tile, uint32_t k_tile) {
    const struct warp_place w = find_warp();
    const int row = w.row + MMA_TEXTBOOK_LEFT_ROW(w.lane), half = MMA_TEXTBOOK_LEFT_CHUNK(w.lane);
    const int key = w.key + MMA_TEXTBOOK_RIGHT_ROW(w.lane), key_half = MMA_TEXTBOOK_RIGHT_CHUNK(w.lane);
#pragma unroll
    for (int k = 0; k < SLICE / 16; k++) {
        uint32_t q[ROW_TILES][4];
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            if (!KEEPS_Q)
                ldmatrix_x4(q[r], q_tile + offset_of<SLICE / 8>(row + r * 16, 2 * k + half));
#pragma unroll
            for (int e = 0; KEEPS_Q && e < 4; e++)
                q[r][e] = kept[KEEPS_Q ? k : 0][e];
        }
#pragma unroll
        for (int n = 0; n < KEY_TILES; n += 2) {
            uint32_t b[4];
            ldmatrix_x4(b, k_tile + offset_of<SLICE / 8>(key + n * 8, 2 * k + key_half));
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                multiply(s[r][n], q[r], b[0], b[1]);
                multiply(s[r][n + 1], q[r], b[2], b[3]);
            }
        }
    }
}

/* O += P V for one part of V: the left operands from first_step on, the accumulators from first_tile on. Four
 * accumulators at a time, so that no product waits for the one before; with float16 sums these are of this part alone
 * and are added to O in float32, so that no sum in float16 is longer than BLOCK_N. */
__device__ __forceinline__ void multiply_pv(float (&o)[ROW_TILES][OUT_TILES][4],
                                            const uint32_t (&p)[KEY_STEPS][ROW_TILES][4], uint32_t v_tile,
                                            int first_step, int first_tile) {
    constexpr int steps = V_ROWS / 16, tiles = OUT_SLICE / WARPS_N / 8, group = tiles % 4 == 0 ? 4 : 2;
    const struct warp_place w = find_warp();
    const int row = MMA_TEXTBOOK_LEFT_ROW(w.lane), chunk = w.column / 8 + MMA_TEXTBOOK_LEFT_CHUNK(w.lane);
#pragma unroll
    for (int n = 0; n < tiles; n += group) {
#if F16_ACCUMULATION
        products sums[ROW_TILES][group] = {};
#else
        products(&sums)[ROW_TILES][OUT_TILES] = o;
#endif
        const int first = F16_ACCUMULATION ? 0 : first_tile + n; /* accumulator of column tile n */
#pragma unroll
        for (int step = 0; step < steps; step++)
#pragma unroll
            for (int g = 0; g < group; g += 2) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, v_tile + offset_of<OUT_SLICE / 8>(step * 16 + row, chunk + n + g));
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) {
                    multiply(sums[r][first + g], p[first_step + step][r], b[0], b[1]);
                    multiply(sums[r][first + g + 1], p[first_step + step][r], b[2], b[3]);
                }
            }
#pragma unroll
        for (int r = 0; F16_ACCUMULATION && r < ROW_TILES; r++)
#pragma unroll
            for (int g = 0; g < group; g++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    o[r][first_tile + n + g][e] += product(sums[r][g], e);
    }
}

/* ---- online softmax ---- */

/* Of the rows of a lane: [row tile][row of the tile's upper or lower half]. */
struct row_state {
    float max[ROW_TILES][2]; /* of scores times log2(e) so far */
    float sum[ROW_TILES][2]; /* of P so far: of this lane's keys alone */
};

/* A row of a block whose keys two warps share: index of one warp's number in the statistics. */
__device__ __forceinline__ int statistic_of(const struct warp_place &w, int r, int half, int side) {
    return side * BLOCK_M + w.row + r * 16 + half * 8 + MMA_TEXTBOOK_SUM_ROW(w.lane);
}

/* Scores in units of log2; keys that a row does not see become -inf. */
__device__ __forceinline__ void finish_scores(float (&s)[ROW_TILES][KEY_TILES][4],
                                              const products (&sums)[ROW_TILES][KEY_TILES], const struct place &at,
                                              const struct gpu_forward_params &a, int first_key) {
    const struct warp_place w = find_warp();
    const float unit = a.scale * LOG2_E;
    const bool partial = first_key + BLOCK_N > at.full_key;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int row = at.first_row + w.row + r * 16 + e / 2 * 8 + MMA_TEXTBOOK_SUM_ROW(w.lane);
            const int last = CAUSAL ? min(a.seqlen_k - 1, row + a.seqlen_k - a.seqlen_q) : a.seqlen_k - 1;
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++) {
                const int key = first_key + w.key + n * 8 + MMA_TEXTBOOK_SUM_COLUMN(w.lane) + e % 2;
                const float x = product(sums[r][n], e) * unit;
                s[r][n][e] = partial && key > last ? MINUS_INF : x;
            }
        }
}

/* Raises the maxima to those of this step's scores, and scales what was summed up under the old ones. */
__device__ __forceinline__ void raise_maxima(struct row_state &state, float (&o)[ROW_TILES][OUT_TILES][4],
                                             const float (&s)[ROW_TILES][KEY_TILES][4], float *statistics) {
    const struct warp_place w = find_sharing_warp();
    float next[ROW_TILES][2];
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float m = MINUS_INF;
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++)
                m = fmaxf(m, fmaxf(s[r][n][half * 2], s[r][n][half * 2 + 1]));
            next[r][half] = quad_max(m);
            if (SPLIT_KV && MMA_TEXTBOOK_SUM_COLUMN(w.lane) == 0)
                statistics[statistic_of(w, r, half, w.key != 0)] = next[r][half];
        }
    if (SPLIT_KV)
        __syncthreads(); /* the other half of the keys has its maxima */
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float m = fmaxf(state.max[r][half], next[r][half]);
            if (SPLIT_KV)
                m = fmaxf(m, statistics[statistic_of(w, r, half, w.key == 0)]);
            /* a row that has not seen a key yet has nothing to scale */
            const float factor = m == state.max[r][half] ? 1.0f : ex2_approx(state.max[r][half] - m);
            state.max[r][half] = m;
            state.sum[r][half] *= factor;
#pragma unroll
            for (int n = 0; n < OUT_TILES; n++) {
                o[r][n][half * 2] *= factor;
                o[r][n][half * 2 + 1] *= factor;
            }
        }
}

/* P as the left operand of P V. The accumulators of two neighbouring groups of eight keys are a left operand of 16
 * keys as they stand; with split-kv, other warps need them: they go through shared memory. */
__device__ __forceinline__ void make_p(uint32_t (&p)[KEY_STEPS][ROW_TILES][4], struct row_state &state,
                                       const float (&s)[ROW_TILES][KEY_TILES][4], uint32_t p_tile) {
    const struct warp_place w = find_sharing_warp();
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float shift = state.max[r][half] == MINUS_INF ? 0.0f : state.max[r][half];
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++) {
                const float x = ex2_approx(s[r][n][half * 2] - shift), y = ex2_approx(s[r][n][half * 2 + 1] - shift);
                state.sum[r][half] += x + y;
                const int row = w.row + r * 16 + half * 8 + MMA_TEXTBOOK_SUM_ROW(w.lane);
                if (SPLIT_KV)
                    st_shared_4(p_tile + offset_of<BLOCK_N / 8>(row, w.key / 8 + n) +
                                    MMA_TEXTBOOK_SUM_COLUMN(w.lane) * 2,
                                pack(x, y));
                else
                    p[n / 2][r][n % 2 * 2 + half] = pack(x, y);
            }
        }
    if (SPLIT_KV)
        __syncthreads(); /* P of all keys is there */
#pragma unroll
    for (int step = 0; SPLIT_KV && step < KEY_STEPS; step++)
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
            ldmatrix_x4(p[step][r], p_tile + offset_of<BLOCK_N / 8>(w.row + r * 16 + MMA_TEXTBOOK_LEFT_ROW(w.lane),
                                                                    step * 2 + MMA_TEXTBOOK_LEFT_CHUNK(w.lane)));
}

/* The sums of whole rows. */
__device__ __forceinline__ void finish_sums(struct row_state &state, float *statistics) {
    const struct warp_place w = find_sharing_warp();
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            state.sum[r][half] = quad_sum(state.sum[r][half]);
            if (SPLIT_KV && MMA_TEXTBOOK_SUM_COLUMN(w.lane) == 0)
                statistics[statistic_of(w, r, half, w.key != 0)] = state.sum[r][half];
        }
    if (SPLIT_KV)
        __syncthreads();
#pragma unroll
    for (int r = 0; SPLIT_KV && r < ROW_TILES; r++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            state.sum[r][half] += statistics[statistic_of(w, r, half, w.key == 0)];
}

/* ---- output ---- */

/* Divides by the sums and writes the lse, then O: 64 columns of 16 rows at a time go through the warp's own panel in
 * shared memory, because a lane holds 4 bytes of a row there, and eight lanes write 128 bytes of it here. */
__device__ __forceinline__ void store_rows(struct row_state &state, float (&o)[ROW_TILES][OUT_TILES][4],
                                           const struct place &at, const struct gpu_forward_params &a, uint32_t panel) {
    const struct warp_place w = find_warp();
    char *const out =
        a.out.data +
        (at.batch * a.out.batch + (int64_t)at.first_row * a.out.row + at.head * a.out.head + at.first_column) * 2;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const bool empty = state.sum[r][half] == 0.0f; /* of scores that are all NaN it is NaN */
            const float inverse = empty ? 0.0f : 1.0f / state.sum[r][half];
            const int row = w.row + r * 16 + half * 8 + MMA_TEXTBOOK_SUM_ROW(w.lane);
            const bool first_of_row = at.first_column == 0 && w.column == 0 && MMA_TEXTBOOK_SUM_COLUMN(w.lane) == 0;
            if (a.lse.data && first_of_row && row < at.rows)
                a.lse.data[at.batch * a.lse.batch + at.head * a.lse.head + (int64_t)(at.first_row + row) * a.lse.row] =
                    empty ? -MINUS_INF : state.max[r][half] * LN_2 + __logf(state.sum[r][half]);
#pragma unroll
            for (int n = 0; n < OUT_TILES; n++) {
                o[r][n][half * 2] *= inverse;
                o[r][n][half * 2 + 1] *= inverse;
            }
        }
#pragma unroll
        for (int first = 0; first < OUT_TILES; first += PANEL_TILES) {
#pragma unroll
            for (int n = first; n < first + PANEL_TILES && n < OUT_TILES; n++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    st_shared_4(panel + offset_of<PANEL_TILES>(MMA_TEXTBOOK_SUM_ROW(w.lane) + half * 8, n - first) +
                                    MMA_TEXTBOOK_SUM_COLUMN(w.lane) * 2,
                                pack(o[r][n][half * 2], o[r][n][half * 2 + 1]));
            __syncwarp();
            for (int index = w.lane; index < 16 * PANEL_TILES; index += 32) {
                const int row = index / PANEL_TILES, chunk = index % PANEL_TILES;
                const int column = w.column + (first + chunk) * 8, count = min(at.columns - column, 8);
                if (first + chunk >= OUT_TILES || count <= 0 || w.row + r * 16 + row >= at.rows)
                    continue;
                uint32_t word[4];
                ld_shared_16(word, panel + offset_of<PANEL_TILES>(row, chunk));
                char *to = out + ((w.row + r * 16 + row) * a.out.row + column) * 2;
                if (count == 8)
                    *(uint4 *)to = make_uint4(word[0], word[1], word[2], word[3]);
                else
#pragma unroll
                    for (int e = 0; e < 8; e++)
                        if (e < count)
                            ((uint16_t *)to)[e] = (uint16_t)(word[e / 2] >> (e % 2 * 16));
            }
            __syncwarp();
        }
    }
}

/* ---- the kernel ---- */

/* Blocks that share rows are neighbours; with causal, late rows, which see most keys, come first. */
__device__ __forceinline__ struct place find_place(const struct gpu_forward_params &a) {
    struct place at;
    const int row_blocks = (a.seqlen_q + BLOCK_M - 1) / BLOCK_M, index = blockIdx.x / OUT_BLOCKS;
    const int block = CAUSAL ? row_blocks - 1 - index % row_blocks : index % row_blocks;
    const int head = index / row_blocks;
    at.batch = head / a.heads;
    at.head = head % a.heads;
    at.first_row = block * BLOCK_M;
    at.rows = a.seqlen_q - at.first_row;
    at.first_column = blockIdx.x % OUT_BLOCKS * OUT_COLUMNS;
    at.columns = a.head_dim_v - at.first_column;
    /* row i sees keys 0 .. i + diagonal */
    const int diagonal = a.seqlen_k - a.seqlen_q, last_row = at.first_row + min(at.rows, BLOCK_M) - 1;
    at.steps = ((CAUSAL ? max(last_row + diagonal + 1, 0) : a.seqlen_k) + BLOCK_N - 1) / BLOCK_N;
    at.full_key = CAUSAL ? min(at.first_row + diagonal + 1, a.seqlen_k) : a.seqlen_k;
    const int head_kv = at.head / a.group;
    at.q = a.q.data + (at.batch * a.q.batch + (int64_t)at.first_row * a.q.row + at.head * a.q.head) * 2;
    at.k = a.k.data + (at.batch * a.k.batch + head_kv * a.k.head) * 2;
    at.v = a.v.data + (at.batch * a.v.batch + head_kv * a.v.head + at.first_column) * 2;
    return at;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mma_textbook(const __grid_constant__ struct gpu_forward_params a) {
    extern __shared__ __align__(128) char shared[];
    const uint32_t first = shared_address(shared);
    const struct place at = find_place(a);
    float *const statistics = (float *)(shared + (SPLIT_KV ? STATISTICS_OFFSET : 0));

    float o[ROW_TILES][OUT_TILES][4] = {};
    struct row_state state = {};
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
        state.max[r][0] = state.max[r][1] = MINUS_INF;

    /* Q, unless it comes in slices: to its own place, or to the ring's and on to registers. */
    query_fragments kept;
    if (!TILED) {
        copy_tile<BLOCK_M, HEAD_DIM / 8>(first, at.q, a.q.row * 2, at.rows, a.head_dim);
        cp_async_commit();
    }
    if (KEEPS_Q) {
        cp_async_wait<0>();
        __syncthreads();
        load_queries(kept, first);
        __syncthreads(); /* all warps have their fragments: the ring may be filled */
    }

    const uint32_t ring = first + RING_OFFSET;
#pragma unroll
    for (int part = 0; part < PLACES - 1; part++)
        fetch_part(0, part, ring, at, a);

#pragma unroll 1
    for (int step = 0; step < at.steps; step++) {
        float s[ROW_TILES][KEY_TILES][4];
        {
            products sums[ROW_TILES][KEY_TILES] = {};
#pragma unroll 1
            for (int part = 0; part < K_PARTS; part++) {
                const uint32_t place = next_part(step, part, ring, at, a);
                multiply_qk(sums, kept, TILED ? place : first, place + Q_SLICE_BYTES);
            }
            finish_scores(s, sums, at, a, step * BLOCK_N);
        }
        uint32_t p[KEY_STEPS][ROW_TILES][4];
        raise_maxima(state, o, s, statistics);
        make_p(p, state, s, first + P_OFFSET);
#pragma unroll
        for (int part = 0; part < V_PARTS; part++) {
            const uint32_t place = next_part(step, K_PARTS + part, ring, at, a);
            const int first_step = V_ROWS < BLOCK_N ? part * (V_ROWS / 16) : 0;
            const int first_tile = V_ROWS < BLOCK_N ? 0 : part * (OUT_SLICE / 8);
            multiply_pv(o, p, place, first_step, first_tile);
        }
    }

    finish_sums(state, statistics);
    cp_async_wait<0>();
    __syncthreads(); /* the output overwrites shared memory, which no thread reads or fills any more */
    store_rows(state, o, at, a, first + threadIdx.x / 32 * MMA_TEXTBOOK_PANEL_BYTES(SWIZZLED));
}
