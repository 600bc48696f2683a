/* test_masks.c: key intervals against the definition of what they express, pair by pair. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "flash_dmattn.h"

enum { MAX_KEYS = 24 };

static uint32_t random_state = 1;
static int random_below(int n) {
    random_state = random_state * 1664525u + 1013904223u;
    return (int)((random_state >> 8) % (uint32_t)n);
}

static fdm_tensor tensor_of(void *data, int32_t ndim, int64_t *shape, fdm_dtype dtype) {
    return (fdm_tensor){
        .data = data, .device = {FDM_CPU, 0}, .ndim = ndim, .dtype = fdm_data_type_of(dtype), .shape = shape};
}

/* Key j is among the `window` largest real keys 0 .. limit; of equals the smaller index is larger. */
static int in_top(const float *bias, const uint8_t *real, int j, int limit, int window) {
    int larger = 0;
    if (j > limit || !real[j])
        return 0;
    float mine = isnan(bias[j]) ? -INFINITY : bias[j];
    for (int k = 0; k <= limit; k++) {
        float other = isnan(bias[k]) ? -INFINITY : bias[k];
        larger += real[k] && (other > mine || (other == mine && k < j));
    }
    return larger < window;
}

static void topk_case(int seqlen_q, int seqlen_k, int window) {
    float bias[MAX_KEYS];
    uint8_t real[MAX_KEYS];
    int32_t start[MAX_KEYS], end[MAX_KEYS];
    int few_values = random_below(2), with_padding = random_below(2);
    for (int j = 0; j < seqlen_k; j++) {
        bias[j] = few_values ? (float)random_below(4) : (float)random_below(1 << 20);
        if (random_below(8) == 0)
            bias[j] = NAN;
        real[j] = !with_padding || random_below(4) != 0;
    }
    fdm_tensor b = tensor_of(bias, 3, (int64_t[]){1, 1, seqlen_k}, FDM_FLOAT32);
    fdm_tensor p = tensor_of(real, 2, (int64_t[]){1, seqlen_k}, FDM_BOOL);
    fdm_tensor s = tensor_of(start, 3, (int64_t[]){1, 1, seqlen_k}, FDM_INT32), e = s;
    e.data = end;
    assert_int_equal(fdm_topk_intervals(&b, with_padding ? &p : NULL, window, seqlen_q, &s, &e, NULL, 0, NULL), FDM_OK);
    for (int i = 0; i < seqlen_q; i++)
        for (int j = 0; j < seqlen_k; j++)
            assert_int_equal(start[j] <= i && i < end[j], in_top(bias, real, j, i + seqlen_k - seqlen_q, window));
}

static void topk_is_exact(void **state) {
    (void)state;
    for (int round = 0; round < 10000; round++)
        topk_case(1 + random_below(MAX_KEYS), 1 + random_below(MAX_KEYS), 1 + random_below(MAX_KEYS + 4));
}

static void topk_refuses_bad_input(void **state) {
    (void)state;
    float bias[4] = {0};
    int32_t start[4] = {7, 7, 7, 7}, end[4] = {7, 7, 7, 7};
    fdm_tensor b = tensor_of(bias, 3, (int64_t[]){1, 1, 4}, FDM_FLOAT32);
    fdm_tensor s = tensor_of(start, 3, (int64_t[]){1, 1, 4}, FDM_INT32), e = s, wrong = s;
    e.data = end;
    wrong.shape = (int64_t[]){1, 2, 4};
    assert_int_equal(fdm_topk_intervals(&b, NULL, 0, 4, &s, &e, NULL, 0, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "window is 0"));
    assert_int_equal(fdm_topk_intervals(&b, NULL, 1, 4, &s, &wrong, NULL, 0, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "end has shape"));
    assert_int_equal(fdm_topk_intervals(&b, NULL, 1, 4, &s, &e, bias, 1, NULL), FDM_ERROR_WORKSPACE);
    memory_fail_at(1);
    assert_int_equal(fdm_topk_intervals(&b, NULL, 1, 4, &s, &e, NULL, 0, NULL), FDM_ERROR_OUT_OF_MEMORY);
    for (int j = 0; j < 4; j++)
        assert_true(start[j] == 7 && end[j] == 7);
    assert_int_equal(memory_live(), 0);
}

/* [1, 1, keys] of `data`; the shape lives as long as the caller. */
static fdm_tensor pair_of(int32_t *data, int64_t shape[3], int64_t keys) {
    shape[0] = shape[1] = 1;
    shape[2] = keys;
    return tensor_of(data, 3, shape, FDM_INT32);
}

/* What a CUDA device is not asked for: no device is needed to be refused. */
static void device_tensors_are_checked_first(void **state) {
    (void)state;
    float bias[4] = {0};
    int32_t start[4], end[4];
    fdm_tensor b = tensor_of(bias, 3, (int64_t[]){1, 1, 4}, FDM_FLOAT32), here = b;
    fdm_tensor s = tensor_of(start, 3, (int64_t[]){1, 1, 4}, FDM_INT32), e = s;
    e.data = end;
    b.device = s.device = (fdm_device_id){FDM_CUDA, 0};
    assert_int_equal(fdm_topk_intervals(&b, NULL, 1, 4, &s, &e, NULL, 0, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "end is on DLPack device 1:0, but bias is on 2:0"));
    e.device = s.device;
    assert_int_equal(fdm_topk_intervals(&b, NULL, 1, 4, &s, &e, NULL, 0, NULL), FDM_ERROR_WORKSPACE);
    assert_non_null(strstr(fdm_last_error(), "workspace is NULL; on CUDA devices 16 bytes"));
    assert_int_equal(fdm_topk_intervals(&b, NULL, 1, 4, &s, &e, (char *)bias + 4, 16, NULL), FDM_ERROR_WORKSPACE);
    assert_non_null(strstr(fdm_last_error(), "a multiple of 16"));
    assert_int_equal(fdm_topk_intervals_workspace(&b, NULL), 16);
    assert_int_equal(fdm_topk_intervals_workspace(&here, NULL), 4 * 8);
    fdm_tensor large = tensor_of(bias, 3, (int64_t[]){2, 3, 100000}, FDM_FLOAT32);
    large.device = b.device;
    /* 98 chunks and 7 spans of 16384 keys, of six heads */
    assert_int_equal(fdm_topk_intervals_workspace(&large, NULL), 6 * (98 * 16 + 7 * (16 + 16384 * 8 + 8)));
    b.device.type = 7;
    assert_int_equal(fdm_topk_intervals(&b, NULL, 1, 4, &s, &e, NULL, 0, NULL), FDM_ERROR_UNSUPPORTED);
}

static void slots_refuse_bad_input(void **state) {
    (void)state;
    float bias[4] = {0}, kept[8], rows[8];
    int32_t key[8], length[2], end[4] = {0};
    fdm_tensor b = tensor_of(bias, 2, (int64_t[]){1, 2}, FDM_FLOAT32), three = b;
    fdm_tensor keys = tensor_of(key, 3, (int64_t[]){1, 2, 4}, FDM_INT32), none = keys, wrong = keys;
    fdm_tensor biases = tensor_of(kept, 3, (int64_t[]){1, 2, 4}, FDM_FLOAT32);
    fdm_tensor lengths = tensor_of(length, 2, (int64_t[]){1, 2}, FDM_INT32);
    fdm_topk_slots s = {sizeof s, &keys, &biases, &lengths, NULL, NULL}, other = s;
    three.ndim = 3;
    none.shape = (int64_t[]){1, 2, 0};
    wrong.shape = (int64_t[]){1, 3, 4};
    assert_int_equal(fdm_topk_append(&three, NULL, NULL, NULL, &s, NULL, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_int_equal(fdm_topk_append(&b, NULL, NULL, NULL, NULL, NULL, NULL), FDM_ERROR_INVALID_ARGUMENT);
    other.key = &none;
    assert_int_equal(fdm_topk_append(&b, NULL, NULL, NULL, &other, NULL, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "slots.key has 0 slots"));
    other.key = &wrong;
    assert_int_equal(fdm_topk_append(&b, NULL, NULL, NULL, &other, NULL, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "slots.key has shape [1, 3, 4]; it must be [1, 2, 4]"));
    other = s;
    other.length = NULL;
    assert_int_equal(fdm_topk_append(&b, NULL, NULL, NULL, &other, NULL, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "slots.length is NULL"));
    assert_int_equal(fdm_topk_append(&b, &b, NULL, NULL, &s, NULL, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_int_equal(fdm_topk_append(&b, NULL, &b, NULL, &s, NULL, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "slots.k is NULL, but k is given"));
    assert_int_equal(fdm_topk_fill(&b, &keys, NULL, NULL, NULL, &s, NULL), FDM_ERROR_INVALID_ARGUMENT);
    b.ndim = 3;
    b.shape = (int64_t[]){1, 2, 2};
    fdm_tensor ends = tensor_of(end, 3, (int64_t[]){1, 2, 2}, FDM_INT32);
    fdm_tensor pages = tensor_of(bias, 4, (int64_t[]){2, 1, 2, 1}, FDM_FLOAT32);
    fdm_tensor slot_k = tensor_of(rows, 4, (int64_t[]){1, 4, 2, 1}, FDM_FLOAT32);
    int32_t page[2] = {1, 2};
    fdm_tensor table = tensor_of(page, 2, (int64_t[]){1, 2}, FDM_INT32);
    end[3] = INT32_MAX; /* token 1 of head 1, in the second page */
    assert_int_equal(fdm_topk_fill(&b, &ends, NULL, NULL, &table, &s, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "block_table is given, but k and v are NULL"));
    s.k = &slot_k;
    assert_int_equal(fdm_topk_fill(&b, &ends, &pages, NULL, &table, &s, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "block_table has page 2; k has 2 pages"));
    table.shape = (int64_t[]){1, 1};
    assert_int_equal(fdm_topk_fill(&b, &ends, &pages, NULL, &table, &s, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "block_table has 1 pages of 1 tokens a sequence, but bias has 2 tokens"));
}

/* dt [1, 3, 2], of which the axes are exchanged in the bias [1, 2, 3]; numbers by hand. */
static void key_biases(void **state) {
    (void)state;
    const float plus = 0.6931472f; /* softplus(0) */
    float dt[6] = {0, 0, 30, -1, 0, NAN}, a[2] = {2, -1}, bias[6], flow[6] = {1, 2, 3, 4, 5, 0}, ddt[6], da[2];
    uint8_t real[3] = {1, 1, 0};
    int64_t by_key[3] = {1, 3, 2}, by_head[3] = {1, 2, 3}, heads = 2;
    fdm_tensor d = tensor_of(dt, 3, by_key, FDM_FLOAT32), h = tensor_of(a, 1, &heads, FDM_FLOAT32);
    fdm_tensor b = tensor_of(bias, 3, by_head, FDM_FLOAT32), db = tensor_of(flow, 3, by_head, FDM_FLOAT32);
    fdm_tensor p = tensor_of(real, 2, (int64_t[]){1, 3}, FDM_BOOL), dd = tensor_of(ddt, 3, by_key, FDM_FLOAT32);
    fdm_tensor dh = tensor_of(da, 1, &heads, FDM_FLOAT32);
    assert_int_equal(fdm_key_bias(&d, &h, NULL, 0, &b, NULL), FDM_OK);
    const float want[5] = {2 * plus, 60, 2 * plus, -plus, -0.3132617f};
    for (int n = 0; n < 5; n++)
        assert_float_equal(bias[n], want[n], 1e-6);
    assert_true(isnan(bias[5]));
    assert_int_equal(fdm_key_bias(&d, &h, &p, 1, &b, NULL), FDM_OK);
    assert_float_equal(bias[0], 4, 1e-6);
    assert_true(isinf(bias[2]) && bias[2] < 0 && isinf(bias[5]) && bias[5] < 0);
    assert_int_equal(fdm_key_bias_backward(&d, &h, NULL, 0, &db, &dd, &dh, NULL), FDM_OK);
    const float gradient[6] = {2 * 0.5f, -4 * 0.5f, 2 * 2, -5 * 0.2689414f, 2 * 3 * 0.5f, 0};
    for (int n = 0; n < 6; n++)
        assert_float_equal(ddt[n], gradient[n], 1e-6); /* nobody saw the last: its NaN stays where it is */
    assert_float_equal(da[0], plus + 2 * 30 + 3 * plus, 1e-5);
    assert_float_equal(da[1], 4 * plus + 5 * 0.3132617f, 1e-5);
    assert_int_equal(fdm_key_bias_backward(&d, &h, &p, 1, &db, &dd, NULL, NULL), FDM_OK);
    assert_float_equal(ddt[0], 2 * 4 * 0.5f, 1e-5);
    assert_float_equal(ddt[4], 0, 0);
}

static void key_biases_refuse_bad_input(void **state) {
    (void)state;
    float dt[6] = {0}, a[2] = {0}, bias[6];
    int64_t by_key[3] = {1, 3, 2}, by_head[3] = {1, 2, 3}, heads = 2;
    fdm_tensor d = tensor_of(dt, 3, by_key, FDM_FLOAT32), h = tensor_of(a, 1, &heads, FDM_FLOAT32);
    fdm_tensor b = tensor_of(bias, 3, by_head, FDM_FLOAT32), same = tensor_of(bias, 3, by_key, FDM_FLOAT32);
    assert_int_equal(fdm_key_bias(NULL, &h, NULL, 0, &b, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "dt is NULL"));
    assert_int_equal(fdm_key_bias(&d, &h, NULL, 0, &same, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "bias has shape [1, 3, 2]; it must be [1, 2, 3]"));
    assert_int_equal(fdm_key_bias(&d, &d, NULL, 0, &b, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "a has 3 axes; it needs 1"));
    assert_int_equal(fdm_key_bias(&d, &h, &d, 0, &b, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_int_equal(fdm_key_bias_backward(&d, &h, NULL, 0, &same, NULL, NULL, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "dbias has shape"));
    assert_int_equal(fdm_key_bias_backward(&d, &h, NULL, 0, &b, &b, NULL, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "ddt has shape"));
    d.dtype = fdm_data_type_of(FDM_INT32);
    assert_int_equal(fdm_key_bias(&d, &h, NULL, 0, &b, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "dt is int32; it must be floating"));
    d.dtype = fdm_data_type_of(FDM_FLOAT64);
    d.device.type = FDM_CUDA;
    assert_int_equal(fdm_key_bias(&d, &h, NULL, 0, &b, NULL), FDM_ERROR_UNSUPPORTED);
    assert_non_null(strstr(fdm_last_error(), "dt is float64; CUDA devices take"));
}

static void windows_are_exact(void **state) {
    (void)state;
    int32_t start[6], end[6];
    int64_t shape[3];
    const int64_t sides[] = {-1, 0, 2, 9, INT64_MAX};
    for (int sq = 0; sq <= 6; sq++)
        for (int sk = 0; sk <= 6; sk++)
            for (int n = 0; n < 50; n++) {
                int64_t left = sides[n / 2 % 5], right = sides[n / 10];
                int causal = n % 2;
                fdm_tensor first = pair_of(start, shape, sk), last = pair_of(end, shape, sk);
                assert_int_equal(fdm_window_intervals(sq, causal, left, right, &first, &last, NULL), FDM_OK);
                for (int i = 0; i < sq; i++)
                    for (int j = 0; j < sk; j++) {
                        int64_t distance = j - (i + sk - sq);
                        int want = (!causal || distance <= 0) && (left < 0 || -distance <= left) &&
                                   (right < 0 || distance <= right);
                        assert_int_equal(start[j] <= i && i < end[j], want);
                    }
            }
}

static void documents_and_prefixes(void **state) {
    (void)state;
    int32_t cu[] = {0, 2, 2, 6}, falling[] = {0, 3, 2}, start[6], end[6];
    int64_t shape[3], small[3], four = 4, three = 3;
    fdm_tensor first = pair_of(start, shape, 6), last = pair_of(end, shape, 6);
    fdm_tensor offsets = tensor_of(cu, 1, &four, FDM_INT32), bad = tensor_of(falling, 1, &three, FDM_INT32);
    for (int causal = 0; causal < 2; causal++) {
        assert_int_equal(fdm_document_intervals(&offsets, causal, &first, &last, NULL), FDM_OK);
        for (int i = 0; i < 6; i++)
            for (int j = 0; j < 6; j++)
                assert_int_equal(start[j] <= i && i < end[j], (i < 2) == (j < 2) && (!causal || j <= i));
    }
    assert_int_equal(fdm_document_intervals(&bad, 0, &first, &last, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "falls from 3 to 2"));
    fdm_tensor five = pair_of(start, small, 5), other = pair_of(end, small, 5);
    assert_int_equal(fdm_document_intervals(&offsets, 0, &five, &other, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "cu_seqlens ends with 6, but start has 5 keys"));
    assert_int_equal(fdm_prefix_intervals(4, 3, &first, &last, NULL), FDM_OK);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 6; j++)
            assert_int_equal(start[j] <= i && i < end[j], j < 3 || j <= i + 2);
}

static void assert_refused(fdm_status status, const char *words) {
    assert_int_equal(status, FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), words));
}

/* Documents, prefixes, windows and intervals at once, and what is refused. fdm-checks masks interval draws them. */
static void rules_hold_at_once(void **state) {
    (void)state;
    int32_t start[12], end[12], ids[6] = {-3, -3, 0, 0, 0, 7}, prefixes[2] = {0, 4}, windows[4] = {1, -1, -1, 0};
    int64_t one_row[2] = {1, 6}, two = 2, pairs[2] = {2, 2}, rows[3] = {1, 2, 6};
    fdm_tensor first = tensor_of(start, 3, rows, FDM_INT32), last = tensor_of(end, 3, rows, FDM_INT32);
    fdm_tensor documents = tensor_of(ids, 2, one_row, FDM_INT32), window = tensor_of(windows, 2, pairs, FDM_INT32);
    fdm_tensor prefix = tensor_of(prefixes + 1, 1, &(int64_t){1}, FDM_INT32);
    fdm_key_rules rules = {
        .struct_bytes = sizeof rules, .document_ids = &documents, .prefix_lengths = &prefix, .window_sizes = &window};
    assert_int_equal(fdm_rule_intervals(&rules, 6, &first, &last, NULL), FDM_OK);
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < 6; i++)
            for (int j = 0; j < 6; j++)
                assert_int_equal(start[6 * h + j] <= i && i < end[6 * h + j],
                                 ids[i] == ids[j] && (j < 4 || j <= i) && (h ? j <= i : j >= i - 1));
    fdm_tensor many = tensor_of(prefixes, 1, &two, FDM_INT32);
    rules.prefix_lengths = &many;
    assert_refused(fdm_rule_intervals(&rules, 6, &first, &last, NULL), "prefix_lengths has shape [2]; it must be [1]");
    rules.prefix_lengths = NULL;
    assert_refused(fdm_rule_intervals(&rules, 5, &first, &last, NULL), "seqlen_q is 5 and there are 6 keys");
    ids[4] = -1;
    assert_refused(fdm_rule_intervals(&rules, 6, &first, &last, NULL),
                   "document_ids fall from 0 to -1 at index [0, 4]");
    rules.document_ids = NULL;
    windows[2] = -2;
    assert_refused(fdm_rule_intervals(&rules, 6, &first, &last, NULL), "window_sizes holds -2");
    rules.window_sizes = NULL;
    rules.interval_end = &documents;
    assert_refused(fdm_rule_intervals(&rules, 6, &first, &last, NULL), "interval_start is missing");
    rules.interval_end = NULL;
    rules.cu_seqlens_q = &many;
    assert_refused(fdm_rule_intervals(&rules, 6, &first, &last, NULL), "start has 3 axes; it needs 2");
    fdm_tensor packed[2] = {first, last};
    packed[0].shape = packed[1].shape = rows + 1;
    packed[0].ndim = packed[1].ndim = 2;
    assert_refused(fdm_rule_intervals(&rules, 0, &packed[0], &packed[1], NULL), "cu_seqlens_k is missing");
    rules.cu_seqlens_k = &many;
    prefixes[1] = 9;
    assert_refused(fdm_rule_intervals(&rules, 0, &packed[0], &packed[1], NULL),
                   "cu_seqlens_k ends with 9; the packed tensors have only");
    prefixes[1] = 4;
    rules.document_ids = &documents;
    assert_refused(fdm_rule_intervals(&rules, 0, &packed[0], &packed[1], NULL), "document_ids are given beside");
    assert_refused(fdm_rule_intervals(NULL, 6, &first, &last, NULL), "rules is NULL");
    assert_refused(fdm_rule_intervals(&rules, 6, NULL, &last, NULL), "start is NULL");
}

static void dense_masks_are_detected_exactly(void **state) {
    (void)state;
    uint8_t mask[5 * 5];
    int32_t start[5], end[5], exact;
    int detected = 0;
    for (int round = 0; round < 4000; round++) {
        int rows = random_below(6), keys = random_below(6), one_run_each = 1;
        for (int n = 0; n < rows * keys; n++)
            mask[n] = (uint8_t)(random_below(3) ? 1 : 0);
        for (int j = 0; j < keys; j++) {
            int rises = 0;
            for (int i = 0; i < rows; i++)
                rises += mask[i * keys + j] && (i == 0 || !mask[(i - 1) * keys + j]);
            one_run_each &= rises <= 1;
        }
        int64_t shape[3];
        fdm_tensor first = pair_of(start, shape, keys), last = pair_of(end, shape, keys);
        fdm_tensor dense = tensor_of(mask, 4, (int64_t[]){1, 1, rows, keys}, FDM_BOOL);
        assert_int_equal(fdm_intervals_from_mask(&dense, &first, &last, &exact, NULL), FDM_OK);
        assert_int_equal(exact, one_run_each);
        detected += exact;
        for (int i = 0; exact && i < rows; i++)
            for (int j = 0; j < keys; j++)
                assert_int_equal(start[j] <= i && i < end[j], mask[i * keys + j] != 0);
    }
    assert_in_range(detected, 100, 3900);
}

static int pair_visible(const fdm_problem *p, const uint8_t *mask, const int32_t *start, const int32_t *end, int h,
                        int i, int j) {
    int64_t distance = j - (i + p->seqlen_k - p->seqlen_q);
    return (!p->causal || distance <= 0) && (p->window_left < 0 || -distance <= p->window_left) &&
           (!p->has_mask || mask[(h * p->seqlen_q + i) * p->seqlen_k + j]) &&
           (!p->has_intervals || (start[j] <= i && i < end[j]));
}

static void visible_pairs_are_counted(void **state) {
    (void)state;
    static float storage[512], storage_of_out[512];
    for (int round = 0; round < 500; round++) {
        int sq = random_below(8), sk = random_below(round % 8 ? 8 : 80), one_row = random_below(3) == 0;
        uint8_t mask[2 * 8 * 80];
        int32_t start[80], end[80];
        for (size_t n = 0; n < sizeof mask; n++)
            mask[n] = (uint8_t)random_below(2);
        for (int h = 0; one_row && h < 2; h++)
            for (int i = 1; i < sq; i++)
                memcpy(mask + (h * sq + i) * sk, mask + h * sq * sk, (size_t)sk);
        for (int j = 0; j < 80; j++) {
            start[j] = random_below(10) - 2;
            end[j] = random_below(10) - 1;
        }
        fdm_tensor q = tensor_of(storage, 4, (int64_t[]){1, sq, 2, 4}, FDM_FLOAT32), out = q;
        fdm_tensor k = tensor_of(storage, 4, (int64_t[]){1, sk, 1, 4}, FDM_FLOAT32);
        out.data = storage_of_out;
        fdm_tensor m = tensor_of(mask, 4, (int64_t[]){1, 2, one_row ? 1 : sq, sk}, FDM_BOOL);
        m.strides = (int64_t[]){2 * sq * sk, sq * sk, sk, 1};
        fdm_tensor s = tensor_of(start, 3, (int64_t[]){1, 1, sk}, FDM_INT32), e = s;
        e.data = end;
        fdm_tensors t = {.struct_bytes = sizeof t, .q = &q, .k = &k, .v = &k, .out = &out};
        if (random_below(2))
            t.mask = &m;
        if (random_below(2))
            t.interval_start = &s, t.interval_end = &e;
        fdm_options options = fdm_options_default();
        options.causal = random_below(2);
        options.window_left = random_below(6) - 1;
        fdm_problem p;
        int64_t pairs, want = 0;
        assert_int_equal(fdm_describe(FDM_FORWARD, &t, &options, &p), FDM_OK);
        assert_int_equal(fdm_count_visible(&p, &t, &pairs), FDM_OK);
        for (int h = 0; h < 2; h++)
            for (int i = 0; i < sq; i++)
                for (int j = 0; j < sk; j++)
                    want += pair_visible(&p, mask, start, end, h, i, j);
        assert_int_equal(pairs, want);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(topk_is_exact),
        cmocka_unit_test(topk_refuses_bad_input),
        cmocka_unit_test(device_tensors_are_checked_first),
        cmocka_unit_test(slots_refuse_bad_input),
        cmocka_unit_test(key_biases),
        cmocka_unit_test(key_biases_refuse_bad_input),
        cmocka_unit_test(windows_are_exact),
        cmocka_unit_test(documents_and_prefixes),
        cmocka_unit_test(rules_hold_at_once),
        cmocka_unit_test(dense_masks_are_detected_exactly),
        cmocka_unit_test(visible_pairs_are_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
