/* mma_decode_list.cuh: the coordinates of a block of mma_decode.cu, and the list of the keys that some of its rows
 * see. It uses the constants and macros of mma_decode.cu. */
#ifndef FDM_MMA_DECODE_LIST_CUH
#define FDM_MMA_DECODE_LIST_CUH

#include "cuda/ptx/copy.cuh"
#include "families/mma/decode/mma_decode.h"
#include "gpu/numbers.h"
#include "gpu/packed.cuh"
#include "gpu/row_ranges.cuh"
#include "gpu/tree.cuh"

#define UNIT  mma_decode_unit(WARPS)
#define UNITS (MMA_DECODE_SCAN / UNIT)

static_assert(MMA_DECODE_LIST >= (STAGES + 1 + TABLE_AHEAD) * BLOCK_N + MMA_DECODE_SCAN, "a scan has room");
static_assert(MMA_DECODE_LIST % BLOCK_N == 0, "a tile's keys lie side by side in the list");
static_assert(UNITS * WARPS == 64 && UNITS * UNIT == MMA_DECODE_SCAN, "a lane has two counts of a scan");

/* The sequence at a place of the order in which sequences that see most keys come first, by eight samples of each
 * mask: the longest work begins first. All blocks find the same order. */
__device__ __forceinline__ int batch_in_place(const struct gpu_forward_params &a, int place) {
    constexpr int samples = 8;
    const int lane = threadIdx.x % 32; /* its sequence */
    const char *mask = a.mask.data + min(lane, a.batch - 1) * a.mask.batch;
    int seen = 0, before = 0;
#pragma unroll
    for (int n = 0; n < samples; n++)
        seen += mask[a.seqlen_k / (2 * samples) * (2 * n + 1) * a.mask.key] != 0;
    seen = lane < a.batch ? seen : -1;
#pragma unroll
    for (int n = 0; n <= samples; n++) {
        const uint32_t votes = __ballot_sync(0xffffffff, seen == n);
        before += __popc(n > seen ? votes : n == seen ? votes & ((1u << lane) - 1) : 0);
    }
    return __ffs(__ballot_sync(0xffffffff, before == place)) - 1;
}

/* The rows of a KV head that the block computes, and the keys that some of them may see. */
struct place {
    int split, batch, head_kv, first_row, num_rows;
    int seqlen_q, seqlen_k, diagonal, low, high;
    int64_t q_begin, k_begin;
    struct cached_keys in_cache; /* CACHE */
};
/* `batch`: the block's sequence where that is known. */
__device__ __forceinline__ struct place find_place(const struct gpu_forward_params &a, uint32_t block, int batch = -1) {
    struct place at;
    const int row_blocks = (a.seqlen_q * a.group + ROWS - 1) / ROWS;
    const uint32_t pair = block / a.num_splits, of_heads = pair / row_blocks;
    at.split = (int)(block % a.num_splits);
    at.first_row = (int)(pair % row_blocks) * ROWS;
    at.batch = (int)(of_heads / a.heads_kv);
    if (ORDERED)
        at.batch = batch < 0 ? batch_in_place(a, at.batch) : batch;
    at.head_kv = (int)(of_heads % a.heads_kv);
    at.seqlen_q = a.seqlen_q;
    at.seqlen_k = a.seqlen_k;
    at.q_begin = at.k_begin = 0;
    if (VARLEN && !CACHE) {
        const struct packed q = find_packed_q(a, at.batch), k = find_packed_k(a, at.batch);
        at.q_begin = q.begin;
        at.k_begin = k.begin;
        at.seqlen_q = q.length;
        at.seqlen_k = k.length;
    } else if (VARLEN) {
        const struct packed q = find_packed_q(a, at.batch);
        at.q_begin = q.begin;
        at.seqlen_q = q.length;
    }
    if (SEQUSED)
        at.seqlen_q = used_of(a.seqused_q, at.batch, at.seqlen_q);
    if (CACHE) {
        at.in_cache = find_cached_keys(a, at.batch);
        at.seqlen_k = at.in_cache.seqlen_k;
    } else if (SEQUSED) {
        at.seqlen_k = used_of(a.seqused_k, at.batch, at.seqlen_k);
    }
    at.num_rows = min(at.seqlen_q * a.group - at.first_row, ROWS);
    at.diagonal = at.seqlen_k - at.seqlen_q;
    at.low = 0;
    at.high = at.seqlen_k;
    if (WINDOW && a.window_left != UNBOUNDED)
        at.low = (int)max((int64_t)0, (int64_t)at.diagonal - a.window_left);
    if (WINDOW && a.window_right != UNBOUNDED)
        at.high = (int)max((int64_t)0, min((int64_t)at.seqlen_k, (int64_t)at.seqlen_q + at.diagonal + a.window_right));
    if (CACHE)
        at.low = max(at.low, at.in_cache.first_key);
    return at;
}

/* Addresses of mask, bias and intervals of one query head, from key 0 of the sequence on; of row intervals from row
 * 0 on. */
struct head_view {
    const char *mask, *bias;
    const int32_t *start, *end;
    struct row_ranges ranges;
};
__device__ __forceinline__ struct head_view view_head(const struct gpu_forward_params &a, const struct place &at,
                                                      int head) {
    struct head_view view = {};
    if (MASK)
        view.mask = a.mask.data + at.batch * a.mask.batch + head / a.mask.group * a.mask.head;
    if (BIAS)
        view.bias = a.bias.data + (at.batch * a.bias.batch + head / a.bias.group * a.bias.head) * BIAS_BYTES;
    if (INTERVALS) {
        const struct gpu_intervals &i = a.intervals;
        view.start = i.start + at.batch * i.start_batch + head / i.group * i.start_head + at.k_begin * i.start_key;
        view.end = i.end + at.batch * i.end_batch + head / i.group * i.end_head + at.k_begin * i.end_key;
    }
    if (ROW_RUNS)
        view.ranges = ranges_of_row(a, at.batch, at.q_begin, head, 0);
    return view;
}

/* ---- the list of keys that some row sees ---- */

struct list {
    uint32_t keys, counts; /* in shared memory */
    int unit, num_units;   /* of this split: the next one to test, and all */
    int listed;
};

/* The runs of row i of the head. */
__device__ __forceinline__ struct row_ranges ranges_of(const struct gpu_forward_params &a, const struct head_view &view,
                                                       int i) {
    return {view.ranges.start + i * a.row_intervals.start_row, view.ranges.end + i * a.row_intervals.end_row,
            view.ranges.blocks + (i >> a.blocks.shift) * a.blocks.row};
}

/* Whether mask, bias or runs differ by row. Else rows are asked together: row i stands for all. */
__device__ __forceinline__ bool rows_differ(const struct gpu_forward_params &a) {
    return ROW_RUNS || (MASK_PER_ROW == MMA_DECODE_EACH && a.mask.row) || (BIAS && a.bias.row);
}

/* Whether row i of the head, or some row, sees key j. A key that no row sees may hold anything, and is not listed. */
__device__ __forceinline__ bool head_sees(const struct gpu_forward_params &a, const struct place &at,
                                          const struct head_view &view, int i, int j) {
    int first = rows_differ(a) ? i : 0, last = rows_differ(a) ? i + 1 : at.seqlen_q; /* rows first <= i < last see it */
    if (WINDOW && a.window_right != UNBOUNDED)
        first = (int)max((int64_t)first, min((int64_t)last, (int64_t)j - at.diagonal - a.window_right));
    if (WINDOW && a.window_left != UNBOUNDED)
        last = (int)min((int64_t)last, max((int64_t)first, (int64_t)j - at.diagonal + a.window_left + 1));
    if (INTERVALS) {
        first = max(first, view.start[j * a.intervals.start_key]);
        last = min(last, view.end[j * a.intervals.end_key]);
    }
    bool seen = first < last;
    if (ROW_RUNS)
        seen &= ranges_hold(a, ranges_of(a, view, i), j);
    if (MASK)
        seen &= view.mask[i * a.mask.row + j * a.mask.key] != 0;
    if (BIAS)
        seen &= bias_value(view.bias + (i * a.bias.row + j * a.bias.key) * BIAS_BYTES) != MINUS_INF;
    return seen;
}

/* How many query heads of the group may differ in what they see: one, or all. */
__device__ __forceinline__ int different_heads(const struct gpu_forward_params &a) {
    const bool alike = (!ROW_INTERVALS || a.row_intervals.group >= a.group) && (!BLOCKS || a.blocks.group >= a.group) &&
                       (!INTERVALS || a.intervals.group >= a.group) && (!MASK || a.mask.group >= a.group) &&
                       (!BIAS || a.bias.group >= a.group);
    return alike ? 1 : a.group;
}

/* Tests the keys of the next units of the split. All threads of the block call it. */
__device__ __forceinline__ void list_more(struct list &l, const struct gpu_forward_params &a, const struct place &at) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int heads = different_heads(a), rows = rows_differ(a) ? at.seqlen_q : 1;
    const int64_t first =
        (int64_t)at.low / UNIT * UNIT + ((int64_t)l.unit * a.num_splits + at.split) * UNIT + threadIdx.x;
    const int stride = a.num_splits * UNIT; /* from a unit to the next */
    constexpr bool few = MASK || ROW_RUNS ? INTERVALS || BIAS || WINDOW
                         : INTERVALS      ? BIAS || HEAD_DIM_V > 128
                                          : BIAS != 0;
    constexpr int units_together = MASK && BIAS && (INTERVALS || HEAD_DIM_V > 192) ? 4
                                   : few                                           ? 8
                                         : UNITS; /* as many as registers hold */
    uint32_t seen = 0, inside = 0;                /* bit n: of the n-th unit's key */
#pragma unroll
    for (int n = 0; n < UNITS; n++) {
        const int64_t j = first + n * (int64_t)stride;
        inside |= (uint32_t)(l.unit + n < l.num_units && j >= at.low && j < at.high) << n;
    }
#pragma unroll 1
    for (int n = 0; n < heads * rows; n++) {
        const int h = n / rows, i = n - h * rows;
        if (n && __all_sync(0xffffffff, seen == inside))
            break;
        const struct head_view view = view_head(a, at, at.head_kv * a.group + h);
        uint32_t now = 0;
#pragma unroll units_together
        for (int unit = 0; unit < UNITS; unit++) { /* no branch: all reads are in flight together */
            const int j = inside >> unit & 1 ? (int)first + unit * stride : at.low;
            now |= (uint32_t)head_sees(a, at, view, i, j) << unit;
        }
        seen |= now & inside;
    }
#pragma unroll
    for (int n = 0; n < UNITS; n++) {
        const uint32_t votes = __ballot_sync(0xffffffff, seen >> n & 1);
        if (lane == 0)
            st_shared_4(l.counts + (n * WARPS + warp) * 4, (uint32_t)__popc(votes));
    }
    __syncthreads();    /* also: no warp is behind the tile of the list */
    uint32_t even, odd; /* counts of two neighbours */
    ld_shared_8(even, odd, l.counts + lane * 8);
    int sum = (int)(even + odd); /* of units and warps up to the lane's */
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(0xffffffff, sum, step);
        sum += lane >= step ? before : 0;
    }
    const int before = sum - (int)(warp % 2 ? odd : even + odd); /* that of this warp, in the lane of its unit */
#pragma unroll
    for (int n = 0; n < UNITS; n++) {
        const uint32_t votes = __ballot_sync(0xffffffff, seen >> n & 1);
        const int begin = l.listed + __shfl_sync(0xffffffff, before, (n * WARPS + warp) / 2);
        if (seen >> n & 1)
            st_shared_4(l.keys + (uint32_t)(begin + __popc(votes & ((1u << lane) - 1))) % MMA_DECODE_LIST * 4,
                        (uint32_t)((int)first + n * stride));
    }
    l.listed += __shfl_sync(0xffffffff, sum, 31);
    l.unit += UNITS;
    __syncthreads();
}

/* Lists keys until there are `count`, or no more. */
__device__ __forceinline__ void list_up_to(struct list &l, const struct gpu_forward_params &a, const struct place &at,
                                           int count) {
#pragma unroll 1
    while (l.listed < count && l.unit < l.num_units)
        list_more(l, a, at);
}

/* The key at a place of the split's tiles, -1 past the last. */
__device__ __forceinline__ int key_at(const struct list &l, const struct place &at, int first_key, int slot) {
    if (LISTED)
        return slot < l.listed ? (int)ld_shared_4(l.keys + (uint32_t)slot % MMA_DECODE_LIST * 4) : -1;
    return first_key + slot < at.seqlen_k ? first_key + slot : -1;
}

/* Whether the key is to be copied: some row of the sequence sees it. One that no row sees may hold anything. */
__device__ __forceinline__ bool is_wanted(const struct gpu_forward_params &a, const struct place &at, int key) {
    if (!TREE || key < at.diagonal)
        return true;
    bool seen = false;
#pragma unroll 1
    for (int i = 0; i < at.seqlen_q && !seen; i++) {
        const int64_t aligned = (int64_t)i + at.diagonal;
        seen = tree_holds(a, at.batch, at.q_begin, i, key - at.diagonal) &&
               (!WINDOW || a.window_left == UNBOUNDED || key >= aligned - a.window_left) &&
               (!WINDOW || a.window_right == UNBOUNDED || key <= aligned + a.window_right);
    }
    return seen;
}
/* Takes from what the lane's rows i see of a step's keys, from key `first` on, what their tree hides. Bit
 * half * LANE_KEYS + n of `seen` is the n-th key of the lane. A loop apart: earlier keys cost a comparison a step. */
__device__ __forceinline__ void hide_by_tree(const struct gpu_forward_params &a, const struct place &at,
                                             const int (&i)[2], int first, uint32_t &seen) {
    if (!TREE || first + STEP_KEYS <= at.diagonal)
        return;
#pragma unroll 1
    for (int bit = 0; bit < 2 * LANE_KEYS; bit++) {
        const int n = bit % LANE_KEYS, key = first + n / 2 * 8 + threadIdx.x % 4 * 2 + n % 2;
        const int row = bit < LANE_KEYS ? i[0] : i[1];
        if ((seen >> bit & 1) && !tree_holds(a, at.batch, at.q_begin, row, key - at.diagonal))
            seen ^= 1u << bit;
    }
}

/* The key at a place of the split's tiles, -1 past the last and where no row sees it. */
__device__ __forceinline__ int wanted_key_at(const struct gpu_forward_params &a, const struct list &l,
                                             const struct place &at, int first_key, int slot) {
    const int key = key_at(l, at, first_key, slot);
    return is_wanted(a, at, key) ? key : -1;
}

#endif
