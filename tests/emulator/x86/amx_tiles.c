/* amx_tiles.c: the tiles of AMX for machines without them. Intel, "Architecture Instruction Set Extensions", chapter on
 * AMX. What is an exception there is one line on stderr and the end of the process here. */
#include <stdarg.h>
#include <stddef.h>

#include <immintrin.h>

enum { TILES = 8, ROWS_MAX = 16, ROW_BYTES_MAX = 64 };

/* What LDTILECFG reads. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
_Static_assert(sizeof(struct tile_config) == 64, "as the manual has it");

/* What lies outside the configured shape is never stored. */
struct tile {
    int rows, row_bytes;
    uint32_t row[ROWS_MAX][ROW_BYTES_MAX / 4] __attribute__((aligned(ROW_BYTES_MAX)));
};

static _Thread_local struct tile tiles[TILES];
static _Thread_local int configured;

__attribute__((noreturn, format(printf, 1, 2))) static void stop(const char *format, ...) {
    char line[160];
    va_list values;
    va_start(values, format);
    vsnprintf(line, sizeof line, format, values);
    va_end(values);
    fprintf(stderr, "emulated AMX: %s\n", line);
    abort();
}

void emu_tile_release(void) {
    memset(tiles, 0, sizeof tiles);
    configured = 0;
}

void emu_tile_loadconfig(const void *config) {
    struct tile_config c;
    memcpy(&c, config, sizeof c);
    if (configured) /* the processor would not mind; tiles that stay in use cost the whole thread */
        stop("configured again without a release");
    emu_tile_release();
    if (c.palette == 0)
        return;
    if (c.palette != 1)
        stop("palette %d", c.palette);
    if (c.start_row)
        stop("start_row %d", c.start_row);
    for (size_t i = 0; i < sizeof c.reserved; i++)
        if (c.reserved[i])
            stop("byte %zu of the configuration is %d", offsetof(struct tile_config, reserved) + i, c.reserved[i]);
    for (int i = 0; i < 16; i++) {
        if (c.rows[i] > (i < TILES ? ROWS_MAX : 0) || c.row_bytes[i] > (i < TILES ? ROW_BYTES_MAX : 0) ||
            !c.rows[i] != !c.row_bytes[i])
            stop("tile %d of %d rows of %d bytes", i, c.rows[i], c.row_bytes[i]);
        if (i < TILES) {
            tiles[i].rows = c.rows[i];
            tiles[i].row_bytes = c.row_bytes[i];
        }
    }
    configured = 1;
}

static struct tile *tile_of(int tile, const char *use) {
    if (!configured)
        stop("%s of tile %d while none is configured", use, tile);
    if (tile < 0 || tile >= TILES || !tiles[tile].rows)
        stop("%s of tile %d, which is not configured", use, tile);
    if (tiles[tile].row_bytes % 4)
        stop("%s of tile %d with rows of %d bytes", use, tile, tiles[tile].row_bytes);
    return &tiles[tile];
}

void emu_tile_zero(int tile) {
    struct tile *t = tile_of(tile, "zero");
    memset(t->row, 0, sizeof t->row);
}

/* The stride may be negative. */
void emu_tile_loadd(int tile, const void *base, size_t stride) {
    struct tile *t = tile_of(tile, "load");
    for (int row = 0; row < t->rows; row++)
        memcpy(t->row[row], (const char *)base + (ptrdiff_t)stride * row, (size_t)t->row_bytes);
}

void emu_tile_stored(int tile, void *base, size_t stride) {
    const struct tile *t = tile_of(tile, "store");
    for (int row = 0; row < t->rows; row++)
        memcpy((char *)base + (ptrdiff_t)stride * row, t->row[row], (size_t)t->row_bytes);
}

static __m256i eight(const uint32_t *p) { return _mm256_load_si256((const __m256i *)(const void *)p); }

/* Sums of the even elements' products and of the odd ones' grow from 0 side by side, each by an FMA; at the end they
 * are added, and then to what the tile held. */
__attribute__((noinline)) static void multiply(struct tile *sums, const struct tile *a, const struct tile *b) {
    for (int row = 0; row < sums->rows; row++)
        for (int column = 0; column < sums->row_bytes / 4; column += 8) {
            __m256 even = _mm256_setzero_ps(), odd = even;
            for (int k = 0; k < b->rows; k++) {
                const __m256i pair = _mm256_set1_epi32((int)a->row[row][k]), pairs = eight(&b->row[k][column]);
                even = _mm256_fmadd_ps(emu_lower_bfloat16(pair), emu_lower_bfloat16(pairs), even);
                odd = _mm256_fmadd_ps(emu_upper_bfloat16(pair), emu_upper_bfloat16(pairs), odd);
            }
            const __m256 before = (__m256)eight(&sums->row[row][column]);
            _mm256_store_ps((float *)&sums->row[row][column], _mm256_add_ps(before, _mm256_add_ps(even, odd)));
        }
}

/* TDPBF16PS: A [rows][k] of pairs times B [k][columns] of pairs. */
void emu_tile_dpbf16ps(int sums, int a, int b) {
    struct tile *c = tile_of(sums, "product");
    const struct tile *x = tile_of(a, "product"), *y = tile_of(b, "product");
    if (sums == a || sums == b || a == b)
        stop("product of tiles %d += %d %d, which are not three", sums, a, b);
    if (c->rows != x->rows || c->row_bytes != y->row_bytes || x->row_bytes / 4 != y->rows)
        stop("product of tiles %d += %d %d: %d x %d += (%d x %d) (%d x %d) pairs", sums, a, b, c->rows,
             c->row_bytes / 4, x->rows, x->row_bytes / 4, y->rows, y->row_bytes / 4);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(EMU_FLUSHING);
    __asm__ volatile("" ::"r"(c), "r"(x), "r"(y) : "memory");
    multiply(c, x, y);
    __asm__ volatile("" ::"r"(c) : "memory");
    _mm_setcsr(before);
}
