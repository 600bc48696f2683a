/* topk_append.cu: a token of each head takes the slot of the worst key that is kept, where it is better.
 *
 * Idea: the bound that a key must pass only rises, so what has lost its slot never comes back, and K and V of W keys
 * are all that later steps read. An empty slot counts as worse than any key. A block a head: the worst slot by a
 * reduction of W words, then K and V of the token are copied over it. Bound by its launch: 8 W bytes a head at the
 * most. Constant: DTYPE of the biases. */
#include "gpu/masks/topk_slots.cuh"

#define NUM_WARPS (SLOT_THREADS / 32)

struct worst_slot {
    uint64_t order; /* 0: empty */
    int32_t slot;
};

__device__ __forceinline__ bool is_worse(const struct worst_slot &a, const struct worst_slot &b) {
    return a.order < b.order || (a.order == b.order && a.slot < b.slot);
}

__device__ __forceinline__ void reduce_warp(struct worst_slot &w) {
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        const struct worst_slot other = {__shfl_xor_sync(0xffffffffu, w.order, lanes),
                                         __shfl_xor_sync(0xffffffffu, w.slot, lanes)};
        if (is_worse(other, w))
            w = other;
    }
}

extern "C" __global__ void __launch_bounds__(SLOT_THREADS) topk_append(const __grid_constant__ struct slot_call a) {
    __shared__ uint64_t orders[NUM_WARPS];
    __shared__ int32_t slots[NUM_WARPS];
    const int64_t b = blockIdx.x / (uint32_t)a.heads, h = blockIdx.x % (uint32_t)a.heads;
    const int32_t thread = (int32_t)threadIdx.x, key = *number_at(a.length, b, h, 0);
    const uint32_t bits = bits_at(a.bias, b, h, 0);
    const bool is_real = !a.real || a.real[b * a.real_batch] != 0;
    struct worst_slot worst = {is_real ? order_of(bits, key) : 0, -1}; /* the token itself: a slot must be below it */
#pragma unroll 4
    for (int32_t n = thread; n < a.window; n += SLOT_THREADS) {
        const int32_t kept = *number_at(a.slot_key, b, h, n);
        const uint64_t order = order_of(bits_at(a.slot_bias, b, h, n), kept); /* read beside the key, not after it */
        const struct worst_slot other = {kept < 0 ? 0 : order, n};
        if (other.order < worst.order)
            worst = other;
    }
    reduce_warp(worst);
    if (thread % 32 == 0) {
        orders[thread / 32] = worst.order;
        slots[thread / 32] = worst.slot;
    }
    __syncthreads();
    for (int n = 0; n < NUM_WARPS; n++) {
        const struct worst_slot other = {orders[n], slots[n]};
        if (is_worse(other, worst))
            worst = other;
    }
    if (thread == 0) {
        *number_at(a.length, b, h, 0) = key + 1;
        if (a.slot.data)
            *number_at(a.slot, b, h, 0) = worst.slot;
        if (worst.slot >= 0) {
            *number_at(a.slot_key, b, h, worst.slot) = key;
            set_bits(a.slot_bias, b, h, worst.slot, bits);
        }
    }
    if (worst.slot < 0)
        return;
    for (int32_t n = thread; a.k.data && n < a.k.row_bytes / 2; n += SLOT_THREADS)
        copy_piece(a.slot_k, a.k, b, h, worst.slot, b, 0, n);
    for (int32_t n = thread; a.v.data && n < a.v.row_bytes / 2; n += SLOT_THREADS)
        copy_piece(a.slot_v, a.v, b, h, worst.slot, b, 0, n);
}
