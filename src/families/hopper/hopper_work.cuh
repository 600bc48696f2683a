/* hopper_work.cuh: the items of hopper_forward.cu and the schedulers that hand them out.
 *
 * An item is the rows of one block tile of one query head. Every scheduler has the same protocol: initial() is a
 * block's first place in its order, advance() the next, valid() says whether there is one, item_at() what lies there.
 * prefetch() asks for the next place before it is needed, so that an atomic count's way to L2 and back is hidden. */
#ifndef FDM_HOPPER_WORK_CUH
#define FDM_HOPPER_WORK_CUH

#include "cuda/ptx/mbarrier.cuh"
#include "families/hopper/hopper_forward.h"
#include "gpu/visible.cuh"

struct work_item {
    int row_block, head, batch; /* batch -1: nothing lies at this place */
};

/* Under a causal mask or window the static order takes row blocks in pairs of equal work: one from the end of a head,
 * then its counterpart from the beginning. */
#define PAIRED_ROWS (SCHEDULER == HOPPER_STATIC && WINDOW)

struct tile_scheduler {
    int place, next;

    template <class params> __device__ __forceinline__ static int places(const params &a) {
        return PAIRED_ROWS ? (a.row_blocks + 1) / 2 * 2 * (a.items / a.row_blocks) : a.items;
    }
    __device__ __forceinline__ void initial() {
        place = PAIRED_ROWS ? 2 * (int)blockIdx.x : (int)blockIdx.x;
        next = place;
    }
    template <class params> __device__ __forceinline__ bool valid(const params &a) const { return place < places(a); }
    template <class params> __device__ __forceinline__ void prefetch(const params &a) {
        if (SCHEDULER == HOPPER_DYNAMIC)
            next = (int)gridDim.x + atomicAdd(a.items_begun, 1);
        else if (SCHEDULER == HOPPER_LONGEST)
            next = places(a);
        else if (PAIRED_ROWS)
            next = place % 2 ? place + 2 * (int)gridDim.x - 1 : place + 1;
        else
            next = place + (int)gridDim.x;
    }
    __device__ __forceinline__ void advance() { place = next; }

    template <class params> __device__ __forceinline__ struct work_item item_at(const params &a) const {
        const int all_heads = a.items / a.row_blocks;
        int row_block, head;
        if (PAIRED_ROWS) {
            const int pairs = (a.row_blocks + 1) / 2, pair = place / 2 % pairs;
            head = place / 2 / pairs;
            row_block = place % 2 ? pair : a.row_blocks - 1 - pair;
            if (place % 2 && 2 * pair == a.row_blocks - 1)
                return {0, 0, -1}; /* the middle one of an odd number has no counterpart */
        } else if (WINDOW || INTERVALS) {
            /* heads of an L2 group take turns, row block by row block, those with many keys first */
            const int l2_group_items = a.in.heads_per_l2_group * a.row_blocks;
            const int l2_group = place / l2_group_items, rest = place % l2_group_items;
            const int heads = min(a.in.heads_per_l2_group, all_heads - l2_group * a.in.heads_per_l2_group);
            row_block = a.row_blocks - 1 - rest / heads;
            head = l2_group * a.in.heads_per_l2_group + rest % heads;
        } else {
            row_block = place % a.row_blocks;
            head = place / a.row_blocks;
        }
        return {row_block, head % a.in.heads, head / a.in.heads};
    }
};

/* What the producer tells the consumers of an item; tiles are walked from last - 1 down to first. */
struct item_facts {
    int first_row, head, batch, first_tile, last_tile; /* first_row -1: there are no more items */
    int seqlen_q, seqlen_k, q_begin;
};
#define ITEM_BYTES 32

__device__ __forceinline__ void write_facts(uint32_t slot, const struct item_facts &f) {
    st_shared_16(slot, (uint32_t)f.first_row, (uint32_t)f.head, (uint32_t)f.batch, (uint32_t)f.first_tile);
    st_shared_16(slot + 16, (uint32_t)f.last_tile, (uint32_t)f.seqlen_q, (uint32_t)f.seqlen_k, (uint32_t)f.q_begin);
}
__device__ __forceinline__ struct item_facts read_facts(uint32_t slot) {
    uint32_t low[4], high[4];
    ld_shared_16(low, slot);
    ld_shared_16(high, slot + 16);
    return {(int)low[0], (int)low[1], (int)low[2], (int)low[3], (int)high[0], (int)high[1], (int)high[2], (int)high[3]};
}

/* The tiles that some row of `first_row` .. + rows - 1 sees. */
__device__ __forceinline__ void find_tiles(const struct gpu_forward_params &a, const struct sequence &s, int rows,
                                           struct item_facts &f) {
    const int last_row = min(f.first_row + rows, s.seqlen_q) - 1;
    const int first = first_key(a, s, f.first_row), last = last_key(a, s, last_row) + 1;
    f.first_tile = first / BLOCK_N;
    f.last_tile = first < last ? (last + BLOCK_N - 1) / BLOCK_N : f.first_tile;
}

#endif
