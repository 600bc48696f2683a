/* fake_nvrtc.c: a pretended NVRTC: its machine code is the program's name, options and text; see fake_cuda.h. */
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "fake_cuda.h"
#include "flash_dmattn.h"
#include "injection.h"

enum { INVALID_OPTION = 5, INTERNAL_ERROR = 11, PROGRAMS_MAX = 4096, COMPILE_MICROSECONDS = 500 };
static const char failed_log[] = "families/pretended.cu(7): error: pretended fault\n\n1 error detected.\n";
static const char old_log[] = "nvrtc: error: invalid value for --gpu-architecture (-arch)\n";
static const char sound_log[] = "ptxas info    : (C7510) Potential Performance Loss: pretended\n"
                                "ptxas info    : Used 40 registers, 16 bytes spill stores, 8 bytes spill loads\n";

struct nvrtc_program_body {
    char *code;
    int compiled, failed, silent;
    const char *name, *text;
};
typedef struct nvrtc_program_body *program_handle;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t released = PTHREAD_COND_INITIALIZER;
static struct {
    int ready;
    struct injection injection;
    int cached;    /* from a cache of its own: without a log */
    char held[64]; /* an option, "" = none */
    int64_t num_held, num_compiled, num_distinct;
    uint64_t compiled[PROGRAMS_MAX]; /* hashes of name and options */
} state;

static int begin(const char *function) {
    pthread_mutex_lock(&lock);
    if (!state.ready)
        state.injection = injection_parse(getenv("FAKE_NVRTC_FAIL"));
    state.ready = 1;
    int result = injection_due(&state.injection, function);
    pthread_mutex_unlock(&lock);
    return result;
}

FDM_API int nvrtcCreateProgram(program_handle *program, const char *text, const char *name, int num_headers,
                               const char *const *headers, const char *const *names) {
    int result = begin("nvrtcCreateProgram");
    for (int i = 0; i < num_headers; i++)
        if (!headers[i] || !names[i])
            result = INTERNAL_ERROR;
    program_handle made = result ? NULL : calloc(1, sizeof *made);
    if (made) {
        made->text = text;
        made->name = name;
        *program = made;
    }
    return result;
}

FDM_API int nvrtcDestroyProgram(program_handle *program) {
    int result = begin("nvrtcDestroyProgram");
    free((*program)->code);
    free(*program);
    *program = NULL;
    return result;
}

static void write_down(const char *code) {
    uint64_t hash = 0xcbf29ce484222325ull;
    for (const char *at = code; *at; at++)
        hash = (hash ^ (unsigned char)*at) * 0x100000001b3ull;
    pthread_mutex_lock(&lock);
    int64_t known = 0;
    while (known < state.num_distinct && state.compiled[known] != hash)
        known++;
    if (known == state.num_distinct && known < PROGRAMS_MAX)
        state.compiled[state.num_distinct++] = hash;
    state.num_compiled++;
    pthread_mutex_unlock(&lock);
}

/* Waits while a program with this option is held. */
static void wait_while_held(int num_options, const char *const *options) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_options; i++)
        if (*state.held && strcmp(options[i], state.held) == 0) {
            state.num_held++;
            while (strcmp(options[i], state.held) == 0)
                pthread_cond_wait(&released, &lock);
            state.num_held--;
        }
    pthread_mutex_unlock(&lock);
}

FDM_API int nvrtcCompileProgram(program_handle program, int num_options, const char *const *options) {
    int result = begin("nvrtcCompileProgram");
    size_t bytes = strlen(program->text) + strlen(program->name) + 64;
    for (int i = 0; i < num_options; i++)
        bytes += strlen(options[i]) + 1;
    usleep(COMPILE_MICROSECONDS);
    wait_while_held(num_options, options);
    program->failed = result;
    program->compiled = 1;
    program->silent = state.cached;
    for (int i = 0; i < num_options; i++)
        program->silent &= strcmp(options[i], "--no-cache") != 0;
    program->code = malloc(bytes);
    size_t used = (size_t)snprintf(program->code, bytes, "fake cubin\n%s", program->name);
    for (int i = 0; i < num_options; i++)
        used += (size_t)snprintf(program->code + used, bytes - used, " %s", options[i]);
    if (!result)
        write_down(program->code);
    snprintf(program->code + used, bytes - used, "\n%s", program->text);
    return result;
}

FDM_API int nvrtcGetCUBINSize(program_handle program, size_t *bytes) {
    int result = begin("nvrtcGetCUBINSize");
    if (!result)
        *bytes = program->failed ? 0 : strlen(program->code) + 1;
    return result;
}

FDM_API int nvrtcGetCUBIN(program_handle program, char *code) {
    int result = begin("nvrtcGetCUBIN");
    if (!result)
        memcpy(code, program->code, strlen(program->code) + 1);
    return result;
}

static const char *log_of(program_handle program) {
    return !program->compiled || program->silent ? ""
           : program->failed == INVALID_OPTION   ? old_log
           : program->failed                     ? failed_log
                                                 : sound_log;
}

FDM_API int nvrtcGetProgramLogSize(program_handle program, size_t *bytes) {
    int result = begin("nvrtcGetProgramLogSize");
    if (!result)
        *bytes = strlen(log_of(program)) + 1;
    return result;
}

FDM_API int nvrtcGetProgramLog(program_handle program, char *text) {
    int result = begin("nvrtcGetProgramLog");
    if (!result)
        memcpy(text, log_of(program), strlen(log_of(program)) + 1);
    return result;
}

FDM_API const char *nvrtcGetErrorString(int result) {
    return result == 6    ? "NVRTC_ERROR_COMPILATION"
           : result == 11 ? "NVRTC_ERROR_INTERNAL_ERROR"
                          : "NVRTC_ERROR unknown";
}

/* ---- for tests ---- */

static void inject(const char *function, int result, int64_t nth) {
    pthread_mutex_lock(&lock);
    state.ready = 1;
    state.injection = (struct injection){.result = result, .nth = nth};
    snprintf(state.injection.function, sizeof state.injection.function, "%s", function);
    pthread_mutex_unlock(&lock);
}

static void hold(const char *option) {
    pthread_mutex_lock(&lock);
    snprintf(state.held, sizeof state.held, "%s", option);
    pthread_cond_broadcast(&released);
    pthread_mutex_unlock(&lock);
}

static int64_t num_held(void) {
    pthread_mutex_lock(&lock);
    int64_t held = state.num_held;
    pthread_mutex_unlock(&lock);
    return held;
}

static void cached(int on) { state.cached = on; }

static const char *injected(void) { return state.injection.injected; }

static int64_t num_compiled(void) {
    pthread_mutex_lock(&lock);
    int64_t compiled = state.num_compiled;
    pthread_mutex_unlock(&lock);
    return compiled;
}

static int64_t num_distinct(void) {
    pthread_mutex_lock(&lock);
    int64_t distinct = state.num_distinct;
    pthread_mutex_unlock(&lock);
    return distinct;
}

FDM_API const struct fake_nvrtc fake_nvrtc = {inject, injected, num_compiled, num_distinct, cached, hold, num_held};
