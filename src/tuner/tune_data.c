/* tune_data.c: random inputs of a problem on its device, and its outputs. */
#include "tuner/tune_data.h"

#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "plan/plan.h"
#include "tuner/tune_contents.h"
#include "tuner/tune_pattern.h"

static const fdm_device_id host = {FDM_CPU, 0};
enum { ALIGNMENT = 256, PLACES_MAX = 1024 };

static size_t aligned(size_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

/* ---- shapes ---- */

/* Rows of matrices, masks and biases begin at multiples of 16 bytes, as those of a problem that is aligned do. */
static int64_t row_elements(enum tune_role role, fdm_dtype dtype, int64_t extent) {
    const int64_t unit = 16 / fdm_dtype_bytes(dtype);
    const int by_rows = role <= TUNE_BIAS || role == TUNE_OUT || role == TUNE_K_NEW || role == TUNE_V_NEW ||
                        (role >= TUNE_DQ && role <= TUNE_DBIAS);
    return by_rows && extent > 1 ? (extent + unit - 1) / unit * unit : extent;
}

void tune_set_shape(struct tune_data *data, enum tune_role role, fdm_dtype dtype, int32_t ndim, const int64_t *shape) {
    int64_t elements = 1;
    for (int32_t i = ndim - 1; i >= 0; i--) {
        data->shapes[role][i] = shape[i];
        data->strides[role][i] = elements;
        elements *= i == ndim - 1 ? row_elements(role, dtype, shape[i]) : shape[i];
    }
    data->views[role] = (fdm_tensor){.device = data->device,
                                     .ndim = ndim,
                                     .dtype = fdm_data_type_of(dtype),
                                     .shape = data->shapes[role],
                                     .strides = data->strides[role]};
    data->bytes[role] = (size_t)(elements * fdm_dtype_bytes(dtype));
}

/* [B, S, h, D], or [total, h, D] of packed sequences; k and v of a cache [pages, rows, h, D]. */
static void set_matrix(struct tune_data *data, enum tune_role role, int is_q, int64_t heads, int64_t head_dim) {
    const fdm_problem *p = data->problem;
    const int in_cache = p->has_cache && !is_q, packed = p->varlen && !in_cache;
    const int64_t rows = in_cache && p->page_size ? p->page_size
                         : packed                 ? is_q ? p->total_q : p->total_k
                         : is_q                   ? p->seqlen_q
                                                  : p->seqlen_k;
    const int64_t shape[4] = {in_cache ? p->num_pages : p->batch, rows, heads, head_dim};
    const int wide = p->dkv_float32 && (role == TUNE_DK || role == TUNE_DV);
    tune_set_shape(data, role, wide ? FDM_FLOAT32 : p->dtype, packed ? 3 : 4, packed ? shape + 1 : shape);
}

/* v as the first columns of k: move_to() gives it k's place. */
static void put_value_in_key(struct tune_data *data) {
    memcpy(data->strides[TUNE_V], data->strides[TUNE_K], sizeof data->strides[TUNE_V]);
    data->bytes[TUNE_V] = 0;
}

static void set_rows(struct tune_data *data, enum tune_role role) {
    const fdm_problem *p = data->problem;
    const int64_t shape[3] = {p->batch, p->heads, p->varlen ? p->total_q : p->seqlen_q};
    const fdm_dtype dtype = p->dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32;
    tune_set_shape(data, role, dtype, p->varlen ? 2 : 3, p->varlen ? shape + 1 : shape);
}

/* Row intervals and a block mask. */
static void set_row_runs(struct tune_data *data) {
    const fdm_problem *p = data->problem;
    const int64_t size = p->block_mask_size ? p->block_mask_size : 1;
    const int64_t ranges[4] = {p->row_interval_batch, p->row_interval_heads, p->row_ranges,
                               p->varlen ? p->total_q : p->seqlen_q};
    const int64_t blocks[4] = {p->block_mask_batch, p->block_mask_heads, (p->seqlen_q + size - 1) / size,
                               (p->seqlen_k + size - 1) / size};
    for (int role = TUNE_ROW_START; p->has_row_intervals && role <= TUNE_ROW_END; role++)
        tune_set_shape(data, (enum tune_role)role, FDM_INT32, p->varlen ? 3 : 4, p->varlen ? ranges + 1 : ranges);
    if (p->block_mask_size)
        tune_set_shape(data, TUNE_BLOCKS, FDM_BOOL, 4, blocks);
}

static void set_scores(struct tune_data *data) {
    const fdm_problem *p = data->problem;
    const int backward = p->pass == FDM_BACKWARD;
    const int64_t intervals[3] = {p->interval_batch, p->interval_heads, p->varlen ? p->total_k : p->seqlen_k},
                  sinks[2] = {p->num_sinks, p->heads};
    const int32_t several = p->num_sinks > 1;
    if (p->has_mask)
        tune_set_shape(data, TUNE_MASK, FDM_BOOL, 4, p->mask_shape);
    if (p->has_bias)
        tune_set_shape(data, TUNE_BIAS, p->bias_dtype, 4, p->bias_shape);
    if (p->has_bias && backward && p->needs_dbias)
        tune_set_shape(data, TUNE_DBIAS, p->bias_dtype, 4, p->bias_shape);
    for (int role = TUNE_START; p->has_intervals && role <= TUNE_END; role++)
        tune_set_shape(data, (enum tune_role)role, FDM_INT32, p->varlen ? 2 : 3, p->varlen ? intervals + 1 : intervals);
    set_row_runs(data);
    if (p->has_sink)
        tune_set_shape(data, TUNE_SINK, p->sink_dtype, several ? 2 : 1, several ? sinks : sinks + 1);
    if (p->has_sink && backward && p->needs_dsink)
        tune_set_shape(data, TUNE_DSINK, p->sink_dtype, several ? 2 : 1, several ? sinks : sinks + 1);
}

static void set_shapes(struct tune_data *data) {
    const fdm_problem *p = data->problem;
    set_matrix(data, TUNE_Q, 1, p->heads, p->head_dim);
    set_matrix(data, TUNE_K, 0, p->heads_kv, p->head_dim);
    set_matrix(data, TUNE_V, 0, p->heads_kv, p->head_dim_v);
    if (p->value_in_key)
        put_value_in_key(data);
    set_matrix(data, TUNE_OUT, 1, p->heads, p->head_dim_v);
    if (p->pass == FDM_BACKWARD || p->needs_lse)
        set_rows(data, TUNE_LSE);
    if (p->has_lse_low)
        set_rows(data, TUNE_LSE_LOW);
    set_scores(data);
    tune_set_lengths(data);
    tune_set_cache(data);
    if (p->pass == FDM_FORWARD)
        return;
    set_matrix(data, TUNE_DOUT, 1, p->heads, p->head_dim_v);
    if (p->has_dlse)
        set_rows(data, TUNE_DLSE);
    if (p->needs_dq)
        set_matrix(data, TUNE_DQ, 1, p->heads, p->head_dim);
    if (p->needs_dk)
        set_matrix(data, TUNE_DK, 0, p->heads_kv, p->head_dim);
    if (p->needs_dv)
        set_matrix(data, TUNE_DV, 0, p->heads_kv, p->head_dim_v);
}

/* ---- memory ---- */

/* As many places that all of them together are three times the last cache; on the CPU, whose caches a caller has just
 * filled as a rule, two. */
static int32_t places_of(const fdm_device *device, size_t bytes) {
    if (device->id.type == FDM_CPU || bytes == 0)
        return 2;
    const double cache = device->l2_bytes > 0 ? (double)device->l2_bytes : 64 << 20;
    const double wanted = ceil(3 * cache / (double)bytes);
    return wanted < 1 ? 1 : wanted > PLACES_MAX ? PLACES_MAX : (int32_t)wanted;
}

static fdm_status allocate(struct tune_data *data, const fdm_device *device) {
    fdm_status status = FDM_OK;
    for (int i = 0; i < TUNE_ROTATING; i++)
        data->place_bytes += aligned(data->bytes[i]);
    data->num_places = places_of(device, data->place_bytes);
    status = fdm_memory_allocate(data->device, data->place_bytes * (size_t)data->num_places, &data->places);
    for (int i = TUNE_ROTATING; i < TUNE_ROLES && !status; i++)
        if (data->views[i].ndim && !(status = fdm_memory_allocate(data->device, data->bytes[i], &data->memory[i])))
            data->views[i].data = data->memory[i];
    return status;
}

void tune_data_release(struct tune_data *data) {
    fdm_memory_release(data->device, data->places);
    for (int i = 0; i < TUNE_ROLES; i++)
        fdm_memory_release(data->device, data->memory[i]);
    data->places = NULL;
    memset(data->memory, 0, sizeof data->memory);
}

static void move_to(struct tune_data *data, int64_t number) {
    char *at = (char *)data->places + (size_t)(number % data->num_places) * data->place_bytes;
    for (int i = 0; i < TUNE_ROTATING; i++) {
        data->views[i].data = at;
        at += aligned(data->bytes[i]);
    }
    if (data->problem->value_in_key)
        data->views[TUNE_V].data = data->views[TUNE_K].data;
}

fdm_tensor *tune_data_tensor(struct tune_data *data, enum tune_role role, int64_t number) {
    move_to(data, number);
    return data->views[role].ndim ? &data->views[role] : NULL;
}

fdm_tensors tune_data_tensors(struct tune_data *data, int64_t number) {
    fdm_tensor *view[TUNE_ROLES];
    move_to(data, number);
    for (int i = 0; i < TUNE_ROLES; i++)
        view[i] = data->views[i].ndim ? &data->views[i] : NULL;
    data->cache = (fdm_cache){.struct_bytes = sizeof data->cache,
                              .rotary_interleaved = data->problem->rotary_interleaved,
                              .block_table = view[TUNE_TABLE],
                              .page_start = view[TUNE_PAGE_START],
                              .cache_row = view[TUNE_CACHE_ROW],
                              .lengths = view[TUNE_CACHE_LENGTHS],
                              .first_key = view[TUNE_FIRST_KEY],
                              .k_new = view[TUNE_K_NEW],
                              .v_new = view[TUNE_V_NEW],
                              .cu_seqlens_new = view[TUNE_CU_NEW],
                              .rotary_cos = view[TUNE_COS],
                              .rotary_sin = view[TUNE_SIN]};
    return (fdm_tensors){.struct_bytes = sizeof(fdm_tensors),
                         .q = view[TUNE_Q],
                         .k = view[TUNE_K],
                         .v = view[TUNE_V],
                         .mask = view[TUNE_MASK],
                         .bias = view[TUNE_BIAS],
                         .interval_start = view[TUNE_START],
                         .interval_end = view[TUNE_END],
                         .row_start = view[TUNE_ROW_START],
                         .row_end = view[TUNE_ROW_END],
                         .block_mask = view[TUNE_BLOCKS],
                         .cu_seqlens_q = view[TUNE_CU_Q],
                         .cu_seqlens_k = view[TUNE_CU_K],
                         .seqused_q = view[TUNE_USED_Q],
                         .seqused_k = view[TUNE_USED_K],
                         .tree = view[TUNE_TREE],
                         .cache = data->problem->has_cache ? &data->cache : NULL,
                         .out = view[TUNE_OUT],
                         .lse = view[TUNE_LSE],
                         .dout = view[TUNE_DOUT],
                         .dlse = view[TUNE_DLSE],
                         .dq = view[TUNE_DQ],
                         .dk = view[TUNE_DK],
                         .dv = view[TUNE_DV],
                         .dbias = view[TUNE_DBIAS],
                         .lse_low = view[TUNE_LSE_LOW],
                         .sink = view[TUNE_SINK],
                         .dsink = view[TUNE_DSINK]};
}

/* ---- contents ---- */

static fdm_status fill_random(struct tune_data *data) {
    static const enum tune_role others[] = {TUNE_BIAS, TUNE_SINK,  TUNE_DLSE, TUNE_OUT,
                                            TUNE_LSE,  TUNE_K_NEW, TUNE_V_NEW};
    const fdm_problem *p = data->problem;
    fdm_status status =
        tune_pattern_fill(data->device, data->places, data->place_bytes * (size_t)data->num_places, p->dtype);
    for (size_t i = 0; i < sizeof others / sizeof others[0] && !status; i++)
        if (data->memory[others[i]])
            status = tune_pattern_fill(data->device, data->memory[others[i]], data->bytes[others[i]],
                                       fdm_dtype_of(&data->views[others[i]]));
    if (!status && data->memory[TUNE_MASK])
        status = tune_pattern_fill(data->device, data->memory[TUNE_MASK], data->bytes[TUNE_MASK], FDM_BOOL);
    if (!status && data->memory[TUNE_BLOCKS])
        status = tune_pattern_fill(data->device, data->memory[TUNE_BLOCKS], data->bytes[TUNE_BLOCKS], FDM_BOOL);
    if (!status && data->memory[TUNE_LSE_LOW])
        status = fdm_memory_fill(data->device, data->memory[TUNE_LSE_LOW], 0, data->bytes[TUNE_LSE_LOW]);
    return status;
}

static fdm_status fill_window(struct tune_data *data, int64_t window) {
    int32_t sides[2] = {(int32_t)(window - 1), 0};
    int64_t shape[2] = {1, 2};
    void *there = NULL;
    fdm_status status = fdm_memory_allocate(data->device, sizeof sides, &there);
    if (!status)
        status = fdm_memory_copy(there, data->device, sides, host, sizeof sides);
    const fdm_tensor sizes = {
        .data = there, .device = data->device, .ndim = 2, .dtype = fdm_data_type_of(FDM_INT32), .shape = shape};
    const fdm_key_rules rules = {.struct_bytes = sizeof rules,
                                 .window_sizes = &sizes,
                                 .cu_seqlens_q = &data->views[TUNE_CU_Q],
                                 .cu_seqlens_k = &data->views[TUNE_CU_K]};
    if (!status)
        status = fdm_rule_intervals(&rules, 0, &data->views[TUNE_START], &data->views[TUNE_END], NULL);
    if (!status)
        status = fdm_synchronize(data->device);
    fdm_memory_release(data->device, there);
    return status;
}

/* Where the first row of the number-th list of ranges stands among the keys. Lists of all sequences are those of the
 * shortest. */
static int64_t first_row_of(const fdm_problem *p, int64_t number) {
    const int64_t b =
        p->varlen || p->row_interval_batch == 1 ? p->batch - 1 : number / (p->row_interval_heads * p->row_ranges);
    const int64_t room = tune_cache_room(p);
    if (p->varlen && !p->has_cache)
        return 0;
    return (p->has_cache || p->has_seqused_k ? tune_length_used(room, b, p->batch) : room) - p->seqlen_q;
}

/* A causal window, whose keys the ranges of a row share; of packed sequences its rows count from the first one's. */
static fdm_status fill_row_intervals(struct tune_data *data, int64_t window) {
    const fdm_problem *p = data->problem;
    const int64_t rows = p->varlen ? p->total_q : p->seqlen_q,
                  lists = (p->varlen ? 1 : p->row_interval_batch) * p->row_interval_heads * p->row_ranges;
    const int64_t each = (window + p->row_ranges - 1) / p->row_ranges;
    int32_t *numbers = memory_allocate(data->bytes[TUNE_ROW_START] + 1);
    fdm_status status = FDM_OK;
    if (!numbers)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for the ranges of %lld rows", (long long)rows);
    for (int role = TUNE_ROW_START; role <= TUNE_ROW_END && !status; role++) {
        for (int64_t n = 0; n < lists * rows; n++) {
            const int64_t row = n % rows % p->seqlen_q + first_row_of(p, n / rows);
            numbers[n] = (int32_t)(row + 1 - each * (n / rows % p->row_ranges + (role == TUNE_ROW_START)));
        }
        status = fdm_memory_copy(data->memory[role], data->device, numbers, host, data->bytes[role]);
    }
    memory_release(numbers);
    return status;
}

/* Top-W of a random bias, which is not that of the call. */
static fdm_status fill_topk(struct tune_data *data, int64_t window) {
    const fdm_tensor *start = &data->views[TUNE_START];
    fdm_tensor bias = *start;
    void *workspace = NULL;
    bias.dtype = fdm_data_type_of(FDM_FLOAT32);
    bias.data = NULL;
    fdm_status status = fdm_memory_allocate(data->device, data->bytes[TUNE_START], &bias.data);
    const size_t bytes = status ? 0 : fdm_topk_intervals_workspace(&bias, NULL);
    if (!status)
        status = tune_pattern_fill(data->device, bias.data, data->bytes[TUNE_START], FDM_FLOAT32);
    if (!status)
        status = fdm_memory_allocate(data->device, bytes, &workspace);
    if (!status)
        status = fdm_topk_intervals(&bias, NULL, window, data->problem->seqlen_q, &data->views[TUNE_START],
                                    &data->views[TUNE_END], workspace, bytes, NULL);
    if (!status)
        status = fdm_synchronize(data->device);
    fdm_memory_release(data->device, workspace);
    fdm_memory_release(data->device, bias.data);
    return status;
}

/* out and lse of a forward, which a backward wants. Where none takes the problem they stay random: gradients are then
 * those of no attention, but of finite numbers still. */
static fdm_status run_forward(const fdm_device *device, struct tune_data *data) {
    fdm_options options = problem_options(data->problem);
    options.add_dkv = 0;
    const fdm_tensors all = tune_data_tensors(data, 0);
    fdm_tensors tensors = all;
    fdm_problem problem;
    fdm_plan plan = {.struct_bytes = sizeof plan};
    void *workspace = NULL;
    tensors.dout = tensors.dlse = NULL;
    tensors.dq = tensors.dk = tensors.dv = tensors.dbias = tensors.dsink = NULL;
    fdm_status status = fdm_describe(FDM_FORWARD, &tensors, &options, &problem);
    if (!status && plan_by_rules(device, &problem, NULL, &plan))
        return FDM_OK;
    if (!status)
        status = fdm_memory_allocate(data->device, (size_t)plan.workspace_bytes, &workspace);
    if (!status)
        status = fdm_execute(&plan, &tensors, workspace, (size_t)plan.workspace_bytes, NULL);
    if (!status)
        status = fdm_synchronize(data->device);
    fdm_memory_release(data->device, workspace);
    return status;
}

fdm_status tune_data_make(const fdm_device *device, const fdm_problem *problem, int64_t window,
                          struct tune_data *data) {
    *data = (struct tune_data){.problem = problem, .device = device->id};
    set_shapes(data);
    fdm_status status = allocate(data, device);
    if (!status)
        status = fill_random(data);
    if (!status)
        status = tune_fill_lengths(data);
    if (!status)
        status = tune_fill_cache(data);
    if (!status && problem->has_intervals)
        status = problem->varlen ? fill_window(data, window) : fill_topk(data, window);
    if (!status && problem->has_row_intervals)
        status = fill_row_intervals(data, window);
    if (!status && problem->pass == FDM_BACKWARD)
        status = run_forward(device, data);
    return status ? status : fdm_synchronize(device->id);
}

static void exchange(int64_t *axes, int32_t ndim) {
    const int64_t last = axes[ndim - 1];
    axes[ndim - 1] = axes[ndim - 2];
    axes[ndim - 2] = last;
}

fdm_status tune_data_make_of(const fdm_device *device, const struct tune_operand *operands, int32_t count,
                             struct tune_data *data) {
    static const fdm_problem forward = {.pass = FDM_FORWARD};
    *data = (struct tune_data){.problem = &forward, .device = device->id};
    for (int32_t i = 0; i < count; i++) {
        const struct tune_operand *o = &operands[i];
        int64_t shape[3] = {o->shape[0], o->shape[1], o->shape[2]};
        if (o->columns_contiguous)
            exchange(shape, o->ndim);
        tune_set_shape(data, o->role, o->dtype, o->ndim, shape);
        if (o->columns_contiguous) {
            exchange(data->shapes[o->role], o->ndim);
            exchange(data->strides[o->role], o->ndim);
        }
    }
    fdm_status status = allocate(data, device);
    if (!status)
        status = tune_pattern_fill(device->id, data->places, data->place_bytes * (size_t)data->num_places,
                                   operands[0].dtype);
    if (!status && data->memory[TUNE_MASK])
        status = tune_pattern_fill(device->id, data->memory[TUNE_MASK], data->bytes[TUNE_MASK], FDM_BOOL);
    return status ? status : fdm_synchronize(device->id);
}
