/* mma_tf32.cuh: products of one warp on float32 tiles, nearly as exact as float32, by three products of tf32 numbers.
 *
 * x = big + small, both tf32: big is x rounded to 11 bits, small the rest, of which the tensor core leaves at most the
 * last bit out. a b = small big + big small + big big: what is missing is 2^-22 of a b. Tensor cores add by cutting
 * off, so that long sums drift towards zero: sums here are of 16 products (scores) or of the keys of one tile, and
 * these are added in float32, rounded (Ootomo and Yokota, 2022).
 *
 * Fragments of m16n8k8 lie in 32-bit tiles as those of m16n8k16 do in 16-bit ones: an 8x8 matrix of ldmatrix is 8 rows
 * of 4 elements, so left_of() and right_of() serve both. Where a tile's rows are the contracted index, the lane reads
 * single words; contracted indices 2t and 2t + 1 take the places t and t + 4, so that accumulators of scores are left
 * operands as they are, and the swizzle keeps the 32 words of a load in different banks. */
#ifndef FDM_MMA_TF32_CUH
#define FDM_MMA_TF32_CUH

#include "cuda/ptx/control.cuh"
#include "families/mma/float32/mma_forward32.h"
#include "families/mma/mma_tile.cuh"

/* Rounded by integers, half away from 0: cvt.rna.tf32 takes more time, 12 % of a whole kernel. */
__device__ __forceinline__ void split_tf32(uint32_t &big, uint32_t &small, float x) {
    big = (__float_as_uint(x) + 0x1000) & 0xffffe000;
    small = __float_as_uint(x - __uint_as_float(big));
}

/* Rows that one of the warps which share them has marked; of every `groups` warps each has rows of its own. `shared`:
 * a tile that no thread reads once all have come. */
template <int shares, int groups> __device__ __forceinline__ uint32_t marked_by_any(uint32_t rows, uint32_t shared) {
    if (shares > 1) {
        const int warp = threadIdx.x / 32;
        __syncthreads();
        st_shared_4(shared + warp * 4, rows);
        __syncthreads();
#pragma unroll
        for (int share = 0; share < shares; share++)
            rows |= ld_shared_4(shared + (share * groups + warp % groups) * 4);
    }
    return rows;
}

/* c = A B^T for 16 `row_tiles` rows of A and 8 `tiles` rows of B. Products of 16 elements of the head dim wait for each
 * other in `chains` (1 or 2) sums, and those of `steps` such sixteens are under way together: what fits in registers.
 */
template <int depth, int steps = depth <= 128 ? 2 : 1, int chains = 1, int row_tiles, int tiles>
__device__ __forceinline__ void multiply_scores(float (&c)[row_tiles][tiles][4], const lane_address<depth / 4> &left,
                                                const lane_address<depth / 4> &right) {
#pragma unroll
    for (int r = 0; r < row_tiles; r++)
#pragma unroll
        for (int n = 0; n < tiles; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                c[r][n][e] = 0;
#pragma unroll steps
    for (int k = 0; k < depth / 16; k++) {
        uint32_t big[2][row_tiles][4], small[2][row_tiles][4];
#pragma unroll
        for (int s = 0; s < 2; s++)
#pragma unroll
            for (int r = 0; r < row_tiles; r++) {
                uint32_t x[4];
                ldmatrix_x4(x, left.at_step(r * 16, 4 * k + 2 * s));
#pragma unroll
                for (int e = 0; e < 4; e++)
                    split_tf32(big[s][r][e], small[s][r][e], __uint_as_float(x[e]));
            }
#pragma unroll
        for (int n = 0; n < tiles; n += 2) {
            uint32_t b_big[2][4], b_small[2][4];
            float sum[chains][row_tiles][2][4] = {};
#pragma unroll
            for (int s = 0; s < 2; s++) {
                uint32_t x[4];
                ldmatrix_x4(x, right.at_step(n * 8, 4 * k + 2 * s));
#pragma unroll
                for (int e = 0; e < 4; e++)
                    split_tf32(b_big[s][e], b_small[s][e], __uint_as_float(x[e]));
            }
            /* the smallest products first */
#pragma unroll
            for (int product = 0; product < 3; product++)
#pragma unroll
                for (int s = 0; s < 2; s++)
#pragma unroll
                    for (int r = 0; r < row_tiles; r++)
#pragma unroll
                        for (int j = 0; j < 2; j++) {
                            const uint32_t(&b)[4] = product == 1 ? b_small[s] : b_big[s];
                            mma_m16n8k8_tf32(sum[s % chains][r][j], product == 0 ? small[s][r] : big[s][r], b[2 * j],
                                             b[2 * j + 1]);
                        }
#pragma unroll
            for (int r = 0; r < row_tiles; r++)
#pragma unroll
                for (int j = 0; j < 2; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        c[r][n + j][e] += chains == 1 ? sum[0][r][j][e] : sum[0][r][j][e] + sum[chains - 1][r][j][e];
        }
    }
}

/* sum += W B: W are accumulators of scores, 16 `row_tiles` x 8 `tiles`; the rows of B are the contracted index, and of
 * its columns 8 `columns` from first_column on are taken. From `fenced` groups of columns on, those of four groups are
 * loaded together: all at once would fill the registers. */
template <int chunks, int fenced = 16, int row_tiles, int tiles, int columns>
__device__ __forceinline__ void add_product(float (&sum)[row_tiles][columns][4], const float (&w)[row_tiles][tiles][4],
                                            uint32_t tile, int first_column = 0) {
    const int lane = threadIdx.x % 32;
    lane_address<chunks> even(tile, MMA_WORD_ROW(lane), MMA_WORD_CHUNK(lane));
    lane_address<chunks> odd(tile, MMA_WORD_ROW(lane) + 1, MMA_WORD_CHUNK(lane));
    even.move(first_column / 4);
    odd.move(first_column / 4);
    even.at += MMA_WORD_BYTE(lane);
    odd.at += MMA_WORD_BYTE(lane);
    uint32_t big[row_tiles][tiles][4], small[row_tiles][tiles][4];
#pragma unroll
    for (int r = 0; r < row_tiles; r++)
#pragma unroll
        for (int k = 0; k < tiles; k++)
#pragma unroll
            for (int e = 0; e < 4; e++) /* rows l / 4 and l / 4 + 8 of the first place, then of the second */
                split_tf32(big[r][k][e], small[r][k][e], w[r][k][e % 2 * 2 + e / 2]);
#pragma unroll
    for (int n = 0; n < columns; n++) {
        if (columns >= fenced && n % 4 == 0 && n)
            exit_if((int)even.at_step(0, 2 * n) < 0); /* never, but later loads are not made before, in registers */
        float part[row_tiles][4] = {};
        uint32_t b_big[tiles][2], b_small[tiles][2];
#pragma unroll
        for (int k = 0; k < tiles; k++) {
            split_tf32(b_big[k][0], b_small[k][0], __uint_as_float(ld_shared_4(even.at_step(k * 8, 2 * n))));
            split_tf32(b_big[k][1], b_small[k][1], __uint_as_float(ld_shared_4(odd.at_step(k * 8, 2 * n))));
        }
        /* the smallest products first */
#pragma unroll
        for (int product = 0; product < 3; product++)
#pragma unroll
            for (int k = 0; k < tiles; k++)
#pragma unroll
                for (int r = 0; r < row_tiles; r++) {
                    const uint32_t(&b)[2] = product == 1 ? b_small[k] : b_big[k];
                    mma_m16n8k8_tf32(part[r], product == 0 ? small[r][k] : big[r][k], b[0], b[1]);
                }
#pragma unroll
        for (int r = 0; r < row_tiles; r++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                sum[r][n][e] += part[r][e];
    }
}

#endif
