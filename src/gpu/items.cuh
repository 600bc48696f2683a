/* items.cuh: the work tiles ("items") of a forward and their order. A kernel defines SCHEDULER before including it.
 *
 * An item is the rows of one block tile of one query head. Its place is its rank in the kernel's order. A block (or
 * cluster) begins at first_place() and continues at place_after(). `params` has row_blocks (of a head), items (of all
 * heads) and `in`. */
#ifndef FDM_ITEMS_CUH
#define FDM_ITEMS_CUH

#include "gpu/items.h"
#include "gpu/problem_constants.h"

struct work_item {
    int row_block, head, batch; /* batch -1: no item has this place */
};

/* Under a causal mask or window the static order takes row blocks in pairs of equal work: one from the end of a head,
 * then its counterpart from the beginning. */
#define PAIRED_ROWS (SCHEDULER == ITEMS_STATIC && WINDOW)

template <class params> __device__ __forceinline__ int num_places(const params &a) {
    return PAIRED_ROWS ? (a.row_blocks + 1) / 2 * 2 * (a.items / a.row_blocks) : a.items;
}
/* The first place of the taker-th block of those that run. */
__device__ __forceinline__ int first_place(int taker) { return PAIRED_ROWS ? 2 * taker : taker; }
/* The next place in the static order of `takers` blocks. */
__device__ __forceinline__ int place_after(int place, int takers) {
    return !PAIRED_ROWS ? place + takers : place % 2 ? place + 2 * takers - 1 : place + 1;
}

template <class params> __device__ __forceinline__ struct work_item item_at(const params &a, int place) {
    const int all_heads = a.items / a.row_blocks;
    int row_block, head;
    if (PAIRED_ROWS) {
        const int pairs = (a.row_blocks + 1) / 2, pair = place / 2 % pairs;
        head = place / 2 / pairs;
        row_block = place % 2 ? pair : a.row_blocks - 1 - pair;
        if (place % 2 && 2 * pair == a.row_blocks - 1)
            return {0, 0, -1}; /* the middle one of an odd number has no counterpart */
    } else if (WINDOW || INTERVALS) {
        /* heads of an L2 group are interleaved, row block by row block; blocks with many keys come first */
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

#endif
