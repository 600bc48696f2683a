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

/* ---- a plan's execution ---- */

enum { ROWS = 96, HEADS = 4, HEAD_DIM = 64 };

/* The tensors of a call [1, rows, HEADS, HEAD_DIM], one behind the other; nothing reads them. */
struct own_tensors {
    int64_t shape[4], lse_shape[3];
    fdm_tensor list[8], lse;
    fdm_tensors tensors;
};
static void describe_tensors(struct own_tensors *t, char *memory, int64_t rows, fdm_pass pass) {
    const int64_t bytes = ROWS * HEADS * HEAD_DIM * 2;
    fdm_tensor *l = t->list;
    *t = (struct own_tensors){.shape = {1, rows, HEADS, HEAD_DIM}, .lse_shape = {1, HEADS, rows}};
    for (int n = 0; n < 8; n++)
        l[n] = (fdm_tensor){memory + n * bytes, {FDM_CUDA, 0}, 4, fdm_data_type_of(FDM_BFLOAT16), t->shape, NULL, 0};
    t->lse = (fdm_tensor){memory + 8 * bytes, {FDM_CUDA, 0}, 3, fdm_data_type_of(FDM_FLOAT32), t->lse_shape, NULL, 0};
    t->tensors = (fdm_tensors){
        .struct_bytes = sizeof t->tensors, .q = &l[0], .k = &l[1], .v = &l[2], .out = &l[3], .lse = &t->lse};
    if (pass == FDM_BACKWARD)
        t->tensors.dout = &l[4], t->tensors.dq = &l[5], t->tensors.dk = &l[6], t->tensors.dv = &l[7];
}
enum { MEMORY_BYTES = 9 * ROWS * HEADS * HEAD_DIM * 2 };

struct execution {
    struct rank *rank;
    fdm_pass pass;
    fdm_rank_algorithm algorithm;
    char stream; /* its address is the rank's own */
};

static fdm_status plan_execution(const struct execution *e, char *memory, fdm_ranks_plan **plan) {
    const fdm_layout_wish wish = {
        .struct_bytes = sizeof wish, .kind = FDM_LAYOUT_ZIGZAG, .ranks = RANKS, .total = ROWS, .block = 16};
    const fdm_ranks_options options = {
        .struct_bytes = sizeof options, .rank = e->rank->rank, .algorithm = e->algorithm};
    fdm_options call = fdm_options_default();
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_rank_mask mask = fdm_rank_mask_default();
    struct own_tensors whole;
    fdm_layout *layout = NULL;
    fdm_problem problem;
    call.causal = mask.causal = 1;
    mask.seqlen_q = mask.seqlen_k = ROWS;
    describe_tensors(&whole, memory, ROWS, e->pass);
    fdm_status status = fdm_device_query(FDM_CUDA, 0, &device);
    if (!status)
        status = fdm_describe(e->pass, &whole.tensors, &call, &problem);
    if (!status)
        status = fdm_layout_create(&wish, &layout);
    if (!status)
        status = fdm_plan_ranks(&device, &problem, layout, NULL, &mask, &options, plan);
    fdm_layout_release(layout);
    return status;
}

/* Every rank comes to the agreement, with a plan or without. */
static fdm_status execute(struct execution *e, fdm_communicator *c) {
    static const fdm_device_id id = {FDM_CUDA, 0};
    void *memory = NULL, *workspace = NULL;
    fdm_ranks_plan *plan = NULL;
    fdm_ranks_plan_info info = {.struct_bytes = sizeof info};
    struct own_tensors own;
    fdm_status status = fdm_memory_allocate(id, MEMORY_BYTES, &memory);
    if (!status)
        status = plan_execution(e, memory, &plan);
    const fdm_status agreed = fdm_agree(plan, c);
    if (!status && !(status = agreed) && !(status = fdm_ranks_plan_query(plan, &info)))
        status = fdm_memory_allocate(id, (size_t)info.workspace_bytes, &workspace);
    if (plan && !agreed) { /* without a workspace it fails, and its peers hear of it */
        describe_tensors(&own, memory, info.rows, e->pass);
        const fdm_launch launch = {.struct_bytes = sizeof launch, .stream = &e->stream};
        fake_driver()->begin_capture(1);
        fdm_status ran = fdm_execute_ranks(plan, &own.tensors, workspace, (size_t)info.workspace_bytes, c, &launch);
        if (!fake_driver()->end_capture() && !ran) /* it tried what ends a capture */
            ran = FDM_ERROR_INTERNAL;
        status = status ? status : ran;
    }
    if (!status)
        status = fdm_wait(c, id, NULL, PATIENCE_MS);
    fdm_ranks_plan_release(plan);
    fdm_memory_release(id, workspace);
    fdm_memory_release(id, memory);
    return status;
}

static void *run_execution(void *argument) {
    struct execution *e = argument;
    fdm_communicator c = {.struct_bytes = sizeof c};
    e->rank->status = fdm_nccl_communicator_of_id(e->rank->id, RANKS, e->rank->rank, 0, PATIENCE_MS, &c);
    if (!e->rank->status)
        e->rank->status = execute(e, &c);
    snprintf(e->rank->sentence, sizeof e->rank->sentence, "%s", fdm_last_error());
    fdm_nccl_release(&c);
    return NULL;
}

/* Of how many ranks the execution failed. */
static int execute_all(struct rank *ranks, fdm_pass pass, fdm_rank_algorithm algorithm) {
    static struct execution each[RANKS]; /* streams keep their addresses */
    pthread_t threads[RANKS];
    uint8_t id[FDM_NCCL_ID_BYTES];
    int failed = 0;
    const fdm_status status = fdm_nccl_id(id);
    for (int r = 0; r < RANKS; r++) {
        ranks[r].rank = r;
        ranks[r].status = status;
        memcpy(ranks[r].id, id, sizeof id);
        each[r] = (struct execution){&ranks[r], pass, algorithm, 0};
        if (!status)
            assert_int_equal(pthread_create(&threads[r], NULL, run_execution, &each[r]), 0);
    }
    for (int r = 0; r < RANKS; r++) {
        if (!status)
            pthread_join(threads[r], NULL);
        failed += ranks[r].status != FDM_OK;
        if (ranks[r].status && !*ranks[r].sentence && !status)
            fail_msg("rank %d fails without a sentence", r);
    }
    assert_int_equal(nccl()->live(), 0);
    return failed;
}

static void executes_plans(void) {
    use_fake_compiler();
    for (int n = 0; n < 6; n++) {
        static const fdm_rank_algorithm algorithms[] = {FDM_RANKS_GATHER, FDM_RANKS_BOTH, FDM_RANKS_RING};
        struct rank ranks[RANKS] = {{0}};
        if (execute_all(ranks, (fdm_pass)(n % 2), algorithms[n / 2]))
            fail_msg("%s; %s; %s", ranks[0].sentence, ranks[1].sentence, ranks[2].sentence);
        assert_int_equal(fake_driver()->live().allocations, 0);
    }
    int moved = 0, attended = 0;
    for (int64_t n = 0; n < fake_driver()->num_launches(); n++) {
        moved += strcmp(fake_driver()->launch(n).entry, "rank_rows") == 0;
        attended += strcmp(fake_driver()->launch(n).entry, "hopper_forward") == 0;
    }
    assert_true(moved > 20 && attended >= RANKS);
}

/* ---- what waits for what on the device ---- */

enum { STREAMS_MAX = 16, EVENTS_MAX = 64, LAUNCHES_MAX = 512 };

/* How far each stream has come where another is; stream 0 is unused. */
struct clock {
    int at[STREAMS_MAX];
};
struct ordered_launch {
    char entry[64];
    int stream;
    struct clock seen; /* with itself */
};
struct history {
    void *streams[STREAMS_MAX], *events[EVENTS_MAX];
    struct clock now[STREAMS_MAX], recorded[EVENTS_MAX];
    int beside[STREAMS_MAX]; /* the stream whose event this one waited for first */
    struct ordered_launch launches[LAUNCHES_MAX];
    int num_launches, writer[EVENTS_MAX];
};

static int index_of(void **list, int most, const void *one) {
    for (int i = 1; i < most; i++)
        if (!list[i] || list[i] == one) {
            list[i] = (void *)(uintptr_t)one;
            return i;
        }
    fail_msg("too many streams or events");
    return 0;
}

static void follow(struct history *h, const struct fake_order *o) {
    const int s = index_of(h->streams, STREAMS_MAX, o->stream);
    if (o->kind == FAKE_LAUNCHED) {
        assert_true(h->num_launches < LAUNCHES_MAX);
        struct ordered_launch *l = &h->launches[h->num_launches++];
        h->now[s].at[s]++;
        l->stream = s;
        l->seen = h->now[s];
        memcpy(l->entry, o->entry, sizeof l->entry);
        return;
    }
    const int e = index_of(h->events, EVENTS_MAX, o->event);
    if (o->kind == FAKE_RECORDED) {
        h->recorded[e] = h->now[s];
        h->writer[e] = s;
        return;
    }
    h->beside[s] = h->beside[s] ? h->beside[s] : h->writer[e];
    for (int i = 0; i < STREAMS_MAX; i++)
        h->now[s].at[i] = h->recorded[e].at[i] > h->now[s].at[i] ? h->recorded[e].at[i] : h->now[s].at[i];
}

/* The n-th launch of a kernel on a stream; there are `count`. */
static const struct ordered_launch *launch_of(const struct history *h, int stream, const char *entry, int n,
                                              int *count) {
    const struct ordered_launch *found = NULL;
    *count = 0;
    for (int i = 0; i < h->num_launches; i++)
        if (h->launches[i].stream == stream && !strcmp(h->launches[i].entry, entry) && (*count)++ == n)
            found = &h->launches[i];
    return found;
}

static int is_before(const struct ordered_launch *a, const struct ordered_launch *b) {
    return b->seen.at[a->stream] >= a->seen.at[a->stream];
}

enum { SETS = 3 }; /* 1, 2 and 1 heads */

/* A set is computed behind its own keys, beside the next one's, and before those that get its buffers. */
static void check_forward(const struct history *h, int stream, int side) {
    int moves, calls;
    launch_of(h, side, "rank_rows", 0, &moves);
    launch_of(h, stream, "hopper_forward", 0, &calls);
    assert_true(moves >= SETS && moves % SETS == 0 && calls >= SETS && calls % SETS == 0);
    for (int set = 0; set < SETS; set++)
        for (int other = 0; other < SETS; other++) {
            const struct ordered_launch *first_call =
                launch_of(h, stream, "hopper_forward", set * calls / SETS, &calls);
            const struct ordered_launch *last_call =
                launch_of(h, stream, "hopper_forward", (set + 1) * calls / SETS - 1, &calls);
            const struct ordered_launch *first_move = launch_of(h, side, "rank_rows", other * moves / SETS, &moves);
            const struct ordered_launch *last_move =
                launch_of(h, side, "rank_rows", (other + 1) * moves / SETS - 1, &moves);
            assert_int_equal(is_before(last_move, first_call), other <= set);
            assert_int_equal(is_before(last_call, first_move), other >= set + 2);
        }
}

/* One set's keys travel on another stream than that on which the sets before are computed, and the caller's ends behind
 * everything. */
static void sets_travel_while_others_are_computed(void) {
    use_fake_compiler();
    nccl()->delay(0);
    for (int pass = 0; pass < 2; pass++) {
        static struct history h;
        struct rank ranks[RANKS] = {{0}};
        const int64_t from = fake_driver()->num_orders();
        int num_sides = 0;
        h = (struct history){0};
        assert_int_equal(execute_all(ranks, (fdm_pass)pass, FDM_RANKS_GATHER), 0);
        for (int64_t n = from; n < fake_driver()->num_orders(); n++) {
            const struct fake_order order = fake_driver()->order(n);
            follow(&h, &order);
        }
        const int last = index_of(h.streams, STREAMS_MAX, nccl()->last_stream());
        for (int s = 1; s < STREAMS_MAX && h.streams[s]; s++) {
            int moves;
            launch_of(&h, s, "rank_rows", 0, &moves);
            if (!moves)
                continue; /* the caller's */
            const int stream = h.beside[s];
            num_sides++;
            if (pass == FDM_FORWARD)
                check_forward(&h, stream, s);
            assert_int_equal(h.now[stream].at[s], h.now[s].at[s]);
        }
        int moves;
        launch_of(&h, last, "rank_rows", 0, &moves);
        assert_true(moves > 0); /* a side stream: messages travel there */
        assert_int_equal(num_sides, RANKS);
    }
    assert_int_equal(fake_driver()->live().streams, 0);
    assert_int_equal(fake_driver()->live().events, 0);
}

/* Whatever call of NCCL or of the driver fails, every rank ends, and none of them waits for ever. */
static void a_call_of_nccl_fails_by(fdm_rank_algorithm algorithm) {
    struct rank ranks[RANKS] = {{0}};
    use_fake_compiler();
    const int failed = execute_all(ranks, FDM_BACKWARD, algorithm);
    const char *injected = nccl()->injected();
    scenario_past_the_end = !*injected;
    assert_int_equal(failed > 0, *injected && strcmp(injected, "ncclCommAbort") && strcmp(injected, "ncclCommDestroy"));
}
static void a_call_of_nccl_fails(void) { a_call_of_nccl_fails_by(FDM_RANKS_GATHER); }
static void a_call_of_nccl_fails_in_the_ring(void) { a_call_of_nccl_fails_by(FDM_RANKS_RING); }
static void a_call_of_the_driver_fails(void) {
    struct rank ranks[RANKS] = {{0}};
    use_fake_compiler();
    const int failed = execute_all(ranks, FDM_FORWARD, FDM_RANKS_GATHER);
    scenario_past_the_end = !*fake_driver()->injected();
    assert_true(!failed || !scenario_past_the_end);
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
        {"executes_plans", executes_plans, NULL, 0},
        {"sets_travel_while_others_are_computed", sets_travel_while_others_are_computed, NULL, 0},
        {"a_call_of_nccl_fails", a_call_of_nccl_fails, "FAKE_NCCL_FAIL=*:3:%", 1},
        {"a_call_of_nccl_fails_in_the_ring", a_call_of_nccl_fails_in_the_ring, "FAKE_NCCL_FAIL=*:3:%", 1},
        {"a_launch_fails", a_call_of_the_driver_fails, "FAKE_CUDA_FAIL=cuLaunchKernelEx:999:%", 1},
        {"making_a_stream_fails", a_call_of_the_driver_fails, "FAKE_CUDA_FAIL=cuStreamCreateWithPriority:999:%", 1},
        {"making_an_event_fails", a_call_of_the_driver_fails, "FAKE_CUDA_FAIL=cuEventCreate:999:%", 1},
        {"recording_an_event_fails", a_call_of_the_driver_fails, "FAKE_CUDA_FAIL=cuEventRecord:999:%", 1},
        {"waiting_for_an_event_fails", a_call_of_the_driver_fails, "FAKE_CUDA_FAIL=cuStreamWaitEvent:999:%", 1},
        {"an_allocation_fails", a_call_of_the_driver_fails, "FAKE_CUDA_FAIL=cuMemAlloc:999:%", 1},
        {"an_old_library_is_refused", an_old_library_is_refused, "FAKE_NCCL_VERSION=21701", 0},
        {"no_library_is_one_sentence", no_library_is_one_sentence, "LD_LIBRARY_PATH=/nowhere", 0},
    };
    return scenarios_main(argc, argv, scenarios, (int)(sizeof scenarios / sizeof scenarios[0]));
}
