/* native_cache.c: attention on a KV cache, and appending to one, for Python. */
#include "native_torch.h"

#include "native_fields.h"

#include <string.h>

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

/* The tensors of a forward. */
enum { Q, K, V, MASK, BIAS, SINK, USED_Q, USED_K, CU_Q, ROW_START, ROW_END, TREE, CACHE };
enum { OUT = CACHE + NUM_OF_CACHE, LSE, FAULT, NUM_OF_FORWARD };

static fdm_tensors tensors_of(fdm_tensor *const *t, const fdm_cache *cache) {
    return (fdm_tensors){.struct_bytes = sizeof(fdm_tensors),
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
                         .cache = cache,
                         .row_start = t[ROW_START],
                         .row_end = t[ROW_END],
                         .tree = t[TREE]};
}

/* cache_forward(q, k, v, mask, bias, sink, seqused_q, seqused_k, cu_seqlens_q, row_start, row_end, tree, *the cache's,
 * out, lse or None, fault of fdm_cache or None, *settings, rotary_interleaved, invariance, num_splits, split_keys,
 * number of threads, family or None; for CUDA tensors also the stream's address and what allocates) */
PyObject *native_cache_forward(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
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
    const int on_cuda = count == NUM_OF_FORWARD + NUM_ON_CUDA;
    struct tensor_argument storage[NUM_OF_FORWARD];
    fdm_tensor *t[NUM_OF_FORWARD];
    fdm_options options;
    PyObject *const *others = arguments + NUM_OF_FORWARD, *result = NULL;
    if (!on_cuda && native_expect(count, NUM_OF_FORWARD + NUM_ON_CPU))
        return NULL;
    const int failed = native_tensors(arguments, storage, t, NUM_OF_FORWARD);
    const fdm_cache cache = cache_of(t + CACHE, PyObject_IsTrue(others[INTERLEAVED]) == 1, t[FAULT]);
    const fdm_tensors tensors = tensors_of(t, &cache);
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
    native_release(storage, NUM_OF_FORWARD);
    return result;
}

/* The tensors of appending. */
enum {
    TO_K,
    TO_V,
    TO_CACHE,
    SLOTS = TO_CACHE + NUM_OF_CACHE,
    POSITIONS,
    Q_IN,
    CU_Q_IN,
    Q_OUT,
    TO_FAULT,
    NUM_OF_APPEND
};

static PyObject *append(fdm_tensor *const *t, int interleaved, void *stream) {
    const fdm_cache cache = cache_of(t + TO_CACHE, interleaved, t[TO_FAULT]);
    const fdm_append_tensors tensors = {.struct_bytes = sizeof tensors,
                                        .k = t[TO_K],
                                        .v = t[TO_V],
                                        .cache = &cache,
                                        .slots = t[SLOTS],
                                        .positions = t[POSITIONS],
                                        .q = t[Q_IN],
                                        .cu_seqlens_q = t[CU_Q_IN],
                                        .q_out = t[Q_OUT],
                                        .stream = stream};
    fdm_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = fdm_cache_append(&tensors);
    Py_END_ALLOW_THREADS;
    return native_result(status);
}

/* cache_append(k, v, *the cache's, slots, positions, q, cu_seqlens_q, q_out, fault of fdm_cache or None,
 * rotary_interleaved, stream's address) */
PyObject *native_cache_append(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    struct tensor_argument storage[NUM_OF_APPEND];
    fdm_tensor *t[NUM_OF_APPEND];
    PyObject *result = NULL;
    if (native_expect(count, NUM_OF_APPEND + 2))
        return NULL;
    const int failed = native_tensors(arguments, storage, t, NUM_OF_APPEND);
    PyObject *const *others = arguments + NUM_OF_APPEND;
    void *stream = native_address(others[1]);
    if (!failed && !PyErr_Occurred())
        result = append(t, PyObject_IsTrue(others[0]) == 1, stream);
    native_release(storage, NUM_OF_APPEND);
    return result;
}

/* ---- PyTorch tensors -------------------------------------------------------------------------------------------- */

/* Numbers of a caller as they are most often given; 0 for any other, which Python's rules see to. */
static int is_flag(PyObject *object, int *flag) {
    *flag = object == Py_True;
    return *flag || object == Py_False || object == Py_None;
}

static int is_integer(PyObject *object, int64_t *value) {
    int overflow = 0;
    if (!PyLong_CheckExact(object))
        return 0;
    *value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return !overflow;
}

static int is_bound(PyObject *object, int64_t *value) {
    *value = -1;
    return object == Py_None || is_integer(object, value);
}

static int is_float(PyObject *object, double *value) {
    if (!PyFloat_CheckExact(object))
        return 0;
    *value = PyFloat_AsDouble(object);
    return 1;
}

/* Two objects of a pair, or of None; 0 for what is neither. */
static int is_pair(PyObject *pair, PyObject **first, PyObject **second) {
    *first = *second = Py_None;
    if (pair == Py_None)
        return 1;
    if (!PyTuple_CheckExact(pair) || PyTuple_Size(pair) != 2)
        return 0;
    *first = PyTuple_GetItem(pair, 0);
    *second = PyTuple_GetItem(pair, 1);
    return 1;
}

/* Whether FLASH_DMATTN_CHECK_PAGES may ask for faults; kept from the first call on, as _cache_torch.py does. */
static int asks_for_faults(void) {
    static int asks = -1;
    fdm_setting_info info = {.struct_bytes = sizeof info};
    for (int32_t i = 0; asks < 0 && fdm_setting_list(i, &info) == FDM_OK; i++)
        if (!strcmp(info.name, "FLASH_DMATTN_CHECK_PAGES"))
            asks = info.value && strcmp(info.value, "0") != 0;
    return asks != 0;
}

/* Views of objects, NULL for None and NULL: 1 where all are plain, 0 where not, -1 with an exception set. */
static int plain_views(PyObject *const *objects, int count, struct tensor_argument *storage, fdm_tensor **t) {
    const int records = native_torch_records();
    int plain = records < 0 ? -1 : 1;
    for (int i = 0; i < count; i++) {
        t[i] = NULL;
        if (plain == 1 && objects[i] && objects[i] != Py_None) {
            plain = native_torch_is_plain(objects[i], &storage[i], records);
            t[i] = &storage[i].tensor;
            if (plain == 1 && t[i]->device.type == FDM_CUDA && asks_for_faults())
                plain = 0;
        }
    }
    return plain;
}

/* The arguments of cache_attend() behind its tensors. */
enum {
    NUMBER_MOST_ROWS,
    NUMBER_MOST_KEYS,
    NUMBER_SCALE,
    NUMBER_CAUSAL,
    NUMBER_SOFTCAP,
    NUMBER_WINDOW,
    NUMBER_WITHOUT_SINK,
    NUMBER_INTERLEAVED,
    NUMBER_INVARIANCE,
    NUMBER_SPLITS,
    NUMBER_SPLIT_KEYS,
    NUMBER_WANT_LSE,
    NUMBER_WITHIN_ROOM,
    NUM_OF_NUMBERS
};

struct numbers {
    fdm_options options;
    int interleaved, want_lse, within_room;
};

/* Whether numbers are given in their ordinary form. */
static int are_numbers(PyObject *const *given, int has_tree, struct numbers *numbers) {
    fdm_options *options = &numbers->options;
    PyObject *left, *right;
    int causal, without_sink;
    *options = fdm_options_default();
    options->has_softmax_scale = given[NUMBER_SCALE] != Py_None;
    if (!is_flag(given[NUMBER_CAUSAL], &causal) || !is_flag(given[NUMBER_WITHOUT_SINK], &without_sink))
        return 0;
    options->causal = given[NUMBER_CAUSAL] == Py_None ? !has_tree : causal;
    options->lse_without_sink = without_sink;
    return is_pair(given[NUMBER_WINDOW], &left, &right) && given[NUMBER_WINDOW] != Py_None &&
           is_bound(left, &options->window_left) && is_bound(right, &options->window_right) &&
           (!options->has_softmax_scale || is_float(given[NUMBER_SCALE], &options->softmax_scale)) &&
           (given[NUMBER_SOFTCAP] == Py_None || is_float(given[NUMBER_SOFTCAP], &options->softcap)) &&
           is_integer(given[NUMBER_MOST_ROWS], &options->max_seqlen_q) &&
           is_integer(given[NUMBER_MOST_KEYS], &options->max_seqlen_k) &&
           is_integer(given[NUMBER_INVARIANCE], &options->invariance) &&
           is_integer(given[NUMBER_SPLITS], &options->num_splits) &&
           is_integer(given[NUMBER_SPLIT_KEYS], &options->split_keys) &&
           is_flag(given[NUMBER_INTERLEAVED], &numbers->interleaved) &&
           is_flag(given[NUMBER_WANT_LSE], &numbers->want_lse) &&
           is_flag(given[NUMBER_WITHIN_ROOM], &numbers->within_room);
}

/* Whether the axes are those of a call, and mask and bias of dtypes that Python's rules take. -1 with an exception
 * set. */
static int has_form(PyObject *const *objects, fdm_tensor *const *t) {
    if (!t[Q] || !t[K] || !t[V] || t[Q]->ndim != (t[CU_Q] ? 3 : 4) || t[K]->ndim != 4 || t[V]->ndim != 4)
        return 0;
    if ((t[MASK] && t[MASK]->ndim != 4) || (t[BIAS] && t[BIAS]->ndim != 4))
        return 0;
    int form = t[MASK] ? native_torch_is_bool(objects[MASK]) : 1;
    if (form == 1 && t[BIAS]) {
        form = native_torch_is_bool(objects[BIAS]);
        form = form < 0 ? -1 : !form;
    }
    return form;
}

/* Whether the columns of a table hold all keys of every sequence, the new ones too, by lengths in host memory. */
static int fits(fdm_tensor *const *t) {
    const fdm_tensor *table = t[CACHE + TABLE], *lengths = t[CACHE + LENGTHS], *added = t[CACHE + K_NEW];
    if (!table || !lengths || lengths->device.type != FDM_CPU)
        return 1;
    if (table->ndim != 2 || lengths->ndim != 1 || fdm_dtype_of(lengths) != FDM_INT32)
        return 0;
    const char *first = (const char *)lengths->data + lengths->byte_offset;
    const int64_t room = table->shape[1] * t[K]->shape[1] - (added && added->ndim == 4 ? added->shape[1] : 0);
    for (int64_t i = 0; i < lengths->shape[0]; i++) {
        const int32_t length = ((const int32_t *)first)[lengths->strides ? i * lengths->strides[0] : i];
        if (length >= 0 && length > room)
            return 0;
    }
    return 1;
}

/* Runs a call whose views are all there but those of new results: out, or (out, lse). */
static PyObject *attend(PyObject *const *objects, fdm_tensor **t, struct numbers *numbers) {
    PyObject *made[2] = {NULL, NULL}, *result = NULL;
    struct tensor_argument views[2];
    const int keeps_out = objects[OUT] != Py_None;
    int failed = native_torch_results(objects[Q], t[Q], t[V]->shape[3], keeps_out, 1 + numbers->want_lse, made, views);
    if (!failed) {
        if (!keeps_out)
            t[OUT] = &views[0].tensor;
        t[LSE] = numbers->want_lse ? &views[1].tensor : NULL;
        const fdm_cache cache = cache_of(t + CACHE, numbers->interleaved, NULL);
        const fdm_tensors tensors = tensors_of(t, &cache);
        failed = native_torch_run(fdm_attention_forward, &tensors, objects[Q], &numbers->options);
    }
    if (!failed) {
        PyObject *out = keeps_out ? objects[OUT] : made[0];
        result = numbers->want_lse ? PyTuple_Pack(2, out, made[1]) : Py_NewRef(out);
    }
    Py_XDECREF(made[0]);
    Py_XDECREF(made[1]);
    return result;
}

/* cache_attend(query, key_cache, value_cache, attn_mask, attn_bias, sink, seqused_q, seqused_k, cu_seqlens_q, tree,
 * block_table, page_start, cache_batch_idx, cache_seqlens, cache_leftpad, key, value, cu_seqlens_new, rotary_seqlens,
 * out, row_intervals, rotary, max_seqlen_q, max_seqlen_k, softmax_scale, is_causal, softcap, window_size,
 * lse_without_sink, rotary_interleaved, invariance, num_splits, split_keys, return_lse, whether lengths must fit the
 * columns of block_table), as callers of flash_dmattn_with_kvcache_func() gave them -> out or (out, lse);
 * NotImplemented where the call must go through Python's rules or the dispatcher */
PyObject *native_cache_attend(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    static const int position[] = {Q,
                                   K,
                                   V,
                                   MASK,
                                   BIAS,
                                   SINK,
                                   USED_Q,
                                   USED_K,
                                   CU_Q,
                                   TREE,
                                   CACHE + TABLE,
                                   CACHE + PAGE_START,
                                   CACHE + CACHE_ROW,
                                   CACHE + LENGTHS,
                                   CACHE + FIRST_KEY,
                                   CACHE + K_NEW,
                                   CACHE + V_NEW,
                                   CACHE + CU_NEW,
                                   CACHE + ROTARY_START,
                                   OUT};
    enum { NUM_SINGLE = sizeof position / sizeof position[0], RANGES = NUM_SINGLE, ROTARY, NUMBERS };
    PyObject *objects[NUM_OF_FORWARD] = {NULL};
    struct tensor_argument storage[NUM_OF_FORWARD];
    fdm_tensor *t[NUM_OF_FORWARD];
    struct numbers numbers;
    if (native_expect(count, NUMBERS + NUM_OF_NUMBERS))
        return NULL;
    for (int i = 0; i < NUM_SINGLE; i++)
        objects[position[i]] = given[i];
    int plain = is_pair(given[RANGES], &objects[ROW_START], &objects[ROW_END]) &&
                is_pair(given[ROTARY], &objects[CACHE + COS], &objects[CACHE + SIN]) &&
                are_numbers(given + NUMBERS, objects[TREE] != Py_None, &numbers);
    if (plain == 1)
        plain = (plain = native_torch_is_watched()) < 0 ? -1 : !plain;
    if (plain == 1)
        plain = plain_views(objects, NUM_OF_FORWARD, storage, t);
    if (plain == 1)
        plain = has_form(objects, t);
    if (plain == 1 && numbers.within_room)
        plain = fits(t);
    if (plain != 1)
        return plain < 0 ? NULL : Py_NewRef(Py_NotImplemented);
    return attend(objects, t, &numbers);
}

/* append_to_cache(key_cache, value_cache, block_table, page_start, cache_batch_idx, cache_seqlens, key, value,
 * cu_seqlens_new, rotary_seqlens, slots, positions, query, cu_seqlens_q, query_out, rotary, rotary_interleaved), as
 * callers of append_kv_cache() gave them -> the turned query or None; NotImplemented as of cache_attend() */
PyObject *native_append_to_cache(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    static const int position[] = {TO_K,
                                   TO_V,
                                   TO_CACHE + TABLE,
                                   TO_CACHE + PAGE_START,
                                   TO_CACHE + CACHE_ROW,
                                   TO_CACHE + LENGTHS,
                                   TO_CACHE + K_NEW,
                                   TO_CACHE + V_NEW,
                                   TO_CACHE + CU_NEW,
                                   TO_CACHE + ROTARY_START,
                                   SLOTS,
                                   POSITIONS,
                                   Q_IN,
                                   CU_Q_IN,
                                   Q_OUT};
    enum { NUM_SINGLE = sizeof position / sizeof position[0], ROTARY = NUM_SINGLE, FLAG, NUM_GIVEN };
    PyObject *objects[NUM_OF_APPEND] = {NULL}, *made = NULL;
    struct tensor_argument storage[NUM_OF_APPEND];
    fdm_tensor *t[NUM_OF_APPEND];
    int interleaved;
    void *stream = NULL;
    if (native_expect(count, NUM_GIVEN))
        return NULL;
    for (int i = 0; i < NUM_SINGLE; i++)
        objects[position[i]] = given[i];
    int plain = is_pair(given[ROTARY], &objects[TO_CACHE + COS], &objects[TO_CACHE + SIN]) &&
                is_flag(given[FLAG], &interleaved);
    if (plain == 1)
        plain = (plain = native_torch_is_watched()) < 0 ? -1 : !plain;
    if (plain == 1)
        plain = plain_views(objects, NUM_OF_APPEND, storage, t);
    if (plain != 1 || !t[TO_K] || !t[TO_V])
        return plain < 0 ? NULL : Py_NewRef(Py_NotImplemented);
    PyObject *turned = objects[Q_OUT];
    if (turned == Py_None && t[Q_IN]) {
        turned = made = native_torch_empty_like(objects[Q_IN], t[Q_IN], &storage[Q_OUT]);
        t[Q_OUT] = &storage[Q_OUT].tensor;
        if (!made)
            return NULL;
    }
    PyObject *done = NULL;
    if (t[TO_K]->device.type != FDM_CUDA || !native_torch_stream(t[TO_K]->device, &stream))
        done = append(t, interleaved, stream);
    PyObject *result = done ? Py_NewRef(turned) : NULL;
    Py_XDECREF(done);
    Py_XDECREF(made);
    return result;
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
