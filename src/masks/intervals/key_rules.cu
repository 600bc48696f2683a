/* key_rules.cu: documents, prefixes, windows of each head and key intervals that hold at once, as key intervals.
 *
 * Idea: a thread a key and head. What a key's number does not say is found by bisection: its sequence in the offsets,
 * its document's first and last key in the ids, which rise. Bound by the latency of those reads. */
#include "masks/intervals/key_rows.cuh"
#include "masks/intervals/key_rules_params.h"

struct rows {
    int64_t first, last;
};

__device__ __forceinline__ void narrow(struct rows &rows, int64_t first, int64_t last) {
    rows.first = max(rows.first, first);
    rows.last = min(rows.last, last);
}

__device__ __forceinline__ int32_t number_of(const struct key_rule &rule, int64_t b, int32_t h, int64_t key) {
    return rule.data[b * rule.batch + h / rule.group * rule.head + key * rule.key];
}

/* As narrow_by_place() of masks/intervals/key_rules.c. */
__device__ __forceinline__ void narrow_by_place(const struct key_rules_params &a, int64_t b, int32_t h, int64_t j,
                                                int64_t shift, struct rows &rows) {
    const int64_t none = 0x7fffffffffffffff;
    if (a.prefixes.data && j >= a.prefixes.data[b * a.prefixes.batch])
        narrow(rows, j - shift, none);
    if (!a.windows.data)
        return;
    const int32_t *window = a.windows.data + h / a.windows.group * a.windows.head;
    const int64_t left = window[0], right = window[a.windows.key];
    if (right >= 0)
        narrow(rows, j - shift - right, none);
    if (left >= 0)
        narrow(rows, 0, j - shift + left + 1);
}

extern "C" __global__ void __launch_bounds__(KEY_RULES_THREADS)
    key_rules(const __grid_constant__ struct key_rules_params a) {
    const int64_t n = (int64_t)blockIdx.x * KEY_RULES_THREADS + threadIdx.x;
    if (n >= (int64_t)a.rows * a.keys)
        return;
    const int32_t at = (int32_t)(n % a.keys), row = (int32_t)(n / a.keys), h = row % a.heads;
    int64_t b = row / a.heads, place = 0; /* place: of the batch in start and end */
    struct rows rows = {-0x7fffffff - 1, 0x7fffffff};
    if (a.cu_seqlens_k) {
        b = first_above(a.cu_seqlens_k, 1, a.batch + 1, at, false) - 1;
        if (b < 0 || b >= a.batch) {
            rows.first = rows.last;
            rows.last = -0x7fffffff - 1;
        } else {
            const int64_t begin = a.cu_seqlens_k[b], keys = a.cu_seqlens_k[b + 1] - begin;
            narrow_by_place(a, b, h, at - begin, keys - ((int64_t)a.cu_seqlens_q[b + 1] - a.cu_seqlens_q[b]), rows);
        }
    } else {
        place = b;
        if (a.ids.data) {
            const int32_t *ids = a.ids.data + b * a.ids.batch, id = ids[at * a.ids.key];
            rows.first = first_above(ids, a.ids.key, at, id, true);
            rows.last = at + first_above(ids + at * a.ids.key, a.ids.key, a.keys - at, id, false);
        }
        narrow_by_place(a, b, h, at, (int64_t)a.keys - a.seqlen_q, rows);
    }
    if (a.given_start.data)
        narrow(rows, number_of(a.given_start, place, h, at), number_of(a.given_end, place, h, at));
    a.start.data[place * a.start.batch + h * a.start.head + at * a.start.key] = clamp_row(rows.first);
    a.end.data[place * a.end.batch + h * a.end.head + at * a.end.key] = clamp_row(rows.last);
}
