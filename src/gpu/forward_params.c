/* forward_params.c: a call's tensors as the parameters of the kernels. */
#include "gpu/gpu_family.h"

struct gpu_matrix gpu_matrix_of(const struct matrix_view *view) {
    return (struct gpu_matrix){view->data, view->batch, view->row, view->head};
}
static struct gpu_scores scores_of(const struct score_view *view) {
    return (struct gpu_scores){view->data, view->batch, view->head, view->row, view->key, (int32_t)view->group, 0};
}
static struct gpu_blocks blocks_of(const struct score_view *view, const fdm_problem *p) {
    const int32_t size = p->block_mask_size;
    return (struct gpu_blocks){.data = view->data,
                               .batch = view->batch,
                               .head = view->head,
                               .row = view->row,
                               .key = view->key,
                               .group = (int32_t)view->group,
                               .shift = size == 128 ? 7 : 6,
                               .key_blocks = (int32_t)gpu_ceil_div(p->seqlen_k, size ? size : 64)};
}
static struct gpu_rows rows_of(const struct row_view *view) {
    return (struct gpu_rows){(float *)(void *)view->data, view->batch, view->head, view->row};
}

struct gpu_sink gpu_sink_of(const struct sink_view *view, const fdm_problem *p) {
    return (struct gpu_sink){view->data, view->part, view->head, p->num_sinks, gpu_dtype(p->sink_dtype)};
}

static struct gpu_indices indices_of(const struct index_view *view) {
    return (struct gpu_indices){view->data, view->row, view->column, view->bytes, 0};
}

static int32_t at_most(int64_t n) { return n < INT32_MAX ? (int32_t)n : INT32_MAX; }

struct gpu_cache gpu_cache_of(const struct attention *attention) {
    const struct cache_view *c = &attention->cache;
    const fdm_problem *p = attention->problem;
    const int packed = c->cu_seqlens_new.data != NULL;
    return (struct gpu_cache){.table = indices_of(&c->table),
                              .page_start = indices_of(&c->page_start),
                              .cache_row = indices_of(&c->cache_row),
                              .lengths = indices_of(&c->lengths),
                              .first_key = indices_of(&c->first_key),
                              .cu_seqlens_new = (const int32_t *)(const void *)c->cu_seqlens_new.data,
                              .k_new = gpu_matrix_of(&c->k_new),
                              .v_new = gpu_matrix_of(&c->v_new),
                              .page_rows = at_most(c->page_rows),
                              .num_pages = p->num_pages,
                              .max_pages = p->max_pages,
                              .num_lists = at_most(c->num_lists),
                              .has_ends = c->page_start.data && !c->cache_row.data && c->num_lists == p->batch + 1,
                              .seqlen_new = at_most(packed ? 0 : c->seqlen_new),
                              .total_new = at_most(p->new_rows)};
}

static struct gpu_rotary rotary_of(const struct attention *attention) {
    const struct rotary_view *r = &attention->cache.rotary;
    return (struct gpu_rotary){.cosines = r->cosines,
                               .sines = r->sines,
                               .cosine_row = r->cosine_row,
                               .sine_row = r->sine_row,
                               .num_rows = r->num_rows,
                               .start = indices_of(&r->start),
                               .dim = (int32_t)r->dim,
                               .is_wide = r->dtype == FDM_FLOAT32,
                               .moves = gpu_bounded(attention->problem)};
}

/* A window's bound as the kernels take it: -1 and everything past the longest sequence is "unbounded". */
static int32_t bound_of(int64_t bound) { return bound < 0 || bound >= INT32_MAX ? INT32_MAX : (int32_t)bound; }

/* A mask or bias with rows that several heads read. */
static int shares_scores(const fdm_problem *p) {
    return (gpu_mask_rows(p) && p->mask_shape[1] < p->heads) || (gpu_bias_rows(p) && p->bias_shape[1] < p->heads);
}

/* Heads whose keys and values fit together in most of a second-level cache of 50 MB are interleaved, row block by row
 * block, where a window makes blocks unequal (the longest go first) and where heads read the same mask or bias; else
 * one head after the other is best. L2 groups are equally large: a last one of a few heads would begin its longest
 * blocks when the others have nothing left to do. */
static int32_t heads_per_l2_group(const fdm_problem *p) {
    enum { CACHE_BYTES = 32 << 20 };
    const int64_t head_bytes = p->seqlen_k * (p->head_dim + p->head_dim_v) * 2, heads = p->batch * p->heads;
    const int64_t most = head_bytes > 0 ? CACHE_BYTES / head_bytes : heads;
    if (most < 1 || (!gpu_bounded(p) && !shares_scores(p)))
        return 1;
    const int64_t l2_groups = (heads + most - 1) / most;
    return l2_groups > 0 ? (int32_t)((heads + l2_groups - 1) / l2_groups) : 1;
}

void gpu_fill_forward(const struct attention *attention, struct gpu_forward_params *a) {
    const fdm_problem *p = attention->problem;
    const struct interval_view *i = &attention->intervals, *r = &attention->row_intervals;
    *a = (struct gpu_forward_params){
        .q = gpu_matrix_of(&attention->q),
        .k = gpu_matrix_of(&attention->k),
        .v = gpu_matrix_of(&attention->v),
        .out = gpu_matrix_of(&attention->out),
        .lse = rows_of(&attention->lse),
        .mask = scores_of(&attention->mask),
        .bias = scores_of(&attention->bias),
        .intervals = {i->start, i->end, i->start_batch, i->start_head, i->start_item, i->end_batch, i->end_head,
                      i->end_item, (int32_t)i->group, 0},
        .row_intervals = {r->start, r->end, r->start_batch, r->start_head, r->start_range, r->start_item, r->end_batch,
                          r->end_head, r->end_range, r->end_item, (int32_t)r->group, p->row_ranges},
        .blocks = blocks_of(&attention->block_mask, p),
        .cu_seqlens_q = attention->cu_seqlens_q,
        .cu_seqlens_k = attention->cu_seqlens_k,
        .batch = (int32_t)p->batch,
        .heads = (int32_t)p->heads,
        .heads_kv = (int32_t)p->heads_kv,
        .group = (int32_t)(p->heads / p->heads_kv),
        .seqlen_q = (int32_t)p->seqlen_q,
        .seqlen_k = (int32_t)p->seqlen_k,
        .head_dim = (int32_t)p->head_dim,
        .head_dim_v = (int32_t)p->head_dim_v,
        .num_splits = 1,
        .total_q = (int32_t)p->total_q,
        .total_k = (int32_t)p->total_k,
        .window_left = bound_of(p->window_left),
        .window_right = p->causal ? 0 : bound_of(p->window_right),
        .scale = (float)p->softmax_scale,
        .softcap = (float)p->softcap,
        .softcap_inverse = p->softcap > 0 ? (float)(1 / p->softcap) : 0,
        .heads_per_l2_group = heads_per_l2_group(p),
        .lse_low = rows_of(&attention->lse_low),
        .sink = gpu_sink_of(&attention->sink, p),
        .lse_without_sink = p->lse_without_sink,
        .seqused_q = indices_of(&attention->seqused_q),
        .seqused_k = indices_of(&attention->seqused_k),
        .cache = gpu_cache_of(attention),
        .rotary = rotary_of(attention),
        .tree = {attention->tree.data, attention->tree.batch, attention->tree.row, attention->tree.word},
    };
}
