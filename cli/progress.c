/* progress.c: one line on a terminal for work that takes long. A thread writes it, so that a single long call shows. */
#include <pthread.h>
#include <stdarg.h>
#include <time.h>

#include "cli.h"
#include "system/streams.h"

enum { PATIENCE_SECONDS = 1, TEXT_MAX = 96 };

static struct {
    pthread_mutex_t lock;
    pthread_once_t once;
    int shows, drawn;
    char text[TEXT_MAX]; /* "" = nothing to show */
    struct timespec since;
} state = {.lock = PTHREAD_MUTEX_INITIALIZER, .once = PTHREAD_ONCE_INIT};

static double seconds_since(const struct timespec *start) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(now.tv_sec - start->tv_sec) + 1e-9 * (double)(now.tv_nsec - start->tv_nsec);
}

static void *draw_often(void *unused) {
    for (;;) {
        nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
        pthread_mutex_lock(&state.lock);
        const double seconds = seconds_since(&state.since);
        if (state.text[0] && seconds >= PATIENCE_SECONDS)
            state.drawn = fprintf(stderr, "\r%s, %.0f s ... \033[K", state.text, seconds) > 0;
        pthread_mutex_unlock(&state.lock);
    }
    return unused;
}

static void start(void) {
    pthread_t thread;
    state.shows = system_has_terminal() && pthread_create(&thread, NULL, draw_often, NULL) == 0;
    if (state.shows)
        pthread_detach(thread);
}

void progress(const char *format, ...) {
    pthread_once(&state.once, start);
    if (!state.shows)
        return;
    pthread_mutex_lock(&state.lock);
    if (!state.text[0])
        clock_gettime(CLOCK_MONOTONIC, &state.since);
    state.text[0] = 0;
    if (format) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(state.text, sizeof state.text, format, arguments);
        va_end(arguments);
    } else if (state.drawn) {
        fputs("\r\033[K", stderr);
        state.drawn = 0;
    }
    pthread_mutex_unlock(&state.lock);
}
