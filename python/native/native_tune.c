/* native_tune.c: timing the ways to run a problem of given shapes, for Python. */
#include <math.h>

#include "native.h"

enum { ROWS_MAX = 256 };

/* (kernel, choice, state, is the rules', seconds or None, why) */
static PyObject *row_of(const fdm_tune_row *row) {
    static const char *const states[] = {"timed", "not timed", "wrong", "failed"};
    PyObject *seconds = row->num_samples ? PyFloat_FromDouble(row->seconds) : Py_NewRef(Py_None);
    return Py_BuildValue("(sssNNs)", row->kernel, row->choice, states[row->state], PyBool_FromLong(row->is_rule),
                         seconds, row->why);
}

static PyObject *result_of(const fdm_tune_row *rows, const fdm_tune_result *result) {
    PyObject *list = PyList_New(0);
    for (int32_t i = 0; list && i < result->num_rows; i++) {
        PyObject *row = row_of(&rows[i]);
        if (!row || PyList_Append(list, row))
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return Py_BuildValue("(iiddN)", (int)result->best, (int)result->kept, result->compile_seconds,
                         result->device_seconds, list);
}

/* What is tuned, by one of the library's functions. */
struct tuned {
    fdm_status (*tune)(const struct tuned *tuned, const fdm_device *device, const fdm_tune_options *options,
                       fdm_tune_row *rows, fdm_tune_result *result);
    fdm_problem attention;
    fdm_gemm_problem gemm;
    fdm_softmax_problem softmax;
    fdm_tune_options options;
    int type, index;
};

static fdm_status tune_attention(const struct tuned *t, const fdm_device *device, const fdm_tune_options *options,
                                 fdm_tune_row *rows, fdm_tune_result *result) {
    return fdm_tune(device, &t->attention, options, rows, ROWS_MAX, result);
}
static fdm_status tune_gemm(const struct tuned *t, const fdm_device *device, const fdm_tune_options *options,
                            fdm_tune_row *rows, fdm_tune_result *result) {
    return fdm_tune_gemm(device, &t->gemm, options, rows, ROWS_MAX, result);
}
static fdm_status tune_softmax(const struct tuned *t, const fdm_device *device, const fdm_tune_options *options,
                               fdm_tune_row *rows, fdm_tune_result *result) {
    return fdm_tune_softmax(device, &t->softmax, options, rows, ROWS_MAX, result);
}

/* Without the GIL, one call at a time: the rows are many. */
static PyObject *run(const struct tuned *t) {
    static fdm_tune_row rows[ROWS_MAX];
    static PyThread_type_lock lock;
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_tune_result result = {.struct_bytes = sizeof result};
    fdm_status status;
    if (!lock && !(lock = PyThread_allocate_lock()))
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS;
    PyThread_acquire_lock(lock, WAIT_LOCK);
    rows[0].struct_bytes = sizeof rows[0];
    status = fdm_device_query(t->type, t->index, &device);
    if (!status)
        status = t->tune(t, &device, &t->options, rows, &result);
    Py_END_ALLOW_THREADS;
    PyObject *made = status ? native_result(status) : result_of(rows, &result);
    PyThread_release_lock(lock);
    return made;
}

/* What is a cache: whether there is one, rows of a page or 0, new keys of a sequence, dims that turn; whether pages are
 * in lists, sequences name their rows, and first keys are hidden. A sequence has room for seqlen_k keys. */
struct cache_words {
    int given, page_size, rotary_dim, lists, rows, padded;
    long long new_keys;
};
static void add_cache(const struct cache_words *c, fdm_problem *p) {
    const int64_t pages = c->page_size > 0 ? (p->seqlen_k + c->page_size - 1) / c->page_size : 1;
    const int64_t all = p->batch > INT32_MAX / (pages > 0 ? pages : 1) ? INT32_MAX : p->batch * pages;
    p->has_cache = 1;
    p->page_size = c->page_size;
    p->num_pages = (int32_t)all;
    p->max_pages = !c->page_size ? 0 : c->lists ? (int32_t)all : pages < INT32_MAX ? (int32_t)pages : INT32_MAX;
    p->ragged_pages = c->lists;
    p->has_cache_row = c->rows;
    p->has_first_key = c->padded;
    p->new_rows = c->new_keys > 0 && p->batch > INT64_MAX / c->new_keys ? INT64_MAX : p->batch * c->new_keys;
    p->rotary_dim = c->rotary_dim;
}

static void add_intervals(fdm_problem *p) { /* as masks.topk_intervals() and its bias make them */
    p->has_intervals = p->has_bias = p->causal = 1;
    p->interval_batch = p->bias_shape[0] = p->batch;
    p->interval_heads = p->bias_shape[1] = p->heads_kv;
    p->bias_shape[3] = p->seqlen_k;
    p->bias_dtype = p->dtype;
    p->needs_dbias = p->pass == FDM_BACKWARD;
}

/* tune(device type, index, backward, dtype, B, H, Hkv, Sq, Sk, D, Dv, causal, left, right, window of intervals or 0,
 * seconds, keep, (ranges of a row or 0, size of mask blocks or 0, tree, lengths), (a cache's words)) ->
 * (best row, kept, seconds of compilation, of the device, rows) */
PyObject *native_tune(PyObject *module, PyObject *arguments) {
    struct tuned t = {.tune = tune_attention, .options = {.struct_bytes = sizeof t.options}};
    fdm_problem p = fdm_problem_default();
    const char *dtype;
    int backward, causal, keep, tree, lengths;
    long long left, right, window;
    struct cache_words cache;
    if (!PyArg_ParseTuple(arguments, "iipsLLLLLLLpLLLdp(iipp)(piLippp)", &t.type, &t.index, &backward, &dtype, &p.batch,
                          &p.heads, &p.heads_kv, &p.seqlen_q, &p.seqlen_k, &p.head_dim, &p.head_dim_v, &causal, &left,
                          &right, &window, &t.options.seconds, &keep, &p.row_ranges, &p.block_mask_size, &tree,
                          &lengths, &cache.given, &cache.page_size, &cache.new_keys, &cache.rotary_dim, &cache.lists,
                          &cache.rows, &cache.padded))
        return NULL;
    p.pass = backward ? FDM_BACKWARD : FDM_FORWARD;
    p.dtype = fdm_dtype_from_name(dtype);
    p.causal = causal;
    p.window_left = left;
    p.window_right = right;
    p.softmax_scale = p.head_dim > 0 ? 1.0 / sqrt((double)p.head_dim) : 1.0;
    if (window > 0)
        add_intervals(&p);
    p.has_row_intervals = p.row_ranges != 0;
    p.row_interval_batch = p.has_row_intervals ? p.batch : 1;
    p.row_interval_heads = p.has_row_intervals ? p.heads_kv : 1;
    p.has_tree = (int8_t)tree;
    p.has_seqused_q = p.has_seqused_k = lengths;
    if (cache.given)
        add_cache(&cache, &p);
    t.attention = p;
    t.options.window = window;
    t.options.keep = keep;
    return run(&t);
}

/* tune_gemm(device type, index, dtype, batch, m, n, k, a's rows are contiguous, b's, there is a c, seconds, keep): the
 * matrices are contiguous */
PyObject *native_tune_gemm(PyObject *module, PyObject *arguments) {
    struct tuned t = {.tune = tune_gemm, .options = {.struct_bytes = sizeof t.options}};
    const char *dtype;
    int rows_a, rows_b, has_c, keep;
    fdm_gemm_problem p = {0};
    if (!PyArg_ParseTuple(arguments, "iisLLLLpppdp", &t.type, &t.index, &dtype, &p.batch, &p.m, &p.n, &p.k, &rows_a,
                          &rows_b, &has_c, &t.options.seconds, &keep))
        return NULL;
    p.dtype = fdm_dtype_from_name(dtype);
    p.a_rows_contiguous = rows_a;
    p.b_rows_contiguous = rows_b;
    p.has_c = has_c;
    p.mappable = (rows_a ? p.k : p.m) % 8 == 0 && (rows_b ? p.n : p.k) % 8 == 0 && p.n % 8 == 0;
    t.gemm = p;
    t.options.keep = keep;
    return run(&t);
}

/* tune_softmax(device type, index, backward, dtype, rows, columns, log, masked, seconds, keep): contiguous tensors */
PyObject *native_tune_softmax(PyObject *module, PyObject *arguments) {
    struct tuned t = {.tune = tune_softmax, .options = {.struct_bytes = sizeof t.options}};
    const char *dtype;
    int backward, is_log, masked, keep;
    fdm_softmax_problem p = {0};
    if (!PyArg_ParseTuple(arguments, "iipsLLppdp", &t.type, &t.index, &backward, &dtype, &p.rows, &p.columns, &is_log,
                          &masked, &t.options.seconds, &keep))
        return NULL;
    p.pass = backward ? FDM_BACKWARD : FDM_FORWARD;
    p.dtype = fdm_dtype_from_name(dtype);
    p.log = is_log;
    p.has_mask = masked && !backward;
    p.aligned = p.columns * fdm_dtype_bytes(p.dtype) % 16 ? 1 : 2;
    t.softmax = p;
    t.options.keep = keep;
    return run(&t);
}
