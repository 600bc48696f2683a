/* hopper_items.c: the number of items of a problem, and their launch. */
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

void hopper_add_items(struct gpu_launches *l, int32_t order, int32_t num_sms, int32_t items, void *items_begun,
                      const void *params, size_t bytes) {
    gpu_add_launch(l, (struct gpu_launch){.grid = {order == ITEMS_LONGEST || items < num_sms ? items : num_sms},
                                          .early = items_begun == NULL,
                                          .params = params,
                                          .params_bytes = bytes,
                                          .zeros = items_begun,
                                          .zero_bytes = order == ITEMS_DYNAMIC && items_begun ? sizeof(int32_t) : 0});
}
