/* ranks_run.c: agreement of ranks, execution, and waiting for peers. */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/struct_bytes.h"
#include "cuda/cuda.h"
#include "parallel/patience.h"
#include "parallel/ranks_call.h"
#include "parallel/ranks_local.h"

/* ---- agreement ---- */

enum { HEADER_VERSION = 1, HEADER_WORDS = 12 };

/* What ranks compare, by the names of a sentence. */
struct header {
    uint64_t version; /* of this struct */
    char library[16];
    int64_t has_plan;
    uint64_t words[HEADER_WORDS];
    char sentence[256]; /* of a rank without a plan */
};
static const char *const word_names[HEADER_WORDS] = {
    "the number of ranks", "the pass",      "the batch",  "the dtype", "the query heads", "the KV heads",
    "the head dims",       "other options", "the layout", "the mask",  "the algorithm",   "the keys that travel"};

static uint64_t options_hash(const fdm_problem *p) {
    fdm_problem rest = *p;
    rest.aligned = rest.scores_aligned = rest.q_mappable = rest.keys_mappable = rest.scores_mappable = 0;
    return hash_bytes(0xcbf29ce484222325u, &rest, sizeof rest);
}

static void fill_header(const fdm_ranks_plan *plan, struct header *h) {
    memset(h, 0, sizeof *h);
    h->version = HEADER_VERSION;
    snprintf(h->library, sizeof h->library, "%s", fdm_version());
    if (!plan) {
        snprintf(h->sentence, sizeof h->sentence, "%s", fdm_last_error());
        return;
    }
    const fdm_problem *p = &plan->problem;
    const uint64_t words[HEADER_WORDS] = {(uint64_t)plan->ranks,
                                          (uint64_t)p->pass,
                                          (uint64_t)p->batch,
                                          (uint64_t)p->dtype,
                                          (uint64_t)p->heads,
                                          (uint64_t)p->heads_kv,
                                          (uint64_t)(p->head_dim << 16 | p->head_dim_v),
                                          options_hash(p),
                                          plan->layout_hash,
                                          plan->mask_hash,
                                          (uint64_t)plan->algorithm + ((uint64_t)plan->head_ranks << 8),
                                          plan->table_hash + (uint64_t)plan->sets.count};
    h->has_plan = 1;
    memcpy(h->words, words, sizeof words);
}

static fdm_status break_off(fdm_communicator *c, const char *what) {
    c->broken = 1;
    return error_set(FDM_ERROR_REMOTE,
                     "a peer of rank %d failed, ended or was late while %s; the communicator takes no "
                     "more calls",
                     c->rank, what);
}

/* The first difference, as a sentence that every rank words alike. */
static fdm_status compare(const struct header *all, int32_t ranks, int own_plan) {
    for (int32_t r = 0; r < ranks; r++)
        if (all[r].version != all[0].version || memcmp(all[r].library, all[0].library, sizeof all[r].library))
            return error_set(FDM_ERROR_INVALID_ARGUMENT, "ranks differ in the library: rank 0 has %.15s, rank %d %.15s",
                             all[0].library, r, all[r].library);
    for (int32_t r = 0; r < ranks; r++)
        if (!all[r].has_plan)
            return own_plan ? error_set(FDM_ERROR_INVALID_ARGUMENT, "rank %d has no plan: %.240s", r, all[r].sentence)
                            : FDM_ERROR_INVALID_ARGUMENT; /* whose own sentence stays */
    for (int w = 0; w < HEADER_WORDS; w++)
        for (int32_t r = 1; r < ranks; r++)
            if (all[r].words[w] != all[0].words[w])
                return error_set(FDM_ERROR_INVALID_ARGUMENT, "ranks differ in %s: rank 0 has %llx, rank %d %llx",
                                 word_names[w], (unsigned long long)all[0].words[w], r,
                                 (unsigned long long)all[r].words[w]);
    return FDM_OK;
}

static fdm_status check_communicator(fdm_communicator *c) {
    const fdm_status status = STRUCT_CHECK(fdm_communicator, c);
    if (status)
        return status;
    if (c->struct_bytes < sizeof *c || !c->exchange || !c->share || c->ranks < 1 || c->rank < 0 || c->rank >= c->ranks)
        return error_set(FDM_ERROR_INVALID_ARGUMENT,
                         "the communicator lacks exchange() or share(), or is of rank %d of %d", c->rank, c->ranks);
    return c->broken
               ? error_set(FDM_ERROR_REMOTE, "the communicator takes no more calls: a peer failed in an earlier one")
               : FDM_OK;
}

fdm_status fdm_agree(const fdm_ranks_plan *plan, fdm_communicator *communicator) {
    struct header own;
    fill_header(plan, &own);
    fdm_status status = check_communicator(communicator);
    if (status)
        return status;
    struct header *all = memory_allocate((size_t)communicator->ranks * sizeof *all);
    if (!all)
        return error_set(FDM_ERROR_OUT_OF_MEMORY, "no memory for the headers of %d ranks", communicator->ranks);
    if (plan && (plan->ranks != communicator->ranks || plan->rank != communicator->rank)) {
        own.has_plan = 0;
        snprintf(own.sentence, sizeof own.sentence, "its plan is for rank %d of %d, its communicator for rank %d of %d",
                 plan->rank, plan->ranks, communicator->rank, communicator->ranks);
    }
    if (communicator->share(communicator->context, &own, sizeof own, all))
        status = break_off(communicator, "ranks compared their plans");
    else
        status = compare(all, communicator->ranks, plan != NULL);
    memory_release(all);
    return status;
}

/* ---- execution ---- */

/* This rank tells its peers nothing more: they would wait for it. */
static fdm_status leave(fdm_communicator *c, fdm_status status) {
    c->broken = 1;
    if (c->abort)
        (*c->abort)(c->context);
    return status;
}

fdm_status fdm_execute_ranks(const fdm_ranks_plan *plan, const fdm_tensors *tensors, void *workspace,
                             size_t workspace_bytes, fdm_communicator *communicator, const fdm_launch *launch) {
    fdm_tensors tensors_room;
    fdm_launch launch_room;
    fdm_status status = check_communicator(communicator);
    if (status)
        return status;
    if (!plan)
        status = error_set(FDM_ERROR_INVALID_ARGUMENT, "plan is NULL");
    else if (!(tensors = STRUCT_READ(fdm_tensors, tensors, &tensors_room)) ||
             (launch && !(launch = STRUCT_READ(fdm_launch, launch, &launch_room))))
        status = FDM_ERROR_INVALID_ARGUMENT;
    else if (communicator->ranks != plan->ranks || communicator->rank != plan->rank)
        status =
            error_set(FDM_ERROR_INVALID_ARGUMENT, "the plan is for rank %d of %d, the communicator for rank %d of %d",
                      plan->rank, plan->ranks, communicator->rank, communicator->ranks);
    else if (communicator->device_type != plan->device.id.type)
        status =
            error_set(FDM_ERROR_INVALID_ARGUMENT, "the communicator moves memory of DLPack device %d; the plan's is %d",
                      communicator->device_type, plan->device.id.type);
    else if (!workspace || workspace_bytes < plan->workspace_bytes || (uintptr_t)workspace % 64)
        status =
            error_set(FDM_ERROR_WORKSPACE, "workspace has %zu bytes at a multiple of %d; the plan needs %zu, at 64",
                      workspace ? workspace_bytes : 0, (uintptr_t)workspace % 64 ? 1 : 64, plan->workspace_bytes);
    else
        status = local_check(plan, tensors);
    if (status)
        return leave(communicator, status);
    struct ranks_call call = {.plan = plan,
                              .tensors = tensors,
                              .communicator = communicator,
                              .launch = launch,
                              .stream = launch ? launch->stream : NULL,
                              .base = workspace,
                              .at = workspace};
    const int64_t bytes = plan->messages_max * (int64_t)sizeof(fdm_message);
    call.sends = plan->messages;
    call.receives = plan->messages + plan->messages_max;
    if (!plan->messages) {
        call.sends = (fdm_message *)(void *)call_take(&call, bytes);
        call.receives = (fdm_message *)(void *)call_take(&call, bytes);
    }
    status = ranks_run(&call, plan->algorithm);
    status = status ? status : call.status;
    return status ? leave(communicator, status) : FDM_OK;
}
/* ---- waiting ---- */

fdm_status fdm_wait(fdm_communicator *communicator, fdm_device_id device, void *stream, int64_t milliseconds) {
    fdm_status status = check_communicator(communicator);
    const struct patience patience = patience_start(milliseconds > 0 ? milliseconds : 0);
    for (int32_t done = device.type == FDM_CPU; !status;) {
        if (communicator->poll && communicator->poll(communicator->context))
            status = break_off(communicator, "work was waited for");
        else if (done)
            return FDM_OK;
        else if (!(status = cuda_stream_done(device.index, stream, &done)) && !done && !patience_wait(&patience))
            status = break_off(communicator, "work was waited for");
    }
    return communicator && communicator->broken ? leave(communicator, status) : status;
}
