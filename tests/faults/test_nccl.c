/* test_nccl.c: communicators over a pretended NCCL and a pretended driver: ranks are threads, every call fails in turn,
 * operations are late, and peers leave. */
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "cuda_call.h"
#include "fake_nccl.h"
#include "scenario.h"

enum { RANKS = 3, PATIENCE_MS = 300 };

static const struct fake_nccl *nccl(void) {
    static const struct fake_nccl *known;
    if (!known)
        known = dlsym(dlopen("libnccl.so.2", RTLD_NOW), "fake_nccl");
    assert_non_null(known);
    return known;
}

struct rank {
    int rank;
    uint8_t id[FDM_NCCL_ID_BYTES];
    void *callers; /* NULL: by id */
    int leaves;    /* 1: it never comes to the exchange */
    fdm_status status;
    char sentence[400];
};

/* Each rank sends every other one a number, and gets one of each. */
static fdm_status swap_numbers(fdm_communicator *c) {
    int32_t sent[RANKS][2], received[RANKS][2] = {{0}};
    fdm_message sends[2 * RANKS], receives[2 * RANKS];
    int32_t n = 0;
    for (int32_t peer = 0; peer < RANKS; peer++)
        for (int32_t i = 0; i < 2 && peer != c->rank; i++, n++) { /* two messages between two ranks, in their order */
            sent[peer][i] = 100 * c->rank + 10 * peer + i;
            sends[n] = (fdm_message){.peer = peer, .memory = &sent[peer][i], .bytes = sizeof sent[peer][i]};
            receives[n] = (fdm_message){.peer = peer, .memory = &received[peer][i], .bytes = sizeof received[peer][i]};
        }
    const fdm_status status = c->exchange(c->context, sends, n, receives, n, NULL);
    for (int32_t peer = 0; !status && peer < RANKS; peer++)
        for (int32_t i = 0; i < 2 && peer != c->rank; i++)
            if (received[peer][i] != 100 * peer + 10 * c->rank + i)
                return FDM_ERROR_INTERNAL;
    return status;
}

static fdm_status share_numbers(fdm_communicator *c) {
    int64_t all[RANKS];
    const int64_t mine = 7 * c->rank;
    const fdm_status status = c->share(c->context, &mine, sizeof mine, all);
    for (int32_t peer = 0; !status && peer < RANKS; peer++)
        if (all[peer] != 7 * peer)
            return FDM_ERROR_INTERNAL;
    return status;
}

static void *run_rank(void *argument) {
    struct rank *r = argument;
    fdm_communicator c = {.struct_bytes = sizeof c};
    fdm_status status = r->callers ? fdm_nccl_communicator(r->callers, PATIENCE_MS, &c)
                                   : fdm_nccl_communicator_of_id(r->id, RANKS, r->rank, 0, PATIENCE_MS, &c);
    if (!status && (c.ranks != RANKS || c.rank != r->rank || c.device_type != FDM_CUDA))
        status = FDM_ERROR_INTERNAL;
    if (!status)
        status = share_numbers(&c);
    if (!status && r->leaves == 1) {
        c.abort(c.context);
        status = c.poll(c.context);
    } else if (!status && r->leaves == 2) {
        fdm_nccl_release(&c); /* it ends, and does not come to the exchange */
        return NULL;
    } else if (!status) {
        status = swap_numbers(&c);
    }
    if (!status)
        status = fdm_wait(&c, (fdm_device_id){FDM_CUDA, 0}, NULL, PATIENCE_MS);
    r->status = status;
    snprintf(r->sentence, sizeof r->sentence, "%s", fdm_last_error());
    if (c.context)
        fdm_nccl_release(&c);
    return NULL;
}

static void run_all(struct rank *ranks, int by_callers) {
    pthread_t threads[RANKS];
    uint8_t id[FDM_NCCL_ID_BYTES];
    const fdm_status status = by_callers ? FDM_OK : fdm_nccl_id(id);
    for (int r = 0; r < RANKS; r++) {
        ranks[r].rank = r;
        ranks[r].status = status;
        ranks[r].callers = by_callers ? nccl()->callers(RANKS, r, 0) : NULL;
        if (!by_callers)
            memcpy(ranks[r].id, id, sizeof id);
    }
    for (int r = 0; !status && r < RANKS; r++)
        assert_int_equal(pthread_create(&threads[r], NULL, run_rank, &ranks[r]), 0);
    for (int r = 0; !status && r < RANKS; r++)
        pthread_join(threads[r], NULL);
    for (int r = 0; by_callers && r < RANKS; r++)
        nccl()->release_callers(ranks[r].callers);
    assert_int_equal(nccl()->live(), 0);
    assert_int_equal(fake_driver()->live().allocations, 0);
    assert_int_equal(memory_live(), 0);
}

static void moves_messages(void) {
    for (int polls = 0; polls < 4; polls += 3)
        for (int by_callers = 0; by_callers < 2; by_callers++) {
            struct rank ranks[RANKS] = {{0}};
            nccl()->delay(polls);
            run_all(ranks, by_callers);
            for (int r = 0; r < RANKS; r++)
                if (ranks[r].status)
                    fail_msg("rank %d: %s", r, ranks[r].sentence);
        }
}

/* Every rank ends: those that saw nothing wrong, or with a sentence of the peer that is gone. */
static void a_call_fails(int by_callers) {
    struct rank ranks[RANKS] = {{0}};
    int failed = 0;
    nccl()->delay(1);
    run_all(ranks, by_callers);
    const char *injected = nccl()->injected();
    scenario_past_the_end = !*injected;
    for (int r = 0; r < RANKS; r++) {
        failed += ranks[r].status != FDM_OK;
        if (ranks[r].status && ranks[r].status != FDM_ERROR_REMOTE && strcmp(injected, "ncclGetVersion") != 0)
            fail_msg("%s fails, rank %d: %d %s", injected, r, ranks[r].status, ranks[r].sentence);
    }
    assert_int_equal(failed > 0, *injected && strcmp(injected, "ncclCommAbort") && strcmp(injected, "ncclCommDestroy"));
}
static void a_call_by_id_fails(void) { a_call_fails(0); }
static void a_call_by_split_fails(void) { a_call_fails(1); }

static void a_peer_leaves(void) {
    for (int how = 1; how < 3; how++) {
        struct rank ranks[RANKS] = {{.leaves = 0}, {.leaves = how}, {.leaves = 0}};
        nccl()->delay(0);
        run_all(ranks, 0);
        for (int r = 0; r < RANKS; r += 2) {
            assert_int_equal(ranks[r].status, FDM_ERROR_REMOTE);
            if (!strstr(ranks[r].sentence, how == 1 ? "remote process exited" : "took longer than 300 ms") &&
                !strstr(ranks[r].sentence, "remote process"))
                fail_msg("rank %d: %s", r, ranks[r].sentence);
        }
    }
}

/* Operations that never end are given up after the caller's time. */
static void a_late_peer_is_not_waited_for(void) {
    struct rank ranks[RANKS] = {{0}};
    nccl()->delay(1 << 30);
    run_all(ranks, 0);
    for (int r = 0; r < RANKS; r++) {
        assert_int_equal(ranks[r].status, FDM_ERROR_REMOTE);
        assert_true(strstr(ranks[r].sentence, "took longer than 300 ms") ||
                    strstr(ranks[r].sentence, "remote process"));
    }
}

static void an_old_library_is_refused(void) {
    uint8_t id[FDM_NCCL_ID_BYTES];
    assert_int_equal(fdm_nccl_id(id), FDM_ERROR_UNSUPPORTED);
    assert_string_equal(fdm_last_error(), "NCCL is 2.17; 2.18 or later is needed");
}

static void no_library_is_one_sentence(void) {
    fdm_communicator c = {.struct_bytes = sizeof c};
    int anything;
    assert_int_equal(fdm_nccl_communicator(&anything, 0, &c), FDM_ERROR_UNSUPPORTED);
    assert_non_null(strstr(fdm_last_error(), "NCCL cannot be opened: "));
    assert_int_equal(fdm_nccl_communicator(NULL, 0, &c), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "nccl is NULL"));
    assert_null(c.context);
    fdm_nccl_release(&c);
    assert_int_equal(memory_live(), 0);
}

int main(int argc, char **argv) {
    static const struct scenario scenarios[] = {
        {"moves_messages", moves_messages, NULL, 0},
        {"a_call_by_id_fails", a_call_by_id_fails, "FAKE_NCCL_FAIL=*:3:%", 1},
        {"a_call_by_split_fails", a_call_by_split_fails, "FAKE_NCCL_FAIL=*:3:%", 1},
        {"a_peer_leaves", a_peer_leaves, NULL, 0},
        {"a_late_peer_is_not_waited_for", a_late_peer_is_not_waited_for, NULL, 0},
        {"an_old_library_is_refused", an_old_library_is_refused, "FAKE_NCCL_VERSION=21701", 0},
        {"no_library_is_one_sentence", no_library_is_one_sentence, "LD_LIBRARY_PATH=/nowhere", 0},
    };
    return scenarios_main(argc, argv, scenarios, (int)(sizeof scenarios / sizeof scenarios[0]));
}
