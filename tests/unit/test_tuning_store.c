/* test_tuning_store.c: the store of measured choices: classes' edges, damage, owners, races, a folder that cannot be
 * written; needs no device. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "machine.h"
#include "tuning/model.h"
#include "tuning/store.h"

static char folder[256];

static int set_up(void **state) {
    char path[300];
    (void)state;
    snprintf(path, sizeof path, "%s/sub", folder);
    machine_set("FLASH_DMATTN_CACHE_DIR", path);
    tuning_forget_memory();
    return 0;
}
static int tear_down(void **state) {
    (void)state;
    return !machine_remove_all(folder);
}

static struct tuning_entry entry_of(const char *key, double seconds) {
    struct tuning_entry e = {.date = 1700000000, .num_best = 2, .chosen = 0};
    snprintf(e.key, sizeof e.key, "%s", key);
    snprintf(e.maker, sizeof e.maker, "me");
    e.rule = (struct tuning_choice){"mma.forward", "MMA_A", 1.25e-3, 1.2e-3, 1.3e-3, 15, 1};
    e.best[0] = (struct tuning_choice){"mma.forward", "MMA_B", seconds, seconds, seconds, 15, 1};
    e.best[1] = e.rule;
    return e;
}

/* Of the file, since memory is emptied before. */
static int is_kept(const char *key, const char *maker, double seconds) {
    struct tuning_entry found;
    tuning_forget_memory();
    if (!tuning_find(key, maker, &found))
        return 0;
    assert_string_equal(found.key, key);
    assert_float_equal(found.best[0].seconds, seconds, 1e-12);
    return 1;
}

static int remember_name(void *argument, const struct tuning_entry *entry, const char *name, const char *why) {
    (void)entry, (void)why;
    snprintf(argument, 300, "%s/sub/tuned/%s", folder, name);
    return 1;
}
static void file_path(char path[300]) {
    *path = 0;
    tuning_visit(remember_name, path);
    assert_true(*path != 0);
}

/* ---- classes ---- */

static void edges_are_upper_and_rise(void **state) {
    (void)state;
    static const int64_t lengths[][2] = {{0, 0},       {1, 1},       {8, 8},       {9, 9},       {16, 16},
                                         {17, 18},     {300, 320},   {1024, 1024}, {1025, 1152}, {4095, 4096},
                                         {4096, 4096}, {4097, 5120}, {5120, 5120}, {8192, 8192}, {8193, 10240}};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++)
        assert_int_equal(tuning_length_edge(lengths[i][0]), lengths[i][1]);
    int64_t last = 0;
    for (int64_t n = 1; n < 70000; n++) {
        const int64_t edge = tuning_length_edge(n), batch = tuning_batch_edge(n);
        assert_true(edge >= n && edge >= last && tuning_length_edge(edge) == edge); /* a class' edge is in it */
        assert_true(8 * (edge - n) < (n > 4096 ? 2 : 1) * n + 8);
        assert_true(batch >= n && 4 * (batch - n) < n + 4 && tuning_batch_edge(batch) == batch);
        last = edge;
    }
    assert_true(tuning_length_edge(INT64_MAX / 4) >= INT64_MAX / 4);
    assert_true(tuning_length_edge(INT64_MAX / 4 + 1) == INT64_MAX && tuning_length_edge(INT64_MAX) == INT64_MAX);
    assert_true(tuning_batch_edge(INT64_MAX / 4) <= INT64_MAX / 2 && tuning_batch_edge(INT64_MAX) == INT64_MAX);
}

static void keys_say_what_matters(void **state) {
    (void)state;
    fdm_device device = {.struct_bytes = sizeof device};
    char key[TUNING_KEY_BYTES], other[TUNING_KEY_BYTES];
    fdm_problem p = fdm_problem_default(), q;
    assert_int_equal(fdm_device_from_name("cpu", &device), FDM_OK);
    p.window_left = INT64_MAX - 1; /* the widest windows that a caller can name */
    p.window_right = INT64_MAX;
    assert_int_equal(tuning_key(&device, &p, 1, key), FDM_OK);
    p.window_left = p.window_right = -1;
    p.seqlen_q = p.seqlen_k = 1000;
    assert_int_equal(tuning_key(&device, &p, 2, key), FDM_OK);
#define DIFFERS(change, differs)                                 \
    q = p;                                                       \
    change;                                                      \
    assert_int_equal(tuning_key(&device, &q, 2, other), FDM_OK); \
    if (differs != (strcmp(key, other) != 0))                    \
    fail_msg("%s: %s", #change, other)
    DIFFERS(q.seqlen_q = 1024, 0);
    DIFFERS(q.seqlen_q = 1025, 1);
    DIFFERS(q.seqlen_k = 961, 0);
    DIFFERS(q.seqlen_k = 960, 1);
    DIFFERS(q.batch = 2, 1);
    DIFFERS(q.head_dim = 80, 1);
    DIFFERS(q.head_dim_v = 80, 1);
    DIFFERS(q.dtype = FDM_BFLOAT16, 1);
    DIFFERS(q.pass = FDM_BACKWARD, 1);
    DIFFERS(q.causal = 1, 1);
    DIFFERS(q.window_left = 100, 1);
    DIFFERS(q.softcap = 3, 1);
    DIFFERS(q.has_mask = 1, 1);
    DIFFERS(q.has_bias = 1, 1);
    DIFFERS(q.has_intervals = 1, 1);
    DIFFERS(q.has_sink = 1, 1);
    DIFFERS(q.needs_lse = 0, 0);
    DIFFERS(q.aligned = 0, 1);
    DIFFERS(q.keys_mappable = 0, 1);
    DIFFERS(q.softmax_scale = 3, 0);
    DIFFERS(q.deterministic = 1, 0); /* which looks at no choice */
    DIFFERS(q.has_row_intervals = 1, 1);
    DIFFERS(q.block_mask_size = 64, 1);
    DIFFERS(q.has_tree = 1, 1);
    DIFFERS(q.has_seqused_q = 1, 1);
    DIFFERS(q.has_seqused_k = 1, 1);
    DIFFERS(q.value_in_key = 1, 1);
    DIFFERS(q.dkv_float32 = 1, 1);
    DIFFERS(q.has_cache = 1, 1);
    assert_int_equal(tuning_key(&device, &p, 1, other), FDM_OK);
    assert_string_not_equal(key, other);
}

/* A choice for the classes of a cache: none of them is another's. */
static void keys_say_what_a_cache_has(void **state) {
    (void)state;
    fdm_device device = {.struct_bytes = sizeof device};
    char key[TUNING_KEY_BYTES], other[TUNING_KEY_BYTES];
    fdm_problem p = fdm_problem_default(), q;
    assert_int_equal(fdm_device_from_name("cpu", &device), FDM_OK);
    p.batch = 4;
    p.seqlen_q = 1;
    p.seqlen_k = 512;
    p.has_cache = 1;
    p.page_size = 16;
    p.max_pages = 32;
    p.num_pages = 128;
    p.new_rows = 4;
    p.rotary_dim = 32;
    assert_int_equal(tuning_key(&device, &p, 2, key), FDM_OK);
    DIFFERS(q.page_size = 0, 1);
    DIFFERS(q.page_size = 64, 1);
    DIFFERS(q.num_pages = 4000, 0); /* of a pool that others use too */
    DIFFERS(q.max_pages = 40, 0);   /* what seqlen_k leaves of them counts */
    DIFFERS(q.ragged_pages = 1, 1);
    DIFFERS(q.has_first_key = 1, 1);
    DIFFERS(q.has_cache_row = 1, 1);
    DIFFERS(q.has_seqused_k = 1, 1);
    DIFFERS(q.new_rows = 0, 1);
    DIFFERS(q.new_rows = 8, 1);
    DIFFERS(q.new_rows = 3, 0); /* a sequence has one at most still */
    DIFFERS(q.rotary_dim = 0, 1);
    DIFFERS(q.rotary_interleaved = 1, 1);
    DIFFERS(q.value_in_key = 1, 1);
    DIFFERS(q.has_tree = 1, 1);
    DIFFERS(q.varlen = 1; q.total_q = 4, 1);
}

/* ---- lines ---- */

static void a_line_comes_back_whole(void **state) {
    (void)state;
    char line[TUNING_LINE_BYTES];
    struct tuning_entry want = entry_of("class", 1e-3), have;
    tuning_write_line(&want, line);
    const size_t length = strlen(line);
    assert_int_equal(tuning_read_line(line, length, &have), 1);
    assert_memory_equal(&have, &want, sizeof want);
    for (size_t i = 0; i < length; i++) { /* one bit anywhere, a cut anywhere */
        line[i] ^= 1;
        assert_int_equal(tuning_read_line(line, length, &have), 0);
        line[i] ^= 1;
        assert_int_equal(tuning_read_line(line, i, &have), 0);
    }
    assert_int_equal(tuning_read_line(line, length, &have), 1);
}

/* Whole and right by its checksum, but nothing that a tuner keeps. */
static void nonsense_with_a_checksum_is_not_read(void **state) {
    (void)state;
    char line[TUNING_LINE_BYTES];
    struct tuning_entry e, have;
#define REFUSES(change)                              \
    e = entry_of("class", 1e-3);                     \
    change;                                          \
    tuning_write_line(&e, line);                     \
    if (tuning_read_line(line, strlen(line), &have)) \
    fail_msg("%s is read", #change)
    REFUSES(e.chosen = 2);
    REFUSES(e.chosen = -2);
    REFUSES(e.best[0].seconds = -1);
    REFUSES(e.best[0].num_samples = 0);
    REFUSES(e.best[1].num_threads = 0);
    REFUSES(*e.key = 0);
    REFUSES(*e.rule.kernel = 0);
}

/* ---- files ---- */

static void an_entry_comes_back(void **state) {
    (void)state;
    const struct tuning_entry e = entry_of("one", 1e-3), newer = entry_of("one", 0.5e-3);
    const uint32_t before = tuning_generation();
    assert_int_equal(is_kept("one", "me", 1e-3), 0);
    assert_int_equal(tuning_keep(&e), 1);
    assert_true(tuning_generation() != before);
    assert_int_equal(is_kept("one", "me", 1e-3), 1);
    assert_int_equal(is_kept("other", "me", 1e-3), 0);
    assert_int_equal(is_kept("one", "another version", 1e-3), 0);
    assert_int_equal(tuning_keep(&newer), 1); /* the last one wins */
    assert_int_equal(is_kept("one", "me", 0.5e-3), 1);
    assert_int_equal(tuning_forget_files(), 1);
    assert_int_equal(is_kept("one", "me", 0.5e-3), 0);
}

static void damage_is_not_used_and_heals(void **state) {
    (void)state;
    char path[300];
    const struct tuning_entry e = entry_of("one", 1e-3);
    for (int kind = 0; kind < 4; kind++) {
        assert_int_equal(tuning_keep(&e), 1);
        file_path(path);
        if (kind == 0) {
            assert_true(machine_cut(path, 200));
        } else if (kind == 1) {
            assert_true(machine_cut(path, 0));
        } else {
            FILE *file = fopen(path, kind == 2 ? "r+b" : "ab");
            assert_int_equal(fseek(file, kind == 2 ? 100 : 0, kind == 2 ? SEEK_SET : SEEK_END), 0);
            fputs("x\n", file);
            fclose(file);
        }
        assert_int_equal(is_kept("one", "me", 1e-3), 0);
        assert_int_equal(tuning_keep(&e), 1);
        assert_int_equal(is_kept("one", "me", 1e-3), 1);
    }
}

/* A file, the folder, or the folder above that others may write is no entry, and nothing goes into such a folder. */
static void only_its_owner_is_trusted(void **state) {
    (void)state;
    char path[300], tuned[300], sub[300];
    const struct tuning_entry e = entry_of("one", 1e-3);
    snprintf(sub, sizeof sub, "%s/sub", folder);
    snprintf(tuned, sizeof tuned, "%s/sub/tuned", folder);
    assert_int_equal(tuning_keep(&e), 1);
    file_path(path);
    const char *const places[] = {path, tuned, sub};
    for (int i = 0; i < 3; i++) {
        assert_true(machine_let_others_write(places[i], 1));
        assert_int_equal(is_kept("one", "me", 1e-3), 0);
        if (i > 0)
            assert_int_equal(tuning_keep(&e), 0);
        assert_true(machine_let_others_write(places[i], 0));
        assert_int_equal(is_kept("one", "me", 1e-3), 1);
    }
}

/* Nothing can be written: it lies in memory, and the call goes on. */
static void a_folder_that_cannot_be_made(void **state) {
    (void)state;
    char path[300];
    struct tuning_entry found;
    const struct tuning_entry e = entry_of("one", 1e-3);
    snprintf(path, sizeof path, "%s/file", folder);
    FILE *file = fopen(path, "wb");
    fclose(file);
    machine_set("FLASH_DMATTN_CACHE_DIR", path);
    assert_int_equal(tuning_keep(&e), 0);
    assert_int_equal(tuning_find("one", "me", &found), 1);
    tuning_forget_memory();
    assert_int_equal(tuning_find("one", "me", &found), 0);
    set_up(NULL);
}

/* ---- several at once ---- */

static void *keep_often(void *argument) {
    const double seconds = *(const double *)argument;
    for (int i = 0; i < 200; i++) {
        struct tuning_entry found;
        const struct tuning_entry e = entry_of(i % 2 ? "one" : "two", seconds);
        tuning_keep(&e);
        if (i % 8 == 0)
            tuning_forget_memory();
        if (tuning_find(e.key, "me", &found) && found.best[0].seconds != 1e-3 && found.best[0].seconds != 2e-3)
            return argument;
    }
    return NULL;
}

static void threads_see_whole_entries(void **state) {
    (void)state;
    static double seconds[] = {1e-3, 2e-3, 1e-3, 2e-3};
    pthread_t threads[4];
    void *wrong;
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, keep_often, &seconds[i]), 0);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pthread_join(threads[i], &wrong), 0);
        assert_null(wrong);
    }
}

static void processes_see_whole_entries(void **state) {
    (void)state;
    char path[300];
    const struct tuning_entry e = entry_of("one", 1e-3);
    assert_int_equal(machine_run_myself("keep", 4), 4);
    assert_true(is_kept("two", "me", 1e-3));
    assert_int_equal(tuning_keep(&e), 1);
    file_path(path);
}

/* model_find() halves the table. */
static void rows_of_the_model_rise(void **state) {
    (void)state;
    for (int32_t t = 0; t < num_model_tables; t++)
        for (int32_t i = 1; i < model_tables[t].num_rows; i++)
            if (strcmp(model_tables[t].rows[i - 1].name, model_tables[t].rows[i].name) >= 0)
                fail_msg("%s comes before %s", model_tables[t].rows[i - 1].name, model_tables[t].rows[i].name);
}

int main(int argc, char **argv) {
    static double seconds = 1e-3;
    if (argc > 1 && strcmp(argv[1], "keep") == 0)
        return keep_often(&seconds) != NULL;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_of_the_model_rise),
        cmocka_unit_test(edges_are_upper_and_rise),
        cmocka_unit_test(keys_say_what_matters),
        cmocka_unit_test(keys_say_what_a_cache_has),
        cmocka_unit_test(a_line_comes_back_whole),
        cmocka_unit_test(nonsense_with_a_checksum_is_not_read),
        cmocka_unit_test_setup(an_entry_comes_back, set_up),
        cmocka_unit_test_setup(damage_is_not_used_and_heals, set_up),
        cmocka_unit_test_setup(only_its_owner_is_trusted, set_up),
        cmocka_unit_test_setup(a_folder_that_cannot_be_made, set_up),
        cmocka_unit_test_setup(threads_see_whole_entries, set_up),
        cmocka_unit_test_setup(processes_see_whole_entries, set_up),
    };
    if (!machine_make_folder(folder, sizeof folder))
        return 1;
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
