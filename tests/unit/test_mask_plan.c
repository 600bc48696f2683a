/* test_mask_plan.c: the mask plan that a caller keeps, on the CPU: its bits, the calls that take it, and those that
 * refuse it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "flash_dmattn.h"

enum { B = 2, H = 4, HKV = 2, SQ = 150, SK = 200, D = 8, ROW_TILES = 3, KEY_TILES = 4, TILE = 64 };

/* A call of B batches; every array is large enough for all variants of it. */
struct scene {
    float q[B * SQ * H * D], k[B * SK * HKV * D], v[B * SK * HKV * D], out[B * SQ * H * D], lse[B * H * SQ];
    uint8_t mask[B * H * SQ * SK], blocks[B * H * ROW_TILES * KEY_TILES];
    int32_t start[B * H * SK], end[B * H * SK], row_start[H * 2 * SQ], row_end[H * 2 * SQ];
    int64_t shapes[12][4];
    fdm_tensor tensor[12];
    fdm_tensors all;
    fdm_options options;
    _Alignas(64) char memory[1 << 14];
    fdm_tile_plan plan;
};

static fdm_tensor *make(struct scene *s, int n, void *data, fdm_dtype dtype, int32_t ndim, const int64_t *shape) {
    memcpy(s->shapes[n], shape, (size_t)ndim * sizeof *shape);
    s->tensor[n] = (fdm_tensor){
        .data = data, .device = {FDM_CPU, 0}, .ndim = ndim, .dtype = fdm_data_type_of(dtype), .shape = s->shapes[n]};
    return &s->tensor[n];
}
#define SHAPE(...) ((const int64_t[]){__VA_ARGS__})

static struct scene *begin(void) {
    struct scene *s = memory_allocate(sizeof *s);
    memset(s, 0, sizeof *s);
    for (int n = 0; n < B * SQ * H * D; n++)
        s->q[n] = (float)(n % 7) - 3;
    for (int n = 0; n < B * SK * HKV * D; n++)
        s->k[n] = (float)(n % 5) - 2, s->v[n] = (float)(n % 11) - 5;
    for (int n = 0; n < B * H * SQ * SK; n++)
        s->mask[n] = n / SK % SQ / TILE != 1 || n % SK / TILE != 2; /* one tile hidden */
    for (int n = 0; n < B * H * ROW_TILES * KEY_TILES; n++)
        s->blocks[n] = n % 5 != 1;
    for (int n = 0; n < B * H * SK; n++)
        s->start[n] = n % SK, s->end[n] = n % SK + 70;
    for (int n = 0; n < H * 2 * SQ; n++)
        s->row_start[n] = n % SQ / 2, s->row_end[n] = n % SQ / 2 + 65;
    s->options = fdm_options_default();
    s->all = (fdm_tensors){.struct_bytes = sizeof s->all,
                           .q = make(s, 0, s->q, FDM_FLOAT32, 4, SHAPE(B, SQ, H, D)),
                           .k = make(s, 1, s->k, FDM_FLOAT32, 4, SHAPE(B, SK, HKV, D)),
                           .v = make(s, 2, s->v, FDM_FLOAT32, 4, SHAPE(B, SK, HKV, D)),
                           .out = make(s, 3, s->out, FDM_FLOAT32, 4, SHAPE(B, SQ, H, D)),
                           .lse = make(s, 4, s->lse, FDM_FLOAT32, 3, SHAPE(B, H, SQ))};
    s->plan = (fdm_tile_plan){.struct_bytes = sizeof s->plan, .memory = s->memory, .memory_bytes = sizeof s->memory};
    return s;
}

static void give_masks(struct scene *s) {
    s->all.mask = make(s, 5, s->mask, FDM_BOOL, 4, SHAPE(B, 1, SQ, SK));
    s->all.interval_start = make(s, 6, s->start, FDM_INT32, 3, SHAPE(1, HKV, SK));
    s->all.interval_end = make(s, 7, s->end, FDM_INT32, 3, SHAPE(1, HKV, SK));
    s->all.row_start = make(s, 8, s->row_start, FDM_INT32, 4, SHAPE(1, 1, 2, SQ));
    s->all.row_end = make(s, 9, s->row_end, FDM_INT32, 4, SHAPE(1, 1, 2, SQ));
    s->all.block_mask = make(s, 10, s->blocks, FDM_BOOL, 4, SHAPE(1, H, ROW_TILES, KEY_TILES));
}

static int bit(const fdm_tile_plan *plan, const uint32_t *bits, int of_head, int row_tile, int key_tile) {
    return bits[((int64_t)of_head * plan->row_tiles + row_tile) * plan->key_words + key_tile / 32] >> key_tile % 32 & 1;
}

static void test_bits_of_causal_and_window(void **state) {
    (void)state;
    struct scene *s = begin();
    s->options.causal = 1;
    s->options.window_left = 60;
    assert_int_equal(fdm_mask_plan(&s->all, &s->options, &s->plan, NULL), FDM_OK);
    assert_int_equal(s->plan.batches * s->plan.heads, 1);
    assert_int_equal(s->plan.row_tiles, ROW_TILES);
    assert_int_equal(s->plan.key_words, 1);
    for (int row_tile = 0; row_tile < ROW_TILES; row_tile++)
        for (int key_tile = 0; key_tile < 32; key_tile++) {
            int seen = 0, full = key_tile < KEY_TILES;
            for (int i = row_tile * TILE; i < (row_tile + 1) * TILE && i < SQ; i++)
                for (int j = key_tile * TILE; j < (key_tile + 1) * TILE && j < SK; j++) {
                    const int sees = j <= i + SK - SQ && j >= i + SK - SQ - 60;
                    seen |= sees;
                    full &= sees;
                }
            assert_int_equal(bit(&s->plan, s->plan.seen, 0, row_tile, key_tile), seen);
            assert_int_equal(bit(&s->plan, s->plan.full, 0, row_tile, key_tile), full);
        }
    memory_release(s);
}

static void test_bits_of_all_masks(void **state) {
    (void)state;
    struct scene *s = begin();
    give_masks(s);
    assert_int_equal(fdm_mask_plan(&s->all, &s->options, &s->plan, NULL), FDM_OK);
    assert_int_equal(s->plan.batches, B);
    assert_int_equal(s->plan.heads, H);
    for (int of_head = 0; of_head < B * H; of_head++)
        for (int row_tile = 0; row_tile < ROW_TILES; row_tile++)
            for (int key_tile = 0; key_tile < KEY_TILES; key_tile++) {
                const int h = of_head % H, kv = h / (H / HKV);
                int seen = 0, full = 1;
                for (int i = row_tile * TILE; i < (row_tile + 1) * TILE && i < SQ; i++)
                    for (int j = key_tile * TILE; j < (key_tile + 1) * TILE && j < SK; j++) {
                        int in_range = 0;
                        for (int n = 0; n < 2; n++)
                            in_range |= s->row_start[n * SQ + i] <= j && j < s->row_end[n * SQ + i];
                        const int sees = s->mask[(of_head / H * SQ + i) * SK + j] && in_range &&
                                         s->start[kv * SK + j] <= i && i < s->end[kv * SK + j] &&
                                         s->blocks[(h * ROW_TILES + row_tile) * KEY_TILES + key_tile];
                        seen |= sees;
                        full &= sees;
                    }
                assert_int_equal(bit(&s->plan, s->plan.seen, of_head, row_tile, key_tile), seen);
                assert_int_equal(bit(&s->plan, s->plan.full, of_head, row_tile, key_tile), full);
            }
    memory_release(s);
}

/* The call takes the plan, or refuses it with a sentence that holds `words`. */
static void expect(struct scene *s, const char *words) {
    s->all.mask_plan = &s->plan;
    const fdm_status status = fdm_attention_forward(&s->all, &s->options, NULL);
    if (!words)
        assert_int_equal(status, FDM_OK);
    else if (status != FDM_ERROR_INVALID_ARGUMENT || !strstr(fdm_last_error(), words))
        fail_msg("status %d, '%s' instead of '%s'", (int)status, fdm_last_error(), words);
}

static void test_other_calls_are_refused(void **state) {
    (void)state;
    struct scene *s = begin();
    expect(s, "mask_plan is empty");
    give_masks(s);
    s->options.causal = 1;
    assert_int_equal(fdm_mask_plan(&s->all, &s->options, &s->plan, NULL), FDM_OK);
    expect(s, NULL);
    s->options.softcap = 3; /* no fact of masks */
    expect(s, NULL);
    s->options.causal = 0;
    expect(s, "mask_plan was made for causal 1, but the call has 0");
    s->options.causal = 1;
    s->options.window_left = 9;
    expect(s, "window_left -1, but the call has 9");
    s->options.window_left = -1;
    s->all.mask = NULL;
    expect(s, "has_mask 1");
    s->all.mask = make(s, 5, s->mask, FDM_BOOL, 4, SHAPE(B, HKV, SQ, SK));
    expect(s, "mask_shape[1] 1, but the call has 2");
    s->all.mask = make(s, 5, s->mask, FDM_BOOL, 4, SHAPE(B, 1, SQ, SK));
    s->all.block_mask = NULL;
    expect(s, "block_mask_size 64");
    s->all.block_mask = make(s, 10, s->blocks, FDM_BOOL, 4, SHAPE(1, H, 2, 2));
    expect(s, "block_mask_size 64, but the call has 128");
    s->all.block_mask = make(s, 10, s->blocks, FDM_BOOL, 4, SHAPE(1, HKV, ROW_TILES, KEY_TILES));
    expect(s, "block_mask_heads 4");
    s->all.block_mask = make(s, 10, s->blocks, FDM_BOOL, 4, SHAPE(1, H, ROW_TILES, KEY_TILES));
    s->all.row_start = make(s, 8, s->row_start, FDM_INT32, 4, SHAPE(1, 1, 1, SQ));
    s->all.row_end = make(s, 9, s->row_end, FDM_INT32, 4, SHAPE(1, 1, 1, SQ));
    expect(s, "row_ranges 2, but the call has 1");
    s->all.row_start = s->all.row_end = NULL;
    expect(s, "has_row_intervals 1");
    memory_release(s);
}

static void test_other_shapes_are_refused(void **state) {
    (void)state;
    struct scene *s = begin();
    assert_int_equal(fdm_mask_plan(&s->all, &s->options, &s->plan, NULL), FDM_OK);
    s->all.q = make(s, 0, s->q, FDM_FLOAT32, 4, SHAPE(B, SQ - 1, H, D));
    s->all.out = make(s, 3, s->out, FDM_FLOAT32, 4, SHAPE(B, SQ - 1, H, D));
    s->all.lse = make(s, 4, s->lse, FDM_FLOAT32, 3, SHAPE(B, H, SQ - 1));
    expect(s, "seqlen_q 150, but the call has 149");
    s->plan.device.type = FDM_CUDA;
    expect(s, "mask_plan is on DLPack device 2:0");
    memory_release(s);
}

static void test_bad_memory_is_refused(void **state) {
    (void)state;
    struct scene *s = begin();
    fdm_problem problem;
    assert_int_equal(fdm_describe(FDM_FORWARD, &s->all, &s->options, &problem), FDM_OK);
    const size_t bytes = fdm_mask_plan_bytes(&problem);
    assert_true(bytes > 0 && bytes < sizeof s->memory);
    s->plan.memory_bytes = bytes - 1;
    assert_int_equal(fdm_mask_plan(&s->all, &s->options, &s->plan, NULL), FDM_ERROR_WORKSPACE);
    s->plan.memory_bytes = bytes;
    s->plan.memory = s->memory + 4;
    assert_int_equal(fdm_mask_plan(&s->all, &s->options, &s->plan, NULL), FDM_ERROR_WORKSPACE);
    s->plan.memory = NULL;
    assert_int_equal(fdm_mask_plan(&s->all, &s->options, &s->plan, NULL), FDM_ERROR_WORKSPACE);
    s->plan.memory_bytes = 0;
    assert_int_equal(fdm_mask_plan(&s->all, &s->options, &s->plan, NULL), FDM_OK);
    assert_int_equal(s->plan.memory_bytes, bytes);
    expect(s, "mask_plan is empty");
    s->plan.memory = s->memory;
    s->all.mask_plan = NULL;
    s->all.out = s->all.lse = NULL; /* are not needed */
    assert_int_equal(fdm_mask_plan(&s->all, NULL, &s->plan, NULL), FDM_OK);
    problem.batch = -1;
    assert_int_equal(fdm_mask_plan_bytes(&problem), 0);
    assert_int_equal(fdm_mask_plan_bytes(NULL), 0);
    memory_release(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits_of_causal_and_window), cmocka_unit_test(test_bits_of_all_masks),
        cmocka_unit_test(test_other_calls_are_refused), cmocka_unit_test(test_other_shapes_are_refused),
        cmocka_unit_test(test_bad_memory_is_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
