/* global_shadow.c: races between blocks in global memory, four bytes at a time.
 *
 * Grids that do not overlap are ordered; blocks of one grid are ordered by st.release or an atomic addition and what
 * reads it. Within a block nothing is said: that is for shared memory's shadow and for results. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emulated_launch.h"
#include "state.h"

enum { PAGE_BITS = 12, PAGE_WORDS = 1 << (PAGE_BITS - 2), TABLE = 1 << 14 };

struct cell {
    uint32_t writer, write_epoch, reader, read_epoch; /* blocks by serial number; 0: none */
    place written_at, read_at;
    uint8_t atomic, bytes;
};
struct page {
    struct page *next;
    uintptr_t number;
    struct cell cells[PAGE_WORDS];
};
static struct page *table[TABLE];
static struct page *last_page;

static struct cell *cell_of(uintptr_t address) {
    const uintptr_t number = address >> PAGE_BITS;
    struct page *p = last_page;
    if (!p || p->number != number) {
        struct page **head = &table[(number ^ number >> 14) % TABLE];
        for (p = *head; p && p->number != number;)
            p = p->next;
        if (!p) {
            p = calloc(1, sizeof *p);
            p->number = number;
            p->next = *head;
            *head = p;
        }
        last_page = p;
    }
    return &p->cells[address % (1 << PAGE_BITS) / 4];
}

void global_shadow_forget(void) {
    last_page = NULL;
    for (int i = 0; i < TABLE; i++)
        while (table[i]) {
            struct page *p = table[i];
            table[i] = p->next;
            free(p);
        }
}

/* ---- what a block knows of others ---- */

struct pair {
    uint32_t serial, epoch;
};
struct block_knowledge {
    uint32_t epoch; /* releases so far, from 1 */
    uint32_t count, size;
    struct pair *pairs;
};

struct block_knowledge *knowledge_begin(struct block_knowledge *k) {
    if (!k)
        k = calloc(1, sizeof *k);
    k->epoch = 1;
    k->count = 0;
    return k;
}

static void learn(struct block_knowledge *k, uint32_t serial, uint32_t epoch) {
    for (uint32_t i = 0; i < k->count; i++)
        if (k->pairs[i].serial == serial) {
            k->pairs[i].epoch = k->pairs[i].epoch < epoch ? epoch : k->pairs[i].epoch;
            return;
        }
    if (k->count == k->size) {
        k->size = 2 * k->size + 8;
        k->pairs = realloc(k->pairs, k->size * sizeof *k->pairs);
    }
    k->pairs[k->count++] = (struct pair){serial, epoch};
}

static int knows_block(const struct block *b, uint32_t serial, uint32_t epoch) {
    if (serial == b->serial || serial < b->cluster->grid->first_serial)
        return 1; /* an earlier grid; where it may still run, the results tell */
    const struct block_knowledge *k = b->knowledge;
    for (uint32_t i = 0; i < k->count; i++)
        if (k->pairs[i].serial == serial)
            return k->pairs[i].epoch >= epoch;
    for (unsigned r = 0; r < b->cluster->num_blocks; r++) /* ordered, or not, by the cluster's barriers */
        if (b->cluster->blocks[r]->serial == serial)
            return 1;
    return 0;
}

/* What was released at an address, by whom. */
struct release {
    struct release *next;
    const void *at;
    struct block_knowledge known;
};
static struct release *releases[256];

static struct release *release_of(const void *at) {
    struct release **head = &releases[((uintptr_t)at >> 2) % 256];
    for (struct release *r = *head; r; r = r->next)
        if (r->at == at)
            return r;
    struct release *made = calloc(1, sizeof *made);
    made->at = at;
    made->next = *head;
    return *head = made;
}

void global_release(struct block *b, const void *at) {
    struct release *r = release_of(at);
    const struct block_knowledge *k = b->knowledge;
    for (uint32_t i = 0; i < k->count; i++)
        learn(&r->known, k->pairs[i].serial, k->pairs[i].epoch);
    learn(&r->known, b->serial, b->knowledge->epoch++);
}
void global_acquire(struct block *b, const void *at) {
    const struct release *r = release_of(at);
    for (uint32_t i = 0; i < r->known.count; i++)
        if (r->known.pairs[i].serial >= b->cluster->grid->first_serial)
            learn(b->knowledge, r->known.pairs[i].serial, r->known.pairs[i].epoch);
}
void global_releases_forget(void) {
    for (int i = 0; i < 256; i++)
        while (releases[i]) {
            struct release *r = releases[i];
            releases[i] = r->next;
            free(r->known.pairs);
            free(r);
        }
}

/* ---- accesses ---- */

static unsigned mask_of(uintptr_t word, uintptr_t from, uintptr_t to) {
    unsigned mask = 15;
    if (word < from)
        mask &= 15u << (from - word);
    if (word + 4 > to)
        mask &= 15u >> (word + 4 - to);
    return mask;
}

static void suspect(struct thread *t, uintptr_t from, size_t bytes, const char *what, place written_at, place at) {
    char text[300];
    snprintf(text, sizeof text,
             "%s in global memory: another block did so at %s, and nothing orders this write after it", what,
             place_text(written_at));
    if (!t || bytes > sizeof t->suspect.before) {
        finding("race between blocks", at, "%s", text);
        return;
    }
    t->suspect.kind = "race between blocks";
    t->suspect.memory = (unsigned char *)from;
    t->suspect.bytes = (uint32_t)bytes;
    memcpy(t->suspect.before, (const void *)from, bytes);
    memcpy(t->suspect.text, text, sizeof text);
    t->suspect.at = at;
}

void global_read(struct block *b, const void *memory, size_t bytes, place at) {
    const uintptr_t from = (uintptr_t)memory, to = from + bytes;
    if (!emulated_settings_now.check)
        return;
    for (uintptr_t word = from & ~(uintptr_t)3; word < to; word += 4) {
        struct cell *c = cell_of(word);
        if (c->writer && c->writer != b->serial && (c->bytes & mask_of(word, from, to)) &&
            !knows_block(b, c->writer, c->write_epoch)) {
            finding("race between blocks", at,
                    "read-write race in global memory at %p: another block wrote there at %s, "
                    "and nothing orders this read after it",
                    (const void *)word, place_text(c->written_at));
            return;
        }
        c->reader = b->serial;
        c->read_epoch = b->knowledge->epoch;
        c->read_at = at;
    }
}

void global_write(struct block *b, struct thread *t, void *memory, size_t bytes, int atomic, place at) {
    const uintptr_t from = (uintptr_t)memory, to = from + bytes;
    if (!emulated_settings_now.check)
        return;
    int told = 0;
    for (uintptr_t word = from & ~(uintptr_t)3; word < to; word += 4) {
        struct cell *c = cell_of(word);
        const unsigned mask = mask_of(word, from, to);
        const int both = atomic && c->atomic;
        if (!told && c->writer && c->writer != b->serial && !both && (c->bytes & mask) &&
            !knows_block(b, c->writer, c->write_epoch)) {
            suspect(t, from, bytes, "write-write race", c->written_at, at);
            told = 1;
        }
        if (!told && c->reader && c->reader != b->serial && !atomic && mask == 15 &&
            !knows_block(b, c->reader, c->read_epoch)) {
            suspect(t, from, bytes, "write-read race", c->read_at, at);
            told = 1;
        }
        c->bytes = c->writer == b->serial ? c->bytes | (uint8_t)mask : (uint8_t)mask;
        c->writer = b->serial;
        c->write_epoch = b->knowledge->epoch;
        c->written_at = at;
        c->atomic = (uint8_t)atomic;
    }
}
