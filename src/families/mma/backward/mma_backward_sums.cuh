/* mma_backward_sums.cuh: the additions of P and dS to dK, dV and dQ in mma_backward.cu, and the stores of the sums. */
#ifndef FDM_MMA_BACKWARD_SUMS_CUH
#define FDM_MMA_BACKWARD_SUMS_CUH

#include "cuda/ptx/global.cuh"
#include "families/mma/backward/mma_backward_scores.cuh"
#include "gpu/quad.cuh"

/* Adds the products of a part's own rows to a sum. */
template <int tiles, class address>
__device__ __forceinline__ void add_rows(float (&sum)[KEY_TILES][tiles][4], const score_fragments &left,
                                         const address &right) {
#pragma unroll
    for (int n = 0; n < ROW_TILES / 2; n++)
        add_product<COLUMN_SHARES>(sum, left[n], right, n * 16);
}

/* State that the loop over rows carries from stage to stage, and from head to head. */
struct carried {
    struct sums sums;
    uint32_t ds_buffer; /* offset of the buffer of dS that is written next */
    uint32_t spoiled;   /* SCRUB: the result of scrub_keys() */
    bool scrubbed;      /* SCRUB: scrub_keys() was called */
    struct ring ring;
    struct unreleased unreleased; /* DETERMINISTIC: of a head */
};

/* Called when K is loaded. */
__device__ __forceinline__ void scrub_once(struct carried &carried, const struct tiles &tiles) {
    if (!SCRUB || carried.scrubbed)
        return;
    carried.spoiled = scrub_keys(tiles, tiles.self.warp % KEY_WARPS * WARP_KEYS);
    carried.scrubbed = true;
}

/* Makes the scores of the sub-tile's rows that are the warp's own, adds them to dK and dV, and leaves dS (BY_COLUMNS
 * also P) in shared memory for the other warps. */
__device__ __forceinline__ void add_own(struct sums &sums, const struct work &on, const struct sub_tile &rows) {
    const struct tiles &tiles = on.tiles;
    const struct stage &stage = rows.stage;
    const uint32_t staged = rows.staged;
    const int sub = rows.sub;
    const int warp = tiles.self.warp, share = warp / KEY_WARPS, warp_key = warp % KEY_WARPS * WARP_KEYS;
#pragma unroll 1
    for (int first = share * WARP_ROWS; first < share * WARP_ROWS + WARP_ROWS; first += PART_ROWS) {
        const struct part part = {warp_key, sub + first};
        struct p_fragments made;
        score_fragments p, ds;
        make_p(made, on, rows, part);
        pack_scores(p, made.p);
        if (BY_COLUMNS)
            store_scores(staged + SCORES_BYTES, p, warp_key, first);
        auto dout = by_rows<HEAD_DIM_V / 8, PANEL_ROWS>(tiles.self, stage.dout, part.row);
        auto q = by_rows<HEAD_DIM / 8, PANEL_ROWS>(tiles.self, stage.q, part.row);
        if (BY_COLUMNS) {
            dout.move(share * 2);
            q.move(share * 2);
        }
        if (!RING)
            add_rows(sums.dv, p, dout);
        make_ds(ds, sums, made, on, rows, part);
        if (OVERLAY)
            __syncthreads();
        store_scores(staged, ds, warp_key, first);
        if (RING && first + PART_ROWS == share * WARP_ROWS + WARP_ROWS) {
            __syncwarp(); /* the products below hide the wait for the others */
            if (threadIdx.x % 32 == 0)
                mbarrier_arrive(scores_barrier(tiles));
        }
        if (DBIAS_FROM_DS)
            store_dbias(on.params.shared, on.at, on.h, staged, warp_key, first, rows.row + part.row);
        if (RING)
            add_rows(sums.dv, p, dout);
        add_rows(sums.dk, ds, q);
    }
}

/* BY_COLUMNS: adds rows of another warp with the same keys to the warp's columns of dK and dV. */
__device__ __forceinline__ void add_others_rows(struct sums &sums, const struct tiles &tiles, const struct stage &stage,
                                                uint32_t staged, int sub, int other) {
    const int warp = tiles.self.warp, share = warp / KEY_WARPS, warp_key = warp % KEY_WARPS * WARP_KEYS;
    const int row = (share ^ other) * WARP_ROWS;
    auto dout = by_rows<HEAD_DIM_V / 8, PANEL_ROWS>(tiles.self, stage.dout, sub + row);
    auto q = by_rows<HEAD_DIM / 8, PANEL_ROWS>(tiles.self, stage.q, sub + row);
    auto scores = by_rows<SUB_ROWS / 8, 0>(tiles.self, staged, warp_key);
    dout.move(share * 2);
    q.move(share * 2);
    scores.move(row / 8);
#pragma unroll
    for (int n = 0; n < WARP_ROWS / 16; n++) {
        uint32_t left[KEY_TILES][4];
#pragma unroll
        for (int t = 0; t < KEY_TILES; t++)
            ldmatrix_x4(left[t], scores.at_step(t * 16, 2 * n) + SCORES_BYTES);
        add_product<WARPS_PER_KEY_GROUP>(sums.dv, left, dout, n * 16);
#pragma unroll
        for (int t = 0; t < KEY_TILES; t++)
            ldmatrix_x4(left[t], scores.at_step(t * 16, 2 * n));
        add_product<WARPS_PER_KEY_GROUP>(sums.dk, left, q, n * 16);
    }
}
__device__ __forceinline__ void add_others(struct sums &sums, const struct tiles &tiles, const struct stage &stage,
                                           uint32_t staged, int sub) {
#pragma unroll
    for (int other = 1; other < WARPS_PER_KEY_GROUP; other++)
        add_others_rows(sums, tiles, stage, staged, sub, other);
}

/* Makes dQ of the warp's rows and columns from the staged dS, and adds it in global memory, in order where that is
 * fixed. A call makes some of the passes over columns. */
template <int first_pass = 0, int end_pass = DQ_PASSES>
__device__ __forceinline__ void add_dq(const struct work &on, uint32_t staged, int row, int sub_row) {
    const struct gpu_backward_params &a = on.params.shared;
    const struct place &at = on.at;
    const struct tiles &tiles = on.tiles;
    float *dq = find_head(a, at, on.h).dq + (int64_t)row * HEAD_DIM;
    const int lane = LOW_REGISTERS_WIDE && !RING ? fresh_lane() : threadIdx.x % 32;
    const int warp = tiles.self.warp, group = warp % DQ_GROUPS, share = warp / DQ_GROUPS;
    float *to = dq + (int64_t)(sub_row + group * 16 * DQ_TILES) * HEAD_DIM + share * 256 +
                first_pass * (DQ_STEP * DQ_SHARE * 16);
    auto scores = by_chunks<SUB_ROWS / 8, 0>(tiles.self, staged, 0);
    auto keys = by_rows<HEAD_DIM / 8, PANEL_KEYS>(tiles.self, tiles.k, 0);
    scores.move(group * 2 * DQ_TILES);
    keys.move(share * 2);
#pragma unroll 1
    for (int pass = first_pass; pass < end_pass; pass++, to += DQ_STEP * DQ_SHARE * 16) {
        auto columns = keys;
        columns.move(pass * (DQ_STEP / 8 * DQ_SHARE));
        float sum[DQ_TILES][DQ_STEP / 8][4] = {};
#pragma unroll
        for (int k = 0; k < BLOCK_N / 16; k++) {
            uint32_t x[DQ_TILES][4];
#pragma unroll
            for (int t = 0; t < DQ_TILES; t++)
                ldmatrix_x4_trans(x[t], scores.at_step(k * 16, 2 * t));
            add_product<DQ_SHARE>(sum, x, columns, k * 16);
        }
        if (ORDERED_DQ && pass == 0)
            wait_semaphore(semaphore_of(a, at, on.h, row + sub_row), my_turn(a, at, row + sub_row));
        float *mine = to + lane * (__CUDA_ARCH__ >= 900 ? 4 : 1); /* words that a lane adds at a time */
        mine = opaque(mine);                                      /* the other addresses are known distances from it */
#pragma unroll
        for (int i = 0; i < DQ_TILES * DQ_STEP / 8; i++) {
            const int t = i / (DQ_STEP / 8), n = i % (DQ_STEP / 8);
            float *tile = mine + t * 16 * HEAD_DIM + (n / 2 * 2 * DQ_SHARE + n % 2) * 128;
            if (__CUDA_ARCH__ >= 900)
                red_add_4(tile, sum[t][n][0], sum[t][n][1], sum[t][n][2], sum[t][n][3]);
            else
#pragma unroll
                for (int e = 0; e < 4; e++)
                    red_add(tile + e * 32, sum[t][n][e]);
        }
    }
}

/* Adds the sums of warps with the same keys in the first of them. */
template <int tiles> __device__ __forceinline__ void gather_shares(float (&sum)[tiles][4], float *shared) {
    if (WARPS_PER_KEY_GROUP == 1 || BY_COLUMNS)
        return;
    const int warp = threadIdx.x / 32, share = warp / KEY_WARPS;
    float *mine = shared + (warp % KEY_WARPS) * tiles * 128 + threadIdx.x % 32 * 4;
#pragma unroll 1
    for (int s = 1; s < WARPS_PER_KEY_GROUP; s++) {
        __syncthreads();
        if (share == s)
#pragma unroll
            for (int n = 0; n < tiles; n++)
                *(float4 *)(mine + n * 128) = make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
        __syncthreads();
        if (share == 0)
#pragma unroll
            for (int n = 0; n < tiles; n++) {
                const float4 x = *(const float4 *)(mine + n * 128);
                sum[n][0] += x.x, sum[n][1] += x.y, sum[n][2] += x.z, sum[n][3] += x.w;
            }
    }
}

template <int chunks>
__device__ __forceinline__ void store_keys_tile(const struct gpu_matrix &to, const struct gpu_backward_params &a,
                                                const struct place &at, uint32_t tile, int num_columns) {
    char *data = keys_of(to, a, at);
    if (!GATHER) {
        store_tile<chunks>(data, to.row * 2, tile, min(BLOCK_N, at.seqlen_k - at.first_key), num_columns,
                           (int)threadIdx.x, THREADS);
        return;
    }
    for (int n = threadIdx.x; n < BLOCK_N * chunks; n += THREADS) {
        const int row = n / chunks, chunk = n % chunks, key = key_at(a, at, row);
        const int count = min(num_columns - chunk * 8, 8);
        if (key < at.seqlen_k && count > 0)
            store_chunk(data + key * to.row * 2 + chunk * 16, tile + chunk_offset<chunks>(row, chunk), count);
    }
}

/* Stores the gradient of the bias of the warp's keys for one query head, and sets the sums to 0. */
__device__ __forceinline__ void store_key_dbias(struct sums &sums, const struct gpu_backward_params &a,
                                                const struct place &at, int h) {
    const int warp = threadIdx.x / 32, warp_key = warp % KEY_WARPS * WARP_KEYS;
#pragma unroll
    for (int n = 0; n < 2 * KEY_TILES; n++) {
        float x = sums.dbias[n / 2][n % 2];
        x = quad_sum(x);
        const int key = key_at(a, at, warp_key + threadIdx.x % 32 / 4 + n * 8);
        if (threadIdx.x % 4 == 0 && key < at.seqlen_k)
            a.dbias_sums[(((int64_t)(warp / KEY_WARPS) * a.in.batch + at.batch) * a.in.heads + h) * a.in.seqlen_k +
                         key] = x;
        sums.dbias[n / 2][n % 2] = 0;
    }
}

/* SPLIT: stores one part of a gradient of the block's keys in fp32, in rows of HEAD_DIM or HEAD_DIM_V in the order
 * of the tensor's keys. */
template <int columns, int tiles>
__device__ __forceinline__ void store_part(const float (&sum)[KEY_TILES][tiles][4], float *to,
                                           const struct gpu_backward_params &a, const struct place &at) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, share = warp / KEY_WARPS;
    const int64_t begin = at.part * a.key_rows + (VARLEN ? at.k_begin : (int64_t)at.batch * a.in.seqlen_k);
    if (!BY_COLUMNS && share)
        return;
#pragma unroll
    for (int j = 0; j < 2 * KEY_TILES; j++) {
        const int key = key_at(a, at, warp % KEY_WARPS * WARP_KEYS + lane / 4 + j * 8);
        if (key < at.seqlen_k)
#pragma unroll
            for (int n = 0; n < tiles; n++)
                *(float2 *)(to + (begin + key) * columns +
                            (BY_COLUMNS ? n / 2 * 2 * WARPS_PER_KEY_GROUP + share * 2 + n % 2 : n) * 8 + lane % 4 * 2) =
                    make_float2(sum[j / 2][n][j % 2 * 2], sum[j / 2][n][j % 2 * 2 + 1]);
    }
}

/* Stores one gradient of the block's keys, rounded, through shared memory. */
template <int columns, int tiles>
__device__ __forceinline__ void store_sums(const float (&sum)[KEY_TILES][tiles][4], float factor, uint32_t tile,
                                           const struct gpu_matrix &to, const struct gpu_backward_params &a,
                                           const struct place &at, int num_columns) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, share = warp / KEY_WARPS;
    __syncthreads();
    if (BY_COLUMNS || share == 0)
#pragma unroll
        for (int n = 0; n < tiles; n++)
#pragma unroll
            for (int j = 0; j < 2 * KEY_TILES; j++)
                st_shared_4(tile +
                                chunk_offset<columns / 8>(
                                    warp % KEY_WARPS * WARP_KEYS + lane / 4 + j * 8,
                                    BY_COLUMNS ? n / 2 * 2 * WARPS_PER_KEY_GROUP + share * 2 + n % 2 : n) +
                                lane % 4 * 4,
                            pack(sum[j / 2][n][j % 2 * 2] * factor, sum[j / 2][n][j % 2 * 2 + 1] * factor));
    __syncthreads();
    if (to.data)
        store_keys_tile<columns / 8>(to, a, at, tile, num_columns);
}

#endif
