/* problem.c: what to compute: shapes, strides, dtypes, mask and bias; bad input ends here, with a sentence. */
#include "problem/problem.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/struct_bytes.h"
#include "problem/block_views.h"
#include "problem/interval_views.h"
#include "problem/kv_cache.h"
#include "problem/lengths.h"
#include "problem/problem_fields.h"
#include "problem/sinks.h"
#include "problem/tensor.h"
#include "problem/tree.h"
#include "problem/visible_tiles.h"

#define NOTHING(field, kind, value, rule)
#define FROM_PROBLEM(field, kind, value, rule) options.field = p->field;
#define FROM_OPTIONS(field, kind, value, rule) p->field = o->field;
#define DEFAULT(field, kind, value, rule)      .field = value,

fdm_options problem_options(const fdm_problem *p) {
    fdm_options options = fdm_options_default();
    FDM_PROBLEM_FIELDS(NOTHING, FROM_PROBLEM)
    options.has_softmax_scale = 1;
    options.max_seqlen_q = p->varlen ? p->seqlen_q : 0;
    options.max_seqlen_k = p->varlen || p->has_cache ? p->seqlen_k : 0;
    return options;
}

fdm_problem fdm_problem_default(void) { return (fdm_problem){FDM_PROBLEM_FIELDS(DEFAULT, DEFAULT)}; }

struct key_range problem_key_range(const fdm_problem *problem, const struct sequence *sequence, int64_t i) {
    struct key_range range = {sequence->first_key, sequence->seqlen_k};
    int64_t row = i + sequence->seqlen_k - sequence->seqlen_q;
    /* Compared before they are added: either side of the window may be INT64_MAX. */
    if (problem->window_left >= 0 && problem->window_left < row - range.first)
        range.first = row - problem->window_left;
    if (problem->window_right >= 0 && problem->window_right < range.last - 1 - row)
        range.last = row + problem->window_right + 1;
    if (problem->causal && row + 1 < range.last)
        range.last = row + 1;
    return range;
}

/* ---- a problem by itself ---- */

static fdm_status check_broadcast(const char *name, const int64_t *shape, const fdm_problem *p) {
    char text[96];
    tensor_shape_text(text, sizeof text, shape, 4);
    if (shape[0] != 1 && shape[0] != p->batch)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s has shape %s; its axis 0 must be 1 or the batch %lld", name,
                         text, (long long)p->batch);
    if (shape[1] != 1 && shape[1] != p->heads && shape[1] != p->heads_kv)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "%s has shape %s; its axis 1 must be 1, %lld (heads of k) or %lld (heads of q)", name, text,
                         (long long)p->heads_kv, (long long)p->heads);
    if (shape[2] != 1 && shape[2] != p->seqlen_q)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s has shape %s; its axis 2 must be 1 or the query length %lld",
                         name, text, (long long)p->seqlen_q);
    if (shape[3] != 1 && shape[3] != p->seqlen_k)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s has shape %s; its axis 3 must be 1 or the key length %lld",
                         name, text, (long long)p->seqlen_k);
    return FDM_OK;
}

static fdm_status check_numbers(const fdm_problem *p) {
    if (!isfinite(p->softmax_scale))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "softmax_scale is %g; it must be finite", p->softmax_scale);
    if (!isfinite((float)p->softmax_scale))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "softmax_scale is %g; it must fit a float32", p->softmax_scale);
    if (!isfinite((float)p->softcap) || p->softcap < 0)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "softcap is %g; it must be finite and >= 0 (0 = none)",
                         p->softcap);
    if (p->window_left < -1 || p->window_right < -1)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "window is (%lld, %lld); each side must be >= 0, or -1 for unbounded",
                         (long long)p->window_left, (long long)p->window_right);
    return FDM_OK;
}

static fdm_status check_extents(const fdm_problem *p) {
    const struct {
        const char *name;
        int64_t value, least, most;
    } extents[] = {
        {"batch", p->batch, 0, INT32_MAX},
        {"heads of q", p->heads, 1, INT32_MAX},
        {"heads of k", p->heads_kv, 1, INT32_MAX},
        {"query length", p->seqlen_q, 0, INT32_MAX},
        {"key length", p->seqlen_k, 0, INT32_MAX},
        {"head_dim of q", p->head_dim, 1, 65536},
        {"head_dim of v", p->head_dim_v, 1, 65536},
        {"packed length of q", p->total_q, 0, INT32_MAX},
        {"packed length of k", p->total_k, 0, INT32_MAX},
    };
    for (size_t i = 0; i < sizeof extents / sizeof extents[0]; i++)
        if (extents[i].value < extents[i].least || extents[i].value > extents[i].most)
            return error_set(FDM_ERROR_INVALID_ARGUMENT, "the %s is %lld; it must be in %lld..%lld", extents[i].name,
                             (long long)extents[i].value, (long long)extents[i].least, (long long)extents[i].most);
    if (p->heads % p->heads_kv)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "q has %lld heads, which is not a multiple of the %lld heads of k",
                         (long long)p->heads, (long long)p->heads_kv);
    return FDM_OK;
}

static fdm_status dkv_validate(const fdm_problem *p) {
    const int half = fdm_dtype_bytes(p->dtype) == 2;
    if (p->dkv_float32 != 0 && (p->dkv_float32 != 1 || !half))
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "dkv_float32 is %d beside %s; it is 0, or 1 beside float16 and bfloat16", p->dkv_float32,
                         fdm_dtype_name(p->dtype));
    if (p->pass == FDM_BACKWARD && p->add_dkv && half && !p->dkv_float32)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "dk and dv are %s, but add_dkv is 1; they are float32 or float64 where they are added to",
                         fdm_dtype_name(p->dtype));
    return FDM_OK;
}

static fdm_status splits_validate(const fdm_problem *p) {
    if (p->invariance < FDM_INVARIANCE_NONE || p->invariance > FDM_INVARIANCE_SCHEDULE)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "invariance is %d; it must be 0, 1 or 2", p->invariance);
    if (p->num_splits < 0 || p->split_keys < 0 || p->split_keys % 64 || (p->num_splits && p->split_keys))
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "num_splits is %d and split_keys %d; they are at least 0, split_keys is a multiple of 64, and "
                         "only one of them is above 0",
                         p->num_splits, p->split_keys);
    if (p->invariance == FDM_INVARIANCE_SCHEDULE && (p->num_splits > 1 || p->split_keys))
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "num_splits is %d and split_keys %d beside invariance 2, which splits no keys; give neither",
                         p->num_splits, p->split_keys);
    return FDM_OK;
}

fdm_status fdm_problem_validate(const fdm_problem *p) {
    if (!p)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "problem is NULL");
    if (!struct_is_zero(p->reserved, sizeof p->reserved))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "reserved words of the problem are not 0; " FDM_NEWER_FIELD);
    if (p->pass != FDM_FORWARD && p->pass != FDM_BACKWARD)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "pass is %d; it must be FDM_FORWARD or FDM_BACKWARD",
                         (int)p->pass);
    if (p->dtype < FDM_FLOAT32 || p->dtype > FDM_FLOAT64)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "dtype is %s; q, k, v are float32, float16, bfloat16 or float64",
                         fdm_dtype_name(p->dtype));
    fdm_status status = check_extents(p);
    if (!status)
        status = check_numbers(p);
    if (!status && p->has_mask)
        status = check_broadcast("mask", p->mask_shape, p);
    if (!status && p->has_bias)
        status = check_broadcast("bias", p->bias_shape, p);
    if (!status && p->has_bias && p->bias_dtype != p->dtype && p->bias_dtype != FDM_FLOAT32)
        status = error_set(FDM_ERROR_INVALID_ARGUMENT, "bias is %s; it must be float32 or q's %s",
                           fdm_dtype_name(p->bias_dtype), fdm_dtype_name(p->dtype));
    if (!status)
        status = intervals_validate(p);
    if (!status)
        status = block_mask_validate(p);
    if (!status)
        status = tree_validate(p);
    if (!status && p->needs_dbias && !p->has_bias)
        status = error_set(FDM_ERROR_INVALID_ARGUMENT, "dbias is wanted, but there is no bias");
    if (!status && p->has_lse_low && !p->has_bias)
        status = error_set(FDM_ERROR_INVALID_ARGUMENT, "has_lse_low is set, but there is no bias");
    if (!status)
        status = cache_validate(p);
    if (!status)
        status = dkv_validate(p);
    if (!status)
        status = splits_validate(p);
    if (!status && p->value_in_key != 0 && (p->value_in_key != 1 || p->head_dim_v >= p->head_dim))
        status = error_set(FDM_ERROR_INVALID_ARGUMENT,
                           "value_in_key is %d beside head dims %lld and %lld; it is 0, or 1 where v has fewer",
                           p->value_in_key, (long long)p->head_dim, (long long)p->head_dim_v);
    return status ? status : sinks_validate(p);
}

/* ---- a problem from tensors ---- */

/* q, k, v or one of their kin: [B, S, H, D], or [total, H, D] when packed. */
static fdm_status resolve_matrix_as(const fdm_tensor *tensor, const char *name, enum tensor_role role, fdm_dtype dtype,
                                    int packed, const int64_t *dense, fdm_problem *p, struct matrix_view *view) {
    fdm_status status = tensor_check(tensor, name, 4 - packed, role, 1);
    if (!status)
        status = tensor_expect_dtype(tensor, name, dtype);
    if (!status)
        status = tensor_expect_shape(tensor, name, dense + packed);
    if (status)
        return status;
    p->aligned &= tensor_aligned(tensor) && tensor_stride(tensor, 1 - packed) * fdm_dtype_bytes(dtype) <= INT32_MAX;
    *view = (struct matrix_view){tensor_data(tensor), packed ? 0 : tensor_stride(tensor, 0),
                                 tensor_stride(tensor, 1 - packed), tensor_stride(tensor, 2 - packed)};
    return FDM_OK;
}

fdm_status problem_resolve_matrix(const fdm_tensor *tensor, const char *name, enum tensor_role role, int packed,
                                  const int64_t *dense, fdm_problem *p, struct matrix_view *view) {
    return resolve_matrix_as(tensor, name, role, p->dtype, packed, dense, p, view);
}

static fdm_status resolve_matrix(const fdm_tensor *tensor, const char *name, enum tensor_role role, fdm_problem *p,
                                 const int64_t *dense, struct matrix_view *view) {
    return problem_resolve_matrix(tensor, name, role, p->varlen, dense, p, view);
}

fdm_dtype problem_dkv_dtype(const fdm_problem *p) { return p->dkv_float32 ? FDM_FLOAT32 : p->dtype; }

static fdm_status resolve_rows(const fdm_tensor *tensor, const char *name, enum tensor_role role, const fdm_problem *p,
                               struct row_view *view) {
    int32_t packed = p->varlen ? 1 : 0;
    int64_t expected[3] = {p->batch, p->heads, packed ? p->total_q : p->seqlen_q};
    fdm_status status = tensor_check(tensor, name, 3 - packed, role, 0);
    if (!status)
        status = tensor_expect_dtype(tensor, name, p->dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32);
    if (!status)
        status = tensor_expect_shape(tensor, name, expected + packed);
    if (status)
        return status;
    *view = (struct row_view){tensor_data(tensor), packed ? 0 : tensor_stride(tensor, 0),
                              tensor_stride(tensor, 1 - packed), tensor_stride(tensor, 2 - packed)};
    return FDM_OK;
}

static struct score_view view_of_scores(const fdm_tensor *tensor, int64_t heads) {
    return (struct score_view){tensor_data(tensor),      tensor_stride(tensor, 0),
                               tensor_stride(tensor, 1), tensor_stride(tensor, 2),
                               tensor_stride(tensor, 3), tensor->shape[1] ? heads / tensor->shape[1] : 1};
}

/* Whether rows of a mask, bias or dbias can be read or written 16 bytes at a time, and 32 bits count the bytes from one
 * to the next. */
static int scores_aligned(const struct score_view *view, int64_t bytes) {
    return view->key == 1 && view->row * bytes <= INT32_MAX &&
           ((uintptr_t)view->data | (uintptr_t)(view->row | view->head | view->batch) * (uintptr_t)bytes) % 16 == 0;
}

static fdm_status resolve_mask(const fdm_tensors *t, fdm_problem *p, struct attention *a) {
    fdm_status status = tensor_check(t->mask, "mask", 4, TENSOR_INPUT, 0);
    if (!status)
        status = tensor_expect_dtype(t->mask, "mask", FDM_BOOL);
    if (status)
        return status;
    p->has_mask = 1;
    memcpy(p->mask_shape, t->mask->shape, sizeof p->mask_shape);
    status = check_broadcast("mask", p->mask_shape, p);
    if (status)
        return status;
    a->mask = view_of_scores(t->mask, p->heads);
    p->scores_aligned &= scores_aligned(&a->mask, 1);
    return FDM_OK;
}

static fdm_status resolve_bias(const fdm_tensors *t, fdm_problem *p, struct attention *a) {
    fdm_status status = tensor_check(t->bias, "bias", 4, TENSOR_INPUT, 0);
    if (status)
        return status;
    p->has_bias = 1;
    p->bias_dtype = fdm_dtype_of(t->bias);
    memcpy(p->bias_shape, t->bias->shape, sizeof p->bias_shape);
    if (p->bias_dtype != p->dtype && p->bias_dtype != FDM_FLOAT32)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "bias is %s; it must be float32 or q's %s",
                         fdm_dtype_name(p->bias_dtype), fdm_dtype_name(p->dtype));
    status = check_broadcast("bias", p->bias_shape, p);
    if (status)
        return status;
    a->bias = view_of_scores(t->bias, p->heads);
    p->scores_aligned &= scores_aligned(&a->bias, fdm_dtype_bytes(p->bias_dtype));
    return FDM_OK;
}

static fdm_status resolve_dbias(const fdm_tensors *t, fdm_problem *p, struct attention *a) {
    if (!t->bias)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "dbias is given, but bias is not");
    fdm_status status = tensor_check(t->dbias, "dbias", 4, TENSOR_OUTPUT, 0);
    if (!status)
        status = tensor_expect_dtype(t->dbias, "dbias", p->bias_dtype);
    if (!status)
        status = tensor_expect_shape(t->dbias, "dbias", p->bias_shape);
    if (status)
        return status;
    p->needs_dbias = 1;
    a->dbias = view_of_scores(t->dbias, p->heads);
    p->scores_aligned &= p->bias_shape[3] <= INT32_MAX / 4; /* sums of dbias are float32 */
    p->scores_aligned &= scores_aligned(&a->dbias, fdm_dtype_bytes(p->bias_dtype));
    return FDM_OK;
}

static fdm_status describe_shapes(const fdm_tensors *t, const fdm_options *o, fdm_problem *p, struct attention *a) {
    p->varlen = t->cu_seqlens_q || t->cu_seqlens_k;
    int32_t packed = p->varlen ? 1 : 0, packed_keys = packed && !t->cache;
    const fdm_tensor *three[3] = {t->q, t->k, t->v};
    const char *names[3] = {"q", "k", "v"};
    if (t->cache && t->cu_seqlens_k)
        return error_set(
            FDM_ERROR_INVALID_ARGUMENT,
            "cu_seqlens_k is given beside a cache, whose lengths or seqused_k say how many keys there are");
    for (int i = 0; i < 3; i++) {
        fdm_status status = tensor_check(three[i], names[i], 4 - (i ? packed_keys : packed), TENSOR_INPUT, 1);
        if (status)
            return status;
    }
    p->dtype = fdm_dtype_of(t->q);
    p->heads = t->q->shape[2 - packed];
    p->heads_kv = t->k->shape[2 - packed_keys];
    p->head_dim = t->q->shape[3 - packed];
    p->head_dim_v = t->v->shape[3 - packed_keys];
    if (!p->varlen) {
        p->batch = t->q->shape[0];
        p->seqlen_q = t->q->shape[1];
        p->seqlen_k = t->k->shape[1];
    }
    /* Beside a cache the keys are as many as that has room for. */
    const fdm_status status = t->cache ? cache_describe(t->cache, t->k, o->max_seqlen_k, p) : FDM_OK;
    return status ? status : lengths_describe(t, o, p, a);
}

static const char *device_text(fdm_device_id device, char *text, size_t size) {
    if (device.type == FDM_CPU)
        return "the CPU";
    if (device.type == FDM_CUDA)
        snprintf(text, size, "CUDA device %d", device.index);
    else
        snprintf(text, size, "DLPack device %d:%d", device.type, device.index);
    return text;
}

/* The tensors of a call by name, those of every pass first. */
enum { NUM_Q = 0, NUM_OF_FORWARD = 31, NUM_TENSORS = 38 };
static void name_tensors(const fdm_tensors *t, fdm_pass pass, struct named_tensor all[NUM_TENSORS]) {
    static const fdm_cache none;
    const int32_t forward = pass == FDM_FORWARD, backward = !forward;
    const fdm_cache *cache = t->cache ? t->cache : &none;
    const int32_t appends = cache->k_new != NULL;
    const struct named_tensor list[NUM_TENSORS] = {
        [NUM_Q] = {"q", t->q, 0, 0},
        {"k", t->k, appends, 0},
        {"v", t->v, appends, 0},
        {"mask", t->mask, 0, 0},
        {"bias", t->bias, 0, 0},
        {"interval_start", t->interval_start, 0, 0},
        {"interval_end", t->interval_end, 0, 0},
        {"row_start", t->row_start, 0, 0},
        {"row_end", t->row_end, 0, 0},
        {"block_mask", t->block_mask, 0, 0},
        {"tree", t->tree, 0, 0},
        {"cu_seqlens_q", t->cu_seqlens_q, 0, 0},
        {"cu_seqlens_k", t->cu_seqlens_k, 0, 0},
        {"seqused_q", t->seqused_q, 0, 0},
        {"seqused_k", t->seqused_k, 0, 0},
        {"sink", t->sink, 0, 0},
        {"block_table", cache->block_table, 0, 0},
        {"page_start", cache->page_start, 0, 0},
        {"cache_row", cache->cache_row, 0, 0},
        {"lengths", cache->lengths, 0, 0},
        {"first_key", cache->first_key, 0, 0},
        {"k_new", cache->k_new, 0, 0},
        {"v_new", cache->v_new, 0, 0},
        {"cu_seqlens_new", cache->cu_seqlens_new, 0, 0},
        {"rotary_cos", cache->rotary_cos, 0, 0},
        {"rotary_sin", cache->rotary_sin, 0, 0},
        {"rotary_start", cache->rotary_start, 0, 0},
        {"fault", cache->fault, 1, 0},
        {"out", t->out, forward, 1u << NUM_Q},
        {"lse", t->lse, forward, 0},
        {"lse_low", t->lse_low, forward, 0},
        {"dout", t->dout, 0, 0},
        {"dlse", t->dlse, 0, 0},
        {"dq", t->dq, backward, 0},
        {"dk", t->dk, backward, 0},
        {"dv", t->dv, backward, 0},
        {"dbias", t->dbias, backward, 0},
        {"dsink", t->dsink, backward, 0},
    };
    memcpy(all, list, sizeof list);
}

static fdm_status check_devices(const fdm_tensors *t, const struct named_tensor all[NUM_TENSORS]) {
    for (int32_t i = 0; i < NUM_TENSORS; i++)
        if (all[i].tensor &&
            (all[i].tensor->device.type != t->q->device.type || all[i].tensor->device.index != t->q->device.index)) {
            char here[40], there[40];
            return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is on %s, but q is on %s", all[i].name,
                             device_text(all[i].tensor->device, there, sizeof there),
                             device_text(t->q->device, here, sizeof here));
        }
    if (t->q->device.type != FDM_CPU && t->q->device.type != FDM_CUDA)
        return error_set(FDM_ERROR_UNSUPPORTED,
                         "q is on DLPack device type %d; this version runs on the CPU (type 1) and CUDA (type 2)",
                         t->q->device.type);
    return FDM_OK;
}

static fdm_status resolve_outputs(const fdm_tensors *t, fdm_problem *p, struct attention *a, const int64_t *q_shape,
                                  const int64_t *k_shape, const int64_t *v_shape, const int64_t *out_shape) {
    fdm_status status;
    int backward = p->pass == FDM_BACKWARD;
    enum tensor_role role = backward ? TENSOR_INPUT : TENSOR_OUTPUT;
    if (!t->out || (backward && (!t->lse || !t->dout)))
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL", !t->out ? "out" : !t->lse ? "lse" : "dout");
    if ((status = resolve_matrix(t->out, "out", role, p, out_shape, &a->out)))
        return status;
    if (t->lse && (status = resolve_rows(t->lse, "lse", role, p, &a->lse)))
        return status;
    p->needs_lse = t->lse != NULL;
    struct row_view lse_low = {0};
    if (t->lse_low && (status = resolve_rows(t->lse_low, "lse_low", role, p, &lse_low)))
        return status;
    if (!backward && t->lse_low && !t->lse)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "lse_low is given, but lse is not; it is what lse rounds away");
    if (p->has_bias && t->lse_low) {
        p->has_lse_low = 1;
        a->lse_low = lse_low;
    }
    if (!backward)
        return FDM_OK;
    if ((status = resolve_matrix(t->dout, "dout", TENSOR_INPUT, p, out_shape, &a->dout)))
        return status;
    if (t->dlse && (status = resolve_rows(t->dlse, "dlse", TENSOR_INPUT, p, &a->dlse)))
        return status;
    p->has_dlse = t->dlse != NULL;
    if (t->dq && (status = resolve_matrix(t->dq, "dq", TENSOR_OUTPUT, p, q_shape, &a->dq)))
        return status;
    const fdm_dtype dkv = problem_dkv_dtype(p);
    if (t->dk && (status = resolve_matrix_as(t->dk, "dk", TENSOR_OUTPUT, dkv, p->varlen, k_shape, p, &a->dk)))
        return status;
    if (t->dv && (status = resolve_matrix_as(t->dv, "dv", TENSOR_OUTPUT, dkv, p->varlen, v_shape, p, &a->dv)))
        return status;
    p->needs_dq = t->dq != NULL;
    p->needs_dk = t->dk != NULL;
    p->needs_dv = t->dv != NULL;
    return t->dbias ? resolve_dbias(t, p, a) : FDM_OK;
}

static int32_t in_32_bits(int64_t value) {
    return (int32_t)(value < INT32_MIN ? INT32_MIN : value > INT32_MAX ? INT32_MAX : value);
}

static void apply_options(const fdm_options *o, fdm_problem *p) {
    FDM_PROBLEM_FIELDS(NOTHING, FROM_OPTIONS)
    p->invariance = in_32_bits(o->invariance);
    p->num_splits = in_32_bits(o->num_splits);
    p->split_keys = in_32_bits(o->split_keys);
    if (!o->has_softmax_scale)
        p->softmax_scale = p->head_dim > 0 ? 1.0 / sqrt((double)p->head_dim) : 1.0;
    p->causal = p->causal != 0;
    p->deterministic = p->deterministic != 0;
    p->lse_without_sink = o->lse_without_sink != 0;
    p->add_dkv = o->add_dkv != 0; /* of a backward; a forward has no dk and dv */
}

static int has_wide_dkv(const fdm_tensors *t, const fdm_problem *p) {
    const fdm_tensor *first = t->dk ? t->dk : t->dv;
    return p->pass == FDM_BACKWARD && first && fdm_dtype_bytes(p->dtype) == 2 && fdm_dtype_of(first) == FDM_FLOAT32;
}

/* Shapes of the call's matrices. */
static void shapes_of(const fdm_problem *p, int64_t q[4], int64_t k[4], int64_t v[4], int64_t out[4]) {
    const int64_t q_rows = p->varlen ? p->total_q : p->seqlen_q, k_rows = p->varlen ? p->total_k : p->seqlen_k;
    const int64_t shapes[4][4] = {{p->batch, q_rows, p->heads, p->head_dim},
                                  {p->batch, k_rows, p->heads_kv, p->head_dim},
                                  {p->batch, k_rows, p->heads_kv, p->head_dim_v},
                                  {p->batch, q_rows, p->heads, p->head_dim_v}};
    memcpy(q, shapes[0], sizeof shapes[0]);
    memcpy(k, shapes[1], sizeof shapes[1]);
    memcpy(v, shapes[2], sizeof shapes[2]);
    memcpy(out, shapes[3], sizeof shapes[3]);
}

/* Shapes, masks and the rest that is read, without out and gradients; `*p` begins as the default problem. */
static fdm_status resolve_inputs(const fdm_tensors *t, const fdm_options *o, const struct named_tensor *all,
                                 fdm_problem *p, struct attention *a) {
    fdm_status status = check_devices(t, all);
    if (!status)
        status = describe_shapes(t, o, p, a);
    if (status)
        return status;
    apply_options(o, p);
    p->dkv_float32 = has_wide_dkv(t, p);
    if ((status = fdm_problem_validate(p)))
        return status;
    int64_t q_shape[4], k_shape[4], v_shape[4], out_shape[4];
    shapes_of(p, q_shape, k_shape, v_shape, out_shape);
    if ((status = resolve_matrix(t->q, "q", TENSOR_INPUT, p, q_shape, &a->q)) ||
        (t->cache ? (status = cache_resolve(t->cache, t->k, t->v, 0, p, a))
                  : (status = resolve_matrix(t->k, "k", TENSOR_INPUT, p, k_shape, &a->k)) ||
                        (status = resolve_matrix(t->v, "v", TENSOR_INPUT, p, v_shape, &a->v))) ||
        (t->mask && (status = resolve_mask(t, p, a))) || (t->bias && (status = resolve_bias(t, p, a))) ||
        (status = intervals_resolve(t, p, a)) || (status = block_mask_resolve(t, p, a)) ||
        (status = tree_resolve(t, p, a)) || (status = sinks_resolve(t, p, a)))
        return status;
    return mask_plan_resolve(t, p, a);
}

/* `*t` with a cache of this version. */
static const fdm_tensors *read_cache(const fdm_tensors *t, fdm_tensors *room, fdm_cache *cache) {
    if (!t->cache)
        return t;
    *room = *t;
    room->cache = STRUCT_READ(fdm_cache, t->cache, cache);
    return room->cache ? room : NULL;
}

static fdm_status check_operands(const fdm_tensors *t) {
    return t->q && t->k && t->v ? FDM_OK
                                : error_set(FDM_ERROR_INVALID_ARGUMENT, "%s is NULL",
                                            !t->q   ? "q"
                                            : !t->k ? "k"
                                                    : "v");
}

fdm_status problem_from_inputs(const fdm_tensors *t, const fdm_options *options, fdm_problem *problem,
                               struct attention *attention) {
    const fdm_options defaults = fdm_options_default(), *o = options ? options : &defaults;
    struct named_tensor all[NUM_TENSORS];
    fdm_tensors inputs;
    const fdm_status status = check_operands(t);
    if (status)
        return status;
    inputs = *t;
    inputs.out = inputs.lse = inputs.lse_low = NULL;
    inputs.mask_plan = NULL;
    *problem = fdm_problem_default();
    *attention = (struct attention){.problem = problem};
    name_tensors(&inputs, FDM_FORWARD, all);
    return resolve_inputs(&inputs, o, all, problem, attention);
}

fdm_status problem_from_tensors(fdm_pass pass, const fdm_tensors *t, const fdm_options *options, fdm_problem *problem,
                                struct attention *attention) {
    const fdm_options defaults = fdm_options_default(), *o = options ? options : &defaults;
    struct attention scratch, *a = attention ? attention : &scratch;
    fdm_problem p = fdm_problem_default();
    fdm_tensors with_cache;
    fdm_cache cache_room;
    fdm_status status = check_operands(t);
    if (status)
        return status;
    if (!(t = read_cache(t, &with_cache, &cache_room)))
        return FDM_ERROR_INVALID_ARGUMENT;
    p.pass = pass;
    p.needs_dq = p.needs_dk = p.needs_dv = 0;
    *a = (struct attention){.problem = problem};
    struct named_tensor all[NUM_TENSORS];
    name_tensors(t, pass, all);
    int64_t q_shape[4], k_shape[4], v_shape[4], out_shape[4];
    if ((status = resolve_inputs(t, o, all, &p, a)))
        return status;
    shapes_of(&p, q_shape, k_shape, v_shape, out_shape);
    if ((status = resolve_outputs(t, &p, a, q_shape, k_shape, v_shape, out_shape)) ||
        (status = tensors_check_apart(all, pass == FDM_FORWARD ? NUM_OF_FORWARD : NUM_TENSORS)))
        return status;
    /* Boxes of a packed q reach into the next sequence, where out must not change meanwhile: whether a warp raises its
     * maxima depends on all of its rows. */
    const int in_place = pass == FDM_FORWARD && p.varlen && tensors_overlap(t->out, t->q);
    p.q_mappable = !in_place && tensor_mappable(t->q) && (pass != FDM_BACKWARD || tensor_mappable(t->dout));
    p.keys_mappable = tensor_mappable(t->k) && tensor_mappable(t->v);
    p.value_in_key = p.head_dim_v < p.head_dim && tensor_begins(t->v, t->k);
    p.scores_mappable =
        p.scores_aligned && (!t->mask || tensor_mappable(t->mask)) && (!t->bias || tensor_mappable(t->bias));
    *problem = p;
    return p.has_cache && t->q->device.type == FDM_CPU ? cache_check_pages(a) : FDM_OK;
}

fdm_status fdm_describe(fdm_pass pass, const fdm_tensors *tensors, const fdm_options *options, fdm_problem *problem) {
    fdm_tensors tensors_room;
    fdm_options options_room;
    if (!problem)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "problem is NULL");
    if (!(tensors = STRUCT_READ(fdm_tensors, tensors, &tensors_room)) ||
        (options && !(options = STRUCT_READ(fdm_options, options, &options_room))))
        return FDM_ERROR_INVALID_ARGUMENT;
    return problem_from_tensors(pass, tensors, options, problem, NULL);
}
