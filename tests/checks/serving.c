/* serving.c: the same problem with a tree, and as a call on a cache: K and V of a trial scattered over pages, its last
 * keys appended by the call, and what the call turns turned back before. The truth stays the trial's own. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "checks.h"
#include "problem/problem.h"

enum { NEW_NONE, NEW_DENSE, NEW_PACKED };

/* Of a sequence: its keys in the call, the first visible one, how many are appended, where its packed new ones begin,
 * and its pages, from the cache's list on. */
struct served {
    int64_t keys, pad, added, new_begin, list, num_pages, *pages;
};
struct serving {
    struct served *sequences;
    int64_t page_rows, bound;
    int form, turns, lengths_after;
};

static int64_t garbage(struct trial *t) { return PICK(t, -1, -7, INT32_MIN, INT32_MAX, 123456789); }

/* ---- latent ---- */

/* The tensor of V that a call has: the first columns of K, or of the cache. */
static void view_values(struct trial *t, enum role keys) {
    const int32_t last = t->g[keys].tensor.ndim - 1;
    memcpy(t->latent_shape, t->g[keys].shape, sizeof t->latent_shape);
    t->latent_shape[last] = t->head_dim_v;
    t->latent_v = t->g[keys].tensor;
    t->latent_v.shape = t->latent_shape;
}

void trial_share_values(struct trial *t) {
    const int64_t d = t->head_dim, dv = t->head_dim_v;
    const int32_t axes = t->g[V].tensor.ndim;
    int64_t shape[4];
    memcpy(shape, t->g[V].shape, sizeof shape);
    guarded_free(&t->g[V]); /* axes of the one drawn may be shared */
    guarded_make(&t->g[V], t, t->dtype, axes, shape, 0);
    for (int64_t n = 0; n < guarded_elements(&t->g[V]); n++)
        guarded_set(&t->g[V], n, guarded_get(&t->g[K], n / dv * d + n % dv));
    view_values(t, K);
}

/* ---- lengths ---- */

/* Lengths within what the trial has, and a little beside it. */
static void draw_used(struct trial *t, enum role role, int64_t longest) {
    const int64_t shape[1] = {t->batch};
    guarded_make(&t->g[role], t, FDM_INT32, 1, shape, 0);
    for (int64_t b = 0; b < t->batch; b++)
        guarded_set(&t->g[role], b,
                    (double)(random_below(t, 4) ? random_below(t, longest + 1)
                                                : PICK(t, -1, -5, 0, longest, longest + 3, INT32_MAX)));
}

static int64_t largest_of(const struct trial *t, int of_pads) {
    int64_t largest = 0;
    for (int64_t b = 0; b < t->batch; b++) {
        const struct served *s = &t->serving->sequences[b];
        const int64_t n = of_pads ? s->pad : s->keys;
        largest = n > largest ? n : largest;
    }
    return largest;
}

static void draw_lengths(struct trial *t, const struct attention *a) {
    struct serving *v = t->serving;
    /* The truth has no padding, so its keys have other numbers than the cache's. */
    const int numbered = t->g[MASK].map || t->g[BIAS].map || t->g[ROW_START].map || t->g[BLOCKS].map;
    const int form = t->latent ? NEW_NONE : (int)random_below(t, 3);
    const int pads = !t->latent && !numbered && random_below(t, 2);
    int64_t least = 20, begin = random_below(t, 3);
    v->form = form;
    for (int64_t b = 0; b < t->batch; b++) {
        struct served *s = &v->sequences[b];
        const int64_t keys = attention_sequence(a, b).seqlen_k;
        s->pad = pads && keys && random_below(t, 3) ? random_below(t, 40) : 0;
        s->keys = keys + s->pad;
        least = keys && keys < least ? keys : least;
    }
    const int64_t dense = 1 + random_below(t, least);
    for (int64_t b = 0; b < t->batch; b++) {
        struct served *s = &v->sequences[b];
        const int64_t keys = s->keys - s->pad;
        s->added = form == NEW_DENSE ? (keys ? dense : 0) : form == NEW_PACKED ? random_below(t, keys + 1) : 0;
        s->new_begin = begin;
        begin += s->added;
    }
    v->bound = t->seqlen_k + largest_of(t, 1);
    const int64_t shape[1] = {t->batch}, offsets[1] = {t->batch + 1};
    v->lengths_after = (int)random_below(t, 2);
    guarded_make(&t->g[LENGTHS], t, FDM_INT32, 1, shape, 2);
    if (pads)
        guarded_make(&t->g[FIRST_KEY], t, FDM_INT32, 1, shape, 2);
    if (form == NEW_PACKED)
        guarded_make(&t->g[CU_NEW], t, FDM_INT32, 1, offsets, 0);
    for (int64_t b = 0; b < t->batch; b++) {
        const struct served *s = &v->sequences[b];
        const int none = s->keys == 0 && (form == NEW_DENSE || random_below(t, 2));
        guarded_set(&t->g[LENGTHS], b, none ? -1 : (double)(s->keys - (v->lengths_after ? 0 : s->added)));
        if (pads)
            guarded_set(&t->g[FIRST_KEY], b, s->pad || random_below(t, 2) ? (double)s->pad : -3);
        if (form == NEW_PACKED)
            guarded_set(&t->g[CU_NEW], b, (double)s->new_begin);
    }
    if (form == NEW_PACKED)
        guarded_set(&t->g[CU_NEW], t->batch, (double)begin);
    const int64_t rows = form == NEW_DENSE ? dense : begin + random_below(t, 3);
    for (int of_values = 0; of_values < 2 && form; of_values++) {
        const int64_t full[4] = {t->batch, rows, t->heads_kv, of_values ? t->head_dim_v : t->head_dim};
        guarded_make(&t->g[of_values ? V_NEW : K_NEW], t, t->dtype, form == NEW_DENSE ? 4 : 3,
                     full + (form != NEW_DENSE), 0);
    }
}

/* ---- pages ---- */

/* Numbers below n in a random order. */
static int64_t *shuffled(struct trial *t, int64_t n) {
    int64_t *list = malloc((size_t)(n + 1) * sizeof *list);
    for (int64_t i = 0; i < n; i++) {
        const int64_t j = random_below(t, i + 1);
        list[i] = list[j];
        list[j] = i;
    }
    return list;
}

/* Which row of the table, or of the cache, belongs to each sequence: its own, or any of a few more. */
static int64_t draw_rows(struct trial *t) {
    const int64_t shape[1] = {t->batch}, rows = random_below(t, 2) ? t->batch + random_below(t, 3) : 0;
    int64_t *order = shuffled(t, rows);
    if (rows)
        guarded_make(&t->g[CACHE_ROW], t, FDM_INT32, 1, shape, 2);
    for (int64_t b = 0; b < t->batch; b++) {
        t->serving->sequences[b].list = rows ? order[b] : b;
        if (rows)
            guarded_set(&t->g[CACHE_ROW], b, (double)order[b]);
    }
    free(order);
    return rows ? rows : t->batch;
}

/* A table [rows, columns], or lists one behind the other with page_start. */
static void draw_table(struct trial *t, int64_t rows) {
    const struct serving *v = t->serving;
    const fdm_dtype dtype = random_below(t, 2) ? FDM_INT32 : FDM_INT64;
    const int ragged = random_below(t, 2) == 0, with_ends = ragged && !t->g[CACHE_ROW].map && random_below(t, 2);
    const int64_t columns = (v->bound + v->page_rows - 1) / v->page_rows + (v->bound ? random_below(t, 3) : 0);
    int64_t entries = 0, starts[2] = {rows + with_ends, 0};
    for (int64_t b = 0; b < t->batch && ragged; b++)
        entries += t->serving->sequences[b].num_pages;
    const int64_t shape[2] = {rows, columns}, all[1] = {entries + (with_ends ? 0 : columns)};
    guarded_make(&t->g[TABLE], t, dtype, ragged ? 1 : 2, ragged ? all : shape, 2);
    for (int64_t n = 0; n < guarded_elements(&t->g[TABLE]); n++)
        guarded_set(&t->g[TABLE], n, (double)garbage(t));
    if (ragged)
        guarded_make(&t->g[PAGE_START], t, random_below(t, 2) ? FDM_INT32 : FDM_INT64, 1, starts, 2);
    for (int64_t n = 0; ragged && n < rows; n++)
        guarded_set(&t->g[PAGE_START], n, 0);
    int64_t at = 0;
    for (int64_t b = 0; b < t->batch; b++) {
        const struct served *s = &v->sequences[b];
        if (ragged)
            guarded_set(&t->g[PAGE_START], s->list, (double)at);
        for (int64_t c = 0; c < s->num_pages; c++)
            guarded_set(&t->g[TABLE], ragged ? at + c : s->list * columns + c, (double)s->pages[c]);
        at += ragged ? s->num_pages : 0;
    }
    if (with_ends)
        guarded_set(&t->g[PAGE_START], rows, (double)at);
}

static void draw_pages(struct trial *t) {
    struct serving *v = t->serving;
    const int paged = random_below(t, 4) != 0;
    const int64_t rows = draw_rows(t);
    v->page_rows = !paged      ? v->bound + random_below(t, 5)
                   : t->latent ? PICK(t, 1, 16, 16, 32, 48, 64, 64, 100, 128)
                               : PICK(t, 1, 2, 3, 5, 8, 16, 48, 64, 100, 256);
    int64_t needed = 0, next = 0;
    for (int64_t b = 0; b < t->batch; b++) {
        struct served *s = &v->sequences[b];
        s->num_pages = paged ? (s->keys + v->page_rows - 1) / v->page_rows : 1;
        s->pages = malloc((size_t)(s->num_pages + 1) * sizeof *s->pages);
        needed += s->num_pages;
    }
    const int64_t pages = paged ? needed + random_below(t, 4) : rows;
    int64_t *order = shuffled(t, pages);
    for (int64_t b = 0; b < t->batch; b++) {
        struct served *s = &v->sequences[b];
        for (int64_t c = 0; c < s->num_pages; c++)
            s->pages[c] = paged ? order[next++] : s->list;
    }
    free(order);
    for (int of_values = 0; of_values < 2 - t->latent; of_values++) {
        const int64_t shape[4] = {pages, v->page_rows, t->heads_kv, of_values ? t->head_dim_v : t->head_dim};
        guarded_make(&t->g[of_values ? CACHE_V : CACHE_K], t, t->dtype, 4, shape, 0);
    }
    if (paged)
        draw_table(t, rows);
}

/* ---- rotary ---- */

/* Quarter turns are exact in every dtype: no more can be said of bits, but of pairs, positions and dims all. A column
 * more than there are pairs lies behind them. */
static void draw_rotary(struct trial *t) {
    const int64_t pairs = t->head_dim / 2, chosen = pairs ? 1 + random_below(t, pairs) : 0;
    const int64_t shape[2] = {1 + random_below(t, 60), chosen + 1}, batch[1] = {t->batch};
    for (enum role role = Q; role <= K && t->serving->turns; role++)
        for (int64_t n = 0; n < guarded_elements(&t->g[role]); n++) {
            const double x = guarded_get(&t->g[role], n);
            t->serving->turns &= isfinite(x) && x != 0;
        }
    t->serving->turns &= chosen > 0;
    if (!t->serving->turns)
        return;
    const fdm_dtype dtype = random_below(t, 2) ? FDM_FLOAT32 : t->dtype;
    guarded_make(&t->g[COS], t, dtype, 2, shape, 0);
    guarded_make(&t->g[SIN], t, dtype, 2, shape, 0);
    for (int64_t n = 0; n < guarded_elements(&t->g[COS]); n++) {
        const int64_t turn = random_below(t, 4);
        guarded_set(&t->g[COS], n, turn == 0 ? 1 : turn == 2 ? -1 : 0);
        guarded_set(&t->g[SIN], n, turn == 1 ? 1 : turn == 3 ? -1 : 0);
    }
    t->g[COS].shape[1] = t->g[SIN].shape[1] = chosen;
    t->cache.rotary_interleaved = (int32_t)random_below(t, 2);
    if (random_below(t, 2)) {
        guarded_make(&t->g[ROTARY_START], t, FDM_INT32, 1, batch, 2);
        for (int64_t b = 0; b < t->batch; b++)
            guarded_set(&t->g[ROTARY_START], b, (double)(random_below(t, shape[0] + 6) - 3));
    }
    guarded_make(&t->g[Q_GIVEN], t, t->dtype, t->g[Q].tensor.ndim, t->g[Q].shape, 0);
}

/* The row that `first` is of `to`, from that of `from`; turned back from `position` on. */
static void copy_row(struct trial *t, enum role to, int64_t to_first, enum role from, int64_t from_first, int64_t depth,
                     int64_t position, int turns) {
    const int64_t pairs = turns ? t->g[COS].shape[1] : 0, rows = turns ? t->g[COS].shape[0] : 0;
    for (int64_t d = 2 * pairs; d < depth; d++)
        guarded_set(&t->g[to], to_first + d, guarded_get(&t->g[from], from_first + d));
    position = position < 0 ? 0 : position < rows ? position : rows - 1;
    for (int64_t n = 0; n < pairs; n++) {
        const int64_t one = t->cache.rotary_interleaved ? 2 * n : n,
                      other = t->cache.rotary_interleaved ? one + 1 : n + pairs;
        const double a = guarded_get(&t->g[from], from_first + one), b = guarded_get(&t->g[from], from_first + other);
        const double c = guarded_get(&t->g[COS], position * pairs + n),
                     s = guarded_get(&t->g[SIN], position * pairs + n);
        guarded_set(&t->g[to], to_first + one, a * c + b * s);
        guarded_set(&t->g[to], to_first + other, b * c - a * s);
    }
}

/* ---- the call ---- */

int trial_serve(struct trial *t) {
    static struct serving serving;
    static struct served sequences[64];
    fdm_problem problem;
    struct attention attention;
    if (t->far || t->named || t->batch > 64)
        return 0;
    if (random_below(t, 2))
        draw_used(t, USED_Q, t->seqlen_q);
    if (random_below(t, 2))
        draw_used(t, USED_K, t->seqlen_k);
    snprintf(t->text + strlen(t->text), sizeof t->text - strlen(t->text), "%s%s", t->g[USED_Q].map ? " seqused_q" : "",
             t->g[USED_K].map ? " seqused_k" : "");
    if (!t->options.causal && random_below(t, 2)) {
        draw_tree(t);
        snprintf(t->text + strlen(t->text), sizeof t->text - strlen(t->text), " tree");
    }
    if (t->g[START].map || random_below(t, 4) == 0)
        return t->g[USED_Q].map || t->g[USED_K].map;
    const fdm_tensors tensors = trial_tensors(t, FDM_FORWARD);
    if (problem_from_tensors(FDM_FORWARD, &tensors, &t->options, &problem, &attention))
        return 0;
    memset(sequences, 0, sizeof sequences);
    serving = (struct serving){.sequences = sequences, .turns = t->seed % 2 && !trial_wants_nan(t) && !t->latent};
    t->serving = &serving;
    t->contradicts = 0;
    draw_lengths(t, &attention);
    draw_pages(t);
    draw_rotary(t);
    if (t->latent)
        view_values(t, CACHE_K);
    snprintf(t->text + strlen(t->text), sizeof t->text - strlen(t->text), " cache of %lld pages of %lld, %s%s%s%s%s",
             (long long)t->g[CACHE_K].shape[0], (long long)serving.page_rows,
             t->g[PAGE_START].map ? "ragged"
             : t->g[TABLE].map    ? "table"
                                  : "contiguous",
             t->g[CACHE_ROW].map ? " cache_row" : "", t->g[FIRST_KEY].map ? " first_key" : "",
             serving.form == NEW_DENSE    ? " new"
             : serving.form == NEW_PACKED ? " packed new"
                                          : "",
             serving.turns ? " rotary" : "");
    return 1;
}

void trial_serve_free(struct trial *t) {
    for (int64_t b = 0; t->serving && b < t->batch; b++)
        free(t->serving->sequences[b].pages);
    t->serving = NULL;
}

/* Element (batch, row, head, 0) of a tensor, packed or not. */
static int64_t element_of(const struct guarded *g, int64_t b, int64_t row, int64_t head) {
    const int64_t *shape = g->shape + g->tensor.ndim - 3;
    return ((b * shape[0] + row) * shape[1] + head) * shape[2];
}

static int64_t cached_element(const struct trial *t, enum role role, const struct served *s, int64_t key,
                              int64_t head) {
    const int64_t rows = t->serving->page_rows;
    const int64_t page = t->g[TABLE].map ? s->pages[key / rows] : s->pages[0];
    return element_of(&t->g[role], page, t->g[TABLE].map ? key % rows : key, head);
}

static int64_t start_of(const struct trial *t, int64_t b) {
    const struct served *s = &t->serving->sequences[b];
    return t->g[ROTARY_START].map ? (int64_t)guarded_get(&t->g[ROTARY_START], b) : s->keys - s->added;
}

static void fill_keys(struct trial *t, int64_t b, const struct sequence *of_trial) {
    const struct served *s = &t->serving->sequences[b];
    const int dense_new = t->serving->form == NEW_DENSE;
    for (int64_t key = s->pad; key < s->keys; key++)
        for (int64_t h = 0; h < t->heads_kv; h++) {
            const int64_t row = of_trial->k_begin + key - s->pad, added = key - (s->keys - s->added);
            const int64_t from_b = t->varlen ? 0 : b, new_b = dense_new ? b : 0;
            const int64_t k = element_of(&t->g[K], from_b, row, h), v = element_of(&t->g[V], from_b, row, h);
            copy_row(t, CACHE_K, cached_element(t, CACHE_K, s, key, h), K, k, t->head_dim, 0, 0);
            if (!t->latent)
                copy_row(t, CACHE_V, cached_element(t, CACHE_V, s, key, h), V, v, t->head_dim_v, 0, 0);
            if (added < 0)
                continue;
            const int64_t new_row = (dense_new ? 0 : s->new_begin) + added;
            copy_row(t, K_NEW, element_of(&t->g[K_NEW], new_b, new_row, h), K, k, t->head_dim, start_of(t, b) + added,
                     t->serving->turns);
            copy_row(t, V_NEW, element_of(&t->g[V_NEW], new_b, new_row, h), V, v, t->head_dim_v, 0, 0);
        }
}

void trial_serve_fill(struct trial *t) {
    fdm_problem problem;
    struct attention attention;
    const fdm_tensors tensors = trial_tensors(t, FDM_FORWARD);
    const int moves = t->options.causal || t->options.window_left >= 0 || t->options.window_right >= 0;
    if (!t->serving || problem_from_tensors(FDM_FORWARD, &tensors, &t->options, &problem, &attention))
        return;
    for (int64_t b = 0; b < t->batch; b++) {
        const struct sequence s = attention_sequence(&attention, b);
        fill_keys(t, b, &s);
        for (int64_t i = 0; i < s.seqlen_q && t->serving->turns; i++)
            for (int64_t h = 0; h < t->heads; h++) {
                const int64_t at = element_of(&t->g[Q], t->varlen ? 0 : b, s.q_begin + i, h);
                copy_row(t, Q_GIVEN, at, Q, at, t->head_dim, start_of(t, b) + (moves ? i : 0), 1);
            }
    }
}

void trial_serve_erase(struct trial *t) {
    for (int64_t b = 0; t->serving && b < t->batch; b++) {
        const struct served *s = &t->serving->sequences[b];
        for (int64_t key = s->keys - s->added; key < s->keys; key++)
            for (int64_t h = 0; h < t->heads_kv; h++) {
                for (int64_t d = 0; d < t->head_dim; d++)
                    guarded_set(&t->g[CACHE_K], cached_element(t, CACHE_K, s, key, h) + d, NAN);
                for (int64_t d = 0; d < t->head_dim_v; d++)
                    guarded_set(&t->g[CACHE_V], cached_element(t, CACHE_V, s, key, h) + d, NAN);
            }
    }
}

int64_t trial_serve_bound(const struct trial *t) { return t->serving->bound; }

static const fdm_tensor *present(const struct guarded *g) { return g->map ? &g->tensor : NULL; }

fdm_tensors trial_call(struct trial *t, fdm_pass pass) {
    fdm_tensors s = trial_tensors(t, pass);
    const struct guarded *g = t->g;
    if (t->latent && pass == FDM_FORWARD)
        s.v = &t->latent_v;
    if (pass == FDM_BACKWARD || !g[CACHE_K].map)
        return s;
    t->cache = (fdm_cache){.struct_bytes = sizeof t->cache,
                           .rotary_interleaved = t->cache.rotary_interleaved,
                           .block_table = present(&g[TABLE]),
                           .page_start = present(&g[PAGE_START]),
                           .cache_row = present(&g[CACHE_ROW]),
                           .lengths = t->serving->lengths_after ? NULL : &g[LENGTHS].tensor,
                           .first_key = present(&g[FIRST_KEY]),
                           .k_new = present(&g[K_NEW]),
                           .v_new = present(&g[V_NEW]),
                           .cu_seqlens_new = present(&g[CU_NEW]),
                           .rotary_cos = present(&g[COS]),
                           .rotary_sin = present(&g[SIN]),
                           .rotary_start = present(&g[ROTARY_START])};
    s.q = g[Q_GIVEN].map ? &g[Q_GIVEN].tensor : &g[Q].tensor;
    s.k = &g[CACHE_K].tensor;
    s.v = t->latent ? s.v : &g[CACHE_V].tensor;
    s.cu_seqlens_k = NULL;
    s.seqused_k = t->serving->lengths_after ? &g[LENGTHS].tensor : NULL;
    s.cache = &t->cache;
    return s;
}
