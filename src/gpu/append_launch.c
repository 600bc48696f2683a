/* append_launch.c: append.cu on the host: its workspace, constants, parameters and launch. */
#include "gpu/append_launch.h"

#include "gpu/gpu_family.h"

static int64_t bytes_of(const fdm_problem *p) { return fdm_dtype_bytes(p->dtype); }

/* Elements of a turned row of one head: the next begins at a multiple of 16 bytes. */
static int64_t depth_of(const fdm_problem *p) { return gpu_round_up(p->head_dim, 16 / bytes_of(p)); }

static int64_t query_rows(const fdm_problem *p) {
    return !p->rotary_dim ? 0 : p->varlen ? p->total_q : p->batch * p->seqlen_q;
}

int64_t append_workspace_bytes(const fdm_problem *p) {
    if (!append_precedes(p) || !p->rotary_dim)
        return 0;
    return gpu_round_up((query_rows(p) * p->heads + p->new_rows * p->heads_kv) * depth_of(p) * bytes_of(p), 64);
}

/* Pieces of 16 bytes hold dims of one kind only, and whole pairs where two neighbours are one. */
static int in_pieces(const fdm_problem *p) {
    const int64_t unit = 16 / bytes_of(p);
    return p->aligned && p->head_dim % unit == 0 && p->head_dim_v % unit == 0 && p->rotary_dim % (2 * unit) == 0;
}

int32_t append_rotary_constant(const fdm_problem *p) {
    return !p->rotary_dim ? APPEND_PLAIN : p->rotary_interleaved ? APPEND_INTERLEAVED : APPEND_HALVES;
}

void append_request(const fdm_problem *p, struct cuda_kernel_request *request) {
    gpu_set_problem_constants(request, p, GPU_ALIKE_ALL & ~(GPU_ALIKE_DTYPE | GPU_ALIKE_VARLEN | GPU_ALIKE_SEQUSED));
    GPU_ADD_CONSTANTS(request, APPEND_CONSTANTS, .VECTOR = in_pieces(p), .ROTARY = append_rotary_constant(p));
    request->file = "gpu/append.cu";
    request->entry = "cache_append";
    request->shared_bytes = 0;
    request->threads = APPEND_THREADS;
}

static struct gpu_matrix matrix_of(const struct matrix_view *view) {
    return (struct gpu_matrix){view->data, view->batch, view->row, view->head};
}
static struct gpu_indices indices_of(const struct index_view *view) {
    return (struct gpu_indices){view->data, view->row, view->column, view->bytes, 0};
}

static fdm_status launch(int32_t device, const struct attention *attention, const struct matrix_view *q_to,
                         const struct matrix_view *k_to, const struct index_view *slots, void *stream) {
    const fdm_problem *p = attention->problem;
    struct append_params arguments = {.q_to = matrix_of(q_to),
                                      .k_to = matrix_of(k_to),
                                      .positions = indices_of(&attention->cache.rotary.positions),
                                      .slots = indices_of(slots),
                                      .new_rows = p->new_rows,
                                      .query_rows = attention->q.data ? query_rows(p) : 0};
    gpu_fill_forward(attention, &arguments.in);
    if (arguments.new_rows + arguments.query_rows == 0)
        return FDM_OK;
    struct cuda_kernel_request request;
    append_request(p, &request);
    return cuda_run(device, &request, gpu_grid(arguments.new_rows + arguments.query_rows), &arguments, sizeof arguments,
                    stream);
}

fdm_status append_before(int32_t device, const struct attention *attention, char *workspace, void *stream,
                         struct attention *turned) {
    const fdm_problem *p = attention->problem;
    const int64_t depth = depth_of(p), q_row = p->heads * depth, k_row = p->heads_kv * depth;
    struct cache_view *c = &turned->cache;
    *turned = *attention;
    if (p->rotary_dim)
        turned->q = (struct matrix_view){workspace, p->varlen ? 0 : p->seqlen_q * q_row, q_row, depth};
    if (p->rotary_dim && p->new_rows)
        c->k_new =
            (struct matrix_view){workspace + query_rows(p) * q_row * bytes_of(p), c->seqlen_new * k_row, k_row, depth};
    const struct matrix_view none = {0};
    return launch(device, attention, p->rotary_dim ? &turned->q : &none, p->rotary_dim ? &c->k_new : &none,
                  &(struct index_view){0}, stream);
}

fdm_status append_alone(int32_t device, const struct attention *attention, const struct index_view *slots,
                        void *stream) {
    return launch(device, attention, &attention->out, &(struct matrix_view){0}, slots, stream);
}
