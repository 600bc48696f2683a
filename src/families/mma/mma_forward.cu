/* mma_forward.cu: the family's production forward, with every feature of the library, for 16-bit dtypes.
 *
 * Idea: FlashAttention-2 (Dao, 2023): a block owns BLOCK_M query rows and walks the keys once with an online softmax;
 * scores and weights never leave registers, since the accumulator of S = Q K^T has the layout of the left operand of
 * P V. Each warp owns 16 * ROW_TILES rows, so that every fragment of K and V loaded from shared memory feeds ROW_TILES
 * matrix instructions: with one, ldmatrix is the bound (32 FLOPs a byte are needed, 16 rows give 16). The running
 * maximum is raised only when a row outgrows it by 2^8 (FlashAttention-4): most tiles then rescale nothing, and the
 * result is the same, because sum and output use the same stale maximum.
 *
 * Tile: BLOCK_M = 16 * ROW_TILES * WARPS rows x BLOCK_N keys. Lane l of a warp holds rows l / 4 and l / 4 + 8 of each
 * row tile and columns 2 (l % 4), +1 of each group of eight.
 *
 * Shared memory: Q [BLOCK_M][HEAD_DIM] (later the output [BLOCK_M][HEAD_DIM_V]), K [STAGES][BLOCK_N][HEAD_DIM],
 * V [STAGES][BLOCK_N][HEAD_DIM_V], then the list of active tiles where there is a mask or intervals. Rows are chunks of
 * 16 bytes, permuted by an exclusive or with bits of the row (swizzle) so that the eight rows of an ldmatrix fall into
 * different banks.
 *
 * Barriers: one per tile. After it, tile t is there for all, and the buffer of tile t - 1 may be filled again.
 *
 * Registers: O HEAD_DIM_V / 2 * ROW_TILES, S BLOCK_N / 2 * ROW_TILES; the plan keeps the sum below 200. */
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "families/mma/mma_forward.h"

#define THREADS  (32 * WARPS)
#define BLOCK_M  (16 * ROW_TILES * WARPS)
#define KEY_TILES (BLOCK_N / 8)      /* groups of eight keys: one accumulator of S each */
#define OUT_TILES (HEAD_DIM_V / 8)   /* groups of eight columns of O */
#define LISTED    (MASK || INTERVALS) /* tiles are found active before the loop */
#define PLAIN     (!BIAS && !SOFTCAP && POSITIVE_SCALE)

#define UNBOUNDED   0x7fffffff
#define LOG2_E      1.4426950408889634f
#define LN_2        0.6931471805599453f
#define MINUS_INF   (-__int_as_float(0x7f800000))
#define SUM_MAX     4096.0f /* of a thread's weights of one row and tile: none overflows float16 */
#define RESCALE_AT  8.0f /* log2 of the growth that a stale maximum may fall behind */

static_assert(BLOCK_N % 16 == 0 && HEAD_DIM % 16 == 0 && HEAD_DIM_V % 16 == 0, "tiles are multiples of 16");

/* ---- shared memory ---- */

/* What chunk indices of a row are xor-ed with: see the bank argument in docs/mma.md. */
template <int chunks> __device__ __forceinline__ int swizzle_of(int row) {
    return chunks % 8 == 0 ? row & 7 : chunks % 4 == 0 ? (row >> 1) & 3 : (row >> 2) & 1;
}
template <int chunks> __device__ __forceinline__ int chunk_offset(int row, int chunk) {
    return (row * chunks + (chunk ^ swizzle_of<chunks>(row))) * 16;
}

/* Eight 16-bit elements one by one: for addresses that are not multiples of 16. */
__device__ __forceinline__ void copy_elements(uint32_t to, const char *from, int count) {
    uint32_t word[4] = {0, 0, 0, 0};
#pragma unroll
    for (int e = 0; e < 8; e++)
        if (e < count)
            word[e / 2] |= (uint32_t)((const uint16_t *)from)[e] << (e % 2 * 16);
    st_shared_16(to, word[0], word[1], word[2], word[3]);
}

/* Tiles of `tile_rows` rows of one matrix. Where the block's threads cover whole rows, a thread's chunks lie a constant
 * stride apart in both memories, and what it needs is made once. */
template <int chunks, int tile_rows> struct tile_source {
    static constexpr bool regular = THREADS % chunks == 0 && THREADS / chunks % 8 == 0 &&
                                    tile_rows * chunks % THREADS == 0 && ALIGNED;
    static constexpr int row_step = THREADS / chunks;
    const char *data; /* of the matrix; where regular, of the thread's first chunk */
    int row_bytes, columns;
    int row, bytes;  /* the thread's first row, and how much of its chunk is inside the row */
    uint32_t offset; /* of the thread's first chunk in a tile */

    __device__ __forceinline__ tile_source(const char *first, int64_t row_stride, int num_columns) {
        data = first;
        row_bytes = (int)row_stride * 2;
        columns = num_columns;
        if constexpr (regular) {
            const int chunk = threadIdx.x % chunks;
            row = threadIdx.x / chunks;
            bytes = min(max(columns - chunk * 8, 0), 8) * 2;
            data += (int64_t)row * row_bytes + (bytes ? chunk * 16 : 0);
            offset = chunk_offset<chunks>(row, chunk);
        }
    }
    /* Rows first_row .. of which `rows` exist, to shared memory; what is past the end of a row or column becomes 0. */
    __device__ __forceinline__ void load(uint32_t tile, int first_row, int rows) const {
        const char *from = data + (int64_t)first_row * row_bytes;
        if constexpr (regular) {
            const uint32_t to = tile + offset;
            if (rows >= tile_rows && columns == chunks * 8) {
#pragma unroll
                for (int n = 0; n < tile_rows / row_step; n++)
                    cp_async_16(to + n * THREADS * 16, from + (int64_t)(n * row_step) * row_bytes);
            } else {
#pragma unroll 1
                for (int n = 0; n < tile_rows / row_step; n++) {
                    bool inside = row + n * row_step < rows;
                    cp_async_16_fill(to + n * THREADS * 16, inside ? from + (int64_t)(n * row_step) * row_bytes : from,
                                     inside ? bytes : 0);
                }
            }
        } else {
#pragma unroll 1
            for (int index = threadIdx.x; index < tile_rows * chunks; index += THREADS) {
                const int r = index / chunks, chunk = index % chunks;
                const int count = r < rows ? min(max(columns - chunk * 8, 0), 8) : 0;
                const char *at = count ? from + (int64_t)r * row_bytes + chunk * 16 : from;
#if ALIGNED
                cp_async_16_fill(tile + chunk_offset<chunks>(r, chunk), at, count * 2);
#else
                copy_elements(tile + chunk_offset<chunks>(r, chunk), at, count);
#endif
            }
        }
    }
};

/* ---- one warp's products ---- */

__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if DTYPE == MMA_BFLOAT16
    mma_m16n8k16_bf16(c, a, b0, b1);
#else
    mma_m16n8k16_f16(c, a, b0, b1);
#endif
}
__device__ __forceinline__ uint32_t pack(float low, float high) {
#if DTYPE == MMA_BFLOAT16
    return cvt_bf16x2(low, high);
#else
    return cvt_f16x2(low, high);
#endif
}

struct fragments {
    float s[ROW_TILES][KEY_TILES][4];
    float o[ROW_TILES][OUT_TILES][4];
    float row_max[ROW_TILES][2], row_sum[ROW_TILES][2];
};

#if Q_IN_REGISTERS
typedef uint32_t query_fragments[HEAD_DIM / 16][ROW_TILES][4];
#else
typedef uint32_t query_fragments[1][1][4];
#endif

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
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        uint32_t q[ROW_TILES][4];
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
#if Q_IN_REGISTERS
#    pragma unroll
            for (int e = 0; e < 4; e++)
                q[r][e] = kept[k][r][e];
#else
            load_query(q[r], q_tile, warp_row, r, k);
#endif
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

#if Q_IN_REGISTERS
/* The same for keys 16 group .. 16 group + 15 alone. */
__device__ __forceinline__ void multiply_qk_group(float (&s)[ROW_TILES][KEY_TILES][4], const query_fragments &kept,
                                                  uint32_t k_tile, int group) {
    const int lane = threadIdx.x % 32, key = lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
#    pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#    pragma unroll
        for (int e = 0; e < 8; e++)
            s[r][2 * group + e / 4][e % 4] = 0;
#    pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        uint32_t b[4];
        ldmatrix_x4(b, k_tile + chunk_offset<HEAD_DIM / 8>(key, 2 * k + half) + group * 16 * HEAD_DIM * 2);
#    pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            mma_16x8x16(s[r][2 * group], kept[k][r], b[0], b[1]);
            mma_16x8x16(s[r][2 * group + 1], kept[k][r], b[2], b[3]);
        }
    }
}
#endif

/* O += P V for keys 16 step .. 16 step + 15. */
__device__ __forceinline__ void multiply_pv(float (&o)[ROW_TILES][OUT_TILES][4], const uint32_t (&p)[ROW_TILES][4],
                                            uint32_t v_tile, int step) {
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

/* One block's place in the problem. */
struct place {
    int batch, head, first_row;
    int seqlen_q, seqlen_k, q_begin, k_begin;
    int diagonal;        /* i' = i + diagonal */
    int first_key, last_key; /* keys that some row sees, before mask and intervals */
    int first_full, last_full; /* keys that every row sees */
};

struct score_pointers {
    const char *mask, *bias;
    const int32_t *start, *end;
};

__device__ __forceinline__ float bias_value(const struct mma_forward_arguments &a, const char *at) {
#if BIAS == MMA_BIAS_FLOAT32
    return *(const float *)at;
#elif DTYPE == MMA_BFLOAT16
    return cvt_f32_bf16(*(const uint16_t *)at);
#else
    return cvt_f32_f16(*(const uint16_t *)at);
#endif
}

/* Scale, softcap and bias: scores in natural units (where PLAIN, they stay as the products are). */
__device__ __forceinline__ void finish_scores(float (&s)[ROW_TILES][KEY_TILES][4],
                                              const struct mma_forward_arguments &a, const struct place &at,
                                              const struct score_pointers &from, int warp_row, int first_key) {
#if !PLAIN
    const int lane = threadIdx.x % 32;
#    pragma unroll
    for (int n = 0; n < KEY_TILES; n++)
#    pragma unroll
        for (int c = 0; c < 2; c++) {
            int key = first_key + n * 8 + lane % 4 * 2 + c;
            bool inside = key < at.seqlen_k;
#    if BIAS && !BIAS_ROWS
            float shared_bias =
                inside ? bias_value(a, from.bias + (int64_t)key * a.bias.key * BIAS_BYTES) : 0;
#    endif
#    pragma unroll
            for (int r = 0; r < ROW_TILES; r++)
#    pragma unroll
                for (int half = 0; half < 2; half++) {
                    float &x = s[r][n][half * 2 + c];
                    x *= a.scale;
#    if SOFTCAP
                    x = a.softcap * tanh_accurate(x * a.softcap_inverse);
#    endif
#    if BIAS && BIAS_ROWS
                    int row = at.first_row + warp_row + r * 16 + half * 8 + lane / 4;
                    if (inside && row < at.seqlen_q)
                        x += bias_value(a, from.bias + ((int64_t)row * a.bias.row + (int64_t)key * a.bias.key) *
                                                           BIAS_BYTES);
#    elif BIAS
                    x += shared_bias;
#    endif
                }
        }
#endif
}

/* First and last key that a row sees, before mask and intervals. */
__device__ __forceinline__ int first_visible(const struct mma_forward_arguments &a, const struct place &at, int row) {
    return WINDOW && a.window_left != UNBOUNDED
               ? (int)max((int64_t)0, (int64_t)row + at.diagonal - a.window_left) : 0;
}
__device__ __forceinline__ int last_visible(const struct mma_forward_arguments &a, const struct place &at, int row) {
    return WINDOW && a.window_right != UNBOUNDED
               ? (int)max((int64_t)-1, min((int64_t)at.seqlen_k - 1, (int64_t)row + at.diagonal + a.window_right))
               : at.seqlen_k - 1;
}

/* Keys that are not visible become -inf. */
__device__ __forceinline__ void hide_keys(float (&s)[ROW_TILES][KEY_TILES][4], const struct mma_forward_arguments &a,
                                          const struct place &at, const struct score_pointers &from, int warp_row,
                                          int first_key) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = at.first_row + warp_row + r * 16 + half * 8 + lane / 4;
            const int first = first_visible(a, at, row), last = last_visible(a, at, row);
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const int key = first_key + n * 8 + lane % 4 * 2 + c;
                    bool visible = key >= first && key <= last;
#if INTERVALS
                    visible = visible && row >= from.start[key * a.intervals.start_key] &&
                              row < from.end[key * a.intervals.end_key];
#endif
#if MASK
                    visible = visible && row < at.seqlen_q &&
                              from.mask[MASK_ROWS * row * a.mask.row + key * a.mask.key];
#endif
                    if (!visible)
                        s[r][n][half * 2 + c] = MINUS_INF;
                }
        }
}

/* ---- online softmax ---- */

__device__ __forceinline__ float exponent_unit(const struct mma_forward_arguments &a) {
#if PLAIN
    return a.scale * LOG2_E;
#else
    return LOG2_E;
#endif
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
            m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 1));
            m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 2));
            next[r][half] = fmaxf(m, f.row_max[r][half]);
            /* -inf stays where no key was seen: the comparison is with a NaN or an infinity then */
            outgrown = outgrown || (next[r][half] - f.row_max[r][half]) * unit > RESCALE_AT;
        }
    if (!__any_sync(0xffffffff, outgrown))
        return;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float factor = next[r][half] == f.row_max[r][half]
                               ? 1.0f
                               : ex2_approx((f.row_max[r][half] - next[r][half]) * unit);
            f.row_max[r][half] = next[r][half];
            f.row_sum[r][half] *= factor;
#pragma unroll
            for (int n = 0; n < OUT_TILES; n++) {
                f.o[r][n][half * 2] *= factor;
                f.o[r][n][half * 2 + 1] *= factor;
            }
        }
}

/* Weights of keys 16 step .. + 15 from their scores, packed as left operands; adds to the sums. `shift` is what is
 * subtracted: max * unit where PLAIN, else max. */
__device__ __forceinline__ void make_weights(uint32_t (&p)[ROW_TILES][4], float (&sum)[ROW_TILES][2],
                                             const float (&s)[ROW_TILES][KEY_TILES][4],
                                             const float (&shift)[ROW_TILES][2], float unit, int step) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float w[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float x = s[r][2 * step + n][e];
#if PLAIN
                w[e] = ex2_approx(__fmaf_rn(x, unit, -shift[r][e / 2]));
#else
                w[e] = ex2_approx((x - shift[r][e / 2]) * unit);
#endif
                sum[r][e / 2] += w[e];
            }
            p[r][2 * n] = pack(w[0], w[1]);
            p[r][2 * n + 1] = pack(w[2], w[3]);
        }
}

/* ---- which tiles ---- */

#if LISTED
#    define TILE_FULL 0x8000
/* Lists the tiles of [first, last) that have a visible pair, with TILE_FULL where all of them are; returns how many.
 * Each warp looks at tiles of its own; the list is in order because each tile has its slot before it is closed up. */
__device__ __forceinline__ int list_tiles(uint16_t *list, const struct mma_forward_arguments &a,
                                          const struct place &at, const struct score_pointers &from, int first,
                                          int last) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first_row = at.first_row, last_row = min(at.first_row + BLOCK_M, at.seqlen_q) - 1;
    for (int tile = first + warp; tile < last; tile += WARPS) {
        bool any = false, all = true;
        for (int c = lane; c < BLOCK_N; c += 32) {
            int key = tile * BLOCK_N + c;
            if (key >= at.seqlen_k)
                break;
            bool key_any = true, key_all = true;
#    if INTERVALS
            int start = from.start[key * a.intervals.start_key], end = from.end[key * a.intervals.end_key];
            key_any = max(start, first_row) <= min(end - (end > 0), last_row) && start < end && end > 0;
            key_all = start <= first_row && end > last_row;
#    endif
#    if MASK && !MASK_ROWS
            bool seen = from.mask[key * a.mask.key];
            key_any = key_any && seen;
            key_all = key_all && seen;
#    endif
            any = any || key_any;
            all = all && key_all;
        }
        any = __any_sync(0xffffffff, any);
        all = __all_sync(0xffffffff, all);
#    if MASK && MASK_ROWS
        if (any) {
            bool some = false, every = true;
            int keys = min(BLOCK_N, at.seqlen_k - tile * BLOCK_N);
            for (int row = first_row; row <= last_row; row++)
                for (int c = lane; c < keys; c += 32) {
                    bool seen = from.mask[row * a.mask.row + (int64_t)(tile * BLOCK_N + c) * a.mask.key];
                    some = some || seen;
                    every = every && seen;
                }
            any = __any_sync(0xffffffff, some);
            all = all && __all_sync(0xffffffff, every);
        }
#    endif
        if (lane == 0)
            list[tile - first] = any ? (tile - first) | (all ? TILE_FULL : 0) : 0x7fff;
    }
    __syncthreads();
    int count = 0;
    if (warp == 0)
        for (int i = 0; i < last - first; i += 32) {
            uint16_t entry = i + lane < last - first ? list[i + lane] : 0x7fff;
            uint32_t kept = __ballot_sync(0xffffffff, entry != 0x7fff);
            if (entry != 0x7fff)
                list[count + __popc(kept & ((1u << lane) - 1))] = entry;
            count += __popc(kept);
            __syncwarp();
        }
    if (threadIdx.x == 0)
        list[MMA_FORWARD_LIST] = count;
    __syncthreads();
    return list[MMA_FORWARD_LIST];
}
#endif

/* ---- the kernel ---- */

__device__ __forceinline__ struct place find_place(const struct mma_forward_arguments &a) {
    struct place at;
    /* Sections of heads whose K and V fit in the second-level cache; in a section the longest rows first. */
    int blocks = (a.seqlen_q + BLOCK_M - 1) / BLOCK_M, heads = a.heads * a.batch;
    int section = blockIdx.x / (blocks * a.heads_per_section), index = blockIdx.x % (blocks * a.heads_per_section);
    int size = min(a.heads_per_section, heads - section * a.heads_per_section);
    int block = index / size, head = section * a.heads_per_section + index % size;
    at.batch = head / a.heads;
    at.head = head % a.heads;
    at.first_row = (WINDOW ? blocks - 1 - block : block) * BLOCK_M;
    at.seqlen_q = a.seqlen_q;
    at.seqlen_k = a.seqlen_k;
    at.q_begin = at.k_begin = 0;
#if VARLEN
    at.q_begin = a.cu_seqlens_q[at.batch];
    at.k_begin = a.cu_seqlens_k[at.batch];
    at.seqlen_q = a.cu_seqlens_q[at.batch + 1] - at.q_begin;
    at.seqlen_k = a.cu_seqlens_k[at.batch + 1] - at.k_begin;
#endif
    at.diagonal = at.seqlen_k - at.seqlen_q;
    at.first_key = at.first_full = 0;
    at.last_key = at.last_full = at.seqlen_k;
#if WINDOW
    const int last_row = min(at.first_row + BLOCK_M, at.seqlen_q) - 1;
    at.first_key = first_visible(a, at, at.first_row);
    at.first_full = first_visible(a, at, last_row);
    at.last_key = last_visible(a, at, last_row) + 1;
    at.last_full = last_visible(a, at, at.first_row) + 1;
#endif
    return at;
}

/* Rows of the warp from registers to global memory, through its own part of shared memory. */
__device__ __forceinline__ void store_rows(struct fragments &f, const struct mma_forward_arguments &a,
                                           const struct place &at, uint32_t out_tile, int warp_row, float unit) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = f.row_sum[r][half];
            sum += __shfl_xor_sync(0xffffffff, sum, 1);
            sum += __shfl_xor_sync(0xffffffff, sum, 2);
            int row = warp_row + r * 16 + half * 8 + lane / 4;
            bool empty = f.row_max[r][half] == MINUS_INF;
            float inverse = empty ? 0.0f : 1.0f / sum;
            if (a.lse.data && lane % 4 == 0 && at.first_row + row < at.seqlen_q)
                a.lse.data[at.batch * a.lse.batch + at.head * a.lse.head +
                           (int64_t)(at.q_begin + at.first_row + row) * a.lse.row] =
                    empty ? -MINUS_INF : f.row_max[r][half] * (unit * LN_2) + __logf(sum);
#pragma unroll
            for (int n = 0; n < OUT_TILES; n++)
                st_shared_4(out_tile + chunk_offset<HEAD_DIM_V / 8>(row, n) + lane % 4 * 4,
                            pack(f.o[r][n][half * 2] * inverse, f.o[r][n][half * 2 + 1] * inverse));
        }
    __syncwarp();
    char *out = a.out.data +
                (at.batch * a.out.batch + (int64_t)(at.q_begin + at.first_row) * a.out.row + at.head * a.out.head) * 2;
    for (int index = lane; index < ROW_TILES * 16 * (HEAD_DIM_V / 8); index += 32) {
        int row = warp_row + index / (HEAD_DIM_V / 8), chunk = index % (HEAD_DIM_V / 8);
        int count = min(a.head_dim_v - chunk * 8, 8);
        if (at.first_row + row >= at.seqlen_q || count <= 0)
            continue;
        uint32_t word[4];
        ld_shared_16(word, out_tile + chunk_offset<HEAD_DIM_V / 8>(row, chunk));
        char *to = out + row * a.out.row * 2 + chunk * 16;
        if (ALIGNED && count == 8)
            *(uint4 *)to = make_uint4(word[0], word[1], word[2], word[3]);
        else
#pragma unroll
            for (int e = 0; e < 8; e++)
                if (e < count)
                    ((uint16_t *)to)[e] = (uint16_t)(word[e / 2] >> (e % 2 * 16));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    mma_forward(const __grid_constant__ struct mma_forward_arguments a) {
    extern __shared__ __align__(128) char shared[];
    const uint32_t q_tile = shared_address(shared), k_tiles = q_tile + MMA_FORWARD_Q_BYTES,
                   v_tiles = k_tiles + STAGES * BLOCK_N * HEAD_DIM * 2;
    const int warp_row = threadIdx.x / 32 * ROW_TILES * 16;
    const float unit = exponent_unit(a);
    const struct place at = find_place(a);
    if (at.first_row >= at.seqlen_q)
        return;

    const int head_kv = at.head / a.group;
    const char *q = a.q.data + (at.batch * a.q.batch + (int64_t)(at.q_begin + at.first_row) * a.q.row +
                                at.head * a.q.head) * 2;
    const char *k = a.k.data + (at.batch * a.k.batch + (int64_t)at.k_begin * a.k.row + head_kv * a.k.head) * 2;
    const char *v = a.v.data + (at.batch * a.v.batch + (int64_t)at.k_begin * a.v.row + head_kv * a.v.head) * 2;
    struct score_pointers from = {};
#if MASK
    from.mask = a.mask.data + at.batch * a.mask.batch + at.head / a.mask.group * a.mask.head;
#endif
#if BIAS
    from.bias = a.bias.data + (at.batch * a.bias.batch + at.head / a.bias.group * a.bias.head) * BIAS_BYTES;
#endif
#if INTERVALS
    const int64_t interval_head = at.head / a.intervals.group;
    from.start = a.intervals.start + at.batch * a.intervals.start_batch + interval_head * a.intervals.start_head +
                 at.k_begin * a.intervals.start_key;
    from.end = a.intervals.end + at.batch * a.intervals.end_batch + interval_head * a.intervals.end_head +
               at.k_begin * a.intervals.end_key;
#endif

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

    const int first_tile = at.first_key / BLOCK_N, last_tile = (at.last_key + BLOCK_N - 1) / BLOCK_N;
    const tile_source<HEAD_DIM / 8, BLOCK_M> q_source(q, a.q.row, a.head_dim);
    q_source.load(q_tile, 0, at.seqlen_q - at.first_row);
    const tile_source<HEAD_DIM / 8, BLOCK_N> k_source(k, a.k.row, a.head_dim);
    const tile_source<HEAD_DIM_V / 8, BLOCK_N> v_source(v, a.v.row, a.head_dim_v);
    bool settled = false; /* every row of the warp has seen a key */
    query_fragments kept;

#if LISTED
    uint16_t *list = (uint16_t *)(shared + MMA_FORWARD_LIST_OFFSET);
    for (int segment = first_tile; segment < last_tile; segment += MMA_FORWARD_LIST) {
        __syncthreads(); /* the list and the buffers of the segment before are free */
        const int count = list_tiles(list, a, at, from, segment, min(segment + MMA_FORWARD_LIST, last_tile));
#    define TILE_AT(t) (segment + (list[t] & 0x7fff))
#else
    {
        const int count = last_tile - first_tile;
        /* keys in falling order: the tiles that are cut come first, while the pipeline fills */
#    define TILE_AT(t) (last_tile - 1 - (t))
#endif
        auto fetch = [&](int t) {
            if (t < count) {
                const int first_key = TILE_AT(t) * BLOCK_N, stage = t % STAGES;
                k_source.load(k_tiles + stage * BLOCK_N * HEAD_DIM * 2, first_key, at.seqlen_k - first_key);
                v_source.load(v_tiles + stage * BLOCK_N * HEAD_DIM_V * 2, first_key, at.seqlen_k - first_key);
            }
            cp_async_commit();
        };
#pragma unroll
        for (int t = 0; t < STAGES - 1; t++)
            fetch(t);
#pragma unroll 1
        for (int t = 0; t < count; t++) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();
            fetch(t + STAGES - 1);
#if Q_IN_REGISTERS
            if (t == 0)
#    pragma unroll
                for (int step = 0; step < HEAD_DIM / 16; step++)
#    pragma unroll
                    for (int r = 0; r < ROW_TILES; r++)
                        load_query(kept[step][r], q_tile, warp_row, r, step);
#endif
            const int first_key = TILE_AT(t) * BLOCK_N;
            const uint32_t k_tile = k_tiles + t % STAGES * BLOCK_N * HEAD_DIM * 2;
            const uint32_t v_tile = v_tiles + t % STAGES * BLOCK_N * HEAD_DIM_V * 2;
            bool partial = first_key < at.first_full || first_key + BLOCK_N > at.last_full;
#if LISTED
            partial = partial || !(list[t] & TILE_FULL);
#endif
            uint32_t p[BLOCK_N / 16][ROW_TILES][4];
            float sum[ROW_TILES][2] = {};
            bool done = false;
            if (OPTIMISTIC && PLAIN && settled && !partial) {
                /* With the maxima as they are: no row waits for its maximum, and most tiles raise none. */
                float shift[ROW_TILES][2], most = 0;
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        shift[r][half] = f.row_max[r][half] * unit;
#if Q_IN_REGISTERS
#    pragma unroll
                for (int step = 0; step < BLOCK_N / 16; step++) {
                    multiply_qk_group(f.s, kept, k_tile, step);
                    make_weights(p[step], sum, f.s, shift, unit, step);
                }
#else
                multiply_qk(f.s, kept, q_tile, warp_row, k_tile);
#    pragma unroll
                for (int step = 0; step < BLOCK_N / 16; step++)
                    make_weights(p[step], sum, f.s, shift, unit, step);
#endif
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++)
                    most = fmaxf(most, fmaxf(sum[r][0], sum[r][1]));
                done = !__any_sync(0xffffffff, !(most <= SUM_MAX));
            }
            if (!done) {
                multiply_qk(f.s, kept, q_tile, warp_row, k_tile);
                finish_scores(f.s, a, at, from, warp_row, first_key);
                if (partial)
                    hide_keys(f.s, a, at, from, warp_row, first_key);
                raise_maxima(f, unit);
                float shift[ROW_TILES][2];
                bool seen = true;
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const float m = f.row_max[r][half];
                        seen = seen && m != MINUS_INF;
                        shift[r][half] = m == MINUS_INF ? 0.0f : PLAIN ? m * unit : m;
                        sum[r][half] = 0;
                    }
                settled = __all_sync(0xffffffff, seen);
#pragma unroll
                for (int step = 0; step < BLOCK_N / 16; step++)
                    make_weights(p[step], sum, f.s, shift, unit, step);
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
    }
    cp_async_wait<0>();
    __syncthreads(); /* Q's place becomes the output's */
    store_rows(f, a, at, q_tile, warp_row, unit);
}
