/* amx_overlap.h: one turn of the overlapped forward on AMX tiles, and the entries of the tables.
 *
 * The products of a turn (values of the panel before, then scores of the panel after) wait for loads, for each other
 * and for their stores; the softmax of the panel between, vector work, goes between them in the order of the program.
 * The blocks of C and the order of each sum are those of amx_score and amx_accumulate. A block's sums are stored
 * between the first products of the next block, tile by tile: each store waits for a product of its own (52 cycles),
 * and four of them at the end of a block would fill the store queue before anything behind them could begin.
 *
 * Scores of next may overwrite those of now: rows are weighed before a block begins that is stored over them. */
#ifndef FDM_CPU_AMX_OVERLAP_H
#define FDM_CPU_AMX_OVERLAP_H

#include "families/cpu/isa/amx_tile.h"
#include "families/cpu/isa/overlap_vectors.h"

/* ---- blocks that roll into each other ---- */

INLINE float *tile_of(float *c, size_t stride, int tile) {
    return (float *)(void *)((char *)c + (size_t)(tile / 2) * TILE_SIDE * stride) + tile % 2 * TILE_SIDE;
}

/* The intrinsics want a literal: `tile` is known when compiled. */
INLINE void store_held(struct cpu_overlap *t, int tile) {
    if (!(t->held_tiles >> tile & 1))
        return;
    float *at = tile_of(t->held, t->held_stride, tile);
    switch (tile) {
    case 0: _tile_stored(0, at, t->held_stride); break;
    case 1: _tile_stored(1, at, t->held_stride); break;
    case 2: _tile_stored(2, at, t->held_stride); break;
    default: _tile_stored(3, at, t->held_stride); break;
    }
}

static void store_all_held(struct cpu_overlap *t) {
    store_held(t, 0);
    store_held(t, 1);
    store_held(t, 2);
    store_held(t, 3);
    t->held_tiles = 0;
}

struct block {
    float *c;
    size_t stride;
    int add;
    int two_rows, two_columns; /* known when compiled */
};

INLINE void load_sums(const float *at, size_t stride, int tile) {
    switch (tile) {
    case 0: _tile_loadd(0, at, stride); break;
    case 1: _tile_loadd(1, at, stride); break;
    case 2: _tile_loadd(2, at, stride); break;
    default: _tile_loadd(3, at, stride); break;
    }
}

INLINE void zero_sums(int tile) {
    switch (tile) {
    case 0: _tile_zero(0); break;
    case 1: _tile_zero(1); break;
    case 2: _tile_zero(2); break;
    default: _tile_zero(3); break;
    }
}

/* Tile `tile` of C from the block before to this one. */
INLINE void renew(struct cpu_overlap *t, const struct block *block, int tile) {
    store_held(t, tile);
    if (block->add)
        load_sums(tile_of(block->c, block->stride, tile), block->stride, tile);
    else
        zero_sums(tile);
}

/* The products of one step with one part of B. fresh: they are the first of the block. */
INLINE void roll_products(struct cpu_overlap *t, const struct block *block, const char *b, size_t b_stride, int fresh) {
    _tile_loadd(6, b, b_stride);
    if (fresh)
        renew(t, block, 0);
    _tile_dpbf16ps(0, 4, 6);
    if (fresh && block->two_rows)
        renew(t, block, 2);
    if (block->two_rows)
        _tile_dpbf16ps(2, 5, 6);
    overlap_place(t);
    if (!block->two_columns)
        return;
    _tile_loadd(7, b + 64, b_stride);
    if (fresh)
        renew(t, block, 1);
    _tile_dpbf16ps(1, 4, 7);
    if (fresh && block->two_rows)
        renew(t, block, 3);
    if (block->two_rows)
        _tile_dpbf16ps(3, 5, 7);
    overlap_place(t);
}

/* multiply(), and after it the sums are held. */
INLINE void roll_block(struct cpu_overlap *t, const struct multiplication *m, const struct block *block, const char *a,
                       const char *b) {
    const uint32_t tiles = 1u | (uint32_t)block->two_columns << 1 | (uint32_t)block->two_rows << 2 |
                           (uint32_t)(block->two_rows && block->two_columns) << 3;
    int fresh = 1;
    for (int pa = PARTS - 1; pa >= 0; pa--)
        for (int32_t step = 0; step < m->steps; step++) {
            const char *a_at = a + (size_t)pa * m->a_plane + (size_t)step * TILE_STEP * 2;
            _tile_loadd(4, a_at, m->a_stride);
            if (block->two_rows)
                _tile_loadd(5, a_at + TILE_SIDE * m->a_stride, m->a_stride);
            for (int pb = least_part(m, pa); pb >= 0; pb--) {
                const char *b_at = b + (size_t)pb * m->b_plane + (size_t)step * TILE_SIDE * m->b_stride;
                roll_products(t, block, b_at, m->b_stride, fresh);
                if (fresh) {
                    t->held_tiles &= ~tiles;
                    store_all_held(t);
                }
                fresh = 0;
            }
        }
    t->held = block->c;
    t->held_stride = block->stride;
    t->held_tiles = tiles;
}

/* ---- the two products of a turn ---- */

/* C = or += A B in blocks of 2 x 2 tiles, numbered along the rows of blocks. */
struct tile_product {
    struct multiplication m;
    float *c;
    const char *a, *b;
    int32_t rows, columns; /* of C, in tiles; 0 rows = no product */
};

INLINE int32_t pairs_of(int32_t tiles) { return (tiles + 1) / 2; }
INLINE int32_t num_blocks(const struct tile_product *p) { return pairs_of(p->rows) * pairs_of(p->columns); }

/* Calls of overlap_place in all blocks. */
INLINE int32_t num_places(const struct tile_product *p) {
    const int32_t partial_products = PARTS == 2 && p->m.exact ? 4 : PARTS * (PARTS + 1) / 2;
    return pairs_of(p->rows) * p->columns * p->m.steps * partial_products;
}

INLINE struct tile_product scores_of(const struct cpu_overlap *t) {
    if (!t->next)
        return (struct tile_product){0};
    return (struct tile_product){score_multiplication(t->next->num_keys, t->depth),
                                 t->next->s,
                                 t->keys,
                                 t->panel,
                                 tiles_of(t->next->num_keys),
                                 tiles_of(t->next->num_lanes)};
}

INLINE struct tile_product values_of(const struct cpu_overlap *t) {
    if (!t->acc)
        return (struct tile_product){0};
    return (struct tile_product){accumulate_multiplication(t->acc_keys, t->acc_depth),
                                 t->acc,
                                 t->values,
                                 t->weights,
                                 tiles_of(t->acc_depth),
                                 tiles_of(t->acc_lanes)};
}

/* The block of the product whose first tile is (row, column); its C lies at c. */
INLINE void roll_at(struct cpu_overlap *t, const struct tile_product *p, int32_t row, int32_t column, float *c,
                    size_t stride, int add) {
    const char *a = p->a + (size_t)row * TILE_SIDE * p->m.a_stride, *b = p->b + (size_t)column * 64;
    const int two_rows = row + 1 < p->rows, two_columns = column + 1 < p->columns;
    if (two_rows && two_columns)
        roll_block(t, &p->m, &(struct block){c, stride, add, 1, 1}, a, b);
    else if (two_rows)
        roll_block(t, &p->m, &(struct block){c, stride, add, 1, 0}, a, b);
    else if (two_columns)
        roll_block(t, &p->m, &(struct block){c, stride, add, 0, 1}, a, b);
    else
        roll_block(t, &p->m, &(struct block){c, stride, add, 0, 0}, a, b);
}

INLINE float *block_of_c(const struct tile_product *p, int32_t row, int32_t column) {
    return p->c + (size_t)row * TILE_SIDE * CPU_LANES + column * TILE_SIDE;
}

/* Rows of C that end in the middle of the last tile go through a copy, so that nothing past acc is touched. */
static void add_through_copy(struct cpu_overlap *t, const struct tile_product *p, int32_t row, int32_t column) {
    enum { WIDTH = 2 * TILE_SIDE };
    float c[WIDTH * WIDTH] __attribute__((aligned(64))) = {0}, *rows = block_of_c(p, row, column);
    const int32_t left = t->acc_depth - row * TILE_SIDE;
    for (int32_t d = 0; d < left; d++)
        memcpy(c + d * WIDTH, rows + (size_t)d * CPU_LANES, sizeof(float) * WIDTH);
    atomic_signal_fence(memory_order_seq_cst);
    roll_at(t, p, row, column, c, WIDTH * sizeof(float), 1);
    store_all_held(t);
    atomic_signal_fence(memory_order_seq_cst);
    for (int32_t d = 0; d < left; d++)
        memcpy(rows + (size_t)d * CPU_LANES, c + d * WIDTH, sizeof(float) * WIDTH);
}

static void add_block(struct cpu_overlap *t, const struct tile_product *p, int32_t index) {
    const int32_t row = index / pairs_of(p->columns) * 2, column = index % pairs_of(p->columns) * 2;
    if ((row + 2) * TILE_SIDE > t->acc_depth && t->acc_depth % TILE_SIDE)
        add_through_copy(t, p, row, column);
    else
        roll_at(t, p, row, column, block_of_c(p, row, column), CPU_LANES * sizeof(float), 1);
}

/* The maxima of a row of blocks are taken during the next, when the last of its sums are stored. */
static void score_block(struct cpu_overlap *t, const struct tile_product *p, int32_t index) {
    const int32_t row = index / pairs_of(p->columns) * 2, column = index % pairs_of(p->columns) * 2;
    if (t->now && t->now->s == t->next->s)
        weigh_until(t, (row + 2) * TILE_SIDE);
    roll_at(t, p, row, column, block_of_c(p, row, column), CPU_LANES * sizeof(float), 0);
    if (column + 2 >= p->columns)
        t->scored = row * TILE_SIDE;
}

static void amx_overlap(struct cpu_overlap *t, int32_t share) {
    const struct tile_product values = values_of(t), scores = scores_of(t);
    const int32_t first = num_blocks(&values), all = first + num_blocks(&scores);
    if (share == 0) {
        t->held_tiles = 0;
        overlap_begin(t, num_places(&values) + num_places(&scores));
    }
    /* gcc's intrinsics do not say that they read memory. */
    atomic_signal_fence(memory_order_seq_cst);
    for (int32_t i = all * share / CPU_OVERLAP_SHARES; i < all * (share + 1) / CPU_OVERLAP_SHARES; i++)
        if (i < first)
            add_block(t, &values, i);
        else
            score_block(t, &scores, i - first);
    if (share == CPU_OVERLAP_SHARES - 1) {
        store_all_held(t);
        atomic_signal_fence(memory_order_seq_cst);
        overlap_end(t);
    }
}

#define AMX_ENTRIES                                                                                     \
    .isa = "amx", .begin = amx_begin, .end = amx_end, .score = amx_score, .accumulate = amx_accumulate, \
    .outer = amx_outer, .overlap = amx_overlap, OPERAND_ENTRIES

#endif
