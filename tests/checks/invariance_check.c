/* invariance_check.c: equal bits (fdm_options.invariance, num_splits, split_keys): one sequence in calls that differ in
 * all else, with a tree that is a chain in place of causal, and at level 2 its rows in several calls; on a CUDA device,
 * on the emulated one, or on the CPU.
 *
 * A row of q, a key and a value are made of the numbers of their sequence and position, so that a sequence is the same
 * wherever it stands. Each result is also compared with the reference. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/elements.h"
#include "device_check.h"
#include "flash_dmattn.h"
#include "subjects.h"

enum { BATCH_MAX = 5, MANY = 64, FEW = 16 }; /* rows of a KV head */
enum { OF_Q, OF_K, OF_V };

/* The last rows of a sequence. */
struct member {
    int64_t id, keys, rows;
};
struct call {
    struct member of[BATCH_MAX];
    int64_t batch, target, page, bound, rows_max; /* page 0: a cache without pages */
};
/* Rows of the target: out, then lse. */
struct result {
    int64_t rows;
    char *out;
    float *lse;
};

static struct scene {
    fdm_dtype dtype;
    int64_t heads, heads_kv, head_dim, keys, rows, most_rows;
    fdm_device_id device;
    fdm_options options;
    int chain; /* 1: the call says causal by a tree */
} s;

static int64_t pick(const int64_t *list, int64_t count) { return list[below(count)]; }
#define PICK(...) pick((const int64_t[]){__VA_ARGS__}, sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t))

/* From -2 to 2, by its place alone. */
static double number_at(int64_t kind, int64_t id, int64_t position, int64_t element) {
    uint64_t x = (uint64_t)(kind + 3 * (id + 8 * (position + (element << 20)))) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 31) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 29) * 0x94d049bb133111ebu;
    return (double)(x >> 40) / (1 << 22) - 2;
}
static void store_row(char *data, int64_t row, int64_t heads, int64_t kind, int64_t id, int64_t position) {
    for (int64_t n = 0; n < heads * s.head_dim; n++)
        element_store(data, row * heads * s.head_dim + n, s.dtype, number_at(kind, id, position, n));
}

/* ---- one call ---- */

/* Tensors of a call, on the host first. */
enum { Q, K, V, OUT, LSE, TABLE, LENGTHS, CU_Q, TREE, NUM_TENSORS };
static struct memory {
    int64_t shape[4];
    size_t bytes;
    char *here;
    void *there;
    fdm_tensor tensor;
} t[NUM_TENSORS];

static void make(int n, fdm_dtype dtype, int32_t ndim, const int64_t *shape) {
    struct memory *m = &t[n];
    m->bytes = (size_t)fdm_dtype_bytes(dtype);
    for (int32_t i = 0; i < ndim; i++)
        m->bytes *= (size_t)(m->shape[i] = shape[i]);
    m->here = malloc(m->bytes + 64);
    if (!m->here || fdm_memory_allocate(s.device, m->bytes + 64, &m->there))
        fail("allocating");
    memset(m->here, 0xff, m->bytes); /* NaN */
    m->tensor = (fdm_tensor){m->there, s.device, ndim, fdm_data_type_of(dtype), m->shape, NULL, 0};
}
static void release_all(void) {
    for (int n = 0; n < NUM_TENSORS; n++) {
        free(t[n].here);
        fdm_memory_release(s.device, t[n].there);
        t[n] = (struct memory){.bytes = 0};
    }
}

/* Pages in a random order; what they hold behind a sequence is NaN. */
static void fill_cache(const struct call *c, int64_t pages, int64_t columns) {
    int64_t *order = malloc((size_t)pages * sizeof *order), next = 0;
    const int64_t page = c->page ? c->page : c->bound;
    for (int64_t n = 0; order && n < pages; n++) {
        const int64_t other = below(n + 1);
        order[n] = order[other];
        order[other] = n;
    }
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t column = 0; column < columns; column++) {
            const int64_t first = column * page, at = !c->page ? b : first < c->of[b].keys ? order[next++] : -5;
            if (c->page)
                ((int32_t *)(void *)t[TABLE].here)[b * columns + column] = (int32_t)at;
            for (int64_t j = first; j < first + page && j < c->of[b].keys; j++) {
                store_row(t[K].here, at * page + j - first, s.heads_kv, OF_K, c->of[b].id, j);
                store_row(t[V].here, at * page + j - first, s.heads_kv, OF_V, c->of[b].id, j);
            }
        }
    free(order);
}

/* Row i sees itself and the rows before it; bits behind a sequence's last row are set too. */
static void fill_tree(const struct call *c, int64_t total) {
    const int64_t words = (c->rows_max + 31) / 32;
    make(TREE, FDM_UINT32, 2, (const int64_t[2]){total, words});
    uint32_t *word = (uint32_t *)(void *)t[TREE].here;
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t i = 0; i < c->of[b].rows; i++)
            for (int64_t bit = 0; bit < 32 * words; bit++) {
                const uint32_t seen = bit <= i || bit >= c->of[b].rows;
                word[bit / 32] = (bit % 32 ? word[bit / 32] : 0) | seen << bit % 32;
                word += bit == 32 * words - 1 ? words : 0;
            }
}

static void fill(const struct call *c) {
    const int64_t page = c->page ? c->page : c->bound, columns = (c->bound + page - 1) / page;
    int64_t pages = 2, total = 0;
    for (int64_t b = 0; b < c->batch; b++) {
        pages += (c->of[b].keys + page - 1) / page;
        total += c->of[b].rows;
    }
    pages = c->page ? pages : c->batch;
    const int64_t q[3] = {total, s.heads, s.head_dim}, cache[4] = {pages, page, s.heads_kv, s.head_dim};
    make(Q, s.dtype, 3, q);
    make(OUT, s.dtype, 3, q);
    make(K, s.dtype, 4, cache);
    make(V, s.dtype, 4, cache);
    make(LSE, FDM_FLOAT32, 2, (const int64_t[2]){s.heads, total});
    make(LENGTHS, FDM_INT32, 1, (const int64_t[1]){c->batch});
    make(CU_Q, FDM_INT32, 1, (const int64_t[1]){c->batch + 1});
    if (c->page)
        make(TABLE, FDM_INT32, 2, (const int64_t[2]){c->batch, columns});
    int32_t *lengths = (int32_t *)(void *)t[LENGTHS].here, *cu = (int32_t *)(void *)t[CU_Q].here;
    cu[0] = 0;
    for (int64_t b = 0; b < c->batch; b++) {
        const struct member *m = &c->of[b];
        lengths[b] = (int32_t)m->keys;
        cu[b + 1] = cu[b] + (int32_t)m->rows;
        for (int64_t i = 0; i < m->rows; i++)
            store_row(t[Q].here, cu[b] + i, s.heads, OF_Q, m->id, m->keys - m->rows + i);
    }
    if (s.chain)
        fill_tree(c, total);
    fill_cache(c, pages, columns);
}

static fdm_status attend(const struct call *c, const fdm_options *given) {
    const fdm_cache cache = {
        .struct_bytes = sizeof cache, .block_table = c->page ? &t[TABLE].tensor : NULL, .lengths = &t[LENGTHS].tensor};
    const fdm_tensors tensors = {.struct_bytes = sizeof tensors,
                                 .q = &t[Q].tensor,
                                 .k = &t[K].tensor,
                                 .v = &t[V].tensor,
                                 .cu_seqlens_q = &t[CU_Q].tensor,
                                 .out = &t[OUT].tensor,
                                 .lse = &t[LSE].tensor,
                                 .cache = &cache,
                                 .tree = s.chain ? &t[TREE].tensor : NULL};
    fdm_options options = *given;
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_plan plan = {.struct_bytes = sizeof plan};
    fdm_problem problem;
    void *workspace = NULL;
    options.causal = s.chain ? 0 : options.causal;
    options.max_seqlen_q = c->rows_max;
    options.max_seqlen_k = c->bound;
    fdm_status status = fdm_device_query(s.device.type, 0, &device);
    if (status || (status = fdm_describe(FDM_FORWARD, &tensors, &options, &problem)) ||
        (status = fdm_plan_attention(&device, &problem, &options, &plan)) ||
        (status = fdm_memory_allocate(s.device, (size_t)plan.workspace_bytes + 64, &workspace)))
        return status;
    status = fdm_memory_fill(s.device, workspace, 0xff, (size_t)plan.workspace_bytes);
    if (!status)
        status = fdm_execute(&plan, &tensors, workspace, (size_t)plan.workspace_bytes, NULL);
    if (!status)
        status = fdm_synchronize(s.device);
    fdm_memory_release(s.device, workspace);
    return status;
}

static size_t row_bytes(void) { return (size_t)(s.heads * s.head_dim * fdm_dtype_bytes(s.dtype)); }

static const char *run(const struct call *c, const fdm_options *options, struct result *r) {
    const char *fault = NULL;
    fill(c);
    for (int n = 0; n < NUM_TENSORS; n++)
        if (t[n].here && fdm_memory_copy(t[n].there, s.device, t[n].here, host, t[n].bytes))
            fail("copying");
    if (attend(c, options))
        fault = fdm_last_error();
    for (int n = OUT; n <= LSE; n++)
        if (!fault && fdm_memory_copy(t[n].here, host, t[n].there, s.device, t[n].bytes))
            fail("copying");
    r->rows = c->of[c->target].rows;
    r->out = malloc((size_t)r->rows * row_bytes());
    r->lse = malloc((size_t)(r->rows * s.heads) * sizeof(float));
    const int64_t first = ((int32_t *)(void *)t[CU_Q].here)[c->target], total = t[Q].shape[0];
    memcpy(r->out, t[OUT].here + (size_t)first * row_bytes(), (size_t)r->rows * row_bytes());
    for (int64_t i = 0; i < r->rows; i++) /* a row's side by side */
        for (int64_t h = 0; h < s.heads; h++)
            r->lse[i * s.heads + h] = ((float *)(void *)t[LSE].here)[h * total + first + i];
    release_all();
    return fault;
}
static void forget(struct result *r) {
    free(r->out);
    free(r->lse);
    *r = (struct result){0};
}

/* ---- two calls ---- */

/* The last `rows` of the target's first `keys` keys among other sequences. */
static struct call draw_call(int64_t keys, int64_t rows) {
    struct call c = {.batch = 1 + below(BATCH_MAX), .page = below(4) ? PICK(1, 3, 16, 64, 100) : 0};
    c.target = below(c.batch);
    c.bound = keys;
    c.rows_max = rows;
    for (int64_t b = 0; b < c.batch; b++) {
        c.of[b] = (struct member){1 + below(7), below(2 * s.keys), below(s.most_rows + 1)};
        if (b == c.target)
            c.of[b] = (struct member){0, keys, rows};
        c.bound = c.of[b].keys > c.bound ? c.of[b].keys : c.bound;
        c.rows_max = c.of[b].rows > c.rows_max ? c.of[b].rows : c.rows_max;
    }
    c.bound += PICK(0, 1, 63, 1500);
    if (s.most_rows > FEW) /* above what has a kernel of its own */
        c.rows_max += MANY + below(100);
    return c;
}

/* Whether rows of `part` are those of `whole` from row `first` on. */
static int same_bits(const struct result *whole, const struct result *part, int64_t first) {
    return memcmp(whole->out + (size_t)first * row_bytes(), part->out, (size_t)part->rows * row_bytes()) == 0 &&
           memcmp(whole->lse + first * s.heads, part->lse, (size_t)(part->rows * s.heads) * sizeof(float)) == 0;
}

static int is_right(const struct result *r, const struct result *truth) {
    const double most = s.dtype == FDM_FLOAT32 ? 2e-5 : s.dtype == FDM_FLOAT16 ? 8e-3 : 6e-2;
    for (int64_t n = 0; n < r->rows * s.heads * s.head_dim; n++)
        if (!(fabs(element_load(r->out, n, s.dtype) - element_load(truth->out, n, s.dtype)) <= most))
            return 0;
    for (int64_t n = 0; n < r->rows * s.heads; n++)
        if (!(fabs((double)r->lse[n] - (double)truth->lse[n]) <= 1e-3) && r->lse[n] != truth->lse[n])
            return 0;
    return 1;
}

static const char *compare_with_reference(const struct call *c, const struct result *r) {
    const fdm_device_id device = s.device;
    fdm_options options = s.options;
    struct result truth;
    s.device = host;
    options.family = "reference";
    const char *fault = run(c, &options, &truth);
    s.device = device;
    fault = fault ? fault : is_right(r, &truth) ? NULL : "another result than the reference's";
    forget(&truth);
    return fault;
}

/* What a level, a length and a kernel's tile may ask. */
static void draw_scene(void) {
    s.chain = 0;
    s.device = fdm_device_query(FDM_CUDA, 0, &(fdm_device){.struct_bytes = sizeof(fdm_device)}) ? host : cuda;
    const int on_cuda = s.device.type == FDM_CUDA, long_ones = below(3) == 0;
    s.options = fdm_options_default();
    s.options.invariance = 1 + below(2);
    s.options.causal = s.options.invariance == FDM_INVARIANCE_SCHEDULE || below(2);
    const int many = s.options.invariance == FDM_INVARIANCE_SCHEDULE || below(3) == 0;
    s.dtype =
        (fdm_dtype)(on_cuda && many ? PICK(FDM_FLOAT16, FDM_BFLOAT16) : PICK(FDM_FLOAT32, FDM_FLOAT16, FDM_BFLOAT16));
    s.heads_kv = 1 + below(2);
    s.heads = s.heads_kv * PICK(1, 2, 4);
    s.head_dim = on_cuda ? PICK(64, 128) : PICK(16, 24, 64, 80);
    s.keys = long_ones && !many ? 900 + below(1800) : 1 + below(300);
    s.most_rows = many ? 40 : FEW / (s.heads / s.heads_kv);
    s.rows = 1 + below(s.most_rows);
    if (s.options.causal && below(2))
        s.options.window_left = below(s.keys);
    if (!many && below(3) == 0)
        s.options.num_splits = 1 + below(5);
    else if (!many && below(3) == 0)
        s.options.split_keys = 64 * (1 + below(4));
}

static const char *check_bits(const struct options *o, char *about, size_t bytes) {
    (void)o;
    draw_scene();
    if (s.options.invariance == FDM_INVARIANCE_SCHEDULE && s.rows > s.keys)
        s.rows = s.keys;
    snprintf(about, bytes,
             "%s on %s, invariance %lld, H %lld/%lld D %lld, %lld rows of %lld keys%s, window %lld, %lld "
             "splits, %lld keys each",
             fdm_dtype_name(s.dtype), s.device.type == FDM_CUDA ? "CUDA" : "the CPU", (long long)s.options.invariance,
             (long long)s.heads, (long long)s.heads_kv, (long long)s.head_dim, (long long)s.rows, (long long)s.keys,
             s.options.causal ? ", causal" : "", (long long)s.options.window_left, (long long)s.options.num_splits,
             (long long)s.options.split_keys);
    struct result whole, part;
    const struct call first = draw_call(s.keys, s.rows);
    const char *fault = run(&first, &s.options, &whole);
    if (!fault)
        fault = compare_with_reference(&first, &whole);
    for (int64_t done = 0, rows; !fault && done < s.rows; done += rows) {
        rows = s.options.invariance == FDM_INVARIANCE_SCHEDULE ? 1 + below(s.rows - done) : s.rows;
        const struct call other = draw_call(s.keys - s.rows + done + rows, rows);
        fault = run(&other, &s.options, &part);
        if (!fault && !same_bits(&whole, &part, done))
            fault = "other bits in another call";
        forget(&part);
    }
    if (!fault && s.options.causal && s.most_rows <= FEW) {
        s.chain = 1;
        const struct call chained = draw_call(s.keys, s.rows);
        snprintf(about + strlen(about), bytes - strlen(about), ", and by a chain");
        fault = run(&chained, &s.options, &part);
        if (!fault && !same_bits(&whole, &part, 0))
            fault = "other bits where a tree says causal";
        forget(&part);
    }
    forget(&whole);
    return fault;
}

int invariance_checks(const struct options *o) { return run_cases(o, 30, check_bits); }
