/* hopper_backward_common.cuh: what the backward kernels share whose blocks own keys: the rows that a key block walks,
 * P^T of a tile, and the store of an accumulator to global memory. A kernel defines BLOCK_M, BLOCK_N, KEYS, PARTS,
 * ROWS_DESCENDING and DETERMINISTIC before including it.
 *
 * Tiles of scores are transposed: a thread holds two keys of its warp's 16, lane / 4 and lane / 4 + 8 ("halves"),
 * and of each group of eight query rows 2 (lane % 4) and the next: s[4 group + 2 half + row]. */
#ifndef FDM_HOPPER_BACKWARD_COMMON_CUH
#define FDM_HOPPER_BACKWARD_COMMON_CUH

#include "cuda/panels.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/ptx/tma.cuh"
#include "families/hopper/backward/hopper_backward.h"
#include "gpu/convert.cuh"
#include "gpu/key_sort.h"
#include "gpu/numbers.h"
#include "gpu/scores.cuh"
#include "gpu/visible.cuh"

#define GATHER    (KEYS == HOPPER_KEYS_SORTED || KEYS == HOPPER_KEYS_SCATTERED)
#define RUNS      (KEYS == HOPPER_KEYS_RUNS)
#define EITHER    (KEYS == HOPPER_KEYS_EITHER)
#define BIAS_TILE (BIAS && BIAS_ROWS)
/* Tiles of rows are listed, and tiles that see no key have no step. */
#define LISTED (KEYED || MASK_TILE || ROW_RUNS)
#ifndef ROW_STEP
#    define ROW_STEP BLOCK_M /* the workspace's arrays round the rows of a sequence up to it */
#endif

/* LISTED: the next tile whose bit is set in the words at `seen`. The caller knows that there is one. */
__device__ __forceinline__ int listed_after(uint32_t seen, int tile) {
    uint32_t at = seen + ++tile / 32 * 4, bits = ld_shared_4(at) >> tile % 32 << tile % 32;
    while (!bits)
        bits = ld_shared_4(at += 4);
    return (int)(at - seen) * 8 + __ffs(bits) - 1;
}

/* The keys of a block, and the tiles of query rows that see some of them: first_tile .. first_tile + tiles - 1 of each
 * query head of the group, or (PARTS) of a part of it. A step is one of these tiles. */
struct key_block {
    int first_key, kv_head, batch, part, first_head, first_tile, tiles, steps;
    int q_begin, k_begin; /* of the sequence, in packed tensors */
    int turn;      /* DETERMINISTIC, LISTED: the block's number among its head's, in the order in which they begin */
    int last_tile; /* LISTED */
    uint32_t seen; /* LISTED: address of a bit for each tile; a tile whose bit is 0 has no step */
    __device__ __forceinline__ int highest_tile() const { return LISTED ? last_tile : first_tile + tiles - 1; }
    /* The walk over a head's tiles. With ROWS_DESCENDING it goes from the last rows to the first: blocks whose last
     * rows are the same then begin together, and read and add to the same rows at the same time. */
    __device__ __forceinline__ int begin_tile() const { return ROWS_DESCENDING ? highest_tile() : first_tile; }
    __device__ __forceinline__ int end_tile() const { return ROWS_DESCENDING ? first_tile : highest_tile(); }
    __device__ __forceinline__ int tile_after(int tile) const {
        if (tile == end_tile())
            return begin_tile();
        if (!LISTED)
            return ROWS_DESCENDING ? tile - 1 : tile + 1;
        if (ROWS_DESCENDING) {
            uint32_t at = seen + --tile / 32 * 4, bits = ld_shared_4(at) << (31 - tile % 32) >> (31 - tile % 32);
            while (!bits)
                bits = ld_shared_4(at -= 4);
            return (int)(at - seen) * 8 + 31 - __clz(bits);
        }
        return listed_after(seen, tile);
    }
};

constexpr int SORT_RANKS = KEY_SORT_KEYS / BLOCK_N; /* blocks of a sorted group of keys */
/* Whether keys are taken in the order of key_sort.cu. */
__device__ __forceinline__ bool are_sorted(const struct hopper_backward_params &a) {
    return EITHER ? a.in.block_order[0] : GATHER;
}
__device__ __forceinline__ int blocks_of_head(const struct hopper_backward_params &a) {
    return GATHER || EITHER ? (a.key_blocks + SORT_RANKS - 1) / SORT_RANKS * SORT_RANKS : a.key_blocks;
}

/* The head of the intervals that a KV head has. */
__device__ __forceinline__ int64_t interval_head(const struct hopper_backward_params &a, int kv_head) {
    return (int64_t)kv_head * a.in.in.group / a.in.in.intervals.group;
}

/* Where a block is, with `head` one of the parts of groups. */
struct block_place {
    int head, turn, block; /* which of the head's begins; its number */
};
/* The order of key blocks; `place` is a block's rank in it. Blocks of a head (PARTS: of a part of a group) lie next to
 * each other unless a causal mask, a window or a fixed order of additions interleaves several heads: then the blocks of
 * the first keys, which many rows see, come first. Sorted keys are interleaved too, each sorted group's first block
 * first. Blocks beside runs of rows are interleaved in the order of block_order.cu. */
__device__ __forceinline__ struct block_place find_place(const struct hopper_backward_params &a, int place) {
    const int parts = PARTS ? a.in.group_parts : 1, of_head = blocks_of_head(a);
    const bool sorted = are_sorted(a);
    int head = place / of_head, turn = place % of_head, block = turn;
    if (WINDOW || DETERMINISTIC || GATHER || RUNS || EITHER) {
        const int groups = sorted ? of_head / SORT_RANKS : 1, together = DETERMINISTIC ? 1 : groups;
        const int first = head / a.heads_in_turn * a.heads_in_turn, rest = place - first * of_head;
        const int heads = min(a.heads_in_turn, a.in.in.heads_kv * a.in.in.batch * parts - first);
        head = first + rest / together % heads;
        block = turn = rest / (together * heads) * together + rest % together;
        if (sorted)
            block = turn % groups * SORT_RANKS + turn / groups;
    }
    if (RUNS || (EITHER && !sorted && turn < a.key_blocks)) {
        const int kv_head = head / parts % a.in.in.heads_kv, batch = head / parts / a.in.in.heads_kv;
        block = a.in.block_order[batch * a.in.block_order_batch + interval_head(a, kv_head) * a.in.block_order_head +
                                 1 + turn];
    }
    return {head, turn, block};
}

__device__ __forceinline__ struct key_block find_block(const struct hopper_backward_params &a,
                                                       const struct block_place &at) {
    struct key_block k;
    const int parts = PARTS ? a.in.group_parts : 1, part_heads = PARTS ? a.in.part_heads : a.in.in.group;
    k.part = at.head % parts;
    k.kv_head = at.head / parts % a.in.in.heads_kv;
    k.batch = at.head / parts / a.in.in.heads_kv;
    k.turn = at.turn;
    k.first_key = at.block * BLOCK_N;
    k.first_head = k.kv_head * a.in.in.group + k.part * part_heads;
    const struct sequence s = find_sequence(a.in.in, k.batch);
    const int first = first_row(a.in.in, s, k.first_key);
    const int last = last_row(a.in.in, s, min(k.first_key + BLOCK_N, s.seqlen_k) - 1);
    k.first_tile = first / BLOCK_M;
    k.q_begin = s.q_begin;
    k.k_begin = s.k_begin;
    k.tiles = first < last && (!VARLEN || k.first_key < s.seqlen_k) ? (last + BLOCK_M - 1) / BLOCK_M - k.first_tile : 0;
    k.steps = k.tiles * part_heads;
    return k;
}

/* DETERMINISTIC, LISTED: the place of the turn-th block of a head (of all batches) in the order of all blocks. */
__device__ __forceinline__ int place_of(const struct hopper_backward_params &a, int head, int turn) {
    const int first = head / a.heads_in_turn * a.heads_in_turn;
    const int heads = min(a.heads_in_turn, a.in.in.heads_kv * a.in.in.batch - first);
    return first * blocks_of_head(a) + turn * heads + head - first;
}
/* The word of hopper_dq_order.cu for a tile of a head (of all batches) and the n-th 32 of its blocks. */
__device__ __forceinline__ uint64_t *dq_order_of(const struct hopper_backward_params &a, int head, int tile, int n) {
    return a.dq_order + ((int64_t)head * a.row_tiles + tile) * a.dq_order_words + n;
}
/* How many blocks before the turn-th process the tile. */
__device__ __forceinline__ int dq_order_before(uint64_t word, int turn) {
    return (int)(word >> 32) + __popc((uint32_t)word & ((1u << turn % 32) - 1));
}

/* How many key blocks before this one process a tile of rows that this one processes. */
__device__ __forceinline__ int blocks_before(const struct hopper_backward_params &a, const struct key_block &k,
                                             int tile) {
    const int first = first_key(a.in.in, find_sequence(a.in.in, k.batch), tile * BLOCK_M);
    return (k.first_key - first / BLOCK_N * BLOCK_N) / BLOCK_N;
}

/* The rows of a step: a tile of a query head. The block's heads follow each other. */
struct step_rows {
    int head, tile;
    __device__ __forceinline__ void advance(const struct key_block &k) {
        head += tile == k.end_tile();
        tile = k.tile_after(tile);
    }
    /* Index of the first row's sums, lse and delta in the workspace. */
    __device__ __forceinline__ int64_t place(const struct hopper_backward_params &a, int batch) const {
        if (VARLEN)
            return backward_begin(find_packed_q(a.in.in, batch).begin, batch, ROW_STEP) + head * a.in.rows +
                   tile * BLOCK_M;
        return ((int64_t)batch * a.in.in.heads + head) * a.in.rows + tile * BLOCK_M;
    }
};

/* Addresses in shared memory of what turns scores into P: lse of the tile's rows and the part that it has rounded away;
 * with KEYED the list of the warpgroup's keys (hopper_key_list.cuh); tiles of bias and mask. */
struct score_sources {
    uint32_t lse, low, keys, bias, mask;
    bool masked;      /* the mask may hide something */
    int mask_key;     /* offset of the warpgroup's first key in the tile of mask */
    uint32_t covered; /* of the warp: note_covered() */
    bool ranged;      /* row intervals or blocks may hide something, */
    int head;         /* those of a query head */
};

/* Address of the mask's byte of a thread's key in row 2 (lane % 4) + c of the first group of eight rows. */
__device__ __forceinline__ uint32_t mask_address(uint32_t tile, int key, int c) {
    const int row = threadIdx.x % 4 * 2 + c;
    return tile + row * 128 + (((key >> 4) ^ row) << 4) + (key & 14);
}

/* Sets scores that the tile of mask hides to -inf. */
__device__ __forceinline__ void hide_masked(float (&s)[BLOCK_M / 2], uint32_t tile, int mask_key) {
    const int thread = (int)tid_x_reread(), key = thread / 32 * 16 + thread % 32 / 4 + mask_key;
    const uint32_t byte = 0xff << key % 2 * 8;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const uint32_t from = mask_address(tile, key + 8 * half, c);
#pragma unroll
            for (int i = 0; i < BLOCK_M / 8; i++)
                if (!(ld_shared_2(from + i * 1024) & byte))
                    s[4 * i + 2 * half + c] = MINUS_INF;
        }
}

/* Address of a lane's row of the matrices in rows 0 .. 15 of a tile of bias, which is laid out as dS. */
__device__ __forceinline__ uint32_t bias_address(uint32_t tile, int lane) {
    const int row = lane / 16 * 8 + lane % 8, chunk = (int)tid_x_reread() / 32 % 4 * 2 + lane / 8 % 2;
    return panels<BLOCK_M>{tile}.panel_chunk(row, chunk);
}

/* KEYED: which rows see the thread's keys, counted from row `row`. */
__device__ __forceinline__ void find_rows(int (&first)[2], int (&last)[2], uint32_t keys, int row) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        first[half] = (int)ld_shared_4(keys + half * 32) - row;
        last[half] = (int)ld_shared_4(keys + BLOCK_N * 4 + half * 32) - row;
    }
}

/* Sets scores outside of first[half] <= row < last[half] to -inf. */
__device__ __forceinline__ void hide_rows(float (&s)[BLOCK_M / 2], int lane, const int (&first)[2],
                                          const int (&last)[2]) {
#pragma unroll
    for (int i = 0; i < BLOCK_M / 2; i++) {
        const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (column < first[i / 2 % 2] || column >= last[i / 2 % 2])
            s[i] = MINUS_INF;
    }
}

/* Sets scores whose key lies in no run of their row to -inf, for 64 keys from `first_key` on and BLOCK_M rows from
 * row `row` on. A lane reads the ranges of some rows, as the first key and, from bit 8 on, the number of keys; the
 * other lanes get them by shuffles. The keys lie in one block of the block mask. */
__device__ __forceinline__ void hide_others(float (&s)[BLOCK_M / 2], const struct gpu_forward_params &a,
                                            const struct sequence &at, int head, int first_key, int row) {
    const struct gpu_row_intervals &r = a.row_intervals;
    const int lane = (int)tid_x_reread() % 32, key = (int)tid_x_reread() / 32 % 4 * 16 + lane / 4;
    const int count = ROW_INTERVALS ? r.ranges : 1;
    uint32_t held[BLOCK_M / 64] = {};
#pragma unroll 1
    for (int n = 0; n < count; n++) {
        uint32_t ranges[BLOCK_M / 32];
#pragma unroll
        for (int i = 0; i < BLOCK_M / 32; i++) {
            const struct row_ranges of_row =
                ranges_of_row(a, at.batch, at.q_begin, head, min(row + lane + 32 * i, at.seqlen_q - 1));
            const int start = ROW_INTERVALS ? max(of_row.start[n * r.start_range], first_key) - first_key : 0;
            int end = ROW_INTERVALS ? min(max(of_row.end[n * r.end_range], first_key) - first_key, 64) : 64;
            if (BLOCKS && !block_holds(a.blocks, of_row, first_key))
                end = 0;
            ranges[i] = start < end ? (uint32_t)(start | (end - start) << 8) : 0;
        }
#pragma unroll
        for (int i = 0; i < BLOCK_M / 4; i++) {
            const uint32_t range = __shfl_sync(0xffffffff, ranges[i / 8], i / 2 % 4 * 8 + lane % 4 * 2 + i % 2);
#pragma unroll
            for (int half = 0; half < 2; half++)
                held[i / 16] |= (uint32_t)(key + 8 * half - (range & 0xff) < range >> 8)
                                << (i / 2 % 8 * 4 + 2 * half + i % 2);
        }
    }
#pragma unroll
    for (int i = 0; i < BLOCK_M / 2; i++)
        if (!(held[i / 32] >> i % 32 & 1))
            s[i] = MINUS_INF;
}

/* The exponent of P, to base 2, from a product of Q and K. unit is score_unit(); lse is the row's as it is kept,
 * +inf of a row that sees no key; low is the part that it has rounded away. With BIAS_HIDES a bias of -inf hides the
 * pair also where K is NaN. */
#ifndef BIAS_HIDES
#    define BIAS_HIDES 0
#endif
__device__ __forceinline__ float score_unit(const struct gpu_forward_params &a) {
    return SCORES_BARE ? a.scale * LOG2_E : a.scale;
}
__device__ __forceinline__ float exponent_of(float x, [[maybe_unused]] const struct gpu_forward_params &a, float unit,
                                             [[maybe_unused]] float bias, float lse, [[maybe_unused]] float low) {
    if (SCORES_BARE)
        return __fmaf_rn(x, unit, -lse);
    x = cap_score(a, x * unit);
    if (BIAS)
        x += bias;
    x -= lse;
    x = BIAS ? __fmaf_rn(x, LOG2_E, low) : x * LOG2_E;
    return BIAS_HIDES && bias == MINUS_INF ? MINUS_INF : x;
}

/* Loads lse or delta of the thread's two rows in each of some groups of eight rows, from a tile in shared memory. Where
 * some are prefetched to `early`, the thread's offset is computed again at each use and takes no register. */
#ifndef EARLY_GROUPS
#    define EARLY_GROUPS 0
#endif
#define EARLY_ROWS (EARLY_GROUPS ? 2 * EARLY_GROUPS : 1)
__device__ __forceinline__ uint32_t own_rows(uint32_t rows, int thread) {
    return EARLY_GROUPS ? rows : rows + thread % 4 * 8;
}
template <int count> __device__ __forceinline__ void load_rows(float (&x)[count], uint32_t own) {
#pragma unroll
    for (int i = 0; i + 1 < count; i += 2) {
        uint32_t words[2];
        ld_shared_8(words[0], words[1], own + (EARLY_GROUPS ? tid_x_reread() % 4 * 8 : 0) + i * 16);
        x[i] = __uint_as_float(words[0]);
        x[i + 1] = __uint_as_float(words[1]);
    }
}
__device__ __forceinline__ void find_group(float (&x)[2], const float (&early)[EARLY_ROWS], uint32_t own, int group) {
    if (group < EARLY_GROUPS)
        x[0] = early[2 * group], x[1] = early[2 * group + 1];
    else
        load_rows(x, own + group * 32);
}

/* Turns scores S^T of 64 keys from key `first_key` on and BLOCK_M rows from row `row` on into P^T, in place. Keys
 * beyond the sequence's last are zeros in shared memory, which would have weight: they are hidden. */
__device__ __forceinline__ void scores_to_p(float (&s)[BLOCK_M / 2], const float (&early)[EARLY_ROWS],
                                            const struct hopper_backward_params &a, int batch, int first_key, int row,
                                            const struct score_sources &from) {
    const int lane = (int)tid_x_reread() % 32;
    const float unit = score_unit(a.in.in);
    const uint32_t keys = KEYED ? from.keys + (tid_x_reread() / 32 % 4 * 16 + lane / 4) * 4 : 0;
    const struct sequence at = KEYED ? sequence{} : find_sequence(a.in.in, batch);
    bool partial = !KEYED && (first_key + 64 > at.seqlen_k || first_row(a.in.in, at, first_key + 63) > row ||
                              last_row(a.in.in, at, first_key) < row + BLOCK_M);
    const uint32_t bias_from = BIAS_TILE ? bias_address(from.bias, lane) : 0;
    uint32_t bias_words[4];
    float bias[2] = {};
    if (BIAS && !BIAS_TILE) {
        bias[0] = __uint_as_float(ld_shared_4(keys + 8 * BLOCK_N));
        bias[1] = __uint_as_float(ld_shared_4(keys + 8 * BLOCK_N + 32));
    }
#pragma unroll
    for (int i = 0; i < BLOCK_M / 8; i++) {
        uint32_t low[2] = {};
        float lse[2];
        find_group(lse, early, own_rows(from.lse, lane), i);
        if (BIAS)
            ld_shared_8(low[0], low[1], from.low + lane % 4 * 8 + i * 32);
        if (BIAS_TILE && i % 2 == 0)
            ldmatrix_x4_trans(bias_words, bias_from + i * 1024);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float of_pair =
                BIAS_TILE ? unpack((uint16_t)(bias_words[i % 2 * 2 + e / 2] >> e % 2 * 16)) : bias[e / 2];
            s[4 * i + e] = exponent_of(s[4 * i + e], a.in.in, unit, of_pair, lse[e % 2], __uint_as_float(low[e % 2]));
        }
    }
    int first[2], last[2];
    if (KEYED) {
        uint32_t covered[2];
        ld_shared_8(covered[0], covered[1], from.covered);
        partial = (int)covered[0] > row || (int)covered[1] < row + BLOCK_M;
        if (partial)
            find_rows(first, last, keys, row);
    } else if (partial) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int key = first_key + (int)tid_x_reread() / 32 % 4 * 16 + lane / 4 + 8 * half;
            first[half] = first_row(a.in.in, at, key) - row;
            last[half] = key < at.seqlen_k ? last_row(a.in.in, at, key) - row : 0;
        }
    }
    if (partial)
        hide_rows(s, lane, first, last);
    if (MASK_TILE && from.masked)
        hide_masked(s, from.mask, from.mask_key);
    if (ROW_RUNS && from.ranged)
        hide_others(s, a.in.in, find_sequence(a.in.in, batch), from.head, first_key, row);
#pragma unroll
    for (int i = 0; i < BLOCK_M / 2; i++)
        s[i] = ex2_approx(s[i]);
}

/* Rows of a tile of `count` panels of `rows` rows that are `gone` become 0, by `threads` threads, which meet before
 * products read it. */
template <int count, int rows, int threads, class predicate>
__device__ __forceinline__ void clear_tile(uint32_t tile, int thread, predicate gone) {
#pragma unroll 1
    for (int n = thread; n < rows * 8 * count; n += threads)
        if (gone(n / 8 % rows))
            st_shared_16(tile + n * 16, 0, 0, 0, 0);
    fence_proxy_async();
}

/* Whether a row of a tile sees no key; lse: that of its first row. */
__device__ __forceinline__ bool is_empty_row(uint32_t lse, int row) { return ld_shared_4(lse + row * 4) == 0x7f800000; }
template <int count, int threads>
__device__ __forceinline__ void clear_empty_rows(uint32_t tile, int thread, uint32_t lse) {
    clear_tile<count, BLOCK_M, threads>(tile, thread, [lse](int row) { return is_empty_row(lse, row); });
}

/* Sums that products are added to: they are set before a loop whose last product is in flight at its end, or the
 * assembler waits for products one by one. */
template <int count> __device__ __forceinline__ void set_zero(float (&x)[count]) {
#pragma unroll
    for (int i = 0; i < count; i++)
        x[i] = 0;
}

/* A warp's 16 rows of an accumulator, times `factor`, to `to` in global memory, by way of rows warp_row .. + 15 of
 * `tile` in shared memory, in panels of `tile_rows` rows. The first `count` rows and head_dim columns are written;
 * zeros where nothing was computed. `numbers`: of the rows, where they lie scattered; `to` is row 0. Rows whose bit is
 * set in `spoiled` are not written. */
template <int columns, int tile_rows, bool scattered = false>
__device__ __forceinline__ void store_accumulator(char *to, int64_t row_bytes, int count, int head_dim, uint32_t tile,
                                                  int warp_row, const float (&x)[columns / 2], float factor,
                                                  bool computed, [[maybe_unused]] const int *numbers = nullptr,
                                                  uint32_t spoiled = 0) {
    const int lane = threadIdx.x % 32, own_row = warp_row + lane % 16;
#pragma unroll
    for (int i = 0; i < columns / 8; i += 2) {
        uint32_t word[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int at = 4 * i + 2 * e;
            word[e] = computed ? pack(x[at] * factor, x[at + 1] * factor) : 0;
        }
        stmatrix_x4(
            panels<tile_rows>{tile}.panel(i / 8).rows(own_row).at + (((i % 8 + lane / 16) ^ (own_row & 7)) << 4), word);
    }
    __syncwarp();
    constexpr int chunks = columns / 8;
#pragma unroll 4
    for (int n = lane; n < 16 * chunks; n += 32) {
        const int r = n / chunks, chunk = n % chunks, rest = head_dim - chunk * 8, row = warp_row + r;
        uint32_t word[4];
        ld_shared_16(word, panels<tile_rows>{tile}.chunk(row, chunk));
        const int place = spoiled >> r & 1 ? count : scattered ? numbers[r] : r;
        char *at = to + place * row_bytes + chunk * 16;
        if (place < count && rest >= 8)
            *(uint4 *)at = make_uint4(word[0], word[1], word[2], word[3]);
        else if (place < count)
#pragma unroll
            for (int e = 0; e < 8; e++)
                if (e < rest)
                    ((uint16_t *)at)[e] = (uint16_t)(word[e / 2] >> (e % 2 * 16));
    }
    __syncwarp();
}

/* Where row `row` of a head begins. */
__device__ __forceinline__ char *row_address(const struct gpu_matrix &m, int batch, int head, int row) {
    return m.data + (batch * m.batch + head * m.head + (int64_t)row * m.row) * 2;
}

/* From the n-th key of a KV head on: numbers of keys in the order of key_sort.cu; from seqlen_k on: none. */
__device__ __forceinline__ const int *sorted_keys(const struct hopper_backward_params &a, int batch, int kv_head,
                                                  int n) {
    return a.in.order + batch * a.in.order_batch + interval_head(a, kv_head) * a.in.order_head + n;
}
/* The same from the block's n-th key on. */
__device__ __forceinline__ const int *sorted_keys(const struct hopper_backward_params &a, const struct key_block &k,
                                                  int n) {
    return sorted_keys(a, k.batch, k.kv_head, k.first_key + n);
}
/* dK or dV of a warp's 16 keys, from key warp_key of the block on, times `factor` to `to`, by way of the tile as above;
 * PARTS: as they are to the part's `sums`. */
template <int columns>
__device__ __forceinline__ void store_keys(const struct hopper_backward_params &a, const struct key_block &k,
                                           const struct gpu_matrix &to, [[maybe_unused]] float *sums, int head_dim,
                                           uint32_t tile, int warp_key, const float (&x)[columns / 2], float factor) {
    const int first = k.first_key + warp_key, count = find_sequence(a.in.in, k.batch).seqlen_k - first;
    const bool computed = k.steps > 0;
    if (!to.data)
        return;
    if (PARTS) {
        const int lane = threadIdx.x % 32, key = lane / 4;
        const int64_t begin = VARLEN ? find_sequence(a.in.in, k.batch).k_begin : (int64_t)k.batch * a.in.in.seqlen_k;
        const int64_t head = (int64_t)k.kv_head * a.in.group_parts + k.part;
        float *from_head = sums + (head * a.in.key_rows + begin) * columns + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int number = are_sorted(a) ? *sorted_keys(a, k, warp_key + key + 8 * half) : first + key + 8 * half;
            float *of_key = from_head + (int64_t)number * columns;
            if (number < first + count)
#pragma unroll
                for (int n = 0; n < columns / 8; n++)
                    *(float2 *)(of_key + 8 * n) =
                        computed ? make_float2(x[4 * n + 2 * half], x[4 * n + 2 * half + 1]) : make_float2(0, 0);
        }
        return;
    }
    if (are_sorted(a))
        store_accumulator<columns, BLOCK_N, true>(row_address(to, k.batch, k.kv_head, 0), to.row * 2, a.in.in.seqlen_k,
                                                  head_dim, tile, warp_key, x, factor, computed,
                                                  sorted_keys(a, k, warp_key));
    else
        store_accumulator<columns, BLOCK_N>(row_address(to, k.batch, k.kv_head, k.k_begin + first), to.row * 2, count,
                                            head_dim, tile, warp_key, x, factor, computed);
}

#endif
