/* gemm_mma.cu: C = alpha A B + beta C for compute capability 8.0 and above, by mma.sync, for 16-bit dtypes.
 *
 * Idea: a block owns a tile of C in registers and walks k; cp.async fills a ring of STAGES tiles of A and B in shared
 * memory while the tensor cores work on an earlier one (the multistage design of CUTLASS 2). Chunks of 16 bytes of a
 * tile are permuted within their row, so that ldmatrix, which reads one chunk from each of eight rows, meets eight
 * different bank groups. Where addresses are no multiples of 16 bytes, threads copy elements instead. gemm.mma is the
 * best of these constants; the rungs below it (gemm_plan.c) are the same text with one idea less.
 *
 * Tile: 128 x BLOCK_N of C, BLOCK_K of k a step. Eight warps, two down and four across, own 64 x BLOCK_N / 4 each: of
 * 256 columns 4 x 8 products m16n8k16, whose operands are 4 KB from shared memory where four by four of 128 columns
 * take 3 KB: a third less for each product. Blocks in groups of 16 tiles down, so that those at work at one time share
 * A and B in L2.
 *
 * Shared memory [STAGES]: A, k-major [128 rows][BLOCK_K] or m-major [BLOCK_K][128 rows]; B, k-major [BLOCK_N
 * columns][BLOCK_K] or n-major [BLOCK_K][BLOCK_N columns]. A and B are held alike: `outer` is the axis that C keeps.
 *
 * Registers: of 128 columns 64 sums (32 in float16), 16 of A, 8 of B and some 30 besides, of 128: two blocks a
 * multiprocessor. AHEAD holds A and B twice, and one block has them all: of 256 columns 128 sums, 64 of A and B and
 * some 50 besides. Bound by mma.sync, and nearly as much by shared memory (128 x 256: 352 cycles beside 412 a product).
 */
#include "companions/gemm/gemm_elements.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mma.cuh"

GEMM_MMA_CONSTANTS(GPU_CONSTANT_GIVEN)

constexpr int BLOCK_M = GEMM_MMA_BLOCK_M, THREADS = GEMM_MMA_THREADS;
constexpr int A_BYTES = gemm_mma_operand_bytes(BLOCK_M, BLOCK_K, LAYOUT);
constexpr int STAGE_BYTES = A_BYTES + gemm_mma_operand_bytes(BLOCK_N, BLOCK_K, LAYOUT);
constexpr int WARP_N = BLOCK_N / 4, PARTS = BLOCK_K / 16; /* of a step: 16 of k each */
static_assert(!ACCUMULATE16 || DTYPE == GEMM_FLOAT16, "sums in float16 are of float16");
static_assert((BLOCK_K == 32 || BLOCK_K == 64) && BLOCK_M * BLOCK_K / 8 % (PARTS * THREADS) == 0, "whole copies");

/* ---- operands in shared memory ---- */

/* Where the chunk of elements `x` .. x + 7 of row `y` lies: rows of BLOCK_K elements, or with `across` of OUTER. */
template <bool across, int OUTER> __device__ __forceinline__ uint32_t chunk_at(int y, int x) {
    constexpr int ROW_BYTES = (across ? OUTER : BLOCK_K) * 2 + (LAYOUT == GEMM_ROWS_PADDED ? 16 : 0);
    const uint32_t mix = LAYOUT != GEMM_ROWS_SWIZZLE ? 0 : across || BLOCK_K == 64 ? y & 7 : y >> 1 & 3;
    return y * ROW_BYTES + ((x / 8 ^ mix) << 4);
}

/* One operand of a block, and the chunks of a step's tile that this thread copies: each STEP rows of the tile below the
 * one before, at the same place of its row, so that one address and one mix serve all. */
template <bool across, int OUTER> struct operand {
    static constexpr int WIDTH = (across ? OUTER : BLOCK_K) / 8; /* chunks of a row */
    static constexpr int STEP = THREADS / WIDTH, CHUNKS = OUTER * BLOCK_K / 8 / THREADS;
    static_assert(STEP % 8 == 0 && (!across || BLOCK_K % STEP == 0) && CHUNKS % PARTS == 0,
                  "a row's mix is that of the row STEP below");
    const char *from;    /* the thread's first chunk of the next step */
    int64_t chunk_bytes; /* from a chunk to the next */
    int left, inside; /* of the first chunk: rows from its own on that lie in the matrix, elements from its first on */
    uint32_t to;      /* of the stage */

    /* stride: from a row to the next, in elements. */
    __device__ __forceinline__ operand(const uint16_t *data, int64_t stride, int outer, int k) {
        const int y = threadIdx.x / WIDTH, x = threadIdx.x % WIDTH * 8;
        from = (const char *)(data + y * stride + x);
        chunk_bytes = 2 * STEP * stride;
        left = (across ? k : outer) - y, inside = (across ? outer : k) - x;
        to = chunk_at<across, OUTER>(y, x);
    }
    /* The chunks of part `part` to the stage at `stage`; those outside of the matrix are 0. */
    __device__ __forceinline__ void copy(uint32_t stage, int part) const {
        constexpr int ROW_BYTES = (across ? OUTER : BLOCK_K) * 2 + (LAYOUT == GEMM_ROWS_PADDED ? 16 : 0);
#pragma unroll
        for (int n = 0; n < CHUNKS / PARTS; n++) {
            const int i = part * (CHUNKS / PARTS) + n;
            const int count = i * STEP < left ? max(0, min(inside, 8)) : 0;
            const char *chunk = from + i * chunk_bytes;
            if (ALIGNED)
                cp_async_16_fill(stage + to + i * STEP * ROW_BYTES, chunk, 2 * count);
            else
                copy_elements(stage + to + i * STEP * ROW_BYTES, chunk, count);
        }
    }
    __device__ __forceinline__ void copy_elements(uint32_t there, const char *chunk, int count) const {
        uint32_t word[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i < count)
                word[i / 2] |= (uint32_t) * (const uint16_t *)(chunk + i * 2) << 16 * (i % 2);
        st_shared_16(there, word[0], word[1], word[2], word[3]);
    }
    __device__ __forceinline__ void next() {
        from += across ? chunk_bytes * (BLOCK_K / STEP) : 2 * BLOCK_K;
        (across ? left : inside) -= BLOCK_K;
    }
};

/* Fragments of 16 of `outer` from `outer` on by 16 of k from `k` on: matrices of 8 x 8, those of A with the halves of
 * outer first, those of B (by_k) with the halves of k first. */
template <bool across, bool by_k, int OUTER>
__device__ __forceinline__ void load_fragment(uint32_t (&r)[4], uint32_t tile, int outer, int k) {
    const int lane = threadIdx.x % 32, first = lane / 8 % 2 * 8, second = lane / 16 * 8;
    const int o = outer + (by_k ? second : first), n = k + (by_k ? first : second);
    if (across)
        ldmatrix_x4_trans(r, tile + chunk_at<true, OUTER>(n + lane % 8, o));
    else
        ldmatrix_x4(r, tile + chunk_at<false, OUTER>(o + lane % 8, n));
}

/* ---- sums ---- */

/* Of an m16n8 product; in float16 two to a register. One of the two is used. */
struct sums {
    float wide[4];
    uint32_t narrow[2];
};

__device__ __forceinline__ void multiply(struct sums &s, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if (ACCUMULATE16)
        mma_m16n8k16_f16_f16(s.narrow, a, b0, b1);
    else if (DTYPE == GEMM_FLOAT16)
        mma_m16n8k16_f16(s.wide, a, b0, b1);
    else
        mma_m16n8k16_bf16(s.wide, a, b0, b1);
}

__device__ __forceinline__ float sum_of(const struct sums &s, int i) {
    return ACCUMULATE16 ? widened((uint16_t)(s.narrow[i / 2] >> 16 * (i % 2))) : s.wide[i];
}

/* Two neighbours of a row. */
__device__ __forceinline__ void store_pair(const struct gemm_params &a, const struct sums &s, int half, int batch,
                                           int row, int column) {
    if (row >= a.m || column >= a.n)
        return;
    uint16_t *to = element_of(a.out, batch, row, column);
    const float low = finished(a, sum_of(s, half * 2), batch, row, column);
    if (column + 1 == a.n) {
        *to = (uint16_t)narrowed(low, 0.0f);
        return;
    }
    const uint32_t pair = narrowed(low, finished(a, sum_of(s, half * 2 + 1), batch, row, column + 1));
    if (ALIGNED) {
        *(uint32_t *)to = pair;
    } else {
        *to = (uint16_t)pair;
        *element_of(a.out, batch, row, column + 1) = (uint16_t)(pair >> 16);
    }
}

/* ---- the kernel ---- */

/* A warp's 64 x 16 of A and WARP_N x 16 of B^T. */
struct fragments {
    uint32_t a[4][4], b[WARP_N / 16][4];
};
__device__ __forceinline__ void load_fragments(struct fragments &f, uint32_t stage, int warp_row, int warp_column,
                                               int k) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        load_fragment<A_M_MAJOR, false, BLOCK_M>(f.a[i], stage, warp_row + 16 * i, k);
#pragma unroll
    for (int j = 0; j < WARP_N / 16; j++)
        load_fragment<B_N_MAJOR, true, BLOCK_N>(f.b[j], stage + A_BYTES, warp_column + 16 * j, k);
}
__device__ __forceinline__ void multiply_fragments(struct sums (&s)[4][WARP_N / 8], const struct fragments &f) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < WARP_N / 8; j++) {
            const int n = i % 2 ? WARP_N / 8 - 1 - j : j; /* to and fro: the next product has one operand of this one */
            multiply(s[i][n], f.a[i], f.b[n / 2][n % 2 * 2], f.b[n / 2][n % 2 * 2 + 1]);
        }
}

/* From (row, column) on. */
__device__ __forceinline__ void store_sums(const struct gemm_params &a, const struct sums (&s)[4][WARP_N / 8],
                                           int batch, int row, int column) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < WARP_N / 8; j++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                store_pair(a, s[i][j], half, batch, row + 16 * i + half * 8 + lane / 4, column + 8 * j + lane % 4 * 2);
}

/* The block's tile of C. */
struct tile {
    int batch, row, column;
};
__device__ __forceinline__ struct tile tile_of_block(const struct gemm_params &a) {
    const int row_tiles = (a.m + BLOCK_M - 1) / BLOCK_M, column_tiles = (a.n + BLOCK_N - 1) / BLOCK_N;
    const int tile = blockIdx.x % (row_tiles * column_tiles), batch = blockIdx.x / (row_tiles * column_tiles);
    const int first = tile / (16 * column_tiles) * 16, height = min(16, row_tiles - first);
    const int within = tile - first * column_tiles;
    return {batch, (L2_ORDER ? first + within % height : tile / column_tiles) * BLOCK_M,
            (L2_ORDER ? within / height : tile % column_tiles) * BLOCK_N};
}

extern "C" __global__ void __launch_bounds__(GEMM_MMA_THREADS, AHEAD || !ALIGNED ? 1 : 2)
    gemm_mma(const __grid_constant__ struct gemm_params a) {
    extern __shared__ char shared[];
    const uint32_t base = (shared_address(shared) + 127) / 128 * 128;
    const struct tile at = tile_of_block(a);
    const int batch = at.batch, row = at.row, column = at.column;
    operand<A_M_MAJOR, BLOCK_M> left(element_of(a.a, batch, row, 0), A_M_MAJOR ? a.a.column : a.a.row, a.m - row, a.k);
    operand<B_N_MAJOR, BLOCK_N> right(element_of(a.b, batch, 0, column), B_N_MAJOR ? a.b.row : a.b.column, a.n - column,
                                      a.k);
    const int steps = (a.k + BLOCK_K - 1) / BLOCK_K;
    const int warp_row = threadIdx.x / 32 % 2 * 64, warp_column = threadIdx.x / 64 * WARP_N;
    struct sums s[4][WARP_N / 8] = {};

    const auto copy_part = [&](uint32_t stage, int part) {
        left.copy(stage, part);
        right.copy(stage + A_BYTES, part);
        if (part == PARTS - 1) {
            left.next();
            right.next();
            cp_async_commit();
        }
    };
    const auto stage_after = [&](uint32_t stage) {
        return stage + STAGE_BYTES == base + STAGES * STAGE_BYTES ? base : stage + STAGE_BYTES;
    };
    struct fragments f[AHEAD ? 2 : 1];

#pragma unroll
    for (int step = 0; step < STAGES - 1; step++)
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            copy_part(base + step * STAGE_BYTES, part);
    if (AHEAD) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        load_fragments(f[0], base, warp_row, warp_column, 0);
    }
    uint32_t now = base, filled = base + (STAGES - 1) * STAGE_BYTES;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        if (!AHEAD) {
            cp_async_wait<STAGES - 2>();
            __syncthreads(); /* this step's tiles are there, and everybody has done the step before */
        }
        const uint32_t next = stage_after(now);
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const int turn = AHEAD ? part % 2 : 0;
            copy_part(filled, part);
            if (!AHEAD) {
                load_fragments(f[0], now, warp_row, warp_column, part * 16);
            } else if (part + 1 < PARTS) {
                load_fragments(f[AHEAD - turn], now, warp_row, warp_column, part * 16 + 16);
            } else {
                cp_async_wait<STAGES - 2>();
                __syncthreads(); /* the next step's tiles are there, and everybody has read this one's */
                load_fragments(f[AHEAD - turn], next, warp_row, warp_column, 0);
            }
            multiply_fragments(s, f[turn]);
        }
        now = next;
        filled = stage_after(filled);
    }
    cp_async_wait<0>();

    store_sums(a, s, batch, row + warp_row, column + warp_column);
}
