/* draw.c: one random problem from a seed: sizes around the kernels' tiles, every feature, fills that stress softmax. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "checks.h"
#include "structure.h"

#define ROLE_NAME(role, name) name,
const char *const role_names[NUM_ROLES] = {CHECK_ROLES(ROLE_NAME)};

/* splitmix64 (Steele, Lea, Flood, 2014). */
uint64_t random_bits(struct trial *trial) {
    uint64_t z = trial->random += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

int64_t random_below(struct trial *trial, int64_t n) { return (int64_t)(random_bits(trial) % (uint64_t)n); }

/* What decides how a kernel is specialised comes from the trial's way where there are so many, else from its seed. */
static int64_t way_below(struct trial *trial, int64_t n) {
    const uint64_t own = trial->random;
    if (!trial->of_ways)
        return random_below(trial, n);
    trial->random = trial->way_random;
    const int64_t number = random_below(trial, n);
    trial->way_random = trial->random;
    trial->random = own;
    return number;
}

static double uniform(struct trial *trial) { return (double)(random_bits(trial) >> 11) * 0x1p-53; }

static double normal(struct trial *trial) {
    double a = 1 - uniform(trial), b = uniform(trial);
    return sqrt(-2 * log(a)) * cos(6.283185307179586 * b);
}

int64_t random_pick(struct trial *trial, const int64_t *values, int64_t count) {
    return values[random_below(trial, count)];
}
#define PICK_WAY(trial, ...) \
    (const int64_t[]){__VA_ARGS__}[way_below(trial, sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t))]

/* Around tile edges (16, 64, 128, 256), 0 and 1 now and then; one problem in ten is larger. */
static int64_t draw_length(struct trial *trial, int large) {
    int64_t length;
    if (random_below(trial, 40) == 0)
        return 0;
    if (random_below(trial, 3) == 0)
        length = PICK(trial, 1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129);
    else
        length = 1 + random_below(trial, 96);
    return large ? length + PICK(trial, 64, 192, 256, 320) : length;
}

static int64_t draw_head_dim(struct trial *trial) {
    if (way_below(trial, 2))
        return PICK_WAY(trial, 1, 8, 16, 31, 32, 33, 64, 64, 80, 96, 128, 256);
    return 1 + way_below(trial, 72);
}

static void draw_sizes(struct trial *t) {
    int large = random_below(t, 10) == 0;
    t->dtype = (fdm_dtype)way_below(t, 3);
    t->batch = large ? 1 : 1 + random_below(t, 3);
    t->heads_kv = large ? 1 : PICK(t, 1, 1, 2, 3);
    t->heads = t->heads_kv * PICK(t, 1, 1, 1, 2, 3, 4);
    t->head_dim = large && !t->of_ways ? PICK(t, 32, 64, 40) : draw_head_dim(t);
    t->head_dim_v = way_below(t, 3) ? t->head_dim : draw_head_dim(t);
    t->seqlen_q = random_below(t, 8) == 0 ? PICK(t, 1, 1, 2, 4) : draw_length(t, large);
    t->seqlen_k = random_below(t, 3) == 0 ? t->seqlen_q : draw_length(t, large);
    if (t->of_ways && random_below(t, 3) == 0) { /* several tiles both ways */
        t->batch = 1;
        t->heads = t->heads_kv * PICK(t, 1, 2);
        t->seqlen_q = 100 + random_below(t, 250);
        t->seqlen_k = random_below(t, 2) ? t->seqlen_q : 100 + random_below(t, 400);
    }
    t->varlen = way_below(t, 6) == 0;
    t->neat = way_below(t, 2) == 0;
    if (way_below(t, 12) == 0) { /* few rows, many keys */
        t->neat = 1;
        t->seqlen_q = 1 + random_below(t, 4);
        t->seqlen_k = PICK(t, 200, 513, 640, 1000, 1500);
        t->heads = t->heads_kv * PICK(t, 1, 2, 4, 8, 20);
        t->head_dim = PICK_WAY(t, 32, 64, 80, 128, 256);
        t->head_dim_v = way_below(t, 3) ? t->head_dim : PICK_WAY(t, 40, 64, 128);
    }
    if (way_below(t, 30) == 0) { /* only kernels for wide heads take these */
        const int64_t wide = PICK_WAY(t, 264, 320, 512, 648, 1024), drawn = t->head_dim_v;
        t->head_dim = drawn % 4 == 1 ? drawn : wide;
        t->head_dim_v = drawn % 4 == 2 ? drawn : wide;
    }
    if (random_below(t, 60) == 0) {
        t->batch = 0;
        t->varlen |= (int)way_below(t, 2);
    }
    if (t->plain) {
        t->dtype = way_below(t, 2) ? FDM_FLOAT16 : FDM_BFLOAT16;
        t->varlen = 0;
        t->neat = 1;
        if (way_below(t, 4) == 0)
            t->head_dim = PICK_WAY(t, 128, 192, 256, 264, 512, 1024);
        t->head_dim_v = way_below(t, 4) ? t->head_dim : t->head_dim_v;
    }
}

/* Something says key by key which rows see it, over several block tiles of rows and steps of keys. */
static void draw_keyed_sizes(struct trial *t) {
    t->dtype = way_below(t, 2) ? FDM_FLOAT16 : FDM_BFLOAT16;
    t->batch = 1 + random_below(t, 2);
    t->heads_kv = PICK(t, 1, 1, 2);
    t->heads = t->heads_kv * PICK(t, 1, 1, 2);
    t->head_dim = PICK_WAY(t, 16, 64, 64, 96, 128, 128, 192, 256);
    t->head_dim_v = way_below(t, 3) ? t->head_dim : PICK_WAY(t, 40, 64, 128);
    t->seqlen_q = 65 + random_below(t, 200);
    t->seqlen_k = random_below(t, 2)   ? t->seqlen_q
                  : random_below(t, 6) ? 100 + random_below(t, 900)
                                       : 1030 + random_below(t, 200);
    t->varlen = way_below(t, 6) == 0;
    t->neat = 1;
    if (t->scored) {
        t->varlen = 0;
        t->seqlen_k = (t->seqlen_k + 15) / 16 * 16;
    }
}

/* More tiles than a ring has stages, more listed keys than a list has places, and now and then more than 64 splits:
 * many keys and few rows, or many rows and few keys. Small otherwise, for the sake of the float64 reference. */
static void draw_lengthy_sizes(struct trial *t) {
    enum { KEYS, MORE_KEYS = 2, ROWS, KINDS };
    const int64_t kind = way_below(t, KINDS);
    t->dtype = way_below(t, 4) == 0 ? FDM_FLOAT32 : way_below(t, 2) ? FDM_FLOAT16 : FDM_BFLOAT16;
    t->batch = t->heads_kv = t->neat = 1;
    t->head_dim = t->head_dim_v = PICK_WAY(t, 16, 32, 64);
    t->seqlen_k = 5000 + random_below(t, 5001);
    t->seqlen_q = 1 + random_below(t, random_below(t, 2) ? 4 : 70);
    t->heads = t->seqlen_q > 4 ? 1 : PICK(t, 1, 2, 4);
    t->varlen = way_below(t, 6) == 0;
    if (kind == MORE_KEYS) {
        t->seqlen_k = 22000 + random_below(t, 8000);
        t->seqlen_q = t->heads = 1;
        t->head_dim = t->head_dim_v = 16;
    } else if (kind == ROWS) {
        t->seqlen_q = t->seqlen_k / 2;
        t->seqlen_k = 1 + random_below(t, 70);
        t->heads = 1;
    }
    if (t->scored) {
        t->varlen = 0;
        t->seqlen_k = (t->seqlen_k + 15) / 16 * 16;
    }
}

/* A latent KV cache: few KV heads, many query heads, some tiles of 64 rows and of 64 keys. */
static void draw_latent_sizes(struct trial *t) {
    t->dtype = random_below(t, 2) ? FDM_FLOAT16 : FDM_BFLOAT16;
    t->batch = 1 + random_below(t, 3);
    t->heads_kv = PICK(t, 1, 1, 1, 2);
    t->heads = t->heads_kv * PICK(t, 1, 5, 16, 16, 40, 64, 128);
    t->head_dim = 576;
    t->head_dim_v = 512;
    t->seqlen_q = t->heads > 40 ? PICK(t, 1, 1, 2) : PICK(t, 1, 1, 2, 4, 7);
    t->seqlen_k = PICK(t, 1, 16, 63, 64, 65, 130, 192, 300, 513, 700);
    t->varlen = random_below(t, 3) == 0;
    t->plain = t->neat = 1;
}

static void draw_options(struct trial *t) {
    fdm_options *o = &t->options;
    *o = fdm_options_default();
    o->causal = way_below(t, 2) == 0;
    if (way_below(t, 4) == 0)
        o->window_left = PICK(t, 0, 1, 7, 40, 1000);
    if (way_below(t, 6) == 0)
        o->window_right = PICK(t, 0, 1, 9, 50);
    if (way_below(t, 5) == 0) {
        o->has_softmax_scale = 1;
        o->softmax_scale = random_below(t, 4) == 0 ? 0 : normal(t) * 0.3;
        if (t->of_ways)
            o->softmax_scale = fabs(o->softmax_scale) * (way_below(t, 2) ? 1 : -1);
    }
    if (way_below(t, 6) == 0)
        o->softcap = 1 + 20 * uniform(t);
    if (t->plain) {
        o->window_left = o->window_right = -1;
        o->softcap = t->latent ? o->softcap : 0;
    }
    if (t->lengthy && o->window_left >= 0) /* few keys seen are few tiles */
        o->window_left += 3000;
}

/* Of many heads, or sequences, whether this is one of those that see keys. */
static int is_of_few(int64_t head, int64_t heads) {
    enum { FEW = 3, BOUND = 65536 };
    return head < FEW || head >= heads - FEW || llabs(head - BOUND) < FEW;
}

static void draw_cu_seqlens(struct trial *t, enum role role, int64_t longest, int64_t *total) {
    guarded_make(&t->g[role], t, FDM_INT32, 1, (int64_t[]){t->batch + 1}, 0);
    /* rows of no sequence */
    const int rest = t->named ? t->rest : t->batch == 0 || random_below(t, 3) == 0;
    *total = rest ? t->named + random_below(t, 40) : 0;
    guarded_set(&t->g[role], 0, (double)*total);
    for (int64_t b = 0; b < t->batch; b++)
        guarded_set(&t->g[role], b + 1,
                    (double)(*total += t->many ? is_of_few(b, t->batch) * longest
                                       : (t->named && b == 0) || (rest && b == t->batch - 1 && random_below(t, 2))
                                           ? longest
                                       : random_below(t, 5) == 0 ? 0
                                                                 : random_below(t, longest + 1)));
    *total += rest ? t->named + random_below(t, 40) : 0;
}

static void draw_packing(struct trial *t) {
    draw_cu_seqlens(t, CU_Q, t->seqlen_q, &t->total_q);
    draw_cu_seqlens(t, CU_K, t->seqlen_k, &t->total_k);
    t->options.max_seqlen_q = t->seqlen_q;
    t->options.max_seqlen_k = t->seqlen_k;
}

/* Ends at the packed tensor's end are moved past it, beginnings at 0 before it, and a last sequence of max_seqlen rows
 * swallows the rows of no sequence behind it: cut off, they mean the same. */
int trial_contradict(struct trial *t, int on) {
    const int64_t totals[2] = {t->total_q, t->total_k}, longest[2] = {t->seqlen_q, t->seqlen_k};
    int changed = 0;
    for (int n = 0; n < 2 && t->g[CU_Q + n].map; n++) {
        struct guarded *cu = &t->g[CU_Q + n];
        const int starts_at_0 = guarded_get(cu, 0) <= 0;
        if (starts_at_0)
            guarded_set(cu, 0, 0); /* the first sequence's cut is found from there */
        const double past = t->seed % 4 ? (double)totals[n] + 1 : INT32_MAX;
        const double cut = t->batch ? guarded_get(cu, t->batch - 1) + (double)longest[n] : INFINITY;
        const int swallows = cut < (double)totals[n] && guarded_get(cu, t->batch) >= cut;
        for (int64_t b = t->batch; b > 0 && (guarded_get(cu, b) >= (double)totals[n] || swallows); b--) {
            const double end = swallows ? cut : (double)totals[n];
            guarded_set(cu, b, on ? past : end);
            changed = 1;
            if (swallows)
                break;
        }
        if (starts_at_0)
            guarded_set(cu, 0, on ? -5 : 0);
        changed |= starts_at_0;
    }
    return changed;
}

/* How the numbers of q, k, v and dout are made. */
enum fill { FILL_NORMAL, FILL_EQUAL, FILL_HUGE_LOGIT, FILL_RISING, FILL_SMALL, FILL_OUTLIERS, NUM_FILLS };

static double draw_value(struct trial *t, enum role role, enum fill fill, int64_t n, int64_t elements) {
    double x = normal(t);
    switch (fill) {
    case FILL_EQUAL: return role == Q || role == K ? 0.5 : x;
    case FILL_HUGE_LOGIT: return role == K && random_below(t, 200) == 0 ? x * 30 : x;
    case FILL_RISING: return role == K ? x * 0.2 + 2.0 * (double)n / (double)elements : role == Q ? fabs(x) : x;
    case FILL_SMALL: return x * 1e-3;
    case FILL_OUTLIERS: return (role == K || role == Q) && random_below(t, 50) == 0 ? x * 8 : x;
    default: return x;
    }
}

static void draw_matrix(struct trial *t, enum role role, int64_t rows, int64_t heads, int64_t depth, enum fill fill) {
    struct guarded *g = &t->g[role];
    const int64_t shape[4] = {t->batch, rows, heads, depth};
    int packed = t->varlen;
    guarded_make(g, t, t->dtype, 4 - packed, shape + packed, !t->named && (role == K || role == V) ? 1 : 0);
    int64_t elements = guarded_elements(g);
    for (int64_t n = 0; n < elements; n++)
        guarded_set(g, n, draw_value(t, role, fill, n, elements));
}

static void draw_operands(struct trial *t, enum fill fill) {
    draw_matrix(t, Q, t->varlen ? t->total_q : t->seqlen_q, t->heads, t->head_dim, fill);
    draw_matrix(t, K, t->varlen ? t->total_k : t->seqlen_k, t->heads_kv, t->head_dim, fill);
    draw_matrix(t, V, t->varlen ? t->total_k : t->seqlen_k, t->heads_kv, t->head_dim_v, fill);
}

static void draw_score_shape(struct trial *t, int64_t shape[4]) {
    shape[0] = t->many || random_below(t, 2) ? t->batch : 1;
    shape[1] = t->many ? t->heads : PICK(t, 1, t->heads_kv, t->heads);
    shape[2] = !t->keyed && (t->scored || way_below(t, 3)) ? t->seqlen_q : 1;
    shape[3] = t->scored || t->named || way_below(t, 8) ? t->seqlen_k : 1;
}

/* Of a sequence, or of the longest where all of them share what is drawn. */
int64_t trial_length(const struct trial *t, enum role cu, int64_t b, int is_shared) {
    const struct guarded *g = &t->g[cu];
    if (!t->varlen || is_shared)
        return cu == CU_Q ? t->seqlen_q : t->seqlen_k;
    return (int64_t)(guarded_get(g, b + 1) - guarded_get(g, b));
}

/* A long stretch of hidden keys. */
int trial_hides_many(const struct trial *t) { return t->lengthy && t->seqlen_k > t->seqlen_q; }

/* Where element n of a mask or bias begins a head, its form is placed anew. */
static void place_in_head(struct trial *t, struct structure *s, const int64_t shape[4], int64_t n) {
    const int64_t b = n / (shape[1] * shape[2] * shape[3]);
    if (n % (shape[2] * shape[3]) == 0)
        structure_place(s, t, shape[2] > 1 ? trial_length(t, CU_Q, b, shape[0] == 1) : 1,
                        shape[3] > 1 ? trial_length(t, CU_K, b, shape[0] == 1) : 1);
}
static int is_seen(const struct structure *s, const int64_t shape[4], int64_t n) {
    return structure_sees(s, n / shape[3] % shape[2], n % shape[3]);
}

static void draw_mask(struct trial *t) {
    int64_t shape[4];
    struct structure form;
    draw_score_shape(t, shape);
    guarded_make(&t->g[MASK], t, FDM_BOOL, 4, shape, t->named ? 2 : 3);
    const double density = (double)PICK(t, 0, 10, 50, 90, 100) / 100;
    const int blocky = random_below(t, 2) == 0, formed = trial_hides_many(t) || random_below(t, 4);
    structure_draw(&form, t, trial_hides_many(t));
    if (formed)
        structure_name(&form, t->forms[0], sizeof t->forms[0]);
    const int64_t elements = guarded_elements(&t->g[MASK]);
    for (int64_t n = 0; n < elements; n++) {
        const int64_t j = n % shape[3], i = n / shape[3] % shape[2];
        const uint64_t block = (uint64_t)(j / 64 * 31 + i / 64 * 17) * 0x9e3779b97f4a7c15u >> 40;
        place_in_head(t, &form, shape, n);
        guarded_set(&t->g[MASK], n,
                    t->many    ? is_of_few(n / shape[3] / shape[2], shape[0] * shape[1])
                    : t->hides ? named_sees(t->hides, i, j)
                    : formed   ? is_seen(&form, shape, n)
                    : blocky   ? (double)(block % 100) < 100 * density
                               : uniform(t) < density);
    }
}

/* How the numbers of a bias are made; what comes after: ordinary ones. */
enum bias_kind { LOWEST, INFINITE, ALL_HUGE, SOME_HUGE, ROWS_HUGE, RISING, FALLING, FORMED, NUM_BIAS_KINDS = 18 };
enum { FORMED_KINDS = 5 };

static double lowest_of(fdm_dtype dtype) {
    return dtype == FDM_FLOAT16 ? -65504 : dtype == FDM_BFLOAT16 ? -3.3895313892515355e38 : -FLT_MAX;
}

static void fill_bias(struct trial *t, const int64_t shape[4]) {
    struct structure form;
    const int64_t elements = guarded_elements(&t->g[BIAS]), drawn = random_below(t, NUM_BIAS_KINDS);
    const int64_t kind = t->hides ? NUM_BIAS_KINDS : drawn;
    const int formed = trial_hides_many(t) || (kind >= FORMED && kind < FORMED + FORMED_KINDS);
    const double lowest = lowest_of(fdm_dtype_of(&t->g[BIAS].tensor));
    const double huge = kind == LOWEST ? lowest : fmax((double)PICK(t, -65504, -1000000, -1000000000), lowest);
    const double slope = kind == RISING ? 0.5 : kind == FALLING ? -0.5 : 0; /* 32 in a tile of 64 keys */
    structure_draw(&form, t, trial_hides_many(t));
    if (formed)
        structure_name(&form, t->forms[1], sizeof t->forms[1]);
    t->huge = kind == LOWEST || (kind >= ALL_HUGE && kind <= ROWS_HUGE);
    int row_is_huge = 0;
    for (int64_t n = 0; n < elements; n++) {
        const double x = kind == LOWEST ? 0 : normal(t) + slope * (double)(n % shape[3]);
        place_in_head(t, &form, shape, n);
        if (n % shape[3] == 0)
            row_is_huge = random_below(t, 2) == 0;
        const int is_huge = kind == LOWEST || kind == ALL_HUGE || (kind == SOME_HUGE && random_below(t, 3) == 0) ||
                            (kind == ROWS_HUGE && row_is_huge);
        const int is_hidden = t->hides ? !named_sees(t->hides, n / shape[3] % shape[2], n % shape[3])
                              : formed ? !is_seen(&form, shape, n)
                                       : kind == INFINITE && random_below(t, 3) == 0;
        guarded_set(&t->g[BIAS], n, is_hidden ? -INFINITY : is_huge ? fmax(huge + x, lowest) : x);
    }
}

static void draw_bias(struct trial *t) {
    int64_t shape[4];
    draw_score_shape(t, shape);
    if (t->shares) {
        shape[0] = t->shares & 2 ? 1 : t->batch;
        shape[1] = t->shares & 1 ? 1 : t->heads;
    }
    const fdm_dtype dtype = way_below(t, t->scored ? 4 : 2) || t->alike ? t->dtype : FDM_FLOAT32;
    guarded_make(&t->g[BIAS], t, dtype, 4, shape, t->named ? 2 : 3);
    fill_bias(t, shape);
}

static void draw_rows(struct trial *t, enum role role, int fill) {
    const int64_t shape[3] = {t->batch, t->heads, t->varlen ? t->total_q : t->seqlen_q};
    int packed = t->varlen;
    guarded_make(&t->g[role], t, FDM_FLOAT32, 3 - packed, shape + packed, fill ? 3 : 2);
    int64_t elements = guarded_elements(&t->g[role]);
    for (int64_t n = 0; n < elements && fill; n++)
        guarded_set(&t->g[role], n, normal(t));
}

static void draw_output(struct trial *t, enum role role, enum role like) {
    struct guarded *g = &t->g[role];
    guarded_make(g, t, fdm_dtype_of(&t->g[like].tensor), t->g[like].tensor.ndim, t->g[like].shape,
                 role == DBIAS || role == DSINK ? 2 : 0);
}

/* What the forward leaves, and what flows back. */
static void draw_results(struct trial *t) {
    const int64_t shape[4] = {t->batch, t->varlen ? t->total_q : t->seqlen_q, t->heads, t->head_dim_v};
    guarded_make(&t->g[OUT], t, t->dtype, 4 - t->varlen, shape + t->varlen, 0);
    draw_rows(t, LSE, 0);
    draw_matrix(t, DOUT, shape[1], t->heads, t->head_dim_v, FILL_NORMAL);
}

static void draw_outputs(struct trial *t) {
    draw_results(t);
    if (way_below(t, 3) == 0)
        draw_rows(t, DLSE, 1);
    if (t->g[BIAS].map && (t->huge || random_below(t, 2)))
        draw_rows(t, LSE_LOW, 0);
    for (enum role role = DQ; role <= DV; role++)
        if (way_below(t, 8))
            draw_output(t, role, Q + (role - DQ));
    if (t->g[BIAS].map && way_below(t, 8))
        draw_output(t, DBIAS, BIAS);
}

/* Logits of any dtype, one for each head or several; some -inf, and now and then +inf or NaN. */
static void draw_sink(struct trial *t) {
    const int64_t shape[2] = {1 + random_below(t, 3), t->heads}, mean = PICK(t, 0, 0, 5, -5);
    const int32_t ndim = 1 + (random_below(t, 3) == 0);
    guarded_make(&t->g[SINK], t, (fdm_dtype)random_below(t, 3), ndim, shape + 2 - ndim, 3);
    const int64_t elements = guarded_elements(&t->g[SINK]), odd = random_below(t, 12);
    for (int64_t n = 0; n < elements; n++)
        guarded_set(&t->g[SINK], n, odd == 0 || random_below(t, 8) == 0 ? -INFINITY : (double)mean + 2 * normal(t));
    if (odd < 3 && odd > 0 && !trial_wants_nan(t))
        guarded_set(&t->g[SINK], random_below(t, elements), odd == 1 ? INFINITY : NAN);
    t->options.lse_without_sink = random_below(t, 3) == 0;
    if (way_below(t, 4))
        draw_output(t, DSINK, SINK);
}

/* An ordinary sink of each head; lse may be without it. */
static void draw_named_sink(struct trial *t, int lse_without) {
    guarded_make(&t->g[SINK], t, FDM_FLOAT32, 1, &t->heads, 3);
    for (int64_t n = 0; n < t->heads; n++)
        guarded_set(&t->g[SINK], n, normal(t));
    t->options.lse_without_sink = lse_without;
    draw_output(t, DSINK, SINK);
}

/* " mask", with its form in brackets where it has one. */
static const char *described(const struct trial *t, enum role role, const char *word, const char *form, char *text,
                             size_t size) {
    const char *there = *form ? " %s (%s)" : " %s";
    text[0] = 0;
    if (t->g[role].map)
        snprintf(text, size, there, word, form);
    return text;
}

static void describe(struct trial *t, enum fill fill) {
    char mask[80], bias[80], intervals[80], rows[24], blocks[24], sink[24];
    snprintf(
        t->text, sizeof t->text,
        "%s B %lld H %lld/%lld Sq %lld Sk %lld D %lld/%lld%s%s window %lld,%lld scale %g softcap %g%s%s%s%s%s%s%s%s%s "
        "fill %d",
        fdm_dtype_name(t->dtype), (long long)t->batch, (long long)t->heads, (long long)t->heads_kv,
        (long long)t->seqlen_q, (long long)t->seqlen_k, (long long)t->head_dim, (long long)t->head_dim_v,
        t->varlen ? " varlen"
        : t->neat ? " neat"
                  : "",
        t->options.causal ? " causal" : "", (long long)t->options.window_left, (long long)t->options.window_right,
        t->options.has_softmax_scale ? t->options.softmax_scale : NAN, t->options.softcap, t->far ? " far" : "",
        t->contradicts ? " contradicted" : "", described(t, MASK, "mask", t->forms[0], mask, sizeof mask),
        described(t, BIAS, t->huge ? "huge bias" : "bias", t->forms[1], bias, sizeof bias),
        described(t, START, "intervals", t->forms[2], intervals, sizeof intervals),
        described(t, ROW_START, "row intervals", "", rows, sizeof rows),
        described(t, BLOCKS, "block mask", "", blocks, sizeof blocks), t->g[DLSE].map ? " dlse" : "",
        described(t, SINK, t->options.lse_without_sink ? "sink (lse without)" : "sink", "", sink, sizeof sink),
        (int)fill);
}

void trial_draw(struct trial *t, uint64_t seed, struct ways ways) {
    const uint64_t way = ways.count ? seed % ways.count + ways.first : seed;
    *t = (struct trial){.seed = seed,
                        .random = seed * 0x2545f4914f6cdd1du + 77,
                        .way = way,
                        .of_ways = ways.count > 0,
                        .way_random = way * 0x2545f4914f6cdd1du + 770077,
                        .plain = way % 8 == 5,
                        .keeps_plan = seed % 2 == 0,
                        .spoils = seed % 2 == 0,
                        .far = !ways.count && seed % 16 == 9 ? 1 + (seed / 16) % 2 : 0,
                        .keyed = way % 16 == 3 || way % 64 == 22,
                        .scored = way % 16 == 1 || way % 64 == 55,
                        .latent = !ways.count && seed % 32 == 14,
                        .lengthy = way % 64 == 22 || way % 64 == 55};
    draw_sizes(t);
    if (t->latent)
        draw_latent_sizes(t);
    else if (t->lengthy)
        draw_lengthy_sizes(t);
    else if (t->keyed || t->scored)
        draw_keyed_sizes(t);
    draw_options(t);
    if (t->varlen) {
        draw_packing(t);
        t->contradicts = seed % 2 == 0 && trial_contradict(t, 1) && trial_contradict(t, 0);
    }
    if (t->varlen &&
        (t->seqlen_q == 0 || t->seqlen_k == 0)) { /* 0 asks the library to find the maxima: all sequences are empty */
        t->options.max_seqlen_q = t->seqlen_q;
        t->options.max_seqlen_k = t->seqlen_k;
    }
    enum fill fill = random_below(t, 2) ? FILL_NORMAL : (enum fill)random_below(t, NUM_FILLS);
    t->mild = (fill == FILL_NORMAL || fill == FILL_EQUAL || fill == FILL_SMALL) && !t->options.has_softmax_scale;
    draw_operands(t, fill);
    if (t->latent)
        trial_share_values(t);
    if (!t->plain && way_below(t, t->scored ? 2 : 3) == 0)
        draw_mask(t);
    if (!t->plain && (way_below(t, 3) == 0 || (t->scored && !t->g[MASK].map)))
        draw_bias(t);
    if (!t->plain && (way_below(t, 4) == 0 || (t->keyed && way_below(t, 4))))
        draw_intervals(t, 0);
    if (!t->plain && (t->of_ways ? way % 16 == 7 || way % 32 == 12 : way_below(t, 10) == 0))
        draw_row_intervals(t, 0);
    if (!t->plain && !t->of_ways && way_below(t, 10) == 1)
        draw_block_mask(t, 0);
    t->options.deterministic =
        (way % 4 == 3 && way % 32 != 19) || way % 32 == 17; /* of those seen key by key, or scored, every other one */
    draw_outputs(t);
    if (way_below(t, t->plain ? 8 : 4) == 0)
        draw_sink(t);
    describe(t, fill);
}

void trial_of_case(struct trial *t, const struct named_case *c, uint64_t number) {
    *t = (struct trial){.seed = number,
                        .random = number * 0x2545f4914f6cdd1du + 77,
                        .dtype = c->dtype,
                        .batch = c->batch,
                        .heads = c->heads,
                        .heads_kv = c->heads_kv,
                        .seqlen_q = c->seqlen_q,
                        .seqlen_k = c->seqlen_k,
                        .head_dim = c->head_dim,
                        .head_dim_v = c->head_dim_v,
                        .varlen = c->varlen,
                        .neat = 1,
                        .mild = 1,
                        .named = 1,
                        .alike = c->pass == FDM_BACKWARD,
                        .scored = c->mask == 1 || c->bias == 1,
                        .keyed = c->mask == 2 || c->bias == 2,
                        .shares = c->shares,
                        .many = c->many,
                        .rest = c->rest,
                        .hides = c->blocks ? HIDES_AS_DRAWN : c->hides,
                        .keeps_plan = c->kept ? c->kept == 1 : number % 2 == 0,
                        .spoils = c->spoils || number % 2 == 0,
                        .wants_nan = c->wants_nan,
                        .contradicts = c->varlen && number % 2 == 0,
                        .apart = c->apart,
                        .far = c->apart ? 2 : 0,
                        .options = fdm_options_default()};
    t->options.causal = c->causal;
    t->options.window_left = c->window_left;
    t->options.window_right = c->window_right;
    t->options.softcap = c->softcap;
    t->options.deterministic = c->deterministic;
    if (t->varlen)
        draw_packing(t);
    draw_operands(t, FILL_NORMAL);
    if (c->mask)
        draw_mask(t);
    if (c->bias)
        draw_bias(t);
    if (c->intervals)
        draw_intervals(t, c->intervals == 2);
    if (c->rows)
        draw_row_intervals(t, c->rows == 2);
    t->hides = c->hides; /* a mask or bias beside blocks hides what is drawn */
    if (c->blocks)
        draw_block_mask(t, c->blocks == 2);
    draw_results(t);
    if (c->dlse)
        draw_rows(t, DLSE, 1);
    draw_output(t, DQ, Q);
    draw_output(t, DK, K);
    draw_output(t, DV, V);
    if (c->dbias)
        draw_output(t, DBIAS, BIAS);
    if (c->sink)
        draw_named_sink(t, c->sink == 2);
    describe(t, FILL_NORMAL);
}

void trial_free(struct trial *t) {
    trial_serve_free(t);
    trial_free_truth(t);
    for (int i = 0; i < NUM_ROLES; i++) {
        guarded_free(&t->g[i]);
        free(t->clean[i]);
    }
}
