/* copies.c: cp.async: a thread's copies of 4 to 16 bytes from global to shared memory, in groups; st.async: writes to
 * shared memory of a cluster that an mbarrier counts. */
#include <stdlib.h>
#include <string.h>

#include "emulated_launch.h"
#include "state.h"

static void move(struct thread *t, struct copy *c) {
    unsigned char *to = t->block->window + c->shared;
    memcpy(to, c->global, c->bytes);
    memset(to + c->bytes, 0, c->size - c->bytes);
    c->moved = 1;
}

/* The bytes are the thread's own writes from now on. */
static void land(struct thread *t, struct copy *c) {
    if (!c->moved)
        move(t, c);
    shadow_land(t->block, c->shared, c->size, t->component, c->arrives ? c->clock : t->clock, 1, c->at);
}

static int happens_at_once(void) {
    const enum emulated_mode mode = emulated_settings_now.mode;
    return mode == EMULATED_EARLY || (mode == EMULATED_RANDOM && chance(2));
}

void emu_cp_async(unsigned shared, const void *global, unsigned bytes, unsigned size, EMU_PLACE) {
    struct thread *t = CURRENT;
    struct block *b;
    uint32_t offset;
    const place at = HERE;
    shadow_settle(t);
    if (!shared_range(shared, size, size, "cp.async", &b, &offset, at))
        return;
    if (b != t->block || bytes > size || (bytes && (uintptr_t)global % size)) {
        finding("wrong copy", at, "cp.async of %u of %u bytes from %p to shared address 0x%x", bytes, size, global,
                shared);
        return;
    }
    if (bytes && !global_range(global, bytes, "cp.async", at))
        return;
    if (bytes)
        global_read(b, global, bytes, at);
    const struct actor a = actor_of(t);
    shadow_flight(b, offset, size, &a, 0, at);
    if (t->num_copies == t->max_copies) {
        t->max_copies = 2 * t->max_copies + 16;
        t->copies = realloc(t->copies, t->max_copies * sizeof *t->copies);
    }
    struct copy *c = &t->copies[t->num_copies++];
    *c = (struct copy){offset, bytes, size, t->copy_group, t->clock, global, at, 0, 0};
    if (happens_at_once())
        move(t, c);
}

void emu_cp_async_commit(EMU_PLACE) {
    (void)emu_file, (void)emu_line;
    CURRENT->copy_group++;
}

void copies_land(struct thread *t, uint32_t below_group) {
    uint32_t left = 0;
    for (uint32_t i = 0; i < t->num_copies; i++)
        if ((int32_t)(t->copies[i].group - below_group) < 0)
            land(t, &t->copies[i]);
        else
            t->copies[left++] = t->copies[i];
    t->num_copies = left;
}

void emu_cp_async_wait(int pending, EMU_PLACE) {
    (void)emu_file, (void)emu_line;
    shadow_settle(CURRENT);
    copies_land(CURRENT, CURRENT->copy_group - (uint32_t)pending);
}

/* ---- an arrival when the copies are there ---- */

struct late_arrival {
    struct thread *thread;
    struct mbarrier *mbarrier;
    uint32_t below_group;
    struct gather released;
};

static void arrive_now(struct event *e) {
    struct late_arrival *a = e->data;
    struct thread *t = a->thread;
    uint32_t left = 0;
    for (uint32_t i = 0; i < t->num_copies; i++)
        if ((int32_t)(t->copies[i].group - a->below_group) < 0)
            land(t, &t->copies[i]);
        else
            t->copies[left++] = t->copies[i];
    t->num_copies = left;
    mbarrier_arrive_by(t->block, a->mbarrier, 1, 0, emulated_settings_now.check ? &a->released : NULL, e->at);
    gather_clear(&a->released);
}

void emu_cp_async_arrive(unsigned barrier, EMU_PLACE) {
    struct thread *t = CURRENT;
    struct block *b;
    uint32_t offset;
    const place at = HERE;
    shadow_settle(t);
    if (!shared_range(barrier, 8, 8, "cp.async.mbarrier.arrive", &b, &offset, at))
        thread_fail();
    struct mbarrier *m = mbarrier_at(b, offset, "cp.async.mbarrier.arrive", at);
    for (uint32_t i = 0; i < t->num_copies; i++)
        t->copies[i].arrives = 1;
    struct event *e = event_add(b->cluster, arrive_now, sizeof(struct late_arrival), at);
    struct late_arrival *a = e->data;
    *a = (struct late_arrival){t, m, ++t->copy_group, {0}};
    e->block = b;
    e->loss = "cp.async and its arrival are under way";
    if (emulated_settings_now.check)
        gather_add(&a->released, t);
    event_now_or_later(e);
    yield_warp();
}

/* The end of a thread waits for nothing, but its copies are made. */
void copies_thread_ended(struct thread *t) {
    for (uint32_t i = 0; i < t->num_copies; i++)
        land(t, &t->copies[i]);
    t->num_copies = 0;
}

/* ---- writes that an mbarrier counts ---- */

struct late_store {
    struct block *block;
    uint32_t offset, bytes, mbarrier, words[4];
};

static void store_now(struct event *e) {
    struct late_store *s = e->data;
    struct mbarrier *m = mbarrier_at(s->block, s->mbarrier, "st.async", e->at);
    memcpy(s->block->window + s->offset, s->words, s->bytes);
    shadow_land(s->block, s->offset, s->bytes, m->component, m->ticks, 0, e->at);
    mbarrier_bytes_came(s->block, m, s->bytes, e->at);
}

void emu_store_async(unsigned address, const void *from, unsigned bytes, unsigned barrier, EMU_PLACE) {
    struct thread *t = CURRENT;
    struct block *b, *of_barrier;
    uint32_t offset, barrier_offset;
    const place at = HERE;
    shadow_settle(t);
    if (!shared_range(address, bytes, bytes, "st.async", &b, &offset, at) ||
        !shared_range(barrier, 8, 8, "st.async's mbarrier", &of_barrier, &barrier_offset, at))
        thread_fail();
    if (b != of_barrier)
        finding("wrong mbarrier", at, "st.async to another block than its mbarrier's");
    if (b->live == 0) {
        finding("block has ended", at, "st.async to block %u of the cluster, which has ended", b->rank);
        return;
    }
    mbarrier_check_use(mbarrier_at(of_barrier, barrier_offset, "st.async", at), "st.async", at);
    const struct actor a = actor_of(t);
    shadow_flight(b, offset, bytes, &a, 0, at);
    struct event *e = event_add(b->cluster, store_now, sizeof(struct late_store), at);
    struct late_store *s = e->data;
    *s = (struct late_store){.block = of_barrier, .offset = offset, .bytes = bytes, .mbarrier = barrier_offset};
    memcpy(s->words, from, bytes);
    e->block = of_barrier;
    e->loss = "a write to its shared memory is under way";
    event_now_or_later(e);
}
