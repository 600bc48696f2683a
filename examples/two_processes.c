/* two_processes.c: causal attention whose rows lie in two processes, which talk by a socket; compared with one call.
 * cc -std=c11 two_processes.c $(pkg-config --cflags --libs flash_dmattn) -lm */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <flash_dmattn.h>

enum { ROWS = 512, HEADS = 4, HEADS_KV = 2, HEAD_DIM = 16, Q_ROW = HEADS * HEAD_DIM, KV_ROW = HEADS_KV * HEAD_DIM };

/* All bytes one way; 0 when the other process is gone. */
static int move(int fd, void *memory, size_t bytes, int sends) {
    for (char *at = memory; bytes > 0;) {
        const ssize_t moved = sends ? send(fd, at, bytes, MSG_NOSIGNAL) : recv(fd, at, bytes, 0);
        if (moved <= 0)
            return 0;
        at += moved;
        bytes -= (size_t)moved;
    }
    return 1;
}

struct link {
    int fd, rank;
};

/* Rank 0 speaks first, so that neither waits for the other to listen. */
static fdm_status exchange(void *context, const fdm_message *sends, int32_t num_sends, const fdm_message *receives,
                           int32_t num_receives, void *stream) {
    const struct link *link = context;
    int fine = 1;
    (void)stream;
    for (int turn = 0; turn < 2; turn++)
        if (turn == link->rank)
            for (int32_t i = 0; i < num_sends; i++)
                fine = fine && move(link->fd, sends[i].memory, sends[i].bytes, 1);
        else
            for (int32_t i = 0; i < num_receives; i++)
                fine = fine && move(link->fd, receives[i].memory, receives[i].bytes, 0);
    return fine ? FDM_OK : FDM_ERROR_REMOTE;
}

static fdm_status share(void *context, const void *mine, size_t bytes, void *all) {
    const struct link *link = context;
    char *own = (char *)all + (size_t)link->rank * bytes, *other = (char *)all + (size_t)!link->rank * bytes;
    memcpy(own, mine, bytes);
    const fdm_message send = {.peer = !link->rank, .memory = own, .bytes = bytes};
    const fdm_message receive = {.peer = !link->rank, .memory = other, .bytes = bytes};
    return exchange(context, &send, 1, &receive, 1, NULL);
}

static void hang_up(void *context) { shutdown(((struct link *)context)->fd, SHUT_RDWR); }

static fdm_tensor tensor_of(float *data, int64_t *shape) {
    return (fdm_tensor){
        .data = data, .device = {FDM_CPU, 0}, .ndim = 4, .dtype = fdm_data_type_of(FDM_FLOAT32), .shape = shape};
}

/* The same numbers in both processes. */
static void fill(float *data, int64_t count, int seed) {
    for (int64_t i = 0; i < count; i++)
        data[i] = sinf((float)(seed * 1000 + i));
}

/* This rank's rows of a whole tensor, one behind the other. */
static void shard(const fdm_layout *layout, int rank, const float *whole, int64_t row, float *own) {
    const fdm_range *ranges;
    int64_t count;
    fdm_layout_ranges(layout, rank, &ranges, &count);
    for (int64_t n = 0; n < count; own += (ranges[n].end - ranges[n].first) * row, n++)
        memcpy(own, whole + ranges[n].first * row, (size_t)((ranges[n].end - ranges[n].first) * row) * sizeof *own);
}

/* 0: this rank's rows are those of one call. */
static int report(int rank, const fdm_ranks_plan_info *info, const float *out, const float *expected) {
    double worst = 0;
    for (int64_t i = 0; i < info->rows * Q_ROW; i++)
        worst = fmax(worst, fabs((double)out[i] - (double)expected[i]));
    printf("rank %d: %lld rows, %s, fetched %lld keys (%lld bytes), largest difference %.1e\n", rank,
           (long long)info->rows, fdm_rank_algorithm_name(info->algorithm), (long long)info->keys_fetched,
           (long long)info->bytes_received, worst);
    return !(worst < 1e-5);
}

static int attend(int fd, int rank) {
    static float q[ROWS * Q_ROW], k[ROWS * KV_ROW], v[ROWS * KV_ROW], out[ROWS * Q_ROW], expected[ROWS * Q_ROW];
    static float own_q[ROWS * Q_ROW], own_k[ROWS * KV_ROW], own_v[ROWS * KV_ROW];
    struct link link = {fd, rank};
    fdm_communicator communicator = {.struct_bytes = sizeof communicator,
                                     .ranks = 2,
                                     .rank = rank,
                                     .device_type = FDM_CPU,
                                     .context = &link,
                                     .exchange = exchange,
                                     .share = share,
                                     .abort = hang_up};
    fill(q, ROWS * Q_ROW, 1);
    fill(k, ROWS * KV_ROW, 2);
    fill(v, ROWS * KV_ROW, 3);

    /* One process: the whole problem, and what it gives. */
    int64_t q_shape[4] = {1, ROWS, HEADS, HEAD_DIM}, kv_shape[4] = {1, ROWS, HEADS_KV, HEAD_DIM};
    fdm_tensor all[] = {tensor_of(q, q_shape), tensor_of(k, kv_shape), tensor_of(v, kv_shape), tensor_of(out, q_shape)};
    fdm_options options = fdm_options_default();
    options.causal = 1;
    fdm_tensors t = {.struct_bytes = sizeof t, .q = &all[0], .k = &all[1], .v = &all[2], .out = &all[3]};
    fdm_problem problem;
    fdm_status status = fdm_describe(FDM_FORWARD, &t, &options, &problem);
    if (!status)
        status = fdm_attention_forward(&t, &options, NULL);
    memcpy(expected, out, sizeof out);

    /* Two: which rows lie where, what this rank does, and whether the other one does the same. */
    fdm_layout *layout = NULL;
    fdm_ranks_plan *plan = NULL;
    fdm_device device = {.struct_bytes = sizeof device};
    const fdm_layout_wish wish = {
        .struct_bytes = sizeof wish, .kind = FDM_LAYOUT_ZIGZAG, .ranks = 2, .total = ROWS, .block = 64};
    const fdm_ranks_options ranks = {.struct_bytes = sizeof ranks, .rank = rank};
    fdm_ranks_plan_info info = {.struct_bytes = sizeof info};
    fdm_rank_mask mask = fdm_rank_mask_default();
    mask.causal = 1;
    mask.seqlen_q = mask.seqlen_k = ROWS;
    if (!status)
        status = fdm_device_query(FDM_CPU, 0, &device);
    if (!status)
        status = fdm_layout_create(&wish, &layout);
    const fdm_status planned = status ? status : fdm_plan_ranks(&device, &problem, layout, NULL, &mask, &ranks, &plan);
    const fdm_status agreed =
        fdm_agree(plan, &communicator); /* without a plan too, so that the other one hears of it */
    if (!status && !(status = planned ? planned : agreed))
        status = fdm_ranks_plan_query(plan, &info);

    /* This rank's rows. */
    q_shape[1] = kv_shape[1] = info.rows;
    all[0].data = own_q, all[1].data = own_k, all[2].data = own_v;
    void *workspace = info.workspace_bytes ? aligned_alloc(64, (size_t)(info.workspace_bytes + 63) / 64 * 64) : NULL;
    if (!status) {
        shard(layout, rank, q, Q_ROW, own_q);
        shard(layout, rank, k, KV_ROW, own_k);
        shard(layout, rank, v, KV_ROW, own_v);
        status = fdm_execute_ranks(plan, &t, workspace, (size_t)info.workspace_bytes, &communicator, NULL);
    }
    if (status) {
        fprintf(stderr, "rank %d: %s: %s\n", rank, fdm_status_name(status), fdm_last_error());
        return 1;
    }
    shard(layout, rank, expected, Q_ROW, q);
    const int failed = report(rank, &info, out, q);
    free(workspace);
    fdm_ranks_plan_release(plan);
    fdm_layout_release(layout);
    return failed;
}

int main(void) {
    int fds[2], other = 1;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, fds))
        return 1;
    const pid_t child = fork();
    if (child < 0)
        return 1;
    close(fds[child == 0 ? 0 : 1]);
    const int failed = attend(fds[child == 0 ? 1 : 0], child == 0);
    if (child == 0)
        return failed;
    waitpid(child, &other, 0);
    return failed || other;
}
