/* test_rules.c: the backward's tiles: every cell of the specified table, and what must hold of any choice anywhere. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "families/mma/backward/mma_rules.h"
#include "flash_dmattn.h"

static fdm_device device_of(int32_t capability, int64_t shared_bytes) {
    fdm_device device = {.struct_bytes = sizeof device,
                         .id = {FDM_CUDA, 0},
                         .compute_major = capability / 10,
                         .compute_minor = capability % 10,
                         .num_sms = 100,
                         .shared_bytes = shared_bytes};
    snprintf(device.name, sizeof device.name, "sm_%d", capability);
    return device;
}

static fdm_problem problem_of(int64_t batch, int64_t seqlen, int64_t head_dim) {
    fdm_problem problem = fdm_problem_default();
    problem.pass = FDM_BACKWARD;
    problem.dtype = FDM_BFLOAT16;
    problem.batch = batch;
    problem.seqlen_q = problem.seqlen_k = seqlen;
    problem.head_dim = problem.head_dim_v = head_dim;
    return problem;
}

/* ---- the cells ---- */

enum { ONE_LESS = 1 }; /* byte below a condition */
struct cell {
    int32_t capability;
    double limit; /* KB */
    int32_t less;
    int64_t head_dim, seqlen, batch;
    const char *code; /* NULL: no tile */
    int32_t stages;
};
static const struct cell cells[] = {
    {90, 227, 0, 32, 1024, 64, "SM90_LargeBlock_128x128", 1},
    {90, 227, 0, 32, 1024, 1, "SM90_LargeBlock_128x128", 1},
    {90, 49, 0, 1, 8192, 1, "SM90_LargeBlock_128x128", 1},
    {90, 49, ONE_LESS, 32, 8192, 1, "SM90_LargeBlock_128x128_VinRegs", 1},
    {90, 227, 0, 33, 1024, 5, "SM90_LargeBlock_128x128", 1},
    {90, 227, 0, 64, 1024, 5, "SM90_LargeBlock_128x128", 1},
    {90, 144, 0, 64, 1024, 5, "SM90_LargeBlock_128x128", 1},
    {90, 144, ONE_LESS, 64, 1024, 5, "SM90_MediumBlock_64x128", 1},
    {90, 144, ONE_LESS, 64, 8192, 5, "SM90_MediumBlock_64x128", 1},
    {90, 227, 0, 64, 1024, 4, "SM90_LargeBlock_128x128", 1},
    {90, 227, 0, 64, 4096, 4, "SM90_LargeBlock_128x128", 1},
    {90, 227, 0, 64, 8191, 4, "SM90_LargeBlock_128x128", 1},
    {90, 227, 0, 64, 8192, 4, "SM90_LargeBlock_128x128", 1},
    {90, 227, 0, 65, 8192, 2, "SM90_LargeBlock_128x128", 1},
    {90, 227, 0, 128, 8192, 2, "SM90_LargeBlock_128x128", 1},
    {90, 227, 0, 128, 8191, 2, "SM90_LargeBlock_128x128", 1},
    {90, 227, 0, 128, 100, 5, "SM90_LargeBlock_128x128", 1},
    {90, 176, 0, 128, 8192, 5, "SM90_LargeBlock_128x128", 1},
    {90, 176, ONE_LESS, 128, 8192, 5, "SM90_MediumBlock_64x128", 1},
    {90, 227, 0, 129, 8192, 2, "SM90_SmallBlock_64x64", 2},
    {90, 137, 0, 192, 8192, 2, "SM90_SmallBlock_64x64", 2},
    {90, 137, ONE_LESS, 192, 8192, 2, "SM90_SmallBlock_64x64", 1},
    {90, 113, 0, 192, 100, 5, "SM90_SmallBlock_64x64", 1},
    {90, 113, ONE_LESS, 192, 100, 5, "SM90_LowMem_64x64_VinRegs", 1},
    {90, 88.5, 0, 192, 100, 5, "SM90_LowMem_64x64_VinRegs", 1},
    {90, 88.5, ONE_LESS, 192, 100, 5, NULL, 0},
    {90, 227, 0, 193, 100, 5, "SM90_SmallBlock_64x64", 2},
    {90, 177, 0, 256, 8192, 2, "SM90_SmallBlock_64x64", 2},
    {90, 177, ONE_LESS, 256, 8192, 2, "SM90_SmallBlock_64x64", 1},
    {90, 145, 0, 256, 100, 5, "SM90_SmallBlock_64x64", 1},
    {90, 145, ONE_LESS, 256, 100, 5, "SM90_LowMem_64x32_VinRegs", 1},
    {90, 88.5, 0, 256, 100, 5, "SM90_LowMem_64x32_VinRegs", 1},
    {90, 88.5, ONE_LESS, 256, 100, 5, NULL, 0},

    {89, 99, 0, 32, 8192, 1, "SM89_LargeBlock_128x128", 1},
    {89, 99, 0, 32, 4096, 5, "SM89_LargeBlock_128x128", 1},
    {89, 99, 0, 32, 4096, 4, "SM89_StandardSeq_64x128", 1},
    {89, 99, 0, 32, 4095, 5, "SM89_StandardSeq_64x128", 1},
    {89, 99, 0, 64, 8192, 1, "SM89_LargeBlock_128x128", 1},
    {89, 99, 0, 64, 8191, 5, "SM89_StandardSeq_64x128_VinRegs", 1},
    {89, 99, 0, 64, 100, 1, "SM89_StandardSeq_64x128_VinRegs", 1},
    {89, 81, 0, 64, 8192, 1, "SM89_LargeBlock_128x128", 1},
    {89, 81, ONE_LESS, 64, 8192, 1, "SM89_LargeBlock_128x128_VinRegs", 1},
    {89, 65, ONE_LESS, 64, 8192, 1, "SM89_StandardSeq_64x128", 1},
    {89, 99, 0, 128, 8192, 1, "SM89_LongSeq_128x64", 1},
    {89, 99, 0, 128, 4096, 5, "SM89_LongSeq_128x64", 1},
    {89, 99, 0, 128, 4096, 4, "SM89_SmallBlock_64x64", 1},
    {89, 99, 0, 128, 4095, 5, "SM89_StandardSeq_64x128", 1},
    {89, 99, 0, 128, 4095, 4, "SM89_StandardSeq_64x128", 1},
    {89, 97, 0, 128, 8192, 5, "SM89_LongSeq_128x64", 1},
    {89, 97, ONE_LESS, 128, 8192, 5, "SM89_SmallBlock_64x64", 1},
    {89, 96.5, 0, 128, 100, 5, "SM89_StandardSeq_64x128", 1},
    {89, 96.5, ONE_LESS, 128, 100, 5, "SM89_LowMem_64x64_VinRegs", 1},
    {89, 96.5, ONE_LESS, 128, 8192, 5, "SM89_LowMem_64x64_VinRegs", 1},
    {89, 96.5, ONE_LESS, 80, 8192, 5, "SM89_LowMem_64x64_VinRegs", 1},
    {89, 227, 0, 128, 100, 5, "SM89_StandardSeq_64x128", 1},
    {89, 227, 0, 128, 8192, 5, "SM89_LongSeq_128x64", 1},
    {89, 64.5, ONE_LESS, 128, 8192, 5, NULL, 0},
    {89, 99, 0, 192, 8192, 5, "SM89_LowMem_64x64_VinRegs", 1},
    {89, 113, 0, 192, 100, 5, "SM89_SmallBlock_64x64", 1},
    {89, 137, 0, 192, 100, 5, "SM89_SmallBlock_64x64", 2},
    {89, 99, 0, 256, 8192, 5, "SM89_LowMem_64x32_VinRegs", 1},
    {89, 145, ONE_LESS, 256, 8192, 5, "SM89_LowMem_64x32_VinRegs", 1},
    {89, 145, 0, 256, 8192, 5, "SM89_SmallBlock_64x64", 1},
    {89, 227, 0, 256, 8192, 5, "SM89_SmallBlock_64x64", 1},

    {86, 99, 0, 32, 8192, 5, "SM86_Standard_64x128", 2},
    {86, 44.5, 0, 32, 100, 1, "SM86_Standard_64x128", 2},
    {86, 44.5, ONE_LESS, 32, 100, 1, "SM86_Standard_64x128", 1},
    {86, 40.5, ONE_LESS, 32, 100, 1, "SM86_Standard_64x128_VinRegs", 1},
    {86, 99, 0, 64, 8192, 5, "SM86_Standard_64x128_VinRegs", 1},
    {86, 99, 0, 64, 100, 1, "SM86_Standard_64x128_VinRegs", 1},
    {86, 99, 0, 128, 8192, 5, "SM86_Standard_64x128", 1},
    {86, 99, 0, 128, 100, 1, "SM86_Standard_64x128", 1},
    {86, 96.5, 0, 128, 100, 1, "SM86_Standard_64x128", 1},
    {86, 96.5, ONE_LESS, 128, 100, 1, "SM86_LowMem_64x64_VinRegs", 1},
    {86, 227, 0, 128, 100, 1, "SM86_Standard_64x128", 1},
    {86, 99, 0, 192, 100, 1, "SM86_LowMem_64x64_VinRegs", 1},
    {86, 113, 0, 192, 100, 1, "SM86_SmallBlock_64x64", 1},
    {86, 137, 0, 192, 100, 1, "SM86_SmallBlock_64x64", 2},
    {86, 99, 0, 256, 8192, 1, "SM86_LowMem_64x32_VinRegs", 1},
    {86, 227, 0, 256, 8192, 1, "SM86_LowMem_64x32_VinRegs", 1},

    {80, 163, 0, 32, 8192, 5, "SM80_Standard_64x128", 2},
    {80, 44.5, ONE_LESS, 32, 8192, 5, "SM80_Standard_64x128", 1},
    {80, 163, 0, 64, 8192, 1, "SM80_LargeBlock_128x128", 1},
    {80, 163, 0, 64, 100, 5, "SM80_LargeBlock_128x128", 1},
    {80, 163, 0, 64, 8191, 4, "SM80_Standard_64x128", 1},
    {80, 144, 0, 64, 100, 5, "SM80_LargeBlock_128x128", 1},
    {80, 144, ONE_LESS, 64, 100, 5, "SM80_Standard_64x128_VinRegs", 1},
    {80, 163, 0, 128, 8192, 5, "SM80_Standard_64x128", 1},
    {80, 144, 0, 128, 100, 1, "SM80_Standard_64x128", 1},
    {80, 144, ONE_LESS, 128, 100, 1, "SM80_LowMem_64x64_VinRegs", 1},
    {80, 163, 0, 192, 100, 1, "SM80_SmallBlock_64x64", 2},
    {80, 137, ONE_LESS, 192, 100, 1, "SM80_SmallBlock_64x64", 1},
    {80, 113, ONE_LESS, 192, 100, 1, "SM80_LowMem_64x64_VinRegs", 1},
    {80, 163, 0, 256, 100, 1, "SM80_SmallBlock_64x64", 1},
    {80, 227, 0, 256, 100, 1, "SM80_SmallBlock_64x64", 1},
    {80, 145, 0, 256, 100, 1, "SM80_SmallBlock_64x64", 1},
    {80, 145, ONE_LESS, 256, 100, 1, "SM80_LowMem_64x32_VinRegs", 1},

    {87, 163, 0, 64, 100, 5, "SM80_LargeBlock_128x128", 1},
    {100, 227, 0, 128, 8192, 5, "SM80_Standard_64x128", 1},
    {120, 99, 0, 128, 8192, 5, "SM80_LowMem_64x64_VinRegs", 1},
    {120, 99, 0, 64, 8192, 5, "SM80_Standard_64x128_VinRegs", 1},
};

static void test_cells(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof cells / sizeof cells[0]; i++) {
        const struct cell *c = &cells[i];
        fdm_device device = device_of(c->capability, (int64_t)(c->limit * 1024) - c->less);
        fdm_problem problem = problem_of(c->batch, c->seqlen, c->head_dim);
        struct mma_backward_choice choice;
        char text[512];
        int taken = mma_backward_choose(&device, &problem, NULL, &choice, text, sizeof text);
        if (taken != (c->code != NULL) || (taken && (strcmp(choice.code, c->code) != 0 || choice.stages != c->stages)))
            fail_msg("cell %zu: sm_%d, %g KB less %d, D %d, S %d, B %d: %s with %d buffers, expected %s with %d (%s)",
                     i, c->capability, c->limit, c->less, (int)c->head_dim, (int)c->seqlen, (int)c->batch,
                     taken ? choice.code : "nothing", taken ? choice.stages : 0, c->code ? c->code : "nothing",
                     c->stages, text);
    }
}

/* ---- bytes and registers ---- */

/* Head dims as the kernels take them, by hand. */
static void pad(const struct mma_backward_choice *c, int64_t *d, int64_t *dv) {
    const int64_t widest = *d > *dv ? *d : *dv;
    const int64_t step = (c->block_n == 128 && widest > 96) || (c->block_n == 32 && widest > 128) ? 64 : 32;
    *d = (*d + step - 1) / step * step, *dv = (*dv + step - 1) / step * step;
}

/* The specified formula, by hand; MS by what the specified figures imply. */
static int64_t expected_bytes(const struct mma_backward_choice *c, int64_t d, int64_t dv) {
    const int64_t m = c->block_m, n = c->block_n, widest = d > dv ? d : dv;
    pad(c, &d, &dv);
    int64_t passing = 2 * n * (n < 128 ? 128 : widest > 96 ? 32 : 64);
    if (m * n == 8192 && c->stages == 1 && !c->v_in_registers && widest > 96 && widest <= 128 && dv == 128)
        passing = 0;
    return 2 * d * m * c->stages + 2 * dv * m + (c->v_in_registers ? 0 : 2 * dv * n) + 2 * d * n + passing + 8 * m;
}

static void test_figures(void **state) {
    (void)state;
    static const struct {
        int32_t block_m, block_n, stages, v_in_registers, head_dim;
        double kilobytes;
    } figures[] = {
        {128, 64, 1, 0, 128, 97},   {64, 128, 1, 0, 128, 96.5}, {128, 64, 1, 1, 128, 97},   {64, 128, 1, 1, 128, 72.5},
        {128, 128, 1, 0, 64, 81},   {128, 128, 2, 0, 64, 97},   {64, 64, 2, 0, 192, 136.5}, {64, 64, 1, 0, 192, 112.5},
        {64, 64, 1, 1, 192, 88.5},  {64, 64, 2, 0, 256, 176.5}, {64, 64, 1, 0, 256, 144.5}, {64, 32, 1, 1, 256, 88.5},
        {128, 128, 1, 0, 128, 137},
    };
    for (size_t i = 0; i < sizeof figures / sizeof figures[0]; i++)
        assert_int_equal(mma_backward_shared_bytes(figures[i].block_m, figures[i].block_n, figures[i].stages,
                                                   figures[i].v_in_registers, figures[i].head_dim, figures[i].head_dim),
                         (int)(figures[i].kilobytes * 1024));
    assert_int_equal(mma_backward_accumulators(128, 128, 128), 128);
    assert_int_equal(mma_backward_accumulators(128, 192, 192), 192);
    assert_int_equal(mma_backward_accumulators(128, 256, 256), 256);
}

/* ---- what holds of every choice ---- */

/* Tile and place of V as the code spells them. */
static void read_code(const char *code, int32_t *block_m, int32_t *block_n, int32_t *v_in_registers) {
    const char *last = strrchr(code, '_');
    *v_in_registers = strcmp(last, "_VinRegs") == 0;
    char copy[64];
    snprintf(copy, sizeof copy, "%.*s", *v_in_registers ? (int)(last - code) : (int)strlen(code), code);
    char end;
    assert_int_equal(sscanf(strrchr(copy, '_'), "_%dx%d%c", block_m, block_n, &end), 2);
}

static const char *column_of(int32_t capability) {
    return capability == 90 ? "SM90_" : capability == 89 ? "SM89_" : capability == 86 ? "SM86_" : "SM80_";
}

static void check_choice(const fdm_device *device, const fdm_problem *p, const struct mma_backward_choice *c,
                         const char *text) {
    int32_t block_m, block_n, v_in_registers;
    read_code(c->code, &block_m, &block_n, &v_in_registers);
    assert_int_equal(block_m, c->block_m);
    assert_int_equal(block_n, c->block_n);
    assert_int_equal(v_in_registers, c->v_in_registers);
    assert_int_equal(c->shared_bytes, expected_bytes(c, p->head_dim, p->head_dim_v));
    assert_true(c->shared_bytes <= device->shared_bytes);
    int64_t d = p->head_dim, dv = p->head_dim_v;
    const int64_t sums =
        c->block_n < 128 && d <= 128 && dv <= 128 ? 128 : c->block_n; /* keys whose sums 8 warps hold */
    pad(c, &d, &dv);
    assert_true(sums * (d + dv) / 256 <= 128);
    assert_true(sums * (d + dv) / 256 + (v_in_registers ? dv / 4 : 0) <= 160);
    assert_true(strlen(text) < 511);
    assert_string_equal(text + strlen(text) - 7, ": taken");
}

static void check_free(const fdm_device *device, const fdm_problem *p) {
    struct mma_backward_choice choice;
    char text[512];
    memset(&choice, 0x5a, sizeof choice);
    const struct mma_backward_choice untouched = choice;
    const int64_t widest = p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v;
    if (!mma_backward_choose(device, p, NULL, &choice, text, sizeof text)) {
        struct mma_backward_choice least = {.block_m = 64, .block_n = widest > 192 ? 32 : 64, .stages = 1};
        least.v_in_registers = 1;
        assert_true(expected_bytes(&least, p->head_dim, p->head_dim_v) > device->shared_bytes);
        assert_non_null(strstr(text, " needs "));
        assert_true(strlen(text) < 160);
        assert_memory_equal(&choice, &untouched, sizeof choice);
        return;
    }
    check_choice(device, p, &choice, text);
    const int32_t capability = device->compute_major * 10 + device->compute_minor;
    assert_int_equal(strncmp(choice.code, column_of(capability), 5), 0);
    assert_in_range(choice.row, 0, mma_backward_row_count - 1);
    const int32_t next = widest <= 32 ? 32 : widest <= 64 ? 64 : widest <= 128 ? 128 : widest <= 192 ? 192 : 256;
    assert_int_equal(mma_backward_rows[choice.row].takes.head_dim_max, next);
    if (p->batch <= 4 && p->seqlen_q < 8192)
        assert_int_equal(choice.block_m, mma_backward_rows[choice.row].small_batch && choice.block_n == 128 ? 128 : 64);
    const char *length = p->seqlen_q >= 8192 ? "long" : p->seqlen_q >= 4096 ? "medium" : "standard";
    assert_int_equal(strncmp(text, length, strlen(length)), 0);
}

static const int32_t capabilities[] = {80, 86, 87, 89, 90, 100, 120};
static const double limits[] = {48,  49,  56,  64.5,  72,  80,  88.4, 88.5, 96.4, 96.5, 97,  98,  99,  105, 112.9,
                                113, 121, 129, 136.9, 137, 143, 144,  145,  153,  163,  170, 175, 176, 177, 227};
enum { NUM_CAPABILITIES = sizeof capabilities / sizeof capabilities[0], NUM_LIMITS = sizeof limits / sizeof limits[0] };

static void test_everywhere(void **state) {
    (void)state;
    static const int64_t lengths[] = {0, 1, 1024, 4095, 4096, 8191, 8192, 1000000}, batches[] = {1, 4, 5, 64};
    for (int a = 0; a < NUM_CAPABILITIES; a++)
        for (int l = 0; l < NUM_LIMITS; l++)
            for (int64_t d = 1; d <= 256; d++)
                for (size_t s = 0; s < 8; s++)
                    for (size_t b = 0; b < 4; b++) {
                        fdm_device device = device_of(capabilities[a], (int64_t)(limits[l] * 1024));
                        fdm_problem problem = problem_of(batches[b], lengths[s], d);
                        check_free(&device, &problem);
                    }
}

static void test_unequal_head_dims(void **state) {
    (void)state;
    for (int a = 0; a < NUM_CAPABILITIES; a++)
        for (int l = 0; l < NUM_LIMITS; l++)
            for (int64_t d = 1; d <= 256; d += 17)
                for (int64_t dv = 1; dv <= 256; dv += 15) {
                    fdm_device device = device_of(capabilities[a], (int64_t)(limits[l] * 1024));
                    fdm_problem problem = problem_of(5, 8192, d);
                    problem.head_dim_v = dv;
                    check_free(&device, &problem);
                }
}

/* Codes of the specification exist, and every code spells its own tile. */
static void test_codes(void **state) {
    (void)state;
    static const char *const specified[] = {
        "SM90_LargeBlock_128x128",   "SM90_MediumBlock_64x128", "SM89_LongSeq_128x64",      "SM89_StandardSeq_64x128",
        "SM89_LowMem_64x64_VinRegs", "SM86_Standard_64x128",    "SM86_LowMem_64x64_VinRegs"};
    for (size_t i = 0; i < sizeof specified / sizeof specified[0]; i++) {
        int found = 0;
        for (int32_t c = 0; c < mma_backward_code_count; c++)
            found += strcmp(mma_backward_codes[c].code, specified[i]) == 0;
        assert_int_equal(found, 1);
    }
    for (int32_t c = 0; c < mma_backward_code_count; c++) {
        const struct mma_backward_code *code = &mma_backward_codes[c];
        int32_t block_m, block_n, v_in_registers;
        read_code(code->code, &block_m, &block_n, &v_in_registers);
        assert_int_equal(block_m, code->block_m);
        assert_int_equal(block_n, code->block_n);
        assert_int_equal(v_in_registers, code->v_in_registers);
        assert_int_equal(strncmp(code->code, mma_column_name(code->column), 4), 0);
        for (int32_t other = 0; other < c; other++)
            assert_string_not_equal(code->code, mma_backward_codes[other].code);
        assert_true(strlen(code->code) < sizeof((fdm_plan *)0)->choice);
    }
}

/* ---- forced codes ---- */

static void check_forced(const fdm_device *device, const fdm_problem *p, const struct mma_backward_code *code) {
    struct mma_backward_choice choice, least = {.block_m = code->block_m, .block_n = code->block_n, .stages = 1};
    least.v_in_registers = code->v_in_registers;
    char text[512];
    int64_t d = p->head_dim, dv = p->head_dim_v;
    const int64_t sums = code->block_n < 128 && d <= 128 && dv <= 128 ? 128 : code->block_n;
    pad(&least, &d, &dv);
    const int64_t accumulators = sums * (d + dv) / 256;
    const int64_t registers = accumulators + (code->v_in_registers ? dv / 4 : 0);
    const int possible = accumulators <= 128 && registers <= 160 &&
                         expected_bytes(&least, p->head_dim, p->head_dim_v) <= device->shared_bytes;
    assert_int_equal(mma_backward_choose(device, p, code->code, &choice, text, sizeof text), possible);
    char count[64];
    if (possible) {
        assert_string_equal(choice.code, code->code);
        assert_int_equal(choice.row, -1);
        check_choice(device, p, &choice, text);
    } else if (accumulators > 128) {
        snprintf(count, sizeof count, " needs %d accumulator registers", (int)accumulators);
        assert_non_null(strstr(text, count));
    } else if (registers > 160) {
        snprintf(count, sizeof count, " needs %d registers", (int)registers);
        assert_non_null(strstr(text, count));
    } else {
        snprintf(count, sizeof count, " needs %.4g KB, the device has %.4g KB",
                 (double)expected_bytes(&least, p->head_dim, p->head_dim_v) / 1024,
                 (double)device->shared_bytes / 1024);
        assert_non_null(strstr(text, count));
    }
}

static void test_forced(void **state) {
    (void)state;
    for (int a = 0; a < NUM_CAPABILITIES; a++)
        for (int l = 0; l < NUM_LIMITS; l++)
            for (int64_t d = 1; d <= 256; d += 5)
                for (int32_t c = 0; c < mma_backward_code_count; c++) {
                    fdm_device device = device_of(capabilities[a], (int64_t)(limits[l] * 1024));
                    fdm_problem problem = problem_of(2, 4096, d);
                    check_forced(&device, &problem, &mma_backward_codes[c]);
                }
    fdm_device device = device_of(90, 227 << 10);
    fdm_problem problem = problem_of(2, 4096, 256);
    struct mma_backward_choice choice;
    char text[512];
    assert_false(mma_backward_choose(&device, &problem, "SM90_LowMem_64x64_VinRegs", &choice, text, sizeof text));
    assert_non_null(strstr(text, "192 registers"));
    assert_false(mma_backward_choose(&device, &problem, "SM90_LowMem_64x64", &choice, text, sizeof text));
    assert_non_null(strstr(text, "no choice code"));
    /* The buffers of the free choice, where it has the same tile. */
    assert_true(mma_backward_choose(&device, &problem, "SM80_SmallBlock_64x64", &choice, text, sizeof text));
    assert_int_equal(choice.stages, 2);
}

/* ---- the gradient of a shared bias in a fixed order ---- */

/* Its turns take registers: 64 keys with V in registers leave too few at head dim 192, and the tile shrinks to 32. */
static void test_turns(void **state) {
    (void)state;
    static const int32_t small[] = {86, 89, 120};
    for (int i = 0; i < 3; i++) {
        fdm_device device = device_of(small[i], 99 << 10);
        fdm_problem problem = problem_of(2, 4096, 192);
        struct mma_backward_choice choice;
        char text[512], keys64[64];
        const char *column = small[i] == 86 ? "SM86" : small[i] == 89 ? "SM89" : "SM80";
        problem.has_bias = problem.needs_dbias = 1;
        problem.bias_dtype = problem.dtype;
        const int64_t shared[4] = {1, problem.heads, problem.seqlen_q, problem.seqlen_k};
        memcpy(problem.bias_shape, shared, sizeof shared);
        snprintf(keys64, sizeof keys64, "%s_LowMem_64x64_VinRegs", column);
        assert_true(mma_backward_choose(&device, &problem, NULL, &choice, text, sizeof text));
        assert_string_equal(choice.code, keys64);
        problem.deterministic = 1;
        assert_true(mma_backward_choose(&device, &problem, NULL, &choice, text, sizeof text));
        assert_int_equal(choice.block_n, 32);
        assert_int_equal(choice.v_in_registers, 1);
        assert_int_equal(strncmp(choice.code, column, 4), 0);
        assert_non_null(strstr(text, "needs 168 registers a thread for accumulators, turns for the bias' gradient"));
        assert_false(mma_backward_choose(&device, &problem, keys64, &choice, text, sizeof text));
    }
}

/* ---- the way through the public interface ---- */

static void test_plan(void **state) {
    (void)state;
    fdm_device device = {.struct_bytes = sizeof device};
    fdm_plan plan = {.struct_bytes = sizeof plan};
    fdm_options options = fdm_options_default();
    fdm_problem problem = problem_of(2, 8192, 128);
    options.kernel = "mma.backward"; /* hopper.backward comes before it */
    assert_int_equal(fdm_device_from_name("sm_90", &device), FDM_OK);
    assert_int_equal(fdm_plan_attention(&device, &problem, &options, &plan), FDM_OK);
    assert_string_equal(plan.family, "mma");
    assert_string_equal(plan.choice, "SM90_LargeBlock_128x128");
    assert_int_equal(plan.block_m, 128);
    assert_int_equal(plan.block_n, 128);
    assert_int_equal(plan.stages, 1);
    assert_int_equal(plan.v_in_registers, 0);
    assert_int_equal(plan.shared_bytes, (451 << 9) + 32); /* paired warps, dS twice, a ring of three units, barriers */
    assert_non_null(strstr(plan.reason, "long sequence (8192 >= 8192)"));
    assert_non_null(strstr(plan.reason, "128x128 needs 137 KB, the device has 227 KB: taken"));

    options.kernel = "SM89_LongSeq_128x64";
    assert_int_equal(fdm_plan_attention(&device, &problem, &options, &plan), FDM_OK);
    assert_string_equal(plan.choice, "SM89_LongSeq_128x64");
    options.kernel = NULL;
    setenv("FLASH_DMATTN_KERNEL", "SM90_MediumBlock_64x128", 1);
    assert_int_equal(fdm_plan_attention(&device, &problem, &options, &plan), FDM_OK);
    assert_string_equal(plan.choice, "SM90_MediumBlock_64x128");
    assert_int_equal(fdm_device_from_name("sm_86:smem=60K", &device), FDM_OK);
    assert_int_equal(fdm_plan_attention(&device, &problem, &options, &plan), FDM_ERROR_UNSUPPORTED);
    assert_non_null(strstr(fdm_last_error(), "64x128 needs 96.5 KB, the device has 60 KB"));
    unsetenv("FLASH_DMATTN_KERNEL");
    assert_int_equal(fdm_plan_attention(&device, &problem, &options, &plan), FDM_ERROR_UNSUPPORTED);
    assert_non_null(strstr(fdm_last_error(), "the smallest tile, 64x64 with V in registers, needs 64.5 KB"));

    device = device_of(75, 64 << 10);
    assert_int_equal(fdm_plan_attention(&device, &problem, &options, &plan), FDM_ERROR_UNSUPPORTED);
    assert_non_null(strstr(fdm_last_error(), "7.5 is below 8.0"));
}

static void test_too_old(void **state) {
    (void)state;
    fdm_device device = device_of(75, 64 << 10);
    fdm_problem problem = problem_of(2, 8192, 128);
    struct mma_backward_choice choice;
    char text[512];
    assert_false(mma_backward_choose(&device, &problem, NULL, &choice, text, sizeof text));
    assert_non_null(strstr(text, "7.5 is unsupported"));
}

static void test_architectures(void **state) {
    (void)state;
    static const struct {
        int32_t capability, sm89, sm90, wgmma, tensor_memory;
    } rows[] = {{80, 0, 0, 0, 0}, {86, 0, 0, 0, 0},  {89, 1, 0, 0, 0},
                {90, 1, 1, 1, 0}, {100, 1, 1, 0, 1}, {120, 1, 1, 0, 0}};
    fdm_arch_config config = {.struct_bytes = sizeof config};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        fdm_device device = device_of(rows[i].capability, 100 << 10);
        assert_int_equal(fdm_supports_sm89_features(&device), rows[i].sm89);
        assert_int_equal(fdm_supports_sm90_features(&device), rows[i].sm90);
        assert_int_equal(fdm_arch_optimization_config(&device, &config), FDM_OK);
        assert_int_equal(config.async_copy, 1);
        assert_int_equal(config.float8, rows[i].sm89);
        assert_int_equal(config.bulk_copy, rows[i].sm90);
        assert_int_equal(config.warpgroup_mma, rows[i].wgmma);
        assert_int_equal(config.tensor_memory, rows[i].tensor_memory);
    }
    static const struct {
        int64_t bytes;
        fdm_memory_tier tier;
    } tiers[] = {{227 << 10, FDM_MEMORY_HIGH},         {176 << 10, FDM_MEMORY_HIGH},
                 {(176 << 10) - 1, FDM_MEMORY_MEDIUM}, {144 << 10, FDM_MEMORY_MEDIUM},
                 {(144 << 10) - 1, FDM_MEMORY_LOW},    {48 << 10, FDM_MEMORY_LOW}};
    for (size_t i = 0; i < sizeof tiers / sizeof tiers[0]; i++) {
        fdm_device device = device_of(90, tiers[i].bytes);
        assert_int_equal(fdm_arch_optimization_config(&device, &config), FDM_OK);
        assert_int_equal(config.tier, tiers[i].tier);
        assert_int_equal(config.shared_bytes, tiers[i].bytes);
    }
    fdm_device old = device_of(75, 64 << 10), cpu = {.struct_bytes = sizeof cpu};
    assert_int_equal(fdm_device_from_name("cpu", &cpu), FDM_OK);
    assert_int_equal(fdm_arch_optimization_config(&old, &config), FDM_ERROR_UNSUPPORTED);
    assert_int_equal(fdm_arch_optimization_config(&cpu, &config), FDM_ERROR_INVALID_ARGUMENT);
    assert_int_equal(fdm_arch_optimization_config(NULL, &config), FDM_ERROR_INVALID_ARGUMENT);
    assert_int_equal(fdm_supports_sm89_features(&cpu) || fdm_supports_sm90_features(NULL), 0);
}

static void test_textbook_devices(void **state) {
    (void)state;
    static const struct {
        const char *name;
        int32_t capability, kilobytes;
    } rows[] = {{"sm_80", 80, 163},   {"sm_86", 86, 99},   {"sm_89", 89, 99},           {"sm_90", 90, 227},
                {"sm_100", 100, 227}, {"sm_120", 120, 99}, {"sm_90:smem=160K", 90, 160}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        fdm_device device = {.struct_bytes = sizeof device};
        assert_int_equal(fdm_device_from_name(rows[i].name, &device), FDM_OK);
        assert_int_equal(device.compute_major * 10 + device.compute_minor, rows[i].capability);
        assert_int_equal(device.shared_bytes, rows[i].kilobytes << 10);
        assert_int_equal(device.registers_per_sm, 65536);
        assert_true(device.num_sms > 0 && device.bandwidth > 500000000000 && device.threads_per_sm >= 1536);
        assert_int_equal(device.present, 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cells),
        cmocka_unit_test(test_figures),
        cmocka_unit_test(test_everywhere),
        cmocka_unit_test(test_unequal_head_dims),
        cmocka_unit_test(test_codes),
        cmocka_unit_test(test_forced),
        cmocka_unit_test(test_turns),
        cmocka_unit_test(test_plan),
        cmocka_unit_test(test_too_old),
        cmocka_unit_test(test_architectures),
        cmocka_unit_test(test_textbook_devices),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
