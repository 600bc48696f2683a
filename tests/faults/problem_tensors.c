/* problem_tensors.c: tensors of any problem, and every field of fdm_problem. */
#include "problem_tensors.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

enum { ALIGNMENT = 256 };

/* Address space alone: pages come when they are touched. */
static char *memory_of_all(void) {
    static const size_t bytes = (size_t)1 << 36;
    static char *memory;
    if (!memory) {
        memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        assert_true(memory != MAP_FAILED);
    }
    return memory;
}

/* ---- one tensor ---- */

static fdm_tensor *add(struct problem_tensors *t, fdm_device_id device, fdm_dtype dtype, int32_t ndim,
                       const int64_t *shape, int32_t shift) {
    const int32_t n = t->count++;
    int64_t elements = 1;
    assert_true(n < PROBLEM_TENSORS_MAX);
    for (int32_t i = ndim - 1; i >= 0; i--) {
        t->shapes[n][i] = shape[i];
        t->strides[n][i] = elements;
        elements *= shape[i];
    }
    t->list[n] = (fdm_tensor){.data = t->memory + shift * fdm_dtype_bytes(dtype),
                              .device = device,
                              .ndim = ndim,
                              .dtype = fdm_data_type_of(dtype),
                              .shape = t->shapes[n],
                              .strides = t->strides[n]};
    t->memory += ((elements + shift) * fdm_dtype_bytes(dtype) / ALIGNMENT + 2) * ALIGNMENT; /* and room to move it */
    return &t->list[n];
}

/* [B, S, h, D], or [total, h, D] */
static fdm_tensor *matrix(struct problem_tensors *t, const fdm_problem *p, fdm_device_id device, int of_keys,
                          int64_t columns) {
    const int64_t dense[4] = {p->batch, of_keys ? p->seqlen_k : p->seqlen_q, of_keys ? p->heads_kv : p->heads, columns};
    const int64_t packed[4] = {of_keys ? p->total_k : p->total_q, dense[2], columns};
    return add(t, device, p->dtype, p->varlen ? 3 : 4, p->varlen ? packed : dense, !p->aligned);
}

/* [B, H, Sq], or [H, total] */
static fdm_tensor *rows(struct problem_tensors *t, const fdm_problem *p, fdm_device_id device) {
    const int64_t dense[3] = {p->batch, p->heads, p->seqlen_q}, packed[3] = {p->heads, p->total_q};
    return add(t, device, p->dtype == FDM_FLOAT64 ? FDM_FLOAT64 : FDM_FLOAT32, p->varlen ? 2 : 3,
               p->varlen ? packed : dense, 0);
}

/* [B|1, h, n, Sq], or [h, n, total] */
static fdm_tensor *row_interval(struct problem_tensors *t, const fdm_problem *p, fdm_device_id device) {
    const int64_t shape[4] = {p->row_interval_batch, p->row_interval_heads, p->row_ranges,
                              p->varlen ? p->total_q : p->seqlen_q};
    return add(t, device, FDM_INT32, p->varlen ? 3 : 4, shape + (p->varlen ? 1 : 0), 0);
}

/* [B|1, h, Sk], or [h, total] */
static fdm_tensor *interval(struct problem_tensors *t, const fdm_problem *p, fdm_device_id device) {
    const int64_t dense[3] = {p->interval_batch, p->interval_heads, p->seqlen_k},
                  packed[3] = {p->interval_heads, p->total_k};
    return add(t, device, FDM_INT32, p->varlen ? 2 : 3, p->varlen ? packed : dense, 0);
}

static fdm_tensor *cu_seqlens(struct problem_tensors *t, const fdm_problem *p, fdm_device_id device, int64_t length,
                              int64_t total) {
    const int64_t shape[1] = {p->batch + 1};
    fdm_tensor *cu = add(t, device, FDM_INT32, 1, shape, 0);
    int32_t *values = cu->data;
    for (int64_t b = 0; b <= p->batch; b++)
        values[b] = (int32_t)(b * length < total ? b * length : total);
    return cu;
}

/* ---- all of them ---- */

void problem_tensors_make(struct problem_tensors *t, const fdm_problem *p, fdm_device_id device) {
    *t = (struct problem_tensors){.memory = memory_of_all(), .options = fdm_options_default()};
    t->options.has_softmax_scale = 1;
    t->options.softmax_scale = p->softmax_scale;
    t->options.softcap = p->softcap;
    t->options.causal = p->causal;
    t->options.window_left = p->window_left;
    t->options.window_right = p->window_right;
    t->options.deterministic = p->deterministic;
    t->all = (fdm_tensors){.struct_bytes = sizeof(fdm_tensors),
                           .q = matrix(t, p, device, 0, p->head_dim),
                           .k = matrix(t, p, device, 1, p->head_dim),
                           .v = matrix(t, p, device, 1, p->head_dim_v),
                           .out = matrix(t, p, device, 0, p->head_dim_v)};
    if (p->value_in_key) {
        fdm_tensor *v = (fdm_tensor *)(uintptr_t)t->all.v;
        v->data = t->all.k->data;
        v->strides = t->all.k->strides;
    }
    if (p->needs_lse)
        t->all.lse = rows(t, p, device);
    if (p->has_lse_low)
        t->all.lse_low = rows(t, p, device);
    if (p->has_mask)
        t->all.mask = add(t, device, FDM_BOOL, 4, p->mask_shape, 0);
    if (p->has_bias)
        t->all.bias = add(t, device, p->bias_dtype, 4, p->bias_shape, 0);
    if (p->has_intervals) {
        t->all.interval_start = interval(t, p, device);
        t->all.interval_end = interval(t, p, device);
    }
    if (p->has_row_intervals) {
        t->all.row_start = row_interval(t, p, device);
        t->all.row_end = row_interval(t, p, device);
    }
    if (p->block_mask_size) {
        const int64_t size = p->block_mask_size,
                      blocks[4] = {p->block_mask_batch, p->block_mask_heads, (p->seqlen_q + size - 1) / size,
                                   (p->seqlen_k + size - 1) / size};
        t->all.block_mask = add(t, device, FDM_BOOL, 4, blocks, 0);
    }
    const int64_t tree[3] = {p->batch, p->varlen ? p->total_q : p->seqlen_q, (p->seqlen_q + 31) / 32};
    if (p->has_tree)
        t->all.tree = add(t, device, FDM_UINT32, 3 - (p->varlen != 0), tree + (p->varlen != 0), 0);
    const int64_t sinks[2] = {p->num_sinks, p->heads};
    if (p->has_sink)
        t->all.sink = add(t, device, p->sink_dtype, 2, sinks, 0);
    if (p->varlen) {
        t->options.max_seqlen_q = p->seqlen_q;
        t->options.max_seqlen_k = p->seqlen_k;
        t->all.cu_seqlens_q = cu_seqlens(t, p, device, p->seqlen_q, p->total_q);
        t->all.cu_seqlens_k = cu_seqlens(t, p, device, p->seqlen_k, p->total_k);
    }
    if (p->pass == FDM_FORWARD)
        return;
    t->all.dout = matrix(t, p, device, 0, p->head_dim_v);
    t->all.dlse = p->has_dlse ? rows(t, p, device) : NULL;
    t->all.dq = p->needs_dq ? matrix(t, p, device, 0, p->head_dim) : NULL;
    t->all.dk = p->needs_dk ? matrix(t, p, device, 1, p->head_dim) : NULL;
    t->all.dv = p->needs_dv ? matrix(t, p, device, 1, p->head_dim_v) : NULL;
    t->all.dbias = p->needs_dbias ? add(t, device, p->bias_dtype, 4, p->bias_shape, 0) : NULL;
    t->all.dsink = p->needs_dsink ? add(t, device, p->sink_dtype, 2, sinks, 0) : NULL;
}

/* ---- fields ---- */

#define FIELD(name, rule) \
    { #name, offsetof(fdm_problem, name), sizeof(((fdm_problem *)0)->name), rule }
const struct problem_field problem_fields[] = {
    FIELD(pass, FIELD_OF_TENSORS),
    FIELD(dtype, FIELD_OF_TENSORS),
    FIELD(batch, FIELD_OF_TENSORS),
    FIELD(heads, FIELD_OF_TENSORS),
    FIELD(heads_kv, FIELD_OF_TENSORS),
    FIELD(seqlen_q, FIELD_OF_LENGTHS),
    FIELD(seqlen_k, FIELD_OF_LENGTHS),
    FIELD(head_dim, FIELD_OF_TENSORS),
    FIELD(head_dim_v, FIELD_OF_TENSORS),
    FIELD(total_q, FIELD_OF_TENSORS),
    FIELD(total_k, FIELD_OF_TENSORS),
    FIELD(softmax_scale, FIELD_OF_PLAN),
    FIELD(softcap, FIELD_OF_PLAN),
    FIELD(window_left, FIELD_OF_PLAN),
    FIELD(window_right, FIELD_OF_PLAN),
    FIELD(causal, FIELD_OF_PLAN),
    FIELD(varlen, FIELD_OF_TENSORS),
    FIELD(deterministic, FIELD_OF_PLAN),
    FIELD(needs_lse, FIELD_OF_TENSORS),
    FIELD(needs_dq, FIELD_OF_TENSORS),
    FIELD(needs_dk, FIELD_OF_TENSORS),
    FIELD(needs_dv, FIELD_OF_TENSORS),
    FIELD(needs_dbias, FIELD_OF_TENSORS),
    FIELD(has_dlse, FIELD_OF_TENSORS),
    FIELD(has_lse_low, FIELD_OF_TENSORS),
    FIELD(has_intervals, FIELD_OF_TENSORS),
    FIELD(has_mask, FIELD_OF_TENSORS),
    FIELD(has_bias, FIELD_OF_TENSORS),
    FIELD(bias_dtype, FIELD_OF_TENSORS),
    FIELD(interval_batch, FIELD_OF_TENSORS),
    FIELD(interval_heads, FIELD_OF_TENSORS),
    FIELD(mask_shape, FIELD_OF_TENSORS),
    FIELD(bias_shape, FIELD_OF_TENSORS),
    FIELD(aligned, FIELD_FACT),
    FIELD(scores_aligned, FIELD_FACT),
    FIELD(q_mappable, FIELD_FACT),
    FIELD(keys_mappable, FIELD_FACT),
    FIELD(scores_mappable, FIELD_FACT),
    FIELD(has_sink, FIELD_OF_TENSORS),
    FIELD(needs_dsink, FIELD_OF_TENSORS),
    FIELD(sink_dtype, FIELD_OF_TENSORS),
    FIELD(num_sinks, FIELD_OF_TENSORS),
    FIELD(lse_without_sink, FIELD_OF_PLAN),
    FIELD(has_seqused_q, FIELD_OF_TENSORS),
    FIELD(has_seqused_k, FIELD_OF_TENSORS),
    FIELD(new_rows, FIELD_OF_TENSORS),
    FIELD(has_cache, FIELD_OF_TENSORS),
    FIELD(page_size, FIELD_OF_TENSORS),
    FIELD(num_pages, FIELD_OF_TENSORS),
    FIELD(max_pages, FIELD_OF_TENSORS),
    FIELD(ragged_pages, FIELD_OF_TENSORS),
    FIELD(has_first_key, FIELD_OF_TENSORS),
    FIELD(has_cache_row, FIELD_OF_TENSORS),
    FIELD(rotary_dim, FIELD_OF_TENSORS),
    FIELD(rotary_interleaved, FIELD_OF_TENSORS),
    FIELD(dkv_float32, FIELD_OF_TENSORS),
    FIELD(add_dkv, FIELD_OF_PLAN),
    FIELD(has_row_intervals, FIELD_OF_TENSORS),
    FIELD(row_interval_batch, FIELD_OF_TENSORS),
    FIELD(row_interval_heads, FIELD_OF_TENSORS),
    FIELD(row_ranges, FIELD_OF_TENSORS),
    FIELD(invariance, FIELD_OF_PLAN),
    FIELD(num_splits, FIELD_OF_PLAN),
    FIELD(split_keys, FIELD_OF_PLAN),
    FIELD(block_mask_size, FIELD_OF_TENSORS),
    FIELD(block_mask_batch, FIELD_OF_TENSORS),
    FIELD(block_mask_heads, FIELD_OF_TENSORS),
    FIELD(has_tree, FIELD_OF_TENSORS),
    FIELD(value_in_key, FIELD_FACT),
    FIELD(reserved, FIELD_OF_TENSORS),
};
const int32_t num_problem_fields = sizeof problem_fields / sizeof problem_fields[0];

int32_t problem_field_elements(const struct problem_field *field) {
    return field->bytes > 8 ? (int32_t)(field->bytes / 8) : 1;
}

void problem_field_change(const struct problem_field *field, int32_t element, fdm_problem *problem) {
    char *at = (char *)problem + field->offset + 8 * element;
    if (strcmp(field->name, "softmax_scale") == 0 || strcmp(field->name, "softcap") == 0) {
        double value;
        memcpy(&value, at, sizeof value);
        value += 0.5;
        memcpy(at, &value, sizeof value);
    } else if (field->bytes < 4) {
        *at ^= 1;
    } else if (field->bytes == 4) { /* flags and small numbers */
        int32_t value;
        memcpy(&value, at, sizeof value);
        value ^= 1;
        memcpy(at, &value, sizeof value);
    } else {
        int64_t value;
        memcpy(&value, at, sizeof value);
        value++;
        memcpy(at, &value, sizeof value);
    }
}
