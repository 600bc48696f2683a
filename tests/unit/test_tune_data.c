/* test_tune_data.c: the tensors that a tuner makes are those of its problem, and hide some pairs and show others. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "problem/problem.h"
#include "tuner/tune_data.h"

static fdm_device the_cpu(void) {
    fdm_device device = {.struct_bytes = sizeof device};
    assert_int_equal(fdm_device_query(FDM_CPU, 0, &device), FDM_OK);
    return device;
}

static fdm_problem problem_of(void) {
    fdm_problem p = fdm_problem_default();
    p.batch = 3;
    p.heads = 4;
    p.heads_kv = 2;
    p.seqlen_q = 70;
    p.seqlen_k = 100;
    p.head_dim = p.head_dim_v = 32;
    p.needs_dq = p.needs_dk = p.needs_dv = 0;
    return p;
}

/* Of a forward: rows whose lse is finite, in parts of all. */
static double rows_that_see(const fdm_problem *p, const fdm_tensors *tensors) {
    const int64_t rows = p->heads * (p->varlen ? p->total_q : p->batch * p->seqlen_q);
    const float *lse = tensors->lse->data;
    int64_t count = 0;
    for (int64_t i = 0; i < rows; i++)
        count += isfinite(lse[i]) != 0;
    return rows ? (double)count / (double)rows : 1;
}

/* Makes the tensors, looks at what they describe, runs them, and has `look` look at them. */
static void check(const fdm_problem *p, void (*look)(const struct tune_data *data)) {
    const fdm_device device = the_cpu();
    struct tune_data data;
    fdm_problem described;
    fdm_plan plan = {.struct_bytes = sizeof plan};
    fdm_options options = problem_options(p);
    assert_int_equal(fdm_problem_validate(p), FDM_OK);
    if (tune_data_make(&device, p, 16, &data))
        fail_msg("%s", fdm_last_error());
    for (int64_t number = 0; number < 2; number++) {
        const fdm_tensors tensors = tune_data_tensors(&data, number);
        if (fdm_describe(p->pass, &tensors, &options, &described))
            fail_msg("%s", fdm_last_error());
        assert_memory_equal(&described, p, sizeof *p);
        options.tune = FDM_TUNE_RULES;
        if (fdm_plan_attention(&device, p, &options, &plan))
            fail_msg("%s", fdm_last_error());
        void *workspace = NULL;
        assert_int_equal(fdm_memory_allocate(device.id, (size_t)plan.workspace_bytes, &workspace), FDM_OK);
        assert_int_equal(tune_data_poison(&data), FDM_OK);
        if (fdm_execute(&plan, &tensors, workspace, (size_t)plan.workspace_bytes, NULL))
            fail_msg("%s", fdm_last_error());
        fdm_memory_release(device.id, workspace);
        if (p->pass == FDM_FORWARD)
            assert_true(rows_that_see(p, &tensors) > 0.5);
    }
    if (look)
        look(&data);
    tune_data_release(&data);
}

#define WITH(p, change) \
    q = p;              \
    change;             \
    check(&q, NULL)

/* A row of a draft sees itself, the root and none behind itself, and not all before it. */
static void look_at_tree(const struct tune_data *data) {
    const fdm_problem *p = data->problem;
    const int64_t words = (p->seqlen_q + 31) / 32;
    const uint32_t *bits = data->memory[TUNE_TREE];
    for (int64_t b = 0; b < (p->varlen ? 1 : p->batch); b++)
        for (int64_t i = 0; i < p->seqlen_q; i++) {
            const uint32_t *row = bits + (b * p->seqlen_q + i) * words;
            int64_t seen = 0;
            assert_true((row[0] & 1) && (row[i / 32] >> i % 32 & 1));
            for (int64_t t = 0; t < 32 * words; t++) {
                seen += row[t / 32] >> t % 32 & 1;
                assert_true(t <= i || !(row[t / 32] >> t % 32 & 1));
            }
            assert_true(i < 4 || seen < i);
        }
}

static void pack(fdm_problem *p) {
    p->varlen = 1;
    p->total_q = 150;
    p->total_k = p->has_cache ? 0 : 220;
}

static void dense_and_packed_tensors_fit(void **state) {
    (void)state;
    for (int packed = 0; packed < 2; packed++) {
        fdm_problem p = problem_of(), q;
        if (packed)
            pack(&p);
        WITH(p, );
        WITH(p, q.has_row_intervals = 1; q.row_ranges = 3; q.row_interval_batch = packed ? 1 : 3;
             q.row_interval_heads = 2);
        WITH(p, q.block_mask_size = 64; q.block_mask_batch = 3; q.block_mask_heads = 4);
        q = p;
        q.has_tree = 1;
        check(&q, look_at_tree);
        WITH(p, q.has_tree = q.has_seqused_q = q.has_seqused_k = 1);
        WITH(p, q.has_seqused_q = 1; q.causal = 1);
        WITH(p, q.has_seqused_k = 1; q.dtype = FDM_BFLOAT16);
        WITH(p, q.value_in_key = 1; q.head_dim_v = 16);
        WITH(p, q.pass = FDM_BACKWARD; q.needs_dq = q.needs_dk = q.needs_dv = q.has_seqused_q = q.has_seqused_k = 1);
        WITH(p, q.pass = FDM_BACKWARD; q.needs_dq = q.needs_dk = q.needs_dv = q.value_in_key = 1; q.head_dim_v = 16);
    }
    fdm_problem p = problem_of(), q;
    p.pass = FDM_BACKWARD;
    p.dtype = FDM_FLOAT16;
    p.needs_dk = p.needs_dv = p.dkv_float32 = 1;
    WITH(p, );
    WITH(p, q.add_dkv = 1);
}

/* ---- caches ---- */

static const int32_t *numbers_of(const struct tune_data *data, enum tune_role role) { return data->memory[role]; }

/* Keys of a sequence after appending. */
static int32_t keys_of(const struct tune_data *data, int64_t b) {
    const fdm_problem *p = data->problem;
    const int32_t *ends = numbers_of(data, TUNE_CU_NEW);
    if (p->has_seqused_k)
        return numbers_of(data, TUNE_USED_K)[b];
    return numbers_of(data, TUNE_CACHE_LENGTHS)[b] + (int32_t)(ends ? ends[b + 1] - ends[b] : p->new_rows / p->batch);
}

/* Every page of a sequence is in the cache and in no other place of a table, and lengths fall to half of the first. */
static void look_at_pages(const struct tune_data *data) {
    const fdm_problem *p = data->problem;
    char *used = calloc((size_t)p->num_pages, 1);
    for (int64_t b = 0; b < p->batch; b++) {
        const int64_t list = p->has_cache_row ? numbers_of(data, TUNE_CACHE_ROW)[b] : b;
        const int64_t first = p->ragged_pages ? numbers_of(data, TUNE_PAGE_START)[list] : list * p->max_pages;
        const int64_t keys = keys_of(data, b);
        assert_in_range(keys, 1, (uintmax_t)p->seqlen_k);
        for (int64_t i = 0; i * p->page_size < keys; i++) {
            const int32_t page = numbers_of(data, TUNE_TABLE)[first + i];
            assert_in_range(page, 0, (uintmax_t)p->num_pages - 1);
            assert_int_equal(used[page]++, 0);
        }
        if (p->has_first_key)
            assert_true(numbers_of(data, TUNE_FIRST_KEY)[b] < keys &&
                        (b == 0 || numbers_of(data, TUNE_FIRST_KEY)[b] > 0));
    }
    if (p->new_rows < 3 * p->batch) {
        assert_true(keys_of(data, 0) <= 2 * keys_of(data, p->batch - 1) + 1);
        assert_true(keys_of(data, 0) > keys_of(data, p->batch - 1));
    }
    free(used);
}

static fdm_problem paged(void) {
    fdm_problem p = problem_of();
    p.seqlen_q = 2;
    p.has_cache = 1;
    p.page_size = 16;
    p.max_pages = 7;
    p.num_pages = 23;
    return p;
}

static void pages_are_each_sequence_s_own(void **state) {
    (void)state;
    for (int packed = 0; packed < 2; packed++)
        for (int ragged = 0; ragged < 2; ragged++)
            for (int rows = 0; rows < 2; rows++)
                for (int more = 0; more < 4; more++) {
                    fdm_problem p = paged();
                    p.ragged_pages = ragged;
                    p.max_pages = ragged ? 22 : 7;
                    p.has_cache_row = rows;
                    p.has_first_key = more == 1;
                    p.new_rows = more == 1 ? 6 : more == 2 ? 4 : 0;
                    p.rotary_dim = more == 2 ? 16 : 0;
                    p.has_seqused_k = more == 3;
                    p.rotary_interleaved = more == 2 && rows;
                    if (packed)
                        pack(&p), p.total_q = 5;
                    check(&p, look_at_pages);
                }
    fdm_problem p = paged(), q;
    p.seqlen_q = 40; /* a prompt is appended */
    p.new_rows = 120;
    p.causal = 1;
    check(&p, look_at_pages);
    p = paged();
    p.num_pages = 9; /* of a pool that is not large enough for the longest */
    p.new_rows = 6;
    check(&p, look_at_pages);
    p = paged();
    WITH(p, q.num_pages = 2); /* fewer than sequences: they share */
    WITH(p, q.has_tree = 1; q.seqlen_q = 33);
    WITH(p, q.value_in_key = 1; q.head_dim_v = 16);
    WITH(p, q.has_row_intervals = 1; q.row_ranges = 2; q.row_interval_batch = 3; q.row_interval_heads = 2);
    WITH(p, q.block_mask_size = 64; q.block_mask_batch = 3; q.block_mask_heads = 2);
    WITH(p, q.has_mask = 1; q.mask_shape[0] = 3; q.mask_shape[3] = 100);
    WITH(p, q.num_pages = 0; q.max_pages = 0; q.seqlen_q = 0);
}

static void caches_without_pages_fit(void **state) {
    (void)state;
    fdm_problem p = problem_of(), q;
    p.seqlen_q = 1;
    p.has_cache = 1;
    p.num_pages = 3;
    WITH(p, );
    WITH(p, q.new_rows = 3; q.rotary_dim = 32);
    WITH(p, q.new_rows = 3; q.has_seqused_k = 1);
    WITH(p, q.num_pages = 5; q.has_cache_row = 1; q.new_rows = 3; q.has_first_key = 1);
    WITH(p, q.num_pages = 2; q.has_cache_row = 1; q.new_rows = 3); /* one sequence has no row */
    WITH(p, q.num_pages = 2; q.has_cache_row = 1);
}

/* New keys that a way does not write are not there from a way before it. */
static void a_cache_is_as_before_for_each_way(void **state) {
    (void)state;
    const fdm_device device = the_cpu();
    struct tune_data data;
    fdm_problem p = paged();
    p.new_rows = 6;
    assert_int_equal(tune_data_make(&device, &p, 16, &data), FDM_OK);
    char *before = malloc(data.place_bytes);
    memcpy(before, data.places, data.place_bytes);
    memset((char *)data.places + data.place_bytes / 2, 0x41, 64);
    assert_int_equal(tune_data_poison(&data), FDM_OK);
    assert_memory_equal(before, data.places, data.place_bytes);
    free(before);
    tune_data_release(&data);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dense_and_packed_tensors_fit),
        cmocka_unit_test(pages_are_each_sequence_s_own),
        cmocka_unit_test(caches_without_pages_fit),
        cmocka_unit_test(a_cache_is_as_before_for_each_way),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
