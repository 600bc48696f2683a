/* structure.h: which rows see which keys where masks have a form: diagonals, padding, documents, single pairs, the last
 * row or column of a tile, long stretches; alone and two at a time. draw.c says one as a mask, as biases of -inf or as
 * key intervals. */
#ifndef FDM_STRUCTURE_H
#define FDM_STRUCTURE_H

#include "checks.h"

enum structure_kind {
    STRUCTURE_CAUSAL,
    STRUCTURE_BAND,
    STRUCTURE_PADDING,
    STRUCTURE_DOCUMENTS,
    STRUCTURE_HIDDEN_PAIR,
    STRUCTURE_VISIBLE_PAIR,
    STRUCTURE_ROW,
    STRUCTURE_COLUMN,
    STRUCTURE_ROWS_OF_TILES,
    STRUCTURE_COLUMNS_OF_TILES,
    STRUCTURE_STRETCH,
    NUM_STRUCTURES
};

enum { STRUCTURE_EDGES = 5 };
struct structure_part {
    enum structure_kind kind;
    int inside; /* whether what the fields below name is seen, and everything else not, or the other way round */
    int64_t rows[2], keys[2]; /* a rectangle: the first ones, and those past the last */
    int64_t left, right;      /* a band: row i sees keys from i - left to i + right */
    int64_t tile;             /* the last row, or column, of every tile of so many */
    int64_t row_edges[STRUCTURE_EDGES], key_edges[STRUCTURE_EDGES]; /* documents begin there */
};

/* A row sees the keys that every part lets it see. */
struct structure {
    int count;
    struct structure_part parts[2];
};

/* Which parts there are. lengthy: keys are many, and a long stretch of them is hidden. */
void structure_draw(struct structure *s, struct trial *trial, int lengthy);
/* Where they lie among so many rows and keys: mostly at edges of kernels' tiles. */
void structure_place(struct structure *s, struct trial *trial, int64_t rows, int64_t keys);
int structure_sees(const struct structure *s, int64_t row, int64_t key);
/* Appends their names to a text: "one hidden pair+documents". */
void structure_name(const struct structure *s, char *text, size_t size);

/* Whether edges of tiles of so many rows or keys are among those that structures are placed at. */
int structure_knows_tile(int64_t tile);

#endif
