/* rows_on_device.c: which way of rank_rows.cu a move allows, its parameters and its launch. */
#include "parallel/rows_on_device.h"

#include "base/error.h"
#include "parallel/rank_rows.h"

void rank_rows_request(int32_t action, int32_t unit, struct cuda_kernel_request *request) {
    *request = (struct cuda_kernel_request){.file = "parallel/rank_rows.cu",
                                            .entry = "rank_rows",
                                            .num_constants = 2,
                                            .constants = {{"ACTION", action}, {"UNIT", unit}},
                                            .threads = RANK_ROWS_THREADS};
}

static struct rank_rows_side side_of(const struct rows_place *place) {
    return (struct rank_rows_side){place->data, place->row, place->batch, place->head};
}

static int64_t bits_of(const struct rows_place *p, const struct move *m) {
    return (int64_t)(uintptr_t)p->data | (m->rows > 1 ? p->row : 0) | (m->batches > 1 ? p->batch : 0) |
           (m->heads > 1 ? p->head : 0);
}

static int32_t unit_of(const struct move *m, int rounds) {
    const int64_t from = bits_of(&m->from, m) | m->width, to = bits_of(&m->to, m);
    if (from % 16 == 0 && to % (rounds ? 8 : 16) == 0)
        return 16;
    if (m->action == MOVE_WIDEN)
        return 2;
    if (m->action != MOVE_COPY || (from | to) % 4 == 0)
        return 4;
    return (from | to) % 2 == 0 ? 2 : 1;
}

static int32_t action_of(const struct move *m) {
    const int half = m->dtype == FDM_FLOAT16;
    switch (m->action) {
    case MOVE_ROUND: return half ? RANK_ROWS_FLOAT16 : RANK_ROWS_BFLOAT16;
    case MOVE_WIDEN: return half ? RANK_ROWS_WIDEN_FLOAT16 : RANK_ROWS_WIDEN_BFLOAT16;
    case MOVE_ADD: return RANK_ROWS_ADD;
    default: return RANK_ROWS_COPY;
    }
}

fdm_status rows_on_device(int32_t device, const struct move *move, void *stream) {
    struct move m = *move;
    struct cuda_kernel_request request;
    if (m.heads > 1 && m.from.head == m.width && m.to.head == move_to_width(&m)) /* they touch */
        m.width *= m.heads, m.heads = 1;
    const int64_t count = m.rows * m.batches * m.heads;
    if (count <= 0 || m.width <= 0)
        return FDM_OK;
    if (count > INT32_MAX || m.width > INT32_MAX)
        return error_set(FDM_ERROR_UNSUPPORTED,
                         "%lld rows of %lld bytes travel at once; CUDA devices take fewer than 2^31 of both",
                         (long long)count, (long long)m.width);
    const int32_t unit = unit_of(&m, m.action == MOVE_ROUND);
    struct rank_rows_params params = {.from = side_of(&m.from),
                                      .to = side_of(&m.to),
                                      .count = (uint32_t)count,
                                      .batches = (uint32_t)m.batches,
                                      .heads = (uint32_t)m.heads,
                                      .units = (uint32_t)(m.width / unit),
                                      .lanes = 1};
    while (params.lanes < params.units && params.lanes < RANK_ROWS_THREADS)
        params.lanes *= 2;
    const uint32_t per_block = RANK_ROWS_THREADS / params.lanes;
    rank_rows_request(action_of(&m), unit, &request);
    return cuda_run(device, &request, (params.count + per_block - 1) / per_block, &params, sizeof params, stream);
}
