/* wgmma_product.c: operands in shared memory as their descriptors say, and the product itself. */
#include <string.h>

#include "wgmma.h"

enum { K = 16 };

/* PTX ISA, "Matrix-descriptor format": bits 0-13 address, 16-29 leading, 32-45 stride, all / 16; 49-51 base offset;
 * 62-63 swizzle: 0 none, 1 of 128 bytes, 2 of 64, 3 of 32. */
struct matrix {
    uint32_t start, leading, stride;
    int swizzle, base;
};
static struct matrix decode(uint64_t d) {
    return (struct matrix){.start = (uint32_t)(d & 0x3fff) << 4,
                           .leading = (uint32_t)(d >> 16 & 0x3fff) << 4,
                           .stride = (uint32_t)(d >> 32 & 0x3fff) << 4,
                           .swizzle = (int)(d >> 62),
                           .base = (int)(d >> 49 & 7)};
}

/* The address of 16 bytes. K-major: the eight elements of row i, chunk c of two along k. Otherwise: eight rows from 8 i
 * on, of number c along k. */
static uint32_t chunk_address(const struct matrix *m, int transposed, uint32_t i, uint32_t c) {
    static const uint32_t row_bytes[] = {16, 128, 64, 32};
    static const uint32_t bits[] = {0, 7, 3, 1};
    const uint32_t width = row_bytes[m->swizzle], chunks = width / 16;
    uint32_t at;
    if (!transposed)
        at = m->start + i / 8 * m->stride + i % 8 * width + (m->swizzle ? c * 16 : c * m->leading);
    else if (m->swizzle)
        at = m->start + i / chunks * m->leading + c / 8 * m->stride + c % 8 * width + i % chunks * 16;
    else
        at = m->start + i * m->leading + c / 8 * m->stride + c % 8 * 16;
    return at ^ (at >> 7 & bits[m->swizzle]) << 4;
}

static uint32_t num_outer(int rows, int transposed) { return (uint32_t)(transposed ? rows / 8 : rows); }
static uint32_t num_inner(int transposed) { return transposed ? K : K / 8; }

void matrix_touch(struct block *b, uint64_t matrix, int rows, int transposed, const struct actor *agent,
                  const struct actor *issuer, place at) {
    const struct matrix m = decode(matrix);
    if (m.base)
        finding("wrong wgmma", at, "a descriptor with base offset %d: the emulator takes 0 alone", m.base);
    for (uint32_t i = 0; i < num_outer(rows, transposed); i++)
        for (uint32_t c = 0; c < num_inner(transposed); c++) {
            struct block *of;
            uint32_t offset;
            if (!shared_range(chunk_address(&m, transposed, i, c), 16, 16, "an operand of wgmma", &of, &offset, at))
                return;
            shadow_async_read(b, offset, 16, agent, issuer, at);
        }
}

static float element(uint16_t x, int type) {
    if (type == EMU_F16)
        return half_table[x];
    const uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

/* `to` is rows x 16 (by_row) or 16 x rows. */
static void gather_matrix(const struct block *b, uint64_t matrix, int rows, int transposed, int type, int by_row,
                          float *to) {
    const struct matrix m = decode(matrix);
    for (uint32_t i = 0; i < num_outer(rows, transposed); i++)
        for (uint32_t c = 0; c < num_inner(transposed); c++) {
            uint16_t chunk[8];
            const uint32_t address = chunk_address(&m, transposed, i, c);
            if (address > WINDOW_BYTES - 16)
                continue;
            memcpy(chunk, b->window + address, sizeof chunk);
            for (uint32_t e = 0; e < 8; e++) {
                const uint32_t row = transposed ? 8 * i + e : i, k = transposed ? c : 8 * c + e;
                to[by_row ? row * K + k : k * (uint32_t)rows + row] = element(chunk[e], type);
            }
        }
}

static void gather_registers(const struct product_record *p, float *to) {
    for (unsigned t = 0; t < WARPS * LANES; t++)
        for (unsigned r = 0; r < 4; r++)
            for (unsigned e = 0; e < 2; e++) {
                const unsigned row = t / LANES * 16 + t % LANES / 4 + r % 2 * 8, k = t % 4 * 2 + r / 2 * 8 + e;
                to[row * K + k] = element((uint16_t)(p->a[t][r] >> 16 * e), p->type);
            }
}

typedef float eight __attribute__((vector_size(32)));

static void multiply(float *sums, const float *a, const float *b, int n, int add) {
    for (int i = 0; i < 64; i++)
        for (int j = 0; j < n; j += 8) {
            eight sum = {0}, row;
            if (add)
                memcpy(&sum, sums + i * n + j, sizeof sum);
            for (int k = 0; k < K; k++) {
                memcpy(&row, b + k * n + j, sizeof row);
                sum += row * a[i * K + k];
            }
            memcpy(sums + i * n + j, &sum, sizeof sum);
        }
}

static void execute(struct block *block, struct product_record *p) {
    static float a[64 * K], b[K * N_MAX];
    if (p->has_a)
        gather_registers(p, a);
    else
        gather_matrix(block, p->a_matrix, 64, p->a_transposed, p->type, 1, a);
    gather_matrix(block, p->b_matrix, p->n, p->b_transposed, p->type, 0, b);
    multiply(p->sums->values, a, b, p->n, p->add);
}

void products_execute(struct warpgroup *g, uint32_t upto) {
    while (g->executed < upto)
        execute(g->block, &g->products[g->executed++ % PRODUCTS_MAX]);
}
