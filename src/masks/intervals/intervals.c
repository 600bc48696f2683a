/* intervals.c: causal, window, document and prefix masks as key intervals, and intervals out of dense masks. */
#include "masks/intervals/key_intervals.h"
#include "problem/tensor.h"

/* Start or end of a head. */
struct key_row {
    int32_t *data;
    int64_t stride;
};

static struct key_row row_of(const fdm_tensor *t, int64_t b, int64_t h) {
    int32_t *data = (int32_t *)(void *)tensor_data(t);
    return (struct key_row){data + b * tensor_stride(t, 0) + h * tensor_stride(t, 1), tensor_stride(t, 2)};
}

static void set_all(struct key_row r, int64_t from, int64_t to, int32_t value) {
    for (int64_t j = from; j < to; j++)
        r.data[j * r.stride] = value;
}

/* Of key j: j + offset. */
static void set_ramp(struct key_row r, int64_t from, int64_t to, int64_t offset) {
    if (r.stride == 1 && from < to && from + offset >= INT32_MIN && to - 1 + offset <= INT32_MAX)
        for (int32_t j = (int32_t)from; j < (int32_t)to; j++)
            r.data[j] = (int32_t)(j + offset);
    else
        for (int64_t j = from; j < to; j++)
            r.data[j * r.stride] = clamp_row(j + offset);
}

static void rule_of_head(const struct interval_rule *rule, int64_t num_keys, struct key_row start, struct key_row end) {
    const int64_t in_prefix = rule->prefix < num_keys ? rule->prefix : num_keys;
    set_all(start, 0, in_prefix, 0);
    set_ramp(start, in_prefix, num_keys, -rule->row_shift - rule->right);
    if (rule->left < 0)
        set_all(end, 0, num_keys, INT32_MAX);
    else
        set_ramp(end, 0, num_keys, rule->left + 1 - rule->row_shift);
}

void intervals_by_rule(const struct interval_rule *rule, const fdm_tensor *start, const fdm_tensor *end) {
    for (int64_t b = 0; b < start->shape[0] && start->shape[2] > 0; b++)
        for (int64_t h = 0; h < start->shape[1]; h++)
            rule_of_head(rule, start->shape[2], row_of(start, b, h), row_of(end, b, h));
}

static void documents_of_head(const int32_t *cu_seqlens, int64_t stride, int64_t num_documents, int32_t causal,
                              struct key_row start, struct key_row end) {
    for (int64_t n = 0; n < num_documents; n++) {
        const int32_t first = cu_seqlens[n * stride], last = cu_seqlens[(n + 1) * stride];
        for (int32_t j = first; j < last; j++) {
            start.data[j * start.stride] = causal ? j : first;
            end.data[j * end.stride] = last;
        }
    }
}

void intervals_of_documents(const int32_t *cu_seqlens, int64_t stride, int64_t num_documents, int32_t causal,
                            const fdm_tensor *start, const fdm_tensor *end) {
    for (int64_t b = 0; b < start->shape[0] && start->shape[2] > 0; b++)
        for (int64_t h = 0; h < start->shape[1]; h++)
            documents_of_head(cu_seqlens, stride, num_documents, causal, row_of(start, b, h), row_of(end, b, h));
}

enum { KEYS_AT_ONCE = 256 };

/* The first and last rows that see each of `count` keys, and how many do; first > last: none does. */
static void look_at_keys(const uint8_t *mask, int64_t rows, int64_t row_stride, int64_t key_stride, int64_t count,
                         int32_t *first, int32_t *last, int32_t *seen) {
    for (int64_t n = 0; n < count; n++) {
        first[n] = INT32_MAX;
        last[n] = -1;
        seen[n] = 0;
    }
    for (int64_t i = 0; i < rows; i++, mask += row_stride)
        for (int64_t n = 0; n < count; n++) {
            const int32_t row = (int32_t)i, sees = mask[n * key_stride] != 0;
            first[n] = sees && row < first[n] ? row : first[n];
            last[n] = sees ? row : last[n];
            seen[n] += sees;
        }
}

/* Whether every key of a head's mask is one run; start.data NULL: writes nothing. */
static int runs_of_head(const fdm_tensor *mask, int64_t b, int64_t h, struct key_row start, struct key_row end) {
    const int64_t rows = mask->shape[2], keys = mask->shape[3], step = tensor_stride(mask, 3);
    const uint8_t *data = (const uint8_t *)tensor_data(mask) + b * tensor_stride(mask, 0) + h * tensor_stride(mask, 1);
    int32_t first[KEYS_AT_ONCE], last[KEYS_AT_ONCE], seen[KEYS_AT_ONCE];
    for (int64_t from = 0; from < keys; from += KEYS_AT_ONCE) {
        const int64_t count = keys - from < KEYS_AT_ONCE ? keys - from : KEYS_AT_ONCE;
        look_at_keys(data + from * step, rows, tensor_stride(mask, 2), step, count, first, last, seen);
        for (int64_t n = 0; n < count; n++) {
            if (seen[n] > 0 && seen[n] != last[n] - first[n] + 1)
                return 0;
            if (!start.data)
                continue;
            start.data[(from + n) * start.stride] = seen[n] > 0 ? first[n] : (int32_t)rows;
            end.data[(from + n) * end.stride] = seen[n] == 0          ? (int32_t)rows
                                                : last[n] == rows - 1 ? INT32_MAX
                                                                      : last[n] + 1;
        }
    }
    return 1;
}

int intervals_from_mask(const fdm_tensor *mask, const fdm_tensor *start, const fdm_tensor *end) {
    const struct key_row none = {0};
    if (start->shape[2] == 0)
        return 1;
    for (int writing = 0; writing < 2; writing++)
        for (int64_t b = 0; b < start->shape[0]; b++)
            for (int64_t h = 0; h < start->shape[1]; h++)
                if (!runs_of_head(mask, b, h, writing ? row_of(start, b, h) : none, writing ? row_of(end, b, h) : none))
                    return 0;
    return 1;
}
