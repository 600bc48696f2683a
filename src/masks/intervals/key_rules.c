/* key_rules.c: checks documents, prefixes and windows, and makes their key intervals on the CPU. */
#include "masks/intervals/key_rules.h"

#include <stddef.h>

#include "base/error.h"
#include "masks/intervals/key_intervals.h"
#include "problem/lengths.h"
#include "problem/tensor.h"

/* ---- checks ---- */

/* One rule: int32, of `ndim` axes that are 1 or of the extents; that of heads (-1: there is none) may divide it. */
static fdm_status resolve(const fdm_tensor *tensor, const char *name, int32_t ndim, const int64_t *extents,
                          int32_t of_heads, const fdm_tensor *start) {
    fdm_status status = tensor_check(tensor, name, ndim, TENSOR_INPUT, 0);
    if (status || (status = tensor_check_device(tensor, name, start, "start")))
        return status;
    if (fdm_dtype_of(tensor) != FDM_INT32)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is %s; it must be int32", name,
                         fdm_dtype_name(fdm_dtype_of(tensor)));
    for (int32_t axis = 0; axis < ndim; axis++) {
        const int64_t extent = tensor->shape[axis];
        const int divides = axis == of_heads && extent > 0 && extents[axis] % extent == 0;
        if (extent != extents[axis] && !divides && (extent != 1 || axis + 1 == ndim)) {
            char have[96], want[96];
            return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s has shape %s; it must be %s", name,
                             tensor_shape_text(have, sizeof have, tensor->shape, ndim),
                             tensor_shape_text(want, sizeof want, extents, ndim));
        }
    }
    return FDM_OK;
}

static const int32_t *numbers(const fdm_tensor *tensor) {
    static const int32_t none; /* an empty tensor may have no address; a rule that is present has one */
    const int32_t *data = (const int32_t *)(const void *)tensor_data(tensor);
    return data ? data : &none;
}

/* On the CPU: ids that fall are an error. */
static fdm_status check_rising(const struct key_rules *r, const fdm_tensor *ids) {
    for (int64_t b = 0; b < ids->shape[0]; b++)
        for (int64_t j = 1; j < r->keys; j++) {
            const int32_t *id = r->ids.data + b * r->ids.batch + j * r->ids.key;
            if (id[0] < id[-r->ids.key])
                return error_set(FDM_ERROR_INVALID_ARGUMENT,
                                 "document_ids fall from %d to %d at index [%lld, %lld]; they must not fall",
                                 id[-r->ids.key], id[0], (long long)b, (long long)j);
        }
    return FDM_OK;
}

static fdm_status resolve_documents(const fdm_tensor *ids, const fdm_tensor *start, struct key_rules *out) {
    if (out->cu_seqlens_k)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "document_ids are given beside cu_seqlens, which say the documents");
    const int64_t extents[2] = {out->batch, out->keys};
    const fdm_status status = resolve(ids, "document_ids", 2, extents, -1, start);
    if (status)
        return status;
    if (out->seqlen_q != out->keys)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "seqlen_q is %lld and there are %lld keys; with document_ids they must be the same",
                         (long long)out->seqlen_q, (long long)out->keys);
    out->ids = (struct key_rule_view){numbers(ids), tensor_stride(ids, 0), 0, tensor_stride(ids, 1), 1};
    return ids->device.type == FDM_CPU ? check_rising(out, ids) : FDM_OK;
}

/* Of each sequence, or one that all share. */
static fdm_status resolve_prefixes(const fdm_tensor *prefixes, const fdm_tensor *start, struct key_rules *out) {
    const int shared = prefixes->ndim == 1 && prefixes->shape && prefixes->shape[0] == 1;
    const int64_t extent = shared ? 1 : out->batch;
    const fdm_status status = resolve(prefixes, "prefix_lengths", 1, &extent, -1, start);
    if (!status)
        out->prefixes = (struct key_rule_view){numbers(prefixes), tensor_stride(prefixes, 0), 0, 0, 1};
    return status;
}

static fdm_status resolve_windows(const fdm_tensor *windows, const fdm_tensor *start, struct key_rules *out) {
    const int64_t extents[2] = {out->heads, 2};
    const fdm_status status = resolve(windows, "window_sizes", 2, extents, 0, start);
    if (status)
        return status;
    out->windows = (struct key_rule_view){numbers(windows), 0, tensor_stride(windows, 0), tensor_stride(windows, 1),
                                          out->heads / windows->shape[0]};
    for (int64_t n = 0; windows->device.type == FDM_CPU && n < 2 * windows->shape[0]; n++) {
        const int32_t side = out->windows.data[n / 2 * out->windows.head + n % 2 * out->windows.key];
        if (side < -1)
            return error_set(FDM_ERROR_INVALID_ARGUMENT,
                             "window_sizes holds %d; each side must be >= 0, or -1 for unbounded", side);
    }
    return FDM_OK;
}

/* Intervals that are given beside the rules. */
static fdm_status resolve_given(const fdm_key_rules *rules, const fdm_tensor *start, struct key_rules *out) {
    if (!rules->interval_start || !rules->interval_end)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "interval_%s is missing; key intervals are a pair",
                         rules->interval_start ? "end" : "start");
    const int32_t packed = out->cu_seqlens_k != NULL;
    const int64_t extents[3] = {out->batch, out->heads, out->keys};
    const fdm_tensor *pair[2] = {rules->interval_start, rules->interval_end};
    struct key_rule_view *views[2] = {&out->start, &out->end};
    for (int n = 0; n < 2; n++) {
        const fdm_status status =
            resolve(pair[n], n ? "interval_end" : "interval_start", 3 - packed, extents + packed, 1 - packed, start);
        if (status)
            return status;
        *views[n] = (struct key_rule_view){numbers(pair[n]), packed ? 0 : tensor_stride(pair[n], 0),
                                           tensor_stride(pair[n], 1 - packed), tensor_stride(pair[n], 2 - packed),
                                           out->heads / pair[n]->shape[1 - packed]};
    }
    return FDM_OK;
}

static fdm_status resolve_offsets(const fdm_key_rules *rules, const fdm_tensor *start, struct key_rules *out) {
    if (!rules->cu_seqlens_q || !rules->cu_seqlens_k)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "cu_seqlens_%s is missing; packed sequences need both",
                         rules->cu_seqlens_q ? "k" : "q");
    const fdm_tensor *pair[2] = {rules->cu_seqlens_q, rules->cu_seqlens_k};
    const int32_t **views[2] = {&out->cu_seqlens_q, &out->cu_seqlens_k};
    for (int n = 0; n < 2; n++) {
        const char *name = n ? "cu_seqlens_k" : "cu_seqlens_q";
        fdm_status status = tensor_check(pair[n], name, 1, TENSOR_INPUT, 1);
        if (!status && pair[n]->shape[0] < 1)
            status = error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is empty; it has batch + 1 elements", name);
        if (!status)
            status = resolve(pair[n], name, 1, pair[0]->shape, -1, start);
        if (status)
            return status;
        *views[n] = numbers(pair[n]);
    }
    out->batch = pair[0]->shape[0] - 1;
    int64_t longest;
    return lengths_check_cu_seqlens(pair[1], "cu_seqlens_k", out->batch, out->keys, &longest);
}

/* start and end of one shape, [B, h, Sk], packed [h, total_k]. */
static fdm_status resolve_outputs(int32_t packed, const fdm_tensor *start, const fdm_tensor *end,
                                  struct key_rules *out) {
    const int32_t ndim = 3 - packed;
    fdm_status status = tensor_check(start, "start", ndim, TENSOR_OUTPUT, 0);
    if (status ||
        (status = tensor_check_as(start, "start", ndim, TENSOR_OUTPUT, FDM_INT32, start->shape, NULL, NULL)) ||
        (status = tensor_check_as(end, "end", ndim, TENSOR_OUTPUT, FDM_INT32, start->shape, start, "start")) ||
        (status = tensor_check_device_type(start, "start")))
        return status;
    out->batch = packed ? 1 : start->shape[0];
    out->heads = start->shape[1 - packed];
    out->keys = start->shape[2 - packed];
    if (out->keys > INT32_MAX)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "start has %lld keys; at most 2^31 - 1 are supported",
                         (long long)out->keys);
    return FDM_OK;
}

fdm_status key_rules_resolve(const fdm_key_rules *rules, int64_t seqlen_q, const fdm_tensor *start,
                             const fdm_tensor *end, struct key_rules *out) {
    const int32_t packed = rules->cu_seqlens_q || rules->cu_seqlens_k;
    *out = (struct key_rules){.seqlen_q = seqlen_q};
    if (!start || !end)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", start ? "end" : "start");
    if (!packed && (seqlen_q < 0 || seqlen_q > INT32_MAX))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "seqlen_q is %lld; it must be in 0..%d", (long long)seqlen_q,
                         INT32_MAX);
    fdm_status status = resolve_outputs(packed, start, end, out);
    if (!status && packed)
        status = resolve_offsets(rules, start, out);
    if (!status && rules->document_ids)
        status = resolve_documents(rules->document_ids, start, out);
    if (!status && rules->prefix_lengths)
        status = resolve_prefixes(rules->prefix_lengths, start, out);
    if (!status && rules->window_sizes)
        status = resolve_windows(rules->window_sizes, start, out);
    if (!status && (rules->interval_start || rules->interval_end))
        status = resolve_given(rules, start, out);
    const struct named_tensor all[] = {{"document_ids", rules->document_ids, 0, 0},
                                       {"prefix_lengths", rules->prefix_lengths, 0, 0},
                                       {"window_sizes", rules->window_sizes, 0, 0},
                                       {"interval_start", rules->interval_start, 0, 0},
                                       {"interval_end", rules->interval_end, 0, 0},
                                       {"cu_seqlens_q", rules->cu_seqlens_q, 0, 0},
                                       {"cu_seqlens_k", rules->cu_seqlens_k, 0, 0},
                                       {"start", start, 1, 0},
                                       {"end", end, 1, 0}};
    return status ? status : tensors_check_apart(all, sizeof all / sizeof all[0]);
}

/* ---- the CPU ---- */

/* Rows first <= i < last see a key. */
struct rows {
    int64_t first, last;
};

static void narrow(struct rows *rows, int64_t first, int64_t last) {
    rows->first = first > rows->first ? first : rows->first;
    rows->last = last < rows->last ? last : rows->last;
}

/* Of key j of a sequence, by its prefix and the window of head h; shift: keys less rows of the sequence. */
static void narrow_by_place(const struct key_rules *r, int64_t b, int64_t h, int64_t j, int64_t shift,
                            struct rows *rows) {
    if (r->prefixes.data && j >= r->prefixes.data[b * r->prefixes.batch])
        narrow(rows, j - shift, INT64_MAX);
    if (!r->windows.data)
        return;
    const int32_t *window = r->windows.data + h / r->windows.group * r->windows.head;
    const int64_t left = window[0], right = window[r->windows.key];
    if (right >= 0)
        narrow(rows, j - shift - right, INT64_MAX);
    if (left >= 0)
        narrow(rows, 0, j - shift + left + 1);
}

static void write_key(const struct key_rules *r, int64_t b, int64_t h, int64_t at, struct rows rows,
                      const fdm_tensor *start, const fdm_tensor *end) {
    if (r->start.data)
        narrow(&rows, r->start.data[b * r->start.batch + h / r->start.group * r->start.head + at * r->start.key],
               r->end.data[b * r->end.batch + h / r->end.group * r->end.head + at * r->end.key]);
    const fdm_tensor *pair[2] = {start, end};
    const int32_t values[2] = {clamp_row(rows.first), clamp_row(rows.last)}, packed = r->cu_seqlens_k != NULL;
    for (int n = 0; n < 2; n++) {
        int32_t *data = (int32_t *)(void *)tensor_data(pair[n]);
        const int64_t batch = packed ? 0 : b * tensor_stride(pair[n], 0);
        data[batch + h * tensor_stride(pair[n], 1 - packed) + at * tensor_stride(pair[n], 2 - packed)] = values[n];
    }
}

/* Keys of documents in turn: each document's last key is looked for once. */
static void dense_on_cpu(const struct key_rules *r, const fdm_tensor *start, const fdm_tensor *end) {
    for (int64_t n = 0; n < r->batch * r->heads; n++) {
        const int64_t b = n / r->heads, h = n % r->heads;
        const int32_t *ids = r->ids.data ? r->ids.data + b * r->ids.batch : NULL;
        struct rows document = {INT32_MIN, INT32_MAX};
        for (int64_t j = 0; j < r->keys; j++) {
            if (ids && (j == 0 || ids[j * r->ids.key] != ids[(j - 1) * r->ids.key])) {
                document = (struct rows){j, j + 1};
                while (document.last < r->keys && ids[document.last * r->ids.key] == ids[j * r->ids.key])
                    document.last++;
            }
            struct rows rows = document;
            narrow_by_place(r, b, h, j, r->keys - r->seqlen_q, &rows);
            write_key(r, b, h, j, rows, start, end);
        }
    }
}

static void packed_on_cpu(const struct key_rules *r, const fdm_tensor *start, const fdm_tensor *end) {
    const int32_t *q = r->cu_seqlens_q, *k = r->cu_seqlens_k;
    for (int64_t h = 0; h < r->heads; h++) {
        int64_t b = 0;
        for (int64_t at = 0; at < r->keys; at++) {
            while (b < r->batch && at >= k[b + 1])
                b++;
            struct rows rows = {INT32_MIN, INT32_MAX};
            const int of_none = b == r->batch || at < k[b];
            if (of_none)
                rows = (struct rows){INT32_MAX, INT32_MIN};
            else
                narrow_by_place(r, b, h, at - k[b], (int64_t)(k[b + 1] - k[b]) - (q[b + 1] - q[b]), &rows);
            write_key(r, b, h, at, rows, start, end);
        }
    }
}

void key_rules_on_cpu(const struct key_rules *r, const fdm_tensor *start, const fdm_tensor *end) {
    if (r->cu_seqlens_k)
        packed_on_cpu(r, start, end);
    else
        dense_on_cpu(r, start, end);
}
