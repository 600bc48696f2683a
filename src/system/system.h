/* system.h: what operating systems do in different ways: memory, the environment, libraries, processors, threads.
 * linux.c, macos.c, windows.c and windows_text.c have it, but for what Linux and macOS share, which is in posix.c. The
 * build takes those of its system. */
#ifndef FDM_SYSTEM_H
#define FDM_SYSTEM_H

#include <stddef.h>
#include <stdint.h>

/* ---- memory ---- */

/* Memory at a multiple of 64 bytes, of a multiple of 64 bytes; NULL: there is none. */
void *system_allocate(size_t bytes);
void system_release(void *memory);

/* ---- the environment ---- */

/* The value of a variable, in UTF-8; NULL: it is not set. Valid as long as getenv()'s. */
const char *system_variable(const char *name);

/* ---- shared libraries ---- */

/* Opens a library by its path or name, for this library's use alone; NULL: it cannot be, and system_library_error()
 * says why. Closed by system_close_library(). */
void *system_open_library(const char *name);
/* The same where the process has it already; NULL where not. */
void *system_open_loaded_library(const char *path);
void system_close_library(void *library);
/* The last failure of this thread. Valid until its next call of these functions. */
const char *system_library_error(void);
/* The address of a function; NULL: the library does not have it. */
void *system_symbol(void *library, const char *name);
/* The path of an open library. Returns 0 where it is not known or longer than size - 1. */
int system_library_path(void *library, char *path, size_t size);

/* Calls visit(path, argument) for each library of the process until it returns other than 0, and returns that. `visit`
 * may not open or close libraries. */
int system_visit_libraries(int (*visit)(const char *path, void *argument), void *argument);
/* A number that is another one whenever a library has been loaded since. */
uint64_t system_libraries_loaded(void);
/* The path of the library or program that `inside` points into. Returns 0 where it is not known or longer than
 * size - 1. */
int system_path_of(const void *inside, char *path, size_t size);
/* Keeps the library that `inside` points into for the rest of the process. */
void system_keep_library(const void *inside);

/* The CUDA driver, the file of NVRTC's version `major` and that of its builtins, as this system names them. `name`
 * receives `size` bytes. */
extern const char system_cuda_driver[];
void system_nvrtc_name(int32_t major, char *name, size_t size);
void system_nvrtc_builtins_name(int32_t major, int32_t minor, char *name, size_t size);

/* Folders that may hold NVRTC; the last of a list is NULL. '#' stands for a number. */
struct system_nvrtc_folders {
    const char *in_packages[3];   /* below site-packages; # is NVRTC's major version */
    const char *in_environment;   /* site-packages below a virtual environment; # is Python's minor version */
    const char *in_toolkits[3];   /* below a CUDA toolkit */
    const char *toolkits[3];      /* where toolkits lie; # is NVRTC's major version */
    const char *toolkit_variable; /* of the environment, which names a toolkit that comes before those */
    char separator;               /* between the folders of PYTHONPATH */
};
extern const struct system_nvrtc_folders system_nvrtc_folders;

/* ---- processors and threads ---- */

/* CPUs that this process may run on; at least 1. */
int32_t system_usable_cpus(void);
/* Bytes of a CPU's data cache of level 1 to 3; 0: there is none, or nobody says. */
int64_t system_cache_bytes(int level);
/* Asks for the state of AMX tiles; 1: granted. */
int system_request_tiles(void);

/* Names the calling thread, for debuggers. */
void system_name_thread(const char *name);
/* Whether this process was forked and has not called exec since; 0 where nobody says. */
int system_is_forked_child(void);
/* Calls handler() in every child that is forked from now on. Returns 0, or an error number. */
int system_call_in_children(void (*handler)(void));
/* Between these two, threads that start receive no signals of the process. `old` keeps the mask. */
struct system_signals {
    uint64_t words[16]; /* a sigset_t */
};
void system_block_signals(struct system_signals *old);
void system_restore_signals(const struct system_signals *old);

#endif
