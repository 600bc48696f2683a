/* warp_data.c: ldmatrix, stmatrix and mma.sync of one warp. */
#include <string.h>

#include "state.h"

struct matrices {
    unsigned *r;
    const unsigned *stored;
    unsigned address;
    int count, transposed;
};
struct product {
    void *c;
    const unsigned *a;
    unsigned b0, b1;
    int type;
};

/* ---- ldmatrix, stmatrix ---- */

/* Lanes 8 i .. 8 i + 7 name the rows of matrix i. */
static void load_matrices(struct warp *w, struct meeting *m) {
    uint16_t rows[32][8];
    const struct matrices *first = m->operands[__builtin_ctz(m->mask)];
    for (unsigned lane = 0; lane < 8u * (unsigned)first->count; lane++) {
        const struct matrices *x = m->operands[lane];
        struct thread *t = &w->threads[lane];
        struct block *b;
        uint32_t offset;
        const void *from = shared_range(x->address, 16, 16, "ldmatrix", &b, &offset, m->at);
        memset(rows[lane], 0xff, 16);
        if (!from)
            continue;
        const struct actor a = actor_of(t);
        banks_note(t, offset, 16, m->at);
        shadow_read(b, offset, 16, &a, m->at);
        memcpy(rows[lane], from, 16);
    }
    for (unsigned lane = 0; lane < LANES; lane++) {
        struct matrices *x = m->operands[lane];
        for (unsigned i = 0; i < (unsigned)x->count; i++) {
            const unsigned row = lane / 4, column = lane % 4 * 2;
            if (x->transposed)
                x->r[i] = rows[8 * i + column][row] | (unsigned)rows[8 * i + column + 1][row] << 16;
            else
                x->r[i] = rows[8 * i + row][column] | (unsigned)rows[8 * i + row][column + 1] << 16;
        }
    }
}

static void store_matrices(struct warp *w, struct meeting *m) {
    uint16_t rows[32][8];
    const struct matrices *first = m->operands[__builtin_ctz(m->mask)];
    for (unsigned lane = 0; lane < LANES; lane++) {
        const struct matrices *x = m->operands[lane];
        for (unsigned i = 0; i < (unsigned)x->count; i++) {
            const unsigned row = lane / 4, column = lane % 4 * 2;
            for (unsigned e = 0; e < 2; e++) {
                const uint16_t value = (uint16_t)(x->stored[i] >> 16 * e);
                if (x->transposed)
                    rows[8 * i + column + e][row] = value;
                else
                    rows[8 * i + row][column + e] = value;
            }
        }
    }
    for (unsigned lane = 0; lane < 8u * (unsigned)first->count; lane++) {
        const struct matrices *x = m->operands[lane];
        struct block *b;
        uint32_t offset;
        void *to = shared_range(x->address, 16, 16, "stmatrix", &b, &offset, m->at);
        if (!to)
            continue;
        const struct actor a = actor_of(&w->threads[lane]);
        banks_note(&w->threads[lane], offset, 16, m->at);
        shadow_write(b, offset, 16, &a, rows[lane], m->at);
        memcpy(to, rows[lane], 16);
    }
}

/* ---- mma ---- */

static inline float element(uint16_t x, int type) {
    if (type != EMU_BF16)
        return half_table[x];
    const uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}
static inline float tf32(uint32_t x) {
    float y;
    x &= 0xffffe000u;
    memcpy(&y, &x, sizeof y);
    return y;
}

typedef float eight __attribute__((vector_size(32)));

/* Sums in float32, one product after the other. */
static void multiply(float (*c)[8], float (*a)[16], float (*b)[8], int depth) {
    for (int i = 0; i < 16; i++) {
        eight sum;
        memcpy(&sum, c[i], sizeof sum);
        for (int k = 0; k < depth; k++) {
            eight row;
            memcpy(&row, b[k], sizeof row);
            sum += row * a[i][k];
        }
        memcpy(c[i], &sum, sizeof sum);
    }
}

static void gather_16(const struct meeting *m, float (*a)[16], float (*b)[8], int type) {
    for (unsigned lane = 0; lane < LANES; lane++) {
        const struct product *p = m->operands[lane];
        const unsigned row = lane / 4, column = lane % 4 * 2;
        for (unsigned r = 0; r < 4; r++)
            for (unsigned e = 0; e < 2; e++)
                a[row + r % 2 * 8][column + r / 2 * 8 + e] = element((uint16_t)(p->a[r] >> 16 * e), type);
        for (unsigned e = 0; e < 2; e++) {
            b[column + e][row] = element((uint16_t)(p->b0 >> 16 * e), type);
            b[column + e + 8][row] = element((uint16_t)(p->b1 >> 16 * e), type);
        }
    }
}
static void gather_tf32(const struct meeting *m, float (*a)[16], float (*b)[8]) {
    for (unsigned lane = 0; lane < LANES; lane++) {
        const struct product *p = m->operands[lane];
        for (unsigned r = 0; r < 4; r++)
            a[lane / 4 + r % 2 * 8][lane % 4 + r / 2 * 4] = tf32(p->a[r]);
        b[lane % 4][lane / 4] = tf32(p->b0);
        b[lane % 4 + 4][lane / 4] = tf32(p->b1);
    }
}

/* Of a lane the sums 0, 1 of its row and 2, 3 of the row eight below. */
static void move_sums(const struct meeting *m, float (*c)[8], int type, int back) {
    int unset = 0;
    for (unsigned lane = 0; lane < LANES; lane++) {
        const struct product *p = m->operands[lane];
        for (unsigned i = 0; i < 4; i++) {
            float *at = &c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
            uint16_t *half = (uint16_t *)p->c + i;
            if (type == EMU_F16_SUM_F16) {
                if (back)
                    *half = emu_to_f16(*at);
                else
                    *at = half_table[*half];
            } else if (back) {
                ((float *)p->c)[i] = *at;
            } else {
                *at = ((const float *)p->c)[i];
                unset |= ((const int32_t *)p->c)[i] == UNWRITTEN;
            }
        }
    }
    if (unset)
        finding("register read before it was written", m->at, "a sum of this mma was never set");
}

static void product(struct meeting *m) {
    float a[16][16], b[16][8], c[16][8];
    const int type = ((const struct product *)m->operands[0])->type;
    if (type == EMU_TF32)
        gather_tf32(m, a, b);
    else
        gather_16(m, a, b, type == EMU_BF16 ? EMU_BF16 : EMU_F16);
    move_sums(m, c, type, 0);
    multiply(c, a, b, type == EMU_TF32 ? 8 : 16);
    move_sums(m, c, type, 1);
}

void data_execute(struct warp *w, struct meeting *m) {
    if (m->mask != ~0u) {
        finding("wrong mask", m->at, "%s is executed by lanes 0x%x of warp %u alone", operation_names[m->operation],
                m->mask, w->number);
        thread_fail();
    }
    if (m->operation == OP_LDMATRIX)
        load_matrices(w, m);
    else if (m->operation == OP_STMATRIX)
        store_matrices(w, m);
    else
        product(m);
}

void emu_ldmatrix(unsigned *r, int count, int transposed, unsigned address, EMU_PLACE) {
    struct matrices x = {r, NULL, address, count, transposed};
    meet(OP_LDMATRIX, ~0u, &x, HERE);
}
void emu_stmatrix(unsigned address, const unsigned *r, int count, int transposed, EMU_PLACE) {
    struct matrices x = {NULL, r, address, count, transposed};
    meet(OP_STMATRIX, ~0u, &x, HERE);
}
void emu_mma(int type, void *c, const unsigned *a, unsigned b0, unsigned b1, EMU_PLACE) {
    struct product p = {c, a, b0, b1, type};
    meet(OP_MMA, ~0u, &p, HERE);
}
