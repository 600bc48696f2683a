/* lengths.c: how many rows and keys each sequence of a call has, and where they lie. */
#include "problem/lengths.h"

#include "base/error.h"
#include "problem/kv_cache.h"
#include "problem/tensor.h"

static int64_t used_of(const struct index_view *used, int64_t b, int64_t most) {
    const int64_t n = used->data ? cache_index(used, b, 0) : most;
    return n < 0 ? 0 : n < most ? n : most;
}

struct sequence attention_sequence(const struct attention *attention, int64_t b) {
    const fdm_problem *problem = attention->problem;
    struct sequence s = {.seqlen_q = problem->seqlen_q, .seqlen_k = problem->seqlen_k};
    const int32_t *q = attention->cu_seqlens_q, *k = attention->cu_seqlens_k;
    if (q) {
        s.seqlen_q = q[b + 1] - q[b];
        s.q_begin = q[b];
    }
    if (k) {
        s.seqlen_k = k[b + 1] - k[b];
        s.k_begin = k[b];
    }
    s.seqlen_q = used_of(&attention->seqused_q, b, s.seqlen_q);
    if (problem->has_cache)
        cache_sequence(attention, b, &s);
    else
        s.seqlen_k = used_of(&attention->seqused_k, b, s.seqlen_k);
    return s;
}

fdm_status lengths_check_cu_seqlens(const fdm_tensor *tensor, const char *name, int64_t batch, int64_t total,
                                    int64_t *longest) {
    const int64_t offsets[1] = {batch + 1};
    fdm_status status = tensor_check(tensor, name, 1, TENSOR_INPUT, 1);
    if (!status)
        status = tensor_check_as(tensor, name, 1, TENSOR_INPUT, FDM_INT32, offsets, NULL, NULL);
    *longest = 0;
    if (status || tensor->device.type == FDM_CUDA)
        return status;
    const int32_t *cu = (const int32_t *)tensor_data(tensor);
    if (cu[0] < 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s starts with %d; it must start with 0 or above", name, cu[0]);
    for (int64_t b = 0; b < batch; b++) {
        if (cu[b + 1] < cu[b])
            return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s falls from %d to %d at index %lld; it must not fall", name,
                             cu[b], cu[b + 1], (long long)b + 1);
        *longest = cu[b + 1] - cu[b] > *longest ? cu[b + 1] - cu[b] : *longest;
    }
    if (cu[batch] > total)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s ends with %d; the packed tensors have only %lld rows", name,
                         cu[batch], (long long)total);
    return FDM_OK;
}

static fdm_status check_longest(const fdm_tensors *t, const fdm_options *o, fdm_problem *p, int64_t longest_q,
                                int64_t longest_k) {
    const int64_t keys = t->cache ? 0 : p->total_k;
    if (t->q->device.type == FDM_CUDA && ((!o->max_seqlen_q && p->total_q) || (!o->max_seqlen_k && keys)))
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "max_seqlen_%s is 0; it is needed where cu_seqlens are on a CUDA device, since reading them "
                         "would wait for the device",
                         o->max_seqlen_q || !p->total_q ? "k" : "q");
    p->seqlen_q = o->max_seqlen_q ? o->max_seqlen_q : longest_q;
    if (!t->cache)
        p->seqlen_k = o->max_seqlen_k ? o->max_seqlen_k : longest_k;
    if (p->seqlen_q < longest_q || p->seqlen_k < longest_k)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "max_seqlen_%s is %lld, but the longest sequence has %lld rows",
                         p->seqlen_q < longest_q ? "q" : "k",
                         (long long)(p->seqlen_q < longest_q ? p->seqlen_q : p->seqlen_k),
                         (long long)(p->seqlen_q < longest_q ? longest_q : longest_k));
    return FDM_OK;
}

static fdm_status describe_varlen(const fdm_tensors *t, const fdm_options *o, fdm_problem *p, struct attention *a) {
    if (!t->cu_seqlens_q || (!t->cu_seqlens_k && !t->cache))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "cu_seqlens_%s is missing; a packed call needs both",
                         t->cu_seqlens_q ? "k" : "q");
    fdm_status status = tensor_check(t->cu_seqlens_q, "cu_seqlens_q", 1, TENSOR_INPUT, 1);
    if (status)
        return status;
    if (t->cu_seqlens_q->shape[0] < 1)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "cu_seqlens_q is empty; it has batch + 1 elements");
    p->batch = t->cu_seqlens_q->shape[0] - 1;
    p->total_q = t->q->shape[0];
    p->total_k = t->cache ? 0 : t->k->shape[0];
    int64_t longest_q, longest_k = 0;
    status = lengths_check_cu_seqlens(t->cu_seqlens_q, "cu_seqlens_q", p->batch, p->total_q, &longest_q);
    if (!status && !t->cache)
        status = lengths_check_cu_seqlens(t->cu_seqlens_k, "cu_seqlens_k", p->batch, p->total_k, &longest_k);
    if (status || (status = check_longest(t, o, p, longest_q, longest_k)))
        return status;
    a->cu_seqlens_q = (const int32_t *)tensor_data(t->cu_seqlens_q);
    a->cu_seqlens_k = t->cache ? NULL : (const int32_t *)tensor_data(t->cu_seqlens_k);
    return FDM_OK;
}

static fdm_status describe_seqused(const fdm_tensors *t, fdm_problem *p, struct attention *a) {
    const int64_t shape[1] = {p->batch};
    fdm_status status = cache_indices(t->seqused_q, "seqused_q", 1, shape, 0, t->q, &a->seqused_q);
    if (!status)
        status = cache_indices(t->seqused_k, "seqused_k", 1, shape, 0, t->q, &a->seqused_k);
    p->has_seqused_q = t->seqused_q != NULL;
    p->has_seqused_k = t->seqused_k != NULL;
    return status;
}

fdm_status lengths_describe(const fdm_tensors *t, const fdm_options *o, fdm_problem *p, struct attention *a) {
    const fdm_status status = p->varlen ? describe_varlen(t, o, p, a) : FDM_OK;
    return status ? status : describe_seqused(t, p, a);
}
