/* tree.cuh: the tree of a draft: which of a sequence's last keys its query rows see. */
#ifndef FDM_TREE_CUH
#define FDM_TREE_CUH

#include "gpu/forward_params.h"

/* Whether row `row` of a sequence that begins at row q_begin sees the key of number t in its draft; keys before the
 * draft have negative numbers, and every row sees them. */
__device__ __forceinline__ bool tree_holds(const struct gpu_forward_params &a, int batch, int64_t q_begin, int row,
                                           int t) {
    const struct gpu_tree &tree = a.tree;
    return !TREE || t < 0 ||
           (tree.data[batch * tree.batch + (q_begin + row) * tree.row + t / 32 * tree.word] >> t % 32 & 1);
}

#endif
