/* test_cuda_kernels.c: the compiler missing, broken and refusing; the cache of kernels damaged, read-only and full. The
 * driver is pretended; the compiler is too, except where a real one is found. */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/memory.h"
#include "cuda/cuda.h"
#include "cuda_call.h"
#include "gpu/splits.h"
#include "scenario.h"

enum { DEVICES = 8 };

/* ---- system calls that fail (the linker's --wrap) ---- */

static int fail_in, system_error; /* the n-th of the calls below fails; 0 = none */
static int threads_fail;

static int due(void) {
    if (fail_in == 0 || --fail_in > 0)
        return 0;
    errno = system_error;
    return 1;
}

int __real_mkostemp(char *name, int flags);
int __wrap_mkostemp(char *name, int flags);
int __wrap_mkostemp(char *name, int flags) { return due() ? -1 : __real_mkostemp(name, flags); }

ssize_t __real_write(int file, const void *data, size_t bytes);
ssize_t __wrap_write(int file, const void *data, size_t bytes);
ssize_t __wrap_write(int file, const void *data, size_t bytes) { /* the disk fills up in the middle */
    if (fail_in == 1 && bytes > 1) {
        fail_in = 2;
        return __real_write(file, data, bytes / 2);
    }
    return due() ? -1 : __real_write(file, data, bytes);
}

int __real_fsync(int file);
int __wrap_fsync(int file);
int __wrap_fsync(int file) { return due() ? -1 : __real_fsync(file); }

int __real_close(int file);
int __wrap_close(int file);
int __wrap_close(int file) { /* of files; folders are only looked at */
    struct stat facts;
    return fstat(file, &facts) == 0 && S_ISREG(facts.st_mode) && due() ? (__real_close(file), -1) : __real_close(file);
}

int __real_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to) { return due() ? -1 : __real_rename(from, to); }

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *), void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *), void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *), void *argument) {
    return threads_fail ? EAGAIN : __real_pthread_create(thread, attributes, body, argument);
}

/* ---- files ---- */

static void write_file(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

/* ---- the compiler ---- */

static void compiler_search(void) {
    char path[600], wanted[600], toolkit[300];
    use_fake_compiler();
    assert_int_equal(fdm_compiler_path(path, sizeof path), FDM_OK);
    snprintf(wanted, sizeof wanted, "%s/lib/python3.11/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
             scenario_folder());
    assert_string_equal(path, wanted);
    assert_refused(fdm_compiler_path(path, 10), FDM_ERROR_INVALID_ARGUMENT, "size is 10");
    setenv("VIRTUAL_ENV", "/nowhere", 1);
    snprintf(path, sizeof path, "/nowhere:%s/lib/python3.11/site-packages:/tmp", scenario_folder());
    setenv("PYTHONPATH", path, 1);
    assert_int_equal(fdm_compiler_path(path, sizeof path), FDM_OK);
    assert_string_equal(path, wanted);
    unsetenv("PYTHONPATH");
    snprintf(toolkit, sizeof toolkit, "%s/lib64", scenario_folder());
    assert_int_equal(mkdir(toolkit, 0700), 0);
    snprintf(toolkit, sizeof toolkit, "%s/lib64/libnvrtc.so.12", scenario_folder());
    assert_int_equal(symlink(wanted, toolkit), 0); /* of an older major than the driver's: it will do */
    setenv("CUDA_HOME", scenario_folder(), 1);
    assert_int_equal(fdm_compiler_path(path, sizeof path), FDM_OK);
    if (strstr(path, "so.12"))
        assert_string_equal(path, toolkit);
    else
        print_message("not covered: this machine has an NVRTC 13 of its own, %s\n", path);
}

/* A driver of CUDA 12 cannot load what an NVRTC 13 makes, so that one is not taken. */
static void compiler_is_too_new(void) {
    char path[600];
    use_fake_compiler();
    if (fdm_compiler_path(path, sizeof path) == FDM_OK) {
        assert_null(strstr(path, scenario_folder()));
        print_message("not covered: this machine has an NVRTC 12, %s\n", path);
        return;
    }
    assert_refused(cuda_call_once(CALL_FORWARD, 0, NULL), FDM_ERROR_UNSUPPORTED,
                   "no NVRTC for CUDA 12 or lower was found (libnvrtc.so.12)");
}

static void compiler_is_missing(void) {
    char path[600];
    use_fresh_cache();
    if (fdm_compiler_path(path, sizeof path) == FDM_OK) {
        print_message("not covered: this machine has an NVRTC outside its virtual environment, %s\n", path);
        return;
    }
    for (int kind = 0; kind < NUM_CALL_KINDS; kind++)
        assert_refused(cuda_call_once((enum cuda_call_kind)kind, 0, NULL), FDM_ERROR_UNSUPPORTED,
                       "install it with pip install nvidia-cuda-nvrtc");
    assert_cpu_works();
    assert_int_equal(fake_driver()->live().allocations, 0);
    use_fake_compiler(); /* installed meanwhile */
    assert_int_equal(cuda_call_once(CALL_FORWARD, 0, NULL), FDM_OK);
}

static void compiler_is_damaged(void) {
    char path[300];
    snprintf(path, sizeof path, "%s/damaged", scenario_folder());
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs("not a library", file);
    fclose(file);
    install_compiler(path, 13);
    use_fresh_cache();
    for (int again = 0; again < 2; again++)
        assert_refused(cuda_call_once(CALL_DECODE, 0, NULL), FDM_ERROR_SYSTEM, "NVRTC cannot be opened from");
    assert_cpu_works();
}

static void compiler_lacks_a_function(void) {
    char library[300], path[600];
    snprintf(library, sizeof library, "%s/../../src/libflash_dmattn.so", getenv("LD_LIBRARY_PATH"));
    install_compiler(library, 13); /* a library, but not NVRTC */
    use_fresh_cache();
    assert_int_equal(fdm_compiler_path(path, sizeof path), FDM_OK);
    for (int again = 0; again < 2; again++) {
        assert_refused(cuda_call_once(CALL_DECODE, 0, NULL), FDM_ERROR_SYSTEM, "it lacks a function");
        assert_null(dlopen(path, RTLD_LAZY | RTLD_NOLOAD)); /* not kept open */
    }
}

/* Its builtins lie beside it, and are loaded before it looks for them by name. */
static void compiler_has_builtins(void) {
    char from[300], path[600], bytes[4096];
    use_fake_compiler();
    assert_int_equal(fdm_compiler_path(path, sizeof path), FDM_OK);
    snprintf(strrchr(path, '/'), sizeof path / 2, "/libnvrtc-builtins.so.13.9");
    snprintf(from, sizeof from, "%s/libfake_nvrtc.so", getenv("LD_LIBRARY_PATH"));
    FILE *in = fopen(from, "rb"), *out = fopen(path, "wb"); /* a copy: another library to the linker */
    assert_true(in && out);
    for (size_t count; (count = fread(bytes, 1, sizeof bytes, in)) > 0;)
        assert_int_equal(fwrite(bytes, 1, count, out), count);
    fclose(in);
    assert_int_equal(fclose(out), 0);
    assert_null(dlopen(path, RTLD_LAZY | RTLD_NOLOAD));
    assert_int_equal(get_kernel(0, 1), FDM_OK);
    assert_non_null(dlopen(path, RTLD_LAZY | RTLD_NOLOAD));
}

static void compiler_refuses(void) {
    use_fake_compiler();
    fake_compiler()->inject("nvrtcCompileProgram", 6, 1);
    assert_refused(get_kernel(0, 1), FDM_ERROR_INTERNAL,
                   "NVRTC does not compile gpu/combine_splits.cu for sm_90: families/pretended.cu(7): error: "
                   "pretended fault");
    fake_compiler()->inject("nvrtcCompileProgram", 5, 1);
    assert_refused(get_kernel(0, 1), FDM_ERROR_SYSTEM, "does not know sm_90; a newer one does: pip install");
    assert_int_equal(count_entries(NULL, 0), 0);
    assert_int_equal(get_kernel(0, 1), FDM_OK);
    fake_compiler()->inject("nvrtcCompileProgram", 6, 2); /* one of two kernels: the other is kept, on disk */
    assert_refused(cuda_call_once(CALL_DECODE, 0, NULL), FDM_ERROR_INTERNAL, "pretended fault");
    assert_int_equal(fake_driver()->live().allocations, 0);
    int64_t compiled = fake_compiler()->num_compiled();
    assert_int_equal(cuda_call_once(CALL_DECODE, 0, NULL), FDM_OK);
    assert_int_equal(fake_compiler()->num_compiled(), compiled + 1);
    assert_int_equal(count_entries(NULL, 0), 3);
}

/* A compiler that took the code from a cache of its own has no log: it is asked again, without that cache. */
static void compiler_has_a_cache(void) {
    const struct cuda_kernel_request unknown = {
        .file = "gpu/combine_splits.cu", .entry = "combine_splits", .num_constants = 1, .constants = {{"DTYPE", 3}}};
    const struct cuda_kernel *kernel;
    struct cuda_resources resources;
    use_fake_compiler();
    fake_compiler()->cached(1);
    assert_int_equal(get_kernel(0, 1), FDM_OK);
    assert_int_equal(fake_compiler()->num_compiled(), 2);
    /* One that does not know the option: what was compiled stays, and nothing is known of it. */
    fake_compiler()->inject("nvrtcCompileProgram", 5, 2);
    const int64_t live = memory_live();
    assert_int_equal(cuda_kernels_get(0, &unknown, 1, &kernel), FDM_OK);
    assert_in_range(memory_live() - live, 1, 2); /* the kernel's record and its image */
    assert_string_equal(fake_compiler()->injected(), "nvrtcCompileProgram");
    assert_int_equal(cuda_kernel_resources(kernel, &resources), FDM_OK);
    assert_int_equal(resources.registers, 0);
    fake_compiler()->cached(0);
}

/* The n-th call of the compiler fails: a sentence, nothing unsound in the cache, and the next call works. */
static void every_compiler_call_fails(void) {
    use_fake_compiler();
    assert_int_equal(cuda_device_count(), 2);
    int64_t live = memory_live();
    fdm_status status = get_kernel(0, 1);
    const char *failed = fake_compiler()->injected();
    if (!*failed) {
        assert_int_equal(status, FDM_OK);
        scenario_past_the_end = 1;
        return;
    }
    print_message("%s: %d, %s\n", failed, status, fdm_last_error());
    if (strcmp(failed, "nvrtcDestroyProgram") == 0) { /* after the machine code was taken */
        assert_int_equal(status, FDM_OK);
    } else {
        const char *words =
            strcmp(failed, "nvrtcCompileProgram") == 0 ? "error: pretended fault" : "sm_90: NVRTC_ERROR_INTERNAL_ERROR";
        assert_refused(status, FDM_ERROR_INTERNAL, words);
        assert_int_equal(memory_live(), live);
        assert_int_equal(count_entries(NULL, 0), 0);
    }
    assert_int_equal(get_kernel(0, 1), FDM_OK);
    assert_int_equal(get_kernel(1, 1), FDM_OK); /* from the cache */
    assert_int_equal(count_entries(NULL, 0), 1);
}

static void no_more_threads(void) {
    use_fake_compiler();
    threads_fail = 1;
    assert_int_equal(cuda_call_once(CALL_DECODE, 0, NULL), FDM_OK);
    assert_int_equal(fake_compiler()->num_compiled(), 2);
    threads_fail = 0;
}

/* The compiler that is installed, twice: the second process finds everything and does not open it. */
static void compile_for_real(void) {
    struct cuda_call call;
    char path[300];
    assert_int_equal(cuda_call_make(&call, CALL_DECODE, 0), FDM_OK);
    fdm_status status = cuda_call_run(&call, NULL);
    /* sanitizers stand between NVRTC and dlopen(), which then does not look beside NVRTC for its second library */
    if (status == FDM_ERROR_UNSUPPORTED || (status && strstr(fdm_last_error(), "libnvrtc-builtins"))) {
        snprintf(path, sizeof path, "%s/not_covered", scenario_folder());
        write_file(path, fdm_last_error());
        print_message("not covered: %s\n", fdm_last_error());
        status = FDM_OK;
    }
    assert_int_equal(status, FDM_OK);
    cuda_call_release(&call);
}
static void real_compiler(void) {
    char path[600];
    const struct cuda_kernel *kernel;
    fdm_problem problem = fdm_problem_default();
    struct cuda_kernel_request request;
    struct cuda_resources resources;
    problem.dtype = FDM_BFLOAT16;
    combine_splits_request(&problem, &request);
    use_fresh_cache();
    scenario_fork(compile_for_real);
    snprintf(path, sizeof path, "%s/not_covered", scenario_folder());
    if (access(path, F_OK) == 0)
        return;
    assert_int_equal(fdm_compiler_path(path, sizeof path), FDM_OK);
    assert_int_equal(count_entries(NULL, 0), 2);
    assert_int_equal(cuda_call_once(CALL_DECODE, 0, NULL), FDM_OK);
    assert_int_equal(fake_driver()->num_launches(), 2);
    assert_null(dlopen(path, RTLD_LAZY | RTLD_NOLOAD));
    assert_int_equal(cuda_kernels_get(0, &request, 1, &kernel), FDM_OK);
    assert_null(dlopen(path, RTLD_LAZY | RTLD_NOLOAD));
    assert_int_equal(cuda_kernel_resources(kernel, &resources), FDM_OK);
    assert_in_range(resources.registers, 10, 255);
    request.num_constants--; /* without a constant it stops with a sentence of ours */
    assert_refused(cuda_kernels_get(0, &request, 1, &kernel), FDM_ERROR_INTERNAL, "combine_splits.cu for sm_90: ");
    assert_non_null(strstr(fdm_last_error(), "error"));
    assert_int_equal(count_entries(NULL, 0), 2);
}

/* ---- the cache ---- */

static void flip_byte(const char *path, long at) {
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    fseek(file, at, SEEK_SET);
    int byte = fgetc(file);
    fseek(file, at, SEEK_SET);
    fputc(byte ^ 1, file);
    fclose(file);
}

/* Each device loads the kernel anew: what is not sound on disk is compiled again and replaced. */
static void damaged_entries(void) {
    char path[600];
    use_fake_compiler();
    assert_int_equal(get_kernel(0, 1), FDM_OK);
    assert_int_equal(count_entries(path, sizeof path), 1);
    assert_int_equal(get_kernel(1, 1), FDM_OK);
    assert_int_equal(fake_compiler()->num_compiled(), 1);
    flip_byte(path, 300);
    assert_int_equal(get_kernel(2, 1), FDM_OK);
    assert_int_equal(fake_compiler()->num_compiled(), 2);
    assert_int_equal(truncate(path, 200), 0);
    assert_int_equal(get_kernel(3, 1), FDM_OK);
    assert_int_equal(fake_compiler()->num_compiled(), 3);
    write_file(path, "somebody else's file, of no use here and shorter than an entry");
    assert_int_equal(get_kernel(4, 1), FDM_OK);
    assert_int_equal(fake_compiler()->num_compiled(), 4);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0); /* reading it would wait for ever */
    assert_int_equal(get_kernel(5, 1), FDM_OK);
    assert_int_equal(fake_compiler()->num_compiled(), 5);
    assert_int_equal(get_kernel(6, 1), FDM_OK);
    assert_int_equal(fake_compiler()->num_compiled(), 5);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0700), 0); /* stays: the kernel works without an entry */
    assert_int_equal(get_kernel(7, 1), FDM_OK);
    assert_int_equal(fake_compiler()->num_compiled(), 6);
    assert_int_equal(count_entries(NULL, 0), 1);
    assert_int_equal(fake_driver()->live().modules, DEVICES);
}

/* Left by processes that were killed, some of them with this one's number. */
static void left_temporary_files(void) {
    char path[600], stale[700];
    use_fake_compiler();
    assert_int_equal(get_kernel(0, 1), FDM_OK);
    assert_int_equal(count_entries(path, sizeof path), 1);
    assert_int_equal(unlink(path), 0);
    for (int i = 0; i < 10; i++) {
        snprintf(stale, sizeof stale, "%s.%ld.%d", path, (long)getpid(), i);
        write_file(stale, "half an entry");
    }
    assert_int_equal(get_kernel(1, 1), FDM_OK);
    assert_int_equal(count_entries(NULL, 0), 11);
    assert_int_equal(get_kernel(2, 1), FDM_OK);
    assert_int_equal(fake_compiler()->num_compiled(), 2);
}

/* Every system call of a store fails in turn: the kernel works, and the folder has no litter and nothing unsound. */
static void full_disk(void) {
    use_fake_compiler();
    int64_t number = 1;
    for (; count_entries(NULL, 0) == 0; number++) {
        fail_in = (int)number;
        system_error = ENOSPC;
        assert_int_equal(get_kernel(0, number), FDM_OK);
        fail_in = 0;
        assert_true(number < 50);
    }
    assert_true(number > 6); /* mkostemp, two times write, fsync, close, rename */
    assert_int_equal(count_entries(NULL, 0), 1);
    assert_int_equal(fake_compiler()->num_compiled(), number - 1);
    assert_int_equal(get_kernel(1, number - 1), FDM_OK); /* the entry that was written is sound */
    assert_int_equal(fake_compiler()->num_compiled(), number - 1);
    assert_int_equal(get_kernel(1, 1), FDM_OK); /* what could not be written is not compiled again for another device */
    assert_int_equal(fake_compiler()->num_compiled(), number - 1);
}

/* A limit on the size of files: the signal that ends a process which passes it is not raised. */
static void limited_files(void) {
    struct rlimit old, limit = {1000, 1000};
    use_fake_compiler();
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    limit.rlim_max = old.rlim_max;
    fflush(NULL);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    fdm_status status = get_kernel(0, 1);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(status, FDM_OK);
    assert_int_equal(count_entries(NULL, 0), 0);
    assert_int_equal(get_kernel(0, 2), FDM_OK);
    assert_int_equal(count_entries(NULL, 0), 1);
}

static void folders_that_cannot_be_written(void) {
    char folder[300];
    use_fake_compiler();
    snprintf(folder, sizeof folder, "%s/file/below", scenario_folder());
    const char *const folders[] = {"/proc/nowhere", "/dev/null/cache", "/dev/full", folder};
    snprintf(folder, sizeof folder, "%s/file", scenario_folder());
    write_file(folder, "a file");
    snprintf(folder, sizeof folder, "%s/file/below", scenario_folder());
    for (int i = 0; i < 4; i++) {
        setenv("FLASH_DMATTN_CACHE_DIR", folders[i], 1);
        assert_int_equal(get_kernel(i, 1 + i), FDM_OK);
        assert_int_equal(get_kernel(i + 1, 1 + i), FDM_OK);
        assert_int_equal(fake_compiler()->num_compiled(), 1 + i);
    }
    unsetenv("FLASH_DMATTN_CACHE_DIR");
    unsetenv("XDG_CACHE_HOME");
    unsetenv("HOME");
    assert_int_equal(get_kernel(0, 10), FDM_OK);
    char path[8];
    assert_refused(fdm_cache_folder(path, sizeof path), FDM_ERROR_UNSUPPORTED, "there is no cache folder");
    setenv("HOME", scenario_folder(), 1);
    assert_refused(fdm_cache_folder(path, sizeof path), FDM_ERROR_INVALID_ARGUMENT, "size is 8");
    assert_int_equal(get_kernel(0, 11), FDM_OK);
    snprintf(folder, sizeof folder, "%s/.cache/flash_dmattn", scenario_folder());
    setenv("FLASH_DMATTN_CACHE_DIR", folder, 1);
    assert_int_equal(count_entries(NULL, 0), 1);
}

/* The compiler's file itself instead of a link into a build folder that others may not look into. */
static void copy_compiler(void) {
    static char bytes[1 << 20];
    char path[600], target[600];
    assert_int_equal(fdm_compiler_path(path, sizeof path), FDM_OK);
    assert_non_null(realpath(path, target));
    FILE *from = fopen(target, "rb");
    size_t size = from ? fread(bytes, 1, sizeof bytes, from) : 0;
    assert_in_range(size, 1000, sizeof bytes - 1);
    fclose(from);
    assert_int_equal(unlink(path), 0);
    FILE *to = fopen(path, "wb");
    assert_non_null(to);
    assert_int_equal(fwrite(bytes, 1, size, to), size);
    fclose(to);
}

/* A folder that others may read and nobody may write. The superuser may, so that one becomes somebody else. */
static void read_only_folder(void) {
    char path[600];
    use_fake_compiler();
    assert_int_equal(get_kernel(0, 1), FDM_OK);
    copy_compiler();
    snprintf(path, sizeof path, "%s/cache", scenario_folder());
    assert_int_equal(chmod(path, 0555), 0);
    assert_int_equal(chmod(scenario_folder(), 0755), 0);
    if (geteuid() == 0 && seteuid(65534) != 0) {
        print_message("not covered: the superuser may not become somebody else here\n");
        return;
    }
    fdm_status status = get_kernel(1, 2), again = get_kernel(2, 2);
    int entries = count_entries(NULL, 0);
    if (getuid() == 0)
        assert_int_equal(seteuid(0), 0);
    assert_int_equal(chmod(path, 0755), 0);
    assert_int_equal(status, FDM_OK);
    assert_int_equal(again, FDM_OK);
    assert_int_equal(entries, 1);
    assert_int_equal(fake_compiler()->num_compiled(), 2);
}

#define MANY "FAKE_CUDA_DEVICES=9.0:1,9.0:1,9.0:1,9.0:1,9.0:1,9.0:1,9.0:1,9.0:1"
static const struct scenario scenarios[] = {
    {"compiler_search", compiler_search, NULL, 0},
    {"compiler_is_too_new", compiler_is_too_new, "FAKE_CUDA_VERSION=12040", 0},
    {"compiler_is_missing", compiler_is_missing, "VIRTUAL_ENV= CUDA_HOME= PYTHONPATH=", 0},
    {"compiler_is_damaged", compiler_is_damaged, NULL, 0},
    {"compiler_lacks_a_function", compiler_lacks_a_function, NULL, 0},
    {"compiler_has_builtins", compiler_has_builtins, NULL, 0},
    {"compiler_refuses", compiler_refuses, NULL, 0},
    {"compiler_has_a_cache", compiler_has_a_cache, NULL, 0},
    {"every_compiler_call_fails", every_compiler_call_fails, "FAKE_NVRTC_FAIL=*:11:% FAKE_CUDA_DEVICES=9.0:1,9.0:1", 1},
    {"no_more_threads", no_more_threads, NULL, 0},
    {"real_compiler", real_compiler, NULL, 0},
    {"damaged_entries", damaged_entries, MANY, 0},
    {"left_temporary_files", left_temporary_files, MANY, 0},
    {"full_disk", full_disk, MANY, 0},
    {"limited_files", limited_files, NULL, 0},
    {"folders_that_cannot_be_written", folders_that_cannot_be_written, MANY, 0},
    {"read_only_folder", read_only_folder, MANY, 0},
};

int main(int argc, char **argv) {
    return scenarios_main(argc, argv, scenarios, sizeof scenarios / sizeof scenarios[0]);
}
