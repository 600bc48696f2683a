/* gemm_skinny.cu: C = alpha A B + beta C where A has few rows, for compute capability 8.0 and above, 16-bit dtypes.
 *
 * Idea: the time is that of reading B once, so B goes from memory straight to registers, 16 bytes a load, many loads in
 * flight, and is the 16-row operand of mma.m16n8k16: eight rows of A cost one product. Which of k a lane holds is free
 * as long as A and B agree, so lane t of four takes k 8t .. 8t + 7 of 32. Held n-major, eight loads (a row of k each,
 * eight columns) are a lane's part of B, once their halves are paired. Held k-major, a load is eight of one column's k;
 * eight lanes read 128 contiguous bytes of a column, as a multiprocessor's requests are what is scarce (64 bytes each
 * took a third longer on an H200), and pairs of lanes exchange halves before the products.
 *
 * Tile: all rows of C (ROWS, a multiple of 8) x 64 columns a block. Its warps take pairs of steps in turns, 64 of k; a
 * step is 4 KB of B, 32 of k (n-major) or 32 columns (k-major). Of a split, a part of k. Sums of the warps are added in
 * order.
 *
 * Shared memory: A [warps][3 pairs][ROWS][64 of k], copied by cp.async, chunks of odd rows in the other half; after
 * that sums [warps][ROWS][64 columns and 4]. Registers: DEPTH steps of 32 for B, 16 sums for each eight rows of A.
 * Bound by device memory: DEPTH - 1 steps of each warp are always on their way. */
#include "companions/gemm/gemm_elements.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/mma.cuh"

GEMM_SKINNY_CONSTANTS(GPU_CONSTANT_GIVEN)

constexpr int COLUMNS = GEMM_SKINNY_COLUMNS, WARPS = GEMM_SKINNY_WARPS, PITCH = GEMM_SKINNY_PITCH;
constexpr int ROW_TILES = ROWS / 8, ROUND = 64 * WARPS, A_BYTES = ROWS * 128, A_PAIRS = GEMM_SKINNY_A_PAIRS;
static_assert(DEPTH % 2 == 0, "steps come in pairs");

/* Where the lane's part of the operands is, and what of it lies in the matrices. */
struct place {
    const uint16_t *b;
    int64_t b_load; /* elements from one load to the next */
    int columns;    /* of B from the lane's first on */
    int k, last;    /* the warp's first of k, and the end of the block's part */
    int lane_k;     /* from the first of a pair's k on, or of a step's */
};

/* Half `half` of pair `pair`. */
__device__ __forceinline__ void load_b(uint32_t (&b)[8][4], const struct place &p, const struct gemm_matrix &matrix,
                                       int pair, int half) {
    const int k = p.k + pair * ROUND + p.lane_k + (B_N_MAJOR ? 32 * half : 0), inside = k < p.last;
    const uint16_t *from = p.b + (B_N_MAJOR ? k * matrix.row : k + 8 * half * p.b_load);
    const int columns = inside ? p.columns : 0;
#pragma unroll
    for (int j = 0; j < 8; j++, from += p.b_load)
        ld_global_16_once(b[j], from, (B_N_MAJOR ? 0 : 32 * half + 4 * j) < columns);
}

/* The pair's 64 of k of A, zeros outside. */
__device__ __forceinline__ void copy_a(uint32_t to, const struct gemm_params &a, const struct place &p, int batch,
                                       int pair) {
    const int lane = threadIdx.x % 32, chunk = lane % 8, k = p.k + pair * ROUND + 8 * chunk;
#pragma unroll
    for (int n = 0; n < ROWS / 4; n++) {
        const int row = 4 * n + lane / 8, inside = row < a.m && k < p.last;
        cp_async_16_fill(to + row * 128 + ((chunk ^ row % 2 * 4) << 4),
                         element_of(a.a, batch, inside ? row : 0, inside ? k : 0), inside ? 16 : 0);
    }
    cp_async_commit();
}

/* Lanes 4 apart hold the two halves of the k of two columns: afterwards each holds one column's. */
__device__ __forceinline__ void exchange_halves(uint32_t (&x)[4], uint32_t (&y)[4]) {
    const bool odd = threadIdx.x & 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t other = __shfl_xor_sync(0xffffffff, odd ? x[i] : y[i], 4);
        (odd ? x[i] : y[i]) = other;
    }
}

/* Adds the products of 16 columns by 16 of k, the tensor core's part `word` of the lane's 8 of k, for all rows of A. */
__device__ __forceinline__ void multiply_tile(float (&sums)[ROW_TILES][4], const uint32_t (&b)[4],
                                              const uint32_t (&a)[ROW_TILES][4], int word) {
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
        if (DTYPE == GEMM_FLOAT16)
            mma_m16n8k16_f16(sums[i], b, a[i][word], a[i][word + 1]);
        else
            mma_m16n8k16_bf16(sums[i], b, a[i][word], a[i][word + 1]);
}

/* Of the pair's A the lane's row of each eight, chunk `t` of the 32 of k `part`. */
__device__ __forceinline__ void load_a(uint32_t (&a)[ROW_TILES][4], uint32_t from, int part) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
        ld_shared_16(a[i], from + (8 * i + g) * 128 + ((4 * part + t ^ g % 2 * 4) << 4));
}

/* A step of 32 of k and 64 columns. */
__device__ __forceinline__ void multiply_n_major(float (&sums)[4][ROW_TILES][4], const uint32_t (&b)[8][4],
                                                 uint32_t from, int half) {
    uint32_t a[ROW_TILES][4];
    load_a(a, from, half);
#pragma unroll
    for (int tile = 0; tile < 4; tile++)
#pragma unroll
        for (int word = 0; word < 4; word += 2) {
            uint32_t paired[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int k = 2 * word + n / 2 * 2;
                paired[n] = __byte_perm(b[k][tile], b[k + 1][tile], n % 2 ? 0x7632 : 0x5410);
            }
            multiply_tile(sums[tile], paired, a, word);
        }
}
/* A step of 64 of k and 32 columns, which are tiles 2 half and 2 half + 1. */
__device__ __forceinline__ void multiply_k_major(float (&sums)[4][ROW_TILES][4], uint32_t (&b)[8][4], uint32_t from,
                                                 int half) {
#pragma unroll
    for (int j = 0; j < 8; j += 2)
        exchange_halves(b[j], b[j + 1]);
#pragma unroll
    for (int part = 0; part < 2; part++) {
        uint32_t a[ROW_TILES][4];
        load_a(a, from, part);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int word = 0; word < 4; word += 2) {
                const uint32_t of_tile[4] = {b[4 * i + part][word], b[4 * i + 2 + part][word],
                                             b[4 * i + part][word + 1], b[4 * i + 2 + part][word + 1]};
                multiply_tile(sums[2 * half + i], of_tile, a, word);
            }
    }
}

/* The warps' sums in their order, finished or as parts. */
__device__ __forceinline__ void store_sums(const struct gemm_params &a, const float *of_warps, int column, int split,
                                           int batch) {
    for (int n = threadIdx.x; n < ROWS * COLUMNS; n += 32 * WARPS) {
        const int row = n / COLUMNS, x = n % COLUMNS;
        if (row >= a.m || column + x >= a.n)
            continue;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            sum += of_warps[(w * ROWS + row) * PITCH + x];
        if (PARTIAL)
            a.partials[(((int64_t)split * a.batch + batch) * a.m + row) * a.n + column + x] = sum;
        else
            *element_of(a.out, batch, row, column + x) =
                (uint16_t)narrowed(finished(a, sum, batch, row, column + x), 0.0f);
    }
}

extern "C" __global__ void __launch_bounds__(32 * GEMM_SKINNY_WARPS, 1)
    gemm_skinny(const __grid_constant__ struct gemm_params a) {
    extern __shared__ char shared[];
    float *const of_warps = (float *)shared;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int column_tiles = (a.n + COLUMNS - 1) / COLUMNS, rest = blockIdx.x / column_tiles;
    const int column = blockIdx.x % column_tiles * COLUMNS, split = rest % a.splits, batch = rest / a.splits;
    const int rounds = (a.k + ROUND - 1) / ROUND, rounds_here = (rounds + a.splits - 1) / a.splits;
    const int first = split * rounds_here * ROUND, own_column = column + (B_N_MAJOR ? 8 * g : g / 2);
    const struct place place = {element_of(a.b, batch, 0, own_column),
                                B_N_MAJOR ? a.b.row : 4 * a.b.column,
                                a.n - own_column,
                                first + warp * 64,
                                min(first + rounds_here * ROUND, a.k),
                                8 * t + (B_N_MAJOR ? 0 : g % 2 * 32)};
    const uint32_t own = shared_address(shared) + warp * A_PAIRS * A_BYTES, end = own + A_PAIRS * A_BYTES;
    float sums[4][ROW_TILES][4] = {};
    uint32_t b[DEPTH][8][4];

    griddepcontrol_launch_dependents(); /* a grid behind this one waits for its end by itself */
    griddepcontrol_wait();
#pragma unroll
    for (int d = 0; d < DEPTH - 1; d++)
        load_b(b[d], place, a.b, d / 2, d % 2);
    copy_a(own, a, place, batch, 0);
    copy_a(own + A_BYTES, a, place, batch, 1);
    uint32_t now = own, to = own + 2 * A_BYTES;
    for (int round = 0; round < rounds_here; round += DEPTH / 2)
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (d % 2 == 0) {
                cp_async_wait<1>();
                __syncwarp(); /* all lanes' copies of this pair are there, and all have read the pair before */
                copy_a(to, a, place, batch, round + d / 2 + 2);
                to = to + A_BYTES == end ? own : to + A_BYTES;
            }
            load_b(b[(d + DEPTH - 1) % DEPTH], place, a.b, round + (d + DEPTH - 1) / 2, (d + 1) % 2);
            if (B_N_MAJOR)
                multiply_n_major(sums, b[d], now, d % 2);
            else
                multiply_k_major(sums, b[d], now, d % 2);
            if (d % 2 == 1)
                now = now + A_BYTES == end ? own : now + A_BYTES;
        }
    cp_async_wait<0>();
    __syncthreads(); /* no thread reads A any more */

#pragma unroll
    for (int tile = 0; tile < 4; tile++)
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int x = B_N_MAJOR ? 8 * g + 2 * tile + n / 2 : 16 * tile + n / 2 * 8 + g % 2 * 4 + g / 2;
                of_warps[(warp * ROWS + 8 * i + 2 * t + n % 2) * PITCH + x] = sums[tile][i][n];
            }
    __syncthreads();
    store_sums(a, of_warps, column, split, batch);
}
