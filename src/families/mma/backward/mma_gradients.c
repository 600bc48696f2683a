/* mma_gradients.c: the workspace and arguments of the family's backward kernels, and the launches around them. */
#include "families/mma/backward/mma_gradients.h"

#include <string.h>

#include "gpu/key_sort.h"

int32_t mma_dbias_kind(const fdm_problem *p) {
    if (!p->needs_dbias)
        return MMA_DBIAS_NONE;
    if (!gpu_bias_rows(p))
        return MMA_DBIAS_KEYS;
    if (p->bias_shape[3] != p->seqlen_k)
        return MMA_DBIAS_ROWS;
    const int own = p->bias_shape[0] == p->batch && p->bias_shape[1] == p->heads && p->bias_shape[3] == p->seqlen_k;
    return own ? MMA_DBIAS_DIRECT : MMA_DBIAS_SUMS;
}

int32_t mma_dbias_constant(const fdm_problem *p) {
    const int32_t kind = mma_dbias_kind(p);
    return kind == MMA_DBIAS_ROWS ? MMA_DBIAS_NONE : kind;
}

int mma_dbias_runs(const fdm_problem *p) {
    const int32_t kind = mma_dbias_kind(p);
    return kind == MMA_DBIAS_KEYS || kind == MMA_DBIAS_SUMS || kind == MMA_DBIAS_ROWS;
}

int mma_dbias_in_turns(const fdm_problem *p) { return p->deterministic && mma_dbias_kind(p) == MMA_DBIAS_SUMS; }

int64_t mma_bias_bytes(const fdm_problem *p) { return p->has_bias ? (int64_t)fdm_dtype_bytes(p->bias_dtype) : 0; }

/* ---- limits ---- */

int mma_folds_grids(const fdm_problem *p) { return p->batch > 65535 || p->heads > 65535; }

/* Bounds of what the launches have: mma_backward_prepare takes 64 rows a block, the main kernels 32 keys or rows at
 * least, mma_backward_combine a row of dK and dV of up to 512 columns, mma_dbias a warp for each element. */
const char *mma_gradients_refusal(const fdm_problem *p) {
    const double heads = (double)p->batch * (double)p->heads, blocks_max = INT32_MAX;
    const double keys = p->varlen ? (double)p->total_k : (double)p->batch * (double)p->seqlen_k;
    const int64_t *shape = p->bias_shape;
    const double biases = (double)shape[0] * (double)shape[1] * (double)shape[2] * (double)shape[3];
    if (heads * (double)(p->seqlen_q / 32 + 4) >= blocks_max)
        return "query rows of all heads are fewer than 2^36";
    if (heads * (double)(p->seqlen_k / 32 + 1) >= blocks_max || keys * (double)p->heads_kv / 2 >= blocks_max)
        return "keys are fewer than 2^36 of all query heads and than 2^32 of all KV heads";
    if (p->needs_dbias && biases / (shape[3] == 1 ? MMA_DBIAS_WARPS : 32 * MMA_DBIAS_WARPS) >= blocks_max)
        return shape[3] == 1 ? "the gradient of a bias that keys share has less than 2^33 elements"
                             : "the bias' gradient has less than 2^38 elements";
    return NULL;
}

/* ---- workspace ---- */

/* Where the arrays of struct mma_backward_arguments lie, in bytes from the workspace's start. */
struct layout {
    int64_t lse, delta, low, dq, dbias, dbias_semaphores, block_mask, semaphores, ticket, order, dk, dv, bytes;
    int64_t rows, arrays, dbias_count, order_stride, key_rows;
};

static int64_t put(struct layout *l, int64_t bytes) {
    const int64_t at = l->bytes;
    l->bytes += gpu_round_up(bytes, 256);
    return at;
}

static int64_t dbias_count(const fdm_problem *p, int32_t shares) {
    const int64_t *shape = p->bias_shape;
    switch (mma_dbias_kind(p)) {
    case MMA_DBIAS_KEYS: return shares * p->batch * p->heads * p->seqlen_k;
    case MMA_DBIAS_SUMS: return shape[0] * shape[1] * shape[2] * shape[3];
    default: return 0;
    }
}

static struct layout lay_out(const fdm_problem *p, const struct mma_workspace_needs *needs) {
    struct layout l = {0};
    l.rows = p->varlen ? mma_backward_begin(p->total_q, p->batch) : gpu_round_up(p->seqlen_q, MMA_BACKWARD_ROW_STEP);
    l.arrays = p->varlen ? p->heads : p->batch * p->heads;
    const int64_t all = l.rows * l.arrays;
    l.lse = put(&l, 4 * all);
    l.delta = put(&l, 4 * all);
    l.low = put(&l, p->has_bias ? 4 * all : 0);
    l.dq = put(&l, 4 * all * needs->dq_columns);
    l.semaphores = put(&l, needs->semaphores ? all / 16 * 4 : 0);
    l.ticket = put(&l, 4);
    l.order_stride = gpu_round_up(p->seqlen_k, KEY_SORT_KEYS);
    l.order = put(&l, needs->ordered_keys ? 4 * p->interval_batch * p->interval_heads * l.order_stride : 0);
    const int64_t dbias_sums = dbias_count(p, needs->dbias_shares);
    l.dbias_count =
        dbias_sums + needs->dbias_blocks * p->bias_shape[0] * p->bias_shape[1] * mma_backward_semaphores(p->seqlen_q);
    l.dbias = put(&l, 4 * l.dbias_count);
    l.dbias_semaphores = l.dbias + 4 * dbias_sums;
    l.key_rows = p->varlen ? p->total_k : p->batch * p->seqlen_k;
    const int64_t parts = needs->group_parts > 1 ? needs->group_parts * p->heads_kv * l.key_rows : 0;
    l.dk = put(&l, 4 * parts * needs->dk_columns);
    l.dv = put(&l, 4 * parts * needs->dv_columns);
    l.block_mask = put(&l, gpu_mask_rows(p) ? block_mask_bytes(p, needs->block_m, needs->block_n) : 0);
    return l;
}

int64_t mma_workspace_bytes(const fdm_problem *p, const struct mma_workspace_needs *needs) {
    return lay_out(p, needs).bytes;
}

/* ---- arguments ---- */

static struct gpu_matrix matrix_of(const struct matrix_view *view) {
    return (struct gpu_matrix){view->data, view->batch, view->row, view->head};
}

void mma_fill_gradients(const struct attention *attention, const struct mma_workspace_needs *needs, char *workspace,
                        struct mma_backward_arguments *a) {
    const fdm_problem *p = attention->problem;
    const struct layout l = lay_out(p, needs);
    const struct row_view *dlse = &attention->dlse;
    const struct score_view *dbias = &attention->dbias;
    const int64_t *shape = p->bias_shape;
    *a = (struct mma_backward_arguments){
        .dout = matrix_of(&attention->dout),
        .dq = matrix_of(&attention->dq),
        .dk = matrix_of(&attention->dk),
        .dv = matrix_of(&attention->dv),
        .dlse = {(float *)(void *)dlse->data, dlse->batch, dlse->head, dlse->row},
        .dbias = {dbias->data, dbias->batch, dbias->head, dbias->row, dbias->key, (int32_t)dbias->group, 0},
        .lse_rows = (float *)(void *)(workspace + l.lse),
        .delta_rows = (float *)(void *)(workspace + l.delta),
        .dq_sums = (float *)(void *)(workspace + l.dq),
        .dbias_sums = (float *)(void *)(workspace + l.dbias),
        .dk_parts = (float *)(void *)(workspace + l.dk),
        .dv_parts = (float *)(void *)(workspace + l.dv),
        .semaphores = needs->semaphores ? (int32_t *)(void *)(workspace + l.semaphores) : NULL,
        .dbias_semaphores = (int32_t *)(void *)(workspace + l.dbias_semaphores),
        .ticket = (int32_t *)(void *)(workspace + l.ticket),
        .order = (const int32_t *)(const void *)(workspace + l.order),
        .order_batch = p->interval_batch == 1 ? 0 : p->interval_heads * l.order_stride,
        .order_head = p->interval_heads == 1 ? 0 : l.order_stride,
        .rows = l.rows,
        .num_row_arrays = l.arrays,
        .dbias_count = l.dbias_count,
        .key_rows = l.key_rows,
        .dbias_batch = shape[0] == 1 ? 0 : shape[1] * shape[2] * shape[3],
        .dbias_head = shape[1] == 1 ? 0 : shape[2] * shape[3],
        .dbias_row = shape[2] == 1 ? 0 : shape[3],
        .dbias_key = shape[3] == 1 ? 0 : 1,
        .dbias_batches = (int32_t)shape[0],
        .dbias_heads = (int32_t)shape[1],
        .dbias_rows = (int32_t)shape[2],
        .dbias_keys = (int32_t)shape[3],
        .dbias_shares = mma_dbias_kind(p) == MMA_DBIAS_KEYS ? needs->dbias_shares : 0,
        .zero_dbias =
            mma_dbias_kind(p) == MMA_DBIAS_DIRECT && (gpu_bounded(p) || p->has_mask || p->has_intervals || p->varlen),
        .group_parts = needs->group_parts > 1 ? needs->group_parts : 1,
        .part_heads = (int32_t)(p->heads / p->heads_kv / (needs->group_parts > 1 ? needs->group_parts : 1)),
        .lse_factor = needs->lse_factor,
        .low_rows = (float *)(void *)(workspace + l.low),
        .dbias_of_rows = mma_dbias_kind(p) == MMA_DBIAS_ROWS,
    };
    gpu_fill_forward(attention, &a->in);
    a->mask_row_bytes = (int32_t)a->in.mask.row; /* these where scores are aligned, whose rows are near */
    a->bias_row_bytes = (int32_t)(a->in.bias.row * mma_bias_bytes(p));
    a->dbias_row_bytes =
        (int32_t)(mma_dbias_kind(p) == MMA_DBIAS_SUMS ? shape[3] * 4 : attention->dbias.row * mma_bias_bytes(p));
    a->in.block_mask = (const uint8_t *)workspace + l.block_mask;
}

/* ---- the kernels before and after ---- */

void mma_rows_request(const fdm_problem *p, const char *entry, int32_t d, int32_t dv, int32_t needs_dq,
                      struct cuda_kernel_request *request) {
    const int32_t dtype = p->dtype == FDM_FLOAT32 ? GPU_FLOAT32 : gpu_dtype(p->dtype);
    const struct cuda_constant constants[] = {
        {"DTYPE", dtype},
        {"HEAD_DIM", d},
        {"HEAD_DIM_V", dv},
        {"ALIGNED", p->aligned},
        {"VARLEN", p->varlen},
        {"NEEDS_DQ", needs_dq},
        {"BIAS", gpu_bias_constant(p)},
        {"FOLDED", mma_folds_grids(p)},
    };
    _Static_assert(sizeof constants / sizeof constants[0] == MMA_ROWS_NUM_CONSTANTS, "one value for each constant");
    const int of_bias = strcmp(entry, "mma_dbias") == 0;
    request->file = of_bias ? "families/mma/backward/mma_dbias.cu" : "families/mma/backward/mma_backward_rows.cu";
    request->entry = entry;
    request->num_constants = MMA_ROWS_NUM_CONSTANTS;
    memcpy(request->constants, constants, sizeof constants);
    request->shared_bytes = 0;
    request->threads = 32 * (of_bias ? MMA_DBIAS_WARPS : MMA_BACKWARD_ROWS_WARPS);
}

fdm_status mma_launch_gradients(const struct cuda_kernel *kernel, int64_t x, int64_t y, int64_t z, uint32_t threads,
                                struct mma_backward_arguments *a, void *stream) {
    a->grid_x = (uint32_t)x;
    a->grid_y = (uint32_t)y;
    struct cuda_launch launch = {.kernel = kernel,
                                 .grid = {gpu_grid(x * y * z), 1, 1},
                                 .threads = threads,
                                 .stream = stream,
                                 .arguments = a,
                                 .arguments_bytes = sizeof *a};
    if (!mma_folds_grids(&(fdm_problem){.batch = a->in.batch, .heads = a->in.heads}))
        launch.grid[0] = a->grid_x, launch.grid[1] = a->grid_y, launch.grid[2] = (uint32_t)z;
    return x > 0 && y > 0 && z > 0 ? cuda_launch(&launch) : FDM_OK;
}

fdm_status mma_launch_prepare(const struct cuda_kernel *kernel, const fdm_problem *p, struct mma_backward_arguments *a,
                              void *stream) {
    const int64_t blocks = gpu_round_up(p->seqlen_q, MMA_BACKWARD_ROW_STEP) / (16 * MMA_BACKWARD_ROWS_WARPS);
    return mma_launch_gradients(kernel, blocks > 1 ? blocks : 1, p->heads, p->batch > 1 ? p->batch : 1,
                                32 * MMA_BACKWARD_ROWS_WARPS, a, stream);
}

fdm_status mma_launch_dbias(const struct cuda_kernel *kernel, struct mma_backward_arguments *a, void *stream) {
    enum { THREADS = 32 * MMA_DBIAS_WARPS };
    const int64_t elements = (int64_t)a->dbias_batches * a->dbias_heads * a->dbias_rows * a->dbias_keys;
    const int64_t threads = a->dbias_shares && a->dbias_keys == 1 ? 32 * elements : elements;
    return mma_launch_gradients(kernel, (threads + THREADS - 1) / THREADS, 1, 1, THREADS, a, stream);
}
