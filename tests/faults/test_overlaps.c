/* test_overlaps.c: every entry that writes, with what it writes over each other tensor of the call: it is refused with
 * both names, and nothing is written, but in the places that the header allows. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "flash_dmattn.h"

enum { B = 2, S = 12, H = 2, HKV = 1, D = 8, W = 5, TENSORS_MAX = 20, ROOM = 4096 };
static _Alignas(64) char memory[TENSORS_MAX][ROOM];

/* What kinds of tensors there are. */
enum form {
    MASK,
    DENSE_MASK,
    PADDING,
    REAL,
    PAIRS,
    KEY_PAIRS,
    KEYS,
    BIAS,
    BY_KEY,
    HEADS,
    SINKS,
    SLOTS,
    SLOT_BIAS,
    SLOT_ROWS,
    TOKEN,
    TOKEN_BIAS,
    TOKEN_ROWS,
    TABLE,
    NUMBER,
    ROWS,
    ROW_MASK,
    LSE_ROWS,
    SQUARE,
    ONE_SQUARE,
    OFFSETS,
    PACKED_Q,
    PACKED_K,
    PACKED_KEYS,
    PACKED_LSE
};
static const struct {
    fdm_dtype dtype;
    int32_t ndim;
    int64_t shape[4];
} forms[] = {
    [MASK] = {FDM_BOOL, 4, {1, 1, S, S}},
    [DENSE_MASK] = {FDM_BOOL, 4, {B, H, S, S}},
    [PADDING] = {FDM_BOOL, 2, {B, S}},
    [REAL] = {FDM_BOOL, 1, {B}},
    [PAIRS] = {FDM_FLOAT32, 4, {1, 1, S, S}},
    [KEY_PAIRS] = {FDM_FLOAT32, 4, {1, 1, 1, S}},
    [KEYS] = {FDM_INT32, 3, {B, H, S}},
    [BIAS] = {FDM_FLOAT32, 3, {B, H, S}},
    [BY_KEY] = {FDM_FLOAT32, 3, {B, S, H}},
    [HEADS] = {FDM_FLOAT32, 1, {H}},
    [SINKS] = {FDM_FLOAT32, 2, {2, H}},
    [SLOTS] = {FDM_INT32, 3, {B, H, W}},
    [SLOT_BIAS] = {FDM_FLOAT32, 3, {B, H, W}},
    [SLOT_ROWS] = {FDM_FLOAT32, 4, {B, W, H, D}},
    [TOKEN] = {FDM_INT32, 2, {B, H}},
    [TOKEN_BIAS] = {FDM_FLOAT32, 2, {B, H}},
    [TOKEN_ROWS] = {FDM_FLOAT32, 4, {B, 1, H, D}},
    [TABLE] = {FDM_INT32, 2, {B, 1}},
    [NUMBER] = {FDM_INT32, 1, {1}},
    [ROWS] = {FDM_FLOAT32, 4, {B, S, H, D}},
    [ROW_MASK] = {FDM_BOOL, 4, {B, S, H, D}},
    [LSE_ROWS] = {FDM_FLOAT32, 3, {B, H, S}},
    [SQUARE] = {FDM_FLOAT16, 2, {S, S}},
    [ONE_SQUARE] = {FDM_FLOAT16, 3, {1, S, S}},
    [OFFSETS] = {FDM_INT32, 1, {2}},
    [PACKED_Q] = {FDM_FLOAT32, 3, {S, H, D}},
    [PACKED_K] = {FDM_FLOAT32, 3, {S, HKV, D}},
    [PACKED_KEYS] = {FDM_INT32, 2, {HKV, S}},
    [PACKED_LSE] = {FDM_FLOAT32, 2, {H, S}},
};

/* A tensor of a call. exact: NULL where it is only read; where it is written, names of those that it may be itself. */
struct role {
    const char *name;
    enum form form;
    const char *exact;
};
struct entry {
    const char *name;
    fdm_status (*run)(fdm_tensor *const *t);
    int32_t device_type, count;
    struct role roles[TENSORS_MAX];
};

/* ---- the entries ---- */

static fdm_status run_windows(fdm_tensor *const *t) { return fdm_window_intervals(S, 1, 3, -1, t[0], t[1], NULL); }
static fdm_status run_prefix(fdm_tensor *const *t) { return fdm_prefix_intervals(S, 3, t[0], t[1], NULL); }
static fdm_status run_documents(fdm_tensor *const *t) { return fdm_document_intervals(t[0], 1, t[1], t[2], NULL); }
static fdm_status run_rules(fdm_tensor *const *t) {
    const fdm_key_rules rules = {.struct_bytes = sizeof rules, .interval_start = t[0], .interval_end = t[1]};
    return fdm_rule_intervals(&rules, S, t[2], t[3], NULL);
}
static fdm_status run_topk(fdm_tensor *const *t) {
    return fdm_topk_intervals(t[0], t[1], W, S, t[2], t[3], NULL, 0, NULL);
}
static fdm_status run_from_mask(fdm_tensor *const *t) {
    int32_t *exact = (void *)((char *)t[3]->data + t[3]->byte_offset);
    return fdm_intervals_from_mask(t[0], t[1], t[2], exact, NULL);
}
static fdm_status run_to_mask(fdm_tensor *const *t) { return fdm_intervals_to_mask(t[0], t[1], t[2], NULL); }
static fdm_status run_blocks(fdm_tensor *const *t) { return fdm_mask_blocks(t[0], 1, 1, t[1], NULL); }
static fdm_status run_create(fdm_tensor *const *t) { return fdm_create_mask(t[0], t[1], W, -1e9, 1, t[2], NULL); }
static fdm_status run_key_bias(fdm_tensor *const *t) { return fdm_key_bias(t[0], t[1], t[2], 0, t[3], NULL); }
static fdm_status run_key_bias_backward(fdm_tensor *const *t) {
    return fdm_key_bias_backward(t[0], t[1], t[2], 0, t[3], t[4], t[5], NULL);
}
static fdm_status run_fill(fdm_tensor *const *t) {
    const fdm_topk_slots slots = {sizeof slots, t[5], t[6], t[7], t[8], t[9]};
    return fdm_topk_fill(t[0], t[1], t[2], t[3], t[4], &slots, NULL);
}
static fdm_status run_append(fdm_tensor *const *t) {
    const fdm_topk_slots slots = {sizeof slots, t[4], t[5], t[6], t[7], t[8]};
    return fdm_topk_append(t[0], t[1], t[2], t[3], &slots, t[9], NULL);
}
static fdm_status run_merge(fdm_tensor *const *t) {
    const fdm_merge_tensors all = {sizeof all, t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8]};
    return fdm_merge(&all, NULL);
}
/* Of the companions, which want a device, the checks. */
static fdm_status run_softmax(fdm_tensor *const *t) {
    const fdm_softmax_tensors all = {.struct_bytes = sizeof all, .x = t[0], .mask = t[1], .out = t[2]};
    fdm_softmax_problem problem;
    return fdm_describe_softmax(FDM_FORWARD, &all, NULL, &problem);
}
static fdm_status run_softmax_backward(fdm_tensor *const *t) {
    const fdm_softmax_tensors all = {.struct_bytes = sizeof all, .out = t[0], .dout = t[1], .dx = t[2]};
    fdm_softmax_problem problem;
    return fdm_describe_softmax(FDM_BACKWARD, &all, NULL, &problem);
}
static fdm_status run_gemm(fdm_tensor *const *t) {
    const fdm_gemm_tensors all = {sizeof all, t[0], t[1], t[2], t[3]};
    const fdm_gemm_options options = {.struct_bytes = sizeof options, .alpha = 1, .beta = 1};
    fdm_gemm_problem problem;
    return fdm_describe_gemm(&all, &options, &problem);
}
static fdm_status run_forward(fdm_tensor *const *t) {
    const fdm_tensors all = {.struct_bytes = sizeof all,
                             .q = t[0],
                             .k = t[1],
                             .v = t[2],
                             .mask = t[3],
                             .bias = t[4],
                             .interval_start = t[5],
                             .interval_end = t[6],
                             .cu_seqlens_q = t[7],
                             .cu_seqlens_k = t[8],
                             .out = t[9],
                             .lse = t[10],
                             .lse_low = t[11],
                             .sink = t[12]};
    return fdm_attention_forward(&all, NULL, NULL);
}
static fdm_status run_backward(fdm_tensor *const *t) {
    const fdm_tensors all = {.struct_bytes = sizeof all,
                             .q = t[0],
                             .k = t[1],
                             .v = t[2],
                             .mask = t[3],
                             .bias = t[4],
                             .interval_start = t[5],
                             .interval_end = t[6],
                             .cu_seqlens_q = t[7],
                             .cu_seqlens_k = t[8],
                             .out = t[9],
                             .lse = t[10],
                             .lse_low = t[11],
                             .dout = t[12],
                             .dlse = t[13],
                             .dq = t[14],
                             .dk = t[15],
                             .dv = t[16],
                             .dbias = t[17],
                             .sink = t[18],
                             .dsink = t[19]};
    return fdm_attention_backward(&all, NULL, NULL);
}

static const struct entry entries[] = {
    {"fdm_window_intervals", run_windows, FDM_CPU, 2, {{"start", KEYS, ""}, {"end", KEYS, ""}}},
    {"fdm_prefix_intervals", run_prefix, FDM_CPU, 2, {{"start", KEYS, ""}, {"end", KEYS, ""}}},
    {"fdm_document_intervals",
     run_documents,
     FDM_CPU,
     3,
     {{"cu_seqlens", OFFSETS, NULL}, {"start", KEYS, ""}, {"end", KEYS, ""}}},
    {"fdm_rule_intervals",
     run_rules,
     FDM_CPU,
     4,
     {{"interval_start", KEYS, NULL}, {"interval_end", KEYS, NULL}, {"start", KEYS, ""}, {"end", KEYS, ""}}},
    {"fdm_topk_intervals",
     run_topk,
     FDM_CPU,
     4,
     {{"bias", BIAS, NULL}, {"padding", PADDING, NULL}, {"start", KEYS, ""}, {"end", KEYS, ""}}},
    {"fdm_intervals_from_mask",
     run_from_mask,
     FDM_CPU,
     4,
     {{"mask", DENSE_MASK, NULL}, {"start", KEYS, ""}, {"end", KEYS, ""}, {"exact", NUMBER, ""}}},
    {"fdm_intervals_to_mask",
     run_to_mask,
     FDM_CPU,
     3,
     {{"start", KEYS, NULL}, {"end", KEYS, NULL}, {"mask", DENSE_MASK, ""}}},
    {"fdm_mask_blocks", run_blocks, FDM_CPU, 2, {{"mask", MASK, NULL}, {"blocks", MASK, ""}}},
    {"fdm_create_mask",
     run_create,
     FDM_CPU,
     3,
     {{"bias", KEY_PAIRS, NULL}, {"attention_mask", MASK, NULL}, {"mask", MASK, ""}}},
    {"fdm_key_bias",
     run_key_bias,
     FDM_CPU,
     4,
     {{"dt", BY_KEY, NULL}, {"a", HEADS, NULL}, {"padding", PADDING, NULL}, {"bias", BIAS, ""}}},
    {"fdm_key_bias_backward",
     run_key_bias_backward,
     FDM_CPU,
     6,
     {{"dt", BY_KEY, NULL},
      {"a", HEADS, NULL},
      {"padding", PADDING, NULL},
      {"dbias", BIAS, NULL},
      {"ddt", BY_KEY, ""},
      {"da", HEADS, ""}}},
    {"fdm_topk_fill",
     run_fill,
     FDM_CPU,
     10,
     {{"bias", BIAS, NULL},
      {"end", KEYS, NULL},
      {"k", ROWS, NULL},
      {"v", ROWS, NULL},
      {"block_table", TABLE, NULL},
      {"slots.key", SLOTS, ""},
      {"slots.bias", SLOT_BIAS, ""},
      {"slots.length", TOKEN, ""},
      {"slots.k", SLOT_ROWS, ""},
      {"slots.v", SLOT_ROWS, ""}}},
    {"fdm_topk_append",
     run_append,
     FDM_CPU,
     10,
     {{"bias", TOKEN_BIAS, NULL},
      {"real", REAL, NULL},
      {"k", TOKEN_ROWS, NULL},
      {"v", TOKEN_ROWS, NULL},
      {"slots.key", SLOTS, ""},
      {"slots.bias", SLOT_BIAS, ""},
      {"slots.length", TOKEN, ""},
      {"slots.k", SLOT_ROWS, ""},
      {"slots.v", SLOT_ROWS, ""},
      {"slot", TOKEN, ""}}},
    {"fdm_merge",
     run_merge,
     FDM_CPU,
     9,
     {{"out1", ROWS, NULL},
      {"lse1", LSE_ROWS, NULL},
      {"lse_low1", LSE_ROWS, NULL},
      {"out2", ROWS, NULL},
      {"lse2", LSE_ROWS, NULL},
      {"lse_low2", LSE_ROWS, NULL},
      {"out", ROWS, "out1 out2"},
      {"lse", LSE_ROWS, "lse1 lse2"},
      {"lse_low", LSE_ROWS, "lse_low1 lse_low2"}}},
    {"fdm_softmax", run_softmax, FDM_CUDA, 3, {{"x", ROWS, NULL}, {"mask", ROW_MASK, NULL}, {"out", ROWS, ""}}},
    {"fdm_softmax, backward",
     run_softmax_backward,
     FDM_CUDA,
     3,
     {{"out", ROWS, NULL}, {"dout", ROWS, NULL}, {"dx", ROWS, ""}}},
    {"fdm_gemm",
     run_gemm,
     FDM_CUDA,
     4,
     {{"a", SQUARE, NULL}, {"b", SQUARE, NULL}, {"c", ONE_SQUARE, NULL}, {"out", SQUARE, "c"}}},
    {"fdm_attention_forward",
     run_forward,
     FDM_CPU,
     13,
     {{"q", PACKED_Q, NULL},
      {"k", PACKED_K, NULL},
      {"v", PACKED_K, NULL},
      {"mask", MASK, NULL},
      {"bias", PAIRS, NULL},
      {"interval_start", PACKED_KEYS, NULL},
      {"interval_end", PACKED_KEYS, NULL},
      {"cu_seqlens_q", OFFSETS, NULL},
      {"cu_seqlens_k", OFFSETS, NULL},
      {"out", PACKED_Q, "q"},
      {"lse", PACKED_LSE, ""},
      {"lse_low", PACKED_LSE, ""},
      {"sink", SINKS, NULL}}},
    {"fdm_attention_backward",
     run_backward,
     FDM_CPU,
     20,
     {{"q", PACKED_Q, NULL},
      {"k", PACKED_K, NULL},
      {"v", PACKED_K, NULL},
      {"mask", MASK, NULL},
      {"bias", PAIRS, NULL},
      {"interval_start", PACKED_KEYS, NULL},
      {"interval_end", PACKED_KEYS, NULL},
      {"cu_seqlens_q", OFFSETS, NULL},
      {"cu_seqlens_k", OFFSETS, NULL},
      {"out", PACKED_Q, NULL},
      {"lse", PACKED_LSE, NULL},
      {"lse_low", PACKED_LSE, NULL},
      {"dout", PACKED_Q, NULL},
      {"dlse", PACKED_LSE, NULL},
      {"dq", PACKED_Q, ""},
      {"dk", PACKED_K, ""},
      {"dv", PACKED_K, ""},
      {"dbias", PAIRS, ""},
      {"sink", SINKS, NULL},
      {"dsink", SINKS, ""}}},
};

/* ---- what must hold ---- */

struct call {
    fdm_tensor tensors[TENSORS_MAX], *list[TENSORS_MAX];
    int64_t shapes[TENSORS_MAX][4];
};

/* Every tensor in its own place, of zeros; offsets end where their tensors do. */
static void make(struct call *c, const struct entry *e) {
    memset(memory, 0, sizeof memory);
    for (int32_t i = 0; i < e->count; i++) {
        const struct role *r = &e->roles[i];
        memcpy(c->shapes[i], forms[r->form].shape, sizeof c->shapes[i]);
        c->tensors[i] = (fdm_tensor){.data = memory[i],
                                     .device = {e->device_type, 0},
                                     .ndim = forms[r->form].ndim,
                                     .dtype = fdm_data_type_of(forms[r->form].dtype),
                                     .shape = c->shapes[i]};
        c->list[i] = &c->tensors[i];
        if (strncmp(r->name, "cu_seqlens", 10) == 0)
            ((int32_t *)(void *)memory[i])[1] = S;
    }
}

static int64_t bytes_of(const struct role *r) {
    int64_t bytes = fdm_dtype_bytes(forms[r->form].dtype);
    for (int32_t axis = 0; axis < forms[r->form].ndim; axis++)
        bytes *= forms[r->form].shape[axis];
    return bytes;
}

static int may_be(const struct role *r, const char *name) {
    const char *at = r->exact ? strstr(r->exact, name) : NULL;
    return at && (at == r->exact || at[-1] == ' ') && strchr(" ", at[strlen(name)]) != NULL;
}

/* Tensor `w` a few bytes into tensor `o`. */
static void check(const struct entry *e, int32_t w, int32_t o, int64_t shift) {
    static char before[TENSORS_MAX][ROOM];
    struct call c;
    char one[64], other[64];
    const int allowed = shift == 0 && may_be(&e->roles[w], e->roles[o].name);
    make(&c, e);
    c.tensors[w].data = memory[o] + shift;
    memcpy(before, memory, sizeof memory);
    const fdm_status status = e->run(c.list);
    if (allowed && status)
        fail_msg("%s, %s in place of %s: %s", e->name, e->roles[w].name, e->roles[o].name, fdm_last_error());
    if (allowed)
        return;
    snprintf(one, sizeof one, "%s overlaps %s in memory", e->roles[w].name, e->roles[o].name);
    snprintf(other, sizeof other, "%s overlaps %s in memory", e->roles[o].name, e->roles[w].name);
    if (status != FDM_ERROR_INVALID_ARGUMENT || (!strstr(fdm_last_error(), one) && !strstr(fdm_last_error(), other)))
        fail_msg("%s, %s %d bytes into %s: status %d, %s", e->name, e->roles[w].name, (int)shift, e->roles[o].name,
                 (int)status, status ? fdm_last_error() : "");
    if (memcmp(before, memory, sizeof memory) != 0)
        fail_msg("%s, %s %d bytes into %s: something was written", e->name, e->roles[w].name, (int)shift,
                 e->roles[o].name);
}

/* At its beginning, 8 bytes in, and at its last 8 bytes. */
static int check_pair(const struct entry *e, int32_t w, int32_t o) {
    const int64_t last = (bytes_of(&e->roles[o]) - 1) / 8 * 8;
    check(e, w, o, 0);
    if (last > 0)
        check(e, w, o, 8);
    if (last > 8)
        check(e, w, o, last);
    return 1 + (last > 0) + (last > 8);
}

static void every_pair_is_refused(void **state) {
    (void)state;
    int count = 0;
    for (size_t n = 0; n < sizeof entries / sizeof entries[0]; n++) {
        const struct entry *e = &entries[n];
        struct call c;
        make(&c, e);
        if (e->run(c.list))
            fail_msg("%s, all apart: %s", e->name, fdm_last_error());
        for (int32_t w = 0; w < e->count; w++)
            for (int32_t o = 0; o < e->count; o++)
                if (e->roles[w].exact && o != w)
                    count += check_pair(e, w, o);
    }
    assert_true(count > 500);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_pair_is_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
