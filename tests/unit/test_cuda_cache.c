/* test_cuda_cache.c: entries of the kernel cache, and what becomes of damaged ones; needs no device. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "cuda/cache.h"
#include "gpu/splits.h"
#include "machine.h"

static char folder[256];
static const struct cache_key key = {{0x1234, 0x5678}, 0x99}, other = {{0x1234, 0x5679}, 0x99};

static struct cuda_binary make_binary(unsigned char first) {
    enum { BYTES = 70000 };
    struct cuda_binary binary = {memory_allocate(BYTES), BYTES, {40, 0, 16, 128, 2}, 13};
    for (int i = 0; i < BYTES; i++)
        ((unsigned char *)binary.code)[i] = (unsigned char)(first + i * 7);
    return binary;
}

static void entry_path(char *path, size_t size) {
    snprintf(path, size, "%s/sub/%016llx%016llx-%016llx.cubin", folder, (unsigned long long)key.half[0],
             (unsigned long long)key.half[1], (unsigned long long)key.compiler);
}

static int set_up(void **state) {
    char path[300];
    (void)state;
    snprintf(path, sizeof path, "%s/sub", folder); /* made by the first entry */
    machine_set("FLASH_DMATTN_CACHE_DIR", path);
    return 0;
}
static int tear_down(void **state) {
    (void)state;
    return !machine_remove_all(folder);
}

static int is_there(const struct cache_key *wanted) {
    struct cuda_binary binary = {0}, want = make_binary(3);
    int there = cache_load(wanted, 0, &binary);
    if (there) {
        assert_int_equal(binary.bytes, want.bytes);
        assert_memory_equal(binary.code, want.code, want.bytes);
        assert_memory_equal(&binary.resources, &want.resources, sizeof want.resources);
    }
    memory_release(binary.code);
    memory_release(want.code);
    return there;
}

static void store(void) {
    struct cuda_binary binary = make_binary(3);
    cache_store(&key, &binary);
    memory_release(binary.code);
}

static void an_entry_comes_back_whole(void **state) {
    (void)state;
    assert_int_equal(is_there(&key), 0);
    store();
    assert_int_equal(is_there(&key), 1);
    assert_int_equal(is_there(&other), 0);
}

/* One byte anywhere, a cut anywhere, more bytes, an entry of another key: none is used, and the next store heals it. */
static void damage_is_not_used(void **state) {
    (void)state;
    char path[400], moved[400];
    entry_path(path, sizeof path);
    const long places[] = {0, 9, 25, 33, 41, 60, 71, 5000, 70000};
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        store();
        FILE *file = fopen(path, "r+b");
        fseek(file, places[i], SEEK_SET);
        int byte = fgetc(file);
        fseek(file, places[i], SEEK_SET);
        fputc(byte ^ 0x20, file);
        fclose(file);
        assert_int_equal(is_there(&key), 0);
    }
    const long cuts[] = {0, 1, 50, 1000, 69999};
    for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++) {
        store();
        assert_true(machine_cut(path, cuts[i]));
        assert_int_equal(is_there(&key), 0);
    }
    store();
    FILE *file = fopen(path, "ab");
    fputc(0, file);
    fclose(file);
    assert_int_equal(is_there(&key), 0);
    store();
    assert_int_equal(is_there(&key), 1);
    snprintf(moved, sizeof moved, "%s/sub/%016llx%016llx-%016llx.cubin", folder, (unsigned long long)other.half[0],
             (unsigned long long)other.half[1], (unsigned long long)other.compiler);
    assert_int_equal(rename(path, moved), 0);
    assert_int_equal(is_there(&other), 0);
    assert_int_equal(remove(moved), 0);
    assert_null(fopen(path, "rb"));
}

/* Where no compiler is known: the code of any, but of none that is newer than the driver. */
static void any_compilers_entry_will_do(void **state) {
    (void)state;
    const struct cache_key any = {{key.half[0], key.half[1]}, 0}, any_other = {{other.half[0], other.half[1]}, 0};
    const struct cache_key newer = {{key.half[0], key.half[1]}, 0x9a};
    struct cuda_binary binary = {0};
    store();
    assert_int_equal(is_there(&any), 1);
    assert_int_equal(is_there(&any_other), 0);
    assert_int_equal(is_there(&newer), 0); /* that compiler's own is not there */
    assert_int_equal(cache_load(&any, 12, &binary), 0);
    assert_null(binary.code);
    assert_int_equal(cache_load(&any, 13, &binary), 1);
    assert_int_equal(binary.compiler_major, 13);
    memory_release(binary.code);
}

static const char racer[] = "race";
/* What each process does. What is there while others write is whole. */
static int race(void) {
    for (int n = 0; n < 20; n++) {
        store();
        (void)is_there(&key);
    }
    return !is_there(&key);
}
static void processes_may_race(void **state) {
    (void)state;
    assert_int_equal(machine_run_myself(racer, 8), 8);
    assert_int_equal(is_there(&key), 1);
}

/* A folder that cannot be made, or is a file, is no error: there is just no entry. */
static void a_folder_that_cannot_be_written(void **state) {
    (void)state;
    char path[300], below[320];
    snprintf(path, sizeof path, "%s/file", folder);
    snprintf(below, sizeof below, "%s/cache", path);
    fclose(fopen(path, "wb"));
    const char *const places[] = {below, path, "/dev/null/cache"};
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        machine_set("FLASH_DMATTN_CACHE_DIR", places[i]);
        store();
        assert_int_equal(is_there(&key), 0);
    }
    set_up(NULL);
}

static int ignored(const char *words) {
    fdm_cache_info info = {.struct_bytes = sizeof info};
    assert_int_equal(fdm_cache_query(&info), FDM_OK);
    if (words)
        assert_non_null(strstr(info.ignored, words));
    else
        assert_string_equal(info.ignored, "");
    return (int)info.num_ignored;
}

/* An entry that others may write is ignored, and replaced by one of the user's; of such a folder nothing is read and
 * nothing is written to it. */
static void only_its_owner_is_trusted(void **state) {
    (void)state;
    char path[400], sub[300];
    const char *may = "may be written by others than its owner";
    entry_path(path, sizeof path);
    snprintf(sub, sizeof sub, "%s/sub", folder);
    store();
    assert_int_equal(ignored(NULL), 0);
    assert_true(machine_let_others_write(path, 1));
    assert_int_equal(is_there(&key), 0);
    assert_int_equal(ignored(may), 1);
    store();
    assert_int_equal(is_there(&key), 1);
    assert_int_equal(ignored(NULL), 0);
    assert_true(machine_let_others_write(sub, 1));
    assert_int_equal(is_there(&key), 0);
    assert_int_equal(ignored(may), 1);
    assert_int_equal(remove(path), 0);
    store();
    assert_null(fopen(path, "rb"));
    assert_true(machine_let_others_write(sub, 0));
    store();
    assert_int_equal(is_there(&key), 1);
    assert_int_equal(ignored(NULL), 0);
}

/* ---- keys ---- */

enum { KEYS_MAX = 256, OPTIONS_MAX = 8 };

/* Everything that machine code depends on. */
struct ingredients {
    struct cuda_compiler compiler;
    char arch[16], names[CUDA_CONSTANTS_MAX][24];
    struct cuda_source source;
    struct cuda_kernel_request request;
    const char *options[OPTIONS_MAX];
};

static void gather(struct ingredients *i) {
    memset(i, 0, sizeof *i);
    snprintf(i->compiler.path, sizeof i->compiler.path, "/lib/libnvrtc.so.13");
    snprintf(i->compiler.identity, sizeof i->compiler.identity, "/lib/libnvrtc.so.13 1000 2000");
    snprintf(i->arch, sizeof i->arch, "sm_90");
    i->source = *cuda_source_find("families/mma/forward/mma_forward.cu");
    i->request = (struct cuda_kernel_request){
        .file = i->source.name, .entry = "mma_forward", .num_constants = CUDA_CONSTANTS_MAX};
    for (int32_t n = 0; n < CUDA_CONSTANTS_MAX; n++) {
        snprintf(i->names[n], sizeof i->names[n], "CONSTANT_%d", n);
        i->request.constants[n] = (struct cuda_constant){i->names[n], 64};
    }
    memcpy(i->options, cuda_compile_options, 4 * sizeof *i->options);
    assert_null(i->options[3]);
}

static struct cache_key keys[KEYS_MAX];
static int32_t num_keys;

/* One more key, which differs from all before it, in each half and not by the other alone. `by_compiler`: in the
 * compiler's part instead. */
static void expect_new(const struct ingredients *i, int by_compiler, const char *what, int32_t number) {
    const struct cache_key made = cache_key_of(&i->compiler, i->arch, &i->source, &i->request, i->options);
    for (int32_t n = 0; n < num_keys; n++) {
        const int same_half = made.half[0] == keys[n].half[0] || made.half[1] == keys[n].half[1];
        if (by_compiler ? made.compiler == keys[n].compiler : same_half)
            fail_msg("%s %d is not in the key", what, number);
    }
    assert_true(num_keys < KEYS_MAX);
    if (!by_compiler)
        keys[num_keys++] = made;
}

static void keys_have_each_constant(void **state) {
    (void)state;
    struct ingredients i;
    num_keys = 0;
    gather(&i);
    expect_new(&i, 0, "nothing", 0);
    for (int32_t n = 0; n < CUDA_CONSTANTS_MAX; n++) {
        i.request.constants[n].value = 65;
        expect_new(&i, 0, "the value of constant", n);
        i.request.constants[n].value = 64 + (1ll << 32);
        expect_new(&i, 0, "the upper half of constant", n);
        i.request.constants[n].value = 64;
        i.names[n][0] = 'X';
        expect_new(&i, 0, "the name of constant", n);
        i.names[n][0] = 'C';
    }
    i.request.num_constants--;
    expect_new(&i, 0, "the number of constants", 0);
}

static void keys_have_everything_else(void **state) {
    (void)state;
    struct ingredients i;
    num_keys = 0;
    gather(&i);
    expect_new(&i, 0, "nothing", 0);
    i.request.entry = "mma_forwards";
    expect_new(&i, 0, "the entry", 0);
    gather(&i);
    i.request.file = "families/mma/forward_d1024/mma_forward_d1024.cu";
    expect_new(&i, 0, "the file", 0);
    for (int32_t half = 0; half < 2; half++) {
        gather(&i);
        i.source.closure[half] ^= 1ull << 63;
        const struct cache_key made = cache_key_of(&i.compiler, i.arch, &i.source, &i.request, i.options);
        assert_true(made.half[half] != keys[0].half[half]); /* which has this half of the closure */
    }
    static const char *const arches[] = {"sm_80", "sm_90a", "sm_100", "sm_9"};
    for (int32_t n = 0; n < 4; n++) {
        gather(&i);
        snprintf(i.arch, sizeof i.arch, "%s", arches[n]);
        expect_new(&i, 0, "the architecture", n);
    }
    for (int32_t n = 0; n < 3; n++) {
        gather(&i);
        i.options[n] = "--fmad=false";
        expect_new(&i, 0, "option", n);
        gather(&i);
        memmove(&i.options[n], &i.options[n + 1], (size_t)(3 - n) * sizeof *i.options);
        expect_new(&i, 0, "lacking option", n);
    }
    gather(&i);
    i.options[3] = "--maxrregcount=32";
    expect_new(&i, 0, "one more option", 0);
}

/* The compiler's part is its own: without a compiler the rest is looked for alone. */
static void keys_have_the_compiler(void **state) {
    (void)state;
    static const char *const identities[] = {"/lib/libnvrtc.so.12 1000 2000", "/lib/libnvrtc.so.13 1001 2000",
                                             "/lib/libnvrtc.so.13 1000 2001"};
    struct ingredients i;
    num_keys = 0;
    gather(&i);
    expect_new(&i, 0, "nothing", 0);
    for (int32_t n = 0; n < 3; n++) {
        snprintf(i.compiler.identity, sizeof i.compiler.identity, "%s", identities[n]);
        expect_new(&i, 1, "the compiler's path, size or time", n);
        const struct cache_key made = cache_key_of(&i.compiler, i.arch, &i.source, &i.request, i.options);
        assert_memory_equal(made.half, keys[0].half, sizeof made.half);
    }
    const struct cache_key any = cache_key_of(NULL, i.arch, &i.source, &i.request, i.options);
    assert_memory_equal(any.half, keys[0].half, sizeof any.half);
    assert_true(any.compiler == 0 && keys[0].compiler != 0);
}

/* What a launch needs is no part of the code. */
static void keys_have_nothing_more(void **state) {
    (void)state;
    struct ingredients i;
    gather(&i);
    const struct cache_key before = cache_key_of(&i.compiler, i.arch, &i.source, &i.request, i.options);
    i.request.shared_bytes = i.request.cluster = i.request.threads = i.request.spill_bytes_max = 77;
    const struct cache_key after = cache_key_of(&i.compiler, i.arch, &i.source, &i.request, i.options);
    assert_memory_equal(&before, &after, sizeof before);
    assert_true(i.source.num_includes >= 5);
    assert_null(cuda_source_find("families/mma/nothing.cu"));
}

/* Where NVRTC is installed, a kernel compiles for a device that is not there, and a wrong constant is a sentence. */
static void a_kernel_compiles_without_a_device(void **state) {
    (void)state;
    char path[1024];
    if (fdm_compiler_path(path, sizeof path)) {
        print_message("not covered: %s\n", fdm_last_error());
        return;
    }
    const fdm_problem problem = fdm_problem_default();
    struct cuda_kernel_request request;
    combine_splits_request(&problem, &request);
    struct cuda_resources resources;
    fdm_status status = cuda_compile_only("sm_90", &request, &resources);
    if (status &&
        strstr(fdm_last_error(), "libnvrtc-builtins")) { /* under sanitizers it does not find its own library */
        print_message("not covered: %s\n", fdm_last_error());
        return;
    }
    assert_int_equal(status, FDM_OK);
    assert_in_range(resources.registers, 10, 128);
    assert_int_equal(resources.spill_bytes, 0);
    request.num_constants = 0;
    request.file = "families/mma/decode/mma_decode.cu";
    assert_int_equal(cuda_compile_only("sm_90", &request, &resources), FDM_ERROR_INTERNAL);
    assert_non_null(strstr(fdm_last_error(), "mma_decode.cu"));
    assert_non_null(strstr(fdm_last_error(), "error"));
    assert_int_equal(cuda_compile_only("sm_1", &request, &resources), FDM_ERROR_SYSTEM);
    assert_non_null(strstr(fdm_last_error(), "does not know sm_1"));
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], racer) == 0)
        return race();
    if (!machine_make_folder(folder, sizeof folder))
        return 2;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_entry_comes_back_whole),
        cmocka_unit_test(damage_is_not_used),
        cmocka_unit_test(any_compilers_entry_will_do),
        cmocka_unit_test(processes_may_race),
        cmocka_unit_test(a_folder_that_cannot_be_written),
        cmocka_unit_test(only_its_owner_is_trusted),
        cmocka_unit_test(keys_have_each_constant),
        cmocka_unit_test(keys_have_everything_else),
        cmocka_unit_test(keys_have_the_compiler),
        cmocka_unit_test(keys_have_nothing_more),
        cmocka_unit_test(a_kernel_compiles_without_a_device),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
