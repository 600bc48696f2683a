/* topk_fill.cu: the keys of a prompt that are kept at its end, in order of their numbers, a slot each.
 *
 * Idea: they are those whose key intervals never end. A block a head counts them in rounds of a key a thread, by
 * ballots, and then copies their K and V, a warp a slot; a block table says in which page. Constants: DTYPE of
 * the biases, THREADS. */
#include "masks/slots/topk_slots.cuh"

#define NUM_WARPS     (THREADS / 32)
#define NEVER_DROPPED 0x7fffffff

extern "C" __global__ void __launch_bounds__(THREADS) topk_fill(const __grid_constant__ struct slot_call a) {
    __shared__ uint32_t ballots[NUM_WARPS];
    const int64_t b = blockIdx.x / (uint32_t)a.heads, h = blockIdx.x % (uint32_t)a.heads;
    const int32_t thread = (int32_t)threadIdx.x, lane = thread % 32, warp = thread / 32;
    int32_t used = 0;
    for (int32_t first = 0; first < a.num_tokens; first += THREADS) {
        const int32_t j = first + thread;
        const bool kept = j < a.num_tokens && *number_at(a.end, b, h, j) == NEVER_DROPPED;
        const uint32_t ballot = __ballot_sync(0xffffffffu, kept);
        __syncthreads(); /* the ballots before are read */
        if (lane == 0)
            ballots[warp] = ballot;
        __syncthreads();
        int32_t slot = used + __popc(ballot & ((1u << lane) - 1));
        for (int n = 0; n < NUM_WARPS; n++) {
            slot += n < warp ? __popc(ballots[n]) : 0;
            used += __popc(ballots[n]);
        }
        if (kept && slot < a.window) {
            *number_at(a.slot_key, b, h, slot) = j;
            set_bits(a.slot_bias, b, h, slot, bits_at(a.bias, b, h, j));
        }
    }
    used = used < a.window ? used : a.window;
    for (int32_t n = used + thread; n < a.window; n += THREADS) {
        *number_at(a.slot_key, b, h, n) = -1;
        set_bits(a.slot_bias, b, h, n, 1u << (VALUE_BITS - 1) | infinite_bits());
    }
    if (thread == 0)
        *number_at(a.length, b, h, 0) = a.num_tokens;
    __syncthreads(); /* the slots' keys are written */
    for (int32_t slot = warp; slot < used; slot += NUM_WARPS) {
        const int32_t j = *number_at(a.slot_key, b, h, slot), row = a.block_table ? j % a.page_size : j;
        const int64_t page = a.block_table ? a.block_table[b * a.table_batch + j / a.page_size * a.table_page] : b;
        for (int32_t n = lane; a.k.data && n < a.k.row_bytes / 2; n += 32)
            *piece_at(a.slot_k, b, h, slot, n) = *piece_at(a.k, page, h, row, n);
        for (int32_t n = lane; a.v.data && n < a.v.row_bytes / 2; n += 32)
            *piece_at(a.slot_v, b, h, slot, n) = *piece_at(a.v, page, h, row, n);
    }
}
