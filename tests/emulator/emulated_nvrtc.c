/* emulated_nvrtc.c: NVRTC's stand-in: a kernel's text, compiled by the host's C++ compiler to one shared object, which
 * is its "machine code".
 *
 * EMULATED_CXX names the compiler (g++); EMULATED_KEEP=1 leaves its folder. Where a text includes what lies in a folder
 * ptx/, it gets the stand-in of that name. EMULATED_PLANT plants a fault: a file, some words of it and what stands
 * there instead, with "=>" between them. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "flash_dmattn.h"
#include "text.h"

enum { COMPILATION_FAILED = 6, OPTIONS_MAX = 128 };
extern char **environ;

struct nvrtc_program_body {
    const char *text, *name;
    int num_headers;
    const char *const *headers, *const *names;
    char *code, *log;
    size_t code_bytes;
};
typedef struct nvrtc_program_body *program_handle;

FDM_API int nvrtcCreateProgram(program_handle *program, const char *text, const char *name, int num_headers,
                               const char *const *headers, const char *const *names) {
    program_handle made = calloc(1, sizeof *made);
    *made = (struct nvrtc_program_body){
        .text = text, .name = name, .num_headers = num_headers, .headers = headers, .names = names};
    *program = made;
    return 0;
}

FDM_API int nvrtcDestroyProgram(program_handle *program) {
    free((*program)->code);
    free((*program)->log);
    free(*program);
    *program = NULL;
    return 0;
}

/* ---- files ---- */

static int write_file(const char *folder, const char *name, const char *text) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    for (char *at = path + strlen(folder) + 1; *at; at++)
        if (*at == '/') {
            *at = 0;
            mkdir(path, 0700);
            *at = '/';
        }
    FILE *file = fopen(path, "w");
    if (!file)
        return 0;
    const int whole = fputs(text, file) >= 0;
    return fclose(file) == 0 && whole;
}

static char *read_whole(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    if (!file)
        return NULL;
    fseek(file, 0, SEEK_END);
    const long size = ftell(file);
    rewind(file);
    char *data = malloc((size_t)size + 1);
    *bytes = fread(data, 1, (size_t)size, file);
    data[*bytes] = 0;
    fclose(file);
    return data;
}

/* The text of a file as it is to be compiled, with the planted fault where it is this file's; an #error where the words
 * are not there, so that no planted fault gets lost when a kernel changes. */
static char *text_of(const char *name, const char *text) {
    char fault[1024], *words, *instead;
    snprintf(fault, sizeof fault, "%s", getenv("EMULATED_PLANT") ? getenv("EMULATED_PLANT") : "");
    if (!(words = strstr(fault, "=>")) || !(instead = strstr(words + 2, "=>")))
        return text_rewrite(text);
    *words = *instead = 0;
    words += 2;
    instead += 2;
    if (strcmp(fault, name) != 0)
        return text_rewrite(text);
    const char *at = strstr(text, words);
    if (!at)
        return strdup("#error EMULATED_PLANT: these words are not in the file\n");
    char *planted = malloc(strlen(text) + strlen(instead) + 1);
    sprintf(planted, "%.*s%s%s", (int)(at - text), text, instead, at + strlen(words));
    char *rewritten = text_rewrite(planted);
    free(planted);
    return rewritten;
}

/* The stand-in for ".../ptx/NAME"; NULL: it is no such file. */
static const char *stand_in(const char *name) {
    const char *ptx = strstr(name, "ptx/");
    if (!ptx || (ptx > name && ptx[-1] != '/'))
        return NULL;
    for (int i = 0; i < num_embedded_texts; i++)
        if (strcmp(embedded_texts[i].name, ptx) == 0)
            return embedded_texts[i].text;
    return NULL;
}

static int write_header(const program_handle program, const char *folder, int i) {
    const char *name = program->names[i], *instead = stand_in(name);
    const char *base = strrchr(name, '/');
    if (!instead && strstr(name, "ptx/") && strcmp(base ? base + 1 : name, "types.cuh") != 0) {
        char text[256];
        snprintf(text, sizeof text, "#error tests/emulator/ptx has no stand-in for %s\n", name);
        return write_file(folder, name, text);
    }
    char *text = text_of(name, instead ? instead : program->headers[i]);
    const int written = write_file(folder, name, text);
    free(text);
    return written;
}

static int write_all(const program_handle program, const char *folder) {
    int written = 1;
    for (int i = 0; i < program->num_headers; i++)
        written = written && write_header(program, folder, i);
    for (int i = 0; i < num_embedded_texts; i++)
        if (!strchr(embedded_texts[i].name, '/'))
            written = written && write_file(folder, embedded_texts[i].name, embedded_texts[i].text);
    char *text = text_of(program->name, program->text);
    written = written && write_file(folder, program->name, text);
    free(text);
    return written;
}

/* ---- the compiler ---- */

static int run(const char *folder, const char *const *arguments) {
    posix_spawn_file_actions_t actions;
    char log[PATH_MAX];
    pid_t child;
    int status = -1;
    snprintf(log, sizeof log, "%s/log", folder);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addchdir_np(&actions, folder);
    posix_spawn_file_actions_addopen(&actions, 1, log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    const int failed = posix_spawnp(&child, arguments[0], &actions, NULL, (char *const *)(uintptr_t)arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (failed)
        return failed;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
    return status;
}

static int compile(const program_handle program, const char *folder, int num_options, const char *const *options) {
    const char *named = getenv("EMULATED_CXX"), *compiler = named && *named ? named : "g++";
    char arch[64] = "-D__CUDA_ARCH__=800";
    const char *arguments[OPTIONS_MAX] = {compiler,
                                          "-x",
                                          "c++",
                                          "-std=c++17",
                                          "-O1",
                                          "-g1",
                                          "-fPIC",
                                          "-w",
                                          "-include",
                                          "prelude.h",
                                          "-I.",
                                          "-fsanitize=thread",
                                          "-fno-exceptions",
                                          "-ftrivial-auto-var-init=pattern",
                                          "-fno-rtti",
                                          "-fno-math-errno",
                                          "-ffp-contract=off",
                                          "-fno-strict-aliasing",
                                          "-fno-threadsafe-statics",
                                          arch};
    int count = 20;
    for (int i = 0; i < num_options && count < OPTIONS_MAX - 6; i++) {
        if (strncmp(options[i], "-D", 2) == 0)
            arguments[count++] = options[i];
        else if (strncmp(options[i], "--gpu-architecture=sm_", 22) == 0)
            snprintf(arch, sizeof arch, "-D__CUDA_ARCH__=%d", atoi(options[i] + 22) * 10);
    }
    char own[PATH_MAX];
    snprintf(own, sizeof own, "./%s", program->name);
    const char *const rest[] = {"-c", own, "-o", "kernel.o", NULL};
    memcpy(&arguments[count], rest, sizeof rest);
    const char *const link[] = {compiler, "-shared", "-nostartfiles", "kernel.o", "-o", "kernel.so", NULL};
    int status = run(folder, arguments);
    return status ? status : run(folder, link);
}

static void remove_folder(const char *folder) {
    const char *keep = getenv("EMULATED_KEEP");
    char log[PATH_MAX];
    if (keep && *keep == '1') {
        fprintf(stderr, "emulated: the kernel's text is in %s\n", folder);
        return;
    }
    snprintf(log, sizeof log, "%s", folder);
    const char *const arguments[] = {"rm", "-rf", folder, NULL};
    pid_t child;
    int status;
    if (posix_spawnp(&child, "rm", NULL, NULL, (char *const *)(uintptr_t)arguments, environ) == 0)
        while (waitpid(child, &status, 0) < 0 && errno == EINTR)
            ;
}

FDM_API int nvrtcCompileProgram(program_handle program, int num_options, const char *const *options) {
    char folder[PATH_MAX], path[PATH_MAX + 16];
    const char *temporary = getenv("TMPDIR");
    size_t log_bytes;
    snprintf(folder, sizeof folder, "%s/emulated-XXXXXX", temporary && *temporary ? temporary : "/tmp");
    if (!mkdtemp(folder) || !write_all(program, folder)) {
        program->log = strdup("error: the emulated compiler cannot write its files\n");
        return COMPILATION_FAILED;
    }
    const int status = compile(program, folder, num_options, options);
    snprintf(path, sizeof path, "%s/log", folder);
    char *log = read_whole(path, &log_bytes);
    if (status) {
        program->log = log && *log ? log : strdup("error: the host's C++ compiler does not run\n");
    } else {
        free(log);
        program->log = strdup("ptxas info    : Used 1 registers, 0 bytes spill stores, 0 bytes spill loads\n");
        snprintf(path, sizeof path, "%s/kernel.so", folder);
        program->code = read_whole(path, &program->code_bytes);
    }
    remove_folder(folder);
    return status || !program->code ? COMPILATION_FAILED : 0;
}

FDM_API int nvrtcGetCUBINSize(program_handle program, size_t *bytes) {
    *bytes = program->code_bytes;
    return 0;
}
FDM_API int nvrtcGetCUBIN(program_handle program, char *code) {
    memcpy(code, program->code, program->code_bytes);
    return 0;
}
FDM_API int nvrtcGetProgramLogSize(program_handle program, size_t *bytes) {
    *bytes = strlen(program->log ? program->log : "") + 1;
    return 0;
}
FDM_API int nvrtcGetProgramLog(program_handle program, char *text) {
    strcpy(text, program->log ? program->log : "");
    return 0;
}
FDM_API const char *nvrtcGetErrorString(int result) {
    return result == COMPILATION_FAILED ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR unknown";
}
