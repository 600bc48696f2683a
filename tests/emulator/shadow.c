/* shadow.c: shared memory's addresses, and who has touched what: bounds, alignment, races, bytes that are under way. */
#include <stdio.h>
#include <string.h>

#include "emulated_launch.h"
#include "state.h"

/* ---- addresses ---- */

static int is_allocated(const struct block *b, uint32_t offset, uint32_t bytes) {
    const struct grid *g = b->cluster->grid;
    const uint32_t end = offset + bytes;
    return (offset >= RESERVED_BYTES && end <= RESERVED_BYTES + g->shared_bytes && end >= offset) ||
           (offset >= b->static_begin && end <= b->static_begin + g->kernel->statics_end && end >= offset);
}

static struct block *block_at(uint32_t address, const char *what, place at) {
    struct block *own = CURRENT->block;
    const uint32_t rank = address >> 24;
    if (rank == 0)
        return own;
    if (rank > own->cluster->num_blocks) {
        finding("bad address", at, "%s: address 0x%x is of no block of the cluster", what, address);
        return NULL;
    }
    struct block *b = own->cluster->blocks[rank - 1];
    if (b->live == 0) {
        finding("block has ended", at, "%s: block %u of the cluster has ended, its shared memory is gone", what,
                rank - 1);
        return NULL;
    }
    return b;
}

void *shared_range(uint32_t address, uint32_t bytes, uint32_t align, const char *what, struct block **block,
                   uint32_t *offset, place at) {
    struct block *b = block_at(address, what, at);
    const uint32_t from = address & 0xffffff;
    if (!b)
        return NULL;
    if (from % align) {
        finding("misaligned", at, "%s: shared offset %d is no multiple of %u", what, (int)from - RESERVED_BYTES, align);
        return NULL;
    }
    if (!is_allocated(b, from, bytes)) {
        finding("out of bounds", at, "%s: %u bytes at shared offset %d; the block has %u bytes", what, bytes,
                (int)from - RESERVED_BYTES, b->cluster->grid->shared_bytes + b->cluster->grid->kernel->statics_end);
        return NULL;
    }
    *block = b;
    *offset = from;
    return b->window + from;
}

void *emu_dynamic_shared(unsigned align) {
    (void)align; /* the window's first kernel byte is a multiple of 1024 */
    return CURRENT->block->window + RESERVED_BYTES;
}

void *emu_static_shared(const void *key, unsigned bytes, unsigned align) {
    struct block *b = CURRENT->block;
    struct kernel *k = b->cluster->grid->kernel;
    for (unsigned i = 0; i < k->num_statics; i++)
        if (k->statics[i].key == key)
            return b->window + b->static_begin + k->statics[i].offset;
    const uint32_t offset = (k->statics_end + align - 1) / align * align, number = k->num_statics++;
    const unsigned limit = b->cluster->grid->limit_bytes;
    if (number == sizeof k->statics / sizeof k->statics[0] || b->static_begin + offset + bytes > WINDOW_BYTES ||
        b->cluster->grid->shared_bytes + offset + bytes > limit) {
        finding("too much shared memory", 0, "static shared memory of %u bytes does not fit", offset + bytes);
        thread_fail();
    }
    k->statics[number].key = key;
    k->statics[number].offset = offset;
    k->statics[number].bytes = bytes;
    k->statics_end = offset + bytes;
    return b->window + b->static_begin + offset;
}

unsigned emu_shared_address(const void *pointer) {
    return (unsigned)((const unsigned char *)pointer - CURRENT->block->window);
}
void *emu_shared_pointer(unsigned address) {
    struct block *b = CURRENT->block;
    return (address >> 24 ? b->cluster->blocks[(address >> 24) - 1] : b)->window + (address & 0xffffff);
}
unsigned emu_mapa(unsigned address, unsigned rank, EMU_PLACE) {
    if (rank >= CURRENT->block->cluster->num_blocks)
        finding("bad address", HERE, "mapa: rank %u of a cluster of %u blocks", rank,
                CURRENT->block->cluster->num_blocks);
    return (address & 0xffffff) | (rank + 1) << 24;
}

/* ---- who touches ---- */

struct actor actor_of(struct thread *t) {
    const struct block *b = t->block;
    return (struct actor){.component = t->component,
                          .clock = t->clock,
                          .proxy_clock = t->proxy_clock,
                          .known = t->known,
                          .proxy = t->proxy_known,
                          .thread = t,
                          .slot = b->rank * b->num_warps + t->warp->number,
                          .sequence = t->warp->sequence,
                          .reads = t->warp->reads};
}

static struct word *word_of(struct block *b, uint32_t index) {
    struct word *w = &b->words[index];
    if (w->serial != b->serial)
        *w = (struct word){.serial = b->serial, .plain = 1};
    return w;
}

static unsigned bytes_in(uint32_t index, uint32_t offset, uint32_t bytes) {
    unsigned mask = 15;
    if (index * 4 < offset)
        mask &= 15u << (offset - index * 4);
    if (index * 4 + 4 > offset + bytes)
        mask &= 15u >> (index * 4 + 4 - offset - bytes);
    return mask;
}

static int knows(const struct actor *a, uint32_t component, uint32_t clock) {
    return component == a->component ? clock <= a->clock : a->known->at[component] >= clock;
}
static int proxy_knows(const struct actor *a, uint32_t component, uint32_t clock) {
    return component == a->component ? clock <= a->proxy_clock : a->proxy->at[component] >= clock;
}

int shadow_knows(const struct actor *a, uint32_t component, uint32_t clock) { return knows(a, component, clock); }

static const char *writer_text(const struct block *b, const struct word *w) {
    return component_text(b->cluster, w->writer);
}
static int at_offset(uint32_t index) { return (int)index * 4 - RESERVED_BYTES; }

static int checks(void) { return emulated_settings_now.check; }

/* ---- reads ---- */

static int found_unready(struct block *b, struct word *w, uint32_t index, unsigned mask, const char *who, place at) {
    if (w->in_flight & mask) {
        finding("read too early", at, "%s reads shared offset %d while the copy of %s is under way", who,
                at_offset(index), place_text(w->flight_at));
        return 1;
    }
    if (w->marked) {
        finding("plain access to an mbarrier", at, "%s reads shared offset %d, where an mbarrier lies", who,
                at_offset(index));
        return 1;
    }
    if (mask & ~w->written) {
        finding("read before it was written", at, "%s reads shared offset %d, which nobody in this block has written",
                who, at_offset(index));
        w->written |= (uint8_t)mask;
        return 1;
    }
    (void)b;
    return 0;
}

static void note_reader(struct block *b, struct word *w, uint32_t index, unsigned mask, const struct actor *by,
                        place at) {
    const struct cluster *c = b->cluster;
    const unsigned slot = by->slot % c->agent_slots;
    struct reader *r = &b->readers[(size_t)slot * (WINDOW_BYTES / 4) + index];
    const int again = (w->readers >> slot & 1) && r->component == by->component && r->clock == by->clock;
    *r = (struct reader){by->clock,
                         by->sequence,
                         (uint16_t)by->reads,
                         (uint16_t)by->component,
                         (uint16_t)((again ? r->bytes | mask : mask) | (by->four ? FOUR_PARTS : 0u)),
                         at};
    w->readers |= 1ull << slot;
}

void shadow_read(struct block *b, uint32_t offset, uint32_t bytes, const struct actor *by, place at) {
    if (!checks())
        return;
    for (uint32_t i = offset / 4; i <= (offset + bytes - 1) / 4; i++) {
        struct word *w = word_of(b, i);
        const unsigned mask = bytes_in(i, offset, bytes);
        if (((w->in_flight & mask) || w->marked || (mask & ~w->written)) &&
            found_unready(b, w, i, mask, "the thread", at))
            return;
        if ((w->last_bytes & mask) && !knows(by, w->writer, w->write_clock)) {
            finding("race", at,
                    "read-write race: shared offset %d was written by %s at %s, and nothing orders this read "
                    "after it",
                    at_offset(i), writer_text(b, w), place_text(w->written_at));
            return;
        }
        note_reader(b, w, i, mask, by, at);
    }
}

/* By TMA, or by wgmma: what a thread has written must have been told to the asynchronous proxy. */
void shadow_async_read(struct block *b, uint32_t offset, uint32_t bytes, const struct actor *agent,
                       const struct actor *issuer, place at) {
    if (!checks())
        return;
    for (uint32_t i = offset / 4; i <= (offset + bytes - 1) / 4; i++) {
        struct word *w = word_of(b, i);
        const unsigned mask = bytes_in(i, offset, bytes);
        if (found_unready(b, w, i, mask, "the instruction", at))
            return;
        if (!knows(issuer, w->writer, w->write_clock)) {
            finding("race", at,
                    "read-write race: shared offset %d was written by %s at %s, and nothing orders this "
                    "asynchronous read after it",
                    at_offset(i), writer_text(b, w), place_text(w->written_at));
            return;
        }
        if (w->plain && !proxy_knows(issuer, w->writer, w->write_clock)) {
            finding("proxy fence missing", at,
                    "shared offset %d was written by %s at %s without a fence.proxy.async "
                    "before this asynchronous read",
                    at_offset(i), writer_text(b, w), place_text(w->written_at));
            return;
        }
        note_reader(b, w, i, mask, agent, at);
    }
}

/* ---- writes ---- */

static int knows_reader(const struct actor *by, const struct reader *r) {
    int known = knows(by, r->component, r->clock);
    for (uint32_t part = 1; (r->bytes & FOUR_PARTS) && part < 4; part++)
        known = known && knows(by, r->component + part, r->clock);
    return known;
}

/* A reader that nothing orders before the write; NULL: there is none. */
static const struct reader *open_reader(struct block *b, struct word *w, uint32_t index, unsigned mask,
                                        const struct actor *by) {
    for (uint64_t m = w->readers; m; m &= m - 1) {
        const struct reader *r = &b->readers[(size_t)__builtin_ctzll(m) * (WINDOW_BYTES / 4) + index];
        if (!(r->bytes & mask) || knows_reader(by, r))
            continue;
        /* an instruction of the whole warp came after the read, and one of its lanes released what it had done */
        const int own = by->thread && by->reads == r->reads;
        if (r->reads && !emulated_settings_now.strict &&
            r->sequence < (own ? by->thread->warp->sequence : by->known->at[r->reads]))
            continue;
        return r;
    }
    return NULL;
}

static int found_write(struct block *b, struct word *w, uint32_t i, unsigned mask, const struct actor *by, place at) {
    if (w->in_flight & mask) {
        finding("written while a copy is under way", at,
                "shared offset %d is written while the copy of %s is under way", at_offset(i),
                place_text(w->flight_at));
        return 1;
    }
    if (w->marked) {
        finding("plain access to an mbarrier", at, "shared offset %d is written, where an mbarrier lies", at_offset(i));
        return 1;
    }
    const struct reader *r = open_reader(b, w, i, mask, by);
    if (r) {
        finding("race", at,
                "write-read race: shared offset %d is written, but nothing orders the read of %s at %s "
                "before it",
                at_offset(i), component_text(b->cluster, r->component), place_text(r->at));
        return 1;
    }
    return 0;
}

/* Two write the same place: a race where the bytes differ. A plain store's are looked at when it has happened. */
static int found_other_writer(struct block *b, struct word *w, uint32_t i, uint32_t offset, uint32_t bytes,
                              const struct actor *by, const void *value, place at) {
    char text[300];
    if (value && memcmp(b->window + offset, value, bytes) == 0)
        return 0;
    snprintf(text, sizeof text,
             "write-write race: shared offset %d was written by %s at %s, and nothing orders this "
             "write after it",
             at_offset(i), writer_text(b, w), place_text(w->written_at));
    if (!value && by->thread && bytes <= sizeof by->thread->suspect.before) {
        struct thread *t = by->thread;
        t->suspect.kind = "race";
        t->suspect.memory = b->window + offset;
        t->suspect.bytes = bytes;
        memcpy(t->suspect.before, b->window + offset, bytes);
        memcpy(t->suspect.text, text, sizeof text);
        t->suspect.at = at;
        return 0;
    }
    finding("race", at, "%s", text);
    return 1;
}

void shadow_settle(struct thread *t) {
    const unsigned char *memory = t->suspect.memory;
    if (!memory)
        return;
    t->suspect.memory = NULL;
    if (memcmp(memory, t->suspect.before, t->suspect.bytes) != 0)
        finding(t->suspect.kind, t->suspect.at, "%s", t->suspect.text);
}

void shadow_write(struct block *b, uint32_t offset, uint32_t bytes, const struct actor *by, const void *value,
                  place at) {
    if (!checks())
        return;
    int told = 0;
    for (uint32_t i = offset / 4; i <= (offset + bytes - 1) / 4; i++) {
        struct word *w = word_of(b, i);
        const unsigned mask = bytes_in(i, offset, bytes);
        if (!told && (w->in_flight || w->marked || w->readers))
            told = found_write(b, w, i, mask, by, at);
        if (!told && (w->last_bytes & mask) && !knows(by, w->writer, w->write_clock))
            told = found_other_writer(b, w, i, offset, bytes, by, value, at);
        w->readers = mask == 15 ? 0 : w->readers;
        w->writer = by->component;
        w->write_clock = by->clock;
        w->written |= (uint8_t)mask;
        w->last_bytes = (uint8_t)mask;
        w->plain = 1;
        w->written_at = at;
    }
}

/* A copy to these bytes has been asked for. by_proxy: by the asynchronous proxy. */
void shadow_flight(struct block *b, uint32_t offset, uint32_t bytes, const struct actor *by, int by_proxy, place at) {
    if (!checks())
        return;
    int told = 0;
    for (uint32_t i = offset / 4; i <= (offset + bytes - 1) / 4; i++) {
        struct word *w = word_of(b, i);
        const unsigned mask = bytes_in(i, offset, bytes);
        if (!told && (w->in_flight || w->marked || w->readers))
            told = found_write(b, w, i, mask, by, at);
        if (!told && (w->last_bytes & mask) && !knows(by, w->writer, w->write_clock)) {
            finding("race", at,
                    "write-write race: shared offset %d was written by %s at %s, and nothing orders this copy "
                    "after it",
                    at_offset(i), writer_text(b, w), place_text(w->written_at));
            told = 1;
        } else if (!told && by_proxy && w->plain && (w->last_bytes & mask) &&
                   !proxy_knows(by, w->writer, w->write_clock)) {
            finding("proxy fence missing", at,
                    "shared offset %d was written by %s at %s without a fence.proxy.async "
                    "before this copy over it",
                    at_offset(i), writer_text(b, w), place_text(w->written_at));
            told = 1;
        }
        w->in_flight |= (uint8_t)mask;
        w->flight_at = at;
    }
}

/* The asynchronous proxy is to write what threads have read. */
void shadow_proxy_reads(struct block *b, uint32_t offset, uint32_t bytes, const struct actor *by, place at) {
    for (uint32_t i = offset / 4; checks() && i <= (offset + bytes - 1) / 4; i++)
        for (uint64_t m = word_of(b, i)->readers; m; m &= m - 1) {
            const struct reader *r = &b->readers[(size_t)__builtin_ctzll(m) * (WINDOW_BYTES / 4) + i];
            if (!r->reads || proxy_knows(by, r->component, r->clock))
                continue;
            finding("proxy fence missing", at,
                    "shared offset %d was read by %s at %s without a fence.proxy.async before this "
                    "asynchronous write",
                    at_offset(i), component_text(b->cluster, r->component), place_text(r->at));
            return;
        }
}

void shadow_land(struct block *b, uint32_t offset, uint32_t bytes, uint32_t component, uint32_t clock, int plain,
                 place at) {
    if (!checks())
        return;
    for (uint32_t i = offset / 4; i <= (offset + bytes - 1) / 4; i++) {
        struct word *w = word_of(b, i);
        const unsigned mask = bytes_in(i, offset, bytes);
        w->in_flight &= (uint8_t)~mask;
        w->readers = 0;
        w->writer = component;
        w->write_clock = clock;
        w->written |= (uint8_t)mask;
        w->last_bytes = (uint8_t)mask;
        w->plain = (uint8_t)plain;
        w->written_at = at;
    }
}

void shadow_mark(struct block *b, uint32_t offset, unsigned mbarrier_plus_one) {
    for (uint32_t i = offset / 4; i < offset / 4 + 2; i++)
        word_of(b, i)->marked = (uint16_t)mbarrier_plus_one;
}

/* ---- the wrappers' loads and stores ---- */

void emu_shared_load(void *to, unsigned address, unsigned bytes, EMU_PLACE) {
    struct block *b;
    uint32_t offset;
    const place at = HERE;
    yield_at_access();
    const void *from = shared_range(address, bytes, bytes, "ld.shared", &b, &offset, at);
    memset(to, 0xff, bytes);
    if (!from)
        return;
    const struct actor a = actor_of(CURRENT);
    shadow_settle(CURRENT);
    banks_note(CURRENT, offset, bytes, at);
    shadow_read(b, offset, bytes, &a, at);
    memcpy(to, from, bytes);
}

void emu_shared_store(unsigned address, const void *from, unsigned bytes, EMU_PLACE) {
    struct block *b;
    uint32_t offset;
    const place at = HERE;
    yield_at_access();
    void *to = shared_range(address, bytes, bytes, "st.shared", &b, &offset, at);
    if (!to)
        return;
    const struct actor a = actor_of(CURRENT);
    shadow_settle(CURRENT);
    banks_note(CURRENT, offset, bytes, at);
    shadow_write(b, offset, bytes, &a, from, at);
    memcpy(to, from, bytes);
}
