/* compiler.c: where NVRTC is looked for, and one compilation.
 *
 * Order of the search, each for the highest major version that the driver takes, then for lower ones down to 12:
 *   1. a library that the process has loaded already (beside a CUDA build of PyTorch there is one)
 *   2. pip's packages: beside libraries that the process has loaded from a site-packages folder, in VIRTUAL_ENV, and in
 *      the folders of PYTHONPATH
 *   3. toolkits: that of the environment, then where they are installed
 *   4. the dynamic linker's own search
 * struct system_nvrtc_folders names the folders. */
#include "cuda/compiler.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/settings.h"
#include "cuda/driver.h"
#include "system/files.h"
#include "system/system.h"

enum { NEWEST_MAJOR = 13, OLDEST_MAJOR = 12 };

/* ---- the search ---- */

static int is_file(const char *path, struct system_file_facts *facts) {
    FILE *file = system_open_file(path, facts);
    if (file)
        fclose(file);
    return file != NULL;
}

static int found_file(const char *path, struct cuda_compiler *compiler) {
    struct system_file_facts facts;
    if (!is_file(path, &facts))
        return 0;
    snprintf(compiler->path, sizeof compiler->path, "%s", path);
    snprintf(compiler->identity, sizeof compiler->identity, "%s %lld %lld", path, (long long)facts.bytes,
             (long long)facts.changed / 1000000000);
    return 1;
}

/* `text` with its '#' as a number, at most size - 1 bytes of it. */
static void put_number(const char *text, int32_t number, char *result, size_t size) {
    const char *mark = strchr(text, '#');
    if (mark)
        snprintf(result, size, "%.*s%d%s", (int)(mark - text), text, number, mark + 1);
    else
        snprintf(result, size, "%s", text);
}

/* In one of some folders below `folder`. */
static int found_in(const char *folder, size_t length, const char *const *below, int32_t major,
                    struct cuda_compiler *compiler) {
    char name[32];
    system_nvrtc_name(major, name, sizeof name);
    for (; *below; below++) {
        char path[512], place[64];
        put_number(*below, major, place, sizeof place);
        const int written = snprintf(path, sizeof path, "%.*s%s/%s", (int)length, folder, place, name);
        if (written > 0 && (size_t)written < sizeof path && found_file(path, compiler))
            return 1;
    }
    return 0;
}

static int found_in_packages(const char *site_packages, size_t length, int32_t major, struct cuda_compiler *compiler) {
    return found_in(site_packages, length, system_nvrtc_folders.in_packages, major, compiler);
}

struct loaded_search {
    int32_t major;
    struct cuda_compiler *compiler;
};
static int is_loaded(const char *path, void *data) {
    struct loaded_search *search = data;
    char name[32];
    system_nvrtc_name(search->major, name, sizeof name);
    const char *slash = strrchr(path, '/');
    return slash && strcmp(slash + 1, name) == 0 && found_file(path, search->compiler);
}
static int is_beside_loaded(const char *path, void *data) {
    struct loaded_search *search = data;
    static const char folder[] = "/site-packages";
    const char *at = strstr(path, folder);
    return at && found_in_packages(path, (size_t)(at - path) + sizeof folder - 1, search->major, search->compiler);
}

/* The linker's search opens the library: the only way to ask it where the file is. It stays open: it compiles next. */
static int found_by_linker(int32_t major, struct cuda_compiler *compiler) {
    char name[32], path[512];
    system_nvrtc_name(major, name, sizeof name);
    void *library = system_open_library(name);
    return library && system_library_path(library, path, sizeof path) && found_file(path, compiler);
}

static int found_in_environment(int32_t major, struct cuda_compiler *compiler) {
    const char *base = setting_get_foreign("VIRTUAL_ENV");
    for (int32_t minor = 20; base && minor >= 8; minor--) {
        char folder[512], below[64];
        put_number(system_nvrtc_folders.in_environment, minor, below, sizeof below);
        const int length = snprintf(folder, sizeof folder, "%s%s", base, below);
        if (length > 0 && (size_t)length < sizeof folder && found_in_packages(folder, (size_t)length, major, compiler))
            return 1;
    }
    const char separator[] = {system_nvrtc_folders.separator, 0};
    for (const char *at = setting_get_foreign("PYTHONPATH"); at && *at;) {
        size_t length = strcspn(at, separator);
        if (found_in_packages(at, length, major, compiler))
            return 1;
        at += length + (at[length] == *separator);
    }
    return 0;
}

static int found_toolkit(int32_t major, struct cuda_compiler *compiler) {
    const struct system_nvrtc_folders *folders = &system_nvrtc_folders;
    const char *named = setting_get_foreign(folders->toolkit_variable);
    if (named && found_in(named, strlen(named), folders->in_toolkits, major, compiler))
        return 1;
    for (const char *const *at = folders->toolkits; *at; at++) {
        char folder[96];
        put_number(*at, major, folder, sizeof folder);
        if (found_in(folder, strlen(folder), folders->in_toolkits, major, compiler))
            return 1;
    }
    return 0;
}

/* by_linker: 1: also by the search that opens what it finds. */
static int search(int32_t max_major, int by_linker, struct cuda_compiler *compiler) {
    for (int32_t major = max_major; major >= OLDEST_MAJOR; major--) {
        struct loaded_search loaded = {major, compiler};
        compiler->major = major;
        if (system_visit_libraries(is_loaded, &loaded) || system_visit_libraries(is_beside_loaded, &loaded) ||
            found_in_environment(major, compiler) || found_toolkit(major, compiler) ||
            (by_linker && found_by_linker(major, compiler)))
            return 1;
    }
    return 0;
}

static int32_t newest_for(int32_t max_major) {
    return max_major > 0 && max_major < NEWEST_MAJOR ? max_major : NEWEST_MAJOR;
}

fdm_status cuda_compiler_find(int32_t max_major, struct cuda_compiler *compiler) {
    const int32_t newest = newest_for(max_major);
    if (search(newest, 1, compiler))
        return FDM_OK;
    char name[64];
    system_nvrtc_name(newest, name, sizeof name);
    return error_set(
        FDM_ERROR_UNSUPPORTED,
        "no NVRTC for CUDA %d or lower was found (%s); install it with pip install nvidia-cuda-nvrtc, or a "
        "CUDA toolkit",
        newest, name);
}

/* What the process found last. */
static struct {
    pthread_mutex_t lock;
    int32_t newest; /* 0 = nothing yet */
    struct cuda_compiler compiler;
} found_last = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int take_last(int32_t max_major, struct cuda_compiler *compiler) {
    struct cuda_compiler now;
    pthread_mutex_lock(&found_last.lock);
    const int same = found_last.newest == newest_for(max_major) && found_file(found_last.compiler.path, &now) &&
                     strcmp(now.identity, found_last.compiler.identity) == 0;
    if (same)
        *compiler = found_last.compiler;
    pthread_mutex_unlock(&found_last.lock);
    return same;
}

static void keep_last(int32_t max_major, const struct cuda_compiler *compiler) {
    pthread_mutex_lock(&found_last.lock);
    found_last.newest = newest_for(max_major);
    found_last.compiler = *compiler;
    pthread_mutex_unlock(&found_last.lock);
}

fdm_status cuda_compiler_get(int32_t max_major, struct cuda_compiler *compiler) {
    fdm_status status = FDM_OK;
    if (!take_last(max_major, compiler) && !(status = cuda_compiler_find(max_major, compiler)))
        keep_last(max_major, compiler);
    return status;
}

int cuda_compiler_known(int32_t max_major, struct cuda_compiler *compiler) {
    if (take_last(max_major, compiler))
        return 1;
    if (!search(newest_for(max_major), 0, compiler))
        return 0;
    keep_last(max_major, compiler);
    return 1;
}

/* NVRTC's builtins, which lie beside it and whose name has its version: the minor, and the path; -1: not there. */
enum { BUILTINS_PATH = 600 };
static int32_t find_builtins(const struct cuda_compiler *compiler, char path[BUILTINS_PATH]) {
    const char *slash = strrchr(compiler->path, '/');
    for (int32_t minor = 0; slash && minor < 20; minor++) {
        char name[48];
        struct system_file_facts facts;
        system_nvrtc_builtins_name(compiler->major, minor, name, sizeof name);
        snprintf(path, BUILTINS_PATH, "%.*s/%s", (int)(slash - compiler->path), compiler->path, name);
        if (is_file(path, &facts))
            return minor;
    }
    return -1;
}

int32_t cuda_compiler_version(int32_t max_major) {
    struct cuda_compiler compiler;
    char path[BUILTINS_PATH];
    if (!cuda_compiler_known(max_major, &compiler))
        return 0;
    const int32_t minor = find_builtins(&compiler, path);
    return minor < 0 ? 0 : compiler.major * 1000 + minor * 10;
}

fdm_status fdm_compiler_path(char *path, size_t size) {
    const struct cuda_driver *driver;
    struct cuda_compiler compiler;
    fdm_status status = cuda_compiler_find(cuda_driver_get(&driver) ? 0 : driver->version / 1000, &compiler);
    if (!status && (size_t)snprintf(path, size, "%s", compiler.path) >= size)
        status =
            error_set(FDM_ERROR_INVALID_ARGUMENT, "the path has %zu bytes; size is %zu", strlen(compiler.path), size);
    return status;
}

const struct cuda_source *cuda_source_find(const char *name) {
    for (int32_t i = 0; i < cuda_num_sources; i++)
        if (strcmp(cuda_sources[i].name, name) == 0)
            return &cuda_sources[i];
    return NULL;
}

/* ---- NVRTC ---- */

typedef struct nvrtc_program_body *nvrtc_program;
#define NVRTC_FUNCTIONS(X)                                                                                       \
    X(const char *, error_text, "nvrtcGetErrorString", (int result))                                             \
    X(int, create, "nvrtcCreateProgram",                                                                         \
      (nvrtc_program * program, const char *text, const char *name, int num_headers, const char *const *headers, \
       const char *const *names))                                                                                \
    X(int, destroy, "nvrtcDestroyProgram", (nvrtc_program * program))                                            \
    X(int, compile, "nvrtcCompileProgram", (nvrtc_program program, int num_options, const char *const *options)) \
    X(int, cubin_size, "nvrtcGetCUBINSize", (nvrtc_program program, size_t * bytes))                             \
    X(int, cubin, "nvrtcGetCUBIN", (nvrtc_program program, char *code))                                          \
    X(int, log_size, "nvrtcGetProgramLogSize", (nvrtc_program program, size_t * bytes))                          \
    X(int, log, "nvrtcGetProgramLog", (nvrtc_program program, char *text))

struct nvrtc {
    void *library;
    char path[512];
#define NVRTC_MEMBER(type, member, name, parameters) type(*member) parameters;
    NVRTC_FUNCTIONS(NVRTC_MEMBER)
#undef NVRTC_MEMBER
};

/* Opened once for each path that is asked for; the process keeps the last one. */
static fdm_status open_nvrtc(const struct cuda_compiler *compiler, struct nvrtc *nvrtc) {
    const char *path = compiler->path;
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct nvrtc kept;
    fdm_status status = FDM_OK;
    pthread_mutex_lock(&lock);
    if (!kept.library || strcmp(kept.path, path) != 0) {
        /* NVRTC opens its builtins by their bare name, and not every package says to the dynamic linker that they lie
         * beside it (pip's of 13.0 does not). Ones that are loaded are found by that name; they stay open. */
        char builtins[BUILTINS_PATH];
        if (find_builtins(compiler, builtins) >= 0)
            system_open_library(builtins);
        struct nvrtc fresh = {.library = system_open_library(path)};
        int complete = fresh.library != NULL;
#define NVRTC_RESOLVE(type, member, name, parameters) \
    complete = complete && (*(void **)&fresh.member = system_symbol(fresh.library, name)) != NULL;
        NVRTC_FUNCTIONS(NVRTC_RESOLVE)
#undef NVRTC_RESOLVE
        if (!complete) {
            status = error_set(FDM_ERROR_SYSTEM, "NVRTC cannot be opened from %.300s: %.100s", path,
                               fresh.library ? "it lacks a function" : system_library_error());
            if (fresh.library)
                system_close_library(fresh.library);
        } else {
            kept = fresh;
            snprintf(kept.path, sizeof kept.path, "%s", path);
        }
    }
    *nvrtc = kept;
    pthread_mutex_unlock(&lock);
    return status;
}

enum { FIXED_OPTIONS = 3, OPTION_BYTES = 64 };
const char *const cuda_compile_options[FIXED_OPTIONS + 1] = {"--std=c++17", "--ptxas-options=-v",
                                                             "--device-as-default-execution-space", NULL};

/* The number that ends where `at` begins. */
static int32_t number_before(const char *at, const char *begin) {
    const char *digits = at;
    while (digits > begin && digits[-1] >= '0' && digits[-1] <= '9')
        digits--;
    return atoi(digits);
}

/* Of one entry's part of the log: "Compiling entry function 'NAME' ...", "N bytes spill stores", "Used N registers,
 * ..., N bytes smem"; of all of it: "(C7510) Potential Performance Loss ...". */
static struct cuda_resources read_log(const char *log, const char *entry) {
    static const char head[] = "Compiling entry function";
    struct cuda_resources resources = {0};
    char name[96];
    snprintf(name, sizeof name, "%s '%s'", head, entry);
    const char *begin = strstr(log, name);
    begin = begin ? begin : log;
    const char *end = strstr(begin + 1, head);
    end = end ? end : begin + strlen(begin);
    const char *used = strstr(begin, "Used "), *shared = strstr(begin, " bytes smem");
    if (used && used < end)
        resources.registers = atoi(used + 5);
    if (shared && shared < end)
        resources.static_shared_bytes = number_before(shared, log);
    for (const char *at = begin; (at = strstr(at, " bytes spill")) && at < end; at++)
        resources.spill_bytes += number_before(at, log);
    for (const char *at = log; (at = strstr(at, "(C75")); at++)
        resources.remarks++;
    return resources;
}

/* The line of the log that says what is wrong: of the compiler, or of the assembler. */
static const char *complaint_in(const char *log) {
    const char *line = strstr(log, "error");
    if (!line)
        line = strstr(log, "fatal");
    while (line && line > log && line[-1] != '\n')
        line--;
    return line;
}

static fdm_status refuse(const struct nvrtc *nvrtc, int result, const char *file, const char *arch, const char *log) {
    enum { NVRTC_OUT_OF_MEMORY = 1 };
    const char *line = complaint_in(log);
    if (line && strstr(line, "value for --gpu-architecture"))
        return error_set(FDM_ERROR_SYSTEM,
                         "the NVRTC at %s does not know %s; a newer one does: pip install nvidia-cuda-nvrtc",
                         nvrtc->path, arch);
    if (!line)
        line = result ? nvrtc->error_text(result) : "it gives no machine code";
    return error_set(result == NVRTC_OUT_OF_MEMORY ? FDM_ERROR_OUT_OF_MEMORY : FDM_ERROR_INTERNAL,
                     "NVRTC does not compile %s for %s: %.*s", file, arch, (int)strcspn(line, "\n"), line);
}

/* The program's log, to be released; "" where there is none. NULL when memory is short. */
static char *take_log(const struct nvrtc *nvrtc, nvrtc_program program, int *result) {
    size_t bytes = 0;
    int failed = nvrtc->log_size(program, &bytes);
    char *log = memory_allocate(failed ? 1 : bytes + 1);
    if (!log)
        return NULL;
    log[0] = log[failed ? 0 : bytes] = 0;
    if (!failed && bytes > 0 && (failed = nvrtc->log(program, log)))
        log[0] = 0;
    if (!*result) /* without the log the kernel's resources would not be known */
        *result = failed;
    return log;
}

static fdm_status take_results(const struct nvrtc *nvrtc, nvrtc_program program,
                               const struct cuda_kernel_request *request, const char *arch, int result,
                               struct cuda_binary *binary) {
    const char *file = request->file;
    fdm_status status = FDM_OK;
    char *log = take_log(nvrtc, program, &result);
    if (!log)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for the compiler's log");
    if (!result)
        result = nvrtc->cubin_size(program, &binary->bytes);
    if (result || binary->bytes == 0)
        status = refuse(nvrtc, result, file, arch, log);
    else if (!(binary->code = memory_allocate(binary->bytes)))
        status = error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for %zu bytes of machine code", binary->bytes);
    else if ((result = nvrtc->cubin(program, binary->code)))
        status = refuse(nvrtc, result, file, arch, log);
    if (status) {
        cuda_binary_release(binary);
    } else {
        binary->resources = read_log(log, request->entry);
    }
    memory_release(log);
    return status;
}

void cuda_binary_release(struct cuda_binary *binary) {
    memory_release(binary->code);
    *binary = (struct cuda_binary){0};
}

void cuda_target_of(const char *arch, const struct cuda_source *source, char *target) {
    const size_t length = strlen(arch);
    const int named = length > 0 && arch[length - 1] == 'a';
    snprintf(target, CUDA_TARGET_BYTES, "%.14s%s", arch, source && source->arch_specific && !named ? "a" : "");
}

static fdm_status compile_with(const struct nvrtc *nvrtc, const struct cuda_source *source, const char *arch,
                               const struct cuda_kernel_request *request, int num_options, const char *const *options,
                               struct cuda_binary *binary) {
    const char *headers[64], *names[64];
    for (int32_t i = 0; i < source->num_includes && i < 64; i++) {
        headers[i] = cuda_sources[source->includes[i]].text;
        names[i] = cuda_sources[source->includes[i]].name;
    }
    nvrtc_program program;
    int result = nvrtc->create(&program, source->text, source->name, source->num_includes, headers, names);
    if (result)
        return refuse(nvrtc, result, request->file, arch, "");
    result = nvrtc->compile(program, num_options, options);
    const fdm_status status = take_results(nvrtc, program, request, arch, result, binary);
    nvrtc->destroy(&program);
    return status;
}

fdm_status cuda_compile(const struct cuda_compiler *compiler, const char *arch,
                        const struct cuda_kernel_request *request, struct cuda_binary *binary) {
    struct nvrtc nvrtc;
    *binary = (struct cuda_binary){0};
    const struct cuda_source *source = cuda_source_find(request->file);
    if (!source)
        return error_set(FDM_ERROR_INTERNAL, "there is no kernel source %s", request->file);
    fdm_status status = open_nvrtc(compiler, &nvrtc);
    if (status)
        return status;
    char text[CUDA_CONSTANTS_MAX + 1][OPTION_BYTES];
    const char *options[FIXED_OPTIONS + 1 + CUDA_CONSTANTS_MAX + 1];
    int num_options = FIXED_OPTIONS + 1;
    memcpy(options, cuda_compile_options, FIXED_OPTIONS * sizeof *options);
    options[FIXED_OPTIONS] = text[CUDA_CONSTANTS_MAX];
    snprintf(text[CUDA_CONSTANTS_MAX], OPTION_BYTES, "--gpu-architecture=%s", arch);
    for (int32_t i = 0; i < request->num_constants; i++) {
        snprintf(text[i], OPTION_BYTES, "-D%s=%lld", request->constants[i].name,
                 (long long)request->constants[i].value);
        options[num_options++] = text[i];
    }
    status = compile_with(&nvrtc, source, arch, request, num_options, options, binary);
    binary->compiler_major = compiler->major;
    if (status || binary->resources.registers > 0)
        return status;
    /* NVRTC took the machine code from a cache of its own, beside the driver's, which keeps no log. One that does not
     * know the option has no such cache. */
    struct cuda_binary fresh = {0};
    options[num_options++] = "--no-cache";
    if (!compile_with(&nvrtc, source, arch, request, num_options, options, &fresh)) {
        memory_release(binary->code);
        *binary = fresh;
        binary->compiler_major = compiler->major;
    }
    return FDM_OK;
}
