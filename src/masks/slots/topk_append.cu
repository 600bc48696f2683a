/* topk_append.cu: a token of each head takes the slot of the worst key that is kept, where it is better.
 *
 * Idea: the bound that a key must pass only rises, so what has lost its slot never comes back, and K and V of W keys
 * are all that later steps read. An empty slot counts as worse than any key. A block a head: each thread reads its
 * slots, and its part of the token's K and V, in one go; the worst slot is the least 64-bit number of the block, found
 * by reductions of 32-bit halves in each warp and then in all warps alike; then K and V are written over it.
 *
 * Bound by latency: one read of memory, one reduction, one write. The next kernel may be launched meanwhile; it waits
 * for this one's end by itself. Constants: DTYPE of the biases, THREADS. */
#include "cuda/ptx/launch.cuh"
#include "masks/slots/topk_slots.cuh"

#define NUM_WARPS (THREADS / 32)
#define ALL_LANES 0xffffffffu

/* Which lane has the least number; the same in all lanes. */
__device__ __forceinline__ int least_lane(uint64_t number) {
    const uint32_t high = (uint32_t)(number >> 32), low = (uint32_t)number;
    const uint32_t least = __reduce_min_sync(ALL_LANES, high);
    const uint32_t other = __reduce_min_sync(ALL_LANES, high == least ? low : ~0u);
    return __ffs((int)__ballot_sync(ALL_LANES, high == least && low == other)) - 1;
}

/* Two bytes of a token's K and V, counted through both: of the token, and in a slot. */
__device__ __forceinline__ uint16_t *either_piece(const struct slot_rows &k, const struct slot_rows &v, int64_t b,
                                                  int64_t h, int64_t row, int32_t n) {
    const int32_t of_k = (int32_t)(k.row_bytes / 2);
    return n < of_k ? piece_at(k, b, h, row, n) : piece_at(v, b, h, row, n - of_k);
}

extern "C" __global__ void __launch_bounds__(THREADS) topk_append(const __grid_constant__ struct slot_call a) {
    __shared__ uint64_t orders[NUM_WARPS];
    __shared__ int32_t slots[NUM_WARPS];
    const int64_t b = blockIdx.x / (uint32_t)a.heads, h = blockIdx.x % (uint32_t)a.heads;
    const int32_t thread = (int32_t)threadIdx.x, in_warp = (int32_t)(threadIdx.x % 32),
                  warp = (int32_t)(threadIdx.x / 32);
    const int32_t pieces = (int32_t)((a.k.row_bytes + a.v.row_bytes) / 2); /* without K and V 0 */
    griddepcontrol_launch_dependents();

    const int32_t key = *number_at(a.length, b, h, 0);
    const uint32_t bits = bits_at(a.bias, b, h, 0);
    const bool is_real = !a.real || a.real[b * a.real_batch] != 0;
    const uint16_t first_piece = thread < pieces ? *either_piece(a.k, a.v, b, h, 0, thread) : (uint16_t)0;
    uint64_t worst = ~(uint64_t)0; /* worse than it is no key's */
    int32_t slot = -1;
#pragma unroll 1
    for (int32_t begin = thread; begin < a.window; begin += THREADS * APPEND_SLOTS) {
        const int32_t *kept_at = number_at(a.slot_key, b, h, begin);
        const char *bias_at = score_at(a.slot_bias, b, h, begin);
        int32_t kept[APPEND_SLOTS];
        uint32_t kept_bits[APPEND_SLOTS];
#pragma unroll
        for (int i = 0; i < APPEND_SLOTS; i++) {
            kept[i] = begin + i * THREADS < a.window ? kept_at[i * THREADS * a.slot_key.step] : 0;
            kept_bits[i] =
                begin + i * THREADS < a.window ? bits_of(bias_at + i * THREADS * a.slot_bias.step * VALUE_BYTES) : 0;
        }
#pragma unroll
        for (int i = 0; i < APPEND_SLOTS; i++) {
            const int32_t n = begin + i * THREADS;
            const uint32_t empty = (uint32_t)(kept[i] >> 31); /* all bits of an empty slot, whose key is -1 */
            const uint32_t high = ordered(kept_bits[i]) & ~empty, low = ~(uint32_t)kept[i] | ((uint32_t)n & empty);
            const uint64_t order = (uint64_t)high << 32 | low;
            const bool is_worst = (n < a.window) & (order < worst);
            worst = is_worst ? order : worst;
            slot = is_worst ? n : slot;
        }
    }
    const int lane = least_lane(worst);
    if (in_warp == lane) {
        orders[warp] = worst;
        slots[warp] = slot;
    }
    __syncthreads();
    const uint64_t of_warp = in_warp < NUM_WARPS ? orders[in_warp] : ~(uint64_t)0;
    const int least = least_lane(of_warp);
    slot = is_real && orders[least] < order_of(bits, key) ? slots[least] : -1;

    if (thread == 0) {
        *number_at(a.length, b, h, 0) = key + 1;
        if (a.slot.data)
            *number_at(a.slot, b, h, 0) = slot;
        if (slot >= 0) {
            *number_at(a.slot_key, b, h, slot) = key;
            set_bits(a.slot_bias, b, h, slot, bits);
        }
    }
    if (slot < 0)
        return;
    if (thread < pieces)
        *either_piece(a.slot_k, a.slot_v, b, h, slot, thread) = first_piece;
#pragma unroll 1
    for (int32_t n = thread + THREADS; n < pieces; n += THREADS)
        *either_piece(a.slot_k, a.slot_v, b, h, slot, n) = *either_piece(a.k, a.v, b, h, 0, n);
}
