/* mma_owner.cuh: a block of a backward kernel that owns query rows and walks the keys, or owns keys and walks the
 * rows: its coordinates, what window, ends and mask leave of its walk, and its semaphores at the gradient of a bias.
 * "Own" are the rows or keys that the block keeps, "other" those that it walks, OTHERS of them a step. A kernel
 * defines OWN, OTHERS, OWNS_KEYS, MASK_BLOCK (rows and keys of a tile of the block mask), DTYPE, DETERMINISTIC and
 * FOLDED before including this. */
#ifndef FDM_MMA_OWNER_CUH
#define FDM_MMA_OWNER_CUH

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/global.cuh"
#include "gpu/backward_params.h"
#include "gpu/block_mask.h"
#include "gpu/numbers.h"
#include "gpu/seen_tiles.cuh"
#include "gpu/semaphores.cuh"
#include "gpu/visible.cuh"

/* The workspace's arrays round the rows of a sequence up to a multiple of the first; a semaphore of a bias stands
 * for as many keys as the second. */
#define OWNER_ROW_STEP  128
#define OWNER_TURN_KEYS 128
static_assert(OWN % MASK_BLOCK == 0 && OTHERS % MASK_BLOCK == 0, "a mask is blocked by parts of steps");
static_assert(OWNER_TURN_KEYS % OTHERS == 0 && OWNER_ROW_STEP % OTHERS == 0, "turns are of whole steps");

/* The block's own rows or keys, and the others that window and ends leave them. */
struct place {
    struct sequence s;
    int head, head_kv; /* the query head; where keys are owned, the heads of the group one after the other */
    int first, own_length, other_length;
    int begin, end;           /* some own row or key sees the others begin <= j < end */
    int full_begin, full_end; /* every own row or key sees these */
};
__device__ __forceinline__ struct place find_place(const struct gpu_backward_params &a, uint32_t x, uint32_t y,
                                                   uint32_t z) {
    struct place at;
    /* causal: blocks with the longest walks begin first */
    const int block = WINDOW && !OWNS_KEYS ? a.grid_x - 1 - x : x;
    at.s = find_sequence(a.in, z);
    at.head_kv = OWNS_KEYS ? y : y / a.in.group;
    at.head = y;
    at.first = block * OWN;
    at.own_length = OWNS_KEYS ? at.s.seqlen_k : at.s.seqlen_q;
    at.other_length = OWNS_KEYS ? at.s.seqlen_q : at.s.seqlen_k;
    const int last = min(at.first + OWN, at.own_length) - 1;
    if (OWNS_KEYS) {
        at.begin = first_row(a.in, at.s, at.first);
        at.end = last_row(a.in, at.s, last);
        at.full_begin = first_row(a.in, at.s, last);
        at.full_end = at.first + OWN <= at.own_length ? last_row(a.in, at.s, at.first) : 0;
        if (at.full_end == at.other_length)
            at.full_end = UNBOUNDED; /* rows past the end have weight 0 */
    } else {
        at.begin = first_key(a.in, at.s, at.first);
        at.end = last_key(a.in, at.s, last) + 1;
        at.full_begin = first_key(a.in, at.s, last);
        at.full_end = last_key(a.in, at.s, at.first) + 1;
    }
    return at;
}
/* The coordinates of the block. `scratch` is a word of shared memory. */
__device__ __forceinline__ struct place find_block(const struct gpu_backward_params &a, int *scratch) {
    if (!DETERMINISTIC && !FOLDED)
        return find_place(a, blockIdx.x, blockIdx.y, blockIdx.z);
    const uint32_t n = DETERMINISTIC ? take_ticket(a.ticket, scratch) : blockIdx.x;
    return find_place(a, n % a.grid_x, n / a.grid_x % a.grid_y, n / a.grid_x / a.grid_y);
}
__device__ __forceinline__ int64_t own_begin(const struct place &at) { return OWNS_KEYS ? at.s.k_begin : at.s.q_begin; }
__device__ __forceinline__ int64_t other_begin(const struct place &at) {
    return OWNS_KEYS ? at.s.q_begin : at.s.k_begin;
}
__device__ __forceinline__ int own_head(const struct place &at) { return OWNS_KEYS ? at.head_kv : at.head; }
__device__ __forceinline__ int other_head(const struct place &at) { return OWNS_KEYS ? at.head : at.head_kv; }

/* Index of the head's first row in the workspace's arrays. */
__device__ __forceinline__ int64_t rows_begin(const struct gpu_backward_params &a, const struct place &at) {
    return VARLEN ? backward_begin(at.s.q_begin, at.s.batch, OWNER_ROW_STEP) + at.head * a.rows
                  : ((int64_t)at.s.batch * a.in.heads + at.head) * a.rows;
}

/* Address of row `row` of a head. The matrices are q, k, v, out and their gradients. */
__device__ __forceinline__ char *row_of(const struct gpu_matrix &m, int batch, int64_t row, int head) {
    return m.data + (batch * m.batch + row * m.row + head * m.head) * (DTYPE == GPU_FLOAT32 ? 4 : 2);
}

/* GPU_BLOCK_*: what the mask hides of the own rows or keys and a step's others. */
__device__ __forceinline__ int mask_kind(const struct gpu_backward_params &a, const struct place &at, int step) {
    const uint8_t *block_mask =
        a.in.block_mask + at.s.batch * a.in.block_mask_batch + at.head / a.in.block_mask_group * a.in.block_mask_head;
    bool hidden = true, full = true;
#pragma unroll
    for (int n = 0; n < OWN / MASK_BLOCK; n++) {
        const int64_t own = at.first / MASK_BLOCK + n;
        if (own * MASK_BLOCK >= at.own_length)
            break;
#pragma unroll
        for (int i = 0; i < OTHERS / MASK_BLOCK; i++) {
            const int64_t other = (int64_t)step * (OTHERS / MASK_BLOCK) + i;
            if (other * MASK_BLOCK >= at.other_length)
                break;
            const int kind = OWNS_KEYS ? block_mask[other * a.in.block_mask_row + own]
                                       : block_mask[own * a.in.block_mask_row + other];
            hidden = hidden && kind == GPU_BLOCK_HIDDEN;
            full = full && kind == GPU_BLOCK_FULL;
        }
    }
    return hidden ? GPU_BLOCK_HIDDEN : full ? GPU_BLOCK_FULL : GPU_BLOCK_PARTIAL;
}
/* Whether some own row or key may not see some other of a step. */
__device__ __forceinline__ bool is_partial(const struct gpu_backward_params &a, const struct place &at, int step) {
    return step * OTHERS < at.full_begin || step * OTHERS + OTHERS > at.full_end ||
           (BLOCK_MASKED && mask_kind(a, at, step) != GPU_BLOCK_FULL);
}

/* Stores the words of a key in shared memory: three, `stride` words apart. */
__device__ __forceinline__ void store_key(uint32_t to, int stride, const struct key_bounds &key) {
    st_shared_4(to, (uint32_t)key.first);
    st_shared_4(to + stride * 4, (uint32_t)key.last);
    st_shared_4(to + stride * 8, __float_as_uint(key.bias));
}
/* For a block that owns rows: each thread reads a key of the step, and writes what depends on it to `bounds`.
 * Returns whether some own row sees it. */
__device__ __forceinline__ bool look_at_step(const struct gpu_backward_params &a, const struct place &at, int step,
                                             uint32_t bounds) {
    if (threadIdx.x >= OTHERS)
        return false;
    const struct key_bounds key = look_at_key(a.in, at.s, at.head, step * OTHERS + (int)threadIdx.x);
    store_key(bounds + threadIdx.x * 4, OTHERS, key);
    return max(key.first, at.first) < min(key.last, at.first + OWN);
}
/* The next step from `step` on in which some own row or key sees some other, -1 when there is none. sees_some(step)
 * says whether keys alone let the thread's own see some of a step's others. */
template <class looking>
__device__ __forceinline__ int next_active(const struct gpu_backward_params &a, const struct place &at, int step,
                                           const looking &sees_some) {
    for (; step * OTHERS < at.end; step++) {
        if constexpr (SEEN_TILES && !OWNS_KEYS)
            if (hides_keys<OWN, OTHERS>(a.in, at.s.batch, at.head, at.first, step * OTHERS))
                continue;
        bool any = !BLOCK_MASKED || mask_kind(a, at, step) != GPU_BLOCK_HIDDEN;
        if (KEYED)
            any = __syncthreads_or(any && sees_some(step));
        if (any)
            return step;
    }
    return -1;
}

/* Blocks of the same rows add to the gradient of a bias that their heads or batches share in the order of their
 * tickets, OWNER_TURN_KEYS keys at a time: a semaphore counts those that have added. */
__device__ __forceinline__ int num_turns(const struct gpu_backward_params &a) {
    return (a.in.seqlen_k + OWNER_TURN_KEYS - 1) / OWNER_TURN_KEYS;
}
__device__ __forceinline__ int turn_of(const struct gpu_backward_params &a, int step) {
    return step < 0 ? num_turns(a) : step * OTHERS / OWNER_TURN_KEYS;
}
__device__ __forceinline__ int *semaphore_of(const struct gpu_backward_params &a, const struct place &at, int turn) {
    const int batch = a.dbias_batches == 1 ? 0 : at.s.batch;
    return a.dbias_semaphores +
           (((int64_t)batch * a.dbias_heads + at.head / a.in.bias.group) * num_turns(a) + turn) *
               backward_semaphores(a.in.seqlen_q) +
           at.first / 32;
}
__device__ __forceinline__ int my_turn(const struct gpu_backward_params &a, const struct place &at) {
    return (a.dbias_batches == 1 ? at.s.batch * a.in.bias.group : 0) + at.head % a.in.bias.group;
}
/* Releases the semaphores from `turn` until `end`, when all warps have added. Where the block adds nothing it waits
 * for them here. */
__device__ __forceinline__ void release_up_to(const struct gpu_backward_params &a, const struct place &at, int turn,
                                              int end) {
    if (!DETERMINISTIC || threadIdx.x != 0)
        return;
    for (; turn < end; turn++) {
        wait_semaphore(semaphore_of(a, at, turn), my_turn(a, at));
        release_semaphore(semaphore_of(a, at, turn), my_turn(a, at));
    }
}

#endif
