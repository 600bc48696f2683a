/* native_cache.c: attention on a KV cache, and appending to one, for Python. */
#include "native.h"
#include "native_fields.h"

/* What both functions take of a cache, in this order. */
enum { TABLE, PAGE_START, CACHE_ROW, LENGTHS, FIRST_KEY, K_NEW, V_NEW, CU_NEW, COS, SIN, ROTARY_START, NUM_OF_CACHE };

static fdm_cache cache_of(fdm_tensor *const *t, int interleaved, fdm_tensor *fault) {
    return (fdm_cache){.struct_bytes = sizeof(fdm_cache),
                       .rotary_interleaved = interleaved,
                       .block_table = t[TABLE],
                       .page_start = t[PAGE_START],
                       .cache_row = t[CACHE_ROW],
                       .lengths = t[LENGTHS],
                       .first_key = t[FIRST_KEY],
                       .k_new = t[K_NEW],
                       .v_new = t[V_NEW],
                       .cu_seqlens_new = t[CU_NEW],
                       .rotary_cos = t[COS],
                       .rotary_sin = t[SIN],
                       .rotary_start = t[ROTARY_START],
                       .fault = fault};
}

/* cache_forward(q, k, v, mask, bias, sink, seqused_q, seqused_k, cu_seqlens_q, row_start, row_end, tree, *the cache's,
 * out, lse or None, fault of fdm_cache or None, *settings, rotary_interleaved, invariance, num_splits, split_keys,
 * number of threads, family or None; for CUDA tensors also the stream's address and what allocates) */
PyObject *native_cache_forward(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    enum { Q, K, V, MASK, BIAS, SINK, USED_Q, USED_K, CU_Q, ROW_START, ROW_END, TREE, CACHE };
    enum { OUT = CACHE + NUM_OF_CACHE, LSE, FAULT, NUM };
    enum {
        INTERLEAVED = NUM_SETTINGS,
        INVARIANCE,
        SPLITS,
        SPLIT_KEYS,
        THREADS,
        FAMILY,
        NUM_ON_CPU,
        STREAM = NUM_ON_CPU,
        ALLOCATE,
        NUM_ON_CUDA
    };
    const int on_cuda = count == NUM + NUM_ON_CUDA;
    struct tensor_argument storage[NUM];
    fdm_tensor *t[NUM];
    fdm_options options;
    PyObject *const *others = arguments + NUM, *result = NULL;
    if (!on_cuda && native_expect(count, NUM + NUM_ON_CPU))
        return NULL;
    const int failed = native_tensors(arguments, storage, t, NUM);
    const fdm_cache cache = cache_of(t + CACHE, PyObject_IsTrue(others[INTERLEAVED]) == 1, t[FAULT]);
    const fdm_tensors tensors = {.struct_bytes = sizeof tensors,
                                 .q = t[Q],
                                 .k = t[K],
                                 .v = t[V],
                                 .mask = t[MASK],
                                 .bias = t[BIAS],
                                 .cu_seqlens_q = t[CU_Q],
                                 .out = t[OUT],
                                 .lse = t[LSE],
                                 .sink = t[SINK],
                                 .seqused_q = t[USED_Q],
                                 .seqused_k = t[USED_K],
                                 .cache = &cache,
                                 .row_start = t[ROW_START],
                                 .row_end = t[ROW_END],
                                 .tree = t[TREE]};
    struct native_device_workspace workspace = {on_cuda ? others[ALLOCATE] : NULL, NULL};
    const fdm_allocator allocator = native_device_allocator(&workspace);
    if (!failed && !native_options(others, others[THREADS], others[FAMILY], &options)) {
        options.stream = on_cuda ? native_address(others[STREAM]) : NULL;
        options.invariance = PyLong_AsLongLong(others[INVARIANCE]);
        options.num_splits = PyLong_AsLongLong(others[SPLITS]);
        options.split_keys = PyLong_AsLongLong(others[SPLIT_KEYS]);
        result = PyErr_Occurred() ? NULL
                                  : native_run(fdm_attention_forward, &tensors, &options, on_cuda ? &allocator : NULL);
    }
    Py_XDECREF(workspace.kept);
    native_release(storage, NUM);
    return result;
}

/* cache_append(k, v, *the cache's, slots, positions, q, cu_seqlens_q, q_out, fault of fdm_cache or None,
 * rotary_interleaved, stream's address) */
PyObject *native_cache_append(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    enum { K, V, CACHE, SLOTS = CACHE + NUM_OF_CACHE, POSITIONS, Q, CU_Q, Q_OUT, FAULT, NUM };
    struct tensor_argument storage[NUM];
    fdm_tensor *t[NUM];
    fdm_status status = FDM_OK;
    if (native_expect(count, NUM + 2))
        return NULL;
    const int failed = native_tensors(arguments, storage, t, NUM);
    const fdm_cache cache = cache_of(t + CACHE, PyObject_IsTrue(arguments[NUM]) == 1, t[FAULT]);
    const fdm_append_tensors tensors = {.struct_bytes = sizeof tensors,
                                        .k = t[K],
                                        .v = t[V],
                                        .cache = &cache,
                                        .slots = t[SLOTS],
                                        .positions = t[POSITIONS],
                                        .q = t[Q],
                                        .cu_seqlens_q = t[CU_Q],
                                        .q_out = t[Q_OUT],
                                        .stream = native_address(arguments[NUM + 1])};
    if (!failed && !PyErr_Occurred()) {
        Py_BEGIN_ALLOW_THREADS;
        status = fdm_cache_append(&tensors);
        Py_END_ALLOW_THREADS;
    }
    native_release(storage, NUM);
    return failed || PyErr_Occurred() ? NULL : native_result(status);
}

/* plan_cache(device's name, dtype's name, rows, heads, heads_kv, head_dim, page_size, sinks of a head, softcap,
 * causal, window_left) -> (family, kernel, reason) of a packed call on a cache in pages. The device need not be
 * here. */
PyObject *native_plan_cache(PyObject *module, PyObject *arguments) {
    enum { BATCH = 8, COLUMNS = 64 };
    const char *name, *dtype;
    int page_size, sinks, causal;
    long long rows, heads, heads_kv, head_dim, window_left;
    fdm_options options = fdm_options_default();
    fdm_problem p = fdm_problem_default();
    if (!PyArg_ParseTuple(arguments, "ssLLLLiidpL", &name, &dtype, &rows, &heads, &heads_kv, &head_dim, &page_size,
                          &sinks, &options.softcap, &causal, &window_left))
        return NULL;
    p.pass = FDM_FORWARD;
    p.dtype = fdm_dtype_from_name(dtype);
    p.batch = BATCH;
    p.varlen = 1;
    p.seqlen_q = rows;
    p.total_q = BATCH * rows;
    p.heads = heads;
    p.heads_kv = heads_kv;
    p.head_dim = p.head_dim_v = head_dim;
    p.softmax_scale = 1.0;
    p.softcap = options.softcap;
    p.causal = options.causal = causal;
    p.window_left = window_left;
    p.has_seqused_k = p.has_cache = 1;
    p.page_size = page_size;
    p.max_pages = COLUMNS;
    p.num_pages = BATCH * COLUMNS;
    p.seqlen_k = (int64_t)page_size * COLUMNS;
    p.has_sink = sinks > 0;
    p.num_sinks = sinks;
    p.sink_dtype = p.dtype;
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_plan plan = {.struct_bytes = sizeof plan};
    fdm_status status = fdm_device_from_name(name, &device);
    if (!status)
        status = fdm_plan_attention(&device, &p, &options, &plan);
    return status ? native_result(status) : Py_BuildValue("(sss)", plan.family, plan.kernel, plan.reason);
}
