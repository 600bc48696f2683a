/* test_ranks.c: one attention over several ranks, which are threads, against one call; agreement and faults. With
 * FDM_TEST_DEVICE=cuda the ranks' tensors lie on CUDA device 0, which may be the emulated one. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "flash_dmattn.h"
#include "ranks_problem.h"
#include "thread_ranks.h"

/* ---- shards ---- */

/* Between a rank's rows of an axis and the whole. back: into the whole, else from it. */
static void move(struct whole *w, const fdm_layout *layout, int32_t rank, struct shard *s, int32_t axis, int back) {
    const int64_t unit = fdm_dtype_bytes(fdm_dtype_of(&w->tensor));
    const fdm_range *ranges;
    int64_t count, outer = 1, inner = unit, place = 0;
    assert_int_equal(fdm_layout_ranges(layout, rank, &ranges, &count), FDM_OK);
    for (int32_t a = 0; a < w->tensor.ndim; a++)
        *(a < axis ? &outer : &inner) *= a == axis ? 1 : w->shape[a];
    for (int64_t n = 0; n < count; n++)
        for (int64_t i = ranges[n].first; i < ranges[n].end; i++, place++)
            for (int64_t o = 0; o < outer; o++) {
                char *whole = (char *)w->data + (o * w->shape[axis] + i) * inner;
                char *own = s->data + (o * s->shape[axis] + place) * inner;
                memcpy(back ? whole : own, back ? own : whole, (size_t)inner);
            }
}

static void make_shard(struct problem *p, int which, int32_t rank, struct shard *s) {
    struct whole *w = &p->all[which];
    const int32_t axis = w->rows_axis >= 0 ? w->rows_axis : w->keys_axis;
    memcpy(s->shape, w->shape, sizeof s->shape);
    s->tensor = w->tensor;
    s->tensor.shape = s->shape;
    if (axis >= 0) {
        const fdm_range *ranges;
        int64_t count, rows = 0;
        const fdm_layout *layout = w->rows_axis >= 0 ? p->rows : p->keys;
        fdm_layout_ranges(layout, rank, &ranges, &count);
        for (int64_t n = 0; n < count; n++)
            rows += ranges[n].end - ranges[n].first;
        s->shape[axis] = rows;
        s->data = malloc((size_t)elements(&s->tensor) * 8 + 8);
        move(w, layout, rank, s, axis, 0);
    } else {
        s->data = malloc((size_t)elements(&s->tensor) * 8 + 8);
        memcpy(s->data, w->data, (size_t)(elements(&s->tensor) * fdm_dtype_bytes(fdm_dtype_of(&w->tensor))));
    }
    s->tensor.data = s->data;
}

static int is_written(const struct problem *p, int which) {
    return which >= DQ ? which <= DBIAS : p->pass == FDM_FORWARD && which >= OUT && which <= LSE_LOW;
}

/* ---- a rank ---- */

struct results {
    struct problem *p;
    struct whole *out; /* [COUNT]: wholes of the ranks' results */
    fdm_ranks_plan_info info[THREAD_RANKS_MAX];
    int skip_agreement;
    int repeat;
};

static fdm_status plan_of_rank(struct problem *p, int32_t rank, fdm_ranks_plan **plan) {
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_tensors whole = tensors_of(p);
    fdm_problem problem;
    const fdm_ranks_options options = {.struct_bytes = sizeof options,
                                       .rank = rank,
                                       .algorithm = p->algorithm,
                                       .num_threads = 1,
                                       .other_kernel = p->other_kernel};
    fdm_status status = fdm_device_query(ranks_device().type, 0, &device);
    if (!status)
        status = fdm_describe(p->pass, &whole, &p->options, &problem);
    return status ? status
                  : fdm_plan_ranks(&device, &problem, p->rows, p->keys == p->rows ? NULL : p->keys, &p->mask, &options,
                                   plan);
}

static fdm_status run_plan(struct thread_rank *rank, struct results *results, fdm_ranks_plan *plan) {
    struct problem *p = results->p;
    struct shard shards[COUNT] = {{0}};
    fdm_tensors t = {.struct_bytes = sizeof t};
    fdm_ranks_plan_info *info = &results->info[rank->rank];
    info->struct_bytes = sizeof *info;
    fdm_ranks_plan_query(plan, info);
    void *workspace = device_memory((size_t)info->workspace_bytes, NULL);
    for (int n = 0; n < START; n++) {
        const fdm_tensor *tensor = p->all[n].data ? &shards[n].tensor : NULL;
        if (tensor) {
            make_shard(p, n, rank->rank, &shards[n]);
            if (is_written(p, n))
                memset(shards[n].data, 0xff, (size_t)elements(tensor) * (p->dtype == FDM_FLOAT64 ? 8 : 4));
            send_shard(&shards[n]);
        }
        memcpy((char *)&t + offsets[n], &tensor, sizeof tensor);
    }
    fdm_status status = FDM_OK;
    for (int n = 0; n <= results->repeat && !status; n++)
        status = fdm_execute_ranks(plan, &t, workspace, (size_t)info->workspace_bytes, &rank->communicator, NULL);
    for (int n = 0; n < START; n++) {
        if (p->all[n].data)
            fetch_shard(&shards[n]);
        if (!status && p->all[n].data && is_written(p, n))
            move(&results->out[n], p->all[n].rows_axis >= 0 ? p->rows : p->keys, rank->rank, &shards[n],
                 p->all[n].rows_axis >= 0 ? p->all[n].rows_axis : p->all[n].keys_axis, 1);
        free(shards[n].data);
    }
    fdm_memory_release(ranks_device(), workspace);
    return status;
}

static int run_rank(struct thread_rank *rank, void *argument) {
    struct results *results = argument;
    fdm_ranks_plan *plan = NULL;
    fdm_status status = plan_of_rank(results->p, rank->rank, &plan);
    const fdm_status agreed = results->skip_agreement ? FDM_OK : fdm_agree(plan, &rank->communicator);
    if (!status && !(status = agreed))
        status = run_plan(rank, results, plan);
    fdm_ranks_plan_release(plan);
    return status;
}

/* ---- comparison ---- */

/* least: numbers that all are smaller count as so large. */
static double largest_error(const struct whole *a, const struct whole *b, double least) {
    const fdm_dtype dtype = fdm_dtype_of(&a->tensor);
    double error = 0, scale = least;
    for (int64_t i = 0; i < elements(&a->tensor); i++) {
        const double x = number(a->data, dtype, i), y = number(b->data, dtype, i);
        if (isinf(x) || isinf(y)) {
            error = isinf(x) && isinf(y) && x == y ? error : HUGE_VAL;
            continue;
        }
        scale = fmax(scale, fabs(x));
        error = !(fabs(x - y) <= error) ? fabs(x - y) : error; /* NaN too */
    }
    return error / scale;
}

static void start_results(struct problem *p, struct results *results) {
    *results = (struct results){.p = p, .out = calloc(COUNT, sizeof(struct whole))};
    for (int n = 0; n < COUNT; n++)
        if (p->all[n].data && is_written(p, n)) {
            results->out[n] = p->all[n];
            results->out[n].tensor.shape = p->all[n].shape;
            results->out[n].data = malloc((size_t)elements(&p->all[n].tensor) * 8 + 8);
            memset(results->out[n].data, 0xff, (size_t)elements(&p->all[n].tensor) * 8);
        }
}

static void end_results(struct results *results) {
    for (int n = 0; n < COUNT; n++)
        free(results->out[n].data);
    free(results->out);
}

static const char *const names[] = {"q",       "k",    "v",    "mask", "bias", "sink", "out",  "lse",
                                    "lse_low", "dout", "dlse", "dq",   "dk",   "dv",   "dbias"};

/* 1: it ran. 0: the plan refused it. */
static int check_problem(struct problem *p, int number_of_it) {
    struct thread_ranks all = {.device_type = ranks_device().type};
    struct thread_rank each[THREAD_RANKS_MAX];
    struct results results;
    assert_int_equal(run_whole(p), FDM_OK);
    start_results(p, &results);
    thread_ranks_run(&all, p->ranks, each, run_rank, &results);
    int ran = 1;
    for (int32_t r = 0; r < p->ranks; r++)
        ran = ran && each[r].status != FDM_ERROR_UNSUPPORTED;
    for (int32_t r = 0; r < p->ranks; r++) {
        if (each[r].status && ran)
            fail_msg("problem %d, rank %d of %d: %s", number_of_it, r, p->ranks, each[r].sentence);
    }
    int64_t sent = 0, received = 0;
    for (int32_t r = 0; r < p->ranks; r++) {
        sent += results.info[r].bytes_sent;
        received += results.info[r].bytes_received;
    }
    assert_int_equal(sent, received);
    for (int n = 0; ran && n < START; n++) {
        if (!results.out[n].data)
            continue;
        /* A bias that is the same for all keys has no effect: its gradient is what rounding leaves of 0. */
        const int is_rest = n == LSE_LOW || (n == DBIAS && p->all[n].shape[3] == 1);
        const double error = largest_error(&p->all[n], &results.out[n], is_rest ? 1 : 1e-3);
        const double rounded = n == LSE || n == LSE_LOW ? 1e-2 : 3e-2;
        const double bound = p->dtype == FDM_FLOAT64    ? 1e-12
                             : p->dtype == FDM_BFLOAT16 ? rounded
                             : n >= DQ || on_cuda()     ? 1e-4
                                                        : 1e-5;
        if (!(error <= bound))
            fail_msg("problem %d, %s of %d ranks by %s differs by %g", number_of_it, names[n], p->ranks,
                     fdm_rank_algorithm_name(results.info[0].algorithm), error);
        if (p->same_bits && n < DK)
            assert_memory_equal(p->all[n].data, results.out[n].data,
                                (size_t)(elements(&p->all[n].tensor) * fdm_dtype_bytes(p->dtype)));
    }
    end_results(&results);
    return ran;
}

static void equals_one_call(void **unused) {
    (void)unused;
    const int count = on_cuda() ? 100 : 400;
    int ran = 0, by[5] = {0};
    state = 11;
    for (int n = 0; n < count; n++) {
        struct problem p = {.pass = (fdm_pass)draw(2), .algorithm = (fdm_rank_algorithm)draw(5)};
        static const fdm_layout_kind kinds[] = {FDM_LAYOUT_CONTIGUOUS, FDM_LAYOUT_ZIGZAG, FDM_LAYOUT_RANGES};
        draw_sizes(&p);
        if (on_cuda()) /* what devices take */
            p.dtype = draw(4) ? FDM_BFLOAT16 : FDM_FLOAT32;
        draw_mask(&p);
        draw_tensors(&p);
        const fdm_layout_kind kind = kinds[draw(3)];
        p.rows = layout_of(p.seqlen_q, p.ranks, kind, 1 + draw(20));
        p.keys =
            p.seqlen_k == p.seqlen_q && draw(3) ? p.rows : layout_of(p.seqlen_k, p.ranks, kinds[draw(3)], 1 + draw(20));
        const int it_ran = check_problem(&p, n);
        ran += it_ran;
        by[p.algorithm] += it_ran;
        release_problem(&p);
    }
    if (on_cuda()) {
        if (ran < 30 || by[FDM_RANKS_ULYSSES] < 2 || by[FDM_RANKS_BOTH] < 5 || by[FDM_RANKS_GATHER] < 5 ||
            by[FDM_RANKS_RING] < 5)
            fail_msg("%d problems ran, %d by gather, %d by ulysses, %d by both, %d by the ring", ran,
                     by[FDM_RANKS_GATHER], by[FDM_RANKS_ULYSSES], by[FDM_RANKS_BOTH], by[FDM_RANKS_RING]);
        return;
    }
    assert_int_equal(memory_live(), 0);
    assert_true(ran > 200 && by[FDM_RANKS_ULYSSES] > 10 && by[FDM_RANKS_BOTH] > 20 && by[FDM_RANKS_RING] > 20);
}

/* A causal problem of one batch, whose rows are its keys, without tensors. */
static struct problem square_problem(fdm_pass pass, fdm_rank_algorithm algorithm, int32_t ranks, int64_t rows,
                                     int64_t dim) {
    struct problem p = {.pass = pass,
                        .dtype = FDM_FLOAT32,
                        .ranks = ranks,
                        .algorithm = algorithm,
                        .batch = 1,
                        .heads = 4,
                        .heads_kv = 2,
                        .seqlen_q = rows,
                        .seqlen_k = rows,
                        .dim = dim,
                        .dim_v = dim,
                        .options = fdm_options_default(),
                        .mask = fdm_rank_mask_default()};
    p.options.num_threads = 1;
    p.options.causal = p.mask.causal = 1;
    p.mask.seqlen_q = p.mask.seqlen_k = rows;
    return p;
}

/* Leaves masks and biases out. */
static void without_scores(struct problem *p) {
    static const int left_out[] = {MASK, BIAS, LSE_LOW, DBIAS};
    for (int n = 0; n < 4; n++) {
        free(p->all[left_out[n]].data);
        p->all[left_out[n]].data = NULL;
    }
}

/* Ranges that begin at multiples of a kernel's rows: forward and dq have one call's bits, by either algorithm. */
static void has_the_bits_of_one_call(void **unused) {
    (void)unused;
    for (int n = 0; n < 8; n++) {
        struct problem p = square_problem((fdm_pass)(n & 1), n & 2 ? FDM_RANKS_GATHER : FDM_RANKS_ULYSSES, 2, 2048, 16);
        p.same_bits = 1;
        p.options.causal = p.mask.causal = n & 4 ? 1 : 0;
        draw_tensors(&p);
        without_scores(&p);
        p.rows = p.keys = layout_of(2048, 2, p.options.causal ? FDM_LAYOUT_ZIGZAG : FDM_LAYOUT_CONTIGUOUS, 512);
        assert_int_equal(check_problem(&p, n), 1);
        release_problem(&p);
    }
}

/* ---- packed sequences ---- */

/* The same call on packed tensors [rows, heads, D]. */
static fdm_status run_packed(struct problem *p, fdm_tensor *cu_seqlens, struct whole copies[COUNT]) {
    fdm_tensors t = {.struct_bytes = sizeof t};
    fdm_options options = p->options;
    options.max_seqlen_q = options.max_seqlen_k = p->seqlen_q;
    for (int n = 0; n < START; n++) {
        if (!p->all[n].data)
            continue;
        copies[n] = p->all[n];
        copies[n].tensor.shape = copies[n].shape + 1; /* without the batch of one */
        copies[n].tensor.ndim--;
        copies[n].data = malloc((size_t)elements(&p->all[n].tensor) * 8 + 8);
        memcpy(copies[n].data, p->all[n].data, (size_t)elements(&p->all[n].tensor) * 8);
        copies[n].tensor.data = copies[n].data;
        const fdm_tensor *tensor = &copies[n].tensor;
        memcpy((char *)&t + offsets[n], &tensor, sizeof tensor);
    }
    t.cu_seqlens_q = t.cu_seqlens_k = cu_seqlens;
    return p->pass == FDM_FORWARD ? fdm_attention_forward(&t, &options, NULL)
                                  : fdm_attention_backward(&t, &options, NULL);
}

/* Packed sequences over ranks are one sequence with the intervals of its documents. */
static void packed_sequences_are_intervals(void **unused) {
    (void)unused;
    int32_t offsets_of[] = {0, 17, 17, 60, 90};
    int64_t count = 5;
    fdm_tensor cu_seqlens = {offsets_of, {FDM_CPU, 0}, 1, fdm_data_type_of(FDM_INT32), &count, NULL, 0};
    for (int n = 0; n < 10; n++) {
        struct problem p = square_problem((fdm_pass)(n & 1), (fdm_rank_algorithm)(n / 2), 2, 90, 8);
        struct whole copies[COUNT] = {{0}};
        p.options.window_left = p.mask.window_left = 11;
        draw_tensors(&p);
        without_scores(&p);
        make(&p, START, FDM_INT32, 3, 1, 1, 90, 0, -1, -1);
        make(&p, END, FDM_INT32, 3, 1, 1, 90, 0, -1, -1);
        assert_int_equal(fdm_document_intervals(&cu_seqlens, 0, &p.all[START].tensor, &p.all[END].tensor, NULL),
                         FDM_OK);
        p.mask.num_lists = 1;
        p.mask.interval_start = (const int32_t *)(const void *)p.all[START].data;
        p.mask.interval_end = (const int32_t *)(const void *)p.all[END].data;
        p.rows = p.keys = layout_of(90, 2, FDM_LAYOUT_ZIGZAG, 7);
        assert_int_equal(check_problem(&p, n), 1);
        assert_int_equal(run_packed(&p, &cu_seqlens, copies), FDM_OK);
        for (int which = 0; which < START; which++) {
            if (p.all[which].data && is_written(&p, which))
                assert_true(largest_error(&p.all[which], &copies[which], 1e-3) < 1e-5);
            free(copies[which].data);
        }
        release_problem(&p);
    }
}

/* ---- agreement and faults ---- */

static void simple_problem(struct problem *p, fdm_pass pass) {
    *p = square_problem(pass, FDM_RANKS_GATHER, 3, 60, 8);
    make(p, Q, p->dtype, 4, 1, 60, 4, 8, 1, -1);
    make(p, K, p->dtype, 4, 1, 60, 2, 8, -1, 1);
    make(p, V, p->dtype, 4, 1, 60, 2, 8, -1, 1);
    make(p, OUT, p->dtype, 4, 1, 60, 4, 8, 1, -1);
    make(p, LSE, p->dtype, 3, 1, 4, 60, 0, 2, -1);
    if (pass == FDM_BACKWARD) {
        make(p, DOUT, p->dtype, 4, 1, 60, 4, 8, 1, -1);
        make(p, DQ, p->dtype, 4, 1, 60, 4, 8, 1, -1);
        make(p, DK, p->dtype, 4, 1, 60, 2, 8, -1, 1);
        make(p, DV, p->dtype, 4, 1, 60, 2, 8, -1, 1);
    }
    p->rows = p->keys = layout_of(60, 3, FDM_LAYOUT_ZIGZAG, 4);
}

/* Rank 1 has another problem; argument says which. */
static int differ(struct thread_rank *rank, void *argument) {
    const int what = *(int *)argument;
    struct problem p;
    fdm_ranks_plan *plan = NULL;
    simple_problem(&p, FDM_FORWARD);
    if (rank->rank == 1 && what == 0) {
        p.options.causal = p.mask.causal = 0;
    } else if (rank->rank == 1 && what == 1) {
        fdm_layout_release(p.rows);
        p.rows = p.keys = layout_of(60, 3, FDM_LAYOUT_CONTIGUOUS, 4);
    } else if (rank->rank == 1 && what == 2) {
        p.options.softcap = 5;
    } else if (rank->rank == 1 && what == 3) {
        p.algorithm = FDM_RANKS_ULYSSES; /* 2 KV heads, 3 ranks */
    }
    const fdm_status made = plan_of_rank(&p, rank->rank, &plan);
    const fdm_status status = fdm_agree(plan, &rank->communicator);
    fdm_ranks_plan_release(plan);
    release_problem(&p);
    return made ? made : status;
}

static void ranks_that_differ_say_so(void **unused) {
    (void)unused;
    static const char *const words[] = {"ranks differ in other options", "ranks differ in the layout",
                                        "ranks differ in other options",
                                        "rank 1 has no plan: ulysses cannot run this problem: KV heads"};
    for (int what = 0; what < 4; what++) {
        struct thread_ranks all = {0};
        struct thread_rank each[THREAD_RANKS_MAX];
        thread_ranks_run(&all, 3, each, differ, &what);
        for (int r = 0; r < 3; r++) {
            const int own = what == 3 && r == 1;
            assert_int_equal(each[r].status, own ? FDM_ERROR_UNSUPPORTED : FDM_ERROR_INVALID_ARGUMENT);
            if (!strstr(each[r].sentence, own ? "ulysses cannot run" : words[what]))
                fail_msg("rank %d says: %s", r, each[r].sentence);
            if (what < 3)
                assert_string_equal(each[r].sentence, each[0].sentence);
        }
    }
}

/* Whatever call of the transport fails, every rank ends with a sentence, and its communicator refuses the next call. */
static int run_and_refuse(struct thread_rank *rank, void *argument) {
    const int status = run_rank(rank, argument);
    if (status == FDM_ERROR_REMOTE) {
        fdm_ranks_plan *plan = NULL;
        struct results *results = argument;
        plan_of_rank(results->p, rank->rank, &plan);
        const fdm_status again = fdm_agree(plan, &rank->communicator);
        fdm_ranks_plan_release(plan);
        return again == FDM_ERROR_REMOTE && strstr(fdm_last_error(), "takes no more calls") ? status
                                                                                            : FDM_ERROR_INTERNAL;
    }
    return status;
}

static void every_fault_ends_all_ranks(void **unused) {
    (void)unused;
    static const fdm_rank_algorithm algorithms[] = {FDM_RANKS_GATHER, FDM_RANKS_BOTH, FDM_RANKS_RING};
    for (int which = 0; which < (on_cuda() ? 4 : 6); which += on_cuda() ? 2 : 1) { /* forwards, without the ring */
        struct problem p;
        simple_problem(&p, (fdm_pass)(which % 2));
        p.algorithm = algorithms[which / 2];
        assert_int_equal(run_whole(&p), FDM_OK);
        for (int64_t n = 1;; n++) {
            struct thread_ranks all = {.fail_at = n, .device_type = ranks_device().type};
            struct thread_rank each[THREAD_RANKS_MAX];
            struct results results;
            start_results(&p, &results);
            thread_ranks_run(&all, 3, each, run_and_refuse, &results);
            const int done = all.calls < n;
            for (int r = 0; r < 3; r++)
                assert_int_equal(each[r].status, done ? FDM_OK : FDM_ERROR_REMOTE);
            end_results(&results);
            if (done)
                break;
        }
        release_problem(&p);
    }
    assert_true(on_cuda() || memory_live() == 0); /* kernels stay */
}

/* A rank whose tensors are wrong ends its peers too. */
static int give_wrong_tensors(struct thread_rank *rank, void *argument) {
    struct results *results = argument;
    fdm_ranks_plan *plan = NULL;
    fdm_status status = plan_of_rank(results->p, rank->rank, &plan);
    if (!status)
        status = fdm_agree(plan, &rank->communicator);
    if (!status && rank->rank == 2) {
        fdm_tensors whole = tensors_of(results->p);
        fdm_ranks_plan_info info = {.struct_bytes = sizeof info};
        fdm_ranks_plan_query(plan, &info);
        void *workspace = memory_allocate((size_t)info.workspace_bytes);
        status = fdm_execute_ranks(plan, &whole, workspace, (size_t)info.workspace_bytes, &rank->communicator, NULL);
        memory_release(workspace);
    } else if (!status) {
        status = run_plan(rank, results, plan);
    }
    fdm_ranks_plan_release(plan);
    return status;
}

static void wrong_tensors_end_all_ranks(void **unused) {
    (void)unused;
    struct problem p;
    struct thread_ranks all = {.device_type = ranks_device().type};
    struct thread_rank each[THREAD_RANKS_MAX];
    struct results results;
    simple_problem(&p, FDM_FORWARD);
    start_results(&p, &results);
    thread_ranks_run(&all, 3, each, give_wrong_tensors, &results);
    assert_int_equal(each[0].status, FDM_ERROR_REMOTE);
    assert_int_equal(each[1].status, FDM_ERROR_REMOTE);
    assert_int_equal(each[2].status, FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(each[2].sentence, "q has shape"));
    end_results(&results);
    release_problem(&p);
}

/* Masks that a plan of ranks does not know are refused in it and in its forecast. */
static void other_masks_are_refused(void **unused) {
    (void)unused;
    struct problem p;
    simple_problem(&p, FDM_FORWARD);
    fdm_device device = {.struct_bytes = sizeof device};
    const fdm_tensors whole = tensors_of(&p);
    const fdm_ranks_options options = {.struct_bytes = sizeof options, .num_threads = 1};
    fdm_problem problem;
    fdm_ranks_plan *plan = NULL;
    assert_int_equal(fdm_device_query(FDM_CPU, 0, &device), FDM_OK);
    assert_int_equal(fdm_describe(FDM_FORWARD, &whole, &p.options, &problem), FDM_OK);
    for (int blocks = 0; blocks < 2; blocks++) {
        problem.has_row_intervals = !blocks;
        problem.block_mask_size = blocks ? 64 : 0;
        assert_int_equal(fdm_plan_ranks(&device, &problem, p.rows, NULL, &p.mask, &options, &plan),
                         FDM_ERROR_UNSUPPORTED);
        assert_non_null(strstr(fdm_last_error(), "row intervals, block masks and trees are not computed over ranks"));
    }
    release_problem(&p);
}

static void plans_check_arguments(void **unused) {
    (void)unused;
    struct problem p;
    fdm_ranks_plan *plan = NULL;
    simple_problem(&p, FDM_FORWARD);
    p.algorithm = FDM_RANKS_ULYSSES;
    assert_int_equal(plan_of_rank(&p, 0, &plan), FDM_ERROR_UNSUPPORTED);
    assert_non_null(strstr(fdm_last_error(), "ulysses cannot run"));
    p.algorithm = FDM_RANKS_AUTO;
    assert_int_equal(plan_of_rank(&p, 3, &plan), FDM_ERROR_INVALID_ARGUMENT);
    p.mask.causal = 0;
    assert_int_equal(plan_of_rank(&p, 0, &plan), FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "differs from the problem's"));
    p.mask.causal = 1;
    for (int64_t n = 1;; n++) {
        memory_fail_at(n);
        const fdm_status status = plan_of_rank(&p, 0, &plan);
        memory_fail_at(0);
        if (!status)
            break;
        assert_int_equal(status, FDM_ERROR_OUT_OF_MEMORY);
    }
    fdm_ranks_plan_release(plan);
    release_problem(&p);
    assert_int_equal(memory_live(), 0);
}

/* Where gather would hold too much, the plan takes the ring; ranks that exchange heads divide both numbers. */
static void plans_follow_options(void **unused) {
    (void)unused;
    struct problem p;
    simple_problem(&p, FDM_FORWARD);
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_tensors whole = tensors_of(&p);
    fdm_problem problem;
    assert_int_equal(fdm_device_query(FDM_CPU, 0, &device), FDM_OK);
    assert_int_equal(fdm_describe(p.pass, &whole, &p.options, &problem), FDM_OK);
    fdm_ranks_options options = {.struct_bytes = sizeof options, .memory_bytes = 1 << 20};
    fdm_ranks_plan_info info = {.struct_bytes = sizeof info};
    for (int n = 0; n < 2; n++, options.memory_bytes = 100) {
        fdm_ranks_plan *plan = NULL;
        assert_int_equal(fdm_plan_ranks(&device, &problem, p.rows, NULL, &p.mask, &options, &plan), FDM_OK);
        assert_int_equal(fdm_ranks_plan_query(plan, &info), FDM_OK);
        assert_int_equal(info.algorithm, n ? FDM_RANKS_RING : FDM_RANKS_GATHER);
        assert_true(!n || strstr(info.reason, "more than 100"));
        fdm_ranks_plan_release(plan);
    }
    fdm_ranks_plan *plan = NULL;
    options.algorithm = FDM_RANKS_BOTH;
    options.head_ranks = 2;
    assert_int_equal(fdm_plan_ranks(&device, &problem, p.rows, NULL, &p.mask, &options, &plan),
                     FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "head_ranks is 2; it must divide the 3 ranks"));
    release_problem(&p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_one_call),
        cmocka_unit_test(has_the_bits_of_one_call),
        cmocka_unit_test(packed_sequences_are_intervals),
        cmocka_unit_test(ranks_that_differ_say_so),
        cmocka_unit_test(every_fault_ends_all_ranks),
        cmocka_unit_test(wrong_tensors_end_all_ranks),
        cmocka_unit_test(other_masks_are_refused),
        cmocka_unit_test(plans_check_arguments),
        cmocka_unit_test(plans_follow_options),
    };
    const struct CMUnitTest of_device[] = {
        cmocka_unit_test(equals_one_call),
        cmocka_unit_test(every_fault_ends_all_ranks),
        cmocka_unit_test(wrong_tensors_end_all_ranks),
    };
    return on_cuda() ? cmocka_run_group_tests(of_device, NULL, NULL) : cmocka_run_group_tests(tests, NULL, NULL);
}
