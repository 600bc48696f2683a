/* test_rank_processes.c: ranks that are processes, of which one is killed or late in some exchange: all others end with
 * a sentence in time. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "flash_dmattn.h"

enum { RANKS = 3, ROWS = 48, HEADS = 4, HEADS_KV = 2, DIM = 8 };
/* A rank that ends is noticed at once; nobody else is late, also on machines with much to do. */
enum { PATIENCE_MS = 1500, LONG_PATIENCE_MS = 30000, SLACK_MS = 8000, LATE_MS = 4000 };
enum what { NOTHING, KILLED, LATE };

static int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* ---- a transport ---- */

struct links {
    int32_t rank;
    int fd[RANKS]; /* of each peer */
    int64_t calls, fail_at;
    enum what fault;
    int patient;
};

/* Messages of one direction with a peer, one behind the other. */
struct stream {
    const fdm_message *messages;
    int32_t count, peer, at;
    size_t done; /* bytes of the current one */
};

static int is_done(struct stream *s) {
    while (s->at < s->count && s->messages[s->at].peer != s->peer)
        s->at++;
    return s->at == s->count;
}

/* 0: the peer is gone. */
static int advance(struct stream *s, int fd, int sends) {
    while (!is_done(s)) {
        const fdm_message *m = &s->messages[s->at];
        char *at = (char *)m->memory + s->done;
        const ssize_t moved =
            sends ? send(fd, at, m->bytes - s->done, MSG_NOSIGNAL) : recv(fd, at, m->bytes - s->done, 0);
        if (moved < 0 && (errno == EAGAIN || errno == EINTR))
            return 1;
        if (moved <= 0)
            return 0;
        s->done += (size_t)moved;
        if (s->done == m->bytes)
            s->at++, s->done = 0;
    }
    return 1;
}

static fdm_status move_all(const struct links *l, struct stream streams[2][RANKS]) {
    const int64_t end = now_ms() + (l->patient ? LONG_PATIENCE_MS : PATIENCE_MS);
    for (;;) {
        struct pollfd polled[RANKS];
        nfds_t waiting = 0;
        for (int32_t peer = 0; peer < RANKS; peer++) {
            short events = 0;
            for (int sends = 0; peer != l->rank && sends < 2; sends++) {
                if (!advance(&streams[sends][peer], l->fd[peer], sends))
                    return FDM_ERROR_REMOTE;
                events |= is_done(&streams[sends][peer]) ? 0 : (short)(sends ? POLLOUT : POLLIN);
            }
            if (events)
                polled[waiting++] = (struct pollfd){l->fd[peer], events, 0};
        }
        const int64_t left = end - now_ms();
        if (!waiting)
            return FDM_OK;
        if (left <= 0 || poll(polled, waiting, (int)left) < 0)
            return FDM_ERROR_REMOTE;
    }
}

static fdm_status exchange(void *context, const fdm_message *sends, int32_t num_sends, const fdm_message *receives,
                           int32_t num_receives, void *stream) {
    struct links *l = context;
    struct stream streams[2][RANKS];
    (void)stream;
    if (++l->calls == l->fail_at && l->fault == KILLED)
        raise(SIGKILL);
    if (l->calls == l->fail_at && l->fault == LATE)
        poll(NULL, 0, LATE_MS);
    for (int32_t peer = 0; peer < RANKS; peer++) {
        streams[0][peer] = (struct stream){receives, num_receives, peer, 0, 0};
        streams[1][peer] = (struct stream){sends, num_sends, peer, 0, 0};
    }
    return move_all(l, streams);
}

static fdm_status share(void *context, const void *mine, size_t bytes, void *all) {
    struct links *l = context;
    fdm_message sends[RANKS], receives[RANKS];
    int32_t count = 0;
    memcpy((char *)all + (size_t)l->rank * bytes, mine, bytes);
    for (int32_t peer = 0; peer < RANKS; peer++) {
        if (peer == l->rank)
            continue;
        sends[count] = (fdm_message){.peer = peer, .memory = (char *)all + (size_t)l->rank * bytes, .bytes = bytes};
        receives[count++] = (fdm_message){.peer = peer, .memory = (char *)all + (size_t)peer * bytes, .bytes = bytes};
    }
    return exchange(context, sends, count, receives, count, NULL);
}

static void hang_up(void *context) {
    const struct links *l = context;
    for (int32_t peer = 0; peer < RANKS; peer++)
        if (peer != l->rank)
            shutdown(l->fd[peer], SHUT_RDWR);
}

/* ---- a rank ---- */

/* Whole tensors [1, ROWS, heads, DIM], of which a rank has rows in a row. */
static float q[ROWS * HEADS * DIM], k[ROWS * HEADS_KV * DIM], v[ROWS * HEADS_KV * DIM], out[ROWS * HEADS * DIM],
    dout[ROWS * HEADS * DIM], dq[ROWS * HEADS * DIM], dk[ROWS * HEADS_KV * DIM], dv[ROWS * HEADS_KV * DIM],
    lse[ROWS * HEADS], expected[4][ROWS * HEADS * DIM];

struct rows {
    fdm_tensor all[9];
    int64_t shapes[9][4], strides[9][4];
    fdm_tensors tensors;
};

static fdm_tensor *put(struct rows *r, int n, float *data, int64_t heads, fdm_range range) {
    const int64_t count = range.end - range.first, shape[4] = {1, count, heads, DIM};
    memcpy(r->shapes[n], shape, sizeof shape);
    r->all[n] = (fdm_tensor){
        data + range.first * heads * DIM, {FDM_CPU, 0}, 4, fdm_data_type_of(FDM_FLOAT32), r->shapes[n], NULL, 0};
    return &r->all[n];
}

static void fill_rows(struct rows *r, fdm_range range, fdm_pass pass) {
    const int64_t shape[4] = {1, HEADS, range.end - range.first, 0}, strides[4] = {HEADS * ROWS, ROWS, 1, 0};
    memcpy(r->shapes[4], shape, sizeof shape);
    memcpy(r->strides[4], strides, sizeof strides);
    r->all[4] =
        (fdm_tensor){lse + range.first, {FDM_CPU, 0}, 3, fdm_data_type_of(FDM_FLOAT32), r->shapes[4], r->strides[4], 0};
    r->tensors = (fdm_tensors){.struct_bytes = sizeof r->tensors,
                               .q = put(r, 0, q, HEADS, range),
                               .k = put(r, 1, k, HEADS_KV, range),
                               .v = put(r, 2, v, HEADS_KV, range),
                               .out = put(r, 3, out, HEADS, range),
                               .lse = &r->all[4]};
    if (pass == FDM_FORWARD)
        return;
    r->tensors.dout = put(r, 5, dout, HEADS, range);
    r->tensors.dq = put(r, 6, dq, HEADS, range);
    r->tensors.dk = put(r, 7, dk, HEADS_KV, range);
    r->tensors.dv = put(r, 8, dv, HEADS_KV, range);
}

static fdm_options options_of(void) {
    fdm_options options = fdm_options_default();
    options.causal = 1;
    options.num_threads = 1;
    return options;
}

static fdm_status make_plan(int32_t rank, fdm_pass pass, fdm_rank_algorithm algorithm, fdm_layout *layout,
                            fdm_ranks_plan **plan) {
    fdm_device device = {.struct_bytes = sizeof device};
    const fdm_options options = options_of();
    fdm_rank_mask mask = fdm_rank_mask_default();
    fdm_ranks_options wish = {.struct_bytes = sizeof wish, .rank = rank, .algorithm = algorithm, .num_threads = 1};
    fdm_problem problem;
    struct rows whole;
    fill_rows(&whole, (fdm_range){0, ROWS}, pass);
    mask.seqlen_q = mask.seqlen_k = ROWS;
    mask.causal = 1;
    fdm_status status = fdm_device_query(FDM_CPU, 0, &device);
    if (!status)
        status = fdm_describe(pass, &whole.tensors, &options, &problem);
    return status ? status : fdm_plan_ranks(&device, &problem, layout, NULL, &mask, &wish, plan);
}

static fdm_status run_pass(fdm_communicator *c, fdm_pass pass, fdm_rank_algorithm algorithm, fdm_layout *layout) {
    fdm_ranks_plan *plan = NULL;
    fdm_ranks_plan_info info = {.struct_bytes = sizeof info};
    const fdm_range *ranges;
    int64_t count;
    struct rows rows;
    fdm_status status = make_plan(c->rank, pass, algorithm, layout, &plan);
    if (!status && !(status = fdm_agree(plan, c)) && !(status = fdm_ranks_plan_query(plan, &info))) {
        fdm_layout_ranges(layout, c->rank, &ranges, &count);
        fill_rows(&rows, ranges[0], pass);
        void *workspace = aligned_alloc(64, ((size_t)info.workspace_bytes + 63) / 64 * 64);
        status = fdm_execute_ranks(plan, &rows.tensors, workspace, (size_t)info.workspace_bytes, c, NULL);
        free(workspace);
    }
    fdm_ranks_plan_release(plan);
    return status;
}

static int differs(const float *have, const float *want, fdm_range rows, int64_t row) {
    int different = 0;
    for (int64_t i = rows.first * row; i < rows.end * row; i++)
        different |= !(fabsf(have[i] - want[i]) <= 1e-4f);
    return different;
}

/* The process's exit status: 0 where everything is as it has to be. */
static int run_rank(struct links *l, fdm_rank_algorithm algorithm) {
    fdm_layout_wish wish = {.struct_bytes = sizeof wish, .ranks = RANKS, .total = ROWS, .block = 4};
    fdm_communicator c = {.struct_bytes = sizeof c,
                          .ranks = RANKS,
                          .rank = l->rank,
                          .device_type = FDM_CPU,
                          .context = l,
                          .exchange = exchange,
                          .share = share,
                          .abort = hang_up};
    fdm_layout *layout = NULL;
    const fdm_range *ranges;
    int64_t count;
    if (fdm_layout_create(&wish, &layout))
        return 2;
    const int64_t began = now_ms();
    fdm_status status = run_pass(&c, FDM_FORWARD, algorithm, layout);
    if (!status)
        status = run_pass(&c, FDM_BACKWARD, algorithm, layout);
    int result = 0;
    fdm_layout_ranges(layout, l->rank, &ranges, &count);
    if (l->fault == NOTHING && status)
        result = 3;
    else if (!status &&
             (differs(out, expected[0], ranges[0], HEADS * DIM) || differs(dq, expected[1], ranges[0], HEADS * DIM) ||
              differs(dk, expected[2], ranges[0], HEADS_KV * DIM) ||
              differs(dv, expected[3], ranges[0], HEADS_KV * DIM)))
        result = 4;
    else if (status && (status != FDM_ERROR_REMOTE || !strstr(fdm_last_error(), "a peer of rank")))
        result = 5;
    else if (status && now_ms() - began > PATIENCE_MS + LATE_MS + SLACK_MS)
        result = 6;
    else if (status && (run_pass(&c, FDM_FORWARD, algorithm, layout) != FDM_ERROR_REMOTE ||
                        !strstr(fdm_last_error(), "takes no more calls")))
        result = 7;
    if (result)
        fprintf(stderr, "rank %d: %d: %s\n", l->rank, result, fdm_last_error());
    fdm_layout_release(layout);
    return result;
}

/* ---- processes ---- */

/* Rank 1 meets the fault in its exchange of this number. Returns whether it was killed. */
static int run_processes(fdm_rank_algorithm algorithm, enum what fault, int64_t fail_at) {
    int pairs[RANKS][RANKS];
    pid_t children[RANKS];
    for (int a = 0; a < RANKS; a++)
        for (int b = a + 1; b < RANKS; b++) {
            int pair[2];
            assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair), 0);
            pairs[a][b] = pair[0];
            pairs[b][a] = pair[1];
        }
    for (int r = 0; r < RANKS; r++) {
        children[r] = fork();
        assert_true(children[r] >= 0);
        if (children[r])
            continue;
        struct links l = {.rank = r, .fail_at = r == 1 ? fail_at : 0, .fault = fault, .patient = fault != LATE};
        alarm(60);
        for (int a = 0; a < RANKS; a++)
            for (int b = 0; b < RANKS; b++)
                if (a != b && a != r)
                    close(pairs[a][b]);
                else if (a != b)
                    l.fd[b] = pairs[a][b];
        _exit(run_rank(&l, algorithm));
    }
    for (int a = 0; a < RANKS; a++)
        for (int b = 0; b < RANKS; b++)
            if (a != b)
                close(pairs[a][b]);
    int was_killed = 0;
    for (int r = 0; r < RANKS; r++) {
        int status;
        assert_int_equal(waitpid(children[r], &status, 0), children[r]);
        if (r == 1 && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
            was_killed = 1;
        else if (!WIFEXITED(status) || WEXITSTATUS(status))
            fail_msg("rank %d ended with %d, fault %d at %lld", r, status, (int)fault, (long long)fail_at);
    }
    return was_killed;
}

static int make_expected(void **unused) {
    (void)unused;
    float *const inputs[] = {q, k, v, dout};
    const int64_t counts[] = {ROWS * HEADS * DIM, ROWS * HEADS_KV * DIM, ROWS * HEADS_KV * DIM, ROWS * HEADS * DIM};
    for (int n = 0; n < 4; n++)
        for (int64_t i = 0; i < counts[n]; i++)
            inputs[n][i] = sinf((float)(1000 * n + i));
    const fdm_options options = options_of();
    struct rows whole;
    fill_rows(&whole, (fdm_range){0, ROWS}, FDM_FORWARD);
    assert_int_equal(fdm_attention_forward(&whole.tensors, &options, NULL), FDM_OK);
    fill_rows(&whole, (fdm_range){0, ROWS}, FDM_BACKWARD);
    assert_int_equal(fdm_attention_backward(&whole.tensors, &options, NULL), FDM_OK);
    float *const results[] = {out, dq, dk, dv};
    for (int n = 0; n < 4; n++) {
        memcpy(expected[n], results[n], sizeof(float) * (size_t)(n < 2 ? counts[0] : counts[1]));
        memset(results[n], 0xff, sizeof(float) * (size_t)(n < 2 ? counts[0] : counts[1]));
    }
    return 0;
}

static const fdm_rank_algorithm algorithms[] = {FDM_RANKS_GATHER, FDM_RANKS_BOTH, FDM_RANKS_RING};

static void processes_compute_what_one_does(void **unused) {
    (void)unused;
    for (int n = 0; n < 3; n++)
        assert_int_equal(run_processes(algorithms[n], NOTHING, 0), 0);
}

static void a_killed_rank_ends_the_others(void **unused) {
    (void)unused;
    for (int n = 0; n < 3; n++) {
        int64_t at = 1;
        while (run_processes(algorithms[n], KILLED, at))
            at++;
        assert_true(at > 4); /* two agreements, and exchanges of both passes */
    }
}

static void a_late_rank_ends_the_others(void **unused) {
    (void)unused;
    for (int64_t at = 1; at < 4; at += 2)
        assert_int_equal(run_processes(FDM_RANKS_GATHER, LATE, at), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(processes_compute_what_one_does),
        cmocka_unit_test(a_killed_rank_ends_the_others),
        cmocka_unit_test(a_late_rank_ends_the_others),
    };
    return cmocka_run_group_tests(tests, make_expected, NULL);
}
