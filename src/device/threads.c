/* threads.c: how many threads a call may use, and who runs them: the host, its OpenMP runtime, or the own pool. */
#include "device/threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "device/pool.h"
#include "device/quota.h"
#include "system/system.h"

/* ThreadSanitizer does not see libgomp's synchronisation. */
#if defined(__SANITIZE_THREAD__)
#    define OPENMP_USABLE 0
#elif defined(__has_feature)
#    if __has_feature(thread_sanitizer)
#        define OPENMP_USABLE 0
#    endif
#endif
#ifndef OPENMP_USABLE
#    define OPENMP_USABLE 1
#endif

/* ---- an OpenMP runtime that the process has loaded (torch's, as a rule): its threads are shared, not doubled ---- */

static struct {
    atomic_int ready;  /* the functions below are set */
    atomic_int forked; /* this process is a child: its team may be gone, and it would hang (GCC PR 60035) */
    atomic_ullong libraries_loaded; /* system_libraries_loaded() before the last search */
    void (*parallel)(void (*body)(void *), void *argument, unsigned num_threads, unsigned flags); /* GOMP_parallel */
    int (*max_threads)(void), (*in_parallel)(void), (*thread_num)(void), (*num_threads)(void);
} openmp;

static pthread_mutex_t openmp_mutex = PTHREAD_MUTEX_INITIALIZER;

/* GNU's runtime, under wheels' hashed names too (libgomp-a34b3233.so.1); LLVM's and Intel's have the same entry. */
enum { LIBRARY_PATH_BYTES = 4096 };
static int keep_openmp(const char *path, void *found) {
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    int matches = strncmp(name, "libgomp", 7) == 0 || strncmp(name, "libiomp5", 8) == 0 ||
                  strncmp(name, "libomp.", 7) == 0 || strncmp(name, "libomp-", 7) == 0;
    if (!matches || strlen(path) >= LIBRARY_PATH_BYTES)
        return 0;
    strcpy(found, path);
    return 1;
}

static int find_function(void *library, const char *name, void *function_pointer) {
    void *symbol = system_symbol(library, name);
    memcpy(function_pointer, &symbol, sizeof symbol);
    return symbol != NULL;
}

/* A runtime may be loaded at any time, so the search is done again whenever the process has other libraries. */
static void openmp_find(void) {
    char path[LIBRARY_PATH_BYTES];
    const uint64_t loaded = system_libraries_loaded();
    if (loaded == atomic_load(&openmp.libraries_loaded))
        return;
    if (!system_visit_libraries(keep_openmp, path)) {
        atomic_store(&openmp.libraries_loaded, loaded);
        return;
    }
    pthread_mutex_lock(&openmp_mutex);
    void *library = atomic_load(&openmp.ready) ? NULL : system_open_loaded_library(path);
    if (library) {
        int complete = find_function(library, "GOMP_parallel", &openmp.parallel) &&
                       find_function(library, "omp_get_max_threads", &openmp.max_threads) &&
                       find_function(library, "omp_in_parallel", &openmp.in_parallel) &&
                       find_function(library, "omp_get_thread_num", &openmp.thread_num) &&
                       find_function(library, "omp_get_num_threads", &openmp.num_threads);
        atomic_store(&openmp.ready, complete);
        if (!complete)
            system_close_library(library);
        atomic_store(&openmp.libraries_loaded, loaded);
    }
    pthread_mutex_unlock(&openmp_mutex);
}

static int openmp_usable(void) {
    if (!OPENMP_USABLE || atomic_load(&openmp.forked))
        return 0;
    if (!atomic_load(&openmp.ready))
        openmp_find();
    return atomic_load(&openmp.ready);
}

struct openmp_job {
    void (*body)(void *argument, int32_t index);
    void *argument;
    int32_t num_threads;
};

/* The runtime may grant fewer threads than asked for. */
static void openmp_body(void *argument) {
    const struct openmp_job *job = argument;
    int32_t team = openmp.num_threads();
    for (int32_t index = openmp.thread_num(); index < job->num_threads; index += team)
        job->body(job->argument, index);
}

/* ---- forked children ---- */

static void in_child(void) {
    atomic_store(&openmp.forked, 1);
    openmp_mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    pool_forget();
}

/* When the library is loaded, since the host may have used its OpenMP runtime before our first call, and may have
 * forked. What a parent did with an OpenMP runtime before the fork is not known in its child, so the runtime is left
 * alone there. */
__attribute__((constructor)) static void register_fork(void) {
    atomic_store(&openmp.forked, system_is_forked_child());
    system_call_in_children(in_child);
}

/* ---- counting ---- */

static int32_t quota;
static void read_quota(void) { quota = quota_cpus(""); }

int32_t threads_available(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_quota);
    int32_t cpus = system_usable_cpus();
    if (quota > 0 && quota < cpus)
        cpus = quota;
    return cpus;
}

static void limit(int32_t *count, int32_t most) {
    if (most < *count)
        *count = most;
}

int32_t threads_for(int32_t wanted, const fdm_executor *executor) {
    int32_t count = threads_available();
    if (wanted > 0)
        limit(&count, wanted);
    if (executor)
        limit(&count, executor->num_threads);
    else if (count > 1 && openmp_usable())
        limit(&count, openmp.in_parallel() ? 1 : openmp.max_threads());
    return count > 0 ? count : 1;
}

/* ---- running ---- */

/* 1 when somebody else ran the body; 0 = the caller has to. */
static int run_parallel(const fdm_executor *executor, int32_t num_threads, void (*body)(void *, int32_t),
                        void *argument) {
    if (executor) {
        if (executor->run)
            executor->run(executor->context, num_threads, body, argument);
        return executor->run != NULL;
    }
    if (!openmp_usable())
        return pool_run(num_threads, num_threads <= threads_available(), body, argument);
    if (openmp.in_parallel())
        return 0;
    struct openmp_job job = {body, argument, num_threads};
    openmp.parallel(openmp_body, &job, (unsigned)num_threads, 0);
    return 1;
}

void threads_run(const fdm_executor *executor, int32_t num_threads, void (*body)(void *argument, int32_t index),
                 void *argument) {
    if (num_threads > 1 && run_parallel(executor, num_threads, body, argument))
        return;
    for (int32_t index = 0; index < num_threads; index++)
        body(argument, index);
}

void threads_shutdown(void) { pool_shutdown(); }
