/* cache_append.c: new keys into a cache, and queries turned, without attention; gpu/append_launch.c on CUDA devices. */
#include "base/error.h"
#include "base/struct_bytes.h"
#include "gpu/append_launch.h"
#include "problem/kv_cache.h"
#include "problem/lengths.h"
#include "problem/tensor.h"

/* A call, read whole. */
struct append {
    fdm_append_tensors tensors;
    fdm_cache cache;
    fdm_problem problem;
    struct attention attention;
    struct index_view slots;
};

static fdm_status refuse_beside_slots(const fdm_cache *c) {
    const struct {
        const char *name;
        const fdm_tensor *tensor;
    } others[] = {{"block_table", c->block_table},      {"page_start", c->page_start},
                  {"cache_row", c->cache_row},          {"lengths", c->lengths},
                  {"first_key", c->first_key},          {"rotary_start", c->rotary_start},
                  {"cu_seqlens_new", c->cu_seqlens_new}};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        if (others[i].tensor)
            return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is given beside slots, which alone say where new keys go",
                             others[i].name);
    return FDM_OK;
}

static fdm_status describe_cache(struct append *x) {
    const fdm_append_tensors *t = &x->tensors;
    fdm_problem *p = &x->problem;
    const fdm_tensor *pair[2] = {t->k, t->v};
    static const char *const names[2] = {"k", "v"};
    for (int i = 0; i < 2; i++) {
        fdm_status status = pair[i] ? tensor_check(pair[i], names[i], 4, TENSOR_INPUT, 1)
                                    : error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", names[i]);
        if (status || (status = tensor_check_device(pair[i], names[i], t->k, "k")))
            return status;
    }
    const fdm_status taken = tensor_check_device_type(t->k, "k");
    if (taken)
        return taken;
    p->dtype = fdm_dtype_of(t->k);
    p->heads_kv = t->k->shape[2];
    p->head_dim = t->k->shape[3];
    p->head_dim_v = t->v->shape[3];
    p->causal = 1;
    p->seqlen_q = 0;
    if (!t->slots && !x->cache.lengths)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "lengths is NULL; appending needs to know where each sequence ends, or slots");
    if (!t->slots && (x->cache.lengths->ndim != 1 || !x->cache.lengths->shape))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "lengths has %d axes; it needs 1", x->cache.lengths->ndim);
    p->batch = t->slots ? 1 : x->cache.lengths->shape[0];
    const fdm_status status = t->slots ? refuse_beside_slots(&x->cache) : FDM_OK;
    return status ? status : cache_describe(&x->cache, t->k, 0, p);
}

static fdm_status describe_queries(struct append *x) {
    const fdm_append_tensors *t = &x->tensors;
    fdm_problem *p = &x->problem;
    if (!t->q && !t->q_out)
        return t->cu_seqlens_q ? error_set(FDM_ERROR_INVALID_ARGUMENT, "cu_seqlens_q is given, but q is not") : FDM_OK;
    if (!t->q || !t->q_out)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is missing; q and q_out are a pair", t->q ? "q_out" : "q");
    p->varlen = t->slots || t->cu_seqlens_q;
    fdm_status status = tensor_check(t->q, "q", 4 - p->varlen, TENSOR_INPUT, 1);
    if (status || (status = tensor_check_device(t->q, "q", t->k, "k")) ||
        (status = tensor_check_device(t->q_out, "q_out", t->k, "k")))
        return status;
    p->heads = t->q->shape[2 - p->varlen];
    p->seqlen_q = t->q->shape[1 - p->varlen];
    p->total_q = p->varlen ? p->seqlen_q : 0;
    const int64_t shape[4] = {p->batch, p->seqlen_q, p->heads, p->head_dim};
    if ((status = problem_resolve_matrix(t->q, "q", TENSOR_INPUT, p->varlen, shape, p, &x->attention.q)) ||
        (status = tensor_check(t->q_out, "q_out", 4 - p->varlen, TENSOR_OUTPUT, 1)) ||
        (status = problem_resolve_matrix(t->q_out, "q_out", TENSOR_OUTPUT, p->varlen, shape, p, &x->attention.out)) ||
        !t->cu_seqlens_q)
        return status;
    int64_t longest;
    status = lengths_check_cu_seqlens(t->cu_seqlens_q, "cu_seqlens_q", p->batch, p->total_q, &longest);
    x->attention.cu_seqlens_q = (const int32_t *)tensor_data(t->cu_seqlens_q);
    return status;
}

/* positions: one for each new key, and for each row of q. */
static fdm_status describe_positions(struct append *x) {
    const fdm_append_tensors *t = &x->tensors;
    const fdm_problem *p = &x->problem;
    const int64_t queries = !t->q ? 0 : p->varlen ? p->total_q : p->batch * p->seqlen_q;
    const int64_t rows = x->cache.k_new ? p->new_rows : queries;
    fdm_status status = cache_indices(t->slots, "slots", 1, &p->new_rows, 1, t->k, &x->slots);
    if (!status)
        status = cache_indices(t->positions, "positions", 1, &rows, 1, t->k, &x->attention.cache.rotary.positions);
    if (status)
        return status;
    if (t->q && !p->rotary_dim)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "q is given, but rotary_cos and rotary_sin are not");
    if (t->positions && !p->rotary_dim)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "positions are given, but rotary_cos and rotary_sin are not");
    if (t->positions && t->q && queries != rows)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "q has %lld rows beside %lld positions; it has one for each",
                         (long long)queries, (long long)rows);
    if (t->slots && p->rotary_dim && !t->positions)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "positions is NULL; slots do not say at which position a new key is turned");
    return FDM_OK;
}

static fdm_status check_apart(const struct append *x) {
    const fdm_append_tensors *t = &x->tensors;
    const fdm_cache *c = &x->cache;
    const int32_t appends = c->k_new != NULL;
    const struct named_tensor all[] = {{"q", t->q, 0, 0},
                                       {"q_out", t->q_out, 1, 1},
                                       {"k", t->k, appends, 0},
                                       {"v", t->v, appends, 0},
                                       {"slots", t->slots, 0, 0},
                                       {"positions", t->positions, 0, 0},
                                       {"cu_seqlens_q", t->cu_seqlens_q, 0, 0},
                                       {"block_table", c->block_table, 0, 0},
                                       {"page_start", c->page_start, 0, 0},
                                       {"cache_row", c->cache_row, 0, 0},
                                       {"lengths", c->lengths, 0, 0},
                                       {"k_new", c->k_new, 0, 0},
                                       {"v_new", c->v_new, 0, 0},
                                       {"cu_seqlens_new", c->cu_seqlens_new, 0, 0},
                                       {"rotary_cos", c->rotary_cos, 0, 0},
                                       {"rotary_sin", c->rotary_sin, 0, 0},
                                       {"rotary_start", c->rotary_start, 0, 0},
                                       {"fault", c->fault, 1, 0}};
    return tensors_check_apart(all, sizeof all / sizeof all[0]);
}

static int is_on_device(const struct append *x) { return x->tensors.k->device.type == FDM_CUDA; }

static fdm_status describe(struct append *x) {
    fdm_problem *p = &x->problem;
    fdm_status status = describe_cache(x);
    if (!status)
        status = describe_queries(x);
    if (!status && !x->tensors.q)
        p->heads = p->heads_kv;
    if (!status && p->dtype != FDM_FLOAT64 && p->dtype > FDM_BFLOAT16)
        status = error_set(FDM_ERROR_INVALID_ARGUMENT, "k is %s; it must be float32, float16, bfloat16 or float64",
                           fdm_dtype_name(p->dtype));
    if (!status)
        status = cache_resolve(&x->cache, x->tensors.k, x->tensors.v, x->tensors.slots != NULL, p, &x->attention);
    if (!status)
        status = describe_positions(x);
    if (!status)
        status = check_apart(x);
    return status || x->tensors.slots || is_on_device(x) ? status : cache_check_pages(&x->attention);
}

static fdm_status append_on_device(const struct append *x) {
    const fdm_problem *p = &x->problem;
    if (p->dtype == FDM_FLOAT64)
        return error_set(FDM_ERROR_UNSUPPORTED, "k is float64, which is appended on the CPU only; CUDA devices take "
                                                "float32, float16 and bfloat16");
    if (p->batch >= INT32_MAX || p->new_rows >= INT32_MAX || p->seqlen_q >= INT32_MAX || p->heads >= INT32_MAX)
        return error_set(FDM_ERROR_UNSUPPORTED,
                         "there are %lld sequences, %lld new keys and %lld heads; CUDA devices take fewer than 2^31",
                         (long long)p->batch, (long long)p->new_rows, (long long)p->heads);
    if (p->batch < 1 || p->heads_kv < 1)
        return FDM_OK;
    const fdm_status status =
        x->tensors.slots ? FDM_OK : cache_fault_look(x->tensors.k->device.index, &x->attention, x->tensors.stream);
    return status ? status : append_alone(x->tensors.k->device.index, &x->attention, &x->slots, x->tensors.stream);
}

fdm_status fdm_cache_append(const fdm_append_tensors *tensors) {
    fdm_append_tensors tensors_room;
    fdm_cache cache_room;
    if (!(tensors = STRUCT_READ(fdm_append_tensors, tensors, &tensors_room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    const fdm_cache *cache = tensors->cache;
    if (!(cache = STRUCT_READ(fdm_cache, cache, &cache_room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    struct append x = {.tensors = *tensors, .cache = *cache, .problem = fdm_problem_default()};
    x.attention.problem = &x.problem;
    const fdm_status status = describe(&x);
    if (status)
        return status;
    if (is_on_device(&x))
        return append_on_device(&x);
    if (x.tensors.slots)
        cache_write_slots(&x.attention, &x.slots);
    for (int64_t item = 0; item < cache_items(&x.attention); item++)
        cache_run_item(&x.attention, NULL, item);
    return FDM_OK;
}
