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
#include "gpu/rest.cuh"
#include "gpu/visible.cuh"

MMA_FORWARD_CONSTANTS(GPU_CONSTANT_GIVEN)

constexpr int THREADS = 32 * WARPS;
constexpr int BLOCK_M = 16 * ROW_TILES * WARPS;
constexpr int KEY_TILES = BLOCK_N / 8;    /* groups of eight keys: one accumulator of S each */
constexpr int OUT_TILES = HEAD_DIM_V / 8; /* groups of eight columns of O */
/* Intervals, and a mask or bias without a row axis, are read once for all rows of the block: the keys that some row
 * sees are listed, and only they are loaded. */
constexpr bool KEY_LIST = KEYED;
constexpr bool TILE_LIST = MASK && MASK_ROWS && !KEY_LIST; /* tiles in which some row sees some key are listed */
/* Mask or bias with rows whose keys are contiguous: each warp copies those of its own rows, a tile ahead. */
constexpr bool STAGED = SCORES_ALIGNED && !KEY_LIST && ((MASK && MASK_ROWS) || (BIAS && BIAS_ROWS));
/* Nothing is added to the scores, and tiles may be full: those have a path of their own. */
constexpr bool FAST_PATH = OPTIMISTIC && MAXIMA_BARE && !STAGED && !KEY_LIST;
constexpr float SUM_MAX = 64.0f; /* of a thread's P of one row and tile, before the maximum is raised */

#include "families/mma/mma_tile.cuh"

static_assert(BLOCK_N % 16 == 0 && HEAD_DIM % 16 == 0 && HEAD_DIM_V % 16 == 0, "tiles are multiples of 16");

/* ---- shared memory ---- */

/* Bytes from row to row of K and V. Those of an aligned problem are less than 2^31: registers are scarce. */
#if ALIGNED
typedef int row_distance;
#else
typedef int64_t row_distance;
#endif

/* Tiles of `tile_rows` rows of one matrix. Where the block's threads cover whole rows, a thread's chunks lie a constant
 * stride apart in both memories, and what it needs is made once. */
template <int chunks, int tile_rows> struct tile_source {
    static constexpr bool regular =
        THREADS % chunks == 0 && THREADS / chunks % 8 == 0 && tile_rows * chunks % THREADS == 0 && ALIGNED;
    static constexpr int row_step = THREADS / chunks;
    const char *data; /* of the matrix; where regular, of the thread's first chunk */
    row_distance row_bytes;
    int columns;
    int row, bytes;  /* the thread's first row, and how much of its chunk is inside the row */
    uint32_t offset; /* of the thread's first chunk in a tile */

    __device__ __forceinline__ tile_source(const char *first, int64_t row_stride, int num_columns) {
        data = first;
        row_bytes = (row_distance)(row_stride * 2);
        columns = num_columns;
        if constexpr (regular) {
            const int chunk = threadIdx.x % chunks;
            row = threadIdx.x / chunks;
            bytes = min(max(columns - chunk * 8, 0), 8) * 2;
            data += row_offset(row) + (bytes ? chunk * 16 : 0);
            offset = chunk_offset<chunks>(row, chunk);
        }
    }
    __device__ __forceinline__ int64_t row_offset(int rows) const { return (int64_t)rows * row_bytes; }
    /* Rows index[0] .. index[rows - 1]; the rest of the tile becomes 0. */
    __device__ __forceinline__ void load_listed(uint32_t tile, const int *index, int rows) const {
        if constexpr (regular) {
#pragma unroll
            for (int n = 0; n < tile_rows / row_step; n++) {
                const bool inside = row + n * row_step < rows;
                const int from = inside ? index[row + n * row_step] - row : 0;
                cp_async_16_fill(tile + offset + n * THREADS * 16, data + row_offset(from), inside ? bytes : 0);
            }
        } else {
#pragma unroll 1
            for (int n = threadIdx.x; n < tile_rows * chunks; n += THREADS) {
                const int r = n / chunks, chunk = n % chunks;
                const int count = r < rows ? min(max(columns - chunk * 8, 0), 8) : 0;
                const char *at = count ? data + row_offset(index[r]) + chunk * 16 : data;
                load_chunk(tile + chunk_offset<chunks>(r, chunk), at, count);
            }
        }
    }
    /* Rows first_row .. of which `rows` exist, to shared memory; what is past the end of a row or column becomes 0. */
    __device__ __forceinline__ void load(uint32_t tile, int first_row, int rows) const {
        const char *from = data + row_offset(first_row);
        if constexpr (regular) {
            const uint32_t to = tile + offset;
            if (rows >= tile_rows && columns == chunks * 8) {
#pragma unroll
                for (int n = 0; n < tile_rows / row_step; n++)
                    cp_async_16(to + n * THREADS * 16, from + row_offset(n * row_step));
            } else {
#pragma unroll 1
                for (int n = 0; n < tile_rows / row_step; n++) {
                    bool inside = row + n * row_step < rows;
                    cp_async_16_fill(to + n * THREADS * 16, inside ? from + row_offset(n * row_step) : from,
                                     inside ? bytes : 0);
                }
            }
        } else {
#pragma unroll 1
            for (int index = threadIdx.x; index < tile_rows * chunks; index += THREADS) {
                const int r = index / chunks, chunk = index % chunks;
                const int count = r < rows ? min(max(columns - chunk * 8, 0), 8) : 0;
                const char *at = count ? from + row_offset(r) + chunk * 16 : from;
                load_chunk(tile + chunk_offset<chunks>(r, chunk), at, count);
            }
        }
    }
};

/* ---- one warp's products ---- */

struct fragments {
    float s[ROW_TILES][KEY_TILES][4];
    float o[ROW_TILES][OUT_TILES][4];
    float row_max[ROW_TILES][2], row_sum[ROW_TILES][2];
};

typedef uint32_t query_fragments[HEAD_DIM / 16][ROW_TILES][4]; /* Q_IN_REGISTERS */

/* Q rows of the warp at step k of the head dim. */
__device__ __forceinline__ void load_query(uint32_t (&q)[4], uint32_t q_tile, int warp_row, int r, int k) {
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(q, q_tile + chunk_offset<HEAD_DIM / 8>(warp_row + r * 16 + lane % 16, 2 * k + lane / 16));
}

/* S = Q K^T for the warp's rows. */
__device__ __forceinline__ void multiply_qk(float (&s)[ROW_TILES][KEY_TILES][4], const query_fragments &kept,
                                            uint32_t q_tile, int warp_row, uint32_t k_tile) {
    const int lane = threadIdx.x % 32, key = lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
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
        uint32_t q[ROW_TILES][4];
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            if (Q_IN_REGISTERS)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    q[r][e] = kept[k][r][e];
            else
                load_query(q[r], q_tile, warp_row, r, k);
        }
#pragma unroll
        for (int n = 0; n < KEY_TILES; n += 2) {
            uint32_t b[4];
            ldmatrix_x4(b, k_tile + chunk_offset<HEAD_DIM / 8>(key, 2 * k + half) + n * 8 * HEAD_DIM * 2);
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                mma_16x8x16(s[r][n], q[r], b[0], b[1]);
                mma_16x8x16(s[r][n + 1], q[r], b[2], b[3]);
            }
        }
    }
}

/* The same for keys 16 group .. 16 group + 15 alone. */
__device__ __forceinline__ void multiply_qk_group(float (&s)[ROW_TILES][KEY_TILES][4], const query_fragments &kept,
                                                  uint32_t k_tile, int group) {
    const int lane = threadIdx.x % 32, key = lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int e = 0; e < 8; e++)
            s[r][2 * group + e / 4][e % 4] = 0;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        uint32_t b[4];
        ldmatrix_x4(b, k_tile + chunk_offset<HEAD_DIM / 8>(key, 2 * k + half) + group * 16 * HEAD_DIM * 2);
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            mma_16x8x16(s[r][2 * group], kept[k][r], b[0], b[1]);
            mma_16x8x16(s[r][2 * group + 1], kept[k][r], b[2], b[3]);
        }
    }
}

/* O += P V for keys 16 step .. 16 step + 15. */
__device__ __forceinline__ void multiply_pv(float (&o)[ROW_TILES][OUT_TILES][4], const uint32_t (&p)[ROW_TILES][4],
                                            uint32_t v_tile, int step) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < OUT_TILES; n += 2) {
        uint32_t b[4];
        ldmatrix_x4_trans(b,
                          v_tile + chunk_offset<HEAD_DIM_V / 8>(lane % 16, n + lane / 16) + step * 16 * HEAD_DIM_V * 2);
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            mma_16x8x16(o[r][n], p[r], b[0], b[1]);
            mma_16x8x16(o[r][n + 1], p[r], b[2], b[3]);
        }
    }
}

/* ---- scores ---- */

/* One block's place in the problem. */
struct place : sequence {
    int head, first_row;
    int first_key, last_key;   /* keys that some row sees, before mask and intervals */
    int first_full, last_full; /* keys that every row sees */
};

struct score_pointers {
    const char *mask, *bias;
    uint32_t mask_tile, bias_tile; /* STAGED: shared memory */
};

/* The keys of one tile. KEY_LIST: places in the list; else consecutive keys. */
struct tile_keys {
    int first;        /* key of column 0 where there is no list */
    int count;        /* columns that are keys */
    bool partial;     /* some row does not see some column */
    const int *index; /* KEY_LIST: of column 0 */
    const uint32_t *rows;
    const float *bias;
};

/* The warp's rows of one tile of mask or bias; past the ends there are zeros. */
template <int element_bytes>
__device__ __forceinline__ void load_scores(uint32_t tile, const char *data, int64_t row_bytes, int first_row, int rows,
                                            int warp_row, int first_key, int keys) {
    constexpr int chunks = BLOCK_N * element_bytes / 16;
    static_assert(!STAGED || chunks % 2 == 0, "the swizzle pairs chunks");
    if (32 % chunks == 0 && warp_row + ROW_TILES * 16 <= rows && keys >= BLOCK_N) {
        constexpr int step = 32 / chunks; /* a lane's chunks lie in one column */
        const int row = warp_row + threadIdx.x % 32 / chunks, chunk = threadIdx.x % chunks;
        const char *from = data + (first_row + row) * row_bytes + (int64_t)first_key * element_bytes + chunk * 16;
#pragma unroll
        for (int n = 0; n < ROW_TILES * 16 / step; n++, from += step * row_bytes)
            cp_async_16(tile + chunk_offset<chunks>(row + n * step, chunk), from);
        return;
    }
#pragma unroll 1
    for (int n = threadIdx.x % 32; n < ROW_TILES * 16 * chunks; n += 32) {
        const int row = warp_row + n / chunks, chunk = n % chunks;
        const int bytes = row < rows ? min(max(keys * element_bytes - chunk * 16, 0), 16) : 0;
        const char *from =
            data + (int64_t)(first_row + row) * row_bytes + (int64_t)first_key * element_bytes + chunk * 16;
        cp_async_16_fill(tile + chunk_offset<chunks>(row, chunk), bytes ? from : data, bytes);
    }
}
__device__ __forceinline__ void stage_scores(const struct gpu_forward_params &a, const struct place &at,
                                             const struct score_pointers &from, int warp_row,
                                             const struct tile_keys &keys) {
    const int rows = at.seqlen_q - at.first_row;
    if (MASK)
        load_scores<1>(from.mask_tile, from.mask, a.mask.row, at.first_row, rows, warp_row, keys.first, keys.count);
    if (BIAS)
        load_scores<BIAS_BYTES>(from.bias_tile, from.bias, a.bias.row * BIAS_BYTES, at.first_row, rows, warp_row,
                                keys.first, keys.count);
}
/* Two neighbours of a staged row: columns 8 n + 2 (lane % 4), + 1. */
__device__ __forceinline__ void staged_bias(float (&b)[2], uint32_t tile, int row, int n) {
    const int pair = threadIdx.x % 4;
    if (BIAS == GPU_BIAS_FLOAT32) {
        uint32_t low, high;
        ld_shared_8(low, high, tile + chunk_offset<BLOCK_N / 4>(row, n * 2 + pair / 2) + pair % 2 * 8);
        b[0] = __uint_as_float(low);
        b[1] = __uint_as_float(high);
    } else {
        const uint32_t both = ld_shared_4(tile + chunk_offset<BLOCK_N / 8>(row, n) + pair * 4);
        b[0] = unpack((uint16_t)both);
        b[1] = unpack((uint16_t)(both >> 16));
    }
}
__device__ __forceinline__ uint32_t staged_mask(uint32_t tile, int row, int n) {
    return ld_shared_2(tile + chunk_offset<BLOCK_N / 16>(row, n / 2) + n % 2 * 8 + threadIdx.x % 4 * 2);
}

/* Scale, softcap and bias: scores in natural units (where MAXIMA_BARE, they stay as the products are). */
__device__ __forceinline__ void finish_scores(float (&s)[ROW_TILES][KEY_TILES][4], const struct gpu_forward_params &a,
                                              const struct place &at, const struct score_pointers &from, int warp_row,
                                              const struct tile_keys &keys) {
    const int column = threadIdx.x % 4 * 2;
    if (MAXIMA_BARE)
        return;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int local = warp_row + r * 16 + half * 8 + threadIdx.x % 32 / 4;
            const int row = min(at.first_row + local, at.seqlen_q - 1);
            const char *bias = from.bias + (int64_t)row * a.bias.row * BIAS_BYTES;
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++) {
                float b[2];
                if (STAGED && BIAS)
                    staged_bias(b, from.bias_tile, local, n);
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const int j = n * 8 + column + c;
                    float x = cap_score(a, s[r][n][half * 2 + c] * a.scale);
                    if (BIAS && !BIAS_ROWS) {
                        x += keys.bias[j];
                    } else if (BIAS && STAGED) {
                        x += b[c];
                    } else if (BIAS) {
                        /* without a branch, so that few registers wait for reads; keys past the last are hidden */
                        const int key = KEY_LIST ? keys.index[j] : min(keys.first + j, at.seqlen_k - 1);
                        x += bias_value(bias + (int64_t)key * a.bias.key * BIAS_BYTES);
                    }
                    s[r][n][half * 2 + c] = x;
                }
            }
        }
}

/* Keys that are not visible become -inf. */
__device__ __forceinline__ void hide_keys(float (&s)[ROW_TILES][KEY_TILES][4], const struct gpu_forward_params &a,
                                          const struct place &at, const struct score_pointers &from, int warp_row,
                                          const struct tile_keys &keys) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t local = warp_row + r * 16 + half * 8 + threadIdx.x % 32 / 4;
            const int row = at.first_row + (int)local;
            const int first = first_key(a, at, row) - keys.first, last = last_key(a, at, row) - keys.first;
            const char *mask = from.mask + (int64_t)min(row, at.seqlen_q - 1) * a.mask.row;
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++) {
                const uint32_t seen = MASK && STAGED ? staged_mask(from.mask_tile, local, n) : 0;
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const int j = n * 8 + column + c;
                    const uint32_t rows = KEY_LIST ? keys.rows[j] : 0; /* of the block: the first, and how many */
                    bool visible = KEY_LIST ? local - (rows & 0xffff) < rows >> 16 : j >= first && j <= last;
                    if (MASK && STAGED)
                        visible = visible && (seen >> c * 8 & 0xff);
                    else if (MASK && MASK_ROWS)
                        visible = visible && mask[(int64_t)(KEY_LIST ? keys.index[j] : keys.first + j) * a.mask.key];
                    if (!visible)
                        s[r][n][half * 2 + c] = MINUS_INF;
                }
            }
        }
}

/* ---- online softmax ---- */

__device__ __forceinline__ float exponent_unit(const struct gpu_forward_params &a) {
    return MAXIMA_BARE ? a.scale * LOG2_E : LOG2_E;
}

/* Raises the running maxima where a row has outgrown them, and rescales what depends on them. */
__device__ __forceinline__ void raise_maxima(struct fragments &f, float unit) {
    bool outgrown = false;
    float next[ROW_TILES][2];
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float m = f.s[r][0][half * 2];
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
                for (int c = 0; c < 2; c++)
                    m = fmaxf(m, f.s[r][n][half * 2 + c]);
            m = quad_max(m);
            next[r][half] = fmaxf(m, f.row_max[r][half]);
            outgrown = outgrown || next[r][half] > f.row_max[r][half];
        }
    if (!__any_sync(0xffffffff, outgrown))
        return;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float factor =
                next[r][half] == f.row_max[r][half] ? 1.0f : ex2_approx((f.row_max[r][half] - next[r][half]) * unit);
            f.row_max[r][half] = next[r][half];
            f.row_sum[r][half] *= factor;
#pragma unroll
            for (int n = 0; n < OUT_TILES; n++) {
                f.o[r][n][half * 2] *= factor;
                f.o[r][n][half * 2 + 1] *= factor;
            }
        }
}

/* P of keys 16 step .. + 15 from their scores, packed as left operands; adds to the sums. `shift` is what is
 * subtracted: max * unit where MAXIMA_BARE, else max. */
__device__ __forceinline__ void make_p(uint32_t (&p)[ROW_TILES][4], float (&sum)[ROW_TILES][2],
                                       const float (&s)[ROW_TILES][KEY_TILES][4], const float (&shift)[ROW_TILES][2],
                                       float unit, int step) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float w[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float x = s[r][2 * step + n][e];
                w[e] = ex2_approx(MAXIMA_BARE ? __fmaf_rn(x, unit, -shift[r][e / 2]) : (x - shift[r][e / 2]) * unit);
                sum[r][e / 2] += w[e];
            }
            p[r][2 * n] = pack(w[0], w[1]);
            p[r][2 * n + 1] = pack(w[2], w[3]);
        }
}

/* ---- which tiles ---- */

struct key_list {
    int *index;
    uint32_t *rows; /* first visible row of the block, and from bit 16 on how many */
    float *bias;
    int *totals; /* [WARPS] */
    const int32_t *
        *intervals; /* start and end of the block's head and batch: in shared memory, since registers are full */
};

/* What key j gives the block: the rows that see it (0 = none), and its bias. */
__device__ __forceinline__ uint32_t look_at_key(const struct key_list &list, const struct gpu_forward_params &a,
                                                const struct place &at, const struct score_pointers &from, int j,
                                                float &bias) {
    int first = at.first_row, last = first + min(BLOCK_M, at.seqlen_q - first); /* rows first <= i < last see it */
    bias = 0;
    if (MASK && !MASK_ROWS && !from.mask[(int64_t)j * a.mask.key])
        return 0;
    if (BIAS && !BIAS_ROWS) {
        bias = bias_value(from.bias + (int64_t)j * a.bias.key * BIAS_BYTES);
        if (bias == MINUS_INF)
            return 0;
    }
    if (INTERVALS) {
        first = max(first, list.intervals[0][j * a.intervals.start_key]);
        last = min(last, list.intervals[1][j * a.intervals.end_key]);
    }
    const int64_t column = (int64_t)j - at.diagonal; /* of the row whose diagonal it is on */
    if (WINDOW && a.window_right != UNBOUNDED)
        first = (int)max((int64_t)first, min((int64_t)last, column - a.window_right));
    if (WINDOW && a.window_left != UNBOUNDED)
        last = (int)min((int64_t)last, max((int64_t)first, column + a.window_left + 1));
    return first < last ? (uint32_t)(first - at.first_row) | (uint32_t)(last - first) << 16 : 0;
}

/* Appends the keys from next_key on that some row sees, until the list is nearly full or the keys end; returns the new
 * number of entries. Each warp looks at consecutive keys, so the list is in order. */
__device__ __forceinline__ int extend_list(const struct key_list &list, int count, int &next_key,
                                           const struct gpu_forward_params &a, const struct place &at,
                                           const struct score_pointers &from) {
    constexpr int each = MMA_FORWARD_LIST_STEP / THREADS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    while (next_key < at.last_key && count + MMA_FORWARD_LIST_STEP <= MMA_FORWARD_LIST) {
        uint32_t rows[each];
        float bias[each];
        int total = 0;
#pragma unroll
        for (int u = 0; u < each; u++) {
            const int j = next_key + (warp * each + u) * 32 + lane;
            rows[u] = j < at.last_key ? look_at_key(list, a, at, from, j, bias[u]) : 0;
        }
#pragma unroll
        for (int u = 0; u < each; u++)
            total += __popc(__ballot_sync(0xffffffff, rows[u] != 0));
        if (lane == 0)
            list.totals[warp] = total;
        __syncthreads();
        int place = count;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            place += w < warp ? list.totals[w] : 0;
            count += list.totals[w];
        }
#pragma unroll
        for (int u = 0; u < each; u++) {
            const uint32_t seen = __ballot_sync(0xffffffff, rows[u] != 0);
            if (rows[u]) {
                const int to = place + __popc(seen & ((1u << lane) - 1));
                list.index[to] = next_key + (warp * each + u) * 32 + lane;
                list.rows[to] = rows[u];
                if (BIAS && !BIAS_ROWS)
                    list.bias[to] = bias[u];
            }
            place += __popc(seen);
        }
        next_key += MMA_FORWARD_LIST_STEP;
        __syncthreads();
    }
    return count;
}

/* Makes the columns after the last entry of the last tile invisible. */
__device__ __forceinline__ void pad_list(const struct key_list &list, int count) {
    for (int n = count + threadIdx.x; n < (count + BLOCK_N - 1) / BLOCK_N * BLOCK_N; n += THREADS) {
        list.index[n] = 0;
        list.rows[n] = 0;
        if (BIAS && !BIAS_ROWS)
            list.bias[n] = 0;
    }
    __syncthreads();
}

/* The entries from `done` on become the first ones. */
__device__ __forceinline__ void shift_list(const struct key_list &list, int done, int count) {
    const int n = done + threadIdx.x;
    __syncthreads();
    static_assert(THREADS >= BLOCK_N, "fewer than a tile is left");
    if (n < count) {
        const int index = list.index[n];
        const uint32_t rows = list.rows[n];
        const float bias = BIAS && !BIAS_ROWS ? list.bias[n] : 0;
        list.index[threadIdx.x] = index; /* done >= BLOCK_N: nobody reads what is written */
        list.rows[threadIdx.x] = rows;
        if (BIAS && !BIAS_ROWS)
            list.bias[threadIdx.x] = bias;
    }
    __syncthreads();
}

/* Lists the tiles of [first, last) in which the mask has a visible pair, from the block mask that block_mask.cu made;
 * returns how many. */
__device__ __forceinline__ int list_tiles(uint16_t *list, const uint8_t *block_mask, int first, int last) {
    const int lane = threadIdx.x % 32;
    int count = 0;
    if (threadIdx.x < 32)
        for (int i = 0; i < last - first; i += 32) {
            const uint8_t kind = i + lane < last - first ? block_mask[first + i + lane] : GPU_BLOCK_HIDDEN;
            const uint32_t kept = __ballot_sync(0xffffffff, kind != GPU_BLOCK_HIDDEN);
            if (kind != GPU_BLOCK_HIDDEN)
                list[count + __popc(kept & ((1u << lane) - 1))] =
                    (uint16_t)((i + lane) | (kind == GPU_BLOCK_FULL ? 0x8000 : 0));
            count += __popc(kept);
        }
    if (threadIdx.x == 0)
        list[MMA_FORWARD_TILES] = (uint16_t)count;
    __syncthreads();
    return list[MMA_FORWARD_TILES];
}

/* ---- the kernel ---- */

__device__ __forceinline__ struct place find_place(const struct gpu_forward_params &a, int place) {
    /* L2 groups: heads whose K and V fit in the second-level cache; in a group the longest rows first. */
    int blocks = (a.seqlen_q + BLOCK_M - 1) / BLOCK_M, heads = a.heads * a.batch;
    int l2_group = place / (blocks * a.heads_per_l2_group), index = place % (blocks * a.heads_per_l2_group);
    int size = min(a.heads_per_l2_group, heads - l2_group * a.heads_per_l2_group);
    int block = index / size, head = l2_group * a.heads_per_l2_group + index % size;
    const struct sequence s = find_sequence(a, head / a.heads);
    struct place at = {s, head % a.heads, (WINDOW ? blocks - 1 - block : block) * BLOCK_M, 0, s.seqlen_k,
                       0, s.seqlen_k};
    if (WINDOW) {
        const int last_row = min(at.first_row + BLOCK_M, at.seqlen_q) - 1;
        at.first_key = first_key(a, at, at.first_row);
        at.first_full = first_key(a, at, last_row);
        at.last_key = last_key(a, at, last_row) + 1;
        at.last_full = last_key(a, at, at.first_row) + 1;
    }
    return at;
}

/* Rows of the warp that a key which they do not see has spoiled: a bit each. */
__device__ __forceinline__ void redo_rows(const struct gpu_forward_params &a, const struct place &at, int warp_row,
                                          uint32_t spoiled) {
    for_each_bit(spoiled, [&](int n) {
        const int row = at.first_row + warp_row + n;
        if (row < at.seqlen_q)
            redo_output(a, find_sequence(a, at.batch), at.head, at.head / a.group, row, at.first_key, at.last_key);
    });
}

/* Rows of the warp from registers to global memory, through its own part of shared memory. REDO: a bit for each row
 * that holds NaN is returned. */
__device__ __forceinline__ uint32_t store_rows(struct fragments &f, const struct gpu_forward_params &a,
                                               const struct place &at, uint32_t out_tile, int warp_row, float unit) {
    const int lane = threadIdx.x % 32;
    uint32_t spoiled = 0;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = f.row_sum[r][half];
            sum = quad_sum(sum);
            int row = warp_row + r * 16 + half * 8 + lane / 4;
            const float inverse = end_softmax(
                a, lane % 4 == 0 && at.first_row + row < at.seqlen_q, at.batch, at.head,
                (int64_t)(at.q_begin + at.first_row + row), sum, [&] { return f.row_max[r][half] * (unit * LN_2); },
                [&] { return __logf(sum); });
#pragma unroll
            for (int n = 0; n < OUT_TILES; n++)
                st_shared_4(out_tile + chunk_offset<HEAD_DIM_V / 8>(row, n) + lane % 4 * 4,
                            pack(f.o[r][n][half * 2] * inverse, f.o[r][n][half * 2 + 1] * inverse));
        }
    __syncwarp();
    if (REDO && out_over_q(a)) {
#pragma unroll 1
        for (int index = lane; index < ROW_TILES * 16 * (HEAD_DIM_V / 8); index += 32) {
            const int row = index / (HEAD_DIM_V / 8);
            uint32_t word[4];
            ld_shared_16(word, out_tile + chunk_offset<HEAD_DIM_V / 8>(warp_row + row, index % (HEAD_DIM_V / 8)));
            spoiled |= nan_bit(word, row);
        }
        spoiled = redo_or(spoiled);
    }
    char *out = a.out.data +
                (at.batch * a.out.batch + (int64_t)(at.q_begin + at.first_row) * a.out.row + at.head * a.out.head) * 2;
    for (int index = lane; index < ROW_TILES * 16 * (HEAD_DIM_V / 8); index += 32) {
        int row = warp_row + index / (HEAD_DIM_V / 8), chunk = index % (HEAD_DIM_V / 8);
        int count = min(a.head_dim_v - chunk * 8, 8);
        if (at.first_row + row >= at.seqlen_q || count <= 0)
            continue;
        uint32_t word[4];
        ld_shared_16(word, out_tile + chunk_offset<HEAD_DIM_V / 8>(row, chunk));
        if (REDO)
            spoiled |= nan_bit(word, row - warp_row);
        if (REDO && spoiled >> (row - warp_row) & 1)
            continue;
        store_words(out + row * a.out.row * 2 + chunk * 16, word, count);
    }
    return REDO ? redo_or(spoiled) : 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    mma_forward(const __grid_constant__ struct gpu_forward_params a) {
    extern __shared__ __align__(128) char shared[];
    const uint32_t q_tile = shared_address(shared), k_tiles = q_tile + MMA_FORWARD_Q_BYTES,
                   v_tiles = k_tiles + STAGES * BLOCK_N * HEAD_DIM * 2;
    const int warp_row = threadIdx.x / 32 * ROW_TILES * 16;
    const float unit = exponent_unit(a);
    const struct place at = find_place(a, (int)blockIdx.x);
    if (at.first_row == 0)
        clear_rest_of_forward(a, at.batch, at.head, threadIdx.x, THREADS);
    if (at.first_row >= at.seqlen_q)
        return;

    const int head_kv = at.head / a.group;
    const char *q =
        a.q.data + (at.batch * a.q.batch + (int64_t)(at.q_begin + at.first_row) * a.q.row + at.head * a.q.head) * 2;
    const char *k = a.k.data + (at.batch * a.k.batch + (int64_t)at.k_begin * a.k.row + head_kv * a.k.head) * 2;
    const char *v = a.v.data + (at.batch * a.v.batch + (int64_t)at.k_begin * a.v.row + head_kv * a.v.head) * 2;
    struct score_pointers from = {};
    from.mask_tile = q_tile + MMA_FORWARD_LIST_OFFSET + (TILE_LIST ? MMA_FORWARD_TILE_BYTES : 0);
    from.bias_tile = from.mask_tile + (MASK ? BLOCK_M * BLOCK_N : 0);
    if (MASK)
        from.mask = mask_of(a, at.batch, at.head);
    if (BIAS)
        from.bias = a.bias.data + (at.batch * a.bias.batch + at.head / a.bias.group * a.bias.head) * BIAS_BYTES;

    struct fragments f;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            f.row_max[r][half] = MINUS_INF;
            f.row_sum[r][half] = 0;
        }
#pragma unroll
        for (int n = 0; n < OUT_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                f.o[r][n][e] = 0;
    }

    const tile_source<HEAD_DIM / 8, BLOCK_M> q_source(q, a.q.row, a.head_dim);
    q_source.load(q_tile, 0, at.seqlen_q - at.first_row);
    cp_async_commit(); /* blocks without a tile wait for it too, before the output takes its place */
    const tile_source<HEAD_DIM / 8, BLOCK_N> k_source(k, a.k.row, a.head_dim);
    const tile_source<HEAD_DIM_V / 8, BLOCK_N> v_source(v, a.v.row, a.head_dim_v);
    bool settled = false; /* every row of the warp has seen a key */
    bool query_loaded = false;
    query_fragments kept;

    /* Tiles 0 to count - 1, whose keys keys_of(t) gives; is_partial(keys): whether pairs are tested one by one. */
    auto add_tiles = [&](int count, auto keys_of, auto is_partial) {
        auto fetch = [&](int t) {
            if (t < count) {
                const struct tile_keys keys = keys_of(t);
                const uint32_t k_tile = k_tiles + t % STAGES * BLOCK_N * HEAD_DIM * 2;
                const uint32_t v_tile = v_tiles + t % STAGES * BLOCK_N * HEAD_DIM_V * 2;
                if (KEY_LIST) {
                    k_source.load_listed(k_tile, keys.index, keys.count);
                    v_source.load_listed(v_tile, keys.index, keys.count);
                } else {
                    k_source.load(k_tile, keys.first, at.seqlen_k - keys.first);
                    v_source.load(v_tile, keys.first, at.seqlen_k - keys.first);
                }
            }
            cp_async_commit();
        };
        if (STAGED && count)
            stage_scores(a, at, from, warp_row, keys_of(0));
#pragma unroll
        for (int t = 0; t < STAGES - 1; t++)
            fetch(t);
#pragma unroll 1
        for (int t = 0; t < count; t++) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();
            fetch(t + STAGES - 1);
            if (Q_IN_REGISTERS && !query_loaded)
#pragma unroll
                for (int step = 0; step < HEAD_DIM / 16; step++)
#pragma unroll
                    for (int r = 0; r < ROW_TILES; r++)
                        load_query(kept[step][r], q_tile, warp_row, r, step);
            query_loaded = true;
            const struct tile_keys keys = keys_of(t);
            const bool partial = is_partial(keys);
            const uint32_t k_tile = k_tiles + t % STAGES * BLOCK_N * HEAD_DIM * 2;
            const uint32_t v_tile = v_tiles + t % STAGES * BLOCK_N * HEAD_DIM_V * 2;
            uint32_t p[BLOCK_N / 16][ROW_TILES][4];
            float sum[ROW_TILES][2] = {};
            bool done = false;
            if (FAST_PATH && settled && !partial) {
                /* With the maxima as they are: no row waits for its maximum, and most tiles raise none. */
                float shift[ROW_TILES][2], most = 0;
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        shift[r][half] = f.row_max[r][half] * unit;
                if (!Q_IN_REGISTERS)
                    multiply_qk(f.s, kept, q_tile, warp_row, k_tile);
#pragma unroll
                for (int step = 0; step < BLOCK_N / 16; step++) {
                    if (Q_IN_REGISTERS)
                        multiply_qk_group(f.s, kept, k_tile, step);
                    make_p(p[step], sum, f.s, shift, unit, step);
                }
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++)
                    most = fmaxf(most, fmaxf(sum[r][0], sum[r][1]));
                done = !__any_sync(0xffffffff, !(most <= SUM_MAX));
            }
            bool careful = !OPTIMISTIC || !settled || FAST_PATH;
            while (!done) {
                multiply_qk(f.s, kept, q_tile, warp_row, k_tile);
                finish_scores(f.s, a, at, from, warp_row, keys);
                if (partial)
                    hide_keys(f.s, a, at, from, warp_row, keys);
                if (careful)
                    raise_maxima(f, unit);
                float shift[ROW_TILES][2], most = 0;
                bool seen = true;
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const float m = f.row_max[r][half];
                        seen = seen && m != MINUS_INF;
                        shift[r][half] = m == MINUS_INF ? 0.0f : MAXIMA_BARE ? m * unit : m;
                        sum[r][half] = 0;
                    }
                settled = __all_sync(0xffffffff, seen);
#pragma unroll
                for (int step = 0; step < BLOCK_N / 16; step++)
                    make_p(p[step], sum, f.s, shift, unit, step);
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++)
                    most = fmaxf(most, fmaxf(sum[r][0], sum[r][1]));
                done = careful || !__any_sync(0xffffffff, !(most <= SUM_MAX));
                careful = true;
            }
            if (STAGED) {
                __syncwarp();
                if (t + 1 < count)
                    stage_scores(a, at, from, warp_row, keys_of(t + 1));
                cp_async_commit();
            }
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    f.row_sum[r][half] += sum[r][half];
#pragma unroll
            for (int step = 0; step < BLOCK_N / 16; step++)
                multiply_pv(f.o, p[step], v_tile, step);
        }
    };

    const int first_tile = at.first_key / BLOCK_N, last_tile = (at.last_key + BLOCK_N - 1) / BLOCK_N;
    auto tile_keys_of = [&](int tile) {
        const int first = tile * BLOCK_N;
        struct tile_keys keys = {first, min(at.seqlen_k - first, BLOCK_N)};
        keys.partial = first < at.first_full || first + BLOCK_N > at.last_full;
        return keys;
    };
    auto is_partial = [&](const struct tile_keys &keys) { return keys.partial; };
    if (KEY_LIST) {
        char *const places = shared + MMA_FORWARD_LIST_OFFSET;
        const struct key_list list = {
            (int *)places, (uint32_t *)(places + 4 * MMA_FORWARD_LIST), (float *)(places + 8 * MMA_FORWARD_LIST),
            (int *)(places + (BIAS && !BIAS_ROWS ? 12 : 8) * MMA_FORWARD_LIST),
            (const int32_t **)(places + (BIAS && !BIAS_ROWS ? 12 : 8) * MMA_FORWARD_LIST + 32)};
        if (INTERVALS) {
            if (threadIdx.x == 0) {
                const struct gpu_intervals &i = a.intervals;
                const int64_t head = at.head / i.group;
                list.intervals[0] = i.start + at.batch * i.start_batch + head * i.start_head + at.k_begin * i.start_key;
                list.intervals[1] = i.end + at.batch * i.end_batch + head * i.end_head + at.k_begin * i.end_key;
            }
            __syncthreads();
        }
        int next_key = at.first_key, num_listed = 0;
        do {
            num_listed = extend_list(list, num_listed, next_key, a, at, from);
            const bool last_round = next_key >= at.last_key;
            const int count = last_round ? (num_listed + BLOCK_N - 1) / BLOCK_N : num_listed / BLOCK_N;
            if (last_round)
                pad_list(list, num_listed);
            auto keys_of = [&](int t) {
                struct tile_keys keys = {0, min(num_listed - t * BLOCK_N, BLOCK_N)};
                keys.index = list.index + t * BLOCK_N;
                keys.rows = list.rows + t * BLOCK_N;
                keys.bias = list.bias + t * BLOCK_N;
                return keys;
            };
            auto list_partial = [&](const struct tile_keys &keys) {
                bool full = true;
                const uint32_t all = (uint32_t)min(BLOCK_M, at.seqlen_q - at.first_row) << 16;
                for (int n = threadIdx.x % 32; n < BLOCK_N; n += 32)
                    full = full && keys.rows[n] == all;
                return (MASK && MASK_ROWS) || !__all_sync(0xffffffff, full);
            };
            add_tiles(count, keys_of, list_partial);
            if (last_round)
                break;
            shift_list(list, count * BLOCK_N, num_listed);
            num_listed -= count * BLOCK_N;
        } while (true);
    } else if (TILE_LIST) {
        uint16_t *list = (uint16_t *)(shared + MMA_FORWARD_LIST_OFFSET);
        const uint8_t *block_mask = a.block_mask + at.batch * a.block_mask_batch +
                                    at.head / a.mask.group * a.block_mask_head +
                                    (int64_t)(at.first_row / BLOCK_M) * a.block_mask_row;
        for (int segment = first_tile; segment < last_tile; segment += MMA_FORWARD_TILES) {
            __syncthreads(); /* the list and the buffers of the segment before are free */
            const int count = list_tiles(list, block_mask, segment, min(segment + MMA_FORWARD_TILES, last_tile));
            auto keys_of = [&](int t) {
                struct tile_keys keys = tile_keys_of(segment + (list[t] & 0x7fff));
                keys.partial = keys.partial || !(list[t] & 0x8000);
                return keys;
            };
            add_tiles(count, keys_of, is_partial);
        }
    } else {
        /* keys in falling order: the tiles that are cut come first, while the pipeline fills */
        auto keys_of = [&](int t) { return tile_keys_of(last_tile - 1 - t); };
        add_tiles(last_tile - first_tile, keys_of, is_partial);
    }
    cp_async_wait<0>();
    __syncthreads(); /* Q's place becomes the output's */
    /* What is read anew is not kept: registers are short in the loop. */
    const struct place then = VARLEN ? find_place(a, (int)ctaid_x_reread()) : at;
    const uint32_t spoiled = store_rows(f, a, then, q_tile, warp_row, unit);
    if (REDO)
        redo_rows(a, VARLEN ? then : find_place(a, (int)ctaid_x_reread()), warp_row, spoiled);
}
