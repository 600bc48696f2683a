/* mma_backward_load.cuh: the loads of mma_backward.cu: rows, stages of a ring, and rows of masks and biases. */
#ifndef FDM_MMA_BACKWARD_LOAD_CUH
#define FDM_MMA_BACKWARD_LOAD_CUH

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "families/mma/backward/mma_backward_place.cuh"
#include "gpu/finite.cuh"

__device__ __forceinline__ void load_q(const struct gpu_backward_params &a, const struct place &at, int h,
                                       uint32_t tile, int row) {
    const struct head head = find_head(a, at, h);
    load_tile<HEAD_DIM / 8, STAGE_ROWS, PANEL_ROWS>(tile, head.q + (int64_t)row * a.in.q.row * 2, a.in.q.row * 2,
                                                    at.seqlen_q - row, a.in.head_dim);
}
/* The word-th word of each row of a head: lse, delta, and the part that lse has rounded away. */
__device__ __forceinline__ const float *row_words(const struct head &head, int word) {
    return BIAS && word == 2 ? head.low : word ? head.delta : head.lse;
}
/* Loads dO and the words of each row. */
__device__ __forceinline__ void load_dout(const struct gpu_backward_params &a, const struct place &at, int h,
                                          const struct stage &stage, int row) {
    const struct head head = find_head(a, at, h);
    load_tile<HEAD_DIM_V / 8, STAGE_ROWS, PANEL_ROWS>(stage.dout, head.dout + (int64_t)row * a.dout.row * 2,
                                                      a.dout.row * 2, at.seqlen_q - row, a.in.head_dim_v);
    if (threadIdx.x < STAGE_ROWS / 4 * ROW_WORDS) {
        const int n = threadIdx.x * 4 % STAGE_ROWS;
        cp_async_16(stage.rows + threadIdx.x * 16, row_words(head, threadIdx.x * 4 / STAGE_ROWS) + row + n);
    }
}

/* RING: the slot of the current stage, and the phase of its barrier that ends when the stage is full. */
struct ring {
    int slot;
    uint32_t parity;
};
__device__ __forceinline__ int slot_after(int slot) { return slot == RING - 1 ? 0 : slot + 1; }
__device__ __forceinline__ struct stage stage_at(const struct tiles &tiles, int slot) {
    return {tiles.q + slot * Q_BYTES, tiles.dout + slot * DOUT_BYTES, tiles.rows + slot * ROWS_BYTES,
            tiles.barriers + slot * 8};
}
/* Ends a phase when all warps have staged a stage's scores. */
__device__ __forceinline__ uint32_t scores_barrier(const struct tiles &tiles) { return tiles.barriers + RING * 8; }
/* Copies of words of rows, of panels of Q and of panels of dO, distributed over the warps. */
__device__ __forceinline__ void load_stage_by_tma(const struct work &on, const struct stage &stage, int row) {
    constexpr int columns_q = mma_backward_panel(HEAD_DIM), columns_v = mma_backward_panel(HEAD_DIM_V);
    constexpr int panels_q = HEAD_DIM / columns_q, panels = panels_q + HEAD_DIM_V / columns_v;
    if (threadIdx.x % 32)
        return;
    const struct head head = find_head(on.params.shared, on.at, on.h);
    if (threadIdx.x == 0)
        mbarrier_arrive_expect_tx(stage.full, Q_BYTES + DOUT_BYTES + ROWS_BYTES);
#pragma unroll
    for (int n = threadIdx.x / 32; n < panels + ROW_WORDS; n += WARPS) {
        const int panel = n - ROW_WORDS;
        if (panel < 0)
            cp_async_bulk(stage.rows + n * (STAGE_ROWS * 4), row_words(head, n) + row, STAGE_ROWS * 4, stage.full);
        else if (panel < panels_q)
            cp_async_bulk_tensor_4d(stage.q + panel * (columns_q * STAGE_ROWS * 2), &on.params.q_map, stage.full,
                                    panel * columns_q, row, head.index, on.at.batch);
        else
            cp_async_bulk_tensor_4d(stage.dout + (panel - panels_q) * (columns_v * STAGE_ROWS * 2), &on.params.dout_map,
                                    stage.full, (panel - panels_q) * columns_v, row, head.index, on.at.batch);
    }
}
/* Loads a stage to a slot that all warps have left. */
__device__ __forceinline__ void load_stage(const struct work &on, int slot, int row) {
    if (row == NO_ROW)
        return;
    const struct stage stage = stage_at(on.tiles, slot);
    if (TMA)
        return load_stage_by_tma(on, stage, row);
    load_q(on.params.shared, on.at, on.h, stage.q, row);
    load_dout(on.params.shared, on.at, on.h, stage, row);
    cp_async_mbarrier_arrive_noinc(stage.full);
    if (!ALIGNED)
        mbarrier_arrive(stage.full); /* for what was stored, not copied */
}
__device__ __forceinline__ int following(const struct work &on, int row) {
    return row == NO_ROW ? NO_ROW : next_active(on, row + STAGE_ROWS);
}

/* Where the copies lie: a part's region is WARP_KEYS lines of PART_ROWS / 8 chunks. Bias: chunk of a row and eight
 * keys. */
__device__ __forceinline__ int line_of(int row, int eight) {
    return WARP_KEYS >= PART_ROWS ? row + PART_ROWS * (eight / (PART_ROWS / 8)) : row % WARP_KEYS;
}
__device__ __forceinline__ int column_of(int row, int eight) {
    return WARP_KEYS >= PART_ROWS ? eight % (PART_ROWS / 8) : eight + row / WARP_KEYS * (WARP_KEYS / 8);
}
__device__ __forceinline__ void read_pairs(uint32_t (&r)[4], uint32_t from) { ldmatrix_x4_trans(r, from); }
__device__ __forceinline__ void read_pairs(uint32_t (&r)[2], uint32_t from) { ldmatrix_x2_trans(r, from); }
/* Mask: 16 keys of a row are chunk row + 16-key group * PART_ROWS; beside a bias it lies where P will, after dS. */
__device__ __forceinline__ uint32_t mask_place(uint32_t staged, int warp_key, int part, int chunk) {
    return staged + (BIAS_COPIED ? SCORES_BYTES : 0) +
           chunk_offset<SUB_ROWS / 8>(warp_key + chunk % WARP_KEYS, part / 8 + chunk / WARP_KEYS);
}

/* A part's bias and mask, of PART_ROWS rows from row + part on. */
__device__ __forceinline__ void copy_bias(const struct work &on, uint32_t staged, int warp_key, int part, int row) {
    constexpr int eights = WARP_KEYS / 8, step = 32 / eights;
    const struct gpu_backward_params &a = on.params.shared;
    const int lane = threadIdx.x % 32, rows = on.at.seqlen_q - row - part;
    const int eight = lane % eights, key = on.at.first_key + warp_key + eight * 8;
    const int bytes = min(max(on.at.seqlen_k - key, 0), 8) * 2;
    const char *none = find_head(a, on.at, on.h).bias;
    const char *bias = none + bias_rows(a, row + part + lane / eights) + key * BIAS_BYTES;
#pragma unroll
    for (int n = 0; n < PART_ROWS; n += step, bias += bias_rows(a, step)) {
        const int i = n + lane / eights, count = i < rows ? bytes : 0;
        cp_async_16_fill(staged +
                             chunk_offset<SUB_ROWS / 8>(warp_key + line_of(i, eight), part / 8 + column_of(i, eight)),
                         count ? bias : none, count);
    }
}
__device__ __forceinline__ void copy_mask(const struct work &on, uint32_t staged, int warp_key, int part, int row) {
    const struct gpu_backward_params &a = on.params.shared;
    const int lane = threadIdx.x % 32, rows = on.at.seqlen_q - row - part;
    const char *none = find_head(a, on.at, on.h).mask;
#pragma unroll
    for (int n = 0; n < PART_ROWS * WARP_KEYS / 16; n += 32) {
        const int chunk = n + lane, i = chunk % PART_ROWS;
        const int key = on.at.first_key + warp_key + chunk / PART_ROWS * 16;
        const int count = i < rows ? min(max(on.at.seqlen_k - key, 0), 16) : 0;
        const char *mask = none + mask_rows(a, row + part + i) + key;
        if (chunk < PART_ROWS * WARP_KEYS / 16)
            cp_async_16_fill(mask_place(staged, warp_key, part, chunk), count ? mask : none, count);
    }
}
/* Copies masks and biases of the warp's own rows of the sub-tile at `row`. `staged` is the address where their dS
 * will lie. */
__device__ __forceinline__ void copy_scores(const struct work &on, uint32_t staged, int row) {
    const int warp = threadIdx.x / 32, share = warp / KEY_WARPS, warp_key = warp % KEY_WARPS * WARP_KEYS;
#pragma unroll 1
    for (int part = share * WARP_ROWS; part < share * WARP_ROWS + WARP_ROWS; part += PART_ROWS) {
        if (BIAS_COPIED)
            copy_bias(on, staged, warp_key, part, row);
        if (MASK_COPIED)
            copy_mask(on, staged, warp_key, part, row);
    }
}

/* A key that no row sees adds nothing to dQ, but 0 times NaN is NaN: rows of K that hold NaN or inf become 0. Where
 * rows see such a key, their P becomes NaN (spoil_p()): bit j of the result says so of the lane's j-th key. All
 * threads call it after K is loaded; warps with the same keys test the same rows. */
__device__ __forceinline__ uint32_t scrub_keys(const struct tiles &tiles, int warp_key) {
    constexpr int chunks = HEAD_DIM / 8, lanes = 32 / WARP_KEYS; /* that share a row */
    const int lane = threadIdx.x % 32, row = warp_key + lane % WARP_KEYS;
    uint32_t bad = 0;
#pragma unroll 4
    for (int chunk = lane / WARP_KEYS; chunk < chunks; chunk += lanes) {
        uint32_t word[4];
        ld_shared_16(word, tiles.k + chunk_offset_in<chunks, PANEL_KEYS>(row, chunk));
        bad |= not_finite(word);
    }
    uint32_t votes = __ballot_sync(0xffffffff, bad);
    votes |= lanes == 2 ? votes >> 16 | votes << 16 : 0; /* bit l: of the lane's row */
    if (!__syncthreads_or(votes != 0))
        return 0;
    for (int chunk = lane / WARP_KEYS; chunk < chunks && (votes >> lane & 1); chunk += lanes)
        st_shared_16(tiles.k + chunk_offset_in<chunks, PANEL_KEYS>(row, chunk), 0, 0, 0, 0);
    __syncthreads();
    uint32_t own = 0;
#pragma unroll
    for (int j = 0; j < 2 * KEY_TILES; j++)
        own |= (votes >> (lane / 4 + 8 * j) & 1) << j;
    return own;
}

/* A row that sees no key has no gradient, whatever dO is and whatever the row holds. Its P and dS are 0, but 0 times
 * NaN is NaN. All warps read the same words. */
__device__ __forceinline__ void clear_empty(const struct walk &walk, const struct stage &stage, int row) {
    if (!(MASK || BIAS || INTERVALS || ROW_RUNS) && (!WINDOW || row >= walk.full_first))
        return; /* rows without a key are before those that see one */
    const int lane = fresh_lane();
    bool empty = false;
#pragma unroll
    for (int n = 0; n < STAGE_ROWS; n += 32)
        empty = empty || __uint_as_float(ld_shared_4(stage.rows + (n + lane) * 4)) == -MINUS_INF;
    if (!__any_sync(0xffffffff, empty))
        return;
    clear_empty_rows<HEAD_DIM / 8, STAGE_ROWS, PANEL_ROWS>(stage.q, stage.rows);
    clear_empty_rows<HEAD_DIM_V / 8, STAGE_ROWS, PANEL_ROWS>(stage.dout, stage.rows);
    if (TMA)
        fence_proxy_async(); /* TMA will write there again */
    __syncthreads();
}

/* Copies the block's keys between a tensor and a tile, in either direction. */
__device__ __forceinline__ char *keys_of(const struct gpu_matrix &x, const struct gpu_backward_params &a,
                                         const struct place &at) {
    return x.data + (at.batch * x.batch + (int64_t)(at.k_begin + (GATHER ? 0 : at.first_key)) * x.row +
                     head_kv_of(a, at) * x.head) *
                        2;
}
template <int chunks>
__device__ __forceinline__ void load_keys_tile(uint32_t tile, const struct gpu_matrix &from,
                                               const struct gpu_backward_params &a, const struct place &at,
                                               int num_columns) {
    const char *data = keys_of(from, a, at);
    if (!GATHER) {
        load_tile<chunks, BLOCK_N, PANEL_KEYS>(tile, data, from.row * 2, at.seqlen_k - at.first_key, num_columns);
        return;
    }
    for (int n = threadIdx.x; n < BLOCK_N * chunks; n += THREADS) {
        const int row = n / chunks, chunk = n % chunks, key = key_at(a, at, row);
        const int count = key < at.seqlen_k ? min(max(num_columns - chunk * 8, 0), 8) : 0;
        const char *at_key = count ? data + key * from.row * 2 + chunk * 16 : data;
        load_chunk(tile + chunk_offset_in<chunks, PANEL_KEYS>(row, chunk), at_key, count);
    }
}

#endif
