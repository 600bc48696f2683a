/* topk_state.c: fdm_topk_append() and fdm_topk_fill(): the slots of a top-W mask, checked here; topk_slots.c keeps them
 * on the CPU, slots_on_device.c on CUDA devices. */
#include "base/error.h"
#include "base/struct_bytes.h"
#include "masks/slots/slots_on_device.h"
#include "problem/tensor.h"

static fdm_status check(const fdm_tensor *t, const char *name, int32_t ndim, enum tensor_role role, fdm_dtype dtype,
                        const int64_t *shape, const fdm_tensor *bias) {
    return tensor_check_as(t, name, ndim, role, dtype, shape, bias, "bias");
}

/* bias [B, h] of a token, or [B, h, S] of a prompt. */
static fdm_status check_bias(const fdm_tensor *bias, int32_t ndim) {
    if (!bias)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "bias is NULL");
    fdm_status status = tensor_check(bias, "bias", ndim, TENSOR_INPUT, 0);
    if (status)
        return status;
    const fdm_dtype dtype = fdm_dtype_of(bias);
    if (dtype != FDM_FLOAT32 && dtype != FDM_FLOAT16 && dtype != FDM_BFLOAT16)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "bias is %s; it must be float32, float16 or bfloat16",
                         fdm_dtype_name(dtype));
    if ((status = tensor_check_device_type(bias, "bias")))
        return status;
    for (int32_t i = 0; i < ndim; i++)
        if (bias->shape[i] > INT32_MAX)
            return error_set(FDM_ERROR_INVALID_ARGUMENT, "bias has extent %lld on axis %d; at most 2^31 - 1 is taken",
                             (long long)bias->shape[i], i);
    return FDM_OK;
}

static fdm_status check_slots(const fdm_topk_slots *s, const fdm_tensor *bias) {
    if (!s->key || s->key->ndim != 3 || !s->key->shape)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "slots.key %s; it needs 3 axes",
                         s->key ? "has no shape of 3 axes" : "is NULL");
    const int64_t shape[3] = {bias->shape[0], bias->shape[1], s->key->shape[2]};
    if (shape[2] < 1 || shape[2] > INT32_MAX)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "slots.key has %lld slots; it must be in 1..%d",
                         (long long)shape[2], INT32_MAX);
    fdm_status status = check(s->key, "slots.key", 3, TENSOR_OUTPUT, FDM_INT32, shape, bias);
    if (!status)
        status = check(s->bias, "slots.bias", 3, TENSOR_OUTPUT, fdm_dtype_of(bias), shape, bias);
    return status ? status : check(s->length, "slots.length", 2, TENSOR_OUTPUT, FDM_INT32, shape, bias);
}

/* K or V of new tokens, [batches, tokens, h, D], and their slots: both or neither. */
static fdm_status check_rows(const fdm_tensor *from, const fdm_tensor *to, const char *name, int64_t batches,
                             int64_t tokens, const fdm_topk_slots *s, const fdm_tensor *bias) {
    char slots_name[16] = "slots.";
    slots_name[6] = name[0];
    slots_name[7] = 0;
    if (!from && !to)
        return FDM_OK;
    if (!from || !to)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL, but %s is given", from ? slots_name : name,
                         from ? name : slots_name);
    fdm_status status = tensor_check(from, name, 4, TENSOR_INPUT, 1);
    if (status || (status = tensor_check(to, slots_name, 4, TENSOR_OUTPUT, 1)))
        return status;
    const fdm_dtype dtype = fdm_dtype_of(from);
    if (fdm_dtype_bytes(dtype) < 2)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is %s; it must be a floating dtype", name,
                         fdm_dtype_name(dtype));
    const int64_t shape[4] = {batches, tokens, bias->shape[1], from->shape[3]};
    const int64_t kept[4] = {bias->shape[0], s->key->shape[2], bias->shape[1], from->shape[3]};
    status = check(from, name, 4, TENSOR_INPUT, dtype, shape, bias);
    return status ? status : check(to, slots_name, 4, TENSOR_OUTPUT, dtype, kept, bias);
}

/* Slots, and slot where it is wanted, are written: apart from each other and from what is read. `beside`: real or end.
 */
static fdm_status check_apart(const fdm_tensor *bias, const fdm_tensor *beside, const char *beside_name,
                              const fdm_tensor *k, const fdm_tensor *v, const fdm_tensor *block_table,
                              const fdm_topk_slots *s, const fdm_tensor *slot) {
    const struct named_tensor all[] = {{"bias", bias, 0, 0},
                                       {beside_name, beside, 0, 0},
                                       {"k", k, 0, 0},
                                       {"v", v, 0, 0},
                                       {"block_table", block_table, 0, 0},
                                       {"slots.key", s->key, 1, 0},
                                       {"slots.bias", s->bias, 1, 0},
                                       {"slots.length", s->length, 1, 0},
                                       {"slots.k", s->k, 1, 0},
                                       {"slots.v", s->v, 1, 0},
                                       {"slot", slot, 1, 0}};
    return tensors_check_apart(all, sizeof all / sizeof all[0]);
}

static struct slot_scores scores_of(const fdm_tensor *t) {
    struct slot_scores s = {0};
    if (t)
        s = (struct slot_scores){tensor_data(t), tensor_stride(t, 0), tensor_stride(t, 1),
                                 t->ndim > 2 ? tensor_stride(t, 2) : 0};
    return s;
}

static struct slot_rows rows_of(const fdm_tensor *t) {
    struct slot_rows r = {0};
    if (t) {
        const int64_t bytes = fdm_dtype_bytes(fdm_dtype_of(t));
        r = (struct slot_rows){tensor_data(t), tensor_stride(t, 0) * bytes, tensor_stride(t, 1) * bytes,
                               tensor_stride(t, 2) * bytes, t->shape[3] * bytes};
    }
    return r;
}

/* block_table NULL: k and v are not in pages. */
static fdm_status fill_call(const fdm_tensor *bias, int64_t tokens, const fdm_tensor *k, const fdm_tensor *v,
                            const fdm_tensor *block_table, const fdm_topk_slots *s, struct slot_call *call) {
    const fdm_tensor *pages = k ? k : v;
    const int64_t batches = block_table && pages ? pages->shape[0] : bias->shape[0];
    const int64_t rows = block_table && pages ? pages->shape[1] : tokens;
    fdm_status status = check_slots(s, bias);
    if (status || (status = check_rows(k, s->k, "k", batches, rows, s, bias)) ||
        (status = check_rows(v, s->v, "v", batches, rows, s, bias)))
        return status;
    *call = (struct slot_call){.bias = scores_of(bias),
                               .k = rows_of(k),
                               .v = rows_of(v),
                               .slot_bias = scores_of(s->bias),
                               .slot_key = scores_of(s->key),
                               .length = scores_of(s->length),
                               .slot_k = rows_of(s->k),
                               .slot_v = rows_of(s->v),
                               .batch = (int32_t)bias->shape[0],
                               .heads = (int32_t)bias->shape[1],
                               .window = (int32_t)s->key->shape[2],
                               .num_tokens = (int32_t)tokens,
                               .dtype = (int32_t)fdm_dtype_of(bias)};
    return FDM_OK;
}

fdm_status fdm_topk_append(const fdm_tensor *bias, const fdm_tensor *real, const fdm_tensor *k, const fdm_tensor *v,
                           const fdm_topk_slots *slots, fdm_tensor *slot, void *stream) {
    struct slot_call call;
    fdm_topk_slots room;
    if (!(slots = STRUCT_READ(fdm_topk_slots, slots, &room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    fdm_status status = check_bias(bias, 2);
    if (status || (status = fill_call(bias, 1, k, v, NULL, slots, &call)))
        return status;
    if (real && (status = check(real, "real", 1, TENSOR_INPUT, FDM_BOOL, bias->shape, bias)))
        return status;
    if ((slot && (status = check(slot, "slot", 2, TENSOR_OUTPUT, FDM_INT32, bias->shape, bias))) ||
        (status = check_apart(bias, real, "real", k, v, NULL, slots, slot)))
        return status;
    call.real = real ? (const uint8_t *)tensor_data(real) : NULL;
    call.real_batch = real ? tensor_stride(real, 0) : 0;
    call.slot = scores_of(slot);
    if (bias->device.type == FDM_CUDA)
        return topk_slots_on_device(0, &call, bias->device.index, stream);
    topk_append_on_cpu(&call);
    return FDM_OK;
}

/* Pages of k and v, and where the call finds them. The pages' own extents are checked with those of k and v. */
static fdm_status check_table(const fdm_tensor *table, const fdm_tensor *pages, const fdm_tensor *bias) {
    if (!pages)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "block_table is given, but k and v are NULL");
    fdm_status status = tensor_check(pages, "k", 4, TENSOR_INPUT, 1);
    if (status || (status = tensor_check(table, "block_table", 2, TENSOR_INPUT, 0)))
        return status;
    const int64_t page_size = pages->shape[1], tokens = bias->shape[2];
    if (page_size < 1 || page_size > INT32_MAX)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "k has pages of %lld tokens; they must have 1..%d",
                         (long long)page_size, INT32_MAX);
    if (table->shape[1] < (tokens + page_size - 1) / page_size)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "block_table has %lld pages of %lld tokens a sequence, but bias has %lld tokens",
                         (long long)table->shape[1], (long long)page_size, (long long)tokens);
    const int64_t shape[2] = {bias->shape[0], table->shape[1]};
    return check(table, "block_table", 2, TENSOR_INPUT, FDM_INT32, shape, bias);
}

fdm_status fdm_topk_fill(const fdm_tensor *bias, const fdm_tensor *end, const fdm_tensor *k, const fdm_tensor *v,
                         const fdm_tensor *block_table, const fdm_topk_slots *slots, void *stream) {
    struct slot_call call;
    fdm_topk_slots room;
    if (!(slots = STRUCT_READ(fdm_topk_slots, slots, &room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    fdm_status status = check_bias(bias, 3);
    if (status || (block_table && (status = check_table(block_table, k ? k : v, bias))) ||
        (status = fill_call(bias, bias->shape[2], k, v, block_table, slots, &call)) ||
        (status = check(end, "end", 3, TENSOR_INPUT, FDM_INT32, bias->shape, bias)) ||
        (status = check_apart(bias, end, "end", k, v, block_table, slots, NULL)))
        return status;
    call.end = scores_of(end);
    if (block_table) {
        call.block_table = (const int32_t *)(void *)tensor_data(block_table);
        call.table_batch = tensor_stride(block_table, 0);
        call.table_page = tensor_stride(block_table, 1);
        call.page_size = (int32_t)(k ? k : v)->shape[1];
    }
    if (bias->device.type == FDM_CUDA)
        return topk_slots_on_device(1, &call, bias->device.index, stream);
    const int64_t num_pages = block_table ? (k ? k : v)->shape[0] : 0;
    int32_t page;
    if (block_table && topk_page_is_missing(&call, num_pages, &page))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "block_table has page %d; k has %lld pages", page,
                         (long long)num_pages);
    topk_fill_on_cpu(&call);
    return FDM_OK;
}
