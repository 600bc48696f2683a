/* mma_forward_list.cuh: lists of the keys and of the tiles that some row of a block sees, for mma_forward.cu, which
 * defines its constants before including this. */
#ifndef FDM_MMA_FORWARD_LIST_CUH
#define FDM_MMA_FORWARD_LIST_CUH

#include "families/mma/forward/mma_forward_load.cuh"
#include "gpu/seen_tiles.cuh"

/* GPU_BLOCK_* of each tile of keys of the block: what masks with rows and row intervals hide of it. */
__device__ __forceinline__ const uint8_t *block_mask_of(const struct gpu_forward_params &a, const struct place &at) {
    return a.block_mask + at.batch * a.block_mask_batch + at.head / a.block_mask_group * a.block_mask_head +
           (int64_t)(at.first_row / BLOCK_M) * a.block_mask_row;
}

/* The keys that some row of the block sees, in shared memory. Beside row intervals it also has other keys of their
 * tiles. */
struct key_list {
    int *index;
    uint32_t *rows; /* first visible row of the block, and from bit 16 on how many */
    float *bias;
    int *totals; /* [WARPS] */
    const int32_t *
        *intervals; /* start and end of the block's head and batch, in shared memory since registers are full */
    int count, next_key;

    __device__ __forceinline__ key_list(char *shared, int first_key) {
        char *const places = shared + MMA_FORWARD_LIST_OFFSET;
        char *const rest = places + (BIAS && !BIAS_ROWS ? 12 : 8) * MMA_FORWARD_LIST;
        index = (int *)places;
        rows = (uint32_t *)(places + 4 * MMA_FORWARD_LIST);
        bias = (float *)(places + 8 * MMA_FORWARD_LIST);
        totals = (int *)rest;
        intervals = (const int32_t **)(rest + 32);
        count = 0;
        next_key = first_key;
    }
    __device__ __forceinline__ void find_intervals(const struct gpu_forward_params &a, const struct place &at) const {
        if (!INTERVALS)
            return;
        if (threadIdx.x == 0) {
            const struct gpu_intervals &i = a.intervals;
            const int64_t head = at.head / i.group;
            intervals[0] = i.start + at.batch * i.start_batch + head * i.start_head + at.k_begin * i.start_key;
            intervals[1] = i.end + at.batch * i.end_batch + head * i.end_head + at.k_begin * i.end_key;
        }
        __syncthreads();
    }

    /* The rows of the block that see key j (0 = none), and the key's bias. */
    __device__ __forceinline__ uint32_t rows_of_key(const struct gpu_forward_params &a, const struct place &at,
                                                    const struct score_source &from, int j, float &key_bias) const {
        int first = at.first_row, last = first + min(BLOCK_M, at.seqlen_q - first); /* rows first <= i < last see it */
        key_bias = 0;
        if (MASK && !MASK_ROWS && !from.mask[(int64_t)j * a.mask.key])
            return 0;
        if (ROW_RUNS && block_mask_of(a, at)[j / BLOCK_N] == GPU_BLOCK_HIDDEN)
            return 0;
        if (BIAS && !BIAS_ROWS) {
            key_bias = bias_value(from.bias + (int64_t)j * a.bias.key * BIAS_BYTES);
            if (key_bias == MINUS_INF)
                return 0;
        }
        if (INTERVALS) {
            first = max(first, intervals[0][j * a.intervals.start_key]);
            last = min(last, intervals[1][j * a.intervals.end_key]);
        }
        const int64_t column = (int64_t)j - at.diagonal; /* of the row whose diagonal it is on */
        if (WINDOW && a.window_right != UNBOUNDED)
            first = (int)max((int64_t)first, min((int64_t)last, column - a.window_right));
        if (WINDOW && a.window_left != UNBOUNDED)
            last = (int)min((int64_t)last, max((int64_t)first, column + a.window_left + 1));
        return first < last ? (uint32_t)(first - at.first_row) | (uint32_t)(last - first) << 16 : 0;
    }

    /* Appends the keys from next_key on that some row sees, until the list is nearly full or the keys end. Each warp
     * reads consecutive keys, so the list is in order. */
    __device__ __forceinline__ void extend(const struct gpu_forward_params &a, const struct place &at,
                                           const struct score_source &from) {
        constexpr int each = MMA_FORWARD_LIST_STEP / THREADS;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        while (next_key < at.last_key && count + MMA_FORWARD_LIST_STEP <= MMA_FORWARD_LIST) {
            if constexpr (SEEN_TILES) {
                next_key = next_seen_key<BLOCK_M>(a, at.batch, at.head, at.first_row, next_key, at.last_key);
                if (next_key >= at.last_key)
                    break;
            }
            uint32_t seen_by[each];
            float key_bias[each];
            int total = 0;
#pragma unroll
            for (int u = 0; u < each; u++) {
                const int j = next_key + (warp * each + u) * 32 + lane;
                seen_by[u] = j < at.last_key ? rows_of_key(a, at, from, j, key_bias[u]) : 0;
            }
#pragma unroll
            for (int u = 0; u < each; u++)
                total += __popc(__ballot_sync(0xffffffff, seen_by[u] != 0));
            if (lane == 0)
                totals[warp] = total;
            __syncthreads();
            int place = count;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                place += w < warp ? totals[w] : 0;
                count += totals[w];
            }
#pragma unroll
            for (int u = 0; u < each; u++) {
                const uint32_t seen = __ballot_sync(0xffffffff, seen_by[u] != 0);
                if (seen_by[u])
                    put(place + __popc(seen & ((1u << lane) - 1)), next_key + (warp * each + u) * 32 + lane, seen_by[u],
                        key_bias[u]);
                place += __popc(seen);
            }
            next_key += MMA_FORWARD_LIST_STEP;
            __syncthreads();
        }
    }
    __device__ __forceinline__ void put(int to, int key, uint32_t seen_by, float key_bias) const {
        index[to] = key;
        rows[to] = seen_by;
        if (BIAS && !BIAS_ROWS)
            bias[to] = key_bias;
    }

    /* Makes the columns after the last entry of the last tile invisible. */
    __device__ __forceinline__ void pad() const {
        for (int n = count + threadIdx.x; n < (count + BLOCK_N - 1) / BLOCK_N * BLOCK_N; n += THREADS)
            put(n, 0, 0, 0);
        __syncthreads();
    }

    /* Moves the entries from `done` on to the front: they are fewer than a tile, and no warp reads what is
     * overwritten. */
    __device__ __forceinline__ void drop(int done) {
        const int n = done + threadIdx.x;
        __syncthreads();
        static_assert(THREADS >= BLOCK_N, "fewer than a tile is left");
        if (n < count)
            put(threadIdx.x, index[n], rows[n], BIAS && !BIAS_ROWS ? bias[n] : 0);
        __syncthreads();
        count -= done;
    }

    __device__ __forceinline__ struct tile_keys tile(int t) const {
        return {0,
                min(count - t * BLOCK_N, BLOCK_N),
                false,
                index + t * BLOCK_N,
                rows + t * BLOCK_N,
                bias + t * BLOCK_N,
                t,
                false};
    }
    /* Whether pairs of a tile are to be tested one by one: some row of the block does not see some key. */
    static __device__ __forceinline__ bool is_partial(const struct place &at, const struct tile_keys &keys) {
        bool full = true;
        const uint32_t all = (uint32_t)min(BLOCK_M, at.seqlen_q - at.first_row) << 16;
        for (int n = threadIdx.x % 32; n < BLOCK_N; n += 32)
            full = full && keys.rows[n] == all;
        return BLOCK_MASKED || !__all_sync(0xffffffff, full);
    }
};

/* The tiles of a segment, at most MMA_FORWARD_TILES, in which the mask has a visible pair, in shared memory. */
struct tile_list {
    uint16_t *entries; /* places in the segment; FULL: the mask shows the whole tile */
    int segment;
    enum { FULL = 0x8000 };

    /* Lists the tiles from `segment` up to `last` that the block mask of block_mask.cu shows; returns their number. */
    __device__ __forceinline__ int fill(const uint8_t *block_mask, int last) const {
        const int lane = threadIdx.x % 32;
        int count = 0;
        if (threadIdx.x < 32)
            for (int i = 0; i < last - segment; i += 32) {
                const uint8_t kind = i + lane < last - segment ? block_mask[segment + i + lane] : GPU_BLOCK_HIDDEN;
                const uint32_t kept = __ballot_sync(0xffffffff, kind != GPU_BLOCK_HIDDEN);
                if (kind != GPU_BLOCK_HIDDEN)
                    entries[count + __popc(kept & ((1u << lane) - 1))] =
                        (uint16_t)((i + lane) | (kind == GPU_BLOCK_FULL ? FULL : 0));
                count += __popc(kept);
            }
        if (threadIdx.x == 0)
            entries[MMA_FORWARD_TILES] = (uint16_t)count;
        __syncthreads();
        return entries[MMA_FORWARD_TILES];
    }
    __device__ __forceinline__ int tile(int t) const { return segment + (entries[t] & ~FULL); }
    __device__ __forceinline__ bool is_full(int t) const { return entries[t] & FULL; }
};

#endif
