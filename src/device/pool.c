/* pool.c: the library's own threads.
 *
 * One call at a time owns the pool (`busy`). It publishes its work by a ticket, (sequence << 16 | participants), whose
 * release-store makes the job visible; a thread whose index is below `participants` takes part and counts `left` down,
 * so the job stays untouched until all of them are done. Threads wait for the next ticket by spinning for a moment,
 * then asleep on a condition variable. */
#include "device/pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "system/system.h"

enum { POOL_WORKERS_MAX = 1023, POOL_STOP = 0xffff, SPIN_NANOSECONDS = 30000 };

static struct {
    atomic_int busy, spin;
    _Atomic uint64_t ticket;
    atomic_int left;     /* participants that have not finished */
    atomic_int sleepers; /* threads that wait on `work` */
    atomic_int caller_sleeps;
    pthread_mutex_t mutex; /* only for the two condition variables */
    pthread_cond_t work, done;
    void (*body)(void *argument, int32_t index);
    void *argument;
    int32_t num_indices;
    int32_t num_workers; /* owned by whoever holds busy, as are the handles */
    pthread_t workers[POOL_WORKERS_MAX];
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* ---- waiting ---- */

static uint64_t wait_ticket(uint64_t seen) {
    uint64_t ticket = atomic_load(&pool.ticket);
    if (ticket == seen && atomic_load(&pool.spin)) {
        int64_t end = nanoseconds() + SPIN_NANOSECONDS;
        do
            for (int i = 0; i < 16 && (ticket = atomic_load(&pool.ticket)) == seen; i++)
                relax();
        while (ticket == seen && nanoseconds() < end);
    }
    if (ticket != seen)
        return ticket;
    pthread_mutex_lock(&pool.mutex);
    atomic_fetch_add(&pool.sleepers, 1); /* before the look at the ticket: see publish() */
    while ((ticket = atomic_load(&pool.ticket)) == seen)
        pthread_cond_wait(&pool.work, &pool.mutex);
    atomic_fetch_sub(&pool.sleepers, 1);
    pthread_mutex_unlock(&pool.mutex);
    return ticket;
}

static void wait_done(void) {
    int64_t end = 0;
    for (int i = 0; atomic_load(&pool.left) > 0; i++) {
        relax();
        if (i % 16 != 15)
            continue;
        if (!end)
            end = nanoseconds() + (atomic_load(&pool.spin) ? SPIN_NANOSECONDS : 0);
        else if (nanoseconds() >= end)
            break;
    }
    if (atomic_load(&pool.left) == 0)
        return;
    pthread_mutex_lock(&pool.mutex);
    atomic_store(&pool.caller_sleeps, 1);
    while (atomic_load(&pool.left) > 0)
        pthread_cond_wait(&pool.done, &pool.mutex);
    atomic_store(&pool.caller_sleeps, 0);
    pthread_mutex_unlock(&pool.mutex);
}

static void publish(uint32_t participants) {
    uint64_t sequence = (atomic_load(&pool.ticket) >> 16) + 1;
    atomic_store(&pool.ticket, sequence << 16 | participants);
    if (atomic_load(&pool.sleepers) == 0)
        return;
    pthread_mutex_lock(&pool.mutex);
    pthread_cond_broadcast(&pool.work);
    pthread_mutex_unlock(&pool.mutex);
}

/* ---- working ---- */

/* With fewer threads than indices each takes every participants-th. */
static void run_indices(int32_t first, int32_t participants) {
    for (int32_t index = first; index < pool.num_indices; index += participants)
        pool.body(pool.argument, index);
}

static void *work(void *argument) {
    int32_t index = (int32_t)(intptr_t)argument;
    uint64_t ticket = 0;
    system_name_thread("flash_dmattn");
    for (;;) {
        ticket = wait_ticket(ticket);
        int32_t participants = (int32_t)(ticket & 0xffff);
        if (participants == POOL_STOP)
            return NULL;
        if (index >= participants)
            continue;
        run_indices(index, participants);
        if (atomic_fetch_sub(&pool.left, 1) == 1 && atomic_load(&pool.caller_sleeps)) {
            pthread_mutex_lock(&pool.mutex);
            pthread_cond_signal(&pool.done);
            pthread_mutex_unlock(&pool.mutex);
        }
    }
}

/* Threads that cannot be started are done without. */
static void start_workers(int32_t wanted) {
    if (wanted > POOL_WORKERS_MAX)
        wanted = POOL_WORKERS_MAX;
    if (pool.num_workers >= wanted)
        return;
    if (pool.num_workers == 0)
        system_keep_library(&pool); /* the threads run its code, which a dlclose() would unmap */
    /* Signals are for the host's threads; the new ones inherit the mask. */
    struct system_signals old;
    system_block_signals(&old);
    while (pool.num_workers < wanted &&
           pthread_create(&pool.workers[pool.num_workers], NULL, work, (void *)(intptr_t)(pool.num_workers + 1)) == 0)
        pool.num_workers++;
    system_restore_signals(&old);
}

int pool_run(int32_t num_threads, int spin, void (*body)(void *argument, int32_t index), void *argument) {
    int idle = 0;
    if (!atomic_compare_exchange_strong(&pool.busy, &idle, 1))
        return 0;
    start_workers(num_threads - 1);
    int32_t participants = num_threads < pool.num_workers + 1 ? num_threads : pool.num_workers + 1;
    if (participants > 1) {
        pool.body = body;
        pool.argument = argument;
        pool.num_indices = num_threads;
        atomic_store(&pool.spin, spin);
        atomic_store(&pool.left, participants - 1);
        publish((uint32_t)participants);
        run_indices(0, participants);
        wait_done();
    }
    atomic_store(&pool.busy, 0);
    return participants > 1;
}

void pool_shutdown(void) {
    for (int idle = 0; !atomic_compare_exchange_strong(&pool.busy, &idle, 1); idle = 0)
        sched_yield();
    publish(POOL_STOP);
    for (int32_t i = 0; i < pool.num_workers; i++)
        pthread_join(pool.workers[i], NULL);
    pool.num_workers = 0;
    atomic_store(&pool.ticket, 0); /* what a new thread takes as already seen */
    atomic_store(&pool.busy, 0);
}

void pool_forget(void) {
    pool.num_workers = 0;
    atomic_store(&pool.ticket, 0);
    atomic_store(&pool.left, 0);
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.caller_sleeps, 0);
    pool.mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    pool.work = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    pool.done = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    atomic_store(&pool.busy, 0);
}
