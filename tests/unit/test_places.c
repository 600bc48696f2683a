/* test_places.c: what a problem says of where its tensors lie (aligned, scores_aligned and the three mappable): for
 * each tensor an address or a stride that just breaks it, and its neighbour that does not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "../faults/problem_tensors.h"

/* Facts that are lost. */
enum { NONE = 0, ALIGNED = 1, SCORES = 2, Q_MAP = 4, KEYS_MAP = 8, SCORES_MAP = 16 };

/* Address: so many bytes on. Stride of an axis: so many bytes. */
enum { ADDRESS = -1, OFFSET = -2, BATCH = 0, ROW = 1, HEAD = 2, SCORE_HEAD = 1, SCORE_ROW = 2, SCORE_KEY = 3 };
#define TWO_31 (1ll << 31)
#define TWO_40 (1ll << 40)

static const struct place {
    size_t tensor; /* in fdm_tensors */
    const char *name;
    int32_t what;
    int64_t bytes;
    int lost;
} dense[] = {
#define IN(name) offsetof(fdm_tensors, name), #name
    {IN(q), ADDRESS, 2, ALIGNED | Q_MAP},
    {IN(q), ADDRESS, 8, ALIGNED | Q_MAP},
    {IN(q), ADDRESS, 16, NONE},
    {IN(q), OFFSET, 8, ALIGNED | Q_MAP},
    {IN(q), OFFSET, 16, NONE},
    {IN(q), BATCH, 8192 + 8, ALIGNED | Q_MAP},
    {IN(q), BATCH, 8192 + 16, NONE},
    {IN(q), BATCH, 0, Q_MAP},
    {IN(q), BATCH, TWO_31, NONE},
    {IN(q), BATCH, TWO_40 - 16, NONE},
    {IN(q), BATCH, TWO_40, Q_MAP},
    {IN(q), ROW, 1024 + 2, ALIGNED | Q_MAP},
    {IN(q), ROW, 1024 + 16, NONE},
    {IN(q), ROW, 0, Q_MAP},
    {IN(q), ROW, TWO_31 - 16, NONE},
    {IN(q), ROW, TWO_31, ALIGNED},
    {IN(q), HEAD, 128 + 8, ALIGNED | Q_MAP},
    {IN(q), HEAD, 128 + 16, NONE},
    {IN(q), HEAD, 0, Q_MAP},
    {IN(q), HEAD, TWO_31, NONE},
    {IN(q), HEAD, TWO_40, Q_MAP},
    {IN(k), ADDRESS, 2, ALIGNED | KEYS_MAP},
    {IN(k), BATCH, 8192 + 8, ALIGNED | KEYS_MAP},
    {IN(k), BATCH, TWO_40 - 16, NONE},
    {IN(k), BATCH, TWO_40, KEYS_MAP},
    {IN(k), ROW, TWO_31, ALIGNED},
    {IN(k), HEAD, 0, KEYS_MAP},
    {IN(v), ADDRESS, 8, ALIGNED | KEYS_MAP},
    {IN(v), ROW, 128 + 2, ALIGNED | KEYS_MAP},
    {IN(v), ROW, TWO_31, ALIGNED},
    {IN(v), HEAD, 0, KEYS_MAP},
    {IN(v), BATCH, TWO_40, KEYS_MAP},
    {IN(out), ADDRESS, 2, ALIGNED},
    {IN(out), BATCH, 2048 + 8, ALIGNED},
    {IN(out), ROW, TWO_31, ALIGNED},
    {IN(out), BATCH, TWO_40, NONE},
    {IN(dout), ADDRESS, 2, ALIGNED | Q_MAP},
    {IN(dout), HEAD, 0, Q_MAP},
    {IN(dout), BATCH, TWO_40, Q_MAP},
    {IN(dout), ROW, TWO_31, ALIGNED},
    {IN(dq), ADDRESS, 2, ALIGNED},
    {IN(dq), ROW, TWO_31, ALIGNED},
    {IN(dq), BATCH, TWO_40, NONE},
    {IN(dk), ADDRESS, 8, ALIGNED},
    {IN(dk), BATCH, 8192 + 8, ALIGNED},
    {IN(dv), ADDRESS, 8, ALIGNED},
    {IN(dv), BATCH, 4096 + 8, ALIGNED},
    {IN(lse), ADDRESS, 4, NONE},
    {IN(dlse), ADDRESS, 4, NONE},
    {IN(lse_low), ADDRESS, 4, NONE},
    {IN(interval_start), ADDRESS, 4, NONE},
    {IN(mask), ADDRESS, 1, SCORES | SCORES_MAP},
    {IN(mask), ADDRESS, 16, NONE},
    {IN(mask), SCORE_KEY, 2, SCORES | SCORES_MAP},
    {IN(mask), SCORE_ROW, 32 + 1, SCORES | SCORES_MAP},
    {IN(mask), SCORE_ROW, 32 + 16, NONE},
    {IN(mask), SCORE_ROW, TWO_31 - 16, NONE},
    {IN(mask), SCORE_ROW, TWO_31, SCORES | SCORES_MAP},
    {IN(mask), SCORE_ROW, 0, SCORES_MAP},
    {IN(mask), SCORE_HEAD, 256 + 8, SCORES | SCORES_MAP},
    {IN(mask), SCORE_HEAD, 0, SCORES_MAP},
    {IN(mask), SCORE_HEAD, TWO_40 - 16, NONE},
    {IN(mask), SCORE_HEAD, TWO_40, SCORES_MAP},
    {IN(mask), BATCH, 1024 + 4, SCORES | SCORES_MAP},
    {IN(bias), ADDRESS, 4, SCORES | SCORES_MAP},
    {IN(bias), ADDRESS, 16, NONE},
    {IN(bias), SCORE_KEY, 8, SCORES | SCORES_MAP},
    {IN(bias), SCORE_ROW, 128 + 8, SCORES | SCORES_MAP},
    {IN(bias), SCORE_ROW, TWO_31 - 16, NONE},
    {IN(bias), SCORE_ROW, TWO_31, SCORES | SCORES_MAP},
    {IN(bias), BATCH, 0, SCORES_MAP},
    {IN(bias), BATCH, TWO_40, SCORES_MAP},
    {IN(dbias), ADDRESS, 4, SCORES | SCORES_MAP},
    {IN(dbias), BATCH, 4096 + 4, SCORES | SCORES_MAP},
    {IN(dbias), SCORE_ROW, TWO_31, SCORES | SCORES_MAP},
    {IN(dbias), BATCH, TWO_40, NONE},
};
/* Rows are axis 0. */
static const struct place packed[] = {
    {IN(q), 0, TWO_31 - 16, NONE},         {IN(q), 0, TWO_31, ALIGNED},
    {IN(q), 0, 1024 + 8, ALIGNED | Q_MAP}, {IN(q), 1, TWO_40, Q_MAP},
    {IN(k), 0, TWO_31, ALIGNED},           {IN(k), 1, 0, KEYS_MAP},
    {IN(dk), 0, TWO_31, ALIGNED},          {IN(v), ADDRESS, 2, ALIGNED | KEYS_MAP},
};

/* A backward with everything there is: q [2, 4, 8, 64], k [2, 16, 2, 64], v [2, 16, 2, 32], mask and float32 bias
 * [2, 8, 4, 32]. */
static fdm_problem problem_of(int varlen) {
    const int64_t shape[4] = {2, 8, 4, 32};
    fdm_problem p = fdm_problem_default();
    p.pass = FDM_BACKWARD;
    p.dtype = FDM_BFLOAT16;
    p.batch = 2, p.heads = 8, p.heads_kv = 2, p.seqlen_q = 4, p.seqlen_k = 32;
    p.head_dim = 64, p.head_dim_v = 32;
    p.varlen = varlen;
    p.total_q = varlen ? 8 : 0, p.total_k = varlen ? 64 : 0;
    p.has_intervals = p.has_dlse = p.has_mask = p.has_bias = p.has_lse_low = p.needs_dbias = 1;
    memcpy(p.mask_shape, shape, sizeof shape);
    memcpy(p.bias_shape, shape, sizeof shape);
    return p;
}

static int lost_facts(const fdm_problem *p) {
    return !p->aligned * ALIGNED | !p->scores_aligned * SCORES | !p->q_mappable * Q_MAP | !p->keys_mappable * KEYS_MAP |
           !p->scores_mappable * SCORES_MAP;
}

/* Each tensor so far from the others that no stride below reaches them; nobody reads any but cu_seqlens. */
static void scatter(struct problem_tensors *t) {
    for (int32_t n = 0; n < t->count; n++)
        if (&t->list[n] != t->all.cu_seqlens_q && &t->list[n] != t->all.cu_seqlens_k)
            t->list[n].data = (void *)((uintptr_t)(n + 1) << 44);
}

static void put(fdm_tensor *tensor, const struct place *place) {
    if (place->what == ADDRESS)
        tensor->data = (char *)tensor->data + place->bytes;
    else if (place->what == OFFSET)
        tensor->byte_offset = (uint64_t)place->bytes;
    else
        tensor->strides[place->what] = place->bytes / fdm_dtype_bytes(fdm_dtype_of(tensor));
}

static void try_places(const struct place *places, size_t count, int varlen) {
    static struct problem_tensors t;
    const fdm_problem wanted = problem_of(varlen);
    for (size_t i = 0; i < count; i++)
        for (int pass = FDM_FORWARD; pass <= FDM_BACKWARD; pass++) {
            const struct place *place = &places[i];
            fdm_tensor *tensor;
            fdm_problem p;
            problem_tensors_make(&t, &wanted, (fdm_device_id){FDM_CPU, 0});
            scatter(&t);
            memcpy(&tensor, (const char *)&t.all + place->tensor, sizeof tensor);
            if (pass == FDM_FORWARD && place->tensor >= offsetof(fdm_tensors, dout) &&
                place->tensor < offsetof(fdm_tensors, lse_low))
                continue; /* of the backward alone */
            assert_int_equal(fdm_describe((fdm_pass)pass, &t.all, &t.options, &p), FDM_OK);
            assert_int_equal(lost_facts(&p), NONE);
            put(tensor, place);
            if (fdm_describe((fdm_pass)pass, &t.all, &t.options, &p))
                fail_msg("%s, place %d: %s", place->name, (int)i, fdm_last_error());
            if (lost_facts(&p) != place->lost)
                fail_msg("%s, %d of %lld bytes, pass %d: %d is lost, not %d", place->name, place->what,
                         (long long)place->bytes, pass, lost_facts(&p), place->lost);
        }
}

static void facts_of_dense_calls(void **state) {
    (void)state;
    try_places(dense, sizeof dense / sizeof dense[0], 0);
}
static void facts_of_packed_calls(void **state) {
    (void)state;
    try_places(packed, sizeof packed / sizeof packed[0], 1);
}

/* Nobody takes the step of an axis of extent 1, nor any step of an empty tensor. */
static void strides_that_do_not_count(void **state) {
    (void)state;
    static struct problem_tensors t;
    fdm_problem wanted = problem_of(0), p;
    wanted.batch = wanted.mask_shape[0] = wanted.bias_shape[0] = 1;
    problem_tensors_make(&t, &wanted, (fdm_device_id){FDM_CPU, 0});
    const fdm_tensor *const all[] = {t.all.q, t.all.k, t.all.v, t.all.dout, t.all.dq, t.all.mask, t.all.bias};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        all[i]->strides[0] = 3;
    assert_int_equal(fdm_describe(FDM_BACKWARD, &t.all, &t.options, &p), FDM_OK);
    assert_int_equal(lost_facts(&p), NONE);
    wanted.batch = 2;
    wanted.has_mask = wanted.has_bias = wanted.needs_dbias = wanted.has_intervals = wanted.has_lse_low = 0;
    wanted.seqlen_k = 0;
    problem_tensors_make(&t, &wanted, (fdm_device_id){FDM_CPU, 0});
    t.all.k->strides[0] = 3;
    t.all.v->strides[2] = 0;
    assert_int_equal(fdm_describe(FDM_BACKWARD, &t.all, &t.options, &p), FDM_OK);
    assert_int_equal(lost_facts(&p), NONE);
}

/* The sums of a bias' gradient are float32 whose rows 32 bits count in bytes. */
static void long_rows_of_dbias(void **state) {
    (void)state;
    static struct problem_tensors t;
    fdm_problem wanted = problem_of(0), p;
    wanted.batch = wanted.bias_shape[0] = wanted.heads = wanted.heads_kv = wanted.bias_shape[1] = 1;
    wanted.seqlen_q = wanted.bias_shape[2] = 1;
    wanted.head_dim = wanted.head_dim_v = 8;
    wanted.has_mask = wanted.has_intervals = 0;
    wanted.bias_dtype = FDM_BFLOAT16;
    for (int64_t keys = INT32_MAX / 4; keys <= INT32_MAX / 4 + 1; keys++) {
        wanted.seqlen_k = wanted.bias_shape[3] = keys;
        problem_tensors_make(&t, &wanted, (fdm_device_id){FDM_CPU, 0});
        assert_int_equal(fdm_describe(FDM_BACKWARD, &t.all, &t.options, &p), FDM_OK);
        assert_int_equal(p.scores_aligned, keys <= INT32_MAX / 4);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(facts_of_dense_calls),
        cmocka_unit_test(facts_of_packed_calls),
        cmocka_unit_test(strides_that_do_not_count),
        cmocka_unit_test(long_rows_of_dbias),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
