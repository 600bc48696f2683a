/* packed.cuh: where a sequence lies in packed tensors.
 *
 * The host does not see cu_seqlens: they may contradict the tensors. A sequence is cut to the tensor's rows and to the
 * longest that the problem names, so that nothing outside tensors and workspace is read or written. */
#ifndef FDM_PACKED_CUH
#define FDM_PACKED_CUH

#include "cuda/ptx/opaque.cuh"
#include "gpu/cache.cuh"
#include "gpu/forward_params.h"
#include "gpu/problem_constants.h"

/* The first sequence that ends behind a row of packed tensors; `batches` where there is none. */
template <class number>
__device__ __forceinline__ int sequence_behind(const int32_t *cu_seqlens, int batches, number row) {
    int low = 0, high = batches;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (cu_seqlens[middle + 1] > row)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

struct packed {
    int begin, length;
};
__device__ __forceinline__ struct packed find_packed(const int32_t *cu_seqlens, int batch, int total, int longest) {
    int begin = min(max(cu_seqlens[batch], 0), total);
    int length = min(max(min(cu_seqlens[batch + 1], total) - begin, 0), longest);
    opaque_pair(begin, length); /* the compiler would spend registers on what follows from their bounds */
    return {begin, length};
}
__device__ __forceinline__ struct packed find_packed_q(const struct gpu_forward_params &a, int batch) {
    return find_packed(a.cu_seqlens_q, batch, a.total_q, a.seqlen_q);
}
__device__ __forceinline__ struct packed find_packed_k(const struct gpu_forward_params &a, int batch) {
    return find_packed(a.cu_seqlens_k, batch, a.total_k, a.seqlen_k);
}

/* One sequence of the problem. */
struct sequence {
    int batch, seqlen_q, seqlen_k, q_begin, k_begin;
    int diagonal; /* i' = i + diagonal */
};
/* The sequence's rows; of its keys only the number that a dense call has. */
__device__ __forceinline__ struct sequence find_sequence_q(const struct gpu_forward_params &a, int batch) {
    struct sequence s = {batch, a.seqlen_q, a.seqlen_k, 0, 0, 0};
    if (VARLEN) {
        const struct packed q = find_packed_q(a, batch);
        s.seqlen_q = q.length;
        s.q_begin = q.begin;
    }
    if (SEQUSED)
        s.seqlen_q = used_of(a.seqused_q, batch, s.seqlen_q);
    return s;
}
__device__ __forceinline__ struct sequence find_sequence(const struct gpu_forward_params &a, int batch) {
    struct sequence s = find_sequence_q(a, batch);
    if (VARLEN && !CACHE) {
        const struct packed k = find_packed_k(a, batch);
        s.seqlen_k = k.length;
        s.k_begin = k.begin;
    }
    if (CACHE)
        s.seqlen_k = find_cached_keys(a, batch).seqlen_k;
    else if (SEQUSED)
        s.seqlen_k = used_of(a.seqused_k, batch, s.seqlen_k);
    s.diagonal = s.seqlen_k - s.seqlen_q;
    return s;
}

#endif
