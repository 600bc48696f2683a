/* test_visible.c: the walk over visible keys against the definition of visibility, pair by pair. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "device/isa.h"
#include "families/cpu/visible.h"

enum { ROWS_MAX = 150, KEYS_MAX = 600, HEADS_MAX = 12, RANGES_MAX = 4, TREE_WORDS = (ROWS_MAX + 31) / 32 };

static uint32_t state;
static int32_t draw(int32_t below) {
    state = state * 1664525u + 1013904223u;
    return (int32_t)((state >> 8) % (uint32_t)below);
}

/* Everything one draw needs; its own head of each tensor for every query head, or one for all. */
struct scene {
    fdm_problem problem;
    struct attention attention;
    uint8_t mask[HEADS_MAX][ROWS_MAX][KEYS_MAX];
    int32_t start[HEADS_MAX][KEYS_MAX], end[HEADS_MAX][KEYS_MAX];
    int32_t row_start[HEADS_MAX][RANGES_MAX][ROWS_MAX], row_end[HEADS_MAX][RANGES_MAX][ROWS_MAX];
    uint8_t blocks[HEADS_MAX][ROWS_MAX / 64 + 1][KEYS_MAX / 64 + 1];
    uint32_t tree[ROWS_MAX][TREE_WORDS];
    float bias[HEADS_MAX][KEYS_MAX];
};

static void draw_row_intervals(struct scene *s) {
    const int64_t of_head = RANGES_MAX * ROWS_MAX;
    for (int64_t h = 0; h < s->problem.heads; h++)
        for (int32_t n = 0; n < RANGES_MAX; n++)
            for (int32_t i = 0; i < ROWS_MAX; i++) {
                const int32_t start = draw(KEYS_MAX) - 20;
                s->row_start[h][n][i] = draw(10) ? start : INT32_MIN;
                s->row_end[h][n][i] = draw(10) ? start + draw(100) - 10 : INT32_MAX;
            }
    s->problem.has_row_intervals = 1;
    s->problem.row_ranges = 1 + draw(RANGES_MAX);
    s->attention.row_intervals = (struct interval_view){s->row_start[0][0],
                                                        s->row_end[0][0],
                                                        0,
                                                        of_head,
                                                        ROWS_MAX,
                                                        1,
                                                        0,
                                                        of_head,
                                                        ROWS_MAX,
                                                        1,
                                                        draw(2) ? 1 : s->problem.heads / s->problem.heads_kv};
}

static void draw_tree(struct scene *s) {
    for (int32_t i = 0; i < ROWS_MAX; i++)
        for (int32_t w = 0; w < TREE_WORDS; w++)
            s->tree[i][w] = (uint32_t)draw(1 << 16) << 16 | (uint32_t)draw(1 << 16);
    s->problem.has_tree = 1;
    s->attention.tree = (struct tree_view){s->tree[0], 0, TREE_WORDS, 1};
}

static void draw_blocks(struct scene *s) {
    const int32_t shown = 1 + draw(9);
    for (int64_t h = 0; h < s->problem.heads; h++)
        for (int32_t r = 0; r <= ROWS_MAX / 64; r++)
            for (int32_t c = 0; c <= KEYS_MAX / 64; c++)
                s->blocks[h][r][c] = draw(10) < shown ? (uint8_t)(1 + draw(255)) : 0;
    s->problem.block_mask_size = draw(2) ? 64 : 128;
    s->attention.block_mask =
        (struct score_view){(char *)s->blocks,      0, sizeof s->blocks[0],
                            sizeof s->blocks[0][0], 1, draw(2) ? 1 : s->problem.heads / s->problem.heads_kv};
    if (draw(3) == 0)
        s->attention.block_mask.group = s->problem.heads;
}

static void draw_scene(struct scene *s) {
    const int64_t group = 1 + draw(3), heads_kv = 1 + draw(2), heads = group * heads_kv;
    s->problem = fdm_problem_default();
    s->problem.heads = heads;
    s->problem.heads_kv = heads_kv;
    s->problem.seqlen_q = 1 + draw(ROWS_MAX);
    s->problem.seqlen_k = 1 + draw(KEYS_MAX);
    s->problem.causal = draw(2);
    s->problem.window_left = draw(2) ? -1 : draw(80);
    s->problem.window_right = draw(3) ? -1 : draw(80);
    if (draw(4) == 0) /* many more rows than keys: those before the first see none */
        s->problem.seqlen_k = 1 + draw(8);
    s->attention = (struct attention){.problem = &s->problem};
    if (draw(2)) {
        const int dense = 1 + draw(20), by_row = draw(3) > 0;
        for (int64_t h = 0; h < heads; h++)
            for (int32_t i = 0; i < ROWS_MAX; i++)
                for (int32_t j = 0; j < KEYS_MAX; j++)
                    s->mask[h][i][j] = draw(dense) ? 0 : (uint8_t)(1 + draw(255));
        s->attention.mask = (struct score_view){(char *)s->mask, 0, ROWS_MAX * KEYS_MAX, by_row ? KEYS_MAX : 0, 1, 1};
        if (draw(2))
            s->attention.mask.group = heads;
    }
    if (draw(2)) {
        for (int64_t h = 0; h < heads; h++)
            for (int32_t j = 0; j < KEYS_MAX; j++) {
                s->start[h][j] = draw(10) ? draw(ROWS_MAX) - 20 : INT32_MIN;
                s->end[h][j] = draw(4) ? draw(ROWS_MAX + 20) - 10 : INT32_MAX;
            }
        s->attention.intervals =
            (struct interval_view){s->start[0], s->end[0], 0, KEYS_MAX, 0, 1, 0, KEYS_MAX, 0, 1, draw(2) ? 1 : group};
    }
    if (draw(3) == 0)
        draw_row_intervals(s);
    if (draw(3) == 0)
        draw_blocks(s);
    if (!s->problem.causal && draw(3) == 0)
        draw_tree(s);
    if (draw(3) == 0) { /* of each KV head, or of all */
        const int32_t barred = draw(3) ? draw(20) : 0;
        for (int64_t h = 0; h < heads; h++)
            for (int32_t j = 0; j < KEYS_MAX; j++)
                s->bias[h][j] = draw(20) < barred ? -INFINITY : 0;
        s->problem.bias_dtype = FDM_FLOAT32;
        s->attention.bias = (struct score_view){(char *)s->bias, 0, KEYS_MAX, 0, 1, draw(2) ? group : heads};
    }
}

static int visible(const struct scene *s, int64_t h, int64_t i, int64_t j) {
    const fdm_problem *p = &s->problem;
    const struct attention *a = &s->attention;
    int64_t row = i + p->seqlen_k - p->seqlen_q;
    if ((p->causal && j > row) || (p->window_left >= 0 && j < row - p->window_left) ||
        (p->window_right >= 0 && j > row + p->window_right))
        return 0;
    if (a->bias.data && s->bias[h / a->bias.group][j] == -INFINITY)
        return 0;
    if (a->mask.data && !s->mask[h / a->mask.group][a->mask.row ? i : 0][j])
        return 0;
    const int32_t size = p->block_mask_size;
    if (a->block_mask.data && !s->blocks[h / a->block_mask.group][i / size][j / size])
        return 0;
    const int64_t drafted = j - (p->seqlen_k - p->seqlen_q);
    if (a->tree.data && drafted >= 0 && !(s->tree[i][drafted / 32] & (uint32_t)1 << drafted % 32))
        return 0;
    int held = !a->row_intervals.start;
    for (int32_t n = 0; n < p->row_ranges && !held; n++)
        held = s->row_start[h / a->row_intervals.group][n][i] <= j && j < s->row_end[h / a->row_intervals.group][n][i];
    if (!held)
        return 0;
    int64_t table = a->intervals.start ? h / a->intervals.group : 0;
    return !a->intervals.start || (s->start[table][j] <= i && i < s->end[table][j]);
}

/* Takes the walk's answer for every lane and key of one block of lanes, and compares. */
static void check_block(const struct scene *s, int64_t kv_head, int64_t first, int32_t count, int32_t block_keys) {
    static struct lane_block block;
    static struct key_block keys;
    static uint8_t seen[CPU_BLOCK_LANES_MAX][KEYS_MAX];
    struct key_walk walk;
    int64_t before = -1;
    memset(seen, 0, sizeof seen);
    lane_block_init(&block, &s->attention, cpu_isa_kernels(CPU_ISA_SCALAR, FDM_FLOAT32), 0, kv_head, first, count);
    key_walk_init(&walk, &block, block_keys);
    const int64_t end = walk.last, halt = draw(2) ? walk.next + draw(KEYS_MAX) : end;
    walk.last = halt < end ? halt : end;
    for (;;) {
        if (!key_walk_next(&walk, &keys)) {
            if (walk.last >= end)
                break;
            walk.last = end;
            continue;
        }
        for (int32_t steps = draw(24); steps > 0; steps--)
            key_walk_ahead(&walk);
        assert_in_range(keys.num_keys, 1, block_keys);
        for (int32_t k = 0; k < keys.num_keys; k++) {
            assert_true(keys.key[k] > before && keys.key[k] < s->problem.seqlen_k);
            before = keys.key[k];
            int any = 0;
            for (int32_t lane = 0; lane < count; lane++) {
                int32_t panel = lane / CPU_LANES;
                uint64_t bits = keys.state[panel] == PANEL_FULL   ? ~UINT64_C(0)
                                : keys.state[panel] == PANEL_SKIP ? 0
                                                                  : keys.visible[panel][k];
                seen[lane][before] = bits >> lane % CPU_LANES & 1;
                any |= seen[lane][before];
            }
            assert_true(any); /* a key that no lane sees is not listed */
        }
    }
    for (int32_t lane = 0; lane < count; lane++) {
        assert_int_equal(block.row[lane], (first + lane) / block.group);
        assert_int_equal(block.head[lane], kv_head * block.group + (first + lane) % block.group);
        for (int32_t j = 0; j < s->problem.seqlen_k; j++)
            assert_int_equal(seen[lane][j], visible(s, block.head[lane], block.row[lane], j));
    }
}

static void test_against_definition(void **unused) {
    static struct scene scene;
    (void)unused;
    for (uint32_t seed = 0; seed < 300; seed++) {
        state = seed * 7919u + 1;
        draw_scene(&scene);
        const int64_t lanes = scene.problem.seqlen_q * (scene.problem.heads / scene.problem.heads_kv);
        const int32_t block_m = CPU_LANES << draw(4), block_keys = draw(2) ? 64 : 1 + draw(CPU_BLOCK_KEYS_MAX);
        for (int64_t first = 0; first < lanes; first += block_m)
            check_block(&scene, draw((int32_t)scene.problem.heads_kv), first,
                        lanes - first < block_m ? (int32_t)(lanes - first) : block_m, block_keys);
    }
}

/* Keys that no lane sees are dropped before they cost anything. */
static void test_compaction(void **unused) {
    static struct scene scene;
    static struct lane_block block;
    static struct key_block keys;
    struct key_walk walk;
    (void)unused;
    scene.problem = fdm_problem_default();
    scene.problem.seqlen_q = ROWS_MAX;
    scene.problem.seqlen_k = KEYS_MAX;
    scene.attention = (struct attention){.problem = &scene.problem,
                                         .intervals = {scene.start[0], scene.end[0], 0, 0, 0, 1, 0, 0, 0, 1, 1}};
    for (int32_t j = 0; j < KEYS_MAX; j++) {
        scene.start[0][j] = j % 10 ? 100 : 0;
        scene.end[0][j] = INT32_MAX;
    }
    lane_block_init(&block, &scene.attention, cpu_isa_kernels(CPU_ISA_SCALAR, FDM_FLOAT32), 0, 0, 0, CPU_LANES);
    key_walk_init(&walk, &block, 64);
    assert_true(key_walk_next(&walk, &keys));
    assert_int_equal(keys.num_keys, KEYS_MAX / 10);
    assert_int_equal(keys.state[0], PANEL_FULL);
    assert_false(keys.contiguous);
    assert_false(key_walk_next(&walk, &keys));
}

/* Causal and windows of a row, and the bounds of a sequence, against the definition: i' = i + Sk - Sq. */
static void test_key_ranges(void **unused) {
    (void)unused;
    static const int64_t sides[] = {-1, 0, 1, 2, 3, 7, INT64_MAX};
    enum { SIDES = sizeof sides / sizeof sides[0], LONGEST = 5 };
    fdm_problem p = fdm_problem_default();
    for (int64_t n = 0; n < 2 * SIDES * SIDES * LONGEST * LONGEST; n++) {
        p.causal = (int32_t)(n % 2);
        p.window_left = sides[n / 2 % SIDES];
        p.window_right = sides[n / 2 / SIDES % SIDES];
        const int64_t lengths = n / 2 / SIDES / SIDES;
        const struct sequence s = {.seqlen_q = 1 + lengths % LONGEST, .seqlen_k = 1 + lengths / LONGEST};
        for (int64_t i = 0; i < s.seqlen_q; i++) {
            const struct key_range range = problem_key_range(&p, &s, i);
            const int64_t row = i + s.seqlen_k - s.seqlen_q;
            for (int64_t j = 0; j < s.seqlen_k; j++) {
                const int sees = (!p.causal || j <= row) && (p.window_left < 0 || row - j <= p.window_left) &&
                                 (p.window_right < 0 || j - row <= p.window_right);
                assert_int_equal(j >= range.first && j < range.last, sees);
            }
            assert_true(range.last <= s.seqlen_k);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_against_definition), cmocka_unit_test(test_compaction),
                                       cmocka_unit_test(test_key_ranges)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
