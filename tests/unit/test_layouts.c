/* test_layouts.c: layouts of rows over ranks, pairs and needed keys against brute force, and forecasts of times. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "flash_dmattn.h"
#include "parallel/layout.h"

static uint64_t state;
static int64_t draw(int64_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return below > 0 ? (int64_t)(state >> 33) % below : 0;
}

static fdm_rank_mask mask_of(int64_t seqlen_q, int64_t seqlen_k) {
    fdm_rank_mask mask = fdm_rank_mask_default();
    mask.seqlen_q = seqlen_q;
    mask.seqlen_k = seqlen_k;
    return mask;
}

enum { ROWS_MAX = 700, DOCUMENTS_MAX = 9, RANKS_TRIED = 9 };

/* A random layout and a mask of its rows, which is the balanced one's own. */
struct problem {
    fdm_rank_mask mask;
    int32_t start[2 * ROWS_MAX], end[2 * ROWS_MAX];
    int64_t cu_seqlens[DOCUMENTS_MAX + 1];
    fdm_layout_wish wish;
};

static void draw_problem(struct problem *p) {
    const int64_t total = draw(ROWS_MAX);
    p->mask = mask_of(total, total);
    p->mask.causal = (int32_t)draw(2);
    p->mask.window_left = draw(3) ? -1 : draw(200);
    p->mask.window_right = draw(3) ? -1 : draw(200);
    p->mask.num_lists = draw(3);
    for (int64_t j = 0; j < p->mask.num_lists * total; j++) {
        p->start[j] = (int32_t)(draw(total + 20) - 10);
        p->end[j] = (int32_t)(draw(4) ? p->start[j] + draw(60) - 5 : INT32_MAX);
    }
    p->mask.interval_start = p->start;
    p->mask.interval_end = p->end;
    const int64_t documents = draw(DOCUMENTS_MAX) + 1;
    for (int64_t d = 0; d <= documents; d++)
        p->cu_seqlens[d] = d == documents ? total : draw(total + 1);
    for (int64_t d = 1; d <= documents; d++) /* sorted */
        for (int64_t e = d; e > 0 && p->cu_seqlens[e] < p->cu_seqlens[e - 1]; e--) {
            const int64_t moved = p->cu_seqlens[e];
            p->cu_seqlens[e] = p->cu_seqlens[e - 1];
            p->cu_seqlens[e - 1] = moved;
        }
    p->wish = (fdm_layout_wish){.struct_bytes = sizeof p->wish,
                                .kind = (fdm_layout_kind)draw(4),
                                .ranks = (int32_t)draw(RANKS_TRIED) + 1,
                                .num_masks = 1,
                                .total = total,
                                .block = 1 + draw(40),
                                .cu_seqlens = p->cu_seqlens,
                                .num_documents = documents,
                                .masks = &p->mask};
}

static int sees(const struct problem *p, int64_t list, int64_t i, int64_t j) {
    const fdm_rank_mask *m = &p->mask;
    const int64_t at = list * m->seqlen_k + j;
    return !(m->causal && j > i) && !(m->window_left >= 0 && j < i - m->window_left) &&
           !(m->window_right >= 0 && j > i + m->window_right) &&
           (!m->num_lists || (p->start[at] <= i && i < p->end[at]));
}

/* Every position is in one rank; owners[i] receives it. */
static void check_ranges(const struct problem *p, const fdm_layout *layout, int32_t *owners) {
    int64_t seen = 0;
    for (int32_t r = 0; r < p->wish.ranks; r++) {
        const fdm_range *ranges;
        int64_t count;
        assert_int_equal(fdm_layout_ranges(layout, r, &ranges, &count), FDM_OK);
        for (int64_t n = 0; n < count; n++) {
            assert_true(ranges[n].first < ranges[n].end && (n == 0 || ranges[n].first != ranges[n - 1].end));
            if (p->wish.kind != FDM_LAYOUT_DOCUMENTS)
                assert_int_equal(ranges[n].first % p->wish.block, 0);
            for (int64_t i = ranges[n].first; i < ranges[n].end; i++)
                owners[i] = r;
            seen += ranges[n].end - ranges[n].first;
        }
    }
    assert_int_equal(seen, p->wish.total);
}

static void check_work(const struct problem *p, const fdm_layout *layout, const int32_t *owners) {
    int64_t pairs[RANKS_TRIED], fetched[RANKS_TRIED], counted[RANKS_TRIED] = {0};
    static uint8_t needs[RANKS_TRIED][ROWS_MAX];
    const int64_t total = p->wish.total, lists = p->mask.num_lists ? p->mask.num_lists : 1;
    memset(needs, 0, sizeof needs);
    assert_int_equal(fdm_layout_work(layout, NULL, &p->mask, pairs, fetched), FDM_OK);
    for (int64_t list = 0; list < lists; list++)
        for (int64_t i = 0; i < total; i++)
            for (int64_t j = 0; j < total; j++)
                if (sees(p, list, i, j)) {
                    counted[owners[i]]++;
                    needs[owners[i]][j] = 1;
                }
    for (int32_t r = 0; r < p->wish.ranks; r++) {
        assert_int_equal(pairs[r], counted[r]);
        if (!p->mask.num_lists) /* whole spans, whose first key is rounded down: at least what is seen */
            continue;
        int64_t expected = 0; /* pages in which some key is seen */
        for (int64_t page = 0; page * KEY_PAGE < total; page++) {
            int64_t others = 0;
            int seen = 0;
            for (int64_t j = page * KEY_PAGE; j < total && j < (page + 1) * KEY_PAGE; j++) {
                seen |= needs[r][j];
                others += owners[j] != r;
            }
            expected += seen ? others : 0;
        }
        assert_int_equal(fetched[r], expected);
    }
}

static void counts_as_brute_force_does(void **unused) {
    (void)unused;
    static struct problem p;
    static int32_t owners[ROWS_MAX];
    state = 1;
    for (int n = 0; n < 300; n++) {
        fdm_layout *layout;
        draw_problem(&p);
        assert_int_equal(fdm_layout_create(&p.wish, &layout), FDM_OK);
        check_ranges(&p, layout, owners);
        check_work(&p, layout, owners);
        fdm_layout_release(layout);
    }
    assert_int_equal(memory_live(), 0);
}

/* Needed keys of causal masks and windows: spans of each range, from a multiple of 128 on. */
static void spans_are_exact(void **unused) {
    (void)unused;
    fdm_layout_wish wish = {.struct_bytes = sizeof wish, .ranks = 4, .total = 4096, .block = 256};
    fdm_rank_mask mask = mask_of(4096, 4096);
    int64_t pairs[4], fetched[4];
    fdm_layout *layout;
    assert_int_equal(fdm_layout_create(&wish, &layout), FDM_OK);
    mask.causal = 1;
    mask.window_left = 300;
    assert_int_equal(fdm_layout_work(layout, NULL, &mask, pairs, fetched), FDM_OK);
    const int64_t window_only[] = {0, 384, 384, 384};
    assert_memory_equal(fetched, window_only, sizeof fetched);
    mask.window_left = -1;
    assert_int_equal(fdm_layout_work(layout, NULL, &mask, pairs, fetched), FDM_OK);
    const int64_t before[] = {0, 1024, 2048, 3072}, triangle = 1024 * 1025 / 2;
    assert_memory_equal(fetched, before, sizeof fetched);
    for (int64_t r = 0; r < 4; r++)
        assert_int_equal(pairs[r], triangle + r * 1024 * 1024);
    fdm_layout_release(layout);
    wish.kind = FDM_LAYOUT_ZIGZAG;
    assert_int_equal(fdm_layout_create(&wish, &layout), FDM_OK);
    assert_int_equal(fdm_layout_work(layout, NULL, &mask, pairs, fetched), FDM_OK);
    for (int64_t r = 1; r < 4; r++)
        assert_int_equal(pairs[r], pairs[0]);
    fdm_layout_release(layout);
}

static void balances(void **unused) {
    (void)unused;
    enum { TOTAL = 64 * 64 };
    static int32_t start[TOTAL], end[TOTAL];
    for (int64_t j = 0; j < TOTAL; j++) { /* documents of unlike lengths */
        const int64_t document = j < 2000 ? 0 : j < 2300 ? 2000 : j < 3500 ? 2300 : 3500;
        start[j] = (int32_t)j;
        end[j] = (int32_t)(document == 0 ? 2000 : document == 2000 ? 2300 : document == 2300 ? 3500 : TOTAL);
    }
    fdm_rank_mask mask = mask_of(TOTAL, TOTAL);
    mask.num_lists = 1;
    mask.interval_start = start;
    mask.interval_end = end;
    fdm_layout_wish wish = {.struct_bytes = sizeof wish,
                            .kind = FDM_LAYOUT_BALANCED,
                            .ranks = 4,
                            .num_masks = 1,
                            .total = TOTAL,
                            .block = 64,
                            .masks = &mask};
    int64_t pairs[4], fetched[4], most = 0, sum = 0;
    fdm_layout *layout;
    assert_int_equal(fdm_layout_create(&wish, &layout), FDM_OK);
    assert_int_equal(fdm_layout_work(layout, NULL, &mask, pairs, fetched), FDM_OK);
    for (int r = 0; r < 4; r++) {
        sum += pairs[r];
        most = pairs[r] > most ? pairs[r] : most;
        assert_int_equal(layout_rows(layout, r), TOTAL / 4);
    }
    assert_true((double)most * 4 <= 1.02 * (double)sum);
    fdm_layout_release(layout);
}

static void expect_refusal(const fdm_layout_wish *wish, const char *words) {
    fdm_layout *layout = NULL;
    assert_int_equal(fdm_layout_create(wish, &layout), FDM_ERROR_INVALID_ARGUMENT);
    assert_null(layout);
    if (!strstr(fdm_last_error(), words))
        fail_msg("the sentence is: %s", fdm_last_error());
}

static void refuses(void **unused) {
    (void)unused;
    const int64_t falls[] = {0, 9, 5}, counts[] = {1, 1};
    const fdm_range twice[] = {{0, 6}, {5, 10}}, hole[] = {{0, 4}, {5, 10}}, backwards[] = {{0, 4}, {5, 4}};
    fdm_layout_wish wish = {.struct_bytes = sizeof wish, .ranks = 0, .total = 10};
    expect_refusal(&wish, "ranks is 0");
    wish.ranks = 2;
    wish.total = -1;
    expect_refusal(&wish, "total is -1");
    wish.total = 10;
    wish.kind = (fdm_layout_kind)9;
    expect_refusal(&wish, "kind is 9");
    wish.kind = FDM_LAYOUT_DOCUMENTS;
    expect_refusal(&wish, "no cu_seqlens");
    wish.cu_seqlens = falls;
    wish.num_documents = 2;
    expect_refusal(&wish, "never fall");
    wish.kind = FDM_LAYOUT_BALANCED;
    expect_refusal(&wish, "no masks");
    wish.kind = FDM_LAYOUT_RANGES;
    expect_refusal(&wish, "no ranges");
    wish.range_counts = counts;
    wish.ranges = twice;
    expect_refusal(&wish, "position 5 is in two ranges");
    wish.ranges = hole;
    expect_refusal(&wish, "position 4 is in no range");
    wish.ranges = backwards;
    expect_refusal(&wish, "range of rank 1 is (5, 4)");
    wish.ranges = twice;
    wish.total = 20;
    expect_refusal(&wish, "position 5");
    assert_int_equal(memory_live(), 0);
}

static void survives_every_failed_allocation(void **unused) {
    (void)unused;
    static struct problem p;
    state = 5;
    for (int kind = 0; kind < 4; kind++) {
        do
            draw_problem(&p);
        while (p.wish.kind != (fdm_layout_kind)kind || p.wish.total < 100 || p.wish.ranks < 3);
        for (int64_t n = 1;; n++) {
            fdm_layout *layout = NULL;
            int64_t fetched[RANKS_TRIED], pairs[RANKS_TRIED];
            memory_fail_at(n);
            fdm_status status = fdm_layout_create(&p.wish, &layout);
            if (!status)
                status = fdm_layout_work(layout, NULL, &p.mask, pairs, fetched);
            memory_fail_at(0);
            fdm_layout_release(layout);
            assert_int_equal(memory_live(), 0);
            if (!status)
                break;
            assert_int_equal(status, FDM_ERROR_OUT_OF_MEMORY);
        }
    }
}

/* ---- forecasts ---- */

static fdm_problem causal_problem(int64_t seqlen, int64_t heads, int64_t heads_kv) {
    fdm_problem p = fdm_problem_default();
    p.dtype = FDM_BFLOAT16;
    p.heads = heads;
    p.heads_kv = heads_kv;
    p.seqlen_q = p.seqlen_k = seqlen;
    p.head_dim = p.head_dim_v = 128;
    p.softmax_scale = 0.0883883476483184;
    p.causal = 1;
    return p;
}

struct forecast {
    fdm_ranks_forecast whole;
    fdm_rank_forecast ranks[64];
    fdm_status status;
};

/* What a device takes, as where a CUDA graph is replayed. */
static const fdm_links device_alone = {
    .struct_bytes = sizeof device_alone, .host_start = -1, .host_exchange = -1, .sums_bandwidth = -1};

static struct forecast forecast(const char *device_name, const fdm_problem *problem, int32_t ranks,
                                const fdm_links *links, fdm_rank_algorithm algorithm) {
    struct forecast f = {.whole.struct_bytes = sizeof f.whole};
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_rank_mask mask = mask_of(problem->seqlen_q, problem->seqlen_k);
    fdm_layout_wish wish = {
        .struct_bytes = sizeof wish, .kind = FDM_LAYOUT_ZIGZAG, .ranks = ranks, .total = problem->seqlen_q};
    fdm_layout *layout;
    mask.causal = problem->causal;
    f.ranks[0].struct_bytes = sizeof f.ranks[0];
    assert_int_equal(fdm_device_from_name(device_name, &device), FDM_OK);
    assert_int_equal(fdm_layout_create(&wish, &layout), FDM_OK);
    f.status = fdm_forecast_ranks(&device, problem, layout, NULL, &mask, links, algorithm, &f.whole, f.ranks);
    fdm_layout_release(layout);
    assert_int_equal(memory_live(), 0);
    return f;
}

/* What is fetched is keys times heads times bytes; what one rank gets others send. */
static void forecasts_exact_bytes(void **unused) {
    (void)unused;
    const fdm_problem p = causal_problem(16384, 16, 4);
    fdm_problem backward = p;
    backward.pass = FDM_BACKWARD;
    const struct forecast f = forecast("sm_90", &p, 4, &device_alone, FDM_RANKS_GATHER);
    const struct forecast b = forecast("sm_90", &backward, 4, &device_alone, FDM_RANKS_GATHER);
    int64_t received = 0, sent = 0, back_received = 0, back_sent = 0;
    assert_int_equal(f.status, FDM_OK);
    assert_int_equal(b.status, FDM_OK);
    for (int r = 0; r < 4; r++) {
        /* Chunks r and 7 - r of 2048 rows see the keys up to the end of chunk 7 - r, of which 4096 are the rank's. */
        const int64_t keys = (8 - r) * 2048 - 4096;
        assert_int_equal(f.ranks[r].keys_fetched, keys);
        assert_int_equal(f.ranks[r].node_bytes, keys * 4 * 256 * 2);
        assert_int_equal(f.ranks[r].net_bytes, 0);
        assert_int_equal(f.ranks[r].rows, 4096);
        received += f.ranks[r].node_bytes;
        sent += f.ranks[r].bytes_sent;
        back_received += b.ranks[r].node_bytes;
        back_sent += b.ranks[r].bytes_sent;
    }
    assert_int_equal(received, sent);
    assert_int_equal(back_received, back_sent);
    assert_int_equal(back_received, 3 * received); /* keys again, and float32 parts of their gradients */
    assert_true(f.whole.imbalance < 1e-9 && f.whole.from_model == 1);
    assert_true(f.whole.seconds > f.whole.one_rank_seconds / 4 && f.whole.seconds < f.whole.one_rank_seconds / 2);
}

static void forecasts_choose(void **unused) {
    (void)unused;
    const fdm_problem large = causal_problem(1 << 20, 64, 8), small = causal_problem(2048, 16, 16);
    struct forecast f = forecast("sm_90", &large, 64, NULL, FDM_RANKS_AUTO);
    assert_int_equal(f.status, FDM_OK);
    assert_int_equal(f.whole.algorithm, FDM_RANKS_BOTH);
    assert_int_equal(f.whole.head_ranks, 8);
    assert_non_null(strstr(f.whole.reason, "8 KV heads are no multiple of 64 ranks"));
    assert_true(f.ranks[0].net_bytes > 0);
    f = forecast("sm_90", &large, 8, NULL, FDM_RANKS_BOTH);
    assert_int_equal(f.status, FDM_ERROR_UNSUPPORTED);
    assert_non_null(strstr(fdm_last_error(), "on one node"));
    /* A rank that may keep less than the heads of one set goes round by the ring. */
    fdm_links links = {.struct_bytes = sizeof links, .memory_bytes = 300 << 20};
    f = forecast("sm_90", &large, 64, &links, FDM_RANKS_GATHER);
    assert_int_equal(f.whole.algorithm, FDM_RANKS_GATHER);
    links.memory_bytes = 160 << 20;
    f = forecast("sm_90", &large, 64, &links, FDM_RANKS_AUTO);
    assert_int_equal(f.whole.algorithm, FDM_RANKS_RING);
    assert_non_null(strstr(f.whole.reason, "GB beside the shard"));
    /* Sixteen ranks for two thousand rows are slower than one. */
    f = forecast("sm_90", &small, 16, NULL, FDM_RANKS_GATHER);
    assert_true(f.whole.seconds > f.whole.one_rank_seconds);
}

static void forecasts_heed_links(void **unused) {
    (void)unused;
    const fdm_problem p = causal_problem(32768, 16, 16);
    fdm_links links = {.struct_bytes = sizeof links};
    const double fast = forecast("sm_90", &p, 2, &links, FDM_RANKS_GATHER).whole.seconds;
    links.node_bandwidth = 20e9;
    const double slow = forecast("sm_90", &p, 2, &links, FDM_RANKS_GATHER).whole.seconds;
    links.ranks_per_node = 1;
    links.net_bandwidth = 200e9;
    const struct forecast apart = forecast("sm_90", &p, 2, &links, FDM_RANKS_GATHER);
    assert_true(slow > 1.5 * fast && slow > 134e6 / 20e9);
    assert_true(apart.whole.seconds < slow && apart.ranks[0].node_bytes == 0);
    /* No measured model: a rate is needed, and work is in proportion to it. */
    links = (fdm_links){.struct_bytes = sizeof links};
    assert_int_equal(forecast("sm_80", &p, 2, &links, FDM_RANKS_GATHER).status, FDM_ERROR_UNSUPPORTED);
    assert_non_null(strstr(fdm_last_error(), "no constants"));
    links.flops = 200e12;
    const struct forecast rated = forecast("sm_80", &p, 2, &links, FDM_RANKS_GATHER);
    assert_int_equal(rated.whole.from_model, 0);
    assert_true(fabs(rated.whole.one_rank_seconds / (4.0 * 128 * 16 * 32768.0 * 32769 / 2 / 200e12) - 1) < 1e-2);
}

/* The host goes ahead of the device: it is waited for where it takes longer. */
static void forecasts_count_the_host(void **unused) {
    (void)unused;
    const fdm_problem p = causal_problem(32768, 16, 16), small = causal_problem(2048, 16, 16);
    fdm_problem backward = p;
    backward.pass = FDM_BACKWARD;
    fdm_links links = device_alone;
    const double alone = forecast("sm_90", &p, 2, &links, FDM_RANKS_GATHER).whole.seconds;
    links.host_start = 1e-3;
    assert_true(fabs(forecast("sm_90", &p, 2, &links, FDM_RANKS_GATHER).whole.seconds - alone - 1e-3) < 1e-9);
    links.host_exchange = 1; /* of one set, in one exchange; of ulysses in two, of the ring in one */
    assert_true(fabs(forecast("sm_90", &small, 2, &links, FDM_RANKS_GATHER).whole.seconds - 1.001) < 1e-9);
    assert_true(fabs(forecast("sm_90", &small, 2, &links, FDM_RANKS_ULYSSES).whole.seconds - 2.001) < 1e-9);
    assert_true(fabs(forecast("sm_90", &small, 2, &links, FDM_RANKS_RING).whole.seconds - 1.001) < 1e-9);
    /* Parts of dk and dv of 32768 keys of 16 heads: 2^29 bytes. */
    links = device_alone;
    const double free_sums = forecast("sm_90", &backward, 2, &links, FDM_RANKS_GATHER).whole.seconds;
    links.sums_bandwidth = 1e9;
    const double sums = forecast("sm_90", &backward, 2, &links, FDM_RANKS_GATHER).whole.seconds - free_sums;
    assert_true(sums > 0.9 * 0.537 && sums < 1.1 * 0.537);
    assert_true(forecast("sm_90", &p, 2, NULL, FDM_RANKS_GATHER).whole.seconds > alone + 500e-6 - 1e-9);
}

static void forecasts_check_arguments(void **unused) {
    (void)unused;
    fdm_problem p = causal_problem(4096, 16, 16);
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_ranks_forecast made = {.struct_bytes = sizeof made};
    fdm_rank_mask mask = mask_of(4096, 4096);
    fdm_layout_wish wish = {.struct_bytes = sizeof wish, .ranks = 2, .total = 4096};
    fdm_layout *layout;
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    assert_int_equal(fdm_layout_create(&wish, &layout), FDM_OK);
    p.seqlen_q = p.seqlen_k = 8192;
    assert_int_equal(fdm_forecast_ranks(&device, &p, layout, NULL, &mask, NULL, FDM_RANKS_AUTO, &made, NULL),
                     FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "8192 rows"));
    p.seqlen_q = p.seqlen_k = 4096;
    mask.window_left = -2;
    assert_int_equal(fdm_forecast_ranks(&device, &p, layout, NULL, &mask, NULL, FDM_RANKS_AUTO, &made, NULL),
                     FDM_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fdm_last_error(), "window is (-2, -1)"));
    mask.window_left = -1;
    assert_int_equal(fdm_forecast_ranks(&device, &p, NULL, NULL, &mask, NULL, FDM_RANKS_AUTO, &made, NULL),
                     FDM_ERROR_INVALID_ARGUMENT);
    assert_int_equal(fdm_forecast_ranks(&device, &p, layout, NULL, &mask, NULL, (fdm_rank_algorithm)9, &made, NULL),
                     FDM_ERROR_INVALID_ARGUMENT);
    for (int64_t n = 1;; n++) {
        memory_fail_at(n);
        const fdm_status status =
            fdm_forecast_ranks(&device, &p, layout, NULL, &mask, NULL, FDM_RANKS_AUTO, &made, NULL);
        memory_fail_at(0);
        if (!status)
            break;
        assert_int_equal(status, FDM_ERROR_OUT_OF_MEMORY);
    }
    fdm_layout_release(layout);
    assert_int_equal(memory_live(), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts_as_brute_force_does),
        cmocka_unit_test(spans_are_exact),
        cmocka_unit_test(balances),
        cmocka_unit_test(refuses),
        cmocka_unit_test(survives_every_failed_allocation),
        cmocka_unit_test(forecasts_exact_bytes),
        cmocka_unit_test(forecasts_choose),
        cmocka_unit_test(forecasts_heed_links),
        cmocka_unit_test(forecasts_count_the_host),
        cmocka_unit_test(forecasts_check_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
