/* hopper_items.c: how many items a problem has, and their launch. */
#include "families/hopper/pipeline/hopper_items.h"

int64_t hopper_row_blocks(const fdm_problem *problem, int32_t packed, int32_t block_m) {
    return (problem->seqlen_q * packed + block_m - 1) / block_m;
}

int64_t hopper_all_blocks(const fdm_problem *problem, int32_t packed, int32_t block_m) {
    return hopper_row_blocks(problem, packed, block_m) * (problem->heads / packed) * problem->batch;
}

double hopper_pairs(const fdm_problem *p) {
    const int64_t rows_q = p->varlen ? p->total_q : p->seqlen_q * p->batch;
    return (double)rows_q * (double)p->seqlen_k * (double)p->heads * (gpu_bounded(p) ? 0.5 : 1);
}

int64_t hopper_count_bytes(int32_t order) { return order == ITEMS_DYNAMIC ? HOPPER_COUNT_BYTES : 0; }

fdm_status hopper_launch_items(const fdm_plan *plan, const struct cuda_kernel *kernel, int32_t threads, int32_t order,
                               int32_t num_sms, int32_t items, void *items_begun, const void *params, size_t bytes,
                               void *stream) {
    const fdm_status status = order == ITEMS_DYNAMIC && items_begun
                                  ? cuda_memory_fill_async(plan->device.index, items_begun, 0, sizeof(int32_t), stream)
                                  : FDM_OK;
    const struct cuda_launch launch = {
        .kernel = kernel,
        .grid = {(uint32_t)(order == ITEMS_LONGEST || items < num_sms ? items : num_sms), 1, 1},
        .threads = (uint32_t)threads,
        .programmatic_launch = items_begun == NULL,
        .stream = stream,
        .arguments = params,
        .arguments_bytes = bytes};
    return status ? status : cuda_launch(&launch);
}
