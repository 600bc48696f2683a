/* mma_decode_products.cuh: the two products of a step of mma_decode.cu, for 16-bit elements and for float32. It uses
 * the constants and macros of mma_decode.cu. */
#ifndef FDM_MMA_DECODE_PRODUCTS_CUH
#define FDM_MMA_DECODE_PRODUCTS_CUH

/* Addresses of a warp's operands: Q of all rows, K and V of a tile; its rows, keys and columns; two alternating
 * buffers of scores for the warp that shares its columns. */
struct operands {
    uint32_t q_tile, k_tile, v_tile;
    int warp_row, key_row, share;
    uint32_t places;
    int turn;
};

#if DTYPE == GPU_FLOAT32
#    include "families/mma/float32/mma_tf32.cuh"

/* Scores of 8 keys of 16: the warp that shares the columns of O makes those of the others. */
__device__ __forceinline__ void multiply_eight(float (&c)[4], uint32_t q_tile, uint32_t k_tile, int warp_row,
                                               int key_row) {
    const int lane = threadIdx.x % 32;
    const lane_address<K_CHUNKS> left = left_of<K_CHUNKS>(q_tile, warp_row);
#    pragma unroll 2
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        uint32_t x[4], q_big[2][4], q_small[2][4], k_big[4], k_small[4];
#    pragma unroll
        for (int s = 0; s < 2; s++) {
            ldmatrix_x4(x, left.at_step(0, 4 * k + 2 * s));
#    pragma unroll
            for (int e = 0; e < 4; e++)
                split_tf32(q_big[s][e], q_small[s][e], __uint_as_float(x[e]));
        }
        ldmatrix_x4(x, k_tile + chunk_offset<K_CHUNKS>(key_row + lane % 8, 4 * k + lane / 8));
#    pragma unroll
        for (int e = 0; e < 4; e++)
            split_tf32(k_big[e], k_small[e], __uint_as_float(x[e]));
        float sum[2][4] = {}; /* as in multiply_scores(): the smallest products first, two sums side by side */
#    pragma unroll
        for (int product = 0; product < 3; product++)
#    pragma unroll
            for (int s = 0; s < 2; s++) {
                const uint32_t(&b)[4] = product == 1 ? k_small : k_big;
                mma_m16n8k8_tf32(sum[s], product == 0 ? q_small[s] : q_big[s], b[2 * s], b[2 * s + 1]);
            }
#    pragma unroll
        for (int e = 0; e < 4; e++)
            c[e] += sum[0][e] + sum[1][e];
    }
}

/* Joins this warp's scores of 8 keys with those of the warp that shares its columns, by two alternating buffers. */
__device__ __forceinline__ void exchange_scores(float (&s)[1][2][4], const float (&mine)[4], uint32_t places,
                                                int turn) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, share = warp % GROUP_WARPS / ROW_GROUPS;
    const uint32_t place = places + turn % 2 * WARPS * 512 + lane * 16;
    uint32_t theirs[4];
    st_shared_16(place + warp * 512, __float_as_uint(mine[0]), __float_as_uint(mine[1]), __float_as_uint(mine[2]),
                 __float_as_uint(mine[3]));
    barrier_sync(1 + KEY_GROUPS + warp / GROUP_WARPS * ROW_GROUPS + warp % ROW_GROUPS, 64);
    ld_shared_16(theirs, place + (warp ^ ROW_GROUPS) * 512);
#    pragma unroll
    for (int e = 0; e < 4; e++) {
        s[0][0][e] = share ? __uint_as_float(theirs[e]) : mine[e];
        s[0][1][e] = share ? mine[e] : __uint_as_float(theirs[e]);
    }
}

/* Makes the scores of a step's keys from the warp's rows of Q. */
__device__ __forceinline__ void multiply(float (&s)[1][STEP_KEYS / 8][4], const uint32_t (&)[HEAD_DIM / 16][4],
                                         const struct operands &of) {
    if (SPLIT_COLUMNS) {
        float mine[4] = {};
        multiply_eight(mine, of.q_tile, of.k_tile, of.warp_row, of.key_row + of.share * 8);
        exchange_scores(s, mine, of.places, of.turn);
    } else {
        multiply_scores<HEAD_DIM, 2, 2>(s, left_of<K_CHUNKS>(of.q_tile, of.warp_row),
                                        right_of<K_CHUNKS>(of.k_tile, of.key_row));
    }
}

/* Adds the keys' P times V to the warp's columns of O. */
__device__ __forceinline__ void add_values(float (&o)[1][OUT_TILES][4], const float (&p)[1][STEP_KEYS / 8][4],
                                           const struct operands &of) {
    add_product<V_CHUNKS>(o, p, of.v_tile + of.key_row * HEAD_DIM_V * 4, of.share * OUT_TILES * 8);
}
#else
#    include "families/mma/mma_tile.cuh"

/* The same; `kept` is Q in registers, where they hold it. */
__device__ __forceinline__ void multiply(float (&s)[1][STEP_KEYS / 8][4], const uint32_t (&kept)[HEAD_DIM / 16][4],
                                         const struct operands &of) {
    const int lane = threadIdx.x % 32;
#    pragma unroll Q_STEPS
    for (int k = 0; k < HEAD_DIM / 16; k++) {
        uint32_t q[4];
        if (KEEP_Q)
            for (int e = 0; e < 4; e++)
                q[e] = kept[k][e];
        else
            ldmatrix_x4(q, of.q_tile + chunk_offset<K_CHUNKS>(of.warp_row + lane % 16, 2 * k + lane / 16));
#    pragma unroll
        for (int n = 0; n < STEP_KEYS / 8; n += 2) {
            uint32_t b[4];
            ldmatrix_x4(b, of.k_tile + chunk_offset<K_CHUNKS>(of.key_row + n * 8 + lane % 8 + lane / 16 * 8,
                                                              2 * k + lane / 8 % 2));
            mma_16x8x16(s[0][n], q, b[0], b[1]);
            mma_16x8x16(s[0][n + 1], q, b[2], b[3]);
        }
    }
}

__device__ __forceinline__ void add_values(float (&o)[1][OUT_TILES][4], const float (&p)[1][STEP_KEYS / 8][4],
                                           const struct operands &of) {
    const int lane = threadIdx.x % 32;
#    pragma unroll
    for (int sixteen = 0; sixteen < STEP_KEYS / 16; sixteen++) {
        uint32_t left[4];
#    pragma unroll
        for (int n = 0; n < 2; n++)
#    pragma unroll
            for (int half = 0; half < 2; half++) {
                const float(&x)[4] = p[0][sixteen * 2 + n];
                left[n * 2 + half] = pack(x[half * 2], x[half * 2 + 1]);
            }
#    pragma unroll
        for (int n = 0; n < OUT_TILES; n += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans(b,
                              of.v_tile + chunk_offset<V_CHUNKS>(of.key_row + sixteen * 16 + lane % 16, n + lane / 16));
            mma_16x8x16(o[0][n], left, b[0], b[1]);
            mma_16x8x16(o[0][n + 1], left, b[2], b[3]);
        }
    }
}
#endif

#endif
