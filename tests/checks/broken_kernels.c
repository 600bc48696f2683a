/* broken_kernels.c: the checker's own test: kernels with one planted fault each, every one of which it must catch.
 *
 * A broken kernel is the chosen CPU kernel on tampered inputs, or with tampered outputs. Each trial runs in a child
 * process, since some faults crash. A fault is caught when some seed of a few tells it from a right kernel; most need
 * one. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/half.h"
#include "checks.h"
#include "subjects.h"

static struct guarded *written(struct trial *t, fdm_pass pass) {
    struct guarded *g = pass == FDM_FORWARD ? &t->g[OUT] : &t->g[DK];
    return g->map && guarded_elements(g) > 0 ? g : NULL;
}

static void causal_off_by_one(struct trial *t, fdm_pass pass) {
    (void)pass;
    if (t->options.causal && t->options.window_right < 0) {
        t->options.causal = 0;
        t->options.window_right = 1;
    }
}

static void window_off_by_one(struct trial *t, fdm_pass pass) {
    (void)pass;
    t->options.window_left += t->options.window_left >= 0;
}

static void scale_in_bfloat16(struct trial *t, fdm_pass pass) {
    (void)pass;
    double scale = t->options.has_softmax_scale ? t->options.softmax_scale : 1 / sqrt((double)t->head_dim);
    t->options.has_softmax_scale = 1;
    t->options.softmax_scale = bfloat16_to_float(float_to_bfloat16((float)scale));
}

static void softcap_ignored(struct trial *t, fdm_pass pass) {
    (void)pass;
    t->options.softcap = 0;
}

static void no_bias(struct trial *t, fdm_pass pass) {
    if (pass == FDM_FORWARD && t->g[BIAS].map)
        t->g[BIAS].map = NULL; /* leaked: the child ends */
}

static void no_mask(struct trial *t, fdm_pass pass) {
    (void)pass;
    t->g[MASK].map = NULL;
}

/* The first block that is hidden, or seen, is called the other. */
static void turn_block(struct trial *t, int seen) {
    struct guarded *blocks = &t->g[BLOCKS];
    const int64_t elements = blocks->map ? guarded_elements(blocks) : 0;
    int64_t n = 0;
    while (n < elements && (guarded_get(blocks, n) != 0) != seen)
        n++;
    if (n < elements)
        guarded_set(blocks, n, !seen);
}

static void hidden_block_seen(struct trial *t, fdm_pass pass) {
    (void)pass;
    turn_block(t, 0);
}

static void seen_block_hidden(struct trial *t, fdm_pass pass) {
    (void)pass;
    turn_block(t, 1);
}

/* Keys of each block see what those of the block before do. */
static void blocks_off_by_one(struct trial *t, fdm_pass pass) {
    (void)pass;
    struct guarded *blocks = &t->g[BLOCKS];
    for (int64_t n = blocks->map ? guarded_elements(blocks) - 1 : 0; n > 0; n--)
        if (n % blocks->shape[3])
            guarded_set(blocks, n, guarded_get(blocks, n - 1));
}

/* k is read one row late: what a wrong start of a tile does. */
static void key_rows_shifted(struct trial *t, fdm_pass pass) {
    (void)pass;
    struct guarded *k = &t->g[K];
    int32_t row = k->tensor.ndim - 3;
    if (k->shape[row] > 1)
        k->tensor.data = (char *)k->tensor.data + k->strides[row] * fdm_dtype_bytes(t->dtype);
}

static void wrong_gqa_head(struct trial *t, fdm_pass pass) {
    (void)pass;
    struct guarded *v = &t->g[V];
    int32_t head = v->tensor.ndim - 2;
    if (v->shape[head] == 2 && v->strides[head] > 0) { /* both heads read head 1 */
        v->tensor.data = (char *)v->tensor.data + v->strides[head] * fdm_dtype_bytes(t->dtype);
        v->strides[head] = 0;
    }
}

static void row_not_written(struct trial *t, fdm_pass pass) {
    struct guarded *g = written(t, pass);
    if (g)
        memset(g->data + guarded_offset(g, guarded_elements(g) - 1), 0xff, (size_t)fdm_dtype_bytes(t->dtype));
}

static void element_off(struct trial *t, fdm_pass pass) {
    struct guarded *g = written(t, pass);
    if (g)
        guarded_set(g, guarded_elements(g) / 2, guarded_get(g, guarded_elements(g) / 2) * 1.25 + 0.05);
}

static void head_not_rescaled(struct trial *t, fdm_pass pass) {
    struct guarded *g = written(t, pass);
    for (int64_t n = 0; g && n < g->shape[g->tensor.ndim - 1]; n++)
        guarded_set(g, n, guarded_get(g, n) * 1.1);
}

static void write_one_past(struct trial *t, fdm_pass pass) {
    struct guarded *g = written(t, pass);
    if (g)
        ((volatile char *)g->data)[g->data_bytes] = 1;
}

static void write_one_before(struct trial *t, fdm_pass pass) {
    struct guarded *g = written(t, pass);
    if (g)
        ((volatile char *)g->data)[-1] = 1;
}

static void input_overwritten(struct trial *t, fdm_pass pass) {
    (void)pass;
    if (guarded_elements(&t->g[Q]) > 0)
        t->g[Q].data[0] ^= 1;
}

static void lse_in_base_two(struct trial *t, fdm_pass pass) {
    for (int64_t n = 0; pass == FDM_FORWARD && n < guarded_elements(&t->g[LSE]); n++)
        guarded_set(&t->g[LSE], n, guarded_get(&t->g[LSE], n) * 1.4426950408889634);
}

static void empty_row_lse(struct trial *t, fdm_pass pass) {
    for (int64_t n = 0; pass == FDM_FORWARD && n < guarded_elements(&t->g[LSE]); n++)
        if (isinf(guarded_get(&t->g[LSE], n)))
            guarded_set(&t->g[LSE], n, -INFINITY);
}

static void nan_row_lse(struct trial *t, fdm_pass pass) {
    for (int64_t n = 0; pass == FDM_FORWARD && n < guarded_elements(&t->g[LSE]); n++)
        if (isnan(guarded_get(&t->g[LSE], n)))
            guarded_set(&t->g[LSE], n, INFINITY);
}

/* The last row of a packed tensor stays as it was where it belongs to no sequence. */
static void row_of_no_sequence_left(struct trial *t, fdm_pass pass) {
    if (t->varlen && t->total_q > guarded_get(&t->g[CU_Q], t->batch) && pass == FDM_FORWARD)
        row_not_written(t, pass);
}

/* A key that nobody sees counts where it is not finite: what a product with a weight of 0 does. */
static void hidden_nan_counts(struct trial *t, fdm_pass pass) {
    const struct guarded *v = &t->g[V];
    struct guarded *g = written(t, pass);
    double sum = 0;
    for (int64_t n = 0; g && !t->far && n < guarded_elements(v); n++)
        sum += 0 * guarded_get(v, n);
    for (int64_t n = 0; g && !t->far && isnan(sum) && n < guarded_elements(g); n++)
        guarded_set(g, n, NAN);
}

static void dk_not_scaled(struct trial *t, fdm_pass pass) {
    double scale = t->options.has_softmax_scale ? t->options.softmax_scale : 1 / sqrt((double)t->head_dim);
    for (int64_t n = 0; pass == FDM_BACKWARD && t->g[DK].map && scale != 0 && n < guarded_elements(&t->g[DK]); n++)
        guarded_set(&t->g[DK], n, guarded_get(&t->g[DK], n) / scale);
}

static void dlse_ignored(struct trial *t, fdm_pass pass) {
    (void)pass;
    t->g[DLSE].map = NULL;
}

static void lse_low_ignored(struct trial *t, fdm_pass pass) {
    (void)pass;
    t->g[LSE_LOW].map = NULL;
}

/* dbias of one of several heads or batches that share it. */
static void dbias_not_reduced(struct trial *t, fdm_pass pass) {
    int shared = t->g[DBIAS].map && (t->g[BIAS].shape[0] < t->batch || t->g[BIAS].shape[1] < t->heads);
    for (int64_t n = 0; pass == FDM_BACKWARD && shared && n < guarded_elements(&t->g[DBIAS]); n++)
        guarded_set(&t->g[DBIAS], n, guarded_get(&t->g[DBIAS], n) * 0.5);
}

static void stale_tile(struct trial *t, fdm_pass pass) { /* the second block of 64 rows repeats the first */
    struct guarded *g = pass == FDM_FORWARD ? &t->g[OUT] : &t->g[DQ];
    int32_t row = g->map ? g->tensor.ndim - 3 : 0;
    if (!g->map || g->shape[row] < 65 || guarded_elements(g) == 0)
        return;
    int64_t block = 64 * g->shape[row + 1] * g->shape[row + 2];
    for (int64_t n = 0; n < g->shape[row + 1] * g->shape[row + 2]; n++)
        guarded_set(g, block + n, guarded_get(g, n));
}

/* A copy of a tensor, which the kernel gets instead: the trial's own must come back as it went. */
static struct guarded copy_of(const struct guarded *g) {
    struct guarded copy = *g;
    copy.data = malloc(g->data_bytes + 1); /* leaked: the child ends */
    memcpy(copy.data, g->data, g->data_bytes);
    return copy;
}

/* A tile of 64 rows and all keys that looks alike in all rows but the last is taken for alike in all of them. */
static void last_row_of_a_tile_ignored(struct trial *t, fdm_pass pass) {
    enum { TILE = 64 };
    (void)pass;
    struct guarded *m = &t->g[MASK];
    if (!m->map || t->far || guarded_elements(m) == 0)
        return;
    struct guarded copy = copy_of(m);
    const int64_t keys = m->shape[3], tiles = m->shape[2] / TILE, heads = m->shape[0] * m->shape[1];
    for (int64_t n = 0; n < heads * tiles; n++) {
        const int64_t first = (n / tiles * m->shape[2] + n % tiles * TILE) * keys, last = first + (TILE - 1) * keys;
        const double value = guarded_get(m, first);
        int alike = 1;
        for (int64_t i = first; i < last; i++)
            alike &= guarded_get(m, i) == value;
        for (int64_t j = 0; j < keys && alike; j++)
            guarded_set(&copy, last + j, value);
    }
    m->tensor.data = copy.data;
}

/* A list of 4096 keys that begins anew where it is full, but with the keys of its beginning. */
static void list_wraps(struct trial *t, fdm_pass pass) {
    enum { LIST = 4096 };
    (void)pass;
    struct guarded *k = &t->g[K];
    const int64_t rows = k->shape[k->tensor.ndim - 3], elements = guarded_elements(k);
    const int64_t of_row = k->shape[k->tensor.ndim - 2] * k->shape[k->tensor.ndim - 1];
    if (t->far || rows <= LIST)
        return;
    struct guarded copy = copy_of(k);
    for (int64_t n = 0; n < elements; n++)
        if (n / of_row % rows >= LIST)
            guarded_set(&copy, n, guarded_get(k, n - LIST * of_row));
    k->tensor.data = copy.data;
}

/* ---- of a call on a cache ---- */

/* Each sequence that has room gets a key more, which nobody wrote. */
static void length_off_by_one(struct trial *t, fdm_pass pass) {
    (void)pass;
    for (int64_t b = 0; t->g[CACHE_K].map && b < t->batch; b++) {
        const double length = guarded_get(&t->g[LENGTHS], b);
        if (length >= 0)
            guarded_set(&t->g[LENGTHS], b, length + 1);
    }
}

/* The page of a sequence is looked up one column too far. */
static void column_off_by_one(struct trial *t, fdm_pass pass) {
    (void)pass;
    struct guarded *table = &t->g[TABLE];
    const int32_t last = table->map ? table->tensor.ndim - 1 : 0;
    if (!table->map || table->shape[last] < 2)
        return;
    table->shape[last]--;
    table->tensor.data =
        (char *)table->tensor.data + table->strides[last] * fdm_dtype_bytes(fdm_dtype_of(&table->tensor));
}

/* The last page of each row of a table is that of the row before it: what a table that was not renewed does. */
static void stale_page(struct trial *t, fdm_pass pass) {
    (void)pass;
    struct guarded *table = &t->g[TABLE];
    if (!table->map || guarded_elements(table) < 2)
        return;
    struct guarded copy = copy_of(table);
    for (int64_t n = 1; n < guarded_elements(table); n++)
        if (guarded_get(table, n) >= 0 && guarded_get(table, n) < (double)t->g[CACHE_K].shape[0])
            guarded_set(&copy, n, guarded_get(table, n - 1));
    table->tensor.data = copy.data;
}

/* Attention is to the keys that there were before the new ones. */
static void length_before_appending(struct trial *t, fdm_pass pass) {
    (void)pass;
    t->g[K_NEW].map = t->g[V_NEW].map = t->g[CU_NEW].map = NULL;
}

static void one_dim_too_many(struct trial *t, fdm_pass pass) {
    (void)pass;
    if (t->g[COS].map && 2 * (t->g[COS].shape[1] + 1) <= t->head_dim)
        t->g[COS].shape[1] = t->g[SIN].shape[1] = t->g[COS].shape[1] + 1;
}

static void other_pairs(struct trial *t, fdm_pass pass) {
    (void)pass;
    t->cache.rotary_interleaved ^= t->g[COS].map != NULL;
}

static void padding_seen(struct trial *t, fdm_pass pass) {
    (void)pass;
    t->g[FIRST_KEY].map = NULL;
}

static void used_rows_ignored(struct trial *t, fdm_pass pass) {
    (void)pass;
    t->g[USED_Q].map = NULL;
}

static void used_keys_ignored(struct trial *t, fdm_pass pass) {
    (void)pass;
    t->g[USED_K].map = NULL;
}

/* A byte of the cache that holds no new key. */
static void cache_overwritten(struct trial *t, fdm_pass pass) {
    (void)pass;
    if (t->g[CACHE_V].map && guarded_elements(&t->g[CACHE_V]) > 0)
        t->g[CACHE_V].data[0] ^= 1;
}

/* The call writes into other memory than the cache. */
static void new_keys_not_written(struct trial *t, fdm_pass pass) {
    (void)pass;
    struct guarded *k = &t->g[CACHE_K];
    if (k->map && t->g[K_NEW].map) {
        const struct guarded copy = copy_of(k);
        k->tensor.data = copy.data;
    }
}

static const struct fault {
    const char *name;
    tamper_function *before, *after;
    fdm_pass pass;
    int serves; /* 1: of seqused, or of a cache */
} faults[] = {
    {"causal off by one", causal_off_by_one, NULL, FDM_FORWARD, 0},
    {"causal off by one, backward", causal_off_by_one, NULL, FDM_BACKWARD, 0},
    {"window off by one", window_off_by_one, NULL, FDM_FORWARD, 0},
    {"scale rounded to bfloat16", scale_in_bfloat16, NULL, FDM_FORWARD, 0},
    {"softcap ignored", softcap_ignored, NULL, FDM_FORWARD, 0},
    {"bias ignored", no_bias, NULL, FDM_FORWARD, 0},
    {"mask ignored", no_mask, NULL, FDM_BACKWARD, 0},
    {"a hidden block seen", hidden_block_seen, NULL, FDM_FORWARD, 0},
    {"a seen block hidden, backward", seen_block_hidden, NULL, FDM_BACKWARD, 0},
    {"a block mask off by a block", blocks_off_by_one, NULL, FDM_FORWARD, 0},
    {"key rows shifted", key_rows_shifted, NULL, FDM_FORWARD, 0},
    {"wrong head of a group", wrong_gqa_head, NULL, FDM_FORWARD, 0},
    {"element not written", NULL, row_not_written, FDM_FORWARD, 0},
    {"element not written, backward", NULL, row_not_written, FDM_BACKWARD, 0},
    {"one element off", NULL, element_off, FDM_FORWARD, 0},
    {"one row not rescaled", NULL, head_not_rescaled, FDM_FORWARD, 0},
    {"write one past", NULL, write_one_past, FDM_FORWARD, 0},
    {"write one before", NULL, write_one_before, FDM_BACKWARD, 0},
    {"input overwritten", NULL, input_overwritten, FDM_FORWARD, 0},
    {"lse in base two", NULL, lse_in_base_two, FDM_FORWARD, 0},
    {"lse of an empty row", NULL, empty_row_lse, FDM_FORWARD, 0},
    {"a row of NaN taken for empty", NULL, nan_row_lse, FDM_FORWARD, 0},
    {"a row of no sequence left", NULL, row_of_no_sequence_left, FDM_FORWARD, 0},
    {"a hidden NaN counts", NULL, hidden_nan_counts, FDM_FORWARD, 0},
    {"a hidden NaN counts, backward", NULL, hidden_nan_counts, FDM_BACKWARD, 0},
    {"dk not scaled", NULL, dk_not_scaled, FDM_BACKWARD, 0},
    {"dlse ignored", dlse_ignored, NULL, FDM_BACKWARD, 0},
    {"lse_low ignored", lse_low_ignored, NULL, FDM_BACKWARD, 0},
    {"dbias not reduced", NULL, dbias_not_reduced, FDM_BACKWARD, 0},
    {"last row of a tile ignored", last_row_of_a_tile_ignored, NULL, FDM_FORWARD, 0},
    {"list of keys wraps", list_wraps, NULL, FDM_FORWARD, 0},
    {"stale tile", NULL, stale_tile, FDM_FORWARD, 0},
    {"stale tile, backward", NULL, stale_tile, FDM_BACKWARD, 0},
    {"length off by one", length_off_by_one, NULL, FDM_FORWARD, 1},
    {"table column off by one", column_off_by_one, NULL, FDM_FORWARD, 1},
    {"stale page", stale_page, NULL, FDM_FORWARD, 1},
    {"length before appending", length_before_appending, NULL, FDM_FORWARD, 1},
    {"one dim too many turned", one_dim_too_many, NULL, FDM_FORWARD, 1},
    {"other pairs turned", other_pairs, NULL, FDM_FORWARD, 1},
    {"left padding seen", padding_seen, NULL, FDM_FORWARD, 1},
    {"seqused_q ignored", used_rows_ignored, NULL, FDM_FORWARD, 1},
    {"seqused_k ignored", used_keys_ignored, NULL, FDM_FORWARD, 1},
    {"seqused_q ignored, backward", used_rows_ignored, NULL, FDM_BACKWARD, 1},
    {"seqused_k ignored, backward", used_keys_ignored, NULL, FDM_BACKWARD, 1},
    {"cache overwritten", NULL, cache_overwritten, FDM_FORWARD, 1},
    {"new keys not written", new_keys_not_written, NULL, FDM_FORWARD, 1},
};

static void prepare(struct trial *t, uint64_t seed, const struct fault *fault) {
    const fdm_pass pass = fault->pass;
    trial_draw(t, seed, (struct ways){0});
    if (fault->serves)
        trial_serve(t);
    trial_truth(t, 1);
    if (pass == FDM_BACKWARD)
        trial_set_forward_results(t);
}

/* Whether a child that runs the kernel on this seed ends as failed. */
static int fails(uint64_t seed, const struct fault *fault, int sound) {
    pid_t child = fork();
    if (child == 0) {
        struct trial trial;
        checks_quiet = 1;
        prepare(&trial, seed, fault);
        _exit(trial_run(&trial, fault->pass, NULL, "cpu", 1, sound ? NULL : fault->before,
                        sound ? NULL : fault->after) == 0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return !WIFEXITED(status) || WEXITSTATUS(status) == 1;
}

/* A seed on which the sound kernel fails too says nothing. */
static int caught(const struct fault *fault, uint64_t seed) { return fails(seed, fault, 0) && !fails(seed, fault, 1); }

int broken_checks(const struct options *o) {
    if (o->emulate)
        return broken_texts(o);
    const uint64_t seeds = given_or(o->repeat, 60);
    int missed = 0, tried = 0;
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        if (o->group && !strstr(faults[i].name, o->group))
            continue;
        tried++;
        uint64_t seed = 1;
        while (seed <= seeds && !caught(&faults[i], seed))
            seed++;
        if (seed <= seeds)
            printf("%-32s caught by seed %llu\n", faults[i].name, (unsigned long long)seed);
        else
            printf("%-32s MISSED in %llu seeds\n", faults[i].name, (unsigned long long)seeds);
        missed += seed > seeds;
    }
    printf("%d passed, %d failed\n", tried - missed, missed);
    return missed > 0 || tried == 0;
}
