/* posix.c: what Linux and macOS do alike. */
#define _GNU_SOURCE /* dladdr, RTLD_NOLOAD */
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "system/system.h"

void *system_allocate(size_t bytes) { return aligned_alloc(64, bytes); }
void system_release(void *memory) { free(memory); }

const char *system_variable(const char *name) { return getenv(name); }

void *system_open_library(const char *name) { return dlopen(name, RTLD_NOW | RTLD_LOCAL); }
void *system_open_loaded_library(const char *path) { return dlopen(path, RTLD_LAZY | RTLD_NOLOAD); }
void system_close_library(void *library) { dlclose(library); }
const char *system_library_error(void) {
    const char *why = dlerror();
    return why ? why : "unknown error";
}
void *system_symbol(void *library, const char *name) { return dlsym(library, name); }

const struct system_nvrtc_folders system_nvrtc_folders = {
    .in_packages = {"/nvidia/cu#/lib", "/nvidia/cuda_nvrtc/lib"},
    .in_environment = "/lib/python3.#/site-packages",
    .in_toolkits = {"/lib64", "/targets/x86_64-linux/lib"},
    .toolkit_variable = "CUDA_HOME",
    .toolkits = {"/usr/local/cuda", "/usr/local/cuda-#"},
    .separator = ':',
};

int system_path_of(const void *inside, char *path, size_t size) {
    Dl_info info;
    if (!dladdr(inside, &info) || !info.dli_fname || strlen(info.dli_fname) >= size)
        return 0;
    strcpy(path, info.dli_fname);
    return 1;
}

void system_keep_library(const void *inside) {
    Dl_info info;
    if (dladdr(inside, &info) && info.dli_fname)
        dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

int system_call_in_children(void (*handler)(void)) { return pthread_atfork(NULL, NULL, handler); }

_Static_assert(sizeof(sigset_t) <= sizeof(struct system_signals), "a mask fits");

void system_block_signals(struct system_signals *old) {
    sigset_t all, now;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &now);
    memcpy(old->words, &now, sizeof now);
}
void system_restore_signals(const struct system_signals *old) {
    sigset_t now;
    memcpy(&now, old->words, sizeof now);
    pthread_sigmask(SIG_SETMASK, &now, NULL);
}
