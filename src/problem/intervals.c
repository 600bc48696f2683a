/* intervals.c: causal, window, document and prefix masks as key intervals, and intervals out of dense masks. */
#include "base/error.h"

/* Rows are raw; a bound past int32 is as good as the largest int32. */
static int32_t clamp_row(int64_t row) {
    return row > INT32_MAX ? INT32_MAX : row < INT32_MIN ? INT32_MIN : (int32_t)row;
}

static fdm_status check_lengths(int64_t seqlen_q, int64_t seqlen_k, const int32_t *start, const int32_t *end) {
    if (seqlen_q < 0 || seqlen_k < 0 || seqlen_q > INT32_MAX || seqlen_k > INT32_MAX)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "lengths are %lld rows and %lld keys; they must be in 0..%d",
                         (long long)seqlen_q, (long long)seqlen_k, INT32_MAX);
    if (seqlen_k > 0 && (!start || !end))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", start ? "end" : "start");
    return FDM_OK;
}

fdm_status fdm_document_intervals(const int32_t *cu_seqlens, int64_t num_documents, int32_t causal, int32_t *start,
                                  int32_t *end) {
    if (!cu_seqlens || num_documents < 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "cu_seqlens is %s and num_documents is %lld",
                         cu_seqlens ? "given" : "NULL", (long long)num_documents);
    if (cu_seqlens[0] != 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "cu_seqlens starts with %d; it must start with 0", cu_seqlens[0]);
    for (int64_t n = 0; n < num_documents; n++)
        if (cu_seqlens[n + 1] < cu_seqlens[n])
            return error_set(FDM_ERROR_INVALID_ARGUMENT,
                             "cu_seqlens falls from %d to %d at index %lld; it must not fall", cu_seqlens[n],
                             cu_seqlens[n + 1], (long long)n + 1);
    fdm_status status = check_lengths(0, cu_seqlens[num_documents], start, end);
    if (status)
        return status;
    for (int64_t n = 0; n < num_documents; n++)
        for (int32_t j = cu_seqlens[n]; j < cu_seqlens[n + 1]; j++) {
            start[j] = causal ? j : cu_seqlens[n];
            end[j] = cu_seqlens[n + 1];
        }
    return FDM_OK;
}

fdm_status fdm_window_intervals(int64_t seqlen_q, int64_t seqlen_k, int32_t causal, int64_t window_left,
                                int64_t window_right, int32_t *start, int32_t *end) {
    fdm_status status = check_lengths(seqlen_q, seqlen_k, start, end);
    if (status)
        return status;
    if (window_left < -1 || window_right < -1)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "window is (%lld, %lld); each side must be >= 0, or -1 for unbounded", (long long)window_left,
                         (long long)window_right);
    if (causal)
        window_right = 0;
    /* Past either length a window is unbounded; clamped so that sums fit. */
    int64_t unbounded = seqlen_q + seqlen_k;
    window_left = window_left < 0 || window_left > unbounded ? unbounded : window_left;
    int no_right = window_right < 0 || window_right > unbounded;
    for (int64_t j = 0; j < seqlen_k; j++) {
        int64_t row = j - (seqlen_k - seqlen_q);
        start[j] = no_right ? 0 : clamp_row(row - window_right);
        end[j] = window_left == unbounded ? INT32_MAX : clamp_row(row + window_left + 1);
    }
    return FDM_OK;
}

fdm_status fdm_prefix_intervals(int64_t seqlen_q, int64_t seqlen_k, int64_t prefix, int32_t *start, int32_t *end) {
    fdm_status status = check_lengths(seqlen_q, seqlen_k, start, end);
    if (status)
        return status;
    if (prefix < 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "prefix is %lld; it must be >= 0", (long long)prefix);
    for (int64_t j = 0; j < seqlen_k; j++) {
        start[j] = j < prefix ? 0 : clamp_row(j - (seqlen_k - seqlen_q));
        end[j] = INT32_MAX;
    }
    return FDM_OK;
}

/* The rows that see a key, when they are one run: first <= i < last, first == last when none does. 0 when they are not.
 */
static int one_run(const uint8_t *column, int64_t rows, int64_t stride, int64_t *first, int64_t *last) {
    int64_t i = 0;
    while (i < rows && !column[i * stride])
        i++;
    *first = i;
    while (i < rows && column[i * stride])
        i++;
    *last = i;
    while (i < rows && !column[i * stride])
        i++;
    return i >= rows;
}

fdm_status fdm_intervals_from_mask(const uint8_t *mask, int64_t seqlen_q, int64_t seqlen_k, int64_t row_stride,
                                   int64_t key_stride, int32_t *start, int32_t *end, int32_t *exact) {
    fdm_status status = check_lengths(seqlen_q, seqlen_k, start, end);
    if (status)
        return status;
    if (!exact || (!mask && seqlen_q > 0 && seqlen_k > 0))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", exact ? "mask" : "exact");
    int64_t first, last;
    *exact = 0;
    for (int64_t j = 0; j < seqlen_k; j++)
        if (!one_run(mask + j * key_stride, seqlen_q, row_stride, &first, &last))
            return FDM_OK;
    *exact = 1;
    for (int64_t j = 0; j < seqlen_k; j++) {
        one_run(mask + j * key_stride, seqlen_q, row_stride, &first, &last);
        start[j] = (int32_t)first;
        end[j] = last == seqlen_q && first < last ? INT32_MAX : (int32_t)last;
    }
    return FDM_OK;
}
