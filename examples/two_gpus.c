/* two_gpus.c: causal attention whose rows lie on two GPUs, a process each, which talk by NCCL; compared with one GPU,
 * and timed beside it. It ends with exit code 77 where there are no two GPUs, or no NCCL.
 * cc -std=c11 two_gpus.c $(pkg-config --cflags --libs flash_dmattn) -lm; then ./a.out [ROWS] */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <flash_dmattn.h>

enum { HEADS = 16, HEAD_DIM = 128, ROW = HEADS * HEAD_DIM, REPEATS = 20, TIMEOUT_MS = 60000, SKIPPED = 77 };

static const fdm_device_id host = {FDM_CPU, 0};
static fdm_device_id gpu = {FDM_CUDA, 0};
static int rank;

static void check(fdm_status status) {
    if (status == FDM_OK)
        return;
    fprintf(stderr, "rank %d: %s: %s\n", rank, fdm_status_name(status), fdm_last_error());
    exit(1);
}

static void *device_memory(size_t bytes, const void *content) {
    void *memory = NULL;
    check(fdm_memory_allocate(gpu, bytes, &memory));
    if (content)
        check(fdm_memory_copy(memory, gpu, content, host, bytes));
    return memory;
}

/* The upper half of a float. */
static uint16_t bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static void fill(uint16_t *data, int64_t count, int seed) {
    for (int64_t i = 0; i < count; i++)
        data[i] = bfloat16(sinf((float)(seed * 1000 + i)));
}

/* This rank's rows of a whole tensor, one behind the other. */
static void shard(const fdm_layout *layout, const uint16_t *whole, uint16_t *own) {
    const fdm_range *ranges;
    int64_t count;
    check(fdm_layout_ranges(layout, rank, &ranges, &count));
    for (int64_t n = 0; n < count; own += (ranges[n].end - ranges[n].first) * ROW, n++)
        memcpy(own, whole + ranges[n].first * ROW, (size_t)((ranges[n].end - ranges[n].first) * ROW) * sizeof *own);
}

/* A call of one GPU, or of both. */
struct call {
    const fdm_plan *plan;
    const fdm_ranks_plan *ranks;
    fdm_communicator *communicator;
    const fdm_tensors *tensors;
    void *workspace;
    size_t bytes;
};
static void run(const struct call *c) {
    if (c->ranks)
        check(fdm_execute_ranks(c->ranks, c->tensors, c->workspace, c->bytes, c->communicator, NULL));
    else
        check(fdm_execute(c->plan, c->tensors, c->workspace, c->bytes, NULL));
}

static double milliseconds(const struct call *c) {
    fdm_timer *timer = NULL;
    double seconds = 0;
    run(c);
    if (c->ranks)
        check(fdm_wait(c->communicator, gpu, NULL, TIMEOUT_MS));
    check(fdm_timer_create(gpu, &timer));
    check(fdm_timer_start(timer, NULL));
    for (int n = 0; n < REPEATS; n++)
        run(c);
    check(fdm_timer_stop(timer, NULL, &seconds));
    fdm_timer_release(timer);
    return 1e3 * seconds / REPEATS;
}

/* Which rows lie where, what this rank does, and whether the other one does the same. */
static void plan_ranks(const fdm_device *device, const fdm_problem *problem, fdm_communicator *communicator,
                       fdm_layout **layout, fdm_ranks_plan **plan) {
    const fdm_layout_wish wish = {
        .struct_bytes = sizeof wish, .kind = FDM_LAYOUT_ZIGZAG, .ranks = 2, .total = problem->seqlen_q, .block = 512};
    const fdm_ranks_options options = {.struct_bytes = sizeof options, .rank = rank, .algorithm = FDM_RANKS_GATHER};
    fdm_rank_mask mask = fdm_rank_mask_default();
    mask.causal = 1;
    mask.seqlen_q = mask.seqlen_k = problem->seqlen_q;
    check(fdm_layout_create(&wish, layout));
    const fdm_status planned = fdm_plan_ranks(device, problem, *layout, NULL, &mask, &options, plan);
    const fdm_status agreed = fdm_agree(*plan, communicator); /* without a plan too: so the other one hears of it */
    check(planned ? planned : agreed);
}

static void report(const fdm_ranks_plan_info *info, double of_one, double of_both, int64_t unequal) {
    printf(
        "rank %d: %lld rows, %s, fetched %lld keys (%lld bytes) in %d sets; one GPU %.3f ms, two %.3f ms (%.2f times "
        "as fast); %lld numbers differ\n",
        rank, (long long)info->rows, fdm_rank_algorithm_name(info->algorithm), (long long)info->keys_fetched,
        (long long)info->bytes_received, info->num_sets, of_one, of_both, of_one / of_both, (long long)unequal);
}

static int attend(const uint8_t *id, int64_t rows) {
    const size_t bytes = (size_t)(rows * ROW) * sizeof(uint16_t);
    uint16_t *whole[4], *own = malloc(bytes), *result = malloc(bytes);
    int64_t shape[4] = {1, rows, HEADS, HEAD_DIM};
    fdm_tensor all[4];
    for (int t = 0; t < 4; t++) { /* q, k, v and out, the same numbers in both processes */
        whole[t] = malloc(bytes);
        fill(whole[t], rows * ROW, t);
        all[t] = (fdm_tensor){device_memory(bytes, whole[t]), gpu, 4, fdm_data_type_of(FDM_BFLOAT16), shape, NULL, 0};
    }
    fdm_tensors tensors = {.struct_bytes = sizeof tensors, .q = &all[0], .k = &all[1], .v = &all[2], .out = &all[3]};

    /* One GPU: the whole problem, and what it gives. */
    fdm_options options = fdm_options_default();
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_problem problem;
    fdm_plan plan = {.struct_bytes = sizeof plan};
    options.causal = 1;
    check(fdm_device_query(FDM_CUDA, gpu.index, &device));
    check(fdm_describe(FDM_FORWARD, &tensors, &options, &problem));
    check(fdm_plan_attention(&device, &problem, &options, &plan));
    struct call one = {.plan = &plan, .tensors = &tensors, .bytes = (size_t)plan.workspace_bytes};
    if (one.bytes)
        one.workspace = device_memory(one.bytes, NULL);
    const double of_one = milliseconds(&one);
    check(fdm_memory_copy(whole[3], host, all[3].data, gpu, bytes));

    /* Two: what this rank does, and its rows. */
    fdm_communicator communicator = {.struct_bytes = sizeof communicator};
    fdm_layout *layout = NULL;
    fdm_ranks_plan *ranks = NULL;
    fdm_ranks_plan_info info = {.struct_bytes = sizeof info};
    check(fdm_nccl_communicator_of_id(id, 2, rank, gpu.index, TIMEOUT_MS, &communicator));
    plan_ranks(&device, &problem, &communicator, &layout, &ranks);
    check(fdm_ranks_plan_query(ranks, &info));
    shape[1] = info.rows;
    for (int t = 0; t < 3; t++) {
        shard(layout, whole[t], own);
        check(fdm_memory_copy(all[t].data, gpu, own, host, (size_t)(info.rows * ROW) * sizeof *own));
    }
    const struct call both = {.ranks = ranks,
                              .communicator = &communicator,
                              .tensors = &tensors,
                              .workspace = device_memory((size_t)info.workspace_bytes, NULL),
                              .bytes = (size_t)info.workspace_bytes};
    const double of_both = milliseconds(&both);
    check(fdm_wait(&communicator, gpu, NULL, TIMEOUT_MS));
    check(fdm_memory_copy(result, host, all[3].data, gpu, (size_t)(info.rows * ROW) * sizeof *result));
    shard(layout, whole[3], own);
    int64_t unequal = 0;
    for (int64_t i = 0; i < info.rows * ROW; i++)
        unequal += own[i] != result[i];
    report(&info, of_one, of_both, unequal);

    for (int t = 0; t < 4; t++) {
        check(fdm_memory_release(gpu, all[t].data));
        free(whole[t]);
    }
    check(fdm_memory_release(gpu, one.workspace));
    check(fdm_memory_release(gpu, both.workspace));
    fdm_ranks_plan_release(ranks);
    fdm_layout_release(layout);
    fdm_nccl_release(&communicator);
    free(own);
    free(result);
    return unequal != 0;
}

/* Before a process uses CUDA it has forked: rank 1 gets the id of rank 0 by a pipe, or nothing. */
int main(int argc, char **argv) {
    const int64_t rows = argc > 1 ? atoll(argv[1]) : 8192;
    uint8_t id[FDM_NCCL_ID_BYTES];
    int fds[2], other = 1;
    if (rows < 1 || pipe(fds))
        return 1;
    const pid_t child = fork();
    if (child < 0)
        return 1;
    close(fds[child != 0 ? 0 : 1]);
    rank = child == 0;
    gpu.index = rank;
    if (child == 0)
        return read(fds[0], id, sizeof id) == (ssize_t)sizeof id ? attend(id, rows) : SKIPPED;
    fdm_device device = {.struct_bytes = sizeof device};
    int failed = SKIPPED;
    if (fdm_device_query(FDM_CUDA, 1, &device) || fdm_nccl_id(id)) {
        printf("two_gpus: skipped: %s\n", fdm_last_error());
        close(fds[1]);
    } else {
        failed = write(fds[1], id, sizeof id) == (ssize_t)sizeof id ? attend(id, rows) : 1;
    }
    waitpid(child, &other, 0);
    return failed ? failed : other != 0;
}
