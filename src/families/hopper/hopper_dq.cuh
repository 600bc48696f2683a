/* hopper_dq.cuh: who begins the sums of dQ of hopper_backward.cu, who adds to them when, and who rounds them, where
 * that is not done by kernels before and after (DQ ROUNDED or TURNS).
 *
 * The workspace has a word for each 16 rows of a query head (semaphores) that counts the blocks of keys that have added
 * to the rows; ROUNDED: in its high half, and the low half of the first of a tile counts those that have come to add.
 * The first block stores what the others add to, and the one that is last rounds the sums: nobody zeroes them before,
 * and they are read while they are near.
 *
 * ROUNDED: in any order; a block that is not the first waits for the one that is, which is running and waits only for
 * what was begun before it. All warps of a block agree on it: where each took its own place, two blocks could wait for
 * each other, as warps wait for each other at products.
 *
 * TURNS: from the last block of keys to the first, each when the ones before it have added; blocks take their places in
 * that order, and so wait only for blocks that are running. */
#ifndef FDM_HOPPER_DQ_CUH
#define FDM_HOPPER_DQ_CUH

#include "families/hopper/hopper_gradients.cuh"
#include "gpu/turns.cuh"

#define DQ_OWN (DQ == HOPPER_DQ_ROUNDED || DQ == HOPPER_DQ_TURNS)

enum { HAS_ADDED = 1 << 16 }; /* one, in the high half */

/* Blocks of keys that have a tile of rows in their walk: first .. last - 1. The same as find_block(), from the rows'
 * side. */
struct visitors {
    int first, last;
};
__device__ __forceinline__ struct visitors find_visitors(const struct hopper_backward_params &a, int batch, int tile) {
    const struct sequence s = find_sequence(a.in.in, batch);
    struct visitors v = {0, (s.seqlen_k + BLOCK_N - 1) / BLOCK_N};
    const int row = tile * BLOCK_M;
    if (WINDOW && a.in.in.window_right != UNBOUNDED) {
        const int64_t end = (int64_t)min(row + BLOCK_M, s.seqlen_q) + s.diagonal + a.in.in.window_right;
        v.last = (int)min((int64_t)v.last, (max(end, (int64_t)0) + BLOCK_N - 1) / BLOCK_N);
    }
    if (WINDOW && a.in.in.window_left != UNBOUNDED) {
        const int64_t begin = (int64_t)row + s.diagonal - a.in.in.window_left;
        v.first = begin >= s.seqlen_k ? v.last : (int)(max(begin, (int64_t)0) / BLOCK_N);
    }
    return v;
}

/* The part of a warp of the serving warpgroup: 16 rows of a step. */
struct dq_rows {
    const struct hopper_backward_params &a;
    const struct key_block &k;
    struct step_rows at;

    __device__ __forceinline__ int *word() const {
        return a.in.semaphores + at.place(a, k.batch) / 16 + threadIdx.x / 32 % 4;
    }
    __device__ __forceinline__ float *sums() const {
        return a.in.dq_sums + (at.place(a, k.batch) + threadIdx.x / 32 % 4 * 16) * HEAD_DIM;
    }

    /* One thread, in any order: whether the block is the first to come to the tile. */
    __device__ __forceinline__ bool come() const { return atomicAdd(word(), 1) % HAS_ADDED == 0; }
    /* Blocks that add to the rows before this one, in a fixed order. */
    __device__ __forceinline__ int turn() const {
        return find_visitors(a, k.batch, at.tile).last - 1 - k.first_key / BLOCK_N;
    }
    /* Waits until so many blocks have added; ROUNDED: some of them, if any. */
    __device__ __forceinline__ void await(int blocks) const {
        if (blocks > 0 && threadIdx.x % 32 == 0) {
            if (DQ == HOPPER_DQ_TURNS)
                await_turn(word(), blocks);
            else
                while (ld_acquire(word()) < HAS_ADDED) {
                }
            fence_proxy_async_global();
        }
        __syncwarp();
    }
    /* When the warp's part has been added: says so, and rounds the rows if all blocks have. */
    __device__ __forceinline__ void hand_on() const {
        const struct visitors v = find_visitors(a, k.batch, at.tile);
        int added = 0;
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            __threadfence();
            added = (DQ == HOPPER_DQ_TURNS ? turn() : atomicAdd(word(), (int)HAS_ADDED) / HAS_ADDED) + 1;
            if (DQ == HOPPER_DQ_TURNS)
                hand_on_turn(word(), turn());
            __threadfence();
        }
        __syncwarp();
        if (__shfl_sync(0xffffffff, added, 0) == v.last - v.first)
            round();
    }
    __device__ __forceinline__ void round() const {
        constexpr int together = HEAD_DIM % 128 == 0 ? 8 : 4; /* tiles of 16 x 8 whose loads are under way */
        const int lane = threadIdx.x % 32, row = at.tile * BLOCK_M + threadIdx.x / 32 % 4 * 16 + lane / 4;
        const float *from = sums() + lane * 4;
        char *const to = row_address(a.in.dq, k.batch, at.head, row);
#pragma unroll 1
        for (int first = 0; first < HEAD_DIM / 8; first += together) {
            float4 x[together];
#pragma unroll
            for (int n = 0; n < together; n++)
                x[n] = __ldcg((const float4 *)(from + (first + n) * 128));
#pragma unroll
            for (int n = 0; n < together; n++) {
                const int column = (first + n) * 8 + lane % 4 * 2, columns = a.in.in.head_dim - column;
                const float scale = a.in.in.scale;
                if (row < a.in.in.seqlen_q)
                    store_pair(to + column * 2, pack(x[n].x * scale, x[n].y * scale), columns);
                if (row + 8 < a.in.in.seqlen_q)
                    store_pair(to + 8 * a.in.dq.row * 2 + column * 2, pack(x[n].z * scale, x[n].w * scale), columns);
            }
        }
    }
    static __device__ __forceinline__ void store_pair(char *to, uint32_t pair, int columns) {
        if (columns >= 2)
            *(uint32_t *)to = pair;
        else if (columns == 1)
            *(uint16_t *)to = (uint16_t)pair;
    }
};

#endif
