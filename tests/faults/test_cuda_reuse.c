/* test_cuda_reuse.c: kernels that are there already: for other threads while one compiles, without a compiler, and in a
 * cache that trusts only its owner and keeps to its limit. Driver and compiler are pretended. */
#define _GNU_SOURCE /* pthread_attr_getstacksize beside the linker's --wrap */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/memory.h"
#include "cuda/compiler.h"
#include "cuda/cuda.h"
#include "cuda_call.h"
#include "scenario.h"

/* ---- system calls that are looked at (the linker's --wrap) ---- */

static size_t smallest_stack = SIZE_MAX;
static char linkers_compiler[300]; /* what the dynamic linker finds under NVRTC's name */
static atomic_int times_opened;

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *), void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *), void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *), void *argument) {
    size_t bytes = 0;
    if (attributes && pthread_attr_getstacksize(attributes, &bytes) == 0 && bytes < smallest_stack)
        smallest_stack = bytes;
    return __real_pthread_create(thread, attributes, body, argument);
}

void *__real_dlopen(const char *name, int flags);
void *__wrap_dlopen(const char *name, int flags);
void *__wrap_dlopen(const char *name, int flags) {
    const int compiler = name && strstr(name, "nvrtc") && !(flags & RTLD_NOLOAD);
    if (compiler && *linkers_compiler && strcmp(name, "libnvrtc.so.13") == 0)
        name = linkers_compiler;
    times_opened += compiler;
    return __real_dlopen(name, flags);
}

/* ---- compiling once, and waiting for nothing else ---- */

struct request {
    int32_t device, number;
    fdm_status status;
    char sentence[512];
};
static void *get_in_thread(void *argument) {
    struct request *request = argument;
    request->status = get_kernel(request->device, request->number);
    snprintf(request->sentence, sizeof request->sentence, "%s", fdm_last_error());
    return NULL;
}
static pthread_t start(struct request *request) {
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, get_in_thread, request), 0);
    return thread;
}
static void until_held(int64_t programs) {
    while (fake_compiler()->num_held() < programs)
        usleep(1000);
}

/* While a kernel is compiled, others come from the disk and from the compiler, on this device and on another. */
static void nobody_waits_for_other_kernels(void) {
    struct request slow = {0, 2, FDM_ERROR_INTERNAL, ""};
    use_fake_compiler();
    assert_int_equal(get_kernel(0, 1), FDM_OK);
    fake_compiler()->hold("-DNUMBER=2");
    const pthread_t thread = start(&slow);
    until_held(1);
    assert_int_equal(get_kernel(1, 1), FDM_OK);
    assert_int_equal(get_kernel(0, 3), FDM_OK);
    assert_int_equal(cuda_call_once(CALL_DECODE, 1, NULL), FDM_OK);
    assert_int_equal(fake_compiler()->num_held(), 1);
    fake_compiler()->hold("");
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(slow.status, FDM_OK);
    assert_int_equal(fake_compiler()->num_compiled(), 5);
    assert_int_equal(memory_live(), fake_driver()->live().modules);
}

/* Whoever needs what is being compiled waits for it; it is loaded once on each device. */
static void one_kernel_is_compiled_once(void) {
    enum { THREADS = 6 };
    struct request requests[THREADS];
    pthread_t threads[THREADS];
    use_fake_compiler();
    fake_compiler()->hold("-DNUMBER=2");
    for (int i = 0; i < THREADS; i++) {
        requests[i] = (struct request){i % 2, 2, FDM_ERROR_INTERNAL, ""};
        threads[i] = start(&requests[i]);
    }
    until_held(1);
    usleep(20000);
    assert_int_equal(fake_compiler()->num_held(), 1);
    fake_compiler()->hold("");
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_int_equal(requests[i].status, FDM_OK);
    }
    assert_int_equal(fake_compiler()->num_compiled(), 1);
    assert_int_equal(fake_driver()->count("cuModuleLoadData"), 2);
    assert_in_range(memory_live(), 2, 3); /* a record for each device, and the code where it is on no disk */
}
static void one_kernel_without_a_cache(void) {
    setenv("FLASH_DMATTN_CACHE_SIZE", "0", 1);
    one_kernel_is_compiled_once();
    assert_int_equal(get_kernel(0, 2), FDM_OK);
    assert_int_equal(fake_compiler()->num_compiled(), 1);
    assert_int_equal(count_entries(NULL, 0), 0);
}

/* All who wait get the sentence; the next call compiles again. */
static void failures_are_shared(void) {
    enum { THREADS = 4 };
    struct request requests[THREADS];
    pthread_t threads[THREADS];
    use_fake_compiler();
    fake_compiler()->inject("nvrtcCompileProgram", 6, 1);
    fake_compiler()->hold("-DNUMBER=2");
    for (int i = 0; i < THREADS; i++) {
        requests[i] = (struct request){i % 2, 2, FDM_OK, ""};
        threads[i] = start(&requests[i]);
    }
    until_held(1);
    usleep(20000);
    fake_compiler()->hold("");
    int refused = 0;
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        refused += requests[i].status == FDM_ERROR_INTERNAL && strstr(requests[i].sentence, "pretended fault");
    }
    assert_true(refused >= 1);
    assert_int_equal(get_kernel(0, 2), FDM_OK);
    assert_int_equal(memory_live(), fake_driver()->live().modules);
}

/* A caller's own thread may be too small for a compiler, and so may what the system gives by default. */
static void compilers_have_room(void) {
    use_fake_compiler();
    assert_int_equal(get_kernel(0, 1), FDM_OK);
    assert_in_range(smallest_stack, 8 << 20, 256 << 20);
}

/* ---- without a compiler ---- */

static void fill_cache(void) {
    assert_int_equal(get_kernel(0, 1), FDM_OK);
    for (int kind = 0; kind < NUM_CALL_KINDS; kind++)
        assert_int_equal(cuda_call_once((enum cuda_call_kind)kind, 0, NULL), FDM_OK);
}

static void warm_cache_without_a_compiler(void) {
    char path[600];
    use_fake_compiler();
    scenario_fork(fill_cache);
    assert_int_equal(fdm_compiler_path(path, sizeof path), FDM_OK);
    assert_int_equal(unlink(path), 0);
    if (fdm_compiler_path(path, sizeof path) == FDM_OK) {
        print_message("not covered: this machine has another NVRTC, %s\n", path);
        return;
    }
    times_opened = 0;
    fill_cache();
    assert_refused(get_kernel(0, 2), FDM_ERROR_UNSUPPORTED, "install it with pip install nvidia-cuda-nvrtc");
    fill_cache();
    assert_int_equal(fake_driver()->num_launches(), 2 * 6);
    assert_int_equal(memory_live(), fake_driver()->live().modules);
}

/* The linker's own search opens what it finds: once, and not at all where the cache has everything. */
static void known_to_the_linker(void) {
    for (int64_t number = 1; number <= 5; number++)
        assert_int_equal(get_kernel(0, number), FDM_OK);
    assert_int_equal(times_opened, 2); /* the search, and the use of the same file */
}
static void compiler_known_to_the_linker(void) {
    struct cuda_compiler compiler;
    use_fresh_cache();
    if (cuda_compiler_find(13, &compiler) == FDM_OK) { /* does not start the driver, so that a child still may */
        print_message("not covered: this machine has another NVRTC, %s\n", compiler.path);
        return;
    }
    snprintf(linkers_compiler, sizeof linkers_compiler, "%s/libfake_nvrtc.so", getenv("LD_LIBRARY_PATH"));
    times_opened = 0;
    scenario_fork(known_to_the_linker);
    for (int64_t number = 1; number <= 5; number++)
        assert_int_equal(get_kernel(0, number), FDM_OK);
    assert_int_equal(times_opened, 0);
    assert_int_equal(get_kernel(0, 6), FDM_OK);
    assert_int_equal(times_opened, 2);
}

/* ---- whom the cache trusts ---- */

static void assert_ignored(int32_t num_ignored, const char *words) {
    fdm_cache_info info = {.struct_bytes = sizeof info};
    assert_int_equal(fdm_cache_query(&info), FDM_OK);
    assert_int_equal(info.num_ignored, num_ignored);
    if (!strstr(info.ignored, words))
        print_error("%s\n", info.ignored);
    assert_non_null(strstr(info.ignored, words));
    assert_int_equal(*words == 0, *info.ignored == 0);
}

static int mode_of(const char *path) {
    struct stat facts;
    assert_int_equal(stat(path, &facts), 0);
    return facts.st_mode & 0777;
}

/* Number `round`'s kernel, on one device after the other; the bit lets others write. */
static void assert_owner_alone(const char *folder, int round, int bit) {
    char path[600];
    const int64_t compiled = fake_compiler()->num_compiled();
    assert_int_equal(get_kernel(0, round), FDM_OK);
    assert_int_equal(count_entries(path, sizeof path), 1);
    assert_int_equal(mode_of(folder), 0700);
    assert_int_equal(mode_of(path), 0600);
    assert_ignored(0, "");
    assert_int_equal(chmod(path, 0600 | bit), 0); /* the entry: compiled again, and replaced */
    assert_ignored(1, ".cubin is ignored: it may be written by others than its owner");
    assert_int_equal(get_kernel(1, round), FDM_OK);
    assert_int_equal(fake_compiler()->num_compiled(), compiled + 2);
    assert_int_equal(mode_of(path), 0600);
    assert_int_equal(chmod(folder, 0700 | bit), 0); /* the folder: neither read nor written */
    assert_ignored(1, "cache is ignored: it may be written by others than its owner");
    assert_int_equal(get_kernel(2, round), FDM_OK);
    assert_int_equal(get_kernel(2, 100 + round), FDM_OK);
    assert_int_equal(fake_compiler()->num_compiled(), compiled + 4);
    assert_int_equal(count_entries(NULL, 0), 1);
    assert_int_equal(chmod(folder, 0700), 0);
    assert_int_equal(unlink(path), 0);
}

static void only_its_owner_is_trusted(void) {
    char path[600], moved[700];
    use_fake_compiler();
    umask(0);
    assert_owner_alone(getenv("FLASH_DMATTN_CACHE_DIR"), 1, 0020);
    assert_owner_alone(getenv("FLASH_DMATTN_CACHE_DIR"), 2, 0002);
    assert_int_equal(get_kernel(0, 3), FDM_OK);
    assert_int_equal(count_entries(path, sizeof path), 1);
    snprintf(moved, sizeof moved, "%s/elsewhere", scenario_folder());
    assert_int_equal(rename(path, moved), 0);
    assert_int_equal(symlink(moved, path), 0);
    const int64_t compiled = fake_compiler()->num_compiled();
    assert_int_equal(get_kernel(1, 3), FDM_OK); /* a link is no entry */
    assert_int_equal(fake_compiler()->num_compiled(), compiled + 1);
}

static void others_files_are_ignored(void) {
    char path[600];
    use_fake_compiler();
    assert_int_equal(get_kernel(0, 1), FDM_OK);
    assert_int_equal(count_entries(path, sizeof path), 1);
    if (geteuid() != 0 || chown(path, 65534, 65534) != 0) {
        print_message("not covered: files cannot be given to others here\n");
        return;
    }
    assert_ignored(1, ".cubin is ignored: it belongs to another user");
    assert_int_equal(get_kernel(1, 1), FDM_OK);
    assert_int_equal(fake_compiler()->num_compiled(), 2);
    assert_int_equal(chown(getenv("FLASH_DMATTN_CACHE_DIR"), 65534, 65534), 0);
    assert_ignored(1, "cache is ignored: it belongs to another user");
    assert_int_equal(get_kernel(2, 1), FDM_OK);
    assert_int_equal(fake_compiler()->num_compiled(), 3);
}

/* One line, once. */
static void the_log_says_so(void) {
    char path[600], line[600] = "";
    use_fake_compiler();
    setenv("FLASH_DMATTN_LOG", "1", 1);
    assert_int_equal(get_kernel(0, 1), FDM_OK);
    assert_int_equal(chmod(getenv("FLASH_DMATTN_CACHE_DIR"), 0777), 0);
    snprintf(path, sizeof path, "%s/log", scenario_folder());
    const int before = dup(STDERR_FILENO);
    assert_non_null(freopen(path, "w", stderr));
    assert_int_equal(get_kernel(1, 1), FDM_OK);
    assert_int_equal(get_kernel(2, 1), FDM_OK);
    fflush(stderr);
    assert_true(dup2(before, STDERR_FILENO) >= 0);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    assert_non_null(fgets(line, sizeof line, file));
    assert_non_null(strstr(line, "flash_dmattn: compiled kernels are not taken from "));
    assert_non_null(strstr(line, "cache: it may be written by others than its owner\n"));
    assert_null(fgets(line, sizeof line, file));
    fclose(file);
}

/* ---- how large it may be ---- */

/* What was used last stays. */
static void least_recently_used_go_first(void) {
    enum { ENTRIES = 8 };
    char limit[32];
    fdm_cache_info info = {.struct_bytes = sizeof info};
    use_fake_compiler();
    for (int64_t number = 1; number <= ENTRIES; number++) {
        assert_int_equal(get_kernel(0, number), FDM_OK);
        usleep(15000); /* the files' times go in steps */
    }
    assert_int_equal(fdm_cache_query(&info), FDM_OK);
    assert_int_equal(info.num_entries, ENTRIES);
    assert_int_equal(info.limit_bytes, 1 << 30);
    snprintf(limit, sizeof limit, "%lld", (long long)info.bytes);
    setenv("FLASH_DMATTN_CACHE_SIZE", limit, 1);
    assert_int_equal(get_kernel(1, 1), FDM_OK); /* from the disk: used */
    usleep(15000);
    assert_int_equal(fake_compiler()->num_compiled(), ENTRIES);
    assert_int_equal(get_kernel(0, ENTRIES + 1), FDM_OK); /* one too many */
    assert_int_equal(fdm_cache_query(&info), FDM_OK);
    assert_int_equal(info.limit_bytes, atoll(limit));
    assert_true(info.bytes <= info.limit_bytes && info.num_entries < ENTRIES && info.num_entries >= ENTRIES - 2);
    assert_int_equal(get_kernel(2, 1), FDM_OK);
    assert_int_equal(get_kernel(2, ENTRIES), FDM_OK);
    assert_int_equal(get_kernel(2, ENTRIES + 1), FDM_OK);
    assert_int_equal(fake_compiler()->num_compiled(), ENTRIES + 1);
    assert_int_equal(get_kernel(2, 2), FDM_OK); /* not used since it was made */
    assert_int_equal(fake_compiler()->num_compiled(), ENTRIES + 2);
    setenv("FLASH_DMATTN_CACHE_SIZE", "100", 1); /* less than an entry: nothing is written */
    assert_int_equal(fdm_cache_query(&info), FDM_OK);
    assert_int_equal(get_kernel(0, 100), FDM_OK);
    assert_int_equal(count_entries(NULL, 0), info.num_entries);
}

/* Temporary files of processes that were killed: old ones go with the next entry. */
static void old_temporary_files_go(void) {
    char path[600], old[700], young[700];
    static const struct timespec long_ago[2] = {{1000000000, 0}, {1000000000, 0}};
    use_fake_compiler();
    assert_int_equal(get_kernel(0, 1), FDM_OK);
    assert_int_equal(count_entries(path, sizeof path), 1);
    snprintf(old, sizeof old, "%s.AAAAAA", path);
    snprintf(young, sizeof young, "%s.BBBBBB", path);
    for (int i = 0; i < 2; i++) {
        FILE *file = fopen(i ? young : old, "w");
        assert_non_null(file);
        fclose(file);
    }
    assert_int_equal(utimensat(AT_FDCWD, old, long_ago, 0), 0);
    assert_int_equal(utimensat(AT_FDCWD, path, long_ago, 0), 0);
    assert_int_equal(get_kernel(0, 2), FDM_OK);
    assert_int_equal(access(old, F_OK), -1);
    assert_int_equal(access(young, F_OK), 0);
    assert_int_equal(access(path, F_OK), 0); /* an entry, however old */
}

static void limits_are_read(void) {
    static const struct {
        const char *text;
        int64_t bytes;
    } cases[] = {{"0", 0},          {"12", 12},    {"3K", 3 << 10},  {"512M", 512 << 20},
                 {"5G", 5ll << 30}, {"", 1 << 30}, {"8G", 8ll << 30}};
    fdm_cache_info info = {.struct_bytes = sizeof info};
    use_fresh_cache();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        setenv("FLASH_DMATTN_CACHE_SIZE", cases[i].text, 1);
        assert_int_equal(fdm_cache_query(&info), FDM_OK);
        assert_int_equal(info.limit_bytes, cases[i].bytes);
    }
    assert_int_equal(info.num_entries, 0); /* of a folder that is not there */
    assert_string_equal(info.ignored, "");
    assert_refused(fdm_cache_query(NULL), FDM_ERROR_INVALID_ARGUMENT, "info is NULL");
}

/* What is in memory is not looked for on the disk. */
static void garbage_in_settings(void) {
    static const char *const cases[][3] = {
        {"FLASH_DMATTN_CACHE_SIZE", "lots", "FLASH_DMATTN_CACHE_SIZE is 'lots'; it must be a whole number of bytes"},
        {"FLASH_DMATTN_LOG", "yes", "FLASH_DMATTN_LOG is 'yes'; it must be 0 or 1"},
        {"FLASH_DMATTN_CACHE_DIR", NULL, "it must be a path of at most 511 bytes"}};
    char path[600], before[600];
    use_fake_compiler();
    assert_int_equal(get_kernel(0, 1), FDM_OK);
    memset(path, 'x', sizeof path - 1);
    path[0] = '/';
    path[sizeof path - 1] = 0;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *old = getenv(cases[i][0]);
        snprintf(before, sizeof before, "%s", old ? old : "");
        setenv(cases[i][0], cases[i][1] ? cases[i][1] : path, 1);
        assert_refused(get_kernel(0, 2), FDM_ERROR_INVALID_ARGUMENT, cases[i][2]);
        assert_refused(fdm_cache_query(&(fdm_cache_info){.struct_bytes = sizeof(fdm_cache_info), .bytes = 0}),
                       FDM_ERROR_INVALID_ARGUMENT, cases[i][2]);
        assert_int_equal(get_kernel(0, 1), FDM_OK);
        setenv(cases[i][0], before, 1);
    }
    assert_int_equal(get_kernel(0, 2), FDM_OK);
    assert_int_equal(fake_compiler()->num_compiled(), 2);
}

/* ---- what a kernel in memory is known by ---- */

static struct cuda_kernel_request many_constants(void) {
    static char names[CUDA_CONSTANTS_MAX][16];
    struct cuda_kernel_request request = {
        .file = "gpu/combine_splits.cu", .entry = "combine_splits", .num_constants = CUDA_CONSTANTS_MAX};
    for (int32_t n = 0; n < CUDA_CONSTANTS_MAX; n++) {
        snprintf(names[n], sizeof names[n], "CONSTANT_%d", n);
        request.constants[n] = (struct cuda_constant){names[n], 2};
    }
    return request;
}

static const struct cuda_kernel *kernel_of(int32_t device, const struct cuda_kernel_request *request) {
    const struct cuda_kernel *kernel;
    assert_int_equal(cuda_kernels_get(device, request, 1, &kernel), FDM_OK);
    return kernel;
}

/* In memory, and as work in flight: each pair is asked for in one call. */
static void kernels_are_known_by_each_constant(void) {
    struct cuda_kernel_request pair[2] = {many_constants(), many_constants()};
    const struct cuda_kernel *both[2];
    use_fake_compiler();
    const struct cuda_kernel *first = kernel_of(0, &pair[0]);
    for (int32_t n = 0; n < CUDA_CONSTANTS_MAX; n++)
        for (int high = 0; high < 2; high++) {
            const int64_t before = fake_compiler()->num_compiled(), distinct = fake_compiler()->num_distinct();
            pair[0] = pair[1] = many_constants();
            pair[0].constants[(n + 1) % CUDA_CONSTANTS_MAX].value = 1000 + n; /* two that are new */
            pair[1] = pair[0];
            pair[1].constants[n].value += high ? 1ll << 32 : 1;
            assert_int_equal(cuda_kernels_get(0, pair, 2, both), FDM_OK);
            if (both[0] == both[1] || both[0] == first || both[1] == first ||
                fake_compiler()->num_distinct() != distinct + (high ? 1 : 2))
                fail_msg("constant %d is not looked at", n);
            assert_ptr_equal(kernel_of(0, &pair[0]), both[0]);
            assert_ptr_equal(kernel_of(0, &pair[1]), both[1]);
            assert_int_equal(fake_compiler()->num_compiled(), before + (high ? 1 : 2));
        }
}

/* Chains of kernels in memory are chosen by constants too. Of 150 values some share a chain, where the constant alone
 * tells them apart. */
static void kernels_of_a_chain_are_told_apart(void) {
    enum { VALUES = 150 };
    static const int32_t places[] = {0, 1, 20, CUDA_CONSTANTS_MAX - 1};
    static const struct cuda_kernel *made[VALUES];
    use_fake_compiler();
    setenv("FLASH_DMATTN_CACHE_SIZE", "0", 1); /* memory is enough here */
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        struct cuda_kernel_request request = many_constants();
        for (int64_t n = 0; n < VALUES; n++) {
            request.constants[places[i]].value = 10 + n;
            made[n] = kernel_of(0, &request);
            for (int64_t before = 0; before < n; before++)
                if (made[before] == made[n])
                    fail_msg("values %lld and %lld of constant %d give one kernel", (long long)before, (long long)n,
                             places[i]);
        }
        assert_int_equal(fake_compiler()->num_distinct(), (int64_t)(i + 1) * VALUES);
    }
}

static void kernels_are_known_by_everything_else(void) {
    const struct cuda_kernel_request request = many_constants();
    struct cuda_kernel_request other;
    use_fake_compiler();
    const struct cuda_kernel *first = kernel_of(0, &request);
    for (int what = 0; what < 4; what++) {
        const int64_t before = fake_compiler()->num_compiled();
        other = request;
        switch (what) {
        case 0: other.shared_bytes = 1024; break; /* set once, when a kernel is loaded: the same code */
        case 1: other.entry = "combine"; break;
        case 2:
            other.file = "gpu/merge.cu";
            other.entry = "merge";
            break;
        default: other.num_constants--; break;
        }
        if (kernel_of(0, &other) == first)
            fail_msg("change %d is not looked at", what);
        assert_ptr_equal(kernel_of(0, &request), first);
        assert_int_equal(fake_compiler()->num_compiled(), before + (what > 0));
    }
    const int64_t before = fake_compiler()->num_compiled();
    assert_ptr_not_equal(kernel_of(1, &request), first); /* loaded on each device, of one code */
    assert_int_equal(fake_compiler()->num_compiled(), before);
}

#define TWO  "FAKE_CUDA_DEVICES=9.0:232448,9.0:232448"
#define MANY "FAKE_CUDA_DEVICES=9.0:1,9.0:1,9.0:1,9.0:1,9.0:1,9.0:1,9.0:1,9.0:1"
#define NONE "VIRTUAL_ENV= CUDA_HOME= PYTHONPATH="
static const struct scenario scenarios[] = {
    {"nobody_waits_for_other_kernels", nobody_waits_for_other_kernels, TWO, 0},
    {"one_kernel_is_compiled_once", one_kernel_is_compiled_once, TWO, 0},
    {"one_kernel_without_a_cache", one_kernel_without_a_cache, TWO, 0},
    {"failures_are_shared", failures_are_shared, TWO, 0},
    {"compilers_have_room", compilers_have_room, NULL, 0},
    {"warm_cache_without_a_compiler", warm_cache_without_a_compiler, NONE, 0},
    {"compiler_known_to_the_linker", compiler_known_to_the_linker, NONE, 0},
    {"only_its_owner_is_trusted", only_its_owner_is_trusted, MANY, 0},
    {"others_files_are_ignored", others_files_are_ignored, MANY, 0},
    {"the_log_says_so", the_log_says_so, MANY, 0},
    {"least_recently_used_go_first", least_recently_used_go_first, MANY, 0},
    {"old_temporary_files_go", old_temporary_files_go, NULL, 0},
    {"limits_are_read", limits_are_read, NULL, 0},
    {"garbage_in_settings", garbage_in_settings, NULL, 0},
    {"kernels_are_known_by_each_constant", kernels_are_known_by_each_constant, TWO, 0},
    {"kernels_of_a_chain_are_told_apart", kernels_of_a_chain_are_told_apart, TWO, 0},
    {"kernels_are_known_by_everything_else", kernels_are_known_by_everything_else, TWO, 0},
};

int main(int argc, char **argv) {
    return scenarios_main(argc, argv, scenarios, sizeof scenarios / sizeof scenarios[0]);
}
