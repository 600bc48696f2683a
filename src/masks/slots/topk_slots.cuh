/* topk_slots.cuh: reads and writes of a slot, for topk_append.cu and topk_fill.cu. */
#ifndef FDM_TOPK_SLOTS_CUH
#define FDM_TOPK_SLOTS_CUH

#include "masks/slots/slot_threads.h"
#include "masks/topk/topk_order.cuh"
/* after the widths of integers */
#include "masks/slots/topk_slots.h"

SLOT_CONSTANTS(GPU_CONSTANT_GIVEN)

#define VALUE_BYTES (VALUE_BITS / 8)

__device__ __forceinline__ int32_t *number_at(const struct slot_scores &s, int64_t b, int64_t h, int64_t n) {
    return (int32_t *)s.data + b * s.batch + h * s.head + n * s.step;
}
__device__ __forceinline__ char *score_at(const struct slot_scores &s, int64_t b, int64_t h, int64_t n) {
    return s.data + (b * s.batch + h * s.head + n * s.step) * VALUE_BYTES;
}
__device__ __forceinline__ uint32_t bits_of(const char *at) {
    return VALUE_BYTES == 4 ? *(const uint32_t *)at : *(const uint16_t *)at;
}
__device__ __forceinline__ uint32_t bits_at(const struct slot_scores &s, int64_t b, int64_t h, int64_t n) {
    return bits_of(score_at(s, b, h, n));
}
__device__ __forceinline__ void set_bits(const struct slot_scores &s, int64_t b, int64_t h, int64_t n, uint32_t bits) {
    char *at = score_at(s, b, h, n);
    if (VALUE_BYTES == 4)
        *(uint32_t *)at = bits;
    else
        *(uint16_t *)at = (uint16_t)bits;
}

/* Larger is better: the bias in its order above the inverted number of its key; never 0. */
__device__ __forceinline__ uint64_t order_of(uint32_t bits, int32_t key) {
    return (uint64_t)ordered(bits) << 32 | (0xffffffffu - (uint32_t)key);
}

/* Two bytes of a row of K or V, counted from its beginning; b: which batch, or page, holds it. */
__device__ __forceinline__ uint16_t *piece_at(const struct slot_rows &r, int64_t b, int64_t h, int64_t row,
                                              int64_t piece) {
    return (uint16_t *)(r.data + b * r.batch + row * r.row + h * r.head) + piece;
}

#endif
