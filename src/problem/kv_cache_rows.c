/* kv_cache_rows.c: on the CPU, new keys into a cache, and rotary embeddings of keys and queries. */
#include <string.h>

#include "base/elements.h"
#include "problem/kv_cache.h"

enum { ITEM_ROWS = 16 }; /* of a sequence: an item of work */

void cache_turn_row(const struct rotary_view *r, fdm_dtype dtype, int64_t depth, int64_t position, const char *from,
                    char *to) {
    const int64_t bytes = fdm_dtype_bytes(dtype), half = r->dim / 2;
    position = position < 0 ? 0 : position < r->num_rows ? position : r->num_rows - 1;
    if (to != from)
        memcpy(to + r->dim * bytes, from + r->dim * bytes, (size_t)((depth - r->dim) * bytes));
    for (int64_t t = 0; t < half; t++) {
        const int64_t first = r->interleaved ? 2 * t : t, second = r->interleaved ? 2 * t + 1 : t + half;
        const double a = element_load(from, first, dtype), b = element_load(from, second, dtype);
        const double c = element_load(r->cosines, position * r->cosine_row + t, r->dtype);
        const double s = element_load(r->sines, position * r->sine_row + t, r->dtype);
        const int wide = dtype == FDM_FLOAT64;
        element_store(to, first, dtype, wide ? a * c - b * s : (double)((float)a * (float)c - (float)b * (float)s));
        element_store(to, second, dtype, wide ? a * s + b * c : (double)((float)a * (float)s + (float)b * (float)c));
    }
}

static char *row_at(const fdm_problem *p, const struct matrix_view *view, int64_t b, int64_t row, int64_t head) {
    return view->data + (b * view->batch + row * view->row + head * view->head) * fdm_dtype_bytes(p->dtype);
}

static int64_t query_rows(const fdm_problem *p) { return p->varlen ? p->total_q : p->batch * p->seqlen_q; }

int64_t cache_workspace(const fdm_problem *p) {
    if (!p->has_cache || p->rotary_dim == 0)
        return 0;
    return (query_rows(p) * p->heads + p->new_rows * p->heads_kv) * p->head_dim * fdm_dtype_bytes(p->dtype);
}

/* Most new keys of a sequence, as far as the call's form says it. */
static int64_t longest_new(const struct attention *a) {
    return a->cache.cu_seqlens_new.data ? a->problem->new_rows : a->cache.seqlen_new;
}

static int64_t blocks_of(const struct attention *a) {
    const int64_t turned = a->problem->rotary_dim ? a->problem->seqlen_q : 0, added = longest_new(a);
    return ((turned > added ? turned : added) + ITEM_ROWS - 1) / ITEM_ROWS;
}

int64_t cache_items(const struct attention *a) { return blocks_of(a) * a->problem->batch; }

int64_t cache_begin(struct attention *turned, char *workspace) {
    const fdm_problem *p = turned->problem;
    if (p->rotary_dim) {
        const int64_t q_row = p->heads * p->head_dim, k_row = p->heads_kv * p->head_dim;
        turned->q = (struct matrix_view){workspace, p->varlen ? 0 : p->seqlen_q * q_row, q_row, p->head_dim};
        if (turned->cache.k_new.data)
            turned->cache.k_new = (struct matrix_view){workspace + query_rows(p) * q_row * fdm_dtype_bytes(p->dtype),
                                                       turned->cache.seqlen_new * k_row, k_row, p->head_dim};
    }
    return cache_items(turned);
}

/* The position of row i of sequence b's queries or new keys, `all` of them in a sequence of a dense tensor. */
static int64_t position_of(const struct attention *a, int64_t b, int64_t begin, int64_t i, int64_t all,
                           int64_t otherwise) {
    const struct index_view *positions = &a->cache.rotary.positions;
    return positions->data ? cache_index(positions, b * all + begin + i, 0) : otherwise;
}

static void turn_query(const struct attention *a, const struct matrix_view *to, const struct sequence *s, int64_t b,
                       int64_t i, int64_t position) {
    const fdm_problem *p = a->problem;
    for (int64_t h = 0; h < p->heads; h++)
        cache_turn_row(&a->cache.rotary, p->dtype, p->head_dim, position, row_at(p, &a->q, b, s->q_begin + i, h),
                       row_at(p, to, b, s->q_begin + i, h));
}

/* New row `row` to `place`, turned; by way of the turned new keys where those are needed. */
static void write_key(const struct attention *a, const struct attention *turned, const struct key_place *place,
                      int64_t b, int64_t row, int64_t position) {
    const fdm_problem *p = a->problem;
    const int64_t bytes = fdm_dtype_bytes(p->dtype);
    for (int64_t h = 0; h < p->heads_kv; h++) {
        const char *k = row_at(p, &a->cache.k_new, b, row, h);
        char *k_to = row_at(p, place->k, place->batch, place->row, h);
        if (p->rotary_dim) {
            char *to = turned ? row_at(p, &turned->cache.k_new, b, row, h) : k_to;
            cache_turn_row(&a->cache.rotary, p->dtype, p->head_dim, position, k, to);
            k = to;
        }
        if (k != k_to)
            memcpy(k_to, k, (size_t)(p->head_dim * bytes));
        memcpy(row_at(p, place->v, place->batch, place->row, h), row_at(p, &a->cache.v_new, b, row, h),
               (size_t)(p->head_dim_v * bytes));
    }
}

void cache_run_item(const struct attention *a, const struct attention *turned, int64_t item) {
    const fdm_problem *p = a->problem;
    const int64_t blocks = blocks_of(a), b = item / blocks, first = item % blocks * ITEM_ROWS;
    const struct sequence s = attention_sequence(a, b);
    const int64_t added = s.seqlen_k - s.cached_keys, query_rows_of = p->varlen ? 0 : p->seqlen_q;
    const int64_t start = a->cache.rotary.start.data ? cache_index(&a->cache.rotary.start, b, 0) : s.cached_keys;
    const int moves = p->causal || p->window_left >= 0 || p->window_right >= 0;
    for (int64_t i = first; i < first + ITEM_ROWS; i++) {
        if (p->rotary_dim && i < s.seqlen_q)
            turn_query(a, turned ? &turned->q : &a->out, &s, b, i,
                       position_of(a, b, s.q_begin, i, query_rows_of, moves ? start + i : start));
        if (i >= added)
            continue;
        const struct key_place place = cache_place_in_pages(a, b, s.cached_keys + i);
        write_key(a, turned, &place, b, s.new_begin + i,
                  position_of(a, b, s.new_begin, i, a->cache.seqlen_new, start + i));
    }
}

void cache_write_slots(const struct attention *a, const struct index_view *slots) {
    const int64_t rows = a->cache.page_rows, all = rows * a->problem->num_pages;
    for (int64_t t = 0; t < a->problem->new_rows; t++) {
        const int64_t slot = cache_index(slots, t, 0);
        const struct key_place place = {&a->k, &a->v, slot / (rows ? rows : 1), slot % (rows ? rows : 1), 1};
        if (slot >= 0 && slot < all)
            write_key(a, NULL, &place, 0, t, position_of(a, 0, 0, t, 0, 0));
    }
}
