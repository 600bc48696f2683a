/* mask_plan.c: the public entries of the mask plan that a caller keeps. */
#include "problem/visible_tiles.h"

#include "base/error.h"
#include "base/struct_bytes.h"
#include "gpu/kept_plan_launch.h"
#include "gpu/tile_plan_launch.h"

size_t fdm_mask_plan_bytes(const fdm_problem *problem) {
    return problem && !fdm_problem_validate(problem) && tile_plan_of_all_possible(problem)
               ? (size_t)kept_plan_bytes(problem)
               : 0;
}

static fdm_status check_memory(const fdm_problem *p, const fdm_tile_plan *plan) {
    const size_t needed = fdm_mask_plan_bytes(p);
    if (p->has_cache)
        return error_set(FDM_ERROR_UNSUPPORTED, "tensors have a cache, for which no mask plan is made");
    if (!tile_plan_of_all_possible(p))
        return error_set(FDM_ERROR_UNSUPPORTED, "tensors have too many rows, keys and heads for a mask plan");
    if (!plan->memory || plan->memory_bytes < needed)
        return error_set(FDM_ERROR_WORKSPACE, "plan->memory has %llu bytes; fdm_mask_plan_bytes() says %zu",
                         plan->memory ? (unsigned long long)plan->memory_bytes : 0, needed);
    if ((uintptr_t)plan->memory % 64)
        return error_set(FDM_ERROR_WORKSPACE, "plan->memory starts at an address that is not a multiple of 64");
    return FDM_OK;
}

fdm_status fdm_mask_plan(const fdm_tensors *tensors, const fdm_options *options, fdm_tile_plan *plan, void *stream) {
    fdm_tensors tensors_room;
    fdm_options options_room;
    fdm_tile_plan whole, plan_room;
    fdm_problem problem;
    struct attention attention;
    if (!(tensors = STRUCT_READ(fdm_tensors, tensors, &tensors_room)) ||
        (options && !(options = STRUCT_READ(fdm_options, options, &options_room))) ||
        !STRUCT_READ(fdm_tile_plan, plan, &plan_room))
        return FDM_ERROR_INVALID_ARGUMENT;
    fdm_status status = problem_from_inputs(tensors, options, &problem, &attention);
    if (!status && problem.has_tree)
        status = error_set(FDM_ERROR_UNSUPPORTED, "tree is given; no mask plan is made beside one");
    if (!status && !plan->memory && plan->memory_bytes == 0) {
        whole = (fdm_tile_plan){.memory_bytes = fdm_mask_plan_bytes(&problem)};
        return STRUCT_WRITE(fdm_tile_plan, plan, &whole);
    }
    if (status || (status = check_memory(&problem, plan)))
        return status;
    const struct tile_plan bits = kept_plan_at(&problem, plan->memory);
    const struct mask_plan_extents e = mask_plan_extents_of(&problem);
    if (tensors->q->device.type == FDM_CUDA)
        status = kept_plan_make(&attention, tensors->q->device.index, plan->memory, stream);
    else
        mask_plan_fill(&attention, bits.seen, bits.full);
    if (status)
        return status;
    whole = (fdm_tile_plan){.memory = plan->memory,
                            .memory_bytes = plan->memory_bytes,
                            .device = tensors->q->device,
                            .batches = e.batches,
                            .heads = e.heads,
                            .row_tiles = e.row_tiles,
                            .key_words = e.key_words,
                            .seen = bits.seen,
                            .full = bits.full,
                            .problem = problem};
    return STRUCT_WRITE(fdm_tile_plan, plan, &whole);
}
