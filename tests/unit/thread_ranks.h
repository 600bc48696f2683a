/* thread_ranks.h: ranks that are threads of one process, and a communicator between them. */
#ifndef FDM_THREAD_RANKS_H
#define FDM_THREAD_RANKS_H

#include <pthread.h>

#include "flash_dmattn.h"

enum { THREAD_RANKS_MAX = 8 };

/* All members are the threads' own. */
struct thread_ranks {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int32_t ranks, waiting, left; /* left: a rank is gone */
    int64_t turn;
    int64_t calls;          /* of exchange() and share(), by all ranks */
    int64_t fail_at;        /* the call that fails, 0 = none */
    int64_t leave_at;       /* the call in which a rank never answers */
    int32_t device_type;    /* of messages: 0 or FDM_CPU, or FDM_CUDA: device 0, which one rank at a time uses */
    pthread_mutex_t device; /* CUDA: held by the rank that runs */
    struct {
        const fdm_message *sends;
        int32_t num_sends;
        const void *mine;
    } posts[THREAD_RANKS_MAX];
};
struct thread_rank {
    struct thread_ranks *all;
    int32_t rank;
    fdm_communicator communicator;
    fdm_status status; /* of run() */
    char sentence[400];
    int (*run)(struct thread_rank *rank, void *argument);
    void *argument;
};

/* Starts run() once for each rank and waits for all. */
void thread_ranks_run(struct thread_ranks *all, int32_t ranks, struct thread_rank *each,
                      int (*run)(struct thread_rank *rank, void *argument), void *argument);

#endif
