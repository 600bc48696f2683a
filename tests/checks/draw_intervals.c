/* draw_intervals.c: key and row intervals, block masks and trees of random problems. */
#include "checks.h"
#include "structure.h"

/* Any rows, from the diagonal on, and those of the W best keys. */
static void draw_interval(struct trial *t, int64_t kind, int64_t key, int64_t *start, int64_t *end) {
    enum { CAUSAL, TOP_W = 3 };
    *start = kind == CAUSAL || kind == TOP_W ? key : random_below(t, t->seqlen_q + 4) - 2;
    *end = kind == CAUSAL  ? key + 1 + random_below(t, 40)
           : kind == TOP_W ? key + random_below(t, PICK(t, 1, 1, 8, 100, 1000))
                           : *start + random_below(t, t->seqlen_q + 2) - 1;
    *start = random_below(t, 20) == 0 ? INT32_MIN : *start;
    *end = random_below(t, 4) == 0 ? INT32_MAX : *end;
}

/* The rows of a form that see a key, from the first to the last of them. */
static void interval_of(struct trial *t, const struct structure *s, int64_t rows, int64_t key, int64_t *start,
                        int64_t *end) {
    *start = 0;
    *end = rows;
    while (*start < rows && !structure_sees(s, *start, key))
        ++*start;
    while (*end > *start && !structure_sees(s, *end - 1, key))
        --*end;
    if (*start < *end && *start == 0 && random_below(t, 2))
        *start = INT32_MIN;
    if (*start < *end && *end == rows && random_below(t, 2))
        *end = INT32_MAX;
}

void draw_intervals(struct trial *t, int documents) {
    const int64_t most = documents ? t->heads_kv : t->heads, of_all = t->varlen ? t->total_k : t->seqlen_k;
    const int64_t shape[3] = {random_below(t, 2) ? t->batch : 1, PICK(t, 1, t->heads_kv, most), of_all};
    const int packed = t->varlen;
    struct structure form;
    for (int i = 0; i < 2; i++)
        guarded_make(&t->g[START + i], t, FDM_INT32, 3 - packed, shape + packed, 3);
    const int64_t heads = (packed ? 1 : shape[0]) * shape[1], kind = random_below(t, t->keyed ? 4 : 3);
    const int formed = documents || trial_hides_many(t) || random_below(t, 3) == 0;
    int64_t n = 0, start, end;
    structure_draw(&form, t, trial_hides_many(t));
    if (documents)
        form = (struct structure){.count = 1, .parts[0].kind = STRUCTURE_DOCUMENTS};
    if (formed)
        structure_name(&form, t->forms[2], sizeof t->forms[2]);
    for (int64_t h = 0; h < heads; h++)
        for (int64_t b = 0; b < (packed ? t->batch : 1); b++) {
            const int64_t rows = trial_length(t, CU_Q, b, !packed), keys = trial_length(t, CU_K, b, !packed);
            structure_place(&form, t, rows, keys);
            for (int64_t key = 0; key < keys; key++, n++) {
                if (formed)
                    interval_of(t, &form, rows, key, &start, &end);
                else
                    draw_interval(t, kind, key, &start, &end);
                guarded_set(&t->g[START], n, (double)start);
                guarded_set(&t->g[END], n, (double)end);
            }
        }
}

/* From some key on, from the diagonal's neighbourhood on, or nothing; beyond the keys at times. */
static void draw_range(struct trial *t, int64_t row, int64_t rows, int64_t keys, int64_t *start, int64_t *end) {
    const int64_t own = row + keys - rows, length = PICK(t, 1, 7, 40, 130, 1000);
    *start = random_below(t, 2) ? own - random_below(t, length) : random_below(t, keys + 4) - 2;
    *end = random_below(t, 6) == 0 ? *start - random_below(t, 3) : *start + random_below(t, length) + 1;
    *start = random_below(t, 12) == 0 ? INT32_MIN : *start;
    *end = random_below(t, 12) == 0 ? INT32_MAX : *end;
}

/* What one range of every row is: the keys around its own, those of its document or of one after it, a prefix, all,
 * none. Then tiles are hidden and full. */
struct range_form {
    int64_t kind, unit, left, right;
};
enum { FORM_NONE, FORM_WINDOW, FORM_DOCUMENT, FORM_PREFIX, FORM_ALL, FORM_EMPTY };
static struct range_form draw_range_form(struct trial *t, int formed) {
    struct range_form f = {FORM_NONE, 1, 0, 0};
    if (!formed)
        return f;
    f.kind = PICK(t, FORM_WINDOW, FORM_WINDOW, FORM_DOCUMENT, FORM_DOCUMENT, FORM_PREFIX, FORM_ALL, FORM_EMPTY);
    f.unit = PICK(t, 64, 96, 128, 150);
    f.left = random_below(t, 200);
    f.right = random_below(t, 100);
    return f;
}
static void range_of_form(const struct range_form *f, int64_t row, int64_t rows, int64_t keys, int64_t *start,
                          int64_t *end) {
    const int64_t own = row + keys - rows > 0 ? row + keys - rows : 0, document = own / f->unit * f->unit;
    *start = f->kind == FORM_WINDOW     ? own - f->left
             : f->kind == FORM_DOCUMENT ? document + (f->right % 2 ? f->unit : 0)
                                        : 0;
    *end = f->kind == FORM_WINDOW     ? own + f->right
           : f->kind == FORM_DOCUMENT ? *start + f->unit
           : f->kind == FORM_PREFIX   ? f->left
           : f->kind == FORM_ALL      ? keys
                                      : 0;
}

void draw_row_intervals(struct trial *t, int of_keys) {
    const int packed = t->varlen;
    const int64_t shape[4] = {random_below(t, 2) ? t->batch : 1,
                              PICK(t, 1, t->heads_kv, of_keys ? t->heads_kv : t->heads), PICK(t, 1, 1, 2, 4),
                              packed ? t->total_q : t->seqlen_q};
    int64_t n = 0, start, end;
    const int formed = random_below(t, 3) > 0;
    for (int i = 0; i < 2; i++)
        guarded_make(&t->g[ROW_START + i], t, FDM_INT32, 4 - packed, shape + packed, 3);
    for (int64_t list = 0; list < (packed ? 1 : shape[0]) * shape[1] * shape[2]; list++) {
        const struct range_form form = draw_range_form(t, formed);
        for (int64_t b = 0; b < (packed ? t->batch : 1); b++) {
            const int64_t rows = trial_length(t, CU_Q, b, !packed), keys = trial_length(t, CU_K, b, !packed);
            for (int64_t row = 0; row < rows; row++, n++) {
                if (formed)
                    range_of_form(&form, row, rows, keys, &start, &end);
                else
                    draw_range(t, row, rows, keys, &start, &end);
                guarded_set(&t->g[ROW_START], n, (double)start);
                guarded_set(&t->g[ROW_END], n, (double)end);
            }
        }
    }
}

/* Blocks at random, those of the diagonal's neighbourhood, or all but a few; whole rows and columns of blocks hidden at
 * times. */
void draw_block_mask(struct trial *t, int of_keys) {
    const int64_t drawn = PICK(t, 64, 128), size = t->hides ? 64 : drawn, shown = PICK(t, 1, 3, 9),
                  kind = random_below(t, 3);
    const int64_t shape[4] = {random_below(t, 2) ? t->batch : 1,
                              PICK(t, 1, t->heads_kv, of_keys ? t->heads_kv : t->heads),
                              (t->seqlen_q + size - 1) / size, (t->seqlen_k + size - 1) / size};
    guarded_make(&t->g[BLOCKS], t, FDM_BOOL, 4, shape, 3);
    const int64_t hidden = random_below(t, 2 * shape[3] + 1), barred = random_below(t, 3 * shape[2] + 1);
    for (int64_t n = 0; n < shape[0] * shape[1] * shape[2] * shape[3]; n++) {
        const int64_t key = n % shape[3], row = n / shape[3] % shape[2], off = row * shape[3] - key * shape[2];
        int seen = random_below(t, 10) < shown;
        if (kind == 1)
            seen = off > -2 * shape[2] && off < 2 * shape[3];
        guarded_set(&t->g[BLOCKS], n,
                    t->hides ? named_sees(t->hides, row * size, key * size) : seen && key != hidden && row != barred);
    }
}

/* Every row sees itself and its parent's keys; a chain, where it is the row before; or bits at random. Bits behind the
 * last row are set at random. */
void draw_tree(struct trial *t) {
    enum { CHAIN, TREE_OF_PARENTS, RANDOM };
    const int packed = t->varlen;
    const int64_t words = (t->seqlen_q + 31) / 32, shape[3] = {t->batch, packed ? t->total_q : t->seqlen_q, words};
    const int64_t kind = random_below(t, 3);
    int64_t begin = 0;
    guarded_make(&t->g[TREE], t, random_below(t, 2) ? FDM_UINT32 : FDM_INT32, 3 - packed, shape + packed, 3);
    for (int64_t b = 0; b < t->batch; b++) {
        const int64_t rows = trial_length(t, CU_Q, b, !packed);
        for (int64_t row = 0; row < rows; row++) {
            const int64_t parent = kind == CHAIN ? row - 1 : row ? random_below(t, row + 1) - 1 : -1;
            for (int64_t w = 0; w < words; w++) {
                uint32_t bits = (uint32_t)random_bits(t);
                const int64_t inside = rows - w * 32, at = (begin + row) * words + w;
                const uint32_t counted = inside >= 32 ? UINT32_MAX : inside > 0 ? (1u << inside) - 1 : 0;
                if (kind != RANDOM) {
                    const uint32_t seen =
                        parent < 0 ? 0 : (uint32_t)(int64_t)guarded_get(&t->g[TREE], at - (row - parent) * words);
                    bits = (bits & ~counted) | (seen & counted) | (row / 32 == w ? 1u << row % 32 : 0);
                }
                guarded_set(&t->g[TREE], at,
                            fdm_dtype_of(&t->g[TREE].tensor) == FDM_INT32 ? (double)(int32_t)bits : (double)bits);
            }
        }
        begin += rows;
    }
}
