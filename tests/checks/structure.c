/* structure.c: masks that have a form, placed around the edges of kernels' tiles. */
#include "structure.h"

#include <string.h>

/* Rows and keys of the tiles of all kernels; a plan with another one fails (knows_tiles() in checks_main.c). */
static const int64_t tiles[] = {16, 32, 48, 64, 80, 96, 112, 128, 160, 176, 192, 256, 512};
enum { NUM_TILES = sizeof tiles / sizeof tiles[0], HIDDEN_TILES = 16 };

int structure_knows_tile(int64_t tile) {
    for (int i = 0; i < NUM_TILES; i++)
        if (tiles[i] == tile)
            return 1;
    return 0;
}

/* Most kernels' tiles have 64 or 128 rows or keys. */
static int64_t draw_tile(struct trial *t) {
    return random_below(t, 2) ? 64 << random_below(t, 2) : tiles[random_below(t, NUM_TILES)];
}

/* One of n: the last of a tile or the first of the next, the very last, or any. */
static int64_t draw_place(struct trial *t, int64_t n) {
    const int64_t tile = draw_tile(t);
    if (n < 1)
        return 0;
    const int64_t edge = (1 + random_below(t, (n + tile - 1) / tile)) * tile - (random_below(t, 3) > 0);
    switch (random_below(t, 6)) {
    case 0: return random_below(t, n);
    case 1: return n - 1;
    default: return edge < n ? edge : n - 1;
    }
}

static void set_range(int64_t range[2], int64_t first, int64_t past) {
    range[0] = first;
    range[1] = past;
}

/* Keys are hidden on one side, from an edge on. */
static void place_padding(struct structure_part *p, struct trial *t, int64_t keys) {
    const int64_t place = draw_place(t, keys);
    p->inside = 1;
    if (random_below(t, 4))
        set_range(p->keys, 0, place);
    else
        set_range(p->keys, place, keys);
}

/* Hidden from all rows, or from those of a tile; of many keys, so many that every kernel passes 16 tiles at once. */
static void place_stretch(struct structure_part *p, struct trial *t, int64_t rows, int64_t keys) {
    const int64_t first = draw_place(t, keys / 2 + 1), least = HIDDEN_TILES * 128, left = keys - first;
    const int64_t length = left > least + 128 ? least + draw_place(t, left - least) : draw_place(t, left) + 1;
    p->inside = 0;
    set_range(p->keys, first, first + length);
    if (random_below(t, 3) == 0) {
        const int64_t tile = draw_tile(t), row = draw_place(t, rows) / tile * tile;
        set_range(p->rows, row, row + tile);
    }
}

static void place_documents(struct structure_part *p, struct trial *t, int64_t rows, int64_t keys) {
    int64_t row = 0, key = 0;
    for (int i = 0; i < STRUCTURE_EDGES; i++) {
        key += draw_place(t, keys - key < 1 ? 1 : (keys - key + 1) / 2 + 1);
        row = rows == keys ? key : row + draw_place(t, rows - row < 1 ? 1 : (rows - row + 1) / 2 + 1);
        p->row_edges[i] = row;
        p->key_edges[i] = key;
    }
}

static void place_band(struct structure_part *p, struct trial *t, int64_t rows, int64_t keys) {
    const int64_t shift = keys - rows; /* the last row's diagonal is the last key's */
    p->left = INT64_MAX / 2;
    p->right = shift;
    if (p->kind == STRUCTURE_CAUSAL)
        return;
    p->left = draw_place(t, keys) - shift;
    p->right = shift + (random_below(t, 2) ? 0 : draw_place(t, keys));
}

static void place_part(struct structure_part *p, struct trial *t, int64_t rows, int64_t keys) {
    const enum structure_kind kind = p->kind;
    const int64_t row = draw_place(t, rows), key = draw_place(t, keys);
    *p = (struct structure_part){.kind = kind, .inside = (int)random_below(t, 2), .tile = draw_tile(t)};
    set_range(p->rows, 0, rows);
    set_range(p->keys, 0, keys);
    switch (kind) {
    case STRUCTURE_PADDING: place_padding(p, t, keys); break;
    case STRUCTURE_DOCUMENTS: place_documents(p, t, rows, keys); break;
    case STRUCTURE_STRETCH: place_stretch(p, t, rows, keys); break;
    case STRUCTURE_ROW: set_range(p->rows, row, row + 1); break;
    case STRUCTURE_COLUMN: set_range(p->keys, key, key + 1); break;
    case STRUCTURE_HIDDEN_PAIR:
    case STRUCTURE_VISIBLE_PAIR:
        p->inside = kind == STRUCTURE_VISIBLE_PAIR;
        set_range(p->rows, row, row + 1);
        set_range(p->keys, key, key + 1);
        break;
    case STRUCTURE_CAUSAL:
    case STRUCTURE_BAND: place_band(p, t, rows, keys); break;
    default: break;
    }
}

void structure_draw(struct structure *s, struct trial *t, int lengthy) {
    static const enum structure_kind finest[] = {STRUCTURE_HIDDEN_PAIR, STRUCTURE_ROW, STRUCTURE_ROWS_OF_TILES};
    *s = (struct structure){.count = random_below(t, 3) ? 1 : 2};
    for (int i = 0; i < s->count; i++)
        s->parts[i].kind =
            random_below(t, 3) ? (enum structure_kind)random_below(t, NUM_STRUCTURES) : finest[random_below(t, 3)];
    if (lengthy)
        s->parts[0].kind = STRUCTURE_STRETCH;
}

void structure_place(struct structure *s, struct trial *t, int64_t rows, int64_t keys) {
    for (int i = 0; i < s->count; i++)
        place_part(&s->parts[i], t, rows, keys);
}

static int in_range(const int64_t range[2], int64_t n) { return n >= range[0] && n < range[1]; }

static int document_of(const int64_t edges[STRUCTURE_EDGES], int64_t n) {
    int number = 0;
    while (number < STRUCTURE_EDGES && edges[number] <= n)
        number++;
    return number;
}

static int part_sees(const struct structure_part *p, int64_t i, int64_t j) {
    switch (p->kind) {
    case STRUCTURE_CAUSAL:
    case STRUCTURE_BAND: return j >= i - p->left && j <= i + p->right;
    case STRUCTURE_DOCUMENTS: return document_of(p->row_edges, i) == document_of(p->key_edges, j);
    case STRUCTURE_ROWS_OF_TILES: return (i % p->tile == p->tile - 1) == p->inside;
    case STRUCTURE_COLUMNS_OF_TILES: return (j % p->tile == p->tile - 1) == p->inside;
    default: return (in_range(p->rows, i) && in_range(p->keys, j)) == p->inside;
    }
}

int structure_sees(const struct structure *s, int64_t row, int64_t key) {
    for (int i = 0; i < s->count; i++)
        if (!part_sees(&s->parts[i], row, key))
            return 0;
    return 1;
}

void structure_name(const struct structure *s, char *text, size_t size) {
    static const char *const names[NUM_STRUCTURES] = {
        "causal", "band",     "padding",       "documents",        "one hidden pair", "one visible pair",
        "a row",  "a column", "rows of tiles", "columns of tiles", "a hidden stretch"};
    for (int i = 0; i < s->count; i++) {
        const size_t used = strlen(text);
        snprintf(text + used, size - used, "%s%s", i ? "+" : "", names[s->parts[i].kind]);
    }
}
