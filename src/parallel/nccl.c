/* nccl.c: a communicator over NCCL, which is found in the process or opened by its name; nothing links to it.
 *
 * Its communicators are non-blocking, so that no call waits for a peer inside NCCL: what is under way is polled until
 * it is done, fails, or takes longer than the caller's timeout; then it is aborted. */
#include "parallel/nccl.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/struct_bytes.h"
#include "cuda/cuda.h"
#include "cuda/driver.h"
#include "parallel/patience.h"
#include "system/system.h"

static struct {
    pthread_once_t once;
    struct nccl nccl;
    fdm_status status;
    char sentence[200];
} opened = {.once = PTHREAD_ONCE_INIT};

/* ---- the library ---- */

static fdm_status refuse(fdm_status status, const char *format, const char *detail) {
    snprintf(opened.sentence, sizeof opened.sentence, format, detail);
    return status;
}

static fdm_status resolve(void *library) {
    const struct {
        const char *name;
        void *place;
    } functions[] = {
#define NCCL_PLACE(member, name, parameters) {name, &opened.nccl.member},
        NCCL_FUNCTIONS(NCCL_PLACE)
#undef NCCL_PLACE
    };
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++)
        if (!(*(void **)functions[i].place = system_symbol(library, functions[i].name)))
            return refuse(FDM_ERROR_UNSUPPORTED, "NCCL has no %s: 2.18 or later is needed", functions[i].name);
    *(void **)&opened.nccl.error_string = system_symbol(library, "ncclGetErrorString");
    if (opened.nccl.get_version(&opened.nccl.version))
        return refuse(FDM_ERROR_SYSTEM, "NCCL does not tell its version%s", "");
    char text[32];
    snprintf(text, sizeof text, "%d.%d", opened.nccl.version / 10000, opened.nccl.version % 10000 / 100);
    return opened.nccl.version < NCCL_OLDEST
               ? refuse(FDM_ERROR_UNSUPPORTED, "NCCL is %s; 2.18 or later is needed", text)
               : FDM_OK;
}

static void open_nccl(void) {
    static const char name[] = "libnccl.so.2";
    void *library = system_open_loaded_library(name);
    if (!library)
        library = system_open_library(name);
    opened.status =
        library ? resolve(library) : refuse(FDM_ERROR_UNSUPPORTED, "NCCL cannot be opened: %s", system_library_error());
}

static fdm_status nccl_get(const struct nccl **nccl) {
    pthread_once(&opened.once, open_nccl);
    *nccl = &opened.nccl;
    return opened.status ? error_set(opened.status, "%s", opened.sentence) : FDM_OK;
}

static fdm_status nccl_failed(const struct nccl *nccl, nccl_result result, const char *what) {
    const char *words = nccl->error_string ? nccl->error_string(result) : NULL;
    return error_set(FDM_ERROR_REMOTE, "%s failed: NCCL says %s (%d)", what, words ? words : "nothing", result);
}

/* ---- a communicator ---- */

struct context {
    const struct nccl *nccl;
    nccl_comm comm;
    int32_t device, ranks;
    int64_t milliseconds;
    char *shared; /* device memory for share() */
    size_t shared_bytes;
};

/* Until what was begun is done; NULL of comm: it was not made. */
static fdm_status settle(const struct context *c, nccl_result result, const char *what) {
    const struct patience patience = patience_start(c->milliseconds);
    while (result == NCCL_IN_PROGRESS) {
        nccl_result now = NCCL_SUCCESS;
        if (c->nccl->async_error(c->comm, &now))
            return error_set(FDM_ERROR_REMOTE, "%s failed: NCCL does not tell its state", what);
        result = now;
        if (result == NCCL_IN_PROGRESS && !patience_wait(&patience))
            return error_set(FDM_ERROR_REMOTE, "%s took longer than %lld ms: a peer is late or gone", what,
                             (long long)c->milliseconds);
    }
    return result ? nccl_failed(c->nccl, result, what) : FDM_OK;
}

static void abort_comm(void *context) {
    struct context *c = context;
    if (c->comm)
        c->nccl->break_off(c->comm);
    c->comm = NULL;
}

/* After a failure peers may still read and write what this rank has lent: NCCL lets go of it before the caller does. */
static fdm_status end_if(struct context *c, fdm_status status) {
    if (status)
        abort_comm(c);
    return status;
}

static fdm_status exchange(void *context, const fdm_message *sends, int32_t num_sends, const fdm_message *receives,
                           int32_t num_receives, void *stream) {
    struct context *c = context;
    const struct nccl *nccl = c->nccl;
    if (!c->comm)
        return error_set(FDM_ERROR_REMOTE, "the communicator was ended");
    nccl_result result = nccl->group_start();
    if (result)
        return end_if(c, nccl_failed(nccl, result, "beginning an exchange"));
    for (int32_t i = 0; i < num_sends && (!result || result == NCCL_IN_PROGRESS); i++)
        result = nccl->send(sends[i].memory, sends[i].bytes, NCCL_UINT8, sends[i].peer, c->comm, stream);
    for (int32_t i = 0; i < num_receives && (!result || result == NCCL_IN_PROGRESS); i++)
        result = nccl->receive(receives[i].memory, receives[i].bytes, NCCL_UINT8, receives[i].peer, c->comm, stream);
    const nccl_result ended = nccl->group_end(); /* a group that was begun is ended, whatever failed in it */
    if (result && result != NCCL_IN_PROGRESS)
        return end_if(c, nccl_failed(nccl, result, "an exchange"));
    return end_if(c, settle(c, ended, "an exchange"));
}

static fdm_status wait_for(struct context *c, void *stream, const char *what) {
    const struct patience patience = patience_start(c->milliseconds);
    fdm_status status = FDM_OK;
    for (int32_t done = 0; !status && !done;) {
        nccl_result result = NCCL_SUCCESS;
        if ((status = cuda_stream_done(c->device, stream, &done)) || done)
            break;
        if (c->nccl->async_error(c->comm, &result) || (result && result != NCCL_IN_PROGRESS))
            status = nccl_failed(c->nccl, result, what);
        else if (!patience_wait(&patience))
            status = error_set(FDM_ERROR_REMOTE, "%s took longer than %lld ms: a peer is late or gone", what,
                               (long long)c->milliseconds);
    }
    return status;
}

/* NCCL moves device memory alone. */
static fdm_status share(void *context, const void *mine, size_t bytes, void *all) {
    struct context *c = context;
    const size_t whole = bytes * (size_t)c->ranks;
    fdm_status status = FDM_OK;
    if (!c->comm)
        return error_set(FDM_ERROR_REMOTE, "the communicator was ended");
    if (c->shared_bytes < whole + bytes) {
        cuda_memory_release(c->device, c->shared);
        c->shared = NULL;
        c->shared_bytes = 0;
        if ((status = cuda_memory_allocate(c->device, whole + bytes, (void **)&c->shared)))
            return status;
        c->shared_bytes = whole + bytes;
    }
    if ((status = cuda_memory_copy(c->device, c->shared + whole, mine, bytes, 0)))
        return status;
    const nccl_result result = c->nccl->all_gather(c->shared + whole, c->shared, bytes, NCCL_UINT8, c->comm, NULL);
    status = settle(c, result, "comparing ranks");
    if (!status)
        status = wait_for(c, NULL, "comparing ranks");
    return status ? end_if(c, status) : cuda_memory_copy(c->device, all, c->shared, whole, 1);
}

static fdm_status poll_peers(void *context) {
    const struct context *c = context;
    nccl_result result = NCCL_SUCCESS;
    const nccl_result asked = c->nccl->async_error(c->comm, &result);
    if (asked || (result && result != NCCL_IN_PROGRESS))
        return nccl_failed(c->nccl, asked ? asked : result, "the communication of ranks");
    return FDM_OK;
}

/* What a broken communicator must not be asked: its copy is gone. */
static fdm_status poll_or_gone(void *context) {
    return ((struct context *)context)->comm ? poll_peers(context)
                                             : error_set(FDM_ERROR_REMOTE, "the communicator was ended");
}

/* A copy that peers may still be talking to is ended in peace, unless it is broken. */
static void release_context(struct context *c, int is_broken) {
    if (c->comm && !is_broken)
        c->nccl->destroy(c->comm);
    else
        abort_comm(c);
    cuda_memory_release(c->device, c->shared);
    memory_release(c);
}

/* ---- making ---- */

static struct nccl_config new_config(void) {
    return (struct nccl_config){.size = sizeof(struct nccl_config),
                                .magic = 0xcafebeef,
                                .version = NCCL_OLDEST,
                                .blocking = 0,
                                .cga_cluster_size = NCCL_UNDEFINED,
                                .min_ctas = NCCL_UNDEFINED,
                                .max_ctas = NCCL_UNDEFINED,
                                .split_share = NCCL_UNDEFINED};
}

static fdm_status finish(struct context *c, fdm_status status, int32_t ranks, int32_t rank,
                         fdm_communicator *communicator) {
    const fdm_communicator made = {.ranks = ranks,
                                   .rank = rank,
                                   .device_type = FDM_CUDA,
                                   .context = c,
                                   .exchange = exchange,
                                   .share = share,
                                   .poll = poll_or_gone,
                                   .abort = abort_comm};
    c->ranks = ranks;
    if (!status)
        status = STRUCT_WRITE(fdm_communicator, communicator, &made);
    if (status)
        release_context(c, 1);
    return status;
}

static fdm_status start(int64_t milliseconds, fdm_communicator *communicator, struct context **context) {
    const struct nccl *nccl;
    fdm_status status = STRUCT_CHECK(fdm_communicator, communicator);
    if (status || (status = nccl_get(&nccl)))
        return status;
    if (!(*context = memory_allocate(sizeof **context)))
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for a communicator");
    **context = (struct context){.nccl = nccl, .milliseconds = milliseconds > 0 ? milliseconds : 600000};
    return FDM_OK;
}

fdm_status fdm_nccl_communicator(void *comm, int64_t milliseconds, fdm_communicator *communicator) {
    struct context *c;
    int ranks = 0, rank = 0, device = 0;
    if (!comm)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "nccl is NULL: its communicator is not there before the process group's first collective");
    fdm_status status = start(milliseconds, communicator, &c);
    if (status)
        return status;
    nccl_result result = c->nccl->count(comm, &ranks);
    if (!result)
        result = c->nccl->user_rank(comm, &rank);
    if (!result)
        result = c->nccl->device_of(comm, &device);
    if (result)
        return finish(c, nccl_failed(c->nccl, result, "asking the caller's communicator"), 0, 0, communicator);
    struct nccl_config config = new_config();
    c->device = device;
    result = c->nccl->split(comm, 0, rank, &c->comm, &config);
    if (result == NCCL_IN_PROGRESS && !c->comm) /* the parent is non-blocking, and the copy comes with it */
        c->comm = comm, status = settle(c, result, "splitting the caller's communicator"), c->comm = NULL;
    else
        status = settle(c, result, "splitting the caller's communicator");
    return finish(c, status, ranks, rank, communicator);
}

fdm_status fdm_nccl_id(uint8_t *id) {
    const struct nccl *nccl;
    struct nccl_id made;
    const fdm_status status = nccl_get(&nccl);
    if (status)
        return status;
    const nccl_result result = nccl->get_id(&made);
    if (result)
        return nccl_failed(nccl, result, "making an id");
    memcpy(id, made.bytes, sizeof made.bytes);
    return FDM_OK;
}

fdm_status fdm_nccl_communicator_of_id(const uint8_t *id, int32_t ranks, int32_t rank, int32_t device,
                                       int64_t milliseconds, fdm_communicator *communicator) {
    struct context *c;
    const struct cuda_driver *driver;
    struct cuda_context_scope scope;
    struct nccl_id copy;
    if (!id || ranks < 1 || rank < 0 || rank >= ranks)
        return error_set(FDM_ERROR_INVALID_ARGUMENT, "%s: rank %d of %d", id ? "there is no such rank" : "id is NULL",
                         rank, ranks);
    fdm_status status = start(milliseconds, communicator, &c);
    if (status)
        return status;
    memcpy(copy.bytes, id, sizeof copy.bytes);
    c->device = device;
    if ((status = cuda_driver_get(&driver)) || (status = cuda_context_enter_relaxed(driver, device, &scope)))
        return finish(c, status, ranks, rank, communicator);
    struct nccl_config config = new_config();
    const nccl_result result = c->nccl->init_rank(&c->comm, ranks, copy, rank, &config);
    status = settle(c, result, "meeting the other ranks");
    cuda_context_leave(driver, &scope);
    return finish(c, status, ranks, rank, communicator);
}

void fdm_nccl_release(fdm_communicator *communicator) {
    if (!communicator || communicator->exchange != exchange || !communicator->context)
        return;
    release_context(communicator->context, communicator->broken);
    communicator->context = NULL;
    communicator->broken = 1;
}
