/* kv_cache.c: the KV cache of a call: its tensors, the keys of each sequence, and where they lie. */
#include "problem/kv_cache.h"

#include <string.h>

#include "base/error.h"
#include "base/integers.h"
#include "problem/lengths.h"
#include "problem/tensor.h"

/* ---- a problem by itself ---- */

fdm_status cache_validate(const fdm_problem *p) {
    const int64_t of_cache[] = {p->new_rows,      p->page_size,    p->num_pages,
                                p->max_pages,     p->ragged_pages, p->has_first_key,
                                p->has_cache_row, p->rotary_dim,   p->rotary_interleaved};
    for (size_t i = 0; i < sizeof of_cache / sizeof of_cache[0]; i++)
        if (of_cache[i] < 0 || (!p->has_cache && of_cache[i] != 0))
            return error_set(FDM_ERROR_INVALID_ARGUMENT,
                             "a field of the problem's cache is %lld; it must be 0 or above, and 0 without a cache",
                             (long long)of_cache[i]);
    if (!p->has_cache)
        return FDM_OK;
    if (p->pass == FDM_BACKWARD)
        return error_set(FDM_ERROR_UNSUPPORTED, "a KV cache is given to a backward; calls with one are forward only");
    if (p->has_intervals)
        return error_set(FDM_ERROR_UNSUPPORTED, "key intervals are given beside a KV cache; this version does not take "
                                                "them together");
    if (p->rotary_dim % 2 || p->rotary_dim > p->head_dim)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "the rotary tables turn %d dims; it must be an even number of at most %lld, the head_dim of q",
                         p->rotary_dim, (long long)p->head_dim);
    const double rows = (p->varlen ? (double)p->total_q : (double)p->batch * (double)p->seqlen_q) * (double)p->heads +
                        (double)p->new_rows * (double)p->heads_kv;
    if (p->rotary_dim && rows * (double)p->head_dim > 0x1p56)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "the rows that turn have more elements than an address space holds");
    return FDM_OK;
}

/* ---- tensors ---- */

fdm_status cache_indices(const fdm_tensor *tensor, const char *name, int32_t ndim, const int64_t *shape,
                         int may_be_wide, const fdm_tensor *beside, struct index_view *view) {
    *view = (struct index_view){0};
    if (!tensor)
        return FDM_OK;
    const fdm_dtype dtype = may_be_wide && fdm_dtype_of(tensor) == FDM_INT64 ? FDM_INT64 : FDM_INT32;
    const fdm_status status = tensor_check_as(tensor, name, ndim, TENSOR_INPUT, dtype, shape, beside, "q");
    if (status)
        return status;
    static const int64_t nothing;
    const char *data = tensor_data(tensor);
    *view = (struct index_view){.data = data ? data : (const char *)&nothing, /* an empty tensor is still given */
                                .row = tensor_stride(tensor, 0),
                                .column = ndim > 1 ? tensor_stride(tensor, 1) : 0,
                                .bytes = (int32_t)fdm_dtype_bytes(dtype)};
    return FDM_OK;
}

static fdm_status check_table(const fdm_cache *cache) {
    const int32_t axes = cache->page_start ? 1 : 2;
    if (!cache->block_table)
        return cache->page_start ? error_set(FDM_ERROR_INVALID_ARGUMENT, "page_start is given, but block_table is not")
                                 : FDM_OK;
    if (cache->block_table->ndim != axes || !cache->block_table->shape)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "block_table has %d axes; it needs %d, [%s",
                         cache->block_table->ndim, axes,
                         axes == 1 ? "pages of all sequences] beside page_start" : "rows, pages]");
    for (int32_t i = 0; i < axes; i++)
        if (cache->block_table->shape[i] < 0 || cache->block_table->shape[i] > INT32_MAX)
            return error_set(FDM_ERROR_INVALID_ARGUMENT, "block_table has extent %lld on axis %d; it must be in 0..%d",
                             (long long)cache->block_table->shape[i], i, INT32_MAX);
    return FDM_OK;
}

fdm_status cache_describe(const fdm_cache *cache, const fdm_tensor *k, int64_t max_seqlen_k, fdm_problem *p) {
    const int64_t pages = k->shape[0], rows = k->shape[1];
    fdm_status status = check_table(cache);
    if (status)
        return status;
    if (pages > INT32_MAX || rows > INT32_MAX)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "k has %lld pages of %lld rows; both are at most %d",
                         (long long)pages, (long long)rows, INT32_MAX);
    if (cache->block_table && rows < 1)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "k has pages of %lld rows; a page has 1 at least",
                         (long long)rows);
    p->has_cache = 1;
    p->num_pages = (int32_t)pages;
    p->page_size = cache->block_table ? (int32_t)rows : 0;
    p->ragged_pages = cache->page_start != NULL;
    p->max_pages = cache->block_table ? (int32_t)cache->block_table->shape[!p->ragged_pages] : 0;
    const int64_t room = cache->block_table ? (int64_t)p->max_pages * rows : rows;
    p->seqlen_k = max_seqlen_k > 0 ? max_seqlen_k : smaller(room, INT32_MAX);
    return FDM_OK;
}

/* cos and sin: [n, R / 2] of q's dtype or float32. */
static fdm_status resolve_rotary(const fdm_cache *cache, const fdm_tensor *k, fdm_problem *p,
                                 struct rotary_view *view) {
    const fdm_tensor *pair[2] = {cache->rotary_cos, cache->rotary_sin};
    static const char *const names[2] = {"rotary_cos", "rotary_sin"};
    *view = (struct rotary_view){0};
    if (!pair[0] && !pair[1])
        return cache->rotary_start ? error_set(FDM_ERROR_INVALID_ARGUMENT,
                                               "rotary_start is given, but rotary_cos and rotary_sin are not")
                                   : FDM_OK;
    if (!pair[0] || !pair[1])
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is missing; rotary_cos and rotary_sin are a pair",
                         names[pair[0] != NULL]);
    if (pair[0]->ndim != 2 || !pair[0]->shape)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "rotary_cos has %d axes; it needs 2 [positions, dims / 2]",
                         pair[0]->ndim);
    const fdm_dtype dtype = fdm_dtype_of(pair[0]) == FDM_FLOAT32 ? FDM_FLOAT32 : p->dtype;
    for (int i = 0; i < 2; i++) {
        const fdm_status status = tensor_check_as(pair[i], names[i], 2, TENSOR_INPUT, dtype, pair[0]->shape, k, "k");
        if (status)
            return status;
        if (pair[i]->shape[1] > 1 && tensor_stride(pair[i], 1) != 1)
            return error_set(FDM_ERROR_INVALID_ARGUMENT,
                             "%s has stride %lld on its last axis; it must be contiguous (1)", names[i],
                             (long long)tensor_stride(pair[i], 1));
    }
    if (pair[0]->shape[0] < 1 || pair[0]->shape[1] < 1 || 2 * pair[0]->shape[1] > p->head_dim)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "rotary_cos has shape [%lld, %lld]; it needs a position, and from 1 to %lld pairs of dims",
                         (long long)pair[0]->shape[0], (long long)pair[0]->shape[1], (long long)p->head_dim / 2);
    if (cache->rotary_interleaved != 0 && cache->rotary_interleaved != 1)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "rotary_interleaved is %d; it must be 0 or 1",
                         cache->rotary_interleaved);
    p->rotary_dim = (int32_t)(2 * pair[0]->shape[1]);
    p->rotary_interleaved = cache->rotary_interleaved;
    *view = (struct rotary_view){.cosines = tensor_data(pair[0]),
                                 .sines = tensor_data(pair[1]),
                                 .cosine_row = tensor_stride(pair[0], 0),
                                 .sine_row = tensor_stride(pair[1], 0),
                                 .num_rows = pair[0]->shape[0],
                                 .dtype = dtype,
                                 .dim = p->rotary_dim,
                                 .interleaved = p->rotary_interleaved};
    return cache_indices(cache->rotary_start, "rotary_start", 1, &p->batch, 0, k, &view->start);
}

static fdm_status resolve_new(const fdm_cache *cache, const fdm_tensor *k, int has_slots, fdm_problem *p,
                              struct attention *a) {
    struct cache_view *c = &a->cache;
    const int32_t packed = cache->cu_seqlens_new || has_slots;
    if (!cache->k_new && !cache->v_new)
        return cache->cu_seqlens_new
                   ? error_set(FDM_ERROR_INVALID_ARGUMENT, "cu_seqlens_new is given, but k_new and v_new are not")
                   : FDM_OK;
    if (!cache->k_new || !cache->v_new)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s_new is missing; k_new and v_new are a pair",
                         cache->k_new ? "v" : "k");
    if (!cache->lengths && !a->seqused_k.data && !has_slots)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "k_new is given without lengths; appending needs to know where each sequence ends");
    fdm_status status = tensor_check(cache->k_new, "k_new", 4 - packed, TENSOR_INPUT, 1);
    if (status || (status = tensor_check_device(cache->k_new, "k_new", k, "k")) ||
        (status = tensor_check(cache->v_new, "v_new", 4 - packed, TENSOR_INPUT, 1)) ||
        (status = tensor_check_device(cache->v_new, "v_new", k, "k")))
        return status;
    const int64_t rows = cache->k_new->shape[1 - packed];
    const int64_t k_shape[4] = {p->batch, rows, p->heads_kv, p->head_dim},
                  v_shape[4] = {p->batch, rows, p->heads_kv, p->head_dim_v};
    if ((status = problem_resolve_matrix(cache->k_new, "k_new", TENSOR_INPUT, packed, k_shape, p, &c->k_new)) ||
        (status = problem_resolve_matrix(cache->v_new, "v_new", TENSOR_INPUT, packed, v_shape, p, &c->v_new)))
        return status;
    p->new_rows = packed ? rows : p->batch * rows;
    c->seqlen_new = packed ? 0 : rows;
    if (!cache->cu_seqlens_new)
        return FDM_OK;
    int64_t longest;
    if ((status = lengths_check_cu_seqlens(cache->cu_seqlens_new, "cu_seqlens_new", p->batch, rows, &longest)))
        return status;
    const int64_t offsets[1] = {p->batch + 1};
    return cache_indices(cache->cu_seqlens_new, "cu_seqlens_new", 1, offsets, 0, k, &c->cu_seqlens_new);
}

static fdm_status resolve_lists(const fdm_cache *cache, const fdm_tensor *k, fdm_problem *p, struct attention *a) {
    struct cache_view *c = &a->cache;
    const int64_t batch[1] = {p->batch};
    fdm_status status;
    if (cache->lengths && a->seqused_k.data)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "lengths and seqused_k are both given; one of them says how many keys there are");
    if ((status = cache_indices(cache->lengths, "lengths", 1, batch, 0, k, &c->lengths)) ||
        (status = cache_indices(cache->first_key, "first_key", 1, batch, 0, k, &c->first_key)) ||
        (status = cache_indices(cache->cache_row, "cache_row", 1, batch, 0, k, &c->cache_row)))
        return status;
    p->has_first_key = cache->first_key != NULL;
    p->has_cache_row = cache->cache_row != NULL;
    const fdm_tensor *lists = cache->page_start ? cache->page_start : cache->block_table ? cache->block_table : k;
    const char *name = cache->page_start ? "page_start" : cache->block_table ? "block_table" : "k";
    if (cache->page_start && (cache->page_start->ndim != 1 || !cache->page_start->shape))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "page_start has %d axes; it needs 1", cache->page_start->ndim);
    c->num_lists = lists->shape[0];
    const int with_end = cache->page_start && !cache->cache_row && c->num_lists == p->batch + 1;
    if (!cache->cache_row && c->num_lists != p->batch + with_end)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "%s has extent %lld on axis 0; it must be the batch %lld%s, unless cache_row is given", name,
                         (long long)c->num_lists, (long long)p->batch, cache->page_start ? ", or one more" : "");
    if ((status = cache_indices(cache->page_start, "page_start", 1, &c->num_lists, 1, k, &c->page_start)))
        return status;
    if (!cache->block_table)
        return FDM_OK;
    status = cache_indices(cache->block_table, "block_table", cache->block_table->ndim, cache->block_table->shape, 1, k,
                           &c->table);
    if (p->ragged_pages) {
        c->table.column = c->table.row;
        c->table.row = 0;
    }
    return status;
}

static fdm_status resolve_fault(const fdm_cache *cache, const fdm_tensor *k, struct cache_view *c) {
    static const int64_t shape[1] = {4};
    if (!cache->fault)
        return FDM_OK;
    const fdm_status status = tensor_check_as(cache->fault, "fault", 1, TENSOR_OUTPUT, FDM_INT32, shape, k, "k");
    if (!status && tensor_stride(cache->fault, 0) != 1)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "fault has a stride of %lld elements; it must be contiguous",
                         (long long)tensor_stride(cache->fault, 0));
    c->fault = (int32_t *)(void *)tensor_data(cache->fault);
    return status;
}

fdm_status cache_resolve(const fdm_cache *cache, const fdm_tensor *k, const fdm_tensor *v, int has_slots,
                         fdm_problem *p, struct attention *a) {
    const enum tensor_role role = cache->k_new ? TENSOR_OUTPUT : TENSOR_INPUT;
    const int64_t rows = k->shape[1], k_shape[4] = {p->num_pages, rows, p->heads_kv, p->head_dim},
                  v_shape[4] = {p->num_pages, rows, p->heads_kv, p->head_dim_v};
    a->cache = (struct cache_view){.page_rows = rows};
    fdm_status status = problem_resolve_matrix(k, "k", role, 0, k_shape, p, &a->k);
    if (!status)
        status = problem_resolve_matrix(v, "v", role, 0, v_shape, p, &a->v);
    if (!status && !has_slots)
        status = resolve_lists(cache, k, p, a);
    if (!status)
        status = resolve_new(cache, k, has_slots, p, a);
    if (!status)
        status = resolve_rotary(cache, k, p, &a->cache.rotary);
    if (!status)
        status = resolve_fault(cache, k, &a->cache);
    return status;
}

/* ---- sequences and where their keys lie ---- */

int64_t cache_index(const struct index_view *view, int64_t row, int64_t column) {
    const int64_t at = row * view->row + column * view->column;
    return view->bytes == 8 ? ((const int64_t *)(const void *)view->data)[at]
                            : ((const int32_t *)(const void *)view->data)[at];
}

/* The row of the table, list or cache that belongs to sequence b. */
static int64_t list_of(const struct cache_view *c, int64_t b) {
    return c->cache_row.data ? cache_index(&c->cache_row, b, 0) : b;
}

/* Entries of a ragged table from page_start on; below 0 where it ends before. */
static int64_t entries_of(const struct attention *a, int64_t list) {
    const struct cache_view *c = &a->cache;
    const int has_end = !c->cache_row.data && c->num_lists == a->problem->batch + 1;
    const int64_t first = cache_index(&c->page_start, list, 0), all = a->problem->max_pages;
    const int64_t end = has_end ? cache_index(&c->page_start, list + 1, 0) : all;
    return (end < 0 ? -1 : smaller(end, all)) - first;
}

/* Whether sequence b has a list, in the table or the cache. */
static int has_list(const struct attention *a, int64_t b) {
    const struct cache_view *c = &a->cache;
    const int64_t list = list_of(c, b);
    return list >= 0 && list < c->num_lists &&
           (!c->page_start.data || (cache_index(&c->page_start, list, 0) >= 0 && entries_of(a, list) >= 0));
}

static int64_t room_of(const struct attention *a, int64_t b) {
    const struct cache_view *c = &a->cache;
    const int64_t columns = !c->table.data       ? 1
                            : c->page_start.data ? entries_of(a, list_of(c, b))
                                                 : a->problem->max_pages;
    return smaller(columns * c->page_rows, a->problem->seqlen_k);
}

void cache_sequence(const struct attention *a, int64_t b, struct sequence *s) {
    const struct cache_view *c = &a->cache;
    int64_t added = c->seqlen_new;
    if (c->cu_seqlens_new.data) {
        s->new_begin = cache_index(&c->cu_seqlens_new, b, 0);
        added = cache_index(&c->cu_seqlens_new, b + 1, 0) - s->new_begin;
    }
    const int64_t room = has_list(a, b) ? room_of(a, b) : 0;
    const int64_t old = c->lengths.data     ? cache_index(&c->lengths, b, 0)
                        : a->seqused_k.data ? cache_index(&a->seqused_k, b, 0) - added
                                            : room;
    s->seqlen_k = old < 0 ? 0 : smaller(old + added, room);
    s->cached_keys = old < 0 ? 0 : smaller(old, room);
    s->first_key = c->first_key.data ? cache_index(&c->first_key, b, 0) : 0;
    if (s->first_key < 0)
        s->first_key = 0;
}

static int64_t page_of(const struct attention *a, int64_t b, int64_t column) {
    const struct cache_view *c = &a->cache;
    const int64_t list = list_of(c, b);
    if (!c->table.data)
        return list;
    return c->page_start.data ? cache_index(&c->table, 0, cache_index(&c->page_start, list, 0) + column)
                              : cache_index(&c->table, list, column);
}

struct key_place cache_place_in_pages(const struct attention *a, int64_t b, int64_t j) {
    const int64_t rows = a->cache.page_rows;
    return (struct key_place){&a->k, &a->v, page_of(a, b, j / rows), j % rows, rows - j % rows};
}

struct key_place cache_key_place(const struct attention *a, const struct sequence *s, int64_t b, int64_t j) {
    const struct cache_view *c = &a->cache;
    if (j >= s->cached_keys)
        return (struct key_place){&c->k_new, &c->v_new, b, s->new_begin + j - s->cached_keys, s->seqlen_k - j};
    struct key_place place = cache_place_in_pages(a, b, j);
    place.count = smaller(place.count, s->cached_keys - j);
    return place;
}

/* ---- what the host can check ---- */

static fdm_status check_sequence(const struct attention *a, int64_t b) {
    const struct cache_view *c = &a->cache;
    const int64_t pages = a->problem->num_pages;
    if (c->lengths.data ? cache_index(&c->lengths, b, 0) < 0
                        : a->seqused_k.data && cache_index(&a->seqused_k, b, 0) < 0)
        return FDM_OK;
    const int64_t list = list_of(c, b);
    if (list < 0 || list >= c->num_lists)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "cache_row of sequence %lld is %lld; there are %lld rows",
                         (long long)b, (long long)list, (long long)c->num_lists);
    if (!has_list(a, b))
        return error_set(
            FDM_ERROR_INVALID_ARGUMENT,
            "page_start of sequence %lld is %lld; lists begin and end within the %d entries of block_table",
            (long long)b, (long long)cache_index(&c->page_start, list, 0), a->problem->max_pages);
    const struct sequence s = attention_sequence(a, b);
    if (!c->table.data)
        return FDM_OK;
    for (int64_t column = smaller(s.first_key, s.seqlen_k) / c->page_rows; column * c->page_rows < s.seqlen_k;
         column++) {
        const int64_t page = page_of(a, b, column);
        if (page < 0 || page >= pages)
            return error_set(FDM_ERROR_INVALID_ARGUMENT,
                             "block_table of sequence %lld holds page %lld in column %lld; the cache has %lld pages",
                             (long long)b, (long long)page, (long long)column, (long long)pages);
    }
    return FDM_OK;
}

fdm_status cache_check_pages(const struct attention *a) {
    fdm_status status = FDM_OK;
    for (int64_t b = 0; b < a->problem->batch && !status; b++)
        status = check_sequence(a, b);
    return status;
}
