/* topk_keys.cuh: keys as numbers whose order is that of the choice, and the walk over those of a head. */
#ifndef FDM_TOPK_KEYS_CUH
#define FDM_TOPK_KEYS_CUH

#include "cuda/constants.h"
#include "masks/topk/topk_order.cuh"
#include "masks/topk/topk_params.h"

TOPK_CONSTANTS(GPU_CONSTANT_GIVEN)

#define KEYS_AT_ONCE 8 /* that a thread reads before it looks at them */

/* One head of one batch. */
struct topk_row {
    const char *bias;
    const uint8_t *padding;
    int32_t number, batch, head;
};

__device__ __forceinline__ struct topk_row topk_row_of(const struct topk_params &a, int32_t number) {
    struct topk_row row = {a.bias, a.padding, number, number / a.num_heads, number % a.num_heads};
    row.bias += (row.batch * a.bias_batch + row.head * a.bias_head) * (VALUE_BITS / 8);
    if (a.padding)
        row.padding += row.batch * a.padding_batch;
    return row;
}

/* Key j as a number; 0 when it is padded. */
__device__ __forceinline__ uint64_t key_of(const struct topk_params &a, const struct topk_row &row, int32_t j) {
    if (row.padding && row.padding[j * a.padding_key] == 0)
        return 0;
    const char *at = row.bias + j * a.bias_key * (VALUE_BITS / 8);
    const uint32_t bits = VALUE_BITS == 32 ? *(const uint32_t *)at : *(const uint16_t *)at;
    return (uint64_t)ordered(bits) << a.index_bits | ((1u << a.index_bits) - 1 - (uint32_t)j);
}
__device__ __forceinline__ int32_t index_of(const struct topk_params &a, uint64_t key) {
    const uint32_t last = (1u << a.index_bits) - 1;
    return (int32_t)(last - ((uint32_t)key & last));
}

/* Each of the keys first .. last - 1 that is real, by one thread of the block. */
template <class Visit>
__device__ __forceinline__ void visit_keys(const struct topk_params &a, const struct topk_row &row, int32_t first,
                                           int32_t last, Visit visit) {
    for (int32_t from = first + (int32_t)threadIdx.x; from < last; from += CHUNK * KEYS_AT_ONCE) {
        uint64_t keys[KEYS_AT_ONCE];
#pragma unroll
        for (int n = 0; n < KEYS_AT_ONCE; n++)
            keys[n] = from + n * CHUNK < last ? key_of(a, row, from + n * CHUNK) : 0;
#pragma unroll
        for (int n = 0; n < KEYS_AT_ONCE; n++)
            if (keys[n])
                visit(keys[n]);
    }
}

/* What decides the chunks of a span: a list of keys that were there before and leave within it, and places for them
 * and those that arrive. */
struct topk_span {
    const uint64_t *list;
    int32_t listed, room, begin;
};

__device__ __forceinline__ struct topk_span topk_span_of(const struct topk_params &a, const struct topk_row &row,
                                                         int32_t number) {
    struct topk_span span = {0, 0, a.window, number * a.span};
    if (a.num_spans > 1) {
        const int64_t at = (int64_t)row.number * a.num_spans + number;
        span.list = a.carried + at * a.span;
        span.listed = a.carries[at].listed;
        span.room = a.carries[at].room;
    }
    return span;
}

/* Those of the list, and those that arrived before key `end`. */
template <class Visit>
__device__ __forceinline__ void visit_span(const struct topk_params &a, const struct topk_row &row,
                                           const struct topk_span &span, int32_t end, Visit visit) {
    for (int32_t n = (int32_t)threadIdx.x; n < span.listed; n += CHUNK)
        visit(span.list[n]);
    visit_keys(a, row, span.begin, end, visit);
}

/* Sum of x up to this lane, itself included. */
__device__ __forceinline__ uint32_t warp_sum_upto(uint32_t x) {
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const uint32_t y = __shfl_up_sync(0xffffffffu, x, lanes);
        if ((int)(threadIdx.x % 32) >= lanes)
            x += y;
    }
    return x;
}

#endif
