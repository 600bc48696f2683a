/* packed.cuh: where a sequence lies in packed tensors.
 *
 * The host does not see cu_seqlens: they may contradict the tensors. A sequence is cut to the tensor's rows and to the
 * longest that the problem names, so that nothing outside tensors and workspace is read or written. */
#ifndef FDM_PACKED_CUH
#define FDM_PACKED_CUH

#include "cuda/ptx/opaque.cuh"
#include "gpu/forward_params.h"

struct packed {
    int begin, length;
};
__device__ __forceinline__ struct packed find_packed(const int32_t *cu_seqlens, int batch, int total, int longest) {
    int begin = min(max(cu_seqlens[batch], 0), total);
    int length = min(max(min(cu_seqlens[batch + 1], total) - begin, 0), longest);
    opaque_pair(begin, length); /* plain numbers: what follows from their bounds would cost registers */
    return {begin, length};
}
__device__ __forceinline__ struct packed find_packed_q(const struct gpu_forward_params &a, int batch) {
    return find_packed(a.cu_seqlens_q, batch, a.total_q, a.seqlen_q);
}
__device__ __forceinline__ struct packed find_packed_k(const struct gpu_forward_params &a, int batch) {
    return find_packed(a.cu_seqlens_k, batch, a.total_k, a.seqlen_k);
}

#endif
