/* fake_nccl.c: a pretended NCCL for tests on machines without GPUs; see fake_nccl.h. Messages are copies between host
 * memory, made by whoever polls when both sides have come. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "fake_nccl.h"
#include "flash_dmattn.h"
#include "injection.h"
#include "parallel/nccl.h"

enum {
    RANKS_MAX = 8,
    WORLDS_MAX = 4096,
    MESSAGES_MAX = 4096,
    IN_PROGRESS = NCCL_IN_PROGRESS,
    REMOTE = 6,
    ARGUMENT = 4
};

struct message {
    int peer, is_send, taken;
    char *memory;
    size_t bytes;
};

struct world;
struct nccl_comm {
    struct world *world;
    int rank, device, polls_left;
    int64_t operations; /* begun */
    int is_busy, left;
    nccl_result failed;
    int num_messages;
    struct message messages[MESSAGES_MAX];
};
struct world {
    int ranks, joined, left;
    nccl_comm members[RANKS_MAX];
    char id[128];
    struct world *parent; /* of a split */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct world *worlds[WORLDS_MAX];
static int num_worlds, live_comms, delay_polls;
static void *last_stream;
static int64_t num_ids;
static struct injection injection;
static _Thread_local struct {
    int depth, num;
    nccl_comm comm;
    struct message list[MESSAGES_MAX];
} group;

static int fails(const char *function) {
    static int ready;
    pthread_mutex_lock(&lock);
    if (!ready)
        injection = injection_parse(getenv("FAKE_NCCL_FAIL"));
    ready = 1;
    const int result = injection_due(&injection, function);
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- worlds ---- */

static struct world *new_world(int ranks, const char *id, struct world *parent) {
    struct world *w = calloc(1, sizeof *w);
    w->ranks = ranks;
    w->parent = parent;
    if (id)
        memcpy(w->id, id, sizeof w->id);
    worlds[num_worlds++] = w;
    return w;
}

/* The world of an id, or of a parent's next split, that has no such rank yet. */
static struct world *world_of(int ranks, const char *id, struct world *parent, int rank) {
    for (int n = 0; n < num_worlds; n++)
        if (worlds[n]->parent == parent && !worlds[n]->members[rank] && worlds[n]->ranks == ranks &&
            (parent || !memcmp(worlds[n]->id, id, sizeof worlds[n]->id)))
            return worlds[n];
    return new_world(ranks, id, parent);
}

static nccl_comm join(struct world *w, int rank, int device) {
    nccl_comm comm = calloc(1, sizeof *comm);
    comm->world = w;
    comm->rank = rank;
    comm->device = device;
    w->members[rank] = comm;
    w->joined++;
    live_comms++;
    return comm;
}

/* ---- operations ---- */

static int is_done(const struct nccl_comm *comm) {
    for (int i = 0; i < comm->num_messages; i++)
        if (!comm->messages[i].taken)
            return 0;
    return 1;
}

/* The first message of `from` to `to` that nobody has taken. */
static struct message *sent_by(nccl_comm from, int to) {
    for (int i = 0; from && i < from->num_messages; i++)
        if (from->messages[i].is_send && from->messages[i].peer == to && !from->messages[i].taken)
            return &from->messages[i];
    return NULL;
}

static void receive_what_is_there(nccl_comm comm) {
    for (int i = 0; i < comm->num_messages; i++) {
        struct message *m = &comm->messages[i];
        if (m->is_send || m->taken)
            continue;
        nccl_comm peer = comm->world->members[m->peer];
        struct message *sent = peer && peer->is_busy ? sent_by(peer, comm->rank) : NULL;
        if (!sent)
            return; /* in their order */
        if (sent->bytes != m->bytes)
            comm->failed = peer->failed = ARGUMENT; /* NCCL would hang or write past */
        else
            memcpy(m->memory, sent->memory, m->bytes);
        m->taken = sent->taken = 1;
    }
}

/* A rank that is still joining its world is done when all have. */
static nccl_result progress(nccl_comm comm) {
    if (comm->failed)
        return comm->failed;
    if (comm->world->left && (comm->is_busy || comm->world->joined < comm->world->ranks))
        return comm->failed = REMOTE;
    if (comm->polls_left > 0) {
        comm->polls_left--;
        return IN_PROGRESS;
    }
    if (comm->world->joined < comm->world->ranks)
        return IN_PROGRESS;
    if (!comm->is_busy)
        return NCCL_SUCCESS;
    receive_what_is_there(comm);
    if (comm->failed)
        return comm->failed;
    if (!is_done(comm))
        return IN_PROGRESS;
    comm->is_busy = 0;
    return NCCL_SUCCESS;
}

static nccl_result begin(nccl_comm comm, const struct message *list, int count) {
    pthread_mutex_lock(&lock);
    comm->num_messages = count;
    memcpy(comm->messages, list, (size_t)count * sizeof *list);
    comm->is_busy = 1;
    comm->polls_left = delay_polls;
    pthread_mutex_unlock(&lock);
    return IN_PROGRESS;
}

/* ---- NCCL's functions ---- */

FDM_API nccl_result ncclGetVersion(int *version) {
    const char *set = getenv("FAKE_NCCL_VERSION");
    *version = set ? atoi(set) : 22809;
    return fails("ncclGetVersion");
}

FDM_API const char *ncclGetErrorString(nccl_result result) {
    return result == REMOTE ? "remote process exited or there was a network error" : "pretended fault";
}

FDM_API nccl_result ncclGetUniqueId(struct nccl_id *id) {
    pthread_mutex_lock(&lock);
    memset(id, 0, sizeof *id);
    num_ids++;
    memcpy(id->bytes, &num_ids, sizeof num_ids);
    pthread_mutex_unlock(&lock);
    return fails("ncclGetUniqueId");
}

static int config_is_right(const struct nccl_config *config) {
    return config && config->size == sizeof *config && config->magic == 0xcafebeef && config->blocking == 0;
}

FDM_API nccl_result ncclCommInitRankConfig(nccl_comm *comm, int ranks, struct nccl_id id, int rank,
                                           struct nccl_config *config) {
    const int result = fails("ncclCommInitRankConfig");
    if (result || !config_is_right(config))
        return result ? result : ARGUMENT;
    pthread_mutex_lock(&lock);
    *comm = join(world_of(ranks, id.bytes, NULL, rank), rank, 0);
    (*comm)->polls_left = delay_polls;
    pthread_mutex_unlock(&lock);
    return IN_PROGRESS;
}

FDM_API nccl_result ncclCommSplit(nccl_comm comm, int color, int key, nccl_comm *made, struct nccl_config *config) {
    const int result = fails("ncclCommSplit");
    if (result || color || key != comm->rank || !config_is_right(config))
        return result ? result : ARGUMENT;
    pthread_mutex_lock(&lock);
    *made = join(world_of(comm->world->ranks, NULL, comm->world, comm->rank), comm->rank, comm->device);
    (*made)->polls_left = delay_polls;
    pthread_mutex_unlock(&lock);
    return IN_PROGRESS;
}

FDM_API nccl_result ncclCommCount(nccl_comm comm, int *count) {
    *count = comm->world->ranks;
    return fails("ncclCommCount");
}
FDM_API nccl_result ncclCommUserRank(nccl_comm comm, int *rank) {
    *rank = comm->rank;
    return fails("ncclCommUserRank");
}
FDM_API nccl_result ncclCommCuDevice(nccl_comm comm, int *device) {
    *device = comm->device;
    return fails("ncclCommCuDevice");
}

FDM_API nccl_result ncclCommGetAsyncError(nccl_comm comm, nccl_result *result) {
    const int failed = fails("ncclCommGetAsyncError");
    pthread_mutex_lock(&lock);
    *result = progress(comm);
    pthread_mutex_unlock(&lock);
    return failed;
}

/* The memory stays: peers may look at it. */
FDM_API nccl_result ncclCommAbort(nccl_comm comm) {
    pthread_mutex_lock(&lock);
    comm->world->left = 1;
    comm->is_busy = 0;
    live_comms--;
    pthread_mutex_unlock(&lock);
    return fails("ncclCommAbort");
}

FDM_API nccl_result ncclCommDestroy(nccl_comm comm) {
    pthread_mutex_lock(&lock);
    (void)comm;
    live_comms--;
    pthread_mutex_unlock(&lock);
    return fails("ncclCommDestroy");
}

FDM_API nccl_result ncclGroupStart(void) {
    const int result = fails("ncclGroupStart");
    if (!result)
        group.depth++;
    return result;
}

static nccl_result add(nccl_comm comm, int peer, int is_send, void *memory, size_t bytes, void *stream) {
    if (group.depth < 1 || peer < 0 || peer >= comm->world->ranks || peer == comm->rank)
        return ARGUMENT;
    group.comm = comm;
    pthread_mutex_lock(&lock);
    last_stream = stream;
    pthread_mutex_unlock(&lock);
    group.list[group.num++] = (struct message){peer, is_send, 0, memory, bytes};
    return NCCL_SUCCESS;
}

FDM_API nccl_result ncclSend(const void *memory, size_t count, int dtype, int peer, nccl_comm comm, void *stream) {
    const int result = fails("ncclSend");
    return result                ? result
           : dtype != NCCL_UINT8 ? ARGUMENT
                                 : add(comm, peer, 1, (void *)(uintptr_t)memory, count, stream);
}

FDM_API nccl_result ncclRecv(void *memory, size_t count, int dtype, int peer, nccl_comm comm, void *stream) {
    const int result = fails("ncclRecv");
    return result ? result : dtype != NCCL_UINT8 ? ARGUMENT : add(comm, peer, 0, memory, count, stream);
}

FDM_API nccl_result ncclGroupEnd(void) {
    const int result = fails("ncclGroupEnd"), count = group.num;
    group.depth--;
    group.num = 0;
    if (result || !count)
        return result;
    return begin(group.comm, group.list, count);
}

FDM_API nccl_result ncclAllGather(const void *mine, void *all, size_t count, int dtype, nccl_comm comm, void *stream) {
    static _Thread_local struct message list[2 * RANKS_MAX];
    const int result = fails("ncclAllGather");
    int num = 0;
    (void)stream;
    if (result || dtype != NCCL_UINT8)
        return result ? result : ARGUMENT;
    for (int peer = 0; peer < comm->world->ranks; peer++) {
        char *place = (char *)all + (size_t)peer * count;
        if (peer == comm->rank) {
            memmove(place, mine, count);
            continue;
        }
        list[num++] = (struct message){peer, 1, 0, (void *)(uintptr_t)mine, count};
        list[num++] = (struct message){peer, 0, 0, place, count};
    }
    return begin(comm, list, num);
}

/* ---- what tests set ---- */

static const char *injected(void) { return injection.injected; }
static void delay(int polls) { delay_polls = polls; }
static int live(void) { return live_comms; }

static void *callers(int ranks, int rank, int device) {
    static const char id[128] = "the caller's";
    pthread_mutex_lock(&lock);
    nccl_comm comm = join(world_of(ranks, id, NULL, rank), rank, device);
    pthread_mutex_unlock(&lock);
    return comm;
}
static void release_callers(void *comm) { ncclCommAbort(comm); }
static void *stream_of_last(void) { return last_stream; }

FDM_API const struct fake_nccl fake_nccl = {injected, delay, live, callers, release_callers, stream_of_last};
