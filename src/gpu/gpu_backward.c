/* gpu_backward.c: the workspace and parameters of backward kernels, and the launches around them. */
#include "gpu/gpu_backward.h"

#include "gpu/key_sort.h"
#include "gpu/tile_plan_launch.h"

int32_t gpu_dbias_kind(const fdm_problem *p) {
    if (!p->needs_dbias)
        return GPU_DBIAS_NONE;
    if (!gpu_bias_rows(p))
        return GPU_DBIAS_KEYS;
    if (p->bias_shape[3] != p->seqlen_k)
        return GPU_DBIAS_ROWS;
    const int own = p->bias_shape[0] == p->batch && p->bias_shape[1] == p->heads && p->bias_shape[3] == p->seqlen_k;
    return own ? GPU_DBIAS_DIRECT : GPU_DBIAS_SUMS;
}

int32_t gpu_dbias_constant(const fdm_problem *p) {
    const int32_t kind = gpu_dbias_kind(p);
    return kind == GPU_DBIAS_ROWS ? GPU_DBIAS_NONE : kind;
}

int gpu_makes_dq(const fdm_problem *p) {
    const int32_t kind = gpu_dbias_kind(p);
    return p->needs_dq || kind == GPU_DBIAS_DIRECT || kind == GPU_DBIAS_SUMS;
}
int gpu_makes_dk(const fdm_problem *p) { return p->needs_dk || gpu_dbias_kind(p) == GPU_DBIAS_KEYS; }

int gpu_dbias_in_turns(const fdm_problem *p) { return p->deterministic && gpu_dbias_kind(p) == GPU_DBIAS_SUMS; }

static int64_t bias_bytes(const fdm_problem *p) { return p->has_bias ? (int64_t)fdm_dtype_bytes(p->bias_dtype) : 0; }

/* ---- limits ---- */

int gpu_folds_grids(const fdm_problem *p) { return p->batch > 65535 || p->heads > 65535; }

int gpu_backward_leaves_sums(const fdm_problem *p, int32_t group_parts) { return group_parts > 1 || p->dkv_float32; }

/* Bounds of what the launches have: backward_prepare takes 64 rows a block, the main kernels 32 keys or rows at
 * least, backward_combine a row of dK and dV of up to 512 columns, backward_dbias a warp for each element. */
const char *gpu_backward_refusal(const fdm_problem *p, int leaves_sums) {
    if ((p->dkv_float32 && !leaves_sums) || (p->add_dkv && !p->dkv_float32))
        return "dk and dv have q's dtype, and are not added to";
    if (p->dkv_float32 && (p->varlen || p->has_seqused_q || p->has_seqused_k))
        return "dk and dv of packed sequences, or beside seqused_q and seqused_k, have q's dtype";
    const double heads = (double)p->batch * (double)p->heads, blocks_max = INT32_MAX;
    const double keys = p->varlen ? (double)p->total_k : (double)p->batch * (double)p->seqlen_k;
    const int64_t *shape = p->bias_shape;
    const double biases = (double)shape[0] * (double)shape[1] * (double)shape[2] * (double)shape[3];
    if (heads * (double)(p->seqlen_q / 32 + 4) >= blocks_max)
        return "query rows of all heads are fewer than 2^36";
    if (heads * (double)(p->seqlen_k / 32 + 1) >= blocks_max || keys * (double)p->heads_kv / 2 >= blocks_max)
        return "keys are fewer than 2^36 of all query heads and than 2^32 of all KV heads";
    if (p->needs_dbias && biases / (shape[3] == 1 ? BACKWARD_DBIAS_WARPS : 32 * BACKWARD_DBIAS_WARPS) >= blocks_max)
        return shape[3] == 1 ? "the gradient of a bias that keys share has less than 2^33 elements"
                             : "the bias' gradient has less than 2^38 elements";
    return NULL;
}

/* ---- workspace ---- */

/* Where the arrays of struct gpu_backward_params lie, in bytes from the workspace's start. */
struct layout {
    int64_t lse, delta, low, sink_shares, dq, dbias, dbias_semaphores, block_mask, semaphores, ticket, empty, order,
        block_order, dk, dv, bytes;
    int64_t rows, arrays, dbias_count, order_stride, block_order_stride, key_rows;
};

static int64_t put(struct layout *l, int64_t bytes) {
    const int64_t at = l->bytes;
    l->bytes += gpu_round_up(bytes, 256);
    return at;
}

static int64_t dbias_count(const fdm_problem *p, int32_t shares) {
    const int64_t *shape = p->bias_shape;
    switch (gpu_dbias_kind(p)) {
    case GPU_DBIAS_KEYS: return shares * p->batch * p->heads * p->seqlen_k;
    case GPU_DBIAS_SUMS: return shape[0] * shape[1] * shape[2] * shape[3];
    default: return 0;
    }
}

static int wants_sink_shares(const fdm_problem *p) {
    return p->has_sink && (p->needs_dsink || gpu_dbias_kind(p) == GPU_DBIAS_ROWS);
}

/* Without row intervals, where the family has a tile plan of them. */
static int wants_block_mask(const fdm_problem *p, const struct gpu_backward_needs *needs) {
    return needs->plans_rows ? gpu_mask_rows(p) : gpu_masks_blocks(p);
}
static int64_t block_mask_room(const fdm_problem *p, const struct gpu_backward_needs *needs) {
    return !wants_block_mask(p, needs) ? 0
           : needs->plans_rows         ? block_mask_bytes(p, needs->block_m, needs->block_n)
                                       : gpu_block_mask_bytes(p, needs->block_m, needs->block_n);
}
/* Without a block mask, in its place. */
static int wants_seen_tiles(const fdm_problem *p, const struct gpu_backward_needs *needs) {
    return needs->seeks_keys && gpu_makes_dq(p) && !wants_block_mask(p, needs);
}
static void add_block_mask(struct gpu_launches *l, const struct gpu_backward_needs *needs,
                           struct gpu_forward_params *a) {
    void *const at = (void *)(uintptr_t)a->block_mask;
    if (needs->plans_rows)
        block_mask_add(l, needs->block_m, needs->block_n, at, a);
    else
        gpu_block_mask_add(l, needs->block_m, needs->block_n, at, a);
}

static struct layout lay_out(const fdm_problem *p, const struct gpu_backward_needs *needs) {
    struct layout l = {0};
    l.rows =
        p->varlen ? backward_begin(p->total_q, p->batch, needs->row_step) : gpu_round_up(p->seqlen_q, needs->row_step);
    l.arrays = p->varlen ? p->heads : p->batch * p->heads;
    const int64_t all = l.rows * l.arrays;
    l.lse = put(&l, 4 * all);
    l.delta = put(&l, 4 * all);
    l.low = put(&l, p->has_bias ? 4 * all : 0);
    l.sink_shares = put(&l, wants_sink_shares(p) ? 4 * all : 0);
    l.dq = put(&l, 4 * all * (needs->sums_dq ? needs->head_dim : 0));
    l.semaphores = put(&l, needs->semaphores ? all / 16 * 4 : 0);
    l.ticket = put(&l, 4);
    l.empty = put(&l, needs->notes_empty ? all / 16 : 0);
    l.order_stride = gpu_round_up(p->seqlen_k, KEY_SORT_KEYS);
    l.order = put(&l, needs->may_order_keys ? 4 * p->interval_batch * p->interval_heads * l.order_stride : 0);
    l.block_order_stride = needs->order_block_n ? block_order_stride(p, needs->order_block_n) : 0;
    l.block_order = put(&l, 4 * p->interval_batch * p->interval_heads * l.block_order_stride);
    const int64_t dbias_sums = dbias_count(p, needs->dbias_shares);
    l.dbias_count =
        dbias_sums + needs->dbias_blocks * p->bias_shape[0] * p->bias_shape[1] * backward_semaphores(p->seqlen_q);
    l.dbias = put(&l, 4 * l.dbias_count);
    l.dbias_semaphores = l.dbias + 4 * dbias_sums;
    l.key_rows = p->varlen ? p->total_k : p->batch * p->seqlen_k;
    const int64_t group_parts = needs->group_parts > 1 ? needs->group_parts : 1;
    const int64_t parts = gpu_backward_leaves_sums(p, needs->group_parts) ? group_parts * p->heads_kv * l.key_rows : 0;
    l.dk = put(&l, 4 * parts * needs->head_dim);
    l.dv = put(&l, 4 * parts * needs->head_dim_v);
    l.block_mask = put(&l, wants_seen_tiles(p, needs) ? tile_plan_bytes_of_keys(p) : block_mask_room(p, needs));
    return l;
}

int64_t gpu_backward_workspace_bytes(const fdm_problem *p, const struct gpu_backward_needs *needs) {
    return lay_out(p, needs).bytes;
}

/* ---- parameters ---- */

void gpu_backward_fill(const struct gpu_launches *launches, const struct gpu_backward_needs *needs,
                       struct gpu_backward_params *a) {
    const fdm_problem *p = launches->problem;
    const struct attention *attention = launches->attention;
    char *workspace = launches->workspace;
    *a = (struct gpu_backward_params){0};
    if (!attention)
        return;
    const struct layout l = lay_out(p, needs);
    const struct row_view *dlse = &attention->dlse;
    const struct score_view *dbias = &attention->dbias;
    const int64_t *shape = p->bias_shape;
    *a = (struct gpu_backward_params){
        .dout = gpu_matrix_of(&attention->dout),
        .dq = gpu_matrix_of(&attention->dq),
        .dk = gpu_matrix_of(&attention->dk),
        .dv = gpu_matrix_of(&attention->dv),
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
        .empty = needs->notes_empty ? (uint8_t *)workspace + l.empty : NULL,
        .order = (const int32_t *)(const void *)(workspace + l.order),
        .order_batch = p->interval_batch == 1 ? 0 : p->interval_heads * l.order_stride,
        .order_head = p->interval_heads == 1 ? 0 : l.order_stride,
        .block_order = (const int32_t *)(const void *)(workspace + l.block_order),
        .block_order_batch = p->interval_batch == 1 ? 0 : p->interval_heads * l.block_order_stride,
        .block_order_head = p->interval_heads == 1 ? 0 : l.block_order_stride,
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
        .dbias_shares = gpu_dbias_kind(p) == GPU_DBIAS_KEYS ? needs->dbias_shares : 0,
        .zero_dbias = gpu_dbias_kind(p) == GPU_DBIAS_DIRECT && (gpu_bounded(p) || p->has_mask || p->has_intervals ||
                                                                gpu_row_runs(p) || p->varlen || gpu_used_constant(p)),
        .group_parts = needs->group_parts > 1 ? needs->group_parts : 1,
        .part_heads = (int32_t)(p->heads / p->heads_kv / (needs->group_parts > 1 ? needs->group_parts : 1)),
        .lse_factor = needs->lse_factor,
        .low_rows = (float *)(void *)(workspace + l.low),
        .sink_shares = wants_sink_shares(p) ? (float *)(void *)(workspace + l.sink_shares) : NULL,
        .dsink = gpu_sink_of(&attention->dsink, p),
        .dbias_of_rows = gpu_dbias_kind(p) == GPU_DBIAS_ROWS,
    };
    gpu_fill_forward(attention, &a->in);
    a->mask_row_bytes = (int32_t)a->in.mask.row; /* these where scores are aligned, whose rows are near */
    a->bias_row_bytes = (int32_t)(a->in.bias.row * bias_bytes(p));
    a->dbias_row_bytes =
        (int32_t)(gpu_dbias_kind(p) == GPU_DBIAS_SUMS ? shape[3] * 4 : attention->dbias.row * bias_bytes(p));
    if (wants_block_mask(p, needs) || wants_seen_tiles(p, needs))
        a->in.block_mask = (const uint8_t *)workspace + l.block_mask;
}

/* ---- launches ---- */

static void add_grid(struct gpu_launches *l, int64_t x, int64_t y, int64_t z, int early, struct gpu_backward_params *a,
                     size_t bytes) {
    struct gpu_launch launch = {.grid = {x, y, z}, .early = early, .params = a, .params_bytes = bytes};
    a->grid_x = (uint32_t)x;
    a->grid_y = (uint32_t)y;
    if (x <= 0 || y <= 0 || z <= 0)
        launch.grid[0] = 0;
    else if (gpu_folds_grids(l->problem))
        launch.grid[0] = gpu_grid(x * y * z), launch.grid[1] = launch.grid[2] = 1;
    gpu_add_launch(l, launch);
}
void gpu_backward_add_grid(struct gpu_launches *l, int64_t x, int64_t y, int64_t z, struct gpu_backward_params *a,
                           size_t bytes) {
    add_grid(l, x, y, z, 0, a, bytes);
}

/* The kernels around a family's, in the order of their launches; those from COMBINE on run after it. */
enum { PREPARE, BLOCK_MASK, SEEN_TILES, BLOCK_ORDER, ORDER, COMBINE, FINISH, DBIAS, DSINK, NUM_KERNELS };
enum { ROWS_THREADS = 32 * BACKWARD_ROWS_WARPS, DBIAS_THREADS = 32 * BACKWARD_DBIAS_WARPS };
enum { DSINK_THREADS = 32 * BACKWARD_DSINK_WARPS };
static uint32_t threads_of(int32_t kernel) {
    return kernel == DBIAS ? DBIAS_THREADS : kernel == DSINK ? DSINK_THREADS : ROWS_THREADS;
}
static const int32_t first_of[] = {[GPU_BACKWARD_BEFORE] = PREPARE, [GPU_BACKWARD_AFTER] = COMBINE};
static const int32_t end_of[] = {[GPU_BACKWARD_BEFORE] = COMBINE, [GPU_BACKWARD_AFTER] = NUM_KERNELS};

static int wanted(int32_t kernel, const fdm_problem *p, const struct gpu_backward_needs *needs) {
    const int32_t kind = gpu_dbias_kind(p);
    switch (kernel) {
    case BLOCK_MASK: return wants_block_mask(p, needs);
    case SEEN_TILES: return wants_seen_tiles(p, needs);
    case BLOCK_ORDER: return needs->order_block_n > 0;
    case ORDER: return needs->orders_keys;
    case COMBINE: return gpu_backward_leaves_sums(p, needs->group_parts);
    case FINISH: return needs->sums_dq;
    case DSINK: return p->needs_dsink && !needs->sums_dq;
    case DBIAS: return kind == GPU_DBIAS_KEYS || kind == GPU_DBIAS_SUMS || kind == GPU_DBIAS_ROWS;
    default: return 1;
    }
}

static void rows_request(int32_t kernel, const fdm_problem *p, const struct gpu_backward_needs *needs,
                         struct cuda_kernel_request *request) {
    static const char *const entries[NUM_KERNELS] = {[PREPARE] = "backward_prepare",
                                                     [COMBINE] = "backward_combine",
                                                     [FINISH] = "backward_finish",
                                                     [DBIAS] = "backward_dbias",
                                                     [DSINK] = "backward_dsink"};
    gpu_set_problem_constants(
        request, p,
        GPU_ALIKE_ALL & ~(GPU_ALIKE_DTYPE | GPU_ALIKE_ALIGNED | GPU_ALIKE_VARLEN | GPU_ALIKE_SEQUSED | GPU_ALIKE_BIAS));
    GPU_ADD_CONSTANTS(request, BACKWARD_ROWS_CONSTANTS, .HEAD_DIM = needs->head_dim, .HEAD_DIM_V = needs->head_dim_v,
                      .ROW_STEP = needs->row_step, .NEEDS_DQ = needs->sums_dq, .NO_ZEROS = needs->stores_first,
                      .HEAD_SINKS = p->has_sink, .FOLDED = gpu_folds_grids(p),
                      .WIDE_DKV = kernel == COMBINE ? p->dkv_float32 + p->add_dkv : 0);
    request->file = kernel == DBIAS   ? "gpu/backward_dbias.cu"
                    : kernel == DSINK ? "gpu/backward_dsink.cu"
                                      : "gpu/backward_rows.cu";
    request->entry = entries[kernel];
    request->shared_bytes = 0;
    request->threads = (int32_t)threads_of(kernel);
}

static int64_t blocks_of(int64_t length, int64_t block) { return (length + block - 1) / block; }
static int64_t at_least_1(int64_t n) { return n > 1 ? n : 1; }

static void add_rows_kernel(struct gpu_launches *l, int32_t which, const struct gpu_backward_needs *needs,
                            struct gpu_backward_params *a) {
    const fdm_problem *p = l->problem;
    const int64_t rows = which == PREPARE ? gpu_round_up(p->seqlen_q, needs->row_step) : p->seqlen_q;
    int64_t x = blocks_of(rows, 16 * BACKWARD_ROWS_WARPS), y = p->heads, z = p->batch;
    switch (which) {
    case PREPARE: /* also where there are no rows: it clears what is summed */
        x = at_least_1(x);
        z = at_least_1(z);
        break;
    case COMBINE:
        x = blocks_of(a->key_rows * (needs->head_dim + needs->head_dim_v) / 8, ROWS_THREADS);
        y = p->heads_kv;
        z = 1;
        break;
    case DBIAS:
        x = (int64_t)a->dbias_batches * a->dbias_heads * a->dbias_rows * a->dbias_keys;
        x = blocks_of(a->dbias_shares && a->dbias_keys == 1 ? 32 * x : x, DBIAS_THREADS);
        y = z = 1;
        break;
    case FINISH: /* a block more makes dsink of its head */
        x += p->needs_dsink;
        z = p->needs_dsink ? at_least_1(z) : z;
        break;
    case DSINK: /* a block a head */
        x = p->heads;
        y = z = 1;
        break;
    default: break;
    }
    rows_request(which, p, needs, gpu_add_kernel(l));
    add_grid(l, x, y, z, needs->early && which >= COMBINE, a, sizeof *a);
}

void gpu_backward_add(struct gpu_launches *l, enum gpu_backward_side side, const struct gpu_backward_needs *needs,
                      struct gpu_backward_params *a) {
    for (int32_t kernel = first_of[side]; kernel < end_of[side]; kernel++) {
        if (!wanted(kernel, l->problem, needs))
            continue;
        if (kernel == BLOCK_MASK)
            add_block_mask(l, needs, &a->in);
        else if (kernel == SEEN_TILES)
            tile_plan_add_of_keys(l, (void *)(uintptr_t)a->in.block_mask, &a->in);
        else if (kernel == BLOCK_ORDER)
            block_order_add(l, &a->in, needs->order_block_n, (int32_t *)(uintptr_t)a->block_order);
        else if (kernel == ORDER)
            key_sort_add(l, &a->in, (int32_t *)(uintptr_t)a->order, needs->order_block_n ? a->block_order : NULL);
        else
            add_rows_kernel(l, kernel, needs, a);
    }
}
