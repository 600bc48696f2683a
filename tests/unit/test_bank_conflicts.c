/* test_bank_conflicts.c: tiles of mma_textbook.cu and mma_tf32.cuh in shared memory, by arithmetic: whatever a warp
 * reads or writes at a time touches each of the 32 banks once. Every access of every tile shape is enumerated. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "families/mma/float32/mma_forward32.h"
#include "families/mma/textbook/mma_textbook.h"

/* Banks are 4 bytes wide. Accesses of 16 bytes are served eight lanes at a time, those of 4 bytes 32 lanes at a time:
 * 128 bytes either way. */
enum { BANKS = 32, BANK_BYTES = 4, LANES = 32, PHASE_BYTES = 128 };

/* How the chunks of a row are placed: the two layouts of the kernel, and rows as they come. */
enum layout { PADDED, SWIZZLED, PLAIN, NUM_LAYOUTS };

/* Tiles of all shapes: 16 to 256 columns are 2 to 32 chunks of 16 bytes; the longest have 64 rows. */
enum { CHUNKS_MAX = 32, ROWS_MAX = 64 };

static int32_t offset_of(enum layout layout, int32_t row, int32_t chunk, int32_t chunks) {
    return layout == PLAIN ? (row * chunks + chunk) * 16 : MMA_TEXTBOOK_OFFSET(row, chunk, chunks, layout == SWIZZLED);
}

/* How many banks more than once: 0 when `lanes` accesses of `bytes` at these offsets take one phase. */
static int32_t conflicts_of(const int32_t *offsets, int32_t lanes, int32_t bytes) {
    int32_t touched[BANKS] = {0}, conflicts = 0;
    for (int32_t i = 0; i < lanes; i++)
        for (int32_t at = offsets[i]; at < offsets[i] + bytes; at += BANK_BYTES)
            conflicts += touched[at / BANK_BYTES % BANKS]++ > 0;
    return conflicts;
}

/* Lane by lane, in phases; `offsets` of 32 lanes. */
static int32_t warp_conflicts(const int32_t *offsets, int32_t bytes) {
    const int32_t lanes = PHASE_BYTES / bytes;
    int32_t conflicts = 0;
    for (int32_t first = 0; first < LANES; first += lanes)
        conflicts += conflicts_of(offsets + first, lanes, bytes);
    return conflicts;
}

/* ---- what the kernel does with a tile; each sums up the conflicts of all its accesses ---- */

/* ldmatrix.x4 of left operands (Q, P; transposed: V), 16 rows and two chunks at a time. */
static int32_t left_operands(enum layout layout, int32_t chunks) {
    int32_t conflicts = 0, offsets[LANES];
    for (int32_t row = 0; row < ROWS_MAX; row += 16)
        for (int32_t chunk = 0; chunk < chunks; chunk += 2) {
            for (int32_t lane = 0; lane < LANES; lane++)
                offsets[lane] =
                    offset_of(layout, row + MMA_TEXTBOOK_LEFT_ROW(lane), chunk + MMA_TEXTBOOK_LEFT_CHUNK(lane), chunks);
            conflicts += warp_conflicts(offsets, 16);
        }
    return conflicts;
}

/* ldmatrix.x4 of right operands (K). */
static int32_t right_operands(enum layout layout, int32_t chunks) {
    int32_t conflicts = 0, offsets[LANES];
    for (int32_t row = 0; row < ROWS_MAX; row += 16)
        for (int32_t chunk = 0; chunk < chunks; chunk += 2) {
            for (int32_t lane = 0; lane < LANES; lane++)
                offsets[lane] = offset_of(layout, row + MMA_TEXTBOOK_RIGHT_ROW(lane),
                                          chunk + MMA_TEXTBOOK_RIGHT_CHUNK(lane), chunks);
            conflicts += warp_conflicts(offsets, 16);
        }
    return conflicts;
}

/* 16 bytes a lane, chunk after chunk: what cp.async writes, and what leaves a panel of the output. Each warp takes 32
 * neighbouring chunks of the tile. */
static int32_t copies(enum layout layout, int32_t rows, int32_t chunks) {
    int32_t conflicts = 0, offsets[LANES];
    for (int32_t first = 0; first < rows * chunks; first += LANES) {
        for (int32_t lane = 0; lane < LANES; lane++)
            offsets[lane] = offset_of(layout, (first + lane) / chunks, (first + lane) % chunks, chunks);
        conflicts += warp_conflicts(offsets, 16);
    }
    return conflicts;
}

/* 4 bytes a lane: accumulators to P, and to a panel of the output; eight rows of one chunk at a time. */
static int32_t accumulators(enum layout layout, int32_t chunks) {
    int32_t conflicts = 0, offsets[LANES];
    for (int32_t row = 0; row < ROWS_MAX; row += 8)
        for (int32_t chunk = 0; chunk < chunks; chunk++) {
            for (int32_t lane = 0; lane < LANES; lane++)
                offsets[lane] = offset_of(layout, row + MMA_TEXTBOOK_SUM_ROW(lane), chunk, chunks) +
                                MMA_TEXTBOOK_SUM_COLUMN(lane) * 2;
            conflicts += warp_conflicts(offsets, 4);
        }
    return conflicts;
}

/* ---- tests ---- */

static void swizzled_tiles_have_no_conflicts(void **state) {
    (void)state;
    for (int32_t chunks = 2; chunks <= CHUNKS_MAX; chunks += 2) {
        assert_int_equal(left_operands(SWIZZLED, chunks), 0);
        assert_int_equal(right_operands(SWIZZLED, chunks), 0);
        assert_int_equal(accumulators(SWIZZLED, chunks), 0);
        assert_int_equal(copies(SWIZZLED, MMA_TEXTBOOK_V_KEYS, chunks), 0);
        assert_int_equal(copies(SWIZZLED, 32, chunks), 0);
        assert_int_equal(copies(SWIZZLED, 64, chunks), 0);
    }
}

/* Padding frees what is read by rows; what is written along them only where a row fills all banks. */
static void padded_tiles_are_read_without_conflicts(void **state) {
    (void)state;
    for (int32_t chunks = 2; chunks <= CHUNKS_MAX; chunks += 2) {
        assert_int_equal(left_operands(PADDED, chunks), 0);
        assert_int_equal(right_operands(PADDED, chunks), 0);
        assert_int_equal(accumulators(PADDED, chunks), 0);
        assert_true((copies(PADDED, 64, chunks) == 0) == (chunks % 8 == 0));
    }
}

/* Float32 tiles, rows of 32 to 256 elements: single words of four rows and eight columns, each lane its own bank. */
static void words_of_float32_tiles_have_no_conflicts(void **state) {
    (void)state;
    for (int32_t chunks = 8; chunks <= 64; chunks += 8)
        for (int32_t row = 0; row < ROWS_MAX; row += 8)
            for (int32_t n = 0; n < chunks / 2 * 2; n++) {
                int32_t offsets[LANES];
                for (int32_t lane = 0; lane < LANES; lane++)
                    offsets[lane] = offset_of(SWIZZLED, row + n % 2 + MMA_WORD_ROW(lane),
                                              n / 2 * 2 + MMA_WORD_CHUNK(lane), chunks) +
                                    MMA_WORD_BYTE(lane);
                assert_int_equal(warp_conflicts(offsets, 4), 0);
            }
}

/* The counter counts: rows as they come are what both layouts are for. Copies along them are free. */
static void plain_tiles_have_conflicts(void **state) {
    (void)state;
    for (int32_t chunks = 2; chunks <= CHUNKS_MAX; chunks += 2) {
        assert_true(left_operands(PLAIN, chunks) > 0);
        assert_true(right_operands(PLAIN, chunks) > 0);
        assert_true(accumulators(PLAIN, chunks) > 0);
        assert_int_equal(copies(PLAIN, 64, chunks), 0);
    }
    /* eight rows of 128 bytes in one chunk column: seven of them meet the first in four banks */
    assert_int_equal(left_operands(PLAIN, 8), ROWS_MAX / 8 * 8 * 7 * 4);
}

/* No two chunks of a tile share a place, and all lie inside it. */
static void chunks_have_places_of_their_own(void **state) {
    (void)state;
    for (int layout = PADDED; layout <= SWIZZLED; layout++)
        for (int32_t chunks = 2; chunks <= CHUNKS_MAX; chunks += 2) {
            const int32_t bytes = MMA_TEXTBOOK_TILE_BYTES(ROWS_MAX, chunks * 8, layout == SWIZZLED);
            uint8_t *taken = test_calloc((size_t)bytes / 16, 1);
            for (int32_t row = 0; row < ROWS_MAX; row++)
                for (int32_t chunk = 0; chunk < chunks; chunk++) {
                    const int32_t at = offset_of((enum layout)layout, row, chunk, chunks);
                    assert_true(at >= 0 && at + 16 <= bytes && at % 16 == 0 && !taken[at / 16]);
                    taken[at / 16] = 1;
                }
            test_free(taken);
        }
}

/* Lanes as mma.m16n8k16 wants them (PTX ISA, "Matrix Fragments for mma.m16n8k16"): every row and half of an operand is
 * given by one lane, and every pair of an accumulator is held by one. */
static void lanes_cover_operands(void **state) {
    (void)state;
    int32_t left[16][2] = {{0}}, right[16][2] = {{0}}, sums[8][8] = {{0}};
    for (int32_t lane = 0; lane < LANES; lane++) {
        left[MMA_TEXTBOOK_LEFT_ROW(lane)][MMA_TEXTBOOK_LEFT_CHUNK(lane)]++;
        right[MMA_TEXTBOOK_RIGHT_ROW(lane)][MMA_TEXTBOOK_RIGHT_CHUNK(lane)]++;
        sums[MMA_TEXTBOOK_SUM_ROW(lane)][MMA_TEXTBOOK_SUM_COLUMN(lane)]++;
    }
    for (int32_t row = 0; row < 16; row++)
        for (int32_t half = 0; half < 2; half++)
            assert_true(left[row][half] == 1 && right[row][half] == 1);
    for (int32_t row = 0; row < 8; row++)
        for (int32_t column = 0; column < 8; column++)
            assert_int_equal(sums[row][column], column % 2 == 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(swizzled_tiles_have_no_conflicts),
        cmocka_unit_test(padded_tiles_are_read_without_conflicts),
        cmocka_unit_test(words_of_float32_tiles_have_no_conflicts),
        cmocka_unit_test(plain_tiles_have_conflicts),
        cmocka_unit_test(chunks_have_places_of_their_own),
        cmocka_unit_test(lanes_cover_operands),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
