/* patience.h: waiting for what is polled, for so long and no longer. */
#ifndef FDM_PARALLEL_PATIENCE_H
#define FDM_PARALLEL_PATIENCE_H

#include <stdint.h>
#include <time.h>

struct patience {
    struct timespec end;
};

static inline struct patience patience_start(int64_t milliseconds) {
    struct patience p;
    clock_gettime(CLOCK_MONOTONIC, &p.end);
    p.end.tv_sec += (time_t)(milliseconds / 1000);
    p.end.tv_nsec += (long)(milliseconds % 1000) * 1000000;
    p.end.tv_sec += p.end.tv_nsec / 1000000000;
    p.end.tv_nsec %= 1000000000;
    return p;
}

/* Sleeps for 50 us. 0: the time is over. */
static inline int patience_wait(const struct patience *p) {
    const struct timespec nap = {0, 50000};
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (now.tv_sec > p->end.tv_sec || (now.tv_sec == p->end.tv_sec && now.tv_nsec >= p->end.tv_nsec))
        return 0;
    nanosleep(&nap, NULL);
    return 1;
}

#endif
