/* thread_ranks.c: exchanges between threads: all post what they send, then copy what they receive. */
#include "thread_ranks.h"

#include <stdio.h>
#include <string.h>

/* The emulated device takes calls of one thread at a time. */
static void use_device(struct thread_ranks *a, int uses) {
    if (a->device_type == FDM_CUDA && uses)
        pthread_mutex_lock(&a->device);
    else if (a->device_type == FDM_CUDA)
        pthread_mutex_unlock(&a->device);
}

static void copy_message(const struct thread_ranks *a, void *to, const void *from, size_t bytes) {
    const fdm_device_id id = {FDM_CUDA, 0};
    if (a->device_type == FDM_CUDA)
        fdm_memory_copy(to, id, from, id, bytes);
    else
        memcpy(to, from, bytes);
}

/* 1: every rank has come here. 0: one is gone. */
static int meet(struct thread_ranks *a) {
    if (a->device_type == FDM_CUDA)
        fdm_synchronize((fdm_device_id){FDM_CUDA, 0});
    use_device(a, 0);
    pthread_mutex_lock(&a->lock);
    const int64_t turn = a->turn;
    if (++a->waiting == a->ranks && !a->left) {
        a->waiting = 0;
        a->turn++;
        pthread_cond_broadcast(&a->changed);
    }
    while (a->turn == turn && !a->left)
        pthread_cond_wait(&a->changed, &a->lock);
    const int met = a->turn != turn;
    pthread_mutex_unlock(&a->lock);
    use_device(a, 1);
    return met;
}

static void leave(void *context) {
    struct thread_ranks *a = ((struct thread_rank *)context)->all;
    pthread_mutex_lock(&a->lock);
    a->left = 1;
    pthread_cond_broadcast(&a->changed);
    pthread_mutex_unlock(&a->lock);
}

/* 0: this call fails, or its rank is gone for good. */
static int may_go_on(struct thread_rank *r) {
    pthread_mutex_lock(&r->all->lock);
    const int64_t call = ++r->all->calls;
    const int fails = call == r->all->fail_at || call == r->all->leave_at;
    pthread_mutex_unlock(&r->all->lock);
    if (fails)
        leave(r);
    return !fails;
}

/* The n-th message of a peer to this rank; NULL: there is none. */
static const fdm_message *message_from(const struct thread_ranks *a, int32_t peer, int32_t to, int32_t n) {
    for (int32_t i = 0; i < a->posts[peer].num_sends; i++)
        if (a->posts[peer].sends[i].peer == to && n-- == 0)
            return &a->posts[peer].sends[i];
    return NULL;
}

static fdm_status exchange(void *context, const fdm_message *sends, int32_t num_sends, const fdm_message *receives,
                           int32_t num_receives, void *stream) {
    struct thread_rank *r = context;
    struct thread_ranks *a = r->all;
    int32_t taken[THREAD_RANKS_MAX] = {0};
    int fits = 1;
    (void)stream;
    if (!may_go_on(r))
        return FDM_ERROR_REMOTE;
    a->posts[r->rank].sends = sends;
    a->posts[r->rank].num_sends = num_sends;
    if (!meet(a))
        return FDM_ERROR_REMOTE;
    for (int32_t i = 0; i < num_receives; i++) {
        const int32_t peer = receives[i].peer;
        const fdm_message *sent = message_from(a, peer, r->rank, taken[peer]++);
        fits &= sent && sent->bytes == receives[i].bytes && peer != r->rank;
        if (sent && sent->bytes == receives[i].bytes)
            copy_message(a, receives[i].memory, sent->memory, sent->bytes);
    }
    for (int32_t peer = 0; peer < a->ranks; peer++) /* nothing is sent that nobody expects */
        fits &= !message_from(a, peer, r->rank, taken[peer]);
    if (!meet(a))
        return FDM_ERROR_REMOTE;
    return fits ? FDM_OK : FDM_ERROR_INTERNAL;
}

static fdm_status share(void *context, const void *mine, size_t bytes, void *all) {
    struct thread_rank *r = context;
    struct thread_ranks *a = r->all;
    if (!may_go_on(r))
        return FDM_ERROR_REMOTE;
    a->posts[r->rank].mine = mine;
    if (!meet(a))
        return FDM_ERROR_REMOTE;
    for (int32_t peer = 0; peer < a->ranks; peer++)
        memcpy((char *)all + (size_t)peer * bytes, a->posts[peer].mine, bytes);
    return meet(a) ? FDM_OK : FDM_ERROR_REMOTE;
}

static fdm_status poll_peers(void *context) {
    return ((struct thread_rank *)context)->all->left ? FDM_ERROR_REMOTE : FDM_OK;
}

static void *start(void *argument) {
    struct thread_rank *r = argument;
    use_device(r->all, 1);
    r->status = (fdm_status)r->run(r, r->argument);
    use_device(r->all, 0);
    snprintf(r->sentence, sizeof r->sentence, "%s", fdm_last_error());
    return NULL;
}

void thread_ranks_run(struct thread_ranks *all, int32_t ranks, struct thread_rank *each,
                      int (*run)(struct thread_rank *rank, void *argument), void *argument) {
    pthread_t threads[THREAD_RANKS_MAX];
    const int64_t fail_at = all->fail_at, leave_at = all->leave_at;
    const int32_t device_type = all->device_type;
    memset(all, 0, sizeof *all);
    all->fail_at = fail_at;
    all->leave_at = leave_at;
    all->device_type = device_type;
    all->ranks = ranks;
    pthread_mutex_init(&all->lock, NULL);
    pthread_cond_init(&all->changed, NULL);
    pthread_mutex_init(&all->device, NULL);
    for (int32_t r = 0; r < ranks; r++) {
        each[r] = (struct thread_rank){.all = all, .rank = r, .run = run, .argument = argument};
        each[r].communicator = (fdm_communicator){.struct_bytes = sizeof(fdm_communicator),
                                                  .ranks = ranks,
                                                  .rank = r,
                                                  .device_type = device_type ? device_type : FDM_CPU,
                                                  .context = &each[r],
                                                  .exchange = exchange,
                                                  .share = share,
                                                  .poll = poll_peers,
                                                  .abort = leave};
        pthread_create(&threads[r], NULL, start, &each[r]);
    }
    for (int32_t r = 0; r < ranks; r++)
        pthread_join(threads[r], NULL);
    pthread_mutex_destroy(&all->lock);
    pthread_cond_destroy(&all->changed);
    pthread_mutex_destroy(&all->device);
}
