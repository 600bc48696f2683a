/* topk_slots.c: the slots of a top-W mask on the CPU.
 *
 * The bound that a key must pass only rises, so a key that has lost its slot never comes back: its K and V may be
 * overwritten by those of the token that took it. */
#include "masks/slots/topk_slots.h"

#include <string.h>

#include "flash_dmattn.h"

struct bias_format {
    int64_t bytes;
    uint32_t sign, infinity;
};

static struct bias_format format_of(int32_t dtype) {
    if (dtype == FDM_FLOAT32)
        return (struct bias_format){4, 0x80000000u, 0x7f800000u};
    return (struct bias_format){2, 0x8000u, dtype == FDM_FLOAT16 ? 0x7c00u : 0x7f80u};
}

static char *score_at(const struct slot_scores *s, int64_t b, int64_t h, int64_t n, int64_t bytes) {
    return s->data + (b * s->batch + h * s->head + n * s->step) * bytes;
}
static int32_t *number_at(const struct slot_scores *s, int64_t b, int64_t h, int64_t n) {
    return (int32_t *)(void *)score_at(s, b, h, n, sizeof(int32_t));
}

static uint32_t bits_at(const struct slot_scores *s, int64_t b, int64_t h, int64_t n, struct bias_format f) {
    uint32_t bits = 0;
    uint16_t half;
    const char *at = score_at(s, b, h, n, f.bytes);
    if (f.bytes == 4)
        memcpy(&bits, at, sizeof bits);
    else {
        memcpy(&half, at, sizeof half);
        bits = half;
    }
    return bits;
}
static void set_bits(const struct slot_scores *s, int64_t b, int64_t h, int64_t n, struct bias_format f,
                     uint32_t bits) {
    const uint16_t half = (uint16_t)bits;
    memcpy(score_at(s, b, h, n, f.bytes), f.bytes == 4 ? (const void *)&bits : &half, (size_t)f.bytes);
}

/* Larger is better: the bias in its order (NaN as -inf, one zero) above the inverted number. */
static uint64_t order_of(uint32_t bits, int32_t key, struct bias_format f) {
    if ((bits & ~f.sign) > f.infinity)
        bits = f.sign | f.infinity;
    if (bits == f.sign)
        bits = 0;
    bits ^= bits & f.sign ? f.sign | (f.sign - 1) : f.sign;
    return (uint64_t)bits << 32 | (0xffffffffu - (uint32_t)key);
}

static int32_t page_of(const struct slot_call *c, int64_t b, int64_t token) {
    return c->block_table[b * c->table_batch + token / c->page_size * c->table_page];
}

static void copy_row(const struct slot_call *c, const struct slot_rows *to, const struct slot_rows *from, int64_t b,
                     int64_t h, int64_t slot, int64_t token) {
    const int64_t batch = c->block_table && from->data ? page_of(c, b, token) : b;
    const int64_t row = c->block_table ? token % c->page_size : token;
    if (from->data)
        memcpy(to->data + b * to->batch + slot * to->row + h * to->head,
               from->data + batch * from->batch + row * from->row + h * from->head, (size_t)from->row_bytes);
}

static void take_slot(const struct slot_call *c, int64_t b, int64_t h, int64_t slot, int32_t key, int64_t token) {
    const struct bias_format f = format_of(c->dtype);
    *number_at(&c->slot_key, b, h, slot) = key;
    set_bits(&c->slot_bias, b, h, slot, f, bits_at(&c->bias, b, h, token, f));
    copy_row(c, &c->slot_k, &c->k, b, h, slot, token);
    copy_row(c, &c->slot_v, &c->v, b, h, slot, token);
}

static void append_to_head(const struct slot_call *c, int64_t b, int64_t h) {
    const struct bias_format f = format_of(c->dtype);
    const int32_t key = (*number_at(&c->length, b, h, 0))++;
    int32_t slot = -1;
    uint64_t worst = c->real && !c->real[b * c->real_batch] ? 0 : order_of(bits_at(&c->bias, b, h, 0, f), key, f);
    for (int32_t n = 0; n < c->window && worst > 0; n++) {
        const int32_t kept = *number_at(&c->slot_key, b, h, n);
        const uint64_t order = kept < 0 ? 0 : order_of(bits_at(&c->slot_bias, b, h, n, f), kept, f);
        if (order < worst) {
            worst = order;
            slot = n;
        }
    }
    if (slot >= 0)
        take_slot(c, b, h, slot, key, 0);
    if (c->slot.data)
        *number_at(&c->slot, b, h, 0) = slot;
}

void topk_append_on_cpu(const struct slot_call *c) {
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t h = 0; h < c->heads; h++)
            append_to_head(c, b, h);
}

static void fill_head(const struct slot_call *c, int64_t b, int64_t h) {
    const struct bias_format f = format_of(c->dtype);
    int32_t used = 0;
    for (int32_t j = 0; j < c->num_tokens && used < c->window; j++)
        if (*number_at(&c->end, b, h, j) == INT32_MAX)
            take_slot(c, b, h, used++, j, j);
    for (; used < c->window; used++) {
        *number_at(&c->slot_key, b, h, used) = -1;
        set_bits(&c->slot_bias, b, h, used, f, f.sign | f.infinity);
    }
    *number_at(&c->length, b, h, 0) = c->num_tokens;
}

int topk_page_is_missing(const struct slot_call *c, int64_t num_pages, int32_t *page) {
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t h = 0; h < c->heads; h++)
            for (int32_t j = 0; j < c->num_tokens; j++) {
                if (*number_at(&c->end, b, h, j) != INT32_MAX)
                    continue;
                *page = page_of(c, b, j);
                if (*page < 0 || *page >= num_pages)
                    return 1;
            }
    return 0;
}

void topk_fill_on_cpu(const struct slot_call *c) {
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t h = 0; h < c->heads; h++)
            fill_head(c, b, h);
}
