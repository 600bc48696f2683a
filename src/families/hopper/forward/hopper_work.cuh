/* hopper_work.cuh: the schedulers, which give blocks the items (work tiles) of hopper_forward.cu (gpu/items.cuh).
 * Every scheduler has the same protocol: initial() is a block's first place in the order, advance() the next, and
 * valid() says whether there is one. The next place is requested before it is needed, which hides the latency of an
 * atomic counter. A kernel calls request_at_begin() where an item begins and request_at_end() where its last tile is
 * loaded; one of the two makes the request. A kernel whose items differ in length defines NEXT_AT_END as 1: a block
 * that requests a place early keeps it from blocks that finish before. */
#ifndef FDM_HOPPER_WORK_CUH
#define FDM_HOPPER_WORK_CUH

#include "cuda/ptx/mbarrier.cuh"
#include "families/hopper/forward/hopper_forward.h"
#include "gpu/items.cuh"
#include "gpu/tile_plan.h"
#include "gpu/visible.cuh"

#ifndef NEXT_AT_END
#    define NEXT_AT_END 0
#endif

struct tile_scheduler {
    int place, next;

    __device__ __forceinline__ void initial() { place = next = first_place((int)blockIdx.x); }
    template <class params> __device__ __forceinline__ bool valid(const params &a) const {
        return place < num_places(a);
    }
    template <class params> __device__ __forceinline__ void request(const params &a) {
        if (SCHEDULER == ITEMS_DYNAMIC)
            next = (int)gridDim.x + atomicAdd(a.items_begun, 1);
        else if (SCHEDULER == ITEMS_LONGEST)
            next = num_places(a);
        else
            next = place_after(place, (int)gridDim.x);
    }
    template <class params> __device__ __forceinline__ void request_at_begin(const params &a) {
        if (!NEXT_AT_END)
            request(a);
    }
    template <class params> __device__ __forceinline__ void request_at_end(const params &a) {
        if (NEXT_AT_END)
            request(a);
    }
    __device__ __forceinline__ void advance() { place = next; }
};

__device__ __forceinline__ bool is_scattered(const struct tile_plan &p, int head_of_plan) {
    return TILES_ARE_SCATTERED(p.counts[head_of_plan]);
}
/* Whether some head of the plan has scattered keys (scattered: true), or some head has none (false). All threads of a
 * warp call it. */
__device__ __forceinline__ bool any_scattered(const struct tile_plan &p, bool scattered) {
    bool some = false;
    for (int first = 0; first < p.num_heads && !some; first += 32) {
        const int head = min(first + (int)threadIdx.x % 32, p.num_heads - 1);
        some = __any_sync(0xffffffff, is_scattered(p, head) == scattered);
    }
    return some;
}

/* Query heads that share a tile of rows: row r of it is row r / PACKED_HEADS of head r % PACKED_HEADS. */
#ifndef PACKED_HEADS
#    define PACKED_HEADS 1
#endif

/* The facts of an item that the producer hands to the consumers. Tiles are walked from last - 1 down to first. */
struct item_facts {
    int first_row, head, batch, first_tile, last_tile; /* first_row -1: there are no more items */
    int seqlen_q, seqlen_k, q_begin;
};
#define ITEM_BYTES     32
#define SEQLEN_K_PLACE 24 /* of seqlen_k in an item */

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

/* The keys that windows and ends leave visible to the rows of a block: its row r sees the keys to + r .. from + r. */
struct row_bounds {
    int first_row, num_rows; /* of the block */
    int from, to;            /* WINDOW: rows from key - from to key - to of the block see a key */
};
__device__ __forceinline__ struct row_bounds bounds_of_rows(const struct gpu_forward_params &a,
                                                            const struct sequence &s, int first_row, int block_m) {
    int64_t from = s.seqlen_k, to = -block_m;
    if (WINDOW && a.window_right != UNBOUNDED)
        from = (int64_t)first_row + s.diagonal + a.window_right;
    if (WINDOW && a.window_left != UNBOUNDED)
        to = (int64_t)first_row + s.diagonal - a.window_left;
    return {first_row, min(block_m, s.seqlen_q - first_row),
            (int)max((int64_t)-block_m, min(from, (int64_t)s.seqlen_k)),
            (int)max((int64_t)-block_m, min(to, (int64_t)s.seqlen_k))};
}

/* The rows of the block that see key j, whose interval is start .. end - 1: the first, and from bit 16 on their
 * number; 0 where no row does. */
__device__ __forceinline__ uint32_t seeing_rows(const struct row_bounds &b, int j, int start, int end) {
    int first = 0, last = b.num_rows;
    if (INTERVALS) {
        first = max(start, b.first_row) - b.first_row;
        last = min(max(end, b.first_row) - b.first_row, b.num_rows);
    }
    if (WINDOW) {
        first = max(first, j - b.from);
        last = min(last, j - b.to + 1);
    }
    return first < last ? (uint32_t)first | (uint32_t)(last - first) << 16 : 0;
}

/* Sets the tiles that some of the rows first_row .. first_row + rows - 1 see. */
__device__ __forceinline__ void find_tiles(const struct gpu_forward_params &a, const struct sequence &s, int rows,
                                           struct item_facts &f) {
    const int last_row = min(f.first_row + rows, s.seqlen_q * PACKED_HEADS) - 1;
    const int first = first_key(a, s, f.first_row / PACKED_HEADS), last = last_key(a, s, last_row / PACKED_HEADS) + 1;
    f.first_tile = first / BLOCK_N;
    f.last_tile = first < last ? (last + BLOCK_N - 1) / BLOCK_N : f.first_tile;
}

#endif
