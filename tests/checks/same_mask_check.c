/* same_mask_check.c: one mask said as key intervals, as row intervals and as a dense mask: out, lse and the gradients
 * agree, forward and backward, by the kernels that a CUDA device, or the emulated one, takes for each. What differs is
 * the order of sums and where numbers are rounded to 16 bits. */
#include <math.h>

#include "device_array.h"
#include "device_check.h"
#include "subjects.h"

enum { Q, K, V, DOUT, OUT, LSE, DQ, DK, DV, MASK, START, END, ROW_START, ROW_END, NUM_TENSORS };
enum { BY_MASK, BY_KEYS, BY_ROWS, NUM_WAYS };
static const char *const ways[] = {"a dense mask", "key intervals", "row intervals"};
static const int results[] = {OUT, LSE, DQ, DK, DV};
static const char *const result_names[] = {"out", "lse", "dq", "dk", "dv"};
enum { NUM_RESULTS = sizeof results / sizeof results[0] };

struct scene {
    int64_t batch, heads, heads_kv, rows, keys, head_dim;
    int form, causal, deterministic, by_tiles; /* by_tiles: by kernels that walk the tile plan, where they can */
};
enum { DOCUMENTS, PREFIX, BAND, NUM_FORMS };

static struct device_array t[NUM_TENSORS];

static struct scene draw_scene(void) {
    struct scene s = {.batch = 1 + below(2), .heads_kv = 1 + below(2), .form = (int)below(NUM_FORMS)};
    s.heads = s.heads_kv * (1 + below(2));
    s.rows = 130 + below(140);
    s.keys = s.rows + (s.form == DOCUMENTS ? 0 : below(90)); /* a document has as many keys as rows */
    s.head_dim = below(4) == 0 ? 160 : 64 << below(2);
    s.causal = (int)below(2);
    s.deterministic = (int)below(2);
    s.by_tiles = (int)below(2);
    return s;
}

/* The keys that a row sees of each form, and the rows that see a key: one range both. */
static void keys_of_row(const struct scene *s, int64_t unit, int64_t row, int64_t *start, int64_t *end) {
    const int64_t own = row + s->keys - s->rows;
    *start = s->form == DOCUMENTS ? row / unit * unit : s->form == PREFIX ? 0 : own - unit;
    *end = s->form == DOCUMENTS ? *start + unit : s->form == PREFIX ? (own < unit ? unit : own + 1) : own + 30;
}
static void fill(const struct scene *s) {
    const int64_t unit = 64 + below(80);
    static const int random[] = {Q, K, V, DOUT};
    for (int n = 0; n < 4; n++)
        for (int64_t i = 0; i < array_elements(&t[random[n]]); i++)
            array_set(&t[random[n]], i, random_number());
    for (int64_t j = 0; j < s->keys; j++) {
        array_set(&t[START], j, INT32_MAX);
        array_set(&t[END], j, 0);
    }
    for (int64_t i = 0; i < s->rows; i++) {
        int64_t start, end;
        keys_of_row(s, unit, i, &start, &end);
        array_set(&t[ROW_START], i, start);
        array_set(&t[ROW_END], i, end);
        for (int64_t j = 0; j < s->keys; j++) {
            const int seen = start <= j && j < end;
            array_set(&t[MASK], i * s->keys + j, seen);
            if (seen && array_get(&t[START], j) > (double)i)
                array_set(&t[START], j, i);
            if (seen)
                array_set(&t[END], j, i + 1);
        }
    }
}

static void make_tensors(const struct scene *s) {
    const int64_t q[4] = {s->batch, s->rows, s->heads, s->head_dim},
                  k[4] = {s->batch, s->keys, s->heads_kv, s->head_dim};
    const int64_t lse[3] = {s->batch, s->heads, s->rows}, pairs[4] = {1, 1, s->rows, s->keys};
    const int64_t of_keys[3] = {1, 1, s->keys}, of_rows[4] = {1, 1, 1, s->rows};
    static const int like_q[] = {Q, DOUT, OUT, DQ}, like_k[] = {K, V, DK, DV};
    for (int n = 0; n < 4; n++) {
        array_make(&t[like_q[n]], FDM_FLOAT16, 4, q, NULL, 0);
        array_make(&t[like_k[n]], FDM_FLOAT16, 4, k, NULL, 0);
    }
    array_make(&t[LSE], FDM_FLOAT32, 3, lse, NULL, 0);
    array_make(&t[MASK], FDM_BOOL, 4, pairs, NULL, 0);
    array_make(&t[START], FDM_INT32, 3, of_keys, NULL, 0);
    array_make(&t[END], FDM_INT32, 3, of_keys, NULL, 0);
    array_make(&t[ROW_START], FDM_INT32, 4, of_rows, NULL, 0);
    array_make(&t[ROW_END], FDM_INT32, 4, of_rows, NULL, 0);
}

static int plan_by_tiles(const fdm_device *device, const fdm_problem *problem, fdm_plan *plan) {
    static const char *const kernels[] = {"hopper.forward", "hopper.backward", "hopper.backward_2pass"};
    for (int n = 0; n < 3; n++)
        if (fdm_plan_variant(device, problem, kernels[n], 0, plan) == FDM_OK)
            return 1;
    return 0;
}

static void run(const struct scene *s, int way, fdm_pass pass, char *kernel, size_t size) {
    const int backward = pass == FDM_BACKWARD;
    const fdm_tensors tensors = {.struct_bytes = sizeof tensors,
                                 .q = &t[Q].tensor,
                                 .k = &t[K].tensor,
                                 .v = &t[V].tensor,
                                 .mask = way == BY_MASK ? &t[MASK].tensor : NULL,
                                 .interval_start = way == BY_KEYS ? &t[START].tensor : NULL,
                                 .interval_end = way == BY_KEYS ? &t[END].tensor : NULL,
                                 .row_start = way == BY_ROWS ? &t[ROW_START].tensor : NULL,
                                 .row_end = way == BY_ROWS ? &t[ROW_END].tensor : NULL,
                                 .out = &t[OUT].tensor,
                                 .lse = &t[LSE].tensor,
                                 .dout = backward ? &t[DOUT].tensor : NULL,
                                 .dq = backward ? &t[DQ].tensor : NULL,
                                 .dk = backward ? &t[DK].tensor : NULL,
                                 .dv = backward ? &t[DV].tensor : NULL};
    fdm_options options = fdm_options_default();
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_problem problem;
    fdm_plan plan = {.struct_bytes = sizeof plan};
    void *workspace = NULL;
    options.causal = s->causal;
    options.deterministic = s->deterministic;
    if (fdm_device_query(FDM_CUDA, 0, &device) || fdm_describe(pass, &tensors, &options, &problem) ||
        (!(s->by_tiles && plan_by_tiles(&device, &problem, &plan)) &&
         fdm_plan_attention(&device, &problem, &options, &plan)) ||
        fdm_memory_allocate(cuda, (size_t)plan.workspace_bytes + 64, &workspace) ||
        fdm_execute(&plan, &tensors, workspace, (size_t)plan.workspace_bytes, NULL) || fdm_synchronize(cuda))
        fail(ways[way]);
    fdm_memory_release(cuda, workspace);
    snprintf(kernel, size, "%s", plan.kernel);
}

/* Whether the result of a way is near that of the first: some roundings to 16 bits of the largest number apart. */
static int is_near(const double *first, int n) {
    double most = 0, apart = 0;
    for (int64_t i = 0; i < array_elements(&t[n]); i++) {
        const double x = array_get(&t[n], i);
        if (isinf(first[i]) || isinf(x)) { /* lse of a row that sees no key */
            if (first[i] != x)
                return 0;
            continue;
        }
        most = fmax(most, fabs(first[i]));
        apart = fmax(apart, fabs(x - first[i]));
        if (isnan(x) || isnan(first[i]))
            return 0;
    }
    return apart <= 4 * ldexp(1, -11) * most;
}

static const char *check(const struct options *o, char *about, size_t bytes) {
    (void)o;
    static char fault[128];
    double *first[NUM_RESULTS];
    char kernels[NUM_WAYS][2][48];
    const struct scene s = draw_scene();
    fault[0] = 0;
    make_tensors(&s);
    fill(&s);
    for (int n = 0; n < NUM_TENSORS; n++)
        array_upload(&t[n]);
    for (int way = 0; way < NUM_WAYS; way++) {
        run(&s, way, FDM_FORWARD, kernels[way][0], sizeof kernels[way][0]);
        run(&s, way, FDM_BACKWARD, kernels[way][1], sizeof kernels[way][1]);
        for (int n = 0; n < NUM_RESULTS; n++) {
            if (!array_download(&t[results[n]]) && !*fault)
                snprintf(fault, sizeof fault, "%s of %s: bytes beside it were written", result_names[n], ways[way]);
            if (way > 0) {
                if (!*fault && !is_near(first[n], results[n]))
                    snprintf(fault, sizeof fault, "%s of %s differs", result_names[n], ways[way]);
                continue;
            }
            const int64_t elements = array_elements(&t[results[n]]);
            first[n] = malloc((size_t)elements * sizeof(double));
            if (!first[n])
                fail("allocating");
            for (int64_t i = 0; i < elements; i++)
                first[n][i] = array_get(&t[results[n]], i);
        }
    }
    const int length =
        snprintf(about, bytes, "B %lld H %lld/%lld Sq %lld Sk %lld D %lld form %d%s%s by %s, %s and %s; %s, %s and %s",
                 (long long)s.batch, (long long)s.heads, (long long)s.heads_kv, (long long)s.rows, (long long)s.keys,
                 (long long)s.head_dim, s.form, s.causal ? " causal" : "", s.deterministic ? " deterministic" : "",
                 kernels[0][0], kernels[1][0], kernels[2][0], kernels[0][1], kernels[1][1], kernels[2][1]);
    if (length < 0)
        snprintf(fault, sizeof fault, "nothing describes it");
    for (int n = 0; n < NUM_RESULTS; n++)
        free(first[n]);
    for (int n = 0; n < NUM_TENSORS; n++)
        array_release(&t[n]);
    return *fault ? fault : NULL;
}

int same_mask_checks(const struct options *o) { return has_device() ? run_cases(o, 12, check) : EXIT_NO_DEVICE; }
