/* blackwell_scheduler.cuh: how pairs of blocks take items of work, for kernels that define SCHEDULER.
 *
 * One thread of each block, the scheduler, walks the places of an order (gpu/items.cuh) by one protocol: initial(),
 * valid() and `place`, prefetch_next(), advance(), finish(). It tells the block's other warps of each item by a ring of
 * WORK_SLOTS slots (work_board), so that their code does not know the order:
 *   ITEMS_STATIC   as many pairs as run at once; a pair's next place is a fixed distance away
 *   ITEMS_LONGEST  a pair an item, those with many keys first
 *   ITEMS_DYNAMIC  a pair an item in that order, and a pair that is done takes the place of one that has not begun, by
 *                  cluster launch control: the leader asks, and the answer comes to both blocks
 *
 * An item is asked for when the one before it was taken up, not sooner: what is claimed early is not balanced. */
#ifndef FDM_BLACKWELL_SCHEDULER_CUH
#define FDM_BLACKWELL_SCHEDULER_CUH

#include "cuda/ptx/cluster_launch.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/tma.cuh"
#include "families/blackwell/pipeline/blackwell_ring.cuh"
#include "gpu/items.cuh"

/* Shared memory of the response of cluster launch control: 16 bytes, then its full barrier, then (the leader's)
 * empty barrier. */
enum { ANSWER_FULL = 16, ANSWER_EMPTY = 24, ANSWER_BYTES = 32 };

struct pair_scheduler {
    uint32_t answer; /* address */
    uint32_t rank;   /* of this block in its pair */
    ring_place<1> asked;
    int place, places;

    /* One thread calls it, before the cluster's barrier. */
    static __device__ __forceinline__ void init_barriers(uint32_t answer) {
        mbarrier_init(answer + ANSWER_FULL, 1);
        mbarrier_init(answer + ANSWER_EMPTY, PAIR);
    }
    static __device__ __forceinline__ int pair() { return (int)blockIdx.x / PAIR; }

    __device__ __forceinline__ pair_scheduler(uint32_t shared_answer, uint32_t block_rank, int num_places)
        : answer(shared_answer), rank(block_rank), places(num_places) {}
    __device__ __forceinline__ void initial() { place = first_place(pair()); }
    __device__ __forceinline__ bool valid() const { return place < places; }
    /* Asks for the place after this one. */
    __device__ __forceinline__ void prefetch_next() {
        if (SCHEDULER != ITEMS_DYNAMIC)
            return;
        mbarrier_arrive_expect_tx(answer + ANSWER_FULL, 16);
        if (rank == LEADER) {
            stage_barriers<1>{answer + ANSWER_EMPTY}.wait_before(asked);
            clusterlaunchcontrol_try_cancel_multicast(answer, answer + ANSWER_FULL);
        }
    }
    __device__ __forceinline__ void advance() {
        if (SCHEDULER == ITEMS_STATIC)
            place = place_after(place, (int)gridDim.x / PAIR);
        else if (SCHEDULER == ITEMS_LONGEST)
            place = places;
        else {
            uint32_t x, y, z;
            stage_barriers<1>{answer + ANSWER_FULL}.wait(asked);
            const bool there = clusterlaunchcontrol_query_cancel(answer, x, y, z);
            place = there ? (int)x / PAIR : places;
            fence_proxy_async(); /* the asynchronous proxy writes the next response */
            mbarrier_arrive_remote(mapa_shared(answer + ANSWER_EMPTY, LEADER));
            asked.next();
        }
    }
    /* Called after the last item. The cluster's barrier that follows keeps both blocks until no request is in
     * flight. */
    __device__ __forceinline__ void finish() {}
};

/* The board on which the scheduler gives the warps of its block WORDS words about an item, in a slot for each item. */
enum { WORK_SLOTS = 2 };
template <int words> struct work_board {
    static_assert(words % 4 == 0, "it is copied by 16 bytes");
    typedef ring<WORK_SLOTS, words * 4> slots;
    enum { BARRIERS = WORK_SLOTS * words * 4, BYTES = BARRIERS + slots::BYTES };
    uint32_t board; /* address */
    ring_place<WORK_SLOTS> at;

    static __device__ __forceinline__ slots slots_of(uint32_t board) { return {board + BARRIERS, board}; }

    /* `warps` is the number of the block's warps that read each item. */
    static __device__ __forceinline__ void init_barriers(uint32_t board, uint32_t warps) {
        for (int i = 0; i < WORK_SLOTS; i++)
            slots_of(board).init(i, 1, warps);
    }
    __device__ __forceinline__ work_board(uint32_t shared) : board(shared) {}
    /* Called by the scheduler: waits for a slot; then fills it. */
    __device__ __forceinline__ void wait_slot() const { slots_of(board).wait_empty(at); }
    __device__ __forceinline__ void tell(const int (&word)[words]) {
        const uint32_t slot = slots_of(board).tile(at);
#pragma unroll
        for (int i = 0; i < words; i += 4)
            st_shared_16(slot + 4 * i, (uint32_t)word[i], (uint32_t)word[i + 1], (uint32_t)word[i + 2],
                         (uint32_t)word[i + 3]);
        slots_of(board).full().arrive(at);
        at.next();
    }
    /* Called by a whole warp: returns the next item. The slot is free for the item after the next when every warp
     * has read it. */
    __device__ __forceinline__ void read(int (&word)[words]) {
        const uint32_t slot = slots_of(board).tile(at);
        slots_of(board).wait_full(at);
#pragma unroll
        for (int i = 0; i < words; i += 4) {
            uint32_t four[4];
            ld_shared_16(four, slot + 4 * i);
#pragma unroll
            for (int n = 0; n < 4; n++)
                word[i + n] = (int)four[n];
        }
        __syncwarp();
        slots_of(board).release(at);
        at.next();
    }
};

#endif
