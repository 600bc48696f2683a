/* windows.c: system.h on Windows. Threads are pthreads of the compiler's runtime. */
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include <psapi.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "system/system.h"
#include "system/windows.h"

void *system_allocate(size_t bytes) { return _aligned_malloc(bytes, 64); }
void system_release(void *memory) { _aligned_free(memory); }

/* ---- shared libraries ---- */

enum { PATH_WORDS = 4096 };

const char system_cuda_driver[] = "nvcuda.dll";
void system_nvrtc_name(int32_t major, char *name, size_t size) { snprintf(name, size, "nvrtc64_%d0_0.dll", major); }
void system_nvrtc_builtins_name(int32_t major, int32_t minor, char *name, size_t size) {
    snprintf(name, size, "nvrtc-builtins64_%d%d.dll", major, minor);
}
const struct system_nvrtc_folders system_nvrtc_folders = {
    .in_packages = {"/nvidia/cu#/bin/x86_64", "/nvidia/cuda_nvrtc/bin"},
    .in_environment = "/Lib/site-packages",
    .in_toolkits = {"/bin/x64", "/bin"},
    .toolkit_variable = "CUDA_PATH",
    .toolkits = {"C:/Program Files/NVIDIA GPU Computing Toolkit/CUDA/v#.0"},
    .separator = ';',
};

/* With a path the libraries beside it are found too; a bare name is looked for in the system's folders, never in the
 * current one. */
void *system_open_library(const char *name) {
    wchar_t wide[PATH_WORDS];
    if (!windows_wide(name, wide, PATH_WORDS))
        return NULL;
    const DWORD flags = strchr(name, '/') ? LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR | LOAD_LIBRARY_SEARCH_DEFAULT_DIRS
                                          : LOAD_LIBRARY_SEARCH_DEFAULT_DIRS;
    return LoadLibraryExW(wide, NULL, flags);
}
void *system_open_loaded_library(const char *path) {
    wchar_t wide[PATH_WORDS];
    HMODULE library = NULL;
    if (windows_wide(path, wide, PATH_WORDS))
        GetModuleHandleExW(0, wide, &library);
    return library;
}
void system_close_library(void *library) { FreeLibrary(library); }

const char *system_library_error(void) {
    static _Thread_local char sentence[48];
    snprintf(sentence, sizeof sentence, "Windows error %lu", (unsigned long)GetLastError());
    return sentence;
}

void *system_symbol(void *library, const char *name) {
    void *symbol;
    const FARPROC found = GetProcAddress(library, name);
    memcpy(&symbol, &found, sizeof symbol);
    return symbol;
}

int system_library_path(void *library, char *path, size_t size) {
    wchar_t wide[PATH_WORDS];
    const DWORD length = GetModuleFileNameW(library, wide, PATH_WORDS);
    return length > 0 && length < PATH_WORDS && windows_narrow(wide, path, size);
}

int system_visit_libraries(int (*visit)(const char *path, void *argument), void *argument) {
    HMODULE all[1024];
    DWORD bytes = 0;
    int result = 0;
    if (!K32EnumProcessModules(GetCurrentProcess(), all, sizeof all, &bytes))
        return 0;
    for (DWORD n = 0; n < bytes / sizeof *all && n < sizeof all / sizeof *all && !result; n++) {
        char path[PATH_WORDS];
        if (system_library_path(all[n], path, sizeof path))
            result = visit(path, argument);
    }
    return result;
}
/* Nobody counts, and no OpenMP runtime of Windows has the entries that threads.c looks for. */
uint64_t system_libraries_loaded(void) { return 0; }

int system_path_of(const void *inside, char *path, size_t size) {
    HMODULE library;
    return GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
                              inside, &library) &&
           system_library_path(library, path, size);
}

void system_keep_library(const void *inside) {
    HMODULE library;
    GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_PIN, inside, &library);
}

/* ---- processors and threads ---- */

int32_t system_usable_cpus(void) {
    DWORD_PTR own, all;
    if (!GetProcessAffinityMask(GetCurrentProcess(), &own, &all) || !own)
        return 1;
    return (int32_t)__builtin_popcountll(own);
}

int64_t system_cache_bytes(int level) {
    DWORD bytes = 0;
    int64_t found = 0;
    GetLogicalProcessorInformation(NULL, &bytes);
    SYSTEM_LOGICAL_PROCESSOR_INFORMATION *all = malloc(bytes);
    if (all && GetLogicalProcessorInformation(all, &bytes))
        for (DWORD n = 0; n < bytes / sizeof *all && !found; n++)
            if (all[n].Relationship == RelationCache && all[n].Cache.Level == level &&
                all[n].Cache.Type != CacheInstruction)
                found = all[n].Cache.Size;
    free(all);
    return found;
}

/* Windows 11 has a call for it, which nobody has tried here. */
int system_request_tiles(void) { return 0; }

void system_name_thread(const char *name) { pthread_setname_np(pthread_self(), name); }

/* There is no fork, and there are no signals that threads receive. */
int system_is_forked_child(void) { return 0; }
int system_call_in_children(void (*handler)(void)) {
    (void)handler;
    return 0;
}
void system_block_signals(struct system_signals *old) { (void)old; }
void system_restore_signals(const struct system_signals *old) { (void)old; }
