/* gemm_skinny.cu: C = alpha A B + beta C where A has few rows, for compute capability 8.0 and above, 16-bit dtypes.
 *
 * Idea: the time is that of reading B once, so B goes from memory straight to registers, 16 bytes a load, many loads in
 * flight, and is the 16-row operand of mma.m16n8k16: eight rows of A cost one product. Which of k a lane holds is free
 * as long as A and B agree, so lane t of four takes k 8t .. 8t + 7 of 32: of B held k-major one load is the lane's part
 * of two products; held n-major, eight loads (a row of k each, eight columns) are, once their halves are paired.
 *
 * Tile: all rows of C (ROWS, a multiple of 8) x 64 columns a block. Its warps take 32 of k in turns, so that a block
 * reads 512 contiguous bytes of each column at a time; of a split, a part of k. Sums of the warps are added in order.
 *
 * Shared memory: [warps][ROWS][64 columns and 4] sums. Registers: DEPTH steps of 32 for B and 4 for each eight rows of
 * A, 16 sums for each eight rows. Bound by device memory: DEPTH - 1 steps, of 4 KB a warp, are always on their way. */
#include "companions/gemm/gemm_elements.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/mma.cuh"

GEMM_SKINNY_CONSTANTS(GPU_CONSTANT_GIVEN)

constexpr int COLUMNS = GEMM_SKINNY_COLUMNS, WARPS = GEMM_SKINNY_WARPS, PITCH = GEMM_SKINNY_PITCH;
constexpr int ROW_TILES = ROWS / 8;

/* What a lane holds of 32 of k: of B eight loads, of A its row in each eight. */
struct step {
    uint32_t b[8][4], a[ROW_TILES][4];
};

/* The block's part of the operands: addresses of the lane's first element, and what is there. */
struct place {
    const uint16_t *a, *b;
    int64_t a_eight_rows, b_load; /* elements from one load to the next */
    int rows, columns;            /* of A from the lane's on; of B */
    int k, last;                  /* the lane's first of k, and the end of the block's part */
};

__device__ __forceinline__ void load(struct step &s, const struct place &p, const struct gemm_matrix &b, int number) {
    const int k = p.k + number * 32 * WARPS, inside = k < p.last;
    const uint16_t *from = p.b + (B_N_MAJOR ? k * b.row : (int64_t)k);
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
        ld_global_16(s.a[i], p.a + i * p.a_eight_rows + k, inside && 8 * i < p.rows);
#pragma unroll
    for (int j = 0; j < 8; j++)
        ld_global_16_once(s.b[j], from + j * p.b_load, inside && (B_N_MAJOR ? 0 : 8 * j) < p.columns);
}

/* The 16 columns x 16 of k of product `half` of two, as the tensor core takes them. */
__device__ __forceinline__ void fragment_of(uint32_t (&r)[4], const struct step &s, int tile, int half) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int column = 2 * tile + n % 2, pair = 2 * half + n / 2;
        r[n] = B_N_MAJOR ? __byte_perm(s.b[2 * pair][tile], s.b[2 * pair + 1][tile], n % 2 ? 0x7632 : 0x5410)
                         : s.b[column][pair];
    }
}

__device__ __forceinline__ void multiply(float (&sums)[4][ROW_TILES][4], const struct step &s) {
#pragma unroll
    for (int tile = 0; tile < 4; tile++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t b[4];
            fragment_of(b, s, tile, half);
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++)
                if (DTYPE == GEMM_FLOAT16)
                    mma_m16n8k16_f16(sums[tile][i], b, s.a[i][2 * half], s.a[i][2 * half + 1]);
                else
                    mma_m16n8k16_bf16(sums[tile][i], b, s.a[i][2 * half], s.a[i][2 * half + 1]);
        }
}

extern "C" __global__ void __launch_bounds__(32 * GEMM_SKINNY_WARPS, 1)
    gemm_skinny(const __grid_constant__ struct gemm_params a) {
    extern __shared__ char shared[];
    float *const of_warps = (float *)shared;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int column_tiles = (a.n + COLUMNS - 1) / COLUMNS, rest = blockIdx.x / column_tiles;
    const int column = blockIdx.x % column_tiles * COLUMNS, split = rest % a.splits, batch = rest / a.splits;
    const int rounds = (a.k + 32 * WARPS - 1) / (32 * WARPS), rounds_here = (rounds + a.splits - 1) / a.splits;
    const int first = split * rounds_here * 32 * WARPS, own_column = column + (B_N_MAJOR ? 8 * g : g);
    const int64_t eight = B_N_MAJOR ? a.b.row : 8 * a.b.column;
    const struct place place = {element_of(a.a, batch, g, 0),
                                element_of(a.b, batch, 0, own_column),
                                8 * a.a.row,
                                eight,
                                a.m - g,
                                a.n - own_column,
                                first + warp * 32 + 8 * t,
                                min(first + rounds_here * 32 * WARPS, a.k)};
    float sums[4][ROW_TILES][4] = {};
    struct step steps[DEPTH];

    griddepcontrol_launch_dependents(); /* a grid behind this one waits for its end by itself */
    griddepcontrol_wait();
#pragma unroll
    for (int d = 0; d < DEPTH - 1; d++)
        load(steps[d], place, a.b, d);
    for (int round = 0; round < rounds_here; round += DEPTH)
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            load(steps[(d + DEPTH - 1) % DEPTH], place, a.b, round + d + DEPTH - 1);
            multiply(sums, steps[d]);
        }

#pragma unroll
    for (int tile = 0; tile < 4; tile++)
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int x = B_N_MAJOR ? 8 * g + 2 * tile + n / 2 : 16 * tile + n / 2 * 8 + g;
                of_warps[(warp * ROWS + 8 * i + 2 * t + n % 2) * PITCH + x] = sums[tile][i][n];
            }
    __syncthreads();
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
