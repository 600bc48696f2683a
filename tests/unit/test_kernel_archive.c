/* test_kernel_archive.c: archives of compiled kernels: what comes back, what is passed over and what is said; needs no
 * device. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/memory.h"
#include "cuda/archive.h"
#include "machine.h"
#include "system/system.h"

enum { COUNT = 7, HEADER_BYTES = 48, ROW_BYTES = 40, TABLE_END = HEADER_BYTES + COUNT * ROW_BYTES };
static char root[256], cache[300], archive[300];

/* Keys of which three share their first half; major: of the compiler. */
static struct cache_key key_of(int n) { return (struct cache_key){{n / 3, n * 10}, 99}; }
static int32_t major_of(int n) { return n % 2 ? 12 : 13; }

static struct cuda_binary binary_of(int n) {
    const size_t bytes = 300 + (size_t)n * 111;
    struct cuda_binary binary = {memory_allocate(bytes), bytes, {40 + n, 0, 16, 128, 2}, major_of(n)};
    memset(binary.code, 'a' + n, bytes);
    return binary;
}

static long bytes_of(const char *path) {
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    fseek(file, 0, SEEK_END);
    const long bytes = ftell(file);
    fclose(file);
    return bytes;
}

static void make_archive(void) {
    int64_t entries = 0, bytes = 0;
    for (int n = COUNT - 1; n >= 0; n--) {
        const struct cache_key key = key_of(n);
        struct cuda_binary binary = binary_of(n);
        assert_int_equal(cache_store(&key, &binary), 1);
        memory_release(binary.code);
    }
    assert_int_equal(fdm_cache_pack(archive, &entries, &bytes), FDM_OK);
    assert_int_equal(entries, COUNT);
    assert_int_equal(bytes_of(archive), bytes);
}

static int set_up(void **state) {
    (void)state;
    assert_true(machine_make_folder(root, sizeof root));
    snprintf(cache, sizeof cache, "%s/cache", root);
    snprintf(archive, sizeof archive, "%s/all.fdm", root);
    machine_set("FLASH_DMATTN_CACHE_DIR", cache);
    machine_set("FLASH_DMATTN_KERNEL_ARCHIVE", archive);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    return !machine_remove_all(root);
}

static int is_there(struct cache_key key, int32_t max_major, int n) {
    struct cuda_binary binary = {0}, want = binary_of(n);
    const int there = archive_load(&key, "sm_90a", max_major, &binary);
    if (there) {
        assert_int_equal(binary.bytes, want.bytes);
        assert_memory_equal(binary.code, want.code, want.bytes);
        assert_memory_equal(&binary.resources, &want.resources, sizeof want.resources);
        assert_int_equal(binary.compiler_major, major_of(n));
    } else {
        assert_null(binary.code);
    }
    memory_release(binary.code);
    memory_release(want.code);
    return there;
}

static int how_many_are_there(void) {
    int count = 0;
    for (int n = 0; n < COUNT; n++)
        count += is_there(key_of(n), 0, n);
    return count;
}

static void all_entries_come_back(void **state) {
    (void)state;
    make_archive();
    assert_int_equal(how_many_are_there(), COUNT);
    const struct cache_key absent[] = {{{0, 1}, 99}, {{0, 21}, 99}, {{1, 20}, 99}, {{9, 9}, 99}, {{0, 0}, 0}};
    for (size_t i = 0; i + 1 < sizeof absent / sizeof absent[0]; i++)
        assert_int_equal(is_there(absent[i], 0, 0), 0);
    assert_int_equal(is_there(absent[4], 0, 0), 1);                         /* of any compiler */
    assert_int_equal(is_there((struct cache_key){{0, 0}, 12345}, 0, 0), 1); /* another is installed here */
}

static void code_is_not_newer_than_the_driver(void **state) {
    (void)state;
    for (int n = 0; n < COUNT; n++) {
        assert_int_equal(is_there(key_of(n), 13, n), 1);
        assert_int_equal(is_there(key_of(n), 12, n), major_of(n) == 12);
    }
}

/* Of two compilers' code of one kernel the newer comes first, where the driver takes it. */
static void an_older_compilers_code_is_found_behind(void **state) {
    struct cache_key twin = key_of(4);
    struct cuda_binary binary = binary_of(5);
    char path[400];
    int64_t entries;
    (void)state;
    twin.compiler = 150;
    assert_int_equal(cache_store(&twin, &binary), 1);
    memory_release(binary.code);
    assert_int_equal(fdm_cache_pack(archive, &entries, NULL), FDM_OK);
    assert_int_equal(entries, COUNT + 1);
    assert_int_equal(is_there(key_of(4), 13, 4), 1);
    assert_int_equal(is_there(key_of(4), 12, 5), 1);
    assert_int_equal(is_there(key_of(4), 11, 5), 0);
    snprintf(path, sizeof path, "%s/%016llx%016llx-%016llx.cubin", cache, (unsigned long long)twin.half[0],
             (unsigned long long)twin.half[1], (unsigned long long)twin.compiler);
    assert_int_equal(remove(path), 0);
    make_archive();
}

static void put_byte(long place, int change) {
    FILE *file = fopen(archive, "r+b");
    fseek(file, place, SEEK_SET);
    const int byte = fgetc(file);
    fseek(file, place, SEEK_SET);
    fputc(byte ^ change, file);
    fclose(file);
}

/* A byte of header or table: nothing is taken. A byte of an entry: all but that one. A cut: what lies before it. */
static void damage_is_not_used(void **state) {
    (void)state;
    for (long place = 0; place < TABLE_END; place++) {
        put_byte(place, 0x10);
        assert_int_equal(how_many_are_there(), 0);
        put_byte(place, 0x10);
    }
    const long bytes = bytes_of(archive);
    for (long place = TABLE_END; place < bytes; place += 13) {
        put_byte(place, 0x10);
        assert_int_equal(how_many_are_there(), COUNT - 1);
        put_byte(place, 0x10);
    }
    assert_int_equal(how_many_are_there(), COUNT);
    assert_true(machine_cut(archive, bytes - 1));
    assert_int_equal(how_many_are_there(), COUNT - 1);
    for (long size = 0; size < TABLE_END; size += 7) {
        assert_true(machine_cut(archive, size));
        assert_int_equal(how_many_are_there(), 0);
    }
    make_archive();
}

/* What goes to standard error while the archive is asked for one kernel. */
static void says(const char *words) {
    char said[1024] = "", path[300];
    snprintf(path, sizeof path, "%s/said", root);
    FILE *file = fopen(path, "w+b");
    assert_non_null(file);
    const int kept = dup(2);
    dup2(fileno(file), 2);
    (void)is_there(key_of(0), 0, 0);
    dup2(kept, 2);
    close(kept);
    rewind(file);
    const size_t length = fread(said, 1, sizeof said - 1, file);
    fclose(file);
    said[length] = 0;
    if (!words)
        assert_int_equal(length, 0);
    else
        assert_non_null(strstr(said, words));
}

static void other_versions_and_owners_are_passed_over(void **state) {
    (void)state;
    assert_true(machine_let_others_write(archive, 1));
    assert_int_equal(how_many_are_there(), 0);
    assert_true(machine_let_others_write(archive, 0));
    assert_int_equal(how_many_are_there(), COUNT);
    put_byte(8, 1); /* the version's first digit */
    says(NULL);
    machine_set("FLASH_DMATTN_LOG", "1");
    says("is of another version of flash_dmattn");
    says(NULL); /* once a process */
    machine_set("FLASH_DMATTN_LOG", NULL);
    assert_int_equal(how_many_are_there(), 0);
    put_byte(8, 1);
    machine_set("FLASH_DMATTN_KERNEL_ARCHIVE", "/nowhere/at/all.fdm");
    assert_int_equal(how_many_are_there(), 0);
    machine_set("FLASH_DMATTN_KERNEL_ARCHIVE", archive);
}

static void copy(const char *from, const char *to) {
    static char bytes[1 << 16];
    FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
    assert_true(in && out);
    const size_t length = fread(bytes, 1, sizeof bytes, in);
    assert_true(feof(in) && fwrite(bytes, 1, length, out) == length);
    fclose(in);
    assert_int_equal(fclose(out), 0);
}

/* This program has the library inside, so its folder is the library's. Of each architecture there is one archive. */
static void the_archive_beside_the_library_is_read(void **state) {
    char beside[512];
    struct cuda_binary binary = {0};
    const struct cache_key key = key_of(1);
    (void)state;
    assert_true(system_path_of(make_archive, beside, sizeof beside - 32));
    strcpy(strrchr(beside, '/') + 1, "kernels-sm_77.fdm");
    copy(archive, beside);
    machine_set("FLASH_DMATTN_KERNEL_ARCHIVE", NULL);
    assert_int_equal(archive_load(&key, "sm_76", 0, &binary), 0);
    assert_int_equal(archive_load(&key, "sm_77a", 0, &binary), 1);
    memory_release(binary.code);
    assert_int_equal(archive_load(&key, "sm_77", 0, &binary), 1);
    memory_release(binary.code);
    assert_int_equal(remove(beside), 0);
    machine_set("FLASH_DMATTN_KERNEL_ARCHIVE", archive);
}

static void memory_that_is_short_loses_nothing(void **state) {
    (void)state;
    const int64_t before = memory_live();
    for (int n = 1; n < 3; n++) {
        struct cuda_binary binary = {0};
        const struct cache_key key = key_of(2);
        memory_fail_at(n);
        assert_int_equal(archive_load(&key, "sm_90", 0, &binary), 0);
        memory_fail_at(0);
    }
    for (int n = 1; n <= 2 + COUNT + 1; n++) {
        memory_fail_at(n);
        const fdm_status status = fdm_cache_pack(archive, NULL, NULL);
        memory_fail_at(0);
        assert_true(status == FDM_OK || status == FDM_ERROR_OUT_OF_MEMORY);
    }
    make_archive();
    assert_int_equal(how_many_are_there(), COUNT);
    assert_int_equal(memory_live(), before);
}

/* On Windows a path may be divided by '\\' too. */
static void the_archive_lies_where_its_path_says(void **state) {
    static const char two[] = "a\\b";
    const int is_divider = system_last_name(two) == two + 2;
    char path[300];
    int64_t entries;
    (void)state;
    snprintf(path, sizeof path, "%s/other.fdm", root);
    for (char *at = path; *at && is_divider; at++)
        if (*at == '/')
            *at = '\\';
    assert_int_equal(fdm_cache_pack(path, &entries, NULL), FDM_OK);
    assert_int_equal(entries, COUNT);
    snprintf(path, sizeof path, "%s/other.fdm", root);
    assert_int_equal(bytes_of(path), bytes_of(archive));
    assert_int_equal(remove(path), 0);
}

static void packing_says_why_not(void **state) {
    int64_t entries = 5, bytes = 5;
    char empty[300];
    struct system_folder folder;
    struct system_file_facts facts;
    (void)state;
    assert_int_equal(fdm_cache_pack(NULL, NULL, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_int_equal(fdm_cache_pack("", NULL, NULL), FDM_ERROR_INVALID_ARGUMENT);
    assert_int_equal(fdm_cache_pack("/nowhere/at/all.fdm", &entries, &bytes), FDM_ERROR_SYSTEM);
    assert_non_null(strstr(fdm_last_error(), "/nowhere/at/all.fdm"));
    snprintf(empty, sizeof empty, "%s/empty", root);
    system_make_folders(empty);
    assert_true(system_open_folder(&folder, empty, &facts));
    system_close_folder(&folder);
    machine_set("FLASH_DMATTN_CACHE_DIR", empty);
    assert_int_equal(fdm_cache_pack(archive, &entries, &bytes), FDM_ERROR_UNSUPPORTED);
    assert_int_equal(entries, 0);
    assert_int_equal(bytes, 0);
    machine_set("FLASH_DMATTN_CACHE_DIR", cache);
    assert_int_equal(how_many_are_there(), COUNT); /* the older archive stands */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_entries_come_back),
        cmocka_unit_test(code_is_not_newer_than_the_driver),
        cmocka_unit_test(an_older_compilers_code_is_found_behind),
        cmocka_unit_test(damage_is_not_used),
        cmocka_unit_test(other_versions_and_owners_are_passed_over),
        cmocka_unit_test(the_archive_beside_the_library_is_read),
        cmocka_unit_test(memory_that_is_short_loses_nothing),
        cmocka_unit_test(the_archive_lies_where_its_path_says),
        cmocka_unit_test(packing_says_why_not),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
