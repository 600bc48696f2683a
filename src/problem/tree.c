/* tree.c: checks the tree of a draft, and resolves it to an address and strides. */
#include "problem/tree.h"

#include "base/error.h"
#include "problem/tensor.h"

fdm_status tree_validate(const fdm_problem *p) {
    if (p->has_tree != 0 && p->has_tree != 1)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "has_tree is %d; it must be 0 or 1", p->has_tree);
    if (p->has_tree && p->causal)
        return error_set(
            FDM_ERROR_INVALID_ARGUMENT,
            "tree is given beside a causal mask; its bits say what the rows of a draft see, so causal must "
            "be 0");
    if (p->has_tree && p->pass == FDM_BACKWARD)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "tree is given to a backward call; only forward calls take it");
    return FDM_OK;
}

fdm_status tree_resolve(const fdm_tensors *t, fdm_problem *p, struct attention *a) {
    static const uint32_t nothing;
    const fdm_tensor *tree = t->tree;
    if (!tree)
        return FDM_OK;
    const int32_t packed = p->varlen ? 1 : 0;
    const int64_t shape[3] = {p->batch, packed ? p->total_q : p->seqlen_q, (p->seqlen_q + 31) / 32};
    fdm_status status = tensor_check(tree, "tree", 3 - packed, TENSOR_INPUT, 0);
    if (!status)
        status = tensor_expect_dtype(tree, "tree", fdm_dtype_of(tree) == FDM_INT32 ? FDM_INT32 : FDM_UINT32);
    if (!status)
        status = tensor_expect_shape(tree, "tree", shape + packed);
    p->has_tree = 1;
    if (status || (status = tree_validate(p)))
        return status;
    const char *data = tensor_data(tree);
    a->tree = (struct tree_view){.data = data ? (const uint32_t *)(const void *)data : &nothing,
                                 .batch = packed ? 0 : tensor_stride(tree, 0),
                                 .row = tensor_stride(tree, 1 - packed),
                                 .word = tensor_stride(tree, 2 - packed)};
    return FDM_OK;
}
