/* mma_rules.c: the backward's table of tiles by architecture, head dim, length and shared memory, and how it is read.
 */
#include "families/mma/backward/mma_rules.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "families/mma/mma_family.h"
#include "gpu/gpu_backward.h"

/* ---- the table ---- */

#define KB(n) ((int32_t)((n)*1024))

/* Tiles are query rows x keys. The rows of 9.0 were timed against every other tile (docs/backward-tiles.md); the
 * reasons of the others are those of the design. */
const struct mma_backward_row mma_backward_rows[] = {
    {.takes = {.column = MMA_SM90, .head_dim_max = 32, .lengths = MMA_ANY_LENGTH},
     .shape = {.block_m = 128, .block_n = 128, .variant = MMA_SINGLE_BUFFERED},
     .reason = "17 to 36 % less time than 64x128 with V in registers (H200)",
     .small_batch = "64 rows: up to 5 % slower (H200)"},
    {.takes = {.column = MMA_SM90, .head_dim_max = 64, .lengths = MMA_ANY_LENGTH, .limit_min = KB(144)},
     .shape = {.block_m = 128, .block_n = 128, .variant = MMA_SINGLE_BUFFERED},
     .reason = "K and V are read once for 128 rows",
     .small_batch = "64 rows: 1 % slower at S 4096 (H200)"},
    {.takes = {.column = MMA_SM90, .head_dim_max = 64, .lengths = MMA_ANY_LENGTH},
     .shape = {.block_m = 64, .block_n = 128, .variant = MMA_SINGLE_BUFFERED},
     .reason = "little shared memory"},
    {.takes = {.column = MMA_SM90, .head_dim_max = 128, .lengths = MMA_ANY_LENGTH, .limit_min = KB(176)},
     .shape = {.block_m = 128, .block_n = 128, .variant = MMA_SINGLE_BUFFERED},
     .reason = "the largest tile without a spill",
     .small_batch = "64 rows: the same with a ring, slower without (H200)"},
    {.takes = {.column = MMA_SM90, .head_dim_max = 128, .lengths = MMA_ANY_LENGTH},
     .shape = {.block_m = 64, .block_n = 128, .variant = MMA_SINGLE_BUFFERED},
     .reason = "little shared memory"},

    {.takes = {.column = MMA_SM89, .head_dim_max = 32, .lengths = MMA_MEDIUM | MMA_LONG},
     .shape = {.block_m = 128, .block_n = 128, .variant = MMA_SINGLE_BUFFERED},
     .reason = "long rows repay a long prologue"},
    {.takes = {.column = MMA_SM89, .head_dim_max = 32, .lengths = MMA_STANDARD},
     .shape = {.block_m = 64, .block_n = 128, .variant = MMA_SINGLE_BUFFERED},
     .reason = "a shorter tail"},
    {.takes = {.column = MMA_SM89, .head_dim_max = 64, .lengths = MMA_LONG},
     .shape = {.block_m = 128, .block_n = 128, .variant = MMA_SINGLE_BUFFERED},
     .reason = "long rows repay a long prologue"},
    {.takes = {.column = MMA_SM89, .head_dim_max = 64, .lengths = MMA_ANY_LENGTH},
     .shape = {.block_m = 64, .block_n = 128, .variant = MMA_V_IN_REGISTERS},
     .reason = "half of a multiprocessor's shared memory"},
    {.takes = {.column = MMA_SM89, .head_dim_max = 128, .lengths = MMA_MEDIUM | MMA_LONG, .limit_min = KB(96.5)},
     .shape = {.block_m = 128, .block_n = 64, .variant = MMA_SINGLE_BUFFERED},
     .reason = "fills 99 KB with dS over dO"},
    {.takes = {.column = MMA_SM89, .head_dim_max = 128, .lengths = MMA_STANDARD, .limit_min = KB(96.5)},
     .shape = {.block_m = 64, .block_n = 128, .variant = MMA_SINGLE_BUFFERED},
     .reason = "fills 99 KB with dS over dO"},
    {.takes = {.column = MMA_SM89, .head_dim_max = 128, .lengths = MMA_ANY_LENGTH},
     .shape = {.block_m = 64, .block_n = 64, .variant = MMA_V_IN_REGISTERS},
     .reason = "little shared memory"},

    {.takes = {.column = MMA_SM86, .head_dim_max = 32, .lengths = MMA_ANY_LENGTH},
     .shape = {.block_m = 64, .block_n = 128, .variant = MMA_DOUBLE_IF_IT_FITS},
     .reason = "the next rows load under this step's products"},
    {.takes = {.column = MMA_SM86, .head_dim_max = 64, .lengths = MMA_ANY_LENGTH},
     .shape = {.block_m = 64, .block_n = 128, .variant = MMA_V_IN_REGISTERS},
     .reason = "half of a multiprocessor's shared memory"},
    {.takes = {.column = MMA_SM86, .head_dim_max = 128, .lengths = MMA_ANY_LENGTH, .limit_min = KB(96.5)},
     .shape = {.block_m = 64, .block_n = 128, .variant = MMA_SINGLE_BUFFERED},
     .reason = "fills 99 KB with dS over dO"},
    {.takes = {.column = MMA_SM86, .head_dim_max = 128, .lengths = MMA_ANY_LENGTH},
     .shape = {.block_m = 64, .block_n = 64, .variant = MMA_V_IN_REGISTERS},
     .reason = "little shared memory"},

    {.takes = {.column = MMA_SM80, .head_dim_max = 32, .lengths = MMA_ANY_LENGTH},
     .shape = {.block_m = 64, .block_n = 128, .variant = MMA_DOUBLE_IF_IT_FITS},
     .reason = "the next rows load under this step's products"},
    {.takes = {.column = MMA_SM80, .head_dim_max = 64, .lengths = MMA_ANY_LENGTH, .limit_min = KB(144)},
     .shape = {.block_m = 128, .block_n = 128, .variant = MMA_SINGLE_BUFFERED},
     .reason = "K and V are read once for 128 rows"},
    {.takes = {.column = MMA_SM80, .head_dim_max = 64, .lengths = MMA_ANY_LENGTH},
     .shape = {.block_m = 64, .block_n = 128, .variant = MMA_V_IN_REGISTERS},
     .reason = "little shared memory"},
    {.takes = {.column = MMA_SM80, .head_dim_max = 128, .lengths = MMA_ANY_LENGTH, .limit_min = KB(144)},
     .shape = {.block_m = 64, .block_n = 128, .variant = MMA_SINGLE_BUFFERED},
     .reason = "128 rows with two buffers of Q would need 169 KB"},
    {.takes = {.column = MMA_SM80, .head_dim_max = 128, .lengths = MMA_ANY_LENGTH},
     .shape = {.block_m = 64, .block_n = 64, .variant = MMA_V_IN_REGISTERS},
     .reason = "little shared memory"},

#define EVERY_192(sm)                                                                                            \
    {.takes = {.column = sm, .head_dim_max = 192, .lengths = MMA_ANY_LENGTH, .limit_min = KB(137)},              \
     .shape = {.block_m = 64, .block_n = 64, .variant = MMA_DOUBLE_BUFFERED},                                    \
     .reason = "128 keys would need 192 accumulators"},                                                          \
        {.takes = {.column = sm, .head_dim_max = 192, .lengths = MMA_ANY_LENGTH, .limit_min = KB(113)},          \
         .shape = {.block_m = 64, .block_n = 64, .variant = MMA_SINGLE_BUFFERED},                                \
         .reason = "no room for Q twice"},                                                                       \
    {                                                                                                            \
        .takes = {.column = sm, .head_dim_max = 192, .lengths = MMA_ANY_LENGTH},                                 \
        .shape = {.block_m = 64, .block_n = 64, .variant = MMA_V_IN_REGISTERS}, .reason = "little shared memory" \
    }
    EVERY_192(MMA_SM90),
    EVERY_192(MMA_SM89),
    EVERY_192(MMA_SM86),
    EVERY_192(MMA_SM80),
#undef EVERY_192

    {.takes = {.column = MMA_SM90, .head_dim_max = 256, .lengths = MMA_ANY_LENGTH, .limit_min = KB(177)},
     .shape = {.block_m = 64, .block_n = 64, .variant = MMA_DOUBLE_BUFFERED},
     .reason = "128 keys would need 256 accumulators"},
    {.takes = {.column = MMA_SM90, .head_dim_max = 256, .lengths = MMA_ANY_LENGTH, .limit_min = KB(145)},
     .shape = {.block_m = 64, .block_n = 64, .variant = MMA_SINGLE_BUFFERED},
     .reason = "no room for Q twice"},
    {.takes = {.column = MMA_SM90, .head_dim_max = 256, .lengths = MMA_ANY_LENGTH},
     .shape = {.block_m = 64, .block_n = 32, .variant = MMA_V_IN_REGISTERS},
     .reason = "64 keys with V in registers would spill"},
    {.takes = {.column = MMA_SM89, .head_dim_max = 256, .lengths = MMA_ANY_LENGTH, .limit_min = KB(145)},
     .shape = {.block_m = 64, .block_n = 64, .variant = MMA_SINGLE_BUFFERED},
     .reason = "a limit that no such part has"},
    {.takes = {.column = MMA_SM89, .head_dim_max = 256, .lengths = MMA_ANY_LENGTH},
     .shape = {.block_m = 64, .block_n = 32, .variant = MMA_V_IN_REGISTERS},
     .reason = "64 keys with V in registers would spill"},
    {.takes = {.column = MMA_SM86, .head_dim_max = 256, .lengths = MMA_ANY_LENGTH},
     .shape = {.block_m = 64, .block_n = 32, .variant = MMA_V_IN_REGISTERS},
     .reason = "64 keys with V in registers would spill"},
    {.takes = {.column = MMA_SM80, .head_dim_max = 256, .lengths = MMA_ANY_LENGTH, .limit_min = KB(145)},
     .shape = {.block_m = 64, .block_n = 64, .variant = MMA_SINGLE_BUFFERED},
     .reason = "the room is not enough for Q twice"},
    {.takes = {.column = MMA_SM80, .head_dim_max = 256, .lengths = MMA_ANY_LENGTH},
     .shape = {.block_m = 64, .block_n = 32, .variant = MMA_V_IN_REGISTERS},
     .reason = "64 keys with V in registers would spill"},
};
const int32_t mma_backward_row_count = sizeof mma_backward_rows / sizeof mma_backward_rows[0];

/* Stable: a code is never renamed and never gets another tile. */
const struct mma_backward_code mma_backward_codes[] = {
    {.code = "SM90_LargeBlock_128x128", .column = MMA_SM90, .block_m = 128, .block_n = 128},
    {.code = "SM90_LargeBlock_128x128_VinRegs",
     .column = MMA_SM90,
     .block_m = 128,
     .block_n = 128,
     .v_in_registers = 1},
    {.code = "SM90_MediumBlock_64x128", .column = MMA_SM90, .block_m = 64, .block_n = 128},
    {.code = "SM90_MediumBlock_64x128_VinRegs", .column = MMA_SM90, .block_m = 64, .block_n = 128, .v_in_registers = 1},
    {.code = "SM90_SmallBlock_64x64", .column = MMA_SM90, .block_m = 64, .block_n = 64},
    {.code = "SM90_LowMem_64x64_VinRegs", .column = MMA_SM90, .block_m = 64, .block_n = 64, .v_in_registers = 1},
    {.code = "SM90_LowMem_64x32_VinRegs", .column = MMA_SM90, .block_m = 64, .block_n = 32, .v_in_registers = 1},
    {.code = "SM89_LargeBlock_128x128", .column = MMA_SM89, .block_m = 128, .block_n = 128},
    {.code = "SM89_LargeBlock_128x128_VinRegs",
     .column = MMA_SM89,
     .block_m = 128,
     .block_n = 128,
     .v_in_registers = 1},
    {.code = "SM89_LongSeq_128x64", .column = MMA_SM89, .block_m = 128, .block_n = 64},
    {.code = "SM89_LongSeq_128x64_VinRegs", .column = MMA_SM89, .block_m = 128, .block_n = 64, .v_in_registers = 1},
    {.code = "SM89_StandardSeq_64x128", .column = MMA_SM89, .block_m = 64, .block_n = 128},
    {.code = "SM89_StandardSeq_64x128_VinRegs", .column = MMA_SM89, .block_m = 64, .block_n = 128, .v_in_registers = 1},
    {.code = "SM89_SmallBlock_64x64", .column = MMA_SM89, .block_m = 64, .block_n = 64},
    {.code = "SM89_LowMem_64x64_VinRegs", .column = MMA_SM89, .block_m = 64, .block_n = 64, .v_in_registers = 1},
    {.code = "SM89_LowMem_64x32_VinRegs", .column = MMA_SM89, .block_m = 64, .block_n = 32, .v_in_registers = 1},
    {.code = "SM86_Standard_64x128", .column = MMA_SM86, .block_m = 64, .block_n = 128},
    {.code = "SM86_Standard_64x128_VinRegs", .column = MMA_SM86, .block_m = 64, .block_n = 128, .v_in_registers = 1},
    {.code = "SM86_SmallBlock_64x64", .column = MMA_SM86, .block_m = 64, .block_n = 64},
    {.code = "SM86_LowMem_64x64_VinRegs", .column = MMA_SM86, .block_m = 64, .block_n = 64, .v_in_registers = 1},
    {.code = "SM86_LowMem_64x32_VinRegs", .column = MMA_SM86, .block_m = 64, .block_n = 32, .v_in_registers = 1},
    {.code = "SM80_LargeBlock_128x128", .column = MMA_SM80, .block_m = 128, .block_n = 128},
    {.code = "SM80_LargeBlock_128x128_VinRegs",
     .column = MMA_SM80,
     .block_m = 128,
     .block_n = 128,
     .v_in_registers = 1},
    {.code = "SM80_Standard_64x128", .column = MMA_SM80, .block_m = 64, .block_n = 128},
    {.code = "SM80_Standard_64x128_VinRegs", .column = MMA_SM80, .block_m = 64, .block_n = 128, .v_in_registers = 1},
    {.code = "SM80_SmallBlock_64x64", .column = MMA_SM80, .block_m = 64, .block_n = 64},
    {.code = "SM80_LowMem_64x64_VinRegs", .column = MMA_SM80, .block_m = 64, .block_n = 64, .v_in_registers = 1},
    {.code = "SM80_LowMem_64x32_VinRegs", .column = MMA_SM80, .block_m = 64, .block_n = 32, .v_in_registers = 1},
};
const int32_t mma_backward_code_count = sizeof mma_backward_codes / sizeof mma_backward_codes[0];

const char *mma_column_name(enum mma_column column) {
    static const char *const names[MMA_COLUMN_COUNT] = {"SM90", "SM89", "SM86", "SM80"};
    return names[column];
}

const char *mma_variant_name(enum mma_variant variant) {
    static const char *const names[] = {"single-buffered", "double-buffered", "V in registers",
                                        "double-buffered if it fits"};
    return names[variant];
}

/* ---- the explanation ---- */

struct explanation {
    char *text;
    size_t size, used;
};

/* Appends a step; the first without, the others after "; ". */
__attribute__((format(printf, 2, 3))) static void tell(struct explanation *e, const char *format, ...) {
    if (e->used && e->used + 3 < e->size)
        e->used += (size_t)snprintf(e->text + e->used, e->size - e->used, "; ");
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(e->text + e->used, e->size - e->used, format, arguments);
    va_end(arguments);
    e->used += length > 0 ? (size_t)length : 0;
    if (e->used >= e->size)
        e->used = e->size ? e->size - 1 : 0;
}

static double kilobytes(int64_t bytes) { return (double)bytes / 1024; }

/* ---- one tile ---- */

/* What is fixed while one problem is placed on one device. */
struct placement {
    int64_t limit;
    int32_t head_dim, head_dim_v, key_words, has_bias;
    int32_t turn_registers; /* that a thread has less for accumulators and V */
    int32_t fills_half;     /* 1: what the scores need does not fit beside the accumulators of half the warps */
};

/* Compiled for 8.0, 8.6 and 8.9, a block of half the warps spills up to 508 bytes beside a block mask with row
 * intervals and the gradient of a shared bias. Devices with more shared memory have a ring, beside which it spills
 * less. */
static int fills_half_blocks(const fdm_device *device, const fdm_problem *p) {
    return device->shared_bytes < KB(200) && p->block_mask_size && p->has_row_intervals &&
           gpu_dbias_constant(p) == GPU_DBIAS_SUMS;
}

static struct placement place(const fdm_device *device, const fdm_problem *problem) {
    return (struct placement){
        .limit = device->shared_bytes,
        .head_dim = (int32_t)problem->head_dim,
        .head_dim_v = (int32_t)problem->head_dim_v,
        .key_words = gpu_key_words(problem),
        .has_bias = problem->has_bias,
        .turn_registers = gpu_dbias_in_turns(problem) ? MMA_BACKWARD_TURN_REGISTERS : 0,
        .fills_half = fills_half_blocks(device, problem),
    };
}

static struct mma_backward_choice tile(const struct placement *p, int32_t block_m, int32_t block_n, int32_t stages,
                                       int32_t v_in_registers) {
    return (struct mma_backward_choice){
        .row = -1,
        .block_m = block_m,
        .block_n = block_n,
        .stages = stages,
        .v_in_registers = v_in_registers,
        .staged_rows = mma_backward_staged_rows(block_n, p->head_dim, p->head_dim_v),
        .overlay = mma_backward_overlays(block_m, block_n, stages, v_in_registers, p->head_dim, p->head_dim_v),
        .shared_bytes =
            mma_backward_shared_bytes(block_m, block_n, stages, v_in_registers, p->head_dim, p->head_dim_v) +
            mma_backward_keys_bytes(block_n, p->key_words) + (p->has_bias ? 4 * block_m : 0)};
}

static const char *variant_of(const struct mma_backward_choice *c) {
    return c->v_in_registers ? " with V in registers" : c->stages == 2 ? " with two buffers of Q" : "";
}

/* 1 when the tile exists and fits; tells why or why not. */
static int fits(const struct placement *p, const struct mma_backward_choice *c, struct explanation *e) {
    const int32_t accumulators = mma_backward_accumulators(c->block_n, p->head_dim, p->head_dim_v);
    const int32_t registers =
        accumulators + p->turn_registers +
        (c->v_in_registers ? mma_backward_v_registers(c->block_n, p->head_dim, p->head_dim_v) : 0);
    if (accumulators > MMA_BACKWARD_ACCUMULATORS_MAX) {
        tell(e, "%dx%d at head dim %d needs %d accumulator registers a thread, more than %d spill", c->block_m,
             c->block_n, p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v, accumulators,
             MMA_BACKWARD_ACCUMULATORS_MAX);
        return 0;
    }
    if (registers > MMA_BACKWARD_REGISTERS_MAX) {
        tell(e, "%dx%d%s needs %d registers a thread for accumulators%s and V, more than %d spill", c->block_m,
             c->block_n, variant_of(c), registers, p->turn_registers ? ", turns for the bias' gradient" : "",
             MMA_BACKWARD_REGISTERS_MAX);
        return 0;
    }
    const int32_t widest = mma_backward_widest(p->head_dim, p->head_dim_v);
    if (p->fills_half && mma_backward_warps(c->block_n, widest, c->v_in_registers) < MMA_BACKWARD_WARPS) {
        tell(e, "%dx%d with half the warps spills beside a block mask, row intervals and a shared bias' gradient",
             c->block_m, c->block_n);
        return 0;
    }
    const int taken = c->shared_bytes <= p->limit;
    tell(e, "%dx%d%s needs %.4g KB, the device has %.4g KB%s", c->block_m, c->block_n, variant_of(c),
         kilobytes(c->shared_bytes), kilobytes(p->limit), taken ? ": taken" : "");
    return taken;
}

static const char *code_of(enum mma_column column, const struct mma_backward_choice *c) {
    for (int32_t i = 0; i < mma_backward_code_count; i++) {
        const struct mma_backward_code *code = &mma_backward_codes[i];
        if (code->column == column && code->block_m == c->block_m && code->block_n == c->block_n &&
            code->v_in_registers == c->v_in_registers)
            return code->code;
    }
    return NULL;
}

/* ---- the row ---- */

static enum mma_column column_of(const fdm_device *device) {
    if (device->compute_major == 9)
        return MMA_SM90;
    if (device->compute_major == 8 && device->compute_minor == 9)
        return MMA_SM89;
    if (device->compute_major == 8 && device->compute_minor == 6)
        return MMA_SM86;
    return MMA_SM80;
}

static int32_t length_of(int64_t seqlen_q, struct explanation *e) {
    const long long rows = (long long)seqlen_q;
    if (seqlen_q >= MMA_LONG_ROWS) {
        tell(e, "long sequence (%lld >= %d)", rows, MMA_LONG_ROWS);
        return MMA_LONG;
    }
    if (seqlen_q >= MMA_MEDIUM_ROWS) {
        tell(e, "medium sequence (%d <= %lld < %d)", MMA_MEDIUM_ROWS, rows, MMA_LONG_ROWS);
        return MMA_MEDIUM;
    }
    tell(e, "standard sequence (%lld < %d)", rows, MMA_MEDIUM_ROWS);
    return MMA_STANDARD;
}

/* The first row that matches; rows that only lack shared memory are told. The last row of each head dim asks for none.
 */
static int32_t find_row(enum mma_column column, int32_t lengths, int64_t head_dim, int64_t limit,
                        struct explanation *e) {
    for (int32_t i = 0; i < mma_backward_row_count; i++) {
        const struct mma_backward_row *row = &mma_backward_rows[i];
        if (row->takes.column != column || head_dim > row->takes.head_dim_max || !(row->takes.lengths & lengths))
            continue;
        if (limit >= row->takes.limit_min) {
            tell(e, "row %s, D <= %d: %dx%d %s (%s)", mma_column_name(column), row->takes.head_dim_max,
                 row->shape.block_m, row->shape.block_n, mma_variant_name(row->shape.variant), row->reason);
            return i;
        }
        tell(e, "%dx%d %s is for devices from %.4g KB, this one has %.4g KB", row->shape.block_m, row->shape.block_n,
             mma_variant_name(row->shape.variant), kilobytes(row->takes.limit_min), kilobytes(limit));
    }
    return -1;
}

/* ---- fall-back ---- */

/* The next smaller tile; 0 when there is none. */
static int shrink(const struct placement *p, int32_t *block_m, int32_t *block_n) {
    if (*block_m == 128)
        *block_m = 64;
    else if (*block_n == 128)
        *block_n = 64;
    else if (*block_n == 64 && p->turn_registers) /* else 64x32 is a row of its own */
        *block_n = 32;
    else
        return 0;
    return 1;
}

/* From the row's variant on: two buffers of Q, one, V in registers, then the same with a smaller tile. */
static int fall_back(const struct placement *p, const struct mma_backward_row *row, int32_t block_m,
                     struct mma_backward_choice *choice, struct explanation *e) {
    int32_t block_n = row->shape.block_n;
    enum { DOUBLE, SINGLE, REGISTERS, STEPS };
    int first = row->shape.variant == MMA_V_IN_REGISTERS    ? REGISTERS
                : row->shape.variant == MMA_SINGLE_BUFFERED ? SINGLE
                                                            : DOUBLE;
    do {
        /* 32 keys are with V in registers alone */
        for (int step = block_n == 32 ? REGISTERS : first; step < STEPS; step++) {
            *choice = tile(p, block_m, block_n, step == DOUBLE ? 2 : 1, step == REGISTERS);
            if (fits(p, choice, e))
                return 1;
        }
        first = row->shape.variant == MMA_DOUBLE_IF_IT_FITS ? DOUBLE : SINGLE;
    } while (shrink(p, &block_m, &block_n));
    return 0;
}

static int choose_freely(const fdm_device *device, const fdm_problem *problem, struct mma_backward_choice *choice,
                         struct explanation *e) {
    const struct placement p = place(device, problem);
    const int64_t widest = problem->head_dim > problem->head_dim_v ? problem->head_dim : problem->head_dim_v;
    const enum mma_column column = column_of(device);
    const int32_t length = length_of(problem->seqlen_q, e);
    const int32_t index = find_row(column, length, widest, p.limit, e);
    if (index < 0)
        return 0;
    const struct mma_backward_row *row = &mma_backward_rows[index];
    int32_t block_m = row->shape.block_m;
    if (problem->batch <= MMA_SMALL_BATCH && length != MMA_LONG && block_m == 128) {
        block_m = row->small_batch ? 128 : 64;
        tell(e, "batch %lld <= %d: %s%s", (long long)problem->batch, MMA_SMALL_BATCH,
             row->small_batch ? "128 query rows all the same, " : "64 query rows instead of 128",
             row->small_batch ? row->small_batch : "");
    }
    if (!fall_back(&p, row, block_m, choice, e)) {
        e->used = 0;
        tell(e, "the smallest tile, %dx%d%s, needs %.4g KB, the device has %.4g KB", choice->block_m, choice->block_n,
             variant_of(choice), kilobytes(choice->shared_bytes), kilobytes(p.limit));
        return 0;
    }
    choice->row = index;
    choice->code = code_of(column, choice);
    return choice->code != NULL;
}

/* A code by name: with the buffers that a free choice of the same tile has, else with one. */
static int choose_forced(const fdm_device *device, const fdm_problem *problem, const char *forced,
                         struct mma_backward_choice *choice, struct explanation *e) {
    const struct placement p = place(device, problem);
    char unused[512];
    struct explanation ignored = {unused, sizeof unused, 0};
    for (int32_t i = 0; i < mma_backward_code_count; i++) {
        const struct mma_backward_code *code = &mma_backward_codes[i];
        if (strcmp(code->code, forced) != 0)
            continue;
        int same = choose_freely(device, problem, choice, &ignored) && choice->block_m == code->block_m &&
                   choice->block_n == code->block_n && choice->v_in_registers == code->v_in_registers;
        *choice = tile(&p, code->block_m, code->block_n, same ? choice->stages : 1, code->v_in_registers);
        choice->code = code->code;
        return fits(&p, choice, e);
    }
    tell(e, "there is no choice code '%.48s'", forced);
    return 0;
}

/* ---- every way ---- */

static int same_tile(const struct mma_backward_code *code, int32_t block_m, int32_t block_n, int32_t v_in_registers) {
    return code->block_m == block_m && code->block_n == block_n && code->v_in_registers == v_in_registers;
}

/* The tile of a code is that of one before it. */
static int is_repeated(const struct mma_backward_code *code) {
    const struct mma_backward_code *first = mma_backward_codes;
    while (!same_tile(first, code->block_m, code->block_n, code->v_in_registers))
        first++;
    return first != code;
}

const char *mma_backward_variant(const fdm_device *device, const fdm_problem *problem, int32_t number) {
    const struct placement p = place(device, problem);
    char unused[512];
    struct explanation ignored = {unused, sizeof unused, 0};
    struct mma_backward_choice own;
    if (!choose_freely(device, problem, &own, &ignored))
        return NULL;
    if (number == 0)
        return own.code;
    for (int32_t i = 0; i < mma_backward_code_count; i++) {
        const struct mma_backward_code *code = &mma_backward_codes[i];
        const struct mma_backward_choice other = tile(&p, code->block_m, code->block_n, 1, code->v_in_registers);
        if (same_tile(code, own.block_m, own.block_n, own.v_in_registers) || is_repeated(code) ||
            !fits(&p, &other, &ignored) || --number > 0)
            continue;
        const char *of_column = code_of(column_of(device), &other);
        return of_column ? of_column : code->code;
    }
    return NULL;
}

/* ---- the entry ---- */

int mma_backward_choose(const fdm_device *device, const fdm_problem *problem, const char *forced,
                        struct mma_backward_choice *choice, char *explanation, size_t size) {
    struct explanation e = {explanation, size, 0};
    if (size)
        explanation[0] = 0;
    if (device->id.type != FDM_CUDA) {
        tell(&e, "it runs on CUDA devices only");
        return 0;
    }
    if (device->compute_major < 8) {
        tell(&e, "compute capability %d.%d is unsupported; it must be at least 8.0", device->compute_major,
             device->compute_minor);
        return 0;
    }
    struct mma_backward_choice found;
    const int taken =
        forced ? choose_forced(device, problem, forced, &found, &e) : choose_freely(device, problem, &found, &e);
    if (taken)
        *choice = found;
    return taken;
}
