/* gemm_mma.cu: C = alpha A B + beta C for compute capability 8.0 and above, by mma.sync, for 16-bit dtypes.
 *
 * Idea: a block owns a tile of C in registers and walks k; cp.async fills a ring of STAGES tiles of A and B in shared
 * memory while the tensor cores work on an earlier one (the multistage design of CUTLASS 2). Chunks of 16 bytes of a
 * tile are permuted within their row, so that ldmatrix, which reads one chunk from each of eight rows, meets eight
 * different bank groups. Where addresses are no multiples of 16 bytes, threads copy elements instead. gemm.mma is the
 * best of these constants; the rungs below it (gemm_plan.c) are the same text with one idea less.
 *
 * Tile: 128 x 128 of C, 32 of k a step. Eight warps, two down and four across, own 64 x 32 each: 4 x 4 products
 * m16n8k16. Blocks in groups of 16 tiles down, so that those at work at one time share A and B in L2.
 *
 * Shared memory [STAGES]: A, k-major [128 rows][32 of k] or m-major [32 of k][128 rows]; B, k-major [128 columns][32 of
 * k] or n-major [32 of k][128 columns]. A and B are held alike: `outer` is the axis that C keeps.
 *
 * Registers: 64 sums (32 in float16), 16 of A, 8 of B and some 30 besides, of 128: two blocks a multiprocessor. AHEAD
 * holds A and B twice, and one block has them all. */
#include "companions/gemm/gemm_elements.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mma.cuh"

GEMM_MMA_CONSTANTS(GPU_CONSTANT_GIVEN)

constexpr int BLOCK = GEMM_MMA_BLOCK, BLOCK_K = GEMM_MMA_BLOCK_K, THREADS = GEMM_MMA_THREADS;
constexpr int OPERAND_BYTES = gemm_mma_operand_bytes(LAYOUT), STAGE_BYTES = 2 * OPERAND_BYTES;
constexpr int CHUNKS = BLOCK * BLOCK_K / 8 / THREADS; /* that a thread copies, of A and of B */
static_assert(!ACCUMULATE16 || DTYPE == GEMM_FLOAT16, "sums in float16 are of float16");

/* ---- operands in shared memory ---- */

/* Where the chunk of elements `x` .. x + 7 of row `y` lies: rows of BLOCK_K elements, or with `across` of BLOCK. */
template <bool across> __device__ __forceinline__ uint32_t chunk_at(int y, int x) {
    constexpr int ROW_BYTES = (across ? BLOCK : BLOCK_K) * 2 + (LAYOUT == GEMM_ROWS_PADDED ? 16 : 0);
    const uint32_t mix = LAYOUT != GEMM_ROWS_SWIZZLE ? 0 : across ? y & 7 : y >> 1 & 3;
    return y * ROW_BYTES + ((x / 8 ^ mix) << 4);
}

/* One operand of a block: element (outer, k) at data + outer * outer_stride + k * k_stride, one of which is 1. */
struct operand {
    const char *data;
    int64_t outer_stride, k_stride;
    int outer, k; /* that are left from the block's first on */
};

/* Eight elements from (outer, k) on, along the contiguous axis; those outside of the matrix are 0. */
template <bool across>
__device__ __forceinline__ void copy_chunk(uint32_t to, const struct operand &x, int outer, int k) {
    const int left = across ? x.outer - outer : x.k - k;
    const int inside = (across ? k < x.k : outer < x.outer) && left > 0 ? min(left, 8) : 0;
    const uint16_t *from = (const uint16_t *)x.data + (inside ? outer * x.outer_stride + k * x.k_stride : 0);
    if (ALIGNED) {
        cp_async_16_fill(to, from, inside * 2);
        return;
    }
    uint32_t word[4] = {0, 0, 0, 0};
    const int64_t step = across ? x.outer_stride : x.k_stride;
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < inside)
            word[i / 2] |= (uint32_t)from[i * step] << 16 * (i % 2);
    st_shared_16(to, word[0], word[1], word[2], word[3]);
}

/* A tile of BLOCK x BLOCK_K from `k` on. */
template <bool across> __device__ __forceinline__ void copy_tile(uint32_t to, const struct operand &x, int k) {
    constexpr int WIDTH = (across ? BLOCK : BLOCK_K) / 8; /* chunks of a row */
#pragma unroll(ALIGNED ? CHUNKS : 1) /* elements of several chunks at a time would not fit in registers */
    for (int i = 0; i < CHUNKS; i++) {
        const int number = i * THREADS + threadIdx.x, row = number / WIDTH, column = number % WIDTH * 8;
        copy_chunk<across>(to + chunk_at<across>(row, column), x, across ? column : row, k + (across ? row : column));
    }
}

/* Fragments of 16 of `outer` from `outer` on by 16 of k from `k` on: matrices of 8 x 8, those of A with the halves of
 * outer first, those of B (by_k) with the halves of k first. */
template <bool across, bool by_k>
__device__ __forceinline__ void load_fragment(uint32_t (&r)[4], uint32_t tile, int outer, int k) {
    const int lane = threadIdx.x % 32, first = lane / 8 % 2 * 8, second = lane / 16 * 8;
    const int o = outer + (by_k ? second : first), n = k + (by_k ? first : second);
    if (across)
        ldmatrix_x4_trans(r, tile + chunk_at<true>(n + lane % 8, o));
    else
        ldmatrix_x4(r, tile + chunk_at<false>(o + lane % 8, n));
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

/* A warp's 64 x 16 of A and 32 x 16 of B^T. */
struct fragments {
    uint32_t a[4][4], b[2][4];
};
__device__ __forceinline__ void load_fragments(struct fragments &f, uint32_t stage, int warp_row, int warp_column,
                                               int k) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        load_fragment<A_M_MAJOR, false>(f.a[i], stage, warp_row + 16 * i, k);
#pragma unroll
    for (int j = 0; j < 2; j++)
        load_fragment<B_N_MAJOR, true>(f.b[j], stage + OPERAND_BYTES, warp_column + 16 * j, k);
}
__device__ __forceinline__ void multiply_fragments(struct sums (&s)[4][4], const struct fragments &f) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            multiply(s[i][j], f.a[i], f.b[j / 2][j % 2 * 2], f.b[j / 2][j % 2 * 2 + 1]);
}

extern "C" __global__ void __launch_bounds__(GEMM_MMA_THREADS, AHEAD ? 1 : 2)
    gemm_mma(const __grid_constant__ struct gemm_params a) {
    extern __shared__ char shared[];
    const uint32_t base = (shared_address(shared) + 127) / 128 * 128;
    const int row_tiles = (a.m + BLOCK - 1) / BLOCK, column_tiles = (a.n + BLOCK - 1) / BLOCK;
    const int tile = blockIdx.x % (row_tiles * column_tiles), batch = blockIdx.x / (row_tiles * column_tiles);
    const int first = tile / (16 * column_tiles) * 16, height = min(16, row_tiles - first);
    const int within = tile - first * column_tiles;
    const int row = (L2_ORDER ? first + within % height : tile / column_tiles) * BLOCK;
    const int column = (L2_ORDER ? within / height : tile % column_tiles) * BLOCK;

    const struct operand left = {(const char *)element_of(a.a, batch, row, 0), a.a.row, a.a.column, a.m - row, a.k};
    const struct operand right = {(const char *)element_of(a.b, batch, 0, column), a.b.column, a.b.row, a.n - column,
                                  a.k};
    const int steps = (a.k + BLOCK_K - 1) / BLOCK_K;
    const int warp_row = threadIdx.x / 32 % 2 * 64, warp_column = threadIdx.x / 64 * 32;
    struct sums s[4][4] = {};

    const auto copy_step = [&](int step) {
        const uint32_t to = base + step % STAGES * STAGE_BYTES;
        copy_tile<A_M_MAJOR>(to, left, step * BLOCK_K);
        copy_tile<B_N_MAJOR>(to + OPERAND_BYTES, right, step * BLOCK_K);
        cp_async_commit();
    };
    struct fragments f[AHEAD ? 2 : 1];

#pragma unroll
    for (int step = 0; step < STAGES - 1; step++)
        copy_step(step);
    if (AHEAD) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        load_fragments(f[0], base, warp_row, warp_column, 0);
    }
    for (int step = 0; step < steps; step++) {
        if (!AHEAD) {
            cp_async_wait<STAGES - 2>();
            __syncthreads(); /* this step's tiles are there, and everybody has done the step before */
        }
        copy_step(step + STAGES - 1);
        const uint32_t now = base + step % STAGES * STAGE_BYTES;
#pragma unroll
        for (int k = 0; k < BLOCK_K; k += 16) {
            const int turn = AHEAD ? k / 16 % 2 : 0;
            if (!AHEAD) {
                load_fragments(f[0], now, warp_row, warp_column, k);
            } else if (k + 16 < BLOCK_K) {
                load_fragments(f[AHEAD - turn], now, warp_row, warp_column, k + 16);
            } else {
                cp_async_wait<STAGES - 2>();
                __syncthreads(); /* the next step's tiles are there, and everybody has read this one's */
                load_fragments(f[AHEAD - turn], base + (step + 1) % STAGES * STAGE_BYTES, warp_row, warp_column, 0);
            }
            multiply_fragments(s, f[turn]);
        }
    }
    cp_async_wait<0>();

    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                store_pair(a, s[i][j], half, batch, row + warp_row + 16 * i + half * 8 + lane / 4,
                           column + warp_column + 8 * j + lane % 4 * 2);
}
